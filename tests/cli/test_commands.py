"""Commands as a user types them: what they print, and their exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlx.cli.main import main
from rlx.cli.run import split_words
from rlx.errors import NotFoundError, RequestError

MLP = Path(__file__).parents[2] / "examples" / "mlp.rlx"


@pytest.mark.parametrize(
    ("level", "shown"),
    [
        ("hir", '%5 = linear(%2, %3, %4, activation="gelu") : f32[seq, 1536]'),
        ("mir", "fused_matmul("),
        ("lir", "launch rms_norm."),
        ("llvm", "define void @matmul_nest."),
        ("asm", "vfmadd"),
    ],
)
def test_inspect_shows_every_level(level: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(MLP), "--level", level, "--target", "avx2"]) == 0
    assert shown in capsys.readouterr().out


def test_inspect_shows_what_was_fused_and_the_bind_program(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(MLP), "--level", "lir", "--bind", "--fusion"]) == 0
    out = capsys.readouterr().out
    assert "pack_panels" in out and "matmul epilogue: fused_matmul + add + gelu" in out


def test_a_file_that_is_no_graph_is_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.rlx").write_text("graph @x mir {\n  %0 = softmaxx(%0) : f32[2]\n  return %0\n}")
    assert main(["inspect", str(tmp_path / "x.rlx")]) == 4
    assert "no op is called 'softmaxx'" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "absent.rlx")]) == 4


def test_ops_lists_groups_and_shows_every_cell_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    assert "attention: attention" in capsys.readouterr().out
    assert main(["ops", "matmul"]) == 0
    out = capsys.readouterr().out
    assert "matmul(a, b)" in out and "rlx/ops/linear.py:" in out and "rlx/lir/linear.py:" in out
    assert main(["ops", "matmull"]) == 1
    assert "did you mean 'matmul'" in capsys.readouterr().err


def test_env_and_cache_say_where_things_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "llvmlite" in out and "target" in out and "cache" in out
    assert main(["cache"]) == 0
    assert "files" in capsys.readouterr().out


def test_the_demo_compiles_runs_and_agrees_with_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--rows", "7"]) == 0
    assert "Largest difference to NumPy" in capsys.readouterr().out


def test_one_word_of_run_is_a_model_or_a_mistake_never_a_guess() -> None:
    assert split_words(["smollm2-135m"], None, None) == ("smollm2-135m", None)
    assert split_words(["two words"], None, None) == (None, "two words")
    assert split_words(["a", "b"], None, None) == ("a", "b")
    assert split_words(["word"], "m", None) == ("m", "word")
    assert split_words(["minilm-l6"], None, "word") == ("minilm-l6", "word")
    with pytest.raises(NotFoundError, match="'smollm3' is no model") as caught:
        split_words(["smollm3"], None, None)
    assert "did you mean 'smollm2-135m'?" in "\n".join(caught.value.notes)
    with pytest.raises(RequestError, match="3 arguments"):
        split_words(["a", "b", "c"], None, None)


def test_without_a_prompt_there_is_nothing_to_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["run"]) == 1
    assert "there is no prompt" in capsys.readouterr().err

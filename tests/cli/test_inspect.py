"""`rlx inspect`: graph files and models at every level, under a binding, whole or by stage."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import small_bert

import rlx
from rlx.cli.inspect import load, matches, phase_sizes
from rlx.cli.main import main
from rlx.flow import LayerStack

MLP = Path(__file__).parents[2] / "examples" / "mlp.rlx"
ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STORIES = ASSETS / "stories260K" / "stories260K.bin"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is absent")


def inspect(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    assert main(["inspect", *map(str, words)]) == 0
    return capsys.readouterr().out


# -- graph files -----------------------------------------------------------------------------------------------------
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
def test_every_level_of_a_file(level: str, shown: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert shown in inspect(capsys, MLP, "--level", level, "--target", "avx2")


def test_nodes_of_a_file_tell_the_file_and_those_of_a_model_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "# mlp.rlx" in inspect(capsys, MLP, "--level", "hir")
    small_bert.write(tmp_path)
    out = inspect(capsys, tmp_path, "--level", "hir", "--all")
    assert re.search(r"# .*\brlx inspect$", out, re.M)
    assert "test_inspect.py" not in out


def test_an_export_shows_the_graph_that_it_was_compiled_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled = rlx.compile(load(MLP), target="avx2")
    path = compiled.export(tmp_path / "mlp.rlxp")
    for level in ("hir", "mir", "lir"):
        shown = inspect(capsys, path, "--level", level).splitlines()[1:]
        assert len(shown) > 5 and shown == inspect(capsys, MLP, "--level", level, "--target", "avx2").splitlines()[1:]
    path.write_bytes(path.read_bytes()[:200])
    assert main(["inspect", str(path)]) == 4
    assert "damaged or cut short" in capsys.readouterr().err


def test_what_was_fused_and_the_bind_program(capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(capsys, MLP, "--level", "lir", "--bind", "--fusion")
    assert 0 < out.index("matmul epilogue: fused_matmul + add + gelu") < out.index("pack_panels")  # fusions come first
    out = inspect(capsys, MLP, "--fusion")
    assert 0 < out.index("matmul epilogue: fused_matmul + add + gelu") < out.index("graph @")


def test_fusions_of_one_stage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def layer(i: int) -> LayerStack:
        return LayerStack().linear(f"{i}.w").custom(lambda emit, value: value.gelu() + 1.0)

    flow = rlx.ModelFlow("f").input("x", ("batch", 8)).repeat_layers(2, layer)
    built = flow.build(flow.init(rlx.random.key(0), shapes={f"{i}.w": (8, 8) for i in range(2)}))
    path = built.compile().export(tmp_path / "f.rlxp")
    both = inspect(capsys, path, "--fusion")
    one = inspect(capsys, path, "--fusion", "--stage", "layers.1")
    assert "fused 4" in both and "fused 2" in one  # a region and an epilogue per layer
    assert "(layers.0" in both and "layers.0" not in one.partition("graph @")[0]


def test_a_binding_gives_launches_their_work(capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(capsys, MLP, "--level", "lir", "--seq", "10")
    assert "# sizes: seq = 10" in out
    first = 2 * 10 * 384 * 1536 / 1e6  # multiply-adds of the first matmul, counted as two
    assert any(
        f"{first:.3g} MFLOP" in line or "11.8 MFLOP" in line for line in out.splitlines() if "launch matmul" in line
    )
    assert "10×384" in out
    total = float(re.search(r"operands, ([\d.]+) MFLOP", out)[1])  # type: ignore[index]
    assert total == pytest.approx(2 * first, rel=0.02)  # norms and activations are the rest


def test_a_file_that_is_no_graph_is_a_bad_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.rlx").write_text("graph @x mir {\n  %0 = softmaxx(%0) : f32[2]\n  return %0\n}")
    assert main(["inspect", str(tmp_path / "x.rlx")]) == 4
    assert "no op is called 'softmaxx'" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "absent.rlx")]) == 3


@pytest.mark.parametrize("words", [["--batch", "0"], ["--past", "-1"], ["--size", "nope=3"], ["--stage", "nope"]])
def test_what_cannot_be_shown_is_a_mistake_in_use(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(MLP), "--level", "lir", *words]) == 2
    assert "inspect: " in capsys.readouterr().err


LEVELS = ("hir", "mir", "mir --built", "lir", "llvm", "asm")
TAKEN = {"--bind": ("mir", "lir", "llvm", "asm"), "--time": ("lir",), "--links": ("hir", "mir", "mir --built", "lir"),
         "--built": ("mir", "mir --built"), "--fusion": LEVELS}  # fmt: skip


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("option", TAKEN)
def test_an_option_is_shown_or_refused(option: str, level: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["inspect", str(MLP), "--level", *level.split(), "--seq", "4"]
    assert main(words) == 0
    plain = capsys.readouterr().out
    status, (out, err) = main([*words, option]), capsys.readouterr()
    if level in TAKEN[option]:
        assert status == 0 and (out != plain or option in level)
    else:
        assert status == 2 and not out and f"inspect: {option} " in err
        if "--built" not in level:
            assert "level " in err or "levels " in err
    if option == "--fusion":
        head, body = plain.splitlines()[:2], plain.splitlines()[2:]
        assert out.splitlines()[:2] == head and out.splitlines()[-len(body) :] == body
        assert "matmul epilogue: fused_matmul + add + gelu" in out


@pytest.mark.parametrize("words", [("--bind", "--time"), ("--links", "--time"), ("--links", "--bind")])
def test_options_that_do_not_go_together_are_refused(
    words: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["inspect", str(MLP), "--level", "lir", *words]) == 2
    assert "does not go with" in capsys.readouterr().err


def test_times_are_those_of_launches(capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(capsys, MLP, "--seq", "4", "--time")
    assert "launches take" in out and "launch rms_norm." in out


# -- models ----------------------------------------------------------------------------------------------------------
@needs_stories
@pytest.mark.parametrize("level", ["hir", "mir", "lir"])
def test_a_model_at_every_level(level: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(capsys, STORIES, "--level", level, "--phase", "decode", "--past", "100")
    lines = out.splitlines()
    assert lines[0].endswith(f"llama decoder, 5 layers, {lines[0].rsplit(' ', 1)[1]}")
    assert lines[1] == "# decode: batch = 1, blocks = 2, pages = 2, picked = 1, seq = 1"
    shown = {"hir": "cached_self_attention(", "mir": "cached_attention(", "lir": "launch attention."}
    assert shown[level] in out


@needs_stories
def test_a_stage_is_only_that_stage(capsys: pytest.CaptureFixture[str]) -> None:
    for level in ("hir", "mir", "lir"):
        out = inspect(capsys, STORIES, "--level", level, "--stage", "layers.2")
        assert "layers.2" in out and "layers.3" not in out and "layers.1" not in out
    everything, part = (inspect(capsys, STORIES, "--level", "llvm", *w) for w in ([], ["--stage", "layers.*.ffn"]))
    assert "define void @attention" in everything and "define void @attention" not in part and "define void" in part


def test_an_encoder_is_shown_with_its_pooling_and_by_its_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("tokenizers")
    pytest.importorskip("safetensors")
    small_bert.write(tmp_path, files=small_bert.sentence_transformers("max"))
    assert "max(" in inspect(capsys, tmp_path, "--level", "hir", "--stage", "pool")
    assert "matmul epilogue" in inspect(capsys, tmp_path, "--fusion")
    (tmp_path / "profile.toml").write_text("[fusion]\nskip = true\n")
    assert "matmul epilogue" not in inspect(capsys, tmp_path, "--fusion")


@needs_stories
def test_the_cache_may_be_of_halves(capsys: pytest.CaptureFixture[str]) -> None:
    assert "f16[" in inspect(capsys, STORIES, "--level", "hir", "--cache", "f16")
    assert "f16[" not in inspect(capsys, STORIES, "--level", "hir")


@needs_stories
def test_work_grows_with_the_binding(capsys: pytest.CaptureFixture[str]) -> None:
    def flops(*words: str) -> float:
        out = inspect(capsys, STORIES, "--level", "lir", *words)
        return float(re.search(r"operands, ([\d.e+]+) MFLOP", out)[1])  # type: ignore[index]

    weights = 5 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 172) + 512 * 64
    attention = 5 * 4 * 64 * 64  # layers, two products of multiply-adds, keys of a block, heads · head_dim
    assert flops("--phase", "decode", "--past", "0") == pytest.approx((2 * weights + attention) / 1e6, rel=0.03)
    assert flops("--phase", "decode", "--batch", "4") == pytest.approx(4 * flops("--phase", "decode"), rel=0.01)


def test_the_cache_has_whole_blocks() -> None:
    assert [phase_sizes(1, 1, past)["blocks"] for past in (0, 63, 64, 512)] == [1, 1, 2, 9]
    assert [phase_sizes(1, 1, past, ["ring64", "ringed"])["ring64"] for past in (0, 512, 5000)] == [1, 9, 9]


def test_stages_match_by_parts() -> None:
    assert matches("layers.1", "layers.1.attn")
    assert matches("layers.*.attn", "layers.12.attn.q")
    assert matches(None, "")
    assert not matches("layers.1", "layers.12.attn")
    assert not matches("layers.1.attn", "layers.1")


@needs_stories
@pytest.mark.parametrize("phase", ("prefill", "decode"))
def test_a_decoder_is_timed_with_its_sampler(phase: str, capsys: pytest.CaptureFixture[str]) -> None:
    out = inspect(capsys, STORIES, "--level", "lir", "--phase", phase, "--past", "8", "--seq", "1", "--time")
    assert "launches take" in out and "sample_tokens" in out

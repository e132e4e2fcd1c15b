"""`rlx embed` as a user types it: what is printed where, what is written, and what is refused."""

from __future__ import annotations

import io
import json
import os
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
import tiny_llama

from rlx.cli.embed import lines, read_texts
from rlx.cli.main import main
from rlx.engine.load import load

TEXTS = ["bal dam", "fom", "", "fom kol kem", "bal dam", "dam"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny-bert"
    prompts = {"config_sentence_transformers.json": {"prompts": {"query": "kol ", "passage": "kom "}}}
    small_bert.write(folder, files=small_bert.sentence_transformers(max_seq_length=16) | prompts)
    return folder


@pytest.fixture(scope="module")
def wanted(model: Path) -> Any:
    with load(model) as encoder:
        return encoder.embed(TEXTS)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(TEXTS) + "\n")
    return path


class Piped:
    """A stdin that is no terminal."""

    def __init__(self, data: bytes) -> None:
        self.buffer = io.BytesIO(data)

    def isatty(self) -> bool:
        return False


def test_a_precision_is_handed_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small_bert.write(tmp_path, files={}, hidden_size=96)
    vectors = []
    for precision in ("f32", "int8"):
        assert main(["embed", "-m", str(tmp_path), "--precision", precision, "fom"]) == 0
        vectors.append(np.array(json.loads(capsys.readouterr().out)))
    assert 1e-6 < np.abs(vectors[0] - vectors[1]).max() < 0.1
    with pytest.raises(SystemExit):
        main(["embed", "-m", str(tmp_path), "--precision", "int3", "fom"])
    assert "invalid choice: 'int3'" in capsys.readouterr().err


# -- vectors ---------------------------------------------------------------------------------------------------------
def test_a_vector_a_line_goes_to_stdout_and_timings_to_stderr(
    model: Path, wanted: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "-m", str(model), *TEXTS[:2]]) == 0
    captured = capsys.readouterr()
    vectors = np.array([json.loads(line) for line in captured.out.splitlines()], np.float32)
    assert np.array_equal(vectors, wanted[:2])
    assert "2 texts" in captured.err and "24 numbers, mean pooling" in captured.err and "\033" not in captured.err


def test_a_file_gives_a_row_a_line(
    model: Path, wanted: Any, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.npy"
    assert main(["embed", "-m", str(model), "--file", str(file), "--out", str(out)]) == 0
    captured = capsys.readouterr()
    assert not captured.out and f"6 vectors of 24 numbers in {out}" in captured.err
    assert np.array_equal(np.load(out), wanted)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["lines.txt", "v.npy"]
    assert out.stat().st_mode & 0o777 == 0o666 & ~current_umask()


@pytest.mark.parametrize(
    "word", ["notes/nope.txt", "nope.txt", "./nope", "../nope/x", "/no/such", "~/nope", "nope/", "a/b.png"]
)
def test_the_path_of_a_file_that_is_not_there_is_refused(
    model: Path, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["embed", "-m", str(model), "fom", word]) == 2
    captured = capsys.readouterr()
    problem = "names an image, and tiny-bert reads texts" if "png" in word else "is written like a path, and nothing is"
    assert f"'{word}' {problem}" in captured.err and not captured.out
    assert f"echo {shlex.quote(word)} | rlx embed" in captured.err
    monkeypatch.setattr("sys.stdin", Piped(f"{word}\n".encode()))
    assert main(["embed", "-m", str(model), "--json"]) == 0  # as the hint says
    assert json.loads(capsys.readouterr().out)["texts"] == 1


@pytest.mark.parametrize(
    "text", ["and/or", "n/a", "1/2.5", "https://a.org/b.html", "see notes/nope.txt", "a.b", "e.g.", "example.com"]
)
def test_other_words_with_slashes_and_dots_are_text(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [place.text for place in read_texts([text], None)] == [text]


def current_umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


@pytest.mark.parametrize("words", [["--file", "-"], []])
def test_lines_may_come_on_stdin(
    model: Path, wanted: Any, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", Piped("\n".join(TEXTS).encode()))
    assert main(["embed", "-m", str(model), "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["model"], report["texts"], report["dim"]) == ("tiny-bert", 6, 24)
    assert np.array_equal(np.array(report["vectors"], np.float32), wanted)


def test_an_empty_file_gives_no_rows(model: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("")
    out = tmp_path / "v.npy"
    assert main(["embed", "-m", str(model), "--file", str(tmp_path / "empty.txt"), "--out", str(out)]) == 0
    assert np.load(out).shape == (0, 24)


def test_lines_end_where_an_editor_ends_them() -> None:
    assert lines("\ufeffone\r\n two \u2028 \x0b\n\nlast".encode(), "x") == ["one", " two \u2028 \x0b", "", "last"]
    assert lines(b"", "x") == [] and lines(b"\n", "x") == [""] and lines(b"a\n", "x") == ["a"]


def test_long_texts_are_counted_on_stderr_or_refused(
    model: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    long = "bal " * 40
    assert main(["embed", "-m", str(model), long, "dam"]) == 0
    assert "1 of 2 texts were cut to the 16 tokens" in caplog.text
    capsys.readouterr()
    assert main(["embed", "-m", str(model), "--no-truncate", "dam", long]) == 1
    assert "text 1 has 42 tokens, the model reads 16" in capsys.readouterr().err


# -- search ----------------------------------------------------------------------------------------------------------
def test_a_query_ranks_lines_once_each_without_the_empty_ones(
    model: Path, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The query and the lines get the prompts that the model has for them."""
    with load(model) as encoder:
        query = encoder.embed("fom", prompt="query")
        scores = encoder.embed(TEXTS, prompt="passage") @ query
    distinct = [0, 1, 3, 5]
    order = sorted(distinct, key=lambda i: -scores[i])
    assert main(["embed", "-m", str(model), "--file", str(file), "--query", "fom"]) == 0
    assert capsys.readouterr().out.splitlines() == [f"{scores[i]:.4f}  {file}:{i + 1}  {TEXTS[i]}" for i in order]
    assert main(["embed", "-m", str(model), "--file", str(file), "--query", "fom", "--top", "2", "--json"]) == 0
    results = json.loads(capsys.readouterr().out)["results"]
    assert [(r["line"], r["text"]) for r in results] == [(i + 1, TEXTS[i]) for i in order[:2]]
    assert np.allclose([r["score"] for r in results], scores[order[:2]], atol=1e-6)


def test_a_query_and_a_file_of_vectors_may_go_together(
    model: Path, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "v.npy"
    assert main(["embed", "-m", str(model), "--file", str(file), "--query", "fom", "--out", str(out)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 4 and np.load(out).shape == (6, 24)


def test_files_and_folders_are_read_and_results_name_them(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes"
    (notes / "deep").mkdir(parents=True)
    (notes / "a.txt").write_text("bal\nfom\n")
    (notes / "deep" / "b.txt").write_text("dam\n")
    (notes / "c.bin").write_bytes(b"\xff\xfe\x00")
    one, two = str(notes / "a.txt"), str(notes / "deep" / "b.txt")
    wanted = [(one, 1, "bal"), (one, 2, "fom"), (two, 1, "dam")]
    ways = ([one, two], ["--file", one, "--file", two], [str(notes)], ["--file", str(notes)])
    for words in ways:
        assert main(["embed", "-m", str(model), *words, "--query", "fom", "--json"]) == 0
        captured = capsys.readouterr()
        results = json.loads(captured.out)["results"]
        assert sorted((r["file"], r["line"], r["text"]) for r in results) == sorted(wanted)
        assert ("1 file passed over" in captured.err) == (str(notes) in words)
    assert main(["embed", "-m", str(model), "kum", one, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == 3


def test_the_folder_of_a_model_is_no_folder_of_texts(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", str(model), "--query", "x"]) == 2
    assert f"rlx embed -m {model}" in capsys.readouterr().err


def test_whole_files_are_one_text_each_and_rows_are_listed(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()
    (notes / "b.txt").write_text("bal\nfom\n")
    (notes / "a.txt").write_text("dam " * 50 + "\r\n")
    one, two = str(notes / "a.txt"), str(notes / "b.txt")
    out = ["--out", str(tmp_path / "v.npy")]
    assert main(["embed", "-m", str(model), "kum", str(notes), "--whole-files", "--json", *out]) == 0
    assert json.loads(capsys.readouterr().out)["rows"] == [{"line": 1}, {"file": one}, {"file": two}]
    with load(model) as encoder:
        expected = encoder.embed(["kum", "dam " * 50, "bal\nfom"])
    np.testing.assert_array_equal(np.load(out[1]), expected)
    assert main(["embed", "-m", str(model), str(notes), "--whole-files", "--query", "bal fom"]) == 0
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 and shown[0].endswith(f"  {two}  bal fom") and shown[1].endswith("dam dam ...")
    assert main(["embed", "-m", str(model), str(notes), "--json", *out]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    assert rows == [{"file": one, "line": 1}, {"file": two, "line": 1}, {"file": two, "line": 2}]


# -- what is refused -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--file", "absent.txt"], "absent.txt cannot be read: No such file"),
        (["bal", "--out", "v.txt"], "ends in .npy"),
        (["bal", "--out", "absent/v.npy"], "there is no folder 'absent'"),
        (["bal", "--top", "0"], "--top is 0"),
        (["bal", "--threads", "0"], "--threads is 0"),
        (["bal", "--batch-size", "-3"], "--batch-size is -3"),
    ],
)
def test_what_cannot_be_meant_is_refused_before_a_model_is_looked_for(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["embed", "-m", "no-such-model", *words]) == 2
    captured = capsys.readouterr()
    assert message in captured.err and not captured.out


def test_without_texts_there_is_nothing_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", None)
    assert main(["embed"]) == 2
    assert "there are no texts" in capsys.readouterr().err


def test_a_line_that_is_not_utf8_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "x.txt").write_bytes(b"one\ntwo \xff\n")
    assert main(["embed", "--file", str(tmp_path / "x.txt")]) == 2
    assert "x.txt, line 2: not UTF-8 text: byte 0xff" in capsys.readouterr().err


def test_models_that_give_no_vectors_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embed", "-m", "no-such-model", "bal"]) == 3
    tiny_llama.write(tmp_path)
    assert main(["embed", "-m", str(tmp_path), "bal"]) == 1
    assert "is a decoder" in capsys.readouterr().err


@pytest.mark.skipif(os.name == "nt", reason="no devices in the file system")
def test_a_device_is_never_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "v.npy").symlink_to("/dev/null")
    assert main(["embed", "bal", "--out", str(tmp_path / "v.npy")]) == 2
    assert "no regular file" in capsys.readouterr().err and Path("/dev/null").is_char_device()


def test_a_link_is_written_through(model: Path, tmp_path: Path) -> None:
    (tmp_path / "real.npy").write_bytes(b"old")
    (tmp_path / "v.npy").symlink_to("real.npy")
    assert main(["embed", "-m", str(model), "bal", "--out", str(tmp_path / "v.npy")]) == 0
    assert (tmp_path / "v.npy").is_symlink() and np.load(tmp_path / "real.npy").shape == (1, 24)


def test_a_failed_write_leaves_the_old_file(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "v.npy"
    out.write_bytes(b"old")

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("numpy.save", full)
    assert main(["embed", "-m", str(model), "bal", "--out", str(out)]) == 1
    assert "v.npy cannot be written: No space left on device" in capsys.readouterr().err
    assert out.read_bytes() == b"old" and [p.name for p in tmp_path.iterdir()] == ["v.npy"]


def test_a_word_that_resembles_a_path_is_pointed_out(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "shop").write_text("fom\n")
    monkeypatch.chdir(tmp_path)
    assert main(["embed", "-m", str(model), "nots", "--query", "fom"]) == 0
    assert "'nots' is embedded as a text; did you mean the folder 'notes'?" in capsys.readouterr().err
    assert main(["embed", "-m", str(model), "nots/shop"]) == 0
    assert "did you mean the file 'notes/shop'?" in capsys.readouterr().err
    assert main(["embed", "-m", str(model), "fom", "bal bam"]) == 0
    assert "did you mean" not in capsys.readouterr().err
    assert main(["embed", "-m", str(model), "notes/shp"]) == 2  # its folder is there
    assert "'notes/shp' is written like a path, and nothing is there" in capsys.readouterr().err
    assert main(["embed", "-m", str(model), "and/or"]) == 0


def test_a_query_needs_texts_to_rank(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Piped(b""))
    assert main(["embed", "-m", str(model), "--query", "fom"]) == 2
    assert "there are no texts to rank" in capsys.readouterr().err

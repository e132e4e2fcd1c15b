"""`rlx search`: texts through a model that stands in, vectors from a file, JSON, and what is wrong."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.cli.main import main


@pytest.fixture
def index(tmp_path: Path) -> Path:
    folder = tmp_path / "index"
    with rlx.Index.create(folder, dim=3) as new:
        new.append(np.eye(3), ids=["x", "y", "z"], texts=["one", "two\nlines", None])
    np.save(tmp_path / "query.npy", np.float32([0.1, 1.0, 0.5]))
    return folder


def test_scores_ids_and_texts_are_printed(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(index), "--vector", str(index.parent / "query.npy"), "-k", "2"]) == 0
    assert capsys.readouterr().out == " 0.8909  y  two lines\n 0.4454  z\n"


def test_json_has_all_of_a_hit(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["search", str(index), "--vector", str(index.parent / "query.npy"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert [r["id"] for r in report["results"]] == ["y", "z", "x"]
    assert report["results"][0]["text"] == "two\nlines" and report["results"][0]["row"] == 1 and report["rows"] == 3


def test_problems_have_their_exit_codes(index: Path, capsys: pytest.CaptureFixture[str]) -> None:
    query = str(index.parent / "query.npy")
    assert main(["search", str(index)]) == 2
    assert main(["search", str(index), "--vector", query, "-k", "0"]) == 2
    assert main(["search", str(index), "a text"]) == 1  # no model is named
    assert main(["search", str(index.parent), "--vector", query]) == 4
    assert main(["search", str(index), "--verify"]) == 0
    path = index / "vectors.0"
    path.write_bytes(path.read_bytes()[:-1] + b"\x01")
    assert main(["search", str(index), "--verify"]) == 4
    said = capsys.readouterr().err
    assert "expected a query or --vector" in said and "does not say which model" in said and "not an index" in said


def test_what_is_not_an_index_says_how_to_make_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "my notes").mkdir()
    np.save(tmp_path / "v.npy", np.ones((2, 3)))
    assert main(["search", str(tmp_path / "my notes"), "a text"]) == 4
    notes = shlex.quote(str(tmp_path / "my notes"))
    said = capsys.readouterr().err
    assert f"rlx embed {notes} --query" in said and f"rlx batch embed {notes} -o OUT --index INDEX" in said
    assert main(["search", str(tmp_path / "v.npy"), "a text"]) == 4
    assert main(["search", str(tmp_path / "nothing"), "a text"]) == 2
    assert capsys.readouterr().err.count("rlx batch embed TEXTS -o OUT --index INDEX") == 2


@pytest.mark.weights
def test_a_text_is_embedded_by_the_model_of_the_index(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["The cat sleeps on the sofa.", "Stocks fell sharply on Monday.", "He plays the guitar."]
    model = rlx.load("minilm-l6")
    with rlx.Index.create(tmp_path / "index", dim=model.dim, dtype="int8", model="minilm-l6") as index:
        index.append(model.embed(texts), texts=texts)
    assert main(["search", str(tmp_path / "index"), "music", "-k", "1"]) == 0
    assert texts[2] in capsys.readouterr().out
    assert [h.text for h in rlx.Index.open(tmp_path / "index").search("finance", k=1)] == [texts[1]]

"""`rlx.Index`: what is found against NumPy, what is stored, and what happens beside and after other processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stand_ins

import rlx
from rlx.errors import FormatError, RequestError, RlxError, ShapeError, UnknownAttribute

Array = np.ndarray[Any, Any]


def vectors(count: int, dim: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal((count, dim)).astype(np.float32)


def ranked(rows: Array, query: Array, metric: str, k: int) -> Array:
    """The best rows, by NumPy in float64."""
    rows, query = rows.astype(np.float64), query.astype(np.float64)
    if metric == "cosine":
        rows = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    scores = -np.square(rows - query).sum(1) if metric == "l2" else rows @ query
    return np.lexsort((np.arange(len(rows)), -scores))[:k]


@pytest.mark.parametrize("dtype", ["f32", "f16", "int8"])
@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_the_best_rows_are_those_of_numpy(tmp_path: Path, dtype: str, metric: str) -> None:
    rows, queries = vectors(3000, 50), vectors(9, 50, seed=1)
    with rlx.Index.create(tmp_path / "index", dim=50, dtype=dtype, metric=metric) as index:
        for at in range(0, 3000, 1100):
            index.append(rows[at : at + 1100])
        exact = rows.astype(np.float16) if dtype == "f16" and metric != "cosine" else rows
        scores, best_rows = index.search_rows(queries, 7)
    for query, score, row in zip(queries, scores, best_rows, strict=True):
        want = ranked(exact, query, metric, 7)
        if dtype == "f16":  # stored vectors are rounded
            assert len(set(want) & set(row)) >= 6
        else:
            np.testing.assert_array_equal(row, want)
        assert (np.diff(score) <= 0).all()


def test_scores_are_the_same_bits_for_any_batch_number_of_threads_and_for_int8(tmp_path: Path) -> None:
    rows, queries = vectors(5000, 70), vectors(11, 70, seed=1)
    answers = []
    for dtype in ("f32", "int8"):
        rlx.Index.create(tmp_path / dtype, dim=70, dtype=dtype).append(rows)
        for threads in (1, 2):
            with rlx.Index.open(tmp_path / dtype, threads=threads) as index:
                answers.append(index.search_rows(queries, 12))
                parts = [index.search_rows(q[None], 12) for q in queries]
                answers.append((np.concatenate([p[0] for p in parts]), np.concatenate([p[1] for p in parts])))
    for scores, best_rows in answers[1:]:
        np.testing.assert_array_equal(scores, answers[0][0])
        np.testing.assert_array_equal(best_rows, answers[0][1])


@pytest.mark.parametrize("dtype", ["f32", "int8"])
def test_of_equal_rows_the_lower_one_comes_first(tmp_path: Path, dtype: str) -> None:
    with rlx.Index.create(tmp_path / "index", dim=8, dtype=dtype) as index:
        index.append(np.ones((9000, 8), np.float32))
        _, best_rows = index.search_rows(np.ones((1, 8)), 300, rescore=400)
        np.testing.assert_array_equal(best_rows[0], np.arange(300))


def test_hits_have_ids_texts_and_metadata(tmp_path: Path) -> None:
    with rlx.Index.create(tmp_path / "index", dim=3) as index:
        index.append(np.eye(3), ids=["x", "y", "z"])
        index.append([[1, 1, 0]], ids=["xy"], texts=["both, ünd"], metadata=[{"page": 3}])
        index.append([[0, 1, 1]], ids=["yz"], texts=[None])
    hits = rlx.Index.open(tmp_path / "index").search([1.0, 0.9, 0.0], k=3)
    assert [(h.id, h.text, h.metadata, h.row) for h in hits] == [
        ("xy", "both, ünd", {"page": 3}, 3), ("x", None, None, 0), ("y", None, None, 1),
    ]  # fmt: skip
    assert hits[0].score == pytest.approx(1.9 / np.sqrt(2 * 1.81), abs=1e-6)
    several = rlx.Index.open(tmp_path / "index").search(np.eye(3), k=9)
    assert [h[0].id for h in several] == ["x", "y", "z"] and all(len(h) == 5 for h in several)


def test_ids_without_names_are_row_numbers_and_integers_are_kept(tmp_path: Path) -> None:
    with rlx.Index.create(tmp_path / "rows", dim=2) as index:
        index.append(np.eye(2))
        assert [h.id for h in index.search([0, 1])] == [1, 0]
    with rlx.Index.create(tmp_path / "numbers", dim=2) as index:
        index.append(np.eye(2), ids=[2**40, -7])
        assert [h.id for h in index.search([0, 1])] == [-7, 2**40]
        with pytest.raises(RequestError, match="ids are strings, those of the 2 rows before integers"):
            index.append(np.eye(2), ids=["a", "b"])


@pytest.mark.parametrize("dtype", ["f32", "int8"])
@pytest.mark.parametrize("metric", ["cosine", "l2"])
def test_deleted_rows_are_not_found_and_compaction_drops_them(tmp_path: Path, dtype: str, metric: str) -> None:
    rows, names = vectors(500, 20), [f"n{i}" for i in range(500)]
    folder = tmp_path / "index"
    with rlx.Index.create(folder, dim=20, dtype=dtype, metric=metric) as index:
        index.append(rows, ids=names, texts=[f"text {i}" for i in range(500)])
        reader = rlx.Index.open(folder)
        assert index.delete([f"n{i}" for i in range(0, 500, 3)] + ["unknown"]) == 167
        assert index.delete(["n3"]) == 0
        assert len(index) == 333 and len(reader) == 500
        before = index.search(rows[:9], k=5)
        assert all(int(str(h.id)[1:]) % 3 for hits in before for h in hits)
        reader.refresh()
        assert reader.search(rows[:9], k=5) == before
        size = sum(p.stat().st_size for p in folder.iterdir())
        index.compact()
        assert sum(p.stat().st_size for p in folder.iterdir()) < 0.75 * size
        after = index.search(rows[:9], k=5)
        assert [[(h.id, h.text, h.score) for h in x] for x in after] == [
            [(h.id, h.text, h.score) for h in x] for x in before
        ]
        assert reader.search(rows[:9], k=5) == before  # its files are mapped, though they have no name any more
        index.verify()
        index.append(rows[:1], ids=["again"])
    assert len(rlx.Index.open(folder)) == 334


def test_an_empty_index_finds_nothing(tmp_path: Path) -> None:
    for dtype in ("f32", "int8"):
        with rlx.Index.create(tmp_path / dtype, dim=4, dtype=dtype) as index:
            assert index.search([1, 2, 3, 4]) == [] and len(index) == 0
            index.append(np.empty((0, 4)))
            index.verify()


def test_errors_name_both_values(tmp_path: Path) -> None:
    index = rlx.Index.create(tmp_path / "index", dim=4)
    cases: list[tuple[Any, type[Exception], str]] = [
        (lambda: index.append(np.ones((2, 5))), ShapeError, r"\[2, 5\], expected \[count, 4\]"),
        (lambda: index.append(np.ones((2, 4)), ids=[1]), ShapeError, "2 vectors and 1 ids"),
        (lambda: index.append(np.ones((2, 4)), texts=["a"]), ShapeError, "2 vectors and 1 texts"),
        (lambda: index.append([[1, 2, 3, np.nan]]), RequestError, "vector 0 .* not finite"),
        (lambda: index.append([[1, 2, 3, 4]], metadata=[{"a": object()}]), RequestError, "no JSON object"),
        (lambda: index.append([[1, 2, 3, 4]], texts=["\ud800"]), RequestError, "UTF-8"),
        (lambda: index.append([[1, 2, 3, 4]], ids=["\ud800"]), RequestError, "an id cannot be written as UTF-8"),
        (lambda: index.append([[1, 2, 3, 4]], ids=[2**63]), RequestError, f"the id {2**63} needs more than 64 bits"),
        (lambda: index.append([[1, 2, 3, 4]], ids=[-(2**63) - 1]), RequestError, "needs more than 64 bits"),
        (lambda: index.append([[1, 2, 3, 4]], ids=[np.uint64(2**63)]), RequestError, "needs more than 64 bits"),
        (
            lambda: index.search([1, 2, 3, 4], rescore="x"),
            RequestError,
            "rescore is 'x', expected an integer from k, 10",
        ),
        (lambda: index.search([1, 2, 3, 4], rescore=9), RequestError, "rescore is 9, expected an integer from k, 10"),
        (lambda: index.search([1.0, 2.0]), ShapeError, r"\[1, 2\], expected \[count, 4\]"),
        (lambda: index.search([1, 2, 3, 4], k=0), RequestError, "k is 0, expected an integer from 1"),
        (lambda: index.search("a text"), RequestError, "which model"),
        (lambda: rlx.Index.create(tmp_path / "index", dim=4), RequestError, "exists already"),
        (lambda: rlx.Index.create(tmp_path / "other", dim=0), RequestError, "dim is 0"),
        (lambda: rlx.Index.create(tmp_path / "other", dim=1, dtype="f8"), RequestError, "'f8'.*f32, f16, int8"),
        (
            lambda: rlx.Index.open(tmp_path / "index", write=True),
            RequestError,
            "open for writing already, in this process or",
        ),
        (lambda: rlx.Index.open(tmp_path / "index").append([[1, 2, 3, 4]]), RequestError, "open for reading"),
        (lambda: rlx.Index.open(tmp_path), FormatError, "not an index"),
    ]
    for call, kind, message in cases:
        with pytest.raises(kind, match=message):
            call()
    assert len(index) == 0


def test_ids_are_listed_and_deleted_rows_are_refused(tmp_path: Path) -> None:
    with rlx.Index.create(tmp_path / "index", dim=2) as index:
        index.append(np.eye(2), ids=["a", "b"], texts=["one", None])
        index.append(np.ones((1, 2)), ids=["c"], metadata=[{"n": 1}])
        index.delete("b")
        assert index.ids() == list(index) == ["a", "c"] and index.rows.tolist() == [0, 2]
        assert index.texts() == ["one", None] and index.metadata() == [None, {"n": 1}]
        assert "a" in index and "b" not in index and 0 not in index and None not in index
        assert [index.ids([hit.row]) for hit in index.search([1.0, 0.0])] == [["a"], ["c"]]
        for read in (index.ids, index.texts, index.metadata):
            with pytest.raises(RequestError, match=r"row 1 is deleted") as caught:
                read(range(len(index)))
            assert "index.rows" in (caught.value.hint or "")
        for outside in (3, -1):
            with pytest.raises(RequestError, match=f"row {outside} is outside the 3 rows"):
                index.ids([outside])
        index.compact()
        assert index.rows.tolist() == [0, 1] and list(index) == ["a", "c"]
    with rlx.Index.create(tmp_path / "numbers", dim=2) as index:
        index.append(np.eye(2), ids=[7, 2**40])
        assert 7 in index and np.int64(2**40) in index and "7" not in index and list(index) == [7, 2**40]
        assert index.delete(7) == 1 and len(index) == 1


@pytest.mark.parametrize("ids", [[7, 2**63 - 1], ["7", "x"], None])
def test_ids_that_no_row_can_have_are_in_no_index(tmp_path: Path, ids: Any) -> None:
    with rlx.Index.create(tmp_path / "index", dim=2) as index:
        index.append(np.eye(2), ids=ids)
        for id in (2**63, -(2**80), "\ud800", None, 1.5):
            assert id not in index
            assert index.delete([id]) == 0  # type: ignore[list-item]
        assert len(index) == 2


@pytest.mark.parametrize("loaded", [False, True])
def test_a_model_embeds_what_is_appended_and_searched(tmp_path: Path, loaded: bool) -> None:
    folder = stand_ins.write_encoder(tmp_path)
    model = rlx.load(folder)
    encoder: Any = model if loaded else str(folder)
    with rlx.Index.create(tmp_path / "index", model=encoder) as index:
        index.append(texts=["bal dem", "kun gos"], ids=["x", "y"])
        assert index.dim == model.dim and index.model == str(folder)
        vectors = model.embed(["bal dem", "kun gos"])
        np.testing.assert_allclose(index.vectors, vectors / np.linalg.norm(vectors, axis=1, keepdims=True), rtol=1e-6)
        with pytest.raises(RequestError, match="these are texts, expected vectors") as caught:
            index.append(["bal"], ids=["z"])
        assert caught.value.hint == "append(texts=[...], ids=[...]) embeds them"
        for wrong in ({}, {"texts": "bal"}, {"texts": ["bal", None]}):
            with pytest.raises(RequestError, match="append: "):
                index.append(ids=["z"], **wrong)
        assert index.ids() == ["x", "y"]
    for other in (None, encoder):
        assert rlx.Index.open(tmp_path / "index", model=other).search("kun gos", k=1)[0].id == "y"
    with rlx.Index.create(tmp_path / "small", dim=3) as small:
        small.append(np.eye(3))
    for call in (rlx.Index.open(tmp_path / "small", model=encoder).search, lambda t: small.append(texts=[t])):
        with pytest.raises(RequestError, match=f"makes vectors of {model.dim}, the index has 3|does not say which"):
            call("bal")
    if loaded:
        with pytest.raises(RequestError, match=f"dim is 3, .* makes vectors of {model.dim}"):
            rlx.Index.create(tmp_path / "other", dim=3, model=encoder)


def test_names_of_other_libraries_are_explained(tmp_path: Path) -> None:
    index: Any = rlx.Index.create(tmp_path / "index", dim=2)
    index.append(np.eye(2), ids=["a", "b"])
    for name, hint in (("add", "append"), ("remove", "delete"), ("update", "delete"), ("query", "search")):
        with pytest.raises(UnknownAttribute) as caught:
            getattr(index, name)
        assert f"index.{hint}(" in (caught.value.hint or "")
    assert not hasattr(index, "upsert") and not hasattr(index, "nothing_like_it")
    kind: Any = rlx.Index
    cases: list[tuple[Any, str, str]] = [
        (lambda: index.search([1, 0], top_k=1), "no setting is called 'top_k'", "here it is called k"),
        (lambda: index.search([1, 0], filter=1), "no setting is called 'filter'", "known: k, rescore"),
        (lambda: kind("index"), "opened or created", "rlx.Index.open('index')"),
        (lambda: kind("index", dim=3), "opened or created", "rlx.Index.create('index', dim=...)"),
        (lambda: kind.create(tmp_path / "new"), "neither dim nor model", "dim=384"),
        (lambda: index.append(np.eye(2)), "ids are row numbers, those of the 2 rows before strings", "pass ids=[...]"),
        (lambda: index.append(np.eye(2), ids=[1, 2]), "ids are integers", "strings"),
        (lambda: index.append(["a"]), "these are texts", "Index.create(..., model=NAME)"),
        (lambda: kind.open(tmp_path / "index", write=True), "open for writing already", "index.close()"),
        (lambda: kind.open(tmp_path / "index", model=3), "3 does not embed texts", "minilm-l6"),
    ]
    for call, message, hint in cases:
        with pytest.raises(RlxError, match=message) as error:
            call()
        assert hint in (error.value.hint or "")


# -- crashes and hostile files -----------------------------------------------------------------------------------------
APPEND_FOREVER = """
import sys, numpy as np, rlx
index = rlx.Index.open(sys.argv[1], write=True)
print("ready", flush=True)
while True:
    start = len(index)
    rows = np.full((7, 5), start + 1, np.float32)
    index.append(rows, ids=range(start, start + 7), texts=[f"t{i}" for i in range(start, start + 7)])
"""


COMPACT_FOREVER = """
import sys, numpy as np, rlx
index = rlx.Index.open(sys.argv[1], write=True)
print("ready", flush=True)
while True:
    index.append(np.ones((3, 5), np.float32), ids=["a", "b", "c"], texts=["x", None, "y"])
    index.delete(["b"])
    index.delete(["a"])
    index.compact()
    index.delete(["c"])
"""


def test_readers_go_on_beside_a_writer_that_deletes_and_compacts(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    rlx.Index.create(folder, dim=5, dtype="int8").close()
    writer = subprocess.Popen([sys.executable, "-c", COMPACT_FOREVER, str(folder)], stdout=subprocess.PIPE)
    try:
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        reader, epochs, end = rlx.Index.open(folder), set(), time.monotonic() + 4
        while time.monotonic() < end:
            reader.refresh()
            epochs.add(reader._store.head.epoch)
            assert 0 <= len(reader) <= 4 and len(reader.texts()) == len(reader)
            reader.verify()
            rlx.Index.open(folder)
        assert len(epochs) > 5
    finally:
        writer.kill()
        writer.communicate()


def test_a_file_that_vanishes_between_two_looks_is_a_format_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with rlx.Index.create(tmp_path / "index", dim=2) as index:
        index.append(np.eye(2), texts=["a", "b"])
    monkeypatch.setattr("rlx.index.columns.require_bytes", lambda path, size: None)  # it was there then
    for name in ("vectors.0", "pieces.0"):
        data = (tmp_path / "index" / name).read_bytes()
        (tmp_path / "index" / name).unlink()
        with pytest.raises(FormatError, match=f"{name}: missing, the head names it"):
            rlx.Index.open(tmp_path / "index")
        (tmp_path / "index" / name).write_bytes(data)
    rlx.Index.open(tmp_path / "index").verify()


def test_a_killed_writer_leaves_whole_appends_and_readers_go_on(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    rlx.Index.create(folder, dim=5, dtype="int8", metric="dot").close()
    rng, last = np.random.default_rng(0), 0
    for _ in range(4):
        writer = subprocess.Popen([sys.executable, "-c", APPEND_FOREVER, str(folder)], stdout=subprocess.PIPE)
        assert writer.stdout is not None and writer.stdout.readline() == b"ready\n"
        reader = rlx.Index.open(folder)
        wanted = last + 7 * int(rng.integers(3, 20))
        while len(reader) < wanted:
            reader.refresh()
            assert len(reader) % 7 == 0 and len(reader) >= last
            last = len(reader)
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        with rlx.Index.open(folder, write=True) as index:
            index.verify()
            last = len(index)
            everything = list(range(last))
            assert last % 7 == 0 and index.ids(everything) == everything
            assert index.texts(everything) == [f"t{i}" for i in everything]


def _outcome(folder: Path) -> str:
    """What happens to a reader of a damaged index: `differs` is silent damage."""
    try:
        with rlx.Index.open(folder) as index:
            index.verify()
            hits = index.search(np.ones((2, 6)), k=3)
            return "right" if hits == EXPECTED["hits"] else "differs"
    except RlxError as error:
        return type(error).__name__


EXPECTED: dict[str, Any] = {}


def test_damaged_files_are_format_errors_or_give_the_right_answer(tmp_path: Path) -> None:
    folder = tmp_path / "index"
    with rlx.Index.create(folder, dim=6, dtype="int8", metric="l2", model="m") as index:
        for at in range(3):
            some = vectors(10, 6, seed=at)
            index.append(some, ids=[f"i{i}" for i in range(10)], texts=["é"] * 10, metadata=[{"a": [1]}] * 10)
        index.delete(["i3"])
        EXPECTED["hits"] = index.search(np.ones((2, 6)), k=3)
    rng = np.random.default_rng(0)
    files = sorted(p for p in folder.iterdir() if p.name != "lock")
    assert {p.name.partition(".")[0] for p in files} >= {
        "head",
        "vectors",
        "codes",
        "scales",
        "halves",
        "pieces",
        "ids",
    }
    seen = set()
    for path in files:
        original = path.read_bytes()
        damages = [original[: len(original) // 2], b"", original + b"x"]
        for _ in range(12):
            changed = bytearray(original)
            changed[int(rng.integers(len(original)))] ^= 1 << int(rng.integers(8))
            damages.append(bytes(changed))
        for damaged in damages:
            path.write_bytes(damaged)
            outcome = _outcome(folder)
            assert outcome in ("FormatError", "right"), (path.name, outcome)
            seen.add(outcome)
        path.write_bytes(original)
    assert seen == {"FormatError", "right"} and _outcome(folder) == "right"


def test_a_head_with_wrong_fields_is_a_format_error(tmp_path: Path) -> None:
    import hashlib
    import json
    import struct

    rlx.Index.create(tmp_path / "index", dim=6).close()
    path = tmp_path / "index" / "head.rlx"
    fields = json.loads(path.read_bytes()[48:])
    wrong: list[Any] = [
        {"dim": 0}, {"dim": 10**9}, {"dim": "6"}, {"dim": True}, {"rows": -1}, {"rows": 2**40}, {"dtype": "f64"},
        {"metric": []}, {"ids": "str"}, {"first": {"../x": 0}}, {"first": []}, {"first": {"texts": 5}}, {"epoch": -1},
        {"chain": "../" * 21 + "x"[:1]}, {"deleted": 1}, {"model": 3}, {"extra": 1}, {"rows": 5},
    ]  # fmt: skip
    for change in wrong:
        body = json.dumps(fields | change).encode()
        digest = hashlib.blake2b(body, digest_size=32).digest()
        path.write_bytes(struct.pack("<8sII32s", b"rlxindex", 1, len(body), digest) + body)
        with pytest.raises(FormatError, match=r"head|vectors|pieces"):
            rlx.Index.open(tmp_path / "index")


@pytest.mark.search
@pytest.mark.parametrize("metric", ["cosine", "dot", "l2"])
def test_faiss_finds_the_same(tmp_path: Path, metric: str) -> None:
    rows, queries = vectors(4000, 48), vectors(20, 48, seed=1)
    with rlx.Index.create(tmp_path / "index", dim=48, metric=metric) as index:
        index.append(rows)
        index.delete(range(0, 4000, 7))
        scores, best_rows = index.search_rows(queries, 10)
        norms = np.linalg.norm(queries, axis=1, keepdims=True)
        theirs, labels = index.to_faiss().search(queries / norms if metric == "cosine" else queries, 10)
    np.testing.assert_array_equal(best_rows, labels)
    np.testing.assert_allclose(scores, -theirs if metric == "l2" else theirs, rtol=1e-4, atol=1e-5)

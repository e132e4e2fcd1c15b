"""Runs along a batch are made piece by piece, so that what a piece becomes stays in cache: same bits, less memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from layers import Bert, bert_graph, bert_inputs, bert_numpy, relative, weights

import rlx
from rlx import Graph
from rlx.backends.cpu import executable
from rlx.errors import KernelError
from rlx.profile import CompileProfile, Precision
from rlx.runtime.compiled import CompiledGraph

SIZES = Bert(64, 2, 128, layers=2)
PROFILES = {"f32": CompileProfile(), "int8": CompileProfile(precision=Precision("int8"))}


@pytest.fixture(autouse=True)
def short_pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(executable, "PIECE_ROWS", 20)
    monkeypatch.setattr(executable, "CACHE_BYTES", 1000)
    yield


def encoder(threads: int, precision: str = "f32") -> CompiledGraph:
    f = rlx.compile(bert_graph(SIZES), threads=threads, profile=PROFILES[precision])
    f.set_params(weights(SIZES))
    return f


def sizes_of(f: CompiledGraph, batch: int, seq: int) -> list[int]:
    symbols = f.executable.layout.symbols
    pieces = f.executable.pieces(tuple({"batch": batch, "seq": seq}[s] for s in symbols))
    return [batch] if pieces is None else [stop - start for start, stop, _ in pieces.parts]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("precision", PROFILES)
def test_pieces_have_the_bits_of_the_whole(threads: int, precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    f = encoder(threads, precision)
    for batch in (1, 2, 5, 9):
        inputs = bert_inputs(SIZES, batch, 7)
        (output,) = f.run(inputs)
        monkeypatch.setattr(executable, "PIECE_ROWS", 10_000)
        (unsplit,) = encoder(1, precision).run(inputs)
        monkeypatch.setattr(executable, "PIECE_ROWS", 20)
        assert output.tobytes() == unsplit.tobytes()
    (exact,) = bert_numpy(SIZES, weights(SIZES), **inputs)
    assert relative(output, exact) < (1e-5 if precision == "f32" else 0.1)


def test_pieces_are_equally_long_and_large_enough() -> None:
    f = encoder(1)
    assert sizes_of(f, 2, 7) == [2] and sizes_of(f, 0, 7) == [0] and sizes_of(f, 3, 0) == [3]
    assert sizes_of(f, 3, 7) == [2, 1] and sizes_of(f, 9, 7) == [2, 2, 2, 2, 1]
    assert sizes_of(f, 3, 50) == [1, 1, 1]  # an entry is never cut
    assert sizes_of(encoder(2), 9, 7) == [5, 4]  # each thread gets as many rows


def test_memory_is_that_of_a_piece() -> None:
    f = encoder(1)
    arena = [f.memory({"batch": batch, "seq": 8}).arena for batch in (2, 64)]
    assert arena[0] == arena[1]


def test_a_trace_has_the_time_of_all_pieces(tmp_path: Path) -> None:
    f = encoder(1)
    inputs = bert_inputs(SIZES, 9, 7)
    output = f.run(inputs, trace=tmp_path / "t.json")[0]
    assert output.tobytes() == f.run(inputs)[0].tobytes()
    events = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert len(events) == len(f.plan.main.launches)


def test_what_meets_along_the_batch_is_not_cut() -> None:
    g = Graph("g")
    x = g.input("x", ("batch", 64)) @ g.param("w", (64, 64))
    f = rlx.compile(g.set_outputs([x - x.mean(axis=0, keepdims=True)]))
    assert f.executable.layout.batch is None
    rng = np.random.default_rng(0)
    data, w = rng.normal(size=(100, 64)).astype(np.float32), rng.normal(size=(64, 64)).astype(np.float32)
    f.set_param("w", w)
    exact = data.astype(np.float64) @ w
    assert relative(f.run({"x": data})[0], exact - exact.mean(0)) < 1e-5


def test_a_single_product_is_not_cut() -> None:
    """It leaves nothing in memory that the next launch would read."""
    g = Graph("g")
    f = rlx.compile(g.set_outputs([g.input("x", ("batch", 64)) @ g.param("w", (64, 64))]), threads=1)
    assert f.executable.layout.batch == 0
    assert f.executable.pieces((1000,)) is None


def test_a_fault_in_a_later_piece_is_told() -> None:
    g = Graph("g")
    at = g.input("at", ("batch", 4), "i32")
    f = rlx.compile(g.set_outputs([g.gather(g.param("t", (9, 64)), at) @ g.param("w", (64, 64))]))
    f.set_params({"t": np.ones((9, 64), np.float32), "w": np.ones((64, 64), np.float32)})
    data = np.zeros((40, 4), np.int32)
    data[33, 1] = 9
    with pytest.raises(KernelError, match=r"index 9 \(input 'at'.*\) lies outside the 9 entries of 't'"):
        f.run({"at": data})
    data[33, 1] = 8
    assert (f.run({"at": data})[0] == 64).all()

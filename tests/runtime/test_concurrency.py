"""One compiled graph from many threads, with sizes and weights that change, and in forked processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from forked import in_child
from layers import (
    TINY_BERT,
    TINY_LLAMA,
    bert_graph,
    bert_inputs,
    compiled,
    llama_graph,
    llama_inputs,
    same_bits,
    weights,
)
from limits import LONGEST_S

import rlx

THREADS, RUNS = 8, 1000
pytestmark = [
    pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork"),
    pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning"),  # that it is dangerous is why it is tested
]


def in_threads(work: Callable[[int], bool], count: int = RUNS) -> list[bool]:
    """`work(0)`, `work(1)`, ... on `THREADS` threads that begin together."""
    start = threading.Barrier(THREADS)
    with ThreadPoolExecutor(THREADS, initializer=lambda: start.wait(LONGEST_S) and None) as pool:
        return list(pool.map(work, range(count)))


# -- threads ------------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_eight_threads_get_the_same_bits(threads: int) -> None:
    f = compiled(bert_graph(TINY_BERT), weights(TINY_BERT), threads=threads)
    inputs = [bert_inputs(TINY_BERT, 2, 33, seed) for seed in range(5)]
    wanted = [f.run(i) for i in inputs]
    assert all(in_threads(lambda n: same_bits(f.run(inputs[n % 5]), wanted[n % 5])))


def test_different_sizes_at_once() -> None:
    f = compiled(llama_graph(TINY_LLAMA, past=True), weights(TINY_LLAMA), threads=2)
    sizes = [(1, 1, 0), (2, 7, 5), (1, 64, 1), (3, 1, 130), (0, 3, 3), (1, 0, 9), (5, 13, 0)]
    inputs = [llama_inputs(TINY_LLAMA, *s) for s in sizes]
    wanted = [f.run(i) for i in inputs]
    f = compiled(llama_graph(TINY_LLAMA, past=True), weights(TINY_LLAMA), threads=2)  # one that has planned nothing
    assert all(in_threads(lambda n: same_bits(f.run(inputs[n % 7]), wanted[n % 7])))


def test_more_sizes_at_once_than_are_remembered() -> None:
    g = rlx.Graph("double")
    g.set_outputs([g.input("x", ("n",)) * 2.0])
    f = rlx.compile(g, threads=2)

    def work(n: int) -> bool:
        x = np.arange(n * 7 % 601, dtype=np.float32)
        return np.array_equal(f.run({"x": x})[0], x * 2)

    assert all(in_threads(work, 3000))


def test_weights_may_change_while_others_run() -> None:
    """A run sees one setting of the weights, old or new, whole."""
    g = rlx.Graph("scale")
    g.set_outputs([g.input("x", ("n", 64)) @ g.param("w", (64, 64)) * g.param("s", (64,)).exp()])
    f = rlx.compile(g, threads=2)
    f.set_param("s", np.zeros(64, np.float32))
    f.set_param("w", np.eye(64, dtype=np.float32))
    x = np.ones((5, 64), np.float32)

    def work(n: int) -> bool:
        if n % 10 == 0:
            f.set_param("w", np.eye(64, dtype=np.float32) * (1 + n // 10))
            np.full((64, 64), np.nan, np.float32)  # takes the place of weights that were let go too early
        y = f.run({"x": x})[0]
        return y[0, 0] >= 1 and bool((y == y[0, 0]).all())

    assert all(in_threads(work))


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_weights_may_change_their_size_while_others_run(device: str) -> None:
    """A run has the sizes of the weights that it reads."""
    g = rlx.Graph("rows")
    table = g.param("w", ("rows", 256))
    g.set_outputs([table.exp(), g.input("x", ("n", 256)) + table.sum(axis=0)])
    f = rlx.compile(g, device=device)
    tables = {rows: np.zeros((rows, 256), np.float32) for rows in (1, 2000, 7, 400)}
    f.set_param("w", tables[1])

    def work(n: int) -> bool:
        if n % 3 == 0:
            f.set_param("w", tables[list(tables)[n // 3 % 4]])
        rows, x = f.run({"x": np.ones((1 + n % 2, 256), np.float32)})
        return rows.shape[0] in tables and bool((rows == 1).all() and (x == 1).all())

    assert all(in_threads(work, 400))


def test_a_report_after_weights_of_another_size_has_no_times_of_the_old_ones() -> None:
    g = rlx.Graph("rows")
    g.set_outputs([g.param("w", ("rows", 256)).exp() + g.input("x", (1,))])
    f = rlx.compile(g)
    f.set_param("w", np.zeros((5000, 256), np.float32))
    f.run({"x": np.ones(1, np.float32)})
    assert f.report().seconds > 0
    f.set_param("w", np.zeros((1, 256), np.float32))
    f.prepare()
    assert f.report().seconds == 0
    assert f.report({"x": np.ones(1, np.float32)}).seconds > 0


def test_threads_may_compile_at_once() -> None:
    def work(n: int) -> bool:
        g = rlx.Graph("shift")
        g.set_outputs([g.input("x", ("n",)) + float(n % 16)])
        return float(rlx.compile(g, threads=1 + n % 2).run({"x": np.zeros(3, np.float32)})[0][1]) == n % 16

    assert all(in_threads(work, 64))


# -- processes ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("threads", [1, 2])
def test_a_forked_child_and_its_parent_both_run(threads: int) -> None:
    f = compiled(bert_graph(TINY_BERT), weights(TINY_BERT), threads=threads)
    inputs = bert_inputs(TINY_BERT, 2, 33)
    wanted, *_ = [f.run(inputs) for _ in range(3)]  # so that the child's first run only repeats them
    assert in_child(lambda: all(same_bits(f.run(inputs), wanted) for _ in range(20))) == 0
    assert same_bits(f.run(inputs), wanted)


def test_a_child_may_set_weights_and_compile() -> None:
    inputs = bert_inputs(TINY_BERT, 2, 9)
    f = compiled(bert_graph(TINY_BERT), weights(TINY_BERT), threads=2)
    other = compiled(bert_graph(TINY_BERT), weights(TINY_BERT, seed=5), threads=2).run(inputs)

    def work() -> bool:
        f.set_params(weights(TINY_BERT, seed=5))
        g = rlx.Graph("new")
        g.set_outputs([g.input("x", (3,)) * 1.25 - 7.0])
        fresh = rlx.compile(g, threads=2).run({"x": np.ones(3, np.float32)})[0]
        return same_bits(f.run(inputs), other) and fresh.tolist() == [-5.75] * 3

    assert in_child(work) == 0


def test_a_child_of_a_process_that_runs_in_other_threads() -> None:
    f = compiled(bert_graph(TINY_BERT), weights(TINY_BERT), threads=2)
    inputs = bert_inputs(TINY_BERT, 2, 33)
    wanted, stop = f.run(inputs), threading.Event()

    def forever() -> None:
        while not stop.is_set():
            f.run(inputs)

    busy = [threading.Thread(target=forever) for _ in range(3)]
    for thread in busy:
        thread.start()
    try:
        assert [in_child(lambda: same_bits(f.run(inputs), wanted)) for _ in range(10)] == [0] * 10
    finally:
        stop.set()
        for thread in busy:
            thread.join()
    assert same_bits(f.run(inputs), wanted)


def test_a_child_of_a_process_that_compiles_and_binds_in_other_threads() -> None:
    """No child inherits a lock that nobody will release."""
    graphs = []
    for n in range(60):
        g = rlx.Graph("many")
        g.set_outputs([((g.input("x", (64, 64)) @ g.param("w", (64, 64))).exp() * (n + 0.5)).sum(axis=n % 2)])
        graphs.append(g)
    shared = rlx.compile(graphs[0], threads=2)
    mine = rlx.Graph("mine")
    mine.set_outputs([mine.input("x", (3,)) * 2.0])
    ones, w = {"x": np.ones((64, 64), np.float32)}, np.zeros((64, 64), np.float32)
    shared.set_param("w", w)
    wanted, stop = shared.run(ones), threading.Event()

    def forever() -> None:
        while not stop.is_set():
            for g in graphs:
                rlx.compile(g, threads=2)
                shared.set_param("w", w)
                shared.run(ones)
                if stop.is_set():
                    break

    def work() -> bool:
        doubled = rlx.compile(mine, threads=2).run({"x": np.ones(3, np.float32)})[0]
        return same_bits(shared.run(ones), wanted) and doubled.tolist() == [2.0] * 3

    busy = [threading.Thread(target=forever) for _ in range(2)]
    for thread in busy:
        thread.start()
    try:
        assert [in_child(work) for _ in range(15)] == [0] * 15
    finally:
        stop.set()
        for thread in busy:
            thread.join()


def _send_result(f: rlx.CompiledGraph, inputs: dict[str, Any], queue: Any) -> None:
    queue.put(f.run(inputs)[0].tobytes())


def test_multiprocessing_by_fork() -> None:
    f = compiled(bert_graph(TINY_BERT), weights(TINY_BERT), threads=2)
    inputs = bert_inputs(TINY_BERT, 2, 33)
    wanted = f.run(inputs)[0].tobytes()
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    children = [context.Process(target=_send_result, args=(f, inputs, queue)) for _ in range(3)]
    for child in children:
        child.start()
    assert [queue.get(timeout=LONGEST_S) for _ in children] == [wanted] * 3
    for child in children:
        child.join(LONGEST_S)
    assert f.run(inputs)[0].tobytes() == wanted

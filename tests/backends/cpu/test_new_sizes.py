"""New batch, sequence and past lengths: nothing is compiled, planning anew takes no time, and results stay right."""

from __future__ import annotations

import gc
import random
import statistics
import time
from typing import Any

import numpy as np
import pytest
from layers import (
    TINY_BERT,
    TINY_LLAMA,
    Bert,
    Llama,
    bert_graph,
    bert_inputs,
    bert_numpy,
    compiled,
    llama_graph,
    llama_inputs,
    llama_numpy,
    relative,
    weights,
)

import rlx
from rlx.backends.base import kernels_compiled
from rlx.backends.cpu.executable import MAX_SIZE_PLANS
from rlx.host_memory import address
from rlx.runtime.compiled import KNOWN_SHAPES, CompiledGraph

Array = np.ndarray[Any, Any]
TRIPLES = 50
LENGTHS = (0, 1, 2, 3, 5, 7, 13, 16, 31, 61, 64, 65, 127, 4097)
LONG = [(1, 4097, 0), (1, 1, 4097), (4097, 1, 1), (1, 4097, 1), (0, 4097, 4097), (4097, 0, 0), (1, 0, 4097)]
WORK = 18_000_000  # pairs of a query and a key that NumPy works off in a fraction of a second
PLAN_SECONDS = 2e-3
SLACK = 5


def triples() -> list[tuple[int, int, int]]:
    """Different (batch, seq, past): the extreme ones, then random ones of a size that the oracle can follow."""
    rng, sizes = random.Random(0), dict.fromkeys([(0, 0, 0), *LONG])
    while len(sizes) < TRIPLES:
        batch, seq, past = (rng.choice(LENGTHS) for _ in range(3))
        if batch * max(seq, 8) * (seq + past) <= WORK // 20:
            sizes[batch, seq, past] = None
    return list(sizes)


def cpu(f: rlx.CompiledGraph) -> CompiledGraph:
    return f


def test_fifty_sizes_compile_nothing_and_are_right() -> None:
    params, encoder_params = weights(TINY_LLAMA), weights(TINY_BERT)
    decoder = compiled(llama_graph(TINY_LLAMA, past=True), params)
    encoder = compiled(bert_graph(TINY_BERT), encoder_params)
    before = kernels_compiled()
    for batch, seq, past in triples():
        inputs = llama_inputs(TINY_LLAMA, batch, seq, past)
        for have, want in zip(decoder.run(inputs), llama_numpy(TINY_LLAMA, params, **inputs), strict=True):
            assert relative(have, want) <= 1e-5, (batch, seq, past)
        if batch * seq * seq > WORK // 20:
            continue
        inputs = bert_inputs(TINY_BERT, batch, seq)
        want = bert_numpy(TINY_BERT, encoder_params, **inputs)[0]
        assert relative(encoder.run(inputs)[0], want) <= 1e-5, (batch, seq)
        assert kernels_compiled() == before, (batch, seq, past)
    assert kernels_compiled() == before


@pytest.mark.parametrize(
    "sizes",
    [Bert(24, 2, 40, layers=6), Llama(24, 2, 1, 8, 40, layers=2), Llama(24, 2, 1, 8, 40, layers=30)],
    ids=["bert, 6 layers", "llama, 2 layers", "llama, 30 layers"],
)
def test_planning_for_a_new_size_is_quick(sizes: Bert | Llama, capsys: pytest.CaptureFixture[str]) -> None:
    graph = bert_graph(sizes) if isinstance(sizes, Bert) else llama_graph(sizes, past=True)
    executable = cpu(compiled(graph, weights(sizes))).executable
    taken = []
    gc.disable()  # a collection takes as long as all tests before have left objects
    try:
        for batch, seq, past in triples():
            key = {"batch": batch, "seq": seq, "past": past}
            begin = time.thread_time()  # other programs on this machine do not count
            executable.size_plan(tuple(key[s] for s in executable.layout.symbols))
            taken.append(time.thread_time() - begin)
    finally:
        gc.enable()
    with capsys.disabled():
        most, typical, count = max(taken) * 1e3, statistics.median(taken) * 1e3, len(executable.program.launches)
        print(f"\n  {count} launches: planned in {typical:.2f} ms, at most {most:.2f} ms ", end="")
    assert max(taken) < PLAN_SECONDS * SLACK


def test_a_new_size_asks_no_weight_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sentence runs in less than the time that looking up all weights takes; other weights are looked up once."""
    params, others = weights(TINY_BERT), weights(TINY_BERT, seed=1)
    encoder = compiled(bert_graph(TINY_BERT), params)
    asked: list[int] = []

    def counting(array: Array) -> int:
        asked.append(address(array))
        return asked[-1]

    monkeypatch.setattr("rlx.backends.cpu.executable.address", counting)
    for bound in (params, others):
        encoder.set_params(bound)
        counts = []
        for seq in (5, 9, 5):
            asked.clear()
            inputs = bert_inputs(TINY_BERT, 2, seq)
            assert relative(encoder.run(inputs)[0], bert_numpy(TINY_BERT, bound, **inputs)[0]) <= 1e-5
            held = {address(array) for array in cpu(encoder).executable.weights.values()}
            counts.append(len(held.intersection(asked)))
        assert counts == [len(held), 0, 0]


def test_a_size_class_shares_its_arena_plan() -> None:
    executable = cpu(compiled(bert_graph(TINY_BERT), weights(TINY_BERT))).executable
    order = executable.program.symbols
    plans = [executable.plan_memory(tuple({"batch": 2, "seq": seq}[s] for s in order)) for seq in (17, 30, 32)]
    assert plans[0] is plans[1] is plans[2]


def test_more_sizes_than_are_remembered_stay_right() -> None:
    g = rlx.Graph("double")
    g.set_outputs([g.input("x", ("n",)) * 2.0])
    f = rlx.compile(g)
    for n in [*range(600), 3, 5, 599]:
        x = np.arange(n, dtype=np.float32)
        assert np.array_equal(f.run({"x": x})[0], x * 2), n
    assert len(f._known) <= KNOWN_SHAPES and len(cpu(f).executable._size_plans) <= MAX_SIZE_PLANS


def test_inputs_of_one_shape_share_its_record() -> None:
    """A decoder has a pool of keys and one of values per layer, and a server remembers hundreds of calls."""
    g = rlx.Graph("sum")
    g.set_outputs([sum((g.input(f"x{i}", ("n", "m")) for i in range(1, 8)), g.input("x0", ("n", "m")))])
    f = rlx.compile(g)
    f.run({f"x{i}": np.ones((2, 3), np.float32) for i in range(8)})
    (shapes,) = f._known
    assert len(shapes) == 8 and len(set(map(id, shapes))) == 1

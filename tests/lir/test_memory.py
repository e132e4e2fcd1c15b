"""The arena planner: no two live buffers share memory, and little is wasted."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from graphs import examples
from hypothesis import given
from hypothesis import strategies as st
from layers import MINILM, SMOLLM, bert_graph, llama_graph
from targets import AVX512

from rlx.lir.memory import ALIGNMENT, Lifetime, Plan, lifetimes, liveness_bound, plan
from rlx.lir.program import ARENA, Program
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import optimise
from rlx.types import evaluate

lives_and_sizes = st.lists(
    st.tuples(st.integers(0, 12), st.integers(0, 6), st.sampled_from([0, 1, 63, 64, 65, 1000]) | st.integers(0, 9999)),
    max_size=24,
)


def check(lives: list[Lifetime], planned: Plan) -> None:
    """Everything a plan promises."""
    for x, y in itertools.combinations(lives, 2):
        if x.first <= y.last and y.first <= x.last:
            a, b = planned.offsets[x.name], planned.offsets[y.name]
            assert (
                a + planned.sizes[x.name] <= b
                or b + planned.sizes[y.name] <= a
                or 0 in (planned.sizes[x.name], planned.sizes[y.name])
            )
    ends = [planned.offsets[x.name] + planned.sizes[x.name] for x in lives]
    assert max(ends, default=0) <= planned.size
    assert planned.bound <= planned.size <= sum(planned.sizes.values())
    assert all(o % ALIGNMENT == 0 for o in planned.offsets.values())


@given(lives_and_sizes)
@examples(300)
def test_live_buffers_never_overlap(drawn: list[tuple[int, int, int]]) -> None:
    lives = [Lifetime(f"b{i}", first, first + length) for i, (first, length, _) in enumerate(drawn)]
    sizes = {f"b{i}": size for i, (_, _, size) in enumerate(drawn)}
    planned = plan(lives, sizes)
    check(lives, planned)
    assert all(sizes[n] <= planned.sizes[n] < sizes[n] + ALIGNMENT for n in sizes)
    assert planned.bound == max(
        (sum(planned.sizes[x.name] for x in lives if x.first <= p <= x.last) for p in range(20)), default=0
    )


def test_a_chain_needs_two_buffers() -> None:
    lives = [Lifetime(f"b{i}", i, i + 1) for i in range(10)]
    planned = plan(lives, dict.fromkeys((x.name for x in lives), 128))
    assert planned.size == planned.bound == 256


def test_freed_neighbours_make_room_for_something_large() -> None:
    lives = [Lifetime("a", 0, 0), Lifetime("b", 0, 0), Lifetime("c", 1, 1)]
    planned = plan(lives, {"a": 64, "b": 64, "c": 128})
    assert planned.size == planned.bound == 128


def test_nothing_needs_nothing() -> None:
    assert plan([], {}) == Plan({}, 0, 0, {})
    assert liveness_bound([], {}) == 0


# -- programs ---------------------------------------------------------------------------------------------------------
BERT = [{"batch": 1, "seq": 8}, {"batch": 8, "seq": 128}, {"batch": 32, "seq": 512}]
PREFILL = [{"batch": 1, "seq": 16}, {"batch": 1, "seq": 512}, {"batch": 4, "seq": 128}]
DECODE = [{"batch": 1, "seq": 1, "past": 7}, {"batch": 1, "seq": 1, "past": 1000}, {"batch": 8, "seq": 1, "past": 300}]


def program(graph: object) -> Program:
    return schedule(optimise(graph, AVX512).main, AVX512)  # type: ignore[arg-type]


PROGRAMS = {
    "a BERT layer": (program(bert_graph(MINILM)), BERT),
    "6 BERT layers": (program(bert_graph(replace(MINILM, layers=6))), BERT),
    "a Llama layer": (program(llama_graph(SMOLLM)), PREFILL),
    "a Llama layer with a past": (program(llama_graph(SMOLLM, past=True)), DECODE),
    "30 Llama layers with a past": (program(llama_graph(replace(SMOLLM, layers=30), past=True)), DECODE),
}


@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("name", PROGRAMS)
def test_plans_of_layers_are_close_to_the_bound(name: str, which: int) -> None:
    program, bindings = PROGRAMS[name]
    lives = lifetimes(program)
    done = plan(lives, {x.name: evaluate(program.buffers[x.name].type.bytes, bindings[which]) for x in lives})
    check(lives, done)
    assert done.size <= 1.15 * done.bound


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_arena_does_not_grow_with_the_past(name: str) -> None:
    program, _ = PROGRAMS[name]
    arena = [b for b in program.buffers.values() if b.kind == ARENA]
    assert arena and not any("past" in str(b.type) for b in arena)


@pytest.mark.parametrize("name", PROGRAMS)
def test_lifetimes_span_every_use_in_barrier_phases(name: str) -> None:
    program, _ = PROGRAMS[name]
    phases = list(itertools.accumulate((int(x.barrier) for x in program.launches), initial=0))
    for life in lifetimes(program):
        used = [phases[i] for i, x in enumerate(program.launches) for v in x.views() if v.buffer == life.name]
        assert (life.first, life.last) == (min(used), max(used))

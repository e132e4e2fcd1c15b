"""Compile time of large graphs, and of plans for new sizes. Limits have slack: machines are noisy."""

from __future__ import annotations

import functools
import gc
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from layers import MINILM, SMOLLM, bert_graph, llama_graph
from targets import AVX512

from rlx import Graph
from rlx.lir.memory import lifetimes, plan
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import optimise
from rlx.types import compile_sizes

SLACK = 3


def quick(what: str, work: Callable[[], Any], limit: float, repeat: int = 3) -> Any:
    """What `work` gives, which takes no longer than the limit allows; one that was disturbed is tried again."""
    took = []
    while not took or (took[-1] >= limit * SLACK and len(took) < repeat):
        gc.collect()
        started = time.process_time()
        result = work()
        took.append(time.process_time() - started)
    print(f"{what}: {min(took) * 1e3:.1f} ms (limit {limit * 1e3:.0f} ms)")
    assert min(took) < limit * SLACK, f"{what} takes {min(took):.3f} s"
    return result


def build() -> Graph:
    """104 decoder layers of 29 nodes."""
    return llama_graph(replace(SMOLLM, layers=104))


def round_trip(graph: Graph) -> Graph:
    return Graph.parse(graph.text(full=True))


def test_a_graph_of_3000_nodes_is_built_optimised_printed_and_parsed_quickly() -> None:
    g = quick("build", build, 0.5)
    print(f"{len(g)} nodes")
    assert len(g) > 3000
    quick("fingerprint", g.fingerprint, 0.1)
    quick("verify", g.verify, 0.2)
    done = quick("optimise", lambda: optimise(g, AVX512), 1.5)
    for graph in (g, done.main):
        assert quick("print and parse", functools.partial(round_trip, graph), 1.0) == graph
    quick("schedule", lambda: schedule(done.main, AVX512), 0.5)


@pytest.mark.parametrize(
    ("name", "make", "sizes"),
    [
        ("6 BERT layers", lambda: bert_graph(replace(MINILM, layers=6)), {"batch": 8, "seq": 128}),
        ("30 Llama layers", lambda: llama_graph(replace(SMOLLM, layers=30)), {"batch": 4, "seq": 128}),
        (
            "30 Llama layers with a past",
            lambda: llama_graph(replace(SMOLLM, layers=30), past=True),
            {"batch": 4, "seq": 1, "past": 99},
        ),
    ],
)
def test_a_plan_for_new_sizes_takes_two_milliseconds(
    name: str, make: Callable[[], Graph], sizes: dict[str, int]
) -> None:
    program = schedule(optimise(make(), AVX512).main, AVX512)
    lives = lifetimes(program)
    evaluate = compile_sizes(program.symbols, [program.buffers[x.name].type.bytes for x in lives])

    def again() -> object:
        values = evaluate(*(sizes[s] for s in program.symbols))
        return plan(lives, dict(zip((x.name for x in lives), values, strict=True)))

    quick(f"plan of {name} ({len(lives)} buffers)", again, 0.002, repeat=9)

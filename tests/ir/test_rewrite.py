"""Copies of parts of a graph, and copies with other origins."""

from __future__ import annotations

import numpy as np

from rlx import Graph
from rlx.ir.evaluate import run
from rlx.ir.provenance import Origin
from rlx.ir.rewrite import live_copy, with_origins


def graph() -> Graph:
    """Two outputs of x and w; u, the state and half of the nodes are of no use to the first."""
    g = Graph("g")
    x, _, s = g.input("x", (3,)), g.input("u", (3,)), g.state("s", (3,))
    y = x.tanh()
    w = g.param("w", (3,))
    g.set_outputs([y * w, (y + s).exp()])
    return g


def ops(g: Graph) -> list[str]:
    return [n.attrs["name"] if n.op in ("input", "state", "param") else n.op for n in g.nodes]


def test_all_of_a_graph_is_the_graph_itself() -> None:
    g = graph()
    assert live_copy(g) is g and live_copy(g, keep=()) is not g


def test_what_outputs_do_not_need_is_left_out() -> None:
    g = graph()
    assert ops(live_copy(g, g.outputs[:1])) == ["x", "u", "s", "tanh", "w", "mul"]
    assert ops(live_copy(g, g.outputs[:1], keep=())) == ["x", "tanh", "w", "mul"]
    assert ops(live_copy(g, g.outputs[:1], keep=("input",))) == ["x", "u", "tanh", "w", "mul"]
    assert ops(live_copy(g, leaves_first=True)) == ["x", "u", "s", "w", "tanh", "mul", "add", "exp"]
    assert len(g) == 8, "the graph itself stays"


def test_a_cut_value_is_an_input_where_it_is_read() -> None:
    g = graph()
    y = g.nodes[3][0]
    part = live_copy(g, [g.outputs[1]], keep=(), cut={y: "y", g.outputs[0]: "unread"})
    assert ops(part) == ["s", "y", "add", "exp"]
    leaves = {"s": np.array([1.0, 2.0, 3.0], "f4"), "y": np.array([0.5, 0.25, 0.0], "f4")}
    np.testing.assert_allclose(run(part, leaves, {})[0], np.exp(leaves["s"] + leaves["y"]), rtol=1e-6)


def test_origins_are_replaced_in_a_copy() -> None:
    g = graph()
    before = [n.origin for n in g.nodes]
    copy = with_origins(g, [Origin("model.py", i) for i in range(len(g))])
    assert copy == g and [n.origin.line for n in copy.nodes] == list(range(8))
    assert [n.origin for n in g.nodes] == before

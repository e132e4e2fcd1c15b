"""The verifier: every way to break a graph is a VerifyError that shows the node and the lines around it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from rlx import Graph, Value
from rlx.errors import VerifyError
from rlx.ir.graph import Array, Node
from rlx.ir.passes import run_passes
from rlx.ir.value import bind_value
from rlx.types import tensor


def graph() -> Graph:
    g = Graph("g")
    x = g.input("x", (2, 3))
    y = x.tanh()
    return g.set_outputs([y + 1.0])


F32 = (tensor((2, 3)),)


def foreign() -> Value:
    return Graph("other").input("x", (2, 3))


def append(op: str, *operands: Callable[[Graph], Value | None], attrs: dict | None = None, types=F32):  # type: ignore[no-untyped-def, type-arg]
    def break_(g: Graph) -> None:
        g.append(op, tuple(o(g) for o in operands), attrs or {}, types)

    return break_


def result(of: Node, index: int) -> Value:
    """A value that the node may not have."""
    value = Value(index)
    bind_value(value, of)
    return value


def node(i: int) -> Callable[[Graph], Value]:
    return lambda g: g.nodes[i][0]


def replace(position: int, **changes: object) -> Callable[[Graph], None]:
    def break_(g: Graph) -> None:
        old = g.nodes[position]
        parts = {k: getattr(old, k) for k in ("id", "op", "operands", "attrs", "types", "origin", "graph", "results")}
        g.nodes[position] = Node(**(parts | changes))

    return break_


def outputs(make: Callable[[Graph], Value]) -> Callable[[Graph], None]:
    def break_(g: Graph) -> None:
        g.outputs = (make(g),)

    return break_


BROKEN: dict[str, tuple[Callable[[Graph], None], str]] = {
    "wrong shape": (append("tanh", node(0), types=(tensor((3, 2)),)), r"f32\[3, 2\], its rule gives f32\[2, 3\]"),
    "wrong dtype": (append("tanh", node(0), types=(tensor((2, 3), "f64"),)), "its rule gives f32"),
    "two types": (append("tanh", node(0), types=F32 * 2), "its rule gives f32"),
    "no type": (append("tanh", node(0), types=()), "its rule gives f32"),
    "cannot be typed": (append("matmul", node(0), node(0)), "cannot be typed: matmul: inner sizes differ, 3 and 2"),
    "too few operands": (append("add", node(0)), "cannot be typed: add"),
    "unknown attribute": (append("tanh", node(0), attrs={"axis": 1}), "cannot be typed: tanh"),
    "nonsense attribute": (append("softmax", node(0), attrs={"axis": object()}), "cannot be typed: softmax"),
    "missing operand": (append("tanh", lambda g: None), "cannot be typed: tanh"),
    "unknown op": (append("tanhh", node(0)), "uses an op that is not registered"),
    "wrong level": (append("linear", node(0), node(0), attrs={"activation": None}), "is an HIR op in an MIR graph"),
    "foreign operand": (append("tanh", lambda g: foreign()), "which is not defined before it"),
    "unknown result": (append("tanh", lambda g: result(g.nodes[1], 1)), "which is not defined before it"),
    "reads itself": (replace(1, operands=(graph().nodes[1][0],)), "which is not defined before it"),
    "operand after": (lambda g: replace(1, operands=(g.nodes[2][0],))(g), "which is not defined before it"),
    "wrong number": (replace(1, id=7), "has number 7 at position 1"),
    "another graph's node": (replace(1, graph=Graph("other")), "belongs to another graph"),
    "name twice": (append("param", attrs={"name": "x"}), "has the name 'x', which is taken"),
    "no name": (append("input", attrs={"name": ""}), "has the name '', which is taken or no name"),
    "leaf with operands": (append("input", node(0), attrs={"name": "y"}), "is a leaf and takes no operands"),
    "constant of another shape": (append("const", attrs={"value": Array(np.zeros(3, "f4"))}), "are something else"),
    "constant of another dtype": (append("const", attrs={"value": Array(np.zeros((2, 3)))}), "data are something else"),
    "constant without data": (append("const", attrs={"value": 3}), "data are something else"),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_node_is_shown_with_its_neighbours(name: str) -> None:
    break_, problem = BROKEN[name]
    g = graph().verify()
    break_(g)
    with pytest.raises(VerifyError, match=problem) as caught:
        g.verify()
    notes = "\n".join(caught.value.notes)
    assert notes.count("\n  > %") == 1, "one line is marked"
    assert 'input(name="x") : f32[2, 3]' in notes, "lines around it are there"
    assert "made test_verify.py:" in notes


@pytest.mark.parametrize(
    "make",
    [
        lambda g: foreign(),
        lambda g: result(g.nodes[0], 1),
        lambda g: result(g.nodes[0], -1),
        lambda g: graph().outputs[0],
    ],
)
def test_a_wrong_output_is_an_error(make: Callable[[Graph], Value]) -> None:
    g = graph()
    outputs(make)(g)
    with pytest.raises(VerifyError, match="is not one of its values"):
        g.verify()


def test_a_level_is_hir_or_mir() -> None:
    g = graph()
    g.level = "lir"
    with pytest.raises(VerifyError, match="level 'lir'"):
        g.verify()
    g.level = "hir"
    g.verify()


def test_ten_lines_are_shown_and_bodies_stay_on_one() -> None:
    g = Graph("g")
    x = g.input("x", (2,))
    body = Graph("body")
    body.set_outputs([body.input("x0", (2,)).tanh()])
    for _ in range(20):
        x = g.apply("region", x, body=body)
    replace(10, types=(tensor((3,)),))(g)
    with pytest.raises(VerifyError, match="%10 region: has type") as caught:
        g.set_outputs([]).verify()
    lines = caught.value.notes[1:]
    assert len(lines) == 10 and lines[5].startswith("  > %10 = region(%9, body=graph @body mir { %0 = input(")
    assert all("\n" not in line for line in lines)


def test_the_runner_says_which_pass_broke_the_graph() -> None:
    def breaks(g: Graph) -> Graph:
        g.append("tanh", (g.nodes[0][0],), {}, (tensor((9,)),))
        return g

    with pytest.raises(VerifyError) as caught:
        run_passes(graph(), (breaks,))
    assert "  after pass: breaks" in caught.value.notes

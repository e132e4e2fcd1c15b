"""Python's operators: one table for graph values, traced arrays and the values that flow through a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np
import pytest

import rlx
from rlx import Graph
from rlx.errors import GraphError
from rlx.flow.state import FlowValue
from rlx.functional.tracers import Traced
from rlx.ir.graph import Node, Value
from rlx.ir.operators import OPERATORS, Operators
from rlx.types import tensor

TRUTH = ("__and__", "__rand__", "__or__", "__ror__", "__invert__")
UNARY = ("__neg__", "__abs__", "__invert__")
INTEGERS = ("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__")


def kind_of(method: str) -> str:
    return "bool" if method in TRUTH else "i32" if method in INTEGERS else "f32"


def by_hand(wrap: Callable[[Value], Operators]) -> Callable[[str], Node]:
    def build(method: str) -> Node:
        g = Graph("g")
        kind = kind_of(method)
        x, y = g.input("x", (3, 3), kind), g.input("y", (3, 3), kind)
        operands = [] if method in UNARY else [wrap(y)]
        getattr(wrap(x), method)(*operands)
        return g.nodes[-1]

    return build


def traced(method: str) -> Node:
    x = np.ones((3, 3), rlx.dtypes.dtype(kind_of(method)).numpy)
    if method in UNARY:
        return rlx.trace(lambda x: getattr(x, method)())(x).nodes[-1]
    return rlx.trace(lambda x, y: getattr(x, method)(y))(x, x).nodes[-1]


WAYS = {"value": by_hand(lambda v: v), "flow": by_hand(FlowValue.of), "traced": traced}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("method", OPERATORS)
def test_an_operator_is_the_op_of_the_table(method: str, way: str) -> None:
    op, swapped = OPERATORS[method]
    node = WAYS[way](method)
    wanted = ["x"] if method in UNARY else ["y", "x"] if swapped else ["x", "y"]
    assert node.op == op
    assert [o.node.attrs["name"] for o in node.operands if o is not None] == wanted


@pytest.mark.parametrize("kind", [Value, Traced, FlowValue])
def test_no_class_has_operators_of_its_own(kind: type) -> None:
    assert issubclass(kind, Operators) and not set(OPERATORS) & set(vars(kind))
    assert all(getattr(kind, method).__doc__ for method in OPERATORS)


def test_operators_compute_what_numpy_does() -> None:
    a = np.array([True, True, False])
    b = np.array([True, False, False])
    g = Graph("g")
    x, y = g.input("x", (3,), "bool"), g.input("y", (3,), "bool")
    both, one = rlx.compile(g.set_outputs([x & y, x | y])).run({"x": a, "y": b})
    np.testing.assert_array_equal(both, a & b)
    np.testing.assert_array_equal(one, a | b)


# -- nodes never change -----------------------------------------------------------------------------------------------
def test_a_node_is_frozen() -> None:
    node = Graph("g").input("x", (2,)).node
    with pytest.raises(dataclasses.FrozenInstanceError):
        node.op = "param"  # type: ignore[misc]


def test_a_leaf_that_nothing_reads_may_be_declared_again() -> None:
    g = Graph("g")
    w = g.param("w", (4, 32))
    before = w.node
    g.redeclare(w, tensor((8, 64), "f16"))
    assert str(w.type) == "f16[8, 64]" and g.params == [w.node] and g.named("w") is w
    assert str(before.types[0]) == "f32[4, 32]", "the node of before is as it was"
    y = w + 1.0
    g.set_outputs([y]).verify()
    with pytest.raises(GraphError, match=r"'w' is f16\[8, 64\] to %2 add, it cannot be f32\[2\]"):
        g.redeclare(w, tensor((2,)))


def test_a_scope_says_where_nodes_come_from() -> None:
    g = Graph("g")
    x = g.input("x", (2,))
    origin = x.node.origin.by("test")
    with g.scope(origin):
        y = x + 1.0
        with g.scope(x.node.origin):
            z = y * 2.0
    after = z + 1.0
    assert y.node.origin == z.node.origin == origin and after.node.origin != origin

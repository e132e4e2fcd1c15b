"""What type checkers know of ops: `mypy tests/test_typed_ops.py` checks this file, pytest runs it.

An ignore with a code is a mistake that a checker has to find: mypy complains about one that it does not need.
"""

from __future__ import annotations

from typing import assert_type

import pytest

import rlx
from rlx import Emit, FlowValue, Graph, GraphModule, ModelFlow, Value
from rlx.errors import GraphError
from rlx.ir.graph import Node


def test_methods_of_graphs_and_values_have_types() -> None:
    g = Graph("typed")
    x = g.input("x", (2, 4))
    assert_type(g.softmax(x, axis=-1), Value)
    assert_type(x.softmax(axis=-1).exp(), Value)
    assert_type(x.topk(k=2), tuple[Value, Value])
    assert_type(g.concatenate([x, x], axis=0), Value)
    assert_type(x.concatenate(x, axis=1), Value)
    assert_type(g.where(x > 0, x, 1.0), Value)
    assert_type(x.sum(axis=(0, 1), keepdims=True), Value)
    assert_type(x.linear(g.param("w", (4, 3)), activation=rlx.Activation.SILU), Value)
    assert_type(g.params, list[Node])


def test_mistakes_are_found_before_anything_runs() -> None:
    g = Graph("typed")
    x = g.input("x", (2, 4))
    with pytest.raises(AttributeError, match="softmax"):
        g.sofmax(x)  # type: ignore[attr-defined]
    with pytest.raises(AttributeError, match="softmax"):
        x.sofmax()  # type: ignore[attr-defined]
    with pytest.raises(GraphError, match="axes"):
        g.softmax(x, axes=-1)  # type: ignore[call-arg]
    with pytest.raises(GraphError, match="'k' is missing"):
        x.topk()  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="GraphModule has no attribute"):
        GraphModule.mir("m").sofmax(x)  # type: ignore[attr-defined]


def test_modules_have_blocks_ops_and_what_graphs_have() -> None:
    m = GraphModule.hir("typed")
    x = m.input("x", (1, 2, 12))
    assert_type(m.exp(x), Value)
    q, k, v = m.split_qkv(x, num_heads=2)
    assert_type(q, Value)
    assert [value.shape for value in (q, k, v)] == [(1, 2, 2, 2)] * 3
    m.set_outputs([q, k, v])
    assert_type(m.lower().outputs, tuple[Value, ...])
    assert_type(m.lower().nodes, list[Node])


def test_what_flows_has_ops_that_give_what_flows() -> None:
    def author(emit: Emit, value: FlowValue) -> FlowValue:
        assert_type(value.softmax(axis=-1), FlowValue)
        assert_type(value.topk(k=2), tuple[FlowValue, FlowValue])
        assert_type(emit.softmax(value, axis=-1), Value)
        assert_type(value.mT, FlowValue)
        assert_type(value * 2, FlowValue)
        return value.exp()

    flow = ModelFlow("typed").input("x", (2, 4))
    assert_type(flow.custom(author), ModelFlow)
    assert flow.custom(author).build().module.outputs[0].shape == (2, 4)

"""Differences of graphs: matched by what nodes compute, whatever their numbers and order."""

from __future__ import annotations

import pytest
from graphs import any_graphs, examples
from hypothesis import given

import rlx
from rlx.errors import GraphError
from rlx.hir.lower import lower
from rlx.ir.diff import GraphDiff, diff
from rlx.mir.cse import cse


def layer(columns: int = 8, *, act: str = "gelu", bias_first: bool = False) -> rlx.Graph:
    g = rlx.Graph("layer")
    if bias_first:
        b = g.param("b", (columns,))
    x, w = g.input("x", ("n", 4)), g.param("w", (4, columns))
    if not bias_first:
        b = g.param("b", (columns,))
    return g.set_outputs([getattr(x @ w + b, act)().softmax(axis=-1)])


def body(change: GraphDiff) -> list[str]:
    return change.text(context=None).splitlines()[1:]


# -- what matches ---------------------------------------------------------------------------------------------------
@given(any_graphs())
@examples(60)
def test_a_graph_does_not_differ_from_itself(g: rlx.Graph) -> None:
    change = diff(g, rlx.Graph.parse(g.text(full=True)))
    assert not change and not change.added and not change.removed and not change.changed and not change.ops
    assert all(line.startswith("  ") or not line for line in body(change))


@given(any_graphs(), any_graphs())
@examples(60)
def test_every_node_is_in_a_difference_once(a: rlx.Graph, b: rlx.Graph) -> None:
    change = diff(a, b)
    assert sorted(e.before.id for e in change.entries if e.before) == list(range(len(a)))
    assert [e.after.id for e in change.entries if e.after] == list(range(len(b)))  # in order
    assert len(a) - len(change.removed) + len(change.added) == len(b)
    assert sum(change.ops.values()) == len(b) - len(a)
    old = [line for mark, line in change.lines(None) if mark in " -"]
    new = [line for mark, line in change.lines(None) if mark in " +"]
    for lines, graph in ((old, a), (new, b)):
        heads = sum(line.startswith("%") for line in lines)
        assert heads == len(graph)


def test_order_and_names_of_graphs_do_not_matter() -> None:
    other = layer(bias_first=True)
    other.name = "another"
    assert layer() != other and not diff(layer(), other)


# -- what is said -----------------------------------------------------------------------------------------------------
def test_an_op_that_became_another_is_a_change() -> None:
    change = diff(layer(), layer(act="silu"))
    assert [(a.op, b.op) for a, b in change.changed] == [("gelu", "silu")]
    assert change.ops == {"gelu": -1, "silu": 1} and not change.added and not change.removed
    assert change.summary() == "7 -> 7 nodes: 1 changed (gelu -1, silu +1)"
    assert body(change)[4:] == [
        "  %4 = add(%3, %2) : f32[n, 8]",
        "- %5 = gelu(%4) : f32[n, 8]",
        "+ %5 = silu(%4) : f32[n, 8]",
        "  %6 = softmax(%5, axis=-1) : f32[n, 8]",
        "  return %6",
    ]


def test_a_change_of_a_leaf_changes_what_reads_it_and_nothing_else() -> None:
    change = diff(layer(8), layer(9))
    assert [a.op for a, _ in change.changed] == ["param", "param", "matmul", "add", "gelu", "softmax"]
    assert not change.added and not change.removed


def test_an_attribute_that_changed_is_seen() -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (2, 3)).sum(axis=0).exp()])
    h = rlx.Graph("h")
    h.set_outputs([h.input("x", (2, 3)).sum(axis=1).exp()])
    assert [a.op for a, _ in diff(g, h).changed] == ["sum", "exp"]


def test_nodes_that_came_and_went() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (3,))
    g.set_outputs([x.exp() + x.exp()])
    shared = cse(g)
    change = diff(g, shared)
    assert [n.op for n in change.removed] == ["exp"] and [b.op for _, b in change.changed] == ["add"]
    back = diff(shared, g)
    assert [n.op for n in back.added] == ["exp"]
    assert "+ %3 = exp(%0) : f32[3]" in body(back)  # a number after the last one before


def test_other_outputs_limits_and_levels_are_differences() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (rlx.dim("n", max=4),))
    y = x.exp()
    g.set_outputs([y])
    h = rlx.Graph("g")
    z = h.input("x", ("n",)).exp()
    h.set_outputs([z, z])
    assert body(diff(g, h))[-4:] == ["- graph mir max(n=4)", "+ graph mir", "- return %1", "+ return %1, %1"]
    assert diff(rlx.Graph("e"), rlx.Graph("e", level="hir"))


def test_of_a_changed_body_only_lines_that_differ_are_marked() -> None:
    def fused(act: str) -> rlx.Graph:
        inner = rlx.Graph("body")
        a = inner.input("x0", (3,))
        inner.set_outputs([getattr(a * 2.0, act)()])
        g = rlx.Graph("g")
        return g.set_outputs([g.apply("region", g.input("x", (3,)), body=inner)])

    marks = [mark for mark, _ in diff(fused("exp"), fused("tanh")).lines(None)]
    assert marks == [" ", " ", " ", " ", " ", "-", "+", " ", " ", " "]


def test_long_runs_without_change_are_folded() -> None:
    def chain(last: str) -> rlx.Graph:
        g = rlx.Graph("g")
        x = g.input("x", (3,))
        for _ in range(20):
            x = x.exp()
        return g.set_outputs([getattr(x, last)()])

    text = diff(chain("exp"), chain("tanh")).text(context=2).splitlines()
    assert text[1] == "  ... 19 nodes as before" and len(text) == 7
    assert str(diff(chain("exp"), chain("exp"))).splitlines() == [
        "22 -> 22 nodes: nothing changed", "  ... 22 nodes as before", "  return %21",
    ]  # fmt: skip


def test_only_graphs_can_be_compared() -> None:
    with pytest.raises(GraphError, match="diff: takes two graphs, found str"):
        rlx.diff(layer(), "layer")  # type: ignore[arg-type]


def test_modules_are_compared_as_their_graphs() -> None:
    a, b = layer(), layer(9)
    modules = rlx.GraphModule.from_mir(a), rlx.GraphModule.from_mir(b).plan()
    assert diff(*modules).text() == diff(a, b).text()
    with pytest.raises(GraphError, match="diff: takes modules of one level, found MIR and HIR"):
        diff(a, rlx.GraphModule.hir("h"))


def block(activation: str) -> rlx.GraphModule:
    module = rlx.GraphModule.hir("m")
    x, w, b = module.input("x", (2, 4)), module.param("w", (4, 3)), module.param("b", (3,))
    module.finish_hir(module.linear(x, w, b, activation=activation))
    return module


def test_modules_at_hir_are_compared_block_by_block() -> None:
    change = diff(block("gelu"), block("silu"))
    assert [(a.op, b.op) for a, b in change.changed] == [("linear", "linear")] and change.blocks == {"linear": 1}
    assert 'activation="gelu"' in change.text() and 'activation="silu"' in change.text()


def test_a_diff_of_mir_names_the_blocks_that_nodes_come_from() -> None:
    one, other = (lower(module.as_hir()) for module in (block("gelu"), block("silu")))
    change = diff(one, other)
    assert change.blocks == {"linear": 1}
    assert change.summary() == "6 -> 6 nodes: 1 changed (gelu -1, silu +1); in blocks: linear 1"

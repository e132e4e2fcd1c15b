"""vmap: a graph is built again with an axis more on each value that depends on a batched input.

Inside, that axis is always the first. `folded` serves ops that have a batch of their own, `by_scan` any op at all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import ELEMENTWISE, LEAF, NAMED
from rlx.transforms import rule_tables
from rlx.transforms.build import declare, flat
from rlx.transforms.rule_tables import Cotangents, Vmapped
from rlx.transforms.walk import copied, decomposition, leaves, stamped
from rlx.types import Size


def batch(
    into: Graph, body: Graph, given: Cotangents, batched: Sequence[bool], size: Size
) -> tuple[list[Value], list[bool]]:
    """`body` inside `into` with `given` for its leaves: its outputs, and which of them have the axis of the batch."""
    values: dict[Value, Value | None] = {}
    wide: set[Value] = set()
    for leaf, value, flag in zip(leaves(body), given, batched, strict=True):
        values[leaf[0]] = value
        if flag:
            wide.add(leaf[0])
    live = body.reachable(body.outputs)
    for node in body.nodes:
        if node.op in NAMED or node not in live:
            continue
        operands = [None if o is None else values[o] for o in node.operands]
        flags = [o in wide for o in node.operands]
        if LEAF in node.definition.traits or not any(flags):
            results: Sequence[Value] = copied(into, node, operands)
            made: Sequence[bool] = [False] * len(node.results)
        else:
            with stamped(into, node, "vmap"):
                results, made = step(Vmapped(node, into, tuple(operands), tuple(flags), size))
        values.update(zip(node.results, results, strict=True))
        wide.update(r for r, m in zip(node.results, made, strict=True) if m)
    outputs = [v for o in body.outputs if (v := values[o]) is not None]
    return outputs, [o in wide for o in body.outputs]


def step(vmapped: Vmapped) -> tuple[Sequence[Value], Sequence[bool]]:
    """The node on the whole batch: results, and which of them differ between its entries."""
    node = vmapped.node
    if node.op in rule_tables.batching:
        return rule_tables.batching[node.op](vmapped), [True] * len(node.results)
    if ELEMENTWISE in node.definition.traits:  # of users
        return rule_tables.batching["add"](vmapped), [True]
    body = decomposition(node)
    if body is None:
        return by_scan(vmapped), [True] * len(node.results)
    there = [i for i, o in enumerate(vmapped.operands) if o is not None]
    given, flags = ([a[i] for i in there] for a in (vmapped.operands, vmapped.batched))
    return batch(vmapped.graph, body, given, flags, vmapped.size)  # type: ignore[arg-type]


def widened(value: Value, batched: bool, size: Size) -> Value:
    """The value with the axis of the batch; repeated along it where it has none."""
    return value if batched else value.graph.one("expand", value, shape=(size, *value.shape))


def batched_graph(body: Graph, batched: Sequence[bool], size: Size, out: Sequence[bool]) -> Graph:
    """The body on a batch: inputs that are `batched` have the axis in front, and so have outputs that are in `out`."""
    graph = Graph(body.name)
    graph.limits = dict(body.limits)
    given = []
    for leaf, flag in zip(leaves(body), batched, strict=True):
        type_ = leaf.types[0]
        shape = (size, *type_.shape) if flag else type_.shape
        given.append(declare(graph, leaf.attrs["name"], type_.with_shape(*shape)))
    outputs, flags = batch(graph, body, given, batched, size)
    for i, wanted in enumerate(out):
        if wanted:
            outputs[i] = widened(outputs[i], flags[i], size)
    return graph.set_outputs(outputs)


def depends(body: Graph, batched: Sequence[bool], size: Size) -> list[bool]:
    """Which outputs of a body differ between entries of the batch."""
    scratch = Graph("scratch")
    given = []
    for leaf, flag in zip(leaves(body), batched, strict=True):
        type_ = leaf.types[0]
        given.append(declare(scratch, "x", type_.with_shape(size, *type_.shape) if flag else type_))
    return batch(scratch, body, given, batched, size)[1]


# -- rules that serve many --------------------------------------------------------------------------------------------
def folded(vmapped: Vmapped, which: Iterable[int]) -> Sequence[Value]:
    """For an op whose operands `which` and whose results have a batch as their first axis: both batches as one."""
    operands = list(vmapped.operands)
    for i in which:
        if operands[i] is not None:
            operands[i] = flat(vmapped.full(i), 2)
    node: Node = vmapped.graph.build(vmapped.node.op, operands, dict(vmapped.attrs))
    return [r.reshape(vmapped.size, *t.shape) for r, t in zip(node.results, vmapped.node.types, strict=True)]


def by_scan(vmapped: Vmapped) -> Sequence[Value]:
    """For any op: entry after entry."""
    body = Graph(vmapped.node.op)
    constant = [i for i, o in enumerate(vmapped.operands) if o is not None and not vmapped.batched[i]]
    rows = [i for i, b in enumerate(vmapped.batched) if b]
    inner: dict[int, Value] = {}
    for i in (*constant, *rows):
        value = vmapped.operand(i)
        shape = value.shape[1:] if vmapped.batched[i] else value.shape
        inner[i] = declare(body, f"x{i}", value.type.with_shape(*shape))
    made = body.build(vmapped.node.op, [inner.get(i) for i in range(len(vmapped.operands))], dict(vmapped.attrs))
    body.set_outputs(made.results)
    shared, xs = ([vmapped.operand(i) for i in which] for which in (constant, rows))
    return vmapped.graph.scan_general([], body, vmapped.size, broadcasts=shared, xs=xs)[1]

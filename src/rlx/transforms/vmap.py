"""vmap: rebuilds a graph with one more axis on each value that depends on a batched input.

Inside, that axis is always the first. `fold_batch` serves ops that have a batch axis of their own, `by_scan` any op.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import ELEMENTWISE, LEAF, NAMED, checked_results
from rlx.transforms import rule_tables
from rlx.transforms.build import declare, flat
from rlx.transforms.rule_tables import Cotangents, Vmapped
from rlx.transforms.walk import copy_node, decomposition, leaves, rule_scope
from rlx.types import Size


def batch(
    into: Graph, body: Graph, leaf_values: Cotangents, batched: Sequence[bool], size: Size
) -> tuple[list[Value], list[bool]]:
    """Inline `body` into `into` with values for its leaves; returns its outputs, and which of them are batched."""
    values: dict[Value, Value | None] = {}
    wide: set[Value] = set()
    for leaf, value, flag in zip(leaves(body), leaf_values, batched, strict=True):
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
            results: Sequence[Value] = copy_node(into, node, operands)
            result_flags: Sequence[bool] = [False] * len(node.results)
        else:
            with rule_scope(into, node, "vmap"):
                results, result_flags = step(Vmapped(node, into, tuple(operands), tuple(flags), size))
        values.update(zip(node.results, results, strict=True))
        wide.update(r for r, m in zip(node.results, result_flags, strict=True) if m)
    outputs = [v for o in body.outputs if (v := values[o]) is not None]
    return outputs, [o in wide for o in body.outputs]


def step(vmapped: Vmapped) -> tuple[Sequence[Value], Sequence[bool]]:
    """Build the node for the full batch; returns its results, and which of them are batched."""
    node = vmapped.node
    if node.op in rule_tables.batching:
        results = rule_tables.batching[node.op](vmapped)
        return checked_results("vmap rule", node.op, results, len(node.results)), [True] * len(node.results)
    if ELEMENTWISE in node.definition.traits:  # custom ops of users
        return rule_tables.batching["add"](vmapped), [True]
    body = decomposition(node)
    if body is None:
        return by_scan(vmapped), [True] * len(node.results)
    present = [i for i, o in enumerate(vmapped.operands) if o is not None]
    operands, flags = ([a[i] for i in present] for a in (vmapped.operands, vmapped.batched))
    return batch(vmapped.graph, body, operands, flags, vmapped.size)  # type: ignore[arg-type]


def with_batch_axis(value: Value, batched: bool, size: Size) -> Value:
    """Return the value with the batch axis; repeated along it if it is not batched."""
    return value if batched else value.graph.one("expand", value, shape=(size, *value.shape))


def batched_graph(body: Graph, batched: Sequence[bool], size: Size, out: Sequence[bool]) -> Graph:
    """Return the body on a batch; inputs in `batched` and outputs in `out` (flags) have the batch axis first."""
    graph = Graph(body.name)
    graph.limits = dict(body.limits)
    inputs = []
    for leaf, flag in zip(leaves(body), batched, strict=True):
        type_ = leaf.types[0]
        shape = (size, *type_.shape) if flag else type_.shape
        inputs.append(declare(graph, leaf.attrs["name"], type_.with_shape(*shape)))
    outputs, flags = batch(graph, body, inputs, batched, size)
    for i, wanted in enumerate(out):
        if wanted:
            outputs[i] = with_batch_axis(outputs[i], flags[i], size)
    return graph.set_outputs(outputs)


def batched_outputs(body: Graph, batched: Sequence[bool], size: Size) -> list[bool]:
    """Return which outputs of a body differ between entries of the batch."""
    scratch = Graph("scratch")
    inputs = []
    for leaf, flag in zip(leaves(body), batched, strict=True):
        type_ = leaf.types[0]
        inputs.append(declare(scratch, "x", type_.with_shape(size, *type_.shape) if flag else type_))
    return batch(scratch, body, inputs, batched, size)[1]


# -- shared rules -----------------------------------------------------------------------------------------------------
def fold_batch(vmapped: Vmapped, which: Iterable[int]) -> Sequence[Value]:
    """Batch an op whose operands `which` and whose results have a batch as first axis, by merging both batch axes."""
    operands = list(vmapped.operands)
    for i in which:
        if operands[i] is not None:
            operands[i] = flat(vmapped.full(i), 2)
    node: Node = vmapped.graph.build(vmapped.node.op, operands, dict(vmapped.attrs))
    return [r.reshape(vmapped.size, *t.shape) for r, t in zip(node.results, vmapped.node.types, strict=True)]


def by_scan(vmapped: Vmapped) -> Sequence[Value]:
    """Batch any op by a scan over the entries."""
    body = Graph(vmapped.node.op)
    constant = [i for i, o in enumerate(vmapped.operands) if o is not None and not vmapped.batched[i]]
    rows = [i for i, b in enumerate(vmapped.batched) if b]
    inner: dict[int, Value] = {}
    for i in (*constant, *rows):
        value = vmapped.operand(i)
        shape = value.shape[1:] if vmapped.batched[i] else value.shape
        inner[i] = declare(body, f"x{i}", value.type.with_shape(*shape))
    new_node = body.build(vmapped.node.op, [inner.get(i) for i in range(len(vmapped.operands))], dict(vmapped.attrs))
    body.set_outputs(new_node.results)
    shared, xs = ([vmapped.operand(i) for i in which] for which in (constant, rows))
    return vmapped.graph.scan_general([], body, vmapped.size, broadcasts=shared, xs=xs)[1]

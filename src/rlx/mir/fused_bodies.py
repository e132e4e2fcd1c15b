"""Bodies of fused ops: small graphs of elementwise nodes extracted from a larger graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rlx.ir.graph import Graph, Node, Value


def extract(
    nodes: Sequence[Node], outputs: Sequence[Value], accumulators: Sequence[Value] = ()
) -> tuple[Graph, list[Value]]:
    """Return a body of `nodes` that computes `outputs`, and the values it reads besides the accumulators.

    Scalar constants move into the body; every other outside value becomes an input.
    """
    body = Graph("body")
    inside: dict[Value, Value] = {}
    for i, acc in enumerate(accumulators):
        inside[acc] = _accumulator(body, i, acc)
    taken = set(nodes)
    operands: list[Value] = []
    for value in _external(nodes, taken):
        if value in inside or _is_scalar_constant(value):
            continue
        inside[value] = body.input(f"x{len(operands)}", value.shape, value.dtype)
        operands.append(value)
    for node in nodes:
        for o in node.operands:
            if o is not None and o not in inside:
                inside[o] = body.append("const", (), o.node.attrs, o.node.types, o.node.origin)[0]
        copied = body.append(
            node.op, tuple(None if o is None else inside[o] for o in node.operands), node.attrs, node.types, node.origin
        )
        inside.update(zip(node.results, copied.results, strict=True))
    body.outputs = tuple(inside[o] for o in outputs)
    return body, operands


def _external(nodes: Iterable[Node], taken: set[Node]) -> Iterable[Value]:
    for node in nodes:
        for operand in node.operands:
            if operand is not None and operand.node not in taken:
                yield operand


def _is_scalar_constant(value: Value) -> bool:
    return value.node.op == "const" and value.type.elements == 1 and value.rank <= 1


def identity(acc: Value) -> Graph:
    """Return the body that passes the accumulator through."""
    body = Graph("body")
    return body.set_outputs([_accumulator(body, 0, acc)])


def _accumulator(body: Graph, i: int, acc: Value) -> Value:
    """Declare a matmul's accumulator as an input of a body, with the origin of the matmul."""
    with body.scope(acc.node.origin):
        return body.input(f"acc{i}", acc.shape, acc.dtype)


def is_identity(body: Graph) -> bool:
    """Whether a body only passes its first accumulator through."""
    return len(body.outputs) == 1 and body.outputs[0].node is body.nodes[0]


def merge_bodies(regions: Sequence[Node]) -> tuple[Graph, list[Value]]:
    """Merge the bodies of several regions into one; also returns the distinct values it reads."""
    if len(regions) == 1:
        return regions[0].attrs["body"], [o for o in regions[0].operands if o is not None]
    read = list(dict.fromkeys(o for region in regions for o in region.operands if o is not None))
    body, outputs = Graph("body"), []
    inputs = {value: body.input(f"x{i}", value.shape, value.dtype) for i, value in enumerate(read)}
    for region in regions:
        inner: Graph = region.attrs["body"]
        inside = {n[0]: inputs[o] for n, o in zip(inner.inputs, region.operands, strict=True) if o is not None}
        for node in inner.nodes:
            if node.op != "input":
                inside.update(zip(node.results, _copy(body, node, inside), strict=True))
        outputs += [inside[o] for o in inner.outputs]
    return body.set_outputs(outputs), read


def after_matmul(body: Graph, sums: int, matmul_body: Graph) -> Graph:
    """Turn a region's body into an epilogue: its input number `sums` becomes the output of `matmul_body`.

    The new inputs are those of `matmul_body`, then the region's other inputs.
    """
    joined = Graph("body")
    inside: dict[Value, Value] = {}
    for node in matmul_body.nodes:
        inside.update(zip(node.results, _copy(joined, node, inside), strict=True))
    read = len(matmul_body.inputs)
    rename = {n: i for i, n in enumerate(n for n in body.inputs if n is not body.inputs[sums])}
    offset = sum(1 for n in matmul_body.inputs if n.attrs["name"].startswith("x"))
    inside[body.inputs[sums][0]] = inside[matmul_body.outputs[0]]
    for node, i in rename.items():
        inside[node[0]] = joined.input(f"x{offset + i}", node.types[0].shape, node.types[0].dtype)
    assert len(joined.inputs) == read + len(rename)
    for node in body.nodes:
        if node.op != "input":
            inside.update(zip(node.results, _copy(joined, node, inside), strict=True))
    joined.outputs = tuple(inside[o] for o in body.outputs)
    return joined


def _copy(into: Graph, node: Node, inside: dict[Value, Value]) -> tuple[Value, ...]:
    operands = tuple(None if o is None else inside[o] for o in node.operands)
    return into.append(node.op, operands, node.attrs, node.types, node.origin).results

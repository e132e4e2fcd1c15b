"""Custom functions: differentiated by their own rules if they have any, else through their forward body.

Each rule implies the other: the transpose of a JVP is the VJP, and vice versa.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import inline
from rlx.ops.custom import named_inputs
from rlx.transforms.build import zeros
from rlx.transforms.jvp import push as push_graph
from rlx.transforms.rule_tables import Cotangents, Pull, Vmapped, batching, linearise, push
from rlx.transforms.vjp import linearise as linearise_graph
from rlx.transforms.vjp import transpose_linear
from rlx.transforms.vmap import batched_graph
from rlx.transforms.walk import copy_node, leaves

Stems = dict[str, Cotangents]  # values for the inputs of a derivative body other than operands, by name stem


def _input_values(body: Graph, operands: Cotangents, stems: Stems) -> list[Value | None]:
    """Return the values for the inputs of a derivative body, in its order."""
    primals, roles = named_inputs(body, *stems)
    values: dict[str, Value | None] = dict(zip(primals, operands, strict=True))
    values |= {name: stems[stem][i] for (stem, i), name in roles.items()}
    return [values[n.attrs["name"]] for n in leaves(body)]


def _filled(into: Graph, body: Graph, values: Cotangents) -> list[Value]:
    """Replace missing values by zeros."""
    return [zeros(into, n.types[0]) if v is None else v for n, v in zip(leaves(body), values, strict=True)]


def _linear_in(body: Graph, stem: str, stems: tuple[str, ...], count: Sequence[bool]) -> list[bool]:
    """Return which inputs of a derivative body belong to a stem, with a number that `count` flags."""
    _, roles = named_inputs(body, *stems)
    names = {name for (role, i), name in roles.items() if role == stem and count[i]}
    return [n.attrs["name"] in names for n in leaves(body)]


def _floats(grads: Cotangents, node: Node) -> list[Value | None]:
    return [g if o is not None and o.dtype.is_float else None for g, o in zip(grads, node.operands, strict=True)]


@linearise("custom_fn")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    vjp_body, jvp_body = node.attrs["vjp_body"], node.attrs["jvp_body"]
    if vjp_body is None and jvp_body is None:
        inner = linearise_graph(into, node.attrs["fwd_body"], operands, wanted)
        return inner.outputs, inner.pull
    results = copy_node(into, node, operands)

    def pull(cts: Cotangents) -> Cotangents:
        if vjp_body is not None:
            values = _input_values(vjp_body, operands, {"primal_output": results, "d_output": cts})
            return _floats(inline(into, vjp_body, _filled(into, vjp_body, values)), node)
        blank: Cotangents = [None] * len(operands)
        values = _input_values(jvp_body, operands, {"tangent": blank, "primal_output": results})
        which = _linear_in(jvp_body, "tangent", ("tangent", "primal_output"), wanted)
        cotangents = iter(transpose_linear(into, jvp_body, values, which, cts))
        numbered = _numbers(jvp_body, "tangent", ("tangent", "primal_output"), which)
        pulled = dict(zip(numbered, cotangents, strict=True))
        return [pulled.get(i) for i in range(len(operands))]

    return results, pull


def _numbers(body: Graph, stem: str, stems: tuple[str, ...], which: Sequence[bool]) -> list[int]:
    """Return the numbers of a stem's inputs that `which` flags, in the declaration order of the body."""
    _, roles = named_inputs(body, *stems)
    number = {name: i for (role, i), name in roles.items() if role == stem}
    return [number[n.attrs["name"]] for n, w in zip(leaves(body), which, strict=True) if w]


@push("custom_fn")
def _(into: Graph, node: Node, operands: Cotangents, tangents: Cotangents) -> tuple[Sequence[Value], Cotangents]:
    vjp_body, jvp_body = node.attrs["vjp_body"], node.attrs["jvp_body"]
    if vjp_body is None and jvp_body is None:
        return push_graph(into, node.attrs["fwd_body"], operands, tangents)
    results = copy_node(into, node, operands)
    if jvp_body is not None:
        values = _input_values(jvp_body, operands, {"tangent": tangents, "primal_output": results})
        tangents_out = inline(into, jvp_body, _filled(into, jvp_body, values))
        return results, [m if r.dtype.is_float else None for m, r in zip(tangents_out, results, strict=True)]
    blank: Cotangents = [None] * len(results)
    stems = ("primal_output", "d_output")
    values = _input_values(vjp_body, operands, {"primal_output": results, "d_output": blank})
    which = _linear_in(vjp_body, "d_output", stems, [r.dtype.is_float for r in results])
    numbers = _numbers(vjp_body, "d_output", stems, which)
    pushed = dict(zip(numbers, transpose_linear(into, vjp_body, values, which, tangents), strict=True))
    return results, [pushed.get(i) for i in range(len(results))]


@batching("custom_fn")
def _(vmapped: Vmapped) -> Sequence[Value]:
    def wide(body: Graph | None) -> Graph | None:
        if body is None:
            return None
        return batched_graph(body, [True] * len(leaves(body)), vmapped.size, [True] * len(body.outputs))

    attrs = {k: wide(v) for k, v in vmapped.attrs.items()}
    return vmapped.graph.build("custom_fn", [vmapped.full(i) for i in range(len(vmapped.operands))], attrs).results

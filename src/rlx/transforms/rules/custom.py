"""Custom functions: their own rules where they have them, their forward body where not.

One rule gives the other: the transpose of a JVP is the VJP, and the transpose of that the JVP again.
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
from rlx.transforms.vjp import transposed
from rlx.transforms.vmap import batched_graph
from rlx.transforms.walk import copied, leaves

Stems = dict[str, Cotangents]  # of the inputs of a derivative body that are no operands: what stands for each


def _ordered(body: Graph, operands: Cotangents, stems: Stems) -> list[Value | None]:
    """What stands for the inputs of a derivative body, in its order."""
    primals, roles = named_inputs(body, *stems)
    given: dict[str, Value | None] = dict(zip(primals, operands, strict=True))
    given |= {name: stems[stem][i] for (stem, i), name in roles.items()}
    return [given[n.attrs["name"]] for n in leaves(body)]


def _filled(into: Graph, body: Graph, given: Cotangents) -> list[Value]:
    """Zeros where nothing stands for an input."""
    return [zeros(into, n.types[0]) if v is None else v for n, v in zip(leaves(body), given, strict=True)]


def _linear_in(body: Graph, stem: str, stems: tuple[str, ...], count: Sequence[bool]) -> list[bool]:
    """Which inputs of a derivative body are those of a stem whose number `count` allows."""
    _, roles = named_inputs(body, *stems)
    names = {name for (found, i), name in roles.items() if found == stem and count[i]}
    return [n.attrs["name"] in names for n in leaves(body)]


def _floats(grads: Cotangents, node: Node) -> list[Value | None]:
    return [g if o is not None and o.dtype.is_float else None for g, o in zip(grads, node.operands, strict=True)]


@linearise("custom_fn")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    vjp_body, jvp_body = node.attrs["vjp_body"], node.attrs["jvp_body"]
    if vjp_body is None and jvp_body is None:
        inner = linearise_graph(into, node.attrs["fwd_body"], operands, wanted)
        return inner.outputs, inner.pull
    results = copied(into, node, operands)

    def pull(cts: Cotangents) -> Cotangents:
        if vjp_body is not None:
            given = _ordered(vjp_body, operands, {"primal_output": results, "d_output": cts})
            return _floats(inline(into, vjp_body, _filled(into, vjp_body, given)), node)
        blank: Cotangents = [None] * len(operands)
        given = _ordered(jvp_body, operands, {"tangent": blank, "primal_output": results})
        which = _linear_in(jvp_body, "tangent", ("tangent", "primal_output"), wanted)
        found = iter(transposed(into, jvp_body, given, which, cts))
        numbered = _numbers(jvp_body, "tangent", ("tangent", "primal_output"), which)
        pulled = dict(zip(numbered, found, strict=True))
        return [pulled.get(i) for i in range(len(operands))]

    return results, pull


def _numbers(body: Graph, stem: str, stems: tuple[str, ...], which: Sequence[bool]) -> list[int]:
    """The numbers of the inputs of a stem that are in `which`, in the order in which the body declares them."""
    _, roles = named_inputs(body, *stems)
    number = {name: i for (found, i), name in roles.items() if found == stem}
    return [number[n.attrs["name"]] for n, w in zip(leaves(body), which, strict=True) if w]


@push("custom_fn")
def _(into: Graph, node: Node, operands: Cotangents, tangents: Cotangents) -> tuple[Sequence[Value], Cotangents]:
    vjp_body, jvp_body = node.attrs["vjp_body"], node.attrs["jvp_body"]
    if vjp_body is None and jvp_body is None:
        return push_graph(into, node.attrs["fwd_body"], operands, tangents)
    results = copied(into, node, operands)
    if jvp_body is not None:
        given = _ordered(jvp_body, operands, {"tangent": tangents, "primal_output": results})
        made = inline(into, jvp_body, _filled(into, jvp_body, given))
        return results, [m if r.dtype.is_float else None for m, r in zip(made, results, strict=True)]
    blank: Cotangents = [None] * len(results)
    stems = ("primal_output", "d_output")
    given = _ordered(vjp_body, operands, {"primal_output": results, "d_output": blank})
    which = _linear_in(vjp_body, "d_output", stems, [r.dtype.is_float for r in results])
    pushed = dict(zip(_numbers(vjp_body, "d_output", stems, which), transposed(into, vjp_body, given, which, tangents),
                      strict=True))  # fmt: skip
    return results, [pushed.get(i) for i in range(len(results))]


@batching("custom_fn")
def _(vmapped: Vmapped) -> Sequence[Value]:
    def wide(body: Graph | None) -> Graph | None:
        if body is None:
            return None
        return batched_graph(body, [True] * len(leaves(body)), vmapped.size, [True] * len(body.outputs))

    attrs = {k: wide(v) for k, v in vmapped.attrs.items()}
    return vmapped.graph.build("custom_fn", [vmapped.full(i) for i in range(len(vmapped.operands))], attrs).results

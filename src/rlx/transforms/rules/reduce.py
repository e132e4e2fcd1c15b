"""Reductions and cumulative sums. Tied maxima share the gradient evenly."""

from __future__ import annotations

from collections.abc import Sequence

import rlx.ops.reduce as reductions
from rlx.ir.graph import Graph, Value
from rlx.transforms.build import (
    count,
    flat,
    flat_row_indices,
    flip,
    full,
    insert_axes,
    keep_axes,
    zeros,
    zeros_like,
)
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, vjp, zero_gradient
from rlx.transforms.rules.shape import linear
from rlx.types import product

zero_gradient("argmax", why="it returns indices")
linear("sum", "mean", "cumsum")


def axes_of(at: NodeCtx | Vmapped) -> tuple[int, ...]:
    """Return the axes of a reduction, sorted and non-negative, of the operand without its batch axis."""
    operand = at.node.operands[0]
    assert operand is not None
    return reductions.normal_axes(at.attrs["axis"], operand.rank, at.node.op)


@vjp("sum", "mean")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x, axes = at.operand(0), axes_of(at)
    if at.node.op == "mean":
        ct = ct / count(at.graph, product(x.shape[a] for a in axes), x.dtype)
    return [at.graph.one("expand", keep_axes(ct, x.type, axes), shape=x.shape)]


@vjp("max", "min")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x, axes = at.operand(0), axes_of(at)
    ct, top = (keep_axes(v, x.type, axes) for v in (ct, at.result))
    here = x.equal(top)
    many = at.graph.one("sum", here.astype(x.dtype), axis=axes, keepdims=True)
    return [at.graph.one("where", here, ct / many, zeros(at.graph, x.type.with_shape()))]


@vjp("prod")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    """Multiply the products of elements before and after each element: exact even if some are zero."""
    x, axes = at.operand(0), axes_of(at)
    others = [a for a in range(x.rank) if a not in axes]
    rows = at.graph.one("transpose", x, axes=(*axes, *others))
    rows = flat(rows, len(axes)) if axes else insert_axes(rows, 0, 1)  # [n, *others]
    length = rows.shape[0]
    step = Graph("products")
    so_far, factor = (step.input(n, rows.shape[1:], x.dtype) for n in ("so_far", "factor"))
    step.set_outputs([so_far * factor, so_far])
    start = full(at.graph, 1, rows.type.with_shape(*rows.shape[1:]))
    before, after = (
        at.graph.scan_general([start], step, length, xs=[rows], reverse=reverse)[1][0] for reverse in (False, True)
    )
    others_product = (before * after).reshape(*(x.shape[a] for a in axes), *(x.shape[a] for a in others))
    order = [*axes, *others]
    others_product = at.graph.one("transpose", others_product, axes=tuple(order.index(a) for a in range(x.rank)))
    return [others_product * keep_axes(ct, x.type, axes)]


@vjp("cumsum")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    axis = at.attrs["axis"] % ct.rank
    total = at.graph.one("cumsum", flip(ct, axis), axis=axis, exclusive=at.attrs["exclusive"])
    return [flip(total, axis)]


@vjp("topk")
def _(at: NodeCtx, ct: Value | None, _: Value | None) -> Cotangents:
    if ct is None:
        return [None]
    x, places = at.operand(0), at.results[1]
    rows, n = product(x.shape[:-1]), x.shape[-1]
    where = flat_row_indices(places.reshape(rows, places.shape[-1]), n)
    none = zeros_like(x).reshape(rows * n)
    return [at.graph.one("scatter_add", none, where, ct.reshape(where.shape)).reshape(x.shape)]


# -- vmap -------------------------------------------------------------------------------------------------------------
@batching("sum", "prod", "mean", "max", "min", "argmax")
def _(vmapped: Vmapped) -> Sequence[Value]:
    axes = tuple(a + 1 for a in axes_of(vmapped))
    axis = axes[0] if vmapped.node.op == "argmax" else axes
    return [vmapped.graph.one(vmapped.node.op, vmapped.operand(0), axis=axis, keepdims=vmapped.attrs["keepdims"])]


@batching("cumsum")
def along_one_axis(vmapped: Vmapped) -> Sequence[Value]:
    """Batch an op with one attribute `axis`: the batch is axis 0, so its own axis shifts by one."""
    x = vmapped.operand(0)
    attrs = dict(vmapped.attrs) | {"axis": vmapped.attrs["axis"] % (x.rank - 1) + 1}
    return [vmapped.graph.one(vmapped.node.op, x, **attrs)]


@batching("topk")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return vmapped.graph.build("topk", [vmapped.operand(0)], dict(vmapped.attrs)).results

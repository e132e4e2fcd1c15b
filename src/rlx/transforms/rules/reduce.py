"""Reductions, softmax, running sums. Equal largest elements share a gradient evenly."""

from __future__ import annotations

from collections.abc import Sequence

import rlx.ops.reduce as reductions
from rlx.ir.graph import Graph, Value
from rlx.transforms.build import (
    count,
    flat,
    flip,
    full,
    insert_axes,
    keep_axes,
    rows_of,
    zeros,
    zeros_like,
)
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, vjp, zero_gradient
from rlx.transforms.rules.shape import linear
from rlx.types import product

zero_gradient("argmax", why="it gives indices")
linear("sum", "mean", "cumsum")


def axes_of(at: NodeCtx | Vmapped) -> tuple[int, ...]:
    """The axes of a reduction, sorted and not negative, of the operand without a batch."""
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
    """The product of all others, as that of those before and those after: exact where some are zero."""
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
    found = (before * after).reshape(*(x.shape[a] for a in axes), *(x.shape[a] for a in others))
    order = [*axes, *others]
    found = at.graph.one("transpose", found, axes=tuple(order.index(a) for a in range(x.rank)))
    return [found * keep_axes(ct, x.type, axes)]


@vjp("softmax")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    y = at.result
    share = ct * y
    return [share - y * at.graph.one("sum", share, axis=at.attrs["axis"], keepdims=True)]


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
    where = rows_of(places.reshape(rows, places.shape[-1]), n)
    none = zeros_like(x).reshape(rows * n)
    return [at.graph.one("scatter_add", none, where, ct.reshape(where.shape)).reshape(x.shape)]


# -- vmap -------------------------------------------------------------------------------------------------------------
@batching("sum", "prod", "mean", "max", "min", "argmax")
def _(vmapped: Vmapped) -> Sequence[Value]:
    axes = tuple(a + 1 for a in axes_of(vmapped))
    axis = axes[0] if vmapped.node.op == "argmax" else axes
    return [vmapped.graph.one(vmapped.node.op, vmapped.operand(0), axis=axis, keepdims=vmapped.attrs["keepdims"])]


@batching("softmax", "cumsum")
def _(vmapped: Vmapped) -> Sequence[Value]:
    x = vmapped.operand(0)
    attrs = dict(vmapped.attrs) | {"axis": vmapped.attrs["axis"] % (x.rank - 1) + 1}
    return [vmapped.graph.one(vmapped.node.op, x, **attrs)]


@batching("topk")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return vmapped.graph.build("topk", [vmapped.operand(0)], dict(vmapped.attrs)).results

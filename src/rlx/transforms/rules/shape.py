"""Ops that rearrange elements: the cotangent is moved back, a batch axis moves along."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.dtypes import I32
from rlx.ir.graph import Value
from rlx.transforms.build import cast_to, count, iota, move_axis, slice_axis, sum_to, zeros
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, jvp, vjp
from rlx.types import Size


def linear(*names: str, **fixed: Any) -> None:
    """Register JVPs of ops that are linear in their first operand and have no other floats: the op itself."""

    def push(at: NodeCtx, tangent: Value, *_: Value | None) -> Cotangents:
        attrs = {k: v for k, v in at.attrs.items()} | fixed
        return [at.graph.one(at.node.op, tangent, *at.operands[1:], **attrs)]

    jvp(*names)(push)


linear("reshape", "transpose", "slice", "expand", "assume_equal")
linear("pad", value=0.0)


@vjp("reshape", "assume_equal")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x = at.operand(0)
    op = "reshape" if at.node.op == "reshape" else "assume_equal"
    return [at.graph.one(op, ct, shape=x.shape)]


@vjp("transpose")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    back = tuple(int(a) for a in np.argsort(at.attrs["axes"]))
    return [at.graph.one("transpose", ct, axes=back)]


@vjp("expand")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    return [sum_to(ct, at.operand(0).type)]


@vjp("pad")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    low, x = at.attrs["low"], at.operand(0)
    stop = tuple(a + d for a, d in zip(low, x.shape, strict=True))
    return [at.graph.one("slice", ct, start=low, stop=stop, step=(1,) * x.rank)]


@vjp("slice")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x, start = at.operand(0), list(at.attrs["start"])
    for axis, step in enumerate(at.attrs["step"]):
        if step > 1 and isinstance(ct.shape[axis], int):
            ct = spread(ct, axis, step)
        elif step > 1:
            ct = scattered(ct, axis, start[axis], step, x.shape[axis])
            start[axis] = 0
    rest = tuple(size - low - have for size, low, have in zip(x.shape, start, ct.shape, strict=True))
    return [at.graph.one("pad", ct, low=tuple(start), high=rest)]


def spread(value: Value, axis: int, step: int) -> Value:
    """Insert `step - 1` zeros between the elements of an axis of static size."""
    size = value.shape[axis]
    assert isinstance(size, int)
    room = value.reshape(*value.shape[: axis + 1], 1, *value.shape[axis + 1 :])
    high = tuple(step - 1 if a == axis + 1 else 0 for a in range(room.rank))
    wide = value.graph.one("pad", room, low=(0,) * room.rank, high=high)
    wide = wide.reshape(*value.shape[:axis], size * step, *value.shape[axis + 1 :])
    return slice_axis(wide, axis, 0, max((size - 1) * step + 1, 0))


def scattered(value: Value, axis: int, start: Size, step: int, size: Size) -> Value:
    """Place the elements of an axis at start, start + step, ... of an axis of `size` zeros."""
    g = value.graph
    rows = move_axis(value, axis, 0)
    first: Any = count(g, start, I32)
    at = iota(g, value.shape[axis]) * step + first
    none = zeros(g, rows.type.with_shape(size, *rows.shape[1:]))
    return move_axis(g.one("scatter_add", none, at, rows), 0, axis)


@vjp("concatenate")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    axis = at.attrs["axis"] % at.result.rank
    cotangents: list[Value | None] = []
    start: Size = 0
    for operand, wanted in zip(at.operands, at.wanted, strict=True):
        assert operand is not None
        stop = start + operand.shape[axis]
        cotangents.append(cast_to(slice_axis(ct, axis, start, stop), operand.dtype) if wanted else None)
        start = stop
    return cotangents


@jvp("concatenate")
def _(at: NodeCtx, *tangents: Value | None) -> Cotangents:
    filled = []
    for operand, tangent in zip(at.operands, tangents, strict=True):
        assert operand is not None
        missing = zeros(at.graph, operand.type.with_dtype(at.result.dtype))
        filled.append(missing if tangent is None else tangent)
    return [at.graph.one("concatenate", *filled, axis=at.attrs["axis"])]


# -- vmap -------------------------------------------------------------------------------------------------------------
@batching("reshape", "assume_equal", "expand")
def _(vmapped: Vmapped) -> Sequence[Value]:
    x, shape = vmapped.operand(0), vmapped.attrs["shape"]
    if vmapped.node.op == "expand":  # new axes come after the batch axis
        x = x.reshape(vmapped.size, *(1,) * (len(shape) - (x.rank - 1)), *x.shape[1:])
    return [vmapped.graph.one(vmapped.node.op, x, shape=(vmapped.size, *shape))]


@batching("transpose")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return [vmapped.graph.one("transpose", vmapped.operand(0), axes=(0, *(a + 1 for a in vmapped.attrs["axes"])))]


@batching("slice")
def _(vmapped: Vmapped) -> Sequence[Value]:
    start, stop, step = ((first, *vmapped.attrs[k]) for k, first in (("start", 0), ("stop", vmapped.size), ("step", 1)))
    return [vmapped.graph.one("slice", vmapped.operand(0), start=start, stop=stop, step=step)]


@batching("pad")
def _(vmapped: Vmapped) -> Sequence[Value]:
    low, high = ((0, *vmapped.attrs[k]) for k in ("low", "high"))
    return [vmapped.graph.one("pad", vmapped.operand(0), low=low, high=high, value=vmapped.attrs["value"])]


@batching("concatenate")
def _(vmapped: Vmapped) -> Sequence[Value]:
    rank = len(vmapped.node.types[0].shape)
    operands = [vmapped.full(i) for i in range(len(vmapped.operands))]
    return [vmapped.graph.one("concatenate", *operands, axis=vmapped.attrs["axis"] % rank + 1)]

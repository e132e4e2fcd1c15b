"""Convolution and pooling: by gathered windows and flipped kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.ir.graph import Value
from rlx.ops.conv import pair, span
from rlx.transforms.build import flip, iota, slice_axis, sum_present
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, jvp, parts, vjp
from rlx.transforms.rules.shape import scattered, spread
from rlx.transforms.vmap import by_scan, fold_batch
from rlx.types import Size

Pair = tuple[int, int]


def windows(x: Value, kernel: Pair, stride: Pair, padding: Pair, dilation: Pair, fill: float = 0.0) -> Value:
    """Gather the window of each output: [batch, channels, out_y, kernel_y, out_x, kernel_x]."""
    sides = (0, 0, *padding)
    x = x.graph.one("pad", x, low=sides, high=sides, value=fill) if any(padding) else x
    for i in (0, 1):
        axis = 2 + 2 * i
        size = (x.shape[axis] - span(kernel[i], dilation[i])) // stride[i] + 1
        first = iota(x.graph, size) * stride[i]
        taps: Any = np.arange(kernel[i], dtype=np.int32)[None] * dilation[i]
        at = first.reshape(size, 1) + taps.astype(np.int32)
        x = x.graph.one("gather", x, at, axis=axis)
    return x


def _settings(attrs: Any) -> tuple[Pair, Pair, Pair]:
    stride, padding, dilation = (pair("conv2d", k, attrs[k], 0) for k in ("stride", "padding", "dilation"))
    return stride, padding, dilation


@vjp("conv2d")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    bias = at.operands[2]
    return [
        _to_x(at, ct) if at.wanted[0] else None,
        _to_weight(at, ct) if at.wanted[1] else None,
        at.graph.one("sum", ct, axis=(0, 2, 3)) if bias is not None and at.wanted[2] else None,
    ]


def _to_x(at: NodeCtx, ct: Value) -> Value:
    """Convolve the cotangent, dilated by the stride, with the flipped kernels."""
    x, weight, groups = at.operand(0), at.operand(1), at.attrs["groups"]
    stride, padding, dilation = _settings(at.attrs)
    out, inside, *kernel = weight.shape
    assert isinstance(out, int) and isinstance(inside, int)
    outer, cut = [0, 0], [0, 0]
    for i in (0, 1):
        k = kernel[i]
        assert isinstance(k, int)
        room = x.shape[2 + i] + (2 * padding[i] - span(k, dilation[i]))
        ct = _insert_zeros(ct, 2 + i, stride[i], room + 1)
        reach = span(k, dilation[i]) - 1
        outer[i], cut[i] = max(reach - padding[i], 0), max(padding[i] - reach, 0)
    flipped = flip(flip(weight.reshape(groups, out // groups, inside, *kernel), 3), 4)
    flipped = at.graph.one("transpose", flipped, axes=(0, 2, 1, 3, 4)).reshape(groups * inside, out // groups, *kernel)
    y = at.graph.one("conv2d", ct, flipped, padding=tuple(outer), dilation=dilation, groups=groups)
    for i in (0, 1):
        y = slice_axis(y, 2 + i, cut[i], cut[i] + x.shape[2 + i])
    return y


def _insert_zeros(ct: Value, axis: int, stride: int, size: Size) -> Value:
    """Space elements by `stride` on an axis of `size`, with zeros in between."""
    have = ct.shape[axis]
    if stride == 1:
        return ct
    if not isinstance(have, int) or not isinstance(size, int):
        return scattered(ct, axis, 0, stride, size)
    ct = spread(ct, axis, stride)
    high = tuple(size - d if a == axis and isinstance(d, int) else 0 for a, d in enumerate(ct.shape))
    return ct.graph.one("pad", ct, low=(0,) * ct.rank, high=high)


def _to_weight(at: NodeCtx, ct: Value) -> Value:
    """Multiply the windows by the cotangent: one matrix product per group."""
    x, weight, groups = at.operand(0), at.operand(1), at.attrs["groups"]
    out, inside, *kernel = weight.shape
    assert isinstance(out, int) and isinstance(kernel[0], int) and isinstance(kernel[1], int)
    patches = windows(x, (kernel[0], kernel[1]), *_settings(at.attrs))
    batch, _, high, _, wide, _ = patches.shape
    patches = patches.reshape(batch, groups, inside, high, kernel[0], wide, kernel[1])
    patches = at.graph.one("transpose", patches, axes=(1, 0, 3, 5, 2, 4, 6))
    patches = patches.reshape(groups, batch * high * wide, inside * kernel[0] * kernel[1])
    rows = at.graph.one("transpose", ct.reshape(batch, groups, out // groups, high, wide), axes=(1, 2, 0, 3, 4))
    rows = rows.reshape(groups, out // groups, batch * high * wide)
    return (rows @ patches).reshape(weight.shape)


@jvp("conv2d")
def _(at: NodeCtx, x: Value | None, weight: Value | None, bias: Value | None) -> Cotangents:
    terms = [
        None if x is None else at.graph.one("conv2d", x, at.operand(1), **at.attrs),
        None if weight is None else at.graph.one("conv2d", at.operand(0), weight, **at.attrs),
        None if bias is None else at.graph.one("expand", bias.reshape(-1, 1, 1), shape=at.result.shape),
    ]
    return [sum_present(terms)]


@parts("pool2d")
def _(x: Value, *, kind: str, kernel: Any, stride: Any, padding: Any) -> Value:
    size = pair("pool2d", "kernel", kernel, 1)
    step = size if stride is None else pair("pool2d", "stride", stride, 1)
    sides = pair("pool2d", "padding", padding, 0)
    patches = windows(x, size, step, sides, (1, 1), fill=-np.inf if kind == "max" else 0.0)
    return x.graph.one(kind, patches, axis=(3, 5))


# -- vmap -------------------------------------------------------------------------------------------------------------
@batching("conv2d")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return by_scan(vmapped) if vmapped.batched[1] or vmapped.batched[2] else fold_batch(vmapped, (0,))


@batching("pool2d")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return fold_batch(vmapped, (0,))

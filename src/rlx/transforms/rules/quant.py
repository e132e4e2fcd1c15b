"""Quantisation: packed weights are frozen; scales and zero points of integers have gradients."""

from __future__ import annotations

from rlx.ir.graph import Value
from rlx.quant_schemes import QuantScheme
from rlx.transforms.build import cast_to, full, sum_to
from rlx.transforms.rule_tables import Cotangents, NodeCtx, batching, vjp, zero_gradient
from rlx.transforms.vmap import by_scan
from rlx.types import TensorType

zero_gradient("quantise", why="it returns integers")
batching("dequantise", "quantise")(by_scan)


def _broadcast_scales(scales: Value, at: NodeCtx) -> Value:
    """Broadcast scales to the quantised values."""
    shape, axis = at.result.shape, at.attrs["axis"]
    scheme = None if at.attrs["scheme"] is None else QuantScheme(at.attrs["scheme"])
    if scheme is not None and scheme.block > 1:
        *leading, blocks, n = scales.shape
        room = scales.reshape(*leading, blocks, 1, n)
        wide = at.graph.one("expand", room, shape=(*leading, blocks, scheme.block, n))
        return wide.reshape(*leading, blocks * scheme.block, n)
    if axis is None:
        return scales
    return scales.reshape(-1, *(1,) * (len(shape) - 1 - axis % len(shape)))


def _sum_per_scale(numbers: Value, like: TensorType, at: NodeCtx) -> Value:
    """Transpose of `_broadcast_scales`: sum over values that share a scale."""
    axis, scheme = at.attrs["axis"], at.attrs["scheme"]
    block = 1 if scheme is None else QuantScheme(scheme).block
    if block > 1:
        *leading, blocks, n = like.shape
        total = at.graph.one("sum", numbers.reshape(*leading, blocks, block, n), axis=-2)
        return cast_to(total, like.dtype)
    if axis is not None:
        others = tuple(a for a in range(numbers.rank) if a != axis % numbers.rank)
        return cast_to(at.graph.one("sum", numbers, axis=others), like.dtype)
    return sum_to(numbers, like)


@vjp("dequantise")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    """Of (x - zp) · scale, or of x · scale · zp if scales are 8-bit floats."""
    x, scale, zp = at.operands
    cotangents: list[Value | None] = [None, None, None]
    float8_scales = scale is not None and not scale.dtype.is_float
    if scale is not None and at.wanted[1]:
        numbers = at.graph.one("dequantise", x, full(at.graph, 1, scale.type), zp, **at.attrs)
        cotangents[1] = _sum_per_scale(ct * numbers, scale.type, at)
    if zp is not None and at.wanted[2]:
        if float8_scales:
            numbers = at.graph.one("dequantise", x, scale, full(at.graph, 1, zp.type), **at.attrs)
            cotangents[2] = sum_to(ct * numbers, zp.type)
        else:
            assert scale is not None
            cotangents[2] = _sum_per_scale(-(ct * _broadcast_scales(scale, at)), zp.type, at)
    return cotangents

"""Quantised numbers: packed weights are frozen, scales and zero points of integers have gradients."""

from __future__ import annotations

from rlx.ir.graph import Value
from rlx.quant_schemes import QuantScheme
from rlx.transforms.build import full, in_type, sum_to
from rlx.transforms.rule_tables import Cotangents, NodeCtx, batching, vjp, zero_gradient
from rlx.transforms.vmap import by_scan
from rlx.types import TensorType

zero_gradient("quantise", why="it gives integers")
batching("dequantise", "quantise")(by_scan)


def _spread(scales: Value, at: NodeCtx) -> Value:
    """Scales as they are broadcast to the numbers."""
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


def _gathered(numbers: Value, like: TensorType, at: NodeCtx) -> Value:
    """The transpose of `_spread`: sums over what shares a scale."""
    axis, scheme = at.attrs["axis"], at.attrs["scheme"]
    block = 1 if scheme is None else QuantScheme(scheme).block
    if block > 1:
        *leading, blocks, n = like.shape
        total = at.graph.one("sum", numbers.reshape(*leading, blocks, block, n), axis=-2)
        return in_type(total, like.dtype)
    if axis is not None:
        others = tuple(a for a in range(numbers.rank) if a != axis % numbers.rank)
        return in_type(at.graph.one("sum", numbers, axis=others), like.dtype)
    return sum_to(numbers, like)


@vjp("dequantise")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    """(x - zp) · scale, or x · scale · zp where scales are eight bit floats."""
    x, scale, zp = at.operands
    made: list[Value | None] = [None, None, None]
    one_for_all = scale is not None and not scale.dtype.is_float
    if scale is not None and at.wanted[1]:
        numbers = at.graph.one("dequantise", x, full(at.graph, 1, scale.type), zp, **at.attrs)
        made[1] = _gathered(ct * numbers, scale.type, at)
    if zp is not None and at.wanted[2]:
        if one_for_all:
            numbers = at.graph.one("dequantise", x, scale, full(at.graph, 1, zp.type), **at.attrs)
            made[2] = sum_to(ct * numbers, zp.type)
        else:
            assert scale is not None
            made[2] = _gathered(-(ct * _spread(scale, at)), zp.type, at)
    return made

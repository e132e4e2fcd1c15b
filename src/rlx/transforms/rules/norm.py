"""Norms over the last axis: one pass back, from the operand, as papers have it."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import DType
from rlx.ir.graph import Value
from rlx.transforms.build import in_type, insert_axes, sum_to
from rlx.transforms.tables import Given, Lanes, Site, batching, vjp


def _mean(x: Value) -> Value:
    return x.graph.one("mean", x, axis=-1, keepdims=True)


@vjp("layer_norm", "rms_norm")
def _(at: Site, ct: Value) -> Given:
    """With x̂ the normalised operand and c = ct · gamma: (c - mean(c x̂) x̂ [- mean(c)]) / deviation."""
    x, gamma = in_type(at.operand(0), _wide(at)), at.operands[1]
    centred = x - _mean(x) if at.node.op == "layer_norm" else x
    inverse = at.graph.one("rsqrt", _mean(centred * centred) + at.attrs["eps"])
    normal, ct = centred * inverse, in_type(ct, x.dtype)
    made: list[Value | None] = [None, None, None]
    if at.wanted[0]:
        c = ct if gamma is None else ct * gamma
        inner = c - normal * _mean(c * normal)
        inner = inner - _mean(c) if at.node.op == "layer_norm" else inner
        made[0] = in_type(inner * inverse, at.operand(0).dtype)
    if gamma is not None and at.wanted[1]:
        made[1] = sum_to(ct * normal, gamma.type)
    beta = at.operands[2]
    if beta is not None and at.wanted[2]:
        made[2] = sum_to(ct, beta.type)
    return made


def _wide(at: Site) -> DType:
    return at.operand(0).dtype.compute


@batching("layer_norm", "rms_norm")
def _(lanes: Lanes) -> Sequence[Value]:
    x, gamma, beta = lanes.operands
    if not (lanes.batched[1] or lanes.batched[2]):
        return [lanes.graph.one(lanes.node.op, x, gamma, beta, **lanes.attrs)]
    y = lanes.graph.one(lanes.node.op, lanes.full(0), **lanes.attrs)
    for i, op in ((1, "mul"), (2, "add")):
        vector = lanes.operands[i]
        if vector is not None:
            aligned = insert_axes(vector, 1, y.rank - 2) if lanes.batched[i] else vector
            y = in_type(lanes.graph.one(op, y, aligned), y.dtype)
    return [y]

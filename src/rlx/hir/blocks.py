"""HIR blocks: the pieces models are assembled from, one level above tensor ops.

Each has a type rule here and a lowering in `lower.py`. An HIR graph may use any MIR op beside them.
"""

from __future__ import annotations

from rlx.errors import GraphError, ShapeError
from rlx.ir.registry import HIR, op
from rlx.ops.elementwise import add, gelu, gelu_tanh, relu, sigmoid, silu, tanh
from rlx.ops.linear import matmul
from rlx.ops.norm import rms_norm
from rlx.types import TensorType

ACTIVATIONS = {a.name: a for a in (gelu, gelu_tanh, relu, sigmoid, silu, tanh)}


@op("linear", level=HIR)
def linear(
    x: TensorType, weight: TensorType, bias: TensorType | None = None, *, activation: str | None = None
) -> TensorType:
    """activation(x @ weight + bias); `weight` is [in, out]."""
    if activation is not None and activation not in ACTIVATIONS:
        raise GraphError(f"linear: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    result = matmul.rule(x, weight)
    if bias is not None:
        if bias.shape != (weight.shape[-1],):
            raise ShapeError(f"linear: bias {bias} does not fit {weight.shape[-1]} columns")
        result = add.rule(result, bias)
    return _one(result if activation is None else ACTIVATIONS[activation].rule(result))


@op("swiglu_ffn", level=HIR)
def swiglu_ffn(x: TensorType, up: TensorType, gate: TensorType, down: TensorType) -> TensorType:
    """(silu(x @ gate) * (x @ up)) @ down."""
    if up != gate:
        raise ShapeError(f"swiglu_ffn: up {up} and gate {gate} differ")
    return _one(matmul.rule(silu.rule(matmul.rule(x, gate)), down))


@op("residual_rms_norm", level=HIR)
def residual_rms_norm(
    x: TensorType, residual: TensorType, gamma: TensorType, beta: TensorType | None = None, *, eps: float
) -> TensorType:
    """rms_norm(x + residual)."""
    if x != residual:
        raise ShapeError(f"residual_rms_norm: types differ, {x} and {residual}")
    return _one(rms_norm.rule(x, gamma, beta, eps=eps))


def _one(types: TensorType | tuple[TensorType, ...]) -> TensorType:
    assert isinstance(types, TensorType)
    return types

"""HIR blocks: the pieces models are assembled from, one level above tensor ops. Each has a type rule here and a lowering in `lower.py`.

An HIR graph may use any MIR op beside them.
"""

from __future__ import annotations

from rlx.errors import GraphError, ShapeError
from rlx.ir.registry import HIR, op
from rlx.ops.elementwise import gelu, gelu_tanh, relu, sigmoid, silu, tanh
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
    assert isinstance(result, TensorType)
    if bias is not None and bias.shape != (weight.shape[-1],):
        raise ShapeError(f"linear: bias {bias} does not fit {weight.shape[-1]} columns")
    return result


@op("swiglu_ffn", level=HIR)
def swiglu_ffn(x: TensorType, up: TensorType, gate: TensorType, down: TensorType) -> TensorType:
    """(silu(x @ gate) * (x @ up)) @ down."""
    if up != gate:
        raise ShapeError(f"swiglu_ffn: up {up} and gate {gate} differ")
    inner = matmul.rule(x, gate)
    assert isinstance(inner, TensorType)
    result = matmul.rule(inner, down)
    assert isinstance(result, TensorType)
    return result


@op("residual_rms_norm", level=HIR)
def residual_rms_norm(
    x: TensorType, residual: TensorType, gamma: TensorType, beta: TensorType | None = None, *, eps: float
) -> TensorType:
    """rms_norm(x + residual)."""
    if x != residual:
        raise ShapeError(f"residual_rms_norm: types differ, {x} and {residual}")
    result = rms_norm.rule(x, gamma, beta, eps=eps)
    assert isinstance(result, TensorType)
    return result

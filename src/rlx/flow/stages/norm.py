"""Normalisation over the last axis."""

from __future__ import annotations

import math
from numbers import Real

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import norm
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue


def check_eps(stage: str, eps: float) -> None:
    """Raise unless the eps of a norm is a number from 0."""
    if not isinstance(eps, Real) or not 0 <= eps < math.inf:  # the square root of a negative number is NaN
        raise GraphError(f"stage {stage}: eps is {eps!r}, expected a number from 0")


@dataclass(frozen=True)
class RmsNorm(FlowStage):
    """RMSNorm over the last axis: `y = x / √(mean(x²) + eps) · weight`."""

    weight_key: str
    eps: float

    def __post_init__(self) -> None:
        check_eps("RmsNorm", self.eps)

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "RmsNorm")
        return ctx.wrap(norm(ctx, x, self.weight_key, kind="rms", eps=self.eps))

    @property
    def path(self) -> str:
        return "norm"


@dataclass(frozen=True)
class GemmaRmsNorm(FlowStage):
    """RMSNorm as in Gemma, whose files store weight - 1: `y = x / √(mean(x²) + eps) · (1 + weight)`."""

    weight_key: str
    eps: float

    def __post_init__(self) -> None:
        check_eps("GemmaRmsNorm", self.eps)

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "GemmaRmsNorm")
        return ctx.wrap(norm(ctx, x, self.weight_key, kind="rms", eps=self.eps, unit_offset=True))

    @property
    def path(self) -> str:
        return "norm"


@dataclass(frozen=True)
class LayerNorm(FlowStage):
    """LayerNorm over the last axis: `y = (x - mean(x)) / √(var(x) + eps) · gamma + beta`; beta is optional."""

    gamma_key: str
    beta_key: str | None
    eps: float

    def __post_init__(self) -> None:
        check_eps("LayerNorm", self.eps)

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "LayerNorm")
        return ctx.wrap(norm(ctx, x, self.gamma_key, self.beta_key, kind="layer", eps=self.eps))

    @property
    def path(self) -> str:
        return "norm"

"""Normalisation stages."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue


@dataclass(frozen=True)
class RmsNorm(FlowStage):
    """RMSNorm by a weight."""

    weight_key: str
    eps: float

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "RmsNorm")
        return ctx.wrap(x.rms_norm(ctx.load_param(self.weight_key, shape=x.shape[-1:]), eps=self.eps))

    @property
    def path(self) -> str:
        return "norm"


@dataclass(frozen=True)
class LayerNorm(FlowStage):
    """LayerNorm by a weight and a bias."""

    gamma_key: str
    beta_key: str
    eps: float

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "LayerNorm")
        gamma, beta = (ctx.load_param(key, shape=x.shape[-1:]) for key in (self.gamma_key, self.beta_key))
        return ctx.wrap(x.layer_norm(gamma, beta, eps=self.eps))

    @property
    def path(self) -> str:
        return "norm"

"""Feed-forward stages."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue
from rlx.ir.graph import Value


def linear(ctx: FlowCtx, x: Value, weight_key: str, bias_key: str | None = None) -> Value:
    """x times a weight stored `[out, in]`, plus a bias."""
    y = x @ ctx.load_param(weight_key, transpose=True)
    return y if bias_key is None else y + ctx.load_param(bias_key)


@dataclass(frozen=True)
class SwiGlu(FlowStage):
    """down(silu(gate(x)) · up(x))."""

    gate_key: str
    up_key: str
    down_key: str

    @classmethod
    def hf_mlp(cls, prefix: str) -> SwiGlu:
        """The names under which Hugging Face keeps a Llama feed-forward."""
        return cls(f"{prefix}.gate_proj.weight", f"{prefix}.up_proj.weight", f"{prefix}.down_proj.weight")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "SwiGlu")
        inner = linear(ctx, x, self.gate_key).silu() * linear(ctx, x, self.up_key)
        return ctx.wrap(linear(ctx, inner, self.down_key))

    @property
    def path(self) -> str:
        return "ffn"


@dataclass(frozen=True)
class GeluFfn(FlowStage):
    """output(gelu(intermediate(x)))."""

    intermediate_w: str
    intermediate_b: str
    output_w: str
    output_b: str
    approx_gelu: bool = False

    @classmethod
    def hf_bert(cls, prefix: str) -> GeluFfn:
        """The names under which Hugging Face keeps a BERT feed-forward."""
        inner, outer = f"{prefix}.intermediate.dense", f"{prefix}.output.dense"
        return cls(f"{inner}.weight", f"{inner}.bias", f"{outer}.weight", f"{outer}.bias")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "GeluFfn")
        inner = linear(ctx, x, self.intermediate_w, self.intermediate_b)
        inner = inner.gelu_tanh() if self.approx_gelu else inner.gelu()
        return ctx.wrap(linear(ctx, inner, self.output_w, self.output_b))

    @property
    def path(self) -> str:
        return "ffn"

"""Encoder layers: BERT's, with a padding mask and norms after the residuals."""

from __future__ import annotations

from dataclasses import dataclass

from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.ffn import GeluFfn, linear
from rlx.flow.stages.norm import LayerNorm
from rlx.flow.stages.structure import emit_stage
from rlx.flow.state import FlowValue
from rlx.ir.graph import Value
from rlx.ir.provenance import stage as provenance
from rlx.ops.attention import MaskKind
from rlx.types import sym


@dataclass(frozen=True)
class BertEncoderLayer(FlowStage):
    """norm(x + attention(x)), then norm(· + feed-forward(·))."""

    layer_prefix: str
    hidden_size: int
    num_heads: int
    head_dim: int
    eps: float
    attention_mask_input: str = "attention_mask"
    intermediate_size: int | None = None  # checks the weights of the feed-forward
    activation: str = "gelu"

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "BertEncoderLayer")
        prefix = self.layer_prefix
        with provenance("attn"):  # without the residual and the norm, as in decoders
            attended = self.attention(ctx, x)
        x = self.norm(ctx, x + attended, f"{prefix}.attention.output.LayerNorm")
        mlp = GeluFfn.hf_bert(prefix, intermediate_size=self.intermediate_size, activation=self.activation)
        ffn = emit_stage(ctx, mlp, ctx.wrap(x))
        return ctx.wrap(self.norm(ctx, x + ctx.need(ffn, "ffn"), f"{prefix}.output.LayerNorm"))

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        batch, seq, _ = x.shape
        mask = ctx.input(self.attention_mask_input, (sym.BATCH, sym.SEQ), "f32")
        width = self.num_heads * self.head_dim
        q, k, v = (
            self.dense(ctx, x, f"self.{n}", width).reshape(batch, seq, self.num_heads, self.head_dim)
            for n in ("query", "key", "value")
        )
        out = q.attention(k, v, mask, mask_kind=MaskKind.CUSTOM).reshape(batch, seq, width)
        return self.dense(ctx, out, "output.dense", self.hidden_size)

    def dense(self, ctx: FlowCtx, x: Value, name: str, out: int) -> Value:
        base = f"{self.layer_prefix}.attention.{name}"
        return linear(ctx, x, f"{base}.weight", f"{base}.bias", out=out)

    def norm(self, ctx: FlowCtx, x: Value, key: str) -> Value:
        return ctx.need(LayerNorm(f"{key}.weight", f"{key}.bias", self.eps).emit(ctx, ctx.wrap(x)), "norm")

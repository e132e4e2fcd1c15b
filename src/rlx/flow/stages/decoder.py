"""Decoder layers: pre-norm attention with rotary positions and grouped heads, then a SwiGLU feed-forward.

`LlamaDecoder` and `Qwen3Decoder` are two constructors of one layer. With a runtime-owned cache in the flow's state the
layer appends to it and attends over it, so prefill and decode are the same graph.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlx.errors import GraphError
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.ffn import SwiGlu, linear
from rlx.flow.stages.norm import RmsNorm
from rlx.flow.stages.structure import emit_stage
from rlx.flow.state import FlowValue
from rlx.ir.graph import Value
from rlx.ir.provenance import stage as provenance
from rlx.ops.attention import MaskKind
from rlx.types import Size, sym


@dataclass(frozen=True)
class DecoderLayer(FlowStage):
    """x + attention(norm x), then + feed-forward(norm ·)."""

    layer_prefix: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    layer_idx: int = 0
    mask: str = MaskKind.CAUSAL
    attention_bias: bool = False  # on q, k and v
    qk_norm: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    intermediate_size: int | None = None  # checks the weights of the feed-forward
    activation: str = "silu"

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, type(self).__name__)
        prefix = self.layer_prefix
        with provenance("attn"):
            h = RmsNorm(f"{prefix}.input_layernorm.weight", self.eps).emit(ctx, ctx.wrap(x))
            attended = self.attention(ctx, ctx.need(h, "attention"))
        x = x + attended
        ffn = emit_stage(ctx, RmsNorm(f"{prefix}.post_attention_layernorm.weight", self.eps), ctx.wrap(x), "ffn.norm")
        mlp = SwiGlu.hf_mlp(
            f"{prefix}.mlp", intermediate_size=self.intermediate_size, bias=self.mlp_bias, activation=self.activation
        )
        ffn = emit_stage(ctx, mlp, ffn)
        return ctx.wrap(x + ctx.need(ffn, "ffn"))

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        batch, seq, hidden = x.shape
        heads = {"q": self.num_heads, "k": self.num_kv_heads, "v": self.num_kv_heads}
        split = {
            n: self.project(ctx, x, n, h * self.head_dim, self.attention_bias).reshape(batch, seq, h, self.head_dim)
            for n, h in heads.items()
        }
        if self.qk_norm:
            for n in ("q", "k"):
                gamma = ctx.load_param(f"{self.layer_prefix}.self_attn.{n}_norm.weight", shape=(self.head_dim,))
                split[n] = split[n].rms_norm(gamma, eps=self.eps)
        positions = ctx.input("positions", (sym.BATCH, sym.SEQ), "i32")
        cos, sin = ctx.state.rope_cos, ctx.state.rope_sin
        if cos is None or sin is None:
            raise GraphError(
                f"stage {type(self).__name__}: no RoPE tables flow here", hint="put RopeTables before the layers"
            )
        turns = positions.maximum(0)  # padding has a negative position; what it turns to is never looked at
        q, k = (split[n].rope(cos, sin, turns, style=ctx.state.rope_style) for n in ("q", "k"))
        if ctx.state.cache is None:
            out = q.attention(k, split["v"], mask_kind=self.mask)
        else:
            keys = ctx.state.cache.keys[self.layer_idx].kv_append(k, positions, kind="keys")
            values = ctx.state.cache.values[self.layer_idx].kv_append(split["v"], positions, kind="values")
            out = q.cached_attention(keys, values, positions, mask_kind=self.mask)
        flat = out.reshape(batch, seq, self.num_heads * self.head_dim)
        return self.project(ctx, flat, "o", hidden, self.output_bias)

    def project(self, ctx: FlowCtx, x: Value, name: str, out: Size, bias: bool) -> Value:
        base = f"{self.layer_prefix}.self_attn.{name}_proj"
        return linear(ctx, x, f"{base}.weight", f"{base}.bias" if bias else None, out=out)


@dataclass(frozen=True)
class LlamaDecoder(DecoderLayer):
    """A Llama layer."""


@dataclass(frozen=True)
class Qwen3Decoder(DecoderLayer):
    """A Qwen layer: Qwen2 has biases on q, k, v; Qwen3 norms each head of q and k instead."""

    qk_norm: bool = True

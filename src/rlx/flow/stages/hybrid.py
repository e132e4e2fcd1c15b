"""Layers of hybrid models (Qwen3-Next, Qwen3.5): gated delta nets, and gated attention in every few layers."""

from __future__ import annotations

from dataclasses import KW_ONLY

from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import gated_queries, linear
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.decoder import DecoderLayer, PreNormLayer
from rlx.flow.stages.recurrent import cached_positions, carried, conv_weight, token_rows
from rlx.ir.graph import Value


@dataclass(frozen=True, kw_only=True)
class GatedAttentionLayer(DecoderLayer):
    """Decoder layer with gated attention (Qwen3-Next): `h = x + (attention(norm(x)) · sigmoid(gate)) @ o_projᵀ`.

    `q_proj` gives the query and then the gate of each head: `[heads · 2 · head_dim, hidden]`.
    """

    unit_offset: bool = True
    qk_norm: bool = True

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        attend = self.self_attention()
        keys = *attend.projection_keys("q"), attend.norm_keys[0] if attend.norm_keys else None
        q, gate = gated_queries(
            ctx, x, keys, heads=self.num_heads, head_dim=self.head_dim, eps=self.eps, unit_offset=self.unit_offset
        )
        attended = attend.attend_heads(ctx, q, attend.project(ctx, x, "k"), attend.project(ctx, x, "v"), gate)
        return self.output_projection(ctx, attended, x.shape[-1])


@dataclass(frozen=True)
class DeltaNetLayer(PreNormLayer):
    """Decoder layer with the gated delta rule (Yang et al., 2024) in place of attention, after a short convolution.

    Per head and token, with l2-normalised q and k: `S = exp(g) · S`, `S = S + k (β (v - Sᵀ k))ᵀ`,
    `o = Sᵀ q / √state_size`, where `β = sigmoid(b)` and `g = -exp(A_log) · softplus(a + dt_bias)`. Then
    `h = x + (rms_norm(o) · silu(z)) @ out_projᵀ` and `y = h + ffn(norm(h))`.
    """

    layer_prefix: str
    eps: float
    _: KW_ONLY
    layer_idx: int  # whose state in the cache it continues
    key_heads: int = 1
    value_heads: int = 1  # neighbouring value heads share a key head, unless `tiled`
    state_size: int = 128  # head size of queries and keys
    value_size: int | None = None  # head size of values; `state_size` unless given
    kernel: int = 4  # taps of the convolution
    tiled: bool = False  # value head i uses key head i mod key_heads (Qwen3.5's GGUF files)
    rates: bool = False  # the file stores -exp(A_log), as GGUF does
    intermediate_size: int | None = None  # checks the shapes of the feed-forward weights
    activation: str = "silu"  # of the feed-forward and of the convolution
    mlp_bias: bool = False
    unit_offset: bool = True
    ffn: FlowStage | None = None  # replaces the gated feed-forward

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        base, n, heads = f"{self.layer_prefix}.linear_attn", self.state_size, self.value_heads
        wide = self.value_size or n
        side = max(n, wide)
        qkv, z, b, a = self.projections(ctx, x, base)
        channels, name = 2 * self.key_heads * n + heads * wide, f"delta.{self.layer_idx}"
        operands = {  # in the order in which weights are read
            "conv": conv_weight(ctx, f"{base}.conv1d.weight", channels, self.kernel),
            "conv_state": carried(ctx, f"conv.{self.layer_idx}", self.kernel - 1, channels),
            "positions": cached_positions(ctx, x),
            "token_rows": token_rows(ctx),
            "rates": ctx.stored_param(f"{base}.A_log", shape=(heads,)),
            "step_bias": ctx.stored_param(f"{base}.dt_bias", shape=(heads,)),
            "state": carried(ctx, name, heads, side, side),
            "norm": ctx.stored_param(f"{base}.norm.weight", shape=(wide,), init=1.0),
        }  # fmt: skip
        mixed, ctx.state.named[name] = ctx.hir().apply(
            "delta_net_block", qkv, z, b, a, **operands, state_size=n, eps=self.eps, tiled=self.tiled,
            activation=self.activation, log_rates=not self.rates,
        )  # fmt: skip
        return linear(ctx, mixed, f"{base}.out_proj.weight", out=x.shape[-1])

    def projections(self, ctx: FlowCtx, x: Value, base: str) -> list[Value]:
        """Project x to concatenated q, k and v, the output gate z, and b and a (for β and g)."""
        values = self.value_heads * (self.value_size or self.state_size)
        sizes = {"qkv": 2 * self.key_heads * self.state_size + values, "z": values}
        sizes |= {"b": self.value_heads, "a": self.value_heads}
        return [linear(ctx, x, f"{base}.in_proj_{name}.weight", out=size) for name, size in sizes.items()]

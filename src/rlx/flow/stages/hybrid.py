"""Layers of hybrids: most keep a matrix by the gated delta rule, some attend, with a gate (Qwen3-Next, Qwen3.5)."""

from __future__ import annotations

import math
from dataclasses import KW_ONLY, dataclass
from itertools import accumulate, pairwise

from rlx.flow.blocks import linear
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.decoder import DecoderLayer, PreNormLayer
from rlx.flow.stages.parts import GdnScan
from rlx.flow.stages.recurrent import short_conv, state_of, where_present
from rlx.flow.state import GdnInputSlots
from rlx.hir.activations import activate, softplus
from rlx.ir.graph import Value


@dataclass(frozen=True, kw_only=True)
class GatedAttentionLayer(DecoderLayer):
    """A layer that attends; what a head finds goes through a gate, whose weights lie behind those of its query."""

    unit_offset: bool = True
    qk_norm: bool = True

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        attend, heads, size, lead = self.self_attention(), self.num_heads, self.head_dim, x.shape[:2]
        bias = attend.q_key.removesuffix("weight") + "bias" if self.attention_bias else None
        both = linear(ctx, x, attend.q_key, bias, out=2 * heads * size, heads=heads)
        q, gate = attend.normed(ctx, both[:, :, :, :size], "q"), both[:, :, :, size:].reshape(*lead, heads * size)
        seen = attend.of_heads(ctx, q, attend.project(ctx, x, "k"), attend.project(ctx, x, "v"))
        return self.projected(ctx, seen * gate.sigmoid(), x.shape[-1])


@dataclass(frozen=True)
class DeltaNetLayer(PreNormLayer):
    """A layer with the gated delta rule (Yang et al., 2024) in place of attention, after a short convolution."""

    layer_prefix: str
    eps: float
    _: KW_ONLY
    layer_idx: int  # whose state of the cache it carries on
    key_heads: int = 1
    value_heads: int = 1  # neighbouring ones share a head of queries and keys, unless they are tiled
    state_size: int = 128  # of each head of queries and keys
    value_size: int | None = None  # of each head of values, where it is another
    kernel: int = 4
    tiled: bool = False  # heads of values come in rounds, one for each head of keys (Qwen3.5's GGUF files)
    rates: bool = False  # A_log is -exp of itself, as GGUF has it
    intermediate_size: int | None = None  # checks the weights of the feed-forward
    activation: str = "silu"  # of the feed-forward's gate and of the convolution
    mlp_bias: bool = False
    unit_offset: bool = True
    ffn: FlowStage | None = None  # in place of the gated one

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        base, lead, n, heads = f"{self.layer_prefix}.linear_attn", x.shape[:2], self.state_size, self.value_heads
        wide = self.value_size or n
        side = max(n, wide)  # states are square: what is missing on one side are zeros
        qkv, z, b, a = self.projections(ctx, x, base)
        conv = short_conv(ctx, qkv, f"{base}.conv1d.weight", None, self.kernel, f"conv.{self.layer_idx}")
        q, k, v = _split(activate(conv, self.activation), [self.key_heads * n] * 2 + [heads * wide])
        rates = ctx.load_param(f"{base}.A_log", shape=(heads,))
        gates = (rates if self.rates else -rates.exp()) * softplus(
            a + ctx.load_param(f"{base}.dt_bias", shape=(heads,))
        )
        q, k = self.unit_heads(q), self.unit_heads(k)
        if side != n:
            q = q * math.sqrt(side / n)  # the scan divides by the root of the side
        # at padding neither a gate nor a change: the state stays as it is
        ctx.state.gdn = GdnInputSlots(
            _padded(q, side), _padded(k, side), _padded(v.reshape(*lead, heads, wide), side),
            where_present(ctx, gates), where_present(ctx, b.sigmoid()),
        )  # fmt: skip
        name = f"delta.{self.layer_idx}"
        ctx.state.named[name] = state_of(ctx, name, x, heads, side, side)
        found = GdnScan(side, carry_state=True, state_key=name).emit(ctx, ctx.wrap(x)).id[:, :, :, :wide]
        normed = found.rms_norm(ctx.load_param(f"{base}.norm.weight", shape=(wide,), init=1.0), eps=self.eps)
        gated = (normed * z.reshape(*lead, heads, wide).silu()).reshape(*lead, heads * wide)
        return linear(ctx, gated, f"{base}.out_proj.weight", out=x.shape[-1])

    def projections(self, ctx: FlowCtx, x: Value, base: str) -> list[Value]:
        """Queries, keys and values side by side, the gate of the output, and what rate and gate are made of."""
        values = self.value_heads * (self.value_size or self.state_size)
        sizes = {"qkv": 2 * self.key_heads * self.state_size + values, "z": values}
        sizes |= {"b": self.value_heads, "a": self.value_heads}
        return [linear(ctx, x, f"{base}.in_proj_{name}.weight", out=size) for name, size in sizes.items()]

    def unit_heads(self, x: Value) -> Value:
        """Queries or keys of length 1, one for each head of values."""
        lead, n, share = x.shape[:2], self.state_size, self.value_heads // self.key_heads
        one, all_ = ((1, self.key_heads), (share, self.key_heads)) if self.tiled else (
            (self.key_heads, 1), (self.key_heads, share)
        )  # fmt: skip
        x = x.reshape(*lead, *one, n)
        unit: Value = x * ((x * x).sum(axis=-1, keepdims=True) + 1e-6).rsqrt()
        shared: Value = unit.expand(shape=(*lead, *all_, n))
        return shared.reshape(*lead, self.value_heads, n)


def _padded(x: Value, size: int) -> Value:
    """With zeros at the end of the last axis."""
    last = x.shape[-1]
    if last == size:
        return x
    before = (0,) * (x.rank - 1)
    result: Value = x.pad(low=(*before, 0), high=(*before, size - last))
    return result


def _split(x: Value, sizes: list[int] | tuple[int, ...]) -> list[Value]:
    """Parts of the last axis."""
    ends = [0, *accumulate(sizes)]
    before = (slice(None),) * (x.rank - 1)
    return [x[(*before, slice(at, end))] for at, end in pairwise(ends)]

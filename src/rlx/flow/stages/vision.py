"""Stages of vision transformers: attention over patches, and the feed-forward of NomicVision."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import linear
from rlx.flow.context import FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.norm import LayerNorm
from rlx.flow.stages.parts import MASK, LayerScale
from rlx.flow.stages.structure import ResidualAdd, ResidualSave
from rlx.flow.stages.structure import Sequence as StageSequence
from rlx.flow.state import FlowValue
from rlx.ir.graph import Value
from rlx.ops.attention import MaskKind

Keys = str | tuple[str, str, str] | None  # the key of one weight for q, k and v, or three keys


@dataclass(frozen=True)
class VitSelfAttn(FlowStage):
    """ViT self-attention: `y = attention(q, k, v) @ outᵀ + out_bias`, where `q, k, v = split(x @ qkvᵀ + qkv_bias)`.

    Per head, attention is `softmax(q @ kᵀ / √head_dim + mask) @ v`; the mask is that of an earlier `AttnMask`, if any.
    `qkv_weight` is the key of one weight `[3 · heads · head_dim, hidden]` or a tuple of three; so is `qkv_bias`.
    """

    qkv_weight: Keys
    qkv_bias: Keys
    out_weight: str
    out_bias: str | None
    num_heads: int
    head_dim: int

    def __post_init__(self) -> None:
        if self.qkv_weight is None:
            raise GraphError("stage VitSelfAttn: has no qkv_weight")
        if self.qkv_bias is not None and isinstance(self.qkv_bias, str) is not isinstance(self.qkv_weight, str):
            raise GraphError("stage VitSelfAttn: qkv_weight and qkv_bias are both one key, or both three")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need_sequence(value, "VitSelfAttn")
        q, k, v = self.heads(ctx, x)
        mask = ctx.state.named.get(MASK)
        kind = MaskKind.NONE if mask is None else MaskKind.CUSTOM
        attended = ctx.hir().one("self_attention", q, k, v, mask, mask_kind=kind)
        return ctx.wrap(linear(ctx, attended, self.out_weight, self.out_bias, out=x.shape[-1]))

    def heads(self, ctx: FlowCtx, x: Value) -> Sequence[Value]:
        """Project x to q, k and v, `[batch, seq, heads, head_dim]` each."""
        width = self.num_heads * self.head_dim
        if isinstance(self.qkv_weight, str):
            assert self.qkv_bias is None or isinstance(self.qkv_bias, str)
            both = linear(ctx, x, self.qkv_weight, self.qkv_bias, out=3 * width)
            parts: Sequence[Value] = ctx.hir().apply("split_qkv", both, num_heads=self.num_heads)
            return parts
        biases = self.qkv_bias or (None, None, None)
        assert self.qkv_weight is not None
        return [
            linear(ctx, x, weight, bias, out=width, heads=self.num_heads)
            for weight, bias in zip(self.qkv_weight, biases, strict=True)
        ]

    @property
    def path(self) -> str:
        return "attn"


@dataclass(frozen=True)
class VisionSwiGluFfn(FlowStage):
    """NomicVision feed-forward: `y = fc2(layer_norm(fc11(x) · silu(fc12(x))))`; each `fc` is a linear map with bias."""

    layer_prefix: str
    eps: float

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "VisionSwiGluFfn")
        inner = self.dense(ctx, x, "fc11") * self.dense(ctx, x, "fc12", "silu")
        norm = LayerNorm(f"{self.layer_prefix}.mlp.norm.weight", f"{self.layer_prefix}.mlp.norm.bias", self.eps)
        return ctx.wrap(self.dense(ctx, norm.emit(ctx, ctx.wrap(inner)).id, "fc2"))

    def dense(self, ctx: FlowCtx, x: Value, name: str, activation: str | None = None) -> Value:
        base = f"{self.layer_prefix}.mlp.{name}"
        return linear(ctx, x, f"{base}.weight", f"{base}.bias", activation=activation)

    @property
    def path(self) -> str:
        return "ffn"


def pre_norm_layer(
    norms: Sequence[str], attention: FlowStage, ffn: FlowStage, eps: float, scales: Sequence[str] = ()
) -> FlowStage:
    """Return the stages of h = x + scale · attention(norm(x)), then h + scale · ffn(norm(h))."""
    stages: list[FlowStage] = []
    for i, part in enumerate((attention, ffn)):
        stages += [ResidualSave(), LayerNorm(f"{norms[i]}.weight", f"{norms[i]}.bias", eps), part]
        stages += [*([LayerScale(scales[i])] if scales else []), ResidualAdd()]
    return StageSequence(stages)

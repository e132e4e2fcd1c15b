"""Post-norm encoder layers with a padding mask: BERT and NomicBERT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from rlx.errors import GraphError, nearest
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import linear
from rlx.flow.context import FlowCtx
from rlx.flow.positions import check_rows, has_positions, rope_tables_of, token_positions
from rlx.flow.stages.attention import only_where, seen_keys
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.ffn import GeluFfn, SwiGlu
from rlx.flow.stages.norm import LayerNorm
from rlx.flow.stages.structure import emit_stage
from rlx.flow.state import MAIN_ROPE, FlowValue
from rlx.ir.graph import Value
from rlx.ir.provenance import stage as provenance
from rlx.ops.attention import MaskKind

ATTENTION_BIAS = "attention_bias"  # name of a value that an earlier stage adds to the scores of all layers


@dataclass(frozen=True)
class QkvNames:
    """Weight names of a layer's attention, under its prefix."""

    q: str
    k: str
    v: str
    out: str
    norm: str


QKV_STYLES = {
    "bert": QkvNames("attention.self.query", "attention.self.key", "attention.self.value", "attention.output.dense",
                     "attention.output.LayerNorm"),
    "mpnet": QkvNames("attention.attn.q", "attention.attn.k", "attention.attn.v", "attention.attn.o",
                      "attention.LayerNorm"),
}  # fmt: skip


Rotation = tuple[Value, Value, Value, str]  # cosines, sines, the table row of each token, and the style


def attend(
    ctx: FlowCtx, q: Value, k: Value, v: Value, mask_input: str, kind: str = MaskKind.NONE, scale: float | None = None,
    rotation: Rotation | None = None,
) -> Value:  # fmt: skip
    """Attend with padding masked out: `[batch, seq, heads · head_dim]`.

    The mask kind says which other tokens are visible: all, earlier ones, or near ones. A value named ATTENTION_BIAS is
    added to the scores if there is one; it has minus infinity at padding already. With a `rotation`, RoPE is applied
    to queries and keys first.
    """
    how: dict[str, Any] = {"scale": scale}
    if rotation is not None:
        how |= zip(("cos", "sin", "rows", "style"), rotation, strict=True)
    if ATTENTION_BIAS in ctx.state.named:
        mask = ctx.state.named[ATTENTION_BIAS]
        mask = mask if kind == MaskKind.NONE else only_where(seen_keys(q, k, kind), mask)
        return ctx.hir().one("self_attention", q, k, v, mask, mask_kind=MaskKind.BIAS, **how)
    token_mask = ctx.mask_input(mask_input, q.shape[:2])
    return ctx.hir().one("self_attention", q, k, v, kept_tokens=token_mask, mask_kind=kind, **how)


def rotation_of(ctx: FlowCtx, stage: str, heads: Value, rope: str = MAIN_ROPE) -> Rotation:
    """Return the RoPE tables of a name and token rows: from the input `positions` if declared, else counted from 0."""
    cos, sin, rows, style = rope_tables_of(ctx, stage, rope)
    if rows is None:
        rows = token_positions(ctx, heads)
        if not has_positions(ctx):
            check_rows(stage, cos.shape[0], heads.shape[1])
    return cos, sin, rows, style


def post_norm_layer(
    ctx: FlowCtx, x: Value, attention: Callable[[], Value], norms: tuple[str, str], ffn: FlowStage, eps: float
) -> FlowValue:
    """Emit h = norm(x + attention(x)), then norm(h + ffn(h))."""
    with provenance("attn"):  # without the residual and the norm, as in decoders
        attended = attention()
    first, second = (LayerNorm(f"{name}.weight", f"{name}.bias", eps) for name in norms)
    normed = first.emit(ctx, ctx.wrap(x + attended))
    inner = emit_stage(ctx, ffn, normed)
    return second.emit(ctx, ctx.wrap(normed.id + ctx.need(inner, "ffn")))


@dataclass(frozen=True)
class BertEncoderLayer(FlowStage):
    """BERT layer, post-norm: `h = layer_norm(x + attention(x))`, `y = layer_norm(h + gelu_ffn(h))`.

    Per head, attention is `softmax(q @ kᵀ / √head_dim + mask) @ v`, then the output projection; projections have
    biases. The mask input is 1 for tokens and 0 for padding: f32, unless the flow declares integers or bools.
    """

    layer_prefix: str
    hidden_size: int
    num_heads: int
    head_dim: int
    eps: float
    qkv_style: str = "bert"  # naming of the attention weights: "bert" or "mpnet"
    attention_mask_input: str = "attention_mask"
    intermediate_size: int | None = None  # checks the weights of the feed-forward
    activation: str = "gelu"
    causal: bool = False  # tokens attend only to earlier tokens and themselves

    def __post_init__(self) -> None:
        if self.qkv_style not in QKV_STYLES:
            hint = nearest(str(self.qkv_style), QKV_STYLES) or f"known: {', '.join(QKV_STYLES)}"
            raise GraphError(f"stage BertEncoderLayer: qkv_style is {self.qkv_style!r}", hint=hint)

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need_sequence(value, "BertEncoderLayer")
        norms = (f"{self.layer_prefix}.{QKV_STYLES[self.qkv_style].norm}", f"{self.layer_prefix}.output.LayerNorm")
        ffn = GeluFfn.hf_bert(self.layer_prefix, intermediate_size=self.intermediate_size, activation=self.activation)
        return post_norm_layer(ctx, x, lambda: self.attention(ctx, x), norms, ffn, self.eps)

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        names = QKV_STYLES[self.qkv_style]
        width = self.num_heads * self.head_dim
        q, k, v = (self.dense(ctx, x, name, width, self.num_heads) for name in (names.q, names.k, names.v))
        kind = MaskKind.CAUSAL if self.causal else MaskKind.NONE
        return self.dense(ctx, attend(ctx, q, k, v, self.attention_mask_input, kind), names.out, self.hidden_size)

    def dense(self, ctx: FlowCtx, x: Value, name: str, out: int, heads: int | None = None) -> Value:
        base = f"{self.layer_prefix}.{name}"
        return linear(ctx, x, f"{base}.weight", f"{base}.bias", out=out, heads=heads)


@dataclass(frozen=True)
class NomicEncoderLayer(FlowStage):
    """NomicBERT layer, post-norm: `h = layer_norm(x + attention(x))`, `y = layer_norm(h + swiglu(h))`.

    `q, k, v = split(x @ Wqkvᵀ)`, RoPE rotates q and k. Only the norms have biases.
    """

    layer_prefix: str
    hidden_size: int
    num_heads: int
    head_dim: int
    eps: float
    attention_mask_input: str = "attention_mask"
    intermediate_size: int | None = None  # checks the weights of the feed-forward
    activation: str = "silu"

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need_sequence(value, "NomicEncoderLayer")
        prefix = self.layer_prefix
        gate, up, down = (f"{prefix}.mlp.{name}.weight" for name in ("fc12", "fc11", "fc2"))
        ffn = SwiGlu(gate, up, down, self.intermediate_size, activation=self.activation)
        norms = (f"{prefix}.norm1", f"{prefix}.norm2")
        return post_norm_layer(ctx, x, lambda: self.attention(ctx, x), norms, ffn, self.eps)

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        width = self.num_heads * self.head_dim
        qkv = linear(ctx, x, f"{self.layer_prefix}.attn.Wqkv.weight", out=3 * width)
        q, k, v = ctx.hir().apply("split_qkv", qkv, num_heads=self.num_heads)
        rotation = rotation_of(ctx, "NomicEncoderLayer", q)
        out = attend(ctx, q, k, v, self.attention_mask_input, rotation=rotation)
        return linear(ctx, out, f"{self.layer_prefix}.attn.out_proj.weight", out=self.hidden_size)

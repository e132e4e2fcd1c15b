"""Decoder layers: pre-norm attention with RoPE and grouped heads, then a gated feed-forward.

All stages here are constructors of one layer. If the flow has a KV cache, the layer appends to it and attends over it,
so prefill and decode are the same graph; `*DecodeLayer` stages also take a past that the caller passes as inputs.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, field
from typing import Any

from rlx.errors import GraphError
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import linear
from rlx.flow.context import FlowCtx
from rlx.flow.side_outputs import SideOutputs
from rlx.flow.stages.attention import SelfAttention
from rlx.flow.stages.base import FlowStage
from rlx.flow.stages.ffn import SwiGlu
from rlx.flow.stages.norm import GemmaRmsNorm, RmsNorm
from rlx.flow.stages.structure import emit_stage
from rlx.flow.state import MAIN_ROPE, FlowValue
from rlx.ir.graph import Value
from rlx.ir.provenance import stage as provenance
from rlx.ops.attention import MaskKind
from rlx.types import Size


class PreNormLayer(FlowStage):
    """Pre-norm layer: `h = x + attention(norm(x))`, `y = h + ffn(norm(h))`. Subclasses define the attention.

    With `post_norms` (Gemma 2 and 3), the outputs of attention and feed-forward are normed before they are added.
    """

    layer_prefix: str
    eps: float
    intermediate_size: int | None
    activation: str
    mlp_bias: bool
    unit_offset: bool
    ffn: FlowStage | None
    post_norms: bool = False

    @abstractmethod
    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        """Return the attention output to add to the residual, from the normed x `[batch, seq, hidden]`."""

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need_sequence(value, type(self).__name__)
        with provenance("attn"):
            attended = self.attention(ctx, self.norm(ctx, x, "input"))
            if self.post_norms:
                attended = self.norm(ctx, attended, "post_attention")
        x = x + attended
        with provenance("ffn.norm"):
            normed = self.norm(ctx, x, "pre_feedforward" if self.post_norms else "post_attention")
        ffn = self.ffn or SwiGlu.hf_mlp(
            f"{self.layer_prefix}.mlp", intermediate_size=self.intermediate_size, bias=self.mlp_bias,
            activation=self.activation,
        )  # fmt: skip
        added = ctx.need(emit_stage(ctx, ffn, ctx.wrap(normed)), "ffn")
        if self.post_norms:
            with provenance("ffn.post_norm"):
                added = self.norm(ctx, added, "post_feedforward")
        return ctx.wrap(x + added)

    def norm(self, ctx: FlowCtx, x: Value, name: str) -> Value:
        """Apply a norm of this layer, scaled by its weight or by 1 + weight."""
        kind = GemmaRmsNorm if self.unit_offset else RmsNorm
        return kind(f"{self.layer_prefix}.{name}_layernorm.weight", self.eps).emit(ctx, ctx.wrap(x)).id


@dataclass(frozen=True)
class DecoderLayer(PreNormLayer):
    """Decoder layer: `h = x + attention(norm(x)) @ o_projᵀ`, `y = h + ffn(norm(h))`.

    attention is that of `SelfAttnPrefill`, norm is RMSNorm and ffn is SwiGLU, unless the fields say otherwise.
    """

    layer_prefix: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    _: KW_ONLY
    layer_idx: int | None = None  # its layer in the KV cache: counted in order unless given
    mask: str = MaskKind.CAUSAL
    score_scale: float | None = None  # 1/√head_dim unless given
    attn_logit_softcap: float | None = None
    attention_bias: bool = False  # on q, k and v
    qk_norm: bool = False  # per-head norm of queries and keys, before RoPE
    output_bias: bool = False
    mlp_bias: bool = False
    intermediate_size: int | None = None  # checks the shapes of the feed-forward weights
    activation: str = "silu"
    post_norms: bool = False  # norm the outputs of attention and feed-forward before adding them (Gemma 2 and 3)
    unit_offset: bool = False  # norms multiply by 1 + weight (Gemma's files)
    rope: str | None = MAIN_ROPE  # name of the RoPE tables; None for no RoPE
    ffn: FlowStage | None = None  # replaces the gated feed-forward
    kv_sink: SideOutputs | None = None  # receives the keys and values of the new tokens

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        return self.output_projection(ctx, self.self_attention().emit(ctx, x), x.shape[-1])

    def self_attention(self) -> SelfAttention:
        """Return the self-attention of this layer, without the output projection."""
        base = f"{self.layer_prefix}.self_attn"
        return SelfAttention(
            type(self).__name__, f"{base}.q_proj.weight", f"{base}.k_proj.weight", f"{base}.v_proj.weight",
            self.num_heads, self.num_kv_heads, self.head_dim, self.mask, self.score_scale, self.attn_logit_softcap,
            bias=self.attention_bias, eps=self.eps, unit_offset=self.unit_offset, rope=self.rope,
            norm_keys=(f"{base}.q_norm.weight", f"{base}.k_norm.weight") if self.qk_norm else None,
            layer_idx=self.layer_idx, kv_sink=self.kv_sink, **self.step_fields(),
        )  # fmt: skip

    def step_fields(self) -> dict[str, Any]:
        """Return further fields of the self-attention; overridden by decode layers."""
        return {}

    def output_projection(self, ctx: FlowCtx, attended: Value, width: Size) -> Value:
        """Apply the output projection."""
        base = f"{self.layer_prefix}.self_attn.o_proj"
        return linear(ctx, attended, f"{base}.weight", f"{base}.bias" if self.output_bias else None, out=width)


@dataclass(frozen=True, kw_only=True)
class Step:
    """Fields of decode layers, whose past is in the runtime's KV cache or bound by `BindDecodeInputs`."""

    layer_idx: int = field()  # which layer's past it reads
    use_custom_mask: bool = False  # also apply the mask that `BindDecodeInputs` bound
    kv_out: SideOutputs | None = None  # receives all keys and values: the past, then the new tokens

    def step_fields(self) -> dict[str, Any]:
        return {"decodes": True, "use_custom_mask": self.use_custom_mask, "kv_out": self.kv_out}


@dataclass(frozen=True)
class LlamaDecoder(DecoderLayer):
    """Llama layer for prefill: `h = x + attention(rms_norm(x)) @ o_projᵀ`, `y = h + swiglu(rms_norm(h))`."""


@dataclass(frozen=True)
class LlamaDecodeLayer(Step, LlamaDecoder):
    """Llama layer for decode: `LlamaDecoder`, with the new keys and values appended to the past.

    `k = concat(past_k, rope(k))` and `v = concat(past_v, v)`; new tokens attend to both.
    """


@dataclass(frozen=True, kw_only=True)
class Qwen3Decoder(DecoderLayer):
    """Qwen layer for prefill: `LlamaDecoder` with `q = rope(rms_norm(q))` and `k = rope(rms_norm(k))` per head.

    Qwen2 has biases on q, k and v instead: `qk_norm=False, attention_bias=True`.
    """

    qk_norm: bool = True


@dataclass(frozen=True)
class Qwen3DecodeLayer(Step, Qwen3Decoder):
    """Qwen layer for decode: `Qwen3Decoder` with `k = concat(past_k, k)` and `v = concat(past_v, v)`."""


class GemmaStyle:
    """Generations of Gemma: Gemma 2 adds post-norms, Gemma 3 also norms queries and keys."""

    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3"
    ALL = (GEMMA, GEMMA2, GEMMA3)


@dataclass(frozen=True, kw_only=True)
class GemmaDecoder(DecoderLayer):
    """Gemma layer: `h = x + attention(norm(x)) @ o_projᵀ`, `y = h + geglu(norm(h))`, where norm is `GemmaRmsNorm`.

    Styles "gemma2" and "gemma3" norm the outputs of attention and ffn before adding them; "gemma3" also has per-head
    norms of q and k.
    """

    style: str = GemmaStyle.GEMMA
    unit_offset: bool = True
    activation: str = "gelu_pytorch_tanh"
    post_norms: bool = field(init=False, default=False)  # these two follow from the style
    qk_norm: bool = field(init=False, default=False)

    def __post_init__(self) -> None:
        if self.style not in GemmaStyle.ALL:
            known = ", ".join(GemmaStyle.ALL)
            raise GraphError(f"stage {type(self).__name__}: style {self.style!r} is not known", hint=f"known: {known}")
        object.__setattr__(self, "post_norms", self.style != GemmaStyle.GEMMA)
        object.__setattr__(self, "qk_norm", self.style == GemmaStyle.GEMMA3)


@dataclass(frozen=True)
class GemmaDecodeLayer(Step, GemmaDecoder):
    """Gemma layer for decode: `GemmaDecoder` with `k = concat(past_k, k)` and `v = concat(past_v, v)`."""

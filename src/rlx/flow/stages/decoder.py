"""Decoder layers: pre-norm attention with rotary positions and grouped heads, then a gated feed-forward.

All named stages are constructors of one layer. With a runtime-owned cache in the flow's state the layer appends to it
and attends over it, so prefill and decode are the same graph; the `*DecodeLayer`s also take a past that the caller
keeps.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

from rlx.errors import GraphError
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
    """x + attention(norm x), then + feed-forward(norm ·). Subclasses have these fields, and say how they attend.

    With `post_norms` what is added is normed too (Gemma 2).
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
        """What is added to x `[batch, seq, hidden]`, of x after its norm."""

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
        """A norm of this layer, by its weight or by 1 + weight."""
        kind = GemmaRmsNorm if self.unit_offset else RmsNorm
        return kind(f"{self.layer_prefix}.{name}_layernorm.weight", self.eps).emit(ctx, ctx.wrap(x)).id


@dataclass(frozen=True)
class DecoderLayer(PreNormLayer):
    """A layer that attends to the tokens given, and to those in the runtime's cache where the flow has one."""

    layer_prefix: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    _: KW_ONLY
    layer_idx: int | None = None  # which layer of the cache is its own; needed where the flow has one
    mask: str = MaskKind.CAUSAL
    score_scale: float | None = None  # 1/√head_dim unless given
    attn_logit_softcap: float | None = None
    attention_bias: bool = False  # on q, k and v
    qk_norm: bool = False  # each head of queries and keys is normed before it turns
    output_bias: bool = False
    mlp_bias: bool = False
    intermediate_size: int | None = None  # checks the weights of the feed-forward
    activation: str = "silu"
    post_norms: bool = False  # what attention and feed-forward give is normed before it is added (Gemma 2 and 3)
    unit_offset: bool = False  # norms multiply by 1 + weight (Gemma's files)
    rope: str | None = MAIN_ROPE  # the name of the tables that this layer turns by; None: heads do not turn
    ffn: FlowStage | None = None  # in place of the gated one
    kv_sink: SideOutputs | None = None  # gets the keys and values of the tokens given

    def attention(self, ctx: FlowCtx, x: Value) -> Value:
        return self.projected(ctx, self.self_attention().emit(ctx, x), x.shape[-1])

    def self_attention(self) -> SelfAttention:
        """What this layer does between its norm and its output projection."""
        base = f"{self.layer_prefix}.self_attn"
        return SelfAttention(
            type(self).__name__, f"{base}.q_proj.weight", f"{base}.k_proj.weight", f"{base}.v_proj.weight",
            self.num_heads, self.num_kv_heads, self.head_dim, self.mask, self.score_scale, self.attn_logit_softcap,
            bias=self.attention_bias, eps=self.eps, unit_offset=self.unit_offset, rope=self.rope,
            norm_keys=(f"{base}.q_norm.weight", f"{base}.k_norm.weight") if self.qk_norm else None,
            layer_idx=self.layer_idx, kv_sink=self.kv_sink, **self.of_step(),
        )  # fmt: skip

    def of_step(self) -> dict[str, Any]:
        """What a step tells its attention besides."""
        return {}

    def projected(self, ctx: FlowCtx, attended: Value, width: Size) -> Value:
        """The output projection."""
        base = f"{self.layer_prefix}.self_attn.o_proj"
        return linear(ctx, attended, f"{base}.weight", f"{base}.bias" if self.output_bias else None, out=width)


@dataclass(frozen=True, kw_only=True)
class Step:
    """What a layer of a step takes too: its past is in the runtime's cache, or bound by `BindDecodeInputs`."""

    layer_idx: int = field()  # whose past it reads
    use_custom_mask: bool = False  # keys that the bound mask leaves out are not seen
    kv_out: SideOutputs | None = None  # gets the keys and values of the past and of the tokens given

    def of_step(self) -> dict[str, Any]:
        return {"decodes": True, "use_custom_mask": self.use_custom_mask, "kv_out": self.kv_out}


@dataclass(frozen=True)
class LlamaDecoder(DecoderLayer):
    """A Llama layer."""


@dataclass(frozen=True)
class LlamaDecodeLayer(Step, LlamaDecoder):
    """A Llama layer of a step."""


@dataclass(frozen=True, kw_only=True)
class Qwen3Decoder(DecoderLayer):
    """A Qwen layer: Qwen2 has biases on q, k, v; Qwen3 norms each head of q and k instead."""

    qk_norm: bool = True


@dataclass(frozen=True)
class Qwen3DecodeLayer(Step, Qwen3Decoder):
    """A Qwen layer of a step."""


class GemmaStyle:
    """Which Gemma: the second norms what it adds, the third queries and keys as well."""

    GEMMA = "gemma"
    GEMMA2 = "gemma2"
    GEMMA3 = "gemma3"
    ALL = (GEMMA, GEMMA2, GEMMA3)


@dataclass(frozen=True, kw_only=True)
class GemmaDecoder(DecoderLayer):
    """A Gemma layer: norms by 1 + weight, a gate of tanh GELU, and what the style says."""

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
    """A Gemma layer of a step."""

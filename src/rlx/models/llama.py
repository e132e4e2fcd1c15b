"""Llama 2, 3.x and relatives such as SmolLM2 and Mistral: pre-norm decoder, RoPE, grouped-query attention, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import DecoderLayer, FlowStage, LlamaDecoder
from rlx.formats import TensorFile
from rlx.models.config import MAX_POSITIONS, DecoderConfig, group, key
from rlx.models.config_fields import Biases, window_key
from rlx.models.family import family
from rlx.models.rope import rope_stage
from rlx.ops.attention import MaskKind
from rlx.types import sym


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Llama's configuration: the common one with switches for biases."""

    IN_GGUF: ClassVar[Mapping[str, Any]] = {"pairs": True}

    biases: Biases = group(Biases, mlp_bias=key(hf="mlp_bias", default=False))
    sliding_window: int | None = key(gguf="attention.sliding_window", default=None, maximum=MAX_POSITIONS)
    pairs: bool = False  # RoPE rotates adjacent pairs, as in Meta's checkpoints and GGUF

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {**cls.IN_GGUF, **Biases.in_gguf(file, "qkv_bias", "output_bias", "mlp_bias")}

    def omitted_weights(self) -> tuple[str, ...]:
        return self.biases.omitted_weights(WEIGHTS)


@dataclass(frozen=True)
class MistralConfig(DecoderConfig):
    """Mistral: no biases; a sliding window unless the file says null."""

    IN_GGUF: ClassVar[Mapping[str, Any]] = {"pairs": True}

    sliding_window: int | None = window_key(4096)
    pairs: bool = False

    def window(self, layer: int) -> int | None:
        return self.sliding_window

    def omitted_weights(self) -> tuple[str, ...]:
        return NO_BIASES.omitted_weights(WEIGHTS)


NO_BIASES = Biases(False, False, False)
_LINEAR = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
WEIGHTS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{i}.input_layernorm.weight": "blk.{i}.attn_norm.weight",
    "model.layers.{i}.post_attention_layernorm.weight": "blk.{i}.ffn_norm.weight",
} | {
    f"model.layers.{{i}}.{hf}.{part}": f"blk.{{i}}.{gguf}.{part}"
    for hf, gguf in _LINEAR.items()
    for part in ("weight", "bias")
}  # fmt: skip


@family("llama", kind="decoder", gguf=["llama"], hf=["llama"], config=Config, weights=WEIGHTS)
def llama(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return decoder("llama", c, context, rope_factors, biases=c.biases, pairs=c.pairs)


@family("mistral", kind="decoder", hf=["mistral"], config=MistralConfig, weights=WEIGHTS, saved_as="llama")
def mistral(c: MistralConfig, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return decoder("mistral", c, context, rope_factors, pairs=c.pairs)


def mask_of(window: int | None, context: int) -> str:
    """The attention mask of a layer; a window that covers the whole context is plain causal."""
    return MaskKind.CAUSAL if window is None or window >= context else MaskKind.sliding(window)


def decoder(
    name: str, c: DecoderConfig, context: int, rope_factors: Array | None, *, stage: type[DecoderLayer] = LlamaDecoder,
    ffn: Callable[[int], FlowStage | None] = lambda i: None, biases: Biases = NO_BIASES, pairs: bool = False,
) -> ModelFlow:  # fmt: skip
    """The flow of Llama and of relatives that differ in switches, in the layer stage or in the feed-forward."""

    def layer(i: int) -> FlowStage:
        return stage(
            f"model.layers.{i}", c.heads, c.kv_heads, c.head_dim, c.eps, layer_idx=i,
            mask=mask_of(c.window(i), context), attention_bias=biases.qkv_bias, output_bias=biases.output_bias,
            mlp_bias=biases.mlp_bias, intermediate_size=c.ffn, activation=c.activation, ffn=ffn(i),
        )  # fmt: skip

    rope = rope_stage(c.rope, context, rope_factors, style="pairs" if pairs else "halves")
    return (
        ModelFlow(name).input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(c.layers, c.kv_heads, c.head_dim)
        .stage(rope).token_embed(shape=(c.vocab, c.dim))
        .repeat_layers(c.layers, layer).final_norm(c.eps).gather_last_token().lm_head(c.vocab, c.dim, tied=c.tied)
    )  # fmt: skip

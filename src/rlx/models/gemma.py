"""Gemma 1, 2 and 3: scaled embeddings, norms by 1 + weight, GeGLU; from 2 on also post-norms and sliding windows.

Gemma 2 norms the output of each sublayer, caps scores and logits, and gives every second layer a sliding window. Gemma
3 norms q and k instead of capping scores; five of six layers have a window and a RoPE base of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, GemmaDecoder, GemmaRmsNorm, GemmaStyle, RmsNorm
from rlx.formats import TensorFile
from rlx.models import llama, qwen3
from rlx.models.config import FULL, SLIDING, TEXT_PREFIXES, DecoderConfig, Ignorable, group, key, text_settings
from rlx.models.config_fields import rope_base_key, without
from rlx.models.family import family
from rlx.models.gemma_base import ATTENTION_CAP, BIASES, FINAL_CAP, GemmaConfig, LocalRope, Scores, Windows
from rlx.models.rope import Rope, of_layer_kind, rope_stage
from rlx.types import sym


@dataclass(frozen=True)
class Config(GemmaConfig):
    """Gemma's configuration: no caps, full attention in all layers."""

    STYLE: ClassVar[str] = GemmaStyle.GEMMA

    activation: str = key(hf="hidden_act", default="gelu_pytorch_tanh")
    scores: Scores = group(Scores, attention_cap=None, final_cap=None, query_scalar=None)
    windows: Windows = group(Windows, sliding_window=None, layer_types=None, period=None)


@dataclass(frozen=True)
class Config2(GemmaConfig):
    """Gemma 2's configuration: every second layer has a sliding window."""

    STYLE: ClassVar[str] = GemmaStyle.GEMMA2
    GGUF_IGNORABLE: ClassVar[Ignorable] = without(DecoderConfig.GGUF_IGNORABLE, ATTENTION_CAP, FINAL_CAP)
    PERIOD: ClassVar[int] = 2
    LARGEST: ClassVar[int] = 46


# transformers has a score cap in Gemma 3's configuration, which its model ignores.
SCORES3 = {"attention_cap": None, "final_cap": key(gguf=FINAL_CAP, hf=FINAL_CAP, default=None)}


@dataclass(frozen=True)
class Config3(GemmaConfig):
    """Gemma 3's configuration: five of six layers have a sliding window and a RoPE base of their own."""

    STYLE: ClassVar[str] = GemmaStyle.GEMMA3
    GGUF_IGNORABLE: ClassVar[Ignorable] = without(DecoderConfig.GGUF_IGNORABLE, FINAL_CAP)
    PERIOD: ClassVar[int] = 6
    LARGEST: ClassVar[int] = 62

    rope_base: float = rope_base_key(1_000_000.0)
    scores: Scores = group(Scores, **SCORES3)
    local: LocalRope = group(LocalRope)

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return super().inferred_from_gguf(file) | LocalRope.windows_of_gguf(file)

    @property
    def local_rope(self) -> Rope:
        return self.local.rope(self.head_dim, self.trained)


# Defaults of Gemma 3, which multimodal configurations omit.
_USUAL = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
}  # fmt: skip


def rename_activation(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Before version 5, `transformers` ignored Gemma's `hidden_act` and used `hidden_activation`."""
    if "hidden_activation" not in settings and not str(settings.get("transformers_version")).startswith("4."):
        return settings
    return {**settings, "hidden_act": settings.get("hidden_activation") or "gelu_pytorch_tanh"}


def split_rope_parameters(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Moves both kinds of RoPE from `rope_parameters` of newer files to the original names."""
    settings = text_settings(settings, where, _USUAL)
    ropes = settings.get("rope_parameters")
    if not isinstance(ropes, Mapping) or not any(isinstance(ropes.get(kind), Mapping) for kind in (FULL, SLIDING)):
        return settings
    full, local = (of_layer_kind(ropes, kind, where) for kind in (FULL, SLIDING))
    theta = local.pop("rope_theta", None)
    moved = {"rope_parameters": full, "rope_local_scaling": local, "rope_local_base_freq": theta}
    return {**settings, "rope_scaling": None, **moved}


_LAYER = "model.layers.{i}"
WEIGHTS = {n: g for n, g in llama.WEIGHTS.items() if not n.endswith(".bias")} | dict.fromkeys(BIASES, "")
WEIGHTS2 = WEIGHTS | {
    f"{_LAYER}.post_attention_layernorm.weight": "blk.{i}.post_attention_norm.weight",
    f"{_LAYER}.pre_feedforward_layernorm.weight": "blk.{i}.ffn_norm.weight",
    f"{_LAYER}.post_feedforward_layernorm.weight": "blk.{i}.post_ffw_norm.weight",
}
WEIGHTS3 = WEIGHTS2 | qwen3.NORMS


@family(
    "gemma", kind="decoder", gguf=["gemma"], hf=["gemma"], config=Config, weights=WEIGHTS, settings=rename_activation
)
def gemma(c: GemmaConfig, context: int, rope_factors: Array | None = None) -> ModelFlow:
    def layer(i: int) -> FlowStage:
        window = c.window(i)
        return GemmaDecoder(
            f"model.layers.{i}", c.heads, c.kv_heads, c.head_dim, c.eps, layer_idx=i, style=c.STYLE,
            mask=llama.mask_of(window, context), score_scale=c.scores.scale(c.head_dim),
            attn_logit_softcap=c.scores.attention_cap,
            unit_offset=c.unit_offset, rope="rope" if window is None else "rope.local", intermediate_size=c.ffn,
            activation=c.activation, attention_bias=c.attention_bias, output_bias=c.attention_bias,
        )  # fmt: skip

    norm = GemmaRmsNorm if c.unit_offset else RmsNorm
    local = rope_stage(c.local_rope, context, name="rope.local")
    return (
        ModelFlow(c.STYLE).input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(c.layers, c.kv_heads, c.head_dim)
        .when(any(c.window(i) for i in range(c.layers)), lambda flow: flow.stage(local))
        .stage(rope_stage(c.rope, context, rope_factors)).token_embed(shape=(c.vocab, c.dim))
        .embed_scale(c.dim).repeat_layers(c.layers, layer).stage(norm("model.norm.weight", c.eps)).gather_last_token()
        .lm_head(c.vocab, c.dim, tied=c.tied)
        .when(c.scores.final_cap is not None, lambda flow: flow.logit_softcap(c.scores.final_cap or 0))
    )  # fmt: skip


family("gemma2", kind="decoder", gguf=["gemma2"], hf=["gemma2"], config=Config2, weights=WEIGHTS2)(gemma.flow)
family(
    "gemma3", kind="decoder", gguf=["gemma3"], hf=["gemma3_text", "gemma3"], config=Config3, weights=WEIGHTS3,
    settings=split_rope_parameters, prefixes=TEXT_PREFIXES,
)(gemma.flow)  # fmt: skip

"""Gemma 1, 2 and 3: scaled embeddings, norms by 1 + weight, GeGLU, and from 2 on more norms, windows and other bases.

Gemma 2 norms what a layer adds, caps scores and logits, and lets every second layer see a window only. Gemma 3 norms
queries and keys instead of capping, and layers with a window, five of six, turn by a base of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlx.errors import FormatError
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, GemmaDecoder, GemmaRmsNorm, GemmaStyle, RmsNorm
from rlx.flow.weights import Array
from rlx.formats import TensorFile
from rlx.models import llama, qwen3
from rlx.models.config import (
    FULL,
    MAX_HEAD_DIM,
    MAX_LAYERS,
    MAX_POSITIONS,
    SLIDING,
    TEXT_PREFIXES,
    DecoderConfig,
    check_layer_types,
    key,
    text_settings,
)
from rlx.models.family import family
from rlx.models.rope import Rope, of_layer_kind, rope_stage
from rlx.types import sym

_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Gemma's configuration."""

    STYLE: ClassVar[str] = GemmaStyle.GEMMA
    HF_NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **DecoderConfig.HF_NEUTRAL, "use_bidirectional_attention": (None, False),
    }  # fmt: skip
    IN_GGUF: ClassVar[Mapping[str, Any]] = {"unit_offset": False}

    head_dim_given: int | None = key(gguf="attention.key_length", hf="head_dim", default=256, most=MAX_HEAD_DIM)
    activation: str = key(hf="hidden_act", default="gelu_pytorch_tanh")
    tied: bool = key(hf="tie_word_embeddings", default=True)
    attention_bias: bool = key(hf="attention_bias", default=False)  # on q, k, v and the output
    unit_offset: bool = True  # norms lack the 1; converters to GGUF add it
    attention_cap: float | None = None
    final_cap: float | None = None
    query_scalar: float | None = None

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {"unit_offset": False}

    def left_out(self) -> tuple[str, ...]:
        return () if self.attention_bias else tuple(name for name in WEIGHTS if name.endswith(".bias"))

    @property
    def score_scale(self) -> float:
        return float((self.query_scalar or self.head_dim) ** -0.5)

    @property
    def local_rope(self) -> Rope:
        """How layers with a window turn."""
        return self.rope


@dataclass(frozen=True)
class Config2(Config):
    """Gemma 2's."""

    STYLE: ClassVar[str] = GemmaStyle.GEMMA2
    GGUF_NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        name: values for name, values in DecoderConfig.GGUF_NEUTRAL.items() if name not in _CAPS
    }
    PERIOD: ClassVar[int] = 2  # the last of so many layers sees everything
    LARGEST: ClassVar[int] = 46  # layers of the size whose scores are scaled by the width; GGUF does not say it

    activation: str = key(hf="hidden_activation", default="gelu_pytorch_tanh")
    attention_cap: float | None = key(gguf=_CAPS[0], hf=_CAPS[0], default=50.0)
    final_cap: float | None = key(gguf=_CAPS[1], hf=_CAPS[1], default=30.0)
    query_scalar: float | None = key(hf="query_pre_attn_scalar", default=256.0)
    sliding_window: int | None = key(
        gguf="attention.sliding_window", hf="sliding_window", default=4096, most=MAX_POSITIONS
    )
    layer_types: tuple[str, ...] | None = key(hf="layer_types", default=None)
    period: int | None = key(hf="sliding_window_pattern", default=None, most=MAX_LAYERS)

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        prefix = file.metadata.get("general.architecture")
        names = ("block_count", "embedding_length", "attention.head_count")
        layers, width, heads = (file.metadata.get(f"{prefix}.{name}") for name in names)
        scalar = None
        if layers == cls.LARGEST and isinstance(width, int) and isinstance(heads, int) and heads:
            scalar = width / heads
        return {"unit_offset": False, "query_scalar": scalar}

    def window(self, layer: int) -> int | None:
        if self.layer_types is not None:
            return self.sliding_window if self.layer_types[layer] == SLIDING else None
        return self.sliding_window if (layer + 1) % (self.period or self.PERIOD) else None

    def check(self, where: str) -> None:
        super().check(where)
        check_layer_types(where, self.layer_types, self.layers, self.sliding_window)
        for cap in (self.attention_cap, self.final_cap, self.query_scalar):
            if cap == 0:
                raise FormatError(f"{where}: a cap or query_pre_attn_scalar is 0, expected a number above it or none")


@dataclass(frozen=True)
class Config3(Config2):
    """Gemma 3's."""

    STYLE: ClassVar[str] = GemmaStyle.GEMMA3
    GGUF_NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {**Config2.GGUF_NEUTRAL, _CAPS[0]: (0,)}
    PERIOD: ClassVar[int] = 6
    LARGEST: ClassVar[int] = 62

    attention_cap: float | None = None  # transformers has the setting, and its model does nothing with it
    final_cap: float | None = key(gguf=_CAPS[1], hf=_CAPS[1], default=None)
    rope_base: float = key(gguf="rope.freq_base", hf="rope_theta", default=1_000_000.0)
    local_base: float = key(gguf="rope.freq_base_swa", hf="rope_local_base_freq", default=10_000.0)
    local_scaling: Mapping[str, Any] | None = key(hf="rope_local_scaling", default=None)

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        window = f"{file.metadata.get('general.architecture')}.attention.sliding_window"
        return super().known_of_gguf(file) | ({} if window in file.metadata else {"sliding_window": None})

    @property
    def local_rope(self) -> Rope:
        return Rope(self.head_dim, self.local_base, self.trained, self.local_scaling or {})


# What the files of models that also see images leave out of Gemma 3's settings.
_USUAL = {
    "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
    "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 131072, "rms_norm_eps": 1e-6,
}  # fmt: skip


def first_activation(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Before its version 5, `transformers` did not heed Gemma's `hidden_act`: there was `hidden_activation`."""
    if "hidden_activation" not in settings and not str(settings.get("transformers_version")).startswith("4."):
        return settings
    return {**settings, "hidden_act": settings.get("hidden_activation") or "gelu_pytorch_tanh"}


def by_layer_kind(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Newer files keep both kinds of RoPE in `rope_parameters`; here they get the names of the older ones."""
    settings = text_settings(settings, where, _USUAL)
    given = settings.get("rope_parameters")
    if not isinstance(given, Mapping) or not any(isinstance(given.get(kind), Mapping) for kind in (FULL, SLIDING)):
        return settings
    full, local = (of_layer_kind(given, kind, where) for kind in (FULL, SLIDING))
    theta = local.pop("rope_theta", None)
    moved = {"rope_parameters": full, "rope_local_scaling": local, "rope_local_base_freq": theta}
    return {**settings, "rope_scaling": None, **moved}


_LAYER = "model.layers.{i}"
_NO_GGUF = {n: "" for n in llama.WEIGHTS if n.endswith(".bias") and ".self_attn." in n}
WEIGHTS = {n: g for n, g in llama.WEIGHTS.items() if not n.endswith(".bias")} | _NO_GGUF
WEIGHTS2 = WEIGHTS | {
    f"{_LAYER}.post_attention_layernorm.weight": "blk.{i}.post_attention_norm.weight",
    f"{_LAYER}.pre_feedforward_layernorm.weight": "blk.{i}.ffn_norm.weight",
    f"{_LAYER}.post_feedforward_layernorm.weight": "blk.{i}.post_ffw_norm.weight",
}
WEIGHTS3 = WEIGHTS2 | qwen3.NORMS


@family(
    "gemma", kind="decoder", gguf=["gemma"], hf=["gemma"], config=Config, weights=WEIGHTS, settings=first_activation
)
def gemma(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    def layer(i: int) -> FlowStage:
        window = c.window(i)
        return GemmaDecoder(
            f"model.layers.{i}", c.heads, c.kv_heads, c.head_dim, c.eps, layer_idx=i, style=c.STYLE,
            mask=llama.mask_of(window, context), score_scale=c.score_scale, attn_logit_softcap=c.attention_cap,
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
        .when(c.final_cap is not None, lambda flow: flow.logit_softcap(c.final_cap or 0))
    )  # fmt: skip


family("gemma2", kind="decoder", gguf=["gemma2"], hf=["gemma2"], config=Config2, weights=WEIGHTS2)(gemma.flow)
family(
    "gemma3", kind="decoder", gguf=["gemma3"], hf=["gemma3_text", "gemma3"], config=Config3, weights=WEIGHTS3,
    settings=by_layer_kind, prefixes=TEXT_PREFIXES,
)(gemma.flow)  # fmt: skip

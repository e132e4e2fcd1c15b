"""Configuration shared by Gemma 1 to 3 and EmbeddingGemma."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.formats import TensorFile
from rlx.models.config import MAX_LAYERS, SLIDING, DecoderConfig, Ignorable, check_layer_types, group, key
from rlx.models.config_fields import head_dim_key, said_in_gguf, window_key
from rlx.models.rope import Rope

ATTENTION_CAP, FINAL_CAP = "attn_logit_softcapping", "final_logit_softcapping"


@dataclass(frozen=True)
class Windows:
    """Which layers have a sliding window: all but the last of every `period`, or those of a list."""

    sliding_window: int | None = window_key(4096)
    layer_types: tuple[str, ...] | None = key(hf="layer_types", default=None)
    period: int | None = key(hf="sliding_window_pattern", default=None, maximum=MAX_LAYERS)

    def of(self, layer: int, period: int) -> int | None:
        """The window of a layer, or None for full attention. `period` is the family's default."""
        if self.layer_types is not None:
            return self.sliding_window if self.layer_types[layer] == SLIDING else None
        return self.sliding_window if (layer + 1) % (self.period or period) else None


@dataclass(frozen=True)
class Scores:
    """Scaling and caps of scores and logits, from Gemma 2 on."""

    attention_cap: float | None = key(gguf=ATTENTION_CAP, hf=ATTENTION_CAP, default=50.0)
    final_cap: float | None = key(gguf=FINAL_CAP, hf=FINAL_CAP, default=30.0)
    query_scalar: float | None = key(hf="query_pre_attn_scalar", default=256.0)

    def scale(self, head_dim: int) -> float:
        return float((self.query_scalar or head_dim) ** -0.5)

    def check(self, where: str) -> None:
        for cap in (self.attention_cap, self.final_cap, self.query_scalar):
            if cap == 0:
                raise FormatError(f"{where}: a cap or query_pre_attn_scalar is 0, expected a number above it or none")

    @staticmethod
    def scalar_of_gguf(file: TensorFile, largest: int) -> float | None:
        """Inferred, since GGUF does not store it: the model with the most layers is scaled by its width."""
        names = ("block_count", "embedding_length", "attention.head_count")
        layers, width, heads = said_in_gguf(file.metadata, *names)
        wide = layers == largest and isinstance(width, int) and isinstance(heads, int) and heads
        return width / heads if wide else None


@dataclass(frozen=True)
class LocalRope:
    """RoPE of the sliding layers, from Gemma 3 on."""

    local_base: float = key(gguf="rope.freq_base_swa", hf="rope_local_base_freq", default=10_000.0)
    local_scaling: Mapping[str, Any] | None = key(hf="rope_local_scaling", default=None)

    def rope(self, head_dim: int, trained: int) -> Rope:
        return Rope(head_dim, self.local_base, trained, self.local_scaling or {})

    @staticmethod
    def windows_of_gguf(file: TensorFile) -> dict[str, Any]:
        """A file that states no window has none."""
        return {"sliding_window": None} if said_in_gguf(file.metadata, "attention.sliding_window") == [None] else {}


@dataclass(frozen=True)
class GemmaConfig(DecoderConfig):
    """Scaled embeddings, norms by 1 + weight, GeGLU; scores, windows and RoPE by the groups."""

    STYLE: ClassVar[str]
    HF_IGNORABLE: ClassVar[Ignorable] = {**DecoderConfig.HF_IGNORABLE, "use_bidirectional_attention": (None, False)}
    IN_GGUF: ClassVar[Mapping[str, Any]] = {"unit_offset": False}
    PERIOD: ClassVar[int] = 1  # the last of every PERIOD layers has full attention
    LARGEST: ClassVar[int] = 0  # layer count of the model whose scores are scaled by width; GGUF does not store it

    stated_head_dim: int | None = head_dim_key(256)
    activation: str = key(hf="hidden_activation", default="gelu_pytorch_tanh")
    tied: bool = key(hf="tie_word_embeddings", default=True)
    attention_bias: bool = key(hf="attention_bias", default=False)  # on q, k, v and the output
    unit_offset: bool = True  # the stored norms lack the 1; GGUF converters add it
    scores: Scores = group(Scores)
    windows: Windows = group(Windows)

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {**cls.IN_GGUF, "query_scalar": Scores.scalar_of_gguf(file, cls.LARGEST)}

    @property
    def local_rope(self) -> Rope:
        """RoPE of the sliding layers."""
        return self.rope

    def window(self, layer: int) -> int | None:
        return self.windows.of(layer, self.PERIOD)

    def check(self, where: str) -> None:
        super().check(where)
        check_layer_types(where, self.windows.layer_types, self.layers, self.windows.sliding_window)
        self.scores.check(where)

    def omitted_weights(self) -> tuple[str, ...]:
        return () if self.attention_bias else BIASES


BIASES = tuple(f"model.layers.{{i}}.self_attn.{name}_proj.bias" for name in "qkvo")

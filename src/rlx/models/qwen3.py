"""Qwen3: Llama with per-head RMSNorm on q and k before RoPE, and an independent head_dim."""

from __future__ import annotations

from typing import Any, ClassVar

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import Qwen3Decoder
from rlx.formats import TensorFile
from rlx.models import llama
from rlx.models.config import DecoderConfig, Ignorable, group
from rlx.models.config_fields import NO_WINDOW, Biases, QwenWindows, head_dim_key
from rlx.models.embedding_models import embedder
from rlx.models.family import family


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Qwen3's configuration: biases are a switch, windows are as in Qwen2."""

    GGUF_IGNORABLE: ClassVar[Ignorable] = NO_WINDOW

    stated_head_dim: int | None = head_dim_key(128)
    biases: Biases = group(Biases)
    windows: QwenWindows = group(QwenWindows)

    @classmethod
    def inferred_from_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {**Biases.in_gguf(file, "qkv_bias", "output_bias")}

    def window(self, layer: int) -> int | None:
        return self.windows.of(layer)

    def check(self, where: str) -> None:
        super().check(where)
        self.windows.check(where, self.layers)

    def omitted_weights(self) -> tuple[str, ...]:
        return self.biases.omitted_weights(WEIGHTS)


NORMS = {f"model.layers.{{i}}.self_attn.{n}_norm.weight": f"blk.{{i}}.attn_{n}_norm.weight" for n in "qk"}
WEIGHTS = {name: gguf for name, gguf in llama.WEIGHTS.items() if not name.endswith("_proj.bias") or "attn" in name}
WEIGHTS |= NORMS


@family("qwen3", kind="decoder", gguf=["qwen3"], hf=["qwen3"], config=Config, weights=WEIGHTS)
def qwen3(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return llama.decoder("qwen3", c, context, rope_factors, stage=Qwen3Decoder, biases=c.biases)


qwen3_embedding = embedder(qwen3)

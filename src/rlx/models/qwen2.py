"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values; some layers may see a window only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from rlx.flow.flow import ModelFlow
from rlx.flow.weights import Array
from rlx.formats import TensorFile
from rlx.models import llama
from rlx.models.config import MAX_LAYERS, MAX_POSITIONS, SLIDING, DecoderConfig, check_layer_types, key
from rlx.models.family import family


@dataclass(frozen=True)
class Config(llama.Config):
    """Qwen2's configuration: the biases are no switches, the window is one."""

    # which layers have the window is not in GGUF
    GGUF_NEUTRAL: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **DecoderConfig.GGUF_NEUTRAL, "attention.sliding_window": (0,)
    }  # fmt: skip

    IN_GGUF: ClassVar[Mapping[str, Any]] = {}

    attention_bias: bool = True
    output_bias: bool = False
    mlp_bias: bool = False
    use_sliding_window: bool = key(hf="use_sliding_window", default=False)
    sliding_window: int | None = key(hf="sliding_window", default=4096, most=MAX_POSITIONS)
    max_window_layers: int = key(hf="max_window_layers", default=28, least=0, most=MAX_LAYERS)
    layer_types: tuple[str, ...] | None = key(hf="layer_types", default=None)

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        return {}  # unlike Llama's, its heads turn as halves, and biases are as said here

    def window(self, layer: int) -> int | None:
        if not self.use_sliding_window:
            return None
        if self.layer_types is None:
            return self.sliding_window if layer >= self.max_window_layers else None
        return self.sliding_window if self.layer_types[layer] == SLIDING else None

    def check(self, where: str) -> None:
        super().check(where)
        window = self.sliding_window if self.use_sliding_window else None
        check_layer_types(where, self.layer_types, self.layers, window)


WEIGHTS = {
    name: gguf for name, gguf in llama.WEIGHTS.items()
    if not name.endswith(".bias") or name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
}  # fmt: skip


@family("qwen2", kind="decoder", gguf=["qwen2"], hf=["qwen2"], config=Config, weights=WEIGHTS)
def qwen2(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return llama.decoder("qwen2", c, context, rope_factors)

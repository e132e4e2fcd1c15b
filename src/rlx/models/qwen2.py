"""Qwen2 and Qwen2.5: Llama with biases on q, k and v; some layers may have a sliding window."""

from __future__ import annotations

from typing import ClassVar

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.models import llama
from rlx.models.config import DecoderConfig, Ignorable, group
from rlx.models.config_fields import NO_WINDOW, Biases, QwenWindows
from rlx.models.family import family

BIASES = Biases(qkv_bias=True, output_bias=False, mlp_bias=False)


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Qwen2's configuration: biases are fixed, the window is a switch."""

    GGUF_IGNORABLE: ClassVar[Ignorable] = NO_WINDOW

    windows: QwenWindows = group(QwenWindows)

    def window(self, layer: int) -> int | None:
        return self.windows.of(layer)

    def check(self, where: str) -> None:
        super().check(where)
        self.windows.check(where, self.layers)


WEIGHTS = {
    name: gguf for name, gguf in llama.WEIGHTS.items()
    if not name.endswith(".bias") or name.endswith(("q_proj.bias", "k_proj.bias", "v_proj.bias"))
}  # fmt: skip


@family("qwen2", kind="decoder", gguf=["qwen2"], hf=["qwen2"], config=Config, weights=WEIGHTS)
def qwen2(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return llama.decoder("qwen2", c, context, rope_factors, biases=BIASES)

"""Phi-3, 3.5 and 4: Llama with fused qkv and gate-up tensors.

Long contexts have one RoPE factor per frequency (longrope); Phi-4-mini rotates only a part of each head.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.models import llama
from rlx.models.config import DecoderConfig, Ignorable, key
from rlx.models.config_fields import check_rotary, eps_key, window_key, without
from rlx.models.family import family
from rlx.models.weight_views import Rows, WeightViews


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Phi-3's configuration: no biases; a window in all layers or in none (0 in GGUF)."""

    HF_IGNORABLE: ClassVar[Ignorable] = {
        **without(DecoderConfig.HF_IGNORABLE, "partial_rotary_factor"), "attention_bias": (None, False)
    }  # fmt: skip

    eps: float = eps_key(1e-5)
    partial: float = key(hf="partial_rotary_factor", default=1.0)
    sliding_window: int | None = window_key(None, minimum=0)

    def window(self, layer: int) -> int | None:
        return self.sliding_window or None

    @property
    def rotary(self) -> int:
        return self.rope_dim or int(self.head_dim * self.partial)

    def check(self, where: str) -> None:
        if self.heads % self.kv_heads == 0:
            check_rotary(where, self.rotary, self.head_dim)
        super().check(where)


def long_settings(settings: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Adds Phi-3's original context length as in `transformers`, and renames its first kind of scaling."""
    completed = {"original_max_position_embeddings": 4096, **settings}
    for name in ("rope_scaling", "rope_parameters"):
        rope = settings.get(name)
        if isinstance(rope, Mapping) and "yarn" in (rope.get("rope_type"), rope.get("type")):
            completed[name] = {**rope, "rope_type": "longrope"}  # its name in the first files
    return completed


_LAYER = "model.layers.{i}"
_QKV, _GATE_UP = f"{_LAYER}.self_attn.qkv_proj.weight", f"{_LAYER}.mlp.gate_up_proj.weight"
_OURS = [f"{_LAYER}.{name}_proj.weight" for name in ("self_attn.q", "self_attn.k", "self_attn.v", "mlp.gate", "mlp.up")]
WEIGHTS = {n: g for n, g in llama.WEIGHTS.items() if not n.endswith(".bias") and n not in _OURS} | {
    _QKV: "blk.{i}.attn_qkv.weight",
    _GATE_UP: "blk.{i}.ffn_up.weight",
}


def weight_views(c: Config, format: str) -> WeightViews:
    """Splits q, k, v, gate and up from the fused tensors."""
    q, kv = c.heads * c.head_dim, c.kv_heads * c.head_dim
    rows = [
        Rows(_QKV, 0, q), Rows(_QKV, q, q + kv), Rows(_QKV, q + kv),
        Rows(_GATE_UP, 0, c.ffn), Rows(_GATE_UP, c.ffn),
    ]  # fmt: skip
    return dict(zip(_OURS, rows, strict=True))


@family("phi3", kind="decoder", gguf=["phi3"], hf=["phi3"], config=Config, weights=WEIGHTS, settings=long_settings,
        weight_views=weight_views)  # fmt: skip
def phi3(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return llama.decoder("phi3", c, context, rope_factors)

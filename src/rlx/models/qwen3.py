"""Qwen3: a Llama that norms each head of queries and keys before it turns, and gives heads a size of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from rlx.flow.flow import ModelFlow
from rlx.flow.stages import Qwen3Decoder
from rlx.flow.weights import Array
from rlx.formats import TensorFile
from rlx.models import llama, qwen2
from rlx.models.config import MAX_HEAD_DIM, key
from rlx.models.embedders import embedder
from rlx.models.family import family


@dataclass(frozen=True)
class Config(qwen2.Config):
    """Qwen3's configuration: biases are a switch again, and windows are as in Qwen2."""

    attention_bias: bool = key(hf="attention_bias", default=False)
    output_bias: bool = key(hf="attention_bias", default=False)
    head_dim_given: int | None = key(gguf="attention.key_length", hf="head_dim", default=128, most=MAX_HEAD_DIM)

    @classmethod
    def known_of_gguf(cls, file: TensorFile) -> dict[str, Any]:
        tensors = {"attention_bias": "attn_q", "output_bias": "attn_output"}
        return {name: f"blk.0.{tensor}.bias" in file for name, tensor in tensors.items()}


NORMS = {f"model.layers.{{i}}.self_attn.{n}_norm.weight": f"blk.{{i}}.attn_{n}_norm.weight" for n in "qk"}
WEIGHTS = {name: gguf for name, gguf in llama.WEIGHTS.items() if not name.endswith("_proj.bias") or "attn" in name}
WEIGHTS |= NORMS


@family("qwen3", kind="decoder", gguf=["qwen3"], hf=["qwen3"], config=Config, weights=WEIGHTS)
def qwen3(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    return llama.decoder("qwen3", c, context, rope_factors, Qwen3Decoder)


qwen3_embedding = embedder(qwen3)

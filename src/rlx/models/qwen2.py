"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values."""

from __future__ import annotations

from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, Qwen3Decoder
from rlx.flow.weights import Array
from rlx.models import llama
from rlx.models.family import family

Config = llama.Config
WEIGHTS = llama.WEIGHTS | {
    "model.layers.{i}.self_attn.q_proj.bias": "blk.{i}.attn_q.bias",
    "model.layers.{i}.self_attn.k_proj.bias": "blk.{i}.attn_k.bias",
    "model.layers.{i}.self_attn.v_proj.bias": "blk.{i}.attn_v.bias",
}


@family("qwen2", kind="decoder", gguf=["qwen2"], hf=["qwen2"], config=Config, weights=WEIGHTS)
def qwen2(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    def layer(i: int) -> FlowStage:
        return Qwen3Decoder(
            f"model.layers.{i}", c.heads, c.kv_heads, c.head_dim, c.eps, i, attention_bias=True, qk_norm=False
        )

    return llama.decoder("qwen2", c, context, rope_factors, layer)

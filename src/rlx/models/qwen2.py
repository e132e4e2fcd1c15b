"""Qwen2 and Qwen2.5: a Llama with biases on queries, keys and values."""

from __future__ import annotations

from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, Qwen3Decoder
from rlx.flow.weights import Array
from rlx.models import llama
from rlx.models.family import family
from rlx.models.rope import rope_tables
from rlx.types import sym

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

    cos, sin = rope_tables(context, c.head_dim, c.rope_base, c.rope_scaling, rope_factors)
    return (
        ModelFlow("qwen2").input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(c.layers, c.kv_heads, c.head_dim)
        .rope_tables(cos, sin).token_embed().repeat_layers(c.layers, layer)
        .final_norm(c.eps).gather_last_token().lm_head(c.vocab, c.dim, tied=c.tied)
    )  # fmt: skip

"""Llama 2, 3.x and relatives such as SmolLM2: pre-norm decoder, rotary positions, grouped heads, SwiGLU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, LlamaDecoder
from rlx.flow.weights import Array
from rlx.models.config import DecoderConfig, key
from rlx.models.family import family
from rlx.models.rope import rope_tables
from rlx.types import sym


@dataclass(frozen=True)
class Config(DecoderConfig):
    """Llama's configuration is the common one; GGUF files keep q and k in pairs order."""

    vocab: int = key(gguf="vocab_size", hf="vocab_size", default=0)
    pairs: bool = key(hf="rope_interleaved", default=False)


WEIGHTS = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "model.layers.{i}.input_layernorm.weight": "blk.{i}.attn_norm.weight",
    "model.layers.{i}.post_attention_layernorm.weight": "blk.{i}.ffn_norm.weight",
    "model.layers.{i}.self_attn.q_proj.weight": "blk.{i}.attn_q.weight",
    "model.layers.{i}.self_attn.k_proj.weight": "blk.{i}.attn_k.weight",
    "model.layers.{i}.self_attn.v_proj.weight": "blk.{i}.attn_v.weight",
    "model.layers.{i}.self_attn.o_proj.weight": "blk.{i}.attn_output.weight",
    "model.layers.{i}.mlp.gate_proj.weight": "blk.{i}.ffn_gate.weight",
    "model.layers.{i}.mlp.up_proj.weight": "blk.{i}.ffn_up.weight",
    "model.layers.{i}.mlp.down_proj.weight": "blk.{i}.ffn_down.weight",
}


@family("llama", kind="decoder", gguf=["llama"], hf=["llama", "mistral"], config=Config, weights=WEIGHTS)
def llama(c: Config, context: int, rope_factors: Array | None = None) -> ModelFlow:
    def layer(i: int) -> FlowStage:
        return LlamaDecoder(f"model.layers.{i}", c.heads, c.kv_heads, c.head_dim, c.eps, i)

    return decoder("llama", c, context, rope_factors, layer)


def decoder(
    name: str, c: Config, context: int, rope_factors: Array | None, layer: Callable[[int], FlowStage]
) -> ModelFlow:
    """What Llama and its relatives share around their layers."""
    cos, sin = rope_tables(context, c.head_dim, c.rope_base, c.rope_scaling, rope_factors)
    return (
        ModelFlow(name).input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(c.layers, c.kv_heads, c.head_dim)
        .rope_tables(cos, sin, "pairs" if c.pairs else "halves").token_embed().repeat_layers(c.layers, layer)
        .final_norm(c.eps).gather_last_token().lm_head(c.vocab, c.dim, tied=c.tied)
    )  # fmt: skip

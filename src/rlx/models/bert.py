"""BERT and MiniLM: encoder with learned positions, post-norm residuals, GELU feed-forward. Outputs hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import BertEncoderLayer, FlowStage
from rlx.models.config import EncoderConfig, key
from rlx.models.family import family
from rlx.types import sym


@dataclass(frozen=True)
class Config(EncoderConfig):
    """BERT's configuration."""

    HF_IGNORABLE: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **EncoderConfig.HF_IGNORABLE, "position_embedding_type": (None, "absolute"),
        "add_cross_attention": (None, False),
    }  # fmt: skip

    types: int = key(hf="type_vocab_size", default=2)
    causal: bool = key(hf="is_decoder", default=False)  # causal attention


_LAYER = "encoder.layer.{i}"
WEIGHTS = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.position_embeddings.weight": "position_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "embeddings.LayerNorm.weight": "token_embd_norm.weight",
    "embeddings.LayerNorm.bias": "token_embd_norm.bias",
} | {
    f"{_LAYER}.{hf}.{part}": f"blk.{{i}}.{gguf}.{part}"
    for hf, gguf in {
        "attention.self.query": "attn_q", "attention.self.key": "attn_k", "attention.self.value": "attn_v",
        "attention.output.dense": "attn_output", "attention.output.LayerNorm": "attn_output_norm",
        "intermediate.dense": "ffn_up", "output.dense": "ffn_down", "output.LayerNorm": "layer_output_norm",
    }.items()
    for part in ("weight", "bias")
}  # fmt: skip


@family("bert", kind="encoder", gguf=["bert"], hf=["bert"], config=Config, weights=WEIGHTS, prefixes=["bert."])
def bert(c: Config) -> ModelFlow:
    def layer(i: int) -> FlowStage:
        return BertEncoderLayer(
            f"encoder.layer.{i}", c.dim, c.heads, c.head_dim, c.eps, intermediate_size=c.ffn, activation=c.activation,
            causal=c.causal,
        )  # fmt: skip

    return (
        ModelFlow("bert").input("tokens", (sym.BATCH, sym.SEQ), "i32")
        .token_embed("embeddings.word_embeddings.weight", shape=(c.vocab, c.dim))
        .gather_add("token_types", "embeddings.token_type_embeddings.weight", rows=c.types)
        .gather_add("positions", "embeddings.position_embeddings.weight", rows=c.positions)
        .layer_norm("embeddings.LayerNorm", c.eps).repeat_layers(c.layers, layer)
    )  # fmt: skip

"""NomicBERT: BERT with RoPE, fused qkv, SwiGLU and almost no biases.

`transformers` and Nomic's own code use different names in the configuration; both are read.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, NomicEncoderLayer
from rlx.models.config import MAX_HEAD_DIM, EncoderConfig, key, unsupported
from rlx.models.family import family
from rlx.models.rope import Rope, rope_stage, scaling_of_hf
from rlx.types import sym


@dataclass(frozen=True)
class Config(EncoderConfig):
    """NomicBERT's configuration."""

    HF_IGNORABLE: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **EncoderConfig.HF_IGNORABLE,
        "prenorm": (None, False), "parallel_block": (None, False), "causal": (None, False),
        "qkv_proj_bias": (None, False), "mlp_fc1_bias": (None, False), "mlp_fc2_bias": (None, False),
        "use_rms_norm": (None, False), "rotary_emb_fraction": (None, 1), "rotary_emb_interleaved": (None, False),
        "rotary_emb_scale_base": (None,), "scale_attn_weights": (None, True), "num_experts": (None, 0, 1),
        "scale_attn_by_inverse_layer_idx": (None, False), "moe_every_n_layers": (None, 0, -1),
    }  # fmt: skip
    GGUF_IGNORABLE: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **EncoderConfig.GGUF_IGNORABLE, "rope.scaling.type": ("none",), "rope.scaling.factor": (0, 1),
    }  # fmt: skip

    types: int = key(hf="type_vocab_size", default=2)
    rope_base: float = key(gguf="rope.freq_base", hf="rope_theta", default=10000.0)
    rope_scaling: Mapping[str, Any] | None = key(hf="rope_scaling", default=None)
    stated_head_dim: int | None = key(hf="head_dim", default=None, maximum=MAX_HEAD_DIM)
    activation: str = key(hf="hidden_act", default="silu")

    @property
    def head_dim(self) -> int:
        return self.stated_head_dim or self.dim // self.heads

    @property
    def rope(self) -> Rope:
        return Rope(self.head_dim, self.rope_base, self.positions, self.rope_scaling or {})

    def check(self, where: str) -> None:
        if self.stated_head_dim is None:
            super().check(where)
        if self.head_dim % 2:
            raise unsupported(where, "head_dim", self.head_dim, hint="rotary positions turn pairs")
        self.rope.check(where)


WEIGHTS = {
    "embeddings.word_embeddings.weight": "token_embd.weight",
    "embeddings.token_type_embeddings.weight": "token_types.weight",
    "emb_ln.weight": "token_embd_norm.weight",
    "emb_ln.bias": "token_embd_norm.bias",
} | {
    f"encoder.layers.{{i}}.{hf}": f"blk.{{i}}.{gguf}"
    for hf, gguf in {
        "attn.Wqkv.weight": "attn_qkv.weight", "attn.out_proj.weight": "attn_output.weight",
        "norm1.weight": "attn_output_norm.weight", "norm1.bias": "attn_output_norm.bias",
        "mlp.fc11.weight": "ffn_up.weight", "mlp.fc12.weight": "ffn_gate.weight", "mlp.fc2.weight": "ffn_down.weight",
        "norm2.weight": "layer_output_norm.weight", "norm2.bias": "layer_output_norm.bias",
    }.items()
}  # fmt: skip
_THEIRS = {
    "n_embd": "hidden_size", "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
    "n_inner": "intermediate_size", "n_positions": "max_position_embeddings", "layer_norm_epsilon": "layer_norm_eps",
    "rotary_emb_base": "rope_theta",
}  # fmt: skip
_GATED = {"swiglu": "silu", "geglu": "gelu"}


def settings(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Translates a configuration to the names of `transformers`."""
    if "n_embd" not in config:
        return {**config, **scaling_of_hf({"rope_theta": 1000.0, **config}, where)}
    renamed = {_THEIRS.get(name, name): value for name, value in config.items()}
    act = config.get("activation_function")
    if not isinstance(act, str) or act not in _GATED:
        raise unsupported(where, "activation_function", act, hint=f"known: {', '.join(_GATED)}")
    if config.get("rotary_scaling_factor") is not None:  # unscaled up to this length
        renamed["max_position_embeddings"] = config.get("max_trained_positions", 2048)
    return renamed | {"hidden_act": _GATED[act]}


@family("nomic-bert", kind="encoder", gguf=["nomic-bert"], hf=["nomic_bert"], config=Config, weights=WEIGHTS,
        prefixes=["bert.", "nomic_bert."], settings=settings)  # fmt: skip
def nomic_bert(c: Config) -> ModelFlow:
    def layer(i: int) -> FlowStage:
        return NomicEncoderLayer(
            f"encoder.layers.{i}", c.dim, c.heads, c.head_dim, c.eps, intermediate_size=c.ffn, activation=c.activation
        )

    return (
        ModelFlow("nomic-bert").input("tokens", (sym.BATCH, sym.SEQ), "i32")
        .input("positions", (sym.BATCH, sym.SEQ), "i32")
        .stage(rope_stage(c.rope, c.context))
        .token_embed("embeddings.word_embeddings.weight", shape=(c.vocab, c.dim))
        .gather_add("token_types", "embeddings.token_type_embeddings.weight", rows=c.types)
        .layer_norm("emb_ln", c.eps).repeat_layers(c.layers, layer)
    )  # fmt: skip

"""SigLIP's vision tower: patches without a class token; a learned query attends over them for the pooled vector.

Full SigLIP models are read too: `vision_config` and the weights under `vision_model.` are the tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import linear
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import FlowStage, GeluFfn, LayerNorm
from rlx.flow.stages.vision import pre_norm_layer
from rlx.flow.state import FlowValue
from rlx.formats.tensor_file import quoted
from rlx.models.config import key
from rlx.models.family import family
from rlx.models.vision import AddPositions, Patches, VisionConfig, named, split_attention
from rlx.types import sym


@dataclass(frozen=True)
class Config(VisionConfig):
    """The configuration of SigLIP's vision tower."""

    HF_IGNORABLE: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        **VisionConfig.HF_IGNORABLE, "vision_use_head": (None, True),
    }  # fmt: skip

    ffn: int = key(hf="intermediate_size", default=3072)
    eps: float = key(hf="layer_norm_eps", default=1e-6)
    activation: str = key(hf="hidden_act", default="gelu_pytorch_tanh")


WEIGHTS = named(
    "embeddings.patch_embedding", "post_layernorm", "head.attention.out_proj", "head.layernorm", "head.mlp.fc1",
    "head.mlp.fc2", layer="encoder.layers",
    layers=["layer_norm1", "layer_norm2", "mlp.fc1", "mlp.fc2", "self_attn.q_proj", "self_attn.k_proj",
            "self_attn.v_proj", "self_attn.out_proj"],
    vectors=["embeddings.position_embedding.weight", "head.probe", "head.attention.in_proj_weight",
             "head.attention.in_proj_bias"],
)  # fmt: skip


def settings(config: Mapping[str, Any], where: str) -> Mapping[str, Any]:
    """Selects the vision tower's part of a full model's configuration."""
    tower = config.get("vision_config", {}) if config.get("model_type") == "siglip" else config
    if not isinstance(tower, Mapping):
        raise FormatError(f"{where}: vision_config: expected an object, found {quoted(tower)}")
    return tower


@family("siglip", kind="vision model", hf=["siglip_vision_model", "siglip"], config=Config, weights=WEIGHTS,
        prefixes=["vision_model."], settings=settings)  # fmt: skip
def siglip(c: Config) -> ModelFlow:
    def layer(i: int) -> FlowStage:
        at = f"encoder.layers.{i}"
        attention = split_attention(f"{at}.self_attn", ("q_proj", "k_proj", "v_proj"), "out_proj", c)
        ffn = GeluFfn.dinov2(at, intermediate_size=c.ffn, activation=c.activation)
        return pre_norm_layer((f"{at}.layer_norm1", f"{at}.layer_norm2"), attention, ffn, c.eps)

    return (
        ModelFlow("siglip").input("pixels", (sym.BATCH, 3, c.image, c.image))
        .stage(Patches("embeddings.patch_embedding", c.dim, c.patch))
        .stage(AddPositions("embeddings.position_embedding.weight", (c.context, c.dim)))
        .repeat_layers(c.layers, layer)
        .named_layer("states", LayerNorm("post_layernorm.weight", "post_layernorm.bias", c.eps))
        .stage(AttentionPool("head", c)).outputs("pooled", "states")
    )  # fmt: skip


@dataclass(frozen=True)
class AttentionPool(FlowStage):
    """Attention pooling, `[batch, seq, dim]` to `[batch, dim]`: a learned query attends over tokens; then an MLP."""

    prefix: str
    c: Config

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "AttentionPool")
        c, at = self.c, f"{self.prefix}.attention"
        dim = x.shape[-1]
        weight = ctx.stored_param(f"{at}.in_proj_weight", transpose=True, shape=(dim, 3 * c.dim))
        bias = ctx.stored_param(f"{at}.in_proj_bias", shape=(3 * c.dim,))
        probe = ctx.stored_param(f"{self.prefix}.probe", shape=(1, 1, dim))
        attended = ctx.hir().one("attention_pool", x, weight, bias, probe, heads=c.heads)
        pooled = linear(ctx, attended, f"{at}.out_proj.weight", f"{at}.out_proj.bias", out=dim)
        norm = LayerNorm(f"{self.prefix}.layernorm.weight", f"{self.prefix}.layernorm.bias", c.eps)
        ffn = GeluFfn.dinov2(self.prefix, intermediate_size=c.ffn, activation=c.activation)
        return ctx.wrap(pooled + ffn.emit(ctx, norm.emit(ctx, ctx.wrap(pooled))).id)

    @property
    def path(self) -> str:
        return "pool"

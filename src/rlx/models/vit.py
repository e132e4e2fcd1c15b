"""ViT: a class token and image patches through pre-norm layers. Outputs hidden states and the class token's vector."""

from __future__ import annotations

from rlx.fast_dataclass import dataclass
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import ClsTokenPool, FlowStage, GeluFfn, LayerNorm
from rlx.flow.stages.vision import pre_norm_layer
from rlx.models.config import key
from rlx.models.family import family
from rlx.models.vision import AddPositions, Patches, PrependToken, VisionConfig, named, split_attention
from rlx.types import sym


@dataclass(frozen=True)
class Config(VisionConfig):
    """ViT's configuration."""

    ffn: int = key(hf="intermediate_size", default=3072)

    def omitted_weights(self) -> tuple[str, ...]:
        return () if self.qkv_bias else tuple(f"encoder.layer.{{i}}.attention.attention.{n}.bias" for n in QKV)


QKV = ("query", "key", "value")
WEIGHTS = named(
    "embeddings.patch_embeddings.projection", "layernorm", layer="encoder.layer",
    layers=[*(f"attention.attention.{n}" for n in QKV), "attention.output.dense", "intermediate.dense", "output.dense",
            "layernorm_before", "layernorm_after"],
    vectors=["embeddings.cls_token", "embeddings.position_embeddings"],
)  # fmt: skip


@family("vit", kind="vision model", hf=["vit"], config=Config, weights=WEIGHTS, prefixes=["vit."])
def vit(c: Config) -> ModelFlow:
    def layer(i: int) -> FlowStage:
        at = f"encoder.layer.{i}"
        attention = split_attention(f"{at}.attention", [f"attention.{n}" for n in QKV], "output.dense", c)
        ffn = GeluFfn.hf_bert(at, intermediate_size=c.ffn, activation=c.activation)
        return pre_norm_layer((f"{at}.layernorm_before", f"{at}.layernorm_after"), attention, ffn, c.eps)

    return (
        ModelFlow("vit").input("pixels", (sym.BATCH, 3, c.image, c.image))
        .stage(Patches("embeddings.patch_embeddings.projection", c.dim, c.patch))
        .stage(PrependToken("embeddings.cls_token"))
        .stage(AddPositions("embeddings.position_embeddings", (1, 1 + c.context, c.dim)))
        .repeat_layers(c.layers, layer)
        .named_layer("states", LayerNorm("layernorm.weight", "layernorm.bias", c.eps))
        .stage(ClsTokenPool()).outputs("pooled", "states")
    )  # fmt: skip

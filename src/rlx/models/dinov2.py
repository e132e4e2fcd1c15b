"""DINOv2: ViT with layer scale, SwiGLU in the largest model, optional registers, and positions for any image size."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from rlx.arrays import Array
from rlx.errors import RequestError
from rlx.fast_dataclass import dataclass
from rlx.flow.blocks import fused_gated_ffn
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.stages import ClsTokenPool, FlowStage, GeluFfn, LayerNorm
from rlx.flow.stages.vision import pre_norm_layer
from rlx.flow.state import FlowValue
from rlx.formats.images import resampling
from rlx.models.config import group, key
from rlx.models.family import family
from rlx.models.vision import Patches, PrependToken, VisionConfig, bicubic, named, split_attention
from rlx.types import dim, sym

ROWS, COLUMNS = dim("rows"), dim("columns")  # patches per image


@dataclass(frozen=True)
class DinoFfn:
    """DINOv2's feed-forward: an MLP or SwiGLU."""

    ratio: float = key(hf="mlp_ratio", default=4)
    gated: bool = key(hf="use_swiglu_ffn", default=False)

    def ffn(self, dim: int) -> int:
        wide = int(dim * self.ratio)
        return (int(wide * 2 / 3) + 7) // 8 * 8 if self.gated else wide

    def omitted_weights(self, qkv_bias: bool) -> tuple[str, ...]:
        absent = MLP if self.gated else SWIGLU
        biases = () if qkv_bias else tuple(f"attention.attention.{n}.bias" for n in QKV)
        parts = (*(f"{name}.{part}" for name in absent for part in ("weight", "bias")), *biases)
        return tuple(f"encoder.layer.{{i}}.{part}" for part in parts)


@dataclass(frozen=True)
class Config(VisionConfig):
    """DINOv2's configuration."""

    eps: float = key(hf="layer_norm_eps", default=1e-6)
    patch: int = key(hf="patch_size", default=14)
    mlp: DinoFfn = group(DinoFfn)
    registers: int = 0

    @property
    def ffn(self) -> int:
        return self.mlp.ffn(self.dim)

    def inputs(self, pixels: Array) -> dict[str, Array]:
        return positioned_inputs(self, pixels, bicubic)

    def omitted_weights(self) -> tuple[str, ...]:
        return self.mlp.omitted_weights(self.qkv_bias)


@dataclass(frozen=True)
class RegisterConfig(VisionConfig):
    """DINOv2 with registers: extra tokens that belong to no patch."""

    eps: float = key(hf="layer_norm_eps", default=1e-6)
    patch: int = key(hf="patch_size", default=16)
    mlp: DinoFfn = group(DinoFfn)
    registers: int = key(hf="num_register_tokens", default=4)

    @property
    def ffn(self) -> int:
        return self.mlp.ffn(self.dim)

    def inputs(self, pixels: Array) -> dict[str, Array]:
        return positioned_inputs(self, pixels, resampling)  # antialiased

    def omitted_weights(self) -> tuple[str, ...]:
        return self.mlp.omitted_weights(self.qkv_bias)


def positioned_inputs(c: VisionConfig, pixels: Array, stretch: Callable[[int, int], Array]) -> dict[str, Array]:
    """Graph inputs for images of any size, with the weights that resample positions to their patches.

    Pixels beyond the last full patch are cropped, as by a convolution.
    """
    height, width = pixels.shape[2:]
    rows, columns = height // c.patch, width // c.patch
    if not (rows and columns):
        raise RequestError(f"image: {height} × {width} pixels are less than a patch of {c.patch} × {c.patch}")
    return {
        "pixels": np.ascontiguousarray(pixels[:, :, : rows * c.patch, : columns * c.patch]),
        "position_rows": stretch(c.grid, rows).astype(np.float32),
        "position_columns": stretch(c.grid, columns).astype(np.float32),
    }


QKV = ("query", "key", "value")
MLP, SWIGLU = ("mlp.fc1", "mlp.fc2"), ("mlp.weights_in", "mlp.weights_out")
VECTORS = ("embeddings.cls_token", "embeddings.position_embeddings", "encoder.layer.{i}.layer_scale1.lambda1",
           "encoder.layer.{i}.layer_scale2.lambda1")  # fmt: skip
WEIGHTS = named(
    "embeddings.patch_embeddings.projection", "layernorm", layer="encoder.layer",
    layers=[*(f"attention.attention.{n}" for n in QKV), "attention.output.dense", "norm1", "norm2", *MLP, *SWIGLU],
    vectors=VECTORS,
)  # fmt: skip
REGISTER_WEIGHTS = WEIGHTS | {"embeddings.register_tokens": ""}


@family("dinov2", kind="vision model", hf=["dinov2"], config=Config, weights=WEIGHTS, prefixes=["dinov2."])
def dinov2(c: Config | RegisterConfig) -> ModelFlow:
    def layer(i: int) -> FlowStage:
        at = f"encoder.layer.{i}"
        attention = split_attention(f"{at}.attention", [f"attention.{n}" for n in QKV], "output.dense", c)
        ffn = FusedSwiGlu(f"{at}.mlp", c.ffn) if c.mlp.gated else GeluFfn.dinov2(
            at, intermediate_size=c.ffn, activation=c.activation
        )  # fmt: skip
        scales = (f"{at}.layer_scale1.lambda1", f"{at}.layer_scale2.lambda1")
        return pre_norm_layer((f"{at}.norm1", f"{at}.norm2"), attention, ffn, c.eps, scales)

    return (
        ModelFlow("dinov2").input("pixels", (sym.BATCH, 3, ROWS * c.patch, COLUMNS * c.patch))
        .stage(Patches("embeddings.patch_embeddings.projection", c.dim, c.patch))
        .stage(PrependToken("embeddings.cls_token"))
        .stage(StretchedPositions("embeddings.position_embeddings", c.grid))
        .when(bool(c.registers), lambda f: f.stage(PrependToken("embeddings.register_tokens", c.registers, after=1)))
        .repeat_layers(c.layers, layer)
        .named_layer("states", LayerNorm("layernorm.weight", "layernorm.bias", c.eps))
        .stage(ClsTokenPool()).outputs("pooled", "states")
    )  # fmt: skip


@family("dinov2-registers", kind="vision model", hf=["dinov2_with_registers"], config=RegisterConfig,
        weights=REGISTER_WEIGHTS, prefixes=["dinov2_with_registers."])  # fmt: skip
def dinov2_registers(c: RegisterConfig) -> ModelFlow:
    return dinov2.flow(c)


@dataclass(frozen=True)
class StretchedPositions(FlowStage):
    """Adds positions: the class token's own, and for patches a grid × grid table resampled to rows × columns.

    Resampling is separable and linear, so it is two matrix products with interpolation weights.
    """

    weight_key: str
    grid: int

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "StretchedPositions")
        n, width = self.grid, x.shape[-1]
        assert isinstance(width, int)
        table = ctx.load_param(self.weight_key, shape=(1, 1 + n * n, width))
        rows = ctx.input("position_rows", (ROWS, n))
        columns = ctx.input("position_columns", (COLUMNS, n))
        tall = (rows @ table[:, 1:].reshape(n, n * width)).reshape(ROWS, n, width)
        patches = (columns @ tall).reshape(1, ROWS * COLUMNS, width)
        return ctx.wrap(x + table[:, :1].concatenate(patches, axis=1))

    @property
    def path(self) -> str:
        return "embed"


@dataclass(frozen=True)
class FusedSwiGlu(FlowStage):
    """out(silu(a) · b), where one weight produces both a and b."""

    prefix: str
    intermediate_size: int

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "FusedSwiGlu")
        keys = f"{self.prefix}.weights_in", f"{self.prefix}.weights_out"
        return ctx.wrap(fused_gated_ffn(ctx, x, *keys, activation="silu", bias=True, inner=self.intermediate_size))

    @property
    def path(self) -> str:
        return "ffn"

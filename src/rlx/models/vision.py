"""Shared by vision transformers: sizes, patches, class tokens, layers, and resampled position tables."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from rlx.arrays import Array
from rlx.errors import FormatError, RequestError
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.stages import FlowStage, VitSelfAttn
from rlx.flow.state import FlowValue
from rlx.models.config import MAX_LAYERS, ModelConfig, check_activation, key

MAX_PIXELS = 1 << 14  # per side of an image


@dataclass(frozen=True)
class VisionConfig(ModelConfig):
    """Fields of every vision transformer, with the defaults of `transformers`, which files often omit."""

    HF_IGNORABLE: ClassVar[Mapping[str, tuple[Any, ...]]] = {**ModelConfig.HF_IGNORABLE, "num_channels": (None, 3)}
    vocab: ClassVar[int] = 0  # no tokens

    dim: int = key(hf="hidden_size", default=768)
    layers: int = key(hf="num_hidden_layers", default=12, maximum=MAX_LAYERS)
    heads: int = key(hf="num_attention_heads", default=12)
    eps: float = key(hf="layer_norm_eps", default=1e-12)
    image: int = key(hf="image_size", default=224, maximum=MAX_PIXELS)
    patch: int = key(hf="patch_size", default=16, maximum=MAX_PIXELS)
    activation: str = key(hf="hidden_act", default="gelu")
    qkv_bias: bool = key(hf="qkv_bias", default=True)

    @property
    def head_dim(self) -> int:
        return self.dim // self.heads

    @property
    def grid(self) -> int:
        """Patches per side of a training image."""
        return self.image // self.patch

    @property
    def context(self) -> int:
        """Patches per image."""
        return self.grid * self.grid

    def inputs(self, pixels: Array) -> dict[str, Array]:
        """Graph inputs for preprocessed images `[images, 3, height, width]`."""
        height, width = pixels.shape[2:]
        if (height, width) != (self.image, self.image):
            raise RequestError(
                f"image: {height} × {width} pixels, the model reads {self.image} × {self.image}",
                hint="what preprocessor_config.json says of sizes does not fit the model",
            )
        return {"pixels": pixels}

    def check(self, where: str) -> None:
        if self.dim % self.heads:
            raise FormatError(f"{where}: a width of {self.dim} does not split into {self.heads} heads")
        if not self.grid:
            raise FormatError(f"{where}: patches of {self.patch} pixels in images of {self.image}")
        check_activation(where, self.activation)


# -- stages ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Patches(FlowStage):
    """Patch embedding: `[batch, 3, height, width]` to `[batch, patches, dim]`, row by row."""

    prefix: str
    dim: int
    patch: int

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        pixels = ctx.need(value, "Patches")
        weight = ctx.stored_param(f"{self.prefix}.weight", shape=(self.dim, 3, self.patch, self.patch))
        bias = ctx.stored_param(f"{self.prefix}.bias", shape=(self.dim,))
        return ctx.wrap(ctx.hir().one("patch_embedding", pixels, weight, bias))

    @property
    def path(self) -> str:
        return "embed"


@dataclass(frozen=True)
class PrependToken(FlowStage):
    """Inserts learned tokens at index `after` of the sequence (default: the front)."""

    weight_key: str
    count: int = 1
    after: int = 0

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "PrependToken")
        batch, _, dim = x.shape
        tokens = ctx.load_param(self.weight_key, shape=(1, self.count, dim)).expand(shape=(batch, self.count, dim))
        if not self.after:
            return ctx.wrap(tokens.concatenate(x, axis=1))
        return ctx.wrap(x[:, : self.after].concatenate(tokens, x[:, self.after :], axis=1))

    @property
    def path(self) -> str:
        return "embed"


@dataclass(frozen=True)
class AddPositions(FlowStage):
    """Adds a position table `[1, tokens, dim]` or `[tokens, dim]`."""

    weight_key: str
    shape: tuple[int, ...]

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        return ctx.wrap(ctx.need(value, "AddPositions") + ctx.load_param(self.weight_key, shape=self.shape))

    @property
    def path(self) -> str:
        return "embed"


def split_attention(prefix: str, names: Sequence[str], out: str, c: VisionConfig) -> VitSelfAttn:
    """Attention with separate query, key and value weights."""
    q, k, v = (f"{prefix}.{name}" for name in names)
    biases = (f"{q}.bias", f"{k}.bias", f"{v}.bias") if c.qkv_bias else None
    return VitSelfAttn(
        (f"{q}.weight", f"{k}.weight", f"{v}.weight"), biases, f"{prefix}.{out}.weight", f"{prefix}.{out}.bias",
        c.heads, c.head_dim,
    )  # fmt: skip


def named(*names: str, layers: Sequence[str] = (), layer: str = "", vectors: Sequence[str] = ()) -> dict[str, str]:
    """Weight names of a vision model: each name has a weight and a bias, also per layer. GGUF has no such models."""
    every = [*names, *(f"{layer}.{{i}}.{name}" for name in layers)]
    pairs = [f"{name}.{part}" for name in every for part in ("weight", "bias")]
    return dict.fromkeys([*pairs, *vectors], "")


# -- resampled positions ---------------------------------------------------------------------------------------------
def bicubic(size: int, wanted: int) -> Array:
    """[wanted, size] interpolation weights, as in torch's `interpolate`.

    Unlike image resizing, the cubic has a = -0.75, always uses four taps even when shrinking, and repeats the border.
    """
    a = -0.75
    places = (np.arange(wanted) + 0.5) * (size / wanted) - 0.5
    first = np.floor(places)
    weights = np.zeros((wanted, size))
    for offset in (-1, 0, 1, 2):
        x = np.abs(places - first - offset)
        near, far = ((a + 2) * x - (a + 3)) * x * x + 1, (((x - 5) * x + 8) * x - 4) * a
        column = np.clip(first + offset, 0, size - 1).astype(np.int64)
        np.add.at(weights, (np.arange(wanted), column), np.where(x <= 1, near, far))
    return weights

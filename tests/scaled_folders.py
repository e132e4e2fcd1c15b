"""Folders of Hugging Face whose weights are 8-bit floats or MXFP4 with scales of their own, and what they stand for.

Nothing here shares code with `rlx`: numbers are those of `ml_dtypes`, scales are repeated by NumPy.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray[Any, Any]
E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)
E8M0 = np.dtype(ml_dtypes.float8_e8m0fnu)
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def repeated(scales: Array, shape: Sequence[int], grid: tuple[int, int]) -> Array:
    """A scale [..., rows, columns] for each number of a weight of this shape."""
    wide = scales.astype(np.float32).repeat(grid[0], axis=-2).repeat(grid[1], axis=-1)
    return wide[..., : shape[-2], : shape[-1]]


def eight_bits(weight: Array, grid: tuple[int, int], scale: Any = np.float32) -> tuple[Array, Array, Array]:
    """Codes and scales of a weight [..., n, k], one per rectangle of numbers, and the f32 that they stand for."""
    *lead, n, k = weight.shape
    rows, columns = -(-n // grid[0]), -(-k // grid[1])
    pad = [(0, 0)] * len(lead) + [(0, rows * grid[0] - n), (0, columns * grid[1] - k)]
    tiles = np.pad(np.abs(weight), pad).reshape(*lead, rows, grid[0], columns, grid[1])
    largest = tiles.max(axis=(-3, -1)) / 448
    powers = 2.0 ** np.ceil(np.log2(largest)) if np.dtype(scale) == E8M0 else largest
    scales = powers.astype(scale)
    wide = repeated(scales, weight.shape, grid)
    codes = (weight / wide).clip(-448, 448).astype(E4M3)
    return codes, scales, codes.astype(np.float32) * wide


def four_bits(weight: Array) -> tuple[Array, Array, Array]:
    """Blocks [..., n, k / 32, 16] and exponents [..., n, k / 32] of MXFP4, and the f32 that they stand for."""
    blocks = weight.reshape(*weight.shape[:-1], -1, 32)
    power = np.floor(np.log2(np.abs(blocks).max(-1))).astype(int) - 2
    scaled = blocks / 2.0 ** power[..., None]
    codes = np.abs(scaled[..., None] - FP4).argmin(-1).astype(np.uint8)
    numbers = FP4[codes] * np.float32(2.0) ** power[..., None].astype(np.float32)
    packed = codes[..., 0::2] | codes[..., 1::2] << 4  # neighbours share a byte, the first one is low
    return packed, (power + 127).astype(np.uint8), numbers.astype(np.float32).reshape(weight.shape)


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write(folder: Path, tensors: dict[str, Array], settings: dict[str, Any], **quantization: Any) -> Path:
    """A folder of these tensors; the last arguments are its quantization_config."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.array(array, order="C") for name, array in tensors.items()}, folder / "model.safetensors")
    said = {"quantization_config": quantization} if quantization else {}
    (folder / "config.json").write_text(json.dumps({**settings, **said}))
    return folder


def write_fp8(
    folder: Path, weights: dict[str, Array], settings: dict[str, Any], grid: tuple[int, int] = (128, 128),
    scale: Any = np.float32, chosen: Callable[[str], bool] = is_linear, **quantization: Any,
) -> dict[str, Array]:  # fmt: skip
    """A folder as DeepSeek and Qwen publish them; gives the f32 that its weights stand for."""
    tensors: dict[str, Array] = {}
    plain: dict[str, Array] = {}
    for name, weight in weights.items():
        tensors[name] = plain[name] = weight
        if chosen(name):
            tensors[name], tensors[f"{name}_scale_inv"], plain[name] = eight_bits(weight, grid, scale)
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": list(grid)}
    write(folder, tensors, settings, **{**said, "modules_to_not_convert": ["lm_head"], **quantization})
    return plain


def write_mxfp4(
    folder: Path, weights: dict[str, Array], settings: dict[str, Any], chosen: Callable[[str], bool]
) -> dict[str, Array]:
    """A folder whose chosen weights are blocks and scales; gives the f32 that its weights stand for."""
    tensors: dict[str, Array] = {}
    plain: dict[str, Array] = {}
    for name, weight in weights.items():
        if chosen(name):
            tensors[f"{name}_blocks"], tensors[f"{name}_scales"], plain[name] = four_bits(weight)
        else:
            tensors[name] = plain[name] = weight
    write(folder, tensors, settings, quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])
    return plain

"""RoPE tables: cosines and sines of every position, for each kind of scaling in use.

Frequencies are those of the published configurations (`rope_scaling` of Hugging Face); they are computed in float64.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.errors import FormatError

Array = np.ndarray[Any, Any]


def rope_tables(
    positions: int, head_dim: int, base: float, scaling: Mapping[str, Any] | None = None, factors: Array | None = None
) -> tuple[Array, Array]:
    """cos and sin `[positions, head_dim / 2]` as f32. `factors` divide the frequencies, as GGUF stores Llama 3's."""
    frequencies, attention = _scaled(base ** (-np.arange(0, head_dim, 2) / head_dim), head_dim, base, scaling or {})
    if factors is not None:
        frequencies = frequencies / factors.astype(np.float64)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return (np.cos(angles) * attention).astype(np.float32), (np.sin(angles) * attention).astype(np.float32)


def _scaled(plain: Array, head_dim: int, base: float, scaling: Mapping[str, Any]) -> tuple[Array, float]:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    match kind:
        case "default":
            return plain, 1.0
        case "linear":
            return plain / float(scaling["factor"]), 1.0
        case "llama3":
            return _llama3(plain, scaling), 1.0
        case "yarn":
            return _yarn(plain, head_dim, base, scaling)
    raise FormatError(f"rope_scaling: type {kind!r} is not known", hint="known: default, linear, llama3, yarn")


def _llama3(plain: Array, scaling: Mapping[str, Any]) -> Array:
    """Long waves are stretched by the factor, short ones kept, those between blended."""
    factor = float(scaling["factor"])
    low, high = float(scaling["low_freq_factor"]), float(scaling["high_freq_factor"])
    original = float(scaling["original_max_position_embeddings"])
    waves = 2 * math.pi / plain
    blend = (original / waves - low) / (high - low)
    between = (1 - blend) * plain / factor + blend * plain
    return np.where(waves > original / low, plain / factor, np.where(waves < original / high, plain, between))


def _yarn(plain: Array, head_dim: int, base: float, scaling: Mapping[str, Any]) -> tuple[Array, float]:
    """Interpolation by parts between stretched and plain frequencies, and a gentler softmax."""
    factor = float(scaling["factor"])
    original = float(scaling["original_max_position_embeddings"])

    def turn(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low = max(math.floor(turn(float(scaling.get("beta_fast", 32)))), 0)
    high = min(math.ceil(turn(float(scaling.get("beta_slow", 1)))), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2) - low) / max(high - low, 0.001), 0, 1)
    attention = scaling.get("attention_factor")
    gentle = float(attention) if attention is not None else 0.1 * math.log(factor) + 1.0
    return plain / factor * ramp + plain * (1 - ramp), gentle

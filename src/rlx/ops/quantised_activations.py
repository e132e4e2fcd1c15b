"""Activations quantised to 8 bits with one scale per block; `round_blocks` is the round trip, in f32."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.dtypes import dtype as dtype_of
from rlx.errors import DTypeError, ShapeError
from rlx.ir.independence import never
from rlx.ir.registry import f32, op, sample
from rlx.types import TensorType

LARGEST = 127
BLOCKS = (32, 256)  # numbers per scale: as many as in a block of weights
MIN_LARGEST = 2.0**-100  # blocks with a smaller maximum are zeros, since the inverse of the scale would overflow
# Packed types whose weights are codes times scales, so that kernels can multiply the codes by 8-bit activations.
INT8_DOT_TYPES = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4")


def check_blocks(where: str, x: TensorType, block: int) -> int:
    """Checks that x is floats in full blocks; returns the size of the last axis."""
    if not x.dtype.is_float:
        raise DTypeError(f"{where}: takes floats, found {x}")
    if block not in BLOCKS:
        raise ShapeError(f"{where}: block is {block}, expected {BLOCKS[0]} or {BLOCKS[1]}")
    k = x.shape[-1] if x.rank else 0
    if not isinstance(k, int) or k == 0 or k % block:
        raise ShapeError(f"{where}: the last axis of {x} is not whole blocks of {block}")
    return k


def quantise_blocks(x: Any, block: int) -> tuple[Any, Any]:
    """Codes [..., blocks, block] and their scales [..., blocks, 1], in the arithmetic type."""
    parts = x.astype(dtype_of(x.dtype).wide.numpy).reshape(*x.shape[:-1], -1, block)
    kind = parts.dtype.type
    largest = np.abs(parts).max(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        inverse = np.where(largest < MIN_LARGEST, kind(0), kind(LARGEST) / largest)
        scale = np.where(largest < MIN_LARGEST, kind(0), largest / kind(LARGEST))
        return np.rint(parts * inverse), scale


def _round_blocks(x: Any, *, block: int) -> Any:
    codes, scale = quantise_blocks(x, block)
    return (codes * scale).astype(x.dtype).reshape(x.shape)


@op(
    "round_blocks",
    independent=never,
    reference=_round_blocks,
    samples=[sample(f32(3, 64), block=32), sample(f32(2, 2, 256), block=256)],
)
def round_blocks(x: TensorType, *, block: int) -> TensorType:
    """x rounded to 8-bit numbers with one scale per `block` of them along the last axis, and back."""
    check_blocks("round_blocks", x, block)
    return x

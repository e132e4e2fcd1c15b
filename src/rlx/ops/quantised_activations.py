"""Left sides of matmuls in 8 bits, with one scale per block of numbers: `round_blocks` says what is lost, in f32."""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.dtypes import dtype as dtype_of
from rlx.errors import DTypeError, ShapeError
from rlx.ir.independence import never
from rlx.ir.registry import f32, op, sample
from rlx.types import TensorType

LARGEST = 127
BLOCKS = (32, 256)  # how many numbers share a scale: as many as in a block of weights
LEAST = 2.0**-100  # a block whose largest number is below is zeros: inverses of scales would overflow
# Packed types whose weights are codes times scales, so that kernels multiply them by 8-bit activations as they are.
WHOLE = ("q4_0", "q4_1", "q5_0", "q5_1", "q8_0", "q4_k", "q5_k", "q6_k", "mxfp4")


def check_blocks(where: str, x: TensorType, block: int) -> int:
    """The size of the last axis, which must be whole blocks of floats."""
    if not x.dtype.is_float:
        raise DTypeError(f"{where}: takes floats, found {x}")
    if block not in BLOCKS:
        raise ShapeError(f"{where}: block is {block}, expected {BLOCKS[0]} or {BLOCKS[1]}")
    k = x.shape[-1] if x.rank else 0
    if not isinstance(k, int) or k == 0 or k % block:
        raise ShapeError(f"{where}: the last axis of {x} is not whole blocks of {block}")
    return k


def rounded(x: Any, block: int) -> tuple[Any, Any]:
    """Codes [..., blocks, block] and their scales [..., blocks, 1], in the type that arithmetic has."""
    parts = x.astype(dtype_of(x.dtype).wide.numpy).reshape(*x.shape[:-1], -1, block)
    kind = parts.dtype.type
    largest = np.abs(parts).max(axis=-1, keepdims=True)
    with np.errstate(all="ignore"):
        inverse = np.where(largest < LEAST, kind(0), kind(LARGEST) / largest)
        scale = np.where(largest < LEAST, kind(0), largest / kind(LARGEST))
        return np.rint(parts * inverse), scale


def _round_blocks(x: Any, *, block: int) -> Any:
    codes, scale = rounded(x, block)
    return (codes * scale).astype(x.dtype).reshape(x.shape)


@op(
    "round_blocks",
    independent=never,
    reference=_round_blocks,
    samples=[sample(f32(3, 64), block=32), sample(f32(2, 2, 256), block=256)],
)
def round_blocks(x: TensorType, *, block: int) -> TensorType:
    """x as 8-bit numbers with one scale for each `block` of them along the last axis: what that keeps of it."""
    check_blocks("round_blocks", x, block)
    return x

"""Packed weights: blocks of quantised numbers and what they stand for."""

from __future__ import annotations

from typing import Any

from rlx.dtypes import F32, PACKED, dtype
from rlx.errors import DTypeError
from rlx.formats.quants import dequantise as dequantise_blocks
from rlx.ir.registry import TAKES_PACKED, op, packed, sample
from rlx.types import TensorType


def unpacked(x: Any) -> Any:
    """Blocks [..., blocks] as float32 [..., elements]."""
    storage = dtype(x.dtype)
    shape = (*x.shape[:-1], x.shape[-1] * storage.block)
    return dequantise_blocks(x, storage, x.size * storage.block).reshape(shape)


@op(
    "dequantise", reference=unpacked, traits=[TAKES_PACKED],
    samples=[
        *(sample(packed(str(d), 3, 2 * d.block)) for d in PACKED), sample(packed("q4_1", 7, 96)),
        sample(packed("q8_0", 2, 3, 32)), sample(packed("q4_k", 0, 256)),
    ],
)  # fmt: skip
def dequantise(x: TensorType) -> TensorType:
    """The numbers that packed blocks stand for, as f32."""
    if not x.dtype.is_packed:
        raise DTypeError(f"dequantise: takes packed blocks, found {x}")
    return TensorType(x.shape, F32)

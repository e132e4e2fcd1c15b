"""GGUF's tensor types by number, and dequantisation to float32.

`dequantise` is bit-identical to ggml's reference; the decoders are in `formats/quant_blocks.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, PACKED, DType
from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass

if TYPE_CHECKING:
    from rlx.formats.quant_blocks import Table

Buffer = bytes | bytearray | memoryview | Array

BLOCK_TYPES: dict[str, DType] = {d.name: d for d in PACKED}

_GGUF_NAMES = {
    2: "q4_0", 3: "q4_1", 6: "q5_0", 7: "q5_1", 8: "q8_0", 9: "q8_1", 10: "q2_k", 11: "q3_k", 12: "q4_k", 13: "q5_k",
    14: "q6_k", 15: "q8_k", 16: "iq2_xxs", 17: "iq2_xs", 18: "iq3_xxs", 19: "iq1_s", 20: "iq4_nl", 21: "iq3_s",
    22: "iq2_s", 23: "iq4_xs", 29: "iq1_m", 34: "tq1_0", 35: "tq2_0", 39: "mxfp4", 40: "nvfp4", 41: "q1_0",
    42: "q2_0",
}  # fmt: skip
GGUF_TYPES: dict[int, DType] = {
    0: F32, 1: F16, 24: I8, 25: I16, 26: I32, 27: I64, 28: F64, 30: BF16,
    **{number: BLOCK_TYPES[name] for number, name in _GGUF_NAMES.items()},
}  # fmt: skip
GGUF_REMOVED = {
    4: "q4_2", 5: "q4_3", 31: "q4_0_4_4", 32: "q4_0_4_8", 33: "q4_0_8_8", 36: "iq4_nl_4_4", 37: "iq4_nl_4_8",
    38: "iq4_nl_8_8",
}  # fmt: skip


def dequantise(data: Buffer, storage: DType, count: int) -> Array:
    """Decode `count` elements stored in `data` to a flat float32 array; stored float32 is returned as a view.

    >>> dequantise(bytes.fromhex("003c") + bytes(range(32)), BLOCK_TYPES["q8_0"], 32)[:4].tolist()
    [0.0, 1.0, 2.0, 3.0]
    """
    raw = np.asarray(data).reshape(-1).view(np.uint8) if isinstance(data, np.ndarray) else np.frombuffer(data, np.uint8)
    elements, nbytes = storage.block, storage.size
    if count < 0 or count % elements:
        raise FormatError(f"dequantise: {count} elements of {storage} are not whole blocks of {elements}")
    if raw.size != count // elements * nbytes:
        raise FormatError(
            f"dequantise: {count} elements of {storage} are {count // elements * nbytes} bytes, found {raw.size}"
        )
    with np.errstate(all="ignore"):  # files may hold infinities, NaN and values out of f32 range
        if not storage.is_packed:
            return raw.view(storage.numpy).astype(np.float32, copy=False)
        return _dequantise_blocks(raw, storage, count)


_CHUNK = 1 << 15  # elements per step, so that temporaries fit in cache
_SPAN = 4  # positions form groups of 16; values that depend only on the group are read once


def _dequantise_blocks(raw: Array, storage: DType, count: int) -> Array:
    from rlx.formats.quant_blocks import Position, decode  # lazy: loads tables

    groups = np.arange(storage.block >> _SPAN, dtype=np.int32)[:, None]
    position = Position(groups, _SPAN, np.arange(1 << _SPAN, dtype=np.int32)[None])
    blocks = raw.reshape(-1, storage.size)
    out = np.empty((len(blocks), storage.block >> _SPAN, 1 << _SPAN), np.float32)
    step = _CHUNK // storage.block
    for first in range(0, len(blocks), step):
        out[first : first + step] = decode(storage, _Bytes(blocks[first : first + step]), position)
    return out.reshape(count)


class _Numbers(np.ndarray[Any, Any]):
    """An array [blocks, groups or 1, positions or 1] with the methods that decoders call."""

    def cast(self, dtype: DType) -> Array:
        return np.asarray(self.astype(dtype.numpy)).view(_Numbers)

    def bits(self) -> Array:
        """Reinterpret 32-bit integers as f32."""
        return self.view(np.float32)

    def eq(self, other: int) -> Array:
        return np.asarray(self == other).view(_Numbers)

    def select(self, then: Any, other: Any) -> Array:
        """`then` where this is true, else `other`."""
        return np.asarray(np.where(self, then, other)).view(_Numbers)


@dataclass(frozen=True)
class _Bytes:
    """A `quant_blocks.Reader` over blocks stored as rows of bytes."""

    rows: Array

    def half(self, unit: int) -> Array:
        return self._floats(unit, np.float16)

    def single(self, unit: int) -> Array:
        return self._floats(unit, np.float32)

    def _floats(self, unit: int, kind: type[np.floating[Any]]) -> Array:
        size = np.dtype(kind).itemsize
        numbers = np.ascontiguousarray(self.rows[:, 2 * unit : 2 * unit + size]).view(kind)
        return numbers.astype(np.float32)[:, :, None].view(_Numbers)  # [blocks, 1, 1]

    def bits(self, byte: Any, first: Any, width: int) -> Array:
        return np.asarray(self.byte(byte) >> first & (1 << width) - 1).view(_Numbers)

    def byte(self, index: Any) -> Array:
        """Bytes at one index, or at an array of indices per group and position, as i32."""
        at = self.rows[:, index] if isinstance(index, np.ndarray) else self.rows[:, index, None, None]
        return at.astype(np.int32).view(_Numbers)

    def signed(self, byte: Any) -> Array:
        return self.top_byte(byte, 24)

    def top_byte(self, byte: Any, shift: int) -> Array:
        return np.asarray(self.byte(byte) << 24 >> shift).view(_Numbers)

    def lookup(self, table: Table, index: Array) -> Array:
        return np.array(table.values, np.int32)[index].view(_Numbers)

    def where(self, condition: Array, then: Callable[[], Array], other: Callable[[], Array]) -> Array:
        return np.where(condition, then(), other()).view(_Numbers)

    def zero(self) -> Array:
        return np.zeros((1, 1, 1), np.int32).view(_Numbers)

    def from_half(self, bits: Array) -> Array:
        return bits.astype(np.uint16).view(np.float16).astype(np.float32)

    def keep(self, key: object, make: Callable[[], Array]) -> Array:
        return make()

    def let(self, number: Array) -> Array:
        return number

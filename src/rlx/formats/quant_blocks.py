"""Decoders for quantised block types: the value at a position, computed from the bytes of its block.

Each decoder is written once against a `Reader`, which is backed by NumPy arrays (`formats/gguf_quants.py`) or kernel
expressions (`lir/forms/quant_blocks.py`) in any memory layout. A `Position` is a constant (unrolled kernels, where
offsets and shifts fold), a run-time value, or both. Results are bit-identical to ggml: widen, then multiply and add in
its order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import field
from typing import Any, Protocol

from rlx.dtypes import F32, DType
from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass

Number = Any  # a NumPy array or an expression, i32 or f32
Int = Any  # a Python int or a `Number`


def signed_word(bits: int) -> int:
    """Reinterpret 32 bits as an i32."""
    return bits - ((bits & 1 << 31) << 1)


@dataclass(frozen=True)
class Position:
    """An index into a block: `outer * 2**span + inner`."""

    outer: Int
    span: int
    inner: Int

    @classmethod
    def of(cls, index: Int) -> Position:
        """A position given by a single index."""
        return cls(index, 0, 0)

    def __rshift__(self, n: int) -> Int:
        if n >= self.span:
            return self.outer >> n - self.span
        return (self.outer << self.span - n) + (self.inner >> n)

    def __and__(self, mask: int) -> Int:
        high = mask >> self.span
        return ((self.outer & high) << self.span) + (self.inner & mask) if high else self.inner & mask


@dataclass(frozen=True)
class Table:
    """A lookup table from codes to values."""

    name: str
    values: tuple[int, ...] = field(repr=False, compare=False)


class Reader(Protocol):
    """Access to the bytes of a block. Integers are i32, floats f32."""

    def half(self, unit: int) -> Number:
        """The f16 at a 16-bit unit of the block, widened."""

    def single(self, unit: int) -> Number:
        """The f32 in two consecutive 16-bit units, low one first."""

    def bits(self, byte: Int, first: Int, width: int) -> Number:
        """`width` bits of a byte, starting at bit `first`."""

    def signed(self, byte: Int) -> Number:
        """A byte as a signed integer."""

    def byte(self, index: int) -> Number:
        """A byte, for types stored in byte units."""

    def top_byte(self, byte: Int, shift: int) -> Number:
        """A byte in the top bits of an i32, shifted right arithmetically by `shift`."""

    def lookup(self, table: Table, index: Int) -> Number:
        """An entry of a table."""

    def where(self, condition: Int, then: Number, other: Number) -> Number:
        """`then` if the condition is non-zero, else `other`."""

    def zero(self) -> Number:
        """The integer 0."""

    def from_half(self, bits: Number) -> Number:
        """Reinterpret bits as f16 and widen."""

    def keep(self, key: object, make: Callable[[], Number]) -> Number:
        """Memoise a value shared by several positions under `key`."""

    def let(self, number: Number) -> Number:
        """Bind a value that is used more than once."""


Decoder = Callable[[Reader, Position], Number]


def _nibble(b: Reader, base: int, i: Position) -> Number:
    return b.bits((i & 15) + base, (i >> 4) << 2, 4)


def _fifth(b: Reader, base: int, i: Position) -> Number:
    return b.bits((i >> 3) + base, i & 7, 1) << 4


def _q4_0(b: Reader, i: Position) -> Number:
    return (_nibble(b, 2, i) - 8).cast(F32) * b.half(0)


def _q4_1(b: Reader, i: Position) -> Number:
    return _nibble(b, 4, i).cast(F32) * b.half(0) + b.half(1)


def _q5_0(b: Reader, i: Position) -> Number:
    return ((_nibble(b, 6, i) | _fifth(b, 2, i)) - 16).cast(F32) * b.half(0)


def _q5_1(b: Reader, i: Position) -> Number:
    return (_nibble(b, 8, i) | _fifth(b, 4, i)).cast(F32) * b.half(0) + b.half(1)


def _q8_0(b: Reader, i: Position) -> Number:
    return b.signed((i & 31) + 2).cast(F32) * b.half(0)


def _pair(b: Reader, base: int, i: Position) -> Number:
    """A 2-bit code: 128 positions share 32 bytes, as four bit planes."""
    return b.bits(((i >> 7) << 5) + (i & 31) + base, (i >> 5 & 3) << 1, 2)


def _q2_k(b: Reader, i: Position) -> Number:
    s = i >> 4
    scale = b.keep(("scale", s), lambda: b.half(40) * b.bits(s, 0, 4).cast(F32))
    minimum = b.keep(("min", s), lambda: b.half(41) * b.bits(s, 4, 4).cast(F32))
    return _pair(b, 16, i).cast(F32) * scale - minimum


def _q3_k(b: Reader, i: Position) -> Number:
    s = i >> 4

    def scale() -> Number:
        low, high = b.bits((s & 7) + 96, (s >> 3) << 2, 4), b.bits((s & 3) + 104, (s >> 2) << 1, 2)
        return b.half(54) * ((low | high << 4) - 32).cast(F32)

    high = b.bits(i & 31, i >> 5, 1) << 2
    return ((_pair(b, 32, i) | high) - 4).cast(F32) * b.keep(("scale", s), scale)


def _k_scales(b: Reader, i: Position) -> tuple[Number, Number]:
    """A 6-bit scale and minimum: the first four in the low bits of bytes 4-7 and 8-11, the rest in bytes 12-15 plus
    the top bits of those."""
    j = i >> 5
    late, at = j >> 2, j & 3

    def scale() -> Number:
        split = b.bits(at + 12, 0, 4) | b.bits(at + 4, 6, 2) << 4
        return b.half(0) * b.where(late, split, b.bits(at + 4, 0, 6)).cast(F32)

    def minimum() -> Number:
        split = b.bits(at + 12, 4, 4) | b.bits(at + 8, 6, 2) << 4
        return b.half(1) * b.where(late, split, b.bits(at + 8, 0, 6)).cast(F32)

    return b.keep(("scale", j), scale), b.keep(("min", j), minimum)


def _k_nibble(b: Reader, base: int, i: Position) -> Number:
    """A 4-bit code: 64 positions share 32 bytes, low nibbles first."""
    return b.bits(((i >> 6) << 5) + (i & 31) + base, (i >> 5 & 1) << 2, 4)


def _q4_k(b: Reader, i: Position) -> Number:
    scale, minimum = _k_scales(b, i)
    return _k_nibble(b, 16, i).cast(F32) * scale - minimum


def _q5_k(b: Reader, i: Position) -> Number:
    scale, minimum = _k_scales(b, i)
    q = _k_nibble(b, 48, i) | b.bits((i & 31) + 16, i >> 5, 1) << 4
    return q.cast(F32) * scale - minimum


def _q6_k(b: Reader, i: Position) -> Number:
    s = i >> 4
    scale = b.keep(("scale", s), lambda: b.half(104) * b.signed(s + 192).cast(F32))
    low = b.bits(((i >> 7) << 6) + (i & 63), (i >> 6 & 1) << 2, 4)
    return ((low | _pair(b, 128, i) << 4) - 32).cast(F32) * scale


def _q8_k(b: Reader, i: Position) -> Number:
    return b.signed((i & 255) + 4).cast(F32) * b.single(0)


DECODERS: dict[str, Decoder] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "q8_k": _q8_k,
}  # fmt: skip


def decode(storage: DType, block: Reader, position: Position) -> Number:
    """Decode the value at a position."""
    if storage.name not in DECODERS:  # needs tables, or unknown
        from rlx.formats.iq_blocks import DECODERS as WITH_TABLES  # imports this module

        DECODERS.update(WITH_TABLES)
    if storage.name not in DECODERS:
        raise FormatError(f"blocks of {storage}: no decoder is known", hint="known: " + ", ".join(DECODERS))
    return DECODERS[storage.name](block, position)

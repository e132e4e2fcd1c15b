"""Packed blocks as expressions: the number at a position of a block, from its bytes.

A decoder is written once, for a `Position` that is known (unrolled kernels: offsets and shifts become constants), an
index or a mixture of both, and for any `Source` of the bytes: blocks as files have them (`RowBlocks`), or as a backend
lays them out. Bits are those of ggml: widen, then multiply and add in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from rlx.dtypes import F16, F32, I16, I32, I64, U8, DType
from rlx.errors import LowerError
from rlx.lir.loops import (
    Const,
    Expr,
    Let,
    Load,
    Place,
    Ref,
    Stmt,
    known,
)

UNIT = 2  # bytes
RECENT = 12  # words that stay in registers


def signed_word(bits: int) -> int:
    """32 bits as the number that an i32 with them is."""
    return bits - ((bits & 1 << 31) << 1)


def unit_of(storage: DType) -> DType:
    """What blocks are read by."""
    return I16 if storage.unit == UNIT else U8


# -- positions ------------------------------------------------------------------------------------------------------
Int = int | Expr  # a number that is known, or an expression


def _where(condition: Int, then: Expr, other: Expr) -> Expr:
    """`then` where the condition is not 0."""
    if isinstance(condition, int):
        return then if condition else other
    return condition.ne(0).select(then, other)


@dataclass(frozen=True)
class Position:
    """Where in a block: `outer` groups of 2**span, then `inner` positions."""

    outer: Int
    span: int
    inner: int

    @classmethod
    def of(cls, index: Expr) -> Position:
        """A position that is not known at all."""
        return cls(index, 0, 0)

    def __rshift__(self, n: int) -> Int:
        if n > self.span:
            return self.outer >> n - self.span
        return (self.outer << self.span - n) + (self.inner >> n)

    def __and__(self, mask: int) -> Int:
        high = mask >> self.span
        return ((self.outer & high) << self.span) + (self.inner & mask) if high else self.inner & mask


# -- where blocks lie -----------------------------------------------------------------------------------------------
class Source(Protocol):
    """Reads the bytes of a block from where they lie."""

    def half(self, unit: int) -> Expr:
        """The f16 at a 16-bit unit of the block."""

    def single(self, unit: int) -> Expr:
        """The f32 at two units, the low one first."""

    def split(self, byte: Int) -> tuple[Int, Int]:
        """The word that a byte is in, and its first bit there."""

    def byte(self, index: int) -> Expr:
        """A byte, where units are bytes, as an i32."""

    def word(self, index: Int) -> Expr:
        """A word, as wide as this source has them, as an i32."""


@dataclass(frozen=True)
class RowBlocks:
    """A block as files have it, read by 16-bit units, of which all but a few types are a whole number, or by bytes."""

    unit_at: Callable[[Expr], Place]
    units: int  # the parameter that is read as integers
    halves: int  # the same memory read as f16
    size: int = UNIT  # bytes of a unit

    def half(self, unit: int) -> Expr:
        return Load(self.halves, self.unit_at(Const(unit, I64)), F16)

    def single(self, unit: int) -> Expr:
        low, high = (self.word(u) for u in (unit, unit + 1))
        return (low & 0xFFFF | high << 16).bits()

    def split(self, byte: Int) -> tuple[Int, Int]:
        return (byte >> 1, (byte & 1) << 3) if self.size == UNIT else (byte, 0)

    def byte(self, index: int) -> Expr:
        return self.word(index)

    def word(self, index: Int) -> Expr:
        """A unit as an i32."""
        kind = I16 if self.size == UNIT else U8
        return Load(self.units, self.unit_at(known(index, I64)), kind).cast(I32)


# -- reading a block ------------------------------------------------------------------------------------------------
@dataclass
class Block:
    """A block under decoding. What is read or computed again and again is named by a `Let` in `stmts`, if asked."""

    source: Source
    lets: bool = True
    prefix: str = ""
    stmts: list[Stmt] = field(default_factory=list)
    _kept: dict[object, Expr] = field(default_factory=dict)
    _recent: dict[object, Expr] = field(default_factory=dict)

    def half(self, unit: int) -> Expr:
        """The f16 at a unit, widened."""
        return self.keep(("half", unit), lambda: self.source.half(unit).cast(F32))

    def single(self, unit: int) -> Expr:
        """The f32 at two units."""
        return self.keep(("single", unit), lambda: self.source.single(unit))

    def keep(self, key: object, make: Callable[[], Expr]) -> Expr:
        """A value that is computed once a block or group."""
        if key not in self._kept:
            self._kept[key] = self.let(make())
        return self._kept[key]

    def bits(self, byte: Int, first: Int, width: int) -> Expr:
        """`width` bits of a byte, from bit `first` on."""
        index, start = self.source.split(byte)
        return self.word(index) >> (start + first) & (1 << width) - 1

    def signed(self, byte: Int) -> Expr:
        """A byte as a signed number."""
        index, start = self.source.split(byte)
        return self.word(index) << (24 - start) >> 24

    def word(self, index: Int) -> Expr:
        """A word, as wide as the source has them; the last few stay in registers."""
        found = self._recent.pop(index, None)
        if found is None:
            found = self.let(self.source.word(index))
        self._recent[index] = found
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return found

    def let(self, value: Expr) -> Expr:
        """A name for a value, where names are wanted."""
        if not self.lets:
            return value
        name = f"{self.prefix}v{len(self.stmts)}"
        self.stmts.append(Let(name, value))
        return Ref(name, value.dtype)


# -- the types ------------------------------------------------------------------------------------------------------
Decoder = Callable[[Block, Position], Expr]


def _nibble(b: Block, base: int, i: Position) -> Expr:
    return b.bits((i & 15) + base, (i >> 4) << 2, 4)


def _fifth(b: Block, base: int, i: Position) -> Expr:
    return b.bits((i >> 3) + base, i & 7, 1) << 4


def _q4_0(b: Block, i: Position) -> Expr:
    return (_nibble(b, 2, i) - 8).cast(F32) * b.half(0)


def _q4_1(b: Block, i: Position) -> Expr:
    return _nibble(b, 4, i).cast(F32) * b.half(0) + b.half(1)


def _q5_0(b: Block, i: Position) -> Expr:
    return ((_nibble(b, 6, i) | _fifth(b, 2, i)) - 16).cast(F32) * b.half(0)


def _q5_1(b: Block, i: Position) -> Expr:
    return (_nibble(b, 8, i) | _fifth(b, 4, i)).cast(F32) * b.half(0) + b.half(1)


def _q8_0(b: Block, i: Position) -> Expr:
    return b.signed((i & 31) + 2).cast(F32) * b.half(0)


def _pair(b: Block, base: int, i: Position) -> Expr:
    """Two bits: 128 positions are four planes of 32 bytes."""
    return b.bits(((i >> 7) << 5) + (i & 31) + base, (i >> 5 & 3) << 1, 2)


def _q2_k(b: Block, i: Position) -> Expr:
    s = i >> 4
    scale = b.keep(("scale", s), lambda: b.half(40) * b.bits(s, 0, 4).cast(F32))
    least = b.keep(("min", s), lambda: b.half(41) * b.bits(s, 4, 4).cast(F32))
    return _pair(b, 16, i).cast(F32) * scale - least


def _q3_k(b: Block, i: Position) -> Expr:
    s = i >> 4

    def scale() -> Expr:
        low, high = b.bits((s & 7) + 96, (s >> 3) << 2, 4), b.bits((s & 3) + 104, (s >> 2) << 1, 2)
        return b.half(54) * ((low | high << 4) - 32).cast(F32)

    high = b.bits(i & 31, i >> 5, 1) << 2
    return ((_pair(b, 32, i) | high) - 4).cast(F32) * b.keep(("scale", s), scale)


def _k_scales(b: Block, i: Position) -> tuple[Expr, Expr]:
    """A 6-bit scale and minimum: four whole in the low bits of bytes 4-7 and 8-11, four as bytes 12-15 + top bits."""
    j = i >> 5
    late, at = j >> 2, j & 3

    def scale() -> Expr:
        split = b.bits(at + 12, 0, 4) | b.bits(at + 4, 6, 2) << 4
        return b.half(0) * _where(late, split, b.bits(at + 4, 0, 6)).cast(F32)

    def least() -> Expr:
        split = b.bits(at + 12, 4, 4) | b.bits(at + 8, 6, 2) << 4
        return b.half(1) * _where(late, split, b.bits(at + 8, 0, 6)).cast(F32)

    return b.keep(("scale", j), scale), b.keep(("min", j), least)


def _k_nibble(b: Block, base: int, i: Position) -> Expr:
    """Four bits: 64 positions are 32 bytes, low halves first."""
    return b.bits(((i >> 6) << 5) + (i & 31) + base, (i >> 5 & 1) << 2, 4)


def _q4_k(b: Block, i: Position) -> Expr:
    scale, least = _k_scales(b, i)
    return _k_nibble(b, 16, i).cast(F32) * scale - least


def _q5_k(b: Block, i: Position) -> Expr:
    scale, least = _k_scales(b, i)
    q = _k_nibble(b, 48, i) | b.bits((i & 31) + 16, i >> 5, 1) << 4
    return q.cast(F32) * scale - least


def _q6_k(b: Block, i: Position) -> Expr:
    s = i >> 4
    scale = b.keep(("scale", s), lambda: b.half(104) * b.signed(s + 192).cast(F32))
    low = b.bits(((i >> 7) << 6) + (i & 63), (i >> 6 & 1) << 2, 4)
    return ((low | _pair(b, 128, i) << 4) - 32).cast(F32) * scale


def _q8_k(b: Block, i: Position) -> Expr:
    return b.signed((i & 255) + 4).cast(F32) * b.single(0)


DECODERS: dict[str, Decoder] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "q8_k": _q8_k,
}  # fmt: skip


def decode(storage: DType, block: Block, position: Position) -> Expr:
    """The number at a position."""
    if storage.name not in DECODERS:  # one with tables, or one that nobody knows
        from rlx.lir.forms.grid_blocks import DECODERS as WITH_TABLES  # which needs this module

        DECODERS.update(WITH_TABLES)
    if storage.name not in DECODERS:
        raise LowerError(f"blocks of {storage}: no kernel reads them", hint="known: " + ", ".join(DECODERS))
    return DECODERS[storage.name](block, position)

"""Decoders for quantised block types: the value at a position, computed from the bytes of its block.

Each decoder is written once against a `Reader`, which is backed by NumPy arrays (`formats/gguf_quants.py`) or kernel
expressions (`lir/forms/quant_blocks.py`) in any memory layout. A `Position` is a constant (unrolled kernels, where
offsets and shifts fold), a run-time value, or both. Most types are an `IntegerForm`, whose parts integer kernels read
one by one. Results are bit-identical to ggml: widen, then multiply and add in its order.
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


class IntegerReader(Protocol):
    """Access to the integers of a block, as i32."""

    def bits(self, byte: Int, first: Int, width: int) -> Number:
        """`width` bits of a byte, starting at bit `first`."""

    def signed(self, byte: Int) -> Number:
        """A byte as a signed integer."""

    def lookup(self, table: Table, index: Int) -> Number:
        """An entry of a table."""

    def where(self, condition: Int, then: Callable[[], Number], other: Callable[[], Number]) -> Number:
        """`then` if the condition is non-zero, else `other`; if it is a constant, only one of them is read."""


class Reader(IntegerReader, Protocol):
    """Access to the bytes of a block. Integers are i32, floats f32."""

    def half(self, unit: int) -> Number:
        """The f16 at a 16-bit unit of the block, widened."""

    def single(self, unit: int) -> Number:
        """The f32 in two consecutive 16-bit units, low one first."""

    def byte(self, index: int) -> Number:
        """A byte, for types stored in byte units."""

    def top_byte(self, byte: Int, shift: int) -> Number:
        """A byte in the top bits of an i32, shifted right arithmetically by `shift`."""

    def zero(self) -> Number:
        """The integer 0."""

    def from_half(self, bits: Number) -> Number:
        """Reinterpret bits as f16 and widen."""

    def keep(self, key: object, make: Callable[[], Number]) -> Number:
        """Memoise a value shared by several positions under `key`."""

    def let(self, number: Number) -> Number:
        """Bind a value that is used more than once."""


Decoder = Callable[[Reader, Position], Number]
CodeDecoder = Callable[[IntegerReader, Position], Number]
RunDecoder = Callable[[IntegerReader, Int], Number]
BlockDecoder = Callable[[Reader], Number]


def half(unit: int) -> BlockDecoder:
    """Read the f16 at a 16-bit unit."""
    return lambda b: b.half(unit)


@dataclass(frozen=True)
class IntegerForm:
    """A type whose values are `unit · code + other` or `(unit · scale) · code - other · minimum`.

    Codes, scales and minima are integers; `unit` and `other` are floats of a block.
    """

    code: CodeDecoder
    unit: BlockDecoder = half(0)
    other: BlockDecoder | None = None
    run: int = 0  # positions that share a scale and a minimum; 0 in types without scales
    scale: RunDecoder | None = None
    minimum: RunDecoder | None = None

    def __call__(self, b: Reader, i: Position) -> Number:
        """Decode the value at a position."""
        if self.scale is None:
            value = self.code(b, i).cast(F32) * self.unit(b)
            return value if self.other is None else value + self.other(b)
        run = i >> self.run.bit_length() - 1
        scale = _product(b, ("scale", run), self.unit, self.scale, run)
        if self.other is None or self.minimum is None:
            return self.code(b, i).cast(F32) * scale
        minimum = _product(b, ("min", run), self.other, self.minimum, run)
        return self.code(b, i).cast(F32) * scale - minimum


def _product(b: Reader, key: object, unit: BlockDecoder, integer: RunDecoder, run: Int) -> Number:
    return b.keep(key, lambda: unit(b) * integer(b, run).cast(F32))


def _nibble(b: IntegerReader, base: int, i: Position) -> Number:
    return b.bits((i & 15) + base, (i >> 4) << 2, 4)


def _five_bits(b: IntegerReader, base: int, i: Position) -> Number:
    """A nibble and a fifth bit: 32 of those come first, in order."""
    return _nibble(b, base + 4, i) | b.bits((i >> 3) + base, i & 7, 1) << 4


def _pair(b: IntegerReader, base: int, i: Position) -> Number:
    """A 2-bit code: 128 positions share 32 bytes, as four bit planes."""
    return b.bits(((i >> 7) << 5) + (i & 31) + base, (i >> 5 & 3) << 1, 2)


def _q3_k(b: IntegerReader, i: Position) -> Number:
    return (_pair(b, 32, i) | b.bits(i & 31, i >> 5, 1) << 2) - 4


def _q3_k_scale(b: IntegerReader, s: Int) -> Number:
    return (b.bits((s & 7) + 96, (s >> 3) << 2, 4) | b.bits((s & 3) + 104, (s >> 2) << 1, 2) << 4) - 32


def _k_nibble(b: IntegerReader, base: int, i: Position) -> Number:
    """A 4-bit code: 64 positions share 32 bytes, low nibbles first."""
    return b.bits(((i >> 6) << 5) + (i & 31) + base, (i >> 5 & 1) << 2, 4)


def _six_bits(b: IntegerReader, first: int, shift: int, j: Int) -> Number:
    """A 6-bit scale or minimum: four are in the low bits of bytes from `first` on, the rest in nibbles of bytes 12-15
    plus the top bits of those."""
    at = j & 3
    return b.where(
        j >> 2,
        lambda: b.bits(at + 12, shift, 4) | b.bits(at + first, 6, 2) << 4,
        lambda: b.bits(at + first, 0, 6),
    )


def _q5_k(b: IntegerReader, i: Position) -> Number:
    return _k_nibble(b, 48, i) | b.bits((i & 31) + 16, i >> 5, 1) << 4


def _q6_k(b: IntegerReader, i: Position) -> Number:
    low = b.bits(((i >> 7) << 6) + (i & 63), (i >> 6 & 1) << 2, 4)
    return (low | _pair(b, 128, i) << 4) - 32


def _k_form(code: CodeDecoder) -> IntegerForm:
    """q4_k or q5_k."""
    return IntegerForm(
        code, other=half(1), run=32,
        scale=lambda b, j: _six_bits(b, 4, 0, j), minimum=lambda b, j: _six_bits(b, 8, 4, j),
    )  # fmt: skip


DECODERS: dict[str, Decoder] = {
    "q4_0": IntegerForm(lambda b, i: _nibble(b, 2, i) - 8),
    "q4_1": IntegerForm(lambda b, i: _nibble(b, 4, i), other=half(1)),
    "q5_0": IntegerForm(lambda b, i: _five_bits(b, 2, i) - 16),
    "q5_1": IntegerForm(lambda b, i: _five_bits(b, 4, i), other=half(1)),
    "q8_0": IntegerForm(lambda b, i: b.signed((i & 31) + 2)),
    "q2_k": IntegerForm(
        lambda b, i: _pair(b, 16, i), half(40), half(41), run=16,
        scale=lambda b, s: b.bits(s, 0, 4), minimum=lambda b, s: b.bits(s, 4, 4),
    ),
    "q3_k": IntegerForm(_q3_k, half(54), run=16, scale=_q3_k_scale),
    "q4_k": _k_form(lambda b, i: _k_nibble(b, 16, i)),
    "q5_k": _k_form(_q5_k),
    "q6_k": IntegerForm(_q6_k, half(104), run=16, scale=lambda b, s: b.signed(s + 192)),
    "q8_k": IntegerForm(lambda b, i: b.signed((i & 255) + 4), lambda b: b.single(0)),
}  # fmt: skip


def decoder(storage: DType) -> Decoder:
    """The decoder of a type."""
    if storage.name not in DECODERS:  # needs tables, or unknown
        from rlx.formats.iq_blocks import DECODERS as WITH_TABLES  # imports this module

        DECODERS.update(WITH_TABLES)
    if storage.name not in DECODERS:
        raise FormatError(f"blocks of {storage}: no decoder is known", hint="known: " + ", ".join(DECODERS))
    return DECODERS[storage.name]


def decode(storage: DType, block: Reader, position: Position) -> Number:
    """Decode the value at a position."""
    return decoder(storage)(block, position)

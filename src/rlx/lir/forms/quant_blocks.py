"""Quantised blocks in kernels: loads the bytes of a block as expressions for the decoders of `formats/quant_blocks.py`.

A `Source` locates the bytes: in the file format (`RowBlocks`), or in a backend's layout.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import field
from typing import Protocol

from rlx.dtypes import F16, F32, I16, I32, I64, U8, DType
from rlx.fast_dataclass import dataclass
from rlx.formats import quant_blocks
from rlx.lir.forms.small_floats import small_float
from rlx.lir.loops import (
    Const,
    Expr,
    Let,
    Load,
    Lookup,
    Place,
    Ref,
    Stmt,
    Table,
    known,
)

UNIT = 2  # bytes
RECENT = 12  # words kept in registers
Int = int | Expr  # a constant or an expression


def unit_of(storage: DType) -> DType:
    """The integer type that blocks are read as."""
    return I16 if storage.unit == UNIT else U8


# -- where blocks are ------------------------------------------------------------------------------------------------
class Source(Protocol):
    """Loads the bytes of a block."""

    def half(self, unit: int) -> Expr:
        """The f16 at a 16-bit unit of the block."""

    def single(self, unit: int) -> Expr:
        """The f32 in two units, the low one first."""

    def split(self, byte: Int) -> tuple[Int, Int]:
        """The word that contains a byte, and the position of its first bit."""

    def byte(self, index: int) -> Expr:
        """A byte as an i32, if units are bytes."""

    def word(self, index: Int) -> Expr:
        """A word of this source's width, as an i32."""


@dataclass(frozen=True)
class RowBlocks:
    """A block in the file format, read by 16-bit units, or by bytes for the few types of odd size."""

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


@functools.cache
def _code_table(table: quant_blocks.Table) -> Table:
    return Table.of(table.name, table.values)


# -- reading a block ------------------------------------------------------------------------------------------------
@dataclass
class Block:
    """A block being decoded. With `lets`, reused values are named by a `Let` in `stmts`."""

    source: Source
    lets: bool = True
    prefix: str = ""
    stmts: list[Stmt] = field(default_factory=list)
    _cached: dict[object, Expr] = field(default_factory=dict)
    _recent: dict[object, Expr] = field(default_factory=dict)

    def half(self, unit: int) -> Expr:
        """The f16 at a unit, widened."""
        return self.keep(("half", unit), lambda: self.source.half(unit).cast(F32))

    def single(self, unit: int) -> Expr:
        """The f32 at two units."""
        return self.keep(("single", unit), lambda: self.source.single(unit))

    def keep(self, key: object, make: Callable[[], Expr]) -> Expr:
        """A value computed once per block or group."""
        if key not in self._cached:
            self._cached[key] = self.let(make())
        return self._cached[key]

    def bits(self, byte: Int, first: Int, width: int) -> Expr:
        """`width` bits of a byte, starting at bit `first`."""
        index, start = self.source.split(byte)
        return self.word(index) >> (start + first) & (1 << width) - 1

    def signed(self, byte: Int) -> Expr:
        """A byte as a signed integer."""
        return self.top_byte(byte, 24)

    def byte(self, index: int) -> Expr:
        """A byte, if units are bytes."""
        return self.source.byte(index)

    def top_byte(self, byte: Int, shift: int) -> Expr:
        """A byte at the top of a word, shifted down with its sign."""
        index, start = self.source.split(byte)
        return self.word(index) << (24 - start) >> shift

    def lookup(self, table: quant_blocks.Table, index: Int) -> Expr:
        """An entry of a table, which is embedded in the code."""
        return known(table.values[index], I32) if isinstance(index, int) else Lookup(_code_table(table), index)

    def where(self, condition: Int, then: Callable[[], Expr], other: Callable[[], Expr]) -> Expr:
        """`then` where the condition is not 0."""
        if isinstance(condition, int):
            return then() if condition else other()
        return condition.ne(0).select(then(), other())

    def zero(self) -> Expr:
        """The integer 0."""
        return known(0, I32)

    def from_half(self, bits: Expr) -> Expr:
        """The f16 with these bits, widened."""
        return small_float(bits, "f16")

    def word(self, index: Int) -> Expr:
        """A word of the source; the most recent ones stay in registers."""
        word = self._recent.pop(index, None)
        if word is None:
            word = self.let(self.source.word(index))
        self._recent[index] = word
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return word

    def let(self, value: Expr) -> Expr:
        """Name a value, if names are wanted."""
        if not self.lets:
            return value
        name = f"{self.prefix}v{len(self.stmts)}"
        self.stmts.append(Let(name, value))
        return Ref(name, value.dtype)


def decode(storage: DType, block: Block, position: quant_blocks.Position) -> Expr:
    """The number at a position of a block."""
    number: Expr = quant_blocks.decode(storage, block, position)
    return number

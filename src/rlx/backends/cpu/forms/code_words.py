"""Reads the integers of quantised blocks four at a time, as the bytes of a word, from the panels of integer kernels.

`CodeWords` evaluates the description of a type (`formats/quant_blocks.py`) at four neighbouring positions, where a
field of neighbouring bytes takes one shift and one mask. Fields that a panel stores side by side are read as one.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from rlx.backends.cpu.packing.quantised_weights import Bits, panel_bits
from rlx.dtypes import I32, DType
from rlx.fast_dataclass import dataclass
from rlx.formats.iq_blocks import FP4
from rlx.formats.quant_blocks import IntegerForm, Position, Table, decoder, signed_word
from rlx.lir.forms.quant_blocks import Block
from rlx.lir.loops import Expr

ONES = 0x01010101
BYTES = 0xFFFFFFFF
SPREAD = 0x00204081  # times four bits: each in the lowest bit of a byte


@dataclass(frozen=True)
class Neighbours:
    """Four consecutive numbers, the first of which is a multiple of 4."""

    first: int

    def __add__(self, n: int) -> Neighbours:
        return Neighbours(self.first + n)

    __radd__ = __add__

    def __and__(self, mask: int) -> Neighbours:
        assert mask & 3 == 3, "neighbours differ in their two lowest bits"
        return Neighbours(self.first & mask)

    def __rshift__(self, n: int) -> int:
        assert n >= 2, "neighbours differ in their two lowest bits"
        return self.first >> n


@dataclass(frozen=True)
class Fours:
    """Four integers: the bytes of a word, less `offset`. The word is the union of `word >> right & mask`."""

    # Masks by word (its number in the panel until it is read) and right shift, which is negative for a left one.
    fields: Mapping[tuple[int | Expr, int], int]
    offset: int = 0
    signed: bool = False  # the fields are signed bytes, to which the offset is yet to be added

    def __or__(self, other: Fours) -> Fours:
        assert not self.offset and not other.offset, "parts of codes are unsigned"
        fields = dict(self.fields)
        for field, mask in other.fields.items():
            fields[field] = fields.get(field, 0) | mask
        return Fours(fields)

    def __lshift__(self, n: int) -> Fours:
        assert not self.signed, "parts of codes are unsigned"
        return Fours({(word, right - n): mask << n for (word, right), mask in self.fields.items()}, self.offset << n)

    def __sub__(self, n: int) -> Fours:
        return Fours(self.fields, self.offset + n)

    @property
    def mask(self) -> int:
        """The bits of a byte that are used."""
        return functools.reduce(operator.or_, self.fields.values()) >> 24

    @property
    def room(self) -> int:
        """The number of upper bits of a byte that are not used."""
        return 8 - self.mask.bit_length()

    @property
    def is_high(self) -> bool:
        """Whether a field is the upper bits of its bytes, so that `raised` has one shift less than `word`."""
        return self.room > 0 and any(right == self.room for _, right in self.fields)

    def stored(self) -> Expr:
        """The union of the fields."""
        return functools.reduce(operator.or_, (_field(*field, mask) for field, mask in self.fields.items()))

    def word(self) -> Expr:
        """The integers plus the offset. To signed bytes, inverting their top bits adds 128."""
        return self.stored() ^ signed_word(128 * ONES) if self.signed else self.stored()

    def raised(self) -> Expr:
        """The integers plus the offset, times 2^room."""
        return (self << self.room).word()


def _field(word: int | Expr, right: int, mask: int) -> Expr:
    assert isinstance(word, Expr), "words are read before they are used"
    shifted = word >> right if right >= 0 else word << -right
    return shifted if mask == BYTES else shifted & signed_word(mask)


@dataclass(frozen=True)
class CodeWords:
    """The integers of a block in a panel."""

    storage: DType
    block: Block

    @property
    def form(self) -> IntegerForm:
        return integer_form(self.storage)

    def codes(self, t: int) -> Fours:
        """Four codes, the first of which is at 4 t."""
        return self._read(self.code_places(t))

    def scale(self, run: int) -> Expr:
        """The integer scale of a run, read with its three neighbours."""
        first, index = divmod(run, 4)
        return one_of(self.scale_places(first), self.scales(first), index)

    def scales(self, first: int) -> Expr:
        """The stored scales of the four runs from 4 `first` on."""
        return self.block.keep(("scales", first), lambda: self._read(self.scale_places(first)).stored())

    def code_places(self, t: int) -> Fours:
        """Four codes, not read yet."""
        fours: Fours = self.form.code(self, Position(t, 2, Neighbours(0)))
        return fours

    def scale_places(self, first: int) -> Fours:
        """Four scales, not read yet."""
        assert self.form.scale is not None
        fours: Fours = self.form.scale(self, Neighbours(4 * first))
        return fours

    def minima(self) -> list[Expr]:
        """The minima of a block, four per word."""
        read = self.form.minimum
        if read is None:
            return []
        runs = range(0, self.storage.block // self.form.run, 4)
        return [self.block.keep(("minima", run), self._read(read(self, Neighbours(run))).word) for run in runs]

    def floats(self) -> list[Expr]:
        """The factor of integers at the end of a block, and the other float if there is one."""
        return [read(self.block) for read in (self.form.unit, self.form.other) if read is not None]

    # -- the reader of codes, scales and minima ---------------------------------------------------------------------
    def bits(self, byte: int | Neighbours, first: int | Neighbours, width: int) -> Fours:
        """The same bits of four bytes, or four neighbouring bits of one byte."""
        if isinstance(byte, Neighbours):
            assert isinstance(first, int)
            return self._fields(byte.first, first, ((1 << width) - 1) * ONES)
        assert isinstance(first, Neighbours) and width == 1
        together = self._read(self._fields(byte, first.first, 15)).word()
        return Fours({(together * SPREAD, 0): ONES})

    def signed(self, byte: Neighbours) -> Fours:
        """Four signed bytes."""
        return Fours(self._fields(byte.first, 0, BYTES).fields, 128, signed=True)

    def lookup(self, table: Table, index: Fours) -> Fours:
        """Four entries of a table, computed."""
        assert table is FP4, "the only table of these types"
        return Fours({(_fp4(self.block, self._read(index)), 0): BYTES}, 16)

    def where(self, condition: int, then: Callable[[], Fours], other: Callable[[], Fours]) -> Fours:
        """`then` if the condition is not 0."""
        return then() if condition else other()

    def _fields(self, byte: int, first: int, mask: int) -> Fours:
        """The word of a block that contains a byte, shifted right to a bit of this byte, & mask."""
        index, start = self.block.source.split(byte)
        assert isinstance(index, int) and isinstance(start, int)
        fields = panel_bits(self.storage, Bits(index, start + first, mask))
        return Fours({(bits.word, bits.right): bits.mask for bits in fields})

    def _read(self, fours: Fours) -> Fours:
        """With the words that it names."""
        fields: dict[tuple[int | Expr, int], int] = {
            (self.word(word), right): mask for (word, right), mask in fours.fields.items()
        }
        return Fours(fields, fours.offset, fours.signed)

    def word(self, word: int | Expr) -> Expr:
        """A word of the panel, by its number unless it has been read."""
        if isinstance(word, Expr):
            return word
        return self.block.keep(("word", word), lambda: self.block.source.word(word))


@dataclass(frozen=True)
class PartWords:
    """The integers of one part of a long block: four runs, whose scales are one word. `part` is known at run time.

    Parts differ only in where their words are, or how far these are shifted, by the same steps from one to the next.
    """

    outer: CodeWords  # the whole block: what all parts need is read before the loop over parts
    block: Block
    part: Expr

    @property
    def parts(self) -> int:
        """Parts of a block."""
        return self.outer.storage.block // (4 * self.outer.form.run)

    def codes(self, t: int) -> Fours:
        """Four codes, the first of which is at 4 t in this part."""
        return self._read([self.outer.code_places(t + part * self.outer.form.run) for part in range(self.parts)])

    def scale(self, run: int) -> Expr:
        """The integer scale of a run of this part."""
        places = [self.outer.scale_places(part) for part in range(self.parts)]

        def stored() -> Expr:
            if _is_spaced(places):
                return self._read(places).stored()
            first, second = map(self.outer.scales, range(self.parts))
            return self.part.eq(0).select(first, second)

        return one_of(places[0], self.block.keep("scales", stored), run)

    def _read(self, places: Sequence[Fours]) -> Fours:
        """The integers of this part, given where those of each part are."""
        assert _is_spaced(places), "parts are at equal distances"
        first, second = places[:2]
        fields: dict[tuple[int | Expr, int], int] = {}
        for ((word, right), mask), (next_word, next_right) in zip(first.fields.items(), second.fields, strict=True):
            assert isinstance(word, int) and isinstance(next_word, int)
            fields[self._word(word, next_word - word, next_right - right), right] = mask
        return Fours(fields, first.offset, first.signed)

    def _word(self, word: int, step: int, shift: int) -> Expr:
        def read() -> Expr:
            stored = self.block.source.word(self.part * step + word) if step else self.outer.word(word)
            return stored >> (self.part * shift).cast(I32) if shift else stored

        return self.block.keep(("word", word, step, shift), read)


def _is_spaced(places: Sequence[Fours]) -> bool:
    """Whether the fields of consecutive places have the same masks, and words and shifts at equal distances."""
    if len({tuple(fours.fields.values()) for fours in places}) > 1:
        return False
    numbers = np.array([list(fours.fields) for fours in places], dtype=np.int64)
    return not np.diff(numbers, 2, axis=0).any()


def one_of(fours: Fours, stored: Expr, index: int) -> Expr:
    """One of the integers of a word that is stored like `fours`."""
    if fours.signed:
        return stored << 24 - 8 * index >> 24
    return (stored >> 8 * index & fours.mask) - fours.offset


def integer_form(storage: DType) -> IntegerForm:
    """The description of a type that integer kernels read."""
    form = decoder(storage)
    assert isinstance(form, IntegerForm), f"{storage} has integer codes"
    return form


def _fp4(b: Block, index: Fours) -> Expr:
    """0, 1, 2, 3, 4, 6, 8, 12 or their negatives, plus 16, from a sign, two exponent bits and one more.

    From 4 on a number exceeds its bits: by one for the last bit, by two for the one before, by two more for both.
    """
    bits = b.let(index.word())
    large, sign = b.let(bits >> 2 & ONES), b.let(bits >> 3 & ONES)
    last, second = (b.let(bits >> n & large) for n in range(2))
    size = (bits & 7 * ONES) + last + (second << 1) + ((last & second) << 1)
    # Per byte: s becomes 31 - s if the sign is set, so that taking 15 off that and adding 16 to others is the same.
    flip = b.let((sign << 5) - sign)
    return (size ^ flip) + 16 * ONES - flip

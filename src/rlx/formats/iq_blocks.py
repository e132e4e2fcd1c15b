"""Decoders for block types with codebooks, ternary digits or small floats.

Written as those in `quant_blocks.py`. Codebook entries, signs and scales shared by several positions are memoised with
`Reader.keep`, so each is looked up once.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.dtypes import F32
from rlx.formats import iq_tables
from rlx.formats.quant_blocks import (
    Decoder,
    Int,
    IntegerForm,
    IntegerReader,
    Number,
    Position,
    Reader,
    Table,
    half,
    signed_word,
)

_GRIDS = {name: Table(name, iq_tables.words(name)) for name in iq_tables.GRIDS}
_SIGNS = Table("signs", iq_tables.SIGNS)
_IQ4 = Table("iq4", iq_tables.IQ4)
FP4 = Table("fp4", iq_tables.FP4)
_POWERS = Table("powers_of_3", (1, 3, 9, 27, 81))

Make = Callable[[], Number]  # a lazy read, evaluated once by `Reader.keep`


# -- parts of expressions ---------------------------------------------------------------------------------------------
def _little_endian(b: Reader, byte: Int, count: int) -> Number:
    """Combine bytes into one i32; the top bit of the fourth byte is the sign."""
    value = b.zero()
    for i in range(count):
        value = value | b.bits(byte + i, 0, 8) << 8 * i
    return value


def _nibble(b: IntegerReader, byte: Int, which: Int) -> Number:
    return b.bits(byte, which << 2, 4)


def _pairs(b: IntegerReader, base: int, which: Int) -> Number:
    """Consecutive nibbles: the low and high half of one byte, then of the next."""
    return _nibble(b, (which >> 1) + base, which & 1)


# -- vectors from a grid ----------------------------------------------------------------------------------------------
def _digit(b: Reader, name: str, i: Position, index: Make) -> Number:
    """The digit at a position of a codebook vector, which is looked up once."""
    grid = iq_tables.GRIDS[name]
    vector = i >> grid.length.bit_length() - 1
    word = b.keep((name, vector), lambda: b.lookup(_GRIDS[name], index()))
    at = i & grid.length - 1
    return word >> (at << 1 if grid.bits == 2 else (at << 1) + at) & (1 << grid.bits) - 1


def _magnitude(b: Reader, name: str, i: Position, index: Make) -> Number:
    """The level of a digit, computed arithmetically: 8 25 43, 4 12 20 28 36 44 52 62, or 1 3 5 to 15."""
    digit = _digit(b, name, i, index)
    if name == "iq3_s":
        return (digit << 1) + 1
    if name == "iq3_xxs":
        return (digit << 3) + 4 + ((digit + 1 >> 3) << 1)
    return (digit << 4) + digit + (digit >> 1) + 8


def _signed(b: Reader, magnitude: Number, i: Position, signs: Make) -> Number:
    """Negate the magnitude if the sign bit of the position is set; eight positions share a byte."""
    eight = b.keep(("signs", i >> 3), signs)
    sign = eight >> (i & 7) & 1
    return (magnitude - ((magnitude & 0 - sign) << 1)).cast(F32)


def _scale(b: Reader, part: Int, make: Callable[[], Number]) -> Number:
    return b.keep(("scale", part), make)


def _above_half(b: Reader, scale: Number, factor: float) -> Number:
    return b.half(0) * (scale.cast(F32) + 0.5) * factor


def _odd(d: Number, scale: Number) -> Number:
    """d · (2 scale + 1)."""
    return d * ((scale << 1) + 1).cast(F32)


def _quarter(word: Number, i: Position) -> Number:
    """Sign index of a group of eight among 32 positions: the word holds 7 bits per group."""
    which = i >> 3 & 3
    return word >> (which << 3) - which & 127


def _iq2_xxs(b: Reader, i: Position) -> Number:
    part = i >> 5
    start = (part << 3) + 2
    word = b.keep(("word", part), lambda: _little_endian(b, start + 4, 4))
    scale = _scale(b, part, lambda: _above_half(b, word >> 28 & 15, 0.25))
    magnitude = _magnitude(b, "iq2_xxs", i, lambda: b.bits(start + (i >> 3 & 3), 0, 8))
    return scale * _signed(b, magnitude, i, lambda: b.lookup(_SIGNS, _quarter(word, i)))


def _iq2_xs(b: Reader, i: Position) -> Number:
    code = ((i >> 3) << 1) + 2
    scale = _scale(b, i >> 4, lambda: _above_half(b, _pairs(b, 66, i >> 4), 0.25))
    magnitude = _magnitude(b, "iq2_xs", i, lambda: b.bits(code, 0, 8) | b.bits(code + 1, 0, 1) << 8)
    return scale * _signed(b, magnitude, i, lambda: b.lookup(_SIGNS, b.bits(code + 1, 1, 7)))


def _iq2_s(b: Reader, i: Position) -> Number:
    eight = i >> 3

    def index() -> Number:
        return b.bits(eight + 2, 0, 8) | b.bits((eight >> 2) + 66, (eight & 3) << 1, 2) << 8

    scale = _scale(b, i >> 4, lambda: _above_half(b, _pairs(b, 74, i >> 4), 0.25))
    magnitude = _magnitude(b, "iq2_s", i, index)
    return scale * _signed(b, magnitude, i, lambda: b.bits(eight + 34, 0, 8))


def _iq3_xxs(b: Reader, i: Position) -> Number:
    part = i >> 5
    word = b.keep(("word", part), lambda: _little_endian(b, (part << 2) + 66, 4))
    scale = _scale(b, part, lambda: _above_half(b, word >> 28 & 15, 0.5))
    magnitude = _magnitude(b, "iq3_xxs", i, lambda: b.bits((i >> 2) + 2, 0, 8))
    return scale * _signed(b, magnitude, i, lambda: b.lookup(_SIGNS, _quarter(word, i)))


def _iq3_s(b: Reader, i: Position) -> Number:
    four = i >> 2

    def index() -> Number:
        return b.bits(four + 2, 0, 8) | b.bits((four >> 3) + 66, four & 7, 1) << 8

    scale = _scale(b, i >> 5, lambda: _odd(b.half(0), _pairs(b, 106, i >> 5)))
    magnitude = _magnitude(b, "iq3_s", i, index)
    return scale * _signed(b, magnitude, i, lambda: b.bits((i >> 3) + 74, 0, 8))


def _shifted(b: Reader, i: Position, index: Make, sign: Number) -> Number:
    """-1, 0 or 1, plus 1/8, or minus 1/8 if the sign is set."""
    eighths = (_digit(b, "iq1", i, index) << 3) - 7 - (sign << 1)
    return eighths.cast(F32) * 0.125


def _iq1_s(b: Reader, i: Position) -> Number:
    part, eight = i >> 5, i >> 3
    word = b.keep(("word", part), lambda: _little_endian(b, (part << 1) + 34, 2))

    def index() -> Number:
        which = eight & 3
        return b.bits(eight + 2, 0, 8) | (word >> (which << 1) + which & 7) << 8

    scale = _scale(b, part, lambda: _odd(b.half(0), word >> 12 & 7))
    return scale * _shifted(b, i, index, word >> 15 & 1)


def _iq1_m(b: Reader, i: Position) -> Number:
    part, eight = i >> 4, i >> 3

    def d() -> Number:
        """The f16 scale, assembled from the top nibbles of four words."""
        bits = b.zero()
        for word in range(4):
            bits = bits | b.bits(49 + 2 * word, 4, 4) << 4 * word
        return b.from_half(bits)

    def scale() -> Number:
        word, which = _little_endian(b, (part >> 2 << 1) + 48, 2), part & 3
        return _odd(b.keep("d", d), word >> (which << 1) + which & 7)

    high = b.keep(("high", eight), lambda: _pairs(b, 32, eight))
    numbers = _shifted(b, i, lambda: b.bits(eight, 0, 8) | (high & 7) << 8, high >> 3)
    return _scale(b, part, scale) * numbers


# -- codes of single numbers ------------------------------------------------------------------------------------------
def _iq4_xs(b: IntegerReader, i: Position) -> Number:
    return b.lookup(_IQ4, _nibble(b, ((i >> 5) << 4) + (i & 15) + 8, i >> 4 & 1))


def _iq4_xs_scale(b: IntegerReader, part: Int) -> Number:
    return (_pairs(b, 4, part) | b.bits((part >> 2) + 2, (part & 3) << 1, 2) << 4) - 32


def _power_scale(b: Reader) -> Number:
    """2 ** (e - 128), where e is the first byte of a block; e < 2 gives subnormals."""

    def scale() -> Number:
        e = b.let(b.byte(0))
        return (e < 2).select(0x200000 << e, e - 1 << 23).bits()

    return b.keep("scale", scale)


def _nvfp4(b: Reader, i: Position) -> Number:
    part = i >> 4

    def scale() -> Number:
        """An unsigned E4M3 scale, halved; NaN becomes 0."""
        byte = b.bits(part, 0, 8)
        return byte.eq(127).select(0.0, ((byte & 127) << 20).bits() * 2.0**119)

    code = _nibble(b, (part << 3) + (i & 7) + 4, i >> 3 & 1)
    return b.lookup(FP4, code).cast(F32) * _scale(b, part, scale)


_E4M3_BITS = signed_word(0x87F00000)  # sign, exponent and mantissa bits of an E4M3 float within an f32
_E4M3_NAN = 0x07F00000


def _f8e4m3(b: Reader, i: Position) -> Number:
    """Decode E4M3: shift its bits into f32 position and multiply by the difference of the exponent biases."""
    bits = b.let(b.top_byte((i & 127) + 4, 4) & _E4M3_BITS)
    value = bits.bits() * 2.0**120
    return (bits & _E4M3_NAN).eq(_E4M3_NAN).select(float("nan"), value) * b.single(0)


# -- few bits ---------------------------------------------------------------------------------------------------------
def _tq1_0(b: IntegerReader, i: Position) -> Number:
    """Five digits per byte: 32 bytes up to position 160, 16 up to 240; then four digits in each of 4 bytes."""
    part = i >> 4
    later, last = part + 6 >> 4, part + 1 >> 4  # 1 from 160 on, 1 from 240 on
    first = ((part & 1) << 4 & later - 1) + (later << 5) + (last << 4)
    digit = (part >> 1 & later - 1) + (part - 10 & last - later)
    byte = first + (i & 15) - ((i & 12) & 0 - last)
    power = b.lookup(_POWERS, digit + ((i >> 2 & 3) & 0 - last))
    fraction = b.bits(byte, 0, 8) * power & 255
    return (fraction * 3 >> 8) - 1


DECODERS: dict[str, Decoder] = {
    "q8_1": IntegerForm(lambda b, i: b.signed((i & 31) + 4)),
    "q1_0": IntegerForm(lambda b, i: (b.bits((i >> 3) + 2, i & 7, 1) << 1) - 1),
    "q2_0": IntegerForm(lambda b, i: b.bits((i >> 2) + 2, (i & 3) << 1, 2) - 1),
    "tq1_0": IntegerForm(_tq1_0, half(26)),
    "tq2_0": IntegerForm(lambda b, i: b.bits(((i >> 7) << 5) + (i & 31), (i >> 5 & 3) << 1, 2) - 1, half(32)),
    "iq1_s": _iq1_s, "iq1_m": _iq1_m, "iq2_xxs": _iq2_xxs, "iq2_xs": _iq2_xs, "iq2_s": _iq2_s, "iq3_xxs": _iq3_xxs,
    "iq3_s": _iq3_s,
    "iq4_nl": IntegerForm(lambda b, i: b.lookup(_IQ4, _nibble(b, (i & 15) + 2, i >> 4))),
    "iq4_xs": IntegerForm(_iq4_xs, run=32, scale=_iq4_xs_scale),
    "mxfp4": IntegerForm(lambda b, i: b.lookup(FP4, _nibble(b, (i & 15) + 1, i >> 4)), _power_scale),
    "nvfp4": _nvfp4, "f8e4m3_128": _f8e4m3, "f8e4m3_32": _f8e4m3,
}  # fmt: skip

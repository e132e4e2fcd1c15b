"""Large angles, reduced exactly: for arguments of sine, cosine and tangent that the fast reduction is too short for.

The method of Payne and Hanek (1983). A double is m·2^e with an integer m of 53 bits, and of m·2^e/π mod 2 only 192 bits
of 1/π matter: those before them make multiples of 2, those after them add less than 2^-138. No double comes nearer to a
multiple of π/2 than 2^-61, so the distance has at least 76 correct bits.
"""

from __future__ import annotations

import functools

from rlx.backends.cpu.builder import Builder, Value, const, lanes_of, vector

_WORDS = 20  # of 64 bits: one before the point, and the largest double needs bits up to 971 + 1 + 191 after it
_FRACTION, _BIAS = 52, 1023
_NOT_FINITE = 2047  # the exponent field of infinities


@functools.cache
def _pi(bits: int) -> int:
    """π·2^bits, rounded down, by Machin's formula: π/4 = 4 arctan(1/5) - arctan(1/239)."""
    guard = 64

    def arctan_of_inverse(x: int) -> int:
        power = total = (1 << bits + guard) // x
        n, sign = 1, 1
        while power:
            power //= x * x
            n, sign = n + 2, -sign
            total += sign * (power // n)
        return total

    return 4 * (4 * arctan_of_inverse(5) - arctan_of_inverse(239)) >> guard


@functools.cache
def _inverse_pi() -> list[int]:
    """1/π as words, the highest first; the first one is before the point and 0."""
    after_point = 64 * (_WORDS - 1)
    scaled = (1 << 2 * after_point + 128) // _pi(after_point + 128)
    return [scaled >> 64 * (_WORDS - 1 - i) & 2**64 - 1 for i in range(_WORDS)]


def reduce_large(
    b: Builder, x: Value, limit: float, *, quarter: bool = False, turn: bool = False
) -> tuple[Value, Value, Value]:
    """x + turn·π/2 = n·u + r, |r| <= u/2, for the unit u = π, or π/2 if `quarter`: r, n and what r lacks.

    Only for lanes of doubles beyond ±limit, which is at least 2^26; the others get zeros. Of n, the last bit counts.
    With `turn` (a cosine) they are those of |x|. Infinities have NaN for r.
    """
    count = lanes_of(x.type)
    zeros = [const(t, 0) for t in (x.type, vector(count, "i64"), x.type)]

    def lane(i: Value, *so_far: Value) -> list[Value]:
        element = b.extract(x, i)

        def exact() -> list[Value]:
            found = _reduced(b, element, quarter=quarter, turn=turn)
            return [b.insert(lanes, one, i) for lanes, one in zip(so_far, found, strict=True)]

        is_large = b.fcmp("ogt", b.intrinsic("fabs", element), const("double", limit))
        return b.when(is_large, exact, lambda: list(so_far))

    r, n, lacks = b.loop(0, count, 1, lane, zeros)
    return r, n, lacks


def _reduced(b: Builder, x: Value, *, quarter: bool, turn: bool) -> tuple[Value, Value, Value]:
    """r, n and what r lacks, of one double."""

    def number(value: int) -> Value:
        return const("i64", value)

    def wide(value: Value) -> Value:
        return b.convert("zext", value, "i128")

    def high(value: Value) -> Value:
        return b.convert("trunc", b.op("lshr", value, const("i128", 64)), "i64")

    bits = b.convert("bitcast", x, "i64")
    field = b.op("and", b.op("lshr", bits, number(_FRACTION)), number(_NOT_FINITE))
    m = b.op("or", b.op("and", bits, number((1 << _FRACTION) - 1)), number(1 << _FRACTION))
    # Bit e of 1/π, counted from the point, makes multiples of 1 with m·2^e: the first that matters.
    first = b.add(field, 63 + quarter - _BIAS - _FRACTION)
    table = b.module.table("inverse_pi", "i64", _inverse_pi())
    place = b.offset(table, b.op("lshr", first, number(6)), "i64")
    shift = b.op("and", first, number(63))
    words = [b.load("i64", b.offset(place, i, "i64"), align=8) for i in range(4)]
    top, middle, low = (b.intrinsic("fshl", words[i], words[i + 1], shift) for i in range(3))

    # m·2^e/π mod 2 as an integer of 192 bits, of which 191 are after the point.
    lowest = b.op("mul", wide(m), wide(low))
    inner = b.op("add", b.op("mul", wide(m), wide(middle)), wide(high(lowest)))
    outer = b.op("add", b.op("mul", m, top), high(inner))
    inner, lowest = b.convert("trunc", inner, "i64"), b.convert("trunc", lowest, "i64")
    half = number(1 << 62)
    if turn:
        outer = b.op("add", outer, half)
    n = b.op("lshr", b.op("add", outer, half), number(63))

    # The distance to n, between -1/2 and 1/2: its sign, and 64 bits from the first that is set.
    outer, inner = (b.intrinsic("fshl", p, q, number(1)) for p, q in ((outer, inner), (inner, lowest)))
    sign = b.op("ashr", outer, number(63))
    outer, inner = b.op("xor", outer, sign), b.op("xor", inner, sign)
    zeros = b.call("i64", "llvm.ctlz.i64", outer, const("i1", False))
    distance = b.intrinsic("fshl", outer, inner, zeros)
    product = high(b.op("mul", wide(distance), const("i128", _pi(62))))  # times 2^(-62 - zeros) it is r

    # 53 bits of it are r, the others what r lacks.
    exponent = b.op("sub", number(_BIAS - 61 - quarter), zeros)
    scale = b.convert("bitcast", b.op("shl", exponent, number(_FRACTION)), "double")
    below = (1 << 11) - 1
    r = b.convert("sitofp", b.op("lshr", b.op("and", product, number(~below)), number(1)), "double")
    lacks = b.convert("sitofp", b.op("and", product, number(below)), "double")
    r, lacks = b.op("fmul", r, scale), b.op("fmul", b.op("fmul", lacks, const("double", 0.5)), scale)
    is_negative = b.icmp("slt", sign if turn else b.op("xor", sign, bits), number(0))
    r, lacks = (b.select(is_negative, b.fneg(value), value) for value in (r, lacks))
    is_finite = b.icmp("ne", field, number(_NOT_FINITE))
    return b.select(is_finite, r, const("double", float("nan"))), n, lacks

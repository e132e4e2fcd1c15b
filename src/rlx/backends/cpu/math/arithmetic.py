"""Exact arithmetic on vectors: `Lanes`, which the other functions are written with, and fma, max, min, round_even."""

from __future__ import annotations

import math

from rlx.backends.cpu.builder import Builder, Value, const, lanes_of, scalar_of, vector
from rlx.backends.cpu.targets import CpuTarget
from rlx.fast_dataclass import dataclass

Number = Value | float


@dataclass(frozen=True, slots=True)
class _Format:
    """The bit layout of a float type."""

    bytes: int
    fraction: int
    bias: int

    @property
    def integer(self) -> str:
        return f"i{8 * self.bytes}"


_FORMATS = {"float": _Format(4, 23, 127), "double": _Format(8, 52, 1023)}


class Lanes:
    """Arithmetic on vectors of one float type; Python numbers are constants in every lane."""

    def __init__(self, b: Builder, type_: str, target: CpuTarget) -> None:
        self.b = b
        self.type = type_
        self.target = target
        self.scalar = scalar_of(type_)
        self.format = _FORMATS[self.scalar]
        self.bits_type = with_scalar(type_, self.format.integer)

    def of(self, x: Number) -> Value:
        return x if isinstance(x, Value) else const(self.type, x)

    def add(self, x: Number, y: Number) -> Value:
        return self.b.op("fadd", self.of(x), self.of(y))

    def sub(self, x: Number, y: Number) -> Value:
        return self.b.op("fsub", self.of(x), self.of(y))

    def mul(self, x: Number, y: Number) -> Value:
        return self.b.op("fmul", self.of(x), self.of(y))

    def div(self, x: Number, y: Number) -> Value:
        return self.b.op("fdiv", self.of(x), self.of(y))

    def fma(self, x: Number, y: Number, z: Number) -> Value:
        return fma(self.b, self.of(x), self.of(y), self.of(z), self.target)

    def less_product(self, z: Value, x: Value, y: float) -> Value:
        """z - x·y."""
        return self.fma(x, -y, z)

    def polynomial(self, x: Value, coefficients: tuple[float, ...]) -> Value:
        """Horner's rule: fewest instructions, and neighbouring vectors hide its latency."""
        result = self.of(coefficients[-1])
        for coefficient in reversed(coefficients[:-1]):
            result = self.fma(result, x, coefficient)
        return result

    def at_most(self, x: Value, bound: float) -> Value:
        """min(x, bound) that propagates NaN: one minps, which returns its second operand if either is NaN."""
        return self.b.select(self.compare("olt", bound, x), self.of(bound), x)

    def at_least(self, x: Value, bound: float) -> Value:
        return self.b.select(self.compare("ogt", bound, x), self.of(bound), x)

    def clamp(self, x: Value, low: float, high: float) -> Value:
        return self.at_least(self.at_most(x, high), low)

    def compare(self, predicate: str, x: Number, y: Number) -> Value:
        return self.b.fcmp(predicate, self.of(x), self.of(y))

    def choose(self, condition: Value, x: Number, y: Number) -> Value:
        return self.b.select(condition, self.of(x), self.of(y))

    def magnitude(self, x: Value) -> Value:
        return self.b.intrinsic("fabs", x)

    def with_sign_of(self, x: Value, sign: Value) -> Value:
        return self.b.intrinsic("copysign", x, sign)

    # -- bit patterns ---------------------------------------------------------------------------------------------
    def bits(self, x: Value) -> Value:
        return self.b.convert("bitcast", x, self.bits_type)

    def from_bits(self, x: Value) -> Value:
        return self.b.convert("bitcast", x, self.type)

    def integer(self, value: int) -> Value:
        return const(self.bits_type, value)

    def into_exponent(self, x: Value) -> Value:
        """The float whose biased exponent is the low bits of the integer `x`."""
        return self.from_bits(self.b.op("shl", x, self.integer(self.format.fraction)))

    def rounder(self, bias: int = 0) -> float:
        """Adding this rounds to an integer, which the low bits of the sum then hold, plus `bias`.

        Valid below 2^22 (float) and 2^51 (double) in magnitude.
        """
        return 1.5 * 2.0**self.format.fraction + bias

    # -- powers of two --------------------------------------------------------------------------------------------
    def scale(self, x: Value, n: Value, rounded: Value) -> Value:
        """x·2^n rounded once, for x near 1; `rounded` is n + rounder(2·bias).

        Two factors of about half the exponent each stay in range, so results underflow gradually.
        """
        if self.has_register_instructions:
            return self.per_register("scalef", x, n)
        exponent = self.bits(rounded)
        half = self.b.op("lshr", exponent, self.integer(1))
        rest = self.b.op("sub", exponent, half)
        return self.mul(self.mul(x, self.into_exponent(half)), self.into_exponent(rest))

    def split(self, x: Value, *, normal: bool = False) -> tuple[Value, Value]:
        """(e, m) with x = m·2^e and m in [3/4, 3/2), for positive finite x; `normal`: no x is denormal or negative.

        For other x, e carries the logarithm: -inf for zeros, inf for inf, NaN for NaN; m is NaN for negative x.
        """
        if self.has_register_instructions:
            mantissa = self.per_register("getmant", x)
            return self.sub(self.per_register("getexp", x), self.per_register("getexp", mantissa)), mantissa
        bias, fraction = self.format.bias, self.format.fraction
        unbias: Number = 2.0**fraction + bias
        lifted = x
        if not normal:
            tiny = self.compare("olt", x, 2.0 ** (1 - bias))
            lifted = self.choose(tiny, self.mul(x, 2.0 ** (fraction + 1)), x)
            unbias = self.choose(tiny, 2.0**fraction + bias + fraction + 1, 2.0**fraction + bias)
        one, lowest = bias << fraction, (bias << fraction) - (1 << fraction - 1)  # lowest: the bits of 3/4
        offset = self.b.op("add", self.bits(lifted), self.integer(one - lowest))
        within = self.b.op("and", offset, self.integer((1 << fraction) - 1))
        mantissa = self.from_bits(self.b.op("add", within, self.integer(lowest)))
        if not normal:
            mantissa = self.choose(self.compare("olt", x, 0.0), math.nan, mantissa)
        # Placed in the low bits of 2^fraction the exponent becomes a float; AVX2 has no conversion from i64.
        biased = self.b.op("lshr", offset, self.integer(fraction))
        planted = self.b.op("or", biased, self.integer(bias + fraction << fraction))
        exponent = self.sub(self.from_bits(planted), unbias)
        exponent = self.choose(self.compare("olt", x, math.inf), exponent, x)
        return self.choose(self.compare("oeq", x, 0.0), -math.inf, exponent), mantissa

    @property
    def has_register_instructions(self) -> bool:
        """Whether AVX-512's scalef, reduce, getexp and getmant fit: a power of two of lanes that fills a register."""
        lanes = lanes_of(self.type)
        fills = lanes * self.format.bytes >= 16 and lanes & lanes - 1 == 0
        return fills and "+avx512vl" in self.target.features

    def per_register(self, name: str, x: Value, y: Value | None = None) -> Value:
        """An AVX-512 instruction on each 64-byte piece of the operands."""
        lanes = lanes_of(x.type)
        bits = 8 * lanes * self.format.bytes
        if bits > 512:
            low, high = range(lanes // 2), range(lanes // 2, lanes)
            pieces = [
                self.per_register(name, self.b.shuffle(x, x, part), y and self.b.shuffle(y, y, part))
                for part in (low, high)
            ]
            return self.b.shuffle(pieces[0], pieces[1], range(lanes))
        operands = [x] if y is None else [x, y]
        if name == "getmant":
            operands.append(const("i32", 0b1011))  # mantissa in [3/4, 3/2), NaN for negative x
        if name == "reduce":
            operands.append(const("i32", 0))  # minus the nearest integer, ties to even
        operands += [const(x.type, 0.0), const("i16" if lanes == 16 else "i8", -1)]
        if bits == 512:
            operands.append(const("i32", 4))  # the current rounding mode
        letter = "d" if self.scalar == "double" else "s"
        return self.b.call(x.type, f"llvm.x86.avx512.mask.{name}.p{letter}.{bits}", *operands)


def with_scalar(type_: str, scalar: str) -> str:
    """The type of as many `scalar`s as `type_` has elements."""
    return vector(lanes_of(type_), scalar) if type_.startswith("<") else scalar


def fma(b: Builder, x: Value, y: Value, z: Value, target: CpuTarget) -> Value:
    """x·y + z, with one rounding if the target has FMA."""
    if target.has_fma:
        return b.intrinsic("fma", x, y, z)
    return b.op("fadd", b.op("fmul", x, y), z)


def max(b: Builder, x: Value, y: Value) -> Value:
    """The larger, NaN if either is NaN, as np.maximum. Of two zeros it is `y`."""
    return b.select(b.fcmp("uno", x, x), x, b.select(b.fcmp("ogt", x, y), x, y))


def min(b: Builder, x: Value, y: Value) -> Value:
    """The smaller, NaN if either is NaN, as np.minimum. Of two zeros it is `y`."""
    return b.select(b.fcmp("uno", x, x), x, b.select(b.fcmp("olt", x, y), x, y))


def round_even(b: Builder, x: Value) -> Value:
    """The nearest integer, ties to even, for every x; preserves the sign of zero, infinities and NaN.

    Adding and subtracting 2^23 (2^52 for double) rounds smaller numbers; larger ones have no fraction and are returned
    unchanged.
    """
    scalar = scalar_of(x.type)
    limit = const(x.type, 2.0 ** _FORMATS[scalar].fraction)
    size = b.intrinsic("fabs", x)
    rounded = b.op("fsub", b.op("fadd", size, limit), limit)
    return b.select(b.fcmp("olt", size, limit), b.intrinsic("copysign", rounded, x), x)

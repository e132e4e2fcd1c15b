"""Vector transcendentals and number conversions, written out as instructions.

Each function takes a builder and values of any width (`<1 x float>` to `<16 x double>` and beyond) and gives back the
result value. Nothing branches, nothing reads memory and nothing becomes a call, on any target, except for sines,
cosines and tangents of large angles; the bits of a lane do not depend on how many lanes there are.

Errors are in ulp of the result, the worst of sweeps of millions of arguments over all exponents. The polynomials are
our own minimax fits: a Remez exchange in 50-digit arithmetic on the reduced interval, of the relative error of the
result unless said otherwise; `float` coefficients were then moved by hill climbing over neighbouring floats until the
rounded polynomial was as good as the ideal one. All lists start at the lowest power.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from rlx.backends.cpu.builder import Builder, Value, const, lanes_of, scalar_of, vector
from rlx.backends.cpu.large_angles import reduce_large
from rlx.backends.cpu.targets import CpuTarget

Number = Value | float


@dataclass(frozen=True, slots=True)
class _Format:
    """How a float type lies in its bits."""

    bytes: int
    fraction: int
    bias: int

    @property
    def integer(self) -> str:
        return f"i{8 * self.bytes}"


_FORMATS = {"float": _Format(4, 23, 127), "double": _Format(8, 52, 1023)}


class _Lanes:
    """Arithmetic on vectors of one float type; Python numbers are constants in every lane."""

    def __init__(self, b: Builder, type_: str, target: CpuTarget) -> None:
        self.b = b
        self.type = type_
        self.target = target
        self.scalar = scalar_of(type_)
        self.format = _FORMATS[self.scalar]
        self.bits_type = _with_scalar(type_, self.format.integer)

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
        """min(x, bound), NaN staying NaN: one minps, since its second operand wins where it is NaN."""
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
        """Adding this rounds to an integer, which the low bits of the sum then hold, `bias` more than it.

        Valid below 2^22 (float) and 2^51 (double) in magnitude.
        """
        return 1.5 * 2.0**self.format.fraction + bias

    # -- powers of two --------------------------------------------------------------------------------------------
    def scaled(self, x: Value, n: Value, rounded: Value) -> Value:
        """x·2^n rounded once, x near 1; `rounded` is n + rounder(2·bias).

        Two factors of about half the exponent each keep both in range, so results underflow gradually.
        """
        if self.has_register_instructions:
            return self.per_register("scalef", x, n)
        whole = self.bits(rounded)
        half = self.b.op("lshr", whole, self.integer(1))
        rest = self.b.op("sub", whole, half)
        return self.mul(self.mul(x, self.into_exponent(half)), self.into_exponent(rest))

    def split(self, x: Value, *, normal: bool = False) -> tuple[Value, Value]:
        """(e, m) with x = m·2^e and m in [3/4, 3/2), for positive finite x; `normal`: no x is denormal or negative.

        Elsewhere e carries the logarithm: -inf for zeros, inf for inf, NaN for NaN; m is NaN for negative x.
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
        # Planted in the low bits of 2^fraction the exponent becomes a float; AVX2 has no conversion from i64.
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
            operands.append(const("i32", 0))  # less the nearest integer, of two the even one
        operands += [const(x.type, 0.0), const("i16" if lanes == 16 else "i8", -1)]
        if bits == 512:
            operands.append(const("i32", 4))  # the rounding mode in force
        letter = "d" if self.scalar == "double" else "s"
        return self.b.call(x.type, f"llvm.x86.avx512.mask.{name}.p{letter}.{bits}", *operands)


def _with_scalar(type_: str, scalar: str) -> str:
    """The type of as many `scalar`s as `type_` has elements."""
    return vector(lanes_of(type_), scalar) if type_.startswith("<") else scalar


# -- exact arithmetic ---------------------------------------------------------------------------------------------
def fma(b: Builder, x: Value, y: Value, z: Value, target: CpuTarget) -> Value:
    """x·y + z, with one rounding where the target can."""
    if target.has_fma:
        return b.intrinsic("fma", x, y, z)
    return b.op("fadd", b.op("fmul", x, y), z)


def max(b: Builder, x: Value, y: Value) -> Value:
    """The larger, NaN where either is NaN, as np.maximum. Of two zeros it is `y`."""
    return b.select(b.fcmp("uno", x, x), x, b.select(b.fcmp("ogt", x, y), x, y))


def min(b: Builder, x: Value, y: Value) -> Value:
    """The smaller, NaN where either is NaN, as np.minimum. Of two zeros it is `y`."""
    return b.select(b.fcmp("uno", x, x), x, b.select(b.fcmp("olt", x, y), x, y))


def round_even(b: Builder, x: Value) -> Value:
    """The nearest integer, ties to even, for every x: the sign of zero, infinities and NaN stay.

    Adding and subtracting 2^23 (2^52 for double) rounds what is smaller; what is larger has no fraction and is kept.
    """
    scalar = scalar_of(x.type)
    whole = const(x.type, 2.0 ** _FORMATS[scalar].fraction)
    size = b.intrinsic("fabs", x)
    rounded = b.op("fsub", b.op("fadd", size, whole), whole)
    return b.select(b.fcmp("olt", size, whole), b.intrinsic("copysign", rounded, x), x)


# -- exponentials -------------------------------------------------------------------------------------------------
_LOG2_E = 1.4426950408889634
_LN2 = 0.6931471805599453
# The first part is short enough that its product with any exponent is exact, so no target needs an FMA for it.
_LN2_PARTS = {
    "float": (0.693145751953125, 1.4286068203094173e-06),
    "double": (0.6931471805598903, 5.497923018708371e-14),
}
# Beyond these the result is inf or 0 whatever the argument.
_EXP_RANGE = {"float": (-104.0, 89.0), "double": (-746.0, 710.0)}
_EXP2_RANGE = {"float": (-151.0, 129.0), "double": (-1076.0, 1025.0)}
# e^r for |r| <= ln(2)/2: within 2^-28.2 and 2^-56.4.
_EXP = {
    "float": (1.0, 1.0, 0.49999994, 0.166665211, 0.0416683182, 0.00836868118, 0.00138149899),
    "double": (
        1.0, 1.0, 0.5000000000000011, 0.16666666666666413, 0.04166666666653005, 0.008333333333494595,
        0.0013888888943662627, 0.0001984126950636811, 2.480149306151872e-05, 2.755758649021457e-06,
        2.7630262876937655e-07, 2.5000047986140438e-08,
    ),
}  # fmt: skip
# 2^r for |r| <= 1/2: within 2^-27.4 and 2^-55.
_EXP2 = {
    "float": (1.0, 0.693147182, 0.240226477, 0.0555034243, 0.00961840432, 0.00133988413, 0.000153532412),
    "double": (
        1.0, 0.6931471805599453, 0.2402265069591013, 0.055504108664820084, 0.00961812910759412,
        0.0013333558146774623, 0.00015403530457112132, 1.5252733493125706e-05, 1.3215435282292017e-06,
        1.0178199572627585e-07, 7.073783250851313e-09, 4.434771174811024e-10,
    ),
}  # fmt: skip


def exp(b: Builder, x: Value, target: CpuTarget) -> Value:
    """e^x. Worst: float 0.9 ulp (1.2 without FMA), double 0.95 (1.2)."""
    v = _Lanes(b, x.type, target)
    return _exp_of_sum(v, v.clamp(x, *_EXP_RANGE[v.scalar]), None)


def _exp_of_sum(v: _Lanes, x: Value, rest: Value | None) -> Value:
    """e^(x + rest) for x within the range of exp and a tiny rest."""
    rounder = v.rounder(2 * v.format.bias)
    rounded = v.fma(x, _LOG2_E, rounder)
    n = v.sub(rounded, rounder)
    high, low = _LN2_PARTS[v.scalar]
    r = v.less_product(x, n, high)
    r = v.less_product(r, n, low) if rest is None else v.add(r, v.less_product(rest, n, low))
    return v.scaled(v.polynomial(r, _EXP[v.scalar]), n, rounded)


def exp2(b: Builder, x: Value, target: CpuTarget) -> Value:
    """2^x; exact for integers. Worst: float 0.9 ulp (1.1 without FMA), double 0.95 (1.25)."""
    v = _Lanes(b, x.type, target)
    if v.has_register_instructions:  # which take any x: of an infinity, the distance to an integer is 0
        r = v.per_register("reduce", x)
        return v.per_register("scalef", v.polynomial(r, _EXP2[v.scalar]), v.sub(x, r))
    x = v.clamp(x, *_EXP2_RANGE[v.scalar])
    rounder = v.rounder(2 * v.format.bias)
    rounded = v.add(x, rounder)
    n = v.sub(rounded, rounder)
    return v.scaled(v.polynomial(v.sub(x, n), _EXP2[v.scalar]), n, rounded)


# Where tanh rounds to 1.
_TANH_ONE = {"float": 9.02, "double": 19.1}
_HALF_LN2_PARTS = {
    "float": (0.3465728759765625, 7.143034101547086e-07),
    "double": (0.3465735902799665, 6.17333302073885e-15),
}
# Doubles round 2|x|/ln 2 down up to 0.7369: |x| up to 1/4, where n = 1 would cost half an ulp, then still has n = 0.
_TANH_SHIFT = 0.2369
# ((e^2w - 1)/2 - w) / w² for w from -ln(2)/4 to ln(2)/4 (float) and -0.0913 to 0.2555 (double): the whole within 2^-26
# and 2^-61.6.
_HALF_EXPM1 = {
    "float": (1.0, 0.666661739, 0.333338827, 0.133866027, 0.0444233231),
    "double": (
        1.0, 0.6666666666666672, 0.33333333333332316, 0.13333333333308026, 0.04444444444881859, 0.012698412726294359,
        0.0031746024670045274, 0.0007054689193272573, 0.00014112574122248663, 2.5403631607161694e-05,
        4.9690568152369635e-06,
    ),
}  # fmt: skip


def tanh(b: Builder, x: Value, target: CpuTarget) -> Value:
    """tanh x = h / (h + 1) with h = (e^2|x| - 1)/2, which loses nothing near 0.

    Worst: float 1.8 ulp (1.95 without FMA), double 1.6 (1.9).
    """
    v = _Lanes(b, x.type, target)
    size = v.at_most(v.magnitude(x), _TANH_ONE[v.scalar])
    rounder = v.rounder(v.format.bias)
    if v.scalar == "float":
        rounded = v.fma(size, 2 * _LOG2_E, rounder)
    else:
        rounded = v.add(v.fma(size, 2 * _LOG2_E, -_TANH_SHIFT), rounder)
    n = v.sub(rounded, rounder)
    # For float, ln(2)/2 as one number is enough with FMA: n is small, and where it is not the quotient hides the error.
    w = size
    for part in (_LN2 / 2,) if target.has_fma and v.scalar == "float" else _HALF_LN2_PARTS[v.scalar]:
        w = v.less_product(w, n, part)
    e = v.fma(v.mul(w, w), v.polynomial(w, _HALF_EXPM1[v.scalar]), w)
    power = v.into_exponent(v.bits(rounded))
    h = v.fma(power, e, v.fma(power, 0.5, -0.5))
    # The quotient as c - c²/(h + 1), c = min(h, 1): its rounding errors then only touch the smaller term.
    c = v.at_most(h, 1.0)
    quotient = v.div(c, v.add(h, 1.0))
    return v.with_sign_of(v.fma(b.fneg(c), quotient, c), x)


# -- the error function -------------------------------------------------------------------------------------------
# erf(x)/x - 1 in x² for |x| <= 1: within 2^-24.6 and 2^-62.7.
_ERF_SMALL = {
    "float": (0.128379121, -0.37612325, 0.112801768, -0.0267112758, 0.0049175336, -0.000563138048),
    "double": (
        0.1283791670955126, -0.3761263890318375, 0.11283791670954857, -0.02686617064507288, 0.005223977624780734,
        -0.0008548326978735688, 0.00012055331036689117, -1.4925593502316849e-05, 1.6460972749710854e-06,
        -1.6350024560759464e-07, 1.4657875679145678e-08, -1.1365650818706664e-09, 5.945237520751989e-11,
    ),
}  # fmt: skip
# The 4th root of 1 - erf|x| in |x| (float) or |x| - 3 (double) from 1 to where erf rounds to 1, fitted so that the
# absolute error of its 4th power is within 2^-25.3 and 2^-58.5.
_ERFC_ROOT = {
    "float": (
        1.00397706, -0.302571982, -0.0740855038, -0.0405305363, 0.0606696084, -0.02045995, 0.00292793405,
        -0.00015709248,
    ),
    "double": (
        0.06855693161083354, -0.10804150263715351, 0.06872437510598253, -0.018989110228451685,
        -0.0005697796331424309, 0.001887733601007516, -0.0004110040387797218, -4.391547606709337e-05,
        3.330683658530091e-05, -3.198632968540182e-06, -1.1413131413683004e-06, 2.977951067333742e-07,
        9.11869610098389e-09, -1.2215185937104439e-08, 9.818796999317922e-10, 3.055136004222976e-10,
        -6.044418580333466e-11, -4.159761003359269e-12, 2.0726811429735687e-12, 4.0987327991188076e-14,
        -4.169519803864035e-14, -2.54878930721063e-15,
    ),
}  # fmt: skip
_ERF_ONE = {"float": 4.2, "double": 6.1}  # beyond the fits, where their 4th powers are below half an ulp of 1


def erf(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The error function: an odd polynomial up to 1, beyond that 1 - p(|x|)⁴, which needs no exponential.

    Worst: float 1.7 ulp (2.2 without FMA), double 1.9 (2.3).
    """
    v = _Lanes(b, x.type, target)
    size = v.magnitude(x)
    small = v.fma(size, v.polynomial(v.mul(size, size), _ERF_SMALL[v.scalar]), size)
    capped = v.at_most(size, _ERF_ONE[v.scalar])
    if v.scalar == "double":
        capped = v.sub(capped, 3.0)
    root = v.polynomial(capped, _ERFC_ROOT[v.scalar])
    square = v.mul(root, root)
    large = v.fma(b.fneg(square), square, 1.0)
    return v.with_sign_of(v.choose(v.compare("olt", size, 1.0), small, large), x)


# -- the Gaussian error linear unit ---------------------------------------------------------------------------------
# |x|·Φ(-|x|), what gelu takes off relu, around the multiples of 0.4, by rising powers of the distance to the nearest: a
# column each, of the relative error. The last is for 5.8 and beyond, where less than 2e-8 is taken off.
_GELU_LOSS = (
    (
        0, 0.1378313, 0.169484332, 0.138083622, 0.087678872, 0.0455002598, 0.0196740814, 0.00715436181,
        0.00219884049, 0.000572790974, 0.000126685147, 2.38152916e-05, 3.80800793e-06, 5.18158117e-07,
        6.00199925e-08, 0,
    ),
    (
        0.5, 0.197270319, -0.0198978148, -0.117953539, -0.122674011, -0.0852318183, -0.0455493778,
        -0.0196081623, -0.00694195041, -0.00204373361, -0.000503644231, -0.000104331448, -1.82198564e-05,
        -2.6878065e-06, -3.35447737e-07, 0,
    ),
    (
        -0.398941189, -0.338803828, -0.196993262, -0.054378178, 0.0310544726, 0.0539913177, 0.0421034135,
        0.0231142361, 0.00982272532, 0.00335313613, 0.000936695549, 0.000216441316, 4.165266e-05,
        6.70689042e-06, 9.06595346e-07, 0,
    ),
    (
        -5.30168581e-05, 0.0942629352, 0.129776672, 0.0994177684, 0.0425914973, 2.87949638e-06, -0.0157611351,
        -0.0141816745, -0.00793372095, -0.00329009583, -0.00107117812, -0.000281233835, -6.04409106e-05,
        -1.07329561e-05, -1.58480645e-06, 0,
    ),
    (
        0.0672939494, 0.0442717932, -0.000649562513, -0.032009691, -0.033819899, -0.0180221032, -0.00304894801,
        0.00341393473, 0.00367355812, 0.00207762443, 0.000833726081, 0.000257222535, 6.31758739e-05,
        1.25867364e-05, 2.0577645e-06, 0,
    ),
    (
        -0.00480941776, -0.019558616, -0.0217490569, -0.00811709464, 0.00530645344, 0.00889365189, 0.0053618988,
        0.00121076521, -0.000649055699, -0.000783599971, -0.000427048915, -0.000159725809, -4.51862143e-05,
        -1.00686893e-05, -1.80561983e-06, 0,
    ),
)  # fmt: skip
_GELU_STEP = 0.4


def gelu(b: Builder, x: Value, target: CpuTarget) -> Value:
    """x·Φ(x), Φ being the share of a normal distribution that is below x.

    Worst, of floats with AVX-512, whose registers are tables of 16: 2.8 ulp for x > -1, 3e-8 in all below. Elsewhere
    x (1 + erf(x/√2))/2, which loses digits below 0: 3.2 ulp for x > -1, 2.5e-7 below.
    """
    v = _Lanes(b, x.type, target)
    if v.scalar == "float" and "+avx512f" in target.features:
        return _by_sixteen(b, x, lambda part: _gelu_by_table(_Lanes(b, part.type, target), part))
    half = v.mul(x, 0.5)
    return v.fma(half, erf(b, v.mul(x, math.sqrt(0.5)), target), half)


def _gelu_by_table(v: _Lanes, x: Value) -> Value:
    b = v.b
    size = v.at_most(v.magnitude(x), 15 * _GELU_STEP)
    which = nearest(b, v.mul(size, 1 / _GELU_STEP), v.target)
    distance = v.fma(b.convert("sitofp", which, v.type), -_GELU_STEP, size)
    loss: Value | None = None
    for row in reversed(_GELU_LOSS):
        register = Value(v.type, f"<{', '.join(str(const(v.scalar, number)) for number in row)}>")
        coefficient = b.call(v.type, "llvm.x86.avx512.permvar.sf.512", register, which)
        loss = coefficient if loss is None else v.fma(loss, distance, coefficient)
    assert loss is not None
    # Below zero x·0 and not 0, since x·Φ(x) is NaN at -∞ on every target.
    return v.sub(v.choose(v.compare("ogt", x, 0.0), x, v.mul(x, 0.0)), loss)


def _by_sixteen(b: Builder, x: Value, function: Callable[[Value], Value]) -> Value:
    """A function of 16 lanes on any number of them."""
    lanes = lanes_of(x.type)
    if lanes > 16:
        halves = [b.shuffle(x, x, part) for part in (range(lanes // 2), range(lanes // 2, lanes))]
        low, high = (_by_sixteen(b, half, function) for half in halves)
        return b.shuffle(low, high, range(lanes))
    if lanes == 16:
        return function(x)
    wide = function(b.shuffle(x, x, [i % lanes for i in range(16)]))
    return b.shuffle(wide, wide, range(lanes))


# -- logarithm ----------------------------------------------------------------------------------------------------
# (log(1 + f) - f) / f² for 1 + f in [3/4, 3/2): the whole within 2^-25.
_LOG = (-0.500000596, 0.333335489, -0.249934569, 0.199770555, -0.168227956, 0.149840638, -0.120673411, 0.0541319586)
# (log m - 2s) / s³ in s² for s = (m - 1)/(m + 1), m in [3/4, 3/2): the whole within 2^-61.7.
_LOG_ODD = (
    0.666666666666666, 0.4000000000005594, 0.28571428556007344, 0.22222224276185013, 0.18181667089515416,
    0.15391072395946803, 0.13174262397136222, 0.1383856315147174,
)  # fmt: skip


def log(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The natural logarithm; -inf at zeros, NaN below. Worst: float 1.2 ulp (1.3 without FMA), double 0.9."""
    v = _Lanes(b, x.type, target)
    exponent, mantissa = v.split(x)
    high, low = _LN2_PARTS[v.scalar]
    f = v.sub(mantissa, 1.0)
    if v.scalar == "float":
        tail = v.fma(v.polynomial(f, _LOG), v.mul(f, f), v.mul(exponent, low))
        result = v.fma(exponent, high, v.add(tail, f))
    else:
        # log(1 + f) = f - (f²/2 - s (f²/2 + R)) with R = s² odd(s²): the large terms are exact (Tang; fdlibm e_log.c).
        half_square = v.mul(v.mul(f, f), 0.5)
        s = v.div(f, v.add(f, 2.0))
        z = v.mul(s, s)
        r = v.mul(z, v.polynomial(z, _LOG_ODD))
        tail = v.fma(s, v.add(half_square, r), v.mul(exponent, low))
        result = v.fma(exponent, high, v.sub(f, v.sub(half_square, tail)))
    return result


# -- sine and cosine ----------------------------------------------------------------------------------------------
_ONE_OVER_PI = 0.3183098861837907
# π in parts: with FMA a part is a whole double, without it 27 bits, whose products with |n| <= 2^26 are exact.
_PI_PARTS: tuple[float, ...] = (3.141592653589793, 1.2246467991473532e-16, -2.9947698097183397e-33)
_PI_SHORT_PARTS: tuple[float, ...] = (
    3.141592651605606, 1.9841871479187034e-09, 1.144237741932715e-17, 3.2892513872648515e-26, 4.1340642196527976e-43,
)  # fmt: skip
_PI_REACH = {True: 1e9, False: 1e8}  # the largest angles that the parts are long enough for, with FMA and without
# (sin(r)/r - 1) / r² in r² for |r| <= π/2: the whole within 2^-27.2 and 2^-61.6. The float ones were searched further,
# with the rounding of each step: no sine exceeds 1, and cos(0) is 1 with and without FMA.
_SIN = {
    "float": (-0.166666582, 0.00833307207, -0.000198100854, 2.60572665e-06),
    "double": (
        -0.16666666666666666, 0.008333333333333194, -0.00019841269841209218, 2.755731921113728e-06,
        -2.5052106872802296e-08, 1.6058939705891092e-10, -7.642991488999756e-13, 2.7211749579096234e-15,
    ),
}  # fmt: skip


def sin(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The sine. Worst: float 1.95 ulp (2.2 without FMA), double 1.95 (2.0)."""
    return _sine(b, x, 0.0, target)


def cos(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The cosine, to the same bounds as `sin`."""
    return _sine(b, x, 0.5, target)


def _sine(b: Builder, x: Value, turn: float, target: CpuTarget) -> Value:
    """sin(x + turn·π): with x = (n - turn)π + r it is sin(r) times (-1)^n. The reduction to r is done in double."""
    v, wide = _Lanes(b, x.type, target), _Lanes(b, _with_scalar(x.type, "double"), target)
    full = b.convert("fpext", x, wide.type)
    if turn:
        rounded = wide.add(wide.fma(full, _ONE_OVER_PI, turn), wide.rounder())
        n = wide.sub(wide.sub(rounded, wide.rounder()), turn)
    else:
        rounded = wide.fma(full, _ONE_OVER_PI, wide.rounder())
        n = wide.sub(rounded, wide.rounder())
    r, rest = _less_multiple_of_pi(wide, full, n, exact=v.scalar == "double")
    result = _sine_of_rest(v, wide, r, wide.bits(rounded), rest)
    return _with_large(v, x, result, "cos" if turn else "sin", _sine_of_rest)


def _sine_of_rest(v: _Lanes, wide: _Lanes, r: Value, n: Value, rest: Value | None) -> Value:
    """sin(r + rest) times (-1)^n."""
    b = v.b
    flip = b.op("shl", n, wide.integer(63))
    r = v.clamp(b.convert("fptrunc", _xor_sign(wide, r, flip), v.type), -1.5708, 1.5708)
    z = v.mul(r, r)
    series = v.polynomial(z, _SIN[v.scalar])
    if rest is None:
        result = v.fma(r, v.mul(z, series), r)
    else:
        rest = v.clamp(_xor_sign(wide, rest, flip), -(2.0**-52), 2.0**-52)
        rest = v.fma(v.mul(rest, z), -0.5, rest)  # times cos(r), nearly
        result = v.add(r, v.fma(v.mul(r, z), series, rest))
    return v.with_sign_of(result, r)  # the sum above makes 0 of -0


def _with_large(
    v: _Lanes,
    x: Value,
    result: Value,
    name: str,
    function: Callable[[_Lanes, _Lanes, Value, Value, Value | None], Value],
) -> Value:
    """`result`, with `function` of exactly reduced angles where |x| is beyond the reach of the parts of π.

    Vectors with such lanes are rare: they are left to a function of the module.
    """
    b, target, reach = v.b, v.target, _PI_REACH[v.target.has_fma]
    symbol = f"large_{name}.{lanes_of(x.type)}.{v.scalar}"

    def emit(b: Builder, x: Value, result: Value) -> Value:
        v, wide = _Lanes(b, x.type, target), _Lanes(b, _with_scalar(x.type, "double"), target)
        full = b.convert("fpext", x, wide.type)
        r, n, rest = reduce_large(b, full, reach, quarter=name == "tan", turn=name == "cos")
        exact = function(v, wide, r, n, rest if v.scalar == "double" else None)
        return b.select(v.compare("ogt", v.magnitude(x), reach), exact, result)

    def large() -> list[Value]:
        b.module.define(symbol, [(x.type, "x"), (x.type, "fast")], emit, result=x.type, internal=True, noinline=True)
        return [b.call(x.type, symbol, x, result, cold=True)]

    return b.when(b.any(v.compare("ogt", v.magnitude(x), reach)), large, lambda: [result])[0]


def _xor_sign(v: _Lanes, x: Value, flip: Value) -> Value:
    return v.from_bits(v.b.op("xor", v.bits(x), flip))


def _less_multiple_of_pi(v: _Lanes, x: Value, n: Value, *, exact: bool) -> tuple[Value, Value | None]:
    """x - nπ as a double, with a second one for what is below its last bit where `exact`."""
    parts, exact_parts = (_PI_PARTS, 1) if v.target.has_fma else (_PI_SHORT_PARTS, 2)
    middle, *last = parts[exact_parts:]
    before = x
    for part in parts[:exact_parts]:  # these differences are exact, but for the second of two where much remains
        before, x = x, v.less_product(x, n, part)
    if not exact:
        return v.less_product(x, n, middle), None
    product = v.mul(n, middle)
    r = v.sub(x, product)
    rest = v.sub(v.sub(x, r), product)  # exact, x being a multiple of the last bit of the product
    if v.target.has_fma:
        rest = v.sub(rest, v.fma(n, middle, v.b.fneg(product)))
    else:
        rest = v.add(rest, v.less_product(v.sub(before, x), n, parts[exact_parts - 1]))
    for part in last:
        rest = v.less_product(rest, n, part)
    return r, rest


# -- tangent ------------------------------------------------------------------------------------------------------
# (cos(r) - 1 + r²/2) / r⁴ in r² for |r| <= π/4: the whole within 2^-33 and 2^-64.
_COS = {
    "float": (0.04166664567699405, -0.0013887316015783516, 2.4433133858264908e-05),
    "double": (
        0.041666666666666595, -0.0013888888888873058, 2.480158728885244e-05, -2.7557314179475586e-07,
        2.0875700862571598e-09, -1.1358537423957617e-11,
    ),
}  # fmt: skip


def tan(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The tangent. Worst: float 0.66 ulp, double 0.9.

    With x = nπ/2 + r it is sin(r)/cos(r) for even n and -cos(r)/sin(r) for odd n, all in double.
    """
    v, wide = _Lanes(b, x.type, target), _Lanes(b, _with_scalar(x.type, "double"), target)
    full = b.convert("fpext", x, wide.type)
    rounded = wide.fma(full, 2 * _ONE_OVER_PI, wide.rounder())
    halves = wide.mul(wide.sub(rounded, wide.rounder()), 0.5)
    r, rest = _less_multiple_of_pi(wide, full, halves, exact=v.scalar == "double")
    result = _with_large(v, x, _tangent_of_rest(v, wide, r, wide.bits(rounded), rest), "tan", _tangent_of_rest)
    # A sum made 0 of -0, which is the only argument whose tangent is one.
    return v.choose(v.compare("oeq", x, 0.0), x, result)


def _tangent_of_rest(v: _Lanes, wide: _Lanes, r: Value, n: Value, rest: Value | None) -> Value:
    """The tangent of r + rest + nπ/2."""
    b = v.b
    r = wide.clamp(r, -0.7854, 0.7854)
    z = wide.mul(r, r)
    odd = b.icmp("ne", b.op("and", n, wide.integer(1)), wide.integer(0))
    flip = b.select(odd, wide.integer(-(1 << 63)), wide.integer(0))
    sine_tail = wide.mul(wide.mul(r, z), wide.polynomial(z, _SIN[v.scalar]))
    cosine, cosine_tail = _ordered_sum(wide, wide.of(1.0), wide.mul(z, -0.5))
    cosine_tail = wide.fma(wide.mul(z, z), wide.polynomial(z, _COS[v.scalar]), cosine_tail)
    if rest is None:
        sine, cosine = wide.add(r, sine_tail), wide.add(cosine, cosine_tail)
        result = wide.div(b.select(odd, cosine, sine), _xor_sign(wide, b.select(odd, sine, cosine), flip))
    else:
        rest = wide.clamp(rest, -(2.0**-52), 2.0**-52)
        sine, sine_low = _ordered_sum(wide, r, wide.fma(rest, wide.fma(z, -0.5, 1.0), sine_tail))
        cosine, cosine_low = _ordered_sum(wide, cosine, wide.fma(b.fneg(r), rest, cosine_tail))
        above = b.select(odd, cosine, sine), b.select(odd, cosine_low, sine_low)
        below = b.select(odd, sine, cosine), b.select(odd, sine_low, cosine_low)
        quotient, low = _quotient(wide, above, below)
        result = _xor_sign(wide, wide.add(quotient, low), flip)
    return b.convert("fptrunc", result, v.type)


# (atan(t)/t - 1) / t² in t² for |t| <= tan(π/8): the whole within 2^-30.5 and 2^-64.2.
_ATAN = {
    "float": (
        -0.33333315182022866, 0.19998471006904658, -0.14243522218746518, 0.10593722795854849, -0.06077973349938406,
    ),
    "double": (
        -0.33333333333333326, 0.19999999999997647, -0.14285714285385737, 0.11111111088055255, -0.09090908140717076,
        0.07692282684784543, -0.06666225829318993, 0.05877014146558793, -0.052183634988295646, 0.045034140650180805,
        -0.033471962292091394, 0.015193231080795462,
    ),
}  # fmt: skip
_TAN_EIGHTH = 0.41421356237309503  # of π; its inverse is the tangent of 3π/8
_TAN_THREE_EIGHTHS = 2.414213562373095


def atan(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The inverse tangent. Worst: float 0.51 ulp, double 0.7 (0.75 without FMA).

    atan|x| = c + atan(t), |t| <= tan(π/8): of c = 0, t = |x|; of c = π/4, t = (|x| - 1)/(|x| + 1); of c = π/2,
    t = -1/|x|. All in double.
    """
    v, wide = _Lanes(b, x.type, target), _Lanes(b, _with_scalar(x.type, "double"), target)
    size = wide.at_most(wide.magnitude(b.convert("fpext", x, wide.type)), 2.0**100)  # where it is π/2 long since
    small, large = wide.compare("olt", size, _TAN_EIGHTH), wide.compare("ogt", size, _TAN_THREE_EIGHTHS)

    def by_size(low: Number, middle: Number, high: Number) -> Value:
        return wide.choose(small, low, wide.choose(large, high, middle))

    # Both are exact pairs: where size is above 1, 1 - size is exact and so is the sum less 1.
    below, below_low = _ordered_sum(wide, wide.of(1.0), size)
    above, above_low = _ordered_sum(wide, wide.of(-1.0), size)
    above, below = by_size(size, above, -1.0), by_size(1.0, below, size)
    start, start_low = (by_size(0.0, half, 2 * half) for half in (math.pi / 4, _PI_PARTS[1] / 4))
    if v.scalar == "float":
        t, t_low = wide.div(above, below), wide.of(0.0)
    else:
        t, t_low = _quotient(wide, (above, by_size(0.0, above_low, 0.0)), (below, by_size(0.0, below_low, 0.0)))
    z = wide.mul(t, t)
    tail = wide.fma(wide.mul(t, z), wide.polynomial(z, _ATAN[v.scalar]), wide.add(start_low, t_low))
    total, lost = _ordered_sum(wide, start, t)
    result = wide.add(total, wide.add(lost, tail))
    return v.with_sign_of(b.convert("fptrunc", result, v.type), x)


# -- powers -------------------------------------------------------------------------------------------------------
# log2(m)/s in s² for s = (m - 1)/(m + 1), m in [3/4, 3/2): within 2^-35.5.
_LOG2_ODD = (2.885390081835806, 0.9617966219981482, 0.577092310736132, 0.4112077455684474, 0.348374457249898)
# 2^r for |r| <= 1/2: within 2^-28.9, evaluated in double.
_EXP2_MIDDLE = (
    1.0, 0.6931472028548291, 0.24022647913512113, 0.05550332471388891, 0.009618437369221314, 0.001339887435410092,
    0.00015353359205362137,
)  # fmt: skip
# ((log m - 2s) / s³ - 2/3) / s² in s², s as above: the whole within 2^-68.
_LOG_ODD_TAIL = (
    0.39999999999999725, 0.28571428571577184, 0.22222222191273655, 0.1818182152362603, 0.15384406768886882,
    0.1334114125120383, 0.11592403662956598, 0.12571173974798108,
)  # fmt: skip
_TWO_THIRDS = (0.6666666666666666, 3.700743415417188e-17)


def pow(b: Builder, x: Value, y: Value, target: CpuTarget) -> Value:
    """x to the power y, with C's (and NumPy's) special cases.

    x^0 and 1^y are 1 even for NaN; a negative x needs an integer y, whose parity gives the sign, else NaN.
    Worst: float 0.56 ulp, double 1.0 (1.2 without FMA).
    """
    v = _Lanes(b, x.type, target)
    size = v.magnitude(x)
    result = (_positive_power if v.scalar == "float" else _positive_power_exact)(v, size, y)
    whole = v.compare("oeq", round_even(b, y), y)
    half = v.mul(y, 0.5)
    odd = b.op("and", whole, v.compare("one", round_even(b, half), half))
    result = b.select(odd, v.with_sign_of(result, x), result)
    bounded = b.op("and", v.compare("olt", x, 0.0), v.compare("ogt", x, -math.inf))
    strange = b.op("and", bounded, b.op("xor", whole, const(whole.type, True)))
    result = v.choose(strange, math.nan, result)
    trivial = b.op("or", v.compare("oeq", y, 0.0), v.compare("oeq", x, 1.0))
    return v.choose(trivial, 1.0, result)


def _positive_power(v: _Lanes, x: Value, y: Value) -> Value:
    """x^y of floats for x >= 0 as 2^(y·log2 x), all in double: the one rounding that counts is the last."""
    b, wide = v.b, _Lanes(v.b, _with_scalar(x.type, "double"), v.target)
    exponent, mantissa = wide.split(b.convert("fpext", x, wide.type), normal=True)
    s = wide.div(wide.sub(mantissa, 1.0), wide.add(mantissa, 1.0))
    log2 = wide.fma(s, wide.polynomial(wide.mul(s, s), _LOG2_ODD), exponent)
    # A bound instead of inf makes 1^inf 1; the logarithm of any other float is at least 2^-24, so nothing else changes.
    bounded = b.convert("fpext", v.clamp(y, -(2.0**34), 2.0**34), wide.type)
    product = wide.clamp(wide.mul(bounded, log2), *_EXP2_RANGE["float"])
    rounder = wide.rounder(wide.format.bias)
    rounded = wide.add(product, rounder)
    power = wide.polynomial(wide.sub(product, wide.sub(rounded, rounder)), _EXP2_MIDDLE)
    return b.convert("fptrunc", wide.mul(power, wide.into_exponent(wide.bits(rounded))), x.type)


def _positive_power_exact(v: _Lanes, x: Value, y: Value) -> Value:
    """x^y of doubles for x >= 0 as e^(y·log x), the logarithm and the product being unevaluated sums of two doubles."""
    high, low = _log_pair(v, x)
    # See above: here the logarithm is at least 2^-53.
    bounded = v.clamp(y, -(2.0**65), 2.0**65)
    product, error = _product(v, bounded, high)
    rest = v.fma(bounded, low, error)
    edge_low, edge_high = _EXP_RANGE["double"]
    # The rest is tiny unless the product lies far outside the range, where it only has to stay harmless.
    result = _exp_of_sum(v, v.clamp(product, edge_low - 2, edge_high + 2), v.clamp(rest, -1.0, 1.0))
    grows = v.b.op("xor", v.compare("oeq", x, 0.0), v.compare("ogt", y, 0.0))
    edge = v.b.op("or", v.compare("oeq", x, 0.0), v.compare("oeq", x, math.inf))
    edge = v.b.op("and", edge, v.compare("ord", y, y))
    return v.b.select(edge, v.choose(grows, math.inf, 0.0), result)


def _log_pair(v: _Lanes, x: Value) -> tuple[Value, Value]:
    """log x as a sum of two doubles, right to about 2^-65, for positive finite x.

    log m = 2s + s (2/3 s² + s⁴ tail(s²)) with s, s² and the 2/3 as pairs.
    """
    exponent, m = v.split(x)
    f = v.sub(m, 1.0)
    denominator = v.add(m, 1.0)
    dropped = v.sub(m, v.sub(denominator, 1.0))
    inverse = v.div(1.0, denominator)
    s = v.mul(f, inverse)
    product, error = _product(v, s, denominator)
    s_low = v.mul(v.sub(v.sub(v.sub(f, product), error), v.mul(s, dropped)), inverse)
    z, z_low = _product(v, s, s)
    z_low = v.fma(v.add(s, s), s_low, z_low)
    third, third_low = _product(v, z, v.of(_TWO_THIRDS[0]))
    slope = v.fma(z, 0.8, _TWO_THIRDS[0])  # of the series in z
    third_low = v.fma(z_low, slope, v.fma(z, _TWO_THIRDS[1], third_low))
    series, lost = _ordered_sum(v, third, v.mul(v.mul(z, z), v.polynomial(z, _LOG_ODD_TAIL)))
    cubic, cubic_low = _product(v, s, series)
    cubic_low = v.add(v.fma(s, v.add(third_low, lost), cubic_low), v.mul(s_low, series))
    ln2, ln2_low = _LN2_PARTS["double"]
    total, lost = _ordered_sum(v, v.mul(exponent, ln2), v.add(s, s))
    total, lost_more = _ordered_sum(v, total, cubic)
    low = v.add(v.fma(exponent, ln2_low, v.add(s_low, s_low)), v.add(cubic_low, v.add(lost, lost_more)))
    return _ordered_sum(v, total, low)


def _ordered_sum(v: _Lanes, x: Value, y: Value) -> tuple[Value, Value]:
    """x + y and its rounding error, where x is 0 or the larger."""
    total = v.add(x, y)
    return total, v.sub(y, v.sub(total, x))


def _product(v: _Lanes, x: Value, y: Value) -> tuple[Value, Value]:
    """x·y and its rounding error (Dekker's way where there is no FMA; doubles below 2^900)."""
    product = v.mul(x, y)
    if v.target.has_fma:
        return product, v.fma(x, y, v.b.fneg(product))
    (a, a_low), (c, c_low) = _halves(v, x), _halves(v, y)
    error = v.sub(v.mul(a, c), product)
    error = v.add(v.add(error, v.mul(a, c_low)), v.mul(a_low, c))
    return product, v.add(error, v.mul(a_low, c_low))


def _quotient(v: _Lanes, x: tuple[Value, Value], y: tuple[Value, Value]) -> tuple[Value, Value]:
    """x/y of pairs, as a pair."""
    inverse = v.div(1.0, y[0])
    quotient = v.mul(x[0], inverse)
    product, error = _product(v, quotient, y[0])
    rest = v.add(v.sub(v.sub(x[0], product), error), v.sub(x[1], v.mul(quotient, y[1])))
    return quotient, v.mul(rest, inverse)


def _halves(v: _Lanes, x: Value) -> tuple[Value, Value]:
    """x as a sum of two numbers of 26 bits (Veltkamp)."""
    scaled = v.mul(x, 2.0**27 + 1)
    high = v.sub(scaled, v.sub(scaled, x))
    return high, v.sub(x, high)


# -- narrow floats ------------------------------------------------------------------------------------------------
def _has_half(target: CpuTarget) -> bool:
    return "+f16c" in target.features or target.arch == "aarch64"


def half_to_float(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The f32 values of f16 bit patterns, `<n x i16>`; exact."""
    result = _with_scalar(x.type, "float")
    if _has_half(target):
        return b.convert("fpext", b.convert("bitcast", x, _with_scalar(x.type, "half")), result)
    wide = _with_scalar(x.type, "i32")
    pattern = b.convert("zext", x, wide)
    size = b.op("and", pattern, const(wide, 0x7FFF))
    # Shifted into place the exponent is 112 too small; a multiplication repairs that for denormals too.
    number = b.convert("bitcast", b.op("shl", size, const(wide, 13)), result)
    number = b.convert("bitcast", b.op("fmul", number, const(result, 2.0**112)), wide)
    special = b.icmp("ugt", size, const(wide, 0x7BFF))
    number = b.op("or", number, b.select(special, const(wide, 0x7F800000), const(wide, 0)))
    sign = b.op("shl", b.op("and", pattern, const(wide, 0x8000)), const(wide, 16))
    return b.convert("bitcast", b.op("or", number, sign), result)


def float_to_half(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The f16 bit patterns nearest to f32 or f64 values, ties to even; overflow gives inf, NaN stays NaN."""
    x = _as_float(b, x)
    short = _with_scalar(x.type, "i16")
    if _has_half(target):
        return b.convert("bitcast", b.convert("fptrunc", x, _with_scalar(x.type, "half")), short)
    wide = _with_scalar(x.type, "i32")
    pattern = b.convert("bitcast", x, wide)
    size = b.op("and", pattern, const(wide, 0x7FFFFFFF))
    rebiased = b.op("add", size, const(wide, (15 - 127 << 23) + 0xFFF))
    normal = b.op("lshr", b.op("add", rebiased, _bit(b, size, 13)), const(wide, 13))
    # Adding 1/2 makes the FPU round at the last bit of a half denormal and leaves the result in the low bits.
    lifted = b.op("fadd", b.convert("bitcast", size, x.type), const(x.type, 0.5))
    denormal = b.op("sub", b.convert("bitcast", lifted, wide), const(wide, 126 << 23))
    result = b.select(b.icmp("ult", size, const(wide, 113 << 23)), denormal, normal)
    result = b.select(b.icmp("ugt", size, const(wide, 0x47800000 - 1)), const(wide, 0x7C00), result)
    payload = b.op("or", b.op("and", b.op("lshr", size, const(wide, 13)), const(wide, 0x3FF)), const(wide, 0x7E00))
    result = b.select(b.icmp("ugt", size, const(wide, 0x7F800000)), payload, result)
    sign = b.op("and", b.op("lshr", pattern, const(wide, 16)), const(wide, 0x8000))
    return b.convert("trunc", b.op("or", result, sign), short)


def bfloat_to_float(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The f32 values of bf16 bit patterns, `<n x i16>`; exact."""
    wide = _with_scalar(x.type, "i32")
    shifted = b.op("shl", b.convert("zext", x, wide), const(wide, 16))
    return b.convert("bitcast", shifted, _with_scalar(x.type, "float"))


def float_to_bfloat(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The bf16 bit patterns nearest to f32 or f64 values, ties to even; overflow gives inf, NaN stays NaN.

    Integer arithmetic on every target: vcvtneps2bf16 takes denormals for zeros.
    """
    x = _as_float(b, x)
    wide = _with_scalar(x.type, "i32")
    pattern = b.convert("bitcast", x, wide)
    rounded = b.op("add", b.op("add", pattern, const(wide, 0x7FFF)), _bit(b, pattern, 16))
    quiet = b.op("or", pattern, const(wide, 1 << 22))
    result = b.select(b.fcmp("uno", x, x), quiet, rounded)
    return b.convert("trunc", b.op("lshr", result, const(wide, 16)), _with_scalar(x.type, "i16"))


def _bit(b: Builder, x: Value, index: int) -> Value:
    return b.op("and", b.op("lshr", x, const(x.type, index)), const(x.type, 1))


def _as_float(b: Builder, x: Value) -> Value:
    """A double as a float for one more rounding: rounded to odd, so that the second rounding sees what was lost."""
    if scalar_of(x.type) == "float":
        return x
    short, integer = _with_scalar(x.type, "float"), _with_scalar(x.type, "i32")
    near = b.convert("fptrunc", x, short)
    back = b.convert("fpext", near, x.type)
    grown = b.fcmp("ogt", b.intrinsic("fabs", back), b.intrinsic("fabs", x))
    bits = b.convert("bitcast", near, integer)
    toward_zero = b.op("add", bits, b.convert("sext", grown, integer))
    odd = b.op("or", toward_zero, b.convert("zext", b.fcmp("one", back, x), integer))
    return b.convert("bitcast", odd, short)


# -- integers -----------------------------------------------------------------------------------------------------
def nearest(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The integer as wide as x that is nearest to it, ties to even, for |x| below 2^22 (2^51); any integer for others.

    AVX-512 rounds as it converts; elsewhere the low bits of a sum hold the integer.
    """
    v = _Lanes(b, x.type, target)
    if v.has_register_instructions and x.type == "<16 x float>":
        zero, every = const(v.bits_type, 0), const("i16", -1)
        return b.call(v.bits_type, "llvm.x86.avx512.mask.cvtps2dq.512", x, zero, every, const("i32", 4))
    return b.op("sub", v.bits(v.add(x, v.rounder())), v.bits(v.of(v.rounder())))


def float_to_int(b: Builder, x: Value, scalar_int_type: str, target: CpuTarget, *, signed: bool = True) -> Value:
    """x cut off toward zero and saturated to the range of the integer type; NaN gives 0.

    Not llvm.fptosi.sat, which comes apart into single lanes on x86.
    """
    v = _Lanes(b, x.type, target)
    width = int(scalar_int_type[1:])
    lowest, highest = (-(1 << width - 1), (1 << width - 1) - 1) if signed else (0, (1 << width) - 1)
    result = _with_scalar(x.type, scalar_int_type)
    # Conversions exist to 32 bits and more; outside its range a conversion is poison, so x is clamped first.
    through = _with_scalar(x.type, "i32") if width < 32 else result
    last = _largest_within(highest, v.format.fraction + 1)
    number = v.choose(v.compare("ord", x, x), x, 0.0) if lowest else v.choose(v.compare("ogt", x, 0.0), x, 0.0)
    clamped = v.clamp(number, float(lowest), float(last)) if lowest else v.at_most(number, float(last))
    converted = b.convert("fptosi" if signed or width < 32 else "fptoui", clamped, through)
    if last != highest:
        converted = b.select(v.compare("ogt", x, float(last)), const(through, highest), converted)
    return b.convert("trunc", converted, result)


def _largest_within(bound: int, digits: int) -> int:
    """The largest integer up to `bound` that has `digits` significant bits."""
    excess = bound.bit_length() - digits
    return bound if excess <= 0 else bound >> excess << excess

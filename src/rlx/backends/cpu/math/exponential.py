"""Exponentials, logarithms and powers of vectors, and the hyperbolic tangent."""

from __future__ import annotations

import math

from rlx.backends.cpu.builder import Builder, Value, const
from rlx.backends.cpu.math.arithmetic import Lanes, round_even, with_scalar
from rlx.backends.cpu.math.pairs import exact_product, ordered_sum
from rlx.backends.cpu.targets import CpuTarget

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
    v = Lanes(b, x.type, target)
    return _exp_of_sum(v, v.clamp(x, *_EXP_RANGE[v.scalar]), None)


def _exp_of_sum(v: Lanes, x: Value, rest: Value | None) -> Value:
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
    v = Lanes(b, x.type, target)
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
    v = Lanes(b, x.type, target)
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
    v = Lanes(b, x.type, target)
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
    v = Lanes(b, x.type, target)
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


def _positive_power(v: Lanes, x: Value, y: Value) -> Value:
    """x^y of floats for x >= 0 as 2^(y·log2 x), all in double: the one rounding that counts is the last."""
    b, wide = v.b, Lanes(v.b, with_scalar(x.type, "double"), v.target)
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


def _positive_power_exact(v: Lanes, x: Value, y: Value) -> Value:
    """x^y of doubles for x >= 0 as e^(y·log x), the logarithm and the product being unevaluated sums of two doubles."""
    high, low = _log_pair(v, x)
    # See above: here the logarithm is at least 2^-53.
    bounded = v.clamp(y, -(2.0**65), 2.0**65)
    product, error = exact_product(v, bounded, high)
    rest = v.fma(bounded, low, error)
    edge_low, edge_high = _EXP_RANGE["double"]
    # The rest is tiny unless the product lies far outside the range, where it only has to stay harmless.
    result = _exp_of_sum(v, v.clamp(product, edge_low - 2, edge_high + 2), v.clamp(rest, -1.0, 1.0))
    grows = v.b.op("xor", v.compare("oeq", x, 0.0), v.compare("ogt", y, 0.0))
    edge = v.b.op("or", v.compare("oeq", x, 0.0), v.compare("oeq", x, math.inf))
    edge = v.b.op("and", edge, v.compare("ord", y, y))
    return v.b.select(edge, v.choose(grows, math.inf, 0.0), result)


def _log_pair(v: Lanes, x: Value) -> tuple[Value, Value]:
    """log x as a sum of two doubles, right to about 2^-65, for positive finite x.

    log m = 2s + s (2/3 s² + s⁴ tail(s²)) with s, s² and the 2/3 as pairs.
    """
    exponent, m = v.split(x)
    f = v.sub(m, 1.0)
    denominator = v.add(m, 1.0)
    dropped = v.sub(m, v.sub(denominator, 1.0))
    inverse = v.div(1.0, denominator)
    s = v.mul(f, inverse)
    product, error = exact_product(v, s, denominator)
    s_low = v.mul(v.sub(v.sub(v.sub(f, product), error), v.mul(s, dropped)), inverse)
    z, z_low = exact_product(v, s, s)
    z_low = v.fma(v.add(s, s), s_low, z_low)
    third, third_low = exact_product(v, z, v.of(_TWO_THIRDS[0]))
    slope = v.fma(z, 0.8, _TWO_THIRDS[0])  # of the series in z
    third_low = v.fma(z_low, slope, v.fma(z, _TWO_THIRDS[1], third_low))
    series, lost = ordered_sum(v, third, v.mul(v.mul(z, z), v.polynomial(z, _LOG_ODD_TAIL)))
    cubic, cubic_low = exact_product(v, s, series)
    cubic_low = v.add(v.fma(s, v.add(third_low, lost), cubic_low), v.mul(s_low, series))
    ln2, ln2_low = _LN2_PARTS["double"]
    total, lost = ordered_sum(v, v.mul(exponent, ln2), v.add(s, s))
    total, lost_more = ordered_sum(v, total, cubic)
    low = v.add(v.fma(exponent, ln2_low, v.add(s_low, s_low)), v.add(cubic_low, v.add(lost, lost_more)))
    return ordered_sum(v, total, low)

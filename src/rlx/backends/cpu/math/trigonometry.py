"""Sine, cosine, tangent and inverse tangent of vectors."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlx.backends.cpu.builder import Builder, Value, lanes_of
from rlx.backends.cpu.math.arithmetic import Lanes, Number, with_scalar
from rlx.backends.cpu.math.large_angles import reduce_large
from rlx.backends.cpu.math.pairs import ordered_sum, pair_quotient
from rlx.backends.cpu.targets import CpuTarget

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
    v, wide = Lanes(b, x.type, target), Lanes(b, with_scalar(x.type, "double"), target)
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


def _sine_of_rest(v: Lanes, wide: Lanes, r: Value, n: Value, rest: Value | None) -> Value:
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
    v: Lanes,
    x: Value,
    result: Value,
    name: str,
    function: Callable[[Lanes, Lanes, Value, Value, Value | None], Value],
) -> Value:
    """`result`, with `function` of exactly reduced angles where |x| is beyond the reach of the parts of π.

    Vectors with such lanes are rare: they are left to a function of the module.
    """
    b, target, reach = v.b, v.target, _PI_REACH[v.target.has_fma]
    symbol = f"large_{name}.{lanes_of(x.type)}.{v.scalar}"

    def emit(b: Builder, x: Value, result: Value) -> Value:
        v, wide = Lanes(b, x.type, target), Lanes(b, with_scalar(x.type, "double"), target)
        full = b.convert("fpext", x, wide.type)
        r, n, rest = reduce_large(b, full, reach, quarter=name == "tan", turn=name == "cos")
        exact = function(v, wide, r, n, rest if v.scalar == "double" else None)
        return b.select(v.compare("ogt", v.magnitude(x), reach), exact, result)

    def large() -> list[Value]:
        b.module.define(symbol, [(x.type, "x"), (x.type, "fast")], emit, result=x.type, internal=True, noinline=True)
        return [b.call(x.type, symbol, x, result, cold=True)]

    return b.when(b.any(v.compare("ogt", v.magnitude(x), reach)), large, lambda: [result])[0]


def _xor_sign(v: Lanes, x: Value, flip: Value) -> Value:
    return v.from_bits(v.b.op("xor", v.bits(x), flip))


def _less_multiple_of_pi(v: Lanes, x: Value, n: Value, *, exact: bool) -> tuple[Value, Value | None]:
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
    v, wide = Lanes(b, x.type, target), Lanes(b, with_scalar(x.type, "double"), target)
    full = b.convert("fpext", x, wide.type)
    rounded = wide.fma(full, 2 * _ONE_OVER_PI, wide.rounder())
    halves = wide.mul(wide.sub(rounded, wide.rounder()), 0.5)
    r, rest = _less_multiple_of_pi(wide, full, halves, exact=v.scalar == "double")
    result = _with_large(v, x, _tangent_of_rest(v, wide, r, wide.bits(rounded), rest), "tan", _tangent_of_rest)
    # A sum made 0 of -0, which is the only argument whose tangent is one.
    return v.choose(v.compare("oeq", x, 0.0), x, result)


def _tangent_of_rest(v: Lanes, wide: Lanes, r: Value, n: Value, rest: Value | None) -> Value:
    """The tangent of r + rest + nπ/2."""
    b = v.b
    r = wide.clamp(r, -0.7854, 0.7854)
    z = wide.mul(r, r)
    odd = b.icmp("ne", b.op("and", n, wide.integer(1)), wide.integer(0))
    flip = b.select(odd, wide.integer(-(1 << 63)), wide.integer(0))
    sine_tail = wide.mul(wide.mul(r, z), wide.polynomial(z, _SIN[v.scalar]))
    cosine, cosine_tail = ordered_sum(wide, wide.of(1.0), wide.mul(z, -0.5))
    cosine_tail = wide.fma(wide.mul(z, z), wide.polynomial(z, _COS[v.scalar]), cosine_tail)
    if rest is None:
        sine, cosine = wide.add(r, sine_tail), wide.add(cosine, cosine_tail)
        result = wide.div(b.select(odd, cosine, sine), _xor_sign(wide, b.select(odd, sine, cosine), flip))
    else:
        rest = wide.clamp(rest, -(2.0**-52), 2.0**-52)
        sine, sine_low = ordered_sum(wide, r, wide.fma(rest, wide.fma(z, -0.5, 1.0), sine_tail))
        cosine, cosine_low = ordered_sum(wide, cosine, wide.fma(b.fneg(r), rest, cosine_tail))
        above = b.select(odd, cosine, sine), b.select(odd, cosine_low, sine_low)
        below = b.select(odd, sine, cosine), b.select(odd, sine_low, cosine_low)
        quotient, low = pair_quotient(wide, above, below)
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
    v, wide = Lanes(b, x.type, target), Lanes(b, with_scalar(x.type, "double"), target)
    size = wide.at_most(wide.magnitude(b.convert("fpext", x, wide.type)), 2.0**100)  # where it is π/2 long since
    small, large = wide.compare("olt", size, _TAN_EIGHTH), wide.compare("ogt", size, _TAN_THREE_EIGHTHS)

    def by_size(low: Number, middle: Number, high: Number) -> Value:
        return wide.choose(small, low, wide.choose(large, high, middle))

    # Both are exact pairs: where size is above 1, 1 - size is exact and so is the sum less 1.
    below, below_low = ordered_sum(wide, wide.of(1.0), size)
    above, above_low = ordered_sum(wide, wide.of(-1.0), size)
    above, below = by_size(size, above, -1.0), by_size(1.0, below, size)
    start, start_low = (by_size(0.0, half, 2 * half) for half in (math.pi / 4, _PI_PARTS[1] / 4))
    if v.scalar == "float":
        t, t_low = wide.div(above, below), wide.of(0.0)
    else:
        t, t_low = pair_quotient(wide, (above, by_size(0.0, above_low, 0.0)), (below, by_size(0.0, below_low, 0.0)))
    z = wide.mul(t, t)
    tail = wide.fma(wide.mul(t, z), wide.polynomial(z, _ATAN[v.scalar]), wide.add(start_low, t_low))
    total, lost = ordered_sum(wide, start, t)
    result = wide.add(total, wide.add(lost, tail))
    return v.with_sign_of(b.convert("fptrunc", result, v.type), x)

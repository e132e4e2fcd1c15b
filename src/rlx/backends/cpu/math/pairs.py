"""Sums of two floats, for intermediate results that one float is too short for: sums, products and quotients."""

from __future__ import annotations

from rlx.backends.cpu.builder import Value
from rlx.backends.cpu.math.arithmetic import Lanes


def ordered_sum(v: Lanes, x: Value, y: Value) -> tuple[Value, Value]:
    """x + y and its rounding error, where x is 0 or the larger."""
    total = v.add(x, y)
    return total, v.sub(y, v.sub(total, x))


def exact_product(v: Lanes, x: Value, y: Value) -> tuple[Value, Value]:
    """x·y and its rounding error (Dekker's way where there is no FMA; doubles below 2^900)."""
    product = v.mul(x, y)
    if v.target.has_fma:
        return product, v.fma(x, y, v.b.fneg(product))
    (a, a_low), (c, c_low) = _halves(v, x), _halves(v, y)
    error = v.sub(v.mul(a, c), product)
    error = v.add(v.add(error, v.mul(a, c_low)), v.mul(a_low, c))
    return product, v.add(error, v.mul(a_low, c_low))


def pair_quotient(v: Lanes, x: tuple[Value, Value], y: tuple[Value, Value]) -> tuple[Value, Value]:
    """x/y of pairs, as a pair."""
    inverse = v.div(1.0, y[0])
    quotient = v.mul(x[0], inverse)
    product, error = exact_product(v, quotient, y[0])
    rest = v.add(v.sub(v.sub(x[0], product), error), v.sub(x[1], v.mul(quotient, y[1])))
    return quotient, v.mul(rest, inverse)


def _halves(v: Lanes, x: Value) -> tuple[Value, Value]:
    """x as a sum of two numbers of 26 bits (Veltkamp)."""
    scaled = v.mul(x, 2.0**27 + 1)
    high = v.sub(scaled, v.sub(scaled, x))
    return high, v.sub(x, high)

"""Floats of few bits as expressions: what the bits stand for, and the bits of what is nearest to a number."""

from __future__ import annotations

from rlx.dtypes import F32, F64
from rlx.lir.loops import Expr, number
from rlx.quant_schemes import SMALL_FLOATS, SmallFloat

FLOATS = SMALL_FLOATS | {"f16": SmallFloat(5, 10, 15, 65504.0, infinities=True)}
_NAN = {"fp8e4m3": 0x7F, "fp8e5m2": 0x7E, "nvfp4": 0}


def small_float(bits: Expr, kind: str) -> Expr:
    """The f32 that a float of few bits is: its bits at the places of an f32, times what the biases differ by.

    Denormals come out right: they are denormals of f32. E4M3 has no infinities, E2M1 neither these nor NaN.
    """
    exponent, mantissa, bias, _, infinities = FLOATS[kind]
    largest = (1 << exponent + mantissa) - 1
    size, sign = bits & largest, bits & largest + 1
    value = (size << 23 - mantissa | sign << 31 - exponent - mantissa).bits() * 2.0 ** (127 - bias)
    if infinities:
        infinite = largest + 1 - (1 << mantissa)
        value = size.eq(infinite).select(value * float("inf"), value)
        return (size > infinite).select(float("nan"), value)
    return size.eq(largest).select(float("nan"), value) if kind == "fp8e4m3" else value


def small_bits(value: Expr, kind: str) -> Expr:
    """The bits of the float of few bits that is nearest to an f32 or f64, ties to even; too large ones are cut off.

    NaN stays NaN without a sign, in the bits that `ml_dtypes` gives it; E2M1 has none and makes it 0.
    """
    exponent, mantissa, bias, largest, _ = FLOATS[kind]
    own, own_bias = (23, 127) if value.dtype is F32 else (52, 1023)
    assert value.dtype in (F32, F64)
    size = abs(value).min(largest)
    drop = own - mantissa
    whole = size.order()  # of what is not negative: its bits
    normal = (whole + ((whole >> drop & 1) + ((1 << drop - 1) - 1)) >> drop) - (own_bias - bias << mantissa)
    # Below the normal numbers steps are equal: those of `shift`, so that adding it rounds to whole ones.
    shift = 2.0 ** (own + 1 - bias - mantissa)
    offset = (own + 1 - bias - mantissa + own_bias) << own
    small = (size + shift).order() - offset
    rounded = (size < 2.0 ** (1 - bias)).select(small, normal)
    negative = (value < 0.0) | (1.0 / value < 0.0)  # the second tells -0.0
    top = 1 << exponent + mantissa
    signed = rounded | negative.select(number(top, whole.dtype), 0)
    return value.ne(value).select(_NAN[kind], signed)

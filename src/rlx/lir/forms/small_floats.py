"""Small floats (fp8, fp4, f16) as expressions: decoding bits, and rounding numbers to bits."""

from __future__ import annotations

from rlx.dtypes import F32, F64
from rlx.lir.loops import Expr, number
from rlx.quant_schemes import SMALL_FLOATS, SmallFloat

FLOATS = SMALL_FLOATS | {"f16": SmallFloat(5, 10, 15, 65504.0, infinities=True)}
_NAN = {"fp8e4m3": 0x7F, "fp8e5m2": 0x7E, "nvfp4": 0}


def small_float(bits: Expr, kind: str) -> Expr:
    """Decode a small float to f32: shift its bits into place, then scale by two to the difference of the biases.

    Denormals are correct, since they become denormals of f32. E4M3 has no infinities, E2M1 neither infinities nor NaN.
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
    """The bits of the small float nearest to an f32 or f64, ties to even; larger magnitudes saturate.

    NaN becomes the unsigned NaN that `ml_dtypes` uses; E2M1 has no NaN and makes it 0.
    """
    exponent, mantissa, bias, largest, _ = FLOATS[kind]
    own, own_bias = (23, 127) if value.dtype is F32 else (52, 1023)
    assert value.dtype in (F32, F64)
    size = abs(value).min(largest)
    drop = own - mantissa
    raw_bits = size.order()  # the bits of a non-negative float
    normal = (raw_bits + ((raw_bits >> drop & 1) + ((1 << drop - 1) - 1)) >> drop) - (own_bias - bias << mantissa)
    # Denormals are equally spaced, with the spacing of floats near `shift`, so adding that rounds to them.
    shift = 2.0 ** (own + 1 - bias - mantissa)
    offset = (own + 1 - bias - mantissa + own_bias) << own
    small = (size + shift).order() - offset
    rounded = (size < 2.0 ** (1 - bias)).select(small, normal)
    negative = (value < 0.0) | (1.0 / value < 0.0)  # the second detects -0.0
    top = 1 << exponent + mantissa
    signed = rounded | negative.select(number(top, raw_bits.dtype), 0)
    return value.ne(value).select(_NAN[kind], signed)

"""Floats of few bits as expressions: what the bits stand for, and the bits of what is nearest to a number."""

from __future__ import annotations

from rlx.dtypes import BOOL, F32, F64, I32, I64
from rlx.lir.blocks import Term
from rlx.lir.loops import Apply, Const, Expr
from rlx.quant import SMALL_FLOATS, SmallFloat

FLOATS = SMALL_FLOATS | {"f16": SmallFloat(5, 10, 15, 65504.0, infinities=True)}
_NAN = {"fp8e4m3": 0x7F, "fp8e5m2": 0x7E, "nvfp4": 0}


def _binary(op: str, a: Expr, b: Expr | float) -> Expr:
    return Apply(op, (a, b if isinstance(b, Expr) else Const(b, a.dtype)), a.dtype)


def _test(op: str, a: Expr, b: Expr | float) -> Expr:
    return Apply(op, (a, b if isinstance(b, Expr) else Const(b, a.dtype)), BOOL)


def _select(condition: Expr, then: Expr, other: Expr) -> Expr:
    return Apply("select", (condition, then, other), then.dtype)


def small_float(bits: Term, kind: str) -> Expr:
    """The f32 that a float of few bits is: its bits at the places of an f32, times what the biases differ by.

    Denormals come out right: they are denormals of f32. E4M3 has no infinities, E2M1 neither these nor NaN.
    """
    exponent, mantissa, bias, _, infinities = FLOATS[kind]
    largest = (1 << exponent + mantissa) - 1
    size, sign = bits & largest, bits & largest + 1
    raw = Apply("bits", ((size << 23 - mantissa | sign << 31 - exponent - mantissa).expr(I32),), F32)
    value = _binary("mul", raw, 2.0 ** (127 - bias))
    whole = size.expr(I32)
    if infinities:
        infinite = largest + 1 - (1 << mantissa)
        value = _select(_test("eq", whole, infinite), _binary("mul", value, float("inf")), value)
        return _select(_test("gt", whole, infinite), Const(float("nan"), F32), value)
    return _select(_test("eq", whole, largest), Const(float("nan"), F32), value) if kind == "fp8e4m3" else value


def small_bits(value: Expr, kind: str) -> Term:
    """The bits of the float of few bits that is nearest to an f32 or f64, ties to even; too large ones are cut off.

    NaN stays NaN without a sign, in the bits that `ml_dtypes` gives it; E2M1 has none and makes it 0.
    """
    exponent, mantissa, bias, largest, _ = FLOATS[kind]
    wide, own, own_bias = (I32, 23, 127) if value.dtype is F32 else (I64, 52, 1023)
    assert value.dtype in (F32, F64)

    def pattern(x: Expr) -> Term:
        return Term(Apply("order", (x,), wide))  # of what is not negative: its bits

    size = _binary("min", Apply("abs", (value,), value.dtype), largest)
    drop = own - mantissa
    whole = pattern(size)
    normal = (whole + ((whole >> drop & 1) + ((1 << drop - 1) - 1)) >> drop) - (own_bias - bias << mantissa)
    # Below the normal numbers steps are equal: those of `shift`, so that adding it rounds to whole ones.
    shift = 2.0 ** (own + 1 - bias - mantissa)
    offset = (own + 1 - bias - mantissa + own_bias) << own
    small = pattern(_binary("add", size, shift)) - offset
    rounded = Term(_select(_test("lt", size, 2.0 ** (1 - bias)), small.expr(wide), normal.expr(wide)))
    below = _test("lt", _binary("div", Const(1.0, value.dtype), value), 0.0)  # tells -0.0
    negative = Apply("or", (_test("lt", value, 0.0), below), BOOL)
    top = 1 << exponent + mantissa
    signed = rounded | Term(_select(negative, Const(top, wide), Const(0, wide)))
    return Term(_select(_test("ne", value, value), Const(_NAN[kind], wide), signed.expr(wide)))

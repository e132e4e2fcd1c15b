"""Conversions of vectors between float types, and from floats to integers."""

from __future__ import annotations

from rlx.backends.cpu.builder import Builder, Value, const, scalar_of
from rlx.backends.cpu.math.arithmetic import Lanes, with_scalar
from rlx.backends.cpu.targets import CpuTarget


# -- narrow floats ------------------------------------------------------------------------------------------------
def _has_half(target: CpuTarget) -> bool:
    return "+f16c" in target.features or target.arch == "aarch64"


def half_to_float(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The f32 values of f16 bit patterns, `<n x i16>`; exact."""
    result = with_scalar(x.type, "float")
    if _has_half(target):
        return b.convert("fpext", b.convert("bitcast", x, with_scalar(x.type, "half")), result)
    wide = with_scalar(x.type, "i32")
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
    short = with_scalar(x.type, "i16")
    if _has_half(target):
        return b.convert("bitcast", b.convert("fptrunc", x, with_scalar(x.type, "half")), short)
    wide = with_scalar(x.type, "i32")
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
    wide = with_scalar(x.type, "i32")
    shifted = b.op("shl", b.convert("zext", x, wide), const(wide, 16))
    return b.convert("bitcast", shifted, with_scalar(x.type, "float"))


def float_to_bfloat(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The bf16 bit patterns nearest to f32 or f64 values, ties to even; overflow gives inf, NaN stays NaN.

    Integer arithmetic on every target: vcvtneps2bf16 takes denormals for zeros.
    """
    x = _as_float(b, x)
    wide = with_scalar(x.type, "i32")
    pattern = b.convert("bitcast", x, wide)
    rounded = b.op("add", b.op("add", pattern, const(wide, 0x7FFF)), _bit(b, pattern, 16))
    quiet = b.op("or", pattern, const(wide, 1 << 22))
    result = b.select(b.fcmp("uno", x, x), quiet, rounded)
    return b.convert("trunc", b.op("lshr", result, const(wide, 16)), with_scalar(x.type, "i16"))


def _bit(b: Builder, x: Value, index: int) -> Value:
    return b.op("and", b.op("lshr", x, const(x.type, index)), const(x.type, 1))


def _as_float(b: Builder, x: Value) -> Value:
    """A double as a float for one more rounding: rounded to odd, so that the second rounding sees what was lost."""
    if scalar_of(x.type) == "float":
        return x
    short, integer = with_scalar(x.type, "float"), with_scalar(x.type, "i32")
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
    v = Lanes(b, x.type, target)
    if v.has_register_instructions and x.type == "<16 x float>":
        zero, every = const(v.bits_type, 0), const("i16", -1)
        return b.call(v.bits_type, "llvm.x86.avx512.mask.cvtps2dq.512", x, zero, every, const("i32", 4))
    return b.op("sub", v.bits(v.add(x, v.rounder())), v.bits(v.of(v.rounder())))


def float_to_int(b: Builder, x: Value, scalar_int_type: str, target: CpuTarget, *, signed: bool = True) -> Value:
    """x cut off toward zero and saturated to the range of the integer type; NaN gives 0.

    Not llvm.fptosi.sat, which comes apart into single lanes on x86.
    """
    v = Lanes(b, x.type, target)
    width = int(scalar_int_type[1:])
    lowest, highest = (-(1 << width - 1), (1 << width - 1) - 1) if signed else (0, (1 << width) - 1)
    result = with_scalar(x.type, scalar_int_type)
    # Conversions exist to 32 bits and more; outside its range a conversion is poison, so x is clamped first.
    through = with_scalar(x.type, "i32") if width < 32 else result
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

"""Quantised numbers: GGUF blocks, integers with scales, 8-bit and 4-bit floats.

`quantise` converts to them, `dequantise` back, `dequant_matmul` multiplies by a quantised weight. Weights of schemes
with separate scales are [..., k, n], blocks run along k and scales are [..., k / block, n].
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from rlx.dtypes import F32, F64, I8, PACKED, U8, DType, cast_array
from rlx.dtypes import dtype as dtype_of
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.independence import never
from rlx.ir.registry import COMPOSED, TAKES_PACKED, Spec, f32, i32, op, packed, sample
from rlx.ops.linear import matmul
from rlx.quant_schemes import SMALL_FLOATS, QuantScheme
from rlx.types import Size, TensorType, axis_index, require_equal

MIN_SCALE = 1e-12  # of all-zero numbers
FP8 = {"fp8e4m3": ml_dtypes.float8_e4m3fn, "fp8e5m2": ml_dtypes.float8_e5m2}
SMALL = FP8 | {"nvfp4": ml_dtypes.float4_e2m1fn}


# -- shapes -----------------------------------------------------------------------------------------------------------
def numbers_shape(stored: TensorType, scheme: QuantScheme) -> tuple[Size, ...]:
    """[..., k, n] from the type of a weight's bytes."""
    if stored.rank < 2 or stored.dtype is not scheme.storage:
        wanted = f"{scheme.storage}[..., k, n{' / 2' if scheme.elements_per_byte == 2 else ''}]"
        raise DTypeError(f"dequantise: {scheme} is stored as {wanted}, found {stored}")
    return (*stored.shape[:-1], stored.shape[-1] * scheme.elements_per_byte)


def scale_shape(where: str, shape: tuple[Size, ...], scheme: QuantScheme) -> tuple[Size, ...]:
    """The shape of the scales of a weight [..., k, n]."""
    *leading, k, n = shape
    if scheme.kind in FP8:
        return (n,)
    if not isinstance(k, int) or k % scheme.block:
        raise ShapeError(f"{where}: k is {k}, not whole blocks of {scheme.block} ({scheme})")
    return (*leading, k // scheme.block, n)


def require_shape(where: str, name: str, operand: TensorType, shape: tuple[Size, ...]) -> None:
    wanted = f"{where}: {name} is {operand}, expected [{', '.join(map(str, shape))}]"
    if operand.rank != len(shape):
        raise ShapeError(wanted)
    for have, want in zip(operand.shape, shape, strict=True):
        require_equal(have, want, wanted)


def check_scales(
    where: str, shape: tuple[Size, ...], scale: TensorType, zp: TensorType | None, axis: int | None,
    scheme: QuantScheme | None,
) -> None:  # fmt: skip
    """Check scales, per tensor, per index of an axis or per block; zero points have the layout of scales."""
    if not scale.dtype.is_float:
        raise DTypeError(f"{where}: scale is {scale}, expected floats")
    if zp is not None and zp.dtype.is_bool:
        raise DTypeError(f"{where}: zp is {zp}, expected numbers")
    if scheme is not None:
        wanted = scale_shape(where, shape, scheme)
    else:
        wanted = () if axis is None else (shape[axis_index(axis, len(shape), where)],)
    require_shape(where, "scale", scale, wanted)
    if zp is not None:
        require_shape(where, "zp", zp, wanted)


def _require_unpacked(where: str, scheme: str | None) -> QuantScheme | None:
    if scheme is None:
        return None
    parsed = QuantScheme(scheme)
    if parsed.packed is not None:
        hint = "int8/32, int8a/32, int4/32, fp8e4m3, fp8e5m2 or nvfp4/16"
        raise GraphError(f"{where}: makes no blocks of files, found the scheme {parsed}", hint=hint)
    return parsed


# -- meaning ----------------------------------------------------------------------------------------------------------
def unpack_blocks(x: Any) -> Any:
    """Dequantises blocks [..., blocks] to float32 [..., elements]."""
    from rlx.formats.gguf_quants import dequantise  # decoders, which only the reference needs

    storage = dtype_of(x.dtype)
    shape = (*x.shape[:-1], x.shape[-1] * storage.block)
    return dequantise(x, storage, x.size * storage.block).reshape(shape)


def broadcast_scales(scales: Any, rank: int, axis: int | None, scheme: QuantScheme | None) -> Any:
    """Scales, broadcast to the numbers."""
    if scheme is not None:
        return np.repeat(scales, scheme.block, axis=-2) if scheme.block > 1 else scales
    return scales if axis is None else scales.reshape(-1, *(1,) * (rank - 1 - axis % rank))


def _nibbles(x: Any) -> Any:
    """The two halves of each byte, low one first."""
    return np.stack([x & 15, x >> 4], axis=-1).reshape(*x.shape[:-1], -1)


def _dequantise(
    x: Any, scale: Any = None, zp: Any = None, *, axis: int | None = None, scheme: str | None = None
) -> Any:
    if x.dtype.fields is not None:
        return unpack_blocks(x)
    parsed = None if scheme is None else QuantScheme(scheme)
    kind = "int8" if parsed is None else parsed.kind
    wide = np.float64 if any(v is not None and v.dtype == np.float64 for v in (scale, zp)) else np.float32
    if kind in FP8:
        numbers = x.view(FP8[kind]).astype(wide)
        return numbers if scale is None else numbers * scale.astype(wide)
    if kind == "nvfp4":
        numbers = _nibbles(x).view(ml_dtypes.float4_e2m1fn).astype(wide)
        numbers = numbers * broadcast_scales(scale.view(FP8["fp8e4m3"]).astype(wide), x.ndim, None, parsed)
        return numbers if zp is None else numbers * zp.astype(wide)
    numbers = ((_nibbles(x) ^ 8).astype(wide) - 8) if kind == "int4" else x.astype(wide)
    if zp is not None:
        numbers = numbers - broadcast_scales(zp, x.ndim, axis, parsed).astype(wide)
    return numbers * broadcast_scales(scale, x.ndim, axis, parsed).astype(wide)


def _small(x: Any, kind: str) -> Any:
    """The bits of the nearest small floats, ties to even, clipped to the largest."""
    form = SMALL_FLOATS[kind]
    with np.errstate(invalid="ignore"):
        _, exponent = np.frexp(x)
        step = np.ldexp(x.dtype.type(1), np.maximum(exponent - 1, 1 - form.bias) - form.mantissa)
        nearest = np.clip(np.rint(x / step) * step, -form.largest, form.largest)
    nan = SMALL[kind](0 if kind == "nvfp4" else np.nan)  # NaN has no meaningful sign
    return np.where(np.isnan(x), nan, nearest.astype(SMALL[kind])).view(np.uint8)


def _quantise(
    x: Any, scale: Any, zp: Any = None, *, axis: int | None = None, dtype: DType = I8, scheme: str | None = None
) -> Any:
    parsed = None if scheme is None else QuantScheme(scheme)
    if parsed is not None and parsed.kind == "nvfp4":
        step = broadcast_scales(scale.view(FP8["fp8e4m3"]).astype(x.dtype), x.ndim, None, parsed)
        step = step if zp is None else step * zp.astype(x.dtype)
        with np.errstate(all="ignore"):
            return _pack_nibbles(_small(np.where(step == 0, x.dtype.type(0), x / step), parsed.kind))
    with np.errstate(divide="ignore", invalid="ignore"):
        q = x / broadcast_scales(scale, x.ndim, axis, parsed).astype(x.dtype)
    if parsed is not None and parsed.kind in FP8:
        return _small(q, parsed.kind)
    q = np.rint(q)
    if zp is not None:
        q = q + broadcast_scales(zp, x.ndim, axis, parsed).astype(x.dtype)
    if parsed is None or parsed.kind != "int4":
        return cast_array(q, dtype)
    return _pack_nibbles(cast_array(np.clip(q, -8, 7), I8).view(np.uint8) & 15)


def _pack_nibbles(nibbles: Any) -> Any:
    """Packs adjacent nibbles into bytes, the first one low."""
    return nibbles[..., 0::2] | nibbles[..., 1::2] << 4


# -- ops --------------------------------------------------------------------------------------------------------------
def byte(*shape: int) -> Spec:
    """Random bytes."""
    return Spec(shape, "u8", 0, 256)


def signed(*shape: int) -> Spec:
    """Random signed bytes."""
    return Spec(shape, "i8", -128, 128)


def _finite(*shape: int) -> Spec:
    """Random bytes that are finite positive 8-bit floats."""
    return Spec(shape, "u8", 0, 100)


_SCALE = {"low": 0.02, "high": 0.1}


@op(
    "dequantise", independent=never, reference=_dequantise, traits=[TAKES_PACKED],
    samples=[
        *(sample(packed(str(d), 3, 2 * d.block)) for d in PACKED), sample(packed("q4_1", 7, 96)),
        sample(packed("q8_0", 2, 3, 32)), sample(packed("q4_k", 0, 256)),
        sample(signed(5, 7), f32(**_SCALE)), sample(byte(3, 1, 65), f32(**_SCALE), i32(low=100, high=140)),
        sample(signed(4, 5, 3), f32(5, **_SCALE), i32(5), axis=1), sample(byte(4, 33), f32(33, **_SCALE), axis=-1),
        sample(signed(32, 17), f32(4, 17, **_SCALE), scheme="int8/8"),
        sample(signed(2, 32, 5), f32(2, 2, 5, **_SCALE), f32(2, 2, 5), scheme="int8a/16"),
        sample(byte(32, 9), f32(2, 18, **_SCALE), scheme="int4/16"),
        sample(byte(8, 33), f32(4, 66, **_SCALE), f32(4, 66), scheme="int4/2"),
        sample(_finite(9, 40), None, None, scheme="fp8e4m3"), sample(_finite(9, 5), f32(5), scheme="fp8e5m2"),
        sample(byte(32, 9), _finite(2, 18), f32(**_SCALE), scheme="nvfp4/16"),
    ],
)  # fmt: skip
def dequantise(
    x: TensorType, scale: TensorType | None = None, zp: TensorType | None = None, *, axis: int | None = None,
    scheme: str | None = None,
) -> TensorType:  # fmt: skip
    """Converts quantised numbers to f32, or to f64 if scales are f64.

    Packed blocks contain all they need. Integers i8 and u8 are (x - zp) · scale: one scale for all, or one per index of
    `axis`. With a scheme, `x` is the stored weight. Blocks of integers are [..., k, n] and have scales and zero points
    [..., k / block, n]; two signed int4 share a byte, [..., k, n / 2], low nibble first. 8-bit floats (E4M3 has NaN but
    no infinities, and ends at 448) may have one scale per column. Blocks of NVFP4, packed like int4, have 8-bit floats
    as scales, and one f32 for all as `zp`.
    """
    if x.dtype.is_packed:
        if any(v is not None for v in (scale, zp, axis, scheme)):
            raise GraphError(f"dequantise: {x} keeps its scales inside, nothing else is given")
        return TensorType(x.shape, F32)
    if scheme is None:
        if x.dtype not in (I8, U8):
            raise DTypeError(f"dequantise: takes packed blocks, i8 or u8, found {x}")
        if scale is None:
            raise GraphError(f"dequantise: {x} has no scale", hint="dequantise(x, scale=...)")
        check_scales("dequantise", x.shape, scale, zp, axis, None)
        return TensorType(x.shape, _width(scale, zp))
    parsed = QuantScheme(scheme)
    if parsed.packed is not None:
        raise DTypeError(f"dequantise: {parsed} is stored as {parsed.packed}[..., k], found {x}")
    shape = numbers_shape(x, parsed)
    _check_scheme("dequantise", shape, scale, zp, axis, parsed)
    return TensorType(shape, _width(scale, zp))


def _width(*scales: TensorType | None) -> DType:
    return F64 if any(t is not None and t.dtype is F64 for t in scales) else F32


def _check_scheme(
    where: str, shape: tuple[Size, ...], scale: TensorType | None, zp: TensorType | None, axis: int | None,
    scheme: QuantScheme,
) -> None:  # fmt: skip
    """Check scales and zero points of numbers [..., k, n] under a scheme."""
    if axis is not None:
        raise GraphError(f"{where}: {scheme} has its own axis, found axis={axis}")
    if scheme.kind == "nvfp4":
        _check_float_blocks(where, shape, scale, zp, scheme)
    elif scheme.kind in FP8:
        if zp is not None:
            raise GraphError(f"{where}: {scheme} has no zero points, found {zp}")
        if scale is not None:
            check_scales(where, shape, scale, None, None, scheme if scale.rank else None)
    elif scale is None or (scheme.kind == "int8a" and zp is None):
        raise GraphError(f"{where}: {scheme} has no {'scale' if scale is None else 'zp'}")
    else:
        check_scales(where, shape, scale, zp, axis, scheme)


def _check_float_blocks(
    where: str, shape: tuple[Size, ...], scale: TensorType | None, zp: TensorType | None, scheme: QuantScheme
) -> None:
    if scale is None or scale.dtype is not U8:
        raise DTypeError(f"{where}: scale of {scheme} is {scale}, expected u8, the bytes of E4M3 floats")
    require_shape(where, "scale", scale, scale_shape(where, shape, scheme))
    if zp is not None and (zp.rank or not zp.dtype.is_float):
        raise ShapeError(f"{where}: zp of {scheme} is {zp}, expected one float, the scale of all blocks")


@op(
    "quantise", independent=never, reference=_quantise,
    samples=[
        sample(f32(5, 7), f32(**_SCALE)), sample(f32(3, 1, 65), f32(**_SCALE), i32(low=100, high=140), dtype=U8),
        sample(f32(4, 5, 3), f32(5, **_SCALE), i32(5), axis=1), sample(f32(4, 33), f32(33, **_SCALE), axis=-1),
        sample(f32(32, 17), f32(4, 17, **_SCALE), scheme="int8/8"),
        sample(f32(2, 32, 5), f32(2, 2, 5, **_SCALE), i32(2, 2, 5), scheme="int8a/16"),
        sample(f32(32, 18), f32(2, 18, low=0.3, high=0.5), i32(2, 18, low=-2, high=3), scheme="int4/16"),
        sample(f32(9, 40), f32(**_SCALE), scheme="fp8e4m3"),
        sample(f32(9, 5), f32(5, low=1e-5, high=2), scheme="fp8e5m2"),
        sample(f32(32, 18), _finite(2, 18), f32(**_SCALE), scheme="nvfp4/16"),
    ],
)  # fmt: skip
def quantise(
    x: TensorType, scale: TensorType, zp: TensorType | None = None, *, axis: int | None = None, dtype: DType = I8,
    scheme: str | None = None,
) -> TensorType:  # fmt: skip
    """x / scale rounded to the nearest integer, ties to even, plus zp, clipped to i8 or u8. NaN becomes 0.

    Scales and zero points (integers) are those of `dequantise`: per tensor, per index of an axis, or per block along k
    with one of the schemes int8, int8a and int4. With fp8e4m3, fp8e5m2 and nvfp4 the result is the nearest small float,
    ties to even; numbers beyond the largest, including infinities, are clipped to it, and NaN stays NaN if the format
    has one. Without a scale, one is computed and the result is (q, scale), or (q, scale, zp) for nvfp4.
    """
    parsed = _require_unpacked("quantise", scheme)
    if not x.dtype.is_float or dtype not in (I8, U8):
        raise DTypeError(f"quantise: makes i8 or u8 of floats, found {dtype} of {x}")
    if parsed is None:
        check_scales("quantise", x.shape, scale, zp, axis, None)
        return x.with_dtype(dtype)
    if x.rank < 2 or dtype is not I8:
        raise ShapeError(f"quantise: {parsed} takes [..., k, n] and has a type of its own, found {x} and {dtype}")
    _check_scheme("quantise", x.shape, scale, zp, axis, parsed)
    *rows, n = x.shape
    if parsed.elements_per_byte == 2 and (not isinstance(n, int) or n % 2):
        raise ShapeError(f"quantise: n is {n}, two numbers of {parsed} share a byte")
    return TensorType((*rows, n // parsed.elements_per_byte), parsed.storage)


def _levels(scheme: QuantScheme | None) -> float:
    """The largest number of a type; the range is symmetric, so the lowest integer is unused."""
    if scheme is not None and scheme.kind in SMALL:
        return SMALL_FLOATS[scheme.kind].largest
    return 7 if scheme is not None and scheme.kind == "int4" else 127


def scale_axes(rank: int, axis: int | None, scheme: QuantScheme | None) -> tuple[int, ...]:
    """The axes over which the largest magnitude determines a scale, for scales that are not per block."""
    own = rank - 1 if scheme is not None else axis
    return tuple(a for a in range(rank) if own is None or a != own % rank)


def _quant_scale(x: Any, *, axis: int | None = None, scheme: str | None = None) -> Any:
    parsed = None if scheme is None else QuantScheme(scheme)
    size = np.abs(x)
    if parsed is not None and parsed.block > 1:
        *leading, k, n = x.shape
        size = size.reshape(*leading, k // parsed.block, parsed.block, n).max(-2)
    else:
        size = size.max(scale_axes(x.ndim, axis, parsed), initial=0)
    return np.maximum(size / x.dtype.type(_levels(parsed)), x.dtype.type(MIN_SCALE))


def _decompose_quant_scale(x: Value, *, axis: int | None, scheme: str | None) -> Value:
    parsed = None if scheme is None else QuantScheme(scheme)
    size = abs(x.astype(x.dtype.wide))
    if parsed is not None and parsed.block > 1:
        *leading, k, n = x.shape
        size = size.reshape(*leading, k // parsed.block, parsed.block, n)
        largest = x.graph.one("max", size, axis=(size.rank - 2,))
    else:
        others = scale_axes(x.rank, axis, parsed)
        if any(x.shape[a] == 0 for a in others):  # an empty axis has no maximum, but still a scale
            shape = tuple(d for a, d in enumerate(x.shape) if a not in others)
            return x.graph.one("expand", x.graph.constant(MIN_SCALE, x.dtype.wide), shape=shape)
        largest = x.graph.one("max", size, axis=others)
    return (largest / _levels(parsed)).maximum(MIN_SCALE)


@op(
    "quant_scale", independent=never,
    reference=_quant_scale, decompose=_decompose_quant_scale, traits=[COMPOSED], tolerance=1e-6,
    samples=[
        sample(f32(5, 7)), sample(f32(4, 5, 3), axis=1), sample(f32(9), axis=-1), sample(f32(32, 6), scheme="int8/8"),
        sample(f32(2, 6, 4), scheme="int4/2"), sample(f32(2, 6, 5), scheme="fp8e5m2"),
        sample(f32(32, 4), scheme="nvfp4/16"),
    ],
)  # fmt: skip
def quant_scale(x: TensorType, *, axis: int | None = None, scheme: str | None = None) -> TensorType:
    """The smallest scale with which `quantise` clips nothing: the largest magnitude / 127 (int4: 7).

    Per tensor, per index of `axis`, or per block along k with a scheme. Zeros have a scale of 1e-12. 8-bit floats have
    scales per column (the largest magnitude / 448 or 57344); NVFP4 divides by 6.
    """
    parsed = _require_unpacked("quant_scale", scheme)
    if not x.dtype.is_float:
        raise DTypeError(f"quant_scale: takes floats, found {x}")
    shape: tuple[Size, ...]
    if parsed is None:
        shape = () if axis is None else (x.shape[axis_index(axis, x.rank, "quant_scale")],)
    elif x.rank < 2 or axis is not None:
        raise ShapeError(f"quant_scale: {parsed} takes [..., k, n] and no axis, found {x} and axis={axis}")
    else:
        shape = scale_shape("quant_scale", x.shape, parsed)
    return TensorType(shape, x.dtype.wide)


def _dequant_matmul(x: Any, w: Any, scale: Any = None, zp: Any = None, *, scheme: str) -> Any:
    packed_ = QuantScheme(scheme).packed is not None
    numbers = unpack_blocks(w).swapaxes(-1, -2) if packed_ else _dequantise(w, scale, zp, scheme=scheme)
    wide = np.promote_types(x.dtype, numbers.dtype)
    return np.matmul(x.astype(wide), numbers.astype(wide))


def _decompose_dequant_matmul(x: Value, w: Value, scale: Value | None, zp: Value | None, *, scheme: str) -> Value:
    if QuantScheme(scheme).packed is not None:
        return x @ w.graph.one("dequantise", w).mT
    return x @ w.graph.one("dequantise", w, scale, zp, scheme=scheme)


@op(
    "dequant_matmul", independent=never,
    reference=_dequant_matmul, decompose=_decompose_dequant_matmul, traits=[COMPOSED, TAKES_PACKED],
    tolerance=1e-5,
    samples=[
        sample(f32(3, 64), packed("q8_0", 5, 64), scheme="gguf_q8_0"),
        sample(f32(2, 3, 256), packed("q4_k", 70, 256), scheme="gguf_q4k"),
        sample(f32(3, 32), signed(32, 17), f32(4, 17, **_SCALE), scheme="int8/8"),
        sample(f32(2, 3, 32), signed(32, 70), f32(2, 70, **_SCALE), i32(2, 70), scheme="int8a/16"),
        sample(f32(1, 32), byte(32, 9), f32(2, 18, **_SCALE), scheme="int4/16"),
        sample(f32(5, 9), _finite(9, 40), scheme="fp8e4m3"),
        sample(f32(5, 32), byte(32, 9), _finite(2, 18), f32(**_SCALE), scheme="nvfp4/16"),
    ],
)  # fmt: skip
def dequant_matmul(
    x: TensorType, w: TensorType, scale: TensorType | None = None, zp: TensorType | None = None, *, scheme: str
) -> TensorType:
    """x times a quantised weight: [..., m, k] by numbers [k, n].

    GGUF weights are packed rows [n, k], as in files, which the matmul unpacks on the fly; a param declared as plain
    ([n, k], [k, n], or u8 for the bytes) is converted to them. Other schemes are stored as in `dequantise`.
    """
    parsed = QuantScheme(scheme)
    if not x.dtype.is_float:
        raise DTypeError(f"dequant_matmul: x is {x}, expected floats")
    if parsed.packed is None:
        matrix = dequantise.rule(w, scale, zp, scheme=scheme)
    else:
        if scale is not None or zp is not None:
            raise GraphError(f"dequant_matmul: {parsed} keeps its scales inside, found scale {scale} and zp {zp}")
        if w.dtype is not parsed.packed or w.rank != 2:
            raise DTypeError(f"dequant_matmul: {parsed} is stored as {parsed.packed}[n, k], found {w}")
        matrix = TensorType((w.shape[1], w.shape[0]), F32)
    assert isinstance(matrix, TensorType)
    product = matmul.rule(x, matrix)
    assert isinstance(product, TensorType)
    return product

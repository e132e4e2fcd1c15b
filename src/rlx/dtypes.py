"""Element types: their names, sizes, NumPy counterparts and promotion rules.

A `DType` is one of a fixed set of records; `dtype("f32")`, `dtype(np.float32)` and `dtype("float32")` return the same
one. Promotion follows JAX: an int never widens a float, Python numbers are weak, bf16 + f16 is f32.

Packed types (`q4_k`, `q8_0`, ...) store runs of weights along the last axis as blocks of bytes, as GGUF files do.
Blocks of `f8e4m3_128` hold a scale followed by 8-bit floats. Packed types are storage only: `dequantise`, or the kernel
that reads them, converts them to numbers.
"""

from __future__ import annotations

import contextlib
from typing import Any

import ml_dtypes
import numpy as np

from rlx.errors import DTypeError, nearest
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """An element type, compared by identity. `kind` is 'float', 'int', 'uint', 'bool' or 'packed'.

    `size` is the bytes per element or, for packed types, per block of `block` elements.
    """

    name: str
    kind: str
    size: int
    numpy: np.dtype[Any]
    block: int = 1

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (dtype, (self.name,))  # unpickles to the same record, preserving identity

    @property
    def is_float(self) -> bool:
        return self.kind == "float"

    @property
    def is_integer(self) -> bool:
        return self.kind in ("int", "uint")

    @property
    def is_bool(self) -> bool:
        return self.kind == "bool"

    @property
    def is_packed(self) -> bool:
        return self.kind == "packed"

    @property
    def weak(self) -> WeakScalar:
        """The weak scalar kind of a number of this type in an expression."""
        return WeakScalar("int" if self.kind == "uint" else self.kind)

    @property
    def unit(self) -> int:
        """Granularity in bytes at which kernels load packed blocks: 2, or 1 if the block size is odd."""
        return 1 if self.size % 2 else 2

    @property
    def wide(self) -> DType:
        """The type in which ops are defined: narrow floats are computed in f32 and the result is rounded.

        `Target.native` says which type a machine actually computes in.
        """
        return F32 if self.kind == "float" and self.size < 4 else self


F64 = DType("f64", "float", 8, np.dtype(np.float64))
F32 = DType("f32", "float", 4, np.dtype(np.float32))
F16 = DType("f16", "float", 2, np.dtype(np.float16))
BF16 = DType("bf16", "float", 2, np.dtype(ml_dtypes.bfloat16))
I64 = DType("i64", "int", 8, np.dtype(np.int64))
I32 = DType("i32", "int", 4, np.dtype(np.int32))
I16 = DType("i16", "int", 2, np.dtype(np.int16))
I8 = DType("i8", "int", 1, np.dtype(np.int8))
U32 = DType("u32", "uint", 4, np.dtype(np.uint32))
U8 = DType("u8", "uint", 1, np.dtype(np.uint8))
BOOL = DType("bool", "bool", 1, np.dtype(np.bool_))

ALL = (F64, F32, F16, BF16, I64, I32, I16, I8, U32, U8, BOOL)  # the unpacked types


def packed_type(name: str, elements: int, fields: list[Any]) -> DType:
    """Defines a packed type from its C struct, which has no padding."""
    layout = np.dtype(fields)
    return DType(name, "packed", layout.itemsize, layout, elements)


_F2 = "<f2"
GGUF_PACKED = (  # as in GGUF files
    packed_type("q4_0", 32, [("d", _F2), ("qs", "u1", 16)]),
    packed_type("q4_1", 32, [("d", _F2), ("m", _F2), ("qs", "u1", 16)]),
    packed_type("q5_0", 32, [("d", _F2), ("qh", "u1", 4), ("qs", "u1", 16)]),
    packed_type("q5_1", 32, [("d", _F2), ("m", _F2), ("qh", "u1", 4), ("qs", "u1", 16)]),
    packed_type("q8_0", 32, [("d", _F2), ("qs", "i1", 32)]),
    packed_type("q2_k", 256, [("scales", "u1", 16), ("qs", "u1", (2, 32)), ("d", _F2), ("dmin", _F2)]),
    packed_type("q3_k", 256, [("hmask", "u1", 32), ("qs", "u1", (2, 32)), ("scales", "u1", 12), ("d", _F2)]),
    packed_type("q4_k", 256, [("d", _F2), ("dmin", _F2), ("scales", "u1", (3, 4)), ("qs", "u1", (4, 32))]),
    packed_type(
        "q5_k", 256, [("d", _F2), ("dmin", _F2), ("scales", "u1", (3, 4)), ("qh", "u1", 32), ("qs", "u1", (4, 32))]
    ),
    packed_type("q6_k", 256, [("ql", "u1", (2, 2, 32)), ("qh", "u1", (2, 32)), ("scales", "i1", 16), ("d", _F2)]),
    packed_type("q8_k", 256, [("d", "<f4"), ("qs", "i1", 256), ("bsums", "<i2", 16)]),
    packed_type("q8_1", 32, [("d", _F2), ("s", _F2), ("qs", "i1", 32)]),
    packed_type("q1_0", 128, [("d", _F2), ("bits", "u1", 16)]),
    packed_type("q2_0", 64, [("d", _F2), ("pairs", "u1", 16)]),
    packed_type("tq1_0", 256, [("qs", "u1", 48), ("qh", "u1", 4), ("d", _F2)]),
    packed_type("tq2_0", 256, [("qs", "u1", (2, 32)), ("d", _F2)]),
    packed_type("iq1_s", 256, [("d", _F2), ("qs", "u1", 32), ("qh", "<u2", 8)]),
    packed_type("iq1_m", 256, [("qs", "u1", 32), ("qh", "u1", 16), ("scales", "<u2", 4)]),
    packed_type("iq2_xxs", 256, [("d", _F2), ("parts", [("qs", "u1", 4), ("signs", "<u4")], 8)]),
    packed_type("iq2_xs", 256, [("d", _F2), ("qs", "<u2", 32), ("scales", "u1", 8)]),
    packed_type(
        "iq2_s", 256, [("d", _F2), ("qs", "u1", 32), ("signs", "u1", 32), ("qh", "u1", 8), ("scales", "u1", 8)]
    ),
    packed_type("iq3_xxs", 256, [("d", _F2), ("qs", "u1", 64), ("signs", "<u4", 8)]),
    packed_type(
        "iq3_s", 256, [("d", _F2), ("qs", "u1", 64), ("qh", "u1", 8), ("signs", "u1", 32), ("scales", "u1", 4)]
    ),
    packed_type("iq4_nl", 32, [("d", _F2), ("codes", "u1", 16)]),
    packed_type("iq4_xs", 256, [("d", _F2), ("scales_h", "<u2"), ("scales_l", "u1", 4), ("codes", "u1", (8, 16))]),
    packed_type("mxfp4", 32, [("e", "u1"), ("codes", "u1", 16)]),
    packed_type("nvfp4", 64, [("d", "u1", 4), ("codes", "u1", (4, 8))]),
)
# A scale followed by 8-bit floats (E4M3 without infinities). Hugging Face folders keep both in separate tensors, with
# one scale per rectangle, row or tensor. Longest block first, since it spends the least on scales.
FLOAT8_PACKED = tuple(packed_type(f"f8e4m3_{n}", n, [("d", "<f4"), ("codes", "u1", n)]) for n in (128, 32))
PACKED = (*GGUF_PACKED, *FLOAT8_PACKED)
BY_NAME = {d.name: d for d in (*ALL, *PACKED)}
_BY_NUMPY = {d.numpy: d for d in (*ALL, *PACKED)}
_LONG_NAMES = {d.numpy.name: d for d in ALL} | {"float": F32, "int": I32}
_BY_PYTHON = {float: F32, int: I32, bool: BOOL}  # types of Python numbers

DTypeLike = Any  # a DType, "f32", "float32", np.float32, np.dtype(...)


def dtype(like: DTypeLike) -> DType:
    """Looks up a DType by name or by its NumPy or Python counterpart."""
    if isinstance(like, DType):
        return like
    if isinstance(like, str):
        match = BY_NAME.get(like) or _LONG_NAMES.get(like)
        if match is None:
            raise DTypeError(f"dtype: no element type is called {like!r}", hint=nearest(like, BY_NAME))
        return match
    match = None
    if isinstance(like, type) and like in _BY_PYTHON:
        match = _BY_PYTHON[like]
    elif like is not None:  # np.dtype(None) would be float64
        with contextlib.suppress(TypeError, ValueError):
            match = _BY_NUMPY.get(np.dtype(like))
    if match is None:
        raise DTypeError(f"dtype: {like!r} has no counterpart in rlx", hint="known: " + ", ".join(d.name for d in ALL))
    return match


@dataclass(frozen=True, slots=True)
class WeakScalar:
    """A number in an expression: its kind counts in promotion, its width does not."""

    kind: str


def weak(x: Any) -> WeakScalar | None:
    """The weak type of a Python number or NumPy scalar (such as `np.sqrt(2)` returns).

    None for anything else: arrays have the type they state, even at rank 0, so `np.array(2.0)` is f64.

    >>> weak(2.0), weak(np.float64(2)), weak(np.array(2.0))
    (WeakScalar(kind='float'), WeakScalar(kind='float'), None)
    """
    if isinstance(x, np.generic):
        return dtype(x.dtype).weak
    if isinstance(x, (bool, int, float)):
        return WeakScalar("bool" if isinstance(x, bool) else "int" if isinstance(x, int) else "float")
    return None


_KIND_RANK = {"bool": 0, "uint": 1, "int": 1, "float": 2}


def promote(*operands: DType | WeakScalar) -> DType:
    """The result type of arithmetic over all operands.

    >>> promote(F32, I64), promote(BF16, F16), promote(U8, I8), promote(F16, WeakScalar("float"))
    (f32, f32, i16, f16)
    """
    strong = [d for d in operands if isinstance(d, DType)]
    for packed in (d for d in strong if d.is_packed):
        raise DTypeError(
            f"dtype: {packed} is packed, there is no arithmetic on it", hint="unpack it with x.dequantise()"
        )
    weak = [d for d in operands if isinstance(d, WeakScalar)]
    result = _default(weak) if not strong else strong[0]
    for other in strong[1:]:
        result = _promote_pair(result, other)
    if strong and weak:
        rank = max(_KIND_RANK[w.kind] for w in weak)
        if rank > _KIND_RANK[result.kind]:
            result = F32 if rank == 2 else I32
    return result


def _default(weak: list[WeakScalar]) -> DType:
    rank = max((_KIND_RANK[w.kind] for w in weak), default=2)
    return (BOOL, I32, F32)[rank]


def _promote_pair(a: DType, b: DType) -> DType:
    if a is b:
        return a
    if a.is_float or b.is_float:
        if not (a.is_float and b.is_float):
            return a if a.is_float else b
        if a.size == b.size:
            return F32  # f16 and bf16: neither contains the other
        return a if a.size > b.size else b
    if a.is_bool or b.is_bool:
        return b if a.is_bool else a
    if a.kind == b.kind:
        return a if a.size > b.size else b
    signed, unsigned = (a, b) if a.kind == "int" else (b, a)
    if signed.size > unsigned.size:
        return signed
    return {1: I16, 4: I64}[unsigned.size]


# -- casts ------------------------------------------------------------------------------------------------------------
def cast_array(x: Any, dtype: DType) -> Any:
    """Casts a NumPy array by rlx rules: float to integer truncates, saturates and maps NaN to 0; to bool is `!= 0`."""
    if dtype.is_integer and x.dtype.kind not in "iub":
        limits = np.iinfo(dtype.numpy)
        wide = np.trunc(np.nan_to_num(x.astype(np.float64), nan=0.0, posinf=np.inf, neginf=-np.inf))
        inside = np.clip(wide, float(limits.min), float(limits.max))
        result = np.where(inside >= float(limits.max), 0, inside).astype(dtype.numpy)
        return np.where(wide >= float(limits.max), limits.max, result).astype(dtype.numpy)
    if dtype.is_bool:
        return x != 0
    if dtype.is_float and dtype.size == 2 and x.dtype.kind in "iub":
        x = x.astype(np.float32)
    if dtype is BF16 and x.dtype == np.float64:
        x = _round_to_odd(x)
    return x.astype(dtype.numpy)


def _round_to_odd(x: Any) -> Any:
    """f64 to f32, rounded to odd, so that a second rounding (ml_dtypes makes bf16 from f32) is correct."""
    near = x.astype(np.float32)
    back = near.astype(np.float64)
    bits = near.view(np.uint32) - (np.abs(back) > np.abs(x)).astype(np.uint32)  # toward zero
    return np.where(np.isfinite(x), bits | (back != x), near.view(np.uint32)).astype(np.uint32).view(np.float32)

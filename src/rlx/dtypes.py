"""Element types: their names, sizes, NumPy counterparts and promotion rules.

A `DType` is one of a fixed set of records; `dtype("f32")`, `dtype(np.float32)` and `dtype("float32")` all give the
same one. Promotion follows JAX: an int never widens a float, numbers beside arrays are weak, bf16 + f16 is f32.

Packed types (`q4_k`, `q8_0`, ...) store runs of weights along the last axis as blocks of bytes, as GGUF files do. Those
of `f8e4m3_128` are 8-bit floats behind their scale. They are storage: `dequantise` makes numbers of them, or the kernel
that reads them does.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from rlx.errors import DTypeError, nearest


@dataclass(frozen=True, slots=True, eq=False)
class DType:
    """One element type, equal only to itself. `kind` is 'float', 'int', 'uint', 'bool' or 'packed'.

    `size` is the bytes of an element, or of a block of `block` elements where the type is packed.
    """

    name: str
    kind: str
    size: int
    numpy: np.dtype[Any]
    block: int = 1

    def __repr__(self) -> str:
        return self.name

    def __reduce__(self) -> tuple[Any, ...]:
        return (dtype, (self.name,))  # pickles to the one record, so identity survives

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
        """What a number of this type counts as in an expression."""
        return WeakScalar("int" if self.kind == "uint" else self.kind)

    @property
    def unit(self) -> int:
        """Bytes that kernels move blocks of a packed type in: 2, or 1 where a block has an odd number of them."""
        return 1 if self.size % 2 else 2

    @property
    def wide(self) -> DType:
        """The type in which ops are defined: narrow floats are widened, computed with in f32, and results rounded.

        What a machine computes in is another question, which `Target.native` answers.
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

ALL = (F64, F32, F16, BF16, I64, I32, I16, I8, U32, U8, BOOL)  # the plain ones


def packed_type(name: str, elements: int, fields: list[Any]) -> DType:
    """A packed type from its C struct, which has no padding."""
    layout = np.dtype(fields)
    return DType(name, "packed", layout.itemsize, layout, elements)


_F2 = "<f2"
GGUF_PACKED = (  # as GGUF files have them
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
# Floats of 8 bits (E4M3 without infinities) behind their scale. Folders of Hugging Face keep both in tensors of their
# own, with a scale for each rectangle, row or tensor. The longest block first: it spends the least on scales.
FLOAT8_PACKED = tuple(packed_type(f"f8e4m3_{n}", n, [("d", "<f4"), ("codes", "u1", n)]) for n in (128, 32))
PACKED = (*GGUF_PACKED, *FLOAT8_PACKED)
BY_NAME = {d.name: d for d in (*ALL, *PACKED)}
_BY_NUMPY = {d.numpy: d for d in (*ALL, *PACKED)}
_LONG_NAMES = {d.numpy.name: d for d in ALL} | {"float": F32, "int": I32}
_BY_PYTHON = {float: F32, int: I32, bool: BOOL}  # what Python's own numbers become

DTypeLike = Any  # a DType, "f32", "float32", np.float32, np.dtype(...)


def dtype(like: DTypeLike) -> DType:
    """The DType that `like` names."""
    if isinstance(like, DType):
        return like
    if isinstance(like, str):
        found = BY_NAME.get(like) or _LONG_NAMES.get(like)
        if found is None:
            raise DTypeError(f"dtype: no element type is called {like!r}", hint=nearest(like, BY_NAME))
        return found
    found = None
    if isinstance(like, type) and like in _BY_PYTHON:
        found = _BY_PYTHON[like]
    elif like is not None:  # NumPy takes None for float64
        with contextlib.suppress(TypeError, ValueError):
            found = _BY_NUMPY.get(np.dtype(like))
    if found is None:
        raise DTypeError(f"dtype: {like!r} has no counterpart in rlx", hint="known: " + ", ".join(d.name for d in ALL))
    return found


@dataclass(frozen=True, slots=True)
class WeakScalar:
    """A number in an expression: its kind counts, its width does not."""

    kind: str


def weak(x: Any) -> WeakScalar | None:
    """What a number counts as beside arrays: Python's are weak, and so are NumPy's scalars, as `np.sqrt(2)` gives.

    None for anything else. Arrays have the type that they say, those of rank 0 too: `np.array(2.0)` is f64.

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
    """The type of arithmetic over all operands.

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
            return F32  # f16 and bf16: neither holds the other
        return a if a.size > b.size else b
    if a.is_bool or b.is_bool:
        return b if a.is_bool else a
    if a.kind == b.kind:
        return a if a.size > b.size else b
    signed, unsigned = (a, b) if a.kind == "int" else (b, a)
    if signed.size > unsigned.size:
        return signed
    return {1: I16, 4: I64}[unsigned.size]

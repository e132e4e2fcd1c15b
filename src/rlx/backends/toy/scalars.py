"""The scalar operations of `lir/loops.py` in NumPy: the functions that emitted kernels call.

Values are numbers or arrays with one axis per vectorised loop, innermost first. Memory is flat.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BF16, BOOL, F32, F64, DType

REDUCE_BLOCK = 32  # terms of a reduction combined at once; determines the summation order
LANES = 1 << 16  # maximum number of iterations vectorised at once, not counting reductions


# -- memory -----------------------------------------------------------------------------------------------------------
def load(memory: Array, at: Any, mask: Any) -> Any:
    """Loads the elements at `at` where the mask holds; elsewhere the result is arbitrary and memory is not read."""
    if not memory.size:
        return np.zeros(np.broadcast_shapes(np.shape(at), np.shape(mask)), memory.dtype)
    return memory[np.where(mask, at, 0)]


def store(memory: Array, at: Any, value: Any, mask: Any = True) -> None:
    """Stores `value` where the mask holds."""
    if mask is True and np.shape(at) == np.shape(value):
        memory[at] = value
        return
    at, value, mask = np.broadcast_arrays(at, value, mask)
    memory[at[mask]] = value[mask]


def check(faults: list[int], condition: Any, code: int, mask: Any = True) -> None:
    """Reports a fault unless the condition holds everywhere under the mask."""
    if not np.all(np.logical_not(mask) | condition):
        faults.append(code)


# -- loops ------------------------------------------------------------------------------------------------------------
def indices(first: int, stop: int, rank: int) -> Array:
    """The values of a loop variable along a new first axis, before `rank` others."""
    return np.arange(first, stop).reshape(-1, *[1] * rank)


def batches(stop: int, *widths: int) -> Iterator[Array]:
    """Splits the units into batches that bound the vectorised iterations; `widths` are those of the inner loops."""
    step = max(1, LANES // max((1, *widths)))
    for first in range(0, stop, step):
        yield np.arange(first, min(first + step, stop))


def longest(extent: Any) -> int:
    """The largest step count of any lane."""
    return int(np.max(extent, initial=0))


def reduce(combine: Callable[[Any, Any], Any], start: Any, extent: int, rank: int, term: Callable[[Any], Any]) -> Any:
    """Combines all terms block by block. A block is combined by halving, as if padded with identities.

    The order is fixed, whatever else is vectorised, and trailing zeros do not change a sum.
    """
    total = start
    for first in range(0, extent, REDUCE_BLOCK):
        index = indices(first, min(first + REDUCE_BLOCK, extent), rank)
        terms = term(index)
        terms = np.broadcast_to(terms, np.broadcast_shapes(np.shape(terms), index.shape))
        half = REDUCE_BLOCK // 2
        while len(terms) > 1:
            low, high = terms[:half], terms[half:]
            pairs = combine(low[: len(high)], high)
            terms = np.concatenate([pairs, low[len(high) :]]) if len(high) < len(low) else pairs
            half //= 2
        total = combine(total, terms[0])
    return total


def identity(op: str, dtype: DType) -> Any:
    """The identity element of a reduction."""
    if op in ("sum", "prod"):
        return dtype.numpy.type(op == "prod")
    if dtype.is_float:
        return dtype.numpy.type(-np.inf if op == "max" else np.inf)
    if dtype is BOOL:
        return np.bool_(op == "min")
    limits = np.iinfo(dtype.numpy)
    return dtype.numpy.type(limits.min if op == "max" else limits.max)


# -- types ------------------------------------------------------------------------------------------------------------
def cast(x: Any, have: DType, want: DType) -> Any:
    """Converts types: floats round to nearest even, integers wrap; float to integer saturates, NaN becomes 0."""
    x = np.asarray(x)
    if want is BOOL:
        return x != 0
    if have.is_float and not want.is_float:
        return _to_integer(x, want)
    if want.is_float and want.size == 2:
        if not have.is_float:
            x = x.astype(F32.numpy)
        elif have is F64 and want is BF16:
            x = _round_to_odd(x)
    return x.astype(want.numpy)


def _to_integer(x: Array, want: DType) -> Array:
    """Saturates in f64, in which all limits but those of i64 are exact; 2^63 itself becomes the largest i64."""
    limits = np.iinfo(want.numpy)
    wide = np.nan_to_num(x.astype(F64.numpy), nan=0.0, posinf=np.inf, neginf=-np.inf)
    inside = np.clip(wide, limits.min, np.nextafter(2.0**63, 0) if limits.max == 2**63 - 1 else limits.max)
    return np.where(wide >= limits.max, limits.max, inside.astype(want.numpy)).astype(want.numpy)


def _round_to_odd(x: Array) -> Array:
    """f64 to f32 such that rounding again to bf16 equals rounding once."""
    near = x.astype(np.float32)
    even = near.view(np.int32) & 1 == 0
    other = np.nextafter(near, np.where(x > near, np.float32(np.inf), np.float32(-np.inf)))
    return np.where(np.isfinite(near) & (near != x) & even, other, near)


# -- operations -------------------------------------------------------------------------------------------------------
def erf(x: Any) -> Any:
    """erf, computed in f64."""
    return np.asarray(_erf(x), np.float64).astype(np.asarray(x).dtype)


def gelu(x: Any) -> Any:
    """x · erfc(-x / √2) / 2, which does not cancel for very negative x."""
    wide = np.asarray(x, np.float64)
    return (0.5 * wide * np.asarray(_erfc(-wide / math.sqrt(2)), np.float64)).astype(np.asarray(x).dtype)


_erf, _erfc = (np.frompyfunc(function, 1, 1) for function in (math.erf, math.erfc))


def order(x: Any) -> Any:
    """Maps x to a signed integer with the same order: -0.0 equals 0.0, NaN is largest."""
    plain = np.asarray(x) + np.asarray(x).dtype.type(0)
    bits = plain.view(np.int64 if plain.itemsize == 8 else np.int32)
    largest = bits.dtype.type(np.iinfo(bits.dtype).max)
    return np.where(np.isnan(plain), largest, np.where(bits < 0, bits ^ largest, bits))


def bits(x: Any) -> Any:
    """Reinterprets i32 bits as f32."""
    return np.asarray(x).view(np.float32)


def nearest(x: Any) -> Any:
    """The nearest integer, ties to even."""
    x = np.asarray(x)
    with np.errstate(all="ignore"):
        return np.rint(x).astype(np.int64 if x.itemsize == 8 else np.int32)


def dot_bytes(total: Any, x: Any, y: Any) -> Any:
    """total plus the dot product of the four unsigned bytes of x and the four signed bytes of y."""
    for byte in range(4):
        total = total + ((x >> 8 * byte) & 255) * (y << 24 - 8 * byte >> 24)
    return total

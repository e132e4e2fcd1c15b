"""Random numbers with explicit keys: equal keys give equal numbers on every device, traced or eager."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import GraphError
from rlx.functional.arrays import argmax, astype, less, log, stack, zeros
from rlx.functional.tracers import type_of
from rlx.functional.tracing import apply, eager
from rlx.types import as_shape

Shape = Sequence[Any]


def key(seed: int) -> Any:
    """Make a key from an integer seed."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) < 2**64:
        raise GraphError(f"random.key: seed is {seed!r}, wanted an integer from 0 to 2^64 - 1")
    return np.array([int(seed) & 0xFFFFFFFF, int(seed) >> 32], np.uint32)


@eager
def split(key: Any, num: int = 2) -> Any:
    """Split a key into `num` new ones, [num, 2]; do not use the old key again."""
    return apply("random_bits", key, shape=(num, 2))


@eager
def fold_in(key: Any, data: Any) -> Any:
    """Derive a key from a key and an integer, such as a step number; the integer may be traced."""
    base = apply("random_bits", key, shape=(2,))
    number = astype(data, "u32")
    return apply("random_bits", base + stack([number, zeros((), "u32")]), shape=(2,))


@eager
def bits(key: Any, shape: Shape = ()) -> Any:
    """Random 32-bit words."""
    return apply("random_bits", key, shape=as_shape(shape))


@eager
def uniform(key: Any, shape: Shape = (), dtype: Any = "f32", minval: float = 0.0, maxval: float = 1.0) -> Any:
    """Uniform floats in [minval, maxval)."""
    values = astype(apply("random_uniform", key, shape=as_shape(shape)), dtype)
    return values * (maxval - minval) + minval


@eager
def normal(key: Any, shape: Shape = (), dtype: Any = "f32") -> Any:
    """Standard normal floats."""
    return astype(apply("random_normal", key, shape=as_shape(shape)), dtype)


@eager
def bernoulli(key: Any, p: Any = 0.5, shape: Shape = ()) -> Any:
    """True with probability p."""
    return less(apply("random_uniform", key, shape=as_shape(shape)), p)


@eager
def randint(key: Any, shape: Shape, minval: int, maxval: int, dtype: Any = "i32") -> Any:
    """Integers in [minval, maxval), uniform up to the bias of a 32-bit modulo."""
    for name, value in (("minval", minval), ("maxval", maxval)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise GraphError(f"random.randint: {name} is {value!r}, wanted an integer known at trace time")
    span = maxval - minval
    if not 0 < span <= 2**31:
        raise GraphError(f"random.randint: from {minval} to {maxval} is not a range of 1 to 2^31 numbers")
    wide = astype(apply("random_bits", key, shape=as_shape(shape)), "i64")
    return astype(wide % span + minval, dtype)


@eager
def gumbel(key: Any, shape: Shape = ()) -> Any:
    """Gumbel noise: -log(-log(u)) of uniform u."""
    tiny = 2.0**-25
    return -log(-log(apply("random_uniform", key, shape=as_shape(shape)) + tiny))


@eager
def categorical(key: Any, logits: Any, axis: int = -1) -> Any:
    """Sample indices with probabilities softmax(logits)."""
    return argmax(logits + gumbel(key, type_of(logits).shape), axis)


def __dir__() -> list[str]:
    return ["bernoulli", "bits", "categorical", "fold_in", "gumbel", "key", "normal", "randint", "split", "uniform"]

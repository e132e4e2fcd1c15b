"""Random numbers with explicit keys: the same key gives the same numbers, on every device, inside a trace or not."""

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
    """A key from a whole number."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= int(seed) < 2**64:
        raise GraphError(f"random.key: seed is {seed!r}, wanted a whole number from 0 to 2^64 - 1")
    return np.array([int(seed) & 0xFFFFFFFF, int(seed) >> 32], np.uint32)


@eager
def split(key: Any, num: int = 2) -> Any:
    """`num` keys from one, [num, 2]; the one is used up."""
    return apply("random_bits", key, shape=(num, 2))


@eager
def fold_in(key: Any, data: Any) -> Any:
    """A key for a whole number, such as that of a step; the number may be data."""
    base = apply("random_bits", key, shape=(2,))
    number = astype(data, "u32")
    return apply("random_bits", base + stack([number, zeros((), "u32")]), shape=(2,))


@eager
def bits(key: Any, shape: Shape = ()) -> Any:
    """Words of 32 bits."""
    return apply("random_bits", key, shape=as_shape(shape))


@eager
def uniform(key: Any, shape: Shape = (), dtype: Any = "f32", minval: float = 0.0, maxval: float = 1.0) -> Any:
    """Numbers from `minval` to below `maxval`."""
    found = astype(apply("random_uniform", key, shape=as_shape(shape)), dtype)
    return found * (maxval - minval) + minval


@eager
def normal(key: Any, shape: Shape = (), dtype: Any = "f32") -> Any:
    """Numbers of the standard normal distribution."""
    return astype(apply("random_normal", key, shape=as_shape(shape)), dtype)


@eager
def bernoulli(key: Any, p: Any = 0.5, shape: Shape = ()) -> Any:
    """True with probability p."""
    return less(apply("random_uniform", key, shape=as_shape(shape)), p)


@eager
def randint(key: Any, shape: Shape, minval: int, maxval: int, dtype: Any = "i32") -> Any:
    """Whole numbers from `minval` to below `maxval`, all as likely as 2^32 allows."""
    for name, value in (("minval", minval), ("maxval", maxval)):
        if isinstance(value, bool) or not isinstance(value, int):
            raise GraphError(f"random.randint: {name} is {value!r}, wanted a whole number that is known")
    span = maxval - minval
    if not 0 < span <= 2**31:
        raise GraphError(f"random.randint: from {minval} to {maxval} is no range of up to 2^31 numbers")
    wide = astype(apply("random_bits", key, shape=as_shape(shape)), "i64")
    return astype(wide % span + minval, dtype)


@eager
def gumbel(key: Any, shape: Shape = ()) -> Any:
    """-log(-log(u)) of uniform u."""
    tiny = 2.0**-25
    return -log(-log(apply("random_uniform", key, shape=as_shape(shape)) + tiny))


@eager
def categorical(key: Any, logits: Any, axis: int = -1) -> Any:
    """Indices with probabilities softmax(logits)."""
    return argmax(logits + gumbel(key, type_of(logits).shape), axis)


def __dir__() -> list[str]:
    return ["bernoulli", "bits", "categorical", "fold_in", "gumbel", "key", "normal", "randint", "split", "uniform"]

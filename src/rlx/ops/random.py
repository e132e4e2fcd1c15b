"""Random numbers: Philox 4x32-10 (Salmon et al. 2011). A key and an element's index determine its bits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.dtypes import F32, U32
from rlx.errors import DTypeError, ShapeError
from rlx.ir.graph import Value
from rlx.ir.independence import never
from rlx.ir.registry import COMPOSED, Spec, op, sample
from rlx.types import Size, TensorType, as_shape

Sizes = tuple[Size, ...]
ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)  # added to the key per round
WORD = 0xFFFFFFFF


def philox(counter: list[Any], key: list[Any]) -> list[Any]:
    """Four 32-bit words from a counter of four words and a key of two, as arrays of u64."""
    c, k = list(counter), list(key)
    for number in range(ROUNDS):
        if number:
            k = [(word + weyl) & WORD for word, weyl in zip(k, WEYL, strict=True)]
        low, high = c[0] * MULTIPLIERS[0], c[2] * MULTIPLIERS[1]
        c = [(high >> 32) ^ c[1] ^ k[0], high & WORD, (low >> 32) ^ c[3] ^ k[1], low & WORD]
    return c


def _random_bits(key: Any, *, shape: Any) -> Any:
    count = int(np.prod(shape, dtype=np.int64))
    blocks = np.arange(-(-count // 4), dtype=np.uint64)
    zero = np.zeros_like(blocks)
    words = philox([blocks & np.uint64(WORD), blocks >> np.uint64(32), zero, zero], [np.uint64(k) for k in key])
    return np.stack(words, axis=1).reshape(-1)[:count].astype(np.uint32).reshape(shape)


def _check_key(where: str, key: TensorType) -> None:
    if key.dtype is not U32:
        raise DTypeError(f"{where}: a key is two numbers of u32, found {key}", hint="rlx.random.key(seed) makes one")
    if key.shape != (2,):
        hint = "vmap takes a batch of keys, as rlx.random.split gives"
        raise ShapeError(f"{where}: a key is two numbers of u32, found {key}", hint=hint)


_KEY = Spec((2,), "u32", 0, 2**31)


@op(
    "random_bits", independent=never, reference=_random_bits,
    samples=[
        sample(_KEY, shape=(3, 5)), sample(_KEY, shape=(130,)), sample(_KEY, shape=()), sample(_KEY, shape=(0, 4)),
    ],
)  # fmt: skip
def random_bits(key: TensorType, *, shape: Sizes) -> TensorType:
    """Random 32-bit words. Element i is word i mod 4 of Philox 4x32-10 at counter i div 4, whatever the shape."""
    _check_key("random_bits", key)
    return TensorType(as_shape(shape), U32)


def _random_uniform(key: Any, *, shape: Any) -> Any:
    return (_random_bits(key, shape=shape) >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)


@op(
    "random_uniform", independent=never, reference=_random_uniform,
    samples=[sample(_KEY, shape=(3, 50)), sample(_KEY, shape=(7,))],
)  # fmt: skip
def random_uniform(key: TensorType, *, shape: Sizes) -> TensorType:
    """Random f32 numbers in [0, 1): the upper 24 of the 32 bits of `random_bits`, as a fraction."""
    _check_key("random_uniform", key)
    return TensorType(as_shape(shape), F32)


def _random_normal(key: Any, *, shape: Any) -> Any:
    pairs = _random_uniform(key, shape=(*shape, 2)).astype(np.float64)
    radius = np.sqrt(-2 * np.log(1 - pairs[..., 0]))
    return (radius * np.cos(2 * math.pi * pairs[..., 1])).astype(np.float32)


def _decompose_random_normal(key: Value, *, shape: Sizes) -> Value:
    pairs = key.graph.one("random_uniform", key, shape=(*shape, 2))
    radius = ((1.0 - pairs[..., 0]).log() * -2.0).sqrt()  # 1 - u is exact, and never 0
    normal: Value = radius * (pairs[..., 1] * (2 * math.pi)).cos()
    return normal


@op(
    "random_normal", independent=never,
    reference=_random_normal, decompose=_decompose_random_normal, traits=[COMPOSED], tolerance=1e-6,
    samples=[sample(_KEY, shape=(3, 50)), sample(_KEY, shape=()), sample(_KEY, shape=(0, 3))],
)  # fmt: skip
def random_normal(key: TensorType, *, shape: Sizes) -> TensorType:
    """Random f32 numbers from the standard normal distribution (Box and Muller 1958).

    Element i uses two numbers u of `random_uniform`: sqrt(-2 log(1 - u[2i])) cos(2π u[2i + 1]).
    """
    _check_key("random_normal", key)
    return TensorType(as_shape(shape), F32)

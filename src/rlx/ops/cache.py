"""Keys and values of earlier positions, kept by the runtime: append to a cache, attend over it.

A cache of keys is [batch, kv_heads, blocks, head_dim, 64]: a block holds 64 positions, as attention reads them. One of
values is [batch, kv_heads, capacity, value_dim]. Positions are data, so a batch may have unequal prompts.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.errors import DTypeError, GraphError, KernelError, ShapeError
from rlx.ir.registry import f32, i32, op, sample
from rlx.ops.attention import split_mask
from rlx.types import Size, TensorType, require_equal

BLOCK = 64  # positions of a block of keys
KINDS = ("keys", "values")


def _placed(where: str, positions: Any, capacity: int) -> list[tuple[int, int, int]]:
    """(batch, row, position) of all rows that are no padding, in order."""
    if positions.size and positions.max() >= capacity:
        raise KernelError(f"{where}: position {positions.max()} lies outside the capacity of {capacity}")
    return [(b, s, int(p)) for (b, s), p in np.ndenumerate(positions) if p >= 0]


def _kv_append(cache: Any, new: Any, positions: Any, *, kind: str) -> Any:
    capacity = cache.shape[2] * (BLOCK if kind == "keys" else 1)
    result = cache.astype(np.result_type(cache, new))  # a copy; wide, so that what is new is rounded once
    for b, s, p in _placed("kv_append", positions, capacity):
        if kind == "keys":
            result[b, :, p // BLOCK, :, p % BLOCK] = new[b, s]
        else:
            result[b, :, p] = new[b, s]
    return result


@op(
    "kv_append", reference=_kv_append,
    samples=[
        sample(f32(2, 3, 2, 8, 64), f32(2, 5, 3, 8), i32(2, 5, low=-2, high=128), kind="keys"),
        sample(f32(1, 2, 1, 20, 64), f32(1, 70, 2, 20), i32(1, 70, low=0, high=64), kind="keys"),
        sample(f32(2, 3, 100, 8), f32(2, 5, 3, 8), i32(2, 5, low=-2, high=100), kind="values"),
        sample(f32(3, 1, 70, 33), f32(3, 1, 1, 33), i32(3, 1, low=0, high=70), kind="values"),
    ],
)  # fmt: skip
def kv_append(cache: TensorType, new: TensorType, positions: TensorType, *, kind: str) -> TensorType:
    """The cache with `new[b, s]` at position `positions[b, s]`, rounded to the type of the cache.

    `new` is [batch, seq, kv_heads, dim]; `kind` is keys or values and says how the cache is laid out. A negative
    position is padding and skipped; of equal ones the last counts; one beyond the capacity is an error at run time.
    The operand `cache` is consumed: on the CPU the result of appending to a state is the state itself, written in
    place, and nothing may read it again as it was. An input, a weight or a constant is copied instead.
    """
    if kind not in KINDS:
        raise GraphError(f"kv_append: kind {kind!r} is not one of {', '.join(KINDS)}")
    _check_cache("kv_append", kind, cache)
    if new.rank != 4:
        raise ShapeError(f"kv_append: new {kind} are [batch, seq, kv_heads, dim], found {new}")
    if not new.dtype.is_float:
        raise DTypeError(f"kv_append: new {kind} are floats, found {new.dtype}")
    for have, want in ((cache.shape[0], new.shape[0]), (cache.shape[1], new.shape[2]), (cache.shape[3], new.shape[3])):
        require_equal(have, want, f"kv_append: new {kind} {new} do not fit the cache {cache}")
    _check_positions("kv_append", positions, new.shape[:2])
    return cache


def _cached_attention(
    q: Any, keys: Any, values: Any, positions: Any, *, mask_kind: str, scale: float | None, softcap: float | None
) -> Any:
    window = split_mask(mask_kind)[1]
    kv_heads, group = keys.shape[1], q.shape[2] // keys.shape[1]
    factor = q.dtype.type(scale if scale is not None else 1 / math.sqrt(q.shape[3]))
    capacity = min(keys.shape[2] * BLOCK, values.shape[2])
    rows = keys.swapaxes(2, 3).reshape(*keys.shape[:2], keys.shape[3], -1)  # [batch, kv_heads, head_dim, positions]
    result = np.zeros((*q.shape[:3], values.shape[3]), q.dtype)
    for b, s, p in _placed("cached_attention", positions, capacity):
        seen = slice(max(p + 1 - window, 0) if window else 0, p + 1)
        scores = q[b, s].reshape(kv_heads, group, -1) @ rows[b, :, :, seen] * factor  # [kv_heads, group, keys]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        result[b, s] = (weights @ values[b, :, seen]).reshape(q.shape[2], -1)
    return result


@op(
    "cached_attention", reference=_cached_attention, tolerance=1e-5,
    samples=[
        sample(f32(2, 3, 4, 16), f32(2, 2, 2, 16, 64), f32(2, 2, 100, 16), i32(2, 3, low=-2, high=100)),
        sample(f32(3, 1, 6, 20), f32(3, 2, 3, 20, 64), f32(3, 2, 192, 33), i32(3, 1, low=0, high=192)),
        sample(
            f32(1, 70, 2, 64), f32(1, 1, 2, 64, 64), f32(1, 1, 128, 64), i32(1, 70, low=-9, high=128),
            mask_kind="sliding(40)",
        ),
        sample(
            f32(2, 4, 3, 80), f32(2, 3, 1, 80, 64), f32(2, 3, 64, 80), i32(2, 4, low=0, high=64),
            scale=0.3, softcap=5.0,
        ),
    ],
)  # fmt: skip
def cached_attention(
    q: TensorType,
    keys: TensorType,
    values: TensorType,
    positions: TensorType,
    *,
    mask_kind: str = "causal",
    scale: float | None = None,
    softcap: float | None = None,
) -> TensorType:
    """softmax(scale · q kᵀ, softcapped and masked) v for each head, over the keys and values of a cache.

    `q` is [batch, seq, heads, head_dim], heads a multiple of kv_heads. The query q[b, s] sits at `positions[b, s]` and
    sees the keys up to and including that, or the last w of them (mask kind sliding(w)); what the cache holds at other
    positions does not matter. A negative position is padding and gives zeros; one beyond the capacity of either cache
    is an error at run time. The scale is 1/√head_dim unless given.
    """
    where = "cached_attention"
    if split_mask(mask_kind)[0] not in ("causal", "sliding"):
        raise GraphError(f"{where}: mask kind {mask_kind!r} is neither causal nor sliding(w)")
    if softcap is not None and not softcap > 0:
        raise GraphError(f"{where}: softcap is {softcap}, it has to be above 0")
    if q.rank != 4 or not all(isinstance(d, int) and d > 0 for d in q.shape[2:]):
        raise ShapeError(f"{where}: q is [batch, seq, heads, head_dim], the last two fixed numbers above 0, found {q}")
    for kind, cache in zip(KINDS, (keys, values), strict=True):
        _check_cache(where, kind, cache)
    if not q.dtype.is_float or keys.dtype is not values.dtype or keys.dtype.compute is not q.dtype.compute:
        raise DTypeError(
            f"{where}: both caches have one float type, of the width of q or narrower; found q {q.dtype}, "
            f"keys {keys.dtype}, values {values.dtype}"
        )
    batch, seq, heads, head_dim = q.shape
    kv_heads, value_dim = values.shape[1], values.shape[3]
    require_equal(head_dim, keys.shape[3], f"{where}: head_dim of q is {head_dim}, of keys {keys.shape[3]}")
    require_equal(keys.shape[1], kv_heads, f"{where}: keys have {keys.shape[1]} heads, values {kv_heads}")
    for cache in (keys, values):
        require_equal(batch, cache.shape[0], f"{where}: batch sizes differ, {batch} and {cache.shape[0]}")
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    if heads % kv_heads:
        raise ShapeError(f"{where}: {heads} query heads are no multiple of {kv_heads} key heads")
    _check_positions(where, positions, (batch, seq))
    return q.with_shape(batch, seq, heads, value_dim)


def _check_cache(where: str, kind: str, cache: TensorType) -> None:
    axes = f"blocks, head_dim, {BLOCK}" if kind == "keys" else "capacity, value_dim"
    if cache.rank != (5 if kind == "keys" else 4) or (kind == "keys" and cache.shape[4] != BLOCK):
        raise ShapeError(f"{where}: a cache of {kind} is [batch, kv_heads, {axes}], found {cache}")
    if not all(isinstance(d, int) and d > 0 for d in (cache.shape[1], cache.shape[3])):
        raise ShapeError(f"{where}: heads and sizes of heads of {kind} are fixed numbers above 0, found {cache}")
    if not cache.dtype.is_float:
        raise DTypeError(f"{where}: a cache of {kind} holds floats, found {cache.dtype}")


def _check_positions(where: str, positions: TensorType, shape: tuple[Size, ...]) -> None:
    if not positions.dtype.is_integer:
        raise DTypeError(f"{where}: positions are integers, found {positions}")
    if positions.rank != 2:
        raise ShapeError(f"{where}: positions are [batch, seq], found {positions}")
    for have, want in zip(positions.shape, shape, strict=True):
        shown = ", ".join(map(str, shape))
        require_equal(have, want, f"{where}: positions {positions} should have shape [{shown}]")

"""Keys and values of earlier positions, kept by the runtime: append to a cache, attend over it.

A cache of keys is [batch, kv_heads, blocks, head_dim, 64]: a block holds 64 positions, as attention reads them. One of
values is [batch, kv_heads, capacity, value_dim]. Packed keys (q8_0) are [batch, kv_heads, blocks, 64, head_dim], since
what a position holds is quantised by itself, 32 numbers a block. Positions are data, so a batch may have unequal
prompts. A cache may be a ring, in which position p lies at p modulo the capacity: enough for a sliding window.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.dtypes import BY_NAME, F32
from rlx.errors import DTypeError, GraphError, KernelError, ShapeError
from rlx.ir.independence import never
from rlx.ir.registry import CHECKS_DATA, TAKES_PACKED, f32, i32, op, packed, sample
from rlx.ops.attention import split_mask
from rlx.ops.quant import unpacked
from rlx.types import Size, TensorType, require_equal

BLOCK = 64  # positions of a block of keys
KINDS = ("keys", "values")
PACKED = BY_NAME["q8_0"]  # the packed type that caches may have


def _placed(where: str, positions: Any, capacity: int, ring: bool) -> list[tuple[int, int, int]]:
    """(batch, row, position) of all rows that are no padding, in order."""
    if positions.size and positions.max() >= capacity and not (ring and capacity):
        raise KernelError(f"{where}: position {positions.max()} lies outside the capacity of {capacity}")
    return [(b, s, int(p)) for (b, s), p in np.ndenumerate(positions) if p >= 0]


def packed_rows(x: Any) -> Any:
    """Rows of floats as q8_0, in ggml's arithmetic: all of it in f32, halves are rounded away from 0."""
    numbers = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, PACKED.block)
    result = np.zeros(numbers.shape[:-1], PACKED.numpy)
    with np.errstate(all="ignore"):  # inf and NaN come out as NaN
        scale = np.abs(numbers).max(axis=-1) / np.float32(127)
        scaled = numbers * np.where(scale == 0, np.float32(0), 1 / scale)[..., None]
        result["d"] = scale
    whole = np.trunc(scaled)
    away = whole + np.trunc(2 * (scaled - whole))
    result["qs"] = np.where(np.isfinite(away), away, 0)
    return result


def _kv_append(cache: Any, new: Any, positions: Any, *, kind: str, ring: bool) -> Any:
    capacity = cache.shape[2] * (BLOCK if kind == "keys" else 1)
    is_packed = cache.dtype == PACKED.numpy
    if is_packed:
        result, new = cache.copy(), packed_rows(new)
    else:
        result = cache.astype(np.result_type(cache, new))  # a copy; wide, so that what is new is rounded once
    for b, s, p in _placed("kv_append", positions, capacity, ring):
        at, block, lane = p % capacity, p % capacity // BLOCK, p % BLOCK
        if kind == "values":
            result[b, :, at] = new[b, s]
        elif is_packed:
            result[b, :, block, lane] = new[b, s]
        else:
            result[b, :, block, :, lane] = new[b, s]
    return result


@op(
    "kv_append", independent=never, reference=_kv_append, traits=[TAKES_PACKED, CHECKS_DATA],
    samples=[
        sample(f32(2, 3, 2, 8, 64), f32(2, 5, 3, 8), i32(2, 5, low=-2, high=128), kind="keys"),
        sample(f32(1, 2, 1, 20, 64), f32(1, 70, 2, 20), i32(1, 70, low=0, high=64), kind="keys"),
        sample(f32(2, 3, 100, 8), f32(2, 5, 3, 8), i32(2, 5, low=-2, high=100), kind="values"),
        sample(f32(3, 1, 70, 33), f32(3, 1, 1, 33), i32(3, 1, low=0, high=70), kind="values"),
        sample(f32(2, 3, 1, 8, 64), f32(2, 5, 3, 8), i32(2, 5, low=-9, high=999), kind="keys", ring=True),
        sample(f32(2, 3, 50, 8), f32(2, 5, 3, 8), i32(2, 5, low=-9, high=999), kind="values", ring=True),
        sample(packed("q8_0", 2, 2, 1, 64, 96), f32(2, 5, 2, 96), i32(2, 5, low=-2, high=64), kind="keys"),
        sample(packed("q8_0", 1, 3, 20, 32), f32(1, 5, 3, 32), i32(1, 5, low=0, high=99), kind="values", ring=True),
    ],
)  # fmt: skip
def kv_append(
    cache: TensorType, new: TensorType, positions: TensorType, *, kind: str, ring: bool = False
) -> TensorType:
    """The cache with `new[b, s]` at position `positions[b, s]`, rounded to the type of the cache.

    `new` is [batch, seq, kv_heads, dim]; `kind` is keys or values and says how the cache is laid out. A negative
    position is padding and skipped; of equal ones the last counts; one beyond the capacity is an error at run time,
    unless the cache is a `ring`, where it takes the place of the one that was there a capacity ago.
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
    size = _head_size(kind, cache)
    for have, want in ((cache.shape[0], new.shape[0]), (cache.shape[1], new.shape[2]), (size, new.shape[3])):
        require_equal(have, want, f"kv_append: new {kind} {new} do not fit the cache {cache}")
    _check_positions("kv_append", positions, new.shape[:2])
    return cache


def _cached_attention(
    q: Any, keys: Any, values: Any, positions: Any, *, mask_kind: str, scale: float | None, softcap: float | None,
    ring: bool,
) -> Any:  # fmt: skip
    window = split_mask(mask_kind)[1]
    kv_heads, group = keys.shape[1], q.shape[2] // keys.shape[1]
    factor = q.dtype.type(scale if scale is not None else 1 / math.sqrt(q.shape[3]))
    if keys.dtype == PACKED.numpy:
        keys, values = unpacked(keys), unpacked(values)
        rows = keys.reshape(*keys.shape[:2], -1, keys.shape[4]).swapaxes(2, 3)
    else:
        rows = keys.swapaxes(2, 3).reshape(*keys.shape[:2], keys.shape[3], -1)  # [batch, kv_heads, head_dim, positions]
    capacity = min(rows.shape[3], values.shape[2])
    newest = [max(map(int, row), default=-1) for row in positions]
    result = np.zeros((*q.shape[:3], values.shape[3]), q.dtype)
    for b, s, p in _placed("cached_attention", positions, capacity, ring):
        oldest = max(p + 1 - window, 0) if window else 0
        if newest[b] - oldest >= capacity:
            raise KernelError(
                f"cached_attention: positions {oldest} to {newest[b]} lie outside the capacity of {capacity}"
            )
        seen = np.arange(oldest, p + 1) % capacity
        scores = q[b, s].reshape(kv_heads, group, -1) @ rows[b][:, :, seen] * factor  # [kv_heads, group, keys]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        result[b, s] = (weights @ values[b][:, seen]).reshape(q.shape[2], -1)
    return result


@op(
    "cached_attention", independent=never, reference=_cached_attention, tolerance=1e-5, traits=[TAKES_PACKED],
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
        sample(
            f32(2, 3, 4, 32), f32(2, 2, 1, 32, 64), f32(2, 2, 64, 16), i32(2, 3, low=100, high=120),
            mask_kind="sliding(40)", ring=True,
        ),
        sample(
            f32(1, 5, 4, 96), packed("q8_0", 1, 2, 2, 64, 96), packed("q8_0", 1, 2, 99, 32), i32(1, 5, low=-1, high=99),
            scale=1e-3,
        ),
        sample(
            f32(2, 3, 3, 32), packed("q8_0", 2, 1, 1, 64, 32), packed("q8_0", 2, 1, 64, 96), i32(2, 3, low=90, high=99),
            mask_kind="sliding(50)", ring=True, scale=1e-3,
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
    ring: bool = False,
) -> TensorType:
    """softmax(scale · q kᵀ, softcapped and masked) v for each head, over the keys and values of a cache.

    `q` is [batch, seq, heads, head_dim], heads a multiple of kv_heads. The query q[b, s] sits at `positions[b, s]` and
    sees the keys up to and including that, or the last w of them (mask kind sliding(w)); what the cache holds at other
    positions does not matter. A negative position is padding and gives zeros; one beyond the capacity of either cache
    is an error at run time. The scale is 1/√head_dim unless given.

    Caches that are a `ring` have one capacity, whole blocks of 64, and go with sliding windows. From the oldest key
    that a query of a batch row sees to the newest query of the row, there have to be at most as many positions as the
    ring holds; more are an error at run time.
    """
    where = "cached_attention"
    if split_mask(mask_kind)[0] not in ("causal", "sliding"):
        raise GraphError(f"{where}: mask kind {mask_kind!r} is neither causal nor sliding(w)")
    if ring and split_mask(mask_kind)[0] != "sliding":
        raise GraphError(f"{where}: a ring forgets, mask kind {mask_kind!r} does not", hint="use MaskKind.sliding(w)")
    if softcap is not None and not softcap > 0:
        raise GraphError(f"{where}: softcap is {softcap}, it has to be above 0")
    if q.rank != 4 or not all(isinstance(d, int) and d > 0 for d in q.shape[2:]):
        raise ShapeError(f"{where}: q is [batch, seq, heads, head_dim], the last two fixed numbers above 0, found {q}")
    for kind, cache in zip(KINDS, (keys, values), strict=True):
        _check_cache(where, kind, cache)
    width = F32 if keys.dtype is PACKED else keys.dtype.wide
    if not q.dtype.is_float or keys.dtype is not values.dtype or width is not q.dtype.wide:
        raise DTypeError(
            f"{where}: both caches have one type, of the width of q or narrower; found q {q.dtype}, "
            f"keys {keys.dtype}, values {values.dtype}"
        )
    batch, seq, heads, head_dim = q.shape
    kv_heads, value_dim = values.shape[1], values.shape[3]
    if ring:
        capacity = keys.shape[2] * BLOCK
        require_equal(capacity, values.shape[2], f"{where}: a ring of {capacity} keys and {values.shape[2]} values")
    own = _head_size("keys", keys)
    require_equal(head_dim, own, f"{where}: head_dim of q is {head_dim}, of keys {own}")
    require_equal(keys.shape[1], kv_heads, f"{where}: keys have {keys.shape[1]} heads, values {kv_heads}")
    for cache in (keys, values):
        require_equal(batch, cache.shape[0], f"{where}: batch sizes differ, {batch} and {cache.shape[0]}")
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    if heads % kv_heads:
        raise ShapeError(f"{where}: {heads} query heads are no multiple of {kv_heads} key heads")
    _check_positions(where, positions, (batch, seq))
    return q.with_shape(batch, seq, heads, value_dim)


def _head_size(kind: str, cache: TensorType) -> Size:
    return cache.shape[4 if kind == "keys" and cache.dtype.is_packed else 3]


def _check_cache(where: str, kind: str, cache: TensorType) -> None:
    axes = f"blocks, {BLOCK}, head_dim" if cache.dtype.is_packed else f"blocks, head_dim, {BLOCK}"
    if kind == "values":
        axes = "capacity, value_dim"
    lanes = cache.shape[3 if cache.dtype.is_packed else 4 :][:1]
    if cache.rank != (5 if kind == "keys" else 4) or (kind == "keys" and lanes != (BLOCK,)):
        raise ShapeError(f"{where}: a cache of {kind} is [batch, kv_heads, {axes}], found {cache}")
    if not all(isinstance(d, int) and d > 0 for d in (cache.shape[1], _head_size(kind, cache))):
        raise ShapeError(f"{where}: heads and sizes of heads of {kind} are fixed numbers above 0, found {cache}")
    if not cache.dtype.is_float and cache.dtype is not PACKED:
        raise DTypeError(f"{where}: a cache of {kind} holds floats or {PACKED}, found {cache.dtype}")


def _check_positions(where: str, positions: TensorType, shape: tuple[Size, ...]) -> None:
    if not positions.dtype.is_integer:
        raise DTypeError(f"{where}: positions are integers, found {positions}")
    if positions.rank != 2:
        raise ShapeError(f"{where}: positions are [batch, seq], found {positions}")
    for have, want in zip(positions.shape, shape, strict=True):
        shown = ", ".join(map(str, shape))
        require_equal(have, want, f"{where}: positions {positions} should have shape [{shown}]")

"""KV caches: append keys or values of new tokens to pages, and attend over the pages of a sequence.

A pool has pages for every head: its axes are page, head, slot (a position inside a page) and dim, `phsd`, in the order
of the backend (`Target.kv_layout`). A table [rows, blocks] has the page of each block of positions of each sequence, in
any order. Positions are data, so sequences of a batch may differ in length. A cache may be a ring buffer, in which
position p is stored at p modulo the capacity of the table: enough for a sliding window.

Tokens are rectangular, [batch, seq], where batch entry b uses row b of the table; or ragged, [tokens], where `rows` has
the row of each.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.dtypes import BY_NAME, F32
from rlx.errors import DTypeError, GraphError, KernelError, ShapeError
from rlx.ir.independence import never
from rlx.ir.registry import CHECKS_DATA, TAKES_PACKED, f32, i32, op, packed, sample
from rlx.kv_layout import POOL_AXES
from rlx.ops.attention import split_mask
from rlx.ops.quant import unpack_blocks
from rlx.types import Size, TensorType, require_equal

PACKED = BY_NAME["q8_0"]  # the packed type that caches support


# -- reference --------------------------------------------------------------------------------------------------------
def _present(where: str, positions: Any, rows: Any, table: Any) -> list[tuple[tuple[int, ...], int, int]]:
    """(token, row, position) of all tokens that are not padding, in order."""
    present = []
    for token, position in np.ndenumerate(positions):
        row = token[0] if rows is None else int(rows[token])
        if position >= 0 and not 0 <= row < len(table):
            raise KernelError(f"{where}: row {row} lies outside the table, which has {len(table)} rows")
        if position >= 0:
            present.append((token, row, int(position)))
    return present


def _place(where: str, positions: Any, table: Any, pool: Any, ring: bool) -> tuple[Any, Any]:
    """Page numbers of a row's positions, and the slots inside the pages."""
    page = pool.shape[2]
    capacity = len(table) * page
    if positions.max() >= capacity and not (ring and capacity):
        raise KernelError(f"{where}: position {positions.max()} lies outside the capacity of {capacity}")
    slots = positions % capacity
    numbers = table[slots // page].astype(np.int64)
    outside = numbers[(numbers < 0) | (numbers >= len(pool))]
    if len(outside):
        raise KernelError(f"{where}: page {outside[0]} lies outside the pool, which has {len(pool)} pages")
    return numbers, slots % page


def packed_rows(x: Any) -> Any:
    """Quantises rows of floats to q8_0 in ggml's arithmetic: all in f32, halves rounded away from 0."""
    numbers = np.asarray(x, np.float32).reshape(*x.shape[:-1], -1, PACKED.block)
    result = np.zeros(numbers.shape[:-1], PACKED.numpy)
    with np.errstate(all="ignore"):  # inf and NaN come out as NaN
        scale = np.abs(numbers).max(axis=-1) / np.float32(127)
        scaled = numbers * np.where(scale == 0, np.float32(0), 1 / scale)[..., None]
        result["d"] = scale
    integer = np.trunc(scaled)
    rounded = integer + np.trunc(2 * (scaled - integer))
    result["qs"] = np.where(np.isfinite(rounded), rounded, 0)
    return result


def _reorder(pool: Any, axes: str) -> Any:
    """A view of a pool as [pages, kv_heads, page, dim]."""
    return pool.transpose([axes.index(axis) for axis in POOL_AXES])


def _kv_append(pool: Any, new: Any, positions: Any, table: Any, rows: Any = None, *, axes: str, ring: bool) -> Any:
    if pool.dtype == PACKED.numpy:
        result, new = pool.copy(), packed_rows(new)
    else:
        result = pool.astype(np.result_type(pool, new))  # a copy; wide, so that new numbers are rounded once
    pages = _reorder(result, axes)
    for token, row, position in _present("kv_append", positions, rows, table):
        at = _place("kv_append", np.array([position]), table[row], pages, ring)
        pages[at[0][0], :, at[1][0]] = new[token]
    return result


# -- appending --------------------------------------------------------------------------------------------------------
@op(
    "kv_append", independent=never, reference=_kv_append, traits=[TAKES_PACKED, CHECKS_DATA],
    samples=[
        sample(f32(3, 5, 8, 64), f32(2, 5, 3, 8), i32(2, 5, low=-2, high=128), i32(2, 2, low=0, high=5, distinct=True),
               axes="hpds"),
        sample(f32(3, 2, 20, 16), f32(1, 70, 2, 20), i32(1, 70, low=0, high=48), i32(1, 3, low=0, high=3),
               axes="phds"),
        sample(f32(7, 3, 16, 8), f32(2, 5, 3, 8), i32(2, 5, low=-2, high=48), i32(2, 3, low=0, high=7, distinct=True)),
        sample(f32(9, 1, 32, 33), f32(3, 1, 1, 33), i32(3, 1, low=0, high=96), i32(3, 3, low=0, high=9, distinct=True)),
        sample(f32(3, 2, 8, 64), f32(2, 5, 3, 8), i32(2, 5, low=-9, high=999), i32(2, 1, low=0, high=2, distinct=True),
               axes="hpds", ring=True),
        sample(f32(8, 9, 3, 8), f32(12, 3, 8), i32(12, low=-9, high=999), i32(4, 2, low=0, high=9, distinct=True),
               i32(12, low=0, high=4), axes="sphd", ring=True),
        sample(f32(9, 2, 4, 16), f32(7, 2, 4), i32(7, low=-4, high=48), i32(3, 3, low=0, high=9, distinct=True),
               i32(7, low=0, high=3), axes="phds"),
        sample(packed("q8_0", 2, 3, 64, 96), f32(2, 5, 2, 96), i32(2, 5, low=-2, high=64),
               i32(2, 1, low=0, high=3, distinct=True), axes="hpsd"),
        sample(packed("q8_0", 5, 3, 16, 32), f32(6, 3, 32), i32(6, low=0, high=99),
               i32(2, 2, low=0, high=5, distinct=True), i32(6, low=0, high=2), ring=True),
    ],
)  # fmt: skip
def kv_append(
    pool: TensorType,
    new: TensorType,
    positions: TensorType,
    table: TensorType,
    rows: TensorType | None = None,
    *,
    axes: str = POOL_AXES,
    ring: bool = False,
) -> TensorType:
    """Writes each new token to its position of its row in the pool, rounded to the pool's type.

    `axes` is the order of the axes of `pool`: p (pages), h (kv_heads), s (positions per page), d (dim). `table` is
    [rows, blocks] and holds page numbers. `new` is [batch, seq, kv_heads, dim] with `positions` [batch, seq], where
    batch entry b uses row b; or [tokens, kv_heads, dim] with `positions` and `rows` [tokens].

    A negative position is padding and skipped; of equal positions of a row the last wins. A position beyond the
    capacity (blocks · page) is an error at run time, unless the cache is a `ring`, where it overwrites the position one
    capacity earlier. A row or page number that does not exist is an error too, if a token uses it. Rows may share pages
    as long as no token is written there.

    The operand `pool` is consumed: on the CPU the result of appending to a state is the state itself, written in place,
    and its old contents must not be read again. An input, a weight or a constant is copied instead.
    """
    where = "kv_append"
    sizes = _check_pool(where, "pool", pool, axes)
    lead = _check_tokens(where, new.shape, positions, table, rows)
    if new.rank != lead + 2:
        axes = "batch, seq" if lead == 2 else "tokens"
        raise ShapeError(f"{where}: new tokens are [{axes}, kv_heads, dim], found {new}")
    if not new.dtype.is_float:
        raise DTypeError(f"{where}: new tokens are floats, found {new.dtype}")
    for have, want in ((sizes["h"], new.shape[-2]), (sizes["d"], new.shape[-1])):
        require_equal(have, want, f"{where}: new tokens {new} do not fit the pool {pool}")
    return pool


# -- attending --------------------------------------------------------------------------------------------------------
def _cached_attention(
    q: Any, keys: Any, values: Any, positions: Any, table: Any, rows: Any = None, *, mask_kind: str,
    scale: float | None, softcap: float | None, key_axes: str, value_axes: str, ring: bool,
) -> Any:  # fmt: skip
    where, window = "cached_attention", split_mask(mask_kind)[1]
    factor = q.dtype.type(scale if scale is not None else 1 / math.sqrt(q.shape[-1]))
    if keys.dtype == PACKED.numpy:
        keys, values = unpack_blocks(keys), unpack_blocks(values)
    keys, values = _reorder(keys, key_axes), _reorder(values, value_axes)
    kv_heads, group = keys.shape[1], q.shape[-2] // keys.shape[1]
    capacity = table.shape[1] * keys.shape[2]
    present = _present(where, positions, rows, table)
    newest: dict[int, int] = {}
    for _, row, p in present:
        newest[row] = max(newest.get(row, -1), p)
    result = np.zeros((*q.shape[:-1], values.shape[3]), q.dtype)
    for token, row, p in present:
        oldest = max(p + 1 - window, 0) if window else 0
        if ring and newest[row] - oldest >= capacity:
            raise KernelError(f"{where}: positions {oldest} to {newest[row]} lie outside the capacity of {capacity}")
        at = _place(where, np.arange(oldest, p + 1), table[row], keys, ring)
        seen_keys, seen_values = (pool[at[0], :, at[1]].swapaxes(0, 1) for pool in (keys, values))
        scores = q[token].reshape(kv_heads, group, -1) @ seen_keys.swapaxes(1, 2) * factor  # [kv_heads, group, keys]
        if softcap is not None:
            scores = softcap * np.tanh(scores / softcap)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights = weights / weights.sum(axis=-1, keepdims=True)
        result[token] = (weights @ seen_values).reshape(q.shape[-2], -1)
    return result


@op(
    "cached_attention", independent=never, reference=_cached_attention, tolerance=1e-5,
    traits=[TAKES_PACKED, CHECKS_DATA],
    samples=[
        sample(f32(2, 3, 4, 16), f32(2, 5, 16, 64), f32(2, 5, 64, 16), i32(2, 3, low=-2, high=128),
               i32(2, 2, low=0, high=5), key_axes="hpds", value_axes="hpsd"),
        sample(f32(3, 1, 6, 20), f32(8, 2, 20, 64), f32(8, 2, 64, 33), i32(3, 1, low=0, high=192),
               i32(3, 3, low=0, high=8), key_axes="phds"),
        sample(f32(1, 70, 2, 64), f32(1, 2, 64, 64), f32(1, 2, 64, 64), i32(1, 70, low=-9, high=128),
               i32(1, 2, low=0, high=2), key_axes="hpds", value_axes="hpsd", mask_kind="sliding(40)"),
        sample(f32(2, 4, 3, 80), f32(3, 2, 80, 64), f32(3, 2, 64, 80), i32(2, 4, low=0, high=64),
               i32(2, 1, low=0, high=2), key_axes="hpds", value_axes="hpsd", scale=0.3, softcap=5.0),
        sample(f32(2, 3, 4, 32), f32(2, 3, 32, 64), f32(2, 3, 64, 16), i32(2, 3, low=100, high=120),
               i32(2, 1, low=0, high=3), key_axes="hpds", value_axes="hpsd", mask_kind="sliding(40)", ring=True),
        sample(f32(9, 4, 16), f32(2, 5, 16, 64), f32(2, 5, 64, 16), i32(9, low=-4, high=128),
               i32(3, 2, low=0, high=5), i32(9, low=0, high=3), key_axes="hpds", value_axes="hpsd"),
        sample(f32(2, 3, 4, 8), f32(7, 2, 16, 8), f32(7, 2, 16, 5), i32(2, 3, low=-2, high=48),
               i32(2, 3, low=0, high=7)),
        sample(f32(6, 2, 8), f32(7, 2, 16, 8), f32(7, 2, 16, 8), i32(6, low=100, high=110), i32(2, 3, low=0, high=7),
               i32(6, low=0, high=2), mask_kind="sliding(30)", ring=True),
        sample(f32(1, 5, 4, 96), packed("q8_0", 2, 3, 64, 96), packed("q8_0", 2, 3, 64, 32), i32(1, 5, low=-1, high=99),
               i32(1, 2, low=0, high=3), key_axes="hpsd", value_axes="hpsd", scale=1e-3),
        sample(f32(2, 3, 3, 32), packed("q8_0", 2, 1, 64, 32), packed("q8_0", 2, 1, 64, 96), i32(2, 3, low=90, high=99),
               i32(2, 1, low=0, high=2), mask_kind="sliding(50)", ring=True, scale=1e-3),
    ],
)  # fmt: skip
def cached_attention(
    q: TensorType,
    keys: TensorType,
    values: TensorType,
    positions: TensorType,
    table: TensorType,
    rows: TensorType | None = None,
    *,
    mask_kind: str = "causal",
    scale: float | None = None,
    softcap: float | None = None,
    key_axes: str = POOL_AXES,
    value_axes: str = POOL_AXES,
    ring: bool = False,
) -> TensorType:
    """softmax(scale · q kᵀ, softcapped and masked) v per head, over the keys and values of cached sequences.

    `q` is [batch, seq, heads, head_dim] with `positions` [batch, seq], or [tokens, heads, head_dim] with `positions`
    and `rows` [tokens]; heads are a multiple of kv_heads. `keys` and `values` are pools of pages of one size with their
    axes in the order of `key_axes` and `value_axes`; `table` [rows, blocks] has the page numbers of both (see
    kv_append). A query attends to the keys of its row up to and including its position, or to the last w of them (mask
    kind sliding(w)); page contents at other positions do not matter. A negative position is padding and gives zeros. A
    position beyond the capacity, a row, or a page that is needed and does not exist is an error at run time. The scale
    defaults to 1/√head_dim.

    `ring` caches require sliding windows. From the oldest key that a query of a row attends to up to the newest query
    of the row there must be at most as many positions as the ring holds; more are an error at run time.
    """
    where = "cached_attention"
    if split_mask(mask_kind)[0] not in ("causal", "sliding"):
        raise GraphError(f"{where}: mask kind {mask_kind!r} is neither causal nor sliding(w)")
    if ring and split_mask(mask_kind)[0] != "sliding":
        raise GraphError(f"{where}: a ring forgets, mask kind {mask_kind!r} does not", hint="use MaskKind.sliding(w)")
    if softcap is not None and not softcap > 0:
        raise GraphError(f"{where}: softcap is {softcap}, it has to be above 0")
    lead = _check_tokens(where, q.shape, positions, table, rows)
    if q.rank != lead + 2 or not all(isinstance(d, int) and d > 0 for d in q.shape[lead:]):
        axes = "batch, seq" if lead == 2 else "tokens"
        raise ShapeError(f"{where}: q is [{axes}, heads, head_dim], the last two fixed numbers above 0, found {q}")
    of_keys, of_values = (
        _check_pool(where, name, pool, axes)
        for name, pool, axes in (("keys", keys, key_axes), ("values", values, value_axes))
    )
    width = F32 if keys.dtype is PACKED else keys.dtype.wide
    if not q.dtype.is_float or keys.dtype is not values.dtype or width is not q.dtype.wide:
        raise DTypeError(
            f"{where}: both pools have one type, of the width of q or narrower; found q {q.dtype}, "
            f"keys {keys.dtype}, values {values.dtype}"
        )
    heads, head_dim = q.shape[lead:]
    kv_heads = of_values["h"]
    require_equal(head_dim, of_keys["d"], f"{where}: head_dim of q is {head_dim}, of keys {of_keys['d']}")
    require_equal(of_keys["h"], kv_heads, f"{where}: keys have {of_keys['h']} heads, values {kv_heads}")
    pages = f"a page has {of_keys['s']} keys and {of_values['s']} values"
    require_equal(of_keys["s"], of_values["s"], f"{where}: {pages}")
    pools = f"there are {of_keys['p']} pages of keys and {of_values['p']} of values"
    require_equal(of_keys["p"], of_values["p"], f"{where}: {pools}")
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    if heads % kv_heads:
        raise ShapeError(f"{where}: {heads} query heads are no multiple of {kv_heads} key heads")
    return q.with_shape(*q.shape[:-1], of_values["d"])


# -- type rules -------------------------------------------------------------------------------------------------------
def _check_pool(where: str, name: str, pool: TensorType, axes: str) -> dict[str, Size]:
    """Checks the type of a pool; returns the size of each axis."""
    if sorted(axes) != sorted(POOL_AXES):
        raise GraphError(f"{where}: {name}: axes are {axes!r}", hint=f"an order of {POOL_AXES!r}")
    sizes = dict(zip(axes, pool.shape, strict=False))
    if pool.rank != 4 or not all(isinstance(d, int) and d > 0 for axis, d in sizes.items() if axis != "p"):
        names = {"p": "pages", "h": "kv_heads", "s": "page", "d": "dim"}
        wanted = ", ".join(names[axis] for axis in axes)
        raise ShapeError(f"{where}: {name}: expected [{wanted}], fixed numbers above 0 but for pages, found {pool}")
    if not pool.dtype.is_float and pool.dtype is not PACKED:
        raise DTypeError(f"{where}: {name}: pages hold floats or {PACKED}, found {pool.dtype}")
    if pool.dtype.is_packed and axes[-1] != "d":
        raise GraphError(f"{where}: {name}: axes of {pool.dtype} are {axes!r}", hint="packed rows are last: end in d")
    return sizes


def _check_tokens(
    where: str, shape: tuple[Size, ...], positions: TensorType, table: TensorType, rows: TensorType | None
) -> int:
    """Checks positions, table and rows of tokens; returns the number of token axes: 2, or 1 if ragged."""
    lead = 2 if rows is None else 1
    named = {"positions": (positions, lead), "table": (table, 2)} | ({} if rows is None else {"rows": (rows, 1)})
    axes = {"positions": "batch, seq" if lead == 2 else "tokens", "table": "rows, blocks", "rows": "tokens"}
    for name, (type_, rank) in named.items():
        if not type_.dtype.is_integer:
            raise DTypeError(f"{where}: {name}: expected integers, found {type_}")
        if type_.rank != rank:
            raise ShapeError(f"{where}: {name}: expected [{axes[name]}], found {type_}")
    wanted = ", ".join(map(str, shape[:lead]))
    for type_ in (positions,) if rows is None else (positions, rows):
        for have, want in zip(type_.shape, shape, strict=False):
            name = "positions" if type_ is positions else "rows"
            require_equal(have, want, f"{where}: {name} {type_} should have shape [{wanted}]")
    if rows is None:
        entries, count = shape[0], table.shape[0]
        require_equal(entries, count, f"{where}: a batch of {entries} and a table of {count} rows")
    return lead

"""Attention kernels over a KV cache, on every target that runs here: values against NumPy, bits, padding and bounds."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from guarded import guarded, guarded_copy
from targets import AVX512
from test_attention_kernels import (
    EVERY_TARGET,
    Compiled,
    Operands,
    a_kernel,
    assert_close,
    assert_same_bits,
    compiled,
    name_of,
    object_of,
    random,
)

from rlx.backends.cpu import attention, toolchain
from rlx.dtypes import BF16, BY_NAME, F16, F32, F64, I32, DType
from rlx.errors import LowerError
from rlx.lir.kernels import BEYOND_CAPACITY, OUTSIDE_POOL, AttentionKernel
from rlx.target import Target

Array = npt.NDArray[Any]
Q8 = BY_NAME["q8_0"]


# -- compiling and calling --------------------------------------------------------------------------------------------
def over_cache(kernel: AttentionKernel, dtype: DType | None = None) -> AttentionKernel:
    return replace(kernel, page=64, cache_dtype=dtype)


@dataclass(frozen=True)
class Cached:
    """q [batch, seq, heads, head_dim], pools of keys [pages, heads, head_dim, 64] and values [pages, heads, 64,
    value_dim], positions [batch, seq], table [batch, blocks]."""

    q: Array
    keys: Array
    values: Array
    positions: Array
    table: Array

    def rows(self, which: Any) -> Cached:
        """Some of the query rows."""
        return replace(self, q=self.q[:, which], positions=np.ascontiguousarray(self.positions[:, which]))


class CompiledCached(Compiled):
    """A kernel over a cache, ready to be called on arrays."""

    def words(self, operands: Cached, out: Array) -> Array:  # type: ignore[override]
        q, keys, values, positions = operands.q, operands.keys, operands.values, operands.positions
        assert positions.dtype == np.int32 and positions.strides[1] == 4
        given = {
            "parts": self.parts.ctypes.data, "q": q.ctypes.data, "k": keys.ctypes.data, "v": values.ctypes.data,
            "out": out.ctypes.data, "positions": positions.ctypes.data, "batch": q.shape[0], "q_len": q.shape[1],
            "capacity": 64 * operands.table.shape[1], "kv_heads": keys.shape[1], "pages": len(keys),
            "positions_batch": positions.strides[0] // 4, "table": operands.table.ctypes.data,
            "table_rows": len(operands.table), "table_row": operands.table.strides[0] // 4,
        }  # fmt: skip
        for name, array, axes in (
            ("q", q, ("batch", "seq", "head")), ("out", out, ("batch", "seq", "head")), ("k", keys, ("page", "head")),
            ("v", values, ("page", "head", "seq")),
        ):  # fmt: skip
            for axis, stride in zip(axes, array.strides, strict=False):
                given[f"{name}_{axis}"] = stride // (2 if array.dtype.names else array.itemsize)
        return np.array([given[word] for word in attention.Plan(self.kernel, self.target).words], np.int64)

    def units(self, operands: Cached) -> int:  # type: ignore[override]
        batch, q_len = operands.q.shape[:2]
        positions = attention.Plan(self.kernel, self.target).unit_positions
        return int(batch * operands.keys.shape[1] * -(-q_len // positions))

    def __call__(  # type: ignore[override]
        self, operands: Cached, out: Array | None = None, calls: Sequence[tuple[int, int]] | None = None
    ) -> Array:
        return super().__call__(operands, out, calls)  # type: ignore[arg-type]


@functools.cache
def compiled_cached(kernel: AttentionKernel, target: Target) -> CompiledCached:
    return CompiledCached(kernel, target)


# -- data and reference -----------------------------------------------------------------------------------------------
def spoiled(*shape: int, dtype: Any) -> Array:
    """A cache in which nothing has been stored yet: whatever is read there shows."""
    return np.resize(np.array([np.nan, np.inf, -np.inf], dtype), shape)


def cache_of(k: Array, v: Array, capacity: int, dtype: DType) -> tuple[Array, Array, Array]:
    """Pools and a table with k and v [batch, seq, heads, dim] at the positions from 0 on, on pages in random order."""
    batch, seq, heads, dim = k.shape
    blocks = -(-capacity // 64)
    keys = spoiled(batch * blocks, heads, dim, 64, dtype=dtype.numpy)
    values = spoiled(batch * blocks, heads, 64, v.shape[3], dtype=dtype.numpy)
    table = np.random.default_rng(capacity).permutation(batch * blocks).astype(np.int32).reshape(batch, blocks)
    for b, p in np.ndindex(batch, seq):
        keys[table[b, p // 64], :, :, p % 64] = k[b, p]
        values[table[b, p // 64], :, p % 64] = v[b, p]
    return keys, values, table


def cached(kernel: AttentionKernel, operands: Operands, capacity: int = 0) -> Cached:
    """The same queries, keys and values by way of a cache; queries sit at the last positions."""
    (batch, q_len), k_len = operands.q.shape[:2], operands.k.shape[1]
    keys, values, table = cache_of(operands.k, operands.v, capacity or k_len, kernel.cache_dtype or kernel.dtype)
    positions = np.tile(np.arange(k_len - q_len, k_len, dtype=np.int32), (batch, 1))
    return Cached(operands.q, keys, values, positions, table)


def filled(kernel: AttentionKernel, positions: Sequence[Sequence[int]], kv_heads: int = 2, room: int = 5) -> Cached:
    """Random queries at these positions, and as many keys in each batch row as they see."""
    at = np.array(positions, np.int32)
    longest = max(int(at.max()) + 1, 1)
    operands = random(kernel, at.shape[1], longest, batch=at.shape[0], kv_heads=kv_heads)
    keys, values, table = cache_of(operands.k, operands.v, longest + room, kernel.cache_dtype or kernel.dtype)
    for b, own in enumerate(at):
        for p in range(int(own.max()) + 1, longest):
            keys[table[b, p // 64], :, :, p % 64] = np.nan
            values[table[b, p // 64], :, p % 64] = np.nan
    return Cached(operands.q, keys, values, at, table)


def reference(kernel: AttentionKernel, operands: Cached) -> Array:
    """Softmax attention in f64, a row at a time."""
    q, keys, values = (x.astype(np.float64) for x in (operands.q, operands.keys, operands.values))
    result = np.zeros((*q.shape[:3], kernel.value_dim))
    for b, i, h in np.ndindex(*q.shape[:3]):
        position, head = int(operands.positions[b, i]), h // kernel.group
        first = max(position + 1 - kernel.window, 0) if kernel.mask == "sliding" else 0
        if position < 0:
            continue
        places = [(operands.table[b, p // 64], p % 64) for p in range(first, position + 1)]
        own = [keys[page, head, :, slot] for page, slot in places]
        scores = kernel.scale * (np.array(own) @ q[b, i, h])
        if kernel.softcap:
            scores = kernel.softcap * np.tanh(scores / kernel.softcap)
        weights = np.exp(scores - scores.max())
        result[b, i, h] = weights / weights.sum() @ np.array([values[page, head, slot] for page, slot in places])
    return result


# -- values -----------------------------------------------------------------------------------------------------------
KERNELS = (
    a_kernel(head_dim=16, mask="causal"),
    a_kernel(head_dim=20, value_dim=33, group=3, mask="causal"),
    a_kernel(head_dim=32, group=2, mask="sliding", window=70),
    a_kernel(head_dim=64, group=4, mask="causal"),
    a_kernel(head_dim=64, mask="sliding", window=1),
    a_kernel(head_dim=80, mask="causal", softcap=5.0),
    a_kernel(head_dim=128, value_dim=64, group=8, mask="sliding", window=20),
    a_kernel(head_dim=5, value_dim=18, group=128, mask="causal"),
    a_kernel(head_dim=16, mask="causal", scale=-0.7),
    a_kernel(F64, 20, 33, 2, "causal"),
    a_kernel(F16, 64, mask="causal"),
    a_kernel(BF16, 18, 17, 3, "sliding", window=40),
)
MIXED = ((F32, F16), (F32, BF16), (F16, F32), (BF16, F16))  # queries and results, cache
POSITIONS = (
    ((0,),),
    ((63,), (64,)),  # one token, two lengths
    ((-1,), (127,), (7,)),
    (tuple(range(66)),),  # a prompt
    (tuple(range(40, 61)), tuple(range(100, 121))),  # chunks of it
    ((3, 4, 5, 6, -1, -1, -1), (-1, -1, 90, 91, 92, 93, 94)),  # padding at the end and at the start
    ((50, 2, -1, 2, 130, 64, 63, -7, 0, 129, 20, 21, 22), tuple(range(12, -1, -1))),  # any order
    ((-1, -1, -1), (-3, -2, -1)),
)


def cached_name(kernel: AttentionKernel) -> str:
    return f"{name_of(kernel)}-{kernel.cache_dtype or kernel.dtype}"


@EVERY_TARGET
@pytest.mark.parametrize(
    "kernel", [over_cache(k) for k in KERNELS] + [over_cache(a_kernel(q, 20, 32, 2, "causal"), c) for q, c in MIXED],
    ids=cached_name,
)  # fmt: skip
def test_values_are_those_of_the_definition(kernel: AttentionKernel, target: Target) -> None:
    run = compiled_cached(kernel, target)
    for positions in POSITIONS:
        operands = filled(kernel, positions, kv_heads=1 if kernel.group > 4 else 2)
        assert_close(run(operands), reference(kernel, operands), kernel.dtype)


@EVERY_TARGET
def test_layouts_are_strides(target: Target) -> None:
    """Some slots of a larger cache, positions that are columns of a table, results with something between."""
    kernel = over_cache(a_kernel(head_dim=18, value_dim=32, group=2, mask="causal"))
    run, plain = compiled_cached(kernel, target), filled(kernel, ((3, 70, -1), (9, 8, 100)))
    expected = run(plain)

    def inside(array: Array) -> Array:
        larger = spoiled(*(2 * d for d in array.shape[:2]), *array.shape[2:], dtype=array.dtype)
        larger[1::2, 1::2] = array
        return larger[1::2, 1::2]

    wider = np.full((2, 10), 10**6, np.int32)
    wider[:, 4:7] = plain.positions
    pages = np.full((4, 7), 10**6, np.int32)
    pages[1:3, 1 : 1 + plain.table.shape[1]] = plain.table
    table = pages[1:3, 1 : 1 + plain.table.shape[1]]
    wide = np.full((2, 3, 7, 40), 7, np.float32)
    operands = Cached(inside(plain.q), inside(plain.keys), inside(plain.values), wider[:, 4:7], table)
    assert_same_bits(run(operands, out=wide[:, :, 1:5, 3:35]), expected)
    wide[:, :, 1:5, 3:35] = 7
    assert (wide == 7).all()


# -- bits -------------------------------------------------------------------------------------------------------------
@EVERY_TARGET
@pytest.mark.parametrize("kernel", KERNELS, ids=name_of)
def test_a_cache_gives_the_bits_of_plain_keys_whatever_the_chunks(kernel: AttentionKernel, target: Target) -> None:
    length = 150
    prompt = random(kernel, length, length, kv_heads=1 if kernel.group > 4 else 2)
    expected, run = compiled(kernel, target)(prompt), compiled_cached(over_cache(kernel), target)
    whole = cached(kernel, prompt, capacity=200)
    for size in (1, 7, 64, length):
        chunks = []
        for begin in range(0, length, size):
            end = min(begin + size, length)
            # Only the keys up to the chunk's end have been stored so far.
            past = cached(kernel, Operands(prompt.q[:, :end], prompt.k[:, :end], prompt.v[:, :end]), capacity=200)
            chunks.append(run(past.rows(slice(begin, end))))
        assert_same_bits(np.concatenate(chunks, axis=1), expected)
    assert_same_bits(run(whole), expected)


@EVERY_TARGET
@pytest.mark.parametrize(("dtype", "cache_dtype"), MIXED, ids=str)
def test_a_cache_of_another_type_gives_the_bits_of_rounded_keys(
    dtype: DType, cache_dtype: DType, target: Target
) -> None:
    kernel = a_kernel(dtype, 64, 80, 2, "causal")
    prompt = random(kernel, 100, 100, batch=2)
    k, v = (x.astype(cache_dtype.numpy).astype(np.float32) for x in (prompt.k, prompt.v))
    wide = compiled(replace(kernel, dtype=F32), target)(Operands(prompt.q.astype(np.float32), k, v))
    narrow = over_cache(kernel, cache_dtype)
    run, operands = compiled_cached(narrow, target), cached(narrow, prompt)
    expected = wide.astype(dtype.numpy)
    assert_same_bits(run(operands), expected)
    steps = [run(operands.rows(slice(i, i + 1))) for i in range(100)]
    assert_same_bits(np.concatenate(steps, axis=1), expected)


@EVERY_TARGET
@pytest.mark.parametrize("mask", ("causal", "sliding"))
def test_the_order_of_rows_does_not_matter(mask: str, target: Target) -> None:
    kernel = over_cache(a_kernel(head_dim=20, value_dim=16, group=3, mask=mask))
    run, rng = compiled_cached(kernel, target), np.random.default_rng(3)
    operands = filled(kernel, (range(120), range(7, 127)))
    expected = run(operands)
    for _ in range(3):
        order = rng.permutation(120)
        assert_same_bits(run(operands.rows(order)), expected[:, order])
    some = np.sort(rng.choice(120, 50, replace=False))  # in order, but with gaps
    assert_same_bits(run(operands.rows(some)), expected[:, some])


@EVERY_TARGET
@pytest.mark.parametrize("mask", ("causal", "sliding"))
def test_bits_depend_on_neither_units_nor_neighbours(mask: str, target: Target) -> None:
    kernel = over_cache(a_kernel(head_dim=20, value_dim=16, group=5, mask=mask))
    run = compiled_cached(kernel, target)
    operands = filled(kernel, (range(45), range(80, 125), [*range(30), *[-1] * 15]))
    whole, units = run(operands), run.units(operands)
    assert_same_bits(run(operands, calls=[(i, i + 1) for i in reversed(range(units))]), whole)
    assert_same_bits(run(operands, calls=[(0, 5), (5, units)]), whole)
    for i in range(3):
        own = slice(i, i + 1)
        alone = Cached(operands.q[own], operands.keys, operands.values, operands.positions[own], operands.table[own])
        assert_same_bits(run(alone), whole[own])


# -- padding and what a row must not see ------------------------------------------------------------------------------
@EVERY_TARGET
def test_padding_is_zeros_and_changes_nothing_else(target: Target) -> None:
    kernel = over_cache(a_kernel(head_dim=20, value_dim=33, group=2, mask="causal"))
    run, rng = compiled_cached(kernel, target), np.random.default_rng(5)
    operands = filled(kernel, (range(130),))
    expected = run(operands)
    for share in (0.1, 0.5, 0.95):
        padding = rng.random(130) < share
        positions = np.where(padding, -1 - rng.integers(0, 2**31, 130), operands.positions).astype(np.int32)
        found = run(replace(operands, positions=positions))
        assert_same_bits(found[:, ~padding], expected[:, ~padding])
        assert_same_bits(found[:, padding], np.zeros_like(found[:, padding]))


@EVERY_TARGET
def test_a_unit_of_padding_reads_nothing(target: Target) -> None:
    kernel = over_cache(a_kernel(head_dim=20, value_dim=33, group=2, mask="causal"))
    operands = filled(kernel, ((5,) * 7,), kv_heads=1)
    nowhere = guarded(0, at_end=True)  # the next byte may not be touched
    q, keys, values = (
        np.lib.stride_tricks.as_strided(nowhere.view(np.float32), x.shape, x.strides)
        for x in (operands.q, operands.keys, operands.values)
    )
    table = np.lib.stride_tricks.as_strided(nowhere.view(np.int32), (1, 1), (4, 4))
    found = compiled_cached(kernel, target)(Cached(q, keys, values, np.full((1, 7), -1, np.int32), table))
    assert_same_bits(found, np.zeros_like(found))


@EVERY_TARGET
@pytest.mark.parametrize("cache_dtype", (F32, F16), ids=str)
@pytest.mark.parametrize("mask", ("causal", "sliding"))
def test_rows_do_not_notice_inf_and_nan_outside_their_range(mask: str, cache_dtype: DType, target: Target) -> None:
    kernel = over_cache(a_kernel(head_dim=18, value_dim=32, group=2, mask=mask), cache_dtype)
    run = compiled_cached(kernel, target)
    clean = filled(kernel, (range(140),))
    expected = run(clean)
    for first, last in ((0, 1), (70, 71), (63, 65), (10, 128)):
        dirty = replace(clean, keys=clean.keys.copy(), values=clean.values.copy())
        for p in range(first, last):
            page = dirty.table[0, p // 64]
            for place in (dirty.keys[page, :, :, p % 64], dirty.values[page, :, p % 64]):
                place[...] = spoiled(*place.shape, dtype=place.dtype)
        found = run(dirty)
        assert_same_bits(found[:, :first], expected[:, :first])
        if mask == "sliding":
            after = last + kernel.window - 1
            assert_same_bits(found[:, after:], expected[:, after:])
        assert np.isnan(found[:, first : last + 10]).all()


# -- bounds -----------------------------------------------------------------------------------------------------------
@EVERY_TARGET
@pytest.mark.parametrize("at_end", (True, False), ids=("end", "start"))
@pytest.mark.parametrize(
    "kernel",
    (
        over_cache(a_kernel(head_dim=20, value_dim=33, group=2, mask="causal")),
        over_cache(a_kernel(head_dim=64, mask="sliding")),
        over_cache(a_kernel(head_dim=7, value_dim=64, mask="causal"), F16),
        over_cache(a_kernel(head_dim=64, value_dim=18, mask="causal"), BF16),
        over_cache(a_kernel(F64, 5, 3, mask="causal")),
        over_cache(a_kernel(F16, 18, 17, mask="sliding")),
    ),
    ids=cached_name,
)  # fmt: skip
def test_nothing_outside_a_buffer_is_touched(kernel: AttentionKernel, at_end: bool, target: Target) -> None:
    run = compiled_cached(kernel, target)
    for positions in (((0,),), ((16,), (3,)), ((60, 61, 62, 63),), ((-1, 126, 4),), (range(65),)):
        plain = filled(kernel, positions, room=0)
        expected = run(plain)
        operands = plain.q, plain.keys, plain.values, plain.positions, plain.table
        arrays = (guarded_copy(x, at_end=at_end) for x in operands)
        out = guarded_copy(np.zeros_like(expected), at_end=at_end)
        assert_same_bits(run(Cached(*arrays), out=out), expected)


@EVERY_TARGET
@pytest.mark.parametrize("at_end", (True, False), ids=("end", "start"))
def test_nothing_outside_a_packed_cache_is_touched(at_end: bool, target: Target) -> None:
    """Nor outside a ring, of which all blocks are read: it gives what a cache of all positions gives."""
    kernel = over_cache(a_kernel(head_dim=64, value_dim=96, group=3, mask="sliding", window=50), Q8)
    rng, q = np.random.default_rng(7), random(kernel, 5, 5, kv_heads=2).q
    keys, values = (np.zeros(shape, Q8.numpy) for shape in ((3, 2, 64, 2), (3, 2, 64, 3)))
    for x in (keys, values):
        x["d"], x["qs"] = rng.uniform(0, 0.01, x.shape), rng.integers(-127, 128, x["qs"].shape)
    ring_keys, ring_values = keys[[2]], values[[2]]  # one page: positions 128 .. 192
    tables = np.arange(3, dtype=np.int32)[None], np.zeros((1, 1), np.int32)
    whole, ring = compiled_cached(kernel, target), compiled_cached(replace(kernel, ring=True), target)
    for first in (177, 187):
        positions = np.arange(first, first + 5, dtype=np.int32)[None]
        arrays = (guarded_copy(np.ascontiguousarray(x), at_end=at_end) for x in (q, keys, values, positions, tables[0]))
        expected = whole(Cached(*arrays))
        assert np.isfinite(expected).all() and expected.any()
        operands = q, ring_keys, ring_values, positions, tables[1]
        arrays = (guarded_copy(np.ascontiguousarray(x), at_end=at_end) for x in operands)
        assert_same_bits(ring(Cached(*arrays)), expected)


@EVERY_TARGET
def test_a_position_beyond_the_capacity_is_a_fault(target: Target) -> None:
    """It goes to the status word, and nothing is read there: with `room=0`, guard pages lie after the caches."""
    kernel = over_cache(a_kernel(head_dim=20, value_dim=16, group=2, mask="causal"))
    run, good = compiled_cached(kernel, target), filled(kernel, ((99, 3, 50),), room=0)
    expected = run(good)
    keys, values = (guarded_copy(x, at_end=True) for x in (good.keys, good.values))
    for bad in (128, 200, 2**31 - 1):
        operands = Cached(good.q, keys, values, np.array([[99, bad, 50]], np.int32), good.table)
        out, status = run_with_status(run, operands)
        assert status == BEYOND_CAPACITY
        assert_same_bits(out[:, [0, 2]], expected[:, [0, 2]])
        assert not out[:, 1].any()


def run_with_status(run: CompiledCached, operands: Cached) -> tuple[Array, int]:
    """The result and the fault code."""
    out = np.full((*operands.q.shape[:3], run.kernel.value_dim), 7, np.float32)
    words, scratch = run.words(operands, out), run.scratch()
    scratch[:64] = 0
    run.function(words.ctypes.data, 0, run.units(operands), scratch.ctypes.data)
    assert not scratch[8:64].any()
    return out, int(scratch[:8].view(np.int64)[0])


@EVERY_TARGET
@pytest.mark.parametrize("cache_dtype", (F32, F16), ids=str)
def test_a_page_outside_the_pool_is_a_fault_for_those_who_see_it(cache_dtype: DType, target: Target) -> None:
    """Guard pages lie around the pools."""
    kernel = over_cache(a_kernel(head_dim=20, value_dim=16, group=2, mask="causal"), cache_dtype)
    run, good = compiled_cached(kernel, target), filled(kernel, ((3,), (127,)), room=0)
    expected = run(good)
    keys, values = (guarded_copy(x, at_end=True) for x in (good.keys, good.values))
    for bad in (4, 2**31 - 1, -1, -(2**31)):
        table = good.table.copy()
        table[0, 1] = bad  # which the token at position 3 does not see
        out, status = run_with_status(run, replace(good, keys=keys, values=values, table=table))
        assert status == 0
        assert_same_bits(out, expected)
        table[1, 0] = bad
        out, status = run_with_status(run, replace(good, keys=keys, values=values, table=table))
        assert status == OUTSIDE_POOL
        assert_same_bits(out[0], expected[0])


@EVERY_TARGET
@pytest.mark.parametrize("cache_dtype", (F32, F16, BF16, Q8), ids=str)
def test_objects_call_nothing(cache_dtype: DType, target: Target) -> None:
    sizes = (32, 96) if cache_dtype is Q8 else (20, 33)
    kernel = replace(over_cache(a_kernel(F32, *sizes, 2, "sliding", softcap=2.0), cache_dtype), ring=True)
    entry = attention.entry(kernel, target)
    assert set(toolchain.undefined_symbols(object_of([entry.routine], target))) <= {"memset"}


# -- the plan ---------------------------------------------------------------------------------------------------------
def test_plain_caches_are_read_where_they_lie() -> None:
    """No room in scratch for a block of keys or values, unless they are widened or padded."""
    plain = attention.Plan(over_cache(a_kernel(head_dim=64, mask="causal")), AVX512).regions
    assert plain["keys"] == plain["values"] == plain["scores"]
    wide = attention.Plan(over_cache(a_kernel(head_dim=64, mask="causal"), F16), AVX512).regions
    assert wide["values"] - wide["keys"] == wide["scores"] - wide["values"] == 64 * 64 * 4


def test_a_cache_makes_another_kernel() -> None:
    kernel = a_kernel(head_dim=64, mask="causal")
    kernels = (kernel, over_cache(kernel), over_cache(kernel, F16))
    assert len({k.fingerprint for k in kernels}) == 3
    assert "positions" in over_cache(kernel).words and "positions" not in kernel.words
    assert "cache of f16" in over_cache(kernel, F16).text()


@pytest.mark.parametrize(
    ("kernel", "message"),
    (
        (over_cache(a_kernel()), "a cache goes with masks causal, sliding, not 'none'"),
        (over_cache(a_kernel(mask="bias")), "not 'bias'"),
        (over_cache(a_kernel(mask="causal"), F64), "queries of f32 over a cache of f64"),
        (over_cache(a_kernel(mask="causal"), I32), "queries of f32 over a cache of i32"),
        (replace(a_kernel(), cache_dtype=F16), "without a cache, there is none of f16"),
        (over_cache(a_kernel(F64, mask="causal"), Q8), "queries of f64 over a cache of q8_0"),
        (over_cache(a_kernel(mask="causal"), BY_NAME["q4_0"]), "queries of f32 over a cache of q4_0"),
        (over_cache(a_kernel(head_dim=80, mask="causal"), Q8), "heads of 80 and 80 are no whole blocks"),
        (replace(a_kernel(mask="causal"), page=16), "a cache has pages of 64 positions, not of 16"),
        (replace(over_cache(a_kernel(mask="causal")), ring=True), "a sliding window, not with mask 'causal'"),
    ),
)
def test_kernels_that_cannot_be_are_refused(kernel: AttentionKernel, message: str) -> None:
    with pytest.raises(LowerError, match=message):
        attention.entry(kernel, AVX512)

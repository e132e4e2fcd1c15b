"""The KV cache: appending and attending step by step, in place, against the plain attention op and NumPy."""

from __future__ import annotations

import functools
import math
from typing import Any

import gguf
import numpy as np
import pytest
from oracles import NUMPY, Array
from targets import widths

import rlx
from rlx.errors import DTypeError, GraphError, KernelError, LowerError, ShapeError
from rlx.lir.kernels import AttentionKernel

TARGETS = [t.name for t in widths()]
BEST = TARGETS[0]
EVERY_TARGET = pytest.mark.parametrize("target", TARGETS)
EVERY_PLACE = pytest.mark.parametrize("place", ["reference", *TARGETS])
CAPACITY = 192


def compiled(graph: rlx.Graph, place: str, **options: Any) -> Any:
    return rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place, **options)


def step_graph(
    heads: int, kv_heads: int, dim: int, dtype: str = "f32", mask_kind: str = "causal", batch: Any = "batch"
) -> rlx.Graph:
    """One step of a model's attention: new keys and values are appended, then queries look at the cache."""
    graph = rlx.Graph("step")
    q = graph.input("q", (batch, "seq", heads, dim))
    k, v = (graph.input(n, (batch, "seq", kv_heads, dim)) for n in "kv")
    positions = graph.input("positions", (batch, "seq"), "i32")
    table = graph.input("table", (batch, "blocks"), "i32")
    keys = graph.state("keys", ("pages", kv_heads, dim, 64), dtype)
    values = graph.state("values", ("pages", kv_heads, 64, dim), dtype)
    keys = graph.kv_append(keys, k, positions, table, axes="phds")
    values = graph.kv_append(values, v, positions, table)
    how = {"mask_kind": mask_kind, "key_axes": "phds"}
    return graph.set_outputs(graph.cached_attention(q, keys, values, positions, table, **how))


@functools.cache
def step(*shape: Any, place: str = BEST, threads: int | None = None) -> Any:
    options = {} if threads is None else {"threads": threads}
    return compiled(step_graph(*shape), place, **options)


@functools.cache
def plain(heads: int, kv_heads: int, dim: int, mask_kind: str, place: str) -> Any:
    graph = rlx.Graph("plain")
    q = graph.input("q", ("batch", "seq", heads, dim))
    k, v = (graph.input(n, ("batch", "seq", kv_heads, dim)) for n in "kv")
    return compiled(graph.set_outputs(graph.attention(q, k, v, mask_kind=mask_kind)), place)


class Cache:
    """Arrays that the steps write to, full of NaN at first."""

    def __init__(self, batch: int, kv_heads: int, dim: int, dtype: str = "f32") -> None:
        pages = batch * CAPACITY // 64
        self.keys = np.full((pages, kv_heads, dim, 64), np.nan, NUMPY[dtype])
        self.values = np.full((pages, kv_heads, 64, dim), np.nan, NUMPY[dtype])
        self.table = dense(batch, CAPACITY // 64)

    def step(self, run: Any, prompt: dict[str, Array], chunk: Any, positions: Array) -> Array:
        inputs = {name: array[:, chunk] for name, array in prompt.items()}
        cache = {"keys": self.keys, "values": self.values, "table": self.table}
        result: Array = run.run({**inputs, **cache, "positions": positions})[0]
        return result


def dense(rows: int, blocks: int) -> Array:
    """The table of sequences whose pages lie one after the other."""
    return np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)


def a_prompt(batch: int, seq: int, heads: int, kv_heads: int, dim: int) -> dict[str, Array]:
    rng = np.random.default_rng([batch, seq, heads, dim])
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    return {n: rng.standard_normal((batch, seq, h, dim)).astype(np.float32) for n, h in sizes.items()}


def at(begin: int, end: int, batch: int = 1) -> Array:
    return np.tile(np.arange(begin, end, dtype=np.int32), (batch, 1))


def assert_same_bits(actual: Array, expected: Array) -> None:
    assert np.ascontiguousarray(actual).tobytes() == np.ascontiguousarray(expected).tobytes()


# -- step by step -----------------------------------------------------------------------------------------------------
@EVERY_TARGET
@pytest.mark.parametrize("mask_kind", ("causal", "sliding(50)"))
@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"), ((4, 4, 16), (6, 2, 20), (2, 1, 32), (3, 3, 64), (2, 2, 80), (8, 2, 128))
)
def test_steps_of_any_size_have_the_bits_of_plain_attention(
    heads: int, kv_heads: int, dim: int, mask_kind: str, target: str
) -> None:
    length = 130
    prompt = a_prompt(1, length, heads, kv_heads, dim)
    expected = plain(heads, kv_heads, dim, mask_kind, target).run(prompt)[0]
    run = step(heads, kv_heads, dim, "f32", mask_kind, place=target)
    for size in (1, 7, 64, length):
        cache = Cache(1, kv_heads, dim)
        chunks = [(i, min(i + size, length)) for i in range(0, length, size)]
        actual = [cache.step(run, prompt, slice(*chunk), at(*chunk)) for chunk in chunks]
        assert_same_bits(np.concatenate(actual, axis=1), expected)


@EVERY_TARGET
def test_a_batch_of_unequal_prompts_has_the_bits_of_each_alone(target: str) -> None:
    """Prompts are padded at the end, then every row goes on from where its own prompt ended."""
    lengths, heads, kv_heads, dim, more = (70, 1, 33, 64), 4, 2, 20, 5
    prompt = a_prompt(4, 80, heads, kv_heads, dim)
    run, cache = step(heads, kv_heads, dim, place=target), Cache(4, kv_heads, dim)
    positions = np.where(at(0, 70, 4) < np.array(lengths)[:, None], at(0, 70, 4), -1).astype(np.int32)
    first = cache.step(run, prompt, slice(0, 70), positions)
    later = []
    for i in range(more):
        now = np.array([[n + i] for n in lengths], np.int32)
        token = {name: np.take_along_axis(x, now[:, :, None, None], 1) for name, x in prompt.items()}
        later.append(cache.step(run, token, slice(None), now))
    for b, n in enumerate(lengths):
        own = {name: x[b : b + 1, : n + more] for name, x in prompt.items()}
        actual = np.concatenate([first[b : b + 1, :n], *(x[b : b + 1] for x in later)], axis=1)
        assert_same_bits(actual, plain(heads, kv_heads, dim, "causal", target).run(own)[0])
        assert not first[b, n:].any()


@EVERY_TARGET
def test_a_cache_of_f16_gives_prefill_and_decode_the_same_bits(target: str) -> None:
    heads, kv_heads, dim, length = 4, 2, 64, 100
    prompt = a_prompt(1, length, heads, kv_heads, dim)
    run = step(heads, kv_heads, dim, "f16", place=target)
    full = Cache(1, kv_heads, dim, "f16").step(run, prompt, slice(None), at(0, length))
    cache = Cache(1, kv_heads, dim, "f16")
    tokens = [cache.step(run, prompt, slice(i, i + 1), at(i, i + 1)) for i in range(length)]
    assert_same_bits(np.concatenate(tokens, axis=1), full)
    rounded = {n: x if n == "q" else x.astype(np.float16).astype(np.float32) for n, x in prompt.items()}
    assert_same_bits(full, plain(heads, kv_heads, dim, "causal", target).run(rounded)[0])


@pytest.mark.usefixtures("many_cores")
@EVERY_TARGET
def test_the_number_of_threads_changes_nothing(target: str) -> None:
    heads, kv_heads, dim, length = 6, 3, 64, 190
    prompt, results = a_prompt(2, length, heads, kv_heads, dim), []
    for threads in (1, 2, 3):
        run, cache = step(heads, kv_heads, dim, place=target, threads=threads), Cache(2, kv_heads, dim)
        results.append((cache.step(run, prompt, slice(None), at(0, length, 2)), cache.keys, cache.values))
    for result in results[1:]:
        for actual, expected in zip(result, results[0], strict=True):
            assert_same_bits(actual, expected)


@EVERY_TARGET
def test_the_reference_agrees(target: str) -> None:
    heads, kv_heads, dim = 4, 2, 20
    prompt = a_prompt(2, 9, heads, kv_heads, dim)
    positions = np.array([[5, 6, 7, 8, -1, 0, 1, 2, 3], [100, 0, 50, -1, -1, 99, 100, 2, 191]], np.int32)
    results = []
    for place in ("reference", target):
        cache = Cache(2, kv_heads, dim)
        for array in (cache.keys, cache.values):
            array[...] = np.sin(np.arange(array.size)).reshape(array.shape)
        results.append(cache.step(step(heads, kv_heads, dim, place=place), prompt, slice(None), positions))
    np.testing.assert_allclose(results[1], results[0], rtol=1e-5, atol=1e-5)


# -- rings ------------------------------------------------------------------------------------------------------------
def ring_graph(window: int, dtype: str = "f32", heads: int = 4, kv_heads: int = 2, dim: int = 32) -> rlx.Graph:
    """A step over a ring."""
    graph = rlx.Graph("ring")
    q = graph.input("q", ("batch", "seq", heads, dim))
    k, v = (graph.input(n, ("batch", "seq", kv_heads, dim)) for n in "kv")
    positions = graph.input("positions", ("batch", "seq"), "i32")
    table, plain = graph.input("table", ("batch", "blocks"), "i32"), dtype != "q8_0"
    shape, axes = (("pages", kv_heads, dim, 64), "phds") if plain else (("pages", kv_heads, 64, dim), "phsd")
    keys = graph.state("keys", shape, dtype).kv_append(k, positions, table, axes=axes, ring=True)
    values = graph.state("values", ("pages", kv_heads, 64, dim), dtype).kv_append(v, positions, table, ring=True)
    how = {"mask_kind": f"sliding({window})", "key_axes": axes, "ring": True}
    return graph.set_outputs(q.cached_attention(keys, values, positions, table, **how))


def a_ring(dtype: str, blocks: int, batch: int = 1, kv_heads: int = 2, dim: int = 32) -> dict[str, Array]:
    pages, table = batch * blocks, {"table": dense(batch, blocks)}
    if dtype == "q8_0":
        return table | {name: spoiled(pages, kv_heads, 64, dim) for name in ("keys", "values")}
    keys = np.full((pages, kv_heads, dim, 64), np.nan, NUMPY[dtype])
    return table | {"keys": keys, "values": np.full((pages, kv_heads, 64, dim), np.nan, NUMPY[dtype])}


def spoiled(*shape: int) -> Array:
    """A packed cache full of NaN."""
    return np.frombuffer(b"\xff" * 34 * (math.prod(shape) // 32), Q8).reshape(*shape[:-1], shape[-1] // 32).copy()


@EVERY_TARGET
@pytest.mark.parametrize("dtype", ("f32", "f16", "q8_0"))
def test_a_ring_gives_the_bits_of_a_cache_of_everything(dtype: str, target: str) -> None:
    """However the tokens come, as long as window and chunk fit into it."""
    window, length = 100, 500
    run, prompt = compiled(ring_graph(window, dtype), target), a_prompt(1, length, 4, 2, 32)
    expected = run.run({**prompt, **a_ring(dtype, 8), "positions": at(0, length)})[0]
    for size in (1, 29, 92):
        ring, actual = a_ring(dtype, 3), []
        for i in range(0, length, size):
            chunk = slice(i, min(i + size, length))
            tokens = {n: x[:, chunk] for n, x in prompt.items()}
            actual.append(run.run({**tokens, **ring, "positions": at(chunk.start, chunk.stop)})[0])
        assert_same_bits(np.concatenate(actual, axis=1), expected)


@EVERY_PLACE
def test_a_ring_says_when_it_is_too_small(place: str) -> None:
    """From the oldest key that is seen to the newest query there are 128 positions at most."""
    run = compiled(ring_graph(window=100), place)
    prompt = a_prompt(2, 40, 4, 2, 32)

    def attend(*positions: int) -> None:
        rows = np.full((2, 40), -1, np.int32)
        rows[1, [0, 36, *range(37, 37 + len(positions) - 2)]] = positions
        run.run({**prompt, **a_ring("f32", 2, batch=2), "positions": rows})

    attend(1000, 1028)
    attend(0, 127)
    attend(2**31 - 29, 2**31 - 1)
    for bad in ((1000, 1029), (1029, 1000), (0, 128), (5, 2**31 - 1), (1010, 1012, 1039, 1011)):
        with pytest.raises(KernelError, match=r"attention"):
            attend(*bad)
    with pytest.raises(KernelError):
        run.run({**prompt, **a_ring("f32", 0, batch=2), "positions": at(0, 40, 2)})
    nothing = run.run({**prompt, **a_ring("f32", 0, batch=2), "positions": np.full((2, 40), -1, np.int32)})[0]
    assert not nothing.any()


# -- packed caches ----------------------------------------------------------------------------------------------------
Q8 = np.dtype([("d", "<f2"), ("qs", "i1", 32)])


def quantised(x: Array) -> Array:
    """By the `gguf` package: [..., dim] as blocks."""
    result: Array = gguf.quants.quantize(x, gguf.GGMLQuantizationType.Q8_0).view(Q8)
    return result


def dequantised(blocks: Array) -> Array:
    numbers: Array = gguf.quants.dequantize(blocks.view(np.uint8), gguf.GGMLQuantizationType.Q8_0)
    return numbers


def packed_step_graph(heads: int, kv_heads: int, dim: int, value_dim: int, mask_kind: str) -> rlx.Graph:
    graph = rlx.Graph("packed")
    q, k = graph.input("q", ("batch", "seq", heads, dim)), graph.input("k", ("batch", "seq", kv_heads, dim))
    v = graph.input("v", ("batch", "seq", kv_heads, value_dim))
    positions = graph.input("positions", ("batch", "seq"), "i32")
    table = graph.input("table", ("batch", 4), "i32")
    keys = graph.state("keys", ("pages", kv_heads, 64, dim), "q8_0").kv_append(k, positions, table)
    values = graph.state("values", ("pages", kv_heads, 64, value_dim), "q8_0").kv_append(v, positions, table)
    return graph.set_outputs(q.cached_attention(keys, values, positions, table, mask_kind=mask_kind))


@EVERY_PLACE
def test_packed_rows_are_those_of_gguf(place: str) -> None:
    """Among them blocks of zeros, of equal numbers, numbers that lie half way, and tiny ones."""
    rng = np.random.default_rng(5)
    new = rng.standard_normal((2, 6, 3, 96)).astype(np.float32) * 10.0 ** rng.integers(-6, 4, (2, 6, 3, 1))
    new[0, 0], new[0, 1, :, :32] = 0, 7
    new[0, 2] = np.tile(np.arange(-15.5, 16.5), 3)
    new[0, 2, :, ::32] = 127
    graph = rlx.Graph("append")
    shape = (4, 3, 64, 96)
    state, tokens = graph.state("cache", shape, "q8_0"), graph.input("new", (2, 6, 3, 96))
    positions = graph.input("positions", (2, 6), "i32")
    appended = state.kv_append(tokens, positions, graph.constant(dense(2, 2)))
    run = compiled(graph.set_outputs([appended, appended.dequantise()]), place)
    where = np.array([[0, 1, 2, 5, -1, 127], [9, 9, -4, 64, 63, 100]], np.int32)
    cache = np.zeros((4, 3, 64, 3), Q8)
    cache["d"], cache["qs"] = 3, rng.integers(-128, 128, (4, 3, 64, 3, 32))
    expected = cache.copy()
    for b, s in np.ndindex(2, 6):
        if where[b, s] >= 0:
            block, slot = divmod(where[b, s], 64)
            expected[2 * b + block, :, slot] = quantised(new[b, s].astype(np.float32))
    blocks, actual = run.run({"cache": cache, "new": new.astype(np.float32), "positions": where})
    assert blocks.shape == cache.shape and actual.shape == shape
    assert_same_bits(blocks, expected)
    assert_same_bits(actual, dequantised(expected))
    if place != "reference":
        assert_same_bits(cache, expected)


@EVERY_PLACE
@pytest.mark.parametrize("mask_kind", ("causal", "sliding(70)"))
@pytest.mark.parametrize("sizes", ((4, 2, 64, 64), (3, 1, 32, 96), (8, 1, 128, 128), (2, 2, 96, 32)))
def test_attention_reads_a_packed_cache(sizes: tuple[int, int, int, int], mask_kind: str, place: str) -> None:
    """As NumPy does in f64, over what the blocks stand for; in one go and token by token, with the same bits."""
    heads, kv_heads, dim, value_dim = sizes
    rng, length = np.random.default_rng(6), 150
    q = rng.standard_normal((1, length, heads, dim)).astype(np.float32)
    k, v = (rng.standard_normal((1, length, kv_heads, d)).astype(np.float32) for d in (dim, value_dim))
    run = compiled(packed_step_graph(heads, kv_heads, dim, value_dim, mask_kind), place)

    def cache() -> dict[str, Array]:
        pools = {"keys": spoiled(5, kv_heads, 64, dim), "values": spoiled(5, kv_heads, 64, value_dim)}
        return pools | {"table": np.array([[3, 1, 4, 0]], np.int32)}

    full = run.run({"q": q, "k": k, "v": v, **cache(), "positions": at(0, length)})[0]
    k64, v64 = (np.repeat(dequantised(quantised(x)), heads // kv_heads, axis=2) for x in (k, v))
    scores = np.einsum("bqhd,bkhd->bhqk", q.astype(np.float64), k64) / math.sqrt(dim)
    rows, keys = np.ogrid[:length, :length]
    seen = (keys <= rows) & (keys > rows - (70 if "70" in mask_kind else length))
    weights = np.where(seen, np.exp(scores), 0)
    expected = np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), v64)
    np.testing.assert_allclose(full, expected, rtol=2e-5, atol=2e-5)
    if place != "reference":
        states, steps = cache(), []
        for i in range(length):
            token = {name: x[:, i : i + 1] for name, x in (("q", q), ("k", k), ("v", v))}
            steps.append(run.run({**token, **states, "positions": at(i, i + 1)})[0])
        assert_same_bits(np.concatenate(steps, axis=1), full)


@EVERY_PLACE
def test_nan_and_inf_do_not_get_lost_in_a_packed_cache(place: str) -> None:
    graph = rlx.Graph("append")
    state, tokens = graph.state("cache", (1, 1, 64, 32), "q8_0"), graph.input("new", (1, 2, 1, 32))
    positions = graph.constant(np.array([[0, 1]], np.int32))
    appended = state.kv_append(tokens, positions, graph.constant(dense(1, 1)))
    run = compiled(graph.set_outputs(appended.dequantise()), place)
    new = np.ones((1, 2, 1, 32), np.float32)
    new[0, 0, 0, 3], new[0, 1, 0, 4] = np.nan, np.inf
    actual = run.run({"cache": np.zeros((1, 1, 64, 1), Q8), "new": new})[0]
    assert np.isnan(actual[0, 0, 0, 3]) and np.isnan(actual[0, 0, 1, 4]) and not actual[0, 0, 2:].any()


# -- appending --------------------------------------------------------------------------------------------------------
def append_graph(kind: str, dtype: str = "f32", new: str = "f32", index: str = "i32", leaf: str = "state") -> rlx.Graph:
    graph = rlx.Graph("append")
    shape: tuple[Any, ...] = ("pages", 2, 20, 64) if kind == "keys" else ("pages", 2, 64, 20)
    cache = getattr(graph, leaf)("cache", shape, dtype)
    tokens = graph.input("new", ("batch", "seq", 2, 20), new)
    positions, table = (
        graph.input("positions", ("batch", "seq"), index),
        graph.input("table", ("batch", "blocks"), "i32"),
    )
    return graph.set_outputs(
        graph.kv_append(cache, tokens, positions, table, axes="phds" if kind == "keys" else "phsd")
    )


def rows(cache: Array, batch: int) -> Array:
    """A pool of contiguous sequences as [batch, positions, kv_heads, dim]."""
    by_slot = cache.transpose((0, 3, 1, 2) if cache.shape[3] == 64 else (0, 2, 1, 3))
    return by_slot.reshape(batch, -1, *by_slot.shape[2:])


def empty(kind: str, batch: int, positions: int, dtype: str = "f32") -> Array:
    pages = batch * positions // 64
    return np.full((pages, 2, 20, 64) if kind == "keys" else (pages, 2, 64, 20), 7, NUMPY[dtype])


@EVERY_PLACE
@pytest.mark.parametrize("kind", ("keys", "values"))
@pytest.mark.parametrize(
    ("dtype", "new"), (("f32", "f32"), ("f16", "f32"), ("bf16", "f16"), ("f16", "f64"), ("f64", "f32"))
)
def test_tokens_lie_at_their_positions(dtype: str, new: str, kind: str, place: str) -> None:
    run = compiled(append_graph(kind, dtype, new), place)
    positions = np.array([[3, 127, -1, 64, 0], [-5, 63, 62, 63, 100]], np.int32)
    tokens = np.random.default_rng(1).standard_normal((2, 5, 2, 20)).astype(NUMPY[new])
    cache = empty(kind, 2, 128, dtype)
    (actual,) = run.run({"cache": cache, "new": tokens, "positions": positions, "table": dense(2, 2)})
    expected = np.full((2, 128, 2, 20), 7, NUMPY[dtype])
    for b, s in np.ndindex(2, 5):
        if positions[b, s] >= 0:
            expected[b, positions[b, s]] = tokens[b, s].astype(NUMPY[dtype])  # of two at 63 the last one
    assert_same_bits(rows(actual, 2), expected)


@EVERY_PLACE
@pytest.mark.parametrize("index", ("i64", "i8", "u8", "u32"))
def test_positions_may_be_of_any_integer_type(index: str, place: str) -> None:
    """Also of those that hold numbers far beyond what a cache can have."""
    graph = append_graph("keys", index=index)
    positions = graph.named("positions")
    q, values = graph.input("q", ("batch", "seq", 2, 20)), graph.input("values", ("pages", 2, 64, 20))
    table = graph.named("table")
    attended = graph.cached_attention(q, graph.outputs[0], values, positions, table, key_axes="phds")
    run = compiled(graph.set_outputs(attended), place)
    arrays = {"q": np.ones((1, 2, 2, 20), np.float32), "new": np.ones((1, 2, 2, 20), np.float32)}
    arrays |= {"cache": empty("keys", 1, 128), "values": empty("values", 1, 128), "table": dense(1, 2)}
    actual = run.run({**arrays, "positions": np.array([[0, 100]], NUMPY[index])})[0]
    np.testing.assert_allclose(actual, 7, rtol=1e-6)
    for bad in {"i64": (2**32, 2**63 - 1), "u32": (2**31, 2**32 - 1)}.get(index, ()):
        with pytest.raises(KernelError):
            run.run({**arrays, "positions": np.array([[0, bad]], NUMPY[index])})
    if index == "i64":
        actual = run.run({**arrays, "positions": np.array([[-(2**63), -(2**32)]], np.int64)})[0]
        assert not actual.any()


@EVERY_TARGET
@pytest.mark.parametrize("kind", ("keys", "values"))
def test_a_state_is_written_in_place_and_an_input_is_not(kind: str, target: str) -> None:
    tokens, positions = np.arange(80, dtype=np.float32).reshape(1, 2, 2, 20), np.array([[9, 5]], np.int32)
    for leaf in ("state", "input"):
        run, cache = compiled(append_graph(kind, leaf=leaf), target), empty(kind, 1, 64)
        (actual,) = run.run({"cache": cache, "new": tokens, "positions": positions, "table": dense(1, 1)})
        assert_same_bits(rows(actual, 1)[:, [9, 5]], tokens)
        assert (np.delete(rows(actual, 1), [9, 5], axis=1) == 7).all()
        assert_same_bits(cache, actual if leaf == "state" else empty(kind, 1, 64))


@EVERY_PLACE
@pytest.mark.parametrize("kind", ("keys", "values"))
def test_a_position_beyond_the_capacity_is_an_error(kind: str, place: str) -> None:
    run = compiled(append_graph(kind), place)
    for room, bad in ((128, 128), (64, 100), (64, 2**31 - 1), (0, 0)):
        for where in (0, 20, 36):
            positions = np.full((1, 37), -1, np.int32)
            positions[0, where] = bad
            cache, arrays = empty(kind, 1, room), {"positions": positions, "table": dense(1, room // 64)}
            with pytest.raises(KernelError, match="kv_append"):
                run.run({"cache": cache, "new": np.ones((1, 37, 2, 20), np.float32), **arrays})
            assert (cache == 7).all()


@EVERY_PLACE
@pytest.mark.parametrize("kind", ("keys", "values"))
def test_sizes_may_be_zero(kind: str, place: str) -> None:
    run = compiled(append_graph(kind), place)
    for batch, seq, room in ((0, 3, 64), (2, 0, 64), (2, 3, 0)):
        arrays = {"new": np.ones((batch, seq, 2, 20), np.float32), "positions": np.full((batch, seq), -1, np.int32)}
        arrays["table"] = dense(batch, room // 64)
        (actual,) = run.run({**arrays, "cache": empty(kind, batch, room)})
        assert_same_bits(actual, empty(kind, batch, room))


@EVERY_PLACE
def test_a_query_beyond_the_capacity_is_an_error(place: str) -> None:
    """The blocks of the table count, however many pages there are."""
    graph = rlx.Graph("attend")
    q, positions = graph.input("q", (1, "seq", 2, 16)), graph.input("positions", (1, "seq"), "i32")
    caches = graph.input("keys", ("pages", 1, 16, 64)), graph.input("values", ("pages", 1, 64, 16))
    table = graph.input("table", (1, "blocks"), "i32")
    attended = graph.cached_attention(q, *caches, positions, table, key_axes="phds")
    run = compiled(graph.set_outputs(attended), place)
    for blocks, pages in ((2, 5), (1, 1), (2, 2), (0, 0), (0, 3)):
        room = 64 * blocks
        arrays = {
            "q": np.ones((1, 3, 2, 16), np.float32), "keys": np.ones((pages, 1, 16, 64), np.float32),
            "values": np.ones((pages, 1, 64, 16), np.float32), "table": dense(1, blocks),
        }  # fmt: skip
        good = run.run({**arrays, "positions": np.array([[-1, room - 1, -1]], np.int32)})[0]
        np.testing.assert_allclose(good[:, 1], 1 if room else 0, rtol=1e-6)
        with pytest.raises(KernelError, match=r"attention"):
            run.run({**arrays, "positions": np.array([[-1, room, -1]], np.int32)})


# -- who else has the cache -------------------------------------------------------------------------------------------
@EVERY_TARGET
def test_what_is_read_again_is_copied_first(target: str) -> None:
    """Values are values: an operand that the graph still needs keeps its numbers, also seen through a reshape."""
    graph = rlx.Graph("again")
    cache, new = graph.input("x", (1, 2, 64, 20)) * 2.0, graph.input("new", (1, 1, 2, 20))
    first, second = (graph.constant(np.full((1, 1), p, np.int32)) for p in (3, 4))
    before = cache.reshape(2, 64, 20)
    table = graph.constant(dense(1, 1))
    once = graph.kv_append(cache, new, first, table)
    twice = graph.kv_append(once, new, second, table)
    graph.set_outputs([before.sum(), once.sum(), twice.sum()])
    inputs = np.zeros((1, 2, 64, 20), np.float32)
    sums = rlx.compile(graph, target=target).run({"x": inputs, "new": np.ones((1, 1, 2, 20), np.float32)})
    assert [float(x) for x in sums] == [0, 40, 80]


def test_a_state_cannot_be_read_again_as_it_was() -> None:
    graph = append_graph("values")
    state = graph.named("cache")
    graph.set_outputs([graph.outputs[0], state.sum()])
    with pytest.raises(LowerError, match="the old value of state 'cache' is read later"):
        rlx.compile(graph)
    graph = append_graph("values")
    before = graph.named("cache").sum() * 1.0  # of a state that nothing appends to, or before that, anyone may read
    rlx.compile(graph.set_outputs(before))


def test_weights_and_constants_are_not_written() -> None:
    for leaf in ("param", "constant"):
        graph = rlx.Graph("leaf")
        inputs = np.zeros((1, 2, 64, 20), np.float32)
        cache = graph.param("cache", inputs.shape) if leaf == "param" else graph.constant(inputs)
        new = graph.input("new", (1, 1, 2, 20))
        position = graph.constant(np.full((1, 1), 3, np.int32))
        run = rlx.compile(graph.set_outputs(graph.kv_append(cache, new, position, graph.constant(dense(1, 1)))))
        if leaf == "param":
            run.set_param("cache", inputs)
        for value in (1, 2):
            (actual,) = run.run({"new": np.full((1, 1, 2, 20), value, np.float32)})
            assert actual.sum() == 40 * value
        assert not inputs.any()


def test_a_step_is_two_launches_and_the_same_ones_for_all_sizes() -> None:
    """Keys and values are appended together; nothing is copied, and nothing depends on how long the cache is."""
    graph = step_graph(6, 2, 64)
    run = compiled(graph, BEST)
    executable = run.executable
    assert [x.kernel.kind for x in executable.program.launches] == ["loops", "attention"]
    assert executable.program.launches[0].barrier
    kernel = executable.program.launches[1].kernel
    assert isinstance(kernel, AttentionKernel) and kernel.cache_dtype is None
    assert kernel.page == run.target.kv_layout.page
    assert "cache of f32 in pages of 64" in run.plan.main.text()


# -- types ------------------------------------------------------------------------------------------------------------
INTEGERS = ("positions", "table", "rows")


def leaves(graph: rlx.Graph, **shapes: tuple[Any, ...]) -> list[rlx.Value]:
    return [graph.input(n, s, "i32" if n in INTEGERS else "f32") for n, s in shapes.items()]


APPENDED = {"pool": (3, 2, 64, 4), "new": (1, 5, 2, 4), "positions": (1, 5), "table": (1, 3)}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    (
        ({"pool": (3, 2, 3, 4, 32)}, ShapeError, r"pool: expected \[pages, kv_heads, page, dim\]"),
        ({"pool": (3, "n", 64, 4), "new": (1, 5, "n", 4)}, ShapeError, "fixed numbers above 0 but for pages"),
        ({"new": (1, 5, 3, 4)}, ShapeError, "do not fit the pool"),
        ({"new": (1, 5, 4)}, ShapeError, r"new tokens are \[batch, seq, kv_heads, dim\]"),
        ({"new": (2, 5, 2, 4), "positions": (2, 5)}, ShapeError, "a batch of 2 and a table of 1 rows"),
        ({"positions": (1, 4)}, ShapeError, r"should have shape \[1, 5\]"),
        ({"positions": (5,)}, ShapeError, r"positions: expected \[batch, seq\]"),
        ({"table": (3,)}, ShapeError, r"table: expected \[rows, blocks\]"),
        ({"rows": (5,)}, ShapeError, r"positions: expected \[tokens\]"),
        ({"new": (5, 2, 4), "positions": (5,), "rows": (4,)}, ShapeError, r"rows .* should have shape \[5\]"),
    ),
)
def test_what_does_not_fit_cannot_be_appended(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    graph = rlx.Graph("types")
    with pytest.raises(error, match=message):
        graph.kv_append(*leaves(graph, **{**APPENDED, **changed}))


GOOD = {"q": (1, 5, 6, 8), "keys": (4, 2, 8, 64), "values": (4, 2, 64, 9), "positions": (1, 5), "table": (1, 3)}


@pytest.mark.parametrize(
    ("changed", "attrs", "error", "message"),
    (
        ({}, {"mask_kind": "none"}, GraphError, "neither causal nor sliding"),
        ({}, {"mask_kind": "bias"}, GraphError, "neither causal nor sliding"),
        ({}, {"softcap": 0.0}, GraphError, "softcap is 0.0"),
        ({"q": (1, 5, 5, 8)}, {}, ShapeError, "5 query heads are no multiple of 2"),
        ({"q": (1, 5, 6, 9)}, {}, ShapeError, "head_dim of q is 9, of keys 8"),
        ({"q": (2, 5, 6, 8), "positions": (2, 5)}, {}, ShapeError, "a batch of 2 and a table of 1 rows"),
        ({"values": (4, 3, 64, 9)}, {}, ShapeError, "keys have 2 heads, values 3"),
        ({"values": (4, 2, 32, 9)}, {}, ShapeError, "a page has 64 keys and 32 values"),
        ({"values": (5, 2, 64, 9)}, {}, ShapeError, "4 pages of keys and 5 of values"),
        ({"positions": (1, 6)}, {}, ShapeError, r"should have shape \[1, 5\]"),
    ),
)
def test_what_does_not_fit_cannot_be_attended_to(
    changed: dict[str, Any], attrs: dict[str, Any], error: type[Exception], message: str
) -> None:
    graph = rlx.Graph("types")
    assert graph.cached_attention(*leaves(graph, **GOOD), key_axes="phds").shape == (1, 5, 6, 9)
    other = rlx.Graph("types")
    with pytest.raises(error, match=message):
        other.cached_attention(*leaves(other, **{**GOOD, **changed}), key_axes="phds", **attrs)


def test_element_types_have_to_go_together() -> None:
    graph = rlx.Graph("types")
    q, *places = graph.input("q", GOOD["q"]), *(graph.input(n, GOOD[n], "i32") for n in ("positions", "table"))
    names = ("f32", "f16", "f64", "i32")
    keys, values = ({t: graph.input(f"{n}_{t}", GOOD[n], t) for t in names} for n in ("keys", "values"))
    for types in (("f32", "f16"), ("f64", "f64")):
        with pytest.raises(DTypeError, match="both pools have one type"):
            graph.cached_attention(q, keys[types[0]], values[types[1]], *places, key_axes="phds")
    with pytest.raises(DTypeError, match="keys: pages hold floats"):
        graph.cached_attention(q, keys["i32"], values["f32"], *places, key_axes="phds")
    with pytest.raises(DTypeError, match="positions: expected integers"):
        floats = graph.input("floats", (1, 5))
        graph.cached_attention(q, keys["f16"], values["f16"], floats, places[1], key_axes="phds")
    assert graph.cached_attention(q, keys["f16"], values["f16"], *places, key_axes="phds").dtype == q.dtype

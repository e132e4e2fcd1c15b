"""Paged caches: any order of pages, rectangular or ragged, prefill or decode, gives the same bits on every backend."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import KernelError
from rlx.kv_layout import KvLayout

Array = np.ndarray[Any, Any]
DEVICES = ("reference", "toy", "cpu")
HEADS, KV_HEADS, DIM, PAGE, BATCH, LENGTH = 4, 2, 32, 64, 2, 170
KINDS = {"causal": (3, "causal", False), "window": (3, "sliding(50)", False), "ring": (2, "sliding(50)", True)}
rng = np.random.default_rng(3)
PROMPT = {
    n: rng.standard_normal((BATCH, LENGTH, h, DIM)).astype(np.float32) for n, h in zip("qkv", (4, 2, 2), strict=True)
}


def step_graph(dtype: str, kind: str, ragged: bool, layout: KvLayout) -> rlx.Graph:
    """Appends, then attends; the pools are outputs, since the reference does not write states in place."""
    _, mask_kind, ring = KINDS[kind]
    graph, lead = rlx.Graph("step"), ("tokens",) if ragged else ("batch", "seq")
    q, k, v = (graph.input(n, (*lead, h, DIM)) for n, h in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True))
    places = [
        graph.input("positions", lead, "i32"),
        graph.input("table", ("rows" if ragged else "batch", "blocks"), "i32"),
    ]
    places += [graph.input("rows", lead, "i32")] if ragged else []
    stored = rlx.dtype(dtype)
    axes = {kind: layout.axes(kind, stored) for kind in ("keys", "values")}
    pools = {}
    for name, new in (("keys", k), ("values", v)):
        pool = graph.state(name, layout.pool_shape(name, stored, rlx.dim("pages"), KV_HEADS, DIM), dtype)
        pools[name] = pool.kv_append(new, *places, axes=axes[name], ring=ring)
    how = {"mask_kind": mask_kind, "ring": ring, "key_axes": axes["keys"], "value_axes": axes["values"]}
    return graph.set_outputs([q.cached_attention(*pools.values(), *places, **how), *pools.values()])


def layout_of(device: str) -> KvLayout:
    return rlx.Session(device).target.kv_layout


@functools.cache
def step(device: str, *how: Any) -> Any:
    return rlx.compile(step_graph(*how), device)


class Cache:
    """Pools of NaN, or of nothing that makes sense, and a table: the dense one, or one at random."""

    def __init__(self, device: str, dtype: str, kind: str, ragged: bool, layout: KvLayout, seed: int) -> None:
        self.f, self.ragged = step(device, dtype, kind, ragged, layout), ragged
        self.random, blocks = np.random.default_rng(seed), KINDS[kind][0]
        pages = np.arange(BATCH * blocks) if not seed else self.random.permutation(BATCH * blocks + 3)
        self.table = pages[: BATCH * blocks].reshape(BATCH, blocks).astype(np.int32)
        stored, count = rlx.dtype(dtype), len(pages)
        self.pools: dict[str, Any] = {}
        for name in ("keys", "values"):
            *lead, last = layout.pool_shape(name, stored, count, KV_HEADS, DIM)
            size = count * KV_HEADS * PAGE * DIM // stored.block * stored.size
            array = np.frombuffer(b"\xff" * size, stored.numpy).reshape(*lead, last // stored.block)
            memory = self.f.allocator.zeros(array.shape, array.dtype)
            self.f.allocator.copy(array, memory)
            self.pools[name] = memory

    def forward(self, begin: int, end: int) -> Array:
        """The outputs [batch, tokens, heads, dim] of these tokens of both sequences."""
        tokens = {n: x[:, begin:end] for n, x in PROMPT.items()}
        positions = np.tile(np.arange(begin, end, dtype=np.int32), (BATCH, 1))
        if not self.ragged:
            return self.run(tokens, {"positions": positions})
        order = self.random.permutation(positions.size)
        rows = np.repeat(np.arange(BATCH, dtype=np.int32), end - begin)
        flat = {n: x.reshape(-1, *x.shape[2:])[order] for n, x in tokens.items()}
        result = self.run(flat, {"positions": positions.ravel()[order], "rows": rows[order]})
        return result[np.argsort(order)].reshape(BATCH, end - begin, HEADS, DIM)

    def run(self, tokens: dict[str, Array], places: dict[str, Array]) -> Array:
        arrays = {n: np.ascontiguousarray(x) for n, x in (tokens | places).items()}
        result, keys, values = self.f.run({**arrays, "table": self.table, **self.pools})
        if self.f.device == "reference":
            self.pools = {"keys": keys, "values": values}
        return np.asarray(result)


def expected(dtype: str, kind: str) -> Array:
    """NumPy in f64 over keys and values rounded to the type of the cache."""
    k, v = (PROMPT[n].astype(np.float64) for n in "kv")
    if dtype in ("f16", "bf16"):
        k, v = (PROMPT[n].astype(rlx.dtype(dtype).numpy).astype(np.float64) for n in "kv")
    group = HEADS // KV_HEADS
    scores = np.einsum("bqhd,bkhd->bhqk", PROMPT["q"], np.repeat(k, group, 2)) / np.sqrt(DIM)
    rows, keys = np.ogrid[:LENGTH, :LENGTH]
    seen = (keys <= rows) & (keys > rows - (LENGTH if kind == "causal" else 50))
    weights = np.where(seen, np.exp(scores), 0)
    return np.einsum("bhqk,bkhd->bqhd", weights / weights.sum(-1, keepdims=True), np.repeat(v, group, 2))


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", ("f32", "f16", "bf16", "q8_0"))
def test_bits_depend_on_neither_pages_nor_chunks_nor_shape(dtype: str, kind: str, device: str) -> None:
    results = []
    for ragged, seed, size in ((False, 0, 70), (False, 1, 70), (False, 2, 33), (True, 3, 50), (True, 4, 17)):
        cache = Cache(device, dtype, kind, ragged, layout_of(device), seed)
        chunks = [(i, min(i + size, LENGTH)) for i in range(0, LENGTH, size)]
        begin, end = chunks[1]
        chunks[1:2] = [*((p, p + 1) for p in range(begin, begin + 5)), (begin + 5, end)]  # decode in between
        results.append(np.concatenate([cache.forward(*chunk) for chunk in chunks], axis=1))
    for actual in results[1:]:
        assert actual.tobytes() == results[0].tobytes()
    tolerance = 0.05 if dtype == "q8_0" else 1e-4
    np.testing.assert_allclose(results[0], expected(dtype, kind), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("axes", (("phsd", "phsd"), ("phds", "phsd"), ("hpds", "hpsd"), ("shpd", "dsph")))
@pytest.mark.parametrize("device", ("toy", "cpu"))
def test_a_backend_reads_pages_of_any_layout(device: str, axes: tuple[str, str]) -> None:
    cache = Cache(device, "f32", "causal", False, KvLayout(PAGE, *axes), 5)
    actual = np.concatenate([cache.forward(0, 100), cache.forward(100, 101), cache.forward(101, LENGTH)], axis=1)
    np.testing.assert_allclose(actual, expected("f32", "causal"), rtol=1e-4, atol=1e-4)


# -- faults -----------------------------------------------------------------------------------------------------------
def fault(cache: Cache, count: int, rows: list[int], positions: list[int]) -> None:
    tokens = {n: np.ones((count, h, DIM), np.float32) for n, h in zip("qkv", (HEADS, KV_HEADS, KV_HEADS), strict=True)}
    cache.run(tokens, {"positions": np.int32(positions), "rows": np.int32(rows)})


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", (-1, 2, 2**31 - 1))
def test_a_row_outside_the_table_is_an_error(bad: int, device: str) -> None:
    cache = Cache(device, "f32", "causal", True, layout_of(device), 1)
    fault(cache, 3, [0, bad, 1], [0, -1, 0])  # padding has no row
    with pytest.raises(KernelError, match=r"row .* outside the table"):
        fault(cache, 3, [0, bad, 1], [1, 0, 1])


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("bad", (-1, 9, 2**31 - 1))
def test_a_page_outside_the_pool_is_an_error(bad: int, device: str) -> None:
    cache = Cache(device, "f32", "causal", True, layout_of(device), 1)
    cache.table[:, 1:] = bad
    fault(cache, 2, [0, 1], [63, 5])  # nobody looks there
    before = np.asarray(cache.pools["values"]).tobytes()
    with pytest.raises(KernelError, match=r"page .* outside"):
        fault(cache, 2, [0, 1], [64, -1])
    assert np.asarray(cache.pools["values"]).tobytes() == before


@pytest.mark.parametrize("device", DEVICES)
def test_a_ragged_ring_says_when_it_is_too_small(device: str) -> None:
    """The newest token of the same row counts, wherever it stands in the call."""
    cache = Cache(device, "f32", "ring", True, layout_of(device), 1)
    fault(cache, 3, [0, 1, 0], [1000, 5000, 1078])
    with pytest.raises(KernelError, match="attention"):
        fault(cache, 3, [0, 1, 0], [1000, 5000, 1079])

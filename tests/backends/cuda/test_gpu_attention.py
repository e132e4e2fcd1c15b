"""Attention on a GPU: values against NumPy in f64 over masks, shapes and types; bits over batches, chunks and pages."""

from __future__ import annotations

import functools
import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.backends.cuda.memory import CudaAllocator
from rlx.errors import KernelError
from rlx.ops.attention import parse_mask, visible

pytestmark = pytest.mark.gpu
Array = np.ndarray[Any, Any]
NUMPY = {"f64": np.float64, "f32": np.float32, "f16": np.float16, "bf16": ml_dtypes.bfloat16}
TOLERANCE = {"f64": 1e-13, "f32": 3e-6, "f16": 3e-3, "bf16": 2e-2}  # of results of about 1


def oracle(
    q: Array,
    k: Array,
    v: Array,
    mask: Array | None,
    kind: str,
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[Array, Array]:
    """Attention and logsumexp in f64, [batch, seq, heads, dim] and [batch, heads, seq]."""
    q, k, v = (x.astype(np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    scores = np.einsum("bqhd,bkhd->bhqk", q, np.repeat(k, group, 2)) * (scale or 1 / math.sqrt(q.shape[3]))
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    seen = np.broadcast_to(visible(kind, q.shape[1], k.shape[1]), scores.shape)
    if parse_mask(kind).segments:
        assert mask is not None
        seen = seen & (mask[:, None, :, None] >= 0) & (mask[:, None, :, None] == mask[:, None, None, :])
    elif kind == "custom":
        assert mask is not None
        seen = seen & mask[:, None, None, :]
    elif kind == "bias":
        assert mask is not None
        scores = scores + mask
        seen = seen & ~np.isneginf(np.broadcast_to(mask, scores.shape))
    scores = np.where(seen, scores, -np.inf)
    top = scores.max(-1, keepdims=True, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(top), 0, top))
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    values = np.where(weights[..., None] == 0, 0, np.repeat(v, group, 2).transpose(0, 2, 1, 3)[:, :, None])
    return np.einsum("bhqk,bhqkd->bqhd", weights / np.where(total == 0, 1, total), values), lse


def numbers(seed: int, *shape: int, dtype: str) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(NUMPY[dtype])


# -- dense ------------------------------------------------------------------------------------------------------------
@functools.cache
def dense(heads: int, kv_heads: int, dim: int, value_dim: int, kind: str, dtype: str, mask: str, **how: Any) -> Any:
    graph = rlx.Graph("dense")
    queries = "keys" if mask == "segments" else "seq"  # segments are of one sequence
    q = graph.input("q", ("batch", queries, heads, dim), dtype)
    k = graph.input("k", ("batch", "keys", kv_heads, dim), dtype)
    v = graph.input("v", ("batch", "keys", kv_heads, value_dim), dtype)
    shapes = {"custom": ("batch", "keys"), "bias": (1, heads, "seq", "keys"), "segments": ("batch", "keys")}
    operands = [q, k, v] + (
        [graph.input("mask", shapes[mask], {"custom": "bool", "bias": "f32"}.get(mask, "i32"))] if mask else []
    )
    return rlx.compile(graph.set_outputs(graph.attention_lse(*operands, mask_kind=kind, **how)), "cuda")


SHAPES = (  # batch, queries, keys, heads, key heads, head_dim, value_dim
    (2, 5, 5, 4, 4, 8, 8), (1, 1, 300, 8, 2, 128, 128), (1, 130, 130, 4, 2, 64, 64), (1, 70, 200, 6, 2, 80, 96),
    (2, 33, 400, 3, 1, 20, 33), (1, 200, 200, 2, 1, 256, 256), (1, 40, 140, 16, 1, 96, 64), (3, 7, 0, 2, 2, 16, 16),
    (1, 600, 600, 8, 2, 128, 128),
)  # fmt: skip
KINDS = ("none", "causal", "sliding(37)", "near(9)", "custom", "bias", "segments", "causal+segments")


@pytest.mark.parametrize("dtype", NUMPY)
@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_definition(kind: str, dtype: str) -> None:
    mask_operand = "segments" if parse_mask(kind).segments else kind if kind in ("custom", "bias") else ""
    for batch, queries, keys, heads, kv_heads, dim, value_dim in SHAPES:
        if parse_mask(kind).segments and queries != keys:
            continue
        rng = np.random.default_rng(keys)
        masks = {
            "custom": rng.random((batch, keys)) < 0.7,
            "bias": np.where(
                rng.random((1, heads, queries, keys)) < 0.8, rng.standard_normal((1, heads, queries, keys)), -np.inf
            ).astype(np.float32),
            "segments": rng.integers(-1, 3, (batch, keys)).astype(np.int32),
        }
        inputs = {
            "q": numbers(1, batch, queries, heads, dim, dtype=dtype),
            "k": numbers(2, batch, keys, kv_heads, dim, dtype=dtype),
            "v": numbers(3, batch, keys, kv_heads, value_dim, dtype=dtype),
        }
        if mask_operand:
            inputs["mask"] = masks[mask_operand]
        run = dense(heads, kv_heads, dim, value_dim, kind, dtype, mask_operand)
        out, lse = (np.asarray(x).astype(np.float64) for x in run.run(inputs))
        expected, expected_lse = oracle(inputs["q"], inputs["k"], inputs["v"], inputs.get("mask"), kind)
        np.testing.assert_allclose(out, expected, rtol=0, atol=TOLERANCE[dtype], err_msg=str((queries, keys, dim)))
        np.testing.assert_allclose(lse, expected_lse, rtol=TOLERANCE[dtype] / 2, atol=TOLERANCE[dtype] / 2)


@pytest.mark.parametrize("dtype", ("f32", "bf16"))
@pytest.mark.parametrize(
    "how", ({"softcap": 2.0}, {"scale": 0.3}, {"scale": -0.2}, {"scale": 0.1, "softcap": 5.0}), ids=str
)
def test_scales_and_softcaps(how: dict[str, float], dtype: str) -> None:
    q, k, v = (numbers(i, 1, 70, 4 if i == 1 else 2, 64, dtype=dtype) for i in (1, 2, 3))
    run = dense(4, 2, 64, 64, "causal", dtype, "", **how)
    out = np.asarray(run.run({"q": q, "k": k, "v": v})[0]).astype(np.float64)
    np.testing.assert_allclose(out, oracle(q, k, v, None, "causal", **how)[0], rtol=0, atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", ("f32", "bf16"))
def test_what_is_masked_may_be_anything(dtype: str) -> None:
    """NaN and infinities at keys that a row does not see leave no trace; where it sees them, they show."""
    q, k, v = (numbers(i, 1, 150, 2, 64, dtype=dtype) for i in (1, 2, 3))
    clean = np.asarray(dense(2, 2, 64, 64, "causal", dtype, "").run({"q": q, "k": k, "v": v})[0])
    k[:, 100], v[:, 100, :, 5], v[:, 120, :, 6] = np.nan, np.inf, np.nan
    out = np.asarray(dense(2, 2, 64, 64, "causal", dtype, "").run({"q": q, "k": k, "v": v})[0])
    assert out[:, :100].tobytes() == clean[:, :100].tobytes()
    assert np.isnan(out[:, 100:]).all()
    mask = np.ones((1, 150), bool)
    mask[:, [100, 120]] = False
    out = np.asarray(dense(2, 2, 64, 64, "custom", dtype, "custom").run({"q": q, "k": k, "v": v, "mask": mask})[0])
    expected, _ = oracle(q[:, :], np.nan_to_num(k), v, mask, "custom")
    np.testing.assert_allclose(out.astype(np.float64), expected, rtol=0, atol=TOLERANCE[dtype])


# -- caches -----------------------------------------------------------------------------------------------------------
@functools.cache
def step(heads: int, kv_heads: int, dim: int, storage: str, kind: str = "causal", ragged: bool = False) -> Any:
    """Appends new keys and values, then attends."""
    graph = rlx.Graph("step")
    lead = ("tokens",) if ragged else ("batch", "seq")
    q = graph.input("q", (*lead, heads, dim))
    k, v = (graph.input(n, (*lead, kv_heads, dim)) for n in "kv")
    positions, table = (
        graph.input("positions", lead, "i32"),
        graph.input("table", ("rows" if ragged else "batch", "blocks"), "i32"),
    )
    places = [positions, table] + ([graph.input("rows", lead, "i32")] if ragged else [])
    ring = kind != "causal"
    keys, values = (graph.state(n, ("pages", kv_heads, 64, dim), storage) for n in ("keys", "values"))
    keys, values = (graph.kv_append(p, x, *places, ring=ring) for p, x in ((keys, k), (values, v)))
    return rlx.compile(
        graph.set_outputs(graph.cached_attention(q, keys, values, *places, mask_kind=kind, ring=ring)), "cuda"
    )


class Cache:
    """Pools full of NaN, and a table of pages in random order."""

    def __init__(self, rows: int, blocks: int, kv_heads: int, dim: int, storage: str, seed: int = 0) -> None:
        shape = (rows * blocks, kv_heads, 64, dim)
        self.keys, self.values = (CudaAllocator(0).upload(np.full(shape, np.nan, NUMPY[storage])) for _ in range(2))
        self.table = np.random.default_rng(seed).permutation(rows * blocks).astype(np.int32).reshape(rows, blocks)

    def run(self, compiled: Any, **inputs: Array) -> Array:
        state = {"keys": self.keys, "values": self.values, "table": self.table}
        return np.asarray(compiled.run(inputs | state)[0])


def prompt(batch: int, length: int, heads: int, kv_heads: int, dim: int) -> dict[str, Array]:
    sizes = {"q": heads, "k": kv_heads, "v": kv_heads}
    return {n: numbers(i, batch, length, h, dim, dtype="f32") for i, (n, h) in enumerate(sizes.items())}


HEADS = ((8, 2, 128), (4, 4, 64), (6, 2, 80), (2, 1, 256), (3, 3, 20))


@pytest.mark.parametrize("storage", ("bf16", "f16", "f32"))
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), HEADS)
def test_chunks_batches_and_pages_have_the_same_bits(heads: int, kv_heads: int, dim: int, storage: str) -> None:
    length, compiled = 300, step(heads, kv_heads, dim, storage)
    text = prompt(2, length, heads, kv_heads, dim)
    at = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    full = Cache(2, 8, kv_heads, dim, storage).run(compiled, **text, positions=at)
    rounded = {n: x.astype(NUMPY[storage]) for n, x in text.items()}
    expected, _ = oracle(text["q"], rounded["k"], rounded["v"], None, "causal")
    np.testing.assert_allclose(full.astype(np.float64), expected, rtol=0, atol=TOLERANCE[storage])
    for size in (1, 7, 64, 257):
        cache, chunks = Cache(2, 5, kv_heads, dim, storage, seed=size), []
        for begin in range(0, length, size):
            part = {n: x[:, begin : begin + size] for n, x in text.items()}
            chunks.append(cache.run(compiled, **part, positions=at[:, begin : begin + size]))
        assert np.concatenate(chunks, 1).tobytes() == full.tobytes(), f"chunks of {size}"
    alone = Cache(1, 40, kv_heads, dim, storage)
    assert alone.run(compiled, **{n: x[1:] for n, x in text.items()}, positions=at[1:]).tobytes() == full[1:].tobytes()


@pytest.mark.parametrize("storage", ("bf16", "f32"))
def test_a_ring_gives_the_values_of_the_window(storage: str) -> None:
    heads, kv_heads, dim, length = 4, 2, 64, 500
    text, compiled = prompt(1, length, heads, kv_heads, dim), step(heads, kv_heads, dim, storage, "sliding(100)")
    cache, chunks = Cache(1, 3, kv_heads, dim, storage), []
    for begin in range(0, length, 50):
        part = {n: x[:, begin : begin + 50] for n, x in text.items()}
        chunks.append(cache.run(compiled, **part, positions=np.arange(begin, begin + 50, dtype=np.int32)[None]))
    rounded = {n: x.astype(NUMPY[storage]) for n, x in text.items()}
    expected, _ = oracle(text["q"], rounded["k"], rounded["v"], None, "sliding(100)")
    np.testing.assert_allclose(np.concatenate(chunks, 1).astype(np.float64), expected, rtol=0, atol=TOLERANCE[storage])


@pytest.mark.parametrize("storage", ("bf16", "f32"))
def test_ragged_tokens_have_the_bits_of_rectangular_ones(storage: str) -> None:
    heads, kv_heads, dim, length = 8, 2, 64, 200
    text = prompt(2, length, heads, kv_heads, dim)
    at = np.tile(np.arange(length, dtype=np.int32), (2, 1))
    expected = Cache(2, 4, kv_heads, dim, storage).run(step(heads, kv_heads, dim, storage), **text, positions=at)
    ragged, cache = step(heads, kv_heads, dim, storage, ragged=True), Cache(2, 4, kv_heads, dim, storage, seed=3)
    flat = {n: x.reshape(-1, *x.shape[2:]) for n, x in text.items()}
    rows = np.repeat(np.arange(2, dtype=np.int32), length)
    out = cache.run(ragged, **flat, positions=at.ravel(), rows=rows)
    assert out.tobytes() == expected.tobytes()


def test_positions_beyond_the_cache_are_faults() -> None:
    text, compiled = prompt(1, 1, 4, 2, 64), step(4, 2, 64, "bf16")
    with pytest.raises(KernelError):
        Cache(1, 2, 2, 64, "bf16").run(compiled, **text, positions=np.array([[128]], np.int32))

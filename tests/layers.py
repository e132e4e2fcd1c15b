"""Whole layers for tests: a BERT encoder and a Llama decoder built by hand, random weights, and both in NumPy float64.

The NumPy versions share no code with rlx: they are what the layers mean. `relative` is how far two arrays are apart.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import rlx

erf = np.vectorize(math.erf, otypes=[np.float64])
Array = np.ndarray[Any, Any]
Weights = dict[str, Array]
BERT_EPS, LLAMA_EPS = 1e-12, 1e-5


@dataclass(frozen=True)
class Bert:
    """Sizes of a post-norm encoder."""

    hidden: int
    heads: int
    ffn: int
    layers: int = 1


@dataclass(frozen=True)
class Llama:
    """Sizes of a pre-norm decoder; `context` is how many positions the rotary tables have."""

    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int
    layers: int = 1
    context: int = 64


MINILM = Bert(hidden=384, heads=12, ffn=1536)
SMOLLM = Llama(hidden=576, heads=9, kv_heads=3, head_dim=64, ffn=1536)
TINY_BERT = Bert(hidden=12, heads=1, ffn=20)
TINY_LLAMA = Llama(hidden=12, heads=2, kv_heads=1, head_dim=6, ffn=20)


def relative(a: Array, b: Array) -> float:
    """max|a - b| / max|b|; 0 for empty arrays."""
    assert a.shape == b.shape, f"shapes differ: {a.shape} and {b.shape}"
    return float(np.abs(a - b).max() / np.abs(b).max()) if a.size else 0.0


# -- shapes and weights -------------------------------------------------------------------------------------------
def shapes(sizes: Bert | Llama) -> dict[str, tuple[int, ...]]:
    """Params by name; matrices are [in, out]."""
    result: dict[str, tuple[int, ...]] = {}
    h, f = sizes.hidden, sizes.ffn
    if isinstance(sizes, Llama):
        q, kv = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        result |= {"cos": (sizes.context, sizes.head_dim // 2), "sin": (sizes.context, sizes.head_dim // 2)}
        layer = {"norm1": (h,), "q": (h, q), "k": (h, kv), "v": (h, kv), "o": (q, h), "norm2": (h,)}
        layer |= {"gate": (h, f), "up": (h, f), "down": (f, h)}
    else:
        layer = {}
        for name, shape in {"q": (h, h), "k": (h, h), "v": (h, h), "o": (h, h), "up": (h, f), "down": (f, h)}.items():
            layer |= {name: shape, f"{name}.bias": shape[1:]}
        for name in ("norm1", "norm2"):
            layer |= {name: (h,), f"{name}.bias": (h,)}
    return result | {f"{i}.{name}": shape for i in range(sizes.layers) for name, shape in layer.items()}


def weights(sizes: Bert | Llama, seed: int = 0) -> Weights:
    """Random weights that keep activations near 1, and true rotary tables."""
    rng = np.random.default_rng(seed)
    result: Weights = {}
    for name, shape in shapes(sizes).items():
        if name in ("cos", "sin"):
            half = shape[1]
            angles = np.outer(np.arange(shape[0]), 10000.0 ** (-np.arange(half) / half))
            result[name] = (np.cos(angles) if name == "cos" else np.sin(angles)).astype(np.float32)
        else:
            noise = rng.standard_normal(shape, dtype=np.float32)
            scale = np.float32(shape[0] ** -0.5 if len(shape) == 2 else 0.1)
            result[name] = noise * scale + np.float32("norm" in name and "bias" not in name)
    return result


# -- graphs -------------------------------------------------------------------------------------------------------
def bert_graph(sizes: Bert) -> rlx.Graph:
    """Inputs `x` [batch, seq, hidden] and `mask` [batch, seq], where 1 keeps a token."""
    g = rlx.Graph("bert")
    p = {name: g.param(name, shape) for name, shape in shapes(sizes).items()}
    x, mask = g.input("x", ("batch", "seq", sizes.hidden)), g.input("mask", ("batch", "seq"))
    head_dim = sizes.hidden // sizes.heads
    for i in range(sizes.layers):
        with rlx.stage(f"layers.{i}"):

            def linear(value: rlx.Value, name: str, at: int = i) -> rlx.Value:
                return value @ p[f"{at}.{name}"] + p[f"{at}.{name}.bias"]

            def norm(value: rlx.Value, name: str, at: int = i) -> rlx.Value:
                normed: rlx.Value = g.layer_norm(value, p[f"{at}.{name}"], p[f"{at}.{name}.bias"], eps=BERT_EPS)
                return normed

            q, k, v = (linear(x, n).reshape("batch", "seq", sizes.heads, head_dim) for n in "qkv")
            seen = g.attention(q, k, v, mask, mask_kind=rlx.MaskKind.CUSTOM).reshape("batch", "seq", sizes.hidden)
            x = norm(linear(seen, "o") + x, "norm1")
            x = norm(linear(linear(x, "up").gelu(), "down") + x, "norm2")
    return g.set_outputs([x])


def llama_graph(sizes: Llama, *, past: bool = False, seq: int | str = "seq") -> rlx.Graph:
    """Inputs `x`, i32 `positions`; with `past` also `k0`, `v0`, ..., which come back with the new rows at their end."""
    g = rlx.Graph("llama")
    p = {name: g.param(name, shape) for name, shape in shapes(sizes).items()}
    x, positions = g.input("x", ("batch", seq, sizes.hidden)), g.input("positions", ("batch", seq), "i32")
    cached: list[rlx.Value] = []
    for i in range(sizes.layers):
        with rlx.stage(f"layers.{i}"):
            h = g.rms_norm(x, p[f"{i}.norm1"], eps=LLAMA_EPS)
            q, k, v = (
                (h @ p[f"{i}.{n}"]).reshape("batch", seq, heads, sizes.head_dim)
                for n, heads in (("q", sizes.heads), ("k", sizes.kv_heads), ("v", sizes.kv_heads))
            )
            q, k = (g.rope(t, p["cos"], p["sin"], positions) for t in (q, k))
            if past:
                before = ("batch", "past", sizes.kv_heads, sizes.head_dim)
                k = g.concatenate(g.input(f"k{i}", before), k, axis=1)
                v = g.concatenate(g.input(f"v{i}", before), v, axis=1)
                cached += [k, v]
            seen = g.attention(q, k, v, mask_kind=rlx.MaskKind.CAUSAL)
            x = x + seen.reshape("batch", seq, sizes.heads * sizes.head_dim) @ p[f"{i}.o"]
            h = g.rms_norm(x, p[f"{i}.norm2"], eps=LLAMA_EPS)
            x = x + ((h @ p[f"{i}.gate"]).silu() * (h @ p[f"{i}.up"])) @ p[f"{i}.down"]
    return g.set_outputs([x, *cached])


# -- inputs -------------------------------------------------------------------------------------------------------
def bert_inputs(sizes: Bert, batch: int, seq: int, seed: int = 1) -> dict[str, Array]:
    """Random states, and a mask that hides some tokens but never the first."""
    rng = np.random.default_rng(seed)
    mask = (np.arange(seq)[None] < rng.integers(1, max(seq, 1) + 1, (batch, 1))).astype(np.float32)
    return {"x": rng.standard_normal((batch, seq, sizes.hidden), dtype=np.float32), "mask": mask}


def llama_inputs(sizes: Llama, batch: int, seq: int, past: int | None = None, seed: int = 1) -> dict[str, Array]:
    """Random states at positions `past`, `past + 1`, ..., and a random past where one is asked for."""
    rng = np.random.default_rng(seed)
    first = (past or 0) % max(1, sizes.context - seq)  # tables may be shorter than the past of a test
    positions = ((first + np.arange(seq)) % sizes.context).astype(np.int32)
    result = {"x": rng.standard_normal((batch, seq, sizes.hidden), dtype=np.float32)}
    result["positions"] = np.repeat(positions[None], batch, axis=0)
    if past is not None:
        for name in (f"{n}{i}" for i in range(sizes.layers) for n in "kv"):
            result[name] = rng.standard_normal((batch, past, sizes.kv_heads, sizes.head_dim), dtype=np.float32)
    return result


# -- NumPy, float64 -----------------------------------------------------------------------------------------------
def _softmax(scores: Array, seen: Array) -> Array:
    """Over the last axis, unseen places get 0; a row that sees nothing is all 0."""
    top = np.where(seen, scores, -np.inf).max(-1, keepdims=True, initial=-1e300)
    e = np.where(seen, np.exp(np.where(seen, scores - top, 0)), 0)
    total = e.sum(-1, keepdims=True)
    return e / np.where(total == 0, 1, total)


def _attention(q: Array, k: Array, v: Array, seen: Array) -> Array:
    """[batch, seq, heads, dim] each; `seen` broadcasts to [batch, heads, queries, keys]."""
    group = q.shape[2] // k.shape[2]
    q = q.transpose(0, 2, 1, 3)
    k, v = (np.repeat(t, group, axis=2).transpose(0, 2, 1, 3) for t in (k, v))
    result = np.empty((*q.shape[:3], v.shape[3]))
    seen = np.broadcast_to(seen, (*q.shape[:3], k.shape[2]))
    for at in range(0, q.shape[2], 256):  # some rows at a time, or long sequences would not fit into memory
        rows = np.s_[:, :, at : at + 256]
        scores = q[rows] @ k.transpose(0, 1, 3, 2) / np.sqrt(q.shape[-1])
        result[rows] = _softmax(scores, seen[rows]) @ v
    return result.transpose(0, 2, 1, 3)


def bert_numpy(sizes: Bert, params: Mapping[str, Array], x: Array, mask: Array) -> list[Array]:
    """The encoder in float64."""
    p = {n: w.astype(np.float64) for n, w in params.items()}
    x = x.astype(np.float64)
    heads = (*x.shape[:2], sizes.heads, sizes.hidden // sizes.heads)

    def linear(value: Array, name: str) -> Array:
        return np.asarray(value @ p[name] + p[f"{name}.bias"])

    def norm(value: Array, name: str) -> Array:
        centred = value - value.mean(-1, keepdims=True)
        scale = np.sqrt((centred**2).mean(-1, keepdims=True) + BERT_EPS)
        return np.asarray(centred / scale * p[name] + p[f"{name}.bias"])

    for i in range(sizes.layers):
        q, k, v = (linear(x, f"{i}.{n}").reshape(heads) for n in "qkv")
        seen = _attention(q, k, v, (mask > 0.5)[:, None, None, :])
        x = norm(linear(seen.reshape(x.shape), f"{i}.o") + x, f"{i}.norm1")
        up = linear(x, f"{i}.up")
        x = norm(linear(up * 0.5 * (1 + erf(up / np.sqrt(2))), f"{i}.down") + x, f"{i}.norm2")
    return [x]


def llama_numpy(sizes: Llama, params: Mapping[str, Array], x: Array, positions: Array, **past: Array) -> list[Array]:
    """The decoder in float64; with a past, its keys and values too."""
    p = {n: w.astype(np.float64) for n, w in params.items()}
    x = x.astype(np.float64)
    half = sizes.head_dim // 2
    c, s = p["cos"][positions][:, :, None], p["sin"][positions][:, :, None]
    cached: list[Array] = []

    def norm(value: Array, name: str) -> Array:
        return np.asarray(value / np.sqrt((value**2).mean(-1, keepdims=True) + LLAMA_EPS) * p[name])

    def turn(t: Array) -> Array:
        a, b = t[..., :half], t[..., half:]
        return np.concatenate([a * c - b * s, b * c + a * s], -1)

    def heads(value: Array, name: str, count: int) -> Array:
        return np.asarray(value @ p[name]).reshape(*value.shape[:2], count, sizes.head_dim)

    for i in range(sizes.layers):
        h = norm(x, f"{i}.norm1")
        q, k = turn(heads(h, f"{i}.q", sizes.heads)), turn(heads(h, f"{i}.k", sizes.kv_heads))
        v = heads(h, f"{i}.v", sizes.kv_heads)
        if past:
            k, v = np.concatenate([past[f"k{i}"], k], 1), np.concatenate([past[f"v{i}"], v], 1)
            cached += [k, v]
        rows = np.arange(q.shape[1])[:, None] + k.shape[1] - q.shape[1]
        seen = _attention(q, k, v, np.arange(k.shape[1])[None] <= rows)
        x = x + seen.reshape(*x.shape[:2], sizes.heads * sizes.head_dim) @ p[f"{i}.o"]
        h = norm(x, f"{i}.norm2")
        gate = h @ p[f"{i}.gate"]
        x = x + (gate / (1 + np.exp(-gate)) * (h @ p[f"{i}.up"])) @ p[f"{i}.down"]
    return [x, *cached]


# -- compiled -----------------------------------------------------------------------------------------------------
def compiled(graph: rlx.Graph, params: Mapping[str, Array], **options: Any) -> rlx.CompiledGraph:
    """The graph on the CPU, with its weights."""
    f = rlx.compile(graph, **options)
    f.set_params(params)
    return f


def same_bits(a: Sequence[Array], b: Sequence[Array]) -> bool:
    """Equal shapes, types and bytes."""
    return len(a) == len(b) and all(
        x.shape == y.shape and x.dtype == y.dtype and x.tobytes() == y.tobytes() for x, y in zip(a, b, strict=True)
    )

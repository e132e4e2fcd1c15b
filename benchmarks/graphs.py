"""The two graphs that the benchmarks compile: a BERT encoder and a Llama decoder, built by hand with `rlx.Graph`.

Sizes go in, a graph comes out; `weights` gives random arrays for its params. Batch and sequence
are run-time dims. Hidden states come in and go out: no embedding, no head.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

import rlx

BATCH, SEQ = "batch", "seq"
Shapes = dict[str, tuple[int, ...]]


def bert_shapes(layers: int, hidden: int, ffn: int) -> Shapes:
    """Params of `bert_encoder` by name; linear weights are [in, out]."""
    shapes: Shapes = {}
    for i in range(layers):
        for name, (rows, cols) in {
            "query": (hidden, hidden),
            "key": (hidden, hidden),
            "value": (hidden, hidden),
            "attention.output": (hidden, hidden),
            "intermediate": (hidden, ffn),
            "output": (ffn, hidden),
        }.items():
            shapes[f"layer.{i}.{name}.weight"] = (rows, cols)
            shapes[f"layer.{i}.{name}.bias"] = (cols,)
        for name in ("attention.norm", "norm"):
            shapes[f"layer.{i}.{name}.weight"] = shapes[f"layer.{i}.{name}.bias"] = (hidden,)
    return shapes


def bert_encoder(layers: int, hidden: int, heads: int, ffn: int, *, mask: bool = True, eps: float = 1e-12) -> rlx.Graph:
    """Post-norm encoder. Inputs `x` [batch, seq, hidden] and, with `mask`, `mask` [batch, seq] (1 keeps a token)."""
    g = rlx.Graph("bert")
    head_dim = hidden // heads
    p = {name: g.param(name, shape) for name, shape in bert_shapes(layers, hidden, ffn).items()}
    x = g.input("x", (BATCH, SEQ, hidden))
    keep = g.input("mask", (BATCH, SEQ)) if mask else None
    kind = rlx.MaskKind.CUSTOM if mask else rlx.MaskKind.NONE

    def linear(value: rlx.Value, name: str) -> rlx.Value:
        return value @ p[f"{name}.weight"] + p[f"{name}.bias"]

    def split(value: rlx.Value) -> rlx.Value:
        return g.reshape(value, (BATCH, SEQ, heads, head_dim))

    def norm(value: rlx.Value, name: str) -> rlx.Value:
        normed: rlx.Value = g.layer_norm(value, p[f"{name}.weight"], p[f"{name}.bias"], eps=eps)
        return normed

    for i in range(layers):
        at = f"layer.{i}"
        q, k, v = (split(linear(x, f"{at}.{name}")) for name in ("query", "key", "value"))
        seen = g.attention(q, k, v, keep, num_heads=heads, head_dim=head_dim, mask_kind=kind)
        merged = g.reshape(seen, (BATCH, SEQ, hidden))
        x = norm(linear(merged, f"{at}.attention.output") + x, f"{at}.attention.norm")
        x = norm(linear(linear(x, f"{at}.intermediate").gelu(), f"{at}.output") + x, f"{at}.norm")
    return g.set_outputs([x])


def llama_shapes(
    layers: int, hidden: int, heads: int, kv_heads: int, head_dim: int, ffn: int, *, context: int = 2048
) -> Shapes:
    """Params of `llama` by name; linear weights are [in, out]."""
    shapes: Shapes = {"rope.cos": (context, head_dim // 2), "rope.sin": (context, head_dim // 2), "norm": (hidden,)}
    for i in range(layers):
        for name, shape in {
            "attn_norm": (hidden,),
            "q": (hidden, heads * head_dim),
            "k": (hidden, kv_heads * head_dim),
            "v": (hidden, kv_heads * head_dim),
            "o": (heads * head_dim, hidden),
            "ffn_norm": (hidden,),
            "gate": (hidden, ffn),
            "up": (hidden, ffn),
            "down": (ffn, hidden),
        }.items():
            shapes[f"layer.{i}.{name}"] = shape
    return shapes


def llama(
    layers: int,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    ffn: int,
    *,
    context: int = 2048,
    eps: float = 1e-5,
) -> rlx.Graph:
    """Pre-norm decoder: rotary positions, grouped-query causal attention, SwiGLU. Inputs `x` and i32 `positions`."""
    g = rlx.Graph("llama")
    shapes = llama_shapes(layers, hidden, heads, kv_heads, head_dim, ffn, context=context)
    p = {name: g.param(name, shape) for name, shape in shapes.items()}
    x = g.input("x", (BATCH, SEQ, hidden))
    positions = g.input("positions", (BATCH, SEQ), "i32")

    def project(value: rlx.Value, name: str, count: int) -> rlx.Value:
        return g.reshape(value @ p[name], (BATCH, SEQ, count, head_dim))

    def turn(value: rlx.Value) -> rlx.Value:
        rotated: rlx.Value = g.rope(value, p["rope.cos"], p["rope.sin"], positions, style="halves")
        return rotated

    for i in range(layers):
        at = f"layer.{i}"
        h = g.rms_norm(x, p[f"{at}.attn_norm"], eps=eps)
        q, k = turn(project(h, f"{at}.q", heads)), turn(project(h, f"{at}.k", kv_heads))
        v = project(h, f"{at}.v", kv_heads)
        seen = g.attention(q, k, v, num_heads=heads, head_dim=head_dim, mask_kind=rlx.MaskKind.CAUSAL)
        x = x + g.reshape(seen, (BATCH, SEQ, heads * head_dim)) @ p[f"{at}.o"]
        h = g.rms_norm(x, p[f"{at}.ffn_norm"], eps=eps)
        x = x + ((h @ p[f"{at}.gate"]).silu() * (h @ p[f"{at}.up"])) @ p[f"{at}.down"]
    return g.set_outputs([g.rms_norm(x, p["norm"], eps=eps)])


def weights(shapes: Mapping[str, tuple[int, ...]], *, rope_base: float = 10000.0) -> dict[str, np.ndarray]:
    """Random arrays that keep activations near 1, and true RoPE tables."""
    rng = np.random.default_rng(0)
    arrays: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        if name.startswith("rope."):
            context, half = shape
            angles = np.outer(np.arange(context), rope_base ** (-np.arange(half) / half))
            arrays[name] = (np.cos(angles) if name == "rope.cos" else np.sin(angles)).astype(np.float32)
        elif len(shape) == 2:
            arrays[name] = rng.standard_normal(shape, dtype=np.float32) / np.float32(shape[0] ** 0.5)
        elif name.endswith("bias"):
            arrays[name] = rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
        else:
            arrays[name] = 1 + rng.standard_normal(shape, dtype=np.float32) * np.float32(0.1)
    return arrays

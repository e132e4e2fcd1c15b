"""A small random Llama on disk, made without torch, and what it computes, in plain NumPy float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray[Any, Any]
CONFIG = {
    "model_type": "llama", "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 80, "vocab_size": 97, "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip


def write(folder: Path, seed: int = 0, **changes: Any) -> dict[str, Array]:
    """Write config.json and model.safetensors; gives the weights."""
    c: dict[str, Any] = CONFIG | changes
    rng = np.random.default_rng(seed)
    dim, ffn, vocab, head = c["hidden_size"], c["intermediate_size"], c["vocab_size"], head_dim(c)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, dim), "lm_head.weight": (vocab, dim)}
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        shapes |= {
            f"{at}.self_attn.q_proj.weight": (c["num_attention_heads"] * head, dim),
            f"{at}.self_attn.k_proj.weight": (c["num_key_value_heads"] * head, dim),
            f"{at}.self_attn.v_proj.weight": (c["num_key_value_heads"] * head, dim),
            f"{at}.self_attn.o_proj.weight": (dim, c["num_attention_heads"] * head),
            f"{at}.mlp.gate_proj.weight": (ffn, dim),
            f"{at}.mlp.up_proj.weight": (ffn, dim),
            f"{at}.mlp.down_proj.weight": (dim, ffn),
        }
    weights = {n: (rng.normal(size=s) * 3 / np.sqrt(s[1])).astype(np.float32) for n, s in shapes.items()}
    norms = ["model.norm"] + [
        f"model.layers.{i}.{n}_layernorm" for i in range(c["num_hidden_layers"]) for n in ("input", "post_attention")
    ]
    weights |= {f"{n}.weight": (1 + rng.normal(size=dim) / 4).astype(np.float32) for n in norms}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(c))
    return weights


def head_dim(c: dict[str, Any]) -> int:
    return int(c["hidden_size"] // c["num_attention_heads"])


def forward(
    weights: dict[str, Array], tokens: list[int], cache: Any = np.float64, after: Any = None, **changes: Any
) -> dict[str, Array]:
    """Values by stage path: `layers.i.attn` (what it adds), `layers.i` (the residual stream), `norm` and `logits`.

    Keys and values are rounded to the type `cache` before they are attended to. `after` has functions by layer, which
    change the residual stream after it.
    """
    c: dict[str, Any] = CONFIG | changes
    w = {n: a.astype(np.float64) for n, a in weights.items()}
    heads, kv, head, count = c["num_attention_heads"], c["num_key_value_heads"], head_dim(c), len(tokens)
    angles = np.outer(np.arange(count), c["rope_theta"] ** (-np.arange(0, head, 2) / head))
    cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]  # [seq, 1, head / 2]
    found: dict[str, Array] = {}

    def norm(x: Array, name: str) -> Array:
        scaled: Array = x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"])
        return scaled * w[f"{name}.weight"]

    def turned(x: Array) -> Array:
        a, b = x[..., : head // 2], x[..., head // 2 :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    x = w["model.embed_tokens.weight"][tokens]
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}"
        h = norm(x, f"{at}.input_layernorm")
        q, k, v = (
            (h @ w[f"{at}.self_attn.{n}_proj.weight"].T).reshape(count, m, head)
            for n, m in (("q", heads), ("k", kv), ("v", kv))
        )
        k, v = (a.astype(cache).astype(np.float64).repeat(heads // kv, 1) for a in (turned(k), v))
        scores = np.einsum("qhd,khd->hqk", turned(q), k) / np.sqrt(head)
        rows, keys = np.ogrid[:count, :count]
        scores[:, (keys > rows) | (keys <= rows - (c.get("sliding_window") or count))] = -np.inf
        p = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("hqk,khd->qhd", p / p.sum(-1, keepdims=True), v).reshape(count, -1)
        found[f"layers.{i}.attn"] = out @ w[f"{at}.self_attn.o_proj.weight"].T
        x = x + found[f"layers.{i}.attn"]
        h = norm(x, f"{at}.post_attention_layernorm")
        gate = h @ w[f"{at}.mlp.gate_proj.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w[f"{at}.mlp.up_proj.weight"].T)) @ w[f"{at}.mlp.down_proj.weight"].T
        x = x if after is None or i not in after else after[i](x)
        found[f"layers.{i}"] = x
    found["norm"] = norm(x, "model.norm")
    found["logits"] = found["norm"] @ w["lm_head.weight"].T
    return found

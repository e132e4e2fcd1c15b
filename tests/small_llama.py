"""A small Llama made of random numbers: its files, its forward pass in NumPy's float64, and a driver for decoders.

The forward pass shares no code with `rlx`; it follows `modeling_llama.py` of transformers. The driver calls a compiled
graph as an engine does, with a cache of its own, so that models can be tested apart from the engine.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx.flow.built import BuiltModel
from rlx.flow.weights import WeightSource
from rlx.models.load import Checkpoint
from rlx.runtime.kv_spec import table_name
from rlx.runtime.session import Session

Array = np.ndarray[Any, Any]
SETTINGS: dict[str, Any] = {
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0, "hidden_act": "silu", "tie_word_embeddings": False,
}  # fmt: skip


def random_weights(c: dict[str, Any], seed: int = 0) -> dict[str, Array]:
    """Weights under Hugging Face names that fit the settings."""
    rng = np.random.default_rng(seed)
    dim, ffn, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    head = c.get("head_dim") or dim // c["num_attention_heads"]
    q, kv = c["num_attention_heads"] * head, (c.get("num_key_value_heads") or c["num_attention_heads"]) * head
    sizes = {
        "self_attn.q_proj": (q, dim), "self_attn.k_proj": (kv, dim), "self_attn.v_proj": (kv, dim),
        "self_attn.o_proj": (dim, q), "mlp.gate_proj": (ffn, dim), "mlp.up_proj": (ffn, dim),
        "mlp.down_proj": (dim, ffn),
    }  # fmt: skip
    qwen = c["model_type"] == "qwen2"
    weights = {"model.embed_tokens.weight": rng.standard_normal((vocab, dim))}
    for i in range(c["num_hidden_layers"]):
        for name, (rows, columns) in sizes.items():
            key = f"model.layers.{i}.{name}"
            weights[f"{key}.weight"] = rng.standard_normal((rows, columns)) / columns**0.5
            switch = c.get("mlp_bias") if "mlp" in name else (qwen and "o_proj" not in name) or c.get("attention_bias")
            if switch:
                weights[f"{key}.bias"] = rng.standard_normal(rows)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{i}.{name}.weight"] = 1 + 0.2 * rng.standard_normal(dim)
    weights["model.norm.weight"] = 1 + 0.2 * rng.standard_normal(dim)
    if not c["tie_word_embeddings"]:
        weights["lm_head.weight"] = rng.standard_normal((vocab, dim))
    return {name: value.astype(np.float32) for name, value in weights.items()}


def write_folder(folder: Path, weights: dict[str, Array], settings: dict[str, Any]) -> Path:
    """A Hugging Face folder."""
    from safetensors.numpy import save_file

    save_file(weights, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(settings))
    return folder


# -- the forward pass ------------------------------------------------------------------------------------------------
def forward(c: dict[str, Any], weights: dict[str, Array], tokens: Sequence[int], window: int | None = None) -> Array:
    """[seq, vocab] logits in float64."""
    return values(c, weights, tokens, window)["logits"]


def values(
    c: dict[str, Any], weights: dict[str, Array], tokens: Sequence[int], window: int | None = None,
    cache: Any = np.float64, after: Mapping[int, Callable[[Array], Array]] | None = None,
) -> dict[str, Array]:  # fmt: skip
    """Values by stage path, in float64: `layers.i.attn` (what it adds), `layers.i` (the stream), `norm` and `logits`.

    RoPE is unscaled and turns halves. Keys and values are rounded to the type `cache` before they are attended to.
    `after` has functions by layer, which change the stream after it.
    """
    w = {name: value.astype(np.float64) for name, value in weights.items()}
    heads = c["num_attention_heads"]
    kv_heads = c.get("num_key_value_heads") or heads
    head = c.get("head_dim") or c["hidden_size"] // heads
    n = len(tokens)
    result: dict[str, Array] = {}

    def norm(x: Array, name: str) -> Array:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + c["rms_norm_eps"]) * w[f"{name}.weight"]

    def linear(x: Array, name: str) -> Array:
        return x @ w[f"{name}.weight"].T + w.get(f"{name}.bias", 0)

    angles = np.arange(n)[:, None] / c["rope_theta"] ** (np.arange(0, head, 2) / head)
    cos, sin = (np.concatenate([f(angles)] * 2, -1)[:, None] for f in (np.cos, np.sin))  # [seq, 1, head]

    def rotated(x: Array) -> Array:
        a, b = np.split(x, 2, -1)
        return x * cos + np.concatenate([-b, a], -1) * sin

    back = np.arange(n)[:, None] - np.arange(n)
    hidden = (back < 0) | (back >= (window or n))
    x = w["model.embed_tokens.weight"][list(tokens)]
    for i in range(c["num_hidden_layers"]):
        p = f"model.layers.{i}"
        h = norm(x, f"{p}.input_layernorm")
        q, k, v = (
            linear(h, f"{p}.self_attn.{name}_proj").reshape(n, count, head)
            for name, count in (("q", heads), ("k", kv_heads), ("v", kv_heads))
        )
        if f"{p}.self_attn.q_norm.weight" in w:  # Qwen3
            q, k = norm(q, f"{p}.self_attn.q_norm"), norm(k, f"{p}.self_attn.k_norm")
        k, v = (t.astype(cache).astype(np.float64).repeat(heads // kv_heads, 1) for t in (rotated(k), v))
        scores = np.einsum("qhd,khd->hqk", rotated(q), k) / head**0.5
        scores = np.exp(np.where(hidden, -np.inf, scores - scores.max(-1, keepdims=True)))
        out = np.einsum("hqk,khd->qhd", scores / scores.sum(-1, keepdims=True), v).reshape(n, heads * head)
        result[f"layers.{i}.attn"] = linear(out, f"{p}.self_attn.o_proj")
        x = x + result[f"layers.{i}.attn"]
        h = norm(x, f"{p}.post_attention_layernorm")
        gate = linear(h, f"{p}.mlp.gate_proj")
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(h, f"{p}.mlp.up_proj"), f"{p}.mlp.down_proj")
        x = x if after is None or i not in after else after[i](x)
        result[f"layers.{i}"] = x
    table = w["model.embed_tokens.weight" if c["tie_word_embeddings"] else "lm_head.weight"]
    result["norm"] = norm(x, "model.norm")
    result["logits"] = result["norm"] @ table.T
    return result


def dense_table(rows: int, blocks: int) -> Array:
    """The pages of sequences that are contiguous in a pool."""
    return np.arange(rows * blocks, dtype=np.int32).reshape(rows, blocks)


# -- the driver ------------------------------------------------------------------------------------------------------
class Driver:
    """A compiled decoder with a cache for some sequences."""

    def __init__(
        self, built: BuiltModel, weights: WeightSource, batch: int, capacity: int, device: str = "cpu"
    ) -> None:
        self.f = Session(device).compile(built.module)
        for name in self.f.param_types:
            self.f.set_param(name, built.params[name] if name in built.params else weights.array(name))
        spec = built.cache
        assert spec is not None
        blocks = spec.layout.blocks(capacity)
        self.cache: dict[str, Array] = {}
        for i in range(spec.layers):
            if (window := spec.window(i)) is not None:
                self.cache[table_name(window)] = dense_table(batch, blocks)
                for kind in ("keys", "values"):
                    self.cache[f"{kind}.{i}"] = np.zeros(spec.pool_shape(kind, batch * blocks), np.float32)
        self.states = {name: np.zeros((batch, *shape), np.float32) for name, shape in spec.states}  # recurrent ones

    @classmethod
    def of(cls, checkpoint: Checkpoint, batch: int = 1, context: int | None = None, device: str = "cpu") -> Driver:
        context = context or checkpoint.config.context
        flow = checkpoint.family.flow(checkpoint.config, context, checkpoint.rope_factors)
        return cls(flow.build(checkpoint.weights), checkpoint.weights, batch, context, device)

    def forward(
        self, rows: Sequence[Sequence[int]], offsets: Sequence[int], lengths: Sequence[int] | None = None
    ) -> list[Array]:
        """The logits `[len, vocab]` of each row; row i begins at position starts[i], its prompt has lengths[i]."""
        width = max(len(row) for row in rows)
        tokens, positions = np.zeros((len(rows), width), np.int32), np.full((len(rows), width), -1, np.int32)
        for i, (row, start) in enumerate(zip(rows, offsets, strict=True)):
            tokens[i, : len(row)], positions[i, : len(row)] = row, np.arange(start, start + len(row))
            for state in self.states.values() if start == 0 else ():
                state[i] = 0
        every = np.arange(tokens.size, dtype=np.int32)
        inputs = {"tokens": tokens, "positions": positions, "last_token_idx": every}
        if "lengths" in self.f.input_types:
            ends = [start + len(row) for row, start in zip(rows, offsets, strict=True)]
            inputs["lengths"] = np.array(ends if lengths is None else lengths, np.int32)
        (logits,) = self.f.run({**inputs, **self.cache, **self.states})
        return [logits[i * width : i * width + len(row)] for i, row in enumerate(rows)]

    def by_chunks(self, tokens: Sequence[int], chunk: int) -> Array:
        """The logits of one sequence, read so many tokens at a time."""
        return np.concatenate(
            [self.forward([tokens[at : at + chunk]], [at], [len(tokens)])[0] for at in range(0, len(tokens), chunk)]
        )  # fmt: skip


def difference(actual: Array, wanted: Array) -> float:
    """The largest difference of any position, relative to that position's largest logit."""
    return float((np.abs(actual - wanted).max(-1) / np.abs(wanted).max(-1)).max())

"""A small random Llama on disk for tests of whole models, and what it computes; its logits are far apart."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import small_llama
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
    """What `small_llama.values` says of it."""
    return small_llama.values(CONFIG | changes, weights, tokens, changes.get("sliding_window"), cache, after)

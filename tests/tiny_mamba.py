"""A small random Mamba on disk, made without torch, and what it computes, in plain NumPy float64."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

Array = np.ndarray[Any, Any]
DIM, INNER, STATE, RANK, KERNEL, LAYERS, VOCAB, EPS = 24, 40, 6, 5, 4, 2, 97, 1e-5
CONFIG: dict[str, Any] = {
    "model_type": "mamba", "hidden_size": DIM, "intermediate_size": INNER, "state_size": STATE, "conv_kernel": KERNEL,
    "time_step_rank": RANK, "num_hidden_layers": LAYERS, "vocab_size": VOCAB, "layer_norm_epsilon": EPS,
    "use_bias": False, "use_conv_bias": True, "tie_word_embeddings": True,
}  # fmt: skip


def write(folder: Path, seed: int = 0) -> dict[str, Array]:
    """Write config.json and model.safetensors; gives the weights."""
    rng = np.random.default_rng(seed)
    weights = {"backbone.embeddings.weight": rng.normal(size=(VOCAB, DIM))}
    weights["backbone.norm_f.weight"] = 1 + rng.normal(size=DIM) / 4
    shapes: dict[str, tuple[int, ...]] = {
        "in_proj.weight": (2 * INNER, DIM), "conv1d.weight": (INNER, 1, KERNEL), "dt_proj.weight": (INNER, RANK),
        "x_proj.weight": (RANK + 2 * STATE, INNER), "out_proj.weight": (DIM, INNER),
    }  # fmt: skip
    for i in range(LAYERS):
        mixer = f"backbone.layers.{i}.mixer"
        weights |= {f"{mixer}.{n}": 2 * rng.normal(size=s) / np.sqrt(np.prod(s[1:])) for n, s in shapes.items()}
        weights |= {f"{mixer}.{n}": rng.normal(size=INNER) for n in ("conv1d.bias", "D")}
        weights[f"{mixer}.dt_proj.bias"] = rng.normal(size=INNER) - 4  # so that much is remembered
        weights[f"{mixer}.A_log"] = rng.normal(size=(INNER, STATE)) / 2
        weights[f"backbone.layers.{i}.norm.weight"] = 1 + rng.normal(size=DIM) / 4
    saved = {name: value.astype(np.float32) for name, value in weights.items()}
    save_file(saved, str(folder / "model.safetensors"))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return saved


def forward(weights: dict[str, Array], tokens: list[int]) -> Array:
    """[seq, vocab] logits, one token after the other (Gu and Dao, 2023, algorithm 2)."""
    w = {name: value.astype(np.float64) for name, value in weights.items()}

    def silu(x: Array) -> Array:
        return np.asarray(x / (1 + np.exp(-x)))

    def norm(x: Array, name: str) -> Array:
        return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + EPS) * w[name])

    x = w["backbone.embeddings.weight"][tokens]
    for i in range(LAYERS):
        m = {n: w[f"backbone.layers.{i}.mixer.{n}"] for n in ("A_log", "D", "conv1d.bias", "dt_proj.bias")}
        proj = {n: w[f"backbone.layers.{i}.mixer.{n}_proj.weight"].T for n in ("in", "x", "dt", "out")}
        taps = w[f"backbone.layers.{i}.mixer.conv1d.weight"][:, 0].T  # [kernel, inner]
        inner, gate = np.split(norm(x, f"backbone.layers.{i}.norm.weight") @ proj["in"], 2, -1)
        padded = np.concatenate([np.zeros((KERNEL - 1, INNER)), inner])
        h, ys = np.zeros((INNER, STATE)), []
        for t in range(len(tokens)):
            u = silu((padded[t : t + KERNEL] * taps).sum(0) + m["conv1d.bias"])
            low, b, c = np.split(u @ proj["x"], [RANK, RANK + STATE])
            step = np.log1p(np.exp(low @ proj["dt"] + m["dt_proj.bias"]))[:, None]
            h = np.exp(step * -np.exp(m["A_log"])) * h + step * b * u[:, None]
            ys.append(h @ c + m["D"] * u)
        x = x + (np.array(ys) * silu(gate)) @ proj["out"]
    logits: Array = norm(x, "backbone.norm_f.weight") @ w["backbone.embeddings.weight"].T
    return logits

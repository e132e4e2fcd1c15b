"""What llama.cpp's converter makes of Qwen3-Next and Qwen3.5, restated from its source (conversion/qwen.py)."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]


def converted(name: str, value: Array, s: dict[str, Any], *, rounds: bool, legacy: bool = False) -> dict[str, Array]:
    """Tensors by the names that the table of `gguf` knows; `rounds` for Qwen3.5, `legacy` for the first files."""
    keys, values = s["linear_num_key_heads"], s["linear_num_value_heads"]
    size, share = s["linear_key_head_dim"], values // keys
    value = value.astype(np.float32)
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return {name: value + 1}
    if ".linear_attn." not in name:
        return {name: value}
    if name.endswith("in_proj_qkvz.weight") and not legacy:
        groups = np.split(value.reshape(keys, -1, value.shape[1]), [size, 2 * size, (2 + share) * size], axis=1)
        q, k, v, z = (group.reshape(-1, value.shape[1]) for group in groups)
        return {name.replace("qkvz", "qkv"): np.concatenate([q, k, v]), name.replace("qkvz", "z"): z}
    if "conv1d" in name:
        value = value.squeeze()
    if rounds:
        value = _in_rounds(name, value, keys, share, size)
    if name.endswith(".A_log"):
        value = -np.exp(value)
    return {name.replace(".dt_bias", ".dt_proj.bias"): value}


def _in_rounds(name: str, value: Array, keys: int, share: int, size: int) -> Array:
    """Heads of values, kept together by the head of keys that they share, in turns: k0 v0, k1 v0, ..., k0 v1 ..."""
    of_head = 1 if any(part in name for part in ("A_log", "dt_bias", "in_proj_a", "in_proj_b")) else size
    order = np.arange(keys * share * of_head).reshape(keys, share, of_head).transpose(1, 0, 2).reshape(-1)
    if "out_proj" in name:
        return value[:, order]
    if "in_proj_qkv" in name or "conv1d" in name:
        return np.concatenate([value[: 2 * keys * size], value[2 * keys * size :][order]])
    return value if name.endswith("linear_attn.norm.weight") else value[order]

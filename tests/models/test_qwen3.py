"""Qwen3: random small models of `transformers`, with heads whose size is not that of the width."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reference_models import check, save

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 16},
    "tied, odd heads": {
        "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 3, "head_dim": 26,
        "tie_word_embeddings": True,
    },
    "many heads for one, biases": {
        "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 6, "attention_bias": True,
    },
    "window in later layers": {
        "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3, "head_dim": 8,
    },
    "eps, yarn": {
        "rms_norm_eps": 0.3, "head_dim": 8,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    check(tmp_path, save(tmp_path, "Qwen3", **CONFIGS[name]))


@pytest.mark.parity
def test_rounded_weights_are_computed_with_as_they_are(tmp_path: Path) -> None:
    check(tmp_path, save(tmp_path, "Qwen3", dtype="bfloat16", head_dim=12))

"""Qwen2: random small models of `transformers`, with windows in some layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reference_models import check, save

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 6},
    "odd heads": {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 3},
    "many heads for one": {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1},
    "window switched off": {"sliding_window": 5, "use_sliding_window": False},
    "window in later layers": {
        "sliding_window": 5, "use_sliding_window": True, "max_window_layers": 1, "num_hidden_layers": 3,
    },
    "window in all layers": {"sliding_window": 33, "use_sliding_window": True, "max_window_layers": 0},
    "window by layer": {
        "sliding_window": 5, "use_sliding_window": True, "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1000000.0, "factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "eps": {"rms_norm_eps": 0.3, "hidden_act": "gelu"},
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    check(tmp_path, save(tmp_path, "Qwen2", **CONFIGS[name]))


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_weights_are_computed_with_as_they_are(tmp_path: Path, dtype: str) -> None:
    check(tmp_path, save(tmp_path, "Qwen2", dtype=dtype))

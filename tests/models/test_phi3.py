"""Phi-3: random small models of `transformers`: fused weights, long contexts, heads of which a part turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reference_models import check, save

CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied, odd heads": {
        "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 3,
        "tie_word_embeddings": True,
    },
    "many heads for one, window": {
        "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "sliding_window": 7,
    },
    "a part of each head turns": {
        "hidden_size": 96, "rms_norm_eps": 0.3,
        "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.75},
    },
}  # fmt: skip
IDS: dict[str, Any] = {"pad_token_id": 0, "eos_token_id": 1}


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    check(tmp_path, save(tmp_path, "Phi3", **IDS, **CONFIGS[name]))


@pytest.mark.parity
@pytest.mark.parametrize("context", [48, 90])
def test_longrope_is_that_of_the_context(tmp_path: Path, context: int) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3], "partial_rotary_factor": 0.75,
        "long_factor": [1.5, 2.0, 4.0],
    }  # fmt: skip
    model = save(tmp_path, "Phi3", **IDS, rope_parameters=rope, original_max_position_embeddings=48)
    check(tmp_path, model, context=context, length=context)


@pytest.mark.parity
def test_rounded_weights_are_computed_with_as_they_are(tmp_path: Path) -> None:
    check(tmp_path, save(tmp_path, "Phi3", dtype="bfloat16", **IDS))

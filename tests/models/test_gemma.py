"""Gemma 1, 2 and 3: random small models of `transformers`, as it writes them and as GGUF has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reference_models import check, save

Settings = dict[str, Any]
ODD: Settings = {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 18}
SEVEN: Settings = {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1, "head_dim": 8}
BOTH_BASES: Settings = {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0},
    },
}  # fmt: skip
CONFIGS: dict[str, tuple[str, Settings]] = {
    "1 plain": ("Gemma", {"head_dim": 16}),
    "1 odd heads": ("Gemma", {**ODD, "num_hidden_layers": 3, "rms_norm_eps": 0.3}),
    "1 untied, legacy activation": ("Gemma", {**SEVEN, "tie_word_embeddings": False, "hidden_act": "gelu"}),
    "2 plain": ("Gemma2", {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 3}),
    "2 odd heads, small caps": (
        "Gemma2",
        {**ODD, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 9},
    ),
    "2 no caps, untied, layers by name": (
        "Gemma2",
        {
            **SEVEN, "attn_logit_softcapping": None, "final_logit_softcapping": None, "sliding_window": 33,
            "tie_word_embeddings": False, "num_hidden_layers": 3,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "3 plain": ("Gemma3", {"head_dim": 16, "sliding_window": 7, "num_hidden_layers": 7}),
    "3 both bases, odd heads": ("Gemma3", {**ODD, **BOTH_BASES, "sliding_window": 5, "num_hidden_layers": 6}),
    "3 untied, capped": (
        "Gemma3",
        {
            **SEVEN, "final_logit_softcapping": 3.0, "query_pre_attn_scalar": 30, "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention"], "sliding_window": 64,
        },
    ),
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    family, settings = CONFIGS[name]
    check(tmp_path, save(tmp_path, family, **settings))


@pytest.mark.parity
def test_rounded_weights_are_computed_with_as_they_are(tmp_path: Path) -> None:
    check(tmp_path, save(tmp_path, "Gemma3", dtype="bfloat16", head_dim=12, sliding_window=9))

"""Qwen3-MoE and Mixtral: random small models of `transformers`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reference_models import check, save

QWEN: dict[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20, "head_dim": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen": ("Qwen3Moe", {**QWEN, "norm_topk_prob": True}),
    "qwen, odds as they are, odd heads, tied": (
        "Qwen3Moe",
        {
            **QWEN, "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 26,
            "num_experts": 7, "num_experts_per_tok": 3, "norm_topk_prob": False, "tie_word_embeddings": True,
        },
    ),
    "qwen, some layers dense": (
        "Qwen3Moe",
        {**QWEN, "num_hidden_layers": 5, "decoder_sparse_step": 2, "mlp_only_layers": [3], "num_experts_per_tok": 6},
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 4}),
    "mixtral, one expert, window": (
        "Mixtral",
        {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 7, "hidden_size": 56,
         "num_attention_heads": 7, "num_key_value_heads": 1},
    ),
    "mixtral, all experts, odd heads, tied": (
        "Mixtral",
        {"num_local_experts": 3, "num_experts_per_tok": 3, "hidden_size": 60, "num_attention_heads": 3,
         "num_key_value_heads": 3, "num_hidden_layers": 3, "tie_word_embeddings": True},
    ),
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    family, settings = CONFIGS[name]
    check(tmp_path, save(tmp_path, family, **settings))


@pytest.mark.parity
def test_rounded_weights_are_computed_with_as_they_are(tmp_path: Path) -> None:
    check(tmp_path, save(tmp_path, "Qwen3Moe", dtype="bfloat16", **QWEN))

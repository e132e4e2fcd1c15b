"""GPT-2: random small models of `transformers`, with and without the prefix that its files may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from reference_models import check, save

SIZES: dict[str, Any] = {
    "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "max_position_embeddings": 256,
    "bos_token_id": 0, "eos_token_id": 1,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "odd heads, untied": {"hidden_size": 60, "num_attention_heads": 3, "tie_word_embeddings": False, "n_inner": 77},
    "seven heads, erf": {
        "hidden_size": 56, "num_attention_heads": 7, "activation_function": "gelu", "layer_norm_epsilon": 0.3,
    },
    "other scales": {
        "scale_attn_weights": False, "scale_attn_by_inverse_layer_idx": True, "num_hidden_layers": 3,
        "initializer_range": 0.01,
    },
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    check(tmp_path, save(tmp_path, "GPT2", **{**SIZES, **CONFIGS[name]}))


@pytest.mark.parity
def test_rounded_weights_are_computed_with_as_they_are(tmp_path: Path) -> None:
    check(tmp_path, save(tmp_path, "GPT2", dtype="bfloat16", **SIZES))


@pytest.mark.parity
def test_files_without_the_prefix_and_with_masks_are_read(tmp_path: Path) -> None:
    """The first files on the hub are those of the model without its head, with the causal mask among the weights."""
    import torch
    from safetensors.torch import load_file, save_file

    model = save(tmp_path, "GPT2", **SIZES)
    weights = {n.removeprefix("transformer."): w for n, w in load_file(tmp_path / "model.safetensors").items()}
    masks = {f"h.{i}.attn.bias": torch.ones(1, 1, 256, 256) for i in range(2)}
    save_file(weights | masks | {"h.0.attn.masked_bias": torch.tensor(-1e4)}, tmp_path / "model.safetensors")
    check(tmp_path, model)

"""Makes the golden files: small random decoders of `transformers`, their weights as f16, and the logits of two texts.

Run it with torch and transformers: python tests/models/make_golden.py. The files are read by test_golden.py, which
needs neither.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "fixtures" / "models"
SIZES: dict[str, Any] = {
    "vocab_size": 40, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 1, "max_position_embeddings": 64, "head_dim": 8, "pad_token_id": 0, "bos_token_id": 2,
    "eos_token_id": 1,
}  # fmt: skip
BASES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 5000.0, "factor": 4.0},
}
DELTA: dict[str, Any] = {
    "num_hidden_layers": 4, "head_dim": 16, "linear_num_key_heads": 1, "linear_num_value_heads": 2,
    "linear_key_head_dim": 16, "linear_value_head_dim": 16,
}  # fmt: skip
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 3}
GOLDEN: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {"num_key_value_heads": 4, "attention_bias": True}),
    "mistral": ("Mistral", {"sliding_window": 5}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {"head_dim": 12, "tie_word_embeddings": True}),
    "qwen3_moe": ("Qwen3Moe", {**EXPERTS, "norm_topk_prob": True}),
    "mixtral": ("Mixtral", {"num_local_experts": 3}),
    "gemma": ("Gemma", {}),
    "gemma2": (
        "Gemma2",
        {
            "sliding_window": 5, "attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0,
            "query_pre_attn_scalar": 8,  # GGUF has no word for it: it is the size of a head there
        },
    ),
    "gemma3": (
        "Gemma3",
        {
            "sliding_window": 5, "rope_parameters": BASES, "num_hidden_layers": 6, "head_dim": 4,
            "query_pre_attn_scalar": 4,
        },
    ),
    "phi3": ("Phi3", {"tie_word_embeddings": False}),
    "gpt2": ("GPT2", {"n_inner": 40}),
    "mamba": ("Mamba", {"intermediate_size": 64, "state_size": 6, "time_step_rank": 5}),
    "mamba2": ("Mamba2", {"num_heads": 8, "n_groups": 1, "state_size": 12, "chunk_size": 8}),
    "qwen3_next": (
        "Qwen3Next",
        {
            **DELTA, **EXPERTS, "shared_expert_intermediate_size": 16, "moe_intermediate_size": 8,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
    ),
    "qwen3_5_moe": (
        "Qwen3_5Moe",
        {
            **DELTA, **EXPERTS, "shared_expert_intermediate_size": 16, "moe_intermediate_size": 8,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
    ),
    "qwen3_5": (
        "Qwen3_5",
        {**DELTA, "tie_word_embeddings": True, "linear_num_key_heads": 2, "linear_num_value_heads": 6},
    ),
}  # fmt: skip


def make(name: str) -> None:
    from reference_models import logits, save
    from safetensors.torch import load_file

    family, settings = GOLDEN[name]
    rng = np.random.default_rng(7)
    rows = [rng.integers(0, SIZES["vocab_size"], n).tolist() for n in (23, 6)]
    with tempfile.TemporaryDirectory() as folder:
        model = save(Path(folder), family, dtype="float16", **{**SIZES, **settings})
        said = json.loads((Path(folder) / "config.json").read_text())
        weights = {n: w.numpy() for n, w in load_file(Path(folder) / "model.safetensors").items()}
    result = {f"logits.{i}": logits(model, row) for i, row in enumerate(rows)}
    tokens = {f"tokens.{i}": np.array(row, np.int32) for i, row in enumerate(rows)}
    np.savez_compressed(FOLDER / f"{name}.npz", config=np.array(json.dumps(said)), **result, **tokens, **weights)


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    for each in sys.argv[1:] or GOLDEN:
        make(each)

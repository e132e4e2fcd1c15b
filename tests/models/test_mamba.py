"""Mamba 1 and 2: random small models of `transformers`, and files as llama.cpp has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_writing import finish
from reference_models import check, save
from test_golden import Array, Golden

from rlx.models.load import open_checkpoint

SMALL: dict[str, Any] = {"hidden_size": 32, "num_heads": 4, "head_dim": 16, "n_groups": 2, "state_size": 8}
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "1, tied": ("Mamba", {"hidden_size": 48, "intermediate_size": 96}),
    "1, untied, biases, no bias of the convolution, odd sizes": (
        "Mamba",
        {
            "hidden_size": 28, "state_size": 5, "conv_kernel": 3, "expand": 3, "intermediate_size": 84,
            "time_step_rank": 7, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": False,
            "num_hidden_layers": 3,
        },
    ),
    "1, narrow inside, rank by itself": (
        "Mamba", {"hidden_size": 80, "time_step_rank": "auto", "layer_norm_epsilon": 1e-3}
    ),
    "1, rounded": ("Mamba", {"dtype": "bfloat16", "hidden_size": 32, "intermediate_size": 64}),
    "2, two groups": ("Mamba2", {**SMALL, "chunk_size": 16}),
    "2, odd heads, one group, tied, biases, narrow steps": (
        "Mamba2",
        {
            "hidden_size": 30, "num_heads": 9, "head_dim": 10, "n_groups": 1, "state_size": 5, "expand": 3,
            "conv_kernel": 3, "use_bias": True, "use_conv_bias": False, "tie_word_embeddings": True,
            "time_step_limit": [0.01, 0.5], "chunk_size": 8,
        },
    ),
    "2, a group for each head, wide states": (
        "Mamba2", {**SMALL, "n_groups": 4, "state_size": 48, "num_hidden_layers": 3}
    ),
    "2, rounded": ("Mamba2", {"dtype": "bfloat16", **SMALL}),
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    family, settings = CONFIGS[name]
    check(tmp_path, save(tmp_path, family, **settings))


@pytest.mark.parametrize("limit", ["Infinity", "1e999"])
def test_python_writes_infinity_into_a_configuration(tmp_path: Path, limit: str) -> None:
    golden = Golden("mamba2")
    path = golden.folder(tmp_path) / "config.json"
    path.write_text(path.read_text().replace('{"__float__": "Infinity"}', limit))
    assert f"[0.0, {limit}]" in path.read_text()
    golden.check(open_checkpoint(tmp_path))


# -- GGUF ------------------------------------------------------------------------------------------------------------
def converted(golden: Golden, groups: int = 1) -> dict[str, Array]:
    """Weights as llama.cpp's converter has them: rates in place of their logarithms, no axes of size 1, or new ones."""
    gguf = pytest.importorskip("gguf")
    table = gguf.get_tensor_name_map(gguf.MODEL_ARCH[golden.name.upper()], golden.settings["num_hidden_layers"])
    second = golden.name == "mamba2"
    result: dict[str, Array] = {}
    for name, stored in golden.weights.items():
        value = stored.astype(np.float32)
        if name.endswith("A_log"):
            value = -np.exp(value)
        if name.endswith(("A_log", ".D")) and second:
            value = value[:, None]
        if "conv1d.weight" in name:
            value = value[:, 0]
        if name.endswith("mixer.norm.weight"):
            value = value.reshape(groups, -1)
        suffixes = (".weight", ".bias")
        result[table.get_name(name.replace("dt_bias", "dt.bias"), try_suffixes=suffixes)] = np.ascontiguousarray(value)
    return result


def write(golden: Golden, path: Path, tensors: dict[str, Array], groups: int = 1) -> Path:
    gguf = pytest.importorskip("gguf")
    s, second = golden.settings, golden.name == "mamba2"
    inner = s["expand"] * s["hidden_size"] if second else s["intermediate_size"]
    writer = gguf.GGUFWriter(path, golden.name)
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(s["hidden_size"])
    writer.add_feed_forward_length(0)
    writer.add_head_count(0)
    writer.add_block_count(s["num_hidden_layers"])
    writer.add_ssm_conv_kernel(s["conv_kernel"])
    writer.add_ssm_inner_size(inner)
    writer.add_ssm_state_size(s["state_size"])
    writer.add_ssm_time_step_rank(s["num_heads"] if second else s["time_step_rank"])
    if second:
        writer.add_ssm_group_count(groups)
    else:
        writer.add_ssm_dt_b_c_rms(False)
    writer.add_layer_norm_rms_eps(s["layer_norm_epsilon"])
    for name, value in tensors.items():
        writer.add_tensor(name, value)
    finish(writer)
    return path


@pytest.mark.parametrize("name", ["mamba", "mamba2"])
def test_a_gguf_file_gives_the_same(tmp_path: Path, name: str) -> None:
    golden = Golden(name)
    golden.check(open_checkpoint(write(golden, tmp_path / "m.gguf", converted(golden))))

"""BERT through the whole house against `transformers`: random small models, and MiniLM itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.engine.model import Model, load
from rlx.errors import BindError, CapabilityError, FormatError
from rlx.models.load import open_checkpoint

CONFIGS = [
    {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48},
    {"hidden_size": 60, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 100},
    {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 1, "intermediate_size": 65},
]


def small_bert(folder: Path, config: dict[str, int]) -> Any:
    """A random BERT of transformers, saved to a folder."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    settings = transformers.BertConfig(vocab_size=100, max_position_embeddings=64, **config)
    model = transformers.BertModel(settings, add_pooling_layer=False).eval()
    model.save_pretrained(folder, safe_serialization=True)
    return model


def hidden_states(folder: Path, tokens: np.ndarray, mask: np.ndarray) -> np.ndarray:
    checkpoint = open_checkpoint(folder)
    built = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    f = rlx.compile(built.module)
    f.set_params({n: checkpoint.weights.array(n) for n in f.param_types})
    positions = np.broadcast_to(np.arange(tokens.shape[1], dtype=np.int32), tokens.shape)
    inputs = {"tokens": tokens, "token_types": np.zeros_like(tokens), "positions": positions, "attention_mask": mask}
    return f.run(inputs)[0]


@pytest.mark.parity
@pytest.mark.parametrize("config", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, config: dict[str, int]) -> None:
    model = small_bert(tmp_path, config)
    import torch

    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 100, (3, 17)).astype(np.int32)
    mask = np.ones((3, 17), np.float32)
    mask[0, 9:], mask[2, 1:] = 0, 0
    with torch.no_grad():
        wanted = model(torch.from_numpy(tokens).long(), torch.from_numpy(mask)).last_hidden_state.numpy()
    found = hidden_states(tmp_path, tokens, mask)
    seen = mask.astype(bool)
    assert np.abs(found - wanted)[seen].max() / np.abs(wanted)[seen].max() < 1e-5


@pytest.mark.parity
def test_a_missing_weight_names_stage_and_nearest_key(tmp_path: Path) -> None:
    small_bert(tmp_path, CONFIGS[0])
    checkpoint = open_checkpoint(tmp_path)
    checkpoint.weights._names.pop("encoder.layer.1.output.dense.weight")
    with pytest.raises(BindError, match=r"'encoder.layer.1.output.dense.weight' is not in the file") as caught:
        checkpoint.family.flow(checkpoint.config).build(checkpoint.weights)
    notes = "\n".join(caught.value.notes)
    assert "did you mean" in notes and "in stage: ffn" in notes and "in stage: layers.1" in notes


def test_an_unknown_architecture_names_the_known_ones(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1, np.float32)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bertt"}))
    with pytest.raises(CapabilityError, match="'bertt' is not supported") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.hint == "did you mean 'bert'?"


def test_a_configuration_without_a_size_is_a_format_error(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    save_file({"x": np.zeros(1, np.float32)}, str(tmp_path / "model.safetensors"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert", "hidden_size": 4}))
    with pytest.raises(FormatError, match="num_hidden_layers"):
        open_checkpoint(tmp_path)


@pytest.fixture(scope="module")
def minilm() -> Model:
    return load("minilm-l6")


@pytest.mark.weights
def test_minilm_vectors_are_normalised_and_do_not_depend_on_neighbours(minilm: Model) -> None:
    texts = ["a cat", "A much longer sentence about something else entirely, with many words.", "dogs bark"]
    rows = minilm.embed(texts)
    assert rows.shape == (3, 384) and np.allclose(np.linalg.norm(rows, axis=1), 1, atol=1e-6)
    for text, row in zip(texts, rows, strict=True):
        assert np.abs(minilm.embed(text) - row).max() < 1e-6
    assert minilm.embed("a cat") @ minilm.embed("a kitten") > minilm.embed("a cat") @ minilm.embed("a tax form")


@pytest.mark.weights
def test_minilm_refuses_to_generate(minilm: Model) -> None:
    with pytest.raises(CapabilityError, match="encoder"):
        minilm.generate("hello")

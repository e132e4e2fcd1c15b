"""Qwen3-Embedding: vectors are the last token's, after the last norm; the tokenizer ends texts, prompts come first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference_encoders
from reference_models import SIZES
from small_llama import SETTINGS, forward, random_weights, write_folder

from rlx.engine.embedding_model import EmbeddingModel
from rlx.engine.load import load
from rlx.errors import RequestError
from rlx.models.load import open_checkpoint

Array = np.ndarray[Any, Any]
WORDS = [f"w{i}" for i in range(50)]
END = 50
PROMPTS = {"query": "w1 w2 w3 ", "document": ""}
QWEN3 = SETTINGS | {"model_type": "qwen3", "head_dim": 10}
TEXTS = [" ".join(np.random.default_rng(n).choice(WORDS, n)) for n in (1, 5, 40, 2, 70)]


@pytest.fixture(scope="module")
def weights() -> dict[str, Array]:
    result = random_weights(QWEN3)
    norms = {f"model.layers.{i}.self_attn.{n}_norm.weight": np.linspace(0.5, 2, 10) for i in range(2) for n in "qk"}
    return result | {name: value.astype(np.float32) for name, value in norms.items()}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, weights: dict[str, Array]) -> Path:
    """As such models are published: names without a prefix, no head, modules, and a tokenizer that ends texts."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    path = tmp_path_factory.mktemp("embedding")
    write_folder(path, {n.removeprefix("model."): w for n, w in weights.items() if n != "lm_head.weight"}, QWEN3)
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate([*WORDS, "<end>", "?"])}, unk_token="?"))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A <end>", special_tokens=[("<end>", END)])
    tokenizer.save(str(path / "tokenizer.json"))
    types = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(types)
    ]
    files = {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": 32, "pooling_mode_lasttoken": True},
        "config_sentence_transformers.json": {"prompts": PROMPTS, "default_prompt_name": None},
    }
    (path / "1_Pooling").mkdir()
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    return path


def wanted(weights: dict[str, Array], texts: list[str]) -> Array:
    """The last hidden state in float64, of length 1."""
    actual = []
    for text in texts:
        tokens = [*(WORDS.index(w) for w in text.split()), END]
        # logits by a head that changes nothing are the hidden states
        states = forward({**QWEN3, "tie_word_embeddings": False}, weights | {"lm_head.weight": np.eye(32)}, tokens)
        actual.append(states[-1] / np.linalg.norm(states[-1]))
    return np.stack(actual)


def test_vectors_are_those_of_the_last_token(folder: Path, weights: dict[str, Array]) -> None:
    with load(folder) as model:
        assert isinstance(model, EmbeddingModel) and model.pooling == "lasttoken" and model.normalize
        actual = model.embed(TEXTS)
        assert actual.shape == (5, 32) and np.abs(actual - wanted(weights, TEXTS)).max() < 5e-6
        for text, row in zip(TEXTS, actual, strict=True):  # whatever the neighbours are
            assert model.embed(text).tobytes() == row.tobytes()


def test_prompts_come_before_the_text(folder: Path, weights: dict[str, Array]) -> None:
    with load(folder) as model:
        assert isinstance(model, EmbeddingModel)
        actual = model.embed(TEXTS, prompt="query")
        assert np.abs(actual - wanted(weights, [PROMPTS["query"] + text for text in TEXTS])).max() < 5e-6
        with pytest.raises(RequestError, match="no prompt 'questions'"):
            model.embed("w1", prompt="questions")


def test_without_modules_it_is_a_language_model(tmp_path: Path, weights: dict[str, Array]) -> None:
    with load(write_folder(tmp_path, weights, QWEN3)) as model:
        assert not isinstance(model, EmbeddingModel)
        rows = model.logits([1, 2, 3])  # type: ignore[attr-defined]
        assert np.abs(rows - forward(QWEN3, weights, [1, 2, 3])).max() < 1e-3


@pytest.mark.parity
def test_vectors_are_those_of_transformers(tmp_path: Path, folder: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    theirs = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    with load(folder) as model, torch.no_grad():
        assert isinstance(model, EmbeddingModel)
        for text in TEXTS:
            states = theirs(torch.tensor([model.tokenizer.encode(text)])).last_hidden_state[0, -1]
            vector = torch.nn.functional.normalize(states, dim=0).numpy()
            assert np.abs(model.embed(text) - vector).max() < 5e-6


CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {"head_dim": 16},
    "odd heads, biases": {
        "hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 26, "attention_bias": True,
    },
    "seven heads, a window": {
        "hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 7, "head_dim": 8, "num_hidden_layers": 3,
        "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1,
    },
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    model = reference_encoders.save(tmp_path, "Qwen3", **{**SIZES, **CONFIGS[name]})
    (tmp_path / "modules.json").write_text("[]")
    assert open_checkpoint(tmp_path).family.name == "qwen3-embedding"
    reference_encoders.check(tmp_path, model)

"""Llama through the whole house: llama2.c's published text, and random small models of `transformers`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rlx.engine.generate import Decoder
from rlx.engine.model import Model, load
from rlx.errors import RequestError
from rlx.models.load import open_checkpoint

ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STORIES = ASSETS / "stories260K"
FILES = ["stories260K.bin", "stories260K_v1.bin", "tinyllamas-stories-260k-f32.gguf"]
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is absent")


@needs_stories
@pytest.mark.parametrize("name", FILES)
def test_stories_are_told_as_llama2c_tells_them(name: str) -> None:
    with load(STORIES / name) as model:
        told = model.generate([1], max_tokens=200)
        assert told.text.strip() == (STORIES / "expected_greedy_200tok.txt").read_text().strip()
        assert len(told.tokens) == 200 and told.finish_reason == "length"


@pytest.fixture(scope="module")
def stories() -> Model:
    if not STORIES.exists():
        pytest.skip(f"{STORIES} is absent")
    return load(STORIES / FILES[0])


def feed(model: Model, tokens: list[int], chunk: int) -> np.ndarray[Any, Any]:
    assert model.built.cache is not None
    decoder = Decoder.start(model.compiled, model.built.cache, 1, model.context)
    logits = None
    for at in range(0, len(tokens), chunk):
        logits = decoder.feed([tokens[at : at + chunk]], [at])
    assert logits is not None
    return logits[0]


def test_bits_do_not_depend_on_chunks(stories: Model) -> None:
    tokens = [1, *np.random.default_rng(0).integers(3, 500, 149).tolist()]
    whole = feed(stories, tokens, 150)
    for chunk in (1, 7, 64):
        assert feed(stories, tokens, chunk).tobytes() == whole.tobytes()


def test_bits_do_not_depend_on_batch_neighbours(stories: Model) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.integers(3, 500, n).tolist() for n in (5, 70, 1)]
    assert stories.built.cache is not None
    decoder = Decoder.start(stories.compiled, stories.built.cache, 3, stories.context)
    together = decoder.feed(rows, [0, 0, 0])
    for row, logits in zip(rows, together, strict=True):
        assert feed(stories, row, 512).tobytes() == logits.tobytes()


def test_a_prompt_beyond_the_context_is_refused(stories: Model) -> None:
    with pytest.raises(RequestError, match="the prompt has 600 tokens, the context holds 512"):
        stories.generate([5] * 600)


def test_stop_strings_end_the_text_before_them(stories: Model) -> None:
    told = stories.generate([1], max_tokens=100, stop=["Lily"])
    assert "Lily" not in told.text and told.finish_reason == "stop" and told.text.startswith("Once upon a time")


def test_a_seed_repeats_a_sampled_text(stories: Model) -> None:
    first = stories.generate([1], max_tokens=30, temperature=1.0, top_p=0.9)
    again = stories.generate([1], max_tokens=30, temperature=1.0, top_p=0.9, seed=first.seed)
    assert again.tokens == first.tokens


CONFIGS: list[dict[str, Any]] = [
    {"hidden_size": 48, "num_attention_heads": 6, "num_key_value_heads": 2, "tie_word_embeddings": True},
    {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "tie_word_embeddings": False},
    {
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    },
]


@pytest.mark.parity
@pytest.mark.parametrize("family", ["Llama", "Qwen2"])
@pytest.mark.parametrize("config", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, config: dict[str, Any], family: str) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    torch.manual_seed(0)
    settings = getattr(transformers, f"{family}Config")(
        vocab_size=96, intermediate_size=80, num_hidden_layers=2, max_position_embeddings=256, **config
    )
    reference = getattr(transformers, f"{family}ForCausalLM")(settings).eval()
    with torch.no_grad():
        for name, value in reference.named_parameters():
            if name.endswith("bias"):
                value.normal_()
    reference.save_pretrained(tmp_path, safe_serialization=True)
    model = Model(open_checkpoint(tmp_path))
    tokens = np.random.default_rng(2).integers(0, 96, 90).tolist()
    with torch.no_grad():
        wanted = reference(torch.tensor([tokens])).logits[0].numpy()
    found = model.logits(tokens)
    assert (np.abs(found - wanted).max(-1) / np.abs(wanted).max(-1)).max() < 2e-4

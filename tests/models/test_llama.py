"""Llama through the whole house: llama2.c's published text, and random small models of `transformers`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_models import TOLERANCE, check, logits, save
from small_llama import difference

from rlx.engine.decoder import Decoder
from rlx.engine.load import load
from rlx.engine.model import Model
from rlx.errors import RequestError

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


def forward(model: Model, tokens: list[int], chunk: int) -> np.ndarray[Any, Any]:
    assert model.built.cache is not None
    decoder = Decoder.start(model.compiled, model.built.cache, 1, model.context)
    picks = [decoder.prefill([tokens[at : at + chunk]], [at])[0] for at in range(0, len(tokens), chunk)]
    return picks[-1].logits


def test_bits_do_not_depend_on_chunks(stories: Model) -> None:
    tokens = [1, *np.random.default_rng(0).integers(3, 500, 149).tolist()]
    full = forward(stories, tokens, 150)
    for chunk in (1, 7, 64):
        assert forward(stories, tokens, chunk).tobytes() == full.tobytes()


def test_bits_do_not_depend_on_batch_neighbours(stories: Model) -> None:
    rng = np.random.default_rng(1)
    rows = [rng.integers(3, 500, n).tolist() for n in (5, 70, 1)]
    assert stories.built.cache is not None
    decoder = Decoder.start(stories.compiled, stories.built.cache, 3, stories.context)
    together = decoder.prefill(rows, [0, 0, 0])
    for row, own in zip(rows, together, strict=True):
        assert forward(stories, row, 512).tobytes() == own.logits.tobytes()


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


# -- random small models ---------------------------------------------------------------------------------------------
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True, "num_key_value_heads": 6},
    "odd heads": {"hidden_size": 60, "num_attention_heads": 3, "num_key_value_heads": 1, "num_hidden_layers": 3},
    "one head": {"hidden_size": 34, "num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 7},
    "many heads for one": {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1},
    "head_dim": {"head_dim": 26, "num_attention_heads": 4, "num_key_value_heads": 2},
    "wide heads": {"head_dim": 130, "num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "mlp biases": {"mlp_bias": True, "tie_word_embeddings": True},
    "eps": {"rms_norm_eps": 0.3, "rope_parameters": {"rope_type": "default", "rope_theta": 77.0}},
    "gelu": {"hidden_act": "gelu"},
    "gelu_pytorch_tanh": {"hidden_act": "gelu_pytorch_tanh"},
    "relu": {"hidden_act": "relu"},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.5}},
    "llama3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
        },
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 8.0, "mscale": 0.9, "mscale_all_dim": 0.4,
        },
    },
}  # fmt: skip


@pytest.mark.parity
@pytest.mark.parametrize("name", CONFIGS)
def test_random_models_equal_transformers(tmp_path: Path, name: str) -> None:
    check(tmp_path, save(tmp_path, "Llama", **CONFIGS[name]))


@pytest.mark.parity
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_rounded_weights_are_computed_with_as_they_are(tmp_path: Path, dtype: str) -> None:
    check(tmp_path, save(tmp_path, "Llama", dtype=dtype, tie_word_embeddings=True, attention_bias=True))


@pytest.mark.parity
def test_shards_are_one_model(tmp_path: Path) -> None:
    model = save(tmp_path, "Llama", shards="30KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    check(tmp_path, model)


@pytest.mark.parity
@pytest.mark.parametrize("context", [90, 64])
def test_dynamic_rope_is_that_of_the_context(tmp_path: Path, context: int) -> None:
    """transformers goes by the longest sequence so far; with all as long as the context, that is the same."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.5}
    model = save(tmp_path, "Llama", max_position_embeddings=64, rope_parameters=rope)
    check(tmp_path, model, context=context, length=context)


@pytest.mark.parity
@pytest.mark.parametrize("context", [48, 90])
def test_longrope_is_that_of_the_context(tmp_path: Path, context: int) -> None:
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "original_max_position_embeddings": 48,
        "short_factor": [1.0, 1.1, 1.3, 2.0], "long_factor": [1.5, 2.0, 4.0, 9.0],
    }  # fmt: skip
    model = save(tmp_path, "Llama", rope_parameters=rope)
    check(tmp_path, model, context=context, length=context)


@pytest.mark.parity
@pytest.mark.parametrize("window", [1, 7, 64, 90, None])
@pytest.mark.parametrize("name", ["head_dim", "odd heads", "tied"])
def test_mistral_sees_a_window(tmp_path: Path, name: str, window: int | None) -> None:
    check(tmp_path, save(tmp_path, "Mistral", sliding_window=window, **CONFIGS[name]))


@pytest.mark.parity
def test_the_public_calls_give_the_same(tmp_path: Path) -> None:
    model = save(tmp_path, "Llama", **CONFIGS["llama3"])
    tokens = np.random.default_rng(3).integers(0, 96, 50).tolist()
    with load(tmp_path) as mine:
        assert difference(mine.logits(tokens), logits(model, tokens)) < TOLERANCE


@pytest.mark.parity
def test_the_tiny_llama3_of_the_assets(tmp_path: Path) -> None:
    folder = ASSETS / "tiny-random" / "tiny_llama3"
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    check(folder, transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())

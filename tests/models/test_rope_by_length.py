"""RoPE that depends on the length of a sequence: dynamic NTK and longrope, against `transformers`, call by call."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from reference_models import TOLERANCE, logits, save
from small_llama import difference

import rlx
from rlx.engine.decoder import Decoder
from rlx.engine.page_pool import PagePool
from rlx.runtime.kv_spec import KvCacheSpec

LIMIT = 48
LONG = {
    "rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0, 1.1, 1.3, 1.4],
    "long_factor": [1.5, 2.0, 4.0, 9.0],
}  # fmt: skip
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": (
        "Phi3",
        {"rope_parameters": LONG, "original_max_position_embeddings": LIMIT, "pad_token_id": 0, "eos_token_id": 1},
    ),
    "dynamic": (
        "Llama",
        {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
         "max_position_embeddings": LIMIT},
    ),
    "both": (
        "Gemma3",
        {
            "head_dim": 8, "sliding_window": 5, "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "max_position_embeddings": 256, "rope_parameters": {
                "full_attention": {**LONG, "original_max_position_embeddings": LIMIT},
                "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            },
        },
    ),
}  # fmt: skip
TOKENS = np.random.default_rng(5).integers(2, 96, 150).tolist()


def fresh(model: Any) -> Any:
    """`transformers` without what earlier calls have left in its tables."""
    for module in ropes(model):
        if hasattr(module, "original_inv_freq"):
            module.register_buffer("inv_freq", module.original_inv_freq, persistent=False)
            module.max_seq_len_cached = module.original_max_seq_len
    return model


def generated(model: Any, prompt: list[int], count: int) -> list[int]:
    """The likeliest tokens. Phi-3 reads all tokens again when it changes to the long factors: here it always does."""
    import torch

    tokens, past = list(prompt), None
    for _ in range(count):
        with torch.no_grad():
            if any(hasattr(m, "long_inv_freq") or "longrope" in str(m.rope_type) for m in ropes(model)):
                result = model(torch.tensor([tokens]), use_cache=False)
            else:
                new = tokens if past is None else tokens[-1:]
                result = model(torch.tensor([new]), past_key_values=past, use_cache=True)
                past = result.past_key_values
        tokens.append(int(result.logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def ropes(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "rope_type")]


@pytest.mark.parity
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("context", [40, 150])
def test_prompts_of_any_length_equal_transformers(tmp_path: Path, name: str, context: int) -> None:
    family, settings = MODELS[name]
    wanted = save(tmp_path, family, **settings)
    with rlx.load(tmp_path, context=context) as model:
        for length in (3, LIMIT - 1, LIMIT, LIMIT + 1, 77, 150, 9):
            if length <= context:
                actual = model.logits(TOKENS[:length])
                assert difference(actual, logits(fresh(wanted), TOKENS[:length])) < TOLERANCE, length


@pytest.mark.parity
@pytest.mark.parametrize("name", MODELS)
def test_texts_that_grow_beyond_the_limit_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    family, settings = MODELS[name]
    wanted = save(tmp_path, family, **settings)
    with rlx.load(tmp_path, context=150) as model:
        for start, count in ((40, 30), (60, 20), (40, 60)):  # the last one begins with what the first one left
            actual = model.generate(TOKENS[:start], max_tokens=count, stop=[])
            assert actual.tokens == generated(fresh(wanted), TOKENS[:start], count)


@pytest.mark.parity
def test_rows_of_a_batch_go_by_their_own_length(tmp_path: Path) -> None:
    family, settings = MODELS["longrope"]
    wanted = save(tmp_path, family, **settings)
    prompts = [TOKENS[:10], TOKENS[:45], TOKENS[3:70]]
    with rlx.load(tmp_path, context=150) as model:
        for prompt, actual in zip(prompts, model.generate(prompts, max_tokens=12), strict=True):
            assert actual.tokens == generated(wanted, prompt, 12)


@pytest.fixture
def small(tmp_path: Path) -> Any:
    """A Llama whose RoPE changes at a length of 16; what is compared is rlx read in one way and in another."""
    from small_llama import SETTINGS, random_weights, write_folder

    scaling = {"type": "longrope", "short_factor": [1.0, 1.1, 1.3, 1.4], "long_factor": [1.5, 2.0, 4.0, 9.0]}
    said = {**SETTINGS, "rope_scaling": scaling, "original_max_position_embeddings": 16, "max_position_embeddings": 64}
    write_folder(tmp_path, random_weights(SETTINGS), said)
    with rlx.load(tmp_path) as model:
        yield model


def test_a_row_that_grows_beyond_the_limit_is_read_again(small: Any) -> None:
    tokens = [int(t) % 64 for t in TOKENS[:20]]
    decoder = Decoder.start(small.compiled, small.built.cache, 2, 64)
    decoder.prefill([tokens[:15], tokens[:3]], [0, 0])
    for i in range(15, 19):
        stepped = decoder.decode([tokens[i], tokens[i - 12]])
    assert decoder.cache.tokens == [tokens[:19], tokens[:7]]
    assert np.allclose(stepped[0].logits, small.logits(tokens[:19])[-1], atol=1e-5)
    assert np.allclose(stepped[1].logits, small.logits(tokens[:7])[-1], atol=1e-5)
    short = small.logits(tokens[:16])[:10]
    assert np.abs(small.logits(tokens[:17])[:10] - short).max() > 0.01 * np.abs(short).max()


def test_a_text_of_dynamic_frequencies_may_fill_the_context(tmp_path: Path) -> None:
    """There are frequencies for every length up to the last; what is compared is one row with two of a batch."""
    from small_llama import SETTINGS, random_weights, write_folder

    scaling = {"rope_type": "dynamic", "factor": 2.0}
    said = {**SETTINGS, "rope_scaling": scaling, "max_position_embeddings": 16}
    write_folder(tmp_path, random_weights(SETTINGS), said)
    tokens = [int(t) % 64 for t in TOKENS[:32]]
    with rlx.load(tmp_path) as model:
        assert model.context == 32
        for start in (31, 27, 9):
            actual = model.generate(tokens[:start], max_tokens=32, stop=[])
            assert len(actual.tokens) == 32 - start
        both = model.generate([tokens[:9], tokens[:27]], max_tokens=32, stop=[])
        assert both[0].tokens == actual.tokens and len(both[1].tokens) == 5
        assert np.isfinite(model.logits(tokens)).all()


def test_a_prompt_goes_on_only_from_keys_of_its_side_of_the_limit(small: Any) -> None:
    tokens = [int(t) % 64 for t in TOKENS[:40]]
    assert small.generate(tokens[:12], max_tokens=2).usage.cached_tokens == 0
    assert small.generate(tokens[:14], max_tokens=1).usage.cached_tokens == 12
    assert small.generate(tokens[:30], max_tokens=1).usage.cached_tokens == 0
    assert small.generate(tokens[:33], max_tokens=1).usage.cached_tokens == 30


def test_a_cache_knows_by_which_length_its_keys_were_rotated() -> None:
    pool = PagePool(KvCacheSpec(1, 1, 8, lengths=((16, True),)), 64)
    cache = pool.new(2)
    for length in range(14, 20):  # one by one: each key beyond the limit has frequencies of its own
        cache.prepare_write(0, length - 1 if length > 14 else 0, length)
        cache.tokens[0] = list(range(length))
    cache.release(0, ())
    assert [cache.restore(1, list(range(n)), ()) for n in (10, 16, 17, 19)] == [9, 15, 0, 0]
    pool.clear()
    cache.prepare_write(0, 0, 19, 19)  # all at once
    cache.tokens[0] = list(range(19))
    cache.release(0, ())
    assert [cache.restore(1, list(range(n)), ()) for n in (10, 18, 19)] == [0, 0, 18]

"""Layers with a sliding window keep a ring, packed caches are small: same text, less memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama

from rlx.engine import call_sizes, page_pool
from rlx.engine.language_model import Completion, LanguageModel
from rlx.errors import CapabilityError
from rlx.runtime.kv_spec import KvCacheSpec

from .conftest import language_model

WINDOW, LONG = 40, 4096
CONFIG: dict[str, Any] = {
    "model_type": "mistral", "sliding_window": WINDOW, "hidden_size": 128, "max_position_embeddings": 2 * LONG,
}  # fmt: skip
SAMPLING: dict[str, Any] = {"max_tokens": 5, "logprobs": 4, "temperature": 0.9, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("window")
    tiny_llama.write(path, **CONFIG)
    return path


@pytest.fixture
def model(folder: Path) -> LanguageModel:
    return language_model(folder, context=2 * LONG)


def prompt(count: int, seed: int = 0) -> list[int]:
    return [int(token) for token in np.random.default_rng(seed).integers(0, 97, count)]


def same(a: Completion, b: Completion) -> bool:
    """Equal tokens, and equal bits of their log-probabilities."""
    return a.tokens == b.tokens and a.logprobs == b.logprobs


def told(model: LanguageModel, tokens: list[int]) -> Completion:
    """Without anything that is cached."""
    model.caches.clear()
    return model.generate(tokens, **SAMPLING)


def told_by_full_cache(folder: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> Completion:
    """What a cache of all positions gives."""
    with monkeypatch.context() as patched:
        patched.setattr(page_pool, "SPARE", 4 * LONG)
        return language_model(folder, context=2 * LONG).generate(tokens, **SAMPLING)


# -- rings ------------------------------------------------------------------------------------------------------------
def test_logits_over_a_ring_are_those_of_numpy(model: LanguageModel, tmp_path: Path) -> None:
    tokens = prompt(900)  # the ring has 576 positions
    wanted = tiny_llama.forward(tiny_llama.write(tmp_path, **CONFIG), tokens, **CONFIG)["logits"]
    logits = model.logits(tokens)
    assert (np.abs(logits - wanted).max(-1) / np.abs(wanted).max(-1)).max() < 2e-5


@pytest.mark.parity
def test_logits_over_a_ring_are_those_of_transformers(model: LanguageModel, folder: Path) -> None:
    transformers, torch = pytest.importorskip("transformers"), pytest.importorskip("torch")
    theirs = transformers.MistralForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    tokens = prompt(640, seed=1)  # its RoPE is f32: angles of more tokens are no longer exact
    with torch.no_grad():
        wanted = theirs(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    logits = model.logits(tokens)
    assert (np.abs(logits - wanted).max(-1) / np.abs(wanted).max(-1)).max() < 2e-4


@pytest.mark.parametrize("cache", ["f32", "q8_0"])
def test_long_prompts_in_any_chunks_give_the_text_of_a_whole_cache(
    folder: Path, cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, completions = prompt(LONG), []
    for chunk, spare in ((64, 512), (500, 512), (256, 4 * LONG)):
        with monkeypatch.context() as patched:
            patched.setattr(call_sizes, "CHUNK", chunk)
            patched.setattr(page_pool, "SPARE", spare)
            completions.append(language_model(folder, context=2 * LONG, cache=cache).generate(tokens, **SAMPLING))
    assert same(completions[0], completions[2]) and same(completions[1], completions[2])


def test_memory_does_not_grow_with_the_text(model: LanguageModel) -> None:
    sizes = set()
    for count in (1000, 3000):
        told(model, prompt(count))
        sizes.add(model.memory().cache)
    # keys and values of 2 layers, 2 heads of 32, a window and 512 more in whole blocks
    assert sizes == {2 * 2 * 2 * 576 * 32 * 4}


def test_a_prompt_goes_on_in_a_ring_if_what_it_needs_is_there(
    model: LanguageModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Going back by some tokens works, by many it does not: then the prompt is read again. The text is the same."""
    first = prompt(1500)
    for shared, cached in ((1400, 1400), (700, 0), (1499, 1499), (1000, 1000)):
        model.caches.clear()
        model.generate(first, **SAMPLING)
        other = first[:shared] + prompt(100, seed=shared)
        again = model.generate(other, **SAMPLING)
        assert again.usage.cached_tokens == cached
        assert same(again, told_by_full_cache(folder, other, monkeypatch))


def test_going_back_twice_counts_from_the_newest_position(
    model: LanguageModel, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was overwritten stays lost, however short the text has become since."""
    first = prompt(1500)
    model.generate(first, **SAMPLING)
    second = first[:1000] + prompt(20, seed=1)
    assert model.generate(second, **SAMPLING).usage.cached_tokens == 1000
    third = first[:900] + prompt(20, seed=2)
    completion = model.generate(third, **SAMPLING)
    assert completion.usage.cached_tokens == 0 and same(completion, told_by_full_cache(folder, third, monkeypatch))


def test_unequal_batches_have_the_text_of_each_alone(model: LanguageModel) -> None:
    beginning = prompt(700, seed=9)
    prompts = [prompt(n, seed=n) for n in (5, 1200, 70, 640)] + [beginning + prompt(n, seed=n) for n in (3, 90)]
    alone = [told(model, tokens) for tokens in prompts]
    model.caches.clear()
    together = model.generate(prompts, **SAMPLING)
    assert all(map(same, alone, together))
    more = [tokens + prompt(30, seed=1) for tokens in prompts]  # from the rows that were kept
    again = model.generate(more, **SAMPLING)
    assert any(c.usage.cached_tokens for c in again)
    assert all(same(completion, told(model, tokens)) for completion, tokens in zip(again, more, strict=True))


def test_the_window_of_a_layer_says_what_it_keeps(model: LanguageModel) -> None:
    spec = model.caches.spec
    assert spec.windows == (WINDOW, WINDOW)
    pool = page_pool.PagePool(KvCacheSpec(3, 2, 32, "f32", (0, 64, None)), 4096)
    cache = pool.new(1)
    cache.reserve(4000)
    cache.prepare_write(0, 0, 512)
    cache.prepare_write(0, 512, 1024)
    assert set(pool.buffers) == {"keys.0", "values.0", "keys.1", "values.1"}
    assert {window: pages.used for window, pages in pool.pages.items()} == {0: 16, 64: 9}
    assert {n: a.shape for n, a in cache.rows(0, 1).items() if "table" in n} == {"table": (1, 63), "table64": (1, 9)}


# -- packed caches ----------------------------------------------------------------------------------------------------
def test_a_packed_cache_takes_a_quarter_and_says_nearly_the_same(folder: Path, tmp_path: Path) -> None:
    tokens = prompt(300)
    weights = tiny_llama.write(tmp_path, **CONFIG)
    wanted = tiny_llama.forward(weights, tokens, **CONFIG)["layers.0.attn"]
    model, wide = (language_model(folder, context=512, cache=kind) for kind in ("q8_0", "f32"))
    attn = model.run(tokens, capture=["layers.0.attn"])["layers.0.attn"]
    error = np.abs(attn - wanted).max(-1) / np.abs(wanted).max()
    assert np.median(error) > 1e-4 and error.max() < 0.03
    for m in (model, wide):
        m.generate(tokens, max_tokens=1)
    assert model.memory().cache * 128 == wide.memory().cache * 34
    assert "cache q8_0" in model.fingerprint(0)


def test_heads_that_are_no_whole_blocks_are_refused(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path)
    with pytest.raises(CapabilityError, match=r"(?s)q8_0 packs 32 numbers per block, heads of 12 do not fit.*f16"):
        language_model(tmp_path, cache="q8_0")

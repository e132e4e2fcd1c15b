"""Same bits on real weights: threads, chunks of a prompt, neighbours in a batch and known prefixes change nothing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from real_models import model_file

import rlx
from rlx.engine import call_sizes
from rlx.engine.language_model import Completion, LanguageModel

pytestmark = pytest.mark.large
MODEL = "smollm2-135m"


@pytest.fixture(scope="module")
def path() -> Path:
    return model_file(MODEL)


@pytest.fixture
def fresh(model: LanguageModel) -> Iterator[LanguageModel]:
    """The model with nothing in its prefix cache."""
    model.caches.clear()
    yield model


@pytest.fixture(scope="module")
def tokens(model: LanguageModel, wiki: str) -> list[int]:
    return model.tokenizer.encode(wiki)[:200]


def bits(completion: Completion) -> tuple[list[int], object]:
    """Tokens and the logprobs of each step: equal only if the logits were."""
    return completion.tokens, completion.logprobs


def complete(model: LanguageModel, tokens: list[int]) -> Completion:
    return model.generate(tokens, max_tokens=8, logprobs=20)


def test_one_thread_and_two(model: LanguageModel, path: Path, tokens: list[int]) -> None:
    with rlx.load(path, threads=1, context=1024, precision="f32") as single:
        assert isinstance(single, LanguageModel)
        assert single.logits(tokens).tobytes() == model.logits(tokens).tobytes()
        assert bits(complete(single, tokens)) == bits(complete(model, tokens))


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks(fresh: LanguageModel, tokens: list[int], chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    unchunked, text = fresh.logits(tokens), complete(fresh, tokens)
    fresh.caches.clear()
    monkeypatch.setattr(call_sizes, "CHUNK", chunk)
    assert fresh.logits(tokens).tobytes() == unchunked.tobytes()
    assert bits(complete(fresh, tokens)) == bits(text)


@pytest.mark.parametrize("shared", [1, 40, 64, 150, 199])
def test_a_known_prefix(fresh: LanguageModel, tokens: list[int], shared: int) -> None:
    unknown = complete(fresh, tokens)
    assert unknown.usage.cached_tokens == 0
    fresh.caches.clear()
    fresh.generate([*tokens[:shared], 0], max_tokens=1)
    known = complete(fresh, tokens)
    assert known.usage.cached_tokens == shared
    assert bits(known) == bits(unknown)


def test_neighbours_in_the_batch(fresh: LanguageModel, tokens: list[int]) -> None:
    rows = [tokens, tokens[50:57], tokens[150:151], tokens[90:190], tokens[20:84]]
    together = fresh.generate(rows, max_tokens=8, logprobs=20)
    for row, completion in zip(rows, together, strict=True):
        fresh.caches.clear()
        assert bits(complete(fresh, row)) == bits(completion)


def test_callers_at_the_same_time(fresh: LanguageModel, tokens: list[int]) -> None:
    rows = [tokens[start : start + 30] for start in range(0, 160, 20)]
    alone = [complete(fresh, row) for row in rows]
    completions: dict[int, Completion] = {}
    threads = [
        threading.Thread(target=lambda i=i: completions.__setitem__(i, complete(fresh, rows[i])))
        for i in range(len(rows))
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [bits(completions[i]) for i in range(len(rows))] == [bits(c) for c in alone]

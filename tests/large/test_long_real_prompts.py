"""Gemma 3, most layers of which see 512 tokens only, on a prompt of 4,096: its rings are written over several times."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from real_models import model_file

import rlx
from rlx.engine import call_sizes
from rlx.engine.language_model import LanguageModel

pytestmark = pytest.mark.large
LONG, COUNT, TOP = 4096, 32, 20
SLIDING, FULL = 15, 3  # layers of each kind
RING = 512 + 512  # positions: the window, and as many as a call may read at once
POSITION = {"f32": 2 * 256 * 4, "f16": 2 * 256 * 2}  # bytes of keys and values in a layer


@pytest.fixture(scope="module")
def path() -> Path:
    return model_file("gemma3-270m")


@pytest.fixture(scope="module", params=["auto", "f32"])
def gemma(path: Path, request: pytest.FixtureRequest) -> Iterator[LanguageModel]:
    """With activations rounded to 8 bits, as it is unless asked for otherwise, and without."""
    with rlx.load(path, threads=2, context=2 * LONG, precision=request.param) as model:
        assert isinstance(model, LanguageModel)
        yield model


@pytest.fixture(scope="module")
def tokens(gemma: LanguageModel, wiki: str) -> list[int]:
    ids = gemma.token_ids(wiki)[:LONG]
    assert len(ids) == LONG
    return ids


def test_chunks_of_64_and_500_give_the_same_text(
    gemma: LanguageModel, tokens: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    completions = []
    for chunk in (64, 500):
        gemma.caches.clear()
        monkeypatch.setattr(call_sizes, "CHUNK", chunk)
        completions.append(gemma.generate(tokens, max_tokens=COUNT, logprobs=TOP))
    small, large = completions
    assert len(small.tokens) == COUNT and small.usage.cached_tokens == large.usage.cached_tokens == 0
    assert small.text == large.text and small.tokens == large.tokens
    assert small.logprobs == large.logprobs  # bit by bit: equal texts are no accident of clear margins


def test_rings_have_the_same_size_whatever_the_length(gemma: LanguageModel, tokens: list[int]) -> None:
    rest, position = [], POSITION[gemma.cache_dtype]
    for count in (1500, LONG - COUNT):
        written = -(-(count + COUNT - 1) // 64) * 64  # in whole pages; the last token is not fed
        gemma.caches.clear()
        gemma.generate(tokens[:count], max_tokens=COUNT)
        rest.append(gemma.memory().cache - FULL * written * position)
    assert rest == [SLIDING * RING * position] * 2


def test_probabilities_are_those_of_float64(path: Path, wiki: str) -> None:
    """After a prompt that was read in chunks, and after each of the tokens that followed one by one."""
    pytest.importorskip("transformers")
    from float64 import Float64Model

    with rlx.load(path, threads=2, context=2 * LONG, precision="f32") as gemma:
        assert isinstance(gemma, LanguageModel)
        tokens = gemma.token_ids(wiki)[:LONG]
        completion = gemma.generate(tokens, max_tokens=8, logprobs=TOP)
    logits = Float64Model(path).logits(tokens + completion.tokens[:-1], last=8)
    logits -= logits.max(1, keepdims=True)
    wanted = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    assert completion.logprobs is not None
    for row, at in zip(wanted, completion.logprobs, strict=True):
        ids, numbers = map(np.array, zip(*((t.token, t.logprob) for t in at.top), strict=True))
        assert np.abs(numbers - row[ids]).max() < 1e-3
        assert row[at.token] == row.max()

"""Log-probabilities of given texts, against log-softmax in NumPy; and what records of tokens say."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama
from scipy.special import log_softmax

from rlx.engine import call_sizes
from rlx.engine.language_model import LanguageModel
from rlx.errors import RequestError

TEXT = np.random.default_rng(0).integers(0, 97, 30).tolist()


def wanted_scores(folder: Path, tokens: list[int]) -> Any:
    """The log-probability of each token but the first."""
    rows = log_softmax(tiny_llama.forward(tiny_llama.write(folder), tokens)["logits"], -1)
    return rows[np.arange(len(tokens) - 1), tokens[1:]]


def test_a_score_is_that_of_numpy(tiny: LanguageModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = wanted_scores(tmp_path, TEXT)
    score = tiny.score(TEXT, logprobs=3)
    assert [t.token for t in score.tokens] == TEXT[1:]
    np.testing.assert_allclose([t.logprob for t in score.tokens], wanted, atol=1e-4)
    assert score.logprob == pytest.approx(wanted.sum(), abs=1e-3)
    assert score.perplexity == pytest.approx(math.exp(-wanted.mean()), rel=1e-4)
    assert all(len(t.top) == 3 and t.top[0].logprob >= t.top[1].logprob for t in score.tokens)
    monkeypatch.setattr(call_sizes, "CHUNK", 7)
    assert tiny.score(TEXT, logprobs=3) == score


def test_batches_and_prompts_do_not_show(tiny: LanguageModel, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [TEXT, TEXT[:4], [5], TEXT[3:20], TEXT[::-1]]
    monkeypatch.setattr(call_sizes, "ROWS", 3)
    assert tiny.score(texts) == [tiny.score(text) for text in texts]
    assert tiny.score([5]).tokens == [] and math.isnan(tiny.score([5]).perplexity)
    assert math.isnan(tiny.score([5]).logprob)
    text_score = tiny.score(TEXT)
    after = tiny.score(TEXT[12:], prompt=TEXT[:12])
    assert after.tokens == text_score.tokens[11:]
    tiny.generate(TEXT, max_tokens=1)  # so that the prefix cache has the prompt
    assert tiny.score([TEXT[12:], TEXT[12:15]], prompt=TEXT[:12])[0] == after


def test_texts_that_cannot_be_scored(tiny: LanguageModel) -> None:
    with pytest.raises(RequestError, match="score: text 0: there are no tokens"):
        tiny.score([[]])
    with pytest.raises(RequestError, match="score: text 1: has no tokens after the prompt"):
        tiny.score([[3], []], prompt=[1, 2])  # its sum would be 0, the best of all scores
    with pytest.raises(RequestError, match="the context holds 256"):
        tiny.score([1] * 300)
    with pytest.raises(RequestError, match="score: messages are for chat"):
        tiny.score([{"role": "user", "content": "hi"}])  # type: ignore[list-item]


def test_tokens_have_their_text(stories: LanguageModel) -> None:
    done = stories.generate("Once upon a time", max_tokens=5, logprobs=True)
    assert done.logprobs is not None and len(done.logprobs) == 5
    assert "".join(t.text for t in done.logprobs) == done.text
    assert done.logprobs[0].top == (done.logprobs[0].top[0],) and "of token" in repr(done.logprobs[0])
    score = stories.score(", there was", prompt="Once upon a time")
    assert b"".join(t.bytes for t in score.tokens) == b", there was"
    likely, unlikely = stories.score([", there was", " zebra quantum"], prompt="Once upon a time")
    assert likely == score and likely.logprob > unlikely.logprob
    assert "perplexity" in repr(score)


def test_log_probabilities_come_while_a_text_streams(stories: LanguageModel) -> None:
    stream, counts = stories.stream("Once upon a time", max_tokens=6, logprobs=2), []
    for _ in stream:
        assert stream.logprobs is not None
        counts.append(len(stream.logprobs))
        assert stream.text == "".join(t.text for t in stream.logprobs) and len(stream.tokens) == counts[-1]
    assert counts == [1, 2, 3, 4, 5, 6] and "6 tokens, ended" in repr(stream)

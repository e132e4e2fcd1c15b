"""Scores of given texts: the log-probabilities of their tokens, computed in batches of similar length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.engine import call_sizes
from rlx.engine.decoder import Decoder
from rlx.engine.kv_cache import aligned
from rlx.engine.logprobs import Score, text_logprobs
from rlx.errors import RequestError
from rlx.fast_dataclass import dataclass

if TYPE_CHECKING:
    from rlx.engine.language_model import LanguageModel

LOGIT_BYTES = 64 << 20  # of logits per call
NAMESPACE = ("", "")  # of the prefix cache: that of `generate`


@dataclass(frozen=True)
class ScoredText:
    """The tokens of a prompt and a text; those from `begin` on are scored."""

    tokens: list[int]
    begin: int


def text_after(
    model: LanguageModel, text: str | Sequence[int], prompt: str | Sequence[int] | None, where: str
) -> ScoredText:
    """Encode a text together with its prompt."""
    if prompt is None:
        tokens, begin = model.prompt_ids(text, where), 1
    elif isinstance(text, str) and isinstance(prompt, str):
        before, tokens = model.prompt_ids(prompt, where), model.prompt_ids(prompt + text, where)
        # the last tokens of the prompt may merge with the first ones of the text
        shared = enumerate(zip(before, tokens, strict=False))
        begin = next((i for i, (a, b) in shared if a != b), min(len(before), len(tokens)))
    else:
        before = model.prompt_ids(prompt, where)
        tokens, begin = [*before, *model.token_ids(text, where)], len(before)
    scored = ScoredText(model.check_fits(tokens, 0, where), max(begin, 1))
    if prompt is not None and scored.begin >= len(tokens):
        raise RequestError(f"{where}: has no tokens after the prompt", hint="an empty text has no log-probability")
    return scored


def scores_of(model: LanguageModel, texts: Sequence[ScoredText], top: int) -> list[Score]:
    """The scores of texts, with the `top` likeliest tokens at each position."""
    scores = [Score([]) for _ in texts]
    for _ in score_steps(model, texts, scores, top):
        pass
    return scores


def score_steps(
    model: LanguageModel, texts: Sequence[ScoredText], scores: Sequence[Score], top: int, *,
    namespace: tuple[str, ...] = NAMESPACE, max_tokens: Callable[[], int] = lambda: call_sizes.CHUNK,
) -> Iterator[int]:  # fmt: skip
    """Fill in the scores of texts, a call of at most `max_tokens()` tokens per step; yields the number of tokens."""
    scored = [i for i, text in enumerate(texts) if text.begin < len(text.tokens)]
    order = sorted(scored, key=lambda i: len(texts[i].tokens))
    rows = 1 if model.caches.spec.states else call_sizes.ROWS  # how the delta rule rounds depends on the longest text
    for first in range(0, len(order), rows):
        batch = order[first : first + rows]
        yield from _score_batch(
            model, [texts[i] for i in batch], [scores[i] for i in batch], top, namespace, max_tokens
        )


def _score_batch(
    model: LanguageModel, texts: Sequence[ScoredText], scores: Sequence[Score], top: int, namespace: tuple[str, ...],
    max_tokens: Callable[[], int],
) -> Iterator[int]:  # fmt: skip
    cache = model.caches.new(len(texts))
    decoder = Decoder(model.compiled, cache)
    # the logits of a prompt are not needed, so its beginning may come from the prefix cache
    places = [cache.restore(row, t.tokens[: t.begin], namespace, len(t.tokens)) for row, t in enumerate(texts)]
    while any(place < len(text.tokens) for place, text in zip(places, texts, strict=True)):
        tokens = min(LOGIT_BYTES // (4 * model.facts.vocab), max_tokens(), call_sizes.CHUNK)
        chunk = aligned(tokens // len(texts), cache.spec)
        pieces = [text.tokens[place : place + chunk] for place, text in zip(places, texts, strict=True)]
        _score_pieces(model, decoder, texts, scores, pieces, places, top)
        places = [place + len(piece) for place, piece in zip(places, pieces, strict=True)]
        yield sum(map(len, pieces))
    for row in range(len(texts)):
        cache.release(row, namespace)


def _score_pieces(
    model: LanguageModel, decoder: Decoder, texts: Sequence[ScoredText], scores: Sequence[Score],
    pieces: Sequence[Sequence[int]], places: Sequence[int], top: int,
) -> None:  # fmt: skip
    """Run a piece of each text and append the log-probabilities of the tokens that follow those of the piece."""
    width = max(map(len, pieces))
    picked: list[int] = []  # tokens of the padded batch whose logits are needed
    following: list[list[int]] = []  # per row, the tokens that come after them
    for row, (text, piece, place) in enumerate(zip(texts, pieces, places, strict=True)):
        scored = [i for i in range(len(piece)) if text.begin <= place + i + 1 < len(text.tokens)]
        picked += [row * width + i for i in scored]
        following.append([text.tokens[place + i + 1] for i in scored])
    lengths = [len(text.tokens) for text in texts]
    outputs = decoder.run(pieces, places, np.array(picked or [0], np.int32), lengths=lengths)
    logits = np.asarray(outputs[0])[:, : model.vocab_size]
    for score, tokens in zip(scores, following, strict=True):
        score.tokens.extend(text_logprobs(logits[: len(tokens)], tokens, top, model.token_bytes))
        logits = logits[len(tokens) :]

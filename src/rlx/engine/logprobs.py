"""Log-probabilities of tokens, with their text: of generated ones, and of a given text (`LanguageModel.score`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NoReturn

import numpy as np

from rlx.arrays import Array
from rlx.engine.sampler import most_likely
from rlx.errors import shortened
from rlx.fast_dataclass import dataclass

TokenBytes = Callable[[int], bytes]


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of a token, and of the likeliest tokens in its place, before temperature and filters."""

    token: int
    logprob: float
    bytes: bytes = b""  # of its text; empty without a tokenizer
    top: tuple[Logprob, ...] = ()  # likeliest first

    @property
    def text(self) -> str:
        """The text of the token; bytes that are part of a character are replaced by �."""
        return self.bytes.decode("utf-8", "replace")

    @property
    def probability(self) -> float:
        return math.exp(self.logprob)

    def __repr__(self) -> str:
        shown = f" {self.text!r}" if self.bytes else ""
        top = f", top {', '.join(repr(t.text) if t.bytes else str(t.token) for t in self.top)}" if self.top else ""
        return f"<logprob {self.logprob:.4f} of token {self.token}{shown}{top}>"


@dataclass(frozen=True)
class Score:
    """The log-probabilities of a given text, token by token.

    A token's probability depends on those before it, so the first token of a text has one only after a prompt, or after
    a special token that the tokenizer puts before every text.
    """

    tokens: list[Logprob]

    @property
    def logprob(self) -> float:
        """The log-probability of the text: the sum over its tokens; NaN without tokens."""
        return math.fsum(t.logprob for t in self.tokens) if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """`exp` of the mean negative log-probability per token; NaN without tokens."""
        return math.exp(-self.logprob / len(self.tokens)) if self.tokens else math.nan

    def __repr__(self) -> str:
        text = b"".join(t.bytes for t in self.tokens).decode("utf-8", "replace")
        shown = f" of {shortened(text, 40)!r}" if text else ""
        return f"<score {self.logprob:.3f}{shown}: {len(self.tokens)} tokens, perplexity {self.perplexity:.2f}>"

    def _repr_html_(self) -> str:
        from rlx.notebook import Bar, Cell, box, table  # few programs need it

        rows: list[list[Cell]] = [
            [t.token, t.text, Bar(f"{t.logprob:.3f}", t.probability), ", ".join(o.text for o in t.top)]
            for t in self.tokens
        ]
        return box(repr(self)[1:-1], table(("token", "text", "log-probability", "likeliest"), rows))

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Called for missing attributes: names of other libraries raise an explanation."""
            from rlx.engine.foreign_names import missing_attribute  # only errors need it

            raise missing_attribute(self, name)


def logprob_of(
    logits: Array, token: int, logprob: float, top: int, token_bytes: TokenBytes | None, log_sum: float | None = None
) -> Logprob:
    """The record of a token whose log-probability is known.

    Those of the likeliest tokens follow from the logits alone, so that they do not depend on which token it is.
    """
    if log_sum is None and top:
        log_sum = float(log_sums(logits[None])[0])

    def one(other: int) -> Logprob:
        assert log_sum is not None
        return Logprob(other, float(logits[other]) - log_sum, b"" if token_bytes is None else token_bytes(other))

    likeliest = tuple(one(other) for other in most_likely(logits, top))
    return Logprob(token, logprob, b"" if token_bytes is None else token_bytes(token), likeliest)


def log_sums(logits: Array) -> Array:
    """Log of the sum of exponentials of each row, in f64."""
    highest = logits.max(axis=-1, keepdims=True).astype(np.float64)
    sums: Array = highest[:, 0] + np.log(np.exp(logits - highest).sum(axis=-1))
    return sums


def text_logprobs(logits: Array, tokens: Sequence[int], top: int, token_bytes: TokenBytes | None) -> list[Logprob]:
    """The records of given tokens, from the logits `[tokens, vocab]` of their places."""
    return [
        logprob_of(row, token, float(row[token]) - log_sum, top, token_bytes, log_sum)
        for row, token, log_sum in zip(logits, tokens, log_sums(logits).tolist(), strict=True)
    ]

"""Picking the next token: bias and penalties, then temperature, top-k, top-p, min-p, in the order of Hugging Face.

Temperature 0 is the plain argmax, the lowest id among equals. What is picked depends on the logits, on what came
before and on the seed alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import numpy as np

from rlx import sampling
from rlx.arrays import Array
from rlx.errors import KernelError, RequestError, nearest, shortened
from rlx.sampling import highest_places
from rlx.sampling import log_probabilities as log_probabilities

MOST = 1e30  # of bias and penalties: what float32 holds even when they come together

# setting -> the least and the most that it may be, and that in words. Nothing within overflows float32.
_RANGES: dict[str, tuple[float, float, str]] = {
    "temperature": (0, 1e4, "a number from 0 to 10000"),
    "top_k": (0, 2**53, "a whole number from 0, where 0 is no limit"),
    "top_p": (math.ulp(0.0), 1, "a number above 0, up to 1"),
    "min_p": (0, 1, "a number from 0 to 1"),
    "repetition_penalty": (1e-6, 1e6, "a number from 1e-6 to 1e6, where 1 is none"),
    "frequency_penalty": (-MOST, MOST, f"a number from {-MOST:g} to {MOST:g}"),
    "presence_penalty": (-MOST, MOST, f"a number from {-MOST:g} to {MOST:g}"),
}
# what other programs call these
ALIENS = {
    "temp": "temperature", "do_sample": "temperature", "topk": "top_k", "topp": "top_p", "minp": "min_p",
    "repeat_penalty": "repetition_penalty", "penalty_repeat": "repetition_penalty",
    "penalty_freq": "frequency_penalty", "penalty_present": "presence_penalty", "alpha_frequency": "frequency_penalty",
    "alpha_presence": "presence_penalty", "random_seed": "seed", "bias": "logit_bias",
    "sequence_bias": "logit_bias", "max_new_tokens": "max_tokens", "max_length": "max_tokens",
    "num_predict": "max_tokens", "n_predict": "max_tokens", "max_completion_tokens": "max_tokens",
    "stop_strings": "stop", "stop_sequences": "stop", "top_logprobs": "logprobs", "n_probs": "logprobs",
    "n_ctx": "context in rlx.load", "num_ctx": "context in rlx.load", "n_threads": "threads in rlx.load",
}  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked. Defaults are greedy.

    The repetition penalty counts prompt and answer, as in Hugging Face; the frequency and presence penalties count
    what was picked, as in the OpenAI API. `logit_bias` is added first: -inf bans a token. Without a temperature,
    `top_k`, `top_p` and `min_p` are refused: the likeliest token is picked whatever they say.
    """

    temperature: float | None = None  # None: 0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        for name, (least, most, wanted) in _RANGES.items():
            value = getattr(self, name)
            if value is None and name == "temperature":
                continue
            number = _number(value)
            if not least <= number <= most or (name == "top_k" and number % 1):
                raise RequestError(f"sampling: {name} is {shown(value)}, expected {wanted}")
            object.__setattr__(self, name, int(number) if name == "top_k" else number)
        if self.temperature is None:
            for name, idle in (("top_k", 0), ("top_p", 1), ("min_p", 0)):
                if (value := getattr(self, name)) != idle:
                    raise RequestError(
                        f"sampling: {name} is {value}, which needs a temperature above 0", hint="temperature=1.0"
                    )
        if self.seed is not None and (not _is_index(self.seed) or not 0 <= self.seed < 2**128):
            raise RequestError(f"sampling: seed is {shown(self.seed)}, expected a whole number from 0, below 2**128")
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"sampling: logit_bias is {shown(self.logit_bias)}, expected a mapping from token ids")
        for token, bias in self.logit_bias.items():
            if not _is_index(token):
                raise RequestError(f"sampling: logit_bias has {shown(token)}, expected a token id")
            if not abs(_number(bias)) <= MOST and _number(bias) != -math.inf:
                raise RequestError(
                    f"sampling: logit_bias of token {shown(token)} is {shown(bias)}, "
                    f"expected -inf or a number from {-MOST:g} to {MOST:g}"
                )

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Sampling:
        """From keywords; one that other programs use is told its name here."""
        for name in given:
            if name not in cls.__dataclass_fields__:
                ours = ALIENS.get(name)
                known = (*cls.__dataclass_fields__, "max_tokens", "stop", "logprobs")
                hint = f"here it is called {ours}" if ours else nearest(name, known) or f"known: {', '.join(known)}"
                raise RequestError(f"sampling: no setting is called {name!r}", hint=hint)
        return cls(**given)


def shown(value: object) -> str:
    """A value for a message, which it does not fill."""
    try:
        text = repr(value)
    except ValueError:  # whole numbers beyond some thousand digits have no text
        text = f"a huge {type(value).__name__}"
    return shortened(text, 80)


def _number(value: Any) -> float:
    """A real number, or NaN where it is none or too large to be one."""
    try:
        return float(value) if isinstance(value, Real) and not isinstance(value, bool) else math.nan
    except OverflowError:
        return math.nan


def _is_index(value: Any) -> bool:
    try:
        operator.index(value)
    except TypeError:
        return False
    return not isinstance(value, bool)


class Sampler:
    """Picks the tokens of one sequence; its random numbers depend on the seed alone."""

    def __init__(self, settings: Sampling, prompt: Sequence[int] = (), vocab: int | None = None) -> None:
        self.settings = settings
        for token in settings.logit_bias:
            if vocab is not None and not 0 <= token < vocab:
                raise RequestError(f"sampling: logit_bias has token {shown(token)}, the vocabulary has {vocab} tokens")
        self.seed = _fresh_seed() if settings.seed is None else int(settings.seed)
        self._greedy = not settings.temperature
        self._random = None if self._greedy else np.random.Generator(np.random.Philox(self.seed))
        self._bias = (
            np.array(list(settings.logit_bias), np.int64),
            np.array([*settings.logit_bias.values()], np.float32),
        )
        self._repeats = settings.repetition_penalty != 1
        self._counts = bool(settings.frequency_penalty or settings.presence_penalty)
        self._plain = not (self._repeats or self._counts or settings.logit_bias)
        # Token -> how often it was picked. A prompt may have ids beyond the vocabulary, which are never picked.
        self._seen = {t: 0 for t in prompt if vocab is None or t < vocab} if self._repeats else {}

    def pick(self, logits: Array) -> int:
        """The next token; logits are `[vocab]`, float32."""
        adjusted = logits if self._plain else self._adjusted(logits)
        if self._greedy:
            token = int(adjusted.argmax())
            chosen = adjusted[token]
            if not -math.inf < chosen < math.inf:
                raise _no_numbers(float(chosen))
        else:
            token = self._draw(adjusted)
        if not self._plain:
            self._seen[token] = self._seen.get(token, 0) + 1
        return token

    def _adjusted(self, logits: Array) -> Array:
        """Bias, then penalties."""
        s = self.settings
        result = logits.astype(np.float32)
        tokens, values = self._bias
        result[tokens] += values
        if self._seen:
            seen, counts = (np.fromiter(of, np.int64, len(self._seen)) for of in (self._seen, self._seen.values()))
            sampling.penalise(
                result, seen, counts, repetition=s.repetition_penalty, frequency=s.frequency_penalty,
                presence=s.presence_penalty,
            )  # fmt: skip
        return result

    def _draw(self, adjusted: Array) -> int:
        tokens, weights = candidates(adjusted, self.settings)
        assert self._random is not None
        at = sampling.place(weights, self._random.random())
        return at if tokens is None else int(tokens[at])


def candidates(logits: Array, s: Sampling) -> tuple[Array | None, Array]:
    """The tokens that may be picked (None: all of them) and how likely each is, up to a common factor."""
    highest = logits.max()
    if not -math.inf < highest < math.inf:
        raise _no_numbers(float(highest))
    return sampling.candidates(logits, temperature=s.temperature or 0.0, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)


def most_likely(values: Array, count: int) -> list[int]:
    """The places of the highest values, the highest first; of equals, the lower places."""
    if count == 0:
        return []
    found = highest_places(values, count)
    return [int(i) for i in found[np.argsort(-values[found], kind="stable")[:count]]]


def _fresh_seed() -> int:
    entropy = np.random.SeedSequence().entropy
    assert isinstance(entropy, int)
    return entropy % 2**63


def _no_numbers(highest: float) -> RequestError | KernelError:
    if highest == -math.inf:
        return RequestError("sampling: no token is left to pick", hint="logit_bias bans them all")
    hint = "the file may be damaged (rlx verify), or what is kept of it for fast starts (rlx cache --verify)"
    return KernelError(f"sampling: the highest logit of the model is {highest}", hint=hint)

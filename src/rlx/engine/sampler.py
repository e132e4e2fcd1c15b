"""Picking the next token: penalties, bias, temperature, top-k, top-p, min-p. Temperature 0 is the plain argmax."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from rlx.errors import RequestError

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked. Defaults are greedy."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None

    def __post_init__(self) -> None:
        checks = {
            "temperature": self.temperature >= 0, "top_k": self.top_k >= 0, "top_p": 0 < self.top_p <= 1,
            "min_p": 0 <= self.min_p <= 1, "repetition_penalty": self.repetition_penalty > 0,
        }  # fmt: skip
        for name, good in checks.items():
            if not good:
                raise RequestError(f"sampling: {name} is {getattr(self, name)}, which is out of range")


class Sampler:
    """Picks tokens for one sequence; its random numbers depend on the seed alone."""

    def __init__(self, settings: Sampling) -> None:
        self.settings = settings
        self.seed = int(np.random.SeedSequence().entropy) % 2**63 if settings.seed is None else settings.seed  # type: ignore[arg-type]
        self._random = np.random.Generator(np.random.Philox(self.seed))

    def pick(self, logits: Array, seen: Sequence[int]) -> int:
        """The next token after `seen`."""
        s = self.settings
        adjusted = self._penalised(logits, seen)
        if s.temperature == 0:
            return int(np.argmax(adjusted))
        scaled = adjusted.astype(np.float64) / s.temperature
        order = np.argsort(-scaled, kind="stable")
        if s.top_k:
            order = order[: s.top_k]
        weights = np.exp(scaled[order] - scaled[order[0]])
        weights /= weights.sum()
        if s.top_p < 1:
            keep = int(np.searchsorted(np.cumsum(weights), s.top_p)) + 1
            order, weights = order[:keep], weights[:keep]
        if s.min_p:
            good = weights >= s.min_p * weights[0]
            order, weights = order[good], weights[good]
        weights = weights / weights.sum()
        at = int(np.searchsorted(np.cumsum(weights), self._random.random(), side="right"))
        return int(order[min(at, len(order) - 1)])

    def _penalised(self, logits: Array, seen: Sequence[int]) -> Array:
        s = self.settings
        plain = s.repetition_penalty == 1 and not s.frequency_penalty and not s.presence_penalty
        if plain and not s.logit_bias:
            return logits
        result = logits.astype(np.float32, copy=True)
        if seen and not plain:
            tokens, counts = np.unique(np.asarray(seen), return_counts=True)
            values = result[tokens]
            values = np.where(values > 0, values / s.repetition_penalty, values * s.repetition_penalty)
            result[tokens] = values - counts * s.frequency_penalty - s.presence_penalty
        for token, bias in s.logit_bias.items():
            result[token] += bias
        return result

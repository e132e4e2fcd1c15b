"""Learning rate schedules: functions of the number of steps made, for `lr` of an optimiser or of a step.

The rate is a run-time input of a step, so no schedule recompiles. Any function from a step (0, 1, ...) to a
rate is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlx.errors import RequestError
from rlx.fast_dataclass import dataclass

Schedule = Callable[[int], float]


def cosine(peak: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Rise linearly to `peak` within `warmup` steps, then fall along half a cosine to `end` at step `steps`."""
    return _Warm("cosine", peak, steps, warmup, end, lambda part: (1 + math.cos(math.pi * part)) / 2)


def linear(peak: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Rise linearly to `peak` within `warmup` steps, then fall linearly to `end` at step `steps`."""
    return _Warm("linear", peak, steps, warmup, end, lambda part: 1 - part)


def constant(peak: float, *, warmup: int = 0) -> Schedule:
    """Rise linearly to `peak` within `warmup` steps, and stay there."""
    return _Warm("constant", peak, warmup + 1, warmup, peak, lambda part: 1.0)


@dataclass(frozen=True)
class _Warm:
    """A schedule with a warm-up: `shape` of the part of the remaining steps goes from 1 at the peak to 0 at the end."""

    name: str
    peak: Any
    steps: Any
    warmup: Any
    end: Any
    shape: Callable[[float], float]

    def __post_init__(self) -> None:
        for what, value in (("steps", self.steps), ("warmup", self.warmup)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise RequestError(f"{self.name}: {what} is {value!r}, expected an integer from 0")
        for what, rate in (("peak", self.peak), ("end", self.end)):
            if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
                raise RequestError(f"{self.name}: {what} is {rate!r}, expected a number from 0")
        if self.steps <= self.warmup:
            raise RequestError(f"{self.name}: {self.steps} steps are not more than {self.warmup} steps of warm-up")

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return float(self.peak * (step + 1) / self.warmup)
        part = min(1.0, (step - self.warmup) / (self.steps - self.warmup))
        return float(self.end + (self.peak - self.end) * self.shape(part))

    def __repr__(self) -> str:
        falls = self.name != "constant"
        settings = {"steps": self.steps if falls else 0, "warmup": self.warmup, "end": self.end if falls else 0}
        shown = (f", {name}={value!r}" for name, value in settings.items() if value)
        return f"{self.name}({self.peak!r}{''.join(shown)})"

"""Learning rate schedules: functions of the number of steps made, for `lr` of an optimiser or of a step.

The rate is a run-time input of a step, so no schedule recompiles. Any function from a step (0, 1, ...) to a
rate is one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from rlx.errors import RequestError

Schedule = Callable[[int], float]


def cosine(peak: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Rise linearly to `peak` within `warmup` steps, then fall along half a cosine to `end` at step `steps`."""
    return _warm("cosine", peak, steps, warmup, end, lambda part: (1 + math.cos(math.pi * part)) / 2)


def linear(peak: float, steps: int, *, warmup: int = 0, end: float = 0.0) -> Schedule:
    """Rise linearly to `peak` within `warmup` steps, then fall linearly to `end` at step `steps`."""
    return _warm("linear", peak, steps, warmup, end, lambda part: 1 - part)


def constant(peak: float, *, warmup: int = 0) -> Schedule:
    """Rise linearly to `peak` within `warmup` steps, and stay there."""
    return _warm("constant", peak, warmup + 1, warmup, peak, lambda part: 1.0)


def _warm(
    name: str, peak: Any, steps: Any, warmup: Any, end: Any, shape: Callable[[float], float]
) -> Schedule:  # fmt: skip
    for what, value in (("steps", steps), ("warmup", warmup)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise RequestError(f"{name}: {what} is {value!r}, expected an integer from 0")
    for what, rate in (("peak", peak), ("end", end)):
        if isinstance(rate, bool) or not isinstance(rate, int | float) or not 0 <= rate < math.inf:
            raise RequestError(f"{name}: {what} is {rate!r}, expected a number from 0")
    if steps <= warmup:
        raise RequestError(f"{name}: {steps} steps are not more than {warmup} steps of warm-up")

    def rate_at(step: int) -> float:
        if step < warmup:
            return float(peak * (step + 1) / warmup)
        part = min(1.0, (step - warmup) / (steps - warmup))
        return float(end + (peak - end) * shape(part))

    return rate_at

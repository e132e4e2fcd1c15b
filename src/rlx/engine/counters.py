"""Running counters and histograms of a scheduler; `statistics.Statistics` is a snapshot of them."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.engine.statistics import Statistics

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
SHORT_SECONDS = (0.00001, 0.000025, 0.00005, 0.0001, 0.00025, 0.0005, *SECONDS)  # for what is done per token
ROWS = (1.0, 2.0, 4.0, 8.0, 12.0, 16.0, 24.0, 32.0, 64.0)


class Histogram:
    """Counts of values by upper bound; the last count is of those above all bounds."""

    def __init__(self, bounds: tuple[float, ...] = SECONDS) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    @property
    def count(self) -> int:
        return sum(self.counts)

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def copy(self) -> Histogram:
        copy = Histogram(self.bounds)
        copy.counts, copy.sum = list(self.counts), self.sum
        return copy


class GrammarTimes:
    """How long the grammars of a model take: to compile one, and to find the tokens that may follow."""

    def __init__(self) -> None:
        self.compile, self.mask = Histogram(SHORT_SECONDS), Histogram(SHORT_SECONDS)


class Counters:
    """What a scheduler counts and measures as it runs."""

    def __init__(self) -> None:
        self.prompt_tokens = self.cached_tokens = self.generated_tokens = 0
        self.steps = self.preemptions = 0
        self.prefill_speed = 0.0  # tokens per second: of the last slice if it was slow, else a moving average
        self.requests: Counter[str] = Counter()  # by finish reason
        self.rejected: Counter[str] = Counter()  # by reason
        self.cancelled: Counter[str] = Counter()  # by phase
        self.step_rows = Histogram(ROWS)
        self.step_seconds, self.first_token, self.between_tokens = Histogram(), Histogram(), Histogram()
        self.queue, self.request = Histogram(), Histogram()

    def snapshot(
        self, *, running: int, waiting: int, tokens_waiting: int, rows: int, kv_used: float, kv_bytes: int
    ) -> Statistics:
        from rlx.engine.statistics import Statistics  # a warm start takes no snapshot

        return Statistics(
            running, waiting, tokens_waiting, rows, kv_used, kv_bytes, self.prompt_tokens, self.cached_tokens,
            self.generated_tokens, self.steps, self.preemptions, self.prefill_speed, dict(self.requests),
            dict(self.rejected), dict(self.cancelled), self.step_rows.copy(), self.step_seconds.copy(),
            self.first_token.copy(), self.between_tokens.copy(), self.queue.copy(), self.request.copy(),
        )  # fmt: skip

"""Counters and histograms of a scheduler, with the meanings that Prometheus dashboards of inference servers expect."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
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


@dataclass(frozen=True)
class Statistics:
    """A snapshot of a scheduler's counters since it was created."""

    requests_running: int
    requests_waiting: int
    tokens_waiting: int
    rows: int
    kv_used_ratio: float  # pages in use, by sequences or the prefix cache
    kv_bytes: int
    prompt_tokens_total: int
    prompt_tokens_cached_total: int
    generation_tokens_total: int
    steps_total: int
    preemptions_total: int
    prompt_tokens_per_second: float  # moving average of prefill
    requests_total: Mapping[str, int]  # by finish reason: stop, length, closed, error
    rejected_total: Mapping[str, int]  # by reason: requests, tokens
    cancelled_total: Mapping[str, int]  # by phase: waiting, prefill, decode
    step_rows: Histogram
    step_seconds: Histogram
    time_to_first_token_seconds: Histogram
    inter_token_latency_seconds: Histogram
    request_queue_seconds: Histogram
    request_seconds: Histogram


@dataclass
class Counters:
    """The running counters behind `Statistics`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    preemptions: int = 0
    requests: Counter[str] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    cancelled: Counter[str] = field(default_factory=Counter)
    step_rows: Histogram = field(default_factory=lambda: Histogram(ROWS))
    step_seconds: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    between_tokens: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    request: Histogram = field(default_factory=Histogram)

    def snapshot(
        self, *, running: int, waiting: int, tokens_waiting: int, rows: int, kv_used: float, kv_bytes: int, speed: float
    ) -> Statistics:
        return Statistics(
            running, waiting, tokens_waiting, rows, kv_used, kv_bytes, self.prompt_tokens, self.cached_tokens,
            self.generated_tokens, self.steps, self.preemptions, speed, dict(self.requests), dict(self.rejected),
            dict(self.cancelled), self.step_rows.copy(), self.step_seconds.copy(), self.first_token.copy(),
            self.between_tokens.copy(), self.queue.copy(), self.request.copy(),
        )  # fmt: skip

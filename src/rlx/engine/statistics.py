"""A snapshot of a scheduler's counters, with the meanings that Prometheus dashboards of inference servers expect."""

from __future__ import annotations

from collections.abc import Mapping

from rlx.engine.counters import Histogram
from rlx.fast_dataclass import dataclass


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

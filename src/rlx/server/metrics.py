"""Prometheus metrics, in its text format. Labels never hold a key, a prompt or an address."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rlx.engine.counters import GrammarTimes
from rlx.engine.counters import Histogram as StatisticsHistogram
from rlx.engine.statistics import Statistics

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Labels = tuple[tuple[str, str], ...]


def _labels(labels: Labels) -> str:
    if not labels:
        return ""
    escaped = ((n, v.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")) for n, v in labels)
    return "{" + ",".join(f'{name}="{value}"' for name, value in escaped) + "}"


class Counter:
    """A number that only grows, per set of labels."""

    kind = "counter"

    def __init__(self, name: str, help_: str) -> None:
        self.name, self.help = name, help_
        self._values: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def add(self, amount: float = 1, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        with self._lock:
            self._values[key] = self._values.get(key, 0) + amount

    def lines(self) -> Iterator[str]:
        with self._lock:
            values = dict(self._values)
        for labels, value in values.items() or ([((), 0)] if self.kind == "gauge" else []):
            yield f"{self.name}{_labels(labels)} {value:g}"


class Gauge(Counter):
    """A number that goes up and down."""

    kind = "gauge"

    def set(self, value: float, **labels: str) -> None:
        with self._lock:
            self._values[tuple(sorted(labels.items()))] = value


class Histogram:
    """How often values fell below each bound."""

    kind = "histogram"

    def __init__(self, name: str, help_: str, bounds: Sequence[float] = SECONDS) -> None:
        self.name, self.help, self.bounds = name, help_, tuple(bounds)
        self._counts: dict[Labels, list[int]] = {}
        self._sums: dict[Labels, float] = {}
        self._lock = threading.Lock()

    def observe(self, value: float, **labels: str) -> None:
        key = tuple(sorted(labels.items()))
        with self._lock:
            counts = self._counts.setdefault(key, [0] * (len(self.bounds) + 1))
            counts[bisect_left(self.bounds, value)] += 1
            self._sums[key] = self._sums.get(key, 0.0) + value

    def lines(self) -> Iterator[str]:
        with self._lock:
            rows = [(labels, list(counts), self._sums[labels]) for labels, counts in self._counts.items()]
        for labels, counts, total in rows:
            yield from bucket_lines(self.name, labels, self.bounds, counts, total)


def bucket_lines(
    name: str, labels: Labels, bounds: Sequence[float], counts: Sequence[int], total: float
) -> Iterator[str]:
    """The lines of a histogram, from counts per bucket."""
    running = 0
    for bound, count in zip((*(f"{b:g}" for b in bounds), "+Inf"), counts, strict=True):
        running += count
        yield f"{name}_bucket{_labels((*labels, ('le', bound)))} {running}"
    yield f"{name}_sum{_labels(labels)} {total:g}"
    yield f"{name}_count{_labels(labels)} {running}"


class Metrics:
    """All metrics of a server."""

    def __init__(self) -> None:
        self.requests = Counter("rlx_requests_total", "Requests by endpoint, status and reason of their end.")
        self.rejected = Counter("rlx_rejected_total", "Requests that were refused before they ran, by reason.")
        self.embedding_texts = Counter("rlx_embedding_texts_total", "Texts that were embedded.")
        self.duration = Histogram("rlx_http_request_seconds", "From the headers of a request to the end of its answer.")
        self._resident = Gauge("rlx_process_resident_bytes", "Memory of the process.")

    def text(self, models: Mapping[str, Statistics], grammars: Mapping[str, GrammarTimes]) -> str:
        """The page that Prometheus reads, with the statistics of each model's scheduler and grammars."""
        self._resident.set(resident_bytes())
        lines: list[str] = []
        for metric in vars(self).values():
            lines += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
        for name in STATISTICS if models else ():
            lines += [f"# HELP rlx_{name} {STATISTICS[name]}", f"# TYPE rlx_{name} {_kind(name)}"]
            for model, statistics in models.items():
                lines += _statistic_lines(f"rlx_{name}", model, getattr(statistics, name))
        for name in GRAMMARS if grammars else ():
            lines += [f"# HELP rlx_grammar_{name}_seconds {GRAMMARS[name]}"]
            lines += [f"# TYPE rlx_grammar_{name}_seconds histogram"]
            for model, times in grammars.items():
                lines += _statistic_lines(f"rlx_grammar_{name}_seconds", model, getattr(times, name))
        return "\n".join(lines) + "\n"


# what a scheduler counts, and what it means
STATISTICS = {
    "requests_running": "Requests that are generated now.",
    "requests_waiting": "Requests that wait for a row.",
    "tokens_waiting": "Prompt tokens of requests that wait.",
    "kv_used_ratio": "Share of the pages for keys and values that are in use.",
    "kv_bytes": "Memory of keys and values.",
    "prompt_tokens_total": "Tokens of prompts.",
    "prompt_tokens_cached_total": "Tokens of prompts that came from the prefix cache.",
    "generation_tokens_total": "Generated tokens.",
    "steps_total": "Decode steps.",
    "preemptions_total": "Requests that gave up their pages for others, and were prefilled again.",
    "prompt_tokens_per_second": "Speed of prefill, a moving average.",
    "cancelled_total": "Requests whose client left, by phase.",
    "step_rows": "Sequences per decode step.",
    "step_seconds": "Duration of decode steps.",
    "time_to_first_token_seconds": "From a request to its first token.",
    "inter_token_latency_seconds": "Between tokens of a request.",
    "request_queue_seconds": "From a request to the start of its prefill.",
    "request_seconds": "From a request to its last token.",
}

GRAMMARS = {
    "mask": "To find the tokens that may follow by a grammar, per token.",
    "compile": "To compile a grammar: of a schema, a pattern, tools or a grammar itself.",
}


def _kind(name: str) -> str:
    if name.endswith("_total"):
        return "counter"
    histogram = name.endswith("_seconds") or name == "step_rows"
    return "histogram" if histogram else "gauge"


def _statistic_lines(name: str, model: str, value: Any) -> list[str]:
    labels = (("model", model),)
    if isinstance(value, StatisticsHistogram):
        return list(bucket_lines(name, labels, value.bounds, value.counts, value.sum))
    if isinstance(value, Mapping):
        return [f"{name}{_labels((*labels, ('phase', phase)))} {count}" for phase, count in value.items()]
    return [f"{name}{_labels(labels)} {value:g}"]


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:  # not Linux
        return 0

"""Prometheus metrics, in its text format. Labels never hold a key, a prompt or an address."""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

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


Metric = Counter | Gauge | Histogram


class Metrics:
    """All metrics of a server."""

    def __init__(self) -> None:
        self.requests = Counter("rlx_requests_total", "Requests by endpoint, status and reason of their end.")
        self.rejected = Counter("rlx_rejected_total", "Requests that were refused before they ran, by reason.")
        self.cancelled = Counter("rlx_cancelled_total", "Requests whose client left, by phase.")
        self.prompt_tokens = Counter("rlx_prompt_tokens_total", "Tokens of prompts.")
        self.cached_tokens = Counter("rlx_prompt_tokens_cached_total", "Tokens of prompts from the prefix cache.")
        self.generation_tokens = Counter("rlx_generation_tokens_total", "Generated tokens.")
        self.embedding_texts = Counter("rlx_embedding_texts_total", "Texts that were embedded.")
        self.first_token = Histogram("rlx_time_to_first_token_seconds", "From the request to its first text.")
        self.token_gap = Histogram("rlx_inter_token_latency_seconds", "Between pieces of text of a request.")
        self.queue = Histogram("rlx_request_queue_seconds", "From the request to the start of its prefill.")
        self.duration = Histogram("rlx_request_seconds", "From the request to the end of its answer.")
        self.grammar_compile = Histogram("rlx_grammar_compile_seconds", "Compiling a grammar or schema.")
        self._resident = Gauge("rlx_process_resident_bytes", "Memory of the process.")

    def text(self, more: Mapping[Metric, str] | None = None, lines: Sequence[str] = ()) -> str:
        """The page that Prometheus reads; `lines` are those of the engine."""
        self._resident.set(resident_bytes())
        parts: list[str] = []
        for metric in vars(self).values():
            parts += [f"# HELP {metric.name} {metric.help}", f"# TYPE {metric.name} {metric.kind}", *metric.lines()]
        return "\n".join([*parts, *lines]) + "\n"


def resident_bytes() -> int:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096
    except OSError:  # not Linux
        return 0

"""Reports and timelines of a whole call of a model, such as `generate`: kernels by phase and stage, and Python.

A `CallRecorder` times what a call does; `report` sums it up, and `write_trace` writes it as a timeline.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import field, replace
from pathlib import Path
from typing import Any, Protocol

from rlx.backends.base import Executable, Key, backend_of
from rlx.backends.reports import Ceilings, Share, Trace, Work
from rlx.fast_dataclass import dataclass
from rlx.free_memory import writable
from rlx.inspect.profiler import NO_WORK, LaunchReport, event, launch_reports, metadata_event, trace_events
from rlx.notebook import Bar, Cell, box, note, table

TOKENIZING, IMAGES, SAMPLING, TEXT = "tokenizing", "reading images", "sampling in Python", "text of tokens"
STARTING, PYTHON = "starting runs", "other Python"
EXPLAINED = {
    TOKENIZING: "texts to token ids",
    IMAGES: "decoding, resizing and normalising images",
    SAMPLING: "random numbers, penalties and allowed= functions; picking is the kernel sample_tokens",
    TEXT: "token ids to text",
    STARTING: "checks of inputs, waking threads, gaps between launches",
    PYTHON: "the loop over tokens, stop strings, KV cache pages, copying results",
}
_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")


class Timed(Protocol):
    """A compiled graph, which runs with time stamps."""

    @property
    def executable(self) -> Executable: ...

    def run_timed(self, inputs: Mapping[str, Any]) -> tuple[list[Any], Trace, Key]: ...


@dataclass(frozen=True)
class TimedRun:
    """One run of a graph: its phase, when it began and ended, and the times of its launches."""

    phase: str
    executable: Executable
    begin: float
    end: float
    trace: Trace
    key: Key
    tokens: int


class CallRecorder:
    """Times the runs of graphs and the host work of one call."""

    def __init__(self, phase: Callable[[Mapping[str, Any]], str] = lambda inputs: "run") -> None:
        self.phase = phase  # of a run with these inputs
        self.runs: list[TimedRun] = []
        self.spans: list[tuple[str, float, float]] = []  # name, begin, end
        self.begin = time.perf_counter()
        self.end = self.begin

    def run(self, compiled: Timed, inputs: Mapping[str, Any]) -> list[Any]:
        """Run a graph and record its times."""
        begin = time.perf_counter()
        outputs, trace, key = compiled.run_timed(inputs)
        end = time.perf_counter()
        positions = inputs.get("positions")
        count = 0 if positions is None else int((positions >= 0).sum())
        self.runs.append(TimedRun(self.phase(inputs), compiled.executable, begin, end, trace, key, count))
        return outputs

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Record host work under a name."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.spans.append((name, begin, time.perf_counter()))

    def watch(self, owner: object, methods: Sequence[str], name: str) -> None:
        """Record the calls of methods of an object under a name."""
        for method in methods:
            function = getattr(owner, method)

            def timed(*args: Any, function: Callable[..., Any] = function) -> Any:
                with self.span(name):
                    return function(*args)

            setattr(owner, method, timed)

    def finish(self) -> None:
        """End the call."""
        self.end = time.perf_counter()

    def report(self, name: str) -> CallReport:
        """Sum up the call."""
        if not self.runs:
            return CallReport(name, "", 1, self.end - self.begin)
        executable = self.runs[0].executable
        target = executable.target
        report = CallReport(
            name, f"{target.device} {target.name}", executable.threads, self.end - self.begin,
            ceilings=backend_of(target).ceilings(target, executable.threads),
        )  # fmt: skip
        starting, known_launches = 0.0, dict[Any, list[LaunchReport]]()
        for run in self.runs:
            launches, seconds = _launches(run, known_launches), run.end - run.begin
            kernels = sum(launch.seconds for launch in launches)
            starting += max(seconds - kernels, 0.0)
            phase = report.phases.setdefault(run.phase, Phase())
            phase.runs, phase.tokens = phase.runs + 1, phase.tokens + run.tokens
            phase.seconds, phase.kernel_seconds = phase.seconds + seconds, phase.kernel_seconds + kernels
            for launch in launches:
                for totals, label in ((phase.kernels, launch.kernel.partition(".")[0]), (phase.stages, _stage(launch))):
                    totals[label] = totals.get(label, Total()).plus(launch)
        report.host = {name: 0.0 for name in EXPLAINED} | {STARTING: starting}
        for span, begin, end in self.spans:
            report.host[span] += end - begin
        known = sum(report.host.values()) + sum(phase.kernel_seconds for phase in report.phases.values())
        report.host[PYTHON] = max(report.seconds - known, 0.0)
        return report

    def write_trace(self, path: str | Path, name: str) -> None:
        """Write a timeline for Perfetto and chrome://tracing, with a row for Python and one per thread."""
        threads = max((run.trace.launches.shape[1] for run in self.runs), default=0)
        python = threads  # the row below the threads
        events = [metadata_event("process_name", 0, name), metadata_event("thread_name", python, "Python")]
        events += [metadata_event("thread_name", t, f"thread {t}") for t in range(threads)]
        for run in self.runs:
            about = {"tokens": run.tokens, **dict(zip(run.executable.symbols, run.key, strict=True))}
            events.append(event(run.phase, "run", python, run.begin - self.begin, run.end - self.begin, about))
            stamps = run.trace.launches
            if (stamps > 0).any():
                # clocks differ: the first launch is put where the run begins
                first = float(stamps[stamps > 0].min()) - (run.begin - self.begin)
                events += trace_events(run.executable, run.trace, run.key, first)
        events += [event(n, "host", python, b - self.begin, e - self.begin, {}) for n, b, e in self.spans]
        writable(path).write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))


@dataclass(frozen=True)
class Total:
    """Launches, seconds and work of several launches."""

    launches: int = 0
    seconds: float = 0.0
    work: Work = NO_WORK
    is_known: bool = True  # whether the work of all of them is

    def plus(self, launch: LaunchReport) -> Total:
        known = self.is_known and launch.work is not NO_WORK
        return Total(self.launches + launch.runs, self.seconds + launch.seconds, self.work + launch.work, known)

    def share(self, limits: Ceilings | None) -> Share | None:
        """How close they came to the limit that applies to them together."""
        return limits.share(self.work, self.seconds) if limits is not None and self.is_known else None


@dataclass
class Phase:
    """The runs of one phase, such as prefill: totals by kernel, and by stage with `*` for the number of a layer."""

    runs: int = 0
    tokens: int = 0
    seconds: float = 0.0
    kernel_seconds: float = 0.0
    kernels: dict[str, Total] = field(default_factory=dict)
    stages: dict[str, Total] = field(default_factory=dict)


@dataclass
class CallReport:
    """Where the time of a call went. `str` of it is a table."""

    name: str
    device: str
    threads: int
    seconds: float
    phases: dict[str, Phase] = field(default_factory=dict)
    host: dict[str, float] = field(default_factory=dict)  # seconds outside of kernels, by `EXPLAINED`
    ceilings: Ceilings | None = None

    @property
    def _title(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return f"{self.name} on {self.device}, {threads}: {self.seconds * 1e3:.1f} ms"

    def _parts(self) -> Iterator[tuple[str, float, str]]:
        """Parts of the time: name, seconds, explanation. They add up to the time of the call."""
        for name, phase in self.phases.items():
            tokens = f" of {phase.tokens} tokens" if phase.tokens else ""
            yield f"{name} kernels", phase.kernel_seconds, f"{phase.runs} run{'s' * (phase.runs != 1)}{tokens}"
        for name, seconds in self.host.items():
            if seconds:
                yield name, seconds, EXPLAINED[name]

    def _tables(self) -> Iterator[tuple[str, list[tuple[str, Total]]]]:
        for name, phase in self.phases.items():
            for kind, totals in (("kernel", phase.kernels), ("stage", phase.stages)):
                yield f"{name} by {kind}", sorted(totals.items(), key=lambda item: -item[1].seconds)

    def __repr__(self) -> str:
        return f"<report of {self._title}>"

    def __str__(self) -> str:
        lines = [self._title]
        for part, seconds, why in self._parts():
            lines.append(f"  {part:20} {seconds * 1e3:10.2f} ms {seconds / self.seconds:6.1%}  {why}")
        for title, rows in self._tables():
            lines.append(f"  {title:32} {'ms':>10} {'share':>6} {'launches':>9}  of the limit")
            phase_seconds = sum(total.seconds for _, total in rows) or 1.0
            for label, total in rows:
                share, fraction = total.share(self.ceilings), total.seconds / phase_seconds
                lines.append(
                    f"    {label[:30]:30} {total.seconds * 1e3:10.2f} {fraction:6.1%} {total.launches:9}  "
                    f"{'-' if share is None else share}"
                )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        parts: list[list[Cell]] = [
            [part, Bar(f"{seconds * 1e3:.2f}", seconds / (self.seconds or 1.0)), why]
            for part, seconds, why in self._parts()
        ]
        shown = [table(("part", "ms", ""), parts)]
        for title, rows in self._tables():
            phase_seconds = sum(total.seconds for _, total in rows) or 1.0
            cells: list[list[Cell]] = [
                [
                    label,
                    Bar(f"{t.seconds * 1e3:.2f}", t.seconds / phase_seconds),
                    t.launches,
                    str(t.share(self.ceilings) or "-"),
                ]
                for label, t in rows
            ]
            shown += [note(title), table((title.rpartition(" ")[2], "ms", "launches", "of the limit"), cells)]
        return box(self._title, *shown)


def _launches(run: TimedRun, known: dict[Any, list[LaunchReport]]) -> list[LaunchReport]:
    """The launches of a run; `known` has those of earlier runs, which differ only in their seconds."""
    program, stamps = run.executable.program, run.trace.launches
    steps = tuple(sorted(run.trace.steps.items()))
    if (id(program), run.key, steps) not in known:
        sizes, runs = dict(zip(program.symbols, run.key, strict=True)), program.runs(run.trace.steps)
        known[id(program), run.key, steps] = launch_reports(program, sizes, [0.0] * len(runs), runs)
    seconds = (stamps[:, :, 1] - stamps[:, :, 0]).max(axis=1).tolist() if len(stamps) else []
    launches = known[id(program), run.key, steps]
    return [replace(launch, seconds=taken) for launch, taken in zip(launches, seconds, strict=True)]


def _stage(launch: LaunchReport) -> str:
    """The stage path of a launch, with `*` for numbers: layers are summed up."""
    stage = launch.where.partition(", ")[0]
    return "outside of stages" if ":" in stage or not stage else _NUMBER.sub("*", stage)

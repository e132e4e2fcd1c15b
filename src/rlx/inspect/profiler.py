"""Reports and traces: the cost of each launch of a compiled graph, compared with the limits of the machine."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

import numpy as np

from rlx.backends.base import Executable, Key, backend_of
from rlx.backends.reports import Ceilings, Share, Trace, Work
from rlx.fast_dataclass import dataclass
from rlx.inspect.memory import MemoryReport, memory_report, show_bytes
from rlx.lir.kernels import AttentionKernel
from rlx.lir.program import Program
from rlx.notebook import Bar, Cell, box, note, table
from rlx.types import evaluate

LARGEST_CACHE = 64 << 20  # bytes: weights of larger programs come from memory in every run
NO_WORK = Work({}, 0.0)
RUNS = 5  # traced runs, of which the fastest time per launch is reported


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launch: bytes, flops and seconds (0 if not run), summed over all its runs.

    `bytes` are those that every run accesses: of a table from which data selects rows, none are counted.
    """

    kernel: str
    kind: str
    where: str
    bytes: int
    flops: int
    seconds: float
    runs: int = 1  # more than 1 in a loop
    work: Work = NO_WORK

    @property
    def stage(self) -> str:
        """The path of the stage that it computes; empty if it has none."""
        first = self.where.split(", ")[0]
        return "" if ":" in first or first.startswith(("from ", "by ")) else first

    @property
    def gb_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def gflops(self) -> float:
        """Rate of the operations that every run does; 0 if data decides how many there are."""
        return sum(self.work.flops.values()) / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def arithmetic(self) -> str:
        """The type of its multiply-adds: f32, f64, dot_u7 or dot_u8."""
        return next(iter(self.work.flops), "f32")

    def share(self, limits: Ceilings) -> Share | None:
        """How close it came to the limit that applies; None if that is not known (see `Ceilings.share`)."""
        return limits.share(self.work, self.seconds)


@dataclass
class Report:
    """Launches, memory and times of a compiled graph. `str` of it is a table."""

    name: str
    device: str
    threads: int
    target: str = ""
    launches: list[LaunchReport] = field(default_factory=list)
    arena_bytes: int = 0
    arena_bound: int = 0
    weight_bytes: int = 0
    kernels: int = 0
    seconds: float = 0.0
    ceilings: Ceilings | None = None
    dispatch: dict[str, str] = field(default_factory=dict)
    fusion: str = ""
    memory: MemoryReport | None = None  # at the sizes of the run

    @property
    def _title(self) -> str:
        threads = f"{self.threads} thread{'s' * (self.threads != 1)}"
        return (
            f"{self.name} on {self.device} {self.target}, {threads}: {len(self.launches)} launches of "
            f"{self.kernels} kernels, arena {show_bytes(self.arena_bytes)}, weights {show_bytes(self.weight_bytes)}"
        )

    @property
    def _machine(self) -> list[str]:
        """What the machine can do, where something ran."""
        if self.ceilings is None:
            timed = any(launch.seconds for launch in self.launches)
            return ["no times: run it first, or pass inputs"] if self.launches and not timed else []
        c = self.ceilings
        rates = (
            f"{_rates(c)}, {c.cache_gb_per_second:.0f} GB/s from cache, {c.memory_gb_per_second:.0f} GB/s from memory"
        )
        return [f"machine: {rates}; run {self.seconds * 1e6:.0f} µs"]

    def _share(self, launch: LaunchReport) -> str:
        """How close a launch comes to the limit of the machine that applies to it."""
        share = launch.share(self.ceilings) if self.ceilings else None
        return "-" if share is None else str(share)

    def __repr__(self) -> str:
        return f"<report of {self._title}>"

    def _repr_html_(self) -> str:
        total = sum(x.seconds for x in self.launches)
        columns = ["kernel", "kind", "where"]
        rows: list[list[Cell]] = [[_label(x), x.kind, x.where] for x in self.launches]
        if total:
            columns[2:2] = ["µs", "GB/s", "GFLOPS", "ceiling"]
            for row, x in zip(rows, self.launches, strict=True):
                taken = Bar(_microseconds(x.seconds), x.seconds / total)
                row[2:2] = [taken, x.gb_per_second, x.gflops, self._share(x)]
        return box(self._title, *map(note, self._machine), table(columns, rows))

    def __str__(self) -> str:
        lines = [self._title, *(f"  {line}" for line in self._machine)]
        lines.append(f"  {'kernel':40} {'kind':9} {'µs':>9} {'GB/s':>7} {'GFLOPS':>7} {'ceiling':>11}  where")
        for x in self.launches:
            lines.append(
                f"  {_label(x):40} {x.kind:9} {_microseconds(x.seconds):>9} {x.gb_per_second:7.1f} {x.gflops:7.1f} "
                f"{self._share(x):>11}  {x.where}"
            )
        return "\n".join(lines)


def _microseconds(seconds: float) -> str:
    """A number with one digit after the point, or three below 1 µs."""
    return f"{seconds * 1e6:.{3 if 0 < seconds < 1e-6 else 1}f}"


def _rates(limits: Ceilings) -> str:
    integers = f", {limits.gops['dot_u7']:.0f} GOPS int8" if "dot_u7" in limits.gops else ""
    return f"{limits.gflops:.0f} GFLOPS f32{integers}"


def _label(launch: LaunchReport) -> str:
    runs = f" × {launch.runs}" if launch.runs != 1 else ""
    return launch.kernel[: 40 - len(runs)] + runs


def profile(executable: Executable, fusion: str, key: Key | None, inputs: Sequence[Any]) -> Report:
    """The report of an executable; with sizes and inputs it is run and timed. `fusion` is the fusion report."""
    program, target = executable.program, executable.target
    sizes = dict(zip(program.symbols, key, strict=True)) if key is not None else dict.fromkeys(program.symbols, 1)
    report = Report(
        program.name, target.device, executable.threads, target.name,
        kernels=len(program.kernels()),
        weight_bytes=sum(evaluate(program.buffers[n].type.bytes, sizes) for n in program.weights),
        dispatch={f"{i} {x.kernel.symbol}": "native" for i, x in enumerate(program.launches)},
        fusion=fusion,
    )  # fmt: skip
    seconds = [0.0] * len(program.launches)
    steps: Mapping[int, int] = program.all_steps(sizes)
    if key is not None:
        report.memory = memory_of(executable, key)
        report.arena_bytes, report.arena_bound = report.memory.arena, report.memory.bound
        report.ceilings = backend_of(target).ceilings(target, executable.threads)
        seconds, report.seconds, steps = _time(executable, key, inputs)
    report.launches = launch_reports(program, sizes, seconds, program.runs(steps))
    return report


def launch_reports(
    program: Program, sizes: Mapping[str, int], seconds: Sequence[float], runs: Sequence[int]
) -> list[LaunchReport]:
    """The reports of all launches of a run that took these seconds."""
    weights = set(program.weights)
    # each launch finds its weights where the others left them: in memory, if all of them exceed the caches
    streams = sum(evaluate(program.buffers[n].type.bytes, sizes) for n in weights) > LARGEST_CACHE
    reports = []
    for launch, launch_seconds, count in zip(program.launches, seconds, runs, strict=True):
        kernel = launch.kernel
        moved, flops = (evaluate(size, sizes) * count for size in (launch.min_bytes(), launch.flops))
        streamed = evaluate(launch.min_bytes(weights), sizes) * count if streams else 0
        share = kernel.min_work if isinstance(kernel, AttentionKernel) else 1.0
        # without multiply-adds that are known, bytes alone say little
        work = Work({kernel.arithmetic(): flops * share}, moved, streamed) if share else NO_WORK
        reports.append(
            LaunchReport(kernel.symbol, kernel.kind, launch.where, moved, flops, launch_seconds, count, work)
        )
    return reports


def memory_of(executable: Executable, key: Key) -> MemoryReport:
    """The memory of a run with these sizes."""
    memory = executable.memory(key)
    sizes = dict(zip(executable.program.symbols, memory.key, strict=True))
    return memory_report(executable.program, sizes, memory.plan, memory.scratch)


def _time(executable: Executable, key: Key, inputs: Sequence[Any]) -> tuple[list[float], float, Mapping[int, int]]:
    """Seconds of each launch (slowest thread, best of several runs) and of a whole run; the steps of loops."""
    executable.run(key, inputs)
    best = np.full(len(executable.program.launches), np.inf)
    run_seconds = np.inf
    for _ in range(RUNS):
        start = time.perf_counter()
        _, trace = executable.trace(key, inputs)
        run_seconds = min(run_seconds, time.perf_counter() - start)
        best = np.minimum(best, (trace.launches[:, :, 1] - trace.launches[:, :, 0]).max(axis=1))
    return [float(b) for b in best], float(run_seconds), trace.steps


def write_trace(path: Path, executable: Executable, trace: Trace, key: Key) -> None:
    """Write a timeline for Perfetto and chrome://tracing, in microseconds, with one row per thread."""
    stamps = trace.launches
    name = f"{executable.program.name} on {executable.target.name}"
    threads = [metadata_event("thread_name", t, f"thread {t}") for t in range(stamps.shape[1])]
    sizes = dict(zip(executable.program.symbols, key, strict=True))
    start = float(stamps[stamps > 0].min()) if (stamps > 0).any() else 0.0
    events = [metadata_event("process_name", 0, name), *threads, *trace_events(executable, trace, key, start)]
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns", "otherData": sizes}))


def trace_events(executable: Executable, trace: Trace, key: Key, start: float) -> list[dict[str, Any]]:
    """The events of a run; `start` is the time stamp that becomes 0.

    A loop is shown as the sum of its steps: its launches in sequence, each as long as all its runs together.
    """
    program, stamps = executable.program, trace.launches
    sizes = dict(zip(program.symbols, key, strict=True))
    events: list[dict[str, Any]] = []
    loops = program.outermost_loops()
    runs, units = program.runs(trace.steps), executable.units(key)

    def add(name: str, kind: str, thread: int, begin: float, end: float, about: dict[str, Any]) -> None:
        events.append(event(name, kind, thread, begin - start, end - start, about))

    for thread in range(stamps.shape[1]):
        for outer in dict.fromkeys(n for n in loops if n is not None):
            begin, end = trace.controls[outer, thread]
            if begin:
                inside = {"steps": trace.steps[outer], "launches": loops.count(outer)}
                add(f"loop {outer}", "loop", thread, begin, end, inside)
    ended: dict[tuple[int, int], float] = {}  # end of the last launch, by loop and thread
    for number, (launch, row) in enumerate(zip(program.launches, stamps, strict=True)):
        about = {
            "launch": number, "where": launch.where, "units": units[number], "runs": runs[number],
            "bytes": evaluate(launch.min_bytes(), sizes), "flops": evaluate(launch.flops, sizes),
        }  # fmt: skip
        loop = loops[number]
        for thread, (begin, end) in enumerate(row):
            if end > begin:
                at = begin if loop is None else ended.get((loop, thread), float(begin))
                add(launch.kernel.symbol, launch.kernel.kind, thread, at, at + end - begin, about)
                if loop is not None:
                    ended[loop, thread] = at + end - begin
    return events


def event(name: str, kind: str, thread: int, begin: float, end: float, about: dict[str, Any]) -> dict[str, Any]:
    """A span of time on a row of a timeline; times are in seconds."""
    return {
        "name": name, "cat": kind, "ph": "X", "pid": 0, "tid": thread, "ts": float(begin) * 1e6,
        "dur": float(end - begin) * 1e6, "args": about,
    }  # fmt: skip


def metadata_event(kind: str, thread: int, name: str) -> dict[str, Any]:
    """The name of a row, or of the whole timeline."""
    return {"name": kind, "ph": "M", "pid": 0, "tid": thread, "args": {"name": name}}

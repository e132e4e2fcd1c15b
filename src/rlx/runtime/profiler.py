"""Reports and traces: what a compiled graph does, launch by launch, and how close it comes to what the machine can."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.backends.cpu.ceilings import Ceilings, ceilings, ticks_per_second
from rlx.backends.cpu.executable import Executable
from rlx.types import evaluate

if TYPE_CHECKING:
    from rlx.runtime.compiled import CpuGraph

Array = np.ndarray[Any, Any]
RUNS = 5  # traced runs; the fastest of each launch counts


@dataclass(frozen=True, slots=True)
class LaunchReport:
    """One launch: what it reads and computes, and how long it took (0 where nothing ran)."""

    kernel: str
    kind: str
    where: str
    bytes: int
    flops: int
    seconds: float

    @property
    def gb_per_second(self) -> float:
        return self.bytes / self.seconds / 1e9 if self.seconds else 0.0

    @property
    def gflops(self) -> float:
        return self.flops / self.seconds / 1e9 if self.seconds else 0.0

    def fraction(self, limits: Ceilings) -> float:
        """The time the machine needs at least, over the time it took."""
        if not self.seconds:
            return 0.0
        least = max(self.flops / (limits.gflops * 1e9), self.bytes / (limits.cache_gb_per_second * 1e9))
        return least / self.seconds


@dataclass
class Report:
    """What a compiled graph does. `str` of it is a table."""

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

    def __str__(self) -> str:
        lines = [
            f"{self.name} on {self.device} {self.target}, {self.threads} threads: {len(self.launches)} launches of "
            f"{self.kernels} kernels, arena {_bytes(self.arena_bytes)}, weights {_bytes(self.weight_bytes)}"
        ]
        if self.ceilings is not None:
            c = self.ceilings
            lines.append(
                f"  machine: {c.gflops:.0f} GFLOPS f32, {c.cache_gb_per_second:.0f} GB/s from cache, "
                f"{c.memory_gb_per_second:.0f} GB/s from memory; run {self.seconds * 1e6:.0f} µs"
            )
        lines.append(f"  {'kernel':40} {'kind':9} {'µs':>9} {'GB/s':>7} {'GFLOPS':>7} {'ceiling':>7}  where")
        for x in self.launches:
            share = f"{x.fraction(self.ceilings):6.0%}" if self.ceilings and x.seconds else "-"
            lines.append(
                f"  {x.kernel[:40]:40} {x.kind:9} {x.seconds * 1e6:9.1f} {x.gb_per_second:7.1f} {x.gflops:7.1f} "
                f"{share:>7}  {x.where}"
            )
        return "\n".join(lines)


def _bytes(n: int) -> str:
    size = float(n)
    for unit in ("B", "KB", "MB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GB"


def profile(compiled: CpuGraph, key: tuple[int, ...] | None, inputs: Sequence[Array]) -> Report:
    """A report of a compiled graph; with sizes and inputs it is run and timed."""
    executable = compiled.executable
    program = executable.program
    sizes = dict(zip(program.symbols, key, strict=True)) if key is not None else dict.fromkeys(program.symbols, 1)
    report = Report(
        compiled.graph.name, compiled.device, executable.threads, executable.target.name,
        kernels=len(program.kernels()),
        weight_bytes=sum(evaluate(program.buffers[n].type.bytes, sizes) for n in program.weights),
        dispatch={f"{i} {x.kernel.symbol}": "native" for i, x in enumerate(program.launches)},
        fusion=str(compiled.plan.fusion),
    )  # fmt: skip
    seconds = [0.0] * len(program.launches)
    if key is not None:
        memory = executable.frame(key).plan
        report.arena_bytes, report.arena_bound = memory.size, memory.bound
        report.ceilings = ceilings(executable.target, executable.threads)
        seconds, report.seconds = _time(executable, key, inputs)
    for launch, taken in zip(program.launches, seconds, strict=True):
        moved, flops = evaluate(launch.bytes, sizes), evaluate(launch.flops, sizes)
        kernel = launch.kernel
        report.launches.append(LaunchReport(kernel.symbol, kernel.kind, launch.where, moved, flops, taken))
    return report


def _time(executable: Executable, key: tuple[int, ...], inputs: Sequence[Array]) -> tuple[list[float], float]:
    """Seconds of each launch (the slowest thread, best of some runs) and of a whole run."""
    executable.run(key, inputs)
    ticks = ticks_per_second(executable.target)
    best = np.full(len(executable.program.launches), np.inf)
    whole = np.inf
    for _ in range(RUNS):
        start = time.perf_counter()
        _, stamps = executable.trace_run(key, inputs)
        whole = min(whole, time.perf_counter() - start)
        best = np.minimum(best, (stamps[:, :, 1] - stamps[:, :, 0]).max(axis=1) / ticks)
    return [float(b) for b in best], float(whole)


def write_trace(path: Path, executable: Executable, stamps: Array) -> None:
    """A timeline that chrome://tracing and Perfetto read, in microseconds; one row a thread."""
    events = []
    ticks = ticks_per_second(executable.target) / 1e6
    start = int(stamps[stamps > 0].min()) if (stamps > 0).any() else 0
    for launch, row in zip(executable.program.launches, stamps, strict=True):
        for thread, (begin, end) in enumerate(row):
            if end > begin:
                events.append({
                    "name": launch.kernel.symbol, "cat": launch.kernel.kind, "ph": "X", "pid": 0, "tid": thread,
                    "ts": int(begin - start) / ticks, "dur": int(end - begin) / ticks, "args": {"where": launch.where},
                })  # fmt: skip
    path.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ns"}))

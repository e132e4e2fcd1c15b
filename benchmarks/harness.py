"""Side-by-side timing of libraries: one process each, one at work at a time, under ceilings from the same run.

Takes libraries (where to find a factory) and cases (what to compute); gives a `Result` with every round of every
library, ratios, and the fraction of what the machine can do. Three rules make its numbers worth printing:

1. Libraries never share a process, and all but the one being timed are stopped (SIGSTOP): a pool that spins after its
   own work cannot slow its neighbour. The order is shuffled in every round, so drift of the machine hits all alike.
   A round in which other programs, or the host, took the processor is run again; if there is no quiet time, the
   quietest rounds are kept. That choice looks at the processor's counters only, never at the times.
2. Ceilings (`ceilings.py`) are timed in the same rotation. A number above its ceiling is refused, not printed: it
   means that the work was not done, or that the ceiling is wrong.
3. A library that is absent, fails, or gives a wrong result is named, with the reason.
"""

from __future__ import annotations

import datetime
import functools
import importlib
import importlib.metadata
import importlib.util
import json
import math
import multiprocessing
import os
import platform
import random
import re
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

import ceilings
import numpy as np
from worker import Case, Prepared

TOLERANCE = 0.03  # how far above its ceiling a number may be before it is refused: the spread of the probes themselves
REFUSED = "refused"
SETUP_SECONDS = 300.0  # a library that has not answered by then has failed
QUIET_PERCENT = 8.0  # of the machine's time may go elsewhere in a quiet round; the counters tick in 10 ms
THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "RLX_THREADS")


@dataclass(frozen=True, slots=True)
class Library:
    """`factory` is "module:function"; in the library's own process it is called with (case, threads)."""

    name: str
    factory: str
    packages: tuple[str, ...] = ()  # distributions that must be installed; their versions go into the result
    python: str = sys.executable  # the interpreter of the environment that has them


@dataclass(slots=True)
class Timing:
    """One library on one case. `problem` is empty for a number that may be quoted."""

    seconds: list[float] = field(default_factory=list)
    work: float | None = None
    error: float | None = None  # largest difference from the float64 result, relative to its largest element
    note: str = ""
    problem: str = ""

    @property
    def refused(self) -> bool:
        return self.problem.startswith(REFUSED)

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def best(self) -> float:
        return min(self.seconds)


@dataclass(slots=True)
class CaseResult:
    case: Case
    timings: dict[str, Timing]
    elsewhere_percent: list[float]  # of each round: processor time that went to other programs or to the host

    def ok(self, name: str) -> bool:
        timing = self.timings.get(name)
        return timing is not None and bool(timing.seconds) and not timing.problem

    def gflops(self, name: str) -> tuple[float, float]:
        """Median and best."""
        timing = self.timings[name]
        return self.case.flops / timing.median / 1e9, self.case.flops / timing.best / 1e9

    def ratio(self, name: str, peer: str) -> tuple[float, float]:
        """How many times as fast as `peer`: median of the per-round ratios, and ratio of the bests."""
        ours, theirs = self.timings[name], self.timings[peer]
        rounds = [b / a for a, b in zip(ours.seconds, theirs.seconds, strict=True)]
        return statistics.median(rounds), theirs.best / ours.best

    def best_peer(self, peers: Sequence[str]) -> str | None:
        """The peer with the lowest median. None where one was refused: it may be the best one."""
        if any(p in self.timings and self.timings[p].refused for p in peers):
            return None
        valid = [p for p in peers if self.ok(p)]
        return min(valid, key=lambda p: self.timings[p].median) if valid else None


@dataclass(slots=True)
class Ceilings:
    """The best that the probes reached anywhere in this run."""

    fma: float  # FLOP/s
    dram: float  # bytes/s over 1 GiB
    reads: dict[float, float]  # bytes of the buffer -> bytes/s
    usual_fma: float  # median over the run, to tell a steady machine from one with good moments
    usual_dram: float

    def bandwidth(self, size: float) -> float:
        """Read bandwidth over a working set of `size` bytes: a small set stays in cache between calls.

        No set is read more slowly than a larger one, so probes of larger sets make up for an unlucky one.
        """
        return max([self.dram, *(rate for probed, rate in self.reads.items() if probed >= size)])

    def roof(self, case: Case) -> float:
        """FLOP/s that nothing can exceed on this case: min(FMA peak, intensity x bandwidth)."""
        return min(self.fma * case.narrow, case.flops / case.bytes * self.bandwidth(case.bytes))


@dataclass(slots=True)
class Result:
    machine: dict[str, Any]
    threads: int
    rounds: int
    libraries: dict[str, str]  # name -> versions, or "absent: why"
    ceilings: Ceilings
    cases: list[CaseResult]

    def disturbed(self) -> tuple[int, int]:
        """Rounds in which the processor was not ours, and all rounds."""
        elsewhere = [percent for case in self.cases for percent in case.elsewhere_percent]
        return sum(percent > QUIET_PERCENT for percent in elsewhere), len(elsewhere)

    def busy(self) -> bool:
        """Whether most rounds were disturbed, so that neither the times nor the ceilings mean much."""
        disturbed, rounds = self.disturbed()
        return disturbed > rounds / 2

    def problems(self) -> list[str]:
        problems = [
            f"{c.case.name}: {name}: {t.problem}" for c in self.cases for name, t in c.timings.items() if t.problem
        ]
        if self.busy():
            disturbed, rounds = self.disturbed()
            problems.append(f"the whole run: other programs had the processor in {disturbed} of {rounds} rounds")
        return problems

    def to_json(self) -> dict[str, Any]:
        return {
            "machine": self.machine,
            "threads": self.threads,
            "rounds": self.rounds,
            "libraries": self.libraries,
            "ceilings": {
                "fma_gflops": self.ceilings.fma / 1e9,
                "dram_read_gbs": self.ceilings.dram / 1e9,
                "fma_gflops_median": self.ceilings.usual_fma / 1e9,
                "dram_read_gbs_median": self.ceilings.usual_dram / 1e9,
                "read_gbs": {f"{size:.0f}": rate / 1e9 for size, rate in sorted(self.ceilings.reads.items())},
            },
            "cases": [
                asdict(c.case)
                | {
                    "roof_gflops": self.ceilings.roof(c.case) / 1e9,
                    "elsewhere_percent": c.elsewhere_percent,
                    "libraries": {name: timing_json(timing) for name, timing in c.timings.items()},
                }
                for c in self.cases
            ],
            "problems": self.problems(),
        }


def timing_json(timing: Timing) -> dict[str, Any]:
    """A refused number keeps its rounds, for whoever looks for the cause, but has no median and no best."""
    summary = {"median": timing.median, "best": timing.best} if timing.seconds and not timing.problem else {}
    return asdict(timing) | summary


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, with lists of numbers on one line, so that a diff of two runs can be read."""
    text = re.sub(r"\[[-+.e\d,\s]+\]", lambda match: " ".join(match[0].split()), json.dumps(content, indent=1))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text + "\n")
    print(f"written: {path}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------------------------------
# The probes, as libraries like any other.


def fma(case: Case, threads: int) -> Prepared:
    return from_probe(cached_probe(threads, 0))


def dram(case: Case, threads: int) -> Prepared:
    return from_probe(cached_probe(threads, ceilings.DRAM_BYTES))


def read(case: Case, threads: int) -> Prepared:
    return from_probe(ceilings.read_probe(threads, min(int(case.bytes), ceilings.DRAM_BYTES)))


@functools.cache
def cached_probe(threads: int, size: int) -> ceilings.Probe:
    return ceilings.read_probe(threads, size) if size else ceilings.fma_probe(threads)


def from_probe(probe: ceilings.Probe) -> Prepared:
    return Prepared(probe.call, work=probe.work, note=probe.note)


PROBES = (Library("fma", "harness:fma"), Library("dram", "harness:dram"), Library("read", "harness:read"))


# ---------------------------------------------------------------------------------------------------------------------
# Libraries' processes (`worker.py`).


class Worker:
    """The driver's end of one library: a process that is stopped except while it answers."""

    def __init__(self, library: Library, threads: int) -> None:
        self.library, self.threads = library, threads
        self.process: subprocess.Popen[bytes] | None = None
        self.connection: Connection | None = None

    def ask(self, *message: object) -> tuple[Any, ...]:
        """Send a message and wait for its answer; a crash or a hang is an answer too, and the next ask starts anew."""
        if self.process is None:
            self.start()
        assert self.process is not None and self.connection is not None
        try:
            self.signal("SIGCONT")
            self.connection.send(message)
            if not self.connection.poll(SETUP_SECONDS):
                self.close()
                return "failed", f"no answer in {SETUP_SECONDS:.0f} s"
            answer: tuple[Any, ...] = self.connection.recv()
        except (EOFError, OSError):
            code = self.process.wait(timeout=5)
            self.close()
            return "failed", f"its process ended with exit code {code}"
        self.signal("SIGSTOP")
        return answer

    def start(self) -> None:
        self.connection, theirs = multiprocessing.Pipe()
        script, end = Path(__file__).with_name("worker.py"), str(theirs.fileno())
        self.process = subprocess.Popen(
            [self.library.python, script, self.library.factory, str(self.threads), end],
            pass_fds=[theirs.fileno()],
            env=environment() | {name: str(self.threads) for name in THREAD_VARIABLES},
        )
        theirs.close()  # else the end of the process would not close the pipe

    def signal(self, name: str) -> None:
        if self.process is not None:
            os.kill(self.process.pid, getattr(signal, name))

    def close(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
        self.process = self.connection = None

    def cpu_seconds(self) -> float:
        return cpu_seconds(self.process.pid) if self.process is not None else 0.0


# ---------------------------------------------------------------------------------------------------------------------
# The driver.


def compare(
    libraries: Sequence[Library],
    cases: Sequence[Case],
    *,
    threads: int,
    rounds: int,
    reference: Callable[[Case], np.ndarray] | None = None,
    max_error: float = 1e-5,
    seed: int = 0,
) -> Result:
    """Time every library on every case, in shuffled rounds, and judge the numbers by the ceilings of the same run.

    `reference` gives the float64 result of a case; a library that differs from it by more than `max_error` of its
    largest element is refused.
    """
    versions = {library.name: installed(library) for library in libraries}
    for name, version in versions.items():
        print(f"{name}: {version}", file=sys.stderr)
    present = [library for library in libraries if not versions[library.name].startswith("absent")]
    workers = {library.name: Worker(library, threads) for library in (*present, *PROBES)}
    order = random.Random(seed)
    results: list[CaseResult] = []
    try:
        for number, case in enumerate(cases, 1):
            show = functools.partial(progress, f"[{number}/{len(cases)}] {case.name}")
            results.append(time_case(case, workers, rounds, order, show, reference, max_error))
    finally:
        for worker in workers.values():
            worker.close()
        progress("", "")
    machine = describe_machine() | {"date": timestamp(), "command": command()}
    result = Result(machine, threads, rounds, versions, run_ceilings(results), results)
    refuse(result)
    return result


def time_case(
    case: Case,
    workers: dict[str, Worker],
    rounds: int,
    order: random.Random,
    show: Callable[[str], None],
    reference: Callable[[Case], np.ndarray] | None,
    max_error: float,
) -> CaseResult:
    expected = reference(case) if reference else None
    timings: dict[str, Timing] = {}
    for name, worker in workers.items():
        show(f"setting up {name}")
        answer = worker.ask("setup", case)
        if answer[0] == "failed":
            timings[name] = Timing(problem=answer[1])
            continue
        _ready, work, note, output = answer
        timings[name] = Timing(work=work, note=note)
        if expected is not None and output is not None:
            check(timings[name], output, expected, max_error)
    quietest = quiet_rounds(workers, timings, rounds, order, show)
    for name, timing in timings.items():
        timing.seconds = [turn.seconds[name] for turn in quietest if name in turn.seconds]
    return CaseResult(case, timings, [turn.elsewhere_percent for turn in quietest])


@dataclass(frozen=True, slots=True)
class Round:
    seconds: dict[str, float]
    elsewhere_percent: float


def quiet_rounds(
    workers: dict[str, Worker],
    timings: dict[str, Timing],
    rounds: int,
    order: random.Random,
    show: Callable[[str], None],
) -> list[Round]:
    """As many quiet rounds as asked for; after twice that number of attempts, the quietest, in order of time."""
    done: list[Round] = []
    while len(done) < 2 * rounds:
        quiet = [turn for turn in done if turn.elsewhere_percent <= QUIET_PERCENT]
        if len(quiet) == rounds:
            return quiet
        show(f"round {len(quiet) + 1} of {rounds}, {len(done) - len(quiet)} disturbed")
        running = [name for name, timing in timings.items() if not timing.problem]
        order.shuffle(running)
        clock = Clock(workers.values())
        seconds: dict[str, float] = {}
        for name in running:
            kind, value = workers[name].ask("run")
            if kind == "time":
                seconds[name] = value
            else:
                timings[name].problem = value
        done.append(Round(seconds, clock.elsewhere_percent()))
    threshold = sorted(turn.elsewhere_percent for turn in done)[rounds - 1]
    return [turn for turn in done if turn.elsewhere_percent <= threshold][:rounds]


def check(timing: Timing, output: np.ndarray, expected: np.ndarray, max_error: float) -> None:
    """Fill in `error`, and `problem` if the output is not the expected one."""
    if output.shape != expected.shape:
        timing.problem = f"wrong result: shape {output.shape}, expected {expected.shape}"
        return
    timing.error = float(np.abs(output - expected).max() / np.abs(expected).max())
    if not timing.error <= max_error:  # so written because NaN is an error too
        timing.problem = f"wrong result: differs from float64 by {timing.error:.1e} of the largest element"


def run_ceilings(results: Sequence[CaseResult]) -> Ceilings:
    """The best of each probe over the whole run. Without them nothing can be judged, so their failure is an error."""
    rates: dict[str, list[float]] = {"fma": [], "dram": []}
    reads: dict[float, float] = {}
    for result in results:
        for probe in PROBES:
            timing = result.timings[probe.name]
            if timing.problem or timing.work is None:
                raise RuntimeError(f"probe {probe.name} failed on {result.case.name}: {timing.problem}")
            if probe.name == "read":
                reads[result.case.bytes] = max(timing.work / timing.best, reads.get(result.case.bytes, 0.0))
            else:
                rates[probe.name] += [timing.work / seconds for seconds in timing.seconds]
    fma_rates, dram_rates = rates["fma"], rates["dram"]
    return Ceilings(max(fma_rates), max(dram_rates), reads, statistics.median(fma_rates), statistics.median(dram_rates))


def refuse(result: Result) -> None:
    """Mark every number that is above what the machine can do."""
    probes = {probe.name for probe in PROBES}
    for case in result.cases:
        roof = result.ceilings.roof(case.case) / 1e9
        for name, timing in case.timings.items():
            if name in probes or timing.problem or not timing.seconds:
                continue
            best = case.gflops(name)[1]
            if best > roof * (1 + TOLERANCE):
                timing.problem = f"{REFUSED}: {best:.1f} GFLOPS is above the ceiling of {roof:.1f}"


def installed(library: Library) -> str:
    """Versions of the library's packages, or "absent: ..." with what is missing."""
    if library.python != sys.executable:
        return installed_elsewhere(library)
    versions = []
    for package in library.packages:
        if importlib.util.find_spec(package) is None:
            return f"absent: no package {package} in this environment"
        try:
            versions.append(f"{package} {importlib.metadata.version(package)}")
        except importlib.metadata.PackageNotFoundError:
            versions.append(f"{package} (source tree)")
    return ", ".join(versions)


def installed_elsewhere(library: Library) -> str:
    """The same by the library's own interpreter, which finds packages as its processes will."""
    script = "import importlib, sys; print(*(f'{n} {importlib.import_module(n).__version__}' for n in sys.argv[1:]))"
    try:
        done = subprocess.run([library.python, "-c", script, *library.packages], capture_output=True, text=True)
    except OSError as error:
        return f"absent: {library.python}: {error.strerror}"
    return done.stdout.strip() if done.returncode == 0 else f"absent: {done.stderr.strip().splitlines()[-1]}"


# ---------------------------------------------------------------------------------------------------------------------
# What the numbers were measured on.


def describe_machine() -> dict[str, Any]:
    return {
        "cpu": cpu_model(),
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "isa": ceilings.available()[0].name,
        "llvm_cpu": ceilings.cpu_name(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "llvmlite": importlib.metadata.version("llvmlite"),
    }


def cpu_model() -> str:
    """The CPU's name; family and model too, for a virtual machine often hides the name proper."""
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = {key.strip(): value.strip() for key, _colon, value in (line.partition(":") for line in lines)}
    name = fields.get("model name") or platform.machine()
    return f"{name} (family {fields.get('cpu family', '?')}, model {fields.get('model', '?')})"


def timestamp() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def command() -> str:
    return " ".join([Path(sys.executable).name, *sys.argv])


def cpu_counters() -> tuple[float, float, float] | None:
    """Seconds of this machine so far: busy, stolen by the host, all. None where /proc/stat does not exist."""
    try:
        ticks = [int(word) for word in Path("/proc/stat").read_text().splitlines()[0].split()[1:9]]
    except OSError:
        return None
    user, nice, system, idle, iowait, irq, softirq, steal = (tick / os.sysconf("SC_CLK_TCK") for tick in ticks)
    busy = user + nice + system + irq + softirq
    return busy, steal, busy + idle + iowait + steal


def environment() -> dict[str, str]:
    """The environment of measured processes: they find bytecode, as those of an installed package do."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def cpu_seconds(pid: int) -> float:
    """CPU time of a process, its threads and the children it waited for (proc(5): fields 14 to 17 of stat)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")


class HasCpuTime(Protocol):
    def cpu_seconds(self) -> float: ...


class Clock:
    """How much of the machine's processor time since its making went to the host or to programs other than ours."""

    def __init__(self, workers: Iterable[HasCpuTime]) -> None:
        self.workers = tuple(workers)
        self.counters, self.ours = cpu_counters(), self.our_seconds()

    def our_seconds(self) -> float:
        return sum(worker.cpu_seconds() for worker in self.workers) + time.process_time()

    def elsewhere_percent(self) -> float:
        """0 where the system does not tell."""
        now = cpu_counters()
        if self.counters is None or now is None:
            return 0.0
        busy, steal, total = (b - a for a, b in zip(self.counters, now, strict=True))
        others = max(0.0, busy - (self.our_seconds() - self.ours))
        return round(100 * (others + steal) / max(total, 0.01), 1)


# ---------------------------------------------------------------------------------------------------------------------
# Printing.


def progress(where: str, what: str) -> None:
    """One line on stderr that overwrites itself; where stderr is a file, one line for each new `where`."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{where}  {what}", end="", file=sys.stderr, flush=True)
    elif not where:
        _shown.clear()  # the end of a run
    elif what.startswith("setting up") and where not in _shown:
        _shown.add(where)
        print(where, file=sys.stderr, flush=True)


_shown: set[str] = set()


def geometric_mean(values: Sequence[float]) -> float:
    return math.exp(statistics.fmean(math.log(value) for value in values))


def print_end(result: Result, lines: Iterable[str]) -> None:
    """What comes after a table: the summary, and what is wrong with the run."""
    print()
    for line in lines:
        print(line)
    for problem in result.problems():
        print(f"NOT VALID: {problem}")


def print_heading(result: Result) -> None:
    machine = result.machine
    print(f"{machine['cpu']}, {machine['cores']} cores, {machine['isa']}; {machine['system']}; {machine['date']}")
    for name, version in result.libraries.items():
        print(f"  {name}: {version}")
    top = result.ceilings
    print(
        f"{result.threads} thread(s), {result.rounds} rounds; this run's probes, median/best: "
        f"FMA {top.usual_fma / 1e9:.0f}/{top.fma / 1e9:.0f} GFLOPS, "
        f"DRAM read {top.usual_dram / 1e9:.1f}/{top.dram / 1e9:.1f} GB/s"
    )
    disturbed, rounds = result.disturbed()
    print(f"rounds in which over {QUIET_PERCENT:.0f} % of the processor went elsewhere: {disturbed} of {rounds}")

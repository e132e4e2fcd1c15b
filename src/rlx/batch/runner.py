"""Runs the shards of a job on workers: the protocol of runners, and the loop that all of them share.

A runner starts workers and waits for what they send; who gets which shard, what happens when a worker dies, and when
to give up is decided here. At most one shard per worker is in memory.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterator
from typing import Any, Protocol

from rlx.batch.inputs import Shard
from rlx.batch.tasks import ShardResult, Task
from rlx.errors import BatchError, RequestError
from rlx.fast_dataclass import dataclass

TRIES = 3  # per shard, and of starting a worker
BEAT_S = 1.0  # between signs of life of a worker, at least
TIMEOUT_S = 600.0  # without a sign of life, after which a worker is replaced; loading always has as much


@dataclass(frozen=True)
class Ready:
    """A worker has loaded its model."""

    fingerprint: str


@dataclass(frozen=True)
class Raised:
    """A task raised an error, which it would raise again."""

    kind: str
    message: str
    notes: tuple[str, ...] = ()

    @classmethod
    def of(cls, error: BaseException) -> Raised:
        notes = tuple(str(note).strip() for note in getattr(error, "__notes__", ()))
        return cls(type(error).__name__, str(error), notes)

    def as_error(self, where: str) -> BatchError:
        return BatchError(f"{where}: {self.kind}: {self.message}", notes=self.notes)


@dataclass(frozen=True)
class Died:
    """A worker ended without an answer."""

    reason: str


@dataclass(frozen=True)
class Alive:
    """A worker makes progress."""


Event = Ready | ShardResult | Raised | Died | Alive


class Worker(Protocol):
    """A process with the model; runs a shard at a time."""

    is_started: bool  # False: it waits until a cluster has room

    def submit(self, shard: Shard) -> None: ...

    def close(self) -> None: ...


class Runner(Protocol):
    """Where workers run. `threads` is the number per worker."""

    workers: int
    threads: int

    def start(self, task: Task) -> Worker:
        """Start a worker, whose first event is `Ready` or `Died`."""

    def wait(self, workers: list[Any], seconds: float | None) -> tuple[Worker, Event] | None:
        """Wait for the next event of one of the workers; returns None if there is none for so many seconds."""


@dataclass(frozen=True)
class GivenUp:
    """A shard during which workers died again and again."""

    shard: Shard
    reason: str


class _Patience:
    """Waits for events of workers. One that gives no sign of life for `timeout` seconds counts as dead.

    Loading a model gives none, and has at least TIMEOUT_S.
    """

    def __init__(self, runner: Runner, timeout: float) -> None:
        self._runner, self._timeout = runner, timeout
        self._limits, self._deadlines = dict[Worker, float](), dict[Worker, float]()

    def begin(self, worker: Worker, *, is_loading: bool = False) -> None:
        """Start the clock of a worker that has something to do."""
        self._limits[worker] = max(self._timeout, TIMEOUT_S) if is_loading else self._timeout
        self._deadlines[worker] = time.monotonic() + self._limits[worker]

    def wait(self, busy: list[Worker]) -> tuple[Worker, Event]:
        while True:
            deadlines = {worker: self._deadlines[worker] for worker in busy if worker.is_started}
            first = min(deadlines.values(), default=math.inf)
            # at least a second: a driver that was stopped itself has events to read first
            seconds = None if first == math.inf else max(first - time.monotonic(), BEAT_S)
            received = self._runner.wait(busy, seconds)
            if received is None:
                late = next((worker for worker in deadlines if deadlines[worker] <= time.monotonic()), None)
                if late is not None:
                    return late, Died(f"it gave no sign of life for {self._limits[late]:g} seconds")
            elif isinstance(received[1], Alive):
                self._deadlines[received[0]] = time.monotonic() + self._limits[received[0]]
            else:
                return received


def check_timeout(seconds: float) -> None:
    """Raise RequestError if signs of life come less often than this."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 2 * BEAT_S:
        raise RequestError(f"batch: worker_timeout is {seconds!r}, expected a number of seconds from {2 * BEAT_S:g}")


def run_shards(
    runner: Runner, task: Task, shards: Iterator[Shard], fingerprint: str,
    ready: Callable[[int], None] = lambda n: None, *, timeout: float = TIMEOUT_S,
) -> Generator[tuple[Shard, ShardResult] | GivenUp, None, None]:  # fmt: skip
    """The results of all shards, as they are finished. `ready` is called with the number of workers that are loaded."""
    patience = _Patience(runner, timeout)
    queue = deque[Shard]()  # to be run again
    running = dict[Worker, Shard | None]()  # None: not ready yet
    idle, tries, deaths, loaded = list[Worker](), dict[int, int](), 0, 0

    def next_shard() -> Shard | None:
        return queue.popleft() if queue else next(shards, None)

    waiting = next_shard()
    try:
        while waiting is not None or any(running.values()):
            while waiting is not None and idle:
                worker = idle.pop()
                worker.submit(waiting)
                patience.begin(worker)
                running[worker], waiting = waiting, next_shard()
            if waiting is not None and len(running) < runner.workers:
                worker = runner.start(task)
                patience.begin(worker, is_loading=True)
                running[worker] = None
                continue
            worker, event = patience.wait([w for w in running if w not in idle])
            shard = running[worker]
            match event:
                case Ready():
                    _check_fingerprint(event.fingerprint, fingerprint)
                    loaded, deaths = loaded + 1, 0
                    ready(loaded)
                    idle.append(worker)
                case ShardResult():
                    assert shard is not None
                    tries.pop(shard.number, None)
                    running[worker] = None
                    idle.append(worker)
                    yield shard, event
                case Raised():
                    raise event.as_error("batch: a worker" if shard is None else f"batch: {shard}")
                case Died():
                    del running[worker]
                    worker.close()
                    loaded -= shard is not None
                    if shard is None:
                        deaths += 1
                        if deaths >= TRIES:
                            raise BatchError(f"batch: workers end before they are ready: {event.reason}")
                        continue
                    tries[shard.number] = tries.get(shard.number, 0) + 1
                    if tries[shard.number] >= TRIES:
                        yield GivenUp(shard, event.reason)
                    else:
                        queue.append(shard)
                    if waiting is None:
                        waiting = next_shard()
    finally:
        for worker in running:
            worker.close()


def _check_fingerprint(actual: str, expected: str) -> None:
    """Refuse a worker whose results would have other bits."""
    if actual != expected:
        raise BatchError(
            "batch: a worker would give other bits than the job has",
            notes=(f"worker: {actual}", f"job:    {expected}"),
            hint="the same rlx, NumPy and model everywhere; RLX_TARGET=avx2 makes different processors compute alike",
        )

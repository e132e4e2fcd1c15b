"""Workers as processes of this machine. They map the same snapshot, so the weights are in memory once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe
from queue import Empty, SimpleQueue
from typing import Any

from rlx.batch.inputs import Shard
from rlx.batch.runner import BEAT_S, Alive, Died, Event, Raised, Ready
from rlx.batch.tasks import Task

# Not multiprocessing.Process, which imports the script of the user again.
_START = "import sys; sys.path[:] = {path!r}; from rlx.batch.local import serve; serve({pipe})"


class LocalWorker:
    """A process, and a thread that talks to it: one that hangs in the middle of a message must not hang the driver."""

    is_started = True

    def __init__(self, task: Task, threads: int, events: Events) -> None:
        own, other = Pipe()
        environment = os.environ | {"RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        code = _START.format(path=sys.path, pipe=other.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL,
            stdout=sys.stderr if _has_stream() else subprocess.DEVNULL,
        )  # fmt: skip
        other.close()
        self._pipe: Connection[Any, Any] = own
        self._events, self._shards = events, SimpleQueue[Shard | None]()
        self._thread = threading.Thread(target=self._talk, args=[(task, threads)], daemon=True)
        self._thread.start()

    def submit(self, shard: Shard) -> None:
        self._shards.put(shard)

    def close(self) -> None:
        """End the process: nothing is lost, it holds no results."""
        self.process.kill()
        self.process.wait()
        self._shards.put(None)
        self._thread.join()
        self._pipe.close()

    def _talk(self, message: object) -> None:
        try:
            while message is not None:
                self._pipe.send(message)
                event: Event = Alive()
                while isinstance(event, Alive):
                    event = self._pipe.recv()
                    self._events.put((self, event))
                message = self._shards.get()
        except (EOFError, OSError):
            self._events.put((self, Died(f"process {self.process.pid} ended with {self.process.wait()}")))


Events = SimpleQueue[tuple[LocalWorker, Event]]


class Local:
    """Runs shards in processes of this machine, spread over `devices` if there are several."""

    def __init__(self, workers: int, threads: int = 1, devices: Sequence[str] = ()) -> None:
        self.workers, self.threads = workers, threads
        self._running = {name: list[LocalWorker]() for name in devices}
        self._events: Events = SimpleQueue()

    def start(self, task: Task) -> LocalWorker:
        if len(self._running) < 2:
            return LocalWorker(task, self.threads, self._events)
        for name, workers in self._running.items():
            self._running[name] = [worker for worker in workers if worker.process.poll() is None]
        device = min(self._running, key=lambda name: len(self._running[name]))
        worker = LocalWorker(replace(task, load={**task.load, "device": device}), self.threads, self._events)
        self._running[device].append(worker)
        return worker

    def wait(self, workers: list[LocalWorker], seconds: float | None) -> tuple[LocalWorker, Event] | None:
        while True:
            try:
                worker, event = self._events.get(timeout=seconds)
            except Empty:
                return None
            if worker in workers:  # else it was closed
                return worker, event


def _has_stream() -> bool:
    try:
        return sys.stderr.fileno() >= 0
    except (AttributeError, OSError, ValueError):
        return False


# -- in the process --------------------------------------------------------------------------------------------------
def serve(descriptor: int) -> None:
    """Run shards until the other end of the pipe is closed, as when the driver is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the driver ends its workers
    pipe: Connection[Any, Any] = Connection(descriptor)
    last = time.monotonic()

    def beat() -> None:
        nonlocal last
        if time.monotonic() - last >= BEAT_S:
            last = time.monotonic()
            pipe.send(Alive())

    try:
        task, threads = pipe.recv()
        try:
            opened = task.open(threads)
        except Exception as error:
            pipe.send(Raised.of(error))
            return
        pipe.send(Ready(opened.fingerprint))
        while True:
            shard = pipe.recv()
            try:
                event: Event = opened.run(shard, beat)
            except Exception as error:
                event = Raised.of(error)
            pipe.send(event)
    except (EOFError, OSError):
        return

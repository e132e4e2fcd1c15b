"""Workers as processes of this machine. They map the same snapshot, so the weights are in memory once."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection, Pipe, wait
from typing import Any

from rlx.batch.inputs import Shard
from rlx.batch.runner import Died, Event, Raised, Ready
from rlx.batch.tasks import Task

# Not multiprocessing.Process, which imports the script of the user again.
_START = "import sys; sys.path[:] = {path!r}; from rlx.batch.local import serve; serve({pipe})"


class LocalWorker:
    def __init__(self, task: Task, threads: int) -> None:
        own, other = Pipe()
        environment = os.environ | {"RAYON_NUM_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
        code = _START.format(path=sys.path, pipe=other.fileno())
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], pass_fds=[other.fileno()], env=environment, stdin=subprocess.DEVNULL,
            stdout=sys.stderr if _has_stream() else subprocess.DEVNULL,
        )  # fmt: skip
        other.close()
        self.pipe: Connection[Any, Any] = own
        self._send((task, threads))

    def submit(self, shard: Shard) -> None:
        self._send(shard)

    def _send(self, value: object) -> None:
        with contextlib.suppress(OSError):  # it is dead, which `receive` reports
            self.pipe.send(value)

    def receive(self) -> Event:
        try:
            event: Event = self.pipe.recv()
        except (EOFError, OSError):
            return Died(f"process {self.process.pid} ended with {self.process.wait()}")
        return event

    def close(self) -> None:
        """End the process: nothing is lost, it holds no results."""
        self.pipe.close()
        self.process.kill()
        self.process.wait()


class Local:
    """Runs shards in processes of this machine, spread over `devices` if there are several."""

    def __init__(self, workers: int, threads: int = 1, devices: Sequence[str] = ()) -> None:
        self.workers, self.threads = workers, threads
        self._running = {name: list[LocalWorker]() for name in devices}

    def start(self, task: Task) -> LocalWorker:
        if len(self._running) < 2:
            return LocalWorker(task, self.threads)
        for name, workers in self._running.items():
            self._running[name] = [worker for worker in workers if worker.process.poll() is None]
        device = min(self._running, key=lambda name: len(self._running[name]))
        worker = LocalWorker(replace(task, load={**task.load, "device": device}), self.threads)
        self._running[device].append(worker)
        return worker

    def wait(self, workers: list[LocalWorker]) -> tuple[LocalWorker, Event]:
        ready = wait([worker.pipe for worker in workers])[0]
        worker = next(worker for worker in workers if worker.pipe is ready)
        return worker, worker.receive()


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
                event: Event = opened.run(shard)
            except Exception as error:
                event = Raised.of(error)
            pipe.send(event)
    except (EOFError, OSError):
        return

"""Workers as actors of a Ray cluster. Shards and results travel through its object store: no shared disk is needed."""

from __future__ import annotations

import os
import threading
import time
from typing import Any

from rlx.batch.inputs import Shard
from rlx.batch.runner import BEAT_S, Alive, Died, Event, Raised, Ready
from rlx.batch.tasks import OpenTask, Task
from rlx.errors import CapabilityError, RequestError


def import_ray() -> Any:
    try:
        import ray
    except ImportError as error:
        raise CapabilityError("ray is not installed", hint="pip install 'rlx[ray]'") from error
    return ray


class RayWorker:
    def __init__(self, actor: Any) -> None:
        self.actor = actor
        self.is_started = False
        self.pending, self.pulse = actor.ready.remote(), actor.alive.remote()

    def submit(self, shard: Shard) -> None:
        self.pending = self.actor.run.remote(shard)

    def close(self) -> None:
        import_ray().kill(self.actor)


class OnRay:
    """Runs shards on actors with `threads` CPUs and `gpus` GPUs each, on the cluster that `ray.init` found."""

    def __init__(self, workers: int, threads: int = 1, *, gpus: float = 0) -> None:
        self.capacity(threads, gpus)
        self.workers, self.threads, self.gpus = workers, threads, gpus
        self.ray = import_ray()

    @staticmethod
    def capacity(threads: int, gpus: float = 0) -> int:
        """How many workers with so many threads and GPUs the cluster holds; raises RequestError if none."""
        ray = import_ray()
        if not ray.is_initialized():
            raise RequestError(
                "batch: no Ray cluster is connected", hint="ray.init(address='auto'); rlx batch --ray auto"
            )
        nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
        most = max((int(node.get("CPU", 0)) for node in nodes), default=0)
        if most < threads:
            raise RequestError(f"batch: a worker has {threads} threads, the largest node of the cluster {most} CPUs")
        count = 0
        for node in nodes:
            fitting = int(node.get("CPU", 0)) // threads
            count += min(fitting, int(node.get("GPU", 0) / gpus)) if gpus else fitting
        if not count:
            raise RequestError("batch: no node of the cluster has a GPU and CPUs for a worker", hint="--device cpu")
        return count

    def start(self, task: Task) -> RayWorker:
        # two calls at a time: a shard, and a sign of life
        options = {"num_cpus": self.threads, "num_gpus": self.gpus, "max_restarts": 0, "max_concurrency": 2}
        actor = self.ray.remote(Actor).options(**options)
        return RayWorker(actor.remote(task, self.threads))

    def wait(self, workers: list[RayWorker], seconds: float | None) -> tuple[RayWorker, Event] | None:
        calls = {worker.pending: worker for worker in workers} | {worker.pulse: worker for worker in workers}
        ready, _ = self.ray.wait(list(calls), num_returns=1, timeout=seconds)
        if not ready:
            return None
        worker = calls[ready[0]]
        worker.is_started = True
        try:
            event: Event = self.ray.get(ready[0])
            if isinstance(event, Alive):
                worker.pulse = worker.actor.alive.remote()
        except self.ray.exceptions.RayTaskError:  # not the task's own errors, which are values
            raise
        except self.ray.exceptions.RayError as error:  # the actor, its node or its result is gone
            event = Died(f"{type(error).__name__}: {str(error).strip().splitlines()[0]}")
        return worker, event


class Actor:
    """A worker in a process of Ray. Errors of the task are values: Ray would wrap them."""

    def __init__(self, task: Task, threads: int) -> None:
        os.environ["RAYON_NUM_THREADS"] = str(threads)
        self._task, self._threads = task, threads
        self._opened: OpenTask | None = None
        self._beat, self._is_announced = threading.Event(), False

    def alive(self) -> Event:
        """Returns once there is a sign of life: at first that the actor runs, then that it makes progress."""
        if self._is_announced:
            time.sleep(BEAT_S)
            self._beat.wait()
        self._is_announced = True
        self._beat.clear()
        return Alive()

    def ready(self) -> Event:
        try:
            self._opened = self._task.open(self._threads)
        except Exception as error:
            return Raised.of(error)
        return Ready(self._opened.fingerprint)

    def run(self, shard: Shard) -> Event:
        assert self._opened is not None
        try:
            return self._opened.run(shard, self._beat.set)
        except Exception as error:
            return Raised.of(error)

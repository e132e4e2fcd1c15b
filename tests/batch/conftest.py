"""Small models and input files for all tests of this folder, and a runner without processes."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import small_bert
import stand_ins

from rlx.batch.inputs import Shard
from rlx.batch.runner import Died, Event, Raised, Ready
from rlx.batch.tasks import Task


@pytest.fixture(scope="session")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins.write_encoder(tmp_path_factory.mktemp("encoder"))


@pytest.fixture(scope="session")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return stand_ins.write_chat(tmp_path_factory.mktemp("decoder"))


def texts(count: int, seed: int = 0) -> list[str]:
    """Texts of words that the small encoder knows."""
    rng = random.Random(seed)
    return [" ".join(rng.choices(small_bert.WORDS, k=rng.randint(1, 9))) for _ in range(count)]


def write_texts(path: Path, count: int, seed: int = 0) -> list[str]:
    listed = texts(count, seed)
    path.write_text("".join(f"{text}\n" for text in listed))
    return listed


def contents(folder: Path) -> dict[str, bytes]:
    """All files of an output folder but its lock."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != ".lock"}


class InlineWorker:
    is_started = True

    def __init__(self, task: Task, dies: Callable[[Shard], bool]) -> None:
        self.events: list[Event] = []
        self._dies = dies
        try:
            self._opened = task.open(1)
            self.events.append(Ready(self._opened.fingerprint))
        except Exception as error:
            self.events.append(Raised.of(error))

    def submit(self, shard: Shard) -> None:
        self.events.append(Died("it was told to") if self._dies(shard) else self._opened.run(shard))

    def close(self) -> None:
        self.events.clear()


class Inline:
    """Runs shards in this process; a shard for which `dies` is true ends its worker."""

    def __init__(self, workers: int = 1, dies: Callable[[Shard], bool] = lambda shard: False) -> None:
        self.workers, self.threads, self.dies = workers, 1, dies

    def start(self, task: Task) -> Any:
        return InlineWorker(task, self.dies)

    def wait(self, workers: list[Any], seconds: float | None) -> tuple[Any, Event]:
        worker = next(worker for worker in reversed(workers) if worker.events)
        return worker, worker.events.pop(0)

"""A batch job: input files in, an output folder with a file per shard out. It may be killed and resumed at any time."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

from rlx.batch.folder import OutputFolder, Part
from rlx.batch.inputs import Shard, Source, check_sources, cut, find_sources
from rlx.batch.results import Results
from rlx.batch.runner import TIMEOUT_S, GivenUp, Runner, run_shards
from rlx.batch.tasks import Task
from rlx.errors import BatchError, RequestError
from rlx.fast_dataclass import dataclass
from rlx.version import __version__

NAMED = 8  # shards that an error names


@dataclass(frozen=True)
class Progress:
    """How far a job is. Time left is estimated from bytes of input, since lines are not counted beforehand."""

    records: int  # read since this run began, without those that were finished before
    rows: int
    errors: int
    tokens: int
    done: float  # share of the input that is finished
    seconds: float
    seconds_left: float | None
    workers: int  # that are loaded
    resumed: int  # shards that were finished before

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.records / self.seconds if self.seconds else 0.0


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Job:
    """A task, its input files, and how they are cut."""

    task: Task
    sources: Sequence[Source]
    shard_records: int
    shard_bytes: int

    @classmethod
    def of(
        cls, task: Task, inputs: Sequence[str | Path], *, input_format: str | None = None,
        shard_records: int | None = None,
    ) -> Job:  # fmt: skip
        sources = find_sources(inputs, input_format)
        check_sources(sources, [name for name in task.columns if name != "id"])
        count = task.shard_records if shard_records is None else shard_records
        if count < 1:
            raise RequestError(f"batch: shards of {count} records, expected a number from 1")
        return cls(task, sources, count, task.shard_bytes)

    def shards(self) -> Iterator[Shard]:
        return cut(self.sources, self.shard_records, self.shard_bytes, self.task.columns)

    def shards_of(self, source: Source) -> Generator[Shard, None, None]:
        """The shards of one file, counted from 0."""
        return cut([source], self.shard_records, self.shard_bytes, self.task.columns)

    def describe(self, fingerprint: str) -> dict[str, Any]:
        """What results depend on, for the manifest."""
        inputs = [{"name": s.name, "format": s.kind, "bytes": s.size} for s in self.sources]
        cutting = {"records": self.shard_records, "bytes": self.shard_bytes}
        return {
            "rlx": __version__, "verb": self.task.verb, "model": fingerprint, "settings": self.task.settings(),
            "inputs": inputs, "shards_of": cutting,
        }  # fmt: skip

    def run(
        self, out: str | Path, runner: Runner, fingerprint: str, on_progress: OnProgress | None = None,
        worker_timeout: float = TIMEOUT_S,
    ) -> Results:  # fmt: skip
        """Run all shards that are not finished. Raises BatchError if some shards kill their workers."""
        path = Path(out)
        with OutputFolder(path, self.describe(fingerprint), self.task.suffix) as folder:
            if folder.is_finished:
                folder.check_finished(self.sources, self.shards())
            else:
                watch = _Watch(self.sources, on_progress or (lambda progress: None))
                self._run(folder, runner, fingerprint, watch, worker_timeout)
        return Results(path)

    def _run(
        self, folder: OutputFolder, runner: Runner, fingerprint: str, watch: _Watch, worker_timeout: float
    ) -> None:
        def unfinished() -> Iterator[Shard]:
            for shard in self.shards():
                is_finished = folder.check_source(shard)
                watch.read(shard, is_finished=is_finished)
                if not is_finished:
                    yield shard

        lost = list[GivenUp]()
        for outcome in run_shards(runner, self.task, unfinished(), fingerprint, watch.ready, timeout=worker_timeout):
            if isinstance(outcome, GivenUp):
                lost.append(outcome)
                continue
            shard, result = outcome
            part = folder.write(shard, result)
            watch.finish(shard, part)
        if lost:
            named = [f"{one.shard}: {one.reason}" for one in lost[:NAMED]]
            raise BatchError(
                f"batch: {len(lost)} shard{'s' * (len(lost) != 1)} killed every worker that ran them; all others are "
                "finished", notes=named, hint="the same command tries them again",
            )  # fmt: skip
        folder.write_stamps(self.sources)
        folder.finish()


class _Watch:
    """Counts what is finished, in records and in bytes of the input files."""

    def __init__(self, sources: Sequence[Source], on_progress: OnProgress) -> None:
        self._before = {s.number: sum(t.size for t in sources if t.number < s.number) for s in sources}
        self._total = max(sum(source.size for source in sources), 1)
        self._report = on_progress
        self._began = time.monotonic()
        self._counts = dict.fromkeys(("records", "rows", "errors", "tokens"), 0)
        self._workers = self._resumed = self._position = self._skipped = self._finished = 0
        self._sizes = dict[int, int]()  # of shards that run

    def read(self, shard: Shard, *, is_finished: bool) -> None:
        """Note a shard that was read: it takes the bytes since the one before it."""
        position = self._before[shard.source.number] + shard.position
        size, self._position = position - self._position, position
        if is_finished:
            self._resumed += 1
            self._skipped += size
        else:
            self._sizes[shard.number] = size

    def ready(self, workers: int) -> None:
        if not self._workers:
            self._began = time.monotonic()  # loading is not part of the rate
        self._workers = workers

    def finish(self, shard: Shard, part: Part) -> None:
        for name in self._counts:
            self._counts[name] += getattr(part, name)
        self._finished += self._sizes.pop(shard.number)
        seconds = time.monotonic() - self._began
        left = self._total - self._skipped - self._finished
        seconds_left = left * seconds / self._finished if self._finished else None
        self._report(
            Progress(
                **self._counts,
                done=1 - left / self._total,
                seconds=seconds,
                seconds_left=seconds_left,
                workers=self._workers,
                resumed=self._resumed,
            )
        )

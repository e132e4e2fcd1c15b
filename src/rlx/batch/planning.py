"""How long a job takes with 1 to 1,000 workers, from a measurement on this machine.

Some shards run with one worker, then some with as many as this machine holds; the rest is arithmetic: machines like
this one are added, and nothing is faster than the driver reads and writes.
"""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from rlx.batch.folder import digest_of, write_file
from rlx.batch.inputs import Shard
from rlx.batch.job import Job
from rlx.batch.runner import GivenUp, Runner, run_shards
from rlx.batch.tasks import ShardResult
from rlx.errors import BatchError, RequestError
from rlx.fast_dataclass import dataclass

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
COUNTED = 1 << 20  # bytes of each file that are counted at least
Start = Callable[[int], Runner]  # a runner with so many workers


@dataclass(frozen=True)
class Measured:
    """Rates with a number of workers on this machine."""

    workers: int
    records: int
    tokens: int
    size: int  # bytes of shards
    seconds: float  # of all workers together
    shards: int

    @property
    def rate(self) -> float:
        """Records per second."""
        return self.workers * self.records / self.seconds


@dataclass(frozen=True)
class Estimate:
    """What a number of workers needs."""

    workers: int
    machines: int
    records_per_second: float
    tokens_per_second: float
    seconds: float
    limit: str  # what the time depends on: workers, shards or driver


@dataclass(frozen=True)
class Plan:
    """An estimate per number of workers, and what it rests on."""

    records: int  # estimated, unless all of the input was measured
    tokens: int
    shards: int
    is_exact: bool
    one: Measured
    all: Measured
    driver_rate: float  # records per second that the driver can read and write
    start_seconds: float

    def estimate(self, workers: int) -> Estimate:
        rate = self.rate(workers)
        per_record = self.tokens / max(self.records, 1)
        shard_seconds = self.one.seconds / max(self.one.shards, 1)
        limits = {
            "workers": self.records / rate,
            "shards": math.ceil(self.shards / workers) * shard_seconds,
            "driver": self.records / self.driver_rate,
        }
        limit = max(limits, key=limits.__getitem__)
        real = self.records / max(limits[limit], 1e-9)
        machines = math.ceil(workers / self.all.workers)
        return Estimate(workers, machines, real, real * per_record, limits[limit] + self.start_seconds, limit)

    def rate(self, workers: int) -> float:
        """Records per second of workers on machines like this one, which are filled one after the other."""
        full, rest = divmod(workers, self.all.workers)
        return full * self.all.rate + (self._rate_here(rest) if rest else 0.0)

    def _rate_here(self, workers: int) -> float:
        """Between one worker and all of them, what they lose to each other grows with their number."""
        most = self.all.workers
        efficiency = self.all.rate / (most * self.one.rate)
        lost = 0.0 if most == 1 else (1 - efficiency) * (workers - 1) / (most - 1)
        return workers * self.one.rate * (1 - lost)


@dataclass(frozen=True)
class _Sample:
    """What was measured with a number of workers."""

    rates: Measured
    lines: int  # of shards, with blank ones
    records: int
    tokens: int
    shards: int
    is_whole: bool  # all of the input
    driver_seconds: float
    start_seconds: float


def make_plan(job: Job, start: Start, workers: int, fingerprint: str, seconds: float = 30.0) -> Plan:
    """Measure for about so many seconds: a third of them with one worker, the others with all that fit here."""
    if not (math.isfinite(seconds) and seconds > 0):
        raise RequestError(f"batch: a plan that is measured for {seconds} seconds, expected a number above 0")
    began = time.monotonic()
    one = everyone = _measure(job, start(1), fingerprint, seconds / 3)
    samples = [one]
    if workers > 1:
        left = max(seconds - (time.monotonic() - began), seconds / 3)
        everyone = _measure(job, start(workers), fingerprint, left)
        samples.append(everyone)
    sample = max(samples, key=lambda sample: (sample.is_whole, sample.records))
    records, shards = float(sample.records), float(sample.shards)
    if not sample.is_whole:
        lines, shards = _count(job, seconds / 10)
        records = lines * sample.records / max(sample.lines, 1)
    tokens = records * sample.tokens / max(sample.records, 1)
    driver = sum(one.driver_seconds for one in samples) / max(sum(one.records for one in samples), 1)
    return Plan(
        max(1, round(records)), max(1, round(tokens)), max(1, round(shards)), sample.is_whole, one.rates,
        everyone.rates, 1 / max(driver, 1e-9), everyone.start_seconds,
    )  # fmt: skip


def _count(job: Job, seconds: float) -> tuple[float, float]:
    """Lines and shards of the input: counted as far as the time goes, and then by bytes, file by file.

    A compressed file is read in blocks, ahead of its lines. So counts are taken where a block begins.
    """
    lines, shards, end = 0.0, 0.0, time.monotonic() + seconds
    for i, source in enumerate(job.sources):
        own_end = time.monotonic() + (end - time.monotonic()) / (len(job.sources) - i)
        own_lines = own_shards = position = 0
        begin: tuple[int, int, int] | None = None
        scale = 1.0
        with contextlib.closing(job.shards_of(source)) as cutting:
            for shard in cutting:
                if own_shards and shard.position != position:
                    begin = begin or (own_lines, own_shards, shard.position)
                    size = shard.position - begin[2]
                    if size > COUNTED and time.monotonic() > own_end:
                        own_lines, own_shards = own_lines - begin[0], own_shards - begin[1]
                        scale = source.size / size
                        break
                own_lines, own_shards, position = own_lines + shard.records, own_shards + 1, shard.position
        lines, shards = lines + own_lines * scale, shards + own_shards * scale
    return lines, shards


def _measure(job: Job, runner: Runner, fingerprint: str, seconds: float) -> _Sample:
    """Rates of the workers while all of them are busy, seconds of the driver, and seconds until workers are ready."""
    results, driver, began = list[tuple[Shard, ShardResult]](), 0.0, time.monotonic()
    ready_at = list[float]()

    def shards() -> Iterator[Shard]:
        nonlocal driver
        cutting = job.shards()
        while True:
            begin = time.perf_counter()
            shard = next(cutting, None)
            if shard is None:
                return
            driver += time.perf_counter() - begin
            yield shard

    is_whole = False
    with tempfile.TemporaryDirectory(prefix="rlx-plan-") as folder:
        run = run_shards(
            runner, job.task, shards(), fingerprint, lambda workers: ready_at.append(time.monotonic() - began)
        )
        for outcome in run:
            if isinstance(outcome, GivenUp):
                raise BatchError(f"batch: {outcome.shard}: {outcome.reason}")
            result = outcome[1]
            begin = time.perf_counter()
            write_file(Path(folder) / "part", result.output)
            digest_of(result.output)
            driver += time.perf_counter() - begin
            results.append(outcome)
            if time.monotonic() - began - ready_at[0] > seconds:
                break
        else:
            is_whole = True
        run.close()
    if not results:
        raise BatchError("batch: there is nothing to measure: the input has no records")
    measured = results[runner.workers :] or results  # the first call of a worker is slower
    rates = Measured(
        runner.workers,
        records=max(1, sum(result.records for _, result in measured)),
        tokens=sum(result.tokens for _, result in measured),
        size=sum(len(shard.data) for shard, _ in measured),
        seconds=max(sum(result.seconds for _, result in measured), 1e-9),
        shards=len(measured),
    )
    return _Sample(
        rates, sum(shard.records for shard, _ in results), sum(result.records for _, result in results),
        sum(result.tokens for _, result in results), len(results), is_whole, driver, ready_at[-1],
    )  # fmt: skip

"""How long a job takes with 1 to 1,000 workers, from a measurement on this machine.

Some shards run with one worker, then some with as many as this machine holds; the rest is arithmetic: machines like
this one are added, and nothing is faster than the driver reads and writes.
"""

from __future__ import annotations

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
from rlx.errors import BatchError
from rlx.fast_dataclass import dataclass

WORKERS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000)
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


def make_plan(job: Job, start: Start, workers: int, fingerprint: str, seconds: float = 30.0) -> Plan:
    """Measure for about so many seconds: a third of them with one worker, the others with all that fit here."""
    began = time.monotonic()
    one, driver_one, start_seconds = _measure(job, start(1), fingerprint, seconds / 3)
    everyone, driver_all = one, driver_one
    if workers > 1:
        left = max(seconds - (time.monotonic() - began), seconds / 3)
        everyone, driver_all, start_seconds = _measure(job, start(workers), fingerprint, left)
    driver = (driver_one + driver_all) / max(one.records + (everyone.records if workers > 1 else 0), 1)
    total = sum(source.size for source in job.sources)
    sample = everyone if everyone.records >= one.records else one
    share = min(_share(job, sample, total), 1.0)
    exact = share >= 1.0
    records, tokens = (max(1, round(number / share)) for number in (sample.records, sample.tokens))
    return Plan(
        records, tokens, max(1, round(sample.shards / share)), exact, one, everyone,
        1 / max(driver, 1e-9), start_seconds,
    )  # fmt: skip


def _share(job: Job, measured: Measured, total: int) -> float:
    """The share of the input that was measured. Of compressed files, the size on disk per record is looked at."""
    if not any(source.gzipped or source.kind == "parquet" for source in job.sources):
        return measured.size / max(total, 1)
    position = read = 0
    for shard in job.shards():
        position, read = shard.position, read + shard.records
        if read >= measured.records:
            break
    return position * measured.records / max(read, 1) / max(total, 1)


def _measure(job: Job, runner: Runner, fingerprint: str, seconds: float) -> tuple[Measured, float, float]:
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
        run.close()
    if not results:
        raise BatchError("batch: there is nothing to measure: the input has no records")
    measured = results[runner.workers :] or results  # the first call of a worker is slower
    rates = Measured(
        runner.workers,
        records=sum(result.records for _, result in measured),
        tokens=sum(result.tokens for _, result in measured),
        size=sum(len(shard.data) for shard, _ in measured),
        seconds=max(sum(result.seconds for _, result in measured), 1e-9),
        shards=len(measured),
    )
    return rates, driver * len(measured) / len(results), ready_at[-1]

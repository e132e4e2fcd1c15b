"""Plans: arithmetic from measured rates, and a measurement of a real job."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest

from batch.conftest import Inline, write_texts
from rlx.batch.job import Job
from rlx.batch.planning import Measured, Plan, make_plan
from rlx.batch.score_task import Score
from rlx.batch.sizing import choose_workers

# One worker: 100 records per second. 8 workers: 640, an efficiency of 0.8. Shards of 1,000 records.
ONE, ALL = Measured(1, 1000, 8000, 50_000, 10.0, 1), Measured(8, 8000, 64_000, 400_000, 100.0, 8)


def plan(records: int = 10_000_000, driver_rate: float = 1e9) -> Plan:
    return Plan(records, records * 8, max(1, records // 1000), False, ONE, ALL, driver_rate, 2.0)


def test_one_worker_takes_as_long_as_was_measured() -> None:
    estimate = plan(1_000_000).estimate(1)
    assert estimate.seconds == pytest.approx(10_000 + 2) and estimate.tokens_per_second == pytest.approx(800)
    assert estimate.machines == 1 and estimate.limit == "workers"


def test_a_full_machine_has_its_measured_rate_and_more_machines_add_up() -> None:
    assert plan().rate(8) == pytest.approx(640) and plan().rate(80) == pytest.approx(6400)
    assert plan().estimate(1000).machines == 125
    assert 100 < plan().rate(2) < 200 and plan().rate(9) == pytest.approx(740)


def test_the_driver_and_the_number_of_shards_are_limits() -> None:
    assert plan(driver_rate=1000.0).estimate(1000).limit == "driver"
    few = plan(20_000).estimate(1000)
    assert few.limit == "shards" and few.seconds == pytest.approx(10 + 2), "20 shards keep 20 workers busy"


def test_a_measured_job_is_counted_exactly_if_all_of_it_ran(decoder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", 60)
    task = Score(str(decoder), {})
    with closing(task.open()) as opened:
        fingerprint = opened.fingerprint
    job = Job.of(task, [tmp_path / "a.txt"], shard_records=4)
    measured = make_plan(job, Inline, 2, fingerprint, seconds=1000.0)
    assert abs(measured.records - 60) <= 4 and abs(measured.shards - 15) <= 1
    assert measured.one.rate > 0 and measured.all.workers == 2 and measured.driver_rate > 0
    times = [measured.estimate(workers).seconds for workers in (1, 2)]
    assert all(seconds > 0 for seconds in times)


class Facts:
    def __init__(self, kind: str) -> None:
        self.kind = kind


class FakeModel:
    def __init__(self, kind: str, threads: int) -> None:
        self.facts, self.threads = Facts(kind), threads


def test_encoders_get_a_process_per_core_and_decoders_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.free_memory.available", lambda: 64 << 30)
    assert choose_workers(FakeModel("encoder", 16)) == (16, 1)
    assert choose_workers(FakeModel("decoder", 16)) == (2, 8)
    assert choose_workers(FakeModel("decoder", 2)) == (1, 2)
    assert choose_workers(FakeModel("encoder", 16), 4) == (4, 4)
    assert choose_workers(FakeModel("encoder", 16), 4, 1) == (4, 1)
    assert choose_workers(FakeModel("encoder", 16), device="cuda") == (1, 1)
    monkeypatch.setattr("rlx.free_memory.available", lambda: 1 << 30)
    assert choose_workers(FakeModel("encoder", 16)) == (3, 1), "what fits into memory"

"""Plans: arithmetic from measured rates, and a measurement of a real job."""

from __future__ import annotations

import gzip
import random
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import rlx
from batch.conftest import Inline, write_texts
from rlx.batch import planning
from rlx.batch.job import Job
from rlx.batch.local import Local
from rlx.batch.planning import Measured, Plan, make_plan
from rlx.batch.score_task import Score
from rlx.batch.sizing import INTERPRETER, choose_workers, devices_of, private_bytes
from rlx.engine.memory import Memory
from rlx.errors import RequestError

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
    assert (measured.records, measured.shards, measured.is_exact) == (60, 15, True)
    assert measured.one.rate > 0 and measured.all.workers == 2 and measured.driver_rate > 0
    times = [measured.estimate(workers).seconds for workers in (1, 2)]
    assert all(seconds > 0 for seconds in times)


def test_inputs_are_counted_whatever_their_form(decoder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.batch.inputs.MAX_RECORD", 50_000)
    lines = "".join(f"line number {i}\n" for i in range(3000))
    (tmp_path / "a.txt").write_text(lines)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(lines.encode()))
    (tmp_path / "c.txt").write_text("x" * 200_000 + "\nlast\n")
    (tmp_path / "d.jsonl").write_text('"x"\n\n' * 100)
    task = Score(str(decoder), {})
    with closing(task.open()) as opened:
        fingerprint = opened.fingerprint
    job = Job.of(task, sorted(tmp_path.glob("*.*")), shard_records=100)
    short = make_plan(job, Inline, 1, fingerprint, seconds=1e-6)
    assert not short.is_exact and short.records == 6000 + 2 + 200 and short.shards == 30 + 30 + 2 + 2
    assert short.tokens == pytest.approx(short.records * 15, rel=0.1)
    with pytest.raises(RequestError, match=r"measured for -5 seconds, expected a number above 0"):
        make_plan(job, Inline, 1, fingerprint, seconds=-5)


def test_a_large_file_is_counted_in_part(tmp_path: Path, decoder: Path) -> None:
    rng = random.Random(0)
    lines = b"".join(b"%x\n" % rng.getrandbits(rng.randint(1, 256)) for _ in range(150_000))
    (tmp_path / "a.txt").write_bytes(lines)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(lines, 1))
    for name in ("a.txt", "b.txt.gz"):
        job = Job.of(Score(str(decoder), {}), [tmp_path / name], shard_records=100)
        counted, shards = planning._count(job, 0.0)
        assert counted == pytest.approx(150_000, rel=0.05) and shards == pytest.approx(1500, rel=0.05)
        assert counted != 150_000, "it was not read to its end"


class FakeModel:
    """A model of the size of MiniLM, or of SmolLM2."""

    def __init__(self, kind: str, threads: int, cache: int = 23_040) -> None:
        self.facts, self.threads, self.context = SimpleNamespace(kind=kind, dim=384), threads, 8192
        self.caches = SimpleNamespace(limit=None, bytes_for=lambda tokens: tokens * cache)

    def memory(self) -> Memory:
        return Memory(weights=0, mapped=100 << 20, cache=0, arena=0)


def test_encoders_get_a_process_per_core_and_decoders_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rlx.free_memory.available", lambda: 64 << 30)
    assert choose_workers(FakeModel("encoder", 16)) == (16, 1)
    assert choose_workers(FakeModel("decoder", 16)) == (2, 8)
    assert choose_workers(FakeModel("decoder", 2)) == (1, 2)
    assert choose_workers(FakeModel("encoder", 16), 4) == (4, 4)
    assert choose_workers(FakeModel("encoder", 16), 4, 1) == (4, 1)
    assert choose_workers(FakeModel("decoder", 16, cache=1 << 20)) == (1, 8), "a process has 32 GiB of cache"
    monkeypatch.setattr("rlx.free_memory.available", lambda: 1 << 30)
    assert choose_workers(FakeModel("encoder", 16)) == (2, 1), "what fits into memory, of which the weights have a part"
    monkeypatch.setattr("rlx.free_memory.available", lambda: 1 << 20)
    assert choose_workers(FakeModel("encoder", 16)) == (1, 1)


def test_a_small_model_needs_little_memory_per_process(encoder: Path, decoder: Path) -> None:
    for path in (encoder, decoder):
        with rlx.load(path) as model:
            assert INTERPRETER < private_bytes(model) < INTERPRETER + (64 << 20)


def test_there_is_a_process_per_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = SimpleNamespace(allocator=SimpleNamespace(is_host=False), device_count=lambda: 2)
    monkeypatch.setattr("rlx.batch.sizing.device_named", lambda name: SimpleNamespace(backend=backend))
    assert choose_workers(FakeModel("encoder", 16), device="cuda") == (2, 1)
    assert choose_workers(FakeModel("encoder", 16), device="cuda:1") == (1, 1)

    class FakeWorker:
        def __init__(self, task: Score, *_: Any) -> None:
            self.device, self.is_alive, self.process = task.load["device"], True, self

        def poll(self) -> int | None:
            return None if self.is_alive else -9

    monkeypatch.setattr("rlx.batch.local.LocalWorker", FakeWorker)
    runner = Local(2, 1, devices_of("cuda"))
    task = Score("model", {"device": "cuda"})
    start: Any = runner.start
    workers = [start(task), start(task)]
    assert [worker.device for worker in workers] == ["cuda:0", "cuda:1"]
    workers[1].is_alive = False
    assert start(task).device == "cuda:1", "the one whose worker died"

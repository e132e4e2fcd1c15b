"""Jobs whose workers and drivers are killed at random moments end with the bytes of a job in peace."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest
from limits import LONGEST_S

from batch.conftest import Inline, contents, write_texts
from batch.driver import VERBS, run_verb
from batch.killing import children, finished_shards, kill, run_with_kills, start, wait_until

ROUNDS = 100
TEXTS = 64  # in shards of 4: one for each of the 16 workers of some rounds
PER_TEST = 10


def expected_of(verb: str, model: Path, folder: Path) -> dict[str, bytes]:
    run_verb(verb, model, folder / "a.txt", folder / "expected", runner=Inline())
    return contents(folder / "expected")


@pytest.mark.kill
@pytest.mark.parametrize("block", range(ROUNDS // PER_TEST))
def test_a_job_survives_every_kill(block: int, decoder: Path, encoder: Path, tmp_path: Path) -> None:
    verb = VERBS[block % len(VERBS)]
    model = encoder if verb == "embed" else decoder
    write_texts(tmp_path / "a.txt", TEXTS)
    expected = expected_of(verb, model, tmp_path)
    kills = 0
    for i in range(PER_TEST):
        rng = random.Random(1000 * block + i)
        many = block < len(VERBS) and i == 0  # once per verb: loading 16 models takes a small machine seconds
        out, workers = tmp_path / f"out{i}", 16 if many else rng.choice([1, 1, 1, 2, 2, 4])
        arguments = [verb, str(model), str(tmp_path / "a.txt"), str(out), str(workers)]
        most = 2 if i % 3 == 0 else 1  # starting processes is what takes the time
        kills += sum(run_with_kills(arguments, out, TEXTS // 4, rng, most=most).values())
        assert contents(out) == expected, f"round {i} with {workers} workers"
    assert kills >= PER_TEST // 2, "most rounds have a kill before the job ends"


@pytest.mark.kill
@pytest.mark.parametrize("workers", [2, 4, 16])
def test_any_number_of_workers_gives_the_same_bytes(workers: int, decoder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", TEXTS)
    expected = expected_of("generate", decoder, tmp_path)
    run_verb("generate", decoder, tmp_path / "a.txt", tmp_path / "out", workers=workers, threads=1)
    assert contents(tmp_path / "out") == expected


def test_a_job_survives_the_death_of_its_driver_and_of_a_worker(decoder: Path, tmp_path: Path) -> None:
    write_texts(tmp_path / "a.txt", 80)
    expected = expected_of("score", decoder, tmp_path)
    out = tmp_path / "out"
    arguments = ["score", str(decoder), str(tmp_path / "a.txt"), str(out), "1"]
    driver = start(arguments)
    wait_until(lambda: finished_shards(out) >= 3, driver)
    orphans = children(driver.pid)
    assert kill(driver.pid)
    driver.communicate()
    end = time.monotonic() + LONGEST_S
    while any(Path(f"/proc/{pid}").exists() for pid in orphans) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(Path(f"/proc/{pid}").exists() for pid in orphans), "workers end with their driver"
    before = finished_shards(out)
    driver = start(arguments)
    wait_until(lambda: bool(children(driver.pid)) and finished_shards(out) > before, driver)
    for pid in children(driver.pid):
        kill(pid)
    _, errors = driver.communicate(timeout=LONGEST_S)
    assert driver.returncode == 0, errors.decode()
    assert contents(out) == expected

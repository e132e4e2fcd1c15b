"""Kills processes of a job at random moments, until it is finished anyway."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from limits import LONGEST_S

DRIVER = Path(__file__).parent / "driver.py"
POLL_S = 0.002


def start(arguments: Sequence[str]) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, str(DRIVER), *arguments], stderr=subprocess.PIPE)


def children(pid: int) -> list[int]:
    """The processes that a process has started."""
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def kill(pid: int) -> bool:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
        return True
    return False


def finished_shards(out: Path) -> int:
    """Lines of the journal; many once it is gone."""
    with contextlib.suppress(OSError):
        return (out / "journal.jsonl").read_bytes().count(b"\n")
    return 1 << 30 if (out / "manifest.json").exists() else 0


def wait_until(moment: Callable[[], bool], driver: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + LONGEST_S
    while not moment() and driver.poll() is None:
        assert time.monotonic() < end, "the job hangs"
        time.sleep(POLL_S)


def random_moment(out: Path, shards: int, rng: random.Random) -> Callable[[], bool]:
    """A moment after some shards; now and then after some time, to meet the beginning and the end too."""
    begin, delay, target = time.monotonic(), rng.uniform(0, 1.5), rng.randint(0, shards)
    if rng.random() < 0.3:
        return lambda: time.monotonic() - begin > delay
    return lambda: finished_shards(out) >= target


def run_with_kills(
    arguments: Sequence[str], out: Path, shards: int, rng: random.Random,
    victims: Callable[[int], Sequence[int]] = children, most: int = 3,
) -> dict[str, int]:  # fmt: skip
    """Run a driver to its end, through up to `most` kills; says how many of what were killed."""
    kills = {"driver": 0, "worker": 0}
    driver = start(arguments)
    for _ in range(rng.randint(1, most)):
        wait_until(random_moment(out, shards, rng), driver)
        time.sleep(rng.uniform(0, 0.02))
        if driver.poll() is not None:
            break
        workers = victims(driver.pid)
        if workers and rng.random() < 0.5:
            kills["worker"] += kill(rng.choice(workers))
        else:
            kills["driver"] += kill(driver.pid)
            driver.communicate()
            driver = start(arguments)
    _, errors = driver.communicate(timeout=LONGEST_S)
    assert driver.returncode == 0, errors.decode()
    return kills

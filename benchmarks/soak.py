"""A server under steady load for long: no errors, and memory that does not grow.

    python benchmarks/soak.py smollm2-135m --minutes 30 --streams 32 --json benchmarks/results/soak.json

Streams of random lengths, a tenth of which end early; some have a schema. The server is a process of its own; its
memory is read every second, and the slope is that of a line (least squares) through the readings after a warm-up, a
third of the time: by then the caches that have a limit are full. Most of the noise is from pages of the model file,
which come and go with each prompt: `anonymous` is the memory without them. Needs Linux and the extra serve-test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np

READ_S = 1.0  # between readings of memory
WARM_UP = 1 / 3  # of the time
CACHE_MIB = 256  # so that the prefix cache is full, and all of its memory written, before memory is judged
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no", "perhaps"]}}}


def started(model: str, log: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A server, and its address. It writes to a file: a pipe that nobody reads would stop it when it is full."""
    command = [sys.executable, "-m", "rlx", "serve", model, "--port", "0", "--cache-ram", str(CACHE_MIB)]
    with log.open("wb") as file:
        process = subprocess.Popen(command, stderr=file)
    while process.poll() is None:
        if match := re.search(r"at (http://\S+)", log.read_text()):
            return process, match[1]
        time.sleep(0.1)
    raise RuntimeError(f"the server did not start: {log.read_text()[-2000:]}")


class Load:
    """Clients that ask one request after the other until the end."""

    def __init__(self, client: Any, model: str, end: float) -> None:
        self._client, self._model, self._end = client, model, end
        self.counts: Counter[str] = Counter()
        self.gaps: list[float] = []  # between events, seconds

    async def client(self, number: int) -> None:
        rng = random.Random(number)
        while time.monotonic() < self._end:
            try:
                await self._stream(rng)
            except Exception as error:
                self.counts[f"error {type(error).__name__}"] += 1
                await asyncio.sleep(1)

    async def _stream(self, rng: random.Random) -> None:
        words = " ".join(
            rng.choice(("sun", "rain", "snow", "wind", "why", "how")) for _ in range(rng.randrange(1, 200))
        )
        body = {
            "model": self._model, "messages": [{"role": "user", "content": words}], "stream": True,
            "max_tokens": rng.choice((8, 32, 64, 128)), "seed": rng.randrange(1 << 32),
            **({"response_format": FORM} if rng.random() < 0.1 else {}),
        }  # fmt: skip
        leave_after = rng.randrange(1, 20) if rng.random() < 0.1 else -1
        last, done = None, False
        async with self._client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                self.counts[f"status {response.status_code}"] += 1
                await asyncio.sleep(1)
                return
            async for line in response.aiter_lines():
                done |= line == "data: [DONE]"
                if not line.startswith("data: {"):
                    continue
                if '"error"' in line and "error" in json.loads(line[6:]):
                    self.counts["error event"] += 1
                    return
                now = time.monotonic()
                self.gaps += [] if last is None else [now - last]
                last = now
                self.counts["events"] += 1
                leave_after -= 1
                if leave_after == 0:
                    self.counts["left early"] += 1
                    return
        self.counts["finished" if done else "error no [DONE]"] += 1

    async def memory(self, pid: int) -> list[Reading]:
        """Readings of a process until the end."""
        begin, readings = time.monotonic(), list[Reading]()
        while time.monotonic() < self._end:
            status = Path(f"/proc/{pid}/status").read_text()
            kilobytes = dict(re.findall(r"^(\w+):\s+(\d+) kB$", status, re.M))
            resident, anonymous = (1024 * int(kilobytes[name]) for name in ("VmRSS", "RssAnon"))
            done = sum(self.counts[name] for name in ("finished", "left early"))
            readings.append(Reading(time.monotonic() - begin, resident, anonymous, done))
            await asyncio.sleep(READ_S)
        return readings


@dataclass(frozen=True)
class Reading:
    """Memory of a process at a time."""

    seconds: float
    resident: int
    anonymous: int
    requests: int  # that have ended


def growth(readings: Sequence[Reading], kind: str) -> dict[str, float]:
    """How fast a kind of memory grows, by the line through readings, and the standard error of that."""
    times = np.array([reading.seconds for reading in readings])
    sizes = np.array([getattr(reading, kind) for reading in readings]) / 1e6
    line = np.polyfit(times, sizes, 1)
    spread = (times - times.mean()) ** 2
    error = np.sqrt(((sizes - np.polyval(line, times)) ** 2).sum() / (len(times) - 2) / spread.sum())
    requests = (readings[-1].requests - readings[0].requests) / (times[-1] - times[0])
    return {
        "mb_per_hour": round(3600 * float(line[0]), 2), "standard_error": round(3600 * float(error), 2),
        "kb_per_1000_requests": round(1e6 * float(line[0]) / max(requests, 1e-9), 1),
        "mb_first": round(float(sizes[0]), 1), "mb_last": round(float(sizes[-1]), 1),
    }  # fmt: skip


async def soak(address: str, pid: int, model: str, streams: int, seconds: float) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)
        load = Load(client, model, time.monotonic() + seconds)
        clients = asyncio.gather(*(load.client(i) for i in range(streams)))
        readings = await load.memory(pid)
        await clients
    steady = [reading for reading in readings if reading.seconds >= WARM_UP * seconds]
    errors = sum(count for name, count in load.counts.items() if name.startswith(("error", "status")))
    gaps = np.array(load.gaps or [0.0])
    minutes = {int(reading.seconds // 60): reading.resident for reading in readings}  # the last reading of each
    return {
        "streams": streams, "minutes": round(seconds / 60, 2), "warm_up_minutes": round(WARM_UP * seconds / 60, 2),
        "errors": errors, "counts": dict(load.counts),
        "resident": growth(steady, "resident"), "anonymous": growth(steady, "anonymous"),
        "gap_ms_p50": round(1000 * float(np.quantile(gaps, 0.5)), 1),
        "gap_ms_p99": round(1000 * float(np.quantile(gaps, 0.99)), 1),
        "mb_by_minute": [round(size / 1e6, 1) for size in minutes.values()],
    }  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="rlx-soak-") as folder:
        log = Path(folder) / "stderr"
        process, address = started(arguments.model, log)
        try:
            name = Path(arguments.model).name
            result = asyncio.run(soak(address, process.pid, name, arguments.streams, 60 * arguments.minutes))
        finally:
            process.terminate()
            process.wait()
            lines = log.read_text().splitlines()
    for line in lines[-20:] if result["errors"] else ():
        print(line, file=sys.stderr)
    result = {"command": f"python benchmarks/soak.py {name} --minutes {arguments.minutes:g}", **result}
    print(json.dumps(result, indent=1))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")
    return int(result["errors"] > 0)


if __name__ == "__main__":
    sys.exit(main())

"""A server under steady load for long: no errors, and memory that does not grow.

    python benchmarks/soak.py smollm2-135m --minutes 30 --streams 32 --json benchmarks/results/soak.json

Streams of random lengths, a tenth of which end early; some have a schema. The server is a process of its own; its
memory is read from /metrics every few seconds, and the slope is that of a line through the readings after a warm-up.
Needs the extra serve-test.
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
from pathlib import Path
from typing import Any

import httpx2 as httpx
import numpy as np

READ_S = 5.0  # between readings of memory
CACHE_MIB = 512  # so that the prefix cache is full before memory is judged
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

    async def memory(self) -> list[tuple[float, float]]:
        """Readings (seconds, bytes) of the server's memory."""
        begin, readings = time.monotonic(), []
        while time.monotonic() < self._end:
            page = (await self._client.get("/metrics")).text
            value = float(re.search(r"^rlx_process_resident_bytes (\S+)$", page, re.M)[1])  # type: ignore[index]
            readings.append((time.monotonic() - begin, value))
            await asyncio.sleep(READ_S)
        return readings


async def soak(address: str, model: str, streams: int, seconds: float) -> dict[str, Any]:
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=address, timeout=None, limits=limits) as client:
        while (await client.get("/ready")).status_code != 200:
            await asyncio.sleep(0.1)
        load = Load(client, model, time.monotonic() + seconds)
        readings, *_ = await asyncio.gather(load.memory(), *(load.client(i) for i in range(streams)))
    times, sizes = np.array([r for r in readings if r[0] >= seconds / 3]).T
    slope = np.polyfit(times, sizes, 1)[0] * 3600 / 1e6
    errors = sum(count for name, count in load.counts.items() if name.startswith(("error", "status")))
    gaps = np.array(load.gaps or [0.0])
    minutes = {int(seconds // 60): size for seconds, size in readings}  # the last reading of each
    return {
        "streams": streams, "minutes": round(seconds / 60, 2), "errors": errors, "counts": dict(load.counts),
        "mb_first": round(float(sizes[0]) / 1e6, 1), "mb_last": round(float(sizes[-1]) / 1e6, 1),
        "mb_per_hour": round(float(slope), 2), "gap_ms_p50": round(1000 * float(np.quantile(gaps, 0.5)), 1),
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
            result = asyncio.run(soak(address, name, arguments.streams, 60 * arguments.minutes))
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

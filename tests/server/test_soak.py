"""The soak test of benchmarks: what it counts as an error."""

from __future__ import annotations

import asyncio
import importlib.util
import random
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx2")
pytestmark = pytest.mark.serve
EVENT = 'data: {"choices": []}'
ENDS = {
    "finished": [EVENT, "data: [DONE]"],
    "error event": [EVENT, 'data: {"error": {"message": "the model failed"}}'],
    "error no [DONE]": [EVENT, ""],
}


class Client:
    """Answers with given lines."""

    def __init__(self, lines: list[str]) -> None:
        self._lines = lines
        self.status_code = 200

    @asynccontextmanager
    async def stream(self, *_: Any, **__: Any) -> AsyncIterator[Client]:
        yield self

    async def aiter_lines(self) -> AsyncIterator[str]:
        for line in self._lines:
            yield line


@pytest.fixture(scope="module")
def soak() -> Any:
    path = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules["soak"] = importlib.util.module_from_spec(spec)  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("end", list(ENDS))
def test_streams_are_counted_by_how_they_end(soak: Any, end: str) -> None:
    load = soak.Load(Client(ENDS[end]), "tiny", 0.0)
    asyncio.run(load._stream(random.Random(5)))
    assert {name: count for name, count in load.counts.items() if name != "events"} == {end: 1}


def test_growth_is_the_slope_of_the_readings(soak: Any) -> None:
    """7.2 MB per hour with noise: the line finds it within a few standard errors, by time and by requests."""
    rng = random.Random(5)
    readings = [soak.Reading(t, int(9e8 + 2000 * t + rng.gauss(0, 1e6)), 0, 4 * t) for t in range(600, 1800)]
    slope = soak.growth(readings, "resident")
    assert abs(slope["mb_per_hour"] - 7.2) < 4 * slope["standard_error"] < 2.0
    assert slope["kb_per_1000_requests"] == pytest.approx(slope["mb_per_hour"] / 3.6 / 4 * 1000, rel=0.01)
    assert soak.growth(readings, "anonymous")["mb_per_hour"] == 0

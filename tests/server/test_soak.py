"""The soak test of benchmarks: what it counts as an error."""

from __future__ import annotations

import asyncio
import importlib.util
import random
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


@pytest.mark.parametrize("end", list(ENDS))
def test_streams_are_counted_by_how_they_end(end: str) -> None:
    path = Path(__file__).parents[2] / "benchmarks" / "soak.py"
    spec = importlib.util.spec_from_file_location("soak", path)
    assert spec is not None and spec.loader is not None
    soak = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(soak)
    load = soak.Load(Client(ENDS[end]), "tiny", 0.0)
    asyncio.run(load._stream(random.Random(5)))
    assert {name: count for name, count in load.counts.items() if name != "events"} == {end: 1}

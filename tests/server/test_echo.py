"""Log-probabilities of echoed prompts: admission, deadlines, fair shares, and comments while they are computed."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import pytest
from limits import LONGEST_S

from rlx.errors import OverloadedError
from rlx.server import completions, engine_thread, exchange
from rlx.server.serve import running

from .raw_http import connect, json_bytes, request_bytes
from .test_operations import LONG, slow_down, statistics, until

pytestmark = pytest.mark.serve
ECHO: dict[str, Any] = {"model": "tiny", "prompt": "the cat", "max_tokens": 1, "echo": True, "logprobs": 1}


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Scoring takes at least a fifth of a second, in short steps; returns the steps so far."""
    steps, score_steps = list[int](), completions.score_steps

    def slow(*positional: Any, **named: Any) -> Iterator[int]:
        for _ in range(20):
            time.sleep(0.01)
            steps.append(1)
            yield 0
        yield from score_steps(*positional, **named)

    monkeypatch.setattr(completions, "score_steps", slow)
    return steps


def test_scoring_ends_with_the_deadline(http: Any, scored: list[int]) -> None:
    late = http.post("/v1/completions", json=ECHO | {"timeout": 0.05})
    assert late.status_code == 408 and late.json()["error"]["code"] == "timeout" and len(scored) < 20
    late = http.post("/v1/completions", json=ECHO | {"timeout": 0.05, "stream": True})
    assert late.status_code == 200 and '"code":"timeout"' in late.text and "[DONE]" not in late.text
    assert http.post("/v1/completions", json=ECHO).status_code == 200


def test_a_stream_sends_comments_while_its_prompt_is_scored(
    http: Any, scored: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "PING_S", 0.02)
    text = http.post("/v1/completions", json=ECHO | {"stream": True}).text
    assert text.startswith(": ping") and text.endswith("data: [DONE]\n\n")
    first = json.loads(text[text.index("data: ") + 6 :].splitlines()[0])
    assert first["choices"][0]["text"].startswith("the cat") and len(first["choices"][0]["logprobs"]["tokens"]) > 6


@pytest.mark.parametrize("stream", [True, False])
def test_nothing_is_scored_without_room(loaders: Any, scored: list[int], stream: bool) -> None:
    with running({"tiny": loaders["tiny"]}, rows=1, max_queued=2) as server:
        slow_down(server)
        with connect(server.address) as one, httpx.Client(base_url=server.address, timeout=LONGEST_S) as client:
            one.sendall(request_bytes(body=json_bytes(LONG)))
            assert until(lambda: statistics(server).requests_running == 1)
            refused = client.post("/v1/completions", json=ECHO | {"prompt": ["a", "b", "c"], "stream": stream})
            assert refused.status_code == 429 and int(refused.headers["retry-after"]) >= 1
            refused = client.post("/v1/completions", json=ECHO | {"prompt": ["a"] * 4, "stream": stream})
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "too_many_sequences"
            assert not scored


def test_clients_take_turns_with_long_work() -> None:
    order: list[str] = []
    loop = asyncio.new_event_loop()
    engine = engine_thread.EngineThread({}, max_queued=4, max_queued_tokens=10_000)
    model: Any = SimpleNamespace(close=lambda: None)
    scheduler: Any = SimpleNamespace(step=lambda: time.sleep(0.001) or False, close=lambda: None)
    engine.served["tiny"] = engine_thread.Served("tiny", model, scheduler=scheduler)

    def parts(client: str) -> Iterator[int]:
        for _ in range(8):
            order.append(client)
            yield 256

    async def main() -> None:
        jobs = [asyncio.create_task(engine.run(parts(client), client, 2048)) for client in "aaab"]
        await asyncio.sleep(0)
        with pytest.raises(OverloadedError, match="4 prompts with 8192 tokens wait"):
            await engine.run(parts("c"), "c", 1)
        engine.start(loop)
        await asyncio.gather(*jobs)
        with pytest.raises(OverloadedError, match="1 prompts with 9999 tokens wait"):
            await asyncio.gather(engine.run(parts("a"), "a", 9999), engine.run(parts("b"), "b", 9999))

    try:
        loop.run_until_complete(main())
        assert order[:16].count("b") >= 6, order  # not a quarter of the turns
    finally:
        engine.stop()
        loop.close()

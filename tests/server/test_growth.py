"""A server keeps nothing of requests that have ended."""

from __future__ import annotations

import gc
import json
import logging
import random
from collections import Counter
from typing import Any

import httpx2 as httpx
import pytest
from limits import LONGEST_S

from rlx.server.connections import Connection
from rlx.server.serve import running

from .test_operations import until

pytestmark = pytest.mark.serve
ROUND = 60  # requests of each kind
CACHE = 1 << 20  # bytes: full after the first round
SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": ["yes", "no"]}}}


def ask(client: httpx.Client, rng: random.Random) -> None:
    """A request of each kind: whole, streamed, refused, with a schema, and a stream that is left early."""
    words = " ".join(rng.choices(("sun", "rain", "snow"), k=rng.randrange(1, 30)))
    body: dict[str, Any] = {"messages": [{"role": "user", "content": words}], "max_tokens": rng.randrange(1, 6)}
    assert client.post("/v1/chat/completions", json=body).status_code == 200
    assert client.post("/v1/chat/completions", json=body | {"response_format": SCHEMA}).status_code == 200
    assert client.post("/v1/chat/completions", json=body | {"max_tokens": -1}).status_code == 400
    assert client.post("/v1/chat/completions", json=body | {"stream": True}).status_code == 200
    with client.stream("POST", "/v1/completions", json={"prompt": words, "max_tokens": 50, "stream": True}) as response:
        next(response.iter_lines())


def tracked() -> Counter[str]:
    gc.collect()
    return Counter(f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())


def test_requests_that_have_ended_leave_no_objects(loaders: Any, request: pytest.FixtureRequest) -> None:
    """An object per request would be `ROUND` of a type in every round; caches, timers and idle threads stop growing."""
    logging.disable()  # pytest keeps all records
    request.addfinalizer(lambda: logging.disable(logging.NOTSET))
    rng = random.Random(5)
    counts: list[Counter[str]] = []
    with (
        running({"tiny": loaders["tiny"]}, cache_bytes=CACHE) as server,
        httpx.Client(base_url=server.address, timeout=LONGEST_S) as client,
    ):
        for _ in range(4):
            for _ in range(ROUND):
                ask(client, rng)
            counts.append(tracked())
    _, first, second, third = counts
    more = {name: (second[name] - first[name], third[name] - second[name]) for name in third}
    leaks = {name: grown for name, grown in more.items() if min(grown) >= ROUND}
    assert not leaks, json.dumps(leaks)


def test_connections_that_are_closed_are_freed_without_a_collection(server: Any) -> None:
    """Collections are rare in a process with few new objects, and each connection has kilobytes."""
    body = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "stream": True}
    gc.collect()
    others = set(server.server_state.connections)  # clients of other tests, which may stay
    objects = sum(type(each) is Connection for each in gc.get_objects())
    gc.disable()
    try:
        for _ in range(20):
            assert httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=LONGEST_S).status_code == 200
        assert until(lambda: server.server_state.connections <= others)
        assert until(lambda: sum(type(each) is Connection for each in gc.get_objects()) <= objects + 2)
    finally:
        gc.enable()

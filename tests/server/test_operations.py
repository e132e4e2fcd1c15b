"""Operating a server: health, metrics, ids, logs, cancelling, overload, stopping, units and containers."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
from limits import LONGEST_S

import rlx
from rlx.cli.main import main
from rlx.errors import OverloadedError
from rlx.server import completions, connections, engine_thread, exchange
from rlx.server.chat_completions import ChatRequest
from rlx.server.exchange import Exchange
from rlx.server.generation import Generation, Row
from rlx.server.guard import Guard
from rlx.server.metrics import Metrics
from rlx.server.serve import Server, running
from rlx.server.settings import ServerSettings

from .conftest import write_model
from .raw_http import connect, json_bytes, request_bytes

pytestmark = pytest.mark.serve
ROOT = Path(__file__).parents[2]
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
LONG = BODY | {"max_tokens": 900, "logit_bias": {"0": -100, "2": -100}}  # bans the ends of texts


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.01)
    return condition()


def statistics(server: Server) -> Any:
    scheduler = server.state.engine.served["tiny"].scheduler
    assert scheduler is not None
    return scheduler.statistics()


def slow_down(server: Server) -> None:
    """Steps of a small model take no time; let them take some."""
    scheduler = server.state.engine.served["tiny"].scheduler
    assert scheduler is not None
    step = scheduler.step

    def slow_step() -> bool:
        time.sleep(0.005)
        return step()

    scheduler.step = slow_step  # type: ignore[method-assign]


def test_health_and_readiness(http: Any) -> None:
    assert http.get("/health").json() == {"status": "ok"}
    assert http.get("/ready").json() == {"status": "ready"}


def test_a_stuck_step_is_not_ready(server: Server, http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "STUCK_S", 0.05)
    assert http.get("/ready").status_code == 200
    blocked = threading.Event()

    async def block() -> None:
        await server.state.engine.run(iter(lambda: blocked.wait(LONGEST_S), True))

    loop = server.state.engine._loop
    assert loop is not None
    waiting = asyncio.run_coroutine_threadsafe(block(), loop)
    try:
        assert until(lambda: http.get("/ready").status_code == 503)
        assert http.get("/health").status_code == 200
    finally:
        blocked.set()
    waiting.result(10)
    assert until(lambda: http.get("/ready").status_code == 200)


def test_steps_that_keep_failing_are_not_ready(loaders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "IDLE_S", 0.01)
    with running({"tiny": loaders["tiny"]}) as server:
        scheduler = server.state.engine.served["tiny"].scheduler
        assert scheduler is not None and _ready(server.address)
        step = scheduler.step

        def broken() -> bool:
            raise ValueError("broken")

        scheduler.step = broken  # type: ignore[method-assign]
        assert until(lambda: not _ready(server.address))
        scheduler.step = step  # type: ignore[method-assign]
        assert until(lambda: _ready(server.address))


def test_metrics_are_prometheus(http: Any) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    http.post("/v1/chat/completions", json=BODY)
    http.post("/v1/embeddings", json={"model": "encoder", "input": "the cat"})
    answer = http.get("/metrics")
    families = {f.name: f for f in parser.text_string_to_metric_families(answer.text)}
    for name in ("rlx_requests", "rlx_prompt_tokens", "rlx_grammar_mask_seconds", "rlx_grammar_compile_seconds",
                 "rlx_prompt_tokens_cached", "rlx_generation_tokens",
                 "rlx_step_rows",
                 "rlx_time_to_first_token_seconds", "rlx_inter_token_latency_seconds", "rlx_request_queue_seconds",
                 "rlx_requests_running", "rlx_requests_waiting", "rlx_kv_used_ratio", "rlx_preemptions", "rlx_rejected",
                 "rlx_embedding_texts", "rlx_process_resident_bytes"):  # fmt: skip
        assert name in families, name
    labels = {label for f in families.values() for sample in f.samples for label in sample.labels}
    assert labels <= {"model", "endpoint", "status", "finish", "reason", "phase", "le"}
    texts = [sample for sample in families["rlx_embedding_texts"].samples if sample.name.endswith("_total")]
    assert texts[0].value >= 1
    assert families["rlx_process_resident_bytes"].samples[0].value > 1e6


def test_grammars_are_timed(server: Server, http: Any) -> None:
    """A compilation per new grammar, a mask per token, and neither without a grammar."""
    times = server.state.engine.served["tiny"].language.grammar_times
    before = times.compile.count, times.mask.count
    assert http.post("/v1/chat/completions", json=BODY).status_code == 200
    assert (times.compile.count, times.mask.count) == before
    body = BODY | {"regex": "[ab]{6}c", "max_tokens": 20}
    tokens = [http.post("/v1/chat/completions", json=body).json()["usage"]["completion_tokens"] for _ in range(2)]
    compiled, masked = times.compile.count - before[0], times.mask.count - before[1]
    assert compiled == 1 and masked >= sum(tokens)
    assert http.post("/v1/chat/completions", json=BODY | {"regex": "(?=x)"}).status_code == 400
    assert times.compile.count - before[0] == 2
    page = http.get("/metrics").text
    assert f'rlx_grammar_compile_seconds_count{{model="tiny"}} {times.compile.count}' in page
    assert f'rlx_grammar_mask_seconds_bucket{{model="tiny",le="+Inf"}} {times.mask.count}' in page


def test_every_answer_has_an_id(http: Any) -> None:
    assert http.get("/health", headers={"x-request-id": "my-id_7"}).headers["x-request-id"] == "my-id_7"
    for wrong in ("x" * 200, "a b", "<script>"):
        assert re.fullmatch(
            "[0-9a-f]{32}", http.get("/nothing", headers={"x-request-id": wrong}).headers["x-request-id"]
        )


def test_the_log_has_lines_and_no_texts(loaders: Any, capfd: pytest.CaptureFixture[str]) -> None:
    import httpx2 as httpx

    settings = ServerSettings(port=0, log_requests=True)
    with running({"tiny": loaders["tiny"]}, settings) as server, httpx.Client(base_url=server.address) as client:
        secret = "my bank is open"
        body = BODY | {"messages": [{"role": "user", "content": secret}]}
        client.post("/v1/chat/completions", json=body, headers={"x-request-id": "one", "authorization": "Bearer tok"})
        client.post("/v1/chat/completions", json=body | {"n": -1}, headers={"x-request-id": "two"})
    lines = [json.loads(line) for line in capfd.readouterr().err.splitlines() if line.startswith("{")]
    assert [line["id"] for line in lines] == ["one", "two"] and [line["status"] for line in lines] == [200, 400]
    assert lines[0]["completion_tokens"] >= 1 and lines[0]["seconds"] > 0
    assert "bank" not in str(lines) and "tok" not in {str(v) for line in lines for v in line.values()}


# -- clients that leave -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_row(server: Server, http: Any, stream: bool) -> None:
    before = sum(statistics(server).cancelled_total.values())
    with connect(server.address) as one:
        one.sendall(request_bytes(body=json_bytes(LONG | {"stream": stream})))
        assert until(lambda: statistics(server).requests_running >= 1)
        if stream:
            assert one.recv(100)
    assert until(lambda: statistics(server).requests_running == 0, 2.0)
    assert sum(statistics(server).cancelled_total.values()) == before + 1


def test_queued_requests_of_clients_that_left_do_not_run(loaders: Any, model: rlx.LanguageModel) -> None:
    import httpx2 as httpx

    with running({"tiny": loaders["tiny"]}, rows=1) as server:
        slow_down(server)
        clients = [connect(server.address) for _ in range(5)]
        for i, one in enumerate(clients):
            one.sendall(request_bytes(body=json_bytes(LONG | {"max_tokens": 300, "seed": i})))
        assert until(lambda: statistics(server).requests_waiting >= 3)
        for one in clients[1:]:
            one.close()
        assert until(lambda: statistics(server).requests_waiting == 0)
        with httpx.Client(base_url=server.address, timeout=LONGEST_S) as client:
            answer = client.post("/v1/chat/completions", json=BODY | {"seed": 4, "max_tokens": 20}).json()
        expected = model.chat("hi", max_tokens=20, temperature=1.0, seed=4)
        assert answer["choices"][0]["message"]["content"] == expected.text
        clients[0].close()


def test_the_queue_is_bounded(loaders: Any) -> None:
    import httpx2 as httpx

    with running({"tiny": loaders["tiny"]}, rows=1, max_queued=2) as server:
        slow_down(server)
        clients = [connect(server.address) for _ in range(3)]
        clients[0].sendall(request_bytes(body=json_bytes(LONG)))
        assert until(lambda: statistics(server).requests_running == 1)
        for one in clients[1:]:
            one.sendall(request_bytes(body=json_bytes(LONG)))
        assert until(lambda: statistics(server).requests_waiting == 2)
        with httpx.Client(base_url=server.address) as client:
            answer = client.post("/v1/chat/completions", json=BODY)
            assert answer.status_code == 429 and int(answer.headers["retry-after"]) >= 1
            assert answer.json()["error"]["type"] == "rate_limit_error"
            assert client.get("/health").status_code == 200
        for one in clients:
            one.close()


def test_requests_that_will_be_refused_are_not_read_first(loaders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many that arrive together, as many are read as can be queued; while the queue is full, no body is parsed."""
    import httpx2 as httpx

    read, parse, reads, parsed = ChatRequest.read, exchange.read_json, list[int](), list[int]()

    def slow_read(*arguments: Any) -> ChatRequest:
        reads.append(1)
        time.sleep(0.05)
        return read(*arguments)

    def counted_parse(data: bytes) -> Any:
        parsed.append(len(data))
        return parse(data)

    statuses: list[int] = []

    def ask() -> None:
        with httpx.Client(base_url=server.address, timeout=LONGEST_S) as client:
            statuses.append(client.post("/v1/chat/completions", json=BODY | {"max_tokens": 20}).status_code)

    monkeypatch.setattr(ChatRequest, "read", slow_read)
    monkeypatch.setattr(exchange, "read_json", counted_parse)
    with running({"tiny": loaders["tiny"]}, rows=1, max_queued=2) as server:
        slow_down(server)
        threads = [threading.Thread(target=ask) for _ in range(24)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        served = server.state.engine.served["tiny"]
        assert set(statuses) == {200, 429} and served.reserved == 0
        assert len(reads) <= statuses.count(200) + 2  # a row that is taken while its neighbours are counted
        assert _status(server, BODY | {"n": "x"}) == 400 and served.reserved == 0
        clients = [connect(server.address) for _ in range(3)]
        for i, one in enumerate(clients):
            one.sendall(request_bytes(body=json_bytes(LONG)))
            assert until(lambda n=i: _counts(server) == (1, n))  # type: ignore[misc]
        parsed.clear()
        assert _status(server, BODY | {"messages": [{"role": "user", "content": "x" * 300_000}]}) == 429
        assert not parsed
        for one in clients:
            one.close()


def _counts(server: Server) -> tuple[int, int]:
    numbers = statistics(server)
    return numbers.requests_running, numbers.requests_waiting


def _status(server: Server, body: dict[str, Any]) -> int:
    import httpx2 as httpx

    return int(httpx.post(f"{server.address}/v1/chat/completions", json=body, timeout=LONGEST_S).status_code)


def test_the_sequences_of_a_request_are_queued_together(loaders: Any) -> None:
    """More choices than may wait are no overload if there are rows for them."""
    import httpx2 as httpx

    with running({"tiny": loaders["tiny"]}, rows=4, max_queued=2) as server:
        slow_down(server)
        with httpx.Client(base_url=server.address, timeout=LONGEST_S) as client:
            answer = client.post("/v1/chat/completions", json=BODY | {"n": 6})
            assert answer.status_code == 200 and len(answer.json()["choices"]) == 6
            refused = client.post("/v1/chat/completions", json=BODY | {"n": 7})
            assert refused.status_code == 400 and refused.json()["error"]["code"] == "too_many_sequences"
            prompts = {"model": "tiny", "prompt": ["a"] * 7, "max_tokens": 1}
            assert client.post("/v1/completions", json=prompts).status_code == 400
            with connect(server.address) as one:
                one.sendall(request_bytes(body=json_bytes(LONG | {"n": 4})))
                assert until(lambda: statistics(server).requests_running == 4)
                submitted = statistics(server).requests_waiting
                full = client.post("/v1/chat/completions", json=BODY | {"n": 3})
                assert full.status_code == 429 and int(full.headers["retry-after"]) >= 1
                assert statistics(server).requests_waiting == submitted  # none of the three


def test_keys_and_values_have_a_limit_by_default(
    loaders: Any, model: rlx.LanguageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where memory is short it is one context: requests that need more together take turns, with the same answers."""
    import httpx2 as httpx

    pool = model.caches
    monkeypatch.setattr(engine_thread, "available", lambda: 64 << 30)
    assert engine_thread.default_cache_bytes(pool) == 8 << 30
    assert engine_thread.default_cache_bytes(pool, 2) == 4 << 30
    monkeypatch.setattr(engine_thread, "available", lambda: 4 << 30)
    assert engine_thread.default_cache_bytes(pool) == 1 << 30
    monkeypatch.setattr(engine_thread, "available", lambda: 0)
    least = engine_thread.default_cache_bytes(pool)
    assert pool.bytes_for(model.context) < least < 2 * pool.bytes_for(model.context)
    with running({"tiny": loaders["tiny"]}, rows=4) as server:
        scheduler = server.state.engine.served["tiny"].scheduler
        assert scheduler is not None and scheduler.pool.limit == least and scheduler.context == model.context
        body = LONG | {"max_tokens": 600, "temperature": 0}
        texts: list[str] = []

        def ask() -> None:
            with httpx.Client(base_url=server.address, timeout=LONGEST_S) as client:
                answer = client.post("/v1/chat/completions", json=body).json()
                texts.append(answer["choices"][0]["message"]["content"])

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        numbers = statistics(server)
        assert 0 < numbers.kv_used_ratio <= 1 and numbers.preemptions_total > 0
        bias = {int(token): -math.inf for token in LONG["logit_bias"]}
        assert texts == [model.chat("hi", max_tokens=600, logit_bias=bias).text] * 4


def test_models_take_turns(loaders: Any, folders: dict[str, Path]) -> None:
    """While two models have requests, each step of one is followed by one of the other, and answers are their own."""
    import httpx2 as httpx

    names, order = ("tiny", "thinker"), list[str]()

    def record(server: Server, name: str) -> None:
        schedulers: list[Any] = [server.state.engine.served[n].scheduler for n in names]
        scheduler = schedulers[names.index(name)]
        step = scheduler.step

        def recorded() -> bool:
            if not order and not all(one.busy for one in schedulers):  # the first waits for the second
                time.sleep(0.001)
                return True
            if scheduler.busy:
                order.append(name)
            return bool(step())

        scheduler.step = recorded

    texts: dict[str, str] = {}
    body = LONG | {"max_tokens": 120, "seed": 3, "temperature": 1.0}
    with running({name: loaders[name] for name in names}) as server:
        for name in names:
            record(server, name)

        def ask(name: str) -> None:
            with httpx.Client(base_url=server.address, timeout=LONGEST_S) as client:
                message = client.post("/v1/chat/completions", json=body | {"model": name}).json()["choices"][0][
                    "message"
                ]
                texts[name] = message["content"] or message["reasoning_content"]

        threads = [threading.Thread(target=ask, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    shared = order[: 2 * min(order.count(name) for name in names)]
    assert len(shared) > 200 and all(one != other for one, other in itertools.pairwise(shared)), order
    bias = {int(token): -math.inf for token in LONG["logit_bias"]}
    for name in names:
        with rlx.load(folders[name]) as model:
            assert isinstance(model, rlx.LanguageModel)
            assert (
                texts[name].strip() in model.chat("hi", max_tokens=120, temperature=1.0, seed=3, logit_bias=bias).text
            )


def test_embeddings_have_a_queue_of_their_own(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_thread, "MAX_EMBEDDINGS", 0)
    embeddings = server.state.engine.served["encoder"].embeddings
    assert embeddings is not None
    with pytest.raises(OverloadedError):
        embeddings.submit(engine_thread.EmbeddingJob([[1]], lambda _: None))


def test_embeddings_wait_by_tokens_and_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def embed_tokens(rows: list[list[int]]) -> Any:
        calls.append(len(rows))
        return np.array([[row[0]] for row in rows], np.float32)

    monkeypatch.setattr(engine_thread, "MAX_EMBEDDING_TOKENS", 40_000)
    monkeypatch.setattr(engine_thread, "EMBED_TOKENS", 32 * 512)
    queue = engine_thread.EmbeddingQueue(SimpleNamespace(embed_tokens=embed_tokens))  # type: ignore[arg-type]
    done: list[str] = []

    def job(client: str, rows: int) -> engine_thread.EmbeddingJob:
        return engine_thread.EmbeddingJob([[i] * 512 for i in range(rows)], lambda _: done.append(client), client)

    jobs = [job("large", 64), job("small", 4)]
    for one in jobs:
        queue.submit(one)
    with pytest.raises(OverloadedError, match="34816 tokens wait"):
        queue.submit(job("small", 16))
    results: dict[int, Any] = {}
    while queue.step(lambda deliver, item: (deliver(item), results.__setitem__(len(done), item))):
        pass
    assert done == ["small", "large"] and calls[0] == 32  # the small one does not wait for the large one
    assert results[2][:, 0].tolist() == list(range(64))
    queue.submit(job("large", 100))  # nobody else waits


def test_embeddings_have_a_deadline(server: Server, http: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = server.state.engine.served["encoder"].model
    embed_tokens = model.embed_tokens

    def slow(rows: Any) -> Any:
        time.sleep(0.2)
        return embed_tokens(rows)

    monkeypatch.setattr(model, "embed_tokens", slow)
    late = http.post("/v1/embeddings", json={"model": "encoder", "input": "the cat", "timeout": 0.05})
    assert late.status_code == 408 and late.json()["error"]["code"] == "timeout"
    assert http.post("/v1/embeddings", json={"model": "encoder", "input": "the cat"}).status_code == 200


def test_a_reader_that_never_reads_is_cut_off(loaders: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_S", 0.3)
    with running({"tiny": loaders["tiny"]}) as server:
        address = urlsplit(server.address)
        with socket.socket() as one:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            one.connect((address.hostname, address.port))
            body = LONG | {"n": 8, "logprobs": True, "top_logprobs": 20, "stream": True}
            one.sendall(request_bytes(body=json_bytes(body)))
            assert until(lambda: server.state.active == 1)
            assert until(lambda: server.state.active == 0, LONGEST_S)
        # what was not yet computed is cancelled; a fast machine may be through with it
        assert until(lambda: statistics(server).requests_running == 0)
        assert until(lambda: not server.server_state.connections)


def test_a_request_has_a_deadline(loaders: Any) -> None:
    import httpx2 as httpx

    with running({"tiny": loaders["tiny"]}) as server:
        slow_down(server)
        url = f"{server.address}/v1/chat/completions"
        answer = httpx.post(url, json=LONG | {"timeout": 0.05}, timeout=LONGEST_S).json()
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] < 900


def test_many_embedding_clients_share_calls(server: Server) -> None:
    import httpx2 as httpx

    encoder = server.state.engine.served["encoder"].model
    texts = [f"the cat {i}" for i in range(24)]
    answers: dict[int, list[float]] = {}

    def ask(i: int) -> None:
        with httpx.Client(base_url=server.address, timeout=LONGEST_S) as client:
            answer = client.post("/v1/embeddings", json={"model": "encoder", "input": texts[i]}).json()
            answers[i] = answer["data"][0]["embedding"]

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(len(texts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(answers[i] == encoder.embed(text).tolist() for i, text in enumerate(texts))


# -- start and stop ---------------------------------------------------------------------------------------------------
def test_models_that_cannot_be_loaded_end_the_server(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"nothing|not|no "), running({"x": lambda: rlx.load(tmp_path / "nothing")}):
        pass


def test_stopping_lets_running_requests_end(copied: Path, tmp_path: Path) -> None:
    """SIGTERM: no more requests, the running stream goes on to its end, the exit code is 0."""
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    command = [sys.executable, "-m", "rlx", "serve", str(copied), "--port", "0", "--grace", "20", "--log-requests"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stderr is not None
        line = process.stderr.readline()
        address = re.search(r"at (http://\S+)", line)
        assert address, line
        threading.Thread(target=process.stderr.read, daemon=True).start()
        with connect(address[1]) as one:
            assert until(lambda: _ready(address[1]), 60)
            body = LONG | {"model": "model", "stream": True, "max_tokens": 700}
            one.sendall(request_bytes(body=json_bytes(body)))
            data = one.recv(1000)
            process.send_signal(signal.SIGTERM)
            while piece := one.recv(1 << 16):
                data += piece
        assert process.wait(LONGEST_S) == 0
    assert b'"finish_reason":"length"' in data and b"[DONE]" in data


@pytest.mark.parametrize("grace", [10.0, 0.1])
def test_a_running_stream_has_some_time_when_the_server_stops(loaders: Any, grace: float) -> None:
    import httpx2 as httpx

    with running({"tiny": loaders["tiny"]}, ServerSettings(port=0, grace=grace)) as server:
        slow_down(server)
        with connect(server.address) as one:
            one.sendall(request_bytes(body=json_bytes(LONG | {"stream": True, "max_tokens": 200})))
            data = one.recv(1000)
            assert until(lambda: statistics(server).generation_tokens_total > 3)
            server.should_exit = True
            assert until(lambda: server.state.stopping)
            if grace > 1:
                refused = httpx.post(f"{server.address}/v1/chat/completions", json=BODY)
                assert refused.status_code == 503 and refused.json()["error"]["code"] == "stopping"
            while piece := one.recv(1 << 16):
                data += piece
    if grace > 1:
        assert b'"finish_reason":"length"' in data and data.count(b"data: ") > 100
    else:
        assert b'"code":"stopping"' in data and b"[DONE]" not in data


def test_embeddings_and_scores_are_answered_when_the_server_stops(
    loaders: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = ServerSettings(port=0, grace=0.1, log_requests=True)
    started: list[str] = []

    def endless(*_: Any, **__: Any) -> Iterator[int]:
        started.append("score")
        while True:
            time.sleep(0.005)
            yield 1

    def slow(rows: list[list[int]]) -> Any:
        started.append("embed")
        time.sleep(0.05)
        return np.zeros((len(rows), 4), np.float32)

    monkeypatch.setattr(completions, "score_steps", endless)
    monkeypatch.setattr(engine_thread, "EMBED_TOKENS", 1)  # a row per step
    with running(loaders, settings) as server:
        monkeypatch.setattr(server.state.engine.served["encoder"].model, "embed_tokens", slow)
        echo = {"model": "tiny", "prompt": "the cat", "max_tokens": 1, "echo": True, "logprobs": 1}
        bodies = {
            "/v1/embeddings": {"model": "encoder", "input": ["the cat"] * 200}, "/v1/completions": echo,
            "/completions": echo | {"stream": True},
        }  # fmt: skip
        clients = [connect(server.address) for _ in bodies]
        for one, (path, body) in zip(clients, bodies.items(), strict=True):
            one.sendall(request_bytes(path=path, body=json_bytes(body)))
        assert until(lambda: started.count("score") == 2 and "embed" in started)
        server.should_exit = True
        answers = []
        for one in clients:
            data = b""
            while piece := one.recv(1 << 16):
                data += piece
            answers.append(data)
            one.close()
    for answer in answers[:2]:
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 503") and json.loads(body)["error"]["code"] == "stopping"
    assert b'"code":"stopping"' in answers[2] and b"[DONE]" not in answers[2]
    log = capfd.readouterr().err
    assert "Traceback" not in log
    statuses = [json.loads(line)["status"] for line in log.splitlines() if line.startswith("{")]
    assert sorted(statuses) == [200, 503, 503]


def test_a_request_that_is_cancelled_is_answered_in_json() -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def endless(*_: Any) -> None:
        await asyncio.sleep(LONGEST_S)

    async def main() -> None:
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"127.0.0.1")], "client": None}
        metrics = Metrics()
        task = asyncio.create_task(Guard(endless, ServerSettings(), metrics)(scope, endless, send))
        await asyncio.sleep(0.01)
        task.cancel()
        await task
        assert 'status="503"' in "".join(metrics.requests.lines())

    asyncio.run(main())
    assert sent[0]["status"] == 503 and json.loads(sent[1]["body"])["error"]["code"] == "stopping"


def _ready(address: str) -> bool:
    import httpx2 as httpx

    return bool(httpx.get(f"{address}/ready").status_code == 200)


def test_commands_that_cannot_work_say_why(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("a-long-enough-key\n")
    keys.chmod(0o644)
    for words, reason in (
        (["--host", "0.0.0.0"], "there is no key"), (["--key-file", str(keys)], "others may read it"),
        (["--port", "-1"], "--port is -1"), (["--rows", "0"], "--rows is 0"),
        (["--alias", "x=nothing"], "expected a new name"),
    ):  # fmt: skip
        assert main(["serve", str(tmp_path), *words]) != 0
        assert reason in capsys.readouterr().err


# -- files for operators ----------------------------------------------------------------------------------------------
@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd")
def test_the_unit_is_valid(tmp_path: Path) -> None:
    unit = tmp_path / "rlx.service"
    text = (ROOT / "deploy" / "rlx.service").read_text()
    unit.write_text(text.replace("/usr/bin/env /opt/rlx/bin/rlx", "/usr/bin/env rlx"))
    result = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True)
    assert result.returncode == 0 and "rlx.service" not in result.stderr, result.stderr


def test_the_unit_and_the_container_use_options_that_exist() -> None:
    from rlx.cli.main import parser

    known = parser("serve").format_help() + "".join(a.format_help() for a in _subparsers(parser("serve")))
    for name in ("rlx.service", "Containerfile"):
        text = (ROOT / "deploy" / name).read_text()
        command = next(line for line in text.splitlines() if line.startswith(("ExecStart", "ENTRYPOINT")))
        options = re.findall(r"--[a-z-]+", command)
        assert options and all(option in known for option in options)


def _subparsers(top: Any) -> list[Any]:
    return [inner for action in top._actions if hasattr(action, "choices") and isinstance(action.choices, dict)
            for inner in action.choices.values()]  # fmt: skip


@pytest.mark.large
def test_the_lines_of_the_container_run(tmp_path: Path) -> None:
    """The RUN lines that need no root, in a fresh virtual environment."""
    lines = re.findall(r"^RUN (.+)$", (ROOT / "deploy" / "Containerfile").read_text(), re.M)
    mine = [line.replace("/opt/rlx", str(tmp_path / "venv")) for line in lines if "useradd" not in line]
    assert len(mine) == 3
    for line in mine:
        line = line.replace("python -m venv", f"{sys.executable} -m venv")
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        subprocess.run(line, shell=True, check=True, cwd=ROOT, env=environment)
    script = "import rlx.server.serve, rlx.engine.structured; print('ok')"
    command = [str(tmp_path / "venv" / "bin" / "python"), "-c", script]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "ok\n"


def test_pieces_that_arrive_after_the_engine_has_finished_are_not_lost() -> None:
    """A busy event loop sees the first pieces when the engine is done already."""
    ticket: Any = SimpleNamespace(done=True, error=None, sequence=SimpleNamespace(finish_reason="stop"))
    generation = Generation(None, None)  # type: ignore[arg-type]
    generation.rows = [Row(0, ticket)]
    receive = generation._receiver(generation.rows[0])

    async def texts() -> list[str]:
        result: list[str] = []

        def write(batch: Any) -> None:
            result.extend(piece for _, piece in batch)
            if len(result) == 1:
                asyncio.get_running_loop().call_soon(receive, engine_thread.Piece("b"))
                asyncio.get_running_loop().call_soon(receive, engine_thread.Piece(""))

        receive(engine_thread.Piece("a"))
        await generation.follow(write)
        return result

    assert asyncio.run(texts()) == ["a", "b", ""]


def test_a_client_that_reads_slowly_gets_the_text_that_came_meanwhile_at_once() -> None:
    ticket: Any = SimpleNamespace(done=True, error=None, sequence=SimpleNamespace(finish_reason="stop"))
    generation = Generation(None, None)  # type: ignore[arg-type]
    generation.rows = [Row(0, ticket)]
    receive = generation._receiver(generation.rows[0])
    connection: Any = SimpleNamespace(is_paused=False)

    async def texts() -> list[str]:
        result: list[str] = []
        follow = generation.follow(lambda batch: result.extend(piece for _, piece in batch), connection)
        task = asyncio.create_task(follow)
        await asyncio.sleep(0)
        receive(engine_thread.Piece("a"))
        connection.is_paused = True
        for text in ("b", "c", ""):
            receive(engine_thread.Piece(text))
        assert result == ["a"] and not task.done()
        connection.is_paused = False
        connection.on_writable()
        await task
        return result

    assert asyncio.run(texts()) == ["a", "bc"]


def test_a_silent_stream_sends_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Proxies cut silent connections; comments stop with the last event."""
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def receive() -> Any:
        raise AssertionError("nothing is received")

    async def stream() -> None:
        scope = dict.fromkeys(("rlx.id", "rlx.client", "rlx.namespace"), "") | {"rlx.record": {}}
        async with Exchange(scope, receive, send).events() as send_events:
            await send_events(["a"])
            while sent.count(b": ping\n\n") < 2:
                await asyncio.sleep(0.001)
            await send_events(["b", "c"])
        count = len(sent)
        await asyncio.sleep(0.05)
        assert len(sent) == count

    monkeypatch.setattr(exchange, "PING_S", 0.01)
    asyncio.run(stream())
    texts = [data for data in sent if data and data != b": ping\n\n"]
    assert texts == [b'data: "a"\n\n', b'data: "b"\n\ndata: "c"\n\n', b"data: [DONE]\n\n"]


def test_long_work_between_steps_does_not_stop_the_others() -> None:
    """Such as the log-probabilities of a long prompt: the engine steps after every part, and stops if nobody waits."""
    order: list[str] = []
    loop = asyncio.new_event_loop()
    engine = engine_thread.EngineThread({})
    scheduler: Any = SimpleNamespace(step=lambda: order.append("step") or len(order) < 12, close=lambda: None)
    model: Any = SimpleNamespace(close=lambda: None)
    engine.served["tiny"] = engine_thread.Served("tiny", model, scheduler=scheduler)

    def parts(count: int) -> Any:
        for _ in range(count):
            order.append("part")
            yield 1

    async def main() -> None:
        engine.start(loop)
        await engine.run(parts(3))
        endless = asyncio.create_task(engine.run(parts(10**9)))
        await asyncio.sleep(0.05)
        endless.cancel()

    try:
        loop.run_until_complete(main())
        assert until(lambda: not engine._jobs)
        assert "step part step part step part step" in " ".join(order)
        assert "part part" not in " ".join(order)
        ended = len([word for word in order if word == "part"])
        assert ended < 10**6 and ended > 3
    finally:
        engine.stop()
        loop.close()


def test_the_date_in_a_prompt_is_the_clients(tmp_path: Path) -> None:
    """Equal requests have equal prompts on every day."""
    import httpx2 as httpx

    folder = write_model(tmp_path / "dated", "{{ date_string | default('no date') }}: {{ messages[0].content }}")
    body = {"messages": [{"role": "user", "content": "hi"}]}
    with running({"dated": lambda: rlx.load(folder)}) as server:
        for change, prompt in (({}, "no date: hi"), ({"date_string": "18 Nov 2026"}, "18 Nov 2026: hi")):
            answer = httpx.post(f"{server.address}/apply-template", json=body | {"chat_template_kwargs": change})
            assert answer.json() == {"prompt": prompt}


def test_a_conversation_may_end_with_two_answers(http: Any) -> None:
    """As OpenAI's API and vLLM take it: programs of several agents send it. It cannot be gone on with."""
    messages = [{"role": role, "content": "hi"} for role in ("user", "assistant", "assistant")]
    assert http.post("/v1/chat/completions", json=BODY | {"messages": messages}).status_code == 200
    for body in ({"messages": messages}, {"messages": messages[1:]}):
        refused = http.post("/v1/chat/completions", json=BODY | body | {"continue_final_message": True})
        assert refused.status_code == 400 and refused.json()["error"]["param"] == "messages"
    last = BODY | {"messages": messages[:2], "continue_final_message": True}
    assert http.post("/v1/chat/completions", json=last).status_code == 200

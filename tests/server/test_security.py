"""What happened to other servers does not happen to this one: each test is a class of incidents."""

from __future__ import annotations

import ast
import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from limits import LONGEST_S

import rlx
from rlx.engine import structured
from rlx.engine.structured import Structure
from rlx.errors import RequestError
from rlx.server import connections, engine_thread
from rlx.server.app import ROUTES
from rlx.server.guard import PUBLIC
from rlx.server.metrics import resident_bytes
from rlx.server.serve import Server, running
from rlx.server.settings import MAX_BODY, Keys, ServerSettings, host_name

from .hostile_grammars import GRAMMARS, PATTERNS, ask_mutated, ask_unique, slowest_mask
from .raw_http import connect, json_bytes, read_status, request_bytes, status_of
from .test_operations import slow_down

pytestmark = pytest.mark.serve
BODY: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}
SOURCES = sorted((Path(rlx.__file__).parent / "server").glob("*.py"))
KEY, OTHER_KEY = "a-long-enough-key", "another-good-key"
_SCHEMA = {"name": "x", "schema": {"const": 1}, "odd": 1}
_FUNCTION = {"name": "f", "parameters": {"type": "object"}}
INNER_FIELDS: list[tuple[dict[str, Any], str]] = [  # that mean nothing, and their paths
    ({"stream_options": {"odd": 1}}, "stream_options.odd"),
    ({"response_format": {"type": "text", "odd": 1}}, "response_format.odd"),
    ({"response_format": {"type": "json_schema", "json_schema": _SCHEMA}}, "response_format.json_schema.odd"),
    ({"messages": [{"role": "user", "content": "hi", "odd": 1}]}, "messages[0].odd"),
    ({"tools": [{"type": "function", "function": _FUNCTION | {"odd": 1}}]}, "tools[0].function.odd"),
    ({"cache_prompt": False}, "cache_prompt"),
    ({"verbosity": "low"}, "verbosity"),
]


# -- errors name the field at fault -----------------------------------------------------------------------------------
_CALL = {"id": "x", "type": "function", "function": {"name": ["x"], "arguments": "{}"}}
_TOOL = {"type": "function", "function": _FUNCTION}
_GOOD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": 1}}}
_BAD_SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}


def _wrong_tool(schema: dict[str, Any]) -> dict[str, Any]:
    """A strict tool with an argument that no grammar can be made of."""
    parameters = {"type": "object", "properties": {"a": schema}, "additionalProperties": False}
    return {"type": "function", "function": {"name": "g", "strict": True, "parameters": parameters}}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/completions", {"prompt": "x" * 2000}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x" * 2000}]}, "messages"),
        ("/v1/chat/completions", {"response_format": _BAD_SCHEMA}, "response_format"),
        ("/v1/chat/completions", {"response_format": {"type": "json_object", "schema": {"propertes": {}}}},
         "response_format"),
        ("/v1/chat/completions", {"tools": [_TOOL, _wrong_tool({"not": {}})], "tool_choice": "required"},
         "tools[1].function.parameters"),
        ("/v1/chat/completions", {"tools": [_TOOL, _wrong_tool({"minlen": 1})], "tool_choice": "required"},
         "tools[1].function.parameters"),
        ("/v1/chat/completions", {"tools": [_TOOL, _wrong_tool({"not": {}})], "response_format": _GOOD_SCHEMA},
         "tools[1].function.parameters"),
        ("/v1/chat/completions", {"tools": [_wrong_tool({"minlen": 1})], "response_format": _GOOD_SCHEMA},
         "tools[0].function.parameters"),
        ("/v1/chat/completions", {"tools": [_TOOL], "response_format": _BAD_SCHEMA}, "response_format"),
        ("/v1/completions", {"prompt": "x", "structured_outputs": {"regex": "("}}, "structured_outputs"),
        ("/v1/completions", {"prompt": "x", "json_schema": {"not": {}}}, "json_schema"),
        ("/v1/chat/completions", {"messages": [{"role": "assistant", "content": "", "tool_calls": [_CALL]}]},
         "messages[0].tool_calls[0].function.name"),
    ],
)  # fmt: skip
def test_errors_name_the_field(http: Any, path: str, body: dict[str, Any], param: str) -> None:
    common = {k: v for k, v in BODY.items() if k != "messages" or path.endswith("chat/completions")}
    answer = http.post(path, json=common | body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param, answer.text
    assert answer.json()["error"]["message"].startswith(param.partition(".tool_calls")[0])
    assert "TypeError" not in answer.text


@pytest.mark.parametrize("name", ["Content-Type", "Content-Encoding"])
def test_doubled_headers_of_a_body_are_refused(server: Server, name: str) -> None:
    value = {"Content-Type": "application/json", "Content-Encoding": "identity"}[name]
    data = request_bytes(body=json_bytes(BODY), headers={name: value})
    assert status_of(server.address, data) == 200
    other = f"{name}: {value}\r\n{name}: text/plain\r\n".encode()
    assert status_of(server.address, data.replace(f"{name}: {value}\r\n".encode(), other)) == 415


# -- parameters without bounds (CVE-2026-34756), numbers that parsers let through -------------------------------------
NUMBERS = ("n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "top_logprobs",
           "frequency_penalty", "presence_penalty", "repetition_penalty", "timeout", "best_of")  # fmt: skip


REAL = ("temperature", "timeout", "frequency_penalty", "presence_penalty", "top_p", "repetition_penalty")


@pytest.mark.parametrize("name", NUMBERS)
def test_hostile_numbers_are_answered_at_once(http: Any, name: str) -> None:
    before = resident_bytes()
    for text in ("-1", "2147483648", "9223372036854775808", "1e308", "1e999", "-1e999", "NaN", "Infinity", '"7"',
                 "true",
                 "[]", "{}", "1" * 5000, "1.5", '"' + "9" * 1000 + '"'):  # fmt: skip
        if name in REAL and text in ("1.5", "-1"):
            continue
        base = {field: value for field, value in BODY.items() if field != name}
        body = json.dumps(base)[:-1] + f', "{name}": {text}}}'
        start = time.perf_counter()
        answer = http.post("/v1/chat/completions", content=body, headers={"content-type": "application/json"})
        seconds = time.perf_counter() - start
        accepted = {"seed": ("-1", "2147483648"), "top_k": ("-1",), "max_tokens": ("2147483648",),
                    "max_completion_tokens": ("2147483648",)}.get(name, ())  # fmt: skip
        if text in accepted:
            continue
        assert answer.status_code == 400, (name, text, answer.text)
        assert answer.json()["error"]["type"] == "invalid_request_error" and seconds < 1.0
    assert resident_bytes() - before < 64 << 20


@pytest.mark.parametrize("name", NUMBERS)
def test_zero_is_answered_at_once(http: Any, name: str) -> None:
    start = time.perf_counter()
    body = {k: v for k, v in BODY.items() if (k, name) != ("max_tokens", "max_completion_tokens")}
    body |= {"logprobs": True} if name == "top_logprobs" else {}
    answer = http.post("/v1/chat/completions", json=body | {name: 0})
    assert answer.status_code == (400 if name in ("n", "best_of", "timeout", "repetition_penalty") else 200)
    assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    ("path", "name", "zero"), [("/v1/completions", "logprobs", 200), ("/v1/embeddings", "dimensions", 400)]
)
def test_numbers_of_other_paths(http: Any, path: str, name: str, zero: int) -> None:
    base = {"model": "encoder", "input": "the cat"} if path.endswith("embeddings") else {"model": "tiny", "prompt": "x"}
    for text in ("0", "-1", "2147483648", "9223372036854775808", "1e308", "1e999", "NaN", '"7"', "true", "1.5", "[]"):
        body = json.dumps(base)[:-1] + f', "{name}": {text}}}'
        start = time.perf_counter()
        answer = http.post(path, content=body, headers={"content-type": "application/json"})
        assert answer.status_code == (zero if text == "0" else 400), (text, answer.text)
        assert time.perf_counter() - start < 1.0


@pytest.mark.parametrize(
    "change",
    [
        {"stop": ["x"] * 17}, {"stop": ["x" * 300]}, {"stop": [""]}, {"stop": 3}, {"logit_bias": {"x": 1}},
        {"logit_bias": {"1": 101}}, {"logit_bias": {str(i): 1 for i in range(2000)}}, {"logit_bias": {"999999": 1}},
        {"logit_bias": {"-1": 1}}, {"top_logprobs": 5}, {"logprobs": True, "top_logprobs": 21}, {"messages": []},
        {"messages": "hi"}, {"messages": [{"role": "root", "content": "x"}]}, {"messages": [{"role": "user"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        {"messages": [{"role": "user", "tool_calls": True}, 1.5, "x"]}, {"messages": [3],
        "tools": [{"function": {"name": "f"}}]},
        {"stream": "yes"}, {"stream_options": 3}, {"response_format": {"type": "xml"}}, {"response_format": {}},
        {"response_format": {"type": "json_schema"}}, {"tools": [{}]}, {"tools": "x"}, {"tool_choice": "often"},
        {"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"tools": 1}}, {"chat_template_kwargs": {"date_string": "x" * 33}},
        {"messages": [{"role": "user", "content": "x"}, *[{"role": "assistant", "content": "y"}] * 2],
         "continue_final_message": True},
        {"chat_template_kwargs": {"enable_thinking": [1]}}, {"reasoning_effort": "extreme"}, {"modalities": ["audio"]},
        {"max_tokens": 1, "max_completion_tokens": 2}, {"structured_outputs": {"xml": "x"}},
        {"grammar": "start: (" * 9},
        {"regex": "("}, {"json_schema": {"not": {}}}, {"grammar": "x", "regex": "y"},
    ],
    ids=lambda change: json.dumps(change)[:40],
)  # fmt: skip
def test_wrong_fields_are_refused_and_named(http: Any, change: dict[str, Any]) -> None:
    answer = http.post("/v1/chat/completions", json=BODY | change)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"} and error["message"]
    assert "Traceback" not in answer.text and "/src/" not in answer.text


def test_what_cannot_be_enforced_is_named(http: Any) -> None:
    for schema, word in (
        ({"not": {}}, "not"),
        ({"if": {}, "then": {}}, "if"),
        ({"type": "string", "format": "zz"}, "zz"),
        ({"type": "string", "pattern": "(?=a)"}, "look-around"),
        ({"uniqueItems": True}, "uniqueItems"),
    ):
        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        error = http.post("/v1/chat/completions", json=BODY | {"response_format": form}).json()["error"]
        assert word in error["message"], error


def test_unknown_fields_are_said(http: Any, loaders: Any) -> None:
    answer = http.post("/v1/chat/completions", json=BODY | {"no_such_field": 1, "user": "me"})
    assert answer.status_code == 200 and answer.headers["x-rlx-ignored"] == "no_such_field"
    for body, name in INNER_FIELDS:
        answer = http.post("/v1/chat/completions", json=BODY | body)
        assert answer.status_code == 200 and answer.headers["x-rlx-ignored"] == name, (name, answer.text)


def test_prompts_that_are_too_long_are_never_cut(http: Any) -> None:
    for body, path in (({**BODY, "messages": [{"role": "user", "content": "x" * 5000}]}, "chat/completions"),
                       ({"model": "tiny", "prompt": "x" * 5000}, "completions"),
                       ({"model": "tiny", "prompt": [5] * 5000}, "completions")):  # fmt: skip
        answer = http.post(f"/v1/{path}", json=body)
        error = answer.json()["error"]
        assert (answer.status_code, error["code"], error["n_ctx"]) == (400, "context_length_exceeded", 1024)
        assert error["n_prompt_tokens"] >= 5000
    huge = http.post("/v1/completions", json={"model": "tiny", "prompt": "x" * 4_000_000})
    assert huge.json()["error"]["code"] == "context_length_exceeded"
    text = {"model": "encoder", "input": "the cat " * 500}
    assert http.post("/v1/embeddings", json=text).status_code == 400
    assert http.post("/v1/embeddings", json=text | {"truncate": True}).status_code == 200


def test_ids_outside_the_vocabulary_are_refused(http: Any) -> None:
    for prompt in ([1, 2, 10**6], [-1], [2**63], [1.5], [True], [], [[]]):
        assert http.post("/v1/completions", json={"model": "tiny", "prompt": prompt}).status_code == 400
    for value in ([10**6], [[-1]], "", [""], [], 7, [["x"]], ["x"] * 2049):
        assert http.post("/v1/embeddings", json={"model": "encoder", "input": value}).status_code == 400
    for tokens in ([10**6], [-1], "x", [1.5]):
        assert http.post("/detokenize", json={"model": "tiny", "tokens": tokens}).status_code == 400


# -- exceptions in the engine, recursion, caches without bounds -------------------------------------------------------
def test_mutated_schemas_tools_patterns_and_grammars_are_answered_or_refused(server: Server) -> None:
    """`hostile_grammars.py` sends 10,000 by hand."""
    outcomes = ask_mutated(server, range(400))
    assert outcomes["200"] > 40 and outcomes["400"] > 100, outcomes  # else mutations are too strong or too weak


@pytest.mark.parametrize("depth", [10, 100, 10_000, 1_000_000])
def test_depth_is_bounded_everywhere(http: Any, server: Server, depth: int) -> None:
    nested = "[" * depth + "]" * depth
    for name in ("messages", "tools", "metadata", "response_format", "stop", "logit_bias"):
        content = json.dumps(BODY)[:-1] + f', "{name}": {nested}}}'
        answer = http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
        assert answer.status_code in (200, 400) if depth == 10 else answer.status_code == 400
    if depth <= 10_000:
        for body in ({"regex": "(" * depth + "a" + ")" * depth},
                     {"grammar": "start: " + "(" * depth + '"a"' + ")" * depth},
                     {"grammar": "root ::= " + "(" * depth + '"a"' + ")" * depth}):  # fmt: skip
            assert http.post("/v1/chat/completions", json=BODY | body).status_code in (200, 400)
    assert http.get("/ready").status_code == 200


@pytest.mark.parametrize("kind", ["regex", "grammar"])
def test_no_pattern_or_grammar_holds_the_engine_up(model: rlx.LanguageModel, kind: str) -> None:
    """Time of the thread that computes masks, which others' streams wait for: about 30 ms at most on an idle core."""
    for text in PATTERNS if kind == "regex" else GRAMMARS:
        assert slowest_mask(model, {kind: text}) < 0.3, text[:60]


def test_a_stream_goes_on_beside_patterns_that_cost_much(server: Server, http: Any, model: rlx.LanguageModel) -> None:
    body = BODY | {"seed": 5, "max_tokens": 600, "temperature": 1.0, "logit_bias": {"0": -100, "2": -100}}
    texts: list[str] = []

    def ask() -> None:
        answer = http.post("/v1/chat/completions", json=body)
        texts.append(answer.json()["choices"][0]["message"]["content"])

    stream = threading.Thread(target=ask)
    stream.start()
    for pattern in PATTERNS:
        assert http.post("/v1/chat/completions", json=BODY | {"regex": pattern}).status_code in (200, 400)
    stream.join()
    bias = {0: -float("inf"), 2: -float("inf")}
    assert texts == [model.chat("hi", max_tokens=600, temperature=1.0, seed=5, logit_bias=bias).text]


def test_unique_schemas_do_not_fill_memory(server: Server) -> None:
    """`hostile_grammars.py` sends 20,000 by hand."""
    grammars = server.state.engine.served["tiny"].language.grammars
    ask_unique(server, range(200))
    before = resident_bytes()
    ask_unique(server, range(200, 700))
    assert len(grammars._cache) <= structured.CACHED and resident_bytes() - before < 16 << 20
    large = [Structure("schema", json.dumps({"enum": ["x" * 60_000, i]})) for i in range(60)]
    for one in large:
        grammars.follow(one)
    assert sum(map(len, grammars._cache)) <= structured.CACHED_CHARS and len(grammars._cache) < len(large)


# -- JSON and HTTP ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "content",
    [b"", b"null", b"[]", b'"x"', b"{", b"{}{}", b'{"model": "tiny", "model": "x"}', b'{"n": NaN}', b"\xff\xfe",
     b'{"messages": "\\ud800"}', b"\x00", b"{'a': 1}", b'{"seed": 1e400}', b"1" * 5000],
)  # fmt: skip
def test_bodies_that_are_not_a_request(http: Any, content: bytes) -> None:
    answer = http.post("/v1/chat/completions", content=content, headers={"content-type": "application/json"})
    assert answer.status_code == 400 and answer.json()["error"]["message"]


def test_only_json_is_read(server: Server) -> None:
    """A page elsewhere can send forms and plain text without asking the browser for permission."""
    body = json_bytes(BODY)
    for kind in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x", ""):
        assert status_of(server.address, request_bytes(body=body, headers={"Content-Type": kind})) == 415
    gzip = {"Content-Encoding": "gzip"}
    assert status_of(server.address, request_bytes(body=body, headers=gzip)) == 415


def test_sizes_are_bounded(server: Server) -> None:
    address = server.address
    assert status_of(address, request_bytes(headers={"X-Large": "x" * (64 << 10)})) in (0, 400, 431)
    assert status_of(address, request_bytes(headers={"Content-Length": str(MAX_BODY + 1)})) == 413
    assert status_of(address, request_bytes(headers={"Content-Length": "9" * 30})) in (0, 400, 413)
    assert status_of(address, request_bytes(headers={"Content-Length": "-1"})) in (0, 400)
    with connect(address) as one:  # a body in chunks, whose size nobody announces
        head = request_bytes(headers={"Transfer-Encoding": "chunked"}).replace(b"Content-Length: 0\r\n", b"")
        one.sendall(head)
        try:
            for _ in range(MAX_BODY // (1 << 20) + 2):
                one.sendall(b"100000\r\n" + b"x" * (1 << 20) + b"\r\n")
        except ConnectionError:
            pass
        assert read_status(one) in (0, 413)


@pytest.fixture
def more_files() -> Iterator[None]:
    """Both ends of a thousand connections are in this process."""
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(hard, 4096)
    if wanted < 2500:
        pytest.skip(f"the process may have {wanted} files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(wanted, soft), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_idle_and_slow_connections_do_not_stop_others(server: Server, http: Any, more_files: None) -> None:
    import httpx2 as httpx

    with contextlib.ExitStack() as stack:
        idle = [stack.enter_context(connect(server.address)) for _ in range(1000)]
        for one in idle[:500]:
            one.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")
        for one in idle[500:600]:
            one.sendall(request_bytes(headers={"Content-Length": "100"}) + b"{")
        assert http.get("/health").status_code == 200
        with httpx.Client(base_url=server.address, timeout=LONGEST_S) as client:  # a connection of its own
            assert client.post("/v1/chat/completions", json=BODY).status_code == 200


@pytest.mark.parametrize(
    ("method", "path"), [("HEAD", "/v1/models"), ("GET", "/nothing"), ("POST", "/v1/chat/completions")]
)
def test_a_body_that_ends_in_other_bytes_is_no_error_of_the_server(
    server: Server, caplog: pytest.LogCaptureFixture, method: str, path: str
) -> None:
    """Its bytes are not logged, and nobody answers twice."""
    head = request_bytes(method, path, headers={"Transfer-Encoding": "chunked"}).replace(b"Content-Length: 0\r\n", b"")
    for body in (b"2\r\n{}\r\nmy secret\r\n", b"my secret\r\n"):
        assert status_of(server.address, head + body) in (0, 200, 400, 404)
        with connect(server.address) as one:  # the bytes come while the request is being answered
            one.sendall(head)
            time.sleep(0.02)
            one.sendall(body)
            assert read_status(one) in (0, 200, 400, 404)
    assert status_of(server.address, request_bytes("GET", "/health")) == 200
    assert not [r for r in caplog.records if r.levelno >= logging.ERROR] and "secret" not in caplog.text


def test_pipelined_requests_are_answered_one_by_one(server: Server) -> None:
    with connect(server.address) as one:
        one.sendall(request_bytes("GET", "/health") * 3)
        data = b""
        while data.count(b'"ok"') < 3:
            data += one.recv(4096)
    assert data.count(b"HTTP/1.1 200") == 3


# -- browsers: DNS rebinding, pages elsewhere -------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("host", "allowed"),
    [
        ("127.0.0.1", True), ("localhost", True), ("LOCALHOST:80", True), ("[::1]:8000", True), ("127.0.0.1:1", True),
        ("evil.example", False), ("127.0.0.1.evil.example", False), ("", False), ("localhost/v1", False), ("a b",
        False),
        ("localhost:x", False), ("localhost@evil", False), ("[::1", False), ("10.0.0.1", False),
        ("localhost:123456", False),
        ("é", False), ("localhost\t", True), ("../health", False), ("[zz]", False), (":80", False),
    ],
)  # fmt: skip
def test_the_host_must_be_this_server(server: Server, host: str, allowed: bool) -> None:
    status = status_of(server.address, request_bytes("GET", "/v1/models", host=host))
    assert status == 200 if allowed else status in (400, 403)


def test_a_host_is_needed_once(server: Server) -> None:
    assert status_of(server.address, request_bytes("GET", "/v1/models", host=None)) in (400, 403)
    twice = request_bytes("GET", "/v1/models").replace(
        b"Host: 127.0.0.1\r\n", b"Host: 127.0.0.1\r\nHost: localhost\r\n"
    )
    assert status_of(server.address, twice) in (400, 403)


def test_pages_of_other_origins_are_refused_by_every_method(server: Server, http: Any) -> None:
    for method in ("GET", "POST", "DELETE", "PUT", "PATCH", "OPTIONS", "HEAD"):
        for origin in ("http://evil.example", "null", "https://127.0.0.1:1"):
            headers = {"origin": origin, "content-type": "application/json"}
            assert http.request(method, "/v1/chat/completions", headers=headers).status_code == 403
    own = http.post("/v1/chat/completions", json=BODY, headers={"origin": server.address})
    assert own.status_code == 200 and "access-control-allow-origin" not in own.headers


# -- keys -------------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def guarded(loaders: Any) -> Any:
    settings = ServerSettings(
        port=0, keys=Keys([KEY, OTHER_KEY]), origins=frozenset({"http://app.example"}), strict=True
    )
    with running({"tiny": loaders["tiny"]}, settings) as one:
        yield one


def test_every_route_wants_a_key_unless_it_is_listed(guarded: Server) -> None:
    import httpx2 as httpx

    with httpx.Client(base_url=guarded.address) as client:
        for method, path, _ in ROUTES:
            path = path.replace("{name:path}", "tiny")
            status = client.request(method, path, headers={"content-type": "application/json"}).status_code
            assert status == (200 if path in PUBLIC else 401), path
        for path in ("/nothing", "//v1/models", "/v1/models/", "/health/../v1/models", "/?x=/health", "/V1/models"):
            assert client.get(path).status_code in (200, 401) and (
                path.startswith("/?") or client.get(path).status_code == 401
            )
        for headers in ({"authorization": KEY}, {"authorization": "Bearer wrong-key-here"},
                        {"authorization": "Basic x"},
                        {"authorization": f"Bearer {KEY}x"}, {"x-api-key": ""},
                        {"authorization": "Bearer"}):  # fmt: skip
            assert client.get("/v1/models", headers=headers).status_code == 401
        both = {"authorization": f"Bearer {KEY}", "x-api-key": "other"}
        assert client.get("/v1/models", headers=both).status_code == 401
        for headers in ({"authorization": f"Bearer {KEY}"}, {"x-api-key": OTHER_KEY}):
            assert client.get("/v1/models", headers=headers).status_code == 200


def test_another_owners_prompts_do_not_show(guarded: Server) -> None:
    import httpx2 as httpx

    def cached(key: str) -> int:
        headers = {"authorization": f"Bearer {key}"}
        messages = [{"role": "user", "content": "a secret of some length " * 8}]
        with httpx.Client(base_url=guarded.address) as client:
            answer = client.post("/v1/chat/completions", json=BODY | {"messages": messages}, headers=headers).json()
        return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached(KEY) == 0 and cached(KEY) > 100 and cached(OTHER_KEY) == 0


def test_a_flood_of_one_owner_does_not_keep_another_waiting(loaders: Any) -> None:
    """The first token of B comes when a row is free, not when the queue of A is empty."""
    settings = ServerSettings(port=0, keys=Keys([KEY, OTHER_KEY]))
    rows, flood = 2, 30
    body = BODY | {"max_tokens": 40, "logit_bias": {"0": -100, "2": -100}, "stream": True}
    with running({"tiny": loaders["tiny"]}, settings, rows=rows) as server, contextlib.ExitStack() as stack:
        scheduler = server.state.engine.served["tiny"].scheduler
        assert scheduler is not None
        slow_down(server)

        def ended() -> int:
            return sum(scheduler.statistics().requests_total.values())

        for _ in range(flood):
            one = stack.enter_context(connect(server.address))
            one.sendall(request_bytes(body=json_bytes(body), headers={"X-Api-Key": KEY}))
        end = time.monotonic() + LONGEST_S
        while scheduler.statistics().requests_waiting + ended() < flood - rows and time.monotonic() < end:
            time.sleep(0.005)
        before = ended()
        with connect(server.address) as one:
            one.sendall(request_bytes(body=json_bytes(body), headers={"X-Api-Key": OTHER_KEY}))
            data = b""
            while b'"content":"' not in data:
                data += one.recv(1 << 16)
            first = ended()
        assert before < flood // 2 and first - before <= 3 * rows, (before, first)  # 28 and more without turns


def test_named_origins_may_call(guarded: Server) -> None:
    import httpx2 as httpx

    with httpx.Client(base_url=guarded.address) as client:
        headers = {"origin": "http://app.example", "access-control-request-method": "POST"}
        asked = client.options("/v1/chat/completions", headers=headers)
        assert asked.status_code == 204 and asked.headers["access-control-allow-origin"] == "http://app.example"
        assert "access-control-allow-credentials" not in asked.headers
        strict = client.post("/v1/chat/completions", json=BODY | {"odd": 1}, headers={"x-api-key": KEY})
        assert strict.status_code == 400 and "odd" in strict.json()["error"]["message"]
        for body, name in INNER_FIELDS:
            strict = client.post("/v1/chat/completions", json=BODY | body, headers={"x-api-key": KEY})
            assert strict.status_code == 400 and name in strict.json()["error"]["message"], name
            assert strict.json()["error"]["code"] == "unknown_field"
        known = {"cache_prompt": True, "verbosity": "medium", "user": "u", "stream_options": {"include_usage": True}}
        assert client.post("/v1/chat/completions", json=BODY | known, headers={"x-api-key": KEY}).status_code == 200


def test_keys_are_compared_in_constant_time_and_not_kept() -> None:
    keys = Keys([KEY])
    assert keys.match(KEY) is not None and keys.match("x") is None and KEY not in repr(vars(keys))
    source = next(p for p in SOURCES if p.name == "settings.py").read_text()
    assert "compare_digest" in source


def test_key_files_belong_to_one_user(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"# of the team\n{KEY}\n\n{OTHER_KEY}\n")
    path.chmod(0o644)
    if os.name == "posix":
        with pytest.raises(RequestError, match="others may read it"):
            Keys.read(path)
    path.chmod(0o600)
    assert Keys.read(path) == [KEY, OTHER_KEY]
    for bad in ("short", "with space in it", "nön-ascii-key"):
        with pytest.raises(RequestError, match="a key is"):
            Keys([bad])


# -- defaults ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_a_public_address_needs_a_key(host: str) -> None:
    with pytest.raises(RequestError, match="there is no key"):
        ServerSettings(host=host)
    assert ServerSettings(host=host, keys=Keys([KEY])) and ServerSettings(host=host, open=True)


def test_the_default_is_this_machine_only() -> None:
    assert ServerSettings().is_loopback and not ServerSettings().origins
    assert host_name("[::1]:80") == "::1" and host_name("a:1:2") is None


# -- what the code does not do ----------------------------------------------------------------------------------------
def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def test_no_pickle_no_fetching_no_templates_no_shell() -> None:
    banned = {"pickle", "marshal", "shelve", "subprocess", "urllib.request", "http.client", "requests", "httpx",
              "jinja2",
              "multiprocessing", "ctypes", "starlette.staticfiles", "starlette.responses",
              "python_multipart"}  # fmt: skip
    for path in SOURCES:
        assert not imported(path) & banned, path.name


def test_no_pickle_in_batch_jobs_either() -> None:
    """Ray pickles by design: `rlx.ray` asks for a token instead."""
    banned = {"pickle", "marshal", "shelve", "cloudpickle", "dill", "joblib", "copyreg"}
    sources = sorted((Path(rlx.__file__).parent / "batch").rglob("*.py"))
    assert sources
    for path in (*SOURCES, *sources):
        assert not {name.split(".")[0] for name in imported(path)} & banned, path.name
        assert "allow_pickle=True" not in path.read_text().replace(" ", ""), path.name


def test_only_the_sandbox_imports_jinja() -> None:
    root = Path(rlx.__file__).parent
    users = {p.name for p in root.rglob("*.py") if any(n.split(".")[0] == "jinja2" for n in imported(p))}
    assert users and all(name.startswith("jinja_") for name in users)


def test_errors_say_nothing_of_the_inside(http: Any, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ValueError("a path /secret and a text")

    monkeypatch.setattr(server.state.engine.served["tiny"].language.tokenizer.__class__, "decode", broken)
    answer = http.post("/detokenize", json={"model": "tiny", "tokens": [5]})
    assert answer.status_code == 500 and "secret" not in answer.text
    assert answer.headers["x-request-id"] in answer.json()["error"]["message"]


def test_one_failing_request_ends_alone(server: Server, model: Any) -> None:
    """A grammar that no token continues, beside requests that run."""
    import httpx2 as httpx

    results: dict[str, Any] = {}

    def ask(name: str, **change: Any) -> None:
        with httpx.Client(base_url=server.address, timeout=LONGEST_S) as client:
            results[name] = client.post("/v1/chat/completions", json=BODY | {"seed": 1, "max_tokens": 60} | change)

    names = {"good": {}, "bad": {"grammar": "start: x\nx: x"}, "also good": {"seed": 2}}
    threads = [threading.Thread(target=ask, args=(name,), kwargs=change) for name, change in names.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["bad"].status_code == 400
    for name, seed in (("good", 1), ("also good", 2)):
        expected = model.chat("hi", max_tokens=60, temperature=1.0, seed=seed)
        assert results[name].json()["choices"][0]["message"]["content"] == expected.text


# -- connections: slow heads, idle ones, too many ---------------------------------------------------------------------
def test_a_head_that_never_ends_closes_its_connection(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.2)
    with connect(server.address) as silent, connect(server.address) as slow:
        slow.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: ")
        assert silent.recv(10) == b"" and slow.recv(10) == b""
    with connect(server.address) as again:  # a second head on a connection that was used
        again.sendall(request_bytes("GET", "/health"))
        assert b"200" in again.recv(4096)
        again.sendall(b"GET /health HT")
        while piece := again.recv(4096):
            assert b"HTTP/1.1 200" not in piece


def test_a_slow_answer_is_not_a_slow_head(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    with connect(server.address) as one:
        body = BODY | {"max_tokens": 400, "logit_bias": {"0": -100, "2": -100}}
        one.sendall(request_bytes(body=json_bytes(body)))
        assert read_status(one) == 200


def test_connections_are_counted(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    assert connections.most_connections() >= 64
    monkeypatch.setattr(connections, "most_connections", lambda: 0)
    with connect(server.address) as one, contextlib.suppress(ConnectionResetError):
        assert one.recv(10) == b""
    monkeypatch.undo()
    assert status_of(server.address, request_bytes("GET", "/health")) == 200


def test_a_large_embedding_request_does_not_hold_up_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is computed in parts, between steps of other requests; a client that leaves takes its rows with it."""
    monkeypatch.setattr(engine_thread, "EMBED_TOKENS", 8)
    model = server.state.engine.served["encoder"].model
    queue = engine_thread.EmbeddingQueue(model)
    results: list[Any] = []
    rows = model.text_rows([f"the cat {i}" for i in range(7)])
    large, left, small = (engine_thread.EmbeddingJob(part, results.append) for part in (rows, rows[:3], rows[:1]))
    for job in (large, left, small):
        queue.submit(job)
    left.cancelled = True
    steps = 0
    while queue.step(lambda done, value: done(value)):
        steps += 1
    assert steps > 3 and queue.waiting == 0 and len(results) == 2
    assert np.array_equal(results[0], model.embed_tokens(rows)) and np.array_equal(results[1], results[0][:1])

"""Hostile requests: mutated bytes on bare sockets, and mutated bodies for every path.

No answer is a server error, none takes long, and the server goes on. `python tests/server/fuzz_http.py --minutes 60`
runs by the clock; tests run a number of cases.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import random
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

sys.path.insert(0, str(Path(__file__).parents[1]))

import stand_ins
from tool_templates import CODER, HERMES, THINKING

import rlx
from rlx.server.metrics import resident_bytes
from rlx.server.serve import Server, running
from rlx.server.settings import ServerSettings

ANSWER_S = 60.0  # an answer that takes longer hangs
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
TOOL = {
    "type": "function",
    "function": {"name": "f", "description": "d", "strict": True, "parameters": {
        "type": "object", "properties": {"a": {"type": "string", "pattern": "^x+$"}, "b": {"enum": [1, "two"]}},
        "required": ["a"], "additionalProperties": False}},
}  # fmt: skip
CALL = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": '{"a": "x"}'}}
CHAT: dict[str, Any] = {"model": "hermes", "messages": MESSAGES, "max_tokens": 3}
BODIES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["a"], "n": 2, "stream": True,
     "stream_options": {"include_usage": True}, "logprobs": True, "top_logprobs": 2, "logit_bias": {"5": 1}}),
    ("/v1/chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}),
    ("/v1/chat/completions", CHAT | {"model": "coder", "tools": [TOOL], "tool_choice": {"type": "function", "function":
     {"name": "f"}}, "messages": [*MESSAGES, {"role": "assistant", "content": None, "tool_calls": [CALL]},
     {"role": "tool", "tool_call_id": "call_1", "content": "ok"}]}),
    ("/v1/chat/completions", CHAT | {"model": "thinker", "response_format": {"type": "json_schema", "json_schema": {
     "name": "x", "strict": True, "schema": {"anyOf": [{"type": "array", "items": {"$ref": "#/$defs/n"}, "minItems": 1},
     {"type": "string", "format": "date"}], "$defs": {"n": {"type": "integer", "minimum": 3}}}}},
     "reasoning_effort": "low", "chat_template_kwargs": {"enable_thinking": True}}),
    ("/v1/chat/completions", CHAT | {"grammar": 'start: "a" b*\nb: /[xy]{1,3}/'}),
    ("/v1/chat/completions", CHAT | {"grammar": 'root ::= "a" b*\nb ::= [xy]{1,3}'}),
    ("/v1/chat/completions", CHAT | {"structured_outputs": {"regex": "(a|b{1,3})+[^c]"}}),
    ("/v1/chat/completions", CHAT | {"messages": [*MESSAGES, {"role": "assistant", "content": [{"type": "text",
     "text": "so"}]}], "continue_final_message": True, "choice": ["a", "bc"]}),
    ("/v1/completions", {"model": "hermes", "prompt": ["a", "b"], "echo": True, "logprobs": 2, "max_tokens": 2}),
    ("/v1/completions", {"model": "hermes", "prompt": [[5, 6], [7]], "stream": True, "max_tokens": 2}),
    ("/v1/embeddings", {"model": "encoder", "input": ["the cat", "a dog"], "dimensions": 4}),
    ("/v1/embeddings", {"model": "encoder", "input": [[1, 2], [3]], "truncate": True}),
    ("/v1/chat/completions/input_tokens", CHAT), ("/apply-template", CHAT | {"tools": [TOOL]}),
    ("/tokenize", {"model": "hermes", "content": "a text <|im_end|>", "with_pieces": True, "add_special": True}),
    ("/detokenize", {"model": "hermes", "tokens": [5, 6, 7]}),
]  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2**31, 2**63, -(2**63) - 1, 10**40, 1e308, 0.5, -0.0, "", "a", "\x00", "\U0010ffff",
    "𝕏" * 50, "x" * 5000, "<|im_end|>", "<think>", "{{ 7*7 }}", "../../etc/passwd", "__class__", [], {}, [[]], [None],
    [1, "a"], {"": {}}, {"type": "string"}, {"type": ["object", "null"]}, {"$ref": "#"}, {"$ref": "#/$defs/n"},
    {"not": {}}, "(", "(?=a)", "(a*)*", "a{1,9999}", "[", "\\", "%json {}", "start: start", 'root ::= root "a"',
    "function", "auto", "json_schema", "user",
)  # fmt: skip
PATHS = (
    "/",
    "/health",
    "/ready",
    "/metrics",
    "/v1/models",
    "/v1/models/x",
    "/v1/models/%00",
    "/v1/../health",
    "/%2e%2e",
    "//",
)
METHODS = ("GET", "POST", "HEAD", "OPTIONS", "PUT", "DELETE", "PATCH", "TRACE", "CONNECT", "BREW")
HEADERS = (
    b"Host: evil\r\n", b"Host: 127.0.0.1\r\n", b"Origin: http://evil\r\n", b"Origin: null\r\n",
    b"Connection: close\r\n", b"Connection: Upgrade\r\nUpgrade: websocket\r\n",
    b"Transfer-Encoding: chunked\r\n", b"Content-Length: -1\r\n", b"Content-Length: 99999999999\r\n",
    b"Content-Type: text/plain\r\n", b"Content-Encoding: gzip\r\n", b"Expect: 100-continue\r\n",
    b'X-Request-Id: a"b\r\n', b"Authorization: Bearer \xff\r\n", b"X: " + b"y" * 20000 + b"\r\n",
    b" folded\r\n", b": empty\r\n",
)  # fmt: skip


# -- mutations --------------------------------------------------------------------------------------------------------
def places(value: Any, parent: Any = None, key: Any = None) -> Iterator[tuple[Any, Any]]:
    """Every (container, key) in a JSON value."""
    if parent is not None:
        yield parent, key
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for inner, item in list(items):
        yield from places(item, value, inner)


def mutated(rng: random.Random, body: dict[str, Any]) -> dict[str, Any]:
    """A body with one to three changes: a value, a name, a member more or less, a copy of a part elsewhere."""
    body = copy.deepcopy(body)
    for _ in range(rng.choice((1, 1, 2, 3))):
        spots = list(places(body))
        if not spots:
            break
        parent, key = rng.choice(spots)
        match rng.randrange(6):
            case 0 | 1 | 2:
                parent[key] = copy.deepcopy(rng.choice(VALUES))
            case 3:
                del parent[key]
            case 4:
                other, name = rng.choice(spots)
                if name in other if isinstance(other, dict) else name < len(other):
                    parent[key] = copy.deepcopy(other[name])
            case _:
                if isinstance(parent, dict):
                    parent[str(rng.choice(VALUES))[:40]] = copy.deepcopy(rng.choice(VALUES))
                else:
                    parent.extend(copy.deepcopy(parent[:20]))
    return body


def request(rng: random.Random) -> tuple[bytes, bool]:
    """The bytes of a request, and whether they are HTTP."""
    path, body = rng.choice(BODIES)
    data = json.dumps(mutated(rng, body)).encode()
    if rng.random() < 0.1:
        at = rng.randrange(len(data))
        data = data[:at] + rng.choice((b"", b"\xff", b"[" * 3000, b'"', b"NaN", b"1e999", b"\\ud800")) + data[at + 1 :]
    head = (
        f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(data)}\r\n"
    )
    if rng.random() < 0.75:
        return head.encode() + b"Connection: close\r\n\r\n" + data, True
    if rng.random() < 0.3:
        line = f"{rng.choice(METHODS)} {rng.choice((path, *PATHS))} HTTP/1.1"
        head = f"{line}\r\nHost: localhost\r\nContent-Length: {len(data)}\r\n"
    message = bytearray(head.encode() + rng.choice(HEADERS) + b"\r\n" + data)
    for _ in range(rng.randrange(4)):
        at = rng.randrange(len(message))
        match rng.randrange(3):
            case 0:
                message[at] ^= 1 << rng.randrange(8)
            case 1:
                del message[at : at + rng.randrange(1, 30)]
            case _:
                message[at:at] = rng.choice((b"\r\n", b"\x00", b"\xff\xfe", b"HTTP/1.1", b" " * 100))
        if not message:
            break
    return bytes(message), False


def status(address: str, data: bytes, patience: float) -> int:
    """The status of the answer, read to its end; 0 if there is none."""
    parts = urlsplit(address)
    with socket.create_connection((parts.hostname, parts.port), timeout=ANSWER_S) as one:
        answer = b""
        try:
            one.sendall(data)
            one.settimeout(patience)
            while piece := one.recv(1 << 16):
                answer += piece
        except TimeoutError:
            if patience == ANSWER_S:
                raise
        except ConnectionError:
            pass
    return int(answer.split(b" ", 2)[1]) if answer.startswith(b"HTTP/1.1 ") else 0


class Errors(logging.Handler):
    """Errors in the log: what a server does not expect."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))

    def __enter__(self) -> Errors:
        logging.getLogger().addHandler(self)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger().removeHandler(self)


def fuzz(server: Server, seeds: Iterator[int]) -> Counter[str]:
    """Send the requests of seeds; raises on a server error, a hang, an error in the log, or a server that has ended."""
    with Errors() as errors:
        return _fuzz(server, seeds, errors)


def _fuzz(server: Server, seeds: Iterator[int], errors: Errors) -> Counter[str]:
    outcomes: Counter[str] = Counter()
    for seed in seeds:
        data, is_http = request(random.Random(seed))
        try:
            code = status(server.address, data, ANSWER_S if is_http else 0.05)
        except TimeoutError:
            raise AssertionError(f"seed {seed} hangs: {data!r}") from None
        assert code < 500, f"seed {seed}: status {code} for {data!r}"
        assert code or not is_http, f"seed {seed}: no answer to {data!r}"
        assert not errors.messages, f"seed {seed}, or one before it: {errors.messages[0]} for {data!r}"
        outcomes[str(code)] += 1
        if not sum(outcomes.values()) % 200:
            assert server.state.engine.is_ready, f"seed {seed}: the engine is not ready"
    assert (
        status(server.address, b"GET /ready HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n", ANSWER_S) == 200
    )
    return outcomes


def write_models(folder: Path) -> dict[str, Path]:
    """Models whose templates write tool calls and thoughts in different ways, and an encoder."""
    folders = {"encoder": stand_ins.write_encoder(folder / "encoder")}
    for name, template in (("hermes", HERMES), ("coder", CODER), ("thinker", THINKING)):
        folders[name] = stand_ins.write_chat(folder / name)
        path = folders[name] / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folders


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--first", type=int, default=1_000_000, help="seed of the first case")
    parser.add_argument("--json", type=Path, help="where to write the outcomes, beside others")
    arguments = parser.parse_args()

    def seeds() -> Iterator[int]:
        seed, end = arguments.first, time.monotonic() + 60 * arguments.minutes
        while time.monotonic() < end:
            yield seed
            seed += 1

    with tempfile.TemporaryDirectory(prefix="rlx-fuzz-") as folder:
        loaders = {name: lambda path=path: rlx.load(path) for name, path in write_models(Path(folder)).items()}
        with running(loaders, ServerSettings(port=0, matryoshka=True)) as server:
            fuzz(server, iter(range(arguments.first - 2000, arguments.first)))  # fills caches
            before = resident_bytes()
            outcomes = fuzz(server, seeds())
            growth = resident_bytes() - before
    result = {
        "command": f"python tests/server/fuzz_http.py --minutes {arguments.minutes:g} --first {arguments.first}",
        "cases": sum(outcomes.values()), "server_errors": 0, "hangs": 0, "growth_bytes": growth,
        "statuses": dict(sorted(outcomes.items())),
    }  # fmt: skip
    print(json.dumps(result))
    if arguments.json is not None:
        results = json.loads(arguments.json.read_text()) if arguments.json.exists() else {}
        results.setdefault("http", {}).setdefault("runs", []).append(result)
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())

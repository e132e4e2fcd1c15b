"""HTTP over a bare socket: requests that no client library would send."""

from __future__ import annotations

import json
import socket
from typing import Any
from urllib.parse import urlsplit

from limits import LONGEST_S


def connect(address: str) -> socket.socket:
    parts = urlsplit(address)
    return socket.create_connection((parts.hostname, parts.port), timeout=LONGEST_S)


def request_bytes(
    method: str = "POST", path: str = "/v1/chat/completions", body: bytes = b"", headers: dict[str, str] | None = None,
    host: str | None = "127.0.0.1",
) -> bytes:  # fmt: skip
    lines = [f"{method} {path} HTTP/1.1"]
    lines += [] if host is None else [f"Host: {host}"]
    given_headers = {"Content-Type": "application/json", "Content-Length": str(len(body)), **(headers or {})}
    lines += [f"{name}: {value}" for name, value in given_headers.items()]
    return "\r\n".join(lines).encode("latin-1") + b"\r\n\r\n" + body


def status_of(address: str, data: bytes) -> int:
    """The status of the answer to some bytes; 0 if the connection is closed without one."""
    with connect(address) as one:
        one.sendall(data)
        return read_status(one)


def read_status(one: socket.socket) -> int:
    head = b""
    try:
        while b"\r\n\r\n" not in head:
            piece = one.recv(4096)
            if not piece:
                break
            head += piece
    except ConnectionError:
        return 0
    return int(head.split(b" ", 2)[1]) if head.startswith(b"HTTP/1.1 ") else 0


def json_bytes(value: Any) -> bytes:
    return json.dumps(value).encode()

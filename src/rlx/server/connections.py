"""Connections: how many there may be, and how long a client may take to send a head or to read an answer."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 30.0  # seconds for a request's line and headers
READ_S = 30.0  # seconds in which a client must read some of what waits for it
CONNECTION = "rlx.connection"  # in the state of a request's scope
SPARE_FILES = 64  # descriptors that are left for everything but connections


class HeadJoiner:
    """A transport that writes the head of an answer with its body, if this has a length.

    It is one system call instead of two, after each of which the event loop may have to wait for the GIL.
    """

    def __init__(self, transport: Any) -> None:
        self._transport, self._head = transport, b""

    def write(self, data: bytes) -> None:
        if data.startswith(b"HTTP/1.1 ") and b"\r\ncontent-length: " in data:
            self._head += data
        elif self._head or data:
            head, self._head = self._head, b""
            self._transport.write(head + data)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)


class Connection(H11Protocol):
    """uvicorn's protocol, which cuts off clients that send no whole head or read nothing in time, and one too many.

    Whoever waits to write learns of it as of any client that has left.
    """

    app_state: dict[str, Any]
    _head_timer: asyncio.TimerHandle | None = None
    _read_timer: asyncio.TimerHandle | None = None
    on_writable: Callable[[], None] = staticmethod(lambda: None)  # called when `is_paused` ends
    _on_leave: Callable[[], None] = staticmethod(lambda: None)

    def connection_made(self, transport: Any) -> None:
        self.app_state = {**self.app_state, CONNECTION: self}  # the scope of each request has a copy
        super().connection_made(transport)
        self.transport = HeadJoiner(transport)  # type: ignore[assignment]
        if len(self.connections) > most_connections():
            transport.abort()
        else:
            self._await_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._head_arrived()
        else:  # uvicorn's own timer ends with the first byte
            self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        self._head_arrived()
        self._stop_read_timer()
        super().connection_lost(exc)
        self._on_leave()
        self.app_state, self.scope, self.cycle = {}, None, None  # type: ignore[assignment]  # they refer to this object

    @contextlib.contextmanager
    def watched(self, leave: Callable[[], None]) -> Iterator[None]:
        """Calls `leave` if the client leaves meanwhile, or has left."""
        if self.cycle is None or self.cycle.disconnected:
            leave()
        self._on_leave = leave
        try:
            yield
        finally:
            del self._on_leave  # of the class again

    @property
    def has_body(self) -> bool:
        """Whether the body of the request is here to its end."""
        return self.cycle is not None and not self.cycle.more_body

    @property
    def is_paused(self) -> bool:
        """Whether the client reads too slowly to write more now."""
        return bool(self.flow.write_paused)

    def write_part(self, data: bytes) -> None:
        """Write part of the body of an answer that has begun: what ASGI's `send` does, without awaiting."""
        if self.cycle is not None and not self.cycle.disconnected and not self.transport.is_closing():
            self.transport.write(self.conn.send(h11.Data(data=data)))  # type: ignore[arg-type]

    def send_400_response(self, msg: str) -> None:
        """Answer bytes that are no HTTP, unless an answer has begun. A request that they belong to is over.

        uvicorn would go on with that request, fail to answer it, and log the bytes.
        """
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            self._on_leave()
        try:
            super().send_400_response(msg)
        except h11.LocalProtocolError:  # the answer has begun, or must not have a body
            self.transport.close()

    def pause_writing(self) -> None:
        super().pause_writing()
        if self._read_timer is None:
            self._read_timer = self.loop.call_later(READ_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_read_timer()
        super().resume_writing()
        self.on_writable()

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _await_head(self) -> None:
        if self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def _head_arrived(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _too_slow(self) -> None:
        self._head_timer = None
        if self.cycle is None or self.cycle.response_complete:
            self.transport.close()


def most_connections() -> int:
    """Connections at the same time: as many as the process may have files, less some."""
    try:
        import resource
    except ImportError:  # not POSIX
        return 1 << 10
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return 1 << 16 if limit == resource.RLIM_INFINITY else max(limit - SPARE_FILES, limit // 2)

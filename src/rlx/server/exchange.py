"""One request and its answer over ASGI: the body with its limits, JSON answers, event streams, and disconnects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import time
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterator,
    Mapping,
    MutableMapping,
    Sequence,
)
from typing import Any, TypeVar

from rlx.errors import RlxError
from rlx.server.api_errors import ApiError, invalid, of_rlx
from rlx.server.connections import CONNECTION, Connection
from rlx.server.fields import read_json
from rlx.server.settings import MAX_BODY

Message = MutableMapping[str, Any]
Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Result = TypeVar("Result")
BODY_S = 30.0  # seconds to send a body
PING_S = 15.0  # silence after which a stream sends a comment: proxies cut silent connections
LARGE = 1 << 16  # bytes: larger bodies are parsed in a thread
encoded = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode


class Disconnected(Exception):
    """The client has left."""


class Exchange:
    """A request, and what is sent back."""

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.id: str = scope["rlx.id"]
        self.client: str = scope["rlx.client"]  # for fair shares: the owner of a key, or an address
        self.namespace: str = scope["rlx.namespace"]  # of the prefix cache
        self.record: dict[str, Any] = scope["rlx.record"]  # for the log
        self.headers: dict[str, str] = {}  # of the answer
        self._written = time.monotonic()  # when the last part of the answer was sent

    async def body(self) -> bytes:
        """The body; raises ApiError if it is too long or too slow."""
        parts, size = list[bytes](), 0
        is_here = self.connection is not None and self.connection.has_body
        try:
            async with contextlib.nullcontext() if is_here else asyncio.timeout(BODY_S):
                while True:
                    message = await self._receive()
                    if message["type"] == "http.disconnect":
                        raise Disconnected
                    parts.append(message.get("body", b""))
                    size += len(parts[-1])
                    if size > MAX_BODY:
                        raise ApiError(413, f"the body is larger than {MAX_BODY >> 20} MiB", code="body_too_large")
                    if not message.get("more_body"):
                        return b"".join(parts)
        except TimeoutError as error:
            raise ApiError(408, f"the body took more than {BODY_S:g} seconds", code="timeout") from error

    async def json(self, check: Callable[[], None] | None = None) -> Any:
        """The body as a JSON value; `check` may refuse it before it is parsed."""
        data = await self.body()
        if check is not None:
            check()
        if not data.strip():
            raise invalid("the body is empty, expected a JSON object", code="invalid_json")
        return await asyncio.to_thread(read_json, data) if len(data) > LARGE else read_json(data)

    # -- answers --
    async def start(self, status: int, headers: Mapping[str, str]) -> None:
        self.record["status"] = status
        pairs = [(n.encode("latin-1"), v.encode("latin-1")) for n, v in {**headers, **self.headers}.items()]
        await self._send({"type": "http.response.start", "status": status, "headers": pairs})

    async def write(self, data: bytes, more: bool = True) -> None:
        self._written = time.monotonic()
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def answer(self, value: Any, status: int = 200) -> None:
        """An answer in JSON."""
        data = encoded(value).encode()
        await self.start(status, {"content-type": "application/json", "content-length": str(len(data))})
        await self.write(data, more=False)

    async def text(self, text: str, kind: str, status: int = 200, headers: Mapping[str, str] | None = None) -> None:
        data = text.encode()
        await self.start(status, {"content-type": kind, "content-length": str(len(data)), **(headers or {})})
        await self.write(data, more=False)

    @contextlib.asynccontextmanager
    async def events(self) -> AsyncIterator[Callable[[Sequence[Any]], Awaitable[None]]]:
        """A stream of server-sent events, with a comment whenever it is silent for long; then `[DONE]`.

        The context is a function that sends events; an error inside becomes the last one.
        """
        headers = {"content-type": "text/event-stream; charset=utf-8", "cache-control": "no-cache"}
        await self.start(200, headers | {"x-accel-buffering": "no"})
        pings = asyncio.ensure_future(self._ping())
        self._unsent: list[asyncio.Future[None]] = []

        async def send(events: Sequence[Any]) -> None:
            await self.write(b"".join(map(event, events)))

        try:
            try:
                yield send
            finally:
                pings.cancel()
                await asyncio.gather(*self._unsent)
            await self.write(b"data: [DONE]\n\n", more=False)
        except (ApiError, RlxError) as error:  # the status is sent already: an event is all that is left
            answer = error if isinstance(error, ApiError) else of_rlx(error)
            self.record["error"] = answer.code or answer.status
            await self.write(event(answer.body()), more=False)

    def send_now(self, events: Sequence[Any]) -> None:
        """Send events of a stream without awaiting; the connection must not be paused."""
        self._written = time.monotonic()
        data = b"".join(map(event, events))
        if self.connection is not None:
            self.connection.write_part(data)
        else:  # another ASGI server, such as Ray's: parts are sent in order by tasks
            self._unsent.append(asyncio.ensure_future(self._send_after(tuple(self._unsent[-1:]), data)))

    async def _send_after(self, before: Sequence[asyncio.Future[None]], data: bytes) -> None:
        await asyncio.gather(*before)
        await self.write(data)

    @property
    def connection(self) -> Connection | None:
        connection: Connection | None = self.scope.get("state", {}).get(CONNECTION)
        return connection

    async def _ping(self) -> None:
        """Send a comment whenever nothing was sent for long. A task per stream: a timeout per event costs more."""
        while True:
            silent = time.monotonic() - self._written
            if silent >= PING_S:
                await self.write(b": ping\n\n")
            else:
                await asyncio.sleep(PING_S - silent)

    async def until_disconnect(self, work: Coroutine[Any, Any, Result]) -> Result:
        """Await work; raises Disconnected, with the work cancelled, as soon as the client leaves."""
        task, has_left = asyncio.ensure_future(work), False

        def leave() -> None:
            nonlocal has_left
            has_left = True
            task.cancel()

        with self.watching(leave):
            try:
                return await task
            except asyncio.CancelledError:
                if has_left:
                    raise Disconnected from None
                raise

    @contextlib.contextmanager
    def watching(self, leave: Callable[[], None]) -> Iterator[None]:
        """Calls `leave` if the client leaves meanwhile."""
        connection = self.connection
        if connection is not None:
            with connection.watched(leave):
                yield
        else:  # another ASGI server says so where a request is read
            watch = asyncio.ensure_future(self._disconnect())
            watch.add_done_callback(lambda watch: None if watch.cancelled() else leave())
            try:
                yield
            finally:
                watch.cancel()

    async def _disconnect(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass


def event(value: Any) -> bytes:
    """A server-sent event with JSON data."""
    return f"data: {encoded(value)}\n\n".encode()

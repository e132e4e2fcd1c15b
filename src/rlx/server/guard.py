"""What every request passes: ids, the Host and Origin checks, keys, limits, errors as JSON, the access log.

Everything is refused unless it is allowed: a route is public only if it is listed here.
"""

from __future__ import annotations

import asyncio
import json
import logging
import re
import secrets
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any

from rlx.errors import RlxError
from rlx.server.api_errors import ApiError, of_rlx, stopping
from rlx.server.engine_thread import not_private
from rlx.server.exchange import Disconnected, Exchange, Message, Receive, Scope, Send
from rlx.server.metrics import Metrics
from rlx.server.settings import MAX_BODY, ServerSettings

LOG = logging.getLogger("rlx.server")
PUBLIC = frozenset({"/", "/health", "/ready"})
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
App = Callable[[Scope, Receive, Send], Awaitable[None]]
_CORS = {
    "access-control-allow-methods": "GET, POST", "access-control-max-age": "600",
    "access-control-allow-headers": "authorization, *",  # clients send headers of their own; * leaves out this one
}  # fmt: skip


class Guard:
    """ASGI middleware around all routes."""

    def __init__(self, app: App, settings: ServerSettings, metrics: Metrics) -> None:
        self._app, self._settings, self._metrics = app, settings, metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
            return
        headers: dict[str, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.decode("latin-1").lower(), []).append(value.decode("latin-1"))
        wanted = headers.get("x-request-id", [""])[0]
        id_ = wanted if _ID.fullmatch(wanted) else secrets.token_hex(16)
        record: dict[str, Any] = {"id": id_, "method": scope["method"], "path": scope["path"], "status": 0}
        client = scope.get("client")
        scope.update(
            {"rlx.id": id_, "rlx.record": record, "rlx.namespace": "", "rlx.client": client[0] if client else ""}
        )
        began, started = time.perf_counter(), False
        origin = headers.get("origin", [""])[0]
        extra = {"x-request-id": id_, "x-content-type-options": "nosniff"}
        if origin in self._settings.origins:
            extra |= {"access-control-allow-origin": origin, "vary": "origin"}
            extra["access-control-expose-headers"] = "x-request-id, x-rlx-ignored, retry-after"

        async def reply(message: Message) -> None:
            nonlocal started
            if message["type"] == "http.response.start":
                started = True
                message["headers"] += [(n.encode(), v.encode("latin-1")) for n, v in extra.items()]
            await send(message)

        exchange = Exchange(scope, receive, reply)
        try:
            self._check(scope, headers)
            if scope["method"] == "OPTIONS":
                exchange.headers = _CORS
                await exchange.text("", "text/plain", 204)
            else:
                await self._app(scope, receive, reply)
        except Disconnected:
            record["status"] = 499  # as nginx calls it
        except asyncio.CancelledError:  # by uvicorn, if a stop takes too long
            record["error"] = "stopping"
            if not started:
                answer = stopping()
                exchange.headers = answer.headers
                await exchange.answer(answer.body(), answer.status)
        except Exception as error:
            answer = self._error(error, id_)
            if not started:
                exchange.headers = answer.headers
                if error.__class__ is ApiError and scope["method"] == "HEAD":
                    await exchange.text("", "text/plain", answer.status)
                else:
                    await exchange.answer(answer.body(), answer.status)
        finally:
            self._finish(record, scope, time.perf_counter() - began)

    def _check(self, scope: Scope, headers: dict[str, list[str]]) -> None:
        """Raise ApiError unless the request may go on; names its client in the scope."""
        settings = self._settings
        hosts = headers.get("host", [])
        if len(hosts) != 1 or not settings.allows_host(hosts[0]):
            self._metrics.rejected.add(reason="host")
            raise ApiError(403, "the Host header does not name this server (--host-name NAME adds one)", code="host")
        origins = headers.get("origin", [])
        if len(origins) > 1 or any(not settings.allows_origin(origin, hosts[0]) for origin in origins):
            self._metrics.rejected.add(reason="origin")
            raise ApiError(
                403, "pages of this origin may not call the server (--cors ORIGIN allows one)", code="origin"
            )
        method = scope["method"]
        if method == "OPTIONS":
            return
        if settings.keys and not (scope["path"] in PUBLIC and method in ("GET", "HEAD")):
            owner = self._owner(headers)
            if owner is None:
                self._metrics.rejected.add(reason="key")
                raise ApiError(401, "no valid API key", code="invalid_api_key", headers={"www-authenticate": "Bearer"})
            scope["rlx.client"] = scope["rlx.namespace"] = owner
        if method == "POST":
            self._check_body(headers)

    def _owner(self, headers: dict[str, list[str]]) -> str | None:
        given_keys = [v[7:].strip() for v in headers.get("authorization", []) if v[:7].lower() == "bearer "]
        given_keys += headers.get("x-api-key", [])
        return self._settings.keys.match(given_keys[0]) if len(given_keys) == 1 else None

    def _check_body(self, headers: dict[str, list[str]]) -> None:
        kinds = headers.get("content-type", [])
        if len(kinds) != 1 or kinds[0].split(";")[0].strip().lower() != "application/json":
            raise ApiError(415, "the body must be application/json", code="content_type")
        if [name.lower() for name in headers.get("content-encoding", ["identity"])] != ["identity"]:
            raise ApiError(415, "compressed bodies are not read", code="content_encoding")
        length = headers.get("content-length", ["0"])[0]
        if not (length.isascii() and length.isdigit()) or int(length) > MAX_BODY:
            raise ApiError(413, f"the body is larger than {MAX_BODY >> 20} MiB", code="body_too_large")

    def _error(self, error: Exception, id_: str) -> ApiError:
        match error:
            case ApiError():
                answer = error
            case RlxError():
                answer = of_rlx(error)
            case _:
                answer = ApiError(500, "internal error")
        if answer.status == 429:
            self._metrics.rejected.add(reason="overload")
        if answer.status >= 500:
            answer = ApiError(
                answer.status, f"{answer.message}, request {id_}", code=answer.code, headers=answer.headers
            )
            if answer.status == 500:
                LOG.error("request %s: %s", id_, type(error).__name__, exc_info=not_private(error))
        return answer

    def _finish(self, record: dict[str, Any], scope: Scope, seconds: float) -> None:
        endpoint = scope.get("rlx.endpoint", "other")  # of the route: paths of strangers are not labels
        finish = str(record.get("finish", ""))
        self._metrics.requests.add(endpoint=endpoint, status=str(record["status"]), finish=finish)
        if endpoint.startswith("/v1/"):
            self._metrics.duration.observe(seconds)
        if self._settings.log_requests:
            line = {"time": round(time.time(), 3), **record, "seconds": round(seconds, 4)}
            print(json.dumps(line), file=sys.stderr, flush=True)

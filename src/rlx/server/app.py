"""The ASGI application: routes, and the guard around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from starlette.exceptions import HTTPException
from starlette.routing import Route, Router

from rlx.server import operations, page, tokens
from rlx.server.api_errors import ApiError
from rlx.server.chat_completions import chat_completions, input_tokens
from rlx.server.completions import completions
from rlx.server.embeddings import embeddings
from rlx.server.exchange import Exchange, Receive, Scope, Send
from rlx.server.guard import Guard
from rlx.server.state import State

Endpoint = Callable[[Exchange, State], Awaitable[None]]
# Paths under /v1 also answer without it, for clients whose base URL ends at the port.
ROUTES: list[tuple[str, str, Endpoint]] = [
    ("GET", "/", page.page),
    ("GET", "/health", operations.health),
    ("GET", "/ready", operations.ready),
    ("GET", "/metrics", operations.metrics),
    ("GET", "/v1/models", operations.models),
    ("GET", "/v1/models/{name:path}", operations.model),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/chat/completions/input_tokens", input_tokens),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/apply-template", tokens.apply_template),
]


class _Handler:
    """An endpoint as an ASGI application."""

    def __init__(self, endpoint: Endpoint, path: str, state: State) -> None:
        self._endpoint, self._path, self._state = endpoint, path, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["rlx.endpoint"] = self._path
        await self._endpoint(Exchange(scope, receive, send), self._state)


async def _unknown(scope: Scope, receive: Receive, send: Send) -> None:
    raise ApiError(404, "there is no such path", code="unknown_path")


def application(state: State) -> Guard:
    """The application for a server's state."""
    routes = []
    for method, path, endpoint in ROUTES:
        handler = _Handler(endpoint, path, state)
        routes += [Route(form, handler, methods=[method]) for form in {path, path.removeprefix("/v1")}]
    router = Router(routes, redirect_slashes=False, default=_unknown)

    async def routed(scope: Scope, receive: Receive, send: Send) -> None:
        scope["app"] = state  # so that the router raises what it refuses, and the guard answers in JSON
        try:
            await router(scope, receive, send)
        except HTTPException as error:
            message = "the path takes another method" if error.status_code == 405 else "refused"
            raise ApiError(error.status_code, message, headers=error.headers) from error

    return Guard(routed, state.settings, state.metrics)

"""The ASGI application: routes, and the guard around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

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
    ("GET", "/v1/models/{name}", operations.model),
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/chat/completions/input_tokens", input_tokens),
    ("POST", "/v1/completions", completions),
    ("POST", "/v1/embeddings", embeddings),
    ("POST", "/tokenize", tokens.tokenize),
    ("POST", "/detokenize", tokens.detokenize),
    ("POST", "/apply-template", tokens.apply_template),
]


class Routes:
    """Finds the endpoint of a path: equal to one that is listed, or with a name at its end."""

    def __init__(self, state: State) -> None:
        self._state = state
        self._exact: dict[str, tuple[str, str, Endpoint]] = {}
        self._named: list[tuple[str, tuple[str, str, Endpoint]]] = []  # with what comes before the name
        for method, path, endpoint in ROUTES:
            for form in {path, path.removeprefix("/v1")}:
                before, brace, _ = form.partition("{")
                if brace:
                    self._named.append((before, (method, path, endpoint)))
                else:
                    self._exact[form] = method, path, endpoint

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asked = scope["path"]
        route, name = self._exact.get(asked), ""
        for before, named in self._named if route is None else ():
            if asked.startswith(before):
                route, name = named, asked.removeprefix(before)
        if route is None:
            raise ApiError(404, "there is no such path", code="unknown_path")
        method, path, endpoint = route
        methods = ("GET", "HEAD") if method == "GET" else (method,)
        if scope["method"] not in methods:
            raise ApiError(405, "the path takes another method", headers={"allow": ", ".join(methods)})
        scope["rlx.endpoint"], scope["rlx.name"] = path, name
        await endpoint(Exchange(scope, receive, send), self._state)


def application(state: State) -> Guard:
    """The application for a server's state."""
    return Guard(Routes(state), state.settings, state.metrics)

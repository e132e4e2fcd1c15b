"""`GET /health`, `/ready`, `/metrics` and `/v1/models`."""

from __future__ import annotations

from typing import Any

from rlx.engine.embedding_model import EmbeddingModel
from rlx.server.api_errors import ApiError
from rlx.server.engine_thread import Served
from rlx.server.exchange import Exchange
from rlx.server.metrics import CONTENT_TYPE
from rlx.server.state import State


async def health(exchange: Exchange, state: State) -> None:
    """Whether the process answers, and has loaded its models."""
    loading = not state.engine.loaded.is_set()
    await exchange.answer({"status": "loading" if loading else "ok"}, 503 if loading else 200)


async def ready(exchange: Exchange, state: State) -> None:
    """Whether requests are taken: loaded, not stopping, and no step of the engine is stuck."""
    is_ready = state.engine.is_ready and not state.stopping
    await exchange.answer({"status": "ready" if is_ready else "not ready"}, 200 if is_ready else 503)


async def metrics(exchange: Exchange, state: State) -> None:
    served = state.engine.served
    models = {name: one for name, one in served.items() if one.scheduler is not None}
    statistics = {name: one.scheduler.statistics() for name, one in models.items() if one.scheduler is not None}
    times = {name: one.language.grammar_times for name, one in models.items()}
    await exchange.text(state.metrics.text(statistics, times), CONTENT_TYPE)


async def models(exchange: Exchange, state: State) -> None:
    state.check_ready()
    listed = [described(served) for served in state.engine.served.values()]
    for alias, name in state.settings.aliases.items():
        if name in state.engine.served:
            listed.append(described(state.engine.served[name]) | {"id": alias})
    await exchange.answer({"object": "list", "data": listed})


async def model(exchange: Exchange, state: State) -> None:
    state.check_ready()
    name = exchange.scope["rlx.name"]
    if len(name) > 1024:
        raise ApiError(404, "model: the name is too long", param="model", code="model_not_found")
    await exchange.answer(described(state.named(name)) | {"id": name})


def described(served: Served) -> dict[str, Any]:
    """A model in OpenAI's form, with what clients need to know of it."""
    kind = "embedding" if isinstance(served.model, EmbeddingModel) else "chat" if served.language.template else "text"
    return {
        "id": served.name, "object": "model", "created": served.created, "owned_by": "rlx",
        "max_model_len": served.model.context, "kind": kind,
    }  # fmt: skip

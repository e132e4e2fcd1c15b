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
    await exchange.text(state.metrics.text(lines=_engine_lines(state)), CONTENT_TYPE)


def _engine_lines(state: State) -> list[str]:
    """Metrics of the schedulers, with the model as their label."""
    gauges: dict[str, list[str]] = {"rlx_requests_running": [], "rlx_requests_waiting": []}
    for served in state.engine.served.values():
        label = f'{{model="{served.name}"}}'
        if served.scheduler is not None:
            known = served.scheduler.statistics()
            gauges["rlx_requests_running"].append(f"rlx_requests_running{label} {known.running}")
            gauges["rlx_requests_waiting"].append(f"rlx_requests_waiting{label} {known.waiting}")
        elif served.embeddings is not None:
            gauges["rlx_requests_waiting"].append(f"rlx_requests_waiting{label} {served.embeddings.waiting}")
    lines = []
    for name, values in gauges.items():
        lines += [f"# TYPE {name} gauge", *values]
    return lines


async def models(exchange: Exchange, state: State) -> None:
    state.check_ready()
    listed = [described(served) for served in state.engine.served.values()]
    for alias, name in state.settings.aliases.items():
        if name in state.engine.served:
            listed.append(described(state.engine.served[name]) | {"id": alias})
    await exchange.answer({"object": "list", "data": listed})


async def model(exchange: Exchange, state: State) -> None:
    state.check_ready()
    name = exchange.scope["path_params"]["name"]
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

"""What all endpoints share: the engine, the settings, the metrics, and whether the server is stopping."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import field
from itertools import islice

from rlx.errors import nearest
from rlx.fast_dataclass import dataclass
from rlx.server.api_errors import ApiError, invalid, stopping
from rlx.server.engine_thread import EngineThread, Served
from rlx.server.exchange import Exchange
from rlx.server.fields import Fields
from rlx.server.metrics import Metrics
from rlx.server.settings import ServerSettings


@dataclass
class State:
    engine: EngineThread
    settings: ServerSettings
    metrics: Metrics = field(default_factory=Metrics)
    stopping: bool = False
    active: int = 0  # requests that run

    def check_ready(self) -> None:
        if self.stopping:
            raise stopping()
        if not self.engine.loaded.is_set():
            raise ApiError(503, "the model is loading", code="loading", headers={"retry-after": "1"})

    def find(self, fields: Fields) -> Served:
        """The model that a request names. Without a name it is the only one."""
        self.check_ready()
        name = fields.text("model", limit=1024)
        served = self.engine.served
        if name is None or name == "":
            if len(served) == 1:
                return next(iter(served.values()))
            raise invalid("model: which one? Served are " + ", ".join(served), "model")
        return self.named(name)

    def check_room(self, served: Served) -> None:
        """Refuse a request at once if too many wait: reading it would take longer than saying so."""
        if self.engine.is_full(served):
            raise ApiError(429, "too many requests wait already", code="overloaded", headers={"retry-after": "1"})

    def named(self, name: str) -> Served:
        served = self.engine.served
        model = served.get(self.settings.aliases.get(name, name))
        if model is None:
            names = [*served, *self.settings.aliases]
            close = nearest(name[:200], names) or "served are " + ", ".join(names)
            raise ApiError(404, f"model: there is no {name[:80]!r}; {close}", param="model", code="model_not_found")
        return model

    def check_unread(self, fields: Fields, exchange: Exchange) -> None:
        """Say which fields mean nothing here: in a header, or as an error of a strict server."""
        names = sorted(name[:80] for name in islice(fields.unread(), 16))
        if names and self.settings.strict:
            raise invalid("unknown fields: " + ", ".join(names), names[0], "unknown_field")
        safe = [name for name in names if name.isascii() and name.isprintable()]
        if names:
            exchange.headers["x-rlx-ignored"] = ", ".join(safe) or str(len(names))

    @contextmanager
    def running(self, exchange: Exchange) -> Iterator[None]:
        self.active += 1
        try:
            yield
        finally:
            self.active -= 1

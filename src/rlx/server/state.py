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


class Reservation:
    """Room for one request in the queue of a model, until it is queued or refused."""

    def __init__(self, served: Served) -> None:
        self._served: Served | None = served
        served.reserved += 1

    def release(self) -> None:
        if self._served is not None:
            self._served.reserved -= 1
            self._served = None


def _full() -> ApiError:
    return ApiError(429, "too many requests wait already", code="overloaded", headers={"retry-after": "1"})


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

    def check_room(self) -> None:
        """Refuse a request before its body is parsed if no model takes more."""
        models = [served for served in self.engine.served.values() if served.scheduler is not None]
        if models and not any(served.has_room for served in models):
            raise _full()

    @contextmanager
    def reserve(self, served: Served) -> Iterator[Reservation]:
        """Reserve room in the queue while a request is read, or refuse it at once.

        Of many that arrive together, those that will not be queued are not read first.
        """
        if not served.has_room:
            raise _full()
        reservation = Reservation(served)
        try:
            yield reservation
        finally:
            reservation.release()

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

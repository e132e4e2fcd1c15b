"""A model on Ray Serve: each replica has the scheduler of `rlx serve` and answers the same paths."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Mapping
from typing import Any

from rlx.batch.on_ray import import_ray
from rlx.engine.load import load
from rlx.errors import CapabilityError, RlxError
from rlx.ray.cluster import assigned

ONGOING = 64  # requests that a replica takes: more than run at once, so that the next ones are prefilled meanwhile


class Replica:
    """A model with its scheduler, in an actor of Ray Serve."""

    def __init__(self, name: str, model: str, settings: Mapping[str, Any], server: Mapping[str, Any]) -> None:
        from rlx.server.app import application
        from rlx.server.serve import new_state
        from rlx.server.settings import ServerSettings

        loader = functools.partial(load, model, **{**assigned(), **settings})
        self._state = new_state({name: loader}, ServerSettings(**server))
        self._state.engine.start(asyncio.get_running_loop())
        current.application = application(self._state)

    async def load(self) -> None:
        """Wait for the model; raises what is wrong with it."""
        await asyncio.to_thread(self._state.engine.loaded.wait)
        if self._state.engine.failure is not None:
            raise self._state.engine.failure

    def check_health(self) -> None:
        """Called by Serve now and then: a replica whose engine is stuck or dead is replaced."""
        if not self._state.engine.is_ready:
            raise RlxError("serve: the engine does not answer")


class Forward:
    """The ASGI application of the process, which is made by its replica."""

    application: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            for word in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{word}.complete"})
            return
        await self.application(scope, receive, send)

    def __reduce__(self) -> str:
        return "current"  # that of the process in which it is unpickled


current = Forward()


def deployment(
    model: str, *, name: str | None = None, num_cpus: float = 1, num_gpus: float = 0, min_replicas: int = 1,
    max_replicas: int = 1, target_ongoing_requests: float = 8, server: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None, **settings: Any,
) -> Any:  # fmt: skip
    """A Serve application: `serve.run(rlx.ray.deployment("smollm2-135m", num_cpus=4, max_replicas=8))`.

    Replicas are added while more than `target_ongoing_requests` per replica are open, up to `max_replicas`. Answers
    stream. `name` is the model's name in requests; `server` are settings of `rlx.server.settings.ServerSettings`, such
    as keys; `options` are further ones of `serve.deployment`, whose `autoscaling_config` adds to the above. Other
    keywords are settings of `rlx.load`.
    """
    import_ray()
    try:
        from ray import serve
    except ImportError as error:
        raise CapabilityError(f"serve: {error.name} is not installed", hint="pip install 'rlx[ray,serve]'") from error

    @serve.ingress(current)
    class Deployed(Replica):
        async def __init__(self, *arguments: Any) -> None:  # type: ignore[misc]  # Serve awaits it
            Replica.__init__(self, *arguments)
            await self.load()

    more = dict(options or {})
    scaling = {
        "min_replicas": min_replicas, "max_replicas": max_replicas, "target_ongoing_requests": target_ongoing_requests,
        **more.pop("autoscaling_config", {}),
    }  # fmt: skip
    chosen = {
        "name": "rlx", "autoscaling_config": scaling, "max_ongoing_requests": ONGOING, "health_check_period_s": 10,
        "ray_actor_options": {"num_cpus": num_cpus, "num_gpus": num_gpus}, "graceful_shutdown_timeout_s": 30,
        **more,
    }  # fmt: skip
    bound = serve.deployment(**chosen)(Deployed)
    return bound.bind(name or str(model).rpartition("/")[2], str(model), settings, dict(server or {}))

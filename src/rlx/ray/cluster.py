"""Clusters: connecting to one, and what an actor may use of its node."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from rlx.batch.on_ray import import_ray
from rlx.errors import RequestError


def connect(address: str = "local", **options: Any) -> Any:
    """Connect to a Ray cluster: an address, "auto" (the one of this machine), or "local": a new one.

    Whoever reaches a cluster can run code on it. A new one therefore asks for a token, and has no dashboard; an
    existing one decides for itself (`RAY_AUTH_MODE=token`). Returns the module `ray`; the options are those of
    `ray.init`.
    """
    if address == "local":
        was_imported = "ray" in sys.modules
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        options = {"include_dashboard": False} | options
    ray = import_ray()
    if address == "local" and was_imported:
        _read_mode_again()
    try:
        ray.init(address=address, **{"log_to_driver": False} | options)
    except ConnectionError as error:  # what Ray says is a page on its own settings
        where = "this machine" if address == "auto" else address
        raise RequestError(
            f"connect: no Ray cluster answers at {where}",
            hint='"local" (rlx batch --ray local) starts one; ray start --head --port 6379, or its address HOST:6379',
        ) from error
    return ray


def _read_mode_again() -> None:
    """Let Ray notice a RAY_AUTH_MODE that was set after it was imported: it reads the variable then only.

    Without this, the processes that it starts would ask for a token which the driver does not send.
    """
    wanted = os.environ["RAY_AUTH_MODE"].lower()
    raylet: Any = importlib.import_module("ray._raylet")

    def agrees() -> bool:
        return bool((raylet.get_authentication_mode() == raylet.AuthenticationMode.TOKEN) == (wanted == "token"))

    try:
        if not agrees():
            raylet.Config.initialize("")
        is_read = agrees()
    except AttributeError:  # these names are Ray's own, and may change
        is_read = False
    if not is_read:
        raise RequestError(
            f"connect: ray was imported before RAY_AUTH_MODE was set to {wanted!r}, and reads it only then",
            hint="set RAY_AUTH_MODE=token in the environment, or call rlx.ray.connect before `import ray`",
        )


def assigned() -> dict[str, Any]:
    """Settings of `rlx.load` for what Ray gave to this actor: its CPUs as threads, and a GPU if it has one.

    Outside of Ray there are none. Without `num_cpus`, an actor has no CPUs, and gets one thread.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    context = ray.get_runtime_context()
    if context.get_task_id() is None and context.get_actor_id() is None:  # a driver
        return {}
    resources = context.get_assigned_resources()
    settings: dict[str, Any] = {"threads": max(1, int(resources.get("CPU", 0)))}
    os.environ["RAYON_NUM_THREADS"] = str(settings["threads"])  # of the tokenizers, which would take all cores
    if resources.get("GPU"):
        settings["device"] = "cuda"  # the first of those that Ray lets the process see
    return settings

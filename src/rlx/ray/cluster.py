"""Clusters: connecting to one, and what an actor may use of its node."""

from __future__ import annotations

import os
import sys
from typing import Any

from rlx.batch.on_ray import import_ray


def connect(address: str = "local", **options: Any) -> Any:
    """Connect to a Ray cluster: an address, "auto" (the one of this machine), or "local": a new one.

    Whoever reaches a cluster can run code on it. A new one therefore asks for a token, and has no dashboard; an
    existing one decides for itself (`RAY_AUTH_MODE=token`). Returns the module `ray`; the options are those of
    `ray.init`.
    """
    if address == "local":
        os.environ.setdefault("RAY_AUTH_MODE", "token")  # before ray is imported
        options = {"include_dashboard": False} | options
    ray = import_ray()
    ray.init(address=address, **{"log_to_driver": False} | options)
    return ray


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

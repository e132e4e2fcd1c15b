"""Restores compiled graphs from model snapshots, with weights bound: nothing is built, planned or packed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlx.backends.base import Executable
from rlx.kv_layout import KvLayout
from rlx.profile import CompileProfile
from rlx.runtime import kv_spec, record_json, signature
from rlx.runtime.compiled import CompiledGraph, Parts, input_specs, lazy_plan
from rlx.runtime.session import Session
from rlx.runtime.signature import Signature
from rlx.runtime.weights import Recipe

if TYPE_CHECKING:
    from rlx.ir.graph import Graph


@functools.cache
def snapshot_records(device: str) -> Mapping[str, type]:
    """The record classes of snapshots on a device, by name."""
    from rlx.backends.base import backend

    own = {"Recipe": Recipe, "KvLayout": KvLayout}
    return record_json.records_of(*backend(device).image_modules(), signature, kv_spec) | own


def from_snapshot(
    graph_signature: Signature, image: Any, derived: Mapping[str, Recipe], weights: Mapping[str, Any], session: Session,
    profile: CompileProfile, source: Callable[[], tuple[Graph, Mapping[str, Any]]],
) -> CompiledGraph | None:  # fmt: skip
    """Restore a compiled graph; None if its machine code is gone. `source` rebuilds its graph and loads its params."""
    backend, target = session.device.backend, session.target
    plan = lazy_plan(lambda: source()[0], target, profile)  # references `source`, not the compiled graph: no cycle
    executable = backend.load(
        image, lambda: plan().main, target, threads=session.threads, inputs=input_specs(graph_signature)
    )
    if executable is None:
        return None
    executable.bind({name: session.weights.on_device(weight, name) for name, weight in weights.items()})

    @functools.cache
    def binder() -> Executable:
        return backend.compile(plan().bind, target, threads=session.threads, long_lived=True)

    parts = Parts(executable, lambda: source()[0], plan, derived, binder if derived else None)
    return CompiledGraph(
        graph_signature, parts, session.device, session.weights, profile, bound=True, sources=lambda: source()[1]
    )

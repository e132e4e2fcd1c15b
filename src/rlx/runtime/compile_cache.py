"""The compile cache: on a hit, no pass runs and no code generator is imported.

An entry holds the images of a graph's executables and the recipes of its derived weights. The plan, which only reports
need, is loaded or rebuilt on demand.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from rlx.backends import cache_folder
from rlx.backends.base import Backend, Executable
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph
from rlx.profile import CompileProfile
from rlx.runtime import program_cache, record_json
from rlx.runtime.compiled import Parts, input_specs, lazy_plan
from rlx.runtime.program_cache import Keys
from rlx.runtime.signature import Signature
from rlx.runtime.weights import Recipe
from rlx.target import Target

if TYPE_CHECKING:
    from rlx.runtime.session import Session

KIND = "compiled"  # of entries in the cache


@dataclass(frozen=True)
class Entry:
    """The stored part of a compiled graph."""

    main: Any  # image of the main program
    bind: Any | None  # image of the bind program, if weights are derived
    derived: Mapping[str, Recipe]


@functools.cache
def _classes(backend: Backend) -> Mapping[str, type]:
    return {**record_json.records_of(*backend.image_modules()), "Entry": Entry, "Recipe": Recipe}


def load(graph: Graph, keys: Keys, session: Session, target: Target, profile: CompileProfile) -> Parts | None:
    """Load the parts of an equal graph; None on a miss, or if some of its code is gone."""
    # A profile that shows passes needs them to run.
    data = None if keys.code is None or profile.shows_passes else cache_folder.current().read(KIND, keys.code)
    if data is None:
        return None
    backend, threads = session.device.backend, session.threads
    with contextlib.suppress(*program_cache.DAMAGED):  # a damaged entry is a miss
        entry = program_cache.unpack(data, _classes(backend), Entry)
        plan = lazy_plan(lambda: graph, target, profile)  # references the graph, not the compiled graph: no cycle
        specs = input_specs(Signature.of(graph))
        main = backend.load(entry.main, lambda: plan().main, target, threads=threads, inputs=specs)
        if main is None:
            return None
        binder: Callable[[], Executable] | None = None
        if entry.bind is not None:
            loaded = backend.load(entry.bind, lambda: plan().bind, target, threads=threads, long_lived=True)
            if loaded is None:
                return None
            binder = lambda: loaded
        return Parts(main, lambda: graph, plan, entry.derived, binder)
    return None


def store(parts: Parts, keys: Keys, backend: Backend) -> None:
    """Store the parts for `load`."""
    assert parts.plan is not None
    binder = None if parts.binder is None else parts.binder()
    main, bind = parts.executable.image(), None if binder is None else binder.image()
    if keys.code is None or main is None or (binder is not None and bind is None):
        return
    entry = Entry(main, bind, parts.derived)
    cache_folder.current().write(KIND, keys.code, program_cache.pack(entry, _classes(backend)))
    if parts.executable.needs_program or (binder is not None and binder.needs_program):
        from rlx.runtime.plan import store_plan

        assert keys.plan is not None
        store_plan(parts.plan(), keys.plan)

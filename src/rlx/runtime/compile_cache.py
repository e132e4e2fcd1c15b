"""The compile cache: graphs that were compiled before. No pass runs for them, and no generator is imported.

An entry holds the images of a graph's executables and the recipes of its derived weights. The plan, which only reports
need, is read or made again when somebody asks for it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rlx.backends import cache_folder
from rlx.backends.base import Backend, Executable
from rlx.ir.graph import Graph
from rlx.profile import CompileProfile
from rlx.runtime import program_cache, record_json
from rlx.runtime.compiled import Parts, input_specs, later_plan
from rlx.runtime.program_cache import Keys
from rlx.runtime.signature import Signature
from rlx.runtime.weights import Recipe
from rlx.target import Target

if TYPE_CHECKING:
    from rlx.runtime.session import Session

KIND = "compiled"  # of entries in the cache


@dataclass(frozen=True)
class Entry:
    """What is stored of a compiled graph."""

    main: Any  # image of the main program
    bind: Any | None  # and of the bind program, if weights are derived
    derived: Mapping[str, Recipe]


@functools.cache
def _classes(backend: Backend) -> Mapping[str, type]:
    return {**record_json.records_of(*backend.image_modules()), "Entry": Entry, "Recipe": Recipe}


def find(graph: Graph, keys: Keys, session: Session, target: Target, profile: CompileProfile) -> Parts | None:
    """An equal graph that was compiled before; None where there is none, or some of its code is lost."""
    # With a profile that shows passes, they have to run.
    data = None if keys.code is None or profile.shows_passes else cache_folder.current().read(KIND, keys.code)
    if data is None:
        return None
    backend, threads = session.device.backend, session.threads
    with contextlib.suppress(*program_cache.DAMAGED):  # written by something else
        entry = program_cache.unpacked(data, _classes(backend), Entry)
        plan = later_plan(lambda: graph, target, profile)  # not through the compiled graph: that would be a cycle
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


def keep(parts: Parts, keys: Keys, backend: Backend) -> None:
    """Store what `find` gives."""
    assert parts.plan is not None
    binder = None if parts.binder is None else parts.binder()
    main, bind = parts.executable.image(), None if binder is None else binder.image()
    if keys.code is None or main is None or (binder is not None and bind is None):
        return
    entry = Entry(main, bind, parts.derived)
    cache_folder.current().write(KIND, keys.code, program_cache.packed(entry, _classes(backend)))
    if parts.executable.needs_program or (binder is not None and binder.needs_program):
        from rlx.runtime.plan import keep_plan

        assert keys.plan is not None
        keep_plan(parts.plan(), keys.plan)

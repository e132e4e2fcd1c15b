"""Graphs of a model besides its main one: those that requests needed, by their settings, a few of each kind."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from rlx.fork_safe_locks import Lock

if TYPE_CHECKING:  # imported when a graph is built
    from rlx.engine.apply import Applied
    from rlx.engine.edits import EditedModel
    from rlx.engine.interventions import EditedGraph
    from rlx.flow.built import BuiltModel
    from rlx.functional.tracers import HeldArray
    from rlx.runtime.compiled import CompiledGraph

Key = TypeVar("Key")
Cached = TypeVar("Cached")
CAPTURES = 4  # cached graphs per kind: captures, edits, other parameters


class Recent(dict[Key, Cached]):
    """An LRU cache of graphs that requests needed, by their settings."""

    def __init__(self, lock: Lock) -> None:
        super().__init__()
        self._lock = lock  # the model's: its graphs share weights

    def get_or_make(self, key: Key, make: Callable[[], Cached]) -> Cached:
        with self._lock:
            value = self.pop(key, None)
            if value is None:
                value = make()
            self[key] = value
            while len(self) > CAPTURES:
                del self[next(iter(self))]
        return value


class GraphCaches:
    """The recent graphs of a model. A closed model has new, empty ones; calls in progress keep theirs."""

    def __init__(self, lock: Lock) -> None:
        self.captures: Recent[frozenset[str], tuple[BuiltModel, CompiledGraph]] = Recent(lock)
        self.edits: Recent[tuple[frozenset[str], tuple[str, ...]], EditedModel] = Recent(lock)
        self.applications: Recent[frozenset[tuple[str, str]], Applied] = Recent(lock)
        # without a KV cache, for traced functions
        self.traceable: Recent[frozenset[tuple[str, str]], BuiltModel] = Recent(lock)
        self.held_weights: dict[str, HeldArray] = {}  # that traced functions read
        # of decoders: graphs before edits by captured patterns, and graphs with edits of generation
        self.bases: Recent[frozenset[str], BuiltModel] = Recent(lock)
        self.interventions: Recent[tuple[frozenset[str], tuple[tuple[str, str], ...]], EditedGraph] = Recent(lock)

    @property
    def compiled(self) -> list[CompiledGraph]:
        """All compiled graphs."""
        graphs = [compiled for _, compiled in self.captures.values()]
        graphs += [graph for edited in self.edits.values() for graph in edited.graphs]
        graphs += [applied.compiled for applied in self.applications.values()]
        return graphs + [edited.compiled for edited in self.interventions.values()]

"""The weight store: what bind programs made of weights, shared by all compiled graphs that need the same.

A derived weight (packed matrices, joined rows, widened tables) is found again by the graph that computes it and by the
arrays that went into it: the very objects, and only those that nobody can write to, such as maps of files. The store
holds nothing alive: a derived weight lives while a graph uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Allocator
from rlx.fork_safe_locks import Lock

if TYPE_CHECKING:
    from rlx.ir.graph import Graph, Node

Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Recipe:
    """How a derived weight comes about: a digest of the graph that computes it, and the params that it reads."""

    digest: str
    params: tuple[str, ...]

    def sources(self, params: Mapping[str, Array]) -> list[Array]:
        return [params[name] for name in self.params]


def recipes(bind: Graph) -> list[Recipe]:
    """One for each output of a bind graph."""
    from rlx.ir.rewrite import live_copy  # where nothing is compiled, nothing is rewritten

    parts = [live_copy(bind, [output], keep=()) for output in bind.outputs]
    return [Recipe(part.fingerprint(), tuple(_params(part.nodes))) for part in parts]


def _params(nodes: Sequence[Node]) -> list[str]:
    return [n.attrs["name"] for n in nodes if n.op == "param"]


@dataclass(frozen=True)
class _Entry:
    """A derived weight, and the arrays that it was made of: an equal address or id may be another array's by now."""

    derived: weakref.ref[Array]
    sources: tuple[weakref.ref[Array], ...]

    def match(self, sources: Sequence[Array]) -> Array | None:
        same = all(ref() is array for ref, array in zip(self.sources, sources, strict=True))
        return self.derived() if same else None


class WeightStore:
    """Derived weights of some graphs, and those of their weights that had to be uploaded, in memory of a device."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._lock = Lock()
        self._entries: dict[Key, _Entry] = {}

    def on_device(self, weight: Any) -> Any:
        """The weight in memory of the device: uploaded once for all graphs, if nobody can change it."""
        if self._allocator.owns(weight):
            return weight
        recipe, params = Recipe("upload", ("weight",)), {"weight": weight}
        with self._lock:
            found = self._known(recipe, params)
            if found is None:
                found = self._allocator.upload(weight)
                self._add(recipe, params, found)
            return found

    def find(self, recipes: Sequence[Recipe], params: Mapping[str, Array]) -> list[Array] | None:
        """All of them, or nothing where one is missing: a bind program makes them together."""
        with self._lock:
            found = [self._known(recipe, params) for recipe in recipes]
        present = [a for a in found if a is not None]
        return present if len(present) == len(found) else None

    def share(self, recipes: Sequence[Recipe], params: Mapping[str, Array], made: Sequence[Array]) -> list[Array]:
        """What was made, each replaced by the one that is there already."""
        with self._lock:
            self._entries = {k: e for k, e in self._entries.items() if e.derived() is not None}
            known = [self._known(recipe, params) for recipe in recipes]
            new = [array for array, there in zip(made, known, strict=True) if there is None]
            if len(new) < len(made):  # they lie in one piece with those that are there already, and would keep it alive
                new = self._copied(new)
            rest = iter(new)
            shared = [next(rest) if there is None else there for there in known]
            for recipe, array, there in zip(recipes, shared, known, strict=True):
                if there is None:
                    self._add(recipe, params, array)
            return shared

    def adopt(self, recipe: Recipe, params: Mapping[str, Array], derived: Array) -> None:
        """Know a derived weight that was made before, by another process."""
        with self._lock:
            if self._known(recipe, params) is None:
                self._add(recipe, params, derived)

    def _copied(self, buffers: Sequence[Any]) -> list[Any]:
        copies = self._allocator.long_lived([(buffer.shape, buffer.dtype) for buffer in buffers])
        for copy, buffer in zip(copies, buffers, strict=True):
            self._allocator.copy(buffer, copy)
        return copies

    def _add(self, recipe: Recipe, params: Mapping[str, Any], derived: Any) -> None:
        sources = recipe.sources(params)
        if _fixed(sources):
            self._entries[_key(recipe, sources)] = _Entry(weakref.ref(derived), tuple(map(weakref.ref, sources)))

    def _known(self, recipe: Recipe, params: Mapping[str, Any]) -> Any | None:
        sources = recipe.sources(params)
        entry = self._entries.get(_key(recipe, sources)) if _fixed(sources) else None
        return None if entry is None else entry.match(sources)


def _key(recipe: Recipe, sources: Sequence[Array]) -> Key:
    return recipe.digest, tuple(map(id, sources))


def _fixed(sources: Sequence[Any]) -> bool:
    """Whether nobody can have changed them since: arrays that are read-only, such as maps of files."""
    return all(isinstance(array, np.ndarray) and not array.flags.writeable for array in sources)

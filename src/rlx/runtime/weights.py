"""The weight store: outputs of bind programs, shared by all compiled graphs that need the same ones.

A derived weight (packed matrices, concatenated rows, widened tables) is identified by the graph that computes it and by
the source arrays: the same objects, and only read-only ones such as mapped files. The store holds weak references: a
derived weight lives as long as a graph uses it.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Allocator
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import Lock

if TYPE_CHECKING:
    from rlx.ir.graph import Graph, Node

Key = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Recipe:
    """How a derived weight is computed: the digest of its graph, and the params that it reads."""

    digest: str
    params: tuple[str, ...]

    def sources(self, params: Mapping[str, Array]) -> list[Array]:
        return [params[name] for name in self.params]


def recipes(bind: Graph) -> list[Recipe]:
    """The recipe of each output of a bind graph."""
    from rlx.ir.rewrite import live_copy  # a cache hit does not need it

    parts = [live_copy(bind, [output], keep=()) for output in bind.outputs]
    return [Recipe(part.fingerprint(), tuple(_params(part.nodes))) for part in parts]


def _params(nodes: Sequence[Node]) -> list[str]:
    return [n.attrs["name"] for n in nodes if n.op == "param"]


@dataclass(frozen=True)
class _Entry:
    """Weak references to a derived weight and its sources, whose ids may have been reused since."""

    derived: weakref.ref[Array]
    sources: tuple[weakref.ref[Array], ...]

    def match(self, sources: Sequence[Array]) -> Array | None:
        same = all(ref() is array for ref, array in zip(self.sources, sources, strict=True))
        return self.derived() if same else None


class WeightStore:
    """Derived weights and uploaded weights of several graphs, in device memory."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self._lock = Lock()
        self._entries: dict[Key, _Entry] = {}

    def on_device(self, weight: Any, name: str) -> Any:
        """The weight in device memory; a read-only one is uploaded once for all graphs. `name` is for errors."""
        if self._allocator.owns(weight):
            return weight
        recipe, params = Recipe("upload", ("weight",)), {"weight": weight}
        with self._lock:
            buffer = self._known(recipe, params)
            if buffer is None:
                buffer = self._allocator.upload(weight, f"weight {name!r}")
                self._add(recipe, params, buffer)
            return buffer

    def find(self, recipes: Sequence[Recipe], params: Mapping[str, Array]) -> list[Array] | None:
        """The derived weights, or None if one is missing: a bind program computes all of them together."""
        with self._lock:
            known = [self._known(recipe, params) for recipe in recipes]
        present = [a for a in known if a is not None]
        return present if len(present) == len(known) else None

    def share(self, recipes: Sequence[Recipe], params: Mapping[str, Array], derived: Sequence[Array]) -> list[Array]:
        """Register new derived weights; returns them, with existing ones in place of duplicates."""
        with self._lock:
            self._entries = {k: e for k, e in self._entries.items() if e.derived() is not None}
            known = [self._known(recipe, params) for recipe in recipes]
            new = [array for array, existing in zip(derived, known, strict=True) if existing is None]
            if len(new) < len(derived):  # copied: the duplicates are in the same allocation
                new = list(self._copy(new))
            rest = iter(new)
            shared = [next(rest) if existing is None else existing for existing in known]
            for recipe, array, existing in zip(recipes, shared, known, strict=True):
                if existing is None:
                    self._add(recipe, params, array)
            return shared

    def adopt(self, recipe: Recipe, params: Mapping[str, Array], derived: Array) -> None:
        """Register a derived weight that came from a snapshot."""
        with self._lock:
            if self._known(recipe, params) is None:
                self._add(recipe, params, derived)

    def _copy(self, buffers: Sequence[Any]) -> Sequence[Any]:
        copies = self._allocator.long_lived([(buffer.shape, buffer.dtype) for buffer in buffers])
        for copy, buffer in zip(copies, buffers, strict=True):
            self._allocator.copy(buffer, copy)
        return copies

    def _add(self, recipe: Recipe, params: Mapping[str, Any], derived: Any) -> None:
        sources = recipe.sources(params)
        if _read_only(sources):
            self._entries[_key(recipe, sources)] = _Entry(weakref.ref(derived), tuple(map(weakref.ref, sources)))

    def _known(self, recipe: Recipe, params: Mapping[str, Any]) -> Any | None:
        sources = recipe.sources(params)
        entry = self._entries.get(_key(recipe, sources)) if _read_only(sources) else None
        return None if entry is None else entry.match(sources)


def _key(recipe: Recipe, sources: Sequence[Array]) -> Key:
    return recipe.digest, tuple(map(id, sources))


def _read_only(sources: Sequence[Any]) -> bool:
    """Whether all arrays are read-only, such as mapped files."""
    return all(isinstance(array, np.ndarray) and not array.flags.writeable for array in sources)

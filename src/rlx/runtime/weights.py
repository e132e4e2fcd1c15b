"""The weight store: what bind programs made of weights, shared by all compiled graphs that need the same.

A derived weight (packed panels, joined rows, widened tables) is found again by the graph that computes it and by the
memory of the weights that went into it. The store holds nothing alive: a derived weight lives while a graph uses it.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.ir.graph import Graph, Node
from rlx.ir.rewrite import Rewriter

Array = np.ndarray[Any, Any]
Key = tuple[str, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Recipe:
    """How a derived weight comes about: a digest of the graph that computes it, and the params that it reads."""

    digest: str
    params: tuple[str, ...]

    def key(self, params: Mapping[str, Array]) -> Key:
        return self.digest, tuple((params[n].ctypes.data, params[n].nbytes) for n in self.params)


def recipes(bind: Graph) -> list[Recipe]:
    """One for each output of a bind graph."""
    found = []
    for output in bind.outputs:
        needed = bind.reachable([output])
        part = Rewriter(bind, "recipe")
        for node in (n for n in bind.nodes if n in needed):
            part.values.update(zip(node.results, part.copy(node), strict=True))
        part.graph.outputs = (part.values[output],)
        found.append(Recipe(part.graph.fingerprint(), tuple(_params(part.graph.nodes))))
    return found


def _params(nodes: Sequence[Node]) -> list[str]:
    return [n.attrs["name"] for n in nodes if n.op == "param"]


class WeightStore:
    """Derived weights by key."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arrays: weakref.WeakValueDictionary[Key, Array] = weakref.WeakValueDictionary()

    def find(self, keys: Sequence[Key]) -> list[Array] | None:
        """All of them, or nothing where one is missing: a bind program makes them together."""
        with self._lock:
            found = [self._arrays.get(k) for k in keys]
        present = [a for a in found if a is not None]
        return present if len(present) == len(found) else None

    def share(self, keys: Sequence[Key], arrays: Sequence[Array]) -> list[Array]:
        """The arrays, each replaced by an equal one that is there already."""
        with self._lock:
            return [self._arrays.setdefault(k, a) for k, a in zip(keys, arrays, strict=True)]

"""Trees: nested dicts, lists, tuples, named tuples and dataclasses, with arrays as leaves.

`flatten` returns the leaves in order and a `Structure` that rebuilds the tree from leaves. None is a tree without
leaves.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.errors import GraphError
from rlx.types import TensorType

LEAF = "leaf"


@dataclass(frozen=True)
class Structure:
    """The structure of a tree: the kind, keys and children of each node."""

    kind: Any  # dict, list, tuple, a class, None, or LEAF
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()

    @property
    def leaves(self) -> int:
        return 1 if self.kind == LEAF else sum(c.leaves for c in self.children)

    def unflatten(self, leaves: Sequence[Any]) -> Any:
        """Build the tree with these leaves."""
        if len(leaves) != self.leaves:
            raise GraphError(f"tree: {len(leaves)} leaves for a structure of {self.leaves}")
        return self._build(iter(leaves))

    def _build(self, leaves: Iterator[Any]) -> Any:
        if self.kind == LEAF:
            return next(leaves)
        if self.kind is None:
            return None
        parts = [c._build(leaves) for c in self.children]
        if self.kind is dict:
            return dict(zip(self.keys, parts, strict=True))
        if self.kind in (list, tuple):
            return self.kind(parts)
        if dataclasses.is_dataclass(self.kind):
            instance: Any = object.__new__(self.kind)  # type: ignore[arg-type]
            for key, part in zip(self.keys, parts, strict=True):
                object.__setattr__(instance, key, part)
            return instance
        return self.kind(*parts)  # a named tuple

    def paths(self, start: str = "") -> list[str]:
        """Return a name for each leaf: `params.w`, `xs[1]`."""
        if self.kind == LEAF:
            return [start]
        named = self.kind is dict or (self.kind is not None and bool(self.keys))
        names: list[str] = []
        for i, child in enumerate(self.children):
            step = f"{'.' if start else ''}{self.keys[i]}" if named else f"[{i}]"
            names += child.paths(start + step)
        return names

    def __str__(self) -> str:
        match self.kind:
            case "leaf":
                return "array"
            case None:
                return "None"
        parts = [str(c) for c in self.children]
        if self.keys:
            parts = [f"{k}: {p}" for k, p in zip(self.keys, parts, strict=True)]
        name = self.kind.__name__
        return f"{name}({', '.join(parts)})"


def _node_parts(tree: Any) -> tuple[Any, tuple[Any, ...], list[Any]]:
    """Return kind, keys and children of a node."""
    if tree is None:
        return None, (), []
    if isinstance(tree, dict):
        keys = tuple(sorted(tree, key=lambda k: (type(k).__name__, k)))  # independent of insertion order
        return dict, keys, [tree[k] for k in keys]
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree), tuple(tree._fields), list(tree)
    if isinstance(tree, (list, tuple)):
        return type(tree), (), list(tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, TensorType)):
        keys = tuple(f.name for f in dataclasses.fields(tree))
        return type(tree), keys, [getattr(tree, k) for k in keys]
    return LEAF, (), []


def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree, in order, and its structure."""
    leaves: list[Any] = []

    def walk(node: Any) -> Structure:
        kind, keys, children = _node_parts(node)
        if kind == LEAF or (is_leaf is not None and is_leaf(node)):
            leaves.append(node)
            return Structure(LEAF)
        return Structure(kind, keys, tuple([walk(c) for c in children]))

    return leaves, walk(tree)


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    return flatten(tree)[0]


def structure(tree: Any) -> Structure:
    """Return the structure of a tree."""
    return flatten(tree)[1]


def map(function: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Apply a function to each leaf, together with the leaves of other trees of the same structure."""
    first, shape = flatten(tree)
    others = []
    for other in rest:
        other_leaves, other_shape = flatten(other)
        if other_shape != shape:
            raise GraphError(f"tree.map: structures differ, {shape} and {other_shape}")
        others.append(other_leaves)
    return shape.unflatten([function(*group) for group in zip(first, *others, strict=True)])


def broadcast_prefix(prefix: Any, tree: Any, where: str) -> list[Any]:
    """Return a value for each leaf of `tree` from a prefix tree, whose leaves apply to all leaves below them."""

    def walk(prefix_node: Any, node: Any) -> list[Any]:
        kind, keys, children = _node_parts(node)
        if kind == LEAF:
            return [prefix_node]
        if prefix_node is None or isinstance(prefix_node, (int, str)):
            return [prefix_node] * structure(node).leaves
        prefix_kind, prefix_keys, prefix_children = _node_parts(prefix_node)
        if prefix_keys != keys or len(prefix_children) != len(children) or prefix_kind == LEAF:
            raise GraphError(f"{where}: {prefix_node!r} does not fit {structure(node)}")
        values: list[Any] = []
        for a, b in zip(prefix_children, children, strict=True):
            values += walk(a, b)
        return values

    return walk(prefix, tree)


def __dir__() -> list[str]:
    return ["Structure", "flatten", "leaves", "map", "structure"]

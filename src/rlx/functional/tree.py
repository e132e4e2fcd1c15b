"""Trees: nested dicts, lists, tuples, named tuples, dataclasses and registered classes, with arrays as leaves.

`flatten` returns the leaves in order and a `Structure` that rebuilds the tree from leaves. None is a tree without
leaves. A field of a dataclass with `field(metadata={"static": True})` is part of the structure, not a leaf.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

from rlx.dtypes import DType
from rlx.errors import GraphError, nearest
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.functional.absent_keywords import without
from rlx.types import TensorType

LEAF = "leaf"
_Class = TypeVar("_Class", bound=type)


@dataclass(frozen=True)
class Structure:
    """The structure of a tree: the kind, keys, children and static data of each node."""

    kind: Any  # dict, list, tuple, a class, None, or LEAF
    keys: tuple[Any, ...] = ()
    children: tuple[Structure, ...] = ()
    static: Any = None  # static fields of a dataclass, as pairs; what `flatten` of a registered class returned

    @cached_property
    def leaves(self) -> int:
        """The number of leaves."""
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
        if self.kind in _registered:
            return _registered[self.kind].unflatten(self.static, parts)
        if dataclasses.is_dataclass(self.kind):
            instance: Any = object.__new__(self.kind)  # type: ignore[arg-type]
            for key, part in (*zip(self.keys, parts, strict=True), *(self.static or ())):
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
        if self.static is not None and self.kind in _registered:
            parts.append(f"static={self.static!r}")
        elif self.static is not None:
            parts += [f"{name}={value!r}" for name, value in self.static]
        name = self.kind.__name__
        return f"{name}({', '.join(parts)})"


# -- nodes ------------------------------------------------------------------------------------------------------------
class Node(NamedTuple):
    """The parts of one node of a tree."""

    kind: Any
    keys: tuple[Any, ...]
    children: Sequence[Any]
    static: Any = None


class _Container(NamedTuple):
    flatten: Callable[[Any], tuple[Sequence[Any], Any]]
    unflatten: Callable[[Any, Sequence[Any]], Any]


_registered: dict[type, _Container] = {}
_static_fields: dict[type, frozenset[str]] = {}  # of dataclasses


def sorted_keys(tree: dict[Any, Any]) -> tuple[Any, ...]:
    """Return the keys of a dict in the order of its leaves, which does not depend on the order of insertion."""
    try:
        return tuple(sorted(tree))
    except TypeError:
        return tuple(sorted(tree, key=lambda k: (type(k).__name__, k)))


def node(tree: Any) -> Node | None:
    """Return the parts of a tree's root; None if it is a leaf."""
    if tree is None:
        return Node(None, (), ())
    if isinstance(tree, dict):
        keys = sorted_keys(tree)
        return Node(dict, keys, [tree[k] for k in keys])
    kind = type(tree)
    if kind in _registered:
        children, static = _registered[kind].flatten(tree)
        return Node(kind, (), tuple(children), _hashable(kind, static))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return Node(kind, tuple(tree._fields), tree)
    if isinstance(tree, (list, tuple)):
        return Node(kind, (), tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, (type, DType, TensorType)):
        static_names = _static_names(kind)
        names = [f.name for f in dataclasses.fields(tree)]
        keys = tuple([n for n in names if n not in static_names])
        static = tuple([(n, getattr(tree, n)) for n in names if n in static_names]) or None
        return Node(kind, keys, [getattr(tree, k) for k in keys], _hashable(kind, static))
    return None


def _static_names(kind: type) -> frozenset[str]:
    names = _static_fields.get(kind)
    if names is None:
        fields: Any = dataclasses.fields(kind)
        names = _static_fields[kind] = frozenset(f.name for f in fields if f.metadata.get("static"))
    return names


def _hashable(kind: type, static: Any) -> Any:
    try:
        hash(static)
    except TypeError:
        hint = "arrays are leaves; other static data, such as a list, becomes a tuple"
        raise GraphError(f"tree: static data of {kind.__name__} cannot be hashed, {static!r}", hint=hint) from None
    return static


def register(
    kind: _Class,
    flatten: Callable[[Any], tuple[Sequence[Any], Any]] | None = None,
    unflatten: Callable[[Any, Sequence[Any]], Any] | None = None,
) -> _Class:
    """Make a class a tree: `flatten(x)` returns (children, static), and `unflatten(static, children)` builds x again.

    Without functions these are its methods `tree_flatten(self)` and `tree_unflatten(cls, static, children)`, as in JAX,
    which makes this a class decorator. Static data is hashable; functions are traced again if it changes.
    """
    if not isinstance(kind, type):
        raise GraphError(f"tree.register: takes a class, found {type(kind).__name__}")
    if kind in (dict, list, tuple, type(None)):
        raise GraphError(f"tree.register: {kind.__name__} is a tree already")
    flatten = flatten or getattr(kind, "tree_flatten", None)
    unflatten = unflatten or getattr(kind, "tree_unflatten", None)
    if flatten is None or unflatten is None:
        hint = "rlx.tree.register(cls, flatten, unflatten); dataclasses need no registration"
        raise GraphError(f"tree.register: nothing says how to flatten {kind.__name__}", hint=hint)
    _registered[kind] = _Container(flatten, unflatten)
    return kind


def register_dataclass(
    kind: _Class, data_fields: Sequence[str] | None = None, meta_fields: Sequence[str] = ()
) -> _Class:
    """Choose the fields of a dataclass that are static: `meta_fields`, or those not among `data_fields`.

    All dataclasses are trees; their fields are leaves unless this, or `metadata={"static": True}`, says otherwise.
    """
    if not dataclasses.is_dataclass(kind) or not isinstance(kind, type):
        raise GraphError(f"tree.register_dataclass: takes a dataclass, found {kind!r}")
    names = [f.name for f in dataclasses.fields(kind)]
    for name in (*(data_fields or ()), *meta_fields):
        if name not in names:
            message = f"tree.register_dataclass: {kind.__name__} has no field {name!r}"
            raise GraphError(message, hint=nearest(name, names))
    static = set(meta_fields) | _static_names(kind)
    if data_fields is not None:
        static |= set(names) - set(data_fields)
    _static_fields[kind] = frozenset(static)
    return kind


# -- trees ------------------------------------------------------------------------------------------------------------
def flatten(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], Structure]:
    """Return the leaves of a tree, in order, and its structure."""
    leaves: list[Any] = []

    def walk(part: Any) -> Structure:
        parts = None if is_leaf is not None and is_leaf(part) else node(part)
        if parts is None:
            leaves.append(part)
            return _LEAF
        return Structure(parts.kind, parts.keys, tuple([walk(c) for c in parts.children]), parts.static)

    return leaves, walk(tree)


_LEAF = Structure(LEAF)


def unflatten(structure: Structure, leaves: Sequence[Any]) -> Any:
    """Build a tree of this structure from leaves."""
    return structure.unflatten(list(leaves))


def leaves(tree: Any) -> list[Any]:
    """Return the leaves of a tree, in order."""
    return flatten(tree)[0]


def structure(tree: Any) -> Structure:
    """Return the structure of a tree."""
    return flatten(tree)[1]


@without(is_leaf="rlx.tree.register makes a class of your own a container; all other objects are leaves")
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

    def walk(prefix_part: Any, part: Any) -> list[Any]:
        parts = node(part)
        if parts is None:
            return [prefix_part]
        if prefix_part is None or isinstance(prefix_part, (int, str)):
            return [prefix_part] * structure(part).leaves
        prefix_parts = node(prefix_part)
        if prefix_parts is None or prefix_parts.keys != parts.keys:
            raise GraphError(f"{where}: {prefix_part!r} does not fit {structure(part)}")
        if len(prefix_parts.children) != len(parts.children):
            raise GraphError(f"{where}: {prefix_part!r} does not fit {structure(part)}")
        values: list[Any] = []
        for a, b in zip(prefix_parts.children, parts.children, strict=True):
            values += walk(a, b)
        return values

    return walk(prefix, tree)


def reduce(function: Callable[[Any, Any], Any], tree: Any, *initial: Any) -> Any:
    """Combine all leaves from left to right: `reduce(operator.add, tree, 0)`."""
    values = leaves(tree)
    if not values and not initial:
        raise GraphError("tree.reduce: the tree has no leaves", hint="give an initial value")
    return functools.reduce(function, values, *initial)


def ravel(tree: Any) -> tuple[Any, Callable[[Any], Any]]:
    """Return all leaves as one flat array, and a function that builds the tree again from such an array."""
    from rlx.functional import arrays
    from rlx.functional.tracers import type_of

    values, shape = flatten(tree)
    types = [type_of(x) for x in values]
    sizes = [t.elements for t in types]
    if not all([isinstance(n, int) for n in sizes]):
        raise GraphError("tree.ravel: the leaves have sizes that are known only at run time")
    offsets = [0]
    for n in sizes:
        offsets.append(offsets[-1] + int(n))

    def unravel(flat: Any) -> Any:
        if type_of(flat).shape != (offsets[-1],):
            raise GraphError(f"tree.ravel: the array is {type_of(flat)}, the tree has {offsets[-1]} elements")
        parts = [
            arrays.astype(arrays.reshape(flat[start:stop], t.shape), t.dtype)
            for start, stop, t in zip(offsets, offsets[1:], types, strict=False)
        ]
        return shape.unflatten(parts)

    flat = arrays.concatenate([arrays.ravel(x) for x in values]) if values else arrays.zeros(0)
    return flat, unravel


_ELSEWHERE = {
    "map_with_path": "rlx.tree.structure(t).paths() names the leaves in the order of rlx.tree.leaves(t)",
    "flatten_with_path": "zip(rlx.tree.structure(t).paths(), rlx.tree.leaves(t))",
    "leaves_with_path": "zip(rlx.tree.structure(t).paths(), rlx.tree.leaves(t))",
    "all": "all(rlx.tree.leaves(t))",
    "transpose": "rlx.tree.map(lambda *leaves: list(leaves), *trees) is the tree of lists of a list of trees",
    "tree_map": "rlx.tree.map",
    "register_pytree_node": "rlx.tree.register",
    "register_pytree_node_class": "rlx.tree.register",
}
_PUBLIC = "Structure flatten leaves map ravel reduce register register_dataclass structure unflatten"


def __getattr__(name: str) -> NoReturn:
    hint = None if name.startswith("_") else _ELSEWHERE.get(name) or nearest(name, _PUBLIC.split())
    raise AttributeError(f"module 'rlx.tree' has no attribute {name!r}" + (f": {hint}" if hint else ""))


def __dir__() -> list[str]:
    return _PUBLIC.split()

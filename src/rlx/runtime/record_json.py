"""Records as JSON: a table in which every distinct value is one entry, after the entries of its parts.

Decoding calls only the constructors of known classes, whatever the text says. Equal immutable values share an entry, so
repeated layers, shapes and strides are written and decoded once. Arrays are stored separately, in a list.
"""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BY_NAME, DType
from rlx.errors import CapabilityError, FormatError, RlxError
from rlx.fork_safe_locks import cached_property
from rlx.operand_layouts import Layout, parse_layout
from rlx.types import Composite, Dim

Classes = Mapping[str, type]

# Tags of entries other than records.
_TUPLE, _LIST, _DICT, _DIM, _DTYPE, _ARRAY, _CONSTANT = "()", "[]", "{}", "dim", "dtype", "array", "const"
_LAYOUT = "layout"
_DIGEST = "fingerprint"  # a cached property of kernels that is slow to compute
_SIZES = ("//", "min", "max")
_PLAIN = frozenset((type(None), bool, int, str))


def records_of(*modules: ModuleType) -> dict[str, type]:
    """The record classes that modules define, by name."""
    candidates = [c for m in modules for c in vars(m).values() if dataclasses.is_dataclass(c) and isinstance(c, type)]
    own = {c for c in candidates if any(c.__module__ == m.__name__ for m in modules)}
    named = {c.__name__: c for c in sorted(own, key=lambda c: c.__name__)}
    assert len(named) == len(own), "two records of one name could not be told apart"
    return named


def encode(value: Any, classes: Classes) -> tuple[str, list[Array]]:
    """Encode a value as text and a list of its arrays. Only plain data and records of `classes` can be encoded."""
    from rlx.ir.graph import Array as Constant  # only programs have constants: decoding others imports no graphs

    writer = _Writer(classes, Constant)
    writer.add(value)
    return json.dumps(writer.entries, separators=(",", ":")), writer.arrays


def decode(text: str | bytes, classes: Classes, arrays: Sequence[Array], where: str) -> Any:
    """Decode the output of `encode`; `where` names the text in messages."""
    try:
        entries = json.loads(text)
        values: list[Any] = []
        makers = _makers(classes, arrays)
        for entry in entries:
            if entry.__class__ is list:
                values.append(makers[entry[0]]([values[i] for i in entry[1:]]))
            else:
                values.append(entry)
        return values[-1]
    except (RlxError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise FormatError(f"{where}: is not a table of records: {type(error).__name__}: {error}") from error


class _Writer:
    """Builds the table."""

    def __init__(self, classes: Classes, constant: type) -> None:
        self.constant = constant
        self.names = {c: name for name, c in classes.items()}
        self.entries: list[Any] = []
        self.arrays: list[Array] = []
        self._known: dict[Any, int] = {}
        self._seen: dict[int, tuple[int, Any]] = {}  # by identity: every launch references its kernel
        self._parts = {c: _parts(c) for c in self.names}

    def add(self, value: Any) -> int:
        """The entry number of a value, added after its parts if it is new."""
        kind = value.__class__
        if kind in _PLAIN:
            number = self._known.get((kind, value))
            return self._entry(value, (kind, value)) if number is None else number
        if kind is tuple or kind in self.names:
            seen = self._seen.get(id(value))
            if seen is not None:
                return seen[0]
            tag, parts = (_TUPLE, value) if kind is tuple else (self.names[kind], self._parts[kind](value))
            number = self._composite(tag, parts)
            self._seen[id(value)] = number, value  # keep it alive: its id is the key
            return number
        if kind is float:
            return self._entry(value, (kind, value.hex()))  # 0.0 is not -0.0
        if isinstance(value, np.generic):
            return self.add(value.item())
        match value:
            case list():
                return self._composite(_LIST, value, shared=False)
            case Mapping():
                return self._composite(_DICT, [part for item in value.items() for part in item], shared=False)
            case DType():
                return self._composite(_DTYPE, [value.name])
            case Dim():
                return self._composite(_DIM, [value.terms])
            case Layout():
                return self._composite(_LAYOUT, [str(value)])
            case np.ndarray():
                return self._composite(_ARRAY, [self._add_array(value)])
        if isinstance(value, self.constant):
            return self._composite(_CONSTANT, [self._add_array(value.data)])  # type: ignore[attr-defined]
        raise CapabilityError(
            f"export: {kind.__module__}.{kind.__qualname__} cannot be stored in a file",
            hint="a graph that calls Python functions runs only in the process that has them",
        )

    def _composite(self, tag: str, parts: Iterable[Any], *, shared: bool = True) -> int:
        entry = [tag, *map(self.add, parts)]
        return self._entry(entry, tuple(entry) if shared else None)

    def _entry(self, entry: Any, key: Any) -> int:
        number = len(self.entries)
        if key is not None:
            known = self._known.setdefault(key, number)
            if known != number:
                return known
        self.entries.append(entry)
        return number

    def _add_array(self, array: Array) -> int:
        self.arrays.append(array)
        return len(self.arrays) - 1


def _parts(kind: type) -> Callable[[Any], tuple[Any, ...]]:
    """A function that returns the field values of a record, and its digest if it has one."""
    names = [field.name for field in dataclasses.fields(kind)] + ([_DIGEST] if _has_digest(kind) else [])
    if len(names) > 1:
        return operator.attrgetter(*names)
    return (lambda record: (getattr(record, names[0]),)) if names else lambda record: ()


def _makers(classes: Classes, arrays: Sequence[Array]) -> dict[str, Callable[[list[Any]], Any]]:
    """Constructors of values from their parts, by tag."""
    makers: dict[str, Callable[[list[Any]], Any]] = {
        _TUPLE: tuple,
        _LIST: list,
        _DICT: lambda parts: dict(zip(parts[::2], parts[1::2], strict=True)),
        _DTYPE: lambda parts: BY_NAME[parts[0]],
        _DIM: lambda parts: Dim(parts[0]),
        _LAYOUT: lambda parts: parse_layout(parts[0]),
        _ARRAY: lambda parts: arrays[parts[0]],
        _CONSTANT: lambda parts: _constant(arrays[parts[0]]),
    }
    return makers | {name: _maker(kind) for name, kind in classes.items()}


def _constant(array: Array) -> Any:
    from rlx.ir.graph import Array as Constant

    return Constant(array)


def _has_digest(kind: type) -> bool:
    return isinstance(vars(kind).get(_DIGEST), cached_property)


def _maker(kind: type) -> Callable[[list[Any]], Any]:
    if _has_digest(kind):

        def with_digest(parts: list[Any]) -> Any:
            record = kind(*parts[:-1])
            record.__dict__[_DIGEST] = parts[-1]
            return record

        return with_digest
    if kind is Composite:

        def size(parts: list[Any]) -> Any:
            if parts[0] not in _SIZES:  # it becomes part of an expression that is evaluated as Python
                raise ValueError(f"{parts[0]!r} is not an operation on sizes")
            return Composite(*parts)

        return size
    fields = dataclasses.fields(kind)
    if any(field.kw_only for field in fields):  # keyword-only fields may be declared anywhere
        names = [field.name for field in fields]
        return lambda parts: kind(**dict(zip(names, parts, strict=True)))
    return lambda parts: kind(*parts)

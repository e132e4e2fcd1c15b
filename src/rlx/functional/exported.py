"""How an exported function is called: with trees of arrays by position or by name, and with its result as a tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rlx.errors import BindError, FormatError
from rlx.fast_dataclass import dataclass
from rlx.functional import tree
from rlx.functional.tracing import contiguous
from rlx.functional.tree import LEAF, Structure

MAX_DEPTH = 64  # of a result in a file
_KINDS: dict[str, Any] = {"dict": dict, "list": list, "tuple": tuple}


@dataclass(frozen=True)
class ExportedCall:
    """The parameters of a function, without static ones, and the structure of its result."""

    parameters: tuple[str, ...]
    structure: Structure
    keywords: tuple[str, ...] = ()  # parameters that are given by name only
    rest: str = ""  # of `*rest`, if there is one
    named: str = ""  # of `**named`, if there is one

    def inputs(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
        """The arrays of the arguments by the names of the program's inputs, such as `params.w`."""
        names = ", ".join(self.parameters)
        if len(args) > len(self.parameters) and not self.rest:
            raise BindError(f"arguments: {len(args)} given by position, the function takes ({names})")
        by_position = dict(zip(self.parameters, args, strict=False))
        twice = by_position.keys() & kwargs.keys()
        if twice:
            raise BindError(f"arguments: {min(twice)!r} is given twice", hint=f"the function takes ({names})")
        arguments = {**by_position, **kwargs}
        if self.named:
            declared = {*self.parameters, *self.keywords}
            arguments = {name: value for name, value in arguments.items() if name in declared}
            arguments[self.named] = {name: value for name, value in kwargs.items() if name not in declared}
        if self.rest:
            arguments[self.rest] = tuple(args[len(self.parameters) :])
        arrays: dict[str, Any] = {}
        for name, value in arguments.items():
            leaves, structure = tree.flatten(value)
            arrays |= zip(structure.paths(name), map(contiguous, leaves), strict=True)
        return arrays

    def result(self, outputs: Sequence[Any]) -> Any:
        """The function's result."""
        return self.structure.unflatten(outputs[: self.structure.leaves])  # printed values follow

    def to_json(self) -> dict[str, Any]:
        """A record for the manifest of an export."""
        others = {"keywords": list(self.keywords), "rest": self.rest, "named": self.named}
        return {"parameters": list(self.parameters), "result": _to_json(self.structure), **others}

    @classmethod
    def from_json(cls, record: Any, where: str, outputs: int) -> ExportedCall:
        """Read a record of a file; raises FormatError if it is not valid or does not fit the program."""
        try:
            full = {"keywords": (), "rest": "", "named": "", **record}
            parameters, keywords = (tuple(map(str, full[key])) for key in ("parameters", "keywords"))
            rest, named = str(full["rest"]), str(full["named"])
            structure = _from_json(full["result"], MAX_DEPTH)
        except (LookupError, TypeError, ValueError) as error:
            raise FormatError(f"{where}: function: not a record of a function: {error}") from error
        if structure.leaves > outputs:
            raise FormatError(f"{where}: function: its result has {structure.leaves} arrays, its program {outputs}")
        return cls(parameters, structure, keywords, rest, named)


def _to_json(structure: Structure) -> Any:
    """A structure without classes: named tuples and dataclasses are dicts, registered containers lists."""
    if structure.kind in (LEAF, None):
        return structure.kind
    children = [_to_json(child) for child in structure.children]
    if structure.kind in (list, tuple) or not structure.keys:
        return {"tuple" if structure.kind is tuple else "dict" if structure.kind is dict else "list": children}
    return {"dict": children, "keys": [key if isinstance(key, int) else str(key) for key in structure.keys]}


def _from_json(record: Any, depth: int) -> Structure:
    if record is None or record == LEAF:
        return Structure(record)
    if not isinstance(record, dict):
        raise TypeError(f"{record!r} is no container")
    if depth == 0:
        raise ValueError(f"more than {MAX_DEPTH} levels")
    (kind,) = record.keys() & _KINDS.keys()
    children = tuple(_from_json(child, depth - 1) for child in record[kind])
    keys = tuple(record.get("keys", ()))
    if len(keys) != (len(children) if kind == "dict" else 0) or not all(isinstance(key, (str, int)) for key in keys):
        raise ValueError(f"{len(children)} values with {len(keys)} keys")
    return Structure(_KINDS[kind], keys, children)

"""Schemas of the manifests of containers and exports, and their validation.

A schema is a Python type, a set of allowed values, `[schema]` for a list of any length, `(schema, ...)` for a list of
that length, `{name: schema}` for an object with these members (`name?`: optional), `Named(schema)` for an object with
any names, `Maybe(schema)` for a nullable value, or a function that raises ValueError for invalid values. Members that
the schema does not name are ignored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlx.dtypes import dtype
from rlx.errors import RlxError, shortened
from rlx.fast_dataclass import dataclass
from rlx.formats.tensor_file import broken, quoted
from rlx.types import parse_type

Schema = Any
LINE = 64  # sections and arrays begin on a cache line
_MAX_COUNT = 1 << 62  # bytes or elements that NumPy and addresses can count
_JSON = {str: "text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Named:
    """An object whose members all have one schema."""

    schema: Schema


@dataclass(frozen=True)
class Maybe:
    """A nullable value."""

    schema: Schema


def count(value: Any) -> None:
    """A valid number of bytes or elements."""
    if type(value) is not int or not 0 <= value <= _MAX_COUNT:
        raise ValueError("a whole number from 0")


def positive(value: Any) -> None:
    count(value)
    if not value:
        raise ValueError("a whole number from 1")


def tensor_type(value: Any) -> None:
    """A tensor type as text."""
    try:
        parse_type(value)
    except (RlxError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError) as error:
        raise ValueError("a type, such as f32[n, 4]") from error


def element_type(value: Any) -> None:
    try:
        dtype(value)
    except (RlxError, TypeError) as error:
        raise ValueError("an element type") from error


SECTION = {"at": count, "bytes": count, "digest": str, "arrays?": [(str, element_type, [count], count)]}
CONTAINER = {"bytes": count, "sections": Named(SECTION)}
_PROGRAM = {name: SECTION for name in ("program", "constants", "graph", "origins")}
_MODEL = {name: SECTION for name in ("records", "records.arrays", "made")}
EXPORT = {
    "kind": str,
    "name": str,
    "rlx": str,
    "source": str,
    "versions": Named(str),
    "target": {"device": str},  # the other members belong to its backend
    "profile": Maybe(str),
    "level": {"hir", "mir"},
    "limits": Named(count),
    "inputs": [({"input", "state"}, str, tensor_type)],
    "params": Named(tensor_type),
    "outputs": [tensor_type],
    "output_names": [str],
    "kernels": [str],
    "routines": [str],
    "code": [str],
    "sections": _PROGRAM,
}
EXPORTED_MODEL = EXPORT | {
    "model": {
        "name": str, "family": str, "context": positive, "cache": str, "digest": str, "patched": bool,
        "outputs": [str], "path": str, "files": [{"name": str, "bytes": count, "modified": int, "sha256": str}],
    },
    "sections": _PROGRAM | _MODEL,
}  # fmt: skip


def check(manifest: Any, schema: Schema, file: Path) -> None:
    """Raise FormatError if the manifest does not match the schema."""
    try:
        _check(manifest, schema)
    except _Mismatch as wrong:
        where = f"manifest: {''.join(reversed(wrong.path)).lstrip('.')}" if wrong.path else "manifest"
        raise broken(file, where, expected=wrong.expected, actual=wrong.actual) from wrong


def check_sections(manifest: Mapping[str, Any], file: Path) -> None:
    """Raise FormatError if a section or array is outside the file or not aligned to cache lines."""
    for name, section in manifest["sections"].items():
        where, size = f"manifest: section {quoted(name)}", section["bytes"]
        if section["at"] % LINE or section["at"] + size > manifest["bytes"]:
            raise broken(file, where, expected=f"one inside {manifest['bytes']} bytes", actual=quoted(section))
        for key, kind, sizes, at in section.get("arrays", ()):
            width = dtype(kind).numpy.itemsize
            inside = not at % LINE and at + math.prod(sizes) * width <= size
            if not inside or len(sizes) > 32 or math.prod([n or 1 for n in sizes]) * width > _MAX_COUNT:
                raise broken(
                    file, f"{where}, array {quoted(key)}", expected=f"one inside {size} bytes",
                    actual=f"{quoted(kind)}{quoted(sizes)} at {at}",
                )  # fmt: skip


class _Mismatch(Exception):
    """A value that does not match: what was expected, and its path from the innermost name to the outermost."""

    def __init__(self, expected: str, actual: Any) -> None:
        self.expected, self.actual = expected, quoted(actual)
        self.path: list[str] = []


def _check(value: Any, schema: Schema) -> None:
    match schema:
        case type():
            if type(value) is not schema:
                raise _Mismatch(_JSON[schema], value)
        case Maybe():
            if value is not None:
                _check(value, schema.schema)
        case Named():
            _check(value, dict)
            for name, inner in value.items():
                _check_member(inner, schema.schema, name)
        case dict():
            _check(value, dict)
            for key, inner in schema.items():
                name = key.removesuffix("?")
                if name in value:
                    _check_member(value[name], inner, name)
                elif name == key:
                    raise _Mismatch(f"a member {quoted(name)}", sorted(value))
        case list() | tuple():
            _check(value, list)
            if isinstance(schema, tuple) and len(value) != len(schema):
                raise _Mismatch(f"a list of {len(schema)}", value)
            for i, item in enumerate(value):
                _check_member(item, schema[i if isinstance(schema, tuple) else 0], i)
        case set():
            if type(value) not in (str, int) or value not in schema:
                raise _Mismatch(f"one of {', '.join(map(str, sorted(schema)))}", value)
        case _:
            try:
                schema(value)
            except ValueError as error:
                raise _Mismatch(str(error), value) from error


def _check_member(value: Any, schema: Schema, name: str | int) -> None:
    try:
        _check(value, schema)
    except _Mismatch as wrong:
        wrong.path.append(f"[{name}]" if isinstance(name, int) else f".{shortened(name, 80)}")
        raise

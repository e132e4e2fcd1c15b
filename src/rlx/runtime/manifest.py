"""The structure of manifests: what every member of a container's or an export's JSON must be, as data, and its check.

A shape is a Python type, a set of known values, `[shape]` for a list of any length, `(shape, ...)` for a list of that
many, `{name: shape}` for an object that has these members (with a `?` behind the name: may have), `Named(shape)` for an
object of any names, `Maybe(shape)` where it may be null, or a function that raises for what it does not take. Other
members than those are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlx.dtypes import dtype
from rlx.errors import RlxError, shortened
from rlx.formats.tensor_file import broken, quoted
from rlx.types import parse_type

Shape = Any
LINE = 64  # sections and arrays begin on a cache line
_MOST = 1 << 62  # bytes, elements: what NumPy and addresses can count
_JSON = {str: "text", int: "a whole number", bool: "true or false", list: "a list", dict: "an object"}


@dataclass(frozen=True)
class Named:
    """An object whose members are all of one shape."""

    shape: Shape


@dataclass(frozen=True)
class Maybe:
    """Something or null."""

    shape: Shape


def count(value: Any) -> None:
    """A whole number from 0 that can be a number of bytes or elements."""
    if type(value) is not int or not 0 <= value <= _MOST:
        raise ValueError("a whole number from 0")


def positive(value: Any) -> None:
    count(value)
    if not value:
        raise ValueError("a whole number from 1")


def tensor_type(value: Any) -> None:
    """A type as text."""
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
    "target": {"device": str},  # the rest is for its backend
    "profile": Maybe(str),
    "level": {"hir", "mir"},
    "limits": Named(count),
    "inputs": [({"input", "state"}, str, tensor_type)],
    "params": Named(tensor_type),
    "outputs": [tensor_type],
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


def check(manifest: Any, shape: Shape, file: Path) -> None:
    """Raise FormatError where a manifest has another structure."""
    try:
        _check(manifest, shape)
    except _Mismatch as wrong:
        what = f"manifest: {''.join(reversed(wrong.place)).lstrip('.')}" if wrong.place else "manifest"
        raise broken(file, what, expected=wrong.expected, actual=wrong.found) from wrong


def check_sections(manifest: Mapping[str, Any], file: Path) -> None:
    """Raise FormatError where sections and arrays do not lie inside the file, and on cache lines."""
    for name, section in manifest["sections"].items():
        where, size = f"manifest: section {quoted(name)}", section["bytes"]
        if section["at"] % LINE or section["at"] + size > manifest["bytes"]:
            raise broken(file, where, expected=f"one inside {manifest['bytes']} bytes", actual=quoted(section))
        for key, kind, sizes, at in section.get("arrays", ()):
            width = dtype(kind).numpy.itemsize
            inside = not at % LINE and at + math.prod(sizes) * width <= size
            if not inside or len(sizes) > 32 or math.prod([n or 1 for n in sizes]) * width > _MOST:
                raise broken(
                    file, f"{where}, array {quoted(key)}", expected=f"one inside {size} bytes",
                    actual=f"{quoted(kind)}{quoted(sizes)} at {at}",
                )  # fmt: skip


class _Mismatch(Exception):
    """What a value should be, and its place, from the innermost name to the outermost."""

    def __init__(self, expected: str, found: Any) -> None:
        self.expected, self.found = expected, quoted(found)
        self.place: list[str] = []


def _check(value: Any, shape: Shape) -> None:
    match shape:
        case type():
            if type(value) is not shape:
                raise _Mismatch(_JSON[shape], value)
        case Maybe():
            if value is not None:
                _check(value, shape.shape)
        case Named():
            _check(value, dict)
            for name, inner in value.items():
                _check_member(inner, shape.shape, name)
        case dict():
            _check(value, dict)
            for key, inner in shape.items():
                name = key.removesuffix("?")
                if name in value:
                    _check_member(value[name], inner, name)
                elif name == key:
                    raise _Mismatch(f"a member {quoted(name)}", sorted(value))
        case list() | tuple():
            _check(value, list)
            if isinstance(shape, tuple) and len(value) != len(shape):
                raise _Mismatch(f"a list of {len(shape)}", value)
            for i, item in enumerate(value):
                _check_member(item, shape[i if isinstance(shape, tuple) else 0], i)
        case set():
            if type(value) not in (str, int) or value not in shape:
                raise _Mismatch(f"one of {', '.join(map(str, sorted(shape)))}", value)
        case _:
            try:
                shape(value)
            except ValueError as error:
                raise _Mismatch(str(error), value) from error


def _check_member(value: Any, shape: Shape, name: str | int) -> None:
    try:
        _check(value, shape)
    except _Mismatch as wrong:
        wrong.place.append(f"[{name}]" if isinstance(name, int) else f".{shortened(name, 80)}")
        raise

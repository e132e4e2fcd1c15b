"""Reading JSON requests: limits on everything, and errors that name the field."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from rlx.engine.sampler import short_repr
from rlx.errors import FormatError
from rlx.formats.strict_json import parse_json
from rlx.server.api_errors import ApiError, invalid

MAX_DEPTH = 64
MAX_VALUES = 1 << 20
_STRINGS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.S)
_OTHERS = bytes(i for i in range(256) if i not in b"[]{}")


def read_json(data: bytes) -> Any:
    """A JSON value: no NaN, no duplicate names, bounded in depth and number of values."""
    depth = 0
    for bracket in _STRINGS.sub(b"", data).translate(None, _OTHERS):
        depth += 1 if bracket in b"[{" else -1
        if depth > MAX_DEPTH:
            raise invalid(f"the body is nested more than {MAX_DEPTH} deep", code="invalid_json")
    try:
        return parse_json(data, Path("body"), max_values=MAX_VALUES)
    except FormatError as error:
        raise invalid(str(error), code="invalid_json") from error


class Fields:
    """The members of an object, read one by one; `unread` are the names that nobody asked for."""

    def __init__(self, value: Any, where: str = "") -> None:
        if not isinstance(value, dict):
            raise invalid(f"{where or 'the body'}: expected an object, found {short_repr(value)}", where or None)
        self._members: Mapping[str, Any] = value
        self._where = where
        self._read: set[str] = set()
        self._inner: list[Fields] = []

    def path(self, name: str) -> str:
        return f"{self._where}.{name}" if self._where else name

    def wrong(self, name: str, expected: str) -> ApiError:
        actual = short_repr(self._members.get(name))
        return invalid(f"{self.path(name)}: expected {expected}, found {actual}", self.path(name))

    def get(self, name: str) -> Any:
        """A member as it is; None if it is null or absent."""
        self._read.add(name)
        return self._members.get(name)

    def text(self, name: str, *, limit: int = 1 << 16) -> str | None:
        value = self.get(name)
        if value is not None and not (isinstance(value, str) and len(value) <= limit):
            raise self.wrong(name, f"a text of at most {limit} characters")
        return None if value is None else str(value)

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.get(name)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(name, "true or false")
        return default if value is None else value

    def integer(self, name: str, low: int, high: int) -> int | None:
        value = self.get(name)
        if isinstance(value, float) and value.is_integer() and abs(value) < 2**53:
            value = int(value)
        if value is not None and not (isinstance(value, int) and not isinstance(value, bool) and low <= value <= high):
            raise self.wrong(name, f"a whole number from {low} to {high}")
        return value

    def number(self, name: str, low: float, high: float) -> float | None:
        value = self.get(name)
        if value is None:
            return None
        fits = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not fits or not (math.isfinite(value) and low <= value <= high):
            raise self.wrong(name, f"a number from {low:g} to {high:g}")
        return float(value)

    def strings(self, name: str, *, count: int, limit: int) -> list[str]:
        """A text or a list of texts, none of them empty."""
        value = self.get(name)
        listed = [] if value is None else [value] if isinstance(value, str) else value
        if not isinstance(listed, list) or len(listed) > count:
            raise self.wrong(name, f"a text or at most {count} of them")
        if not all(isinstance(text, str) and 0 < len(text) <= limit for text in listed):
            raise self.wrong(name, f"texts of 1 to {limit} characters")
        return listed

    def choice(self, name: str, known: tuple[str, ...]) -> str | None:
        value = self.get(name)
        if value is not None and value not in known:
            raise self.wrong(name, "one of " + ", ".join(known))
        return None if value is None else str(value)

    def inner(self, name: str) -> Fields | None:
        value = self.get(name)
        if value is None:
            return None
        self._inner.append(Fields(value, self.path(name)))
        return self._inner[-1]

    def objects(self, name: str, known: Collection[str]) -> list[Fields]:
        """The objects of a list whose members are read elsewhere; `known` are the names that mean something."""
        value = self.get(name)
        listed = [Fields(v, f"{self.path(name)}[{i}]") for i, v in enumerate(value) if isinstance(v, dict)]
        for fields in listed:
            fields.ignore(*known, *(member for member, v in fields._members.items() if v is None))
        self._inner += listed
        return listed

    def ignore(self, *names: str) -> None:
        """Fields that change nothing here: the user's own notes."""
        self._read.update(names)

    def expect(self, name: str, *values: Any) -> None:
        """A field that asks for what happens anyway if it has one of these values; otherwise it stays unread."""
        value = self._members.get(name)
        if value is None or value in values:
            self._read.add(name)

    def refuse(self, reasons: Mapping[str, str], idle: Callable[[Any], bool]) -> None:
        """Refuse fields that rlx cannot honour, unless their value asks for nothing."""
        for name, reason in reasons.items():
            value = self.get(name)
            if value is not None and not idle(value):
                raise invalid(f"{self.path(name)}: {reason}", self.path(name), "unsupported")

    def unread(self) -> Iterator[str]:
        """Paths of members that nobody asked for, here and in the objects that were read."""
        yield from (self.path(name) for name in self._members if name not in self._read)
        for fields in self._inner:
            yield from fields.unread()

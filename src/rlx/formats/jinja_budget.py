"""The budget of one template rendering: bytes, steps and seconds over all of its values.

`Budget` only counts up: memory that a template has released still counts, so live memory can never exceed `MAX_BYTES`.
Every operation is charged before it runs, by the sizes of its operands.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from typing import Any, NamedTuple

from jinja2.runtime import Macro

from rlx.errors import FormatError, RequestError

MAX_BYTES = 1 << 28  # allocated by one rendering
MAX_STEPS = 1_000_000  # a step is about a microsecond
MAX_SECONDS = 1.0  # of CPU time: steps are estimates
MAX_DEPTH = 64  # nested calls
MAX_CHARS = 1 << 23  # in one string, in a value written out, and in the prompt
MAX_VARIABLE_CHARS = MAX_CHARS // 2  # in all variables together
MAX_ITEMS = 1 << 18  # in one list
MAX_BITS = 64  # in an integer; larger ones allow deliberate hash collisions
MAX_NESTING = 64  # lists in lists

SCAN = 1024  # characters per step of a C loop
ITEMS = 16  # list items compared, copied or hashed per step
_STEPS_PER_LOOK = 16  # between checks of the clock
_OBJECT = 64  # bytes of overhead per object
_KNOWN = 320  # bytes per cached size
REPR = 10  # most characters that repr writes for one: "\U0010ffff"
_ITEM_CHARS = 96  # characters of a non-string item, including separators and quotes

_EMPTY: dict[str, Any] = {}
_KEYS, _VALUES, _PAIRS = type(_EMPTY.keys()), type(_EMPTY.values()), type(_EMPTY.items())
VIEWS = (_KEYS, _VALUES, _PAIRS)
CONTAINERS = (list, tuple, dict, *VIEWS)


class Size(NamedTuple):
    """Size of a value written out; shared parts count each time they occur."""

    chars: int  # in its strings
    items: int
    nesting: int
    width: int  # bytes per character

    @property
    def steps(self) -> int:
        """Steps to scan all of it."""
        return self.chars // SCAN + self.items // ITEMS


_ONE = Size(0, 1, 0, 1)


def width(text: str) -> int:
    """Upper bound on bytes per character: telling 2 from 4 would need a scan, `isascii` does not."""
    return 1 if text.isascii() else 4


class Budget:
    """Resources used so far by one rendering."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._end = time.thread_time() + MAX_SECONDS
        self._next_look = _STEPS_PER_LOOK
        self._sizes: dict[int, tuple[Any, Size]] = {}  # by id, with the value to keep it alive
        self.steps = 0
        self.bytes = 0
        self.output = 0  # characters
        self.depth = 0

    # -- charging --
    def step(self, count: int = 1) -> None:
        if self.steps + count > MAX_STEPS:
            raise self.exceeded(f"{MAX_STEPS} steps")
        self.steps += count
        if self.steps >= self._next_look:
            self._next_look = self.steps + _STEPS_PER_LOOK
            if time.thread_time() > self._end:
                raise self.exceeded(f"{MAX_SECONDS:g} seconds")

    def reserve(self, size: int) -> None:
        """Reject an operation that might exceed the remaining bytes; its result is charged once it exists."""
        if self.bytes + size > MAX_BYTES:
            raise self.exceeded(f"{MAX_BYTES >> 20} MiB")

    def spend(self, size: int) -> None:
        self.reserve(size)
        self.bytes += size

    def make_text(self, chars: int, width: int) -> None:
        """Charge for a string before it is created."""
        if chars > MAX_CHARS:
            raise self.exceeded(f"{MAX_CHARS} characters")
        self.spend(chars * width + _OBJECT)

    def reserve_text(self, chars: int, width: int) -> None:
        if chars > MAX_CHARS:
            raise self.exceeded(f"{MAX_CHARS} characters")
        self.reserve(chars * width + _OBJECT)

    def make_list(self, items: int, each: int = 8) -> None:
        """Charge for a list before it is created; `each` is the bytes per item."""
        self.check_items(items)
        self.step(items // ITEMS)
        self.spend(items * each + _OBJECT)

    def check_items(self, items: int) -> None:
        if items > MAX_ITEMS:
            raise self.exceeded(f"a list of {MAX_ITEMS} values")

    def charge_result(self, value: Any) -> Any:
        """Charge for a result whose size its operands do not determine; returns the value."""
        if isinstance(value, str):
            self.make_text(len(value), width(value))
        else:
            if isinstance(value, (list, tuple, dict)):
                self.make_list(len(value), 104 if isinstance(value, dict) else 8)
            self.check(value)
        return value

    def write(self, text: str) -> None:
        """Charge for a piece of output."""
        self.step()
        self.output += len(text)
        if self.output > MAX_CHARS:
            raise self.exceeded(f"{MAX_CHARS} characters")
        self.spend(len(text) * width(text) + 8)

    # -- sizes --
    def check_variables(self, variables: Mapping[str, Any]) -> None:
        """Reject oversized variables with RequestError, since that is not the template's fault."""
        sizes = [self._size(value, 0) for value in variables.values()]
        chars = sum(size.chars + size.items for size in sizes)
        if chars > MAX_VARIABLE_CHARS:
            raise RequestError(
                f"chat: expected at most {MAX_VARIABLE_CHARS} characters in messages, tools and variables, "
                f"found {chars}",
                hint="send less text",
            )

    def check(self, value: Any) -> Any:
        """Reject a value that is too long written out: nested `[x, x]` is small only in memory."""
        if isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise self.exceeded(f"numbers of {MAX_BITS} bits")
        elif not isinstance(value, str):
            self.size(value)
        return value

    def check_together(self, values: Iterable[Any]) -> None:
        """Reject values that are too long together: a macro sees its arguments as one value, `varargs`."""
        chars = 0
        for value in values:
            size = self.size(value)
            chars += size.chars + size.items
            if chars > MAX_CHARS:
                raise self.exceeded(f"{MAX_CHARS} characters")

    def size(self, value: Any) -> Size:
        size = self._size(value, 0)
        if size.chars + size.items > MAX_CHARS + 1:
            raise self.exceeded(f"{MAX_CHARS} characters")
        return size

    def _size(self, value: Any, depth: int) -> Size:
        if isinstance(value, str):
            return Size(len(value), 1, 0, width(value))
        if isinstance(value, int):
            return Size(value.bit_length(), 1, 0, 1)
        if not isinstance(value, CONTAINERS):
            return _ONE if not isinstance(value, Macro) else Size(len(value.name or ""), 1, 0, 4)
        known = self._sizes.get(id(value))
        if known is not None:
            return known[1]
        if depth > MAX_NESTING:
            raise self.exceeded(f"{MAX_NESTING} nested values")
        self.step(len(value) // ITEMS)
        chars, items, nesting, max_width = 0, 1, 0, 1
        for inner in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            if type(inner) is str:  # fast path with the same result
                chars += len(inner)
                items += 1
                if not inner.isascii():
                    max_width = 4
                continue
            size = self._size(inner, depth + 1)
            chars += size.chars
            items += size.items
            nesting = max(nesting, size.nesting)
            max_width = max(max_width, size.width)
        if nesting >= MAX_NESTING:
            raise self.exceeded(f"{MAX_NESTING} nested values")
        self.spend(_KNOWN)
        # caching by id is safe: the value is kept alive, and templates cannot mutate values
        total = Size(chars, items, nesting + 1, max_width)
        self._sizes[id(value)] = value, total
        return total

    # -- text --
    def text_size(self, value: Any) -> tuple[int, int]:
        """Upper bound on the characters of `str(value)`, and their width."""
        if isinstance(value, str):
            return len(value), width(value)
        size = self.size(value)
        return size.chars * REPR + size.items * _ITEM_CHARS, size.width

    def text(self, value: Any) -> str:
        """Return `str(value)` and charge for it."""
        if isinstance(value, str):
            return str(value)
        chars, width = self.text_size(value)
        self.step(chars // SCAN)
        self.reserve(chars * width)
        text = str(value)
        self.make_text(len(text), width)
        return text

    def exceeded(self, limit: str) -> FormatError:
        return FormatError(f"{self._where}: the template exceeds {limit}")


_current: ContextVar[Budget] = ContextVar("budget")
current = _current.get
start = _current.set
stop = _current.reset


def to_list(values: Iterable[Any]) -> list[Any]:
    """Collect values into a list, charged up front if their number is known, else one by one."""
    budget = current()
    if isinstance(values, (list, tuple, dict, _KEYS, _VALUES)):
        budget.make_list(len(values))
        return list(values)
    if isinstance(values, (str, range, _PAIRS)):  # each item is a new object
        budget.make_list(len(values), 88)
        return list(values)
    items: list[Any] = []
    for value in values:
        budget.step()
        budget.check_items(len(items) + 1)
        items.append(value)
    budget.spend(88 * len(items) + _OBJECT)
    return items

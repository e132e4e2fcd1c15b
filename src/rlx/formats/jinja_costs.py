"""Costs of operators, comparisons and methods in templates, as functions of operand sizes.

`METHODS` lists the only methods that a template may call, each with its cost.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from jinja2.runtime import Undefined
from jinja2.sandbox import SandboxedEscapeFormatter, SandboxedFormatter
from markupsafe import Markup

from rlx.formats.jinja_budget import CONTAINERS, ITEMS, MAX_BITS, REPR, SCAN, VIEWS, Budget, current, to_list, width

Cost = Callable[[Budget, Any, Sequence[Any]], None]
ESCAPED = 6  # most characters per character after HTML escaping, plus a copy

_LINE_BREAKS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"  # as in str.splitlines
_MAX_PADDING = 999  # for width and precision of a format
_PARENTHESIS = re.compile(r"[()]")
_PERCENT_FIELD = re.compile(r"[-#0 +]*(\*|[0-9]*)(?:\.(\*|[0-9]*))?[hlL]?(.?)", re.DOTALL)
_DIGITS = re.compile(r"\d+")  # str.format accepts digits of all scripts
_NUMBERS = (int, float, complex)
_NUMBER_CHARS = 400  # "%f" % 1e308, without its precision
_MAX_KEY = 1 << 16


# -- searching -------------------------------------------------------------------------------------------------------
def charge_search(budget: Budget, text: str, needle: str) -> None:
    """Charge for a forward search: linear time in CPython, but slower than memchr."""
    budget.step(1 + len(text) * min(len(needle) + 1, ITEMS) // SCAN)


def charge_reverse_search(budget: Budget, text: str, needle: str) -> None:
    """Charge for a backward search, which compares at every position, or for stripping a set of characters."""
    budget.step(1 + len(text) * (len(needle) + 1) // SCAN)


def charge_replace(budget: Budget, text: str, old: str, new: str, count: int) -> None:
    charge_search(budget, text, old)
    occurrences = text.count(old)
    times = occurrences if count < 0 else min(occurrences, count)
    growth = ESCAPED if isinstance(text, Markup) else 1
    chars = len(text) + times * max(0, len(new) * growth - len(old))
    budget.step(chars // SCAN + times // ITEMS)
    budget.reserve_text(chars, max(width(text), width(new)))


def join_texts(glue: str, values: Iterable[Any]) -> str:
    """Join the texts of the values with `glue`, charged."""
    budget = current()
    parts = [budget.text(value) for value in to_list(values)]
    chars = sum(map(len, parts)) + len(glue) * len(parts)
    wide = max([width(glue), *map(width, parts)])
    budget.step(chars // SCAN + len(parts) // ITEMS)
    budget.reserve_text(chars, wide)
    budget.reserve(chars * wide * (ESCAPED if isinstance(glue, Markup) else 1))
    text: str = budget.charge_result(glue.join(parts))  # Markup if the glue is
    return text


def count_lines(text: str) -> int:
    current().step(1 + len(text) * len(_LINE_BREAKS) // SCAN)
    return 1 + sum(text.count(mark) for mark in _LINE_BREAKS)


# -- formats ---------------------------------------------------------------------------------------------------------
def charge_percent(budget: Budget, text: str, values: Any) -> None:
    """Charge for `text % values`."""
    if isinstance(values, tuple):
        operands: Iterable[Any] = values
    else:
        operands = values.values() if isinstance(values, dict) else (values,)
    sizes = [budget.text_size(value) for value in operands]
    longest = max((chars for chars, _ in sizes), default=0)
    growth = ESCAPED if isinstance(text, Markup) else 1
    chars = len(text) + sum(
        padding + longest * growth * (REPR if conversion in ("r", "a") else 1)
        for padding, conversion in _percent_fields(budget, text)
    )
    budget.step(chars // SCAN)
    budget.reserve(chars * max([width(text), *(wide for _, wide in sizes)]))


def _percent_fields(budget: Budget, text: str) -> Iterator[tuple[int, str]]:
    """Yield for each field an upper bound on its padding, and its conversion."""
    at = text.find("%") + 1
    while at:
        budget.step()
        if text.startswith("(", at):
            at = _after_key(budget, text, at)
        field = _PERCENT_FIELD.match(text, at)
        assert field is not None  # all of it is optional
        yield _padding(budget, [digits for digits in field.groups()[:2] if digits]), field[3]
        at = text.find("%", field.end()) + 1


def _after_key(budget: Budget, text: str, at: int) -> int:
    """End of the parenthesised key that opens at `at`; parentheses nest."""
    depth = 0
    for match in _PARENTHESIS.finditer(text, at):
        budget.step()
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(text)


def _padding(budget: Budget, numbers: Iterable[str]) -> int:
    total = _NUMBER_CHARS
    for digits in numbers:
        if digits == "*" or len(digits) > 4 or int(digits) > _MAX_PADDING:
            raise budget.exceeded(f"a format with a width of {_MAX_PADDING}")
        total += int(digits)
    return total


class _Charged(SandboxedFormatter):
    """`str.format` that charges for each field before formatting it."""

    growth = 1

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, str]:
        current().step(2 + len(field_name) // ITEMS + field_name.count(".") + field_name.count("["))
        return super().get_field(field_name, args, kwargs)

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is None:
            return value
        budget = current()
        chars, wide = budget.text_size(value)
        budget.step(chars // SCAN)
        budget.reserve(chars * REPR * wide)
        return budget.charge_result(super().convert_field(value, conversion))

    def format_field(self, value: Any, format_spec: str) -> str:
        budget = current()
        budget.step(1 + len(format_spec) // SCAN)
        chars, wide = budget.text_size(value)
        padding = _padding(budget, _DIGITS.findall(format_spec))
        wide = max(wide, width(format_spec))
        budget.reserve((chars + padding) * self.growth * wide)
        text = str(super().format_field(value, format_spec))
        budget.make_text(len(text), wide)
        return text


class _ChargedMarkup(_Charged, SandboxedEscapeFormatter):
    growth = ESCAPED


def formatter(environment: Any, text: str) -> Callable[..., str]:
    """The charged `format` method of a text."""
    kind = type(text)
    runner = _ChargedMarkup(environment, escape=Markup.escape) if isinstance(text, Markup) else _Charged(environment)

    def run(*args: Any, **kwargs: Any) -> str:
        braces = text.count("{") + text.count("}")
        current().step(1 + braces + len(text) // SCAN)
        current().spend(braces * 88 + len(text) * width(text))
        return kind(runner.vformat(text, args, kwargs))

    return run


# -- comparisons -----------------------------------------------------------------------------------------------------
COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "lteq": operator.le, "gt": operator.gt,
    "gteq": operator.ge, "in": lambda a, b: a in b, "notin": lambda a, b: a not in b,
}  # fmt: skip


def compare(left: Any, *rest: Any) -> Any:
    """Evaluate a comparison chain: `a < b <= c` is passed as a, "lt", b, "lteq", c."""
    result: Any = True
    budget = current()
    for name, right in zip(rest[::2], rest[1::2], strict=True):
        budget.step()
        if not isinstance(left, _NUMBERS) or not isinstance(right, _NUMBERS):
            (_charge_in if name in ("in", "notin") else _charge_order)(budget, left, right)
        result = COMPARISONS[name](left, right)
        if not result:
            return result
        left = right
    return result


def _charge_order(budget: Budget, left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        budget.step(min(len(left), len(right)) // SCAN)
    elif left is not None and right is not None:
        budget.step(min(budget.size(left).steps, budget.size(right).steps))


def _charge_in(budget: Budget, item: Any, values: Any) -> None:
    if isinstance(values, str):
        if isinstance(item, str):
            charge_search(budget, values, item)
    elif isinstance(values, dict):
        check_key(item)
    elif isinstance(values, CONTAINERS):
        budget.step(budget.size(item).steps + budget.size(values).steps)
    else:  # a range, or an iterator with a length hint
        budget.step(operator.length_hint(values, 0) * (1 + budget.size(item).steps) // ITEMS)


def check_key(key: Any) -> Any:
    """Reject keys that are slow to hash, which happens on every lookup."""
    if isinstance(key, tuple):
        raise TypeError("a tuple cannot be a key")
    if isinstance(key, str) and len(key) > _MAX_KEY:
        raise current().exceeded(f"a key of {_MAX_KEY} characters")
    return current().check(key)


def take_slice(values: Any, start: Any, stop: Any, step: Any) -> Any:
    """Return `values[start:stop:step]`, charged."""
    budget = current()
    budget.step()
    if isinstance(values, (str, list, tuple)):
        count = len(range(*slice(start, stop, step).indices(len(values))))
        if isinstance(values, str):
            budget.step(count // SCAN)
            budget.make_text(count, width(values))
        else:
            budget.make_list(count)
    return budget.check(values[start:stop:step])


# -- operators -------------------------------------------------------------------------------------------------------
def charge_binary(budget: Budget, symbol: str, left: Any, right: Any) -> None:
    budget.step()
    if symbol == "+" and isinstance(left, str) and isinstance(right, str):
        chars, wide = len(left) + len(right), max(width(left), width(right))
        budget.step(chars // SCAN)
        budget.make_text(chars, wide)
        if isinstance(left, Markup) != isinstance(right, Markup):
            budget.reserve(chars * wide * ESCAPED)
    elif isinstance(left, _NUMBERS) and isinstance(right, _NUMBERS):
        if symbol in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if symbol == "**" else left.bit_length() + right.bit_length()
            if bits > 2 * MAX_BITS:
                raise budget.exceeded(f"numbers of {MAX_BITS} bits")
    elif symbol == "+" and isinstance(left, (list, tuple)) and isinstance(right, (list, tuple)):
        budget.make_list(len(left) + len(right))
    elif symbol == "*" and isinstance(left, (str, list, tuple)) and isinstance(right, int):
        _charge_repeat(budget, left, right)
    elif symbol == "*" and isinstance(right, (str, list, tuple)) and isinstance(left, int):
        _charge_repeat(budget, right, left)
    elif symbol == "%" and isinstance(left, str):
        charge_percent(budget, left, right)
    elif not isinstance(left, Undefined) and not isinstance(right, Undefined):
        kinds = f"{type(left).__name__!r} and {type(right).__name__!r}"
        raise TypeError(f"unsupported operand type(s) for {symbol}: {kinds}")


def _charge_repeat(budget: Budget, values: Any, times: int) -> None:
    count = len(values) * max(times, 0)
    if isinstance(values, str):
        budget.step(count // SCAN)
        budget.make_text(count, width(values))
    else:
        budget.make_list(count)


# -- methods ---------------------------------------------------------------------------------------------------------
def _scan(chars_per_step: int, bytes_per_char: int = 0) -> Cost:
    def cost(budget: Budget, text: str, args: Sequence[Any]) -> None:
        budget.step(len(text) // chars_per_step)
        budget.reserve(len(text) * bytes_per_char * width(text))

    return cost


def _with_needle(charge: Callable[[Budget, str, str], None]) -> Cost:
    def cost(budget: Budget, text: str, args: Sequence[Any]) -> None:
        charge(budget, text, _needle(args))

    return cost


def _needle(args: Sequence[Any]) -> str:
    return next((arg for arg in args if isinstance(arg, str)), "")


def _split(charge: Callable[[Budget, str, str], None]) -> Cost:
    def cost(budget: Budget, text: str, args: Sequence[Any]) -> None:
        needle = _needle(args)
        charge(budget, text, needle)
        pieces = 1 + (text.count(needle) if needle else len(text) // 2)
        max_splits = min((n for n in args if type(n) is int and n >= 0), default=pieces)
        _charge_pieces(budget, text, min(pieces, max_splits + 1))

    return cost


def _partition(charge: Callable[[Budget, str, str], None]) -> Cost:
    def cost(budget: Budget, text: str, args: Sequence[Any]) -> None:
        charge(budget, text, _needle(args))
        _charge_pieces(budget, text, 3)

    return cost


def _charge_pieces(budget: Budget, text: str, pieces: int) -> None:
    budget.make_list(pieces, 88)
    budget.spend(len(text) * width(text))


def _splitlines(budget: Budget, text: str, args: Sequence[Any]) -> None:
    _charge_pieces(budget, text, count_lines(text))


def _charge_args(budget: Budget, text: str, args: Sequence[Any]) -> None:
    budget.step(sum(budget.size(arg).steps for arg in args))


def _replace(budget: Budget, text: str, args: Sequence[Any]) -> None:
    texts = [arg for arg in args if isinstance(arg, str)]
    if len(texts) == 2:
        charge_replace(budget, text, texts[0], texts[1], next((arg for arg in args if type(arg) is int), -1))


def _charge_all(budget: Budget, values: Any, args: Sequence[Any]) -> None:
    budget.step(budget.size(values).steps)


def _check_key_arg(budget: Budget, values: Any, args: Sequence[Any]) -> None:
    for key in args[:1]:
        check_key(key)


def _free(budget: Budget, owner: Any, args: Sequence[Any]) -> None:
    pass


CASE = _scan(64, 6)  # a non-ASCII character may become three, in a separate buffer
_TEXT_METHODS: dict[str, Cost] = {
    **dict.fromkeys(("capitalize", "casefold", "lower", "swapcase", "title", "upper"), CASE),
    **dict.fromkeys((
        "isalnum", "isalpha", "isascii", "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable",
        "isspace", "istitle", "isupper",
    ), _scan(64)),
    **dict.fromkeys(("count", "find", "index"), _with_needle(charge_search)),
    **dict.fromkeys(("rfind", "rindex", "lstrip", "rstrip", "strip"), _with_needle(charge_reverse_search)),
    **dict.fromkeys(("endswith", "removeprefix", "removesuffix", "startswith"), _charge_args),
    "split": _split(charge_search), "rsplit": _split(charge_reverse_search), "splitlines": _splitlines,
    "partition": _partition(charge_search), "rpartition": _partition(charge_reverse_search), "replace": _replace,
    "join": _free, "format": _free,  # charged as they run, by `join_texts` and `formatter`
}  # fmt: skip
METHODS: tuple[tuple[Any, Mapping[str, Cost]], ...] = (
    (str, _TEXT_METHODS),
    (dict, {"copy": _charge_all, "get": _check_key_arg, "items": _free, "keys": _free, "values": _free}),
    ((list, tuple), dict.fromkeys(("copy", "count", "index"), _charge_all)),
    ((int, float, complex, range, *VIEWS), {"is_integer": _free}),
)


def methods_of(value: Any) -> Mapping[str, Cost] | None:
    """The allowed methods of a value with their costs; None for Jinja's own objects."""
    return next((methods for kind, methods in METHODS if isinstance(value, kind)), None)

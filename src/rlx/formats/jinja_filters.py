"""Filters, tests and globals of templates, each charged to the budget before it runs.

Jinja's own where possible, with costs from tables; filters and tests in no table do not exist.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import wraps
from typing import Any

from jinja2 import Environment, pass_environment
from jinja2.filters import FILTERS, make_attrgetter, make_multi_attrgetter
from jinja2.runtime import Undefined
from jinja2.tests import TESTS as _TESTS
from jinja2.utils import Namespace

from rlx.errors import RequestError, shortened
from rlx.formats.jinja_budget import REPR, SCAN, current, to_list, width
from rlx.formats.jinja_costs import (
    charge_percent,
    charge_replace,
    charge_reverse_search,
    check_key,
    compare,
    count_lines,
    join_texts,
    take_slice,
)
from rlx.formats.tensor_file import quoted

_MAX_PATH = 8  # parts of `attribute="a.b.c"`
_MAX_DIGITS = 1000  # of a text converted to a number
_MAX_INDENT = 64
_MAX_SEPARATOR = 64
_WIDE_TIME = re.compile(r"%[^a-zA-Z%]*\d")  # glibc's "%9999Y"

# Text filters: characters per step, and bytes per byte of text for result and scratch together.
_TEXT_FILTERS = {
    "capitalize": (64, 6), "lower": (64, 6), "upper": (64, 6), "title": (4, 100), "string": (SCAN, 1),
    "safe": (SCAN, 2), "e": (256, 12), "escape": (256, 12), "forceescape": (256, 12), "urlencode": (16, 12),
    "striptags": (4, 64), "wordcount": (16, 40), "truncate": (SCAN, 2),
}  # fmt: skip
_LAZY = {"items", "map", "reject", "rejectattr", "reverse", "select", "selectattr"}  # return iterators
_CHEAP = {"abs", "attr", "count", "d", "default", "first", "last", "length"}
_CHEAP_TESTS = {
    "boolean", "callable", "defined", "escaped", "false", "filter", "float", "integer", "iterable", "mapping", "none",
    "number", "sameas", "sequence", "string", "test", "true", "undefined",
}  # fmt: skip
_TEXT_TESTS = {"lower", "upper"}
_NUMBER_TESTS = {"divisibleby", "even", "odd"}
_COMPARE_TESTS = {
    "eq": "eq", "equalto": "eq", "==": "eq", "ne": "ne", "!=": "ne", "lt": "lt", "lessthan": "lt", "<": "lt",
    "le": "lteq", "<=": "lteq", "gt": "gt", "greaterthan": "gt", ">": "gt", "ge": "gteq", ">=": "gteq", "in": "in",
}  # fmt: skip

Function = Callable[..., Any]
TESTS: dict[str, Any] = dict(_TESTS)


# -- Jinja's own, charged --------------------------------------------------------------------------------------------
def _operands(run: Function, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Arguments without the environment or context that Jinja passes first."""
    return args[1:] if hasattr(run, "jinja_pass_arg") else args


def _counted(run: Function) -> Function:
    """Charge one step, and the result unless it is one of the operands."""

    @wraps(run)  # keeps the attributes that tell Jinja what to pass
    def counted(*args: Any, **kwargs: Any) -> Any:
        current().step()
        result = run(*args, **kwargs)
        return result if any(result is arg for arg in args) else current().charge_result(result)

    return counted


def _cheap(run: Function) -> Function:
    """Charge one step; the result is small or already exists."""

    @wraps(run)
    def cheap(*args: Any, **kwargs: Any) -> Any:
        current().step()
        return run(*args, **kwargs)

    return cheap


def _of_text(run: Function, chars_per_step: int, bytes_per_byte: int) -> Function:
    @wraps(run)
    def of_text(*args: Any, **kwargs: Any) -> Any:
        budget = current()
        for value in (*_operands(run, args), *kwargs.values()):
            chars, wide = budget.text_size(value)
            budget.step(chars // chars_per_step)
            budget.reserve(chars * bytes_per_byte * wide)
        return run(*args, **kwargs)

    return of_text


def _lazy(run: Function) -> Function:
    """Return an iterator, as Jinja does, but over values computed eagerly, so chains do not nest."""

    @wraps(run)
    def lazy(*args: Any, **kwargs: Any) -> Any:
        _check_path(kwargs.get("attribute"))
        if run in (FILTERS["selectattr"], FILTERS["rejectattr"]):
            _check_path(next(iter(args[2:]), None))
        for value in args[:1]:
            if isinstance(value, str):  # `reverse`
                current().make_text(len(value), width(value))
        result = run(*args, **kwargs)
        return result if isinstance(result, str) else iter(to_list(result))

    return lazy


def _check_path(attribute: Any) -> None:
    if isinstance(attribute, str) and (len(attribute) > 256 or attribute.count(".") + attribute.count(",") > _MAX_PATH):
        raise ValueError(f"attribute: expected at most {_MAX_PATH} parts, found {quoted(attribute)}")


def _compares(name: str) -> Function:
    return lambda left, right: compare(left, name, right)


def _of_numbers(run: Function) -> Function:
    """Accept only numbers: for a text, `value % 2` would format it."""

    @wraps(run)
    def of_numbers(*values: Any) -> Any:
        current().step()
        for value in values:
            if not isinstance(value, (int, float, Undefined)):
                raise TypeError(f"expected a number, found {quoted(value)}")
        return run(*values)

    return of_numbers


# -- filters ---------------------------------------------------------------------------------------------------------
def _list(values: Iterable[Any]) -> Any:
    return current().check(to_list(values))


def _trim(value: Any, chars: str | None = None) -> str:
    text = value if isinstance(value, str) else current().text(value)
    charge_reverse_search(current(), text, chars or "")
    return text.strip(chars)


def _replace(value: Any, old: Any, new: Any, count: int | None = None) -> str:
    text, old, new = (current().text(part) for part in (value, old, new))
    charge_replace(current(), text, old, new, -1 if count is None else count)
    return str(text.replace(old, new, -1 if count is None else count))


@pass_environment
def _join(env: Environment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    _check_path(attribute)
    if attribute is not None:
        value = map(make_attrgetter(env, attribute), to_list(value))
    return join_texts(current().text(d), value)


def _format(value: Any, *args: Any, **kwargs: Any) -> Any:
    text = value if isinstance(value, str) else current().text(value)
    charge_percent(current(), text, kwargs or args)
    return text % (kwargs or args)


def _indent(text: str, width_or_text: int | str = 4, first: bool = False, blank: bool = False) -> Any:
    indent = width_or_text if isinstance(width_or_text, str) else " "
    length = len(indent) if isinstance(width_or_text, str) else max(width_or_text, 0)
    lines = count_lines(text)
    current().make_list(lines, 2 * 88)
    current().reserve_text(length, 4)
    current().reserve_text(len(text) + (length + 1) * (lines + 1), max(width(indent), width(text)) * 2)
    return FILTERS["indent"](text, width_or_text, first, blank)


def _int(value: Any, default: int = 0, base: int = 10) -> Any:
    _check_digits(value)
    return FILTERS["int"](value, default, base)


def _float(value: Any, default: float = 0.0) -> Any:
    _check_digits(value)
    return FILTERS["float"](value, default)


def _check_digits(value: Any) -> None:
    if isinstance(value, str) and len(value) > _MAX_DIGITS:
        raise current().exceeded(f"a number of {_MAX_DIGITS} digits")


def _round(value: Any, precision: int = 0, method: Any = "common") -> Any:
    if not isinstance(value, (int, float)):
        raise TypeError(f"round: expected a number, found {quoted(value)}")
    if not isinstance(precision, int) or abs(precision) > 100:
        raise ValueError(f"round: expected a precision of at most 100, found {quoted(precision)}")
    return FILTERS["round"](value, precision, method)


@pass_environment
def _sum(env: Environment, value: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
    _check_path(attribute)
    if not isinstance(start, (int, float)):
        raise TypeError("sum: adds numbers only")  # lists would be copied on every addition
    return FILTERS["sum"](env, to_list(value), attribute, start)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """`tojson` as in transformers: Jinja's own escapes HTML."""
    budget = current()
    between = 4
    for separator in separators or ():
        if not isinstance(separator, str) or len(separator) > _MAX_SEPARATOR:
            raise budget.exceeded(f"a separator of {_MAX_SEPARATOR} characters")
        between += len(separator)
    size = budget.size(value)
    if indent is not None:
        length = len(indent) if isinstance(indent, str) else indent
        if length > _MAX_INDENT:
            raise budget.exceeded(f"an indent of {_MAX_INDENT}")
        between += 1 + max(length, 0) * (size.nesting + 1)
        budget.step(4 * size.items)  # the pure Python encoder
    budget.step(8 * size.steps)
    own = max([size.width, *(width(text) for text in (indent, *(separators or ())) if isinstance(text, str))])
    chars = size.chars * (2 * REPR if ensure_ascii else 6) + size.items * (between + 24)
    budget.reserve(chars * own + size.items * (0 if indent is None else 200))
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


# -- filters that order values by keys -------------------------------------------------------------------------------
def _keyed(env: Environment, value: Iterable[Any], attribute: Any, default: Any = None) -> list[Any]:
    """List the values after charging for their keys: read, lower-cased and compared as in sorting."""
    _check_path(attribute)
    key_of = make_attrgetter(env, attribute, default=default)
    return _charged_keys(to_list(value), lambda item: (key_of(item),))


def _charged_keys(values: list[Any], keys_of: Callable[[Any], Iterable[Any]]) -> list[Any]:
    budget = current()
    steps = 0
    for item in values:
        budget.step(2)
        budget.spend(88)
        for key in keys_of(item):
            size = budget.size(key)
            steps += 1 + size.steps
            if isinstance(key, str):
                budget.reserve(size.chars * size.width * 6)
                budget.make_text(size.chars, size.width)
    budget.step(steps * max(len(values).bit_length(), 1) // 4)
    return values


@pass_environment
def _sort(
    env: Environment, value: Iterable[Any], reverse: bool = False, case_sensitive: bool = False, attribute: Any = None
) -> Any:
    _check_path(attribute)
    values = _charged_keys(to_list(value), make_multi_attrgetter(env, attribute))
    return FILTERS["sort"](env, values, reverse, case_sensitive, attribute)


@pass_environment
def _unique(env: Environment, value: Iterable[Any], case_sensitive: bool = False, attribute: Any = None) -> Any:
    values = _keyed(env, value, attribute)
    key_of = make_attrgetter(env, attribute)
    for item in values:
        check_key(key_of(item))
    return iter(to_list(FILTERS["unique"](env, values, case_sensitive, attribute)))


@pass_environment
def _min(env: Environment, value: Iterable[Any], case_sensitive: bool = False, attribute: Any = None) -> Any:
    return FILTERS["min"](env, _keyed(env, value, attribute), case_sensitive, attribute)


@pass_environment
def _max(env: Environment, value: Iterable[Any], case_sensitive: bool = False, attribute: Any = None) -> Any:
    return FILTERS["max"](env, _keyed(env, value, attribute), case_sensitive, attribute)


@pass_environment
def _groupby(
    env: Environment, value: Iterable[Any], attribute: Any, default: Any = None, case_sensitive: bool = False
) -> Any:
    return FILTERS["groupby"](env, _keyed(env, value, attribute, default), attribute, default, case_sensitive)


@pass_environment
def _dictsort(
    env: Environment, value: Mapping[Any, Any], case_sensitive: bool = False, by: Any = "key", reverse: bool = False
) -> Any:
    _keyed(env, value.items(), 1 if by == "value" else 0)
    return FILTERS["dictsort"](value, case_sensitive, by, reverse)


# -- filters that the sandbox inserts into the AST -------------------------------------------------------------------
class Steps:
    """The values of a loop, charged one step or more per iteration; sized, for `loop.length`."""

    def __init__(self, values: Iterable[Any], pieces: int) -> None:
        sized = isinstance(values, (list, tuple, range))
        self._values: Any = values if sized else to_list(values)
        self.pieces = pieces  # most text pieces written per iteration

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        budget = current()
        for value in self._values:
            budget.step(1 + self.pieces // 64)
            budget.spend(8 * self.pieces)
            yield value


def _concat(*parts: Any) -> str:
    return join_texts("", parts)


_AST_FILTERS: dict[str, Function] = {
    "rlx_steps": Steps, "rlx_concat": _concat, "rlx_compare": compare, "rlx_slice": take_slice, "rlx_key": check_key,
    "rlx_literal": lambda value: current().charge_result(value),
}  # fmt: skip


# -- tables ----------------------------------------------------------------------------------------------------------
_OWN: dict[str, Function] = {
    "trim": _trim, "replace": _replace, "join": _join, "format": _format, "indent": _indent, "int": _int,
    "float": _float, "round": _round, "sum": _sum, "tojson": _tojson, "sort": _sort, "unique": _unique,
    "groupby": _groupby, "dictsort": _dictsort,
}  # fmt: skip
TEMPLATE_FILTERS: dict[str, Function] = {
    **_AST_FILTERS,
    **{name: _cheap(FILTERS[name]) for name in _CHEAP},
    **{name: _cheap(_lazy(FILTERS[name])) for name in _LAZY},
    **{name: _counted(_of_text(FILTERS[name], *rates)) for name, rates in _TEXT_FILTERS.items()},
    **{name: _counted(run) for name, run in _OWN.items()},
    "list": _cheap(_list), "min": _cheap(_min), "max": _cheap(_max),
}  # fmt: skip
TEMPLATE_TESTS: dict[str, Function] = {
    **{name: _cheap(TESTS[name]) for name in _CHEAP_TESTS},
    **{name: _cheap(_of_text(TESTS[name], 64, 1)) for name in _TEXT_TESTS},
    **{name: _of_numbers(TESTS[name]) for name in _NUMBER_TESTS},
    **{name: _compares(operator) for name, operator in _COMPARE_TESTS.items()},
}


# -- globals ---------------------------------------------------------------------------------------------------------
class _Namespace(Namespace):
    """Jinja's namespace without private names, and with a constant repr."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *positional = args  # `namespace(self=1)` is allowed
        values = _dict(*positional, **kwargs)
        for name in values:
            _check_name(name)
        Namespace.__init__(self, values)
        current().spend(400)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise ValueError(f"namespace: {quoted(name)} is not a valid name")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    if len(args) > 1:
        raise TypeError(f"dict: expected at most 1 argument, found {len(args)}")
    source = args[0] if args else {}
    pairs = to_list(source.items() if isinstance(source, dict) else source)
    for key, _ in pairs:
        check_key(key)
    current().make_list(len(pairs) + len(kwargs), 104)
    return dict(pairs, **kwargs)


def _range(*bounds: int) -> range:
    for bound in bounds:
        current().check(bound)
    values = range(*bounds)
    current().check_items(len(values))
    return values


def _raise_exception(message: Any = "") -> None:
    """Called by templates that reject the messages: RequestError, since it is the caller's fault."""
    raise RequestError(f"{shortened(current().text(message), 300) or 'refused'} (says the chat template)")


def _strftime_now(format: str) -> str:
    if len(format) > 256 or _WIDE_TIME.search(format):
        raise current().exceeded("a plain date format")
    return datetime.now().strftime(format)


TEMPLATE_GLOBALS: Mapping[str, Any] = {
    "range": _range, "dict": _dict, "namespace": _Namespace, "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}  # fmt: skip

"""Jinja for templates that come with a model, which are programs by strangers: no files, no internals, and bounds.

Built on Jinja's immutable sandbox, set up as transformers sets it up. What is promised of a render: it ends, with a
FormatError where need be, after at most `MAX_SECONDS` of CPU time plus a few primitive operations, `MAX_STEPS` loop
turns, calls and filters, and `MAX_DEPTH` nested calls; no string grows beyond `MAX_CHARS`, no list beyond `MAX_ITEMS`,
and no value beyond `MAX_CHARS` when written out. The bounds hold because every way to repeat, to multiply or to look at
all of a value passes through here: loops, comparisons, slices, `~` and the literals of lists are rewritten in the
template's tree; operators, calls and the joining of a block's text are Jinja's own hooks; filters and tests are
wrapped; and constants are not folded.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from itertools import islice
from typing import Any

from jinja2 import nodes, pass_context
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import FILTERS
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from rlx.errors import FormatError, RequestError, RlxError, shortened
from rlx.formats.tensors import quoted

MAX_TEMPLATE_CHARS = 1 << 17
MAX_SECONDS = 1.0
MAX_STEPS = 1_000_000
MAX_DEPTH = 64
MAX_CHARS = 1 << 23
MAX_ITEMS = 1 << 18
_MAX_NESTING = 64
_MAX_BITS = 1 << 10
_MAX_INDENT = 64

# A field of `"...".format` or `"..." % x` whose width has four digits or comes from an argument, and glibc's "%9999Y".
_WIDE_FIELD = re.compile(r"\{[^{}:]*:[^{}]*(?:\d{4}|\{)")
_WIDE_PERCENT = re.compile(r"%(?:\([^)]*\))?[-#0 +]*(?:\*|\d{4}|\d*\.(?:\*|\d{4}))")
_WIDE_TIME = re.compile(r"%[^a-zA-Z%]*\d")
# Filters that multiply text in ways not worth bounding, or that draw lots; no chat template uses them.
_NO_FILTERS = {"batch", "center", "filesizeformat", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr"}
_METHODS: tuple[tuple[Any, frozenset[str]], ...] = (
    (str, frozenset({
        "capitalize", "casefold", "count", "endswith", "find", "format", "index", "isalnum", "isalpha", "isascii",
        "isdecimal", "isdigit", "isidentifier", "islower", "isnumeric", "isprintable", "isspace", "istitle", "isupper",
        "join", "lower", "lstrip", "partition", "removeprefix", "removesuffix", "replace", "rfind", "rindex",
        "rpartition", "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "swapcase", "title", "upper",
    })),
    (dict, frozenset({"copy", "get", "items", "keys", "values"})),
    ((list, tuple), frozenset({"copy", "count", "index"})),
    ((int, float, bytes, range), frozenset({"is_integer"})),
)  # fmt: skip


class Program:
    """A template, checked and compiled. `reads_parts`: it takes the content of messages apart by itself."""

    def __init__(self, source: str, where: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise FormatError(f"{where}: expected at most {MAX_TEMPLATE_CHARS} characters, found {len(source)}")
        self.where = where
        try:
            tree = _ENVIRONMENT.parse(source)
            _refuse_other_files(tree, where)
            self.reads_parts = _reads_parts(tree)
            self._template = _ENVIRONMENT.from_string(_Bounded().visit(tree))
        except TemplateSyntaxError as error:
            raise FormatError(f"{where}, line {error.lineno}: {_shown(error.message)}") from error
        except (RecursionError, MemoryError) as error:
            raise FormatError(f"{where}: nested too deeply") from error
        except (TemplateError, SyntaxError, ValueError, OverflowError) as error:
            raise FormatError(f"{where}: {_shown(error)}") from error

    def render(self, variables: dict[str, Any]) -> str:
        """The text that the template makes of the variables, which must be plain data."""
        budget = _Budget(self.where)
        token = _budget.set(budget)
        try:
            out = []
            for piece in self._template.generate(variables):
                budget.write(piece)
                out.append(piece)
            return "".join(out)
        except RlxError:
            raise
        except RecursionError as error:
            raise FormatError(f"{self.where}: calls itself without end") from error
        except Exception as error:  # whatever an operator, a filter or a method raises
            raise FormatError(f"{self.where}: {type(error).__name__}: {_shown(error)}") from error
        finally:
            _budget.reset(token)


def _shown(error: object) -> str:
    return shortened(str(error), 300)


# -- bounds ----------------------------------------------------------------------------------------------------------
class _Budget:
    """What one render has used."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._end = time.thread_time() + MAX_SECONDS
        self._steps = 0
        self._chars = 0
        self.depth = 0
        self._weights: dict[int, tuple[Any, int, int]] = {}  # by identity: the value, its weight and its nesting

    def step(self) -> None:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise self.exceeded(f"{MAX_STEPS} steps")
        if self._steps % 16 == 0:
            self.check_time()

    def check_time(self) -> None:
        if time.thread_time() > self._end:
            raise self.exceeded(f"{MAX_SECONDS:g} seconds")

    def write(self, text: str) -> None:
        self.step()
        self._chars += len(text)
        self.check_chars(self._chars)

    def check_chars(self, count: int) -> None:
        if count > MAX_CHARS:
            raise self.exceeded(f"{MAX_CHARS} characters")

    def check_items(self, count: int) -> None:
        if count > MAX_ITEMS:
            raise self.exceeded(f"a list of {MAX_ITEMS} values")

    def check_value(self, value: Any) -> Any:
        """Refuse a value that is too long when written out: `[x, x]` over and over is small only in memory."""
        weight, nesting = self._weigh(value, 0)
        self.check_chars(weight)
        if nesting > _MAX_NESTING:
            raise self.exceeded(f"{_MAX_NESTING} nested values")
        return value

    def check_together(self, values: Iterable[Any]) -> None:
        self.check_chars(sum(self._weigh(value, 0)[0] for value in values))

    def _weigh(self, value: Any, depth: int) -> tuple[int, int]:
        if isinstance(value, str):
            return len(value) + 1, 0
        if not isinstance(value, (list, tuple, dict)):
            return 1, 0
        known = self._weights.get(id(value))
        if known is not None:
            return known[1], known[2]
        if depth > _MAX_NESTING:
            return 1, depth
        weight, nesting = 1, 0
        for inner in (*value.keys(), *value.values()) if isinstance(value, dict) else value:
            inner_weight, inner_nesting = self._weigh(inner, depth + 1)
            weight, nesting = weight + inner_weight, max(nesting, inner_nesting)
        # kept alive with its identity; templates cannot change what they were given or have made
        self._weights[id(value)] = (value, weight, nesting + 1)
        return weight, nesting + 1

    def exceeded(self, what: str) -> FormatError:
        return FormatError(f"{self._where}: the template goes beyond {what}")


_budget: ContextVar[_Budget] = ContextVar("budget")


class _Steps:
    """A loop's values, each a step; it has a length, since `loop.length` asks for it."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._values = _listed(values)

    def __len__(self) -> int:
        return len(self._values)

    def __iter__(self) -> Iterator[Any]:
        budget = _budget.get()
        for value in self._values:
            budget.step()
            yield value


class _Bounded(NodeTransformer):
    """Put the values of every loop, the parts of every `~`, every literal list, and what is compared or sliced through
    filters that check them.
    """

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = _through("rlx_steps", node.iter)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Expr:
        self.generic_visit(node)
        return _through("rlx_concat", nodes.List(node.nodes, lineno=node.lineno))

    def visit_List(self, node: nodes.Literal) -> nodes.Expr:
        self.generic_visit(node)
        target = isinstance(node, nodes.Tuple) and node.ctx != "load"
        return node if target else _through("rlx_value", node)

    visit_Dict = visit_Tuple = visit_List

    def visit_Compare(self, node: nodes.Compare) -> nodes.Compare:
        self.generic_visit(node)
        for operand in node.ops:  # each, since a < b < c is one comparison
            operand.expr = _through("rlx_value", operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Getitem:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _through("rlx_value", node.node)
        return node


def _through(name: str, node: nodes.Node) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _refuse_other_files(tree: nodes.Template, where: str) -> None:
    for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        raise FormatError(f"{where}, line {node.lineno}: {type(node).__name__.lower()} of another template")


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether there is a `part.text` or `part['text']`."""
    by_name = (node.attr == "text" for node in tree.find_all(nodes.Getattr))
    by_key = (isinstance(n.arg, nodes.Const) and n.arg.value == "text" for n in tree.find_all(nodes.Getitem))
    return any(by_name) or any(by_key)


def _listed(values: Iterable[Any]) -> list[Any]:
    found = list(islice(values, MAX_ITEMS + 1))
    _budget.get().check_items(len(found))
    return found


def _written(pieces: Iterable[str]) -> str:
    """The text of a block, a macro or a call, from its pieces."""
    found = list(pieces)
    _budget.get().check_chars(sum(map(len, found)))
    return "".join(found)


def _joined(glue: str, values: Iterable[Any]) -> str:
    parts = [str(value) for value in _listed(values)]
    _budget.get().check_chars(sum(map(len, parts)) + len(glue) * len(parts))
    return glue.join(parts)


def _check_replace(text: str, old: str, new: str, count: int = -1) -> None:
    found = text.count(old)
    _budget.get().check_chars(len(text) + (found if count < 0 else min(found, count)) * max(0, len(new) - len(old)))


def _check_format(text: str, wide: re.Pattern[str], fields: int, values: Iterable[Any]) -> None:
    if wide.search(text):
        raise _budget.get().exceeded("a format with a width of three digits")
    longest = max((len(value if isinstance(value, str) else str(value)) for value in values), default=0)
    _budget.get().check_chars(len(text) + fields * (longest + 1000))


# -- the environment -------------------------------------------------------------------------------------------------
class _Environment(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "**", "%"})
    concat = staticmethod(_written)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if not super().is_safe_attribute(obj, attr, value):
            return False
        allowed = next((names for kind, names in _METHODS if isinstance(obj, kind)), None)
        return allowed is None or attr in allowed or not callable(value)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget.get()
        budget.step()
        if isinstance(left, (str, list, tuple)) or isinstance(right, (str, list, tuple)):
            self._check_sizes(budget, operator, left, right)
        elif operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * right if operator == "**" else left.bit_length() + right.bit_length()
            if bits > _MAX_BITS:
                raise budget.exceeded(f"numbers of {_MAX_BITS} bits")
        result = super().call_binop(context, operator, left, right)
        if isinstance(result, int) and result.bit_length() > _MAX_BITS:
            raise budget.exceeded(f"numbers of {_MAX_BITS} bits")
        return budget.check_value(result)

    def _check_sizes(self, budget: _Budget, operator: str, left: Any, right: Any) -> None:
        check = budget.check_chars if isinstance(left, str) or isinstance(right, str) else budget.check_items
        if operator == "+" and isinstance(left, (str, list, tuple)) and isinstance(right, (str, list, tuple)):
            check(len(left) + len(right))
        elif operator == "*" and isinstance(right, int):
            check(len(left) * right)
        elif operator == "*" and isinstance(left, int):
            check(len(right) * left)
        elif operator == "%" and isinstance(left, str):
            values = right if isinstance(right, tuple) else right.values() if isinstance(right, dict) else (right,)
            _check_format(left, _WIDE_PERCENT, left.count("%"), values)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        run = super().wrap_str_format(value)
        if run is None:
            return None
        text = value.__self__

        def checked(*args: Any, **kwargs: Any) -> str:
            _check_format(text, _WIDE_FIELD, text.count("{"), (*args, *kwargs.values()))
            return run(*args, **kwargs)

        return checked

    def call(self, context: Context, obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        budget.check_together((*args, *kwargs.values()))  # a macro sees them as one value, `varargs`
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", None)
        if isinstance(owner, str) and name == "join" and len(args) == 1:
            return _joined(owner, args[0])
        if isinstance(owner, str) and name == "replace" and all(isinstance(a, str) for a in args[:2]):
            _check_replace(owner, *args)
        budget.depth += 1
        if budget.depth > MAX_DEPTH:
            raise budget.exceeded(f"{MAX_DEPTH} nested calls")
        try:
            return budget.check_value(super().call(context, obj, *args, **kwargs))
        finally:
            budget.depth -= 1


class _Generation(Extension):
    """`{% generation %}` marks what the model wrote, for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    """Called with every value that is printed. That it takes the context keeps Jinja from folding constants."""
    _budget.get().step()
    return value


# -- filters ---------------------------------------------------------------------------------------------------------
def _counted(run: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(run)  # keeps the marks by which Jinja knows what to pass
    def counted(*args: Any, **kwargs: Any) -> Any:
        budget = _budget.get()
        budget.step()
        budget.check_time()  # now, not at every 16th step: the next operation may look at all of a large value
        return budget.check_value(run(*args, **kwargs))

    return counted


def _replace(text: Any, old: str, new: str, count: int | None = None) -> str:
    _check_replace(str(text), old, new, -1 if count is None else count)
    return str(text).replace(old, new, -1 if count is None else count)


@pass_context
def _join(context: Context, value: Iterable[Any], d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = context.environment.call_filter("map", value, kwargs={"attribute": attribute}, context=context)
    return _joined(str(d), value)


def _format(text: str, *args: Any, **kwargs: Any) -> str:
    _check_format(str(text), _WIDE_PERCENT, str(text).count("%"), (*args, *kwargs.values()))
    return str(text) % (kwargs or args)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    length = width if isinstance(width, int) else len(width)
    _budget.get().check_chars(len(text) + max(length, 0) * (1 + text.count("\n")))
    return FILTERS["indent"](text, width, first, blank)  # type: ignore[no-any-return]


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    if abs(precision) > 100:
        raise ValueError(f"round: expected a precision of at most 100, found {_shown(precision)}")
    return FILTERS["round"](value, precision, method)  # type: ignore[no-any-return]


@pass_context
def _sum(context: Context, value: Iterable[Any], attribute: str | int | None = None, start: float = 0) -> Any:
    if not isinstance(start, (int, float)):
        raise TypeError("sum: adds numbers only")  # lists would be copied once for each
    return FILTERS["sum"](context.environment, value, attribute, start)


def _tojson(
    value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
    separators: tuple[str, str] | None = None, sort_keys: bool = False,
) -> str:  # fmt: skip
    """As transformers has it: Jinja's own would escape HTML."""
    if indent is not None and (len(indent) if isinstance(indent, str) else indent) > _MAX_INDENT:
        raise _budget.get().exceeded(f"an indent of {_MAX_INDENT}")
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


_OWN_FILTERS: dict[str, Callable[..., Any]] = {
    "replace": _replace, "join": _join, "format": _format, "indent": _indent, "list": _listed, "round": _round,
    "sum": _sum, "tojson": _tojson,
    # what `_Bounded` puts in
    "rlx_steps": lambda values: _Steps(values), "rlx_concat": lambda parts: _joined("", parts),
    "rlx_value": lambda value: value,
}  # fmt: skip


# -- globals ---------------------------------------------------------------------------------------------------------
class _Namespace(Namespace):
    """Jinja's, without names that Python itself reads, and without writing itself out."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, *given = args  # `namespace(self=1)` is allowed
        for name in dict(*given, **kwargs):
            _check_name(name)
        Namespace.__init__(self, *given, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)

    def __repr__(self) -> str:
        return "<Namespace>"


def _check_name(name: Any) -> None:
    if not isinstance(name, str) or name.startswith("_"):
        raise ValueError(f"namespace: {quoted(name)} is no name for a value")


def _dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _range(*bounds: int) -> range:
    found = range(*bounds)
    _budget.get().check_items(len(found))
    return found


def _raise_exception(message: Any = "") -> None:
    """Called by templates that cannot render these messages: the caller's fault, not the template's."""
    raise RequestError(f"{_shown(message) or 'refused'} (says the chat template)")


def _strftime_now(format: str) -> str:
    if len(format) > 256 or _WIDE_TIME.search(format):
        raise _budget.get().exceeded("a plain date format")
    return datetime.now().strftime(format)


_GLOBALS: Mapping[str, Any] = {
    "range": _range, "dict": _dict, "namespace": _Namespace, "raise_exception": _raise_exception,
    "strftime_now": _strftime_now,
}  # fmt: skip


def _environment() -> _Environment:
    made = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[_Generation, loopcontrols],
        finalize=_finalize,
        optimized=False,
    )
    kept = {name: run for name, run in FILTERS.items() if name not in _NO_FILTERS}
    made.filters = {name: _counted(run) for name, run in (kept | _OWN_FILTERS).items()}
    tests: dict[str, Any] = made.tests
    made.tests = {name: _counted(run) for name, run in tests.items()}
    del made.globals["lipsum"]  # random text
    made.globals.update(_GLOBALS)
    return made


_ENVIRONMENT = _environment()

"""Reads and writes graphs as text.

    graph @mlp mir {
      %0 = input(name="x") : f32[seq, 4]
      %1 = param(name="w") : f32[4, 2]
      %2 = fused_matmul(%0, %1, body=graph @body mir {
        %0 = input(name="acc0") : f32[seq, 2]
        %1 = tanh(%0) : f32[seq, 2]
        return %1
      }, weights=1, columns=2, layout=none) : f32[seq, 2]
      return %2
    }

Between the level and the brace come the maximum sizes of symbols, `max(seq=512)`, and the params that training does not
update, `fixed("rope.cos", "rope.sin")`, if any. Constants of more than 64 elements print as `const(value=@digest)`, or
in full as base64 with `full=True`. The parser accepts any white space, and comments from `#` to the end of a line; its
errors name the line. It matches all brackets once and then skips over them, so its time is linear in the text, however
deeply nested.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from typing import Any, NoReturn

import numpy as np

from rlx.dtypes import BY_NAME, DType, dtype
from rlx.errors import GraphError, ParseError, RlxError, nearest, shortened
from rlx.ir import registry
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.ir.provenance import here
from rlx.operand_layouts import Layout, parse_layout
from rlx.types import Dim, TensorType, parse_dim, parse_type, split_top

INLINE = 64  # constants up to this many elements print their numbers


# -- printing ---------------------------------------------------------------------------------------------------------
def graph_text(graph: Graph, *, full: bool = False, origins: bool = False, pad: str = "") -> str:
    """Formats the graph; `pad` precedes every line but the first."""
    name = graph.name if re.fullmatch(_PLAIN_NAME, graph.name) else json.dumps(graph.name)
    head = f"graph @{name} {graph.level} "
    if graph.limits:
        head += f"max({', '.join(f'{k}={v}' for k, v in sorted(graph.limits.items()))}) "
    if fixed := _fixed(graph):
        head += f"fixed({', '.join(map(json.dumps, fixed))}) "
    lines = [head + "{"]
    for node in graph.nodes:
        line = f"{pad}  {node_text(node, full=full, pad=pad + '  ')}"
        origin = str(node.origin) if origins else ""
        lines.append(f"{line}  # {origin}" if origin else line)
    lines.append(f"{pad}  return " + ", ".join([value_text(v) for v in graph.outputs]))
    return "\n".join(lines) + f"\n{pad}}}"


def _fixed(graph: Graph) -> list[str]:
    """The fixed params that the graph still has."""
    return sorted(graph.fixed.intersection(n.attrs["name"] for n in graph.params)) if graph.fixed else []


def value_text(value: Value | None) -> str:
    if value is None:
        return "none"
    return f"%{value.node.id}" if len(value.node.types) == 1 else f"%{value.node.id}.{value.index}"


def node_text(node: Node, *, full: bool = False, pad: str = "") -> str:
    """Formats one node; the lines of a body come between the first and the last."""
    parts = [value_text(o) for o in node.operands]
    parts += [f"{k}={attr_text(v, full=full, pad=pad)}" for k, v in node.attrs.items()]
    return f"%{node.id} = {node.op}({', '.join(parts)}) : {'; '.join([str(t) for t in node.types])}"


def attr_text(value: Any, *, full: bool = False, pad: str = "") -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value)
        case tuple():
            inside = ", ".join([attr_text(v, full=full, pad=pad) for v in value])
            return f"({inside},)" if len(value) == 1 else f"({inside})"
        case Array():
            return _array_text(value, full)
        case Graph():
            return graph_text(value, full=full, pad=pad)
        case int() | float() | DType() | Dim() | Layout():
            return str(value)
        case _:
            raise GraphError(f"attribute {value!r}: has no text")


def _array_text(array: Array, full: bool) -> str:
    data, kind = array.data, dtype(array.data.dtype)
    if data.size > INLINE and not full:
        return f"@{array.digest}"
    if data.size > INLINE or (full and kind.is_float and _has_nan(data)):  # text has only one NaN
        return f"{kind}{list(data.shape)}:{base64.b64encode(data.tobytes()).decode()}"
    return json.dumps((data.astype(np.float64) if kind.is_float else data).tolist())


def _has_nan(data: np.ndarray[Any, Any]) -> bool:
    with np.errstate(invalid="ignore"):  # bfloat16 warns about signalling NaNs
        return bool(np.isnan(data).any())


# -- parsing ----------------------------------------------------------------------------------------------------------
MAX_NESTING = 200  # nested brackets of all kinds; a body takes two

_STRING = r'"[^"\\]*+(?:\\.[^"\\]*+)*+"'
_PLAIN_NAME = r"[\w.+-]*"
_HEAD = re.compile(
    rf"\s*graph\s+@({_STRING}|{_PLAIN_NAME})\s+(\w+)\s*(?:max\(([^()]*)\)\s*)?"
    rf"(?:fixed\(((?:[\s,]*+{_STRING})*+[\s,]*+)\)\s*)?\{{"
)
_BODY = re.compile(r"graph\s+@")
_COMMENT = re.compile(rf'({_STRING})|#[^\n]*|"')
_BRACKET = re.compile(rf"{_STRING}|[][(){{}}]")
_STATEMENT = re.compile(rf"{_STRING}|[(\[{{]|%[0-9]+\s*=|\breturn\b")
_SEPARATORS = {c: re.compile(rf"{_STRING}|[(\[{{]|{c}") for c in ",;"}
_NODE = re.compile(r"%([0-9]{1,9})\s*=\s*(\w+)\s*\(")
_COLON = re.compile(r"\s*:")
_KEY = re.compile(r"(\w+)\s*=\s*")
_SPACE = re.compile(r"\s*")
_VALUE = re.compile(r"%([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_INTEGER = re.compile(r"-?[0-9]{1,999}")
_FLOAT = re.compile(r"-?(?:inf|nan|[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?)")
_ENCODED = re.compile(r"(\w+)\[([0-9, ]*)\]:([A-Za-z0-9+/=\s]*)")
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_LAYOUT = re.compile(r"\w+\.\w+\(")
_WORDS = {"none": None, "true": True, "false": False}


def parse_graph(text: str) -> Graph:
    """Parses a graph; op names are checked against the registry, types against the type rules."""
    parser = _Parser(text)
    try:
        graph, end = parser.graph(0)
    except RecursionError:
        raise ParseError("graph text: bodies or lists are nested too deeply for the stack that is left") from None
    rest = parser.text[end:].strip()
    if rest:
        raise ParseError(f"graph text: {rest[:40]!r} follows the closing brace")
    return graph


Span = tuple[int, int]


class _Parser:
    """Parses graphs from one text; positions are offsets, so that errors can name the line."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.text = _COMMENT.sub(self._without_comment, text)  # line numbers stay
        self.closing = self._brackets()
        self.origin = here()

    def _without_comment(self, match: re.Match[str]) -> str:
        if match[0] == '"':
            self.fail(match.start(), f"{self.text[match.start() : match.start() + 40]!r} is not a string")
        return match[1] or ""

    def _brackets(self) -> dict[int, int]:
        """Maps each bracket to its closing one."""
        closing: dict[int, int] = {}
        opened: list[int] = []
        for mark in _BRACKET.finditer(self.text):
            at, c = mark.start(), mark[0]
            if c in _CLOSING:
                opened.append(at)
                if len(opened) > MAX_NESTING:
                    self.fail(at, f"bodies or lists are nested too deeply, in more than {MAX_NESTING} brackets")
            elif c in ")]}":
                if not opened or c != _CLOSING[self.text[opened[-1]]]:
                    self.fail(at, f"{c!r} closes nothing")
                closing[opened.pop()] = at
        if opened:
            names = {"(": "parenthesis", "[": "bracket", "{": "brace"}
            self.fail(opened[-1], f"a closing {names[self.text[opened[-1]]]} is missing")
        return closing

    def _marks(self, pattern: re.Pattern[str], start: int, stop: int) -> Iterator[re.Match[str]]:
        """Matches of a pattern (of strings, opening brackets and others) outside strings and brackets."""
        while mark := pattern.search(self.text, start, stop):
            start = mark.end()
            if mark[0] in _CLOSING:
                start = self.closing[mark.start()] + 1
            elif mark[0][0] != '"':
                yield mark

    def _trimmed(self, start: int, stop: int) -> Span:
        start = _SPACE.match(self.text, start, stop).end()  # type: ignore[union-attr]  # matches anything
        while stop > start and self.text[stop - 1].isspace():
            stop -= 1
        return start, stop

    def _split(self, start: int, stop: int, separator: str = ",") -> list[Span]:
        """Splits at separators outside brackets and strings; empty text has no parts."""
        parts: list[Span] = []
        for mark in self._marks(_SEPARATORS[separator], start, stop):
            parts.append(self._trimmed(start, mark.start()))
            start = mark.end()
        first, last = self._trimmed(start, stop)
        return [*parts, (first, last)] if parts or first < last else []

    def graph(self, at: int) -> tuple[Graph, int]:
        """Parses the graph at an offset; returns it and where it ends."""
        head = _HEAD.match(self.text, at)
        if head is None:
            self.fail(at, f"expected 'graph @name level {{', found {self.text[at : at + 40].strip()!r}")
        name, level, limits, fixed = head.groups()
        if level not in (registry.HIR, registry.MIR):
            self.fail(at, f"level {level!r} is not hir or mir")
        try:
            graph = Graph(_string(name) if name.startswith('"') else name, level=level)
        except ParseError as error:
            self.fail(at, str(error), error)
        for part in split_top(limits or ""):
            limit = re.fullmatch(r"(\w+)\s*=\s*([0-9]{1,18})", part)
            if limit is None:
                self.fail(at, f"{part[:40]!r} is not a limit such as n=4")
            graph.limits[limit[1]] = int(limit[2])
        first, end = head.end(), self.closing[head.end() - 1]
        offsets = [mark.start() for mark in self._marks(_STATEMENT, first, end)]
        stray = self.text[first : offsets[0] if offsets else end].strip()
        if stray:
            self.fail(first, f"{stray[:40]!r} is not a node")
        if not offsets:
            self.fail(at, f"@{name} has no return")
        for start, stop in zip(offsets, [*offsets[1:], end], strict=True):
            self.statement(graph, *self._trimmed(start, stop), last=stop == end)
        self.fix(graph, re.findall(_STRING, fixed or ""), at)
        return graph, end + 1

    def fix(self, graph: Graph, names: list[str], at: int) -> None:
        """Record the params that training does not update."""
        try:
            graph.fixed = {_string(name) for name in names}
        except ParseError as error:
            self.fail(at, str(error), error)
        for name in sorted(graph.fixed):
            if not graph.has(name) or graph.named(name).node.op != "param":
                self.fail(at, f"fixed: {shortened(repr(name), 80)} is not a param")

    def statement(self, graph: Graph, start: int, stop: int, *, last: bool) -> None:
        try:
            if self.text.startswith("return", start):
                if not last:
                    raise ParseError("more follows the return")
                outputs = self._split(start + len("return"), stop)
                graph.outputs = tuple([_value(graph, self.text[a:b]) for a, b in outputs])
            elif last:
                raise ParseError("a graph ends with its return")
            else:
                self.node(graph, start, stop)
        except RlxError as error:
            if isinstance(error, ParseError) and str(error).startswith("graph text: line"):
                raise  # from a nested body, which is more precise
            self.fail(start, str(error), error)

    def node(self, graph: Graph, start: int, stop: int) -> None:
        text = self.text
        head = _NODE.match(text, start, stop)
        end = self.closing[head.end() - 1] if head else start
        colon = _COLON.match(text, end + 1, stop)
        if head is None or colon is None:
            raise ParseError("this is not a node", hint="%3 = add(%1, %2) : f32[4]")
        number, op = head.groups()
        if int(number) != len(graph.nodes):
            raise ParseError(f"node %{number} stands where %{len(graph.nodes)} is expected")
        definition = registry.OPS.get(op)
        if definition is None:
            raise ParseError(f"no op is called {shortened(op, 80)!r}", hint=nearest(op, registry.OPS))
        if graph.level == registry.MIR and definition.level == registry.HIR:
            raise ParseError(f"{op} is an HIR op in an MIR graph")
        types = tuple([parse_type(text[a:b]) for a, b in self._split(colon.end(), stop, ";")])
        operands: list[Value | None] = []
        attrs: dict[str, Any] = {}
        for a, b in self._split(head.end(), end):
            if text.startswith("%", a):
                operands.append(_value(graph, text[a:b]))
                continue
            if text[a : min(b, a + 5)] == "none":
                operands.append(None)
                continue
            equals = _KEY.match(text, a, b)
            if equals is None or not equals[1].isidentifier() or equals[1] in attrs:
                raise ParseError(f"{text[a:b][:40]!r} is neither an operand nor an attribute")
            key, a = equals[1], equals.end()
            if op == "const":
                attrs[key] = _array(text[a:b], types)
            elif _BODY.match(text, a, b):
                attrs[key], after = self.graph(a)
                if after != b:
                    raise ParseError(f"{text[after:b][:40]!r} follows the body")
            else:
                attrs[key] = self.attr(a, b)
        _check(graph, definition, operands, attrs, types)
        graph.append(op, tuple(operands), attrs, types, self.origin)

    def attr(self, start: int, stop: int) -> Any:
        """Parses an attribute other than a body."""
        if self.text.startswith("(", start) and self.closing.get(start) == stop - 1:
            parts = self._split(start + 1, stop - 1)
            if len(parts) != 1:  # a tuple is empty or has a comma; otherwise it is a size in parentheses
                if len(parts) == 2 and parts[1][0] == parts[1][1]:
                    parts.pop()
                return tuple([self.attr(a, b) for a, b in parts])
        text = self.text[start:stop]
        if text in _WORDS:
            return _WORDS[text]
        if text.startswith('"'):
            return _string(text)
        if text in BY_NAME:
            return BY_NAME[text]
        if _INTEGER.fullmatch(text):
            return int(text)
        if _FLOAT.fullmatch(text):
            return float(text)
        if _LAYOUT.match(text):
            return parse_layout(text)
        return parse_dim(text)

    def fail(self, at: int, problem: str, cause: RlxError | None = None) -> NoReturn:
        line = self.text.count("\n", 0, at) + 1
        shown = (self.text[at : at + 200].lstrip().splitlines() or [""])[0]
        error = ParseError(f"graph text: line {line}: {shortened(problem, 400)}", notes=[f"in: {shown[:100]}"])
        for note in cause.notes if cause else ():
            error.add_note(note)
        error.hint = cause.hint if cause else None
        raise error from cause


def _check(
    graph: Graph, definition: registry.OpDef, operands: list[Value | None], attrs: dict[str, Any],
    types: tuple[TensorType, ...],
) -> None:  # fmt: skip
    """Checks what a builder would have ensured: attributes, leaf names, types."""
    op = definition.name
    for key in definition.schema.attrs:
        if key not in attrs:
            raise ParseError(f"{op}: attribute {key!r} is missing")
    if registry.LEAF in definition.traits:
        unknown = [k for k in attrs if k not in definition.schema.attrs]
        if operands or unknown or len(types) != 1:
            raise ParseError(f"{op}: takes {', '.join(definition.schema.attrs)} and has one type")
        if op != "const" and (not isinstance(attrs["name"], str) or not attrs["name"] or graph.has(attrs["name"])):
            raise ParseError(f"{op}: {attrs['name']!r} is not a new name")
        return
    inferred = registry.result_types(definition, [None if o is None else o.type for o in operands], attrs)
    if inferred != types:
        raise ParseError(f"{op}: has type {_types(types)}, its rule gives {_types(inferred)}")


def _types(types: tuple[TensorType, ...]) -> str:
    return "; ".join(map(str, types))


def _value(graph: Graph, text: str) -> Value:
    match = _VALUE.fullmatch(text)
    if match is None:
        raise ParseError(f"{text[:40]!r} is not a value such as %3 or %3.1")
    number, index = int(match[1]), int(match[2] or 0)
    if number >= len(graph.nodes):
        raise ParseError(f"{text} is not defined before it is used")
    node = graph.nodes[number]
    if index >= len(node.types):
        raise ParseError(f"{text}: %{number} has {len(node.types)} results")
    return node[index]


def parse_attr(text: str) -> Any:
    """Parses an attribute other than a body."""
    parser = _Parser(text.strip())
    return parser.attr(0, len(parser.text))


def _string(text: str) -> str:
    try:
        parsed = json.loads(text)
    except ValueError:
        parsed = None
    if not isinstance(parsed, str):
        raise ParseError(f"{text[:40]!r} is not a string")
    return parsed


def _array(text: str, types: tuple[TensorType, ...]) -> Array:
    """Parses a constant's data, which must have exactly the declared type."""
    if len(types) != 1:
        raise ParseError("a constant has one type of fixed sizes")
    return parse_array(text, types[0])


def parse_array(text: str, want: TensorType) -> Array:
    """Parses data of exactly one type."""
    if not all(isinstance(d, int) for d in want.shape):
        raise ParseError("a constant has one type of fixed sizes")
    if text.startswith("@"):
        raise ParseError(f"constant {text} has no data here", hint="print the graph with full=True")
    encoded = _ENCODED.fullmatch(text)
    data = _decoded(encoded, want) if encoded else _listed(text, want)
    if data.size != want.elements:
        raise ParseError(f"a constant {want} has {data.size} elements")
    return Array(data.reshape(want.shape))


def _decoded(encoded: re.Match[str], want: TensorType) -> np.ndarray[Any, Any]:
    if parse_type(f"{encoded[1]}[{encoded[2]}]") != want:
        raise ParseError(f"a constant {want} has data of type {encoded[1]}[{encoded[2]}]")
    try:
        raw = base64.b64decode(encoded[3], validate=True)
        return np.frombuffer(raw, want.dtype.numpy)
    except (binascii.Error, ValueError) as error:
        raise ParseError(f"a constant {want} has broken data, {error}") from error


def _listed(text: str, want: TensorType) -> np.ndarray[Any, Any]:
    try:
        numbers = list(_flat(json.loads(text)))
        wide = np.array(numbers, np.float64 if want.dtype.is_float else None)
    except (ValueError, OverflowError) as error:
        raise ParseError(f"a constant has broken data, {error}") from error
    if numbers and wide.dtype.kind not in ("b" if want.dtype.is_bool else "iu" if want.dtype.is_integer else "f"):
        raise ParseError(f"a constant {want} has data of another kind")
    with np.errstate(over="ignore"):
        narrow = wide.astype(want.dtype.numpy)
    if want.dtype.is_integer and not np.array_equal(wide, narrow):
        raise ParseError(f"a constant {want} has numbers that do not fit")
    return narrow


def _flat(data: Any) -> Iterator[bool | int | float]:
    if isinstance(data, list):
        for part in data:
            yield from _flat(part)
    elif isinstance(data, (bool, int, float)):
        yield data
    else:
        raise ValueError(f"{data!r} is not a number")

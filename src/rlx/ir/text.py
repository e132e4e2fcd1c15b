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
errors name the line. Omitted attributes have their defaults.
"""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Iterator
from typing import Any

import numpy as np

from rlx.dtypes import BY_NAME, DType, dtype
from rlx.errors import GraphError, ParseError, nearest, shortened
from rlx.ir import registry
from rlx.ir.graph import Array, Graph, Node, Value, canonical_attr
from rlx.ir.provenance import here
from rlx.ir.source import OPENING, STRING, Source, string
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
_PLAIN_NAME = r"[\w.+-]*"
_HEAD = re.compile(
    rf"\s*graph\s+@({STRING}|{_PLAIN_NAME})\s+(\w+)\s*(?:max\(([^()]*)\)\s*)?"
    rf"(?:fixed\(((?:[\s,]*+{STRING})*+[\s,]*+)\)\s*)?\{{"
)
_BODY = re.compile(r"graph\s+@")
_STATEMENT = re.compile(rf"{STRING}|{OPENING}|%[0-9]+\s*=|\breturn\b")
_NODE = re.compile(r"%([0-9]{1,9})\s*=\s*(\w+)\s*\(")
_COLON = re.compile(r"\s*:")
_KEY = re.compile(r"(\w+)\s*=\s*")
_VALUE = re.compile(r"%([0-9]{1,9})(?:\.([0-9]{1,9}))?")
_INTEGER = re.compile(r"-?[0-9]{1,999}")
_FLOAT = re.compile(r"-?(?:inf|nan|[0-9]+(?:\.[0-9]*)?(?:e[-+]?[0-9]+)?)")
_ENCODED = re.compile(r"(\w+)\[([0-9, ]*)\]:([A-Za-z0-9+/=\s]*)")
_LAYOUT = re.compile(r"\w+\.\w+\(")
_WORDS = {"none": None, "true": True, "false": False}


def parse_graph(text: str) -> Graph:
    """Parses a graph; op names are checked against the registry, types against the type rules."""
    source = Source(text, "graph text")
    try:
        graph, end = _Parser(source).graph(0)
    except RecursionError:
        raise ParseError("graph text: bodies or lists are nested too deeply for the stack that is left") from None
    rest = source.text[end:].strip()
    if rest:
        raise ParseError(f"graph text: {rest[:40]!r} follows the closing brace")
    return graph


class _Parser:
    """Parses graphs from one source."""

    def __init__(self, source: Source) -> None:
        self.source, self.text = source, source.text
        self.closing = source.closing
        self.origin = here()

    def graph(self, at: int) -> tuple[Graph, int]:
        """Parses the graph at an offset; returns it and where it ends."""
        head = _HEAD.match(self.text, at)
        if head is None:
            self.source.fail(at, f"expected 'graph @name level {{', found {self.text[at : at + 40].strip()!r}")
        name, level, limits, fixed = head.groups()
        if level not in (registry.HIR, registry.MIR):
            self.source.fail(at, f"level {level!r} is not hir or mir")
        with self.source.located(at):
            graph = Graph(string(name) if name.startswith('"') else name, level=level)
        for part in split_top(limits or ""):
            limit = re.fullmatch(r"(\w+)\s*=\s*([0-9]{1,18})", part)
            if limit is None:
                self.source.fail(at, f"{part[:40]!r} is not a limit such as n=4")
            graph.limits[limit[1]] = int(limit[2])
        first, end = head.end(), self.closing[head.end() - 1]
        offsets = [mark.start() for mark in self.source.marks(_STATEMENT, first, end)]
        stray = self.text[first : offsets[0] if offsets else end].strip()
        if stray:
            self.source.fail(first, f"{stray[:40]!r} is not a node")
        if not offsets:
            self.source.fail(at, f"@{name} has no return")
        for start, stop in zip(offsets, [*offsets[1:], end], strict=True):
            self.statement(graph, *self.source.trimmed(start, stop), last=stop == end)
        self.fix(graph, re.findall(STRING, fixed or ""), at)
        return graph, end + 1

    def fix(self, graph: Graph, names: list[str], at: int) -> None:
        """Record the params that training does not update."""
        with self.source.located(at):
            graph.fixed = {string(name) for name in names}
        for name in sorted(graph.fixed):
            if not graph.has(name) or graph.named(name).node.op != "param":
                self.source.fail(at, f"fixed: {shortened(repr(name), 80)} is not a param")

    def statement(self, graph: Graph, start: int, stop: int, *, last: bool) -> None:
        with self.source.located(start):
            if self.text.startswith("return", start):
                if not last:
                    raise ParseError("more follows the return")
                outputs = self.source.split(start + len("return"), stop)
                graph.outputs = tuple([_value(graph, self.text[a:b]) for a, b in outputs])
            elif last:
                raise ParseError("a graph ends with its return")
            else:
                self.node(graph, start, stop)

    def node(self, graph: Graph, start: int, stop: int) -> None:
        text = self.text
        head = _NODE.match(text, start, stop)
        end = self.closing[head.end() - 1] if head else start
        colon = _COLON.match(text, end + 1, stop)
        if head is None or colon is None:
            raise ParseError("this is not a node", hint="%3 = add(%1, %2) : f32[4]")
        number, op = head.groups()
        if int(number) != len(graph.nodes):
            hint = "nodes are numbered in order from %0: after an edit, renumber the nodes that follow, and their uses"
            raise ParseError(f"node %{number} stands where %{len(graph.nodes)} is expected", hint=hint)
        definition = registry.OPS.get(op) or registry.OPS.get(registry.current_name(op))
        if definition is None:
            raise ParseError(f"no op is called {shortened(op, 80)!r}", hint=nearest(op, registry.OPS))
        if graph.level == registry.MIR and definition.level == registry.HIR:
            raise ParseError(f"{op} is an HIR op in an MIR graph")
        types = tuple([parse_type(text[a:b]) for a, b in self.source.split(colon.end(), stop, ";")])
        operands: list[Value | None] = []
        attrs: dict[str, Any] = {}
        for a, b in self.source.split(head.end(), end):
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
                attrs[key] = _attr(self.source, a, b)
        _complete(definition, operands, attrs)
        _check(graph, definition, operands, attrs, types)
        graph.append(definition.name, tuple(operands), attrs, types, self.origin)


def _complete(definition: registry.OpDef, operands: list[Value | None], attrs: dict[str, Any]) -> None:
    """Fills in defaults of omitted operands and attributes: the op may have gained them after the text was saved."""
    schema = definition.schema
    for key, default in schema.attrs.items():
        if key in attrs:
            attrs[key] = attrs.pop(key)  # in signature order
        elif default is registry.REQUIRED:
            raise ParseError(f"{definition.name}: attribute {key!r} is missing")
        else:
            attrs[key] = canonical_attr(definition.name, key, default)
    missing = len(schema.operands) - len(operands)
    if not schema.variadic and 0 < missing <= schema.optional:
        operands += [None] * missing


def _check(
    graph: Graph, definition: registry.OpDef, operands: list[Value | None], attrs: dict[str, Any],
    types: tuple[TensorType, ...],
) -> None:  # fmt: skip
    """Checks what a builder would have ensured: leaf names and types."""
    op = definition.name
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


def parse_attr(source: Source) -> Any:
    """Parses an attribute other than a body."""
    return _attr(source, *source.trimmed(0, len(source.text)))


def _attr(source: Source, start: int, stop: int) -> Any:
    if source.text.startswith("(", start) and source.closing.get(start) == stop - 1:
        parts = source.split(start + 1, stop - 1)
        if len(parts) != 1:  # a tuple is empty or has a comma; otherwise it is a size in parentheses
            if len(parts) == 2 and parts[1][0] == parts[1][1]:
                parts.pop()
            return tuple([_attr(source, a, b) for a, b in parts])
    text = source.text[start:stop]
    if text in _WORDS:
        return _WORDS[text]
    if text.startswith('"'):
        return string(text)
    if text in BY_NAME:
        return BY_NAME[text]
    if _INTEGER.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _LAYOUT.match(text):
        return parse_layout(text)
    return parse_dim(text)


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
    data = _decode(encoded, want) if encoded else _parse_numbers(text, want)
    if data.size != want.elements:
        raise ParseError(f"a constant {want} has {data.size} elements")
    return Array(data.reshape(want.shape))


def _decode(encoded: re.Match[str], want: TensorType) -> np.ndarray[Any, Any]:
    if parse_type(f"{encoded[1]}[{encoded[2]}]") != want:
        raise ParseError(f"a constant {want} has data of type {encoded[1]}[{encoded[2]}]")
    try:
        raw = base64.b64decode(encoded[3], validate=True)
        return np.frombuffer(raw, want.dtype.numpy)
    except (binascii.Error, ValueError) as error:
        raise ParseError(f"a constant {want} has broken data, {error}") from error


def _parse_numbers(text: str, want: TensorType) -> np.ndarray[Any, Any]:
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

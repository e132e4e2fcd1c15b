"""Graphs as text, both ways.

    graph @mlp mir {
      %0 = input(name="x") : f32[seq, 4]
      %1 = param(name="w") : f32[4, 2]
      %2 = matmul(%0, %1) : f32[seq, 2]
      return %2
    }

Constants of more than 64 elements print as `const(@digest)`, or in full as base64 with `full=True`.
"""

from __future__ import annotations

import base64
import json
import re
from typing import Any

import numpy as np

from rlx.dtypes import BY_NAME, DType, dtype
from rlx.errors import ParseError, RlxError, nearest
from rlx.ir import registry
from rlx.ir.graph import Array, Graph, Node, Value
from rlx.types import Dim, parse_dim, parse_type, split_top, tensor

INLINE = 64  # constants up to this many elements print their numbers


def graph_text(graph: Graph, *, full: bool = False, origins: bool = False) -> str:
    """The graph as text."""
    head = f"graph @{graph.name} {graph.level} {{"
    if graph.limits:
        head = f"graph @{graph.name} {graph.level} max({', '.join(f'{k}={v}' for k, v in sorted(graph.limits.items()))}) {{"
    lines = [head]
    for node in graph.nodes:
        line = "  " + node_text(node, full=full)
        lines.append(f"{line}  # {node.origin}" if origins and str(node.origin) else line)
    lines.append("  return " + ", ".join(value_text(v) for v in graph.outputs))
    return "\n".join(lines) + "\n}"


def value_text(value: Value | None) -> str:
    if value is None:
        return "none"
    return f"%{value.node.id}" if len(value.node.types) == 1 else f"%{value.node.id}.{value.index}"


def node_text(node: Node, *, full: bool = False) -> str:
    """One node as a line."""
    parts = [value_text(o) for o in node.operands]
    parts += [f"{k}={attr_text(v, full)}" for k, v in node.attrs.items()]
    return f"%{node.id} = {node.op}({', '.join(parts)}) : {'; '.join(map(str, node.types))}"


def attr_text(value: Any, full: bool = False) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return "true" if value else "false"
        case str():
            return json.dumps(value)
        case tuple():
            return "(" + ", ".join(attr_text(v, full) for v in value) + ("," if len(value) == 1 else "") + ")"
        case Array():
            return _array_text(value, full)
        case Graph():
            return " ".join(graph_text(value, full=full).split("\n"))
        case int() | float() | DType() | Dim():
            return str(value)
        case _:
            raise TypeError(f"attribute {value!r} has no text")


def _array_text(array: Array, full: bool) -> str:
    data = array.data
    if data.size > INLINE:
        if not full:
            return f"@{array.digest}"
        return f"{dtype(data.dtype)}{list(data.shape)}:{base64.b64encode(data.tobytes()).decode()}"
    if dtype(data.dtype).is_float:
        data = data.astype(np.float64)
        if np.isnan(data).any() and full:
            return f"{dtype(array.data.dtype)}{list(data.shape)}:{base64.b64encode(array.data.tobytes()).decode()}"
    return json.dumps(data.tolist())


_NODE = re.compile(r"%(\d+) = (\w+)\((.*)\) : (.*)", re.S)
_HEAD = re.compile(r"graph @(\S*) (\w+)(?: max\((.*?)\))? \{")


def parse_graph(text: str) -> Graph:
    """The graph that `text` says; names in it are checked against the registry, types against the rules."""
    graph, rest = _parse_block(text.strip(), text)
    if rest.strip():
        raise ParseError(f"graph text: {rest.strip()[:40]!r} follows the closing brace")
    return graph


def _parse_block(text: str, whole: str) -> tuple[Graph, str]:
    head = _HEAD.match(text)
    if head is None:
        raise ParseError(f"graph text: expected 'graph @name level {{', found {text[:40]!r}")
    name, level, limits = head.groups()
    if level not in (registry.HIR, registry.MIR):
        raise ParseError(f"graph text: level {level!r} is not hir or mir")
    graph = Graph(name, level=level)
    for part in split_top(limits) if limits else ():
        symbol, _, size = part.partition("=")
        graph.limits[symbol.strip()] = int(size)
    body, rest = _to_closing_brace(text[head.end() :])
    returned = False
    for number, line in enumerate(_lines(body), start=2):
        if line.startswith("return"):
            inside = line[len("return") :].strip()
            graph.outputs = tuple(_value(graph, v, line) for v in split_top(inside)) if inside else ()
            returned = True
            continue
        try:
            _parse_node(graph, line)
        except RlxError as error:
            error.add_note(f"  in line {number}: {line[:100]}")
            raise
    if not returned:
        raise ParseError(f"graph text: @{name} has no return")
    return graph, rest


def _to_closing_brace(text: str) -> tuple[str, str]:
    depth, quoted = 1, False
    for at, c in enumerate(text):
        if c == '"':
            quoted = not quoted
        elif not quoted and c == "{":
            depth += 1
        elif not quoted and c == "}":
            depth -= 1
            if depth == 0:
                return text[:at], text[at + 1 :]
    raise ParseError("graph text: a closing brace is missing")


def _lines(body: str) -> list[str]:
    """Node lines: split at newlines, or before `%n =` and `return` outside braces where the text is one line."""
    if "\n" in body.strip():
        raw = body.split("\n")
    else:
        raw, depth, start = [], 0, 0
        for token in re.finditer(r"[{}]|(?<= )%\d+ = |(?<= )return(?= |$)", body):
            if token[0] == "{":
                depth += 1
            elif token[0] == "}":
                depth -= 1
            elif depth == 0:
                raw.append(body[start : token.start()])
                start = token.start()
        raw.append(body[start:])
    stripped = (_strip_comment(line).strip() for line in raw)
    return [line for line in stripped if line]


def _strip_comment(line: str) -> str:
    at = line.find("  # ")
    return line[:at] if at >= 0 else "" if line.lstrip().startswith("#") else line


def _parse_node(graph: Graph, line: str) -> None:
    match = _NODE.fullmatch(line)
    if match is None:
        raise ParseError("graph text: not a node", hint="%3 = add(%1, %2) : f32[4]")
    number, op, inside, types_text = match.groups()
    if int(number) != len(graph.nodes):
        raise ParseError(f"graph text: node %{number} stands where %{len(graph.nodes)} is expected")
    if op not in registry.OPS:
        raise ParseError(f"graph text: no op is called {op!r}", hint=nearest(op, registry.OPS))
    types = tuple(parse_type(t) for t in split_top(types_text, ";"))
    operands: list[Value | None] = []
    attrs: dict[str, Any] = {}
    for part in split_top(inside) if inside.strip() else ():
        key, equals, value = part.partition("=")
        if part == "none":
            operands.append(None)
        elif part.startswith("%"):
            operands.append(_value(graph, part, line))
        elif op == "const":
            attrs["value"] = _parse_array(part, types[0])
        elif equals and key.isidentifier():
            attrs[key] = parse_attr(value)
        else:
            raise ParseError(f"graph text: {part!r} is neither an operand nor an attribute")
    if op == "const" and "value" not in attrs:
        raise ParseError("graph text: a constant has no data")
    graph.append(op, tuple(operands), attrs, types)


def _value(graph: Graph, text: str, line: str) -> Value:
    number, _, index = text.strip()[1:].partition(".")
    if not number.isdigit() or int(number) >= len(graph.nodes):
        raise ParseError(f"graph text: {text} is not defined before it is used")
    node = graph.nodes[int(number)]
    at = int(index) if index else 0
    if at >= len(node.types):
        raise ParseError(f"graph text: {text} but %{number} has {len(node.types)} results")
    return node[at]


def parse_attr(text: str) -> Any:
    text = text.strip()
    if text in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[text]
    if text.startswith('"'):
        return json.loads(text)
    if text.startswith("(") and text.endswith(")") and not text.startswith("(("):
        return _parse_tuple(text)
    if text.startswith("((") and text.endswith(")") and "//" not in text:
        return _parse_tuple(text)
    if text.startswith("graph @"):
        graph, _ = _parse_block(text, text)
        return graph
    if text in BY_NAME:
        return BY_NAME[text]
    if re.fullmatch(r"-?\d+", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return parse_dim(text)


def _parse_tuple(text: str) -> tuple[Any, ...]:
    inner = text[1:-1].strip().removesuffix(",")
    return tuple(parse_attr(p) for p in split_top(inner)) if inner else ()


def _parse_array(text: str, type_: Any) -> Array:
    text = text.removeprefix("value=")
    if text.startswith("@"):
        raise ParseError(f"graph text: constant {text} has no data here", hint="print the graph with full=True")
    encoded = re.fullmatch(r"(\w+)\[([\d, ]*)\]:([A-Za-z0-9+/=]*)", text)
    if encoded:
        kind, shape, data = encoded.groups()
        dims = [int(d) for d in shape.split(",")] if shape.strip() else []
        want = tensor(dims, kind)
        raw = base64.b64decode(data)
        if len(raw) != np.prod(dims, dtype=np.int64) * want.dtype.size:
            raise ParseError(f"graph text: a constant {want} has {len(raw)} bytes")
        return Array(np.frombuffer(raw, want.dtype.numpy).reshape(dims))
    data = json.loads(text)
    return Array(np.asarray(data, dtype=np.float64 if type_.dtype.is_float else None).astype(type_.dtype.numpy).reshape(type_.shape))

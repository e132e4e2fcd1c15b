"""`rlx tour EXPRESSION`: shows an expression at each level, and what each pass changes.

The expression is parsed as Python but not executed: names, numbers, operators and ops of rlx, nothing else.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, pairwise
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

import rlx.hir.blocks  # noqa: F401  registers the ops
from rlx.backends.base import backend, backend_of, known_target
from rlx.cli.console import UsageError, is_rich
from rlx.cli.ops import import_module
from rlx.errors import RlxError, ShapeError, nearest
from rlx.inspect.code import assembly_lines, busiest, easiest
from rlx.inspect.lineage import Lineage, lineage
from rlx.inspect.page import graph_page
from rlx.inspect.picture import picture
from rlx.ir import registry
from rlx.ir.diff import diff
from rlx.ir.graph import Graph, Value
from rlx.mir import pipeline
from rlx.runtime.session import compile
from rlx.target import Target
from rlx.types import Size, TensorType, as_size, concrete

MAX_CHARS = 2000  # of an expression
Shape = tuple[Size, ...]
FIRST: Shape = (as_size("rows"), 64)  # default shape of the first name
ROWS = 5  # run-time sizes in the final run
OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "add", ast.Sub: "sub", ast.Mult: "mul", ast.Div: "div", ast.FloorDiv: "floor_divide", ast.Mod: "mod",
    ast.Pow: "pow", ast.MatMult: "matmul", ast.Lt: "less", ast.LtE: "less_equal", ast.Gt: "greater",
    ast.GtE: "greater_equal", ast.Eq: "equal", ast.NotEq: "not_equal", ast.USub: "neg", ast.Invert: "logical_not",
}  # fmt: skip


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("tour", help="show an expression at each level, pass by pass")
    command.add_argument("expression", help='such as "softmax(x @ w)"; its first name is an input, others are weights')
    command.add_argument(
        "--shape", action="append", default=[], metavar="NAME=SIZES", help="such as x=rows,64 or ids=4:i32"
    )
    command.add_argument("--input", action="append", default=[], metavar="NAME", help="another name that is an input")
    command.add_argument(
        "--target", help="target of the code, such as avx512, also of other machines (the best of this machine)"
    )
    command.add_argument("--lines", type=int, default=16, help="lines of LLVM text and assembly (16)")
    command.add_argument("--module", "-m", help="import this module first, for ops that it declares")
    command.add_argument("--svg", metavar="FILE", help="draw the levels as a picture instead")
    command.add_argument("--html", metavar="FILE", help="write the levels as a web page instead")
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    if arguments.module:
        import_module(arguments.module, "tour")
    machine = backend("cpu").target() if arguments.target is None else known_target(arguments.target, "cpu")
    graph = read(arguments.expression, dict(map(_shape, arguments.shape)), arguments.input)
    if arguments.svg or arguments.html:
        if arguments.svg:
            drawn = picture(lineage(graph, machine), machine, arguments.expression, lines=arguments.lines)
            Path(arguments.svg).write_text(drawn, "utf-8")
        if arguments.html:
            Path(arguments.html).write_text(graph_page(graph, machine), "utf-8")
        return 0
    show = _coloured() if is_rich(sys.stdout) else lambda _, line: print(line)
    for style, line in tour(graph, machine, arguments.expression, arguments.lines):
        show(style, line)
    return 0


def _shape(text: str) -> tuple[str, tuple[Shape, str]]:
    match = re.fullmatch(r"(\w+)=([\w, ]*)(?::(\w+))?", text)
    if match is None:
        raise UsageError(f"tour: --shape {text}: expected NAME=SIZES", hint="such as x=4,8 or x=rows,64 or ids=4:i32")
    name, sizes, dtype = match.groups()
    shape = tuple(as_size(int(s) if s.isdecimal() else s) for s in map(str.strip, sizes.split(",")) if s)
    return name, (shape, dtype or "f32")


def _coloured() -> Callable[[str, str], None]:
    from rich.console import Console
    from rich.text import Text

    styles = {"title": "bold", "note": "italic", "+": "green", "-": "red", " ": "dim"}
    console = Console(highlight=False)
    return lambda style, line: console.print(Text(line, style=styles.get(style, "")), soft_wrap=True)


# -- reading ----------------------------------------------------------------------------------------------------------
def read(text: str, shapes: dict[str, tuple[Shape, str]] | None = None, inputs: Sequence[str] = ()) -> Graph:
    """Parse an expression into a graph. Missing shapes are chosen to fit."""
    reader = _Reader(text, shapes or {}, inputs)
    try:
        result = reader.value(reader.tree)
    except RecursionError:
        raise UsageError("tour: the expression is nested too deeply") from None
    outputs = result if isinstance(result, tuple) else (result,)
    if not all(isinstance(v, Value) for v in outputs):
        reader.fail(reader.tree, "this is a number, not an expression of arrays", hint='such as "softmax(x @ w)"')
    for name in (*reader.shapes, *reader.inputs):
        if not reader.graph.has(name):
            raise UsageError(f"tour: {name!r} is not in the expression", hint=nearest(name, reader.names))
    return reader.graph.set_outputs(outputs).verify()


class _Reader:
    """Builds the graph of an expression, node by node of its syntax tree."""

    def __init__(self, text: str, shapes: dict[str, tuple[Shape, str]], inputs: Sequence[str]) -> None:
        self.text, self.shapes, self.inputs = text, shapes, inputs
        self.tree = _parse(text)
        self.names: list[str] = []
        self.columns = 32  # of the next chosen weight
        called = {n.func.id for n in ast.walk(self.tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)}
        blocks = [op for op in called if op in registry.OPS and registry.OPS[op].level == registry.HIR]
        self.graph = Graph("tour", level=registry.HIR if blocks else registry.MIR)

    def value(self, node: ast.expr, fitting: Callable[[], Shape] = lambda: FIRST) -> Any:
        """The value of an expression; `fitting` is the shape of a name at its first occurrence."""
        match node:
            case ast.Name():
                return self.leaf(node.id, fitting)
            case ast.Constant(value=int(number)) if abs(number) >> 63:
                self.fail(node, "this number is too large")
            case ast.Constant(value=bool() | int() | float()):
                return node.value
            case ast.BinOp() if type(node.op) in OPERATORS:
                return self.both(node, OPERATORS[type(node.op)], node.left, node.right)
            case ast.Compare(ops=[op]) if type(op) in OPERATORS:
                return self.both(node, OPERATORS[type(op)], node.left, node.comparators[0])
            case ast.UnaryOp(op=ast.USub() | ast.Invert()):
                return self.apply(node, OPERATORS[type(node.op)], [self.value(node.operand, fitting)], {})
            case ast.Attribute(attr="mT"):
                return self.apply(node, "transpose", [x := self.value(node.value)], {"axes": _swapped_axes(x)})
            case ast.Call(func=ast.Name(id=name)):
                return self.call(node, name, node.args)
            case ast.Call(func=ast.Attribute(value=first, attr=name)):
                return self.call(node, name, [first, *node.args])
            case ast.Subscript(slice=ast.Constant(value=int(index))):
                return self.pick(node, index)
            case _:
                self.fail(
                    node, "this is not part of the language", hint="names, numbers, + - * / @ and ops; see `rlx ops`"
                )

    def leaf(self, name: str, fitting: Callable[[], Shape]) -> Value:
        if self.graph.has(name):
            return self.graph.named(name)
        is_input = not self.names or name in self.inputs
        shape, dtype = self.shapes[name] if name in self.shapes else (fitting() if self.names else FIRST, "f32")
        self.names.append(name)
        return (self.graph.input if is_input else self.graph.param)(name, shape, dtype)

    def both(self, node: ast.expr, op: str, left: ast.expr, right: ast.expr) -> Any:
        a = self.value(left)
        return self.apply(node, op, [a, self.value(right, lambda: self.fitting(op, "b", [a]))], {})

    def fitting(self, op: str, operand: str, before: Sequence[Any]) -> Shape:
        """A shape for an operand that fits those before it: a matrix for weights, otherwise a row."""
        values = [v for v in before if isinstance(v, Value) and v.rank]
        if not values:
            return FIRST
        first, last = values[0].shape, values[-1].shape
        match op, operand:
            case ("matmul", "b") | (_, "weight" | "up"):
                columns, self.columns = self.columns, max(8, self.columns // 2)
                return first[-1], columns
            case _, "gate":
                return last
            case _, "down":
                return last[-1], first[-1]
            case _, "bias":
                return last[-1:]
            case _:
                return first[-1:]

    def call(self, node: ast.Call, name: str, arguments: Sequence[ast.expr]) -> Any:
        definition = registry.OPS.get(name)
        if definition is None or definition.traits & {registry.LEAF, registry.FUSED}:
            known = [n for n, o in registry.OPS.items() if not o.traits & {registry.LEAF, registry.FUSED}]
            self.fail(node.func, f"no op is called {name!r}", hint=nearest(name, known) or "`rlx ops` lists them")
        names = definition.schema.operands
        operands: list[Any] = []
        for i, argument in enumerate(arguments):
            role = names[min(i, len(names) - 1)] if names else ""
            operands.append(self.value(argument, partial(self.fitting, name, role, tuple(operands))))
        attrs = {k.arg: self.attribute(k.value) for k in node.keywords if k.arg is not None}
        if len(attrs) < len(node.keywords):
            self.fail(node, "this is not part of the language", hint="write the attributes out")
        return self.apply(node, name, operands, attrs)

    def apply(self, node: ast.expr, op: str, operands: list[Any], attrs: dict[str, Any]) -> Any:
        for operand in operands:
            if isinstance(operand, tuple):
                self.fail(node, f"an operand has {len(operand)} results", hint="pick one: topk(x, k=2)[0]")
        return self.with_caret(node, lambda: self.graph.apply(op, *operands, **attrs))

    def attribute(self, node: ast.expr) -> Any:
        try:
            return ast.literal_eval(node)  # literals only: no names, no calls
        except (ValueError, TypeError, MemoryError, RecursionError):
            self.fail(node, "this is not a number, a text or a tuple")

    def pick(self, node: ast.Subscript, index: Any) -> Value:
        results = self.value(node.value)
        if not isinstance(results, tuple) or not 0 <= index < len(results):
            self.fail(
                node,
                "this picks nothing",
                hint="[0] picks the first of several results of an op; arrays are not cut here",
            )
        picked: Value = results[index]
        return picked

    # -- errors --
    def with_caret(self, node: ast.expr, build: Callable[[], Any]) -> Any:
        try:
            return build()
        except RlxError as error:
            notes = [n for n in error.notes if "built at: " not in n]  # lines of this file do not help the user
            more = ["  hint: give shapes with --shape NAME=SIZES"] if isinstance(error, ShapeError) else []
            error.__notes__ = [*_caret(self.text, node), *notes, *more]
            raise

    def fail(self, node: ast.expr, problem: str, hint: str | None = None) -> NoReturn:
        error = UsageError(f"tour: {problem}")
        for line in _caret(self.text, node):
            error.add_note(line)
        if hint:
            error.add_note(f"  hint: {hint}")
        raise error


def _swapped_axes(x: Any) -> tuple[int, ...]:
    """Axes that transpose a matrix; for anything else, axes that the op rejects."""
    rank = x.rank if isinstance(x, Value) else 0
    return (*range(rank - 2), rank - 1, rank - 2) if rank > 1 else ()


def _parse(text: str) -> ast.expr:
    if len(text) > MAX_CHARS:
        raise UsageError(f"tour: the expression has {len(text)} characters, expected at most {MAX_CHARS}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        at = max(0, (error.offset or 1) - 1)
        message = f"tour: this is not an expression: {error.msg}"
        raise UsageError(message, notes=[text.strip(), " " * at + "^"]) from error
    except (ValueError, RecursionError, MemoryError) as error:
        raise UsageError(f"tour: the expression cannot be read: {error}") from error


def _caret(text: str, node: ast.expr) -> list[str]:
    """The source line of a part of the expression, and a marker below it."""
    lines = text.strip().splitlines()
    line = lines[node.lineno - 1].encode()  # columns count bytes
    end = node.end_col_offset if node.end_lineno == node.lineno else len(line)
    before, part = line[: node.col_offset].decode(), line[node.col_offset : end].decode()
    return [f"  {line.decode()}", f"  {' ' * len(before)}^{'~' * (len(part) - 1)}"]


# -- showing ----------------------------------------------------------------------------------------------------------
Lines = Iterator[tuple[str, str]]


def tour(graph: Graph, machine: Target, expression: str, lines: int) -> Lines:
    """A graph at all levels, as (style, line) pairs."""
    yield "title", expression.strip()
    for number, (title, about, body) in enumerate(_levels(graph, machine, lines), 1):
        yield "", ""
        yield "title", f"{number}. {title}"
        if about:
            yield "note", about
        yield from ((style, f"  {text}") for style, text in body)


def _levels(graph: Graph, machine: Target, lines: int) -> Iterator[tuple[str, str, Lines]]:
    """Title, explanation and text of each level."""
    line = lineage(graph, machine)
    built = "Blocks and ops" if graph.level == registry.HIR else "Ops"
    yield "The graph", f"{built} on values. A name among the sizes is known only at run time.", _plain(graph.text())
    if graph.level == registry.HIR:
        yield "Lowered to MIR", "Blocks are written with ops.", _plain(line.lowered.text())
    about = "Each pass takes a graph and gives one that means the same. Numbers are those of the graph before it."
    yield "Passes", about, _passes(line)
    yield "MIR, optimised", "The work of each run.", _plain(line.main.text())
    if line.bind.outputs:
        about = "Nodes that depend only on weights run once, when these are set. `@0` above is its first result."
        yield "The bind program", about, _plain(line.bind.text())
    about = "Kernels are launched on buffers, each split over threads; loops say what a kernel does to elements."
    yield "LIR", about, chain(_plain(line.plan.main.text()), _boundaries(line))
    kernel = easiest(line.plan.main)
    if kernel is not None:
        about = f"{kernel.symbol} where it works hardest; `rlx inspect` shows all of it."
        text = backend_of(machine).kernel_text([kernel], machine).splitlines()
        yield "LLVM", about, _plain("\n".join(busiest(text, lines)))
        code = busiest(assembly_lines(kernel, machine), lines)
        yield "Assembly", f"The same as machine code, for {machine.name}.", _plain("\n".join(code))
    runs = machine in backend("cpu").targets()
    yield "A run", "", _plain(_checked(graph, machine) if runs else f"This machine does not run {machine.name}.")


def _plain(text: str) -> Lines:
    return (("", line) for line in text.splitlines())


def _passes(line: Lineage) -> Lines:
    quiet: dict[str, None] = {}
    for (_, before), (name, after) in pairwise(line.steps):
        change = diff(before, after)
        if not change:
            quiet[name] = None
            continue
        about = (getattr(pipeline, name, None).__doc__ or "").strip().split("\n")[0]
        yield "", f"{name}: {about}"
        for mark, text in change.lines(context=1):
            yield mark, f"  {mark} {text}".rstrip()
    if quiet:
        yield "note", f"without effect here: {', '.join(quiet)}"


def _boundaries(line: Lineage) -> Lines:
    """Why there is more than one launch."""
    report = line.plan.optimised.report
    for miss in (*report.missed, *report.separate):
        yield "note", f"# {miss.op}: {miss.why}"


def _checked(graph: Graph, machine: Target) -> str:
    """Compare a run on random inputs with NumPy."""
    rng = np.random.default_rng(0)
    sizes = dict.fromkeys(graph.symbols(), ROWS)
    inputs, params = (
        {n.attrs["name"]: _numbers(rng, n.types[0], sizes) for n in part} for part in (graph.inputs, graph.params)
    )
    results = []
    for device in ("cpu", "reference"):
        compiled = compile(graph, device, target=machine)
        compiled.set_params(params)
        results.append(compiled.run(inputs))
    gap = max((_gap(a, b) for a, b in zip(*results, strict=True)), default=0.0)
    shapes = ", ".join(str(list(a.shape)) for a in results[0])
    subject = f"The result for {', '.join(f'{k} = {v}' for k, v in sizes.items())}" if sizes else "The result"
    return f"{subject} has shape {shapes}; the largest difference to NumPy is {gap:.1e}."


def _gap(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> float:
    """The largest difference; equal infinities and NaN do not count."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    return float(np.abs(np.where(same, 0, a) - np.where(same, 0, b)).max(initial=0))


def _numbers(rng: np.random.Generator, type_: TensorType, sizes: Mapping[str, int]) -> np.ndarray[Any, Any]:
    shape = concrete(type_.shape, sizes)
    drawn = rng.standard_normal(shape) if type_.dtype.is_float else np.zeros(shape)
    return drawn.astype(type_.dtype.numpy)

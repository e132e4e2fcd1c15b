"""The loop language: what a `loops` kernel does, element by element, for any target.

A `LoopKernel` is a list of statements over run-time extents and strides. Emitters vectorise the loops marked `vector`;
inside such a loop a `Reduce` runs one accumulator per lane, elsewhere it is vectorised itself and its lanes are
combined in one fixed order, so bits never depend on how rows are split over threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields

from rlx.dtypes import BOOL, F32, F64, I32, I64, DType
from rlx.fork_safe_locks import cached_property
from rlx.lir.expressions import (
    SCALAR_OPS,
    Apply,
    Arg,
    Choose,
    Const,
    Expr,
    Index,
    Load,
    Lookup,
    Operand,
    Place,
    Reduce,
    Ref,
    Table,
    binary,
    children,
    compare,
    depends_on,
    fma,
    known,
    number,
    substitute,
    unary,
    walk,
)

__all__ = [  # with the expressions, so that the language has one address
    "SCALAR_OPS", "Apply", "Arg", "Choose", "Const", "Expr", "Index", "Load", "Lookup", "Operand", "Place", "Reduce",
    "Ref", "Table", "binary", "children", "compare", "depends_on", "fma", "known", "number", "substitute", "unary",
    "walk",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Let:
    """Name a value for the statements after it in the same body."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class Var:
    """A variable that `Assign` may change, read with `Ref`."""

    name: str
    start: Expr


@dataclass(frozen=True, slots=True)
class Assign:
    """Give a variable a new value."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class Store:
    """Write one element of a parameter; `value` is cast to the parameter's type."""

    param: int
    at: Place
    value: Expr


@dataclass(frozen=True, slots=True)
class Check:
    """Report `code` to the host where `condition` is false; the kernel goes on."""

    condition: Expr
    code: int


@dataclass(frozen=True, slots=True)
class For:
    """A loop over [0, extent), which may be an i64 computed before it: the bound of a triangle, the rest of a chunk.

    `vector` loops run several iterations at once and may not carry variables.
    """

    index: str
    extent: int | Arg | Ref
    body: tuple[Stmt, ...]
    vector: bool = False


Stmt = Let | Var | Assign | Store | Check | For


@dataclass(frozen=True, slots=True)
class Param:
    """A buffer the kernel reads or writes."""

    name: str
    dtype: DType
    written: bool = False


INTEGER_DOTS = ("dot_u7", "dot_u8")


def multiplied(*dtypes: DType) -> str:
    """The rate by which kernels of these types are measured: f64 where there is one, else f32."""
    return "f64" if F64 in dtypes else "f32"


@dataclass(frozen=True)
class LoopKernel:
    """A whole kernel: `root` is split over threads.

    Units are iterations of `root`, or, where `chunk` is set, runs of `chunk` iterations of a vector loop.
    The argument block has one pointer a parameter, then one integer a name in `args`.
    """

    name: str
    params: tuple[Param, ...]
    args: tuple[str, ...]
    root: For
    chunk: int = 0
    lets: tuple[Let, ...] = ()  # evaluated once before the loop

    kind = "loops"

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the words of the argument block, pointers first."""
        return tuple(p.name for p in self.params) + self.args

    def operands(self) -> dict[str, bool]:
        """The words that are addresses of operands, and whether the kernel writes there."""
        return {p.name: p.written for p in self.params}

    def arithmetic(self) -> str:
        """What it multiplies and adds: f32, f64, or 8-bit integers by `dot_u7` or `dot_u8`."""
        ops = {e.op for e in expressions(self.root) if isinstance(e, Apply)}
        dots = (op for op in INTEGER_DOTS if op in ops)  # the quicker of the two is the limit
        return next(dots, multiplied(*(p.dtype for p in self.params)))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything the machine code depends on, the target aside."""
        text = f"{self.name}|{self.params}|{self.args}|{self.root}|{self.chunk}|{self.lets}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def symbol(self) -> str:
        return f"{self.name}.{self.fingerprint[:8]}"

    def text(self, *, full: bool = False) -> str:
        """The kernel as readable text; in full with all that its expressions are made of (see `lir/text.py`)."""
        show = _Printer(self.params, full)
        reads = ", ".join(f"{p.name}: {p.dtype}" for p in self.params if not p.written)
        writes = ", ".join(f"{p.name}: {p.dtype}" for p in self.params if p.written)
        lines = [f"kernel {self.symbol}({reads}) -> {writes}"]
        for let in self.lets:
            lines += show.lines(let, 1)
        mode = f" split by {self.chunk}" if self.chunk else " split"
        head = show.lines(self.root, 1)
        head[0] = head[0][:-1] + mode + ":"
        return "\n".join(lines + head)


def statements(root: Stmt) -> Iterator[Stmt]:
    """`root` and all statements inside it, in order."""
    yield root
    if isinstance(root, For):
        for inner in root.body:
            yield from statements(inner)


def expressions(root: Stmt) -> Iterator[Expr]:
    """Every expression of every statement inside `root`, nested ones included."""
    for stmt in statements(root):
        for part in fields(stmt):
            value = getattr(stmt, part.name)
            if part.name in ("value", "start", "condition"):
                yield from walk(value)
            elif part.name == "at":
                for index, _ in value:
                    yield from walk(index)


# -- text -----------------------------------------------------------------------------------------------------------
INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def expr_text(expr: Expr, params: tuple[Param, ...] = (), *, full: bool = False) -> str:
    """An expression as readable text; in full as `parse_loops` reads it."""
    return _Printer(params, full).expr(expr)


def written_out(expr: Expr, lets: Mapping[str, Expr], names: Mapping[str, str]) -> str:
    """A value as readable text: with lets in place of their names, other names as `names` shows them."""
    return _Printer((), lets=lets, names=names, terse=True).bare(expr)


def result_type(op: str, args: Sequence[Expr]) -> DType:
    """The type of an operation, unless it says another (as casts do)."""
    match op:
        case "eq" | "ne" | "lt" | "le" | "gt" | "ge":
            return BOOL
        case "bits":
            return F32
        case "order" | "nearest":
            return I64 if args[0].dtype.size == 8 else I32
        case "select":
            return args[1].dtype
        case _:
            return args[0].dtype


@dataclass(frozen=True)
class _Printer:
    """Expressions and statements as text; in full with types of numbers where they are not i64 or f32."""

    params: tuple[Param, ...]
    full: bool = False
    lets: Mapping[str, Expr] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)  # what to show for refs
    terse: bool = False  # without parentheses around what stands alone

    def bare(self, expr: Expr) -> str:
        """An expression that stands alone: a whole value, or an argument."""
        while isinstance(expr, Ref) and expr.name in self.lets:
            expr = self.lets[expr.name]
        text = self.expr(expr)
        return text[1:-1] if self.terse and isinstance(expr, Apply) and expr.op in INFIX else text

    def expr(self, expr: Expr) -> str:
        show = self.expr
        match expr:
            case Ref() if expr.name in self.lets:
                return show(self.lets[expr.name])
            case Ref():
                return self.names.get(expr.name, expr.name)
            case Index() | Arg():
                return expr.name
            case Const():
                return self.number(expr)
            case Load():
                return f"{self.params[expr.param].name}[{self.place(expr.at)}]"
            case Apply(op="cast"):
                return f"{expr.dtype}({self.bare(expr.args[0])})"
            case Apply() if self.full and expr.dtype is not result_type(expr.op, expr.args):
                return f"{expr.op}:{expr.dtype}({', '.join(map(show, expr.args))})"
            case Apply() if expr.op in INFIX:
                return f"({show(expr.args[0])} {INFIX[expr.op]} {show(expr.args[1])})"
            case Apply():
                return f"{expr.op}({', '.join(map(self.bare, expr.args))})"
            case Choose():
                return f"({show(expr.then)} if {show(expr.condition)} else {show(expr.other)})"
            case Reduce():
                return f"{expr.op}({expr.index} in {_extent(expr.extent)}: {show(expr.value)})"
            case Lookup():
                name = expr.table.name if self.full else expr.table.name.partition(".")[0]
                return f"{name}[{show(expr.index)}]"

    def number(self, number: Const) -> str:
        shown = str(number.value).lower() if isinstance(number.value, bool) else f"{number.value!r}"
        usual = BOOL if isinstance(number.value, bool) else I64 if isinstance(number.value, int) else F32
        return f"{shown}:{number.dtype}" if self.full and number.dtype is not usual else shown

    def place(self, at: Place) -> str:
        terms = []
        for index, stride in at:
            factor = _extent(stride)
            shown = self.expr(index)
            one = shown == "1" and not self.full
            terms.append(shown if factor == "1" else factor if one else f"{shown}*{factor}")
        return " + ".join(terms) or ("" if self.full else "0")

    def lines(self, stmt: Stmt, depth: int) -> list[str]:
        pad = "  " * depth
        match stmt:
            case Let() | Assign():
                return [f"{pad}{stmt.name} = {self.expr(stmt.value)}"]
            case Var():
                return [f"{pad}var {stmt.name} = {self.expr(stmt.start)}"]
            case Store():
                return [f"{pad}{self.params[stmt.param].name}[{self.place(stmt.at)}] = {self.expr(stmt.value)}"]
            case Check():
                return [f"{pad}check {self.expr(stmt.condition)} else fault {stmt.code}"]
            case For():
                mode = " vector" if stmt.vector else ""
                lines = [f"{pad}for {stmt.index} in {_extent(stmt.extent)}{mode}:"]
                for inner in stmt.body:
                    lines += self.lines(inner, depth + 1)
                return lines


def _extent(extent: int | Arg | Ref) -> str:
    return str(extent) if isinstance(extent, int) else extent.name

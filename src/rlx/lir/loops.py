"""The loop language: target-independent kernels as statements over run-time extents and strides.

Emitters vectorise the loops marked `vector`. Inside such a loop a `Reduce` keeps one accumulator per lane; elsewhere
the reduction itself is vectorised and its lanes are combined in a fixed order, so results are bitwise independent of
how rows are split over threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field, fields

from rlx.dtypes import BOOL, F32, F64, I32, I64, DType
from rlx.fast_dataclass import dataclass
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

__all__ = [  # re-exports expressions, so that the loop language has one import path
    "SCALAR_OPS", "Apply", "Arg", "Choose", "Const", "Expr", "Index", "Load", "Lookup", "Operand", "Place", "Reduce",
    "Ref", "Table", "binary", "children", "compare", "depends_on", "fma", "known", "number", "substitute", "unary",
    "walk",
]  # fmt: skip


@dataclass(frozen=True, slots=True)
class Let:
    """Names a value for the later statements of the same body."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class Var:
    """A mutable variable: set by `Assign`, read by `Ref`."""

    name: str
    start: Expr


@dataclass(frozen=True, slots=True)
class Assign:
    """Assigns to a variable."""

    name: str
    value: Expr


@dataclass(frozen=True, slots=True)
class Store:
    """Writes one element of a parameter; `value` is cast to the parameter's type."""

    param: int
    at: Place
    value: Expr


@dataclass(frozen=True, slots=True)
class Check:
    """Reports fault `code` to the host if `condition` is false; the kernel continues."""

    condition: Expr
    code: int


@dataclass(frozen=True, slots=True)
class For:
    """A loop over [0, extent). A `Ref` extent is an i64 computed earlier, such as a triangular bound or a chunk's tail.

    `vector` loops run several iterations at once and must not carry variables.
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


def flops_type(*dtypes: DType) -> str:
    """The type whose peak FLOP rate applies to kernels of these types: f64 if there is one, else f32."""
    return "f64" if F64 in dtypes else "f32"


@dataclass(frozen=True)
class LoopKernel:
    """A kernel whose loop `root` is split over threads.

    A unit is one iteration of `root`, or, if `chunk` is set, `chunk` consecutive iterations of a vector loop. The
    argument block has one pointer per parameter, then one integer per name in `args`.
    """

    name: str
    params: tuple[Param, ...]
    args: tuple[str, ...]
    root: For
    chunk: int = 0
    lets: tuple[Let, ...] = ()  # evaluated once before the loop
    streams: tuple[str, ...] = ()  # parameters that are read once and in order: emitters may prefetch them

    kind = "loops"

    @property
    def words(self) -> tuple[str, ...]:
        """Names of the words of the argument block, pointers first."""
        return tuple(p.name for p in self.params) + self.args

    def operands(self) -> dict[str, bool]:
        """The words that are addresses of operands, and whether the kernel writes them."""
        return {p.name: p.written for p in self.params}

    def arithmetic(self) -> str:
        """The arithmetic whose peak rate limits it: f32, f64, or the int8 dot products `dot_u7` or `dot_u8`."""
        ops = {e.op for e in expressions(self.root) if isinstance(e, Apply)}
        dots = (op for op in INTEGER_DOTS if op in ops)  # the faster of the two sets the limit
        return next(dots, flops_type(*(p.dtype for p in self.params)))

    @cached_property
    def selected(self) -> frozenset[str]:
        """Operands accessed at data-dependent indices, such as the table of a gather."""
        from_data: set[str] = set()  # names of values and indices that were computed from loaded ones

        def is_from_data(expr: Expr) -> bool:
            return any(isinstance(e, Load) or (isinstance(e, Ref | Index) and e.name in from_data) for e in walk(expr))

        for statement in (*self.lets, *statements(self.root)):
            match statement:
                case Let(name, value) | Assign(name, value) | Var(name, value) if is_from_data(value):
                    from_data.add(name)
                case For(index, Ref(extent)) if extent in from_data:
                    from_data.add(index)
        places = [(e.param, e.at) for let in self.lets for e in walk(let.value) if isinstance(e, Load)]
        places += [(e.param, e.at) for e in expressions(self.root) if isinstance(e, Load)]
        places += [(s.param, s.at) for s in statements(self.root) if isinstance(s, Store)]
        return frozenset(self.params[param].name for param, at in places if any(is_from_data(index) for index, _ in at))

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything the machine code depends on except the target."""
        text = f"{self.name}|{self.params}|{self.args}|{self.root}|{self.chunk}|{self.lets}"
        text += f"|{self.streams}" if self.streams else ""
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def symbol(self) -> str:
        return f"{self.name}.{self.fingerprint[:8]}"

    def text(self, *, full: bool = False) -> str:
        """The kernel as readable text; with `full`, as unabridged text (see `lir/text.py`)."""
        show = _Printer(self.params, full)
        streamed = {name: " streamed" for name in self.streams}
        reads = ", ".join(f"{p.name}: {p.dtype}{streamed.get(p.name, '')}" for p in self.params if not p.written)
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
    """All expressions of all statements inside `root`, including nested ones."""
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
    """An expression as readable text; with `full`, as `parse_loops` reads it."""
    return _Printer(params, full).expr(expr)


def inlined_text(expr: Expr, lets: Mapping[str, Expr], names: Mapping[str, str]) -> str:
    """A value as readable text with lets inlined; `names` maps other refs to display names."""
    return _Printer((), lets=lets, names=names, terse=True).bare(expr)


def result_type(op: str, args: Sequence[Expr]) -> DType:
    """The default result type of an operation; casts override it."""
    match op:
        case "eq" | "ne" | "lt" | "le" | "gt" | "ge":
            return BOOL
        case "bits":
            return I32 if args[0].dtype is F32 else F32
        case "order" | "nearest":
            return I64 if args[0].dtype.size == 8 else I32
        case "select":
            return args[1].dtype
        case _:
            return args[0].dtype


@dataclass(frozen=True)
class _Printer:
    """Prints expressions and statements; with `full`, constants that are not i64 or f32 show their type."""

    params: tuple[Param, ...]
    full: bool = False
    lets: Mapping[str, Expr] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)  # display names of refs
    terse: bool = False  # without parentheses around top-level expressions

    def bare(self, expr: Expr) -> str:
        """A top-level expression or an argument, which needs no parentheses."""
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

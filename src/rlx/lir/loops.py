"""The loop language: what a `loops` kernel does, element by element, for any target.

A `LoopKernel` is a list of statements over run-time extents and strides. Emitters vectorise the loops marked `vector`;
inside such a loop a `Reduce` runs one accumulator per lane, elsewhere it is vectorised itself and its lanes are
combined in one fixed order, so bits never depend on how rows are split over threads.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields

from rlx.dtypes import BOOL, I32, I64, DType
from rlx.locks import cached_property

Scalar = float | int | bool


@dataclass(frozen=True, slots=True)
class Index:
    """The loop variable called `name`, an i64."""

    name: str

    @property
    def dtype(self) -> DType:
        return I64


@dataclass(frozen=True, slots=True)
class Arg:
    """A run-time integer of the launch: an extent, a stride or any other size."""

    name: str

    @property
    def dtype(self) -> DType:
        return I64


@dataclass(frozen=True, slots=True)
class Const:
    """A number known when the kernel is made."""

    value: Scalar
    dtype: DType


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of an earlier `Let` or `Var`."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Load:
    """One element of a parameter. `at` is a sum of (index, stride) terms, in elements.

    A load may lie outside its buffer only where an enclosing `Choose` does not take it.
    """

    param: int
    at: tuple[tuple[Expr, int | Arg], ...]
    dtype: DType  # of the parameter


@dataclass(frozen=True, slots=True)
class Apply:
    """A scalar operation by name; see `SCALAR_OPS`."""

    op: str
    args: tuple[Expr, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Choose:
    """`then` where `condition`, else `other`; the side that is not taken is not loaded."""

    condition: Expr
    then: Expr
    other: Expr

    @property
    def dtype(self) -> DType:
        return self.then.dtype


@dataclass(frozen=True, slots=True)
class Reduce:
    """All values of `value` for `index` in [0, extent), combined by `op`: sum, prod, max or min."""

    op: str
    index: str
    extent: int | Arg
    value: Expr

    @property
    def dtype(self) -> DType:
        return self.value.dtype


@dataclass(frozen=True, slots=True)
class Table:
    """Integers that are part of the code; the name tells them apart from those of all other tables."""

    name: str
    values: tuple[int, ...] = field(repr=False, compare=False)

    @classmethod
    def of(cls, name: str, values: tuple[int, ...]) -> Table:
        """A table whose name ends in a digest of its values."""
        return cls(f"{name}.{hashlib.blake2b(repr(values).encode(), digest_size=4).hexdigest()}", values)


@dataclass(frozen=True, slots=True)
class Lookup:
    """The integer of a table at an index that always lies inside it."""

    table: Table
    index: Expr

    @property
    def dtype(self) -> DType:
        return I32


Expr = Index | Arg | Const | Ref | Load | Apply | Choose | Reduce | Lookup

# Names an emitter must know. Float arguments are f32 or f64 (narrow floats are widened on load).
SCALAR_OPS = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "floordiv": 2, "mod": 2, "pow": 2, "max": 2, "min": 2, "fma": 3,
    "neg": 1, "abs": 1, "exp": 1, "log": 1, "tanh": 1, "erf": 1, "gelu": 1, "sqrt": 1, "sin": 1, "cos": 1,
    "tan": 1, "atan": 1,
    "eq": 2, "ne": 2, "lt": 2, "le": 2, "gt": 2, "ge": 2, "and": 2, "or": 2, "xor": 2, "not": 1, "shl": 2, "shr": 2,
    "select": 3, "cast": 1, "order": 1, "bits": 1, "nearest": 1, "quot": 2, "rem": 2, "dot_u8": 3, "dot_u7": 3,
}  # fmt: skip
# order: a signed integer as wide as x that sorts as x does, -0.0 as 0.0 and NaN above everything.
# bits: the f32 that has the bits of an i32.
# nearest: the i32 (i64 of f64) nearest to x, ties to even, for |x| below 2^22 (2^51); any integer for others.
# shl, shr: shifts of integers; bits that come in from the left are copies of the sign.
# quot, rem: quotient and remainder of non-negative indices.
# dot_u8(total, x, y): total plus the products of the four bytes of x, unsigned, and those of y, signed; all are i32.
# dot_u7: the same where no byte of x is above 127, which some targets do faster.


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
    at: tuple[tuple[Expr, int | Arg], ...]
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

    @cached_property
    def fingerprint(self) -> str:
        """A digest of everything the machine code depends on, the target aside."""
        text = f"{self.name}|{self.params}|{self.args}|{self.root}|{self.chunk}|{self.lets}"
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    @property
    def symbol(self) -> str:
        return f"{self.name}.{self.fingerprint[:8]}"

    def text(self) -> str:
        """The kernel as readable text."""
        reads = ", ".join(f"{p.name}: {p.dtype}" for p in self.params if not p.written)
        writes = ", ".join(f"{p.name}: {p.dtype}" for p in self.params if p.written)
        lines = [f"kernel {self.symbol}({reads}) -> {writes}"]
        for let in self.lets:
            lines += _stmt_lines(let, self.params, 1)
        mode = f" split by {self.chunk}" if self.chunk else " split"
        head = _stmt_lines(self.root, self.params, 1)
        head[0] = head[0][:-1] + mode + ":"
        return "\n".join(lines + head)


# -- walking ------------------------------------------------------------------------------------------------------
def children(expr: Expr) -> tuple[Expr, ...]:
    """The expressions directly inside `expr`."""
    match expr:
        case Load():
            return tuple(i for i, _ in expr.at)
        case Apply():
            return expr.args
        case Choose():
            return (expr.condition, expr.then, expr.other)
        case Reduce():
            return (expr.value,)
        case Lookup():
            return (expr.index,)
        case _:
            return ()


def walk(expr: Expr) -> Iterator[Expr]:
    """`expr` and everything inside it."""
    yield expr
    for child in children(expr):
        yield from walk(child)


def depends_on(expr: Expr, index: str) -> bool:
    """Whether the value of `expr` changes with the loop variable (through the expression itself, not through refs)."""
    return any(isinstance(e, Index) and e.name == index for e in walk(expr))


# -- text -----------------------------------------------------------------------------------------------------------
_INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "floordiv": "//", "mod": "%", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip


def expr_text(expr: Expr, params: tuple[Param, ...], lets: Mapping[str, Expr] | None = None) -> str:
    """An expression as readable text; names in `lets` are written out."""

    def show(e: Expr) -> str:
        return expr_text(e, params, lets)

    match expr:
        case Ref() if lets and expr.name in lets:
            return show(lets[expr.name])
        case Index() | Arg() | Ref():
            return expr.name
        case Const():
            return str(expr.value).lower() if expr.dtype is BOOL else f"{expr.value!r}"
        case Load():
            return f"{params[expr.param].name}[{_place(expr.at, params)}]"
        case Apply(op="cast"):
            return f"{expr.dtype}({show(expr.args[0])})"
        case Apply() if expr.op in _INFIX:
            return f"({show(expr.args[0])} {_INFIX[expr.op]} {show(expr.args[1])})"
        case Apply():
            return f"{expr.op}({', '.join(map(show, expr.args))})"
        case Choose():
            return f"({show(expr.then)} if {show(expr.condition)} else {show(expr.other)})"
        case Reduce():
            return f"{expr.op}({expr.index} in {_extent(expr.extent)}: {show(expr.value)})"
        case Lookup():
            return f"{expr.table.name.partition('.')[0]}[{show(expr.index)}]"


def _extent(extent: int | Arg | Ref) -> str:
    return str(extent) if isinstance(extent, int) else extent.name


def _place(at: tuple[tuple[Expr, int | Arg], ...], params: tuple[Param, ...]) -> str:
    terms = []
    for index, stride in at:
        factor = _extent(stride)
        shown = expr_text(index, params)
        terms.append(shown if factor == "1" else factor if shown == "1" else f"{shown}*{factor}")
    return " + ".join(terms) or "0"


def _stmt_lines(stmt: Stmt, params: tuple[Param, ...], depth: int) -> list[str]:
    pad = "  " * depth
    match stmt:
        case Let() | Assign():
            return [f"{pad}{stmt.name} = {expr_text(stmt.value, params)}"]
        case Var():
            return [f"{pad}var {stmt.name} = {expr_text(stmt.start, params)}"]
        case Store():
            place = _place(stmt.at, params)
            return [f"{pad}{params[stmt.param].name}[{place}] = {expr_text(stmt.value, params)}"]
        case Check():
            return [f"{pad}check {expr_text(stmt.condition, params)} else fault {stmt.code}"]
        case For():
            mode = " vector" if stmt.vector else ""
            lines = [f"{pad}for {stmt.index} in {_extent(stmt.extent)}{mode}:"]
            for inner in stmt.body:
                lines += _stmt_lines(inner, params, depth + 1)
            return lines


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

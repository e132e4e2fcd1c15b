"""Expressions of the loop language: scalar values that kernels compute, written with Python's operators.

An expression is a tree of frozen records (loop indices, run-time sizes, constants, loads, operations, reductions),
each with one element type.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import field
from typing import TYPE_CHECKING

import numpy as np

from rlx.dtypes import BOOL, F32, F64, I32, I64, DType
from rlx.errors import LowerError
from rlx.fast_dataclass import dataclass

Scalar = float | int | bool


class Formula:
    """Overloaded operators: `a * b + 1` builds the expression that computes it; `==` compares structure.

    Python numbers take the type of the other operand. Otherwise both operands must have the same type, except shift
    counts. Constants are folded, and for integers so are identities such as x + 0 and x * 1.
    """

    __slots__ = ()

    if TYPE_CHECKING:

        @property
        def dtype(self) -> DType: ...

    def __bool__(self) -> bool:
        raise LowerError(
            "expression: has no truth value before a kernel runs", hint="condition.select(a, b); a.eq(b) for equality"
        )

    if not TYPE_CHECKING:  # type checkers know the attributes

        def __getattr__(self, name):
            functions = ", ".join(n for n in vars(Formula) if not n.startswith("_"))
            raise AttributeError(f"expressions of loops have no {name!r}; they have operators and {functions}")

    # -- arithmetic --
    def __add__(self, other: Operand) -> Expr:
        return binary("add", self, other)

    def __radd__(self, other: Scalar) -> Expr:
        return binary("add", other, self)

    def __sub__(self, other: Operand) -> Expr:
        return binary("sub", self, other)

    def __rsub__(self, other: Scalar) -> Expr:
        return binary("sub", other, self)

    def __mul__(self, other: Operand) -> Expr:
        return binary("mul", self, other)

    def __rmul__(self, other: Scalar) -> Expr:
        return binary("mul", other, self)

    def __truediv__(self, other: Operand) -> Expr:
        return binary("div", self, other)

    def __rtruediv__(self, other: Scalar) -> Expr:
        return binary("div", other, self)

    def __floordiv__(self, other: Operand) -> Expr:
        return binary("floordiv", self, other)

    def __rfloordiv__(self, other: Scalar) -> Expr:
        return binary("floordiv", other, self)

    def __mod__(self, other: Operand) -> Expr:
        return binary("mod", self, other)

    def __rmod__(self, other: Scalar) -> Expr:
        return binary("mod", other, self)

    def quot(self, other: Operand) -> Expr:
        """`self // other` for non-negative operands, which is faster."""
        return binary("quot", self, other)

    def rem(self, other: Operand) -> Expr:
        """`self % other` for non-negative operands, which is faster."""
        return binary("rem", self, other)

    def min(self, other: Operand) -> Expr:
        return binary("min", self, other)

    def max(self, other: Operand) -> Expr:
        return binary("max", self, other)

    def __neg__(self) -> Expr:
        return unary("neg", self)

    def __abs__(self) -> Expr:
        return unary("abs", self)

    # -- bits and conditions --
    def __and__(self, other: Operand) -> Expr:
        return binary("and", self, other)

    def __rand__(self, other: Scalar) -> Expr:
        return binary("and", other, self)

    def __or__(self, other: Operand) -> Expr:
        return binary("or", self, other)

    def __ror__(self, other: Scalar) -> Expr:
        return binary("or", other, self)

    def __xor__(self, other: Operand) -> Expr:
        return binary("xor", self, other)

    def __rxor__(self, other: Scalar) -> Expr:
        return binary("xor", other, self)

    def __lshift__(self, other: Operand) -> Expr:
        return binary("shl", self, other)

    def __rlshift__(self, other: int) -> Expr:
        return binary("shl", other, self)

    def __rshift__(self, other: Operand) -> Expr:
        return binary("shr", self, other)

    def __rrshift__(self, other: int) -> Expr:
        return binary("shr", other, self)

    def __invert__(self) -> Expr:
        return unary("not", self)

    def __lt__(self, other: Operand) -> Expr:
        return compare("lt", self, other)

    def __le__(self, other: Operand) -> Expr:
        return compare("le", self, other)

    def __gt__(self, other: Operand) -> Expr:
        return compare("gt", self, other)

    def __ge__(self, other: Operand) -> Expr:
        return compare("ge", self, other)

    def eq(self, other: Operand) -> Expr:
        """Elementwise equality; `==` compares the expressions themselves."""
        return compare("eq", self, other)

    def ne(self, other: Operand) -> Expr:
        return compare("ne", self, other)

    def select(self, then: Operand, other: Operand) -> Expr:
        """`then` where this condition holds, else `other`; both are evaluated."""
        condition, a, b = _condition("select", self), *_same_type("select", then, other)
        if isinstance(condition, Const):
            return a if condition.value else b
        return Apply("select", (condition, a, b), a.dtype)

    def choose(self, then: Operand, other: Operand) -> Expr:
        """Like `select`, but only the chosen side is loaded."""
        condition, a, b = _condition("choose", self), *_same_type("choose", then, other)
        if isinstance(condition, Const):
            return a if condition.value else b
        return Choose(condition, a, b)

    # -- functions --
    def cast(self, dtype: DType) -> Expr:
        """Convert to `dtype`; a no-op if the expression already has it."""
        return _expr(self) if self.dtype is dtype else unary("cast", self, dtype)

    def exp(self) -> Expr:
        return unary("exp", self)

    def log(self) -> Expr:
        return unary("log", self)

    def sqrt(self) -> Expr:
        return unary("sqrt", self)

    def tanh(self) -> Expr:
        return unary("tanh", self)

    def sin(self) -> Expr:
        return unary("sin", self)

    def cos(self) -> Expr:
        return unary("cos", self)

    def erf(self) -> Expr:
        return unary("erf", self)

    def __pow__(self, other: Operand) -> Expr:
        if not self.dtype.is_float:
            raise LowerError(f"expression: pow of {self.dtype}", hint="x * x, or cast it to a float")
        return binary("pow", self, other)

    def bits(self) -> Expr:
        """Reinterpret the bits of an i32 as f32, or those of an f32 as i32."""
        return unary("bits", self, I32 if self.dtype is F32 else F32)

    def order(self) -> Expr:
        """A signed integer of the same width that sorts in the same order; -0.0 equals 0.0, NaN is above everything."""
        return unary("order", self, I64 if self.dtype.size == 8 else I32)

    def nearest(self) -> Expr:
        """The nearest integer of the same width, ties to even, for small magnitudes (see `SCALAR_OPS`)."""
        return unary("nearest", self, I64 if self.dtype.size == 8 else I32)


@dataclass(frozen=True, slots=True)
class Index(Formula):
    """The loop variable called `name`, an i64."""

    name: str

    @property
    def dtype(self) -> DType:
        return I64


@dataclass(frozen=True, slots=True)
class Arg(Formula):
    """A run-time integer of the launch: an extent, a stride or any other size."""

    name: str

    @property
    def dtype(self) -> DType:
        return I64


@dataclass(frozen=True, slots=True, eq=False)
class Const(Formula):
    """A compile-time constant. Compares by its text: NaN equals NaN, but 0.0 does not equal -0.0."""

    value: Scalar
    dtype: DType

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Const) and self.dtype is other.dtype and repr(self.value) == repr(other.value)

    def __hash__(self) -> int:
        return hash((repr(self.value), self.dtype))


@dataclass(frozen=True, slots=True)
class Ref(Formula):
    """The value of an earlier `Let` or `Var`."""

    name: str
    dtype: DType


@dataclass(frozen=True, slots=True)
class Load(Formula):
    """One element of a parameter.

    Its address may lie outside the buffer only if an enclosing `Choose` does not take it.
    """

    param: int
    at: Place
    dtype: DType  # of the parameter


@dataclass(frozen=True, slots=True)
class Apply(Formula):
    """A scalar operation by name; see `SCALAR_OPS`."""

    op: str
    args: tuple[Expr, ...]
    dtype: DType


@dataclass(frozen=True, slots=True)
class Choose(Formula):
    """`then` where `condition` holds, else `other`; only the chosen side is loaded."""

    condition: Expr
    then: Expr
    other: Expr

    @property
    def dtype(self) -> DType:
        return self.then.dtype


@dataclass(frozen=True, slots=True)
class Reduce(Formula):
    """Reduction of `value` over `index` in [0, extent) by `op`: sum, prod, max or min.

    A `Ref` extent is an i64 computed earlier, the same in all lanes.
    """

    op: str
    index: str
    extent: int | Arg | Ref
    value: Expr

    @property
    def dtype(self) -> DType:
        return self.value.dtype


@dataclass(frozen=True, slots=True)
class Table:
    """Constant integers embedded in the code; the name identifies the table uniquely."""

    name: str
    values: tuple[int, ...] = field(repr=False, compare=False)

    @classmethod
    def of(cls, name: str, values: tuple[int, ...]) -> Table:
        """A table whose name ends in a digest of its values."""
        return cls(f"{name}.{hashlib.blake2b(repr(values).encode(), digest_size=4).hexdigest()}", values)


@dataclass(frozen=True, slots=True)
class Lookup(Formula):
    """An entry of a table; the index is always in range."""

    table: Table
    index: Expr

    @property
    def dtype(self) -> DType:
        return I32


Expr = Index | Arg | Const | Ref | Load | Apply | Choose | Reduce | Lookup
Operand = Formula | Scalar
Place = tuple[tuple[Expr, int | Arg], ...]  # an address in elements: the sum of index * stride

# Operations that an emitter must implement, and their arity. Float arguments are f32, f64, or a native narrow type
# (`Target.native`).
SCALAR_OPS = {
    "add": 2, "sub": 2, "mul": 2, "div": 2, "floordiv": 2, "mod": 2, "pow": 2, "max": 2, "min": 2, "fma": 3,
    "neg": 1, "abs": 1, "exp": 1, "log": 1, "tanh": 1, "erf": 1, "gelu": 1, "sqrt": 1, "sin": 1, "cos": 1,
    "tan": 1, "atan": 1,
    "eq": 2, "ne": 2, "lt": 2, "le": 2, "gt": 2, "ge": 2, "and": 2, "or": 2, "xor": 2, "not": 1, "shl": 2, "shr": 2,
    "select": 3, "cast": 1, "order": 1, "bits": 1, "nearest": 1, "quot": 2, "rem": 2, "dot_u8": 3, "dot_u7": 3,
}  # fmt: skip
# order: a signed integer of x's width that sorts in the same order; -0.0 equals 0.0, NaN is above everything.
# bits: reinterprets an i32 as f32, and an f32 as i32.
# nearest: the i32 (i64 for f64) nearest to x, ties to even, for |x| below 2^22 (2^51); unspecified for larger |x|.
# shl, shr: integer shifts; shr is arithmetic (sign-extending).
# quot, rem: quotient and remainder of non-negative indices.
# dot_u8(total, x, y): total plus the dot product of the four unsigned bytes of x and four signed bytes of y; all i32.
# dot_u7: the same, faster on some targets, if the sum of two adjacent products fits into 16 bits: no byte of x exceeds
# 127, or bytes of y are from -64 to 64.


# -- arithmetic on expressions ----------------------------------------------------------------------------------------
def number(value: Scalar, dtype: DType) -> Const:
    """A constant of type `dtype`; raises if the type cannot represent it."""
    if dtype is BOOL:
        return Const(bool(value), dtype)
    if dtype.is_float:
        with np.errstate(over="ignore"):
            fits = not math.isfinite(value) or bool(np.isfinite(dtype.numpy.type(value)))
        if fits:
            return Const(float(value), dtype)
    elif not isinstance(value, float | np.floating) and _wrap(int(value), dtype) == value:
        return Const(int(value), dtype)
    raise LowerError(f"expression: {value!r} is not representable in {dtype}", hint="cast the other operand")


def binary(op: str, a: Operand, b: Operand) -> Expr:
    """A binary operation; operands and result have the same type."""
    left, right = _same_type(op, a, b)
    if op in _BITWISE and left.dtype.is_float:
        raise LowerError(f"expression: {op} of {left.dtype}", hint="bits are those of integers and conditions")
    if isinstance(left, Const) or isinstance(right, Const):
        folded = _fold(op, left, right)
        if folded is not None:
            return folded
    return Apply(op, (left, right), left.dtype)


def compare(op: str, a: Operand, b: Operand) -> Expr:
    """A comparison; operands have the same type, the result is a condition."""
    left, right = _same_type(op, a, b)
    if isinstance(left, Const) and isinstance(right, Const):
        x, y = _machine_value(left), _machine_value(right)
        return Const(bool(_COMPARISONS[op](x, y)), BOOL)
    return Apply(op, (left, right), BOOL)


def unary(op: str, x: Formula, dtype: DType | None = None) -> Expr:
    """A unary operation; the result has the operand's type unless `dtype` is given."""
    folded = _fold_unary(op, x, dtype or x.dtype) if isinstance(x, Const) else None
    return Apply(op, (_expr(x),), dtype or x.dtype) if folded is None else folded


def fma(a: Expr, b: Expr, c: Expr) -> Expr:
    """a * b + c, rounded once."""
    if not a.dtype is b.dtype is c.dtype:
        raise LowerError(f"expression: fma of {a.dtype}, {b.dtype} and {c.dtype}", hint="cast them to one type")
    return Apply("fma", (a, b, c), a.dtype)


def known(value: int | Expr, dtype: DType) -> Expr:
    """A Python integer or an expression, as an expression of type `dtype`."""
    return Const(value, dtype) if isinstance(value, int) else value.cast(dtype)


def _expr(x: Formula) -> Expr:
    return x  # type: ignore[return-value]  # nothing else is a Formula


def _condition(op: str, x: Formula) -> Expr:
    if x.dtype is not BOOL:
        raise LowerError(f"expression: {op} by {x.dtype}, expected a condition", hint="x.ne(0)")
    return _expr(x)


def _same_type(op: str, a: Operand, b: Operand) -> tuple[Expr, Expr]:
    """Both operands as expressions of the same type."""
    if not isinstance(a, Formula):
        assert isinstance(b, Formula), "at least one operand is an expression"
        return number(a, b.dtype), _expr(b)
    if not isinstance(b, Formula):
        return _expr(a), number(b, a.dtype)
    if a.dtype is not b.dtype:
        if op not in ("shl", "shr"):
            raise LowerError(f"expression: {op} of {a.dtype} and {b.dtype}", hint="cast one of them")
        return _expr(a), b.cast(a.dtype)
    return _expr(a), _expr(b)


_EXACT: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "and": operator.and_, "or": operator.or_,
    "xor": operator.xor, "shl": operator.lshift, "shr": operator.rshift, "min": min, "max": max,
    "floordiv": operator.floordiv, "mod": operator.mod, "quot": operator.floordiv, "rem": operator.mod,
}  # fmt: skip
_BITWISE = ("and", "or", "xor", "shl", "shr")
_COMPARISONS: dict[str, Callable[[Scalar, Scalar], bool]] = {
    "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "eq": operator.eq, "ne": operator.ne,
}  # fmt: skip
_FLOATS = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "div": operator.truediv}
_LEFT_IDENTITIES = {  # x op number is x
    0: {"add", "sub", "or", "xor", "shl", "shr"}, 1: {"mul", "floordiv", "quot"},
}  # fmt: skip
_RIGHT_IDENTITIES = {0: {"add", "or", "xor"}, 1: {"mul"}}  # number op x is x


def _fold(op: str, a: Expr, b: Expr) -> Expr | None:
    """The simplified result of an operation with a constant operand, or None."""
    dtype = a.dtype
    if dtype is BOOL:
        return _fold_condition(op, a, b)
    if dtype.is_float:
        return _fold_floats(op, a, b)
    if isinstance(a, Const) and isinstance(b, Const):
        x, y = int(a.value), int(b.value)
        defined = 0 <= y < 8 * dtype.size if op in ("shl", "shr") else y > 0 or op not in _DIVISIONS
        return Const(_wrap(_EXACT[op](x, y), dtype), dtype) if op in _EXACT and defined else None
    if isinstance(b, Const):
        if op in _LEFT_IDENTITIES.get(int(b.value), ()):
            return a
        return Const(0, dtype) if b.value == 0 and op in ("mul", "and") else None
    assert isinstance(a, Const)
    if op in _RIGHT_IDENTITIES.get(int(a.value), ()):
        return b
    return Const(0, dtype) if a.value == 0 and op in ("mul", "and", "shl", "shr") else None


_DIVISIONS = ("floordiv", "mod", "quot", "rem")


def _fold_condition(op: str, a: Expr, b: Expr) -> Expr | None:
    for one, other in ((a, b), (b, a)):
        if isinstance(one, Const) and op in ("and", "or"):
            return other if bool(one.value) is (op == "and") else one
    return None


def _fold_floats(op: str, a: Expr, b: Expr) -> Expr | None:
    """Fold two float constants with machine rounding. No identities: -0.0 + 0.0 is not -0.0, nan * 0.0 is not 0.0."""
    if not isinstance(a, Const) or not isinstance(b, Const) or op not in _FLOATS or a.dtype not in (F32, F64):
        return None
    kind = a.dtype.numpy.type
    with np.errstate(all="ignore"):
        return Const(float(_FLOATS[op](kind(a.value), kind(b.value))), a.dtype)


def _fold_unary(op: str, x: Const, dtype: DType) -> Const | None:
    """Fold a negation or a cast of a constant; other functions are left to the machine, which rounds in its own way."""
    value = _machine_value(x)
    if op == "not":
        return Const(not value, BOOL) if x.dtype is BOOL else Const(_wrap(~int(value), dtype), dtype)
    if op == "neg" and x.dtype in (F32, F64):
        return Const(-value, dtype)
    if op in ("neg", "abs") and x.dtype.kind in ("int", "uint"):
        return Const(_wrap(-int(value) if op == "neg" else abs(int(value)), dtype), dtype)
    if op == "cast" and dtype is BOOL:
        return Const(bool(value), BOOL)
    if op == "cast" and dtype in (F32, F64):
        with np.errstate(over="ignore"):
            return Const(float(dtype.numpy.type(value)), dtype)
    if op == "cast" and isinstance(value, int) and dtype.kind in ("int", "uint"):
        return Const(_wrap(int(value), dtype), dtype)
    return None


def _machine_value(x: Const) -> Scalar:
    """The number that the machine computes with: a float constant rounded to its type."""
    return float(x.dtype.numpy.type(x.value)) if x.dtype.is_float else x.value


def _wrap(value: int, dtype: DType) -> int:
    """An integer wrapped to the range of a type."""
    bits = 8 * dtype.size
    value &= (1 << bits) - 1
    return value - (1 << bits) if dtype.kind == "int" and value >> bits - 1 else value


# -- traversal ------------------------------------------------------------------------------------------------------
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
    """`expr` and all its subexpressions."""
    yield expr
    for child in children(expr):
        yield from walk(child)


def substitute(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """Replace refs by name with other expressions; subtrees without such refs stay the same objects."""
    if isinstance(expr, Ref):
        return values.get(expr.name, expr)
    if not any(isinstance(e, Ref) and e.name in values for e in walk(expr)):
        return expr

    def inside(e: Expr) -> Expr:
        return substitute(e, values)

    match expr:
        case Load():
            return Load(expr.param, tuple((inside(i), step) for i, step in expr.at), expr.dtype)
        case Apply():
            return Apply(expr.op, tuple(map(inside, expr.args)), expr.dtype)
        case Choose():
            return Choose(inside(expr.condition), inside(expr.then), inside(expr.other))
        case Reduce():
            return Reduce(expr.op, expr.index, expr.extent, inside(expr.value))
        case Lookup():
            return Lookup(expr.table, inside(expr.index))
        case _:
            return expr


def depends_on(expr: Expr, index: str) -> bool:
    """Whether the value of `expr` changes with the loop variable (through the expression itself, not through refs)."""
    return any(isinstance(e, Index) and e.name == index for e in walk(expr))

"""Helpers to write kernels with one row per unit: `Body` collects statements, `Rows` are operands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from rlx.dtypes import I64, DType
from rlx.lir.expressions import Formula
from rlx.lir.loops import Arg, Assign, Const, Expr, For, Index, Let, Load, Operand, Ref, Stmt, Store, Var, number
from rlx.lir.schedule import LoopBuilder
from rlx.lir.views import View

ROW = Index("u")  # the unit


class Body:
    """A list of statements under construction; each method appends one. Names are read through a `Ref`."""

    def __init__(self) -> None:
        self.stmts: list[Stmt] = []

    def let(self, name: str, value: Expr) -> Ref:
        self.stmts.append(Let(name, value))
        return Ref(name, value.dtype)

    def var(self, name: str, start: Operand, dtype: DType) -> Ref:
        self.stmts.append(Var(name, start.cast(dtype) if isinstance(start, Formula) else number(start, dtype)))
        return Ref(name, dtype)

    def assign(self, variable: Ref, value: Expr) -> None:
        self.stmts.append(Assign(variable.name, value))

    def store(self, target: Rows, at: Expr, value: Expr) -> None:
        self.stmts.append(Store(target.param, target.place(at), value))

    @contextmanager
    def loop(self, index: str, extent: int | Arg | Ref, *, vector: bool = False) -> Iterator[Body]:
        inner = Body()
        yield inner
        self.stmts.append(For(index, extent, tuple(inner.stmts), vector))

    @contextmanager
    def when(self, name: str, condition: Expr) -> Iterator[Body]:
        """Statements that run only if a condition holds."""
        with self.loop(f"{name}_once", self.let(name, condition.cast(I64))) as inner:
            yield inner


class Rows:
    """A parameter with one row per unit: `rows[i]` is an element of the row."""

    def __init__(self, builder: LoopBuilder, name: str, view: View, *, written: bool = False) -> None:
        self.param = builder.param(view, written=written, name=name)
        self.dtype = view.dtype
        self.stride = builder.stride(self.param, "row", view.strides[0])
        self.step = builder.stride(self.param, "step", view.strides[1], unit=True) if view.rank == 2 else 0

    def place(self, at: Expr) -> tuple[tuple[Expr, int | Arg], ...]:
        terms: list[tuple[Expr, int | Arg]] = [(ROW, self.stride), (at, self.step)]
        return tuple((index, stride) for index, stride in terms if stride != 0)

    def __getitem__(self, at: Expr) -> Expr:
        return Load(self.param, self.place(at), self.dtype)

    @property
    def only(self) -> Expr:
        """The row's single element, for a parameter `[rows]`."""
        return self[Const(0, I64)]

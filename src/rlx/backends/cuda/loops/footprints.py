"""Footprints: the elements of each operand that every unit of a loop kernel may touch, for the sizes of a launch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field

import numpy as np

from rlx.arrays import Array
from rlx.backends.cuda.loops.structure import each, values
from rlx.dtypes import I64
from rlx.fast_dataclass import dataclass
from rlx.lir.loops import (
    Apply,
    Arg,
    Choose,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    LoopKernel,
    Place,
    Reduce,
    Ref,
    Stmt,
    Store,
)

Spans = tuple[Array, Array]  # lowest and highest value, by unit
EVERYTHING = 1 << 60  # the end of what data selects


@dataclass(frozen=True, eq=False, slots=True)
class Footprint:
    """The elements [low, high] of a parameter that a load or store may touch, by unit."""

    param: int
    written: bool
    low: Array
    high: Array


@dataclass
class _Footprints:
    kernel: LoopKernel
    words: Mapping[str, int]
    units: int
    spans: dict[str, Spans | None] = field(default_factory=dict)

    def all(self) -> Iterator[Footprint]:
        root, every = self.kernel.root, np.arange(self.units, dtype=np.int64)
        for let in self.kernel.lets:
            yield from self.stmt(let)
        self.spans[root.index] = every, every
        for stmt in root.body:
            yield from self.stmt(stmt)

    def stmt(self, stmt: Stmt) -> Iterator[Footprint]:
        yield from self.loads(*values(stmt))
        match stmt:
            case Let():
                self.spans[stmt.name] = self.span(stmt.value)
            case Store():
                yield self.footprint(stmt.param, True, stmt.at)
            case For():
                self.enter(stmt.index, stmt.extent)
                for inner in stmt.body:
                    yield from self.stmt(inner)

    def loads(self, *exprs: Expr) -> Iterator[Footprint]:
        for expr in each(*exprs):
            if isinstance(expr, Reduce):
                self.enter(expr.index, expr.extent)
        for expr in each(*exprs):
            if isinstance(expr, Load):
                yield self.footprint(expr.param, False, expr.at)

    def enter(self, index: str, extent: int | Arg | Ref) -> None:
        size = self.span(Const(extent, I64) if isinstance(extent, int) else extent)
        self.spans[index] = None if size is None else (np.zeros_like(size[1]), np.maximum(size[1] - 1, 0))

    def footprint(self, param: int, written: bool, at: Place) -> Footprint:
        low = high = np.zeros(self.units, np.int64)
        for index, stride in at:
            span = self.span(index)
            if span is None:
                return Footprint(param, written, np.zeros_like(low), np.full_like(high, EVERYTHING))
            step = stride if isinstance(stride, int) else self.words[stride.name]
            ends = span[0] * step, span[1] * step
            low, high = low + np.minimum(*ends), high + np.maximum(*ends)
        return Footprint(param, written, low, high)

    def span(self, expr: Expr) -> Spans | None:
        """The range of an index by unit; None for what depends on data."""
        if expr.dtype is not I64:
            return None
        match expr:
            case Const():
                return self._constant(int(expr.value))
            case Arg():
                return self._constant(self.words[expr.name])
            case Index() | Ref():
                return self.spans.get(expr.name)
            case Apply(op="select", args=(_, a, b)) | Choose(then=a, other=b):
                one, other = self.span(a), self.span(b)
                return one and other and (np.minimum(one[0], other[0]), np.maximum(one[1], other[1]))
            case Apply(op=op, args=(a, b)):
                left, right = self.span(a), self.span(b)
                return left and right and _combined(op, left, right)
        return None

    def _constant(self, value: int) -> Spans:
        every = np.full(self.units, value, np.int64)
        return every, every


def _combined(op: str, a: Spans, b: Spans) -> Spans | None:
    match op:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul":
            ends = np.stack([x * y for x in a for y in b])
            return ends.min(0), ends.max(0)
        case "quot" | "floordiv" if (a[0] >= 0).all() and (b[0] > 0).all():
            return a[0] // b[1], a[1] // b[0]
        case "rem" | "mod" if (a[0] >= 0).all() and (b[0] > 0).all():
            exact = (a[0] == a[1]) & (b[0] == b[1])
            return np.where(exact, a[0] % b[0], 0), np.where(exact, a[0] % b[0], b[1] - 1)
    return None


def footprints(kernel: LoopKernel, words: Mapping[str, int], units: int) -> list[Footprint]:
    """What each load and store may touch."""
    return list(_Footprints(kernel, words, units).all())

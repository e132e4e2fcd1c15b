"""The interpreter: runs a `LoopKernel` in NumPy.

Units, iterations of `vector` loops and terms of reductions are vectorised: each is an array axis, innermost first, so
that NumPy broadcasting aligns them. All other loops are Python loops. Where only some lanes take part in a loop or
branch, a mask selects them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import I64, DType, cast_array
from rlx.lir import loops
from rlx.lir.loops import Apply, Arg, Choose, Const, Expr, For, Index, Load, Lookup, LoopKernel, Reduce, Ref, Stmt
from rlx.lir.scalar_meanings import COMBINE, MEANINGS, identity

REDUCE_BLOCK = 32  # terms of a reduction combined at once; determines the summation order
LANES = 1 << 16  # maximum number of iterations vectorised at once, not counting reductions


Memory = Sequence[tuple[Array, int]]  # flat array and offset of each parameter


def run(kernel: LoopKernel, units: int, memory: Memory, args: Sequence[int], faults: list[int]) -> None:
    """Runs all units. Checks that do not hold append their code to `faults`."""
    named = dict(zip(kernel.args, args, strict=True))
    code = _Interpreter(kernel.params, memory, named, faults, in_vector=bool(kernel.chunk))
    code.body(kernel.lets)
    root = kernel.root
    stop = min(units * kernel.chunk, code.extent(root.extent)) if kernel.chunk else units
    step = max(1, LANES // max((1, *code.widths(root.body))))
    for first in range(0, stop, step):
        code.inside(root.index, np.arange(first, min(first + step, stop))).body(root.body)


@dataclass
class _Interpreter:
    params: Sequence[loops.Param]
    memory: Memory
    args: Mapping[str, int]
    faults: list[int]
    names: dict[str, Any] = field(default_factory=dict)  # loop variables and lets; a variable is a list of one value
    memo: dict[int, Any] = field(default_factory=dict)  # values of expressions of this statement, by id
    rank: int = 1  # axes of values
    mask: Any = True  # the active lanes
    in_vector: bool = False  # whether a vector loop encloses the code

    def inside(self, index: str, value: Any, **changes: Any) -> _Interpreter:
        """An interpreter for the body of a loop or reduction. Names from inside do not escape."""
        return replace(self, names={**self.names, index: value}, memo={}, **changes)

    def under(self, mask: Any) -> _Interpreter:
        """An interpreter for the lanes where `mask` holds, of those that are active."""
        return replace(self, mask=mask if self.mask is True else self.mask & mask, memo={})

    # -- statements --
    def body(self, statements: Sequence[Stmt]) -> None:
        for statement in statements:
            self.memo = {}
            self.run(statement)

    def run(self, statement: Stmt) -> None:
        match statement:
            case loops.Let(name, value):
                self.names[name] = self.value(value)
            case loops.Var(name, start):
                self.names[name] = [self.value(start)]
            case loops.Assign(name, expr):
                value, variable = self.value(expr), self.names[name]
                variable[0] = value if self.mask is True else np.where(self.mask, value, variable[0])
            case loops.Store(param, place, expr):
                elements, at = self.address(param, place)
                self.store(elements, at, _cast(self.value(expr), expr.dtype, self.params[param].dtype))
            case loops.Check(condition, code):
                if not np.all(np.logical_not(self.mask) | self.value(condition)):
                    self.faults.append(code)
            case For():
                self.loop(statement)

    def loop(self, loop: For) -> None:
        """Vectorises a vector loop unless another one encloses it; any other loop is a Python loop."""
        extent = self.extent(loop.extent)
        steps: Sequence[Any] = range(_longest(extent))
        inner = self.inside(loop.index, 0)
        if loop.vector and not self.in_vector:
            inner = replace(inner, rank=self.rank + 1, in_vector=True)
            steps = [self.axis(0, len(steps))] if steps else []
        for step in steps:
            inner.names[loop.index] = step
            (inner.under(step < extent) if np.ndim(extent) else inner).body(loop.body)

    def store(self, elements: Array, at: Any, value: Any) -> None:
        if self.mask is True and np.shape(at) == np.shape(value):
            elements[at] = value
            return
        at, value, mask = np.broadcast_arrays(at, value, self.mask)
        elements[at[mask]] = value[mask]

    # -- expressions --
    def value(self, expr: Expr) -> Any:
        match expr:
            case Index(name) | Ref(name):
                value = self.names[name]
                return value[0] if isinstance(value, list) else value
            case Arg(name):
                return self.args[name]
            case Const(value, dtype):
                return value if dtype is I64 else dtype.numpy.type(value)
        if id(expr) not in self.memo:
            self.memo[id(expr)] = self.computed(expr)
        return self.memo[id(expr)]

    def computed(self, expr: Expr) -> Any:
        match expr:
            case Load(param, place):
                elements, at = self.address(param, place)
                if self.mask is True:
                    return elements[at]
                if not elements.size:
                    return np.zeros(np.broadcast_shapes(np.shape(at), np.shape(self.mask)), elements.dtype)
                return elements[np.where(self.mask, at, 0)]  # lanes that are not active read anything
            case Apply("cast", (operand,), dtype):
                return _cast(self.value(operand), operand.dtype, dtype)
            case Apply(op, args):
                return MEANINGS[op](*map(self.value, args))
            case Choose(condition, then, other):
                chosen = self.value(condition)
                sides = self.under(chosen).value(then), self.under(np.logical_not(chosen)).value(other)
                return np.where(chosen, *sides)
            case Reduce():
                return self.reduction(expr)
            case Lookup(table, index):
                return _table(table)[self.value(index)]
        raise AssertionError(f"{expr} is not an expression")

    def reduction(self, expr: Reduce) -> Any:
        """Combines all terms block by block. A block is combined by halving, as if padded with identities.

        The order is fixed, whatever else is vectorised, and trailing zeros do not change a sum.
        """
        combine, start, extent = COMBINE[expr.op], identity(expr.op, expr.dtype), self.extent(expr.extent)
        total, longest = start, _longest(extent)
        for first in range(0, longest, REDUCE_BLOCK):
            index = self.axis(first, min(first + REDUCE_BLOCK, longest))
            inner = self.inside(expr.index, index, rank=self.rank + 1)
            if np.ndim(extent):
                terms = np.where(index < extent, inner.under(index < extent).value(expr.value), start)
            else:
                terms = inner.value(expr.value)
            total = combine(total, _halved(combine, terms, index))
        return total

    def axis(self, first: int, stop: int) -> Array:
        """Values of a loop variable along a new first axis."""
        return np.arange(first, stop).reshape(-1, *[1] * self.rank)

    def extent(self, extent: int | Arg | Ref) -> Any:
        return extent if isinstance(extent, int) else self.value(extent)

    def address(self, param: int, place: loops.Place) -> tuple[Array, Any]:
        elements, at = self.memory[param]
        for index, stride in place:
            at = at + self.value(index) * self.extent(stride)
        return elements, at

    def widths(self, body: Sequence[Stmt]) -> Iterator[int]:
        """The lane count of each vector loop in a body, where known beforehand."""
        for statement in body:
            if isinstance(statement, For) and statement.vector and not isinstance(statement.extent, Ref):
                yield self.extent(statement.extent)
            elif isinstance(statement, For):
                yield from self.widths(statement.body)


def _cast(value: Any, have: DType, want: DType) -> Any:
    return value if have is want else cast_array(np.asarray(value), want)


def _longest(extent: Any) -> int:
    """The largest step count of any lane."""
    return int(np.max(extent, initial=0))


def _halved(combine: Any, terms: Any, index: Array) -> Any:
    terms = np.broadcast_to(terms, np.broadcast_shapes(np.shape(terms), index.shape))
    half = REDUCE_BLOCK // 2
    while len(terms) > 1:
        low, high = terms[:half], terms[half:]
        pairs = combine(low[: len(high)], high)
        terms = np.concatenate([pairs, low[len(high) :]]) if len(high) < len(low) else pairs
        half //= 2
    return terms[0]


@functools.cache
def _table(table: loops.Table) -> Array:
    return np.array(table.values, np.int32)

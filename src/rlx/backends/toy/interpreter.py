"""The interpreter: runs a `LoopKernel` in NumPy.

Units, iterations of `vector` loops and terms of reductions are vectorised: each is an array axis, innermost first, so
that NumPy broadcasting aligns them. All other loops are Python loops. Where only some lanes take part in a loop or
branch, a mask selects them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import I64, DType, cast_array
from rlx.fast_dataclass import dataclass
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


@dataclass(slots=True)
class _Interpreter:
    params: Sequence[loops.Param]
    memory: Memory
    args: Mapping[str, int]
    faults: list[int]
    names: dict[str, Any] = field(default_factory=dict)  # loop variables and lets; a variable is a list of one value
    rank: int = 1  # axes of values
    mask: Any = True  # the active lanes
    in_vector: bool = False  # whether a vector loop encloses the code
    memo: dict[int, Any] = field(default_factory=dict)  # values of expressions of this statement, by id

    def inside(self, index: str, value: Any, *, axis: bool = False, vector: bool = False) -> _Interpreter:
        """An interpreter for the body of a loop or reduction, with an axis if it is vectorised. Names do not escape."""
        names, in_vector = {**self.names, index: value}, self.in_vector or vector
        return _Interpreter(
            self.params, self.memory, self.args, self.faults, names, self.rank + axis, self.mask, in_vector
        )

    def under(self, mask: Any) -> _Interpreter:
        """An interpreter for the lanes where `mask` holds, of those that are active."""
        mask = mask if self.mask is True else self.mask & mask
        return _Interpreter(
            self.params, self.memory, self.args, self.faults, self.names, self.rank, mask, self.in_vector
        )

    # -- statements --
    def body(self, statements: Sequence[Stmt]) -> None:
        for statement in statements:
            self.memo = {}
            self.run(statement)

    def run(self, statement: Stmt) -> None:
        match statement:
            case loops.Let():
                self.names[statement.name] = self.value(statement.value)
            case loops.Store():
                elements, at = self.address(statement.param, statement.at)
                value, wanted = statement.value, self.params[statement.param].dtype
                self.store(elements, at, _cast(self.value(value), value.dtype, wanted))
            case For():
                self.loop(statement)
            case loops.Var():
                self.names[statement.name] = [self.value(statement.start)]
            case loops.Assign():
                value, variable = self.value(statement.value), self.names[statement.name]
                variable[0] = value if self.mask is True else np.where(self.mask, value, variable[0])
            case loops.Check():
                if not np.all(np.logical_not(self.mask) | self.value(statement.condition)):
                    self.faults.append(statement.code)

    def loop(self, loop: For) -> None:
        """Vectorises a vector loop unless another one encloses it; any other loop is a Python loop."""
        extent = self.extent(loop.extent)
        steps: Sequence[Any] = range(_longest(extent))
        vectorised = loop.vector and not self.in_vector
        inner = self.inside(loop.index, 0, axis=vectorised, vector=vectorised)
        if vectorised:
            steps = [self.axis(0, len(steps))] if steps else []
        for step in steps:
            inner.names[loop.index] = step
            (inner.under(step < extent) if _varies(extent) else inner).body(loop.body)

    def store(self, elements: Array, at: Any, value: Any) -> None:
        if self.mask is True and np.shape(at) == np.shape(value):
            elements[at] = value
            return
        at, value, mask = np.broadcast_arrays(at, value, self.mask)
        elements[at[mask]] = value[mask]

    # -- expressions --
    def value(self, expr: Expr) -> Any:
        kind = type(expr)
        if kind is Index or kind is Ref:
            value = self.names[expr.name]  # type: ignore[union-attr]
            return value[0] if type(value) is list else value
        if kind is Arg:
            return self.args[expr.name]  # type: ignore[union-attr]
        if id(expr) not in self.memo:
            self.memo[id(expr)] = _COMPUTE[kind](self, expr)
        return self.memo[id(expr)]

    def constant(self, expr: Const) -> Any:
        return expr.value if expr.dtype is I64 else expr.dtype.numpy.type(expr.value)

    def load(self, expr: Load) -> Any:
        elements, at = self.address(expr.param, expr.at)
        if self.mask is True:
            return elements[at]
        if not elements.size:
            return np.zeros(np.broadcast_shapes(np.shape(at), np.shape(self.mask)), elements.dtype)
        return elements[np.where(self.mask, at, 0)]  # lanes that are not active read anything

    def apply(self, expr: Apply) -> Any:
        if expr.op == "cast":
            return _cast(self.value(expr.args[0]), expr.args[0].dtype, expr.dtype)
        return MEANINGS[expr.op](*map(self.value, expr.args))

    def choose(self, expr: Choose) -> Any:
        chosen = self.value(expr.condition)
        sides = self.under(chosen).value(expr.then), self.under(np.logical_not(chosen)).value(expr.other)
        return np.where(chosen, *sides)

    def lookup(self, expr: Lookup) -> Any:
        return _table(expr.table)[self.value(expr.index)]

    def reduction(self, expr: Reduce) -> Any:
        """Combines all terms block by block. A block is combined by halving, as if padded with identities.

        The order is fixed, whatever else is vectorised, and trailing zeros do not change a sum.
        """
        combine, start, extent = COMBINE[expr.op], identity(expr.op, expr.dtype), self.extent(expr.extent)
        total, longest = start, _longest(extent)
        for first in range(0, longest, REDUCE_BLOCK):
            index = self.axis(first, min(first + REDUCE_BLOCK, longest))
            inner = self.inside(expr.index, index, axis=True)
            if _varies(extent):
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
            at = at + (self.value(index) if stride == 1 else self.value(index) * self.extent(stride))
        return elements, at

    def widths(self, body: Sequence[Stmt]) -> Iterator[int]:
        """The lane count of each vector loop in a body, where known beforehand."""
        for statement in body:
            if isinstance(statement, For) and statement.vector and not isinstance(statement.extent, Ref):
                yield self.extent(statement.extent)
            elif isinstance(statement, For):
                yield from self.widths(statement.body)


_COMPUTE: Mapping[type, Any] = {
    Const: _Interpreter.constant, Load: _Interpreter.load, Apply: _Interpreter.apply, Choose: _Interpreter.choose,
    Reduce: _Interpreter.reduction, Lookup: _Interpreter.lookup,
}  # fmt: skip


def _varies(extent: Any) -> bool:
    """Whether lanes have step counts of their own."""
    return isinstance(extent, np.ndarray) and extent.ndim > 0


def _cast(value: Any, have: DType, want: DType) -> Any:
    return value if have is want else cast_array(np.asarray(value), want)


def _longest(extent: Any) -> int:
    """The largest step count of any lane."""
    return int(extent.max(initial=0)) if _varies(extent) else int(extent)


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

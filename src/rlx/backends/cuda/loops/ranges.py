"""Ranges of index arithmetic: whether all indices and offsets of a launch fit into 32 bits.

An *index* is a 64-bit integer that is computed from loop variables, sizes and constants; data only chooses between
values. Other 64-bit integers (loaded ones, variables, sums) are always computed in 64 bits.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlx.backends.cuda.loops.structure import values
from rlx.dtypes import BOOL, I8, I16, I64, U8
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
    Var,
    children,
)

Span = tuple[int, int]  # lowest and highest value
LIMIT = 2**31 - 1
LONGEST = 2**30  # of a loop, so that a thread's next index does not overflow
INDEX_OPS = ("add", "sub", "mul", "quot", "rem", "floordiv", "mod", "min", "max", "and", "shr", "select")
SMALL = {BOOL: (0, 1), U8: (0, 255), I8: (-128, 127), I16: (-(2**15), 2**15 - 1)}


def is_index(expr: Expr, names: Mapping[str, bool]) -> bool:
    """Whether an expression is an index; `names` says so of loop variables and lets in scope."""
    if expr.dtype is not I64:
        return False
    match expr:
        case Const():
            return -LIMIT <= int(expr.value) <= LIMIT
        case Arg():
            return True
        case Index() | Ref():
            return names.get(expr.name, False)
        case Apply(op="cast", args=(x,)):
            return x.dtype in SMALL
        case Apply(op="select", args=(_, a, b)) | Choose(then=a, other=b):
            return is_index(a, names) and is_index(b, names)
        case Apply() if expr.op in INDEX_OPS:
            return all(is_index(a, names) for a in expr.args)
    return False


@dataclass
class Ranges:
    """The range of every index of a kernel, for the sizes of a launch; `fit` computes them."""

    kernel: LoopKernel
    words: Mapping[str, int]

    def __post_init__(self) -> None:
        self.spans: dict[str, Span | None] = {}  # by name, in scope; None: not an index
        self.longest: dict[str, int] = {}  # the greatest extent of loops, by the name of a `Ref` extent
        self.longest_loops: dict[int, int] = {}  # the same, by the id of the loop
        self.everywhere: dict[str, Span | None] = {}  # ranges by name, in all scopes that have the name
        self.reduced: dict[str, Span | None] = {}  # those of reductions

    def fit(self) -> bool:
        """Whether all indices and offsets fit into 32 bits."""
        self._fits = True
        for name in self.kernel.args:
            self._checked((self.words[name], self.words[name]))
        for let in self.kernel.lets:
            self._stmt(let)
        self._stmt(self.kernel.root)
        return self._fits

    def _checked(self, span: Span | None) -> Span | None:
        if span is None or span[0] < -LIMIT or span[1] > LIMIT:
            self._fits = False
        return span

    def _stmt(self, stmt: Stmt) -> None:
        self._visit(*values(stmt))
        match stmt:
            case Let():
                self._bind(stmt.name, self.span(stmt.value), self.everywhere)
            case Var():
                self._bind(stmt.name, None, self.everywhere)
            case Store():
                self._offset(stmt.at)
            case For():
                outside = dict(self.spans)
                size = self._enter(stmt.index, stmt.extent, self.everywhere)
                if size is not None:
                    self.longest_loops[id(stmt)] = size[1]
                for inner in stmt.body:
                    self._stmt(inner)
                self.spans = outside

    def _bind(self, name: str, span: Span | None, everywhere: dict[str, Span | None]) -> None:
        self.spans[name] = span
        known = everywhere.get(name, span)
        everywhere[name] = known and span and (min(known[0], span[0]), max(known[1], span[1]))

    def _enter(self, index: str, extent: int | Arg | Ref, everywhere: dict[str, Span | None]) -> Span | None:
        """Enters a loop; returns the range of its extent."""
        size = (extent, extent) if isinstance(extent, int) else self.span(extent)
        if isinstance(extent, Ref) and size is not None:
            self.longest[extent.name] = max(size[1], self.longest.get(extent.name, 0))
        if size is not None and size[1] >= LONGEST:
            self._fits = False
        self._bind(index, None if size is None else (0, max(0, size[1] - 1)), everywhere)
        return size

    def _visit(self, *exprs: Expr) -> None:
        """Checks expressions and all inside them."""
        seen: set[int] = set()
        waiting = list(exprs)
        while waiting:
            expr = waiting.pop()
            if id(expr) in seen:
                continue
            seen.add(id(expr))
            if isinstance(expr, Reduce):
                outside, self.spans = self.spans, dict(self.spans)
                self._enter(expr.index, expr.extent, self.reduced)
                self._visit(expr.value)
                self.spans = outside
                continue
            if isinstance(expr, Load):
                self._offset(expr.at)
            self.span(expr)
            waiting += children(expr)

    def _offset(self, at: Place) -> None:
        low = high = 0
        for index, stride in at:
            span = self.span(index)
            if span is not None:
                step = stride if isinstance(stride, int) else self.words[stride.name]
                ends = [end * step for end in span]
                self._checked((min(ends), max(ends)))
                low, high = low + min(ends), high + max(ends)
        self._checked((low, high))

    def span(self, expr: Expr) -> Span | None:
        """The range of an index, None for anything else."""
        if expr.dtype is not I64:
            return None
        match expr:
            case Const():
                value = int(expr.value)
                return (value, value) if -LIMIT <= value <= LIMIT else None
            case Arg():
                return self.words[expr.name], self.words[expr.name]
            case Index() | Ref():
                return self.spans.get(expr.name)
            case Apply(op="cast", args=(x,)):
                return SMALL.get(x.dtype)
            case Apply(op="select", args=(_, a, b)) | Choose(then=a, other=b):
                one, other = self.span(a), self.span(b)
                return one and other and (min(one[0], other[0]), max(one[1], other[1]))
            case Apply(op=op) if op in INDEX_OPS:
                left, right = (self.span(a) for a in expr.args)
                return left and right and self._checked(_combined(op, left, right))
        return None


def _combined(op: str, a: Span, b: Span) -> Span | None:
    """The range of an operation; None if it is not known."""
    match op:
        case "add":
            return a[0] + b[0], a[1] + b[1]
        case "sub":
            return a[0] - b[1], a[1] - b[0]
        case "mul":
            ends = [x * y for x in a for y in b]
            return min(ends), max(ends)
        case "min":
            return min(a[0], b[0]), min(a[1], b[1])
        case "max":
            return max(a[0], b[0]), max(a[1], b[1])
        case "quot":
            return 0, max(0, a[1]) // max(1, b[0])
        case "rem":
            return 0, max(0, min(a[1], b[1] - 1))
        case "floordiv" if b[0] > 0:
            ends = [x // y for x in a for y in b]
            return min(ends), max(ends)
        case "mod" if b[0] > 0:
            return 0, b[1] - 1
        case "and" if a[0] >= 0 and b[0] >= 0:
            return 0, min(a[1], b[1])
        case "shr" if b[0] >= 0 and b[1] < 32:
            ends = [x >> y for x in a for y in b]
            return min(ends), max(ends)
    return None

"""Serial loops whose iterations may run side by side: each warp of a unit then takes some of them.

For example, sampling finds the largest logit of each block of 256, one block after the other. Iterations are
independent if they write disjoint parts of memory, and if variables that outlive them only accumulate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

from rlx.backends.cuda.loops.ranges import Ranges, Span
from rlx.backends.cuda.loops.structure import SharedLoop, each_in, is_condition, shared_loops_in, values
from rlx.dtypes import I64
from rlx.fast_dataclass import dataclass
from rlx.lir.loops import (
    Apply,
    Arg,
    Assign,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    LoopKernel,
    Place,
    Ref,
    Stmt,
    Store,
    Var,
    children,
    statements,
)

LONGEST_INSIDE = 1024  # iterations of the loops inside, which a warp runs alone
ACCUMULATING = {"add": "sum", "max": "max", "min": "min"}
Linear = dict[str, int]  # factors of names; "" is the constant


@dataclass(frozen=True, slots=True)
class WarpLoop:
    """A serial loop that may be split over warps, and the reduction of each variable that it accumulates."""

    loop: For
    accumulated: Mapping[str, str]


def warp_loops(kernel: LoopKernel) -> list[WarpLoop]:
    """The outermost serial loops of a kernel that have the right form, in order; sizes decide (`are_disjoint`)."""
    conditions: set[str] = set()  # names of lets that are 0 or 1
    return [] if kernel.chunk else [loop for stmt in kernel.root.body for loop in _warp_loops(stmt, conditions)]


def _warp_loops(stmt: Stmt, conditions: set[str]) -> Iterator[WarpLoop]:
    if isinstance(stmt, Let) and is_condition(stmt.value):
        conditions.add(stmt.name)
    if not isinstance(stmt, For) or stmt.vector:
        return
    once = isinstance(stmt.extent, Ref) and stmt.extent.name in conditions
    accumulated = None if once else _accumulated(stmt)
    inside = list(shared_loops_in(*stmt.body))
    if accumulated is not None and inside and all(_is_short(loop) for loop in inside):
        yield WarpLoop(stmt, accumulated)
        return
    for inner in stmt.body:
        yield from _warp_loops(inner, conditions)


def _is_short(loop: SharedLoop) -> bool:
    return isinstance(loop.extent, int) and loop.extent <= LONGEST_INSIDE


def _accumulated(loop: For) -> dict[str, str] | None:
    """The variables of outside that a loop assigns to, with the reduction; None if one is more than accumulated."""
    own = {s.name for s in statements(loop) if isinstance(s, Var)}
    accumulated: dict[str, str] = {}
    count: Counter[str] = Counter()
    for stmt in statements(loop):
        if isinstance(stmt, Assign) and stmt.name not in own:
            match stmt.value:
                case Apply(op=op, args=(Ref(name=name), _)) if name == stmt.name and op in ACCUMULATING:
                    count[name] += 1
                    if accumulated.setdefault(name, ACCUMULATING[op]) != ACCUMULATING[op]:
                        return None
                case _:
                    return None
    reads = sum((_reads(value) for s in statements(loop) for value in values(s)), Counter[str]())
    reads.update(s.extent.name for s in statements(loop) if isinstance(s, For) and isinstance(s.extent, Ref))
    return accumulated if all(reads[name] == count[name] for name in accumulated) else None


def _reads(expr: Expr, known: dict[int, Counter[str]] | None = None) -> Counter[str]:
    """How often an expression refers to each name."""
    known = {} if known is None else known
    if id(expr) not in known:
        inside = sum((_reads(child, known) for child in children(expr)), Counter[str]())
        known[id(expr)] = inside + Counter([expr.name] if isinstance(expr, Ref) else [])
    return known[id(expr)]


# -- memory -----------------------------------------------------------------------------------------------------------
def are_disjoint(loop: For, ranges: Ranges) -> bool:
    """Whether no iteration touches what another one writes, if no two parameters share memory."""
    written = {s.param for s in statements(loop) if isinstance(s, Store)}
    places: dict[int, list[Place]] = {param: [] for param in written}
    for stmt in statements(loop):
        if isinstance(stmt, Store):
            places[stmt.param].append(stmt.at)
    for expr in each_in(*loop.body):
        if isinstance(expr, Load) and expr.param in written:
            places[expr.param].append(expr.at)
    steps = ranges.longest_loops.get(id(loop))
    return all(_never_meet(at, loop, steps, ranges) for at in places.values())


def _never_meet(places: list[Place], loop: For, steps: int | None, ranges: Ranges) -> bool:
    """Whether accesses of different iterations never meet: they advance by one step, beyond what each covers."""
    inside = _spans_inside(loop, ranges)
    seen: list[tuple[Linear, Span]] = []
    for at in places:
        form = _linear_place(at, inside, ranges)
        if form is None:
            return False
        low = high = form.pop("", 0)
        for name in [name for name in form if name != loop.index and name in inside]:
            span, factor = inside[name], form.pop(name)
            if span is None:
                return False
            ends = (span[0] * factor, span[1] * factor)
            low, high = low + min(ends), high + max(ends)
        seen.append((form, (low, high)))
    step = seen[0][0].get(loop.index, 0)
    if step <= 0 or any(form != seen[0][0] for form, _ in seen):
        return False
    for _, a in seen:
        for _, b in seen:
            nearest = max(1, -(-(a[0] - b[1]) // step))  # iterations apart at which they may meet
            if nearest * step <= a[1] - b[0] and (steps is None or nearest < steps):
                return False
    return True


def _spans_inside(loop: For, ranges: Ranges) -> dict[str, Span | None]:
    """The names bound inside a loop, with their ranges."""
    names = {loop.index} | {s.index for s in statements(loop) if isinstance(s, For)}
    names |= {s.name for s in statements(loop) if isinstance(s, Let | Var)}
    return {name: ranges.everywhere.get(name) for name in names} | ranges.reduced


def _linear_place(at: Place, inside: Mapping[str, Span | None], ranges: Ranges) -> Linear | None:
    total: Linear = {}
    for expr, stride in at:
        step = stride if isinstance(stride, int) else ranges.words[stride.name]
        form = _linear(expr, ranges)
        if form is None:
            return None
        for name, factor in form.items():
            total[name] = total.get(name, 0) + factor * step
    return {name: factor for name, factor in total.items() if factor or not name}


def _linear(expr: Expr, ranges: Ranges) -> Linear | None:
    """An index as a sum of names and a constant."""
    if expr.dtype is not I64:
        return None
    match expr:
        case Const():
            return {"": int(expr.value)}
        case Arg():
            return {"": ranges.words[expr.name]}
        case Index() | Ref():
            return {expr.name: 1}
        case Apply(op="add" | "sub" as op, args=(a, b)):
            left, right = _linear(a, ranges), _linear(b, ranges)
            if left is None or right is None:
                return None
            sign = 1 if op == "add" else -1
            return {name: left.get(name, 0) + sign * right.get(name, 0) for name in {*left, *right}}
        case Apply(op="mul", args=(a, b)):
            left, right = _linear(a, ranges), _linear(b, ranges)
            if left is None or right is None:
                return None
            if set(left) - {""} and set(right) - {""}:
                return None
            factor, form = (left, right) if set(left) <= {""} else (right, left)
            return {name: value * factor.get("", 0) for name, value in form.items()}
    return None

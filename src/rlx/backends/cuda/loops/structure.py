"""What the statements of a loop kernel touch, and which loops can access memory in packs of neighbouring elements."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rlx.dtypes import BOOL
from rlx.fast_dataclass import dataclass
from rlx.lir.loops import (
    Apply,
    Arg,
    Assign,
    Check,
    Choose,
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
    statements,
)

LARGEST_PACK = 8  # elements
PACK_BYTES = 16
PACK_REGISTERS = 64  # 32-bit registers that the packs of one loop may take
PACK_OPERATIONS = 256  # operations for all elements of a pack


# -- memory -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Effects:
    """The parameters that shared code reads and writes; `spread`: those that more than its first thread writes."""

    reads: frozenset[int] = frozenset()
    writes: frozenset[int] = frozenset()
    spread: frozenset[int] = frozenset()

    def __or__(self, other: Effects) -> Effects:
        return Effects(self.reads | other.reads, self.writes | other.writes, self.spread | other.spread)

    def conflicts(self, other: Effects, *, distinct: bool) -> bool:
        """Whether threads must wait between two accesses. `distinct`: no two parameters share memory."""

        def meet(a: frozenset[int], b: frozenset[int]) -> bool:
            return bool(a & b) if distinct else bool(a and b)

        written = meet(self.writes, other.reads) or meet(self.reads, other.writes)
        return written or meet(self.spread, other.writes) or meet(self.writes, other.spread)


def effects(*stmts: Stmt) -> Effects:
    """The effects of statements in shared code."""
    reads = {e.param for e in each_in(*stmts) if isinstance(e, Load)}
    writes, spread = set(), set()
    for stmt in stmts:
        writes |= {s.param for s in statements(stmt) if isinstance(s, Store)}
        vectors = (s for s in statements(stmt) if isinstance(s, For) and s.vector)
        spread |= {s.param for loop in vectors for s in statements(loop) if isinstance(s, Store)}
    return Effects(frozenset(reads), frozenset(writes), frozenset(spread))


def each(*exprs: Expr) -> Iterator[Expr]:
    """Expressions and all inside them, shared ones once."""
    seen: set[int] = set()
    waiting = list(exprs)
    while waiting:
        expr = waiting.pop()
        if id(expr) not in seen:
            seen.add(id(expr))
            yield expr
            waiting += children(expr)


def each_in(*stmts: Stmt) -> Iterator[Expr]:
    """All expressions of statements and of those inside them."""
    return each(*(value for root in stmts for stmt in statements(root) for value in values(stmt)))


def values(stmt: Stmt) -> Iterator[Expr]:
    """The expressions directly in a statement, addresses first."""
    match stmt:
        case Let() | Assign():
            yield stmt.value
        case Var():
            yield stmt.start
        case Check():
            yield stmt.condition
        case Store():
            yield from (index for index, _ in stmt.at)
            yield stmt.value


def is_condition(expr: Expr) -> bool:
    """Whether an integer is 0 or 1: a loop of that length is a branch."""
    return isinstance(expr, Apply) and expr.op == "cast" and expr.args[0].dtype is BOOL


def weight(*stmts: Stmt) -> int:
    """The operations in statements, shared ones counted once."""
    return sum(isinstance(e, Apply) for e in each_in(*stmts))


def is_free(kernel: LoopKernel) -> bool:
    """Whether threads of a unit never wait for each other: its only access to memory is one vector loop."""
    if kernel.chunk:
        return True
    loops = [s for s in kernel.root.body if isinstance(s, For)]
    others = [s for s in kernel.root.body if not isinstance(s, For)]
    touches = any(isinstance(e, Load | Reduce) for e in each_in(*others))
    plain = all(isinstance(s, Let | Check) for s in others) and not touches
    return plain and len(loops) == 1 and loops[0].vector and not kernel.lets


# -- loops over the threads of a unit ---------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SharedLoop:
    """A vector loop or reduction whose iterations are spread over the threads of a unit."""

    extent: int | Arg | Ref
    packing: Packing | None
    heavy: bool  # with loops inside
    weight: int


def shared_loops(kernel: LoopKernel) -> list[SharedLoop]:
    """The loops of a kernel that threads share, in order."""
    if kernel.chunk:
        return [_shared(kernel.root)]
    return list(shared_loops_in(*kernel.lets, *kernel.root.body))


def shared_loops_in(*stmts: Stmt) -> Iterator[SharedLoop]:
    """The loops of shared code that its threads split."""
    for stmt in stmts:
        if not isinstance(stmt, For):
            yield from _shared_reductions(stmt)
        elif stmt.vector:
            yield _shared(stmt)
        else:
            yield from shared_loops_in(*stmt.body)


def _shared_reductions(stmt: Stmt) -> Iterator[SharedLoop]:
    for reduction in outer_reductions(*values(stmt)):
        heavy = any(isinstance(e, Reduce) for e in each(reduction.value))
        yield SharedLoop(reduction.extent, reduction_packing((reduction,)), heavy, weight(Let("", reduction.value)))


def _shared(loop: For) -> SharedLoop:
    inner = any(isinstance(s, For) for stmt in loop.body for s in statements(stmt))
    heavy = inner or any(isinstance(e, Reduce) for e in each_in(loop))
    return SharedLoop(loop.extent, loop_packing(loop), heavy, weight(loop))


def outer_reductions(*exprs: Expr) -> Iterator[Reduce]:
    """Reductions in expressions that are inside no other."""
    seen: set[int] = set()
    waiting = list(exprs)
    while waiting:
        expr = waiting.pop()
        if id(expr) in seen:
            continue
        seen.add(id(expr))
        if isinstance(expr, Reduce):
            yield expr
        else:
            waiting += children(expr)


def reduction_group(stmts: Sequence[Stmt]) -> list[Let]:
    """The leading lets that are independent reductions over one range, which share a loop."""
    group: list[Let] = []
    first: Reduce | None = None
    for stmt in stmts:
        if not isinstance(stmt, Let) or not isinstance(stmt.value, Reduce):
            break
        value, names = stmt.value, {let.name for let in group}
        first = value if first is None else first
        if (value.index, value.extent) != (first.index, first.extent):
            break
        if any(isinstance(e, Ref) and e.name in names for e in each(value)):
            break
        if (reduction_packing((value,)) is None) != (reduction_packing((first,)) is None):
            break  # otherwise the order of a sum would depend on its neighbours
        group.append(stmt)
    return group


def split_reductions(kernel: LoopKernel) -> list[Reduce]:
    """The reductions of a kernel that blocks may split: a group, or one alone, and nothing else that threads share."""
    body = kernel.root.body
    if kernel.chunk or kernel.lets or any(isinstance(s, For | Var | Assign) for s in body):
        return []
    first = next((i for i, s in enumerate(body) if any(True for _ in outer_reductions(*values(s)))), len(body))
    reductions = list(outer_reductions(*(value for s in body for value in values(s))))
    group = [let.value for let in reduction_group(body[first:]) if isinstance(let.value, Reduce)]
    if len(reductions) != max(len(group), 1) or not all(isinstance(r.extent, Arg) for r in reductions):
        return []
    return group or reductions


# -- packs ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Packing:
    """Loads and stores of a loop that touch neighbouring elements in neighbouring iterations."""

    loads: tuple[Load, ...]
    stores: tuple[Store, ...]

    @property
    def accesses(self) -> tuple[Load | Store, ...]:
        return (*self.loads, *self.stores)


def loop_packing(loop: For) -> Packing | None:
    """The packs of a vector loop; None if its iterations run one by one.

    All loads come before the first store, so that loading a pack first is the same as running iterations in order.
    """
    if isinstance(loop.extent, Ref) or not all(isinstance(s, Let | Store | Check) for s in loop.body):
        return None
    if any(isinstance(e, Reduce) for e in each_in(loop)):
        return None
    dependent = {s.name for s in loop.body if isinstance(s, Let)}
    loads: dict[Load, None] = {}
    stores: list[Store] = []
    stored = False
    for stmt in loop.body:
        if stored and any(isinstance(e, Load) for e in each_in(stmt)):
            return None
        loads |= dict.fromkeys(_neighbouring(values(stmt), loop.index, dependent))
        if isinstance(stmt, Store):
            stored = True
            if unit_stride(stmt.at, loop.index, dependent):
                stores.append(stmt)
    return Packing(tuple(loads), tuple(stores)) if loads or stores else None


def reduction_packing(group: Sequence[Reduce]) -> Packing | None:
    """The packs of reductions over one range; None if there are none or if reductions are nested.

    A length that a unit computes need not be a multiple of a pack.
    """
    terms = [reduction.value for reduction in group]
    if isinstance(group[0].extent, Ref) or any(isinstance(e, Reduce) for e in each(*terms)):
        return None
    loads = dict.fromkeys(_neighbouring(terms, group[0].index, frozenset()))
    return Packing(tuple(loads), ()) if loads else None


def _neighbouring(terms: Iterable[Expr], index: str, dependent: Iterable[str]) -> Iterator[Load]:
    """Loads with unit stride that every iteration makes: none on a side of a `Choose`."""
    seen: set[int] = set()
    waiting = [*terms][::-1]
    while waiting:
        expr = waiting.pop()
        if id(expr) in seen:
            continue
        seen.add(id(expr))
        if isinstance(expr, Load) and unit_stride(expr.at, index, dependent):
            yield expr
        else:
            waiting += (expr.condition,) if isinstance(expr, Choose) else children(expr)[::-1]


def unit_stride(at: Place, index: str, dependent: Iterable[str] = ()) -> bool:
    """Whether the address grows by one element per iteration."""
    total = 0
    for expr, stride in at:
        step = _coefficient(expr, index, dependent)
        if step is None or (step and (isinstance(stride, Arg) or stride != 1)):
            return False
        total += step
    return total == 1


def _coefficient(expr: Expr, index: str, dependent: Iterable[str]) -> int | None:
    """How much an index grows per iteration: 0, 1, or None for anything else."""
    match expr:
        case Index():
            return int(expr.name == index)
        case Ref():
            return None if expr.name in dependent else 0
        case Apply(op="add", args=(a, b)):
            steps = _coefficient(a, index, dependent), _coefficient(b, index, dependent)
            return None if None in steps or sum(map(int, filter(None, steps))) > 1 else int(any(steps))
        case Apply(op="sub", args=(a, b)) if _coefficient(b, index, dependent) == 0:
            return _coefficient(a, index, dependent)
        case _:
            constant = all(_coefficient(child, index, dependent) == 0 for child in children(expr))
            return 0 if constant else None


def largest_pack(kernel: LoopKernel, loop: SharedLoop) -> int:
    """Elements per pack: 16 bytes of the narrowest type, within budgets of registers and code."""
    if loop.packing is None:
        return 1
    sizes = [kernel.params[access.param].dtype.size for access in loop.packing.accesses]
    pack = min(LARGEST_PACK, PACK_BYTES // min(sizes))
    while pack > 1 and (
        pack * sum(max(4, size) for size in sizes) > 4 * PACK_REGISTERS or pack * loop.weight > PACK_OPERATIONS
    ):
        pack //= 2
    return pack

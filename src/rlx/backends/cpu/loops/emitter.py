"""The emitter of loop kernels.

Inside a vector loop every value is a vector of `lanes` elements; outside it is a vector of one, so there is one path.
Addresses are split into a scalar part and a per-lane part: none (broadcast), one element per lane (a contiguous vector
access) or anything else (gather, scatter). Partial vectors and branches not taken are masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import field, replace

from rlx.backends.cpu.builder import Builder, Value, const, i64, lanes_of, vector
from rlx.backends.cpu.loops import memory
from rlx.backends.cpu.loops.scalars import MEMORY, REGISTER, Scalars
from rlx.backends.cpu.math import FUNCTIONS
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import BOOL, I64
from rlx.fast_dataclass import dataclass
from rlx.lir.loops import (
    Apply,
    Arg,
    Assign,
    Check,
    Choose,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    Lookup,
    LoopKernel,
    Place,
    Reduce,
    Ref,
    Stmt,
    Store,
    Var,
    statements,
    walk,
)

STREAM_AHEAD = 8192  # bytes: less is late when several rows of x are multiplied, more takes longer to begin
ACCUMULATORS = 4  # independent chains of a vectorised reduction


def _chains(expr: Reduce) -> int:
    heavy = any(isinstance(e, Apply) and e.op in FUNCTIONS for e in walk(expr.value))
    return 1 if heavy else ACCUMULATORS


@dataclass(frozen=True)
class _Lanes:
    """The vector loop being emitted: its lane count, index, first value and mask."""

    count: int = 1
    index: str = ""
    base: Value | None = None
    mask: Value | None = None
    choice: bool = False  # whether the mask includes a side of a `Choose`, and so may be off in all lanes


@dataclass
class _Address:
    """The address of a load or store: `pointer`, and the distance between lanes (in elements)."""

    pointer: Value
    step: int | Value = 0  # between lanes; 0 is a broadcast
    varying: Value | None = None  # a further offset per lane


@dataclass
class Emitter:
    """Emits the function of a kernel; `args`, `low`, `high` and `scratch` are its arguments."""

    b: Builder
    kernel: LoopKernel
    target: CpuTarget
    args: Value
    low: Value
    high: Value
    scratch: Value
    words: dict[str, Value] = field(default_factory=dict)
    env: dict[str, Value] = field(default_factory=dict)
    lanes: _Lanes = field(default_factory=_Lanes)
    memo: dict[int, Value] = field(default_factory=dict)
    keep: list[Expr] = field(default_factory=list)  # expressions in `memo`, kept alive so that their ids stay unique

    def __post_init__(self) -> None:
        self.scalars = Scalars(self.b, self.target)

    def run(self) -> None:
        kernel, b = self.kernel, self.b
        pointers = len(kernel.params)
        for i, word in enumerate(kernel.words):
            self.words[word] = b.load("ptr" if i < pointers else "i64", b.offset(self.args, 8 * i), align=8)
        for let in kernel.lets:
            self.stmt(let)
        root = kernel.root
        if kernel.chunk:
            start = b.mul(self.low, kernel.chunk)
            stop = b.min(b.mul(self.high, kernel.chunk), self.integer(root.extent))
            self.vector_loop(root, start, stop)
        else:
            b.loop(self.low, self.high, 1, lambda u: self.iteration(root, u))

    def iteration(self, loop: For, index: Value) -> None:
        with self.scope():
            self.env[loop.index] = index
            self.body(loop.body)

    @contextmanager
    def scope(self, lanes: _Lanes | None = None) -> Iterator[None]:
        """Names and memoised values from inside do not escape."""
        saved = self.env, self.lanes, self.memo
        self.env, self.memo = dict(self.env), {}
        self.lanes = lanes or self.lanes
        try:
            yield
        finally:
            self.env, self.lanes, self.memo = saved

    @property
    def width(self) -> int:
        """Lanes of a vector loop: as many as fill registers with the kernel's widest data."""
        wide = any(p.dtype.size == 8 for p in self.kernel.params)
        return self.target.lanes(8 if wide else 4)

    # -- statements -----------------------------------------------------------------------------------------------
    def body(self, stmts: tuple[Stmt, ...]) -> None:
        """Statements in order; adjacent reductions over the same range share one loop."""
        at = 0
        while at < len(stmts):
            together = self.reductions(stmts[at:])
            if len(together) > 1:
                values = self.reduce_lanes([value for _, value in together])
                self.env |= zip((name for name, _ in together), values, strict=True)
            else:
                self.stmt(stmts[at])
            at += max(1, len(together))

    def reductions(self, stmts: tuple[Stmt, ...]) -> list[tuple[str, Reduce]]:
        """The leading lets that are independent reductions over one range, without reductions that run per lane."""
        group: list[tuple[str, Reduce]] = []
        for stmt in stmts:
            if self.lanes.count > 1 or not isinstance(stmt, Let) or not isinstance(stmt.value, Reduce):
                break
            value, names = stmt.value, {name for name, _ in group}
            if any(isinstance(e, Ref) and e.name in names for e in walk(value)):
                break
            if group and (value.index, value.extent) != (group[0][1].index, group[0][1].extent):
                break
            if group and _chains(value) != _chains(group[0][1]):  # otherwise the order of a sum would change
                break
            group.append((stmt.name, value))
        return group

    def stmt(self, stmt: Stmt) -> None:
        match stmt:
            case Let():
                self.env[stmt.name] = self.let(stmt.value)
            case Var():
                self.env[stmt.name] = self.value(stmt.start)
            case Assign():
                self.env[stmt.name] = self.value(stmt.value)
                self.memo = {}
            case Store():
                self.store(stmt)
                self.memo = {}
            case Check():
                self.check(stmt)
            case For() if stmt.vector and self.lanes.count == 1:
                self.vector_loop(stmt, i64(0), self.integer(stmt.extent))
            case For():
                self.serial_loop(stmt)

    def let(self, value: Expr) -> Value:
        """An expression's value; indices that are uniform over lanes stay scalar integers."""
        uniform = self.uniform(value) if value.dtype is I64 else None
        return uniform if uniform is not None else self.value(value)

    def vector_loop(self, loop: For, start: Value, stop: Value) -> None:
        """Full vectors, then one masked vector for the remainder."""
        b, width = self.b, self.width
        full = b.add(start, b.mul(b.sdiv(b.sub(stop, start), width), width))

        def body(at: Value, mask: Value | None) -> None:
            with self.scope(_Lanes(width, loop.index, at, mask)):
                self.body(loop.body)

        b.loop(start, full, width, lambda at: body(at, None))
        if full.constant is not None and full.constant == stop.constant:
            return
        # Hidden from LLVM: it would turn a masked store of one narrowed lane into one of its wide original.
        rest = b.opaque(b.sub(stop, full))
        b.when(b.icmp("sgt", rest, 0), lambda: body(full, b.lane_mask(rest, width)))

    def serial_loop(self, loop: For) -> None:
        """A sequential loop; variables of outer scopes that it assigns are carried."""
        assigned = dict.fromkeys(s.name for s in statements(loop) if isinstance(s, Assign) and s.name in self.env)

        def body(index: Value, *carried: Value) -> list[Value]:
            with self.scope():
                self.env |= zip(assigned, carried, strict=True)
                self.env[loop.index] = index
                self.body(loop.body)
                return [self.env[name] for name in assigned]

        after = self.b.loop(0, self.integer(loop.extent), 1, body, [self.env[n] for n in assigned])
        self.env |= zip(assigned, after, strict=True)
        self.memo = {}

    def store(self, stmt: Store) -> None:
        b = self.b
        param = self.kernel.params[stmt.param]
        value = self.scalars.to_memory(self.value(stmt.value), stmt.value.dtype, param.dtype)
        address = self.address(stmt.param, stmt.at)
        unit = MEMORY[param.dtype.name]
        mask, count = self.lanes.mask, self.lanes.count
        if count == 1:
            b.store(b.extract(value, 0), address.pointer, align=param.dtype.size)
        elif address.step == 1 and address.varying is None:
            memory.store(b, value, address.pointer, param.dtype.size, mask)
        else:
            memory.scatter(b, value, self.lane_pointers(address, unit), param.dtype.size, mask)

    def check(self, stmt: Check) -> None:
        """Live lanes whose condition is false set the status word."""
        b = self.b
        good = self.value(stmt.condition)
        bad = b.op("xor", good, const(good.type, True))
        if self.lanes.mask is not None:
            bad = b.op("and", bad, self.lanes.mask)
        b.when(b.any(bad), lambda: b.store(Value("i64", str(stmt.code)), self.scratch, align=8))

    # -- uniform integers (the same in all lanes) ----------------------------------------------------------------------
    def integer(self, extent: int | Arg | Ref) -> Value:
        if isinstance(extent, Ref):
            value = self.uniform(extent)
            assert value is not None, f"{extent.name} is not uniform over lanes"
            return value
        return i64(extent) if isinstance(extent, int) else self.words[extent.name]

    def uniform(self, expr: Expr) -> Value | None:
        """An i64 expression as a scalar, or None if lanes differ or data is involved."""
        b = self.b
        match expr:
            case Const() if expr.dtype is I64:
                return i64(int(expr.value))
            case Arg():
                return self.words[expr.name]
            case Index():
                return None if expr.name == self.lanes.index else self.env[expr.name]
            case Ref() if expr.dtype is I64:
                value = self.env[expr.name]
                if value.type == "i64":
                    return value
                return b.extract(value, 0) if lanes_of(value.type) == 1 else None
            case Apply(op="add" | "sub" | "mul" | "quot" | "rem" | "min" | "and" | "shl" | "shr" as op) if (
                expr.dtype is I64
            ):
                sides = [self.uniform(a) for a in expr.args]
                if sides[0] is None or sides[1] is None:
                    return None
                method = {"add": b.add, "sub": b.sub, "mul": b.mul, "quot": b.sdiv, "rem": b.srem, "min": b.min}.get(op)
                if method is None:
                    return b.op("ashr" if op == "shr" else op, sides[0], sides[1])
                return method(sides[0], sides[1])
            case Apply(op="cast" | "select") if expr.dtype is I64 and self.lanes.count == 1:
                return b.extract(self.value(expr), 0)
            case Apply(op="cast", args=(Load() as load,)) if expr.dtype is I64 and load.dtype is not I64:
                return self.uniform_load(load)
            case Load() if expr.dtype is I64:
                return b.extract(self.value(expr), 0) if self.lanes.count == 1 else self.uniform_load(expr)
            case _:
                return None

    def uniform_load(self, load: Load) -> Value | None:
        """An integer that all lanes load from one address, such as a table row. Some lane is live, outside choices."""
        if self.lanes.choice or not load.dtype.is_integer or any(self.uniform(index) is None for index, _ in load.at):
            return None
        with self.scope(_Lanes()):
            return self.b.extract(self.scalars.cast(self.load(load), load.dtype, I64), 0)

    # -- addresses --------------------------------------------------------------------------------------------------
    def address(self, param: int, at: Place) -> _Address:
        b = self.b
        offset: Value = i64(0)
        step: int | Value = 0
        varying: Value | None = None
        for index, stride in at:
            factor = self.integer(stride)
            split = self.affine(index)
            if split is None and self.lanes.count == 1:
                split = 0, b.extract(self.value(index), 0)
            if split is None:
                lanes = b.op("mul", self.value(index), b.splat(factor, self.lanes.count))
                varying = lanes if varying is None else b.op("add", varying, lanes)
                continue
            coefficient, rest = split
            offset = b.add(offset, b.mul(rest, factor))
            if coefficient:
                single = step == 0 and stride == 1 and isinstance(stride, int)
                step = 1 if single else b.add(step if isinstance(step, Value) else i64(step), factor)
        p = self.kernel.params[param]
        pointer = b.offset(self.words[p.name], offset, MEMORY[p.dtype.name])
        return _Address(pointer, step, varying)

    def affine(self, index: Expr) -> tuple[int, Value] | None:
        """The index as `lane · coefficient + rest` with coefficient 0 or 1; None for anything else."""
        uniform = self.uniform(index)
        if uniform is not None:
            return 0, uniform
        match index:
            case Index() if index.name == self.lanes.index:
                assert self.lanes.base is not None
                return 1, self.lanes.base
            case Apply(op="add" | "sub" as op, args=(x, y)):
                a, c = self.affine(x), self.affine(y)
                if a is None or c is None or a[0] + c[0] > 1 or (op == "sub" and c[0]):
                    return None
                return a[0] + c[0], self.b.add(a[1], c[1]) if op == "add" else self.b.sub(a[1], c[1])
            case _:
                return None

    def lane_pointers(self, address: _Address, unit: str) -> Value:
        b, count = self.b, self.lanes.count
        offsets = b.iota(count)
        if address.step == 0:
            offsets = const(vector(count, "i64"), 0)
        elif address.step != 1:
            step = address.step if isinstance(address.step, Value) else i64(address.step)
            offsets = b.op("mul", offsets, b.splat(step, count))
        if address.varying is not None:
            offsets = b.op("add", offsets, address.varying)
        return b.assign(f"<{count} x ptr>", f"getelementptr {unit}, {address.pointer}, {offsets}")

    # -- values -----------------------------------------------------------------------------------------------------
    def value(self, expr: Expr) -> Value:
        """An expression as a vector of the current lanes."""
        key = id(expr)
        result = self.memo.get(key)
        if result is None:
            result = self.evaluate(expr)
            self.memo[key] = result
            self.keep.append(expr)
        return result

    def evaluate(self, expr: Expr) -> Value:
        b, count = self.b, self.lanes.count
        match expr:
            case Const():
                return const(vector(count, REGISTER[expr.dtype.name]), expr.value)
            case Arg():
                return self.broadcast(self.words[expr.name])
            case Index() if expr.name == self.lanes.index:
                assert self.lanes.base is not None
                return b.op("add", self.broadcast(self.lanes.base), b.iota(count))
            case Index() | Ref():
                return self.broadcast(self.env[expr.name])
            case Load():
                return self.load(expr)
            case Apply():
                args = [self.value(a) for a in expr.args]
                return self.scalars.apply(expr.op, args, expr.args[0].dtype, expr.dtype)
            case Choose():
                return self.choose(expr)
            case Reduce():
                return self.reduce_lanes([expr])[0] if count == 1 else self.reduce_serial(expr)
            case Lookup():
                return self.lookup(expr)

    def broadcast(self, value: Value) -> Value:
        """Broadcasts a scalar, or a value from outside the vector loop, to every lane."""
        count = self.lanes.count
        have = lanes_of(value.type)
        if have == count:
            return value
        return self.b.splat(self.b.extract(value, 0) if have else value, count)

    def load(self, expr: Load) -> Value:
        b, count, mask = self.b, self.lanes.count, self.lanes.mask
        dtype = self.kernel.params[expr.param].dtype
        unit, align = MEMORY[dtype.name], dtype.size
        address = self.address(expr.param, expr.at)
        type_ = vector(count, unit)
        same = address.varying is None and address.step == 0
        if mask is None and (same or count == 1):
            loaded = b.splat(b.load(unit, address.pointer, align=align), count)
        elif (address.varying is None and address.step == 1) or count == 1:
            loaded = memory.load(b, type_, address.pointer, align, mask)
            if self.kernel.params[expr.param].name in self.kernel.streams:
                b.prefetch(b.offset(address.pointer, STREAM_AHEAD))
        else:
            loaded = memory.gather(b, type_, self.lane_pointers(address, unit), align, mask)
        return b.icmp("ne", loaded, const(type_, 0)) if dtype is BOOL else loaded

    def lookup(self, expr: Lookup) -> Value:
        """Table lookup. If lanes differ, each loads its own element; indices are in range even in masked lanes."""
        b, count = self.b, self.lanes.count
        same = self.uniform(expr.index)
        table = b.module.table(expr.table.name, "i32", expr.table.values)
        if same is not None:
            return b.splat(b.load("i32", b.offset(table, same, "i32"), align=4), count)
        at = self.value(expr.index)
        if len(expr.table.values) <= 16 and self.target.arch == "x86_64" and count in (8, 16):
            return memory.register_lookup(b, expr.table.values, at)
        places = b.assign(f"<{count} x ptr>", f"getelementptr i32, {table}, {at}")
        return memory.gather(b, vector(count, "i32"), places, 4, None)

    def choose(self, expr: Choose) -> Value:
        """Evaluates each side under its own mask, so that the side not taken is not loaded."""
        b = self.b
        condition = self.value(expr.condition)
        opposite = b.op("xor", condition, const(condition.type, True))
        sides = []
        for mask, side in ((condition, expr.then), (opposite, expr.other)):
            outer = self.lanes.mask
            both = mask if outer is None else b.op("and", mask, outer)
            with self.scope(replace(self.lanes, mask=both, choice=True)):
                sides.append(self.value(side))
        return b.select(condition, sides[0], sides[1])

    # -- reductions ---------------------------------------------------------------------------------------------------
    def reduce_serial(self, expr: Reduce) -> Value:
        """Each lane reduces on its own, in index order."""
        start = self.scalars.identity(expr.op, expr.dtype, self.lanes.count)

        def body(index: Value, total: Value) -> list[Value]:
            with self.scope():
                self.env[expr.index] = index
                return [self.scalars.combine(expr.op, total, self.value(expr.value), expr.dtype)]

        return self.b.loop(0, self.integer(expr.extent), 1, body, [start])[0]

    def reduce_lanes(self, exprs: Sequence[Reduce]) -> list[Value]:
        """Reduces over the same range in one loop.

        Lanes and chains interleave over the index; then chains, then lanes, are combined in one fixed order.
        """
        b, width, chains = self.b, self.width, _chains(exprs[0])
        index, extent = exprs[0].index, self.integer(exprs[0].extent)
        identities = [self.scalars.identity(expr.op, expr.dtype, width) for expr in exprs]

        def step(at: Value, totals: Sequence[Value], mask: Value | None = None) -> list[Value]:
            sums = []
            with self.scope(_Lanes(width, index, at, mask)):
                for expr, start, total in zip(exprs, identities, totals, strict=True):
                    value = self.value(expr.value)
                    value = value if mask is None else b.select(mask, value, start)
                    sums.append(self.scalars.combine(expr.op, total, value, expr.dtype))
            return sums

        def steps(at: Value, *totals: Value) -> list[Value]:
            of_chain = [step(b.add(at, i * width), totals[i * count : (i + 1) * count]) for i in range(chains)]
            return [total for sums in of_chain for total in sums]

        if exprs[0].extent == width:  # a single vector
            return [self._combine_chains(expr, [x]) for expr, x in zip(exprs, step(i64(0), identities), strict=True)]
        count, stride = len(exprs), width * chains
        full = b.mul(b.sdiv(extent, stride), stride)
        totals = b.loop(0, full, stride, steps, identities * chains)
        if chains > 1:
            more = b.mul(b.sdiv(extent, width), width)
            totals[:count] = b.loop(full, more, width, lambda at, *t: step(at, t), totals[:count])
            full = more
        rest = b.sub(extent, full)
        first = totals[:count]
        totals[:count] = b.when(
            b.icmp("sgt", rest, 0), lambda: step(full, first, b.lane_mask(rest, width)), lambda: first
        )
        return [self._combine_chains(expr, totals[i::count]) for i, expr in enumerate(exprs)]

    def _combine_chains(self, expr: Reduce, totals: list[Value]) -> Value:
        def both(x: Value, y: Value) -> Value:
            return self.scalars.combine(expr.op, x, y, expr.dtype)

        while len(totals) > 1:
            totals = [both(x, y) for x, y in zip(totals[::2], totals[1::2], strict=True)]
        return self.b.splat(self.b.fold(totals[0], both), 1)

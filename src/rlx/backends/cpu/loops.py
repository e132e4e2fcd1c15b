"""The loops emitter: a `LoopKernel` as LLVM IR, vectorised for the target.

Inside a vector loop every value is a vector of `lanes` elements; outside it is a vector of one, so there is one path.
Addresses are split into a scalar part and what changes from lane to lane: nothing (broadcast), one element a lane
(a plain vector access) or anything else (gather, scatter). Partial vectors and untaken choices are masked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from rlx.backends.cpu import math
from rlx.backends.cpu.builder import Builder, Module, Value, const, i64, intrinsic_suffix, lanes_of, scalar_of, vector
from rlx.backends.cpu.routine import ENTRY_ARGUMENTS, Routine
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import BOOL, F32, F64, I64, U8, U32, DType
from rlx.errors import LowerError
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
    Table,
    Var,
    statements,
    walk,
)

# How elements lie in memory, and how values are held in registers. Narrow floats are bit patterns until they are cast.
MEMORY = {"f64": "double", "f32": "float", "f16": "i16", "bf16": "i16", "i64": "i64", "i32": "i32", "i16": "i16",
          "i8": "i8", "u32": "i32", "u8": "i8", "bool": "i8"}  # fmt: skip
REGISTER = MEMORY | {"bool": "i1"}

HEAVY = ("exp", "log", "tanh", "erf", "gelu", "sin", "cos", "tan", "atan", "pow")  # not worth unrolling
ACCUMULATORS = 4  # independent chains of a vectorised reduction


def _chains(expr: Reduce) -> int:
    heavy = any(isinstance(e, Apply) and e.op in HEAVY for e in walk(expr.value))
    return 1 if heavy else ACCUMULATORS


def routine(kernel: LoopKernel, target: CpuTarget) -> Routine:
    """The function of a loop kernel."""
    return Routine(f"loops.{kernel.symbol}.{kernel.fingerprint}", lambda module: _define(module, kernel, target))


def _define(module: Module, kernel: LoopKernel, target: CpuTarget) -> None:
    name = routine(kernel, target).symbol
    module.define(name, ENTRY_ARGUMENTS, lambda b, *given: _Emitter(b, kernel, target, *given).run())


@dataclass(frozen=True)
class _Lanes:
    """The vector loop that is being emitted: how many lanes, over which index, from which start, under which mask."""

    count: int = 1
    index: str = ""
    base: Value | None = None
    mask: Value | None = None
    choice: bool = False  # the mask is also that of a side of a `Choose`, which may be off in all lanes


@dataclass
class _Address:
    """Where a load or store goes: `pointer`, and how far lanes are apart (in elements)."""

    pointer: Value
    step: int | Value = 0  # between lanes; 0 is the same element for all
    varying: Value | None = None  # a further offset a lane


@dataclass
class _Emitter:
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
    keep: list[Expr] = field(default_factory=list)  # expressions in `memo`, so that their ids stay theirs

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
        """Names and memoised values made inside do not leave."""
        saved = self.env, self.lanes, self.memo
        self.env, self.memo = dict(self.env), {}
        self.lanes = lanes or self.lanes
        try:
            yield
        finally:
            self.env, self.lanes, self.memo = saved

    @property
    def width(self) -> int:
        """Lanes of a vector loop: whole registers of the kernel's widest data."""
        wide = any(p.dtype.size == 8 for p in self.kernel.params)
        return self.target.lanes(8 if wide else 4)

    # -- statements -----------------------------------------------------------------------------------------------
    def body(self, stmts: tuple[Stmt, ...]) -> None:
        """Statements in order; neighbouring reductions over the same elements share one loop."""
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
        """The leading lets that are reductions over one range, none of which needs another; what lanes reduce is not
        among them."""
        found: list[tuple[str, Reduce]] = []
        for stmt in stmts:
            if self.lanes.count > 1 or not isinstance(stmt, Let) or not isinstance(stmt.value, Reduce):
                break
            value, names = stmt.value, {name for name, _ in found}
            if any(isinstance(e, Ref) and e.name in names for e in walk(value)):
                break
            if found and (value.index, value.extent) != (found[0][1].index, found[0][1].extent):
                break
            if found and _chains(value) != _chains(found[0][1]):  # else the order of a sum would be another
                break
            found.append((stmt.name, value))
        return found

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
        """Indices that are the same in all lanes stay scalar integers."""
        uniform = self.uniform(value) if value.dtype is I64 else None
        return uniform if uniform is not None else self.value(value)

    def vector_loop(self, loop: For, start: Value, stop: Value) -> None:
        """Whole vectors, then one masked vector for the rest."""
        b, width = self.b, self.width
        whole = b.add(start, b.mul(b.sdiv(b.sub(stop, start), width), width))

        def body(at: Value, mask: Value | None) -> None:
            with self.scope(_Lanes(width, loop.index, at, mask)):
                self.body(loop.body)

        b.loop(start, whole, width, lambda at: body(at, None))
        if whole.constant is not None and whole.constant == stop.constant:
            return
        # Not a constant in LLVM's eyes: it turns a masked store of one narrowed lane into one of its wide original.
        rest = b.opaque(b.sub(stop, whole))
        b.when(b.icmp("sgt", rest, 0), lambda: body(whole, b.lane_mask(rest, width)))

    def serial_loop(self, loop: For) -> None:
        """One iteration after the other; variables of outer scopes that it assigns are carried."""
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
        value = self.to_memory(self.cast(self.value(stmt.value), stmt.value.dtype, param.dtype), param.dtype)
        address = self.address(stmt.param, stmt.at)
        unit = MEMORY[param.dtype.name]
        mask, count = self.lanes.mask, self.lanes.count
        if count == 1:
            b.store(b.extract(value, 0), address.pointer, align=param.dtype.size)
        elif address.step == 1 and address.varying is None:
            if mask is None:
                b.store(value, address.pointer, align=param.dtype.size)
            else:
                suffix = intrinsic_suffix(value.type)
                place = Value("ptr", f"align {param.dtype.size} {address.pointer.text}")
                declared = [value.type, "ptr", mask.type]
                self._call_void(f"llvm.masked.store.{suffix}.p0", value, place, mask, declared=declared)
        else:
            places = self.lane_pointers(address, unit)
            live = mask or const(vector(count, "i1"), True)
            self._call_void(
                f"llvm.masked.scatter.{intrinsic_suffix(value.type)}.v{count}p0", value,
                Value(places.type, f"align {param.dtype.size} {places.text}"), live,
                declared=[value.type, places.type, live.type],
            )  # fmt: skip

    def _call_void(self, name: str, *arguments: Value, declared: list[str]) -> None:
        self.b.module.declare(name, "void", declared)
        self.b.line(f"call void @{name}({', '.join(map(str, arguments))})")

    def check(self, stmt: Check) -> None:
        """Lanes that are live and false set the status word."""
        b = self.b
        good = self.value(stmt.condition)
        bad = b.op("xor", good, const(good.type, True))
        if self.lanes.mask is not None:
            bad = b.op("and", bad, self.lanes.mask)
        b.when(b.any(bad), lambda: b.store(Value("i64", str(stmt.code)), self.scratch, align=8))

    # -- integers that are the same in all lanes -----------------------------------------------------------------------
    def integer(self, extent: int | Arg | Ref) -> Value:
        if isinstance(extent, Ref):
            value = self.uniform(extent)
            assert value is not None, f"{extent.name} is not the same in all lanes"
            return value
        return i64(extent) if isinstance(extent, int) else self.words[extent.name]

    def uniform(self, expr: Expr) -> Value | None:
        """An i64 expression as a scalar, or None where lanes differ or data is involved."""
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
        """An integer that all lanes load from one place, such as the row of a table. Some lane is live, unless a choice
        has been made."""
        if self.lanes.choice or not load.dtype.is_integer or any(self.uniform(index) is None for index, _ in load.at):
            return None
        with self.scope(_Lanes()):
            return self.b.extract(self.cast(self.load(load), load.dtype, I64), 0)

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
        """The index as `lane · coefficient + rest`, coefficient 0 or 1; None for anything else."""
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
        found = self.memo.get(key)
        if found is None:
            found = self.evaluate(expr)
            self.memo[key] = found
            self.keep.append(expr)
        return found

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
                return self.apply(expr)
            case Choose():
                return self.choose(expr)
            case Reduce():
                return self.reduce_lanes([expr])[0] if count == 1 else self.reduce_serial(expr)
            case Lookup():
                return self.lookup(expr)

    def broadcast(self, value: Value) -> Value:
        """A scalar, or a value from outside the vector loop, in every lane."""
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
            loaded = self._vector_load(type_, address.pointer, align, mask)
        else:
            loaded = self._gather(type_, self.lane_pointers(address, unit), align, mask)
        return b.icmp("ne", loaded, const(type_, 0)) if dtype is BOOL else loaded

    def _vector_load(self, type_: str, pointer: Value, align: int, mask: Value | None) -> Value:
        if mask is None:
            return self.b.load(type_, pointer, align=align)
        name = f"llvm.masked.load.{intrinsic_suffix(type_)}.p0"
        self.b.module.declare(name, type_, ["ptr", mask.type, type_])
        zero = f"{type_} zeroinitializer"
        return self.b.assign(type_, f"call {type_} @{name}(ptr align {align} {pointer.text}, {mask}, {zero})")

    def _gather(self, type_: str, pointers: Value, align: int, mask: Value | None) -> Value:
        count = lanes_of(type_)
        live = mask or const(vector(count, "i1"), True)
        name = f"llvm.masked.gather.{intrinsic_suffix(type_)}.v{count}p0"
        self.b.module.declare(name, type_, [pointers.type, live.type, type_])
        places = f"{pointers.type} align {align} {pointers.text}"
        return self.b.assign(type_, f"call {type_} @{name}({places}, {live}, {type_} zeroinitializer)")

    def lookup(self, expr: Lookup) -> Value:
        """Where lanes differ, each loads its own; the index is inside the table even in lanes that are not live."""
        b, count = self.b, self.lanes.count
        same = self.uniform(expr.index)
        table = b.module.table(expr.table.name, "i32", expr.table.values)
        if same is not None:
            return b.splat(b.load("i32", b.offset(table, same, "i32"), align=4), count)
        at = self.value(expr.index)
        if len(expr.table.values) <= 16 and self.target.arch == "x86_64" and count in (8, 16):
            return self._shuffled(expr.table, at)
        places = b.assign(f"<{count} x ptr>", f"getelementptr i32, {table}, {at}")
        return self._gather(vector(count, "i32"), places, 4, None)

    def _shuffled(self, table: Table, at: Value) -> Value:
        """A lookup in a table that fits into one register, or two: several times as fast as a load a lane."""
        b, type_ = self.b, vector(lanes_of(at.type), "i32")
        at = at if at.type == type_ else b.convert("trunc", at, type_)
        values = [*table.values, *[0] * (16 - len(table.values))]

        def register(part: list[int]) -> Value:
            return Value(type_, f"<{', '.join(f'i32 {v}' for v in part)}>")

        if lanes_of(type_) == 16:
            return b.call(type_, "llvm.x86.avx512.permvar.si.512", register(values), at)
        low, high = (b.call(type_, "llvm.x86.avx2.permd", register(part), at) for part in (values[:8], values[8:]))
        return b.select(b.icmp("sgt", at, const(type_, 7)), high, low)

    def choose(self, expr: Choose) -> Value:
        """Each side is evaluated under its own mask, so that what is not taken is not loaded."""
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
        """Each lane reduces by itself, in index order."""
        start = self.identity(expr)

        def body(index: Value, total: Value) -> list[Value]:
            with self.scope():
                self.env[expr.index] = index
                return [self.combine(expr.op, total, self.value(expr.value), expr.dtype)]

        return self.b.loop(0, self.integer(expr.extent), 1, body, [start])[0]

    def reduce_lanes(self, exprs: Sequence[Reduce]) -> list[Value]:
        """Reductions over the same range, in one loop. Lanes and chains take turns over the index; then chains, then
        lanes, are combined in one fixed order."""
        b, width, chains = self.b, self.width, _chains(exprs[0])
        index, extent = exprs[0].index, self.integer(exprs[0].extent)
        with self.scope(_Lanes(width)):
            starts = [self.identity(expr) for expr in exprs]

        def step(at: Value, totals: Sequence[Value], mask: Value | None = None) -> list[Value]:
            found = []
            with self.scope(_Lanes(width, index, at, mask)):
                for expr, start, total in zip(exprs, starts, totals, strict=True):
                    value = self.value(expr.value)
                    value = value if mask is None else b.select(mask, value, start)
                    found.append(self.combine(expr.op, total, value, expr.dtype))
            return found

        def steps(at: Value, *totals: Value) -> list[Value]:
            of_chain = [step(b.add(at, i * width), totals[i * count : (i + 1) * count]) for i in range(chains)]
            return [total for found in of_chain for total in found]

        count, stride = len(exprs), width * chains
        whole = b.mul(b.sdiv(extent, stride), stride)
        totals = b.loop(0, whole, stride, steps, starts * chains)
        if chains > 1:
            more = b.mul(b.sdiv(extent, width), width)
            totals[:count] = b.loop(whole, more, width, lambda at, *t: step(at, t), totals[:count])
            whole = more
        rest = b.sub(extent, whole)
        first = totals[:count]
        totals[:count] = b.when(
            b.icmp("sgt", rest, 0), lambda: step(whole, first, b.lane_mask(rest, width)), lambda: first
        )
        return [self._combined(expr, totals[i::count]) for i, expr in enumerate(exprs)]

    def _combined(self, expr: Reduce, totals: list[Value]) -> Value:
        def both(x: Value, y: Value) -> Value:
            return self.combine(expr.op, x, y, expr.dtype)

        while len(totals) > 1:
            totals = [both(x, y) for x, y in zip(totals[::2], totals[1::2], strict=True)]
        return self.b.splat(self.b.fold(totals[0], both), 1)

    def identity(self, expr: Reduce) -> Value:
        type_ = vector(self.lanes.count, REGISTER[expr.dtype.name])
        if expr.op in ("sum", "prod"):
            return const(type_, 0 if expr.op == "sum" else 1)
        if expr.dtype.is_float:
            return const(type_, float("-inf") if expr.op == "max" else float("inf"))
        bits = 8 * expr.dtype.size
        if expr.dtype.kind == "uint":
            return const(type_, 0 if expr.op == "max" else 2**bits - 1)
        return const(type_, -(2 ** (bits - 1)) if expr.op == "max" else 2 ** (bits - 1) - 1)

    def combine(self, op: str, a: Value, c: Value, dtype: DType) -> Value:
        return self.arithmetic({"sum": "add", "prod": "mul"}.get(op, op), [a, c], dtype)

    # -- scalar operations ------------------------------------------------------------------------------------------
    def apply(self, expr: Apply) -> Value:
        args = [self.value(a) for a in expr.args]
        kind = expr.args[0].dtype
        match expr.op:
            case "cast":
                return self.cast(args[0], kind, expr.dtype)
            case "select":
                return self.b.select(args[0], args[1], args[2])
            case "and" | "or" | "xor":
                return self.b.op(expr.op, args[0], args[1])
            case "shl" | "shr":
                return self.b.op("shl" if expr.op == "shl" else "ashr", args[0], args[1])
            case "not":
                return self.b.op("xor", args[0], const(args[0].type, True))
            case "eq" | "ne" | "lt" | "le" | "gt" | "ge":
                return self.compare(expr.op, args[0], args[1], kind)
            case "order":
                return self.order(args[0])
            case "nearest":
                return math.nearest(self.b, args[0], self.target)
            case "bits":
                return self.b.convert("bitcast", args[0], vector(lanes_of(args[0].type), "float"))
            case "dot_u8" | "dot_u7":
                return dot(self.b, args[0], args[1], args[2], self.target, small=expr.op == "dot_u7")
            case _:
                return self.arithmetic(expr.op, args, expr.dtype)

    def compare(self, op: str, a: Value, c: Value, kind: DType) -> Value:
        if kind.is_float:
            return self.b.fcmp({"ne": "une"}.get(op, "o" + op), a, c)
        if op in ("eq", "ne"):
            return self.b.icmp(op, a, c)
        return self.b.icmp(("u" if kind.kind in ("uint", "bool") else "s") + op, a, c)

    def arithmetic(self, op: str, args: list[Value], dtype: DType) -> Value:
        return self.float_arithmetic(op, args) if dtype.is_float else self.integer_arithmetic(op, args, dtype)

    def float_arithmetic(self, op: str, args: list[Value]) -> Value:
        b, target = self.b, self.target
        match op:
            case "add" | "sub" | "mul" | "div":
                return b.op("f" + op, args[0], args[1])
            case "neg":
                return b.fneg(args[0])
            case "abs":
                return b.intrinsic("fabs", args[0])
            case "sqrt":
                return b.intrinsic("sqrt", args[0])
            case "max":
                return math.max(b, args[0], args[1])
            case "min":
                return math.min(b, args[0], args[1])
            case "fma":
                return math.fma(b, args[0], args[1], args[2], target)
            case "exp" | "log" | "tanh" | "erf" | "gelu" | "sin" | "cos" | "tan" | "atan" | "pow":
                return getattr(math, op)(b, *args, target)  # type: ignore[no-any-return]
        raise LowerError(f"loops: no float operation {op!r}")

    def integer_arithmetic(self, op: str, args: list[Value], dtype: DType) -> Value:
        b = self.b
        signed = dtype.kind == "int"
        match op:
            case "add" | "sub" | "mul":
                return b.op(op, args[0], args[1])
            case "neg":
                return b.op("sub", const(args[0].type, 0), args[0])
            case "abs":
                below = b.icmp("slt", args[0], const(args[0].type, 0))
                return b.select(below, b.op("sub", const(args[0].type, 0), args[0]), args[0]) if signed else args[0]
            case "max" | "min":
                sign = ("s" if signed else "u") + ("gt" if op == "max" else "lt")
                return b.select(b.icmp(sign, args[0], args[1]), args[0], args[1])
            case "fma":
                return b.op("add", b.op("mul", args[0], args[1]), args[2])
            case "floordiv" | "mod":
                return self.floor_division(op, args[0], args[1], signed)
        raise LowerError(f"loops: no integer operation {op!r}")

    def floor_division(self, op: str, a: Value, c: Value, signed: bool) -> Value:
        """Rounds down; a zero divisor gives 0; the least number by -1 wraps instead of trapping."""
        b = self.b
        zero = const(a.type, 0)
        is_zero = b.icmp("eq", c, zero)
        safe = b.select(is_zero, const(a.type, 1), c)
        if not signed:
            return b.select(is_zero, zero, b.op("udiv" if op == "floordiv" else "urem", a, safe))
        minus = b.icmp("eq", c, const(a.type, -1))
        safe = b.select(minus, const(a.type, 1), safe)
        quotient, rest = b.op("sdiv", a, safe), b.op("srem", a, safe)
        below = b.op("and", b.icmp("ne", rest, zero), b.icmp("slt", b.op("xor", rest, safe), zero))
        if op == "floordiv":
            down = b.select(below, b.op("sub", quotient, const(a.type, 1)), quotient)
            return b.select(is_zero, zero, b.select(minus, b.op("sub", zero, a), down))
        up = b.select(below, b.op("add", rest, safe), rest)
        return b.select(b.op("or", is_zero, minus), zero, up)

    def order(self, x: Value) -> Value:
        """Sign-magnitude bits as two's complement; -0.0 counts as 0.0, NaN as the largest."""
        b = self.b
        bits = 64 if scalar_of(x.type) == "double" else 32
        type_ = vector(lanes_of(x.type), f"i{bits}")
        plain = b.op("fadd", x, const(x.type, 0.0))  # -0.0 + 0.0 is 0.0
        raw = b.convert("bitcast", plain, type_)
        sign = b.op("ashr", raw, const(type_, bits - 1))
        key = b.op("xor", raw, b.op("and", sign, const(type_, 2 ** (bits - 1) - 1)))
        return b.select(b.fcmp("uno", x, x), const(type_, 2 ** (bits - 1) - 1), key)

    # -- casts ------------------------------------------------------------------------------------------------------
    def cast(self, x: Value, have: DType, want: DType) -> Value:
        if have is want:
            return x
        b, count = self.b, lanes_of(x.type)
        type_ = vector(count, REGISTER[want.name])
        if have.is_float and have.size == 2:
            widen = math.half_to_float if have.name == "f16" else math.bfloat_to_float
            return self.cast(widen(b, x, self.target), F32, want)
        if want.is_float and want.size == 2:
            narrow = math.float_to_half if want.name == "f16" else math.float_to_bfloat
            return narrow(b, x if have is F64 else self.cast(x, have, F32), self.target)
        if want is BOOL:
            return b.fcmp("une", x, const(x.type, 0.0)) if have.is_float else b.icmp("ne", x, const(x.type, 0))
        if have.is_float and want.is_float:
            return b.convert("fpext" if want is F64 else "fptrunc", x, type_)
        if want.is_float:
            return b.convert("sitofp" if have.kind == "int" else "uitofp", x, type_)
        if have.is_float:
            return self.float_to_integer(x, want)
        if want.size < have.size:
            return b.convert("trunc", x, type_)
        if have is BOOL:
            return b.convert("zext", x, type_)
        return b.convert("sext" if have.kind == "int" else "zext", x, type_)

    def float_to_integer(self, x: Value, want: DType) -> Value:
        """Saturates; u32 goes through i64."""
        b, count = self.b, lanes_of(x.type)
        if want.kind == "int" or want is U8:
            return math.float_to_int(b, x, f"i{8 * want.size}", self.target, signed=want.kind == "int")
        assert want is U32
        type_ = vector(count, REGISTER[I64.name])
        value = math.float_to_int(b, x, "i64", self.target)
        for limit, predicate in ((0, "slt"), (2**32 - 1, "sgt")):
            value = b.select(b.icmp(predicate, value, const(type_, limit)), const(type_, limit), value)
        return b.convert("trunc", value, vector(count, REGISTER[want.name]))

    def to_memory(self, x: Value, dtype: DType) -> Value:
        return self.b.convert("zext", x, vector(lanes_of(x.type), "i8")) if dtype is BOOL else x


# -- products of bytes ------------------------------------------------------------------------------------------------
_MULTIPLY_BYTES = {16: "ssse3.pmadd.ub.sw.128", 32: "avx2.pmadd.ub.sw", 64: "avx512.pmaddubs.w.512"}
_MULTIPLY_WORDS = {16: "sse2.pmadd.wd", 32: "avx2.pmadd.wd", 64: "avx512.pmaddw.d.512"}


def dot(b: Builder, total: Value, x: Value, y: Value, target: CpuTarget, *, small: bool) -> Value:
    """total + the four products of the bytes of x, unsigned (below 128 if `small`), and of y, signed, in each i32."""
    lanes = lanes_of(total.type)
    size = 4 * lanes
    if target.arch != "x86_64" or size != target.vector_bytes:
        return _dot_by_shifts(b, total, x, y)
    as_bytes = vector(size, "i8")
    if target.has_dot:
        sides = (b.convert("bitcast", v, as_bytes) for v in (x, y))
        return b.call(total.type, f"llvm.x86.avx512.vpdpbusd.{8 * size}", total, *sides)
    as_words = vector(2 * lanes, "i16")
    if small and size > 16:  # two products fit into 16 bits
        sides = (b.convert("bitcast", v, as_bytes) for v in (x, y))
        pairs = b.call(as_words, f"llvm.x86.{_MULTIPLY_BYTES[size]}", *sides)
        return b.op("add", total, _add_pairs(b, pairs, const(as_words, 1), total.type))
    x, y = b.convert("bitcast", x, as_words), b.convert("bitcast", y, as_words)
    eight = const(as_words, 8)
    even = b.op("and", x, const(as_words, 255)), b.op("ashr", b.op("shl", y, eight), eight)
    odd = b.op("lshr", x, eight), b.op("ashr", y, eight)
    for left, right in (even, odd):
        total = b.op("add", total, _add_pairs(b, left, right, total.type))
    return total


def _add_pairs(b: Builder, x: Value, y: Value, result: str) -> Value:
    """The sums of the products of two neighbours."""
    return b.call(result, f"llvm.x86.{_MULTIPLY_WORDS[2 * lanes_of(x.type)]}", x, y)


def _dot_by_shifts(b: Builder, total: Value, x: Value, y: Value) -> Value:
    for byte in range(4):
        left = b.op("and", b.op("lshr", x, const(x.type, 8 * byte)), const(x.type, 255))
        right = b.op("ashr", b.op("shl", y, const(y.type, 24 - 8 * byte)), const(y.type, 24))
        total = b.op("add", total, b.op("mul", left, right))
    return total

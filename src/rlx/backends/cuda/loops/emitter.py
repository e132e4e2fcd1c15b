"""The emitter of loop kernels: writes the CUDA C of a variant.

Code outside vector loops and reductions is *shared*: all threads of a unit run it with the same values, and the threads
split the iterations of vector loops and reductions among them. Code inside is private to a thread. A store or check in
shared code runs in the first thread; threads synchronise where one may touch what another wrote.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import field, replace

from rlx.backends.cuda.kernel_plan import words_struct
from rlx.backends.cuda.loops import operations
from rlx.backends.cuda.loops.independence import warp_loops
from rlx.backends.cuda.loops.operations import MEMORY, VALUE
from rlx.backends.cuda.loops.ranges import is_index
from rlx.backends.cuda.loops.structure import (
    Effects,
    Packing,
    effects,
    is_condition,
    is_free,
    loop_packing,
    reduction_group,
    reduction_packing,
    values,
    weight,
)
from rlx.dtypes import BOOL, I32, I64, DType
from rlx.errors import LowerError
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
    Table,
    Var,
    children,
    statements,
)

BLOCK = 256  # threads of a block that runs several units, or chunks
WARP = 32
LIGHT = 24  # operations of a body that is worth unrolling
LIGHT_PACK = 96  # operations of a pack up to which a thread loads two packs before it computes
PAIRED_ACCESSES = 4  # loads and stores of such a loop
LONGEST_TEXT = 240  # of an expression, before it gets a name of its own
UNIT_BARRIER = 15  # of the threads of a unit, where a block has others; matmuls use the lower numbers


PIECES = ("part", "join")
PART = 16384  # terms of a reduction that one block takes where blocks split it


@dataclass(frozen=True, slots=True)
class Variant:
    """How a loop kernel is compiled: `rows_128_v4_n`.

    `lanes` threads run a unit, 0 for chunks; loops access packs of `pack` elements; `narrow`: indices have 32 bits;
    `distinct`: no two parameters share memory. Bit i of `warps`: warps split the i-th of the kernel's `warp_loops`.
    """

    lanes: int
    pack: int = 1
    narrow: bool = False
    distinct: bool = False
    warps: int = 0
    piece: str = ""  # of a reduction that blocks split: "part" writes partial results, "join" combines them

    @property
    def threads(self) -> int:
        """Threads per block: up to a warp's, units share a block; beyond, each has its own."""
        return self.lanes if self.lanes > WARP else BLOCK

    def __str__(self) -> str:
        parts = [f"rows_{self.lanes}" if self.lanes else "chunk", f"v{self.pack}"]
        parts += ["n"] * self.narrow + ["d"] * self.distinct + [f"w{self.warps:x}"] * bool(self.warps)
        parts += [self.piece] * bool(self.piece)
        return "_".join(parts)

    @classmethod
    def parse(cls, text: str) -> Variant:
        kind, *parts = text.split("_")
        lanes = int(parts.pop(0)) if kind == "rows" else 0
        pack = int(parts.pop(0).removeprefix("v"))
        warps = next((int(part[1:], 16) for part in parts if part.startswith("w")), 0)
        piece = next((part for part in parts if part in PIECES), "")
        variant = cls(lanes, pack, "n" in parts, "d" in parts, warps, piece)
        if str(variant) != text:
            raise LowerError(f"cuda loops: no variant {text!r}")
        return variant


class _PartWritten(Exception):
    """A unit's partial results are in scratch memory: nothing remains to be emitted."""


@dataclass(frozen=True, slots=True)
class _Team:
    """The threads that run shared code: all of a unit, or a warp of them. Texts: its threads' numbers and mask."""

    lanes: int
    thread: str = "thread"
    threads: str = "threads"
    lane: str = "lane"
    mask: str = "mask"


ONE_WARP = _Team(WARP, "warp_lane", str(WARP), "warp_lane", "~0u")


@dataclass(frozen=True, slots=True)
class _Scope:
    """Where code runs: in shared code, or in one thread, there possibly for element `element` of packs."""

    shared: bool
    element: str = ""
    packs: dict[Load, str] = field(default_factory=dict)


@dataclass
class Emitter:
    """Emits one kernel."""

    kernel: LoopKernel
    variant: Variant
    entry: str
    lines: list[str] = field(default_factory=list)
    depth: int = 1
    names: dict[str, str] = field(default_factory=dict)  # C names of loop variables, lets and variables
    indices: dict[str, bool] = field(default_factory=dict)  # whether those are indices (see `ranges.py`)
    memo: dict[int, str] = field(default_factory=dict)  # C names of expressions, by id
    scope: _Scope = field(default_factory=lambda: _Scope(shared=True))
    pending: Effects = field(default_factory=Effects)  # of shared code since threads last synchronised
    variables: dict[str, DType] = field(default_factory=dict)  # types of variables, by C name
    conditions: set[str] = field(default_factory=set)  # C names of lets that are 0 or 1
    tables: dict[Table, str] = field(default_factory=dict)
    slots: int = 0  # of partial results in shared memory
    count: int = 0
    ranged: bool = False  # a function that one block calls for some units, not a kernel
    width: int = 0  # of a ranged function: threads of a unit if there are fewer than lanes, which then take turns

    def source(self) -> str:
        kernel, variant = self.kernel, self.variant
        self.uses = _uses(kernel)
        self.free = is_free(kernel)
        self.team = _Team(variant.lanes)
        loops = enumerate(warp_loops(kernel)) if variant.warps else ()
        self.warp_loops = {id(each.loop): each for i, each in loops if variant.warps >> i & 1}
        if variant.lanes:
            self.rows()
        else:
            self.chunk()
        fields = {_field(p.name): f"{'' if p.written else 'const '}{MEMORY[p.dtype.name]}*" for p in kernel.params}
        fields |= {_field(name): "i64" for name in kernel.args}
        head = [words_struct(fields, f"Words_{self.entry}")]
        for table, name in self.tables.items():
            head.append(f"__device__ const i32 {name}[] = {{{', '.join(str(int(v)) for v in table.values)}}};")
        kind = "i32" if variant.narrow else "i64"
        head.append(
            f"INLINE void {self.entry}(const Words_{self.entry}& w, const {kind} begin, const {kind} end) {{"
            if self.ranged
            else f'extern "C" __global__ void __launch_bounds__({variant.threads}) '
            f"{self.entry}(const Words_{self.entry} w) {{"
        )
        if self.slots:
            head.append(f"  __shared__ u64 slots[2][{self.slots}][{WARP}];")
            head.append("  int phase = 0;")
        return "\n".join([*head, *self.lines, "}", ""])

    # -- kernels --
    def prologue(self) -> None:
        if not self.ranged:
            self.line("wait_for_inputs();")
            self.line("start_next();")
        for param in self.kernel.params:
            kind = MEMORY[param.dtype.name]
            const = "" if param.written else "const "
            self.line(f"{const}{kind}* const p_{param.name} = w.{_field(param.name)};")
        kind = self.index_type(True)
        for name in self.kernel.args:
            self.line(f"const {kind} a_{name} = ({kind})w.{_field(name)};")

    def chunk(self) -> None:
        """One thread per iteration of the root, or per pack of iterations."""
        root, kind = self.kernel.root, self.index_type(True)
        self.prologue()
        if self.ranged:
            self.line("const i32 thread = threadIdx.x, threads = blockDim.x;")
        else:
            self.line(f"const {kind} thread = ({kind})blockIdx.x * {BLOCK} + threadIdx.x;")
            self.line(f"const {kind} threads = ({kind})gridDim.x * {BLOCK};")
        self.scope = _Scope(shared=False)
        for let in self.kernel.lets:
            self.stmt(let)
        self.split_loop(root, tail=True)

    def rows(self) -> None:
        variant, root = self.variant, self.kernel.root
        lanes, kind = variant.lanes, self.index_type(True)
        self.prologue()
        per_block = variant.threads // lanes
        place = "begin" if self.ranged else f"({kind})blockIdx.x"
        if lanes > WARP:
            self.line(f"const {kind} lane = threadIdx.x, first_unit = {place};")
            if variant.warps:
                self.line(f"const {kind} warp = threadIdx.x / {WARP}, warp_lane = threadIdx.x % {WARP};")
        else:
            self.line(f"const {kind} lane = threadIdx.x % {lanes};")
            place = place if self.ranged else f"{place} * {per_block}"
            self.line(f"const {kind} first_unit = {place} + threadIdx.x / {lanes};")
            if 1 < lanes < WARP:
                self.line(f"const u32 mask = {(1 << lanes) - 1}u << (threadIdx.x % {WARP} / {lanes} * {lanes});")
            elif lanes == WARP:
                self.line("const u32 mask = ~0u;")
        if self.free and not self.ranged:
            self.line(f"const {kind} thread = ({kind})blockIdx.y * {lanes} + lane;")
            self.line(f"const {kind} threads = ({kind})gridDim.y * {lanes};")
        else:
            self.line(f"const {kind} thread = lane, threads = {min(lanes, self.width or lanes)};")
        for let in self.kernel.lets:
            self.stmt(let)
        units = "end" if self.ranged else self.extent(root.extent)
        index = self.fresh(root.index)
        step = f"({kind})gridDim.x * {per_block}"
        if self.ranged:
            step = "1" if lanes > WARP else f"({kind})(blockDim.x / {lanes})"
        with self.block(f"for ({kind} {index} = first_unit; {index} < {units}; {index} += {step})"):
            self.bind(root.index, index, True)
            with suppress(_PartWritten):
                self.body(root.body)

    # -- text --
    def line(self, text: str) -> None:
        self.lines.append("  " * self.depth + text)

    def fresh(self, name: str = "t") -> str:
        if not name.isidentifier():  # programs may come from files
            raise LowerError(f"cuda loops: {name!r} is not a valid name for a kernel value")
        self.count += 1
        return f"{name}_{self.count}"

    def named(self, text: str, kind: str) -> str:
        """Assigns a value to a new name."""
        name = self.fresh()
        self.line(f"const {kind} {name} = {text};")
        return name

    def bind(self, name: str, text: str, index: bool) -> None:
        self.names[name], self.indices[name] = text, index

    @contextmanager
    def block(self, head: str, scope: _Scope | None = None) -> Iterator[None]:
        """A block of C; names and values from inside do not escape."""
        saved = self.names, self.indices, self.memo, self.scope
        self.names, self.indices, self.memo = dict(self.names), dict(self.indices), {}
        self.scope = scope or self.scope
        self.line(f"{head} {{".lstrip())
        self.depth += 1
        yield
        self.depth -= 1
        self.line("}")
        self.names, self.indices, self.memo, self.scope = saved

    # -- synchronisation --
    def synchronise(self) -> None:
        lanes = self.team.lanes
        if lanes > WARP:
            threads = min(lanes, self.width or lanes)
            self.line(f"team_barrier({UNIT_BARRIER}, {threads});" if self.ranged else "__syncthreads();")
        elif lanes > 1:
            self.line(f"__syncwarp({self.team.mask});")
        self.pending = Effects()

    def order_after(self, touched: Effects) -> None:
        """Synchronises if what shared code does next conflicts with what threads did since they last did."""
        if self.variant.lanes > 1 and not self.free:
            if self.pending.conflicts(touched, distinct=self.variant.distinct):
                self.synchronise()
            self.pending |= touched

    # -- statements --
    def body(self, stmts: tuple[Stmt, ...]) -> None:
        """Statements in order; adjacent reductions over the same range share one loop."""
        at = 0
        while at < len(stmts):
            group = reduction_group(stmts[at:]) if self.scope.shared else []
            if group:
                self.order_after(effects(*stmts[at : at + len(group)]))
                results = self.reduce_shared([let.value for let in group if isinstance(let.value, Reduce)])
                for let, result in zip(group, results, strict=True):
                    self.bind(let.name, result, False)
            else:
                self.stmt(stmts[at])
            at += max(1, len(group))

    def stmt(self, stmt: Stmt) -> None:
        if self.scope.shared and not isinstance(stmt, For):
            self.order_after(effects(stmt))
        match stmt:
            case Let():
                self.let(stmt)
            case Var():
                name = self.fresh(stmt.name)
                self.line(f"{self.value_type(stmt.start.dtype)} {name} = {self.wide(stmt.start)};")
                self.bind(stmt.name, name, False)
                self.variables[name] = stmt.start.dtype
            case Assign():
                self.line(f"{self.names[stmt.name]} = {self.wide(stmt.value)};")
                self.memo = {}
            case Store():
                self.store(stmt)
                self.memo = {}
            case Check():
                failed = f"!{self.value(stmt.condition)}"
                with self.block(f"if ({self.lead()}{failed})"):
                    self.line(f"report(w.fault, (i32)w.launch, {int(stmt.code)});")
            case For() if id(stmt) in self.warp_loops and self.team.lanes > WARP:
                self.warp_loop(stmt)
                self.memo = {}
            case For() if stmt.vector and self.scope.shared:
                self.order_after(effects(stmt))
                self.split_loop(stmt)
                self.memo = {}
            case For():
                self.serial_loop(stmt)
                self.memo = {}

    def let(self, let: Let) -> None:
        text, index = self.value(let.value), self.is_index(let.value)
        name = self.fresh(let.name)
        self.line(f"const {self.type_of(let.value)} {name} = {text};")
        self.bind(let.name, name, index)
        if is_condition(let.value):
            self.conditions.add(name)

    def lead(self) -> str:
        """A condition that holds in one thread of shared code."""
        return f"{self.team.lane} == 0 && " if self.scope.shared and self.team.lanes > 1 else ""

    def store(self, stmt: Store) -> None:
        param = self.kernel.params[stmt.param]
        value = operations.cast(self.value(stmt.value), stmt.value.dtype, param.dtype)
        target = f"p_{param.name}[{self.address(stmt.at)}]"
        guard = self.lead().removesuffix(" && ")
        self.line(f"if ({guard}) {target} = {value};" if guard else f"{target} = {value};")

    def serial_loop(self, loop: For) -> None:
        """A loop in which every thread runs all iterations."""
        kind, extent = self.extent_type(loop.extent), self.extent(loop.extent)
        index, once = self.fresh(loop.index), extent in self.conditions
        touched = effects(loop) if self.scope.shared else Effects()
        repeats = touched.conflicts(touched, distinct=self.variant.distinct)
        if self.pending.conflicts(touched, distinct=self.variant.distinct):
            self.synchronise()
        before = self.pending  # still holds afterwards if there are no iterations
        if once:
            head, index = f"if ({extent})", "0"
        else:
            head = f"for ({kind} {index} = 0; {index} < {extent}; {index}++)"
            if self.scope.shared or weight(*loop.body) > LIGHT:
                self.line("#pragma unroll 1")
        with self.block(head):
            self.bind(loop.index, index, self.is_extent_index(loop.extent))
            self.body(loop.body)
            if repeats and not once:
                self.synchronise()  # the next iteration, or what follows, may touch the same memory
        self.pending = before if repeats and not once else before | touched

    def warp_loop(self, loop: For) -> None:
        """A serial loop whose iterations the warps of a unit split; then they combine what they accumulated."""
        accumulated = self.warp_loops[id(loop)].accumulated
        touched = effects(loop)
        if self.pending.conflicts(touched, distinct=self.variant.distinct):
            self.synchronise()
        before, team, totals = self.names, self.team, {name: self.fresh(name) for name in accumulated}
        kinds = {name: self.variables[self.names[name]] for name in accumulated}
        for name, op in accumulated.items():
            self.line(f"{self.value_type(kinds[name])} {totals[name]} = {operations.identity(op, kinds[name])};")
        kind, extent, index = self.extent_type(loop.extent), self.extent(loop.extent), self.fresh(loop.index)
        self.names, self.team, self.pending = self.names | totals, ONE_WARP, Effects()
        self.line("#pragma unroll 1")
        step = team.lanes // WARP
        with self.block(f"for ({kind} {index} = warp; {index} < {extent}; {index} += {step})"):
            self.bind(loop.index, index, self.is_extent_index(loop.extent))
            self.body(loop.body)
        self.names, self.team = before, team
        for at, name in enumerate(accumulated):
            value_type = self.value_type(kinds[name])
            self.line(f"if (warp_lane == 0) *({value_type}*)&slots[phase][{at}][warp] = {totals[name]};")
        self.synchronise()
        self.slots = max(self.slots, len(accumulated))
        for at, (name, op) in enumerate(accumulated.items()):
            reduced = f"reduce_slots<{team.lanes}, {operations.REDUCTIONS[op]}, {self.value_type(kinds[name])}>"
            combined = operations.combine(op, self.names[name], f"{reduced}(slots[phase][{at}])")
            self.line(f"{self.names[name]} = {combined};")
        if accumulated:
            self.line("phase ^= 1;")

    def split_loop(self, loop: For, *, tail: bool = False) -> None:
        """Splits the iterations of a vector loop over threads, in packs where possible."""
        packing = loop_packing(loop) if self.variant.pack > 1 else None
        thread, threads = self.team.thread, self.team.threads
        extent, kind = self.extent(loop.extent), self.extent_type(loop.extent)
        index, inside = self.is_extent_index(loop.extent), _Scope(shared=False)
        if packing is None:
            name = self.fresh(loop.index)
            with self.block(f"for ({kind} {name} = {thread}; {name} < {extent}; {name} += {threads})", inside):
                self.bind(loop.index, name, index)
                self.body(loop.body)
            return
        pack, first = self.variant.pack, self.fresh(loop.index)
        stop = self.named(f"{extent} / {pack} * {pack}", kind) if tail else extent
        step = f"{threads} * {pack}"
        if weight(loop) * pack <= LIGHT_PACK and len(packing.accesses) <= PAIRED_ACCESSES:
            self.line(f"{kind} {first} = {thread} * {pack};")
            with self.block(f"for (; {first} + {step} < {stop}; {first} += 2 * {step})", inside):
                second = self.named(f"{first} + {step}", kind)
                self.pack_body(loop, packing, [first, second])
            head = f"if ({first} < {stop})"
        else:
            head = f"for ({kind} {first} = {thread} * {pack}; {first} < {stop}; {first} += {step})"
        with self.block(head, inside):
            self.pack_body(loop, packing, [first])
        if tail:
            name = self.fresh(loop.index)
            with self.block(f"for ({kind} {name} = {stop} + {thread}; {name} < {extent}; {name} += {threads})", inside):
                self.bind(loop.index, name, index)
                self.body(loop.body)

    def pack_body(self, loop: For, packing: Packing, firsts: Sequence[str]) -> None:
        """The body of a vector loop for packs that begin at `firsts`: all loads, then the rest pack by pack."""
        loaded = []
        for first in firsts:
            self.bind(loop.index, first, self.is_extent_index(loop.extent))
            self.memo = {}
            loaded.append(self.load_packs(packing))
        for first, packs in zip(firsts, loaded, strict=True):
            self.bind(loop.index, first, self.is_extent_index(loop.extent))
            self.memo = {}
            self.pack_elements(loop, packing, first, packs)

    def pack_elements(self, loop: For, packing: Packing, first: str, packs: dict[Load, str]) -> None:
        """The iterations of a pack that has been loaded, and its stores."""
        pack, kind = self.variant.pack, self.extent_type(loop.extent)
        results: dict[int, str] = {}
        targets: dict[int, str] = {}
        for store in packing.stores:
            param = self.kernel.params[store.param]
            results[id(store)] = self.fresh("pack")
            targets[id(store)] = f"p_{param.name} + {self.address(store.at)}"
            self.line(f"Pack<{pack}, {MEMORY[param.dtype.name]}> {results[id(store)]};")
        element = self.fresh("e")
        self.line("#pragma unroll")
        with self.block(f"for (int {element} = 0; {element} < {pack}; {element}++)", _Scope(False, element, packs)):
            name = self.fresh(loop.index)
            self.line(f"const {kind} {name} = {first} + {element};")
            self.bind(loop.index, name, self.is_extent_index(loop.extent))
            for stmt in loop.body:
                if isinstance(stmt, Store) and id(stmt) in results:
                    param = self.kernel.params[stmt.param]
                    value = operations.cast(self.value(stmt.value), stmt.value.dtype, param.dtype)
                    self.line(f"{results[id(stmt)]}.v[{element}] = {value};")
                else:
                    self.stmt(stmt)
        for store in packing.stores:
            self.line(f"store_pack({targets[id(store)]}, {results[id(store)]});")

    def load_packs(self, packing: Packing) -> dict[Load, str]:
        packs: dict[Load, str] = {}
        for load in packing.loads:
            param = self.kernel.params[load.param]
            name, kind = self.fresh("pack"), MEMORY[param.dtype.name]
            pack = self.variant.pack
            self.line(
                f"const Pack<{pack}, {kind}> {name} = load_pack<{pack}>(p_{param.name} + {self.address(load.at)});"
            )
            packs[load] = name
        return packs

    # -- types --
    def index_type(self, index: bool) -> str:
        return "i32" if index and self.variant.narrow else "i64"

    def value_type(self, dtype: DType) -> str:
        return VALUE[dtype.name]

    def type_of(self, expr: Expr) -> str:
        return self.index_type(self.is_index(expr)) if expr.dtype is I64 else self.value_type(expr.dtype)

    def is_index(self, expr: Expr) -> bool:
        return is_index(expr, self.indices)

    def is_extent_index(self, extent: int | Arg | Ref) -> bool:
        return isinstance(extent, int) or self.is_index(extent)

    def extent_type(self, extent: int | Arg | Ref) -> str:
        return self.index_type(self.is_extent_index(extent))

    def extent(self, extent: int | Arg | Ref) -> str:
        return str(int(extent)) if isinstance(extent, int) else self.value(extent)

    def address(self, at: Place) -> str:
        """An offset in elements: indices are summed in their own type, data-dependent terms in 64 bits."""
        narrow, wide = [], []
        for expr, stride in at:
            factor = f"a_{stride.name}" if isinstance(stride, Arg) else str(int(stride))
            if self.is_index(expr):
                text = self.value(expr)
                narrow.append(text if factor == "1" else f"{text} * {factor}")
            else:
                wide.append(self.wide(expr) if factor == "1" else f"{self.wide(expr)} * (i64){factor}")
        total = " + ".join(narrow) or "0"
        if not wide:
            return f"({total})"
        return f"({' + '.join(wide)})" if total == "0" else f"((i64)({total}) + {' + '.join(wide)})"

    # -- expressions --
    def wide(self, expr: Expr) -> str:
        """A value; indices as 64-bit integers."""
        text = self.value(expr)
        return f"(i64){text}" if self.variant.narrow and self.is_index(expr) else text

    def value(self, expr: Expr) -> str:
        """The C text of an expression; shared and long ones get a name."""
        match expr:
            case Index() | Ref():
                return self.names[expr.name]
            case Arg():
                return f"a_{expr.name}"
            case Const():
                narrow = self.variant.narrow and self.is_index(expr)
                return operations.constant(expr.value, I32 if narrow else expr.dtype)
        if id(expr) in self.memo:
            return self.memo[id(expr)]
        text = self.computed(expr)
        if self.uses[id(expr)] > 1 or len(text) > LONGEST_TEXT:
            text = self.memo[id(expr)] = self.named(text, self.type_of(expr))
        return text

    def computed(self, expr: Expr) -> str:
        match expr:
            case Load():
                return self.load(expr)
            case Apply():
                return self.apply(expr)
            case Choose():
                return self.choose(expr)
            case Reduce() if self.scope.shared:
                return self.reduce_shared([expr])[0]
            case Reduce():
                return self.reduce_serial(expr)
            case Lookup():
                name = self.tables.setdefault(expr.table, f"table{len(self.tables)}_{self.entry}")
                return f"{name}[{self.value(expr.index)}]"
        raise AssertionError(f"{expr} is not an expression")

    def load(self, expr: Load) -> str:
        param = self.kernel.params[expr.param]
        if expr in self.scope.packs:
            text = f"{self.scope.packs[expr]}.v[{self.scope.element}]"
        else:
            text = f"p_{param.name}[{self.address(expr.at)}]"
        return f"({text} != 0)" if param.dtype is BOOL else text

    def apply(self, expr: Apply) -> str:
        kind = expr.args[1].dtype if expr.op == "select" else expr.args[0].dtype
        if self.variant.narrow:
            if expr.op == "cast" and expr.dtype is I64 and self.is_index(expr):
                return operations.cast(self.value(expr.args[0]), kind, I32)
            if expr.op == "cast" and kind is I64 and self.is_index(expr.args[0]):
                return operations.cast(self.value(expr.args[0]), I32, expr.dtype)
            if self.is_index(expr):
                return operations.index_arithmetic(expr.op, [self.value(a) for a in expr.args])
            if expr.op in operations.COMPARISONS and all(self.is_index(a) for a in expr.args):
                return operations.apply(expr.op, [self.value(a) for a in expr.args], I32, BOOL)
        return operations.apply(expr.op, [self.wide(a) for a in expr.args], kind, expr.dtype)

    def choose(self, expr: Choose) -> str:
        """Only the side taken is evaluated: as a conditional expression, or with statements in each branch."""
        condition = self.value(expr.condition)
        sides, before = [], self.pending
        for side in (expr.then, expr.other):
            self.pending = before
            saved, self.lines = self.lines, []
            memo, self.memo = self.memo, dict(self.memo)
            self.depth += 1
            text = self.value(side) if self.is_index(expr) else self.wide(side)
            self.depth -= 1
            sides.append((self.lines, text))
            self.lines, self.memo = saved, memo
        self.pending = before  # a side may synchronise, but is not always taken
        (then_lines, then), (other_lines, other) = sides
        if not then_lines and not other_lines:
            return f"({condition} ? {then} : {other})"
        name = self.fresh()
        self.line(f"{self.type_of(expr)} {name};")
        self.line(f"if ({condition}) {{")
        self.lines += [*then_lines, "  " * (self.depth + 1) + f"{name} = {then};"]
        self.line("} else {")
        self.lines += [*other_lines, "  " * (self.depth + 1) + f"{name} = {other};"]
        self.line("}")
        return name

    # -- reductions --
    def reduce_serial(self, expr: Reduce) -> str:
        """One thread reduces on its own, in index order."""
        kind, total = self.value_type(expr.dtype), self.fresh("total")
        self.line(f"{kind} {total} = {operations.identity(expr.op, expr.dtype)};")
        index, type_ = self.fresh(expr.index), self.extent_type(expr.extent)
        scope = replace(self.scope, shared=False)
        if weight(Let("", expr)) > LIGHT:
            self.line("#pragma unroll 1")
        with self.block(f"for ({type_} {index} = 0; {index} < {self.extent(expr.extent)}; {index}++)", scope):
            self.bind(expr.index, index, self.is_extent_index(expr.extent))
            self.line(f"{total} = {operations.combine(expr.op, total, self.wide(expr.value))};")
        return total

    def reduce_shared(self, group: Sequence[Reduce]) -> list[str]:
        """All threads of a unit reduce over one range: each its own part, in packs where possible, then together."""
        if self.variant.piece == "join":
            return self.join_parts(group)
        packing = reduction_packing(group) if self.variant.pack > 1 else None
        pack = self.variant.pack if packing is not None else 1
        thread, threads = self.team.thread, self.team.threads
        if self.width and WARP < self.width < self.team.lanes:
            turn = self.fresh("turn")
            self.line("#pragma unroll")
            with self.block(f"for (int {turn} = 0; {turn} < {self.team.lanes // self.width}; {turn}++)"):
                own = self.named(f"{thread} + {turn} * {self.width}", "int")
                totals = self.reduce_own(group, packing, pack, own, str(self.team.lanes))
                self.put_slots(group, totals, pack, own)
            return self.take_slots(group)
        totals = self.reduce_own(group, packing, pack, thread, threads)
        results = self.combine_threads(group, totals, pack)
        if self.variant.piece == "part":
            for at, (reduction, result) in enumerate(zip(group, results, strict=True)):
                kind = self.value_type(reduction.dtype)
                place = self.part_place("(i64)blockIdx.y", "(i64)gridDim.y", len(group), at)
                self.line(f"if (lane == 0) *({kind}*)(w.scratch + {place}) = {result};")
            raise _PartWritten
        return results

    def reduce_own(
        self, group: Sequence[Reduce], packing: Packing | None, pack: int, thread: str, threads: str
    ) -> list[str]:
        """The partial results of one thread of `threads`, by element of a pack."""
        extent, index_type = self.extent(group[0].extent), self.extent_type(group[0].extent)
        totals = [self.fresh("total") for _ in group]
        for reduction, total in zip(group, totals, strict=True):
            start = operations.identity(reduction.op, reduction.dtype)
            kind = self.value_type(reduction.dtype)
            self.line(f"{kind} {total}[{pack}] = {{{', '.join([start] * pack)}}};")
        first = self.fresh(group[0].index)
        step = f"{threads} * {pack}" if pack > 1 else threads
        start = f"{thread} * {pack}" if pack > 1 else thread
        if self.variant.piece == "part":
            begin = self.named(f"({index_type})blockIdx.y * {PART}", index_type)
            extent = self.named(f"smaller({extent}, {begin} + ({index_type}){PART})", index_type)
            start = f"{begin} + {start}"
        private = _Scope(shared=False)
        heavy = sum(weight(Let("", reduction)) for reduction in group) > LIGHT
        self.line(f"#pragma unroll {1 if heavy else 4}")
        with self.block(f"for ({index_type} {first} = {start}; {first} < {extent}; {first} += {step})", private):
            self.bind(group[0].index, first, self.is_extent_index(group[0].extent))
            if packing is None:
                self.accumulate(group, totals, "0")
            else:
                packs, element = self.load_packs(packing), self.fresh("e")
                self.line("#pragma unroll")
                with self.block(
                    f"for (int {element} = 0; {element} < {pack}; {element}++)", _Scope(False, element, packs)
                ):
                    name = self.fresh(group[0].index)
                    self.line(f"const {index_type} {name} = {first} + {element};")
                    self.bind(group[0].index, name, self.is_extent_index(group[0].extent))
                    self.accumulate(group, totals, element)
        return totals

    def part_place(self, part: str, parts: str, count: int, at: int) -> str:
        """Where a partial result is in scratch memory."""
        return f"8 * ((({self.names[self.kernel.root.index]} * {parts}) + {part}) * {count} + {at})"

    def join_parts(self, group: Sequence[Reduce]) -> list[str]:
        """Combines the partial results of the blocks of a unit."""
        parts = self.named(f"((i64){self.extent(group[0].extent)} + {PART - 1}) / {PART}", "i64")
        totals = [self.fresh("total") for _ in group]
        for reduction, total in zip(group, totals, strict=True):
            start = operations.identity(reduction.op, reduction.dtype)
            self.line(f"{self.value_type(reduction.dtype)} {total}[1] = {{{start}}};")
        part = self.fresh("part")
        with self.block(f"for (i64 {part} = thread; {part} < {parts}; {part} += threads)", _Scope(shared=False)):
            for at, (reduction, total) in enumerate(zip(group, totals, strict=True)):
                place = f"w.scratch + {self.part_place(part, parts, len(group), at)}"
                term = f"*(const {self.value_type(reduction.dtype)}*)({place})"
                self.line(f"{total}[0] = {operations.combine(reduction.op, f'{total}[0]', term)};")
        return self.combine_threads(group, totals, 1)

    def accumulate(self, group: Sequence[Reduce], totals: Sequence[str], element: str) -> None:
        for reduction, total in zip(group, totals, strict=True):
            combined = operations.combine(reduction.op, f"{total}[{element}]", self.wide(reduction.value))
            self.line(f"{total}[{element}] = {combined};")

    def combine_threads(self, group: Sequence[Reduce], totals: Sequence[str], pack: int) -> list[str]:
        """Combines the partial results of packs, then of threads, pairwise."""
        lanes, results = self.team.lanes, list[str]()
        if lanes > WARP:
            self.put_slots(group, totals, pack, "threadIdx.x")
            return self.take_slots(group)
        for reduction, total in zip(group, totals, strict=True):
            own, kind = self.combine_pack(reduction, total, pack), self.value_type(reduction.dtype)
            together = f"reduce_warp<{lanes}, {operations.REDUCTIONS[reduction.op]}, {kind}>({own}, {self.team.mask})"
            results.append(self.named(together if lanes > 1 else own, kind))
        return results

    def combine_pack(self, reduction: Reduce, total: str, pack: int) -> str:
        parts = [f"{total}[{i}]" for i in range(pack)]
        while len(parts) > 1:
            half = len(parts) // 2
            parts = [operations.combine(reduction.op, a, b) for a, b in zip(parts[:half], parts[half:], strict=True)]
        return parts[0]

    def put_slots(self, group: Sequence[Reduce], totals: Sequence[str], pack: int, thread: str) -> None:
        """Writes what the warp of a thread has reduced to shared memory."""
        for at, (reduction, total) in enumerate(zip(group, totals, strict=True)):
            own, kind = self.combine_pack(reduction, total, pack), self.value_type(reduction.dtype)
            op = operations.REDUCTIONS[reduction.op]
            self.line(f"reduce_to_slots<{op}, {kind}>({own}, slots[phase][{at}], {thread});")
        self.slots = max(self.slots, len(group))

    def take_slots(self, group: Sequence[Reduce]) -> list[str]:
        """Combines what the warps of a unit have reduced."""
        self.synchronise()
        results = []
        for at, reduction in enumerate(group):
            kind, op = self.value_type(reduction.dtype), operations.REDUCTIONS[reduction.op]
            results.append(self.named(f"reduce_slots<{self.team.lanes}, {op}, {kind}>(slots[phase][{at}])", kind))
        self.line("phase ^= 1;")
        return results


def _uses(kernel: LoopKernel) -> Counter[int]:
    """How many expressions or statements contain each expression, by id."""
    uses: Counter[int] = Counter()
    waiting = [v for stmt in (*kernel.lets, *statements(kernel.root)) for v in values(stmt)]
    while waiting:
        expr = waiting.pop()
        uses[id(expr)] += 1
        if uses[id(expr)] == 1:
            waiting += children(expr)
    return uses


RESERVED = {  # words of C++, and fields that every kernel has
    "and", "or", "not", "xor", "int", "long", "short", "char", "float", "double", "new", "delete", "this", "auto",
    "register", "union", "struct", "class", "const", "void", "bool", "true", "false", "for", "if", "else", "while",
    "do", "switch", "case", "default", "break", "continue", "return", "static", "extern", "signed", "unsigned",
    "template", "typename", "namespace", "operator", "private", "public", "protected", "using", "inline", "volatile",
    "mutable", "friend", "goto", "sizeof", "try", "throw", "catch", "enum", "export", "scratch", "fault", "launch",
}  # fmt: skip


def _field(name: str) -> str:
    """The field of the words for a parameter or argument."""
    if not name.isidentifier():
        raise LowerError(f"cuda loops: {name!r} is not a valid name for a kernel value")
    return f"{name}_" if name in RESERVED else name

"""The matmul generator: micro-kernels (register tiles), the loop nest that calls them, and packing of the right side.

In comes a `MatmulKernel` and a target, out comes an `Entry`. Sizes and strides are run-time words, so the micro-kernels
and the nest are shared by all shapes; every output element is one chain of multiply-adds over k in index order, so its
bits depend on nothing but its row of A and its column of B.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from rlx.backends.cpu.builder import Body, Builder, Module, Value, const, i64, intrinsic_suffix, scalar_of, vector
from rlx.backends.cpu.loops import dot
from rlx.backends.cpu.math import bfloat_to_float, half_to_float
from rlx.backends.cpu.routine import Entry, Routine
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import BF16, F16, F32, DType
from rlx.errors import LowerError
from rlx.lir.kernels import OUT_OF_RANGE, ROW_BLOCK, Blocks, MatmulKernel, TileOperand
from rlx.lir.loops import LoopKernel

CompileLoops = Callable[[LoopKernel, CpuTarget], Routine]

HEADER_BYTES = 64  # of scratch, owned by the driver
LINE = 64  # bytes of a cache line
SLAB = 512  # k steps of B that all tiles of a row block go over before the next ones: 128 KiB of an AVX-512 panel
CODES_SLAB = 1024  # the same of codes, of which a word has four
SLAB_UNIT = 16  # slabs of one panel are equally long but for this
STREAM_AHEAD = 16384  # bytes: how far ahead a panel is prefetched that only one tile of one or two rows reads
CACHED = 8 << 20  # bytes of B up to which it is likely in a cache: there the hardware prefetches better alone
WIDENING_TILES = 8  # tiles of a row block up to which each widens narrow panels again: beside FMAs that costs little
WIDENING_TILES_BASELINE = 2  # the same where products and sums, and conversions of f16, are several instructions
IN_PLACE_TILES = 2  # tiles of a row block up to which packing contiguous rows of B would not pay
WIDE_SLAB = 16  # k steps of a slab where many panels take turns at rows of B
WIDE_PANELS = 4  # the fewest panels for that

_SCALAR = {"f32": "float", "f64": "double", "i32": "i32"}  # of i32, words of A and B are four bytes each
WIDEN = {F16: half_to_float, BF16: bfloat_to_float}  # what panels may be stored as, where tiles are f32
_TILE_ARGUMENTS = (
    ("ptr noalias", "a"), ("i64", "lda"), ("ptr noalias", "b"), ("i64", "ldb"), ("i64", "k"),
    ("ptr noalias", "c"), ("i64", "ldc"), ("ptr", "ahead"), ("i64", "ahead_step"), ("i64", "accumulate"),
)  # fmt: skip
_ENTRY_ARGUMENTS = (("ptr noalias", "args"), ("i64", "lo"), ("i64", "hi"), ("ptr noalias", "scratch"))


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a target makes of one element type: `rows` × `vectors` registers are the largest tile."""

    dtype: DType
    lanes: int
    rows: int
    vectors: int
    most_rows: int = ROW_BLOCK  # of a row block
    stored: DType | None = None  # of panels, where that is narrower
    widening_tiles: int = WIDENING_TILES

    @property
    def scalar(self) -> str:
        return _SCALAR[self.dtype.name]

    @property
    def vector(self) -> str:
        return vector(self.lanes, self.scalar)

    @property
    def right(self) -> DType:
        """The type of B in memory."""
        return self.stored or self.dtype

    @property
    def right_scalar(self) -> str:
        return f"i{8 * self.stored.size}" if self.stored else self.scalar

    @property
    def panel(self) -> int:
        """Columns of a tile."""
        return self.lanes * self.vectors

    @property
    def step_bytes(self) -> int:
        """Bytes of a row of a tile, which are those of B that one k step reads where B is not narrower."""
        return self.panel * self.dtype.size

    @property
    def right_bytes(self) -> int:
        """Bytes of a panel that one k step reads."""
        return self.panel * self.right.size

    @property
    def block_rows(self) -> int:
        """Rows that a row block, which is whole tiles, has at most."""
        return -(-self.most_rows // self.rows) * self.rows


def geometry(kernel: MatmulKernel, target: CpuTarget) -> Geometry:
    dtype = kernel.dtype
    if dtype.name not in _SCALAR or (dtype.is_integer and not kernel.packed):
        raise LowerError(f"cpu matmul: no tiles of {dtype}", hint="widen the operands to f32 first")
    rows = kernel.blocks.tile_rows if kernel.blocks and kernel.blocks.tiles else target.tile_rows
    widening = WIDENING_TILES if target.has_fma else WIDENING_TILES_BASELINE
    size = target.lanes(dtype.size), rows, target.tile_vectors
    return Geometry(dtype, *size, kernel.row_block, kernel.stored, widening)


# -- what the rest of the backend asks for ----------------------------------------------------------------------------
def entry(kernel: MatmulKernel, target: CpuTarget, compile_loops: CompileLoops) -> Entry:
    """The nest of `kernel`, and what it calls by address.

    `tiles` are the micro-kernels by height, the first has one row; where B is not packed, its packing comes after them.
    Where panels are narrow, those that widen them come first, then those that do not, then what widens a panel.
    """
    if kernel.weights != 1 and not kernel.packed:
        raise LowerError("cpu matmul: two weights share a panel only when they are packed")
    whole = kernel.blocks is not None and kernel.blocks.tiles  # those have tiles of their own
    heights = range(0) if whole else range(1, target.tile_rows + 1)
    tiles = tuple(micro_kernel(kernel.dtype, h, target.tile_vectors, target, turned=kernel.turned) for h in heights)
    if kernel.stored is not None:
        if not kernel.packed or kernel.dtype is not F32 or kernel.stored not in WIDEN:
            hint = "only packed panels of f16 and bf16 are widened, to f32"
            raise LowerError(f"cpu matmul: no tiles of {kernel.dtype} times {kernel.stored}", hint=hint)
        form = geometry(kernel, target)
        narrow = (replace(form, rows=height) for height in heights)
        tiles = (*(_tile(each, target, turned=kernel.turned) for each in narrow), *tiles, _widening(form, target))
    tables = {"tiles": tiles if kernel.packed else (*tiles, _packing(geometry(kernel, target)))}
    if kernel.blocks is not None:
        tables["blocks"] = tuple(compile_loops(reader, target) for reader in kernel.blocks.kernels)
    if kernel.epilogue is not None:
        tables["epilogue"] = (compile_loops(kernel.epilogue, target),)
    return Entry(_nest(kernel, target), tables)


def panel_columns(kernel: MatmulKernel, target: CpuTarget) -> int:
    """Output columns that one panel covers."""
    return target.panel(kernel.dtype.size) // kernel.weights


def scratch_bytes(kernel: MatmulKernel, target: CpuTarget, k: int) -> int:
    """Scratch that a launch with this `k` needs, the driver's header included."""
    form = geometry(kernel, target)
    if kernel.blocks:
        block = kernel.blocks.storage.block
        packed = min(-(-k // block), _slab(kernel) // block) * kernel.blocks.unpacked_bytes * form.panel
    else:
        unpacked = not kernel.packed or kernel.stored is not None
        packed = 0 if not unpacked else min(-(-k // form.lanes) * form.lanes, SLAB) * form.step_bytes
    return _sums_end(form) + packed


def _slab(kernel: MatmulKernel) -> int:
    return CODES_SLAB if kernel.blocks and kernel.blocks.tiles else SLAB


def _sums_end(form: Geometry) -> int:
    return HEADER_BYTES + form.block_rows * form.step_bytes


# -- micro-kernels ----------------------------------------------------------------------------------------------------
def micro_kernel(dtype: DType, height: int, vectors: int, target: CpuTarget, *, turned: bool = False) -> Routine:
    """C[height][w] (+)= A[height][k] B[k][w], where w is `vectors` vectors; turned, A lies in memory as A[k][height].

    `tile(a, lda, b, ldb, k, c, ldc, ahead, ahead_step, accumulate)`: strides are in elements; sums start from C if
    `accumulate` is not 0. Each k step prefetches at `ahead`, which moves by `ahead_step` bytes.
    """
    return _tile(Geometry(dtype, target.lanes(dtype.size), height, vectors), target, turned=turned)


def _tile(form: Geometry, target: CpuTarget, *, turned: bool) -> Routine:
    """The micro-kernel of one geometry, which widens B if it is narrower."""
    types = f"{form.dtype}.{form.stored}" if form.stored else f"{form.dtype}"
    symbol = f"tile.{types}.{form.rows}x{form.vectors}{'.turned' if turned else ''}"
    left = _left_columns if turned else _left_rows

    def emit(module: Module) -> None:
        module.define(symbol, _TILE_ARGUMENTS, lambda b, *arguments: _emit_tile(b, form, target, left, *arguments))

    return Routine(symbol, emit)


# From (k step, how many of an unrolled loop are before it, row) to where that element of A is.
_Place = Callable[[Value, int, int], Value]
_Left = Callable[[Builder, Geometry, int, Value, Value], _Place]


def _left_rows(b: Builder, form: Geometry, unroll: int, a: Value, lda: Value) -> _Place:
    # Opaque to the loop strength reduction, which would rebuild these from each other inside the loop; the machine
    # scheduler then gathers the loads of equal bases, and the sums spill.
    rows = [_opaque(b, b.offset(a, b.mul(lda, i), form.scalar)) for i in range(form.rows)]
    return lambda at, u, i: b.offset(b.offset(rows[i], at, form.scalar), u, form.scalar)


def _left_columns(b: Builder, form: Geometry, unroll: int, a: Value, lda: Value) -> _Place:
    """The rows of a k step lie next to each other, so one address a step does."""
    steps = [i64(0), *(_opaque(b, b.mul(lda, u)) for u in range(1, unroll))]
    return lambda at, u, i: b.offset(b.offset(a, b.add(b.mul(at, lda), steps[u]), form.scalar), i, form.scalar)


def _emit_tile(
    b: Builder, form: Geometry, target: CpuTarget, left_side: _Left, a: Value, lda: Value, panel: Value, ldb: Value,
    k: Value, c: Value, ldc: Value, ahead: Value, ahead_step: Value, accumulate: Value,
) -> None:  # fmt: skip
    size, rows, vectors = form.dtype.size, range(form.rows), range(form.vectors)
    unroll = _unroll(form, target)
    cells = [
        b.offset(b.offset(c, b.mul(ldc, i), form.scalar), j * form.lanes, form.scalar) for i in rows for j in vectors
    ]
    a_place = left_side(b, form, unroll, a, lda)
    b_steps = [_opaque(b, b.mul(ldb, u * form.right.size)) for u in range(1, unroll + 1)]
    zeros = [const(form.vector, 0.0)] * len(cells)
    fresh = b.icmp("eq", accumulate, 0)
    start = b.when(fresh, lambda: zeros, lambda: [b.load(form.vector, cell, align=size) for cell in cells])

    def steps(count: int) -> Body:
        def body(at: Value, panel: Value, ahead: Value, *sums: Value) -> list[Value]:
            total = list(sums)
            for u in range(count):
                row = b.offset(panel, b_steps[u - 1]) if u else panel
                right = [_load_right(b, form, target, row, j) for j in vectors]
                for line in range(_lines_of_a_step(form) if u * form.right_bytes % LINE == 0 else 0):
                    b.prefetch(b.offset(ahead, line * LINE), locality=2)  # into L2
                ahead = b.offset(ahead, ahead_step)
                for i in rows:
                    left = b.splat(b.load(form.scalar, a_place(at, u, i), align=size), form.lanes)
                    for j in vectors:
                        cell = i * form.vectors + j
                        total[cell] = _multiply_add(b, target, left, right[j], total[cell])
            return [b.offset(panel, b_steps[count - 1]), ahead, *total]

        return body

    whole = b.op("and", k, i64(-unroll))
    state = b.loop(0, whole, unroll, steps(unroll), [panel, ahead, *start])
    state = b.loop(whole, k, 1, steps(1), state)
    for cell, total in zip(cells, state[2:], strict=True):
        b.store(total, cell, align=size)


def _unroll(form: Geometry, target: CpuTarget) -> int:
    """K steps of one iteration, few enough that sums do not spill."""
    if form.stored and target.arch == "aarch64" and form.rows > 4:
        return 1  # of more steps the scheduler widens all vectors first
    return 4 if target.has_fma else 2  # without FMA a product needs a register of its own


def _load_right(b: Builder, form: Geometry, target: CpuTarget, row: Value, j: int) -> Value:
    """Vector `j` of a row of B, widened if it is stored narrow."""
    place = b.offset(row, j * form.lanes, form.right_scalar)
    found = b.load(vector(form.lanes, form.right_scalar), place, align=form.right.size)
    return found if form.stored is None else WIDEN[form.stored](b, found, target)


def _opaque(b: Builder, value: Value) -> Value:
    return b.assign(value.type, f"freeze {value}")


def _lines_of_a_step(form: Geometry) -> int:
    """Cache lines that one k step prefetches.

    The tiles of a block together fetch the next slab, all of it: with half of its lines the hardware prefetchers lose
    track, which is worse than none. Low tiles are as fast as memory; there one line in four opens pages ahead of time.
    """
    return max(1, form.right_bytes // LINE // (4 if form.rows <= 2 else 2))


def _multiply_add(b: Builder, target: CpuTarget, x: Value, y: Value, total: Value) -> Value:
    if scalar_of(total.type) == "i32":
        return dot(b, total, x, y, target, small=False)
    if target.has_fma:
        return b.intrinsic("fma", x, y, total)
    return b.op("fadd", b.op("fmul", x, y), total)


# -- the nest ---------------------------------------------------------------------------------------------------------
def _nest(kernel: MatmulKernel, target: CpuTarget) -> Routine:
    """The loops over units, K slabs and tiles; what the epilogue computes is behind an address, so nests are shared."""
    form = geometry(kernel, target)
    operands = "".join(f".{o.dtype.size}{'c' if o.columns else 'r'}" for o in kernel.tile)
    finish = "epilogue" if kernel.epilogue else "copy"
    right = "panels" if kernel.packed else "rows"
    if kernel.blocks:
        right = f"{kernel.blocks.storage}{'.int' if kernel.blocks.tiles else ''}"
    elif kernel.stored:  # of which the nest knows the size alone
        right = f"panels.{form.right_scalar}"
    turned = ".turned" if kernel.turned else ""
    groups = f".{kernel.grouped}.{kernel.index}" if kernel.grouped else ""
    symbol = f"matmul_nest.{kernel.dtype}{turned}.{right}.{kernel.weights}.{finish}{operands}{groups}"

    def emit(module: Module) -> None:
        module.define(symbol, _ENTRY_ARGUMENTS, lambda b, *arguments: _Nest(b, kernel, form, *arguments).emit())

    return Routine(symbol, emit)


@dataclass(frozen=True, slots=True)
class _Block:
    """A row block of one batch: `count` tiles, the first of which starts at `first_row`; pointers are the batch's."""

    first_tile: Value
    last_tile: Value
    count: Value
    first_row: Value
    a: Value
    b: Value
    operands: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class _Stripe:
    """One panel and one piece of K (a slab): valid output columns, and pointers moved to the first of them."""

    columns: Value
    b: Value
    operands: tuple[Value, ...]
    sums: Value
    start: Value
    length: Value
    whole_k: Value
    last: Value


@dataclass(frozen=True, slots=True)
class _Right:
    """Where tiles read B, and what they prefetch: `ahead` moves by `step` bytes a k step and by `move` a tile."""

    b: Value
    ldb: Value
    ahead: Value
    step: Value
    move: Value
    tiles: Value | None = None  # the table of the tiles that multiply, where it is not the kernel's


class _Nest:
    """Writes one nest: the methods are its loops, from the outermost to the tile."""

    def __init__(
        self, b: Builder, kernel: MatmulKernel, form: Geometry, args: Value, lo: Value, hi: Value, scratch: Value
    ) -> None:
        self.b, self.kernel, self.form = b, kernel, form
        self.lo, self.hi, self.scratch = lo, hi, scratch
        places = (f"ptr{i}" for i in range(len(kernel.tile)))
        pointers = {"tiles", "epilogue", "blocks", "a", "b", "index", *places}
        self.word = {
            name: b.load("ptr" if name in pointers else "i64", b.offset(args, 8 * i), align=8)
            for i, name in enumerate(kernel.words)
        }
        self.sums = b.offset(scratch, HEADER_BYTES)
        self.packed = b.offset(scratch, _sums_end(form))
        self.columns = form.panel // kernel.weights
        self.panels = b.ceil_div(self.word["n"], self.columns)
        self.k = self.word["k"]
        self.left_steps = (i64(1), self.word["a_row"]) if kernel.turned else (self.word["a_row"], i64(1))  # rows, k
        if kernel.grouped != "rows":
            self._cut_rows(self.word["m"])
        if kernel.epilogue is not None:
            self.epilogue_args = b.stack("i64", len(kernel.epilogue.words))
            for i in range(len(kernel.tile)):
                self._store_arg(2 + len(kernel.tile) + i, self.word[f"row{i}"])
        if kernel.blocks is not None:
            self.block_args = b.stack("i64", 7)
        if not kernel.packed:
            self.memo = b.stack("i64", 2)  # address and columns of what the packed panel in scratch was made from
            b.store(i64(0), self.memo, align=8)
            b.store(i64(0), b.offset(self.memo, 8), align=8)

    def emit(self) -> None:
        b = self.b
        last = b.sdiv(b.add(self.hi, b.sub(self.panels, 1)), self.panels)
        block = self.rows_by_group if self.kernel.grouped == "rows" else self.row_block
        b.loop(b.sdiv(self.lo, self.panels), last, 1, block)

    def _cut_rows(self, m: Value) -> None:
        """How so many rows are cut into tiles."""
        b, blocks = self.b, self.kernel.blocks
        self.m, self.tiles = m, b.ceil_div(m, self.form.rows)
        self.short = b.sdiv(m, self.tiles)  # rows of a tile; the first `longer` tiles have one more
        self.longer = b.srem(m, self.tiles)
        if blocks is not None:
            self.few = b.icmp("sle", m, len(blocks.dots))

    def rows_by_group(self, index: Value) -> None:
        """One row block, run by run: rows that follow each other and have the same matrix go together."""
        b, word = self.b, self.word
        first, end = (b.sdiv(b.mul(word["m"], i), word["row_blocks"]) for i in (index, b.add(index, 1)))

        def row(at: Value, start: Value) -> list[Value]:
            group = self._index(start)
            other = b.icmp("ne", self._index(b.min(at, b.sub(end, 1))), group)
            ends = b.op("or", b.icmp("eq", at, end), other)
            b.when(ends, lambda: self.run(index, start, b.sub(at, start), group))
            return [b.select(ends, at, start)]

        b.loop(b.add(first, 1), b.add(end, 1), 1, row, [first])

    def _index(self, at: Value) -> Value:
        b, size = self.b, self.kernel.index.size
        found = b.load(f"i{8 * size}", b.offset(self.word["index"], at, f"i{8 * size}"), align=size)
        return b.convert("sext", found, "i64")

    def run(self, index: Value, start: Value, count: Value, group: Value) -> None:
        """All panels in [lo, hi) of some rows that have one matrix."""
        b, word = self.b, self.word

        def multiply() -> None:
            self._cut_rows(count)
            rows = _Block(
                first_tile=i64(0),
                last_tile=self.tiles,
                count=self.tiles,
                first_row=i64(0),
                a=b.offset(word["a"], b.mul(start, self.left_steps[0]), self.form.scalar),
                b=b.offset(word["b"], b.mul(group, word["b_batch0"]), self.form.right_scalar),
                operands=tuple(
                    b.offset(word[f"ptr{i}"], b.mul(start, word[f"row{i}"]), _unit(o))
                    for i, o in enumerate(self.kernel.tile)
                ),
            )
            self.panels_of(index, rows)

        known = b.icmp("ult", group, word["groups"])
        b.when(known, multiply, lambda: b.store(i64(OUT_OF_RANGE), self.scratch, align=8))

    def row_block(self, index: Value) -> None:
        """All panels of one row block of one batch that are in [lo, hi): a run of consecutive units."""
        b, word = self.b, self.word
        batch, block = b.sdiv(index, word["row_blocks"]), b.srem(index, word["row_blocks"])
        outer, inner = b.sdiv(batch, word["batch1"]), b.srem(batch, word["batch1"])
        first = b.sdiv(b.mul(self.tiles, block), word["row_blocks"])
        last = b.sdiv(b.mul(self.tiles, b.add(block, 1)), word["row_blocks"])

        def moved(pointer: str, strides: tuple[str, str], unit: str) -> Value:
            steps = b.add(b.mul(outer, word[strides[0]]), b.mul(inner, word[strides[1]]))
            return b.offset(word[pointer], steps, unit)

        rows = _Block(
            first_tile=first,
            last_tile=last,
            count=b.sub(last, first),
            first_row=b.add(b.mul(first, self.short), b.min(first, self.longer)),
            a=moved("a", ("a_batch0", "a_batch1"), self.form.scalar),
            b=moved("b", ("b_batch0", "b_batch1"), self.form.right_scalar),
            operands=tuple(
                moved(f"ptr{i}", (f"outer{i}", f"inner{i}"), _unit(o)) for i, o in enumerate(self.kernel.tile)
            ),
        )
        if self.kernel.grouped == "depth":
            start = self._index(batch)
            self.k = b.sub(self._index(b.add(batch, 1)), start)
            a = b.offset(rows.a, b.mul(start, self.left_steps[1]), self.form.scalar)
            rows = replace(rows, a=a, b=b.offset(rows.b, b.mul(start, word["b_k"]), self.form.scalar))
        self.panels_of(index, rows)

    def panels_of(self, index: Value, rows: _Block) -> None:
        """The panels of a row block that are in [lo, hi)."""
        b = self.b
        before = b.mul(index, self.panels)
        low = b.sub(b.max(self.lo, before), before)
        high = b.min(b.sub(self.hi, before), self.panels)
        group, depth = self._cut(rows, b.sub(high, low))
        slabs = b.max(b.sdiv(b.add(self.k, b.sub(depth, 1)), depth), 1)
        even = b.sdiv(b.add(self.k, b.sub(slabs, 1)), slabs)
        unit = self.kernel.blocks.storage.block if self.kernel.blocks else SLAB_UNIT
        step = b.op("and", b.add(even, unit - 1), i64(-unit))

        def panels(first: Value) -> None:
            end = b.min(b.add(first, group), high)
            b.loop(0, slabs, 1, lambda slab: slab_of_panels(first, end, slab))

        def slab_of_panels(first: Value, end: Value, slab: Value) -> None:
            b.loop(first, end, 1, lambda panel: self.stripe(rows, first, panel, slab, slabs, step))

        b.loop(low, high, group, panels)

    def _cut(self, rows: _Block, panels: Value) -> tuple[Value, Value]:
        """How many panels take turns at a slab, and how many k steps a slab has at most.

        One panel after the other as a rule. But where few tiles read long columns of B in place, short pieces of many
        panels take turns: going down a column touches a page a step, more than there are entries for.
        """
        b = self.b
        if self.kernel.packed:  # a single tile would read nothing twice
            alone = self.few if self.kernel.blocks else b.icmp("eq", rows.count, 1)
            return i64(1), b.select(alone, b.max(self.k, 1), i64(_slab(self.kernel)))
        large = b.op("and", b.icmp("sge", panels, WIDE_PANELS), b.icmp("sgt", self.k, SLAB))
        wide = b.op("and", self._in_place(rows), large)
        return b.select(wide, i64(self._group()), i64(1)), b.select(wide, i64(WIDE_SLAB), i64(SLAB))

    def _group(self) -> int:
        """Panels whose sums fit in scratch together, where B is read in place."""
        return self.form.block_rows // (self.form.rows * IN_PLACE_TILES)

    def _in_place(self, rows: _Block) -> Value:
        b = self.b
        return b.op("and", b.icmp("sle", rows.count, IN_PLACE_TILES), b.icmp("eq", self.word["b_n"], 1))

    def stripe(self, rows: _Block, first: Value, panel: Value, slab: Value, slabs: Value, step: Value) -> None:
        """All tiles of the row block, over one slab of one panel."""
        b, word, form = self.b, self.word, self.form
        column = b.mul(panel, self.columns)
        before = b.mul(panel, b.mul(word["k"], form.panel)) if self.kernel.packed else b.mul(column, word["b_n"])
        here = b.offset(rows.b, before, form.right_scalar)
        if self.kernel.blocks is not None:
            here = b.offset(rows.b, b.mul(panel, self._block_bytes(self.kernel.blocks, word["k"])))
        start = b.mul(slab, step)
        stripe = _Stripe(
            columns=b.min(b.sub(word["n"], column), self.columns),
            b=here,
            operands=tuple(
                b.offset(pointer, column, _unit(o)) if o.columns else pointer
                for pointer, o in zip(rows.operands, self.kernel.tile, strict=True)
            ),
            sums=b.offset(self.sums, b.mul(b.sub(panel, first), IN_PLACE_TILES * form.rows * form.panel), form.scalar),
            start=start,
            length=b.min(b.sub(self.k, start), step),
            whole_k=b.icmp("eq", slabs, 1),
            last=b.icmp("eq", b.add(slab, 1), slabs),
        )
        if self.kernel.epilogue is not None:
            self._store_arg(1 + len(self.kernel.tile), stripe.columns)
        if self.kernel.blocks is not None:
            blocks = self.kernel.blocks
            many = self.each_tile_of_codes if blocks.tiles else self.each_tile_of_numbers
            b.when(self.few, lambda: self.dot(rows, stripe, blocks), lambda: many(rows, stripe, blocks))
        else:
            right = self._narrow_panel if self.kernel.stored else self._panel if self.kernel.packed else self._rows
            self.each_tile(rows, stripe, right(rows, stripe))

    def _block_bytes(self, blocks: Blocks, k: Value) -> Value:
        """Bytes of a panel over `k` steps."""
        return self.b.mul(self.b.sdiv(k, blocks.storage.block), blocks.storage.size * self.form.panel)

    def _call_blocks(self, which: Value, kernel: LoopKernel, count: Value, *pointers: Value) -> None:
        """A kernel of the table, over `count` blocks: `kernel` is one like it. Each pointer is read in two ways."""
        b, (panel, x, out) = self.b, pointers
        for i, word in enumerate((panel, panel, x, x, out, count, self.word["a_row"])):
            b.store(word, b.offset(self.block_args, 8 * i), align=8)
        assert isinstance(kernel.root.extent, int)
        function = b.load("ptr", b.offset(self.word["blocks"], b.mul(which, 8)), align=8)
        b.call_pointer(function, self.block_args, i64(0), i64(kernel.root.extent), self.scratch)

    def _unpack(self, stripe: _Stripe, blocks: Blocks) -> Value:
        """The blocks of a slab in scratch, as numbers or as codes; how many there are."""
        b = self.b
        count = b.sdiv(stripe.length, blocks.storage.block)
        here = b.offset(stripe.b, self._block_bytes(blocks, stripe.start))
        self._call_blocks(i64(0), blocks.unpack, count, here, self.packed, self.packed)
        return count

    def each_tile_of_numbers(self, rows: _Block, stripe: _Stripe, blocks: Blocks) -> None:
        """Packed weights as panels of numbers in scratch, made anew for each slab."""
        self._unpack(stripe, blocks)
        self.each_tile(rows, stripe, _Right(self.packed, i64(self.form.panel), self.packed, i64(0), i64(0)))

    def each_tile_of_codes(self, rows: _Block, stripe: _Stripe, blocks: Blocks) -> None:
        """Packed weights as codes in scratch, and rows of activations, of which a block is so many words."""
        b, form, word = self.b, self.form, self.word
        count = self._unpack(stripe, blocks)
        k_words = b.sdiv(b.mul(stripe.start, blocks.x_words), blocks.storage.block)
        b.when(b.icmp("eq", stripe.start, 0), lambda: self._clear(stripe, self._rows_of(rows)))
        lowest = blocks.tile_rows - len(blocks.tiles) + 1
        fetch = self._next_slab(rows, stripe, blocks)

        def tile(index: Value, row: Value) -> list[Value]:
            height = b.add(self.short, b.assign("i64", f"zext {b.icmp('slt', index, self.longer)} to i64"))
            sums = b.offset(stripe.sums, b.mul(b.sub(row, rows.first_row), form.panel), form.scalar)
            x = b.offset(rows.a, b.add(b.mul(row, word["a_row"]), k_words), form.scalar)
            fetch(b.sub(index, rows.first_tile))
            which = b.add(height, 1 + len(blocks.dots) - lowest)
            self._call_blocks(which, blocks.tiles[0], count, self.packed, x, sums)
            b.when(stripe.last, lambda: self.finish(stripe, row, height, sums))
            return [b.add(row, height)]

        b.loop(rows.first_tile, rows.last_tile, 1, tile, [rows.first_row])

    def _next_slab(self, rows: _Block, stripe: _Stripe, blocks: Blocks) -> Callable[[Value], None]:
        """Prefetches a share of what is taken apart after this slab, for the tile of a number."""
        b, end = self.b, self.b.add(stripe.start, stripe.length)
        here = b.offset(stripe.b, self._block_bytes(blocks, end))  # in this panel or the next
        length = self._block_bytes(blocks, stripe.length)
        share = b.mul(b.add(b.sdiv(length, b.mul(b.max(rows.count, 1), LINE)), 1), LINE)

        def fetch(tile: Value) -> None:
            start = b.mul(tile, share)
            b.loop(start, b.add(start, share), LINE, lambda at: b.prefetch(b.offset(here, at), locality=2))

        return fetch

    def _rows_of(self, rows: _Block) -> Value:
        b = self.b
        end = b.add(b.mul(rows.last_tile, self.short), b.min(rows.last_tile, self.longer))
        return b.sub(end, rows.first_row)

    def dot(self, rows: _Block, stripe: _Stripe, blocks: Blocks) -> None:
        """A few rows times packed weights, with no way through memory: the same chains over k as a tile's."""
        m = self.m
        self._clear(stripe, m)
        count = self.b.sdiv(self.word["k"], blocks.storage.block)
        self._call_blocks(m, blocks.dots[0], count, stripe.b, rows.a, stripe.sums)
        self.finish(stripe, i64(0), m, stripe.sums)

    def _clear(self, stripe: _Stripe, rows: Value) -> None:
        b, form = self.b, self.form

        def clear(cell: Value) -> None:
            place = b.offset(stripe.sums, b.mul(cell, form.lanes), form.scalar)
            b.store(const(form.vector, 0.0), place, align=form.dtype.size)

        b.loop(0, b.mul(rows, form.vectors), 1, clear)

    def _panel(self, rows: _Block, stripe: _Stripe) -> _Right:
        """B in panels: the next slab, of this panel or the next one, follows in memory; all tiles prefetch a share."""
        b, form = self.b, self.form
        here = b.offset(stripe.b, b.mul(stripe.start, form.panel), form.right_scalar)
        following = b.offset(here, b.mul(stripe.length, form.panel), form.right_scalar)
        alone = b.icmp("eq", rows.count, 1)
        high = b.icmp("sgt", self.short, 2)
        near = b.icmp("sle", b.mul(self.panels, b.mul(self.k, form.right_bytes)), CACHED)
        ahead = b.select(alone, b.select(near, here, b.offset(here, STREAM_AHEAD)), following)
        count = b.max(rows.count, 1)
        share = b.sdiv(b.add(b.sub(count, 1), form.right_bytes), count)
        step = b.select(b.op("and", alone, b.op("or", high, near)), i64(0), share)
        return _Right(here, i64(form.panel), ahead, step, b.mul(step, stripe.length))

    def _narrow_panel(self, rows: _Block, stripe: _Stripe) -> _Right:
        """B in narrow panels: a few tiles widen what they load, more read what was widened once for all of them."""
        b, tiles, heights = self.b, self.word["tiles"], self.form.rows
        right = self._panel(rows, stripe)

        def widened() -> list[Value]:
            widen = b.load("ptr", b.offset(tiles, 8 * 2 * heights), align=8)
            b.call_pointer(widen, right.b, stripe.length, self.packed)
            return [self.packed, b.offset(tiles, 8 * heights)]

        few = b.icmp("sle", rows.count, self.form.widening_tiles)
        panel, table = b.when(few, lambda: [right.b, tiles], widened)
        return replace(right, b=panel, tiles=table)

    def _rows(self, rows: _Block, stripe: _Stripe) -> _Right:
        """B that is not panels: read in place if that is worth it, else packed, unless it is in scratch already."""
        b, form, word = self.b, self.form, self.word
        here = b.offset(stripe.b, b.mul(stripe.start, word["b_k"]), form.scalar)
        row_bytes = b.mul(word["b_k"], form.dtype.size)
        whole = b.icmp("eq", stripe.columns, form.panel)

        def in_place() -> list[Value]:
            return [here, word["b_k"], b.offset(here, b.mul(row_bytes, WIDE_SLAB)), row_bytes, i64(0)]

        def packed() -> list[Value]:
            address = b.convert("ptrtoint", here, "i64")
            same = b.icmp("eq", b.load("i64", self.memo, align=8), address)
            wide = b.icmp("eq", b.load("i64", b.offset(self.memo, 8), align=8), stripe.columns)
            held = b.op("and", b.op("and", same, wide), stripe.whole_k)

            def pack() -> None:
                packing = b.load("ptr", b.offset(word["tiles"], 8 * form.rows), align=8)
                strides = (word["b_k"], word["b_n"])
                b.call_pointer(packing, here, *strides, stripe.length, stripe.columns, self.packed)
                made = address
                if self.kernel.grouped == "depth":  # what comes after nothing has the same address
                    made = b.select(b.icmp("sgt", stripe.length, 0), address, i64(0))
                b.store(made, self.memo, align=8)
                b.store(stripe.columns, b.offset(self.memo, 8), align=8)

            b.when(held, lambda: None, pack)
            following = b.offset(here, b.mul(row_bytes, stripe.length))
            after = b.offset(stripe.b, form.panel, form.scalar)
            ahead = b.select(stripe.last, after, following)
            return [self.packed, i64(form.panel), ahead, row_bytes, i64(_lines_of_a_step(form) * LINE)]

        return _Right(*b.when(b.op("and", whole, self._in_place(rows)), in_place, packed))

    def each_tile(self, rows: _Block, stripe: _Stripe, right: _Right) -> None:
        """The tiles; after the last slab each one is finished while it is in cache."""
        b, form, word = self.b, self.form, self.word
        accumulate = b.assign("i64", f"zext {b.icmp('sgt', stripe.start, 0)} to i64")
        row_step, k_step = self.left_steps
        a_start = b.offset(rows.a, b.mul(stripe.start, k_step), form.scalar)
        direct = None
        if self.kernel.epilogue is None:
            direct = b.op("and", stripe.whole_k, b.icmp("eq", stripe.columns, form.panel))

        def tile(index: Value, row: Value, ahead: Value) -> list[Value]:
            height = b.add(self.short, b.assign("i64", f"zext {b.icmp('slt', index, self.longer)} to i64"))
            above = b.select(stripe.whole_k, i64(0), b.sub(row, rows.first_row))
            sums = b.offset(stripe.sums, b.mul(above, form.panel), form.scalar)
            result, stride = sums, i64(form.panel)
            if direct is not None:
                place = b.offset(stripe.operands[0], b.mul(row, word["row0"]), form.scalar)
                result = b.select(direct, place, sums)
                stride = b.select(direct, word["row0"], stride)
            table = word["tiles"] if right.tiles is None else right.tiles
            multiply = b.load("ptr", b.offset(table, b.mul(b.sub(height, 1), 8)), align=8)
            step = right.step
            if not self.kernel.packed:
                fetching = -(-form.step_bytes // (_lines_of_a_step(form) * LINE))  # tiles that fetch a whole slab
                step = b.select(b.icmp("slt", b.sub(index, rows.first_tile), fetching), step, i64(0))
            left = (b.offset(a_start, b.mul(row, row_step), form.scalar), word["a_row"])
            fetch = (ahead, step, accumulate)
            b.call_pointer(multiply, *left, right.b, right.ldb, stripe.length, result, stride, *fetch)
            done = stripe.last if direct is None else b.op("and", stripe.last, b.op("xor", direct, Value("i1", "true")))
            b.when(done, lambda: self.finish(stripe, row, height, sums))
            return [b.add(row, height), b.offset(ahead, right.move)]

        b.loop(rows.first_tile, rows.last_tile, 1, tile, [rows.first_row, right.ahead])

    def finish(self, stripe: _Stripe, row: Value, height: Value, sums: Value) -> None:
        """Take the sums of one tile out of scratch: through the epilogue, or as they are."""
        b, word = self.b, self.word
        places = [
            b.offset(pointer, b.mul(row, word[f"row{i}"]), _unit(o))
            for i, (pointer, o) in enumerate(zip(stripe.operands, self.kernel.tile, strict=True))
        ]
        if self.kernel.epilogue is None:
            _copy_tile(b, self.form, sums, places[0], word["row0"], height, stripe.columns)
            return
        for i, pointer in enumerate([sums, *places]):
            self._store_arg(i, pointer)
        # Of scratch the epilogue may use the driver's header only: the rest holds sums.
        b.call_pointer(word["epilogue"], self.epilogue_args, i64(0), height, self.scratch)

    def _store_arg(self, index: int, value: Value) -> None:
        self.b.store(value, self.b.offset(self.epilogue_args, 8 * index), align=8)


def _unit(operand: TileOperand) -> str:
    """An LLVM type as large as an element of the operand."""
    return f"i{8 * operand.dtype.size}"


def _copy_tile(
    b: Builder, form: Geometry, sums: Value, result: Value, stride: Value, rows: Value, columns: Value
) -> None:
    """Rows of a tile to the result, `columns` of each; only the vector at the edge is masked, since that is slow."""
    whole = b.op("and", columns, i64(-form.lanes))
    edge = b.lane_mask(b.sub(columns, whole), form.lanes)
    ragged = b.icmp("ne", whole, columns)

    def row(i: Value) -> None:
        source = b.offset(sums, b.mul(i, form.panel), form.scalar)
        target = b.offset(result, b.mul(i, stride), form.scalar)

        def value(at: Value) -> Value:
            return b.load(form.vector, b.offset(source, at, form.scalar), align=form.dtype.size)

        def copy(at: Value) -> None:
            b.store(value(at), b.offset(target, at, form.scalar), align=form.dtype.size)

        def copy_edge() -> None:
            _masked_store(b, value(whole), b.offset(target, whole, form.scalar), edge)

        b.loop(0, whole, form.lanes, copy)
        b.when(ragged, copy_edge)

    b.loop(0, rows, 1, row)


def _column_masks(b: Builder, form: Geometry, columns: Value) -> list[Value]:
    return [b.lane_mask(b.sub(columns, j * form.lanes), form.lanes) for j in range(form.vectors)]


def _masked_load(b: Builder, type_: str, pointer: Value, mask: Value) -> Value:
    """A vector with zeros where the mask is off; those lanes are not read."""
    return b.call(type_, f"llvm.masked.load.{intrinsic_suffix(type_)}.p0", pointer, mask, const(type_, 0.0))


def _masked_store(b: Builder, value: Value, pointer: Value, mask: Value) -> None:
    b.call("void", f"llvm.masked.store.{intrinsic_suffix(value.type)}.p0", value, pointer, mask)


# -- widening ---------------------------------------------------------------------------------------------------------
def _widening(form: Geometry, target: CpuTarget) -> Routine:
    """`widen(b, k, panel)`: panel[k][panel] from a narrow panel, whose rows follow each other."""
    symbol = f"widen_panel.{form.dtype}.{form.stored}.{form.vectors}"
    arguments = (("ptr noalias", "b"), ("i64", "k"), ("ptr noalias", "panel"))

    def body(b: Builder, source: Value, k: Value, panel: Value) -> None:
        def row(i: Value) -> None:
            at = b.mul(i, form.panel)
            here, there = b.offset(source, at, form.right_scalar), b.offset(panel, at, form.scalar)
            for j in range(form.vectors):
                value = _load_right(b, form, target, here, j)
                b.store(value, b.offset(there, j * form.lanes, form.scalar), align=form.dtype.size)

        b.loop(0, k, 1, row)

    return Routine(symbol, lambda module: module.define(symbol, arguments, body))


# -- packing ----------------------------------------------------------------------------------------------------------
def _packing(form: Geometry) -> Routine:
    """`pack(b, b_k, b_n, k, columns, panel)`: panel[k][panel] from strided B, zeros in the columns past `columns`."""
    symbol = f"pack_panel.{form.dtype}.{form.vectors}"
    arguments = (
        ("ptr noalias", "b"), ("i64", "b_k"), ("i64", "b_n"), ("i64", "k"), ("i64", "columns"),
        ("ptr noalias", "panel"),
    )  # fmt: skip

    def body(b: Builder, source: Value, b_k: Value, b_n: Value, k: Value, columns: Value, panel: Value) -> None:
        b.when(
            b.icmp("eq", b_n, 1),
            lambda: _pack_rows(b, form, source, b_k, k, columns, panel),
            lambda: b.when(
                b.icmp("eq", b_k, 1),
                lambda: _pack_transposed(b, form, source, b_n, k, columns, panel),
                lambda: _pack_elements(b, form, source, b_k, b_n, k, columns, panel),
            ),
        )

    return Routine(symbol, lambda module: module.define(symbol, arguments, body))


def _pack_rows(b: Builder, form: Geometry, source: Value, b_k: Value, k: Value, columns: Value, panel: Value) -> None:
    size = form.dtype.size

    def copy(load: Callable[[int, Value], Value]) -> None:
        def row(i: Value) -> None:
            here = b.offset(source, b.mul(i, b_k), form.scalar)
            there = b.offset(panel, b.mul(i, form.panel), form.scalar)
            for j in range(form.vectors):
                value = load(j, b.offset(here, j * form.lanes, form.scalar))
                b.store(value, b.offset(there, j * form.lanes, form.scalar), align=size)

        b.loop(0, k, 1, row)

    def copy_part() -> None:
        masks = _column_masks(b, form, columns)
        copy(lambda j, pointer: _masked_load(b, form.vector, pointer, masks[j]))

    whole = b.icmp("eq", columns, form.panel)
    b.when(whole, lambda: copy(lambda _, pointer: b.load(form.vector, pointer, align=size)), copy_part)


def _pack_transposed(
    b: Builder, form: Geometry, source: Value, b_n: Value, k: Value, columns: Value, panel: Value
) -> None:
    """Columns of B are contiguous: square blocks are transposed in registers."""
    lanes = form.lanes

    def vector_of_columns(v: Value) -> None:
        left = b.sub(columns, b.mul(v, lanes))
        here = b.offset(source, b.mul(b.mul(v, lanes), b_n), form.scalar)
        there = b.offset(panel, b.mul(v, lanes), form.scalar)

        def block(load: Callable[[int, Value], Value], at: Value) -> None:
            rows = [
                load(j, b.offset(b.offset(here, b.mul(b_n, j), form.scalar), at, form.scalar)) for j in range(lanes)
            ]
            for i, row in enumerate(_transpose(b, rows)):
                b.store(row, b.offset(there, b.mul(b.add(at, i), form.panel), form.scalar), align=form.dtype.size)

        def partial(at: Value) -> None:
            inside = b.lane_mask(b.sub(k, at), lanes)

            def load(j: int, pointer: Value) -> Value:
                present = b.splat(b.icmp("sgt", left, j), lanes)
                return _masked_load(b, form.vector, pointer, b.op("and", inside, present))

            block(load, at)

        whole = b.select(b.icmp("sge", left, lanes), b.op("and", k, i64(-lanes)), i64(0))
        b.loop(0, whole, lanes, lambda at: block(lambda _, p: b.load(form.vector, p, align=form.dtype.size), at))
        b.loop(whole, k, lanes, partial)

    b.loop(0, form.vectors, 1, vector_of_columns)


def _transpose(b: Builder, rows: list[Value]) -> list[Value]:
    """A square of vectors, transposed by swapping halves of ever smaller blocks."""
    rows, lanes = list(rows), len(rows)
    span = lanes // 2
    while span:
        low = [lane if not lane & span else lanes + lane - span for lane in range(lanes)]
        high = [lane + span if not lane & span else lanes + lane for lane in range(lanes)]
        for i in range(lanes):
            if not i & span:
                upper, lower = rows[i], rows[i + span]
                rows[i], rows[i + span] = b.shuffle(upper, lower, low), b.shuffle(upper, lower, high)
        span //= 2
    return rows


def _pack_elements(
    b: Builder, form: Geometry, source: Value, b_k: Value, b_n: Value, k: Value, columns: Value, panel: Value
) -> None:
    size = form.dtype.size

    def row(i: Value) -> None:
        here = b.offset(source, b.mul(i, b_k), form.scalar)
        there = b.offset(panel, b.mul(i, form.panel), form.scalar)

        def element(j: Value) -> None:
            value = b.load(form.scalar, b.offset(here, b.mul(j, b_n), form.scalar), align=size)
            b.store(value, b.offset(there, j, form.scalar), align=size)

        def pad(j: Value) -> None:
            b.store(const(form.scalar, 0.0), b.offset(there, j, form.scalar), align=size)

        b.loop(0, columns, 1, element)
        b.loop(columns, form.panel, 1, pad)

    b.loop(0, k, 1, row)

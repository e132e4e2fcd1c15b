"""The matmul nest: loops over units, row blocks, panels, slabs of k and tiles.

Sizes and strides are run-time words, so all shapes share the micro-kernels and the nest. Every output element is one
chain of multiply-adds over k in index order, so its bits depend only on its row of A and its column of B.
"""

from __future__ import annotations

from dataclasses import replace

from rlx.backends.cpu.builder import Builder, Module, Value, i64
from rlx.backends.cpu.matmul.grouped import GroupedRows, read_index
from rlx.backends.cpu.matmul.packing import masked_store
from rlx.backends.cpu.matmul.plan import SLAB, Geometry, Plan
from rlx.backends.cpu.matmul.quantised import Quantised
from rlx.backends.cpu.matmul.stripes import Pieces, Right, RowBlock, Stripe
from rlx.backends.cpu.matmul.tiles import SIDE_BY_SIDE, lines_of_a_step
from rlx.backends.cpu.routine import HEADER_BYTES, NOALIAS_ENTRY_ARGUMENTS, Routine
from rlx.host_memory import LINE

SLAB_UNIT = 16  # granularity of slabs: those of one panel have equal length up to this
STREAM_AHEAD = 16384  # prefetch distance in bytes for a panel that only one tile of one or two rows reads
CACHED = 8 << 20  # bytes of B up to which it is likely cached; then the hardware prefetches better on its own
IN_PLACE_TILES = 2  # tiles per row block up to which packing contiguous rows of B does not pay
WIDE_SLAB = 16  # k steps per slab where many panels alternate over rows of B
WIDE_PANELS = 4  # minimum number of panels for that


def nest(plan: Plan) -> Routine:
    """The loops over units, k slabs and tiles; the epilogue is called by address, so nests are shared."""
    kernel, form = plan.kernel, plan.form
    operands = "".join(f".{o.dtype.size}{'c' if o.columns else 'r'}" for o in kernel.epilogue_operands)
    finish = "epilogue" if kernel.epilogue else "copy"
    right = "panels" if plan.packed else "rows"
    if plan.blocks:
        right = f"{plan.blocks.storage}{'.int' if plan.integers else ''}"
    elif kernel.stored:  # only its size matters to the nest
        right = f"panels.{form.right_scalar}"
    transposed = ".turned" if kernel.transposed else ""
    groups = f".{kernel.grouped}.{kernel.index}" if kernel.grouped else ""
    symbol = f"matmul_nest.{kernel.dtype}{transposed}.{right}.{kernel.weights}.{finish}{operands}{groups}"

    def emit(module: Module) -> None:
        module.define(symbol, NOALIAS_ENTRY_ARGUMENTS, lambda b, *arguments: Nest(b, plan, *arguments).emit())

    return Routine(symbol, emit)


class Nest:
    """Emits one nest: the methods are its loops, from outermost to tile."""

    def __init__(self, b: Builder, plan: Plan, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
        self.b, self.plan, self.kernel, self.form = b, plan, plan.kernel, plan.form
        kernel = plan.kernel
        self.lo, self.hi, self.scratch = lo, hi, scratch
        self.operand_names = tuple(o.name for o in kernel.epilogue_operands)
        pointers = {"tiles", "epilogue", "blocks", "a", "b", "index", *self.operand_names}
        self.word = {
            name: b.load("ptr" if name in pointers else "i64", b.offset(args, 8 * i), align=8)
            for i, name in enumerate(plan.words)
        }
        # LLVM integer types as wide as the operands.
        self.elements = tuple(f"i{8 * o.dtype.size}" for o in kernel.epilogue_operands)
        if plan.epilogue is None:
            self.result_row = self.word[f"{self.operand_names[0]}_row"]
        self.sums = b.offset(scratch, HEADER_BYTES)
        self.packed = b.offset(scratch, plan.sums_end)
        self.columns = plan.columns
        self.panels = b.ceil_div(self.word["n"], self.columns)
        self.k = self.word["k"]
        self.left_steps = (i64(1), self.word["a_row"]) if kernel.transposed else (self.word["a_row"], i64(1))  # rows, k
        if kernel.grouped != "rows":
            self.cut_rows(self.word["m"])
        if plan.epilogue is not None:
            self.epilogue_args = b.stack("i64", len(plan.epilogue.words))
            for i, name in enumerate(self.operand_names):
                self._store_arg(2 + len(self.operand_names) + i, self.word[f"{name}_row"])
        self.quantised = None if plan.blocks is None else Quantised(self, plan.blocks)
        if not plan.packed:
            self.memo = b.stack("i64", 2)  # address and column count of the source of the packed panel in scratch
            b.store(i64(0), self.memo, align=8)
            b.store(i64(0), b.offset(self.memo, 8), align=8)

    def emit(self) -> None:
        b = self.b
        last = b.sdiv(b.add(self.hi, b.sub(self.panels, 1)), self.panels)
        block = GroupedRows(self).row_block if self.kernel.grouped == "rows" else self.row_block
        b.loop(b.sdiv(self.lo, self.panels), last, 1, block)

    def cut_rows(self, m: Value) -> None:
        """Splits this many rows into tiles."""
        b, blocks = self.b, self.plan.blocks
        self.m, self.tiles = m, b.ceil_div(m, self.form.rows)
        self.pieces = Pieces(b, m, self.tiles)
        if blocks is not None:
            self.few = b.icmp("sle", m, blocks.few_rows)

    def row_block(self, index: Value) -> None:
        """All panels in [lo, hi) of one row block of one batch: a run of consecutive units."""
        b, word = self.b, self.word
        batch, block = b.sdiv(index, word["row_blocks"]), b.srem(index, word["row_blocks"])
        outer, inner = b.sdiv(batch, word["batch1"]), b.srem(batch, word["batch1"])
        first = b.sdiv(b.mul(self.tiles, block), word["row_blocks"])
        last = b.sdiv(b.mul(self.tiles, b.add(block, 1)), word["row_blocks"])

        def moved(name: str, unit: str) -> Value:
            steps = b.add(b.mul(outer, word[f"{name}_batch0"]), b.mul(inner, word[f"{name}_batch1"]))
            return b.offset(word[name], steps, unit)

        rows = RowBlock(
            first_tile=first,
            last_tile=last,
            count=b.sub(last, first),
            first_row=self.pieces.start(first),
            a=moved("a", self.form.scalar),
            b=moved("b", self.form.right_scalar),
            operands=tuple(
                moved(name, element) for name, element in zip(self.operand_names, self.elements, strict=True)
            ),
        )
        if self.kernel.grouped == "depth":
            start = read_index(self, batch)
            self.k = b.sub(read_index(self, b.add(batch, 1)), start)
            a = b.offset(rows.a, b.mul(start, self.left_steps[1]), self.form.scalar)
            rows = replace(rows, a=a, b=b.offset(rows.b, b.mul(start, word["b_k"]), self.form.scalar))
        self.panels_of(index, rows)

    def panels_of(self, index: Value, rows: RowBlock) -> None:
        """The panels of a row block that are in [lo, hi)."""
        b = self.b
        before = b.mul(index, self.panels)
        low = b.sub(b.max(self.lo, before), before)
        high = b.min(b.sub(self.hi, before), self.panels)
        group, depth = self._cut(rows, b.sub(high, low))
        slabs = b.max(b.sdiv(b.add(self.k, b.sub(depth, 1)), depth), 1)
        even = b.sdiv(b.add(self.k, b.sub(slabs, 1)), slabs)
        unit = self.plan.blocks.storage.block if self.plan.blocks else SLAB_UNIT
        step = b.op("and", b.add(even, unit - 1), i64(-unit))

        def panels(first: Value) -> None:
            end = b.min(b.add(first, group), high)
            b.loop(0, slabs, 1, lambda slab: slab_of_panels(first, end, slab))

        def slab_of_panels(first: Value, end: Value, slab: Value) -> None:
            b.loop(first, end, 1, lambda panel: self.stripe(rows, first, panel, slab, slabs, step))

        def single() -> None:
            b.loop(low, high, group, panels)

        if self.plan.side_by_side:
            b.when(b.icmp("eq", self.m, 1), lambda: self.groups_of(rows, low, high, step), single)
        else:
            single()

    def groups_of(self, rows: RowBlock, low: Value, high: Value, step: Value) -> None:
        """Groups of neighbouring panels times a single row; those that are left over run one by one."""
        b = self.b
        full = b.add(low, b.mul(b.sdiv(b.sub(high, low), SIDE_BY_SIDE), SIDE_BY_SIDE))
        b.loop(low, full, SIDE_BY_SIDE, lambda panel: self.group(rows, panel, step))
        b.loop(full, high, 1, lambda panel: self.stripe(rows, panel, panel, i64(0), i64(1), step))

    def group(self, rows: RowBlock, first: Value, step: Value) -> None:
        """One group of panels."""
        b, form, word = self.b, self.form, self.word
        stripes = [self._stripe(rows, first, b.add(first, i), i64(0), i64(1), step) for i in range(SIDE_BY_SIDE)]
        near = b.icmp("sle", b.mul(self.panels, b.mul(self.k, form.right_bytes)), CACHED)
        ahead = b.select(near, i64(0), i64(STREAM_AHEAD))
        multiply = b.load("ptr", b.offset(word["tiles"], 8 * (2 * form.rows + 1)), align=8)
        places = [*(stripe.b for stripe in stripes), *(stripe.sums for stripe in stripes)]
        b.call_pointer(multiply, rows.a, self.k, ahead, *places)
        for stripe in stripes:
            self._set_columns(stripe)
            self.finish(stripe, rows.first_row, i64(1), stripe.sums)

    def _cut(self, rows: RowBlock, panels: Value) -> tuple[Value, Value]:
        """How many panels alternate over a slab, and the maximum k steps per slab.

        Usually one panel at a time. But if few tiles read long columns of B in place, short pieces of many panels
        alternate: walking down a column touches one page per step, more than the TLB has entries for.
        """
        b = self.b
        if self.plan.packed:  # a single tile reads nothing twice
            alone = self.few if self.plan.blocks else b.icmp("eq", rows.count, 1)
            return i64(1), b.select(alone, b.max(self.k, 1), i64(self.plan.slab))
        large = b.op("and", b.icmp("sge", panels, WIDE_PANELS), b.icmp("sgt", self.k, SLAB))
        wide = b.op("and", self._in_place(rows), large)
        return b.select(wide, i64(self._group()), i64(1)), b.select(wide, i64(WIDE_SLAB), i64(SLAB))

    def _group(self) -> int:
        """Number of panels whose sums fit in scratch together, if B is read in place."""
        return self.form.block_rows // (self.form.rows * IN_PLACE_TILES)

    def _in_place(self, rows: RowBlock) -> Value:
        b = self.b
        return b.op("and", b.icmp("sle", rows.count, IN_PLACE_TILES), b.icmp("eq", self.word["b_n"], 1))

    def stripe(self, rows: RowBlock, first: Value, panel: Value, slab: Value, slabs: Value, step: Value) -> None:
        """All tiles of the row block, over one slab of one panel."""
        stripe = self._stripe(rows, first, panel, slab, slabs, step)
        self._set_columns(stripe)
        if self.quantised is not None:
            self.quantised.multiply(rows, stripe)
        else:
            right = self._narrow_panel if self.kernel.stored else self._panel if self.plan.packed else self._rows
            self.each_tile(rows, stripe, right(rows, stripe))

    def _set_columns(self, stripe: Stripe) -> None:
        """Tells the epilogue how many columns there are."""
        if self.kernel.epilogue is not None:
            self._store_arg(1 + len(self.kernel.epilogue_operands), stripe.columns)

    def _stripe(self, rows: RowBlock, first: Value, panel: Value, slab: Value, slabs: Value, step: Value) -> Stripe:
        b, word, form = self.b, self.word, self.form
        column = b.mul(panel, self.columns)
        before = b.mul(panel, b.mul(word["k"], form.panel)) if self.plan.packed else b.mul(column, word["b_n"])
        here = b.offset(rows.b, before, form.right_scalar)
        if self.quantised is not None:
            here = b.offset(rows.b, b.mul(panel, self.quantised.bytes(word["k"])))
        start = b.mul(slab, step)
        return Stripe(
            columns=b.min(b.sub(word["n"], column), self.columns),
            b=here,
            operands=tuple(
                b.offset(pointer, column, element) if operand.columns else pointer
                for pointer, element, operand in zip(
                    rows.operands, self.elements, self.kernel.epilogue_operands, strict=True
                )
            ),
            sums=b.offset(self.sums, b.mul(b.sub(panel, first), IN_PLACE_TILES * form.rows * form.panel), form.scalar),
            start=start,
            length=b.min(b.sub(self.k, start), step),
            whole_k=b.icmp("eq", slabs, 1),
            last=b.icmp("eq", b.add(slab, 1), slabs),
        )

    def _panel(self, rows: RowBlock, stripe: Stripe) -> Right:
        """B in panels: the next slab, of this panel or the next one, follows in memory; tiles prefetch shares of it."""
        b, form = self.b, self.form
        here = b.offset(stripe.b, b.mul(stripe.start, form.panel), form.right_scalar)
        following = b.offset(here, b.mul(stripe.length, form.panel), form.right_scalar)
        alone = b.icmp("eq", rows.count, 1)
        high = b.icmp("sgt", self.pieces.short, 2)
        near = b.icmp("sle", b.mul(self.panels, b.mul(self.k, form.right_bytes)), CACHED)
        ahead = b.select(alone, b.select(near, here, b.offset(here, STREAM_AHEAD)), following)
        count = b.max(rows.count, 1)
        share = b.sdiv(b.add(b.sub(count, 1), form.right_bytes), count)
        step = b.select(b.op("and", alone, b.op("or", high, near)), i64(0), share)
        return Right(here, i64(form.panel), ahead, step, b.mul(step, stripe.length))

    def _narrow_panel(self, rows: RowBlock, stripe: Stripe) -> Right:
        """B in narrow panels: few tiles widen what they load, many read a panel that was widened once for all."""
        b, tiles, heights = self.b, self.word["tiles"], self.form.rows
        right = self._panel(rows, stripe)

        def widened() -> list[Value]:
            widen = b.load("ptr", b.offset(tiles, 8 * 2 * heights), align=8)
            b.call_pointer(widen, right.b, stripe.length, self.packed)
            return [self.packed, b.offset(tiles, 8 * heights)]

        few = b.icmp("sle", rows.count, self.form.widening_tiles)
        panel, table = b.when(few, lambda: [right.b, tiles], widened)
        return replace(right, b=panel, tiles=table)

    def _rows(self, rows: RowBlock, stripe: Stripe) -> Right:
        """B not in panels: read in place if that pays, else packed, unless it is already in scratch."""
        b, form, word = self.b, self.form, self.word
        here = b.offset(stripe.b, b.mul(stripe.start, word["b_k"]), form.scalar)
        row_bytes = b.mul(word["b_k"], form.dtype.size)
        is_full = b.icmp("eq", stripe.columns, form.panel)

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
                key = address
                if self.kernel.grouped == "depth":  # an empty piece has the address of its successor
                    key = b.select(b.icmp("sgt", stripe.length, 0), address, i64(0))
                b.store(key, self.memo, align=8)
                b.store(stripe.columns, b.offset(self.memo, 8), align=8)

            b.when(held, lambda: None, pack)
            following = b.offset(here, b.mul(row_bytes, stripe.length))
            after = b.offset(stripe.b, form.panel, form.scalar)
            ahead = b.select(stripe.last, after, following)
            return [self.packed, i64(form.panel), ahead, row_bytes, i64(lines_of_a_step(form) * LINE)]

        return Right(*b.when(b.op("and", is_full, self._in_place(rows)), in_place, packed))

    def each_tile(self, rows: RowBlock, stripe: Stripe, right: Right) -> None:
        """The tiles; after the last slab each one is finished while it is in cache."""
        b, form, word = self.b, self.form, self.word
        accumulate = b.assign("i64", f"zext {b.icmp('sgt', stripe.start, 0)} to i64")
        row_step, k_step = self.left_steps
        a_start = b.offset(rows.a, b.mul(stripe.start, k_step), form.scalar)
        direct = None
        if self.kernel.epilogue is None:
            direct = b.op("and", stripe.whole_k, b.icmp("eq", stripe.columns, form.panel))

        def tile(index: Value, row: Value, ahead: Value) -> list[Value]:
            height = self.pieces.size(index)
            above = b.select(stripe.whole_k, i64(0), b.sub(row, rows.first_row))
            sums = b.offset(stripe.sums, b.mul(above, form.panel), form.scalar)
            result, stride = sums, i64(form.panel)
            if direct is not None:
                place = b.offset(stripe.operands[0], b.mul(row, self.result_row), form.scalar)
                result = b.select(direct, place, sums)
                stride = b.select(direct, self.result_row, stride)
            table = word["tiles"] if right.tiles is None else right.tiles
            multiply = b.load("ptr", b.offset(table, b.mul(b.sub(height, 1), 8)), align=8)
            step = right.step
            if not self.plan.packed:
                fetching = -(-form.step_bytes // (lines_of_a_step(form) * LINE))  # tiles that prefetch a full slab
                step = b.select(b.icmp("slt", b.sub(index, rows.first_tile), fetching), step, i64(0))
            left = (b.offset(a_start, b.mul(row, row_step), form.scalar), word["a_row"])
            fetch = (ahead, step, accumulate)
            b.call_pointer(multiply, *left, right.b, right.ldb, stripe.length, result, stride, *fetch)
            done = stripe.last if direct is None else b.op("and", stripe.last, b.op("xor", direct, Value("i1", "true")))
            b.when(done, lambda: self.finish(stripe, row, height, sums))
            return [b.add(row, height), b.offset(ahead, right.move)]

        b.loop(rows.first_tile, rows.last_tile, 1, tile, [rows.first_row, right.ahead])

    def finish(self, stripe: Stripe, row: Value, height: Value, sums: Value) -> None:
        """Stores the sums of one tile from scratch: through the epilogue, or unchanged."""
        b, word = self.b, self.word
        places = [
            b.offset(pointer, b.mul(row, word[f"{name}_row"]), element)
            for name, pointer, element in zip(self.operand_names, stripe.operands, self.elements, strict=True)
        ]
        if self.kernel.epilogue is None:
            _copy_tile(b, self.form, sums, places[0], self.result_row, height, stripe.columns)
            return
        for i, pointer in enumerate([sums, *places]):
            self._store_arg(i, pointer)
        # The epilogue may use only the driver's header in scratch: the rest holds sums.
        b.call_pointer(word["epilogue"], self.epilogue_args, i64(0), height, self.scratch)

    def _store_arg(self, index: int, value: Value) -> None:
        self.b.store(value, self.b.offset(self.epilogue_args, 8 * index), align=8)


def _copy_tile(
    b: Builder, form: Geometry, sums: Value, result: Value, stride: Value, rows: Value, columns: Value
) -> None:
    """Copies `columns` of each row of a tile to the result; only the vector at the edge is masked (masking is slow)."""
    full = b.op("and", columns, i64(-form.lanes))
    edge = b.lane_mask(b.sub(columns, full), form.lanes)
    ragged = b.icmp("ne", full, columns)

    def row(i: Value) -> None:
        source = b.offset(sums, b.mul(i, form.panel), form.scalar)
        target = b.offset(result, b.mul(i, stride), form.scalar)

        def value(at: Value) -> Value:
            return b.load(form.vector, b.offset(source, at, form.scalar), align=form.dtype.size)

        def copy(at: Value) -> None:
            b.store(value(at), b.offset(target, at, form.scalar), align=form.dtype.size)

        def copy_edge() -> None:
            masked_store(b, value(full), b.offset(target, full, form.scalar), edge)

        b.loop(0, full, form.lanes, copy)
        b.when(ragged, copy_edge)

    b.loop(0, rows, 1, row)

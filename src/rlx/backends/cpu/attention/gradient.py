"""The gradient of attention: for each block of query rows, all keys that they see, block by block.

Weights are recomputed from scores and the rows' lse. Products of rows with keys use the plain micro-kernel, sums over
rows the one with a transposed left operand. dQ of the current rows stays in scratch, dK and dV accumulate in memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from rlx.backends.cpu.attention import packing, segments
from rlx.backends.cpu.attention.elements import clear, load, store, sweep
from rlx.backends.cpu.attention.plan import LOG2_E, Plan, lay_out_regions, read_words
from rlx.backends.cpu.attention.softmax import Scorer
from rlx.backends.cpu.builder import NULL, Builder, Module, Value, const, i64
from rlx.backends.cpu.math.arithmetic import fma
from rlx.backends.cpu.math.exponential import exp2
from rlx.backends.cpu.matmul import micro_kernel
from rlx.backends.cpu.routine import NOALIAS_ENTRY_ARGUMENTS, Entry, Routine
from rlx.backends.cpu.targets import KEY_BLOCK, CpuTarget
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.lir.kernels import AttentionGradKernel

ROWS = 192  # query rows per block, a multiple of tiles; their state stays in cache


def grad_entry(kernel: AttentionGradKernel, target: CpuTarget) -> Entry:
    """The loop nest of `kernel`, with the table of micro-kernels: plain, then transposed; by width, then by height."""
    plan = GradPlan(kernel.attention, target)
    sizes = [(height, width) for width in plan.widths for height in range(1, target.tile_rows + 1)]
    both = (False, True)
    parts = tuple(micro_kernel(plan.compute, *size, target, transposed=side) for side in both for size in sizes)
    return Entry(Routine(plan.symbol, lambda module: _define(module, plan, kernel)), {"parts": parts})


class GradPlan(Plan):
    """The sizes of a gradient. Rows in scratch are an odd number of vectors apart, to spread over the cache sets."""

    @property
    def symbol(self) -> str:
        return f"attention_grad.{self.kernel.fingerprint}"

    @property
    def head_row(self) -> int:
        return self.row_stride(self.kernel.head_dim)

    @property
    def value_row(self) -> int:
        return self.row_stride(self.kernel.value_dim)

    def row_stride(self, extent: int) -> int:
        """Elements from one row in scratch to the next."""
        return (self.padded(extent) // self.lanes | 1) * self.lanes

    @cached_property
    def widths(self) -> tuple[int, ...]:
        strips = (s.vectors for extent in (self.kernel.head_dim, self.kernel.value_dim) for s in self.cut(extent))
        scored = (min(span, self.panel) // self.lanes for span in self.spans)
        return tuple(dict.fromkeys((*scored, *strips)))

    @cached_property
    def regions(self) -> dict[str, int]:
        size = self.size
        return lay_out_regions({
            "keys": KEY_BLOCK * self.head_stride * size,  # [panel][head_dim][keys of a panel]
            "values": KEY_BLOCK * self.value_stride * size,
            "key_lines": KEY_BLOCK * self.head_row * size,  # [key][head_dim]
            "queries": ROWS * self.head_row * size,
            "dys": ROWS * self.value_row * size,
            "weights": ROWS * KEY_BLOCK * size,  # [row][key]: products q · k, then weights
            "inner": ROWS * KEY_BLOCK * size,  # [row][key]: products dy · v, then gradients of products q · k
            "dq": ROWS * self.head_row * size,
            "dk": KEY_BLOCK * self.head_row * size,
            "dv": KEY_BLOCK * self.value_row * size,
            "limits": ROWS * 8,  # per row: the first key that it does not see
            "biases": ROWS * 8,  # per row: address of its bias
            "key_rows": KEY_BLOCK * 8,  # per key: its address
            "value_rows": KEY_BLOCK * 8,
            "kept": KEY_BLOCK * size,  # per key: all ones or 0 of a custom mask, or its segment
            "zeros": self.zero_bytes,  # stands in for masked keys
            **self.segment_regions(ROWS),
        })  # fmt: skip


def _define(module: Module, plan: GradPlan, kernel: AttentionGradKernel) -> None:
    packing.define_keep(module, plan)
    packing.define_addresses(module, plan)
    packing.define_pack_keys(module, plan)
    packing.define_transposed_rows(module, plan, "turn_values", "value_rows", "values", plan.kernel.value_dim)
    segments.define_row_segments(module, plan, 1)
    segments.define_block_segments(module, plan)
    parts = (_define_lines, _define_start, _define_differentiate, _define_add, _define_store_queries, _define_clear)
    for define in parts:
        define(module, plan)

    def body(b: Builder, args: Value, low: Value, high: Value, scratch: Value) -> None:
        words = read_words(b, ("parts", *kernel.words), ("parts", *kernel.READS, *kernel.WRITES), args)
        clear(b, plan.region(b, scratch, "zeros"), i64(plan.zero_bytes))

        def unit(index: Value) -> None:
            batch, key_head = b.sdiv(index, words["kv_heads"]), b.srem(index, words["kv_heads"])
            Unit(b, plan, words, scratch, batch, key_head).emit()

        b.loop(low, high, 1, unit)

    module.define(plan.symbol, NOALIAS_ENTRY_ARGUMENTS, body)


@dataclass(frozen=True, slots=True)
class Unit:
    """The code of one unit: a key head of a batch row, and the query heads that share it."""

    b: Builder
    plan: GradPlan
    words: dict[str, Value]
    scratch: Value
    batch: Value
    key_head: Value

    def emit(self) -> None:
        b, words = self.b, self.words
        for name, extent in (("dk", self.plan.kernel.head_dim), ("dv", self.plan.kernel.value_dim)):
            first = self.place(name, self.key_head, i64(0))
            self.call("clear", first, words["k_len"], words[f"{name}_seq"], i64(extent * self.plan.size))

        def head(g: Value) -> None:
            def rows(first: Value) -> None:
                Rows(self, self.query_head(g), first, b.min(b.sub(words["q_len"], first), ROWS)).emit()

            b.loop(0, words["q_len"], ROWS, rows)

        b.loop(0, self.plan.kernel.group, 1, head)

    def query_head(self, g: Value) -> Value:
        return self.b.add(self.b.mul(self.key_head, self.plan.kernel.group), g)

    def call(self, part: str, *arguments: Value, result: str = "void") -> Value:
        return self.b.call(result, f"{self.plan.symbol}.{part}", *arguments)

    def place(self, operand: str, head: Value, position: Value) -> Value:
        """Address of a row of a tensor."""
        return self.at(operand, ("batch", self.batch), ("head", head), ("seq", position))

    def at(self, operand: str, *axes: tuple[str, Value]) -> Value:
        b, index = self.b, i64(0)
        for axis, number in axes:
            index = b.add(index, b.mul(number, self.words[f"{operand}_{axis}"]))
        size = self.plan.mask_dtype.size if operand == "mask" else self.plan.size
        return b.offset(self.words[operand], b.mul(index, size))


@dataclass(frozen=True, slots=True)
class Rows:
    """Query rows `first` .. `first + count` of a head."""

    unit: Unit
    head: Value
    first: Value
    count: Value

    def emit(self) -> None:
        unit, b, plan, words = self.unit, self.unit.b, self.unit.plan, self.unit.words
        bias, query_stride = NULL, i64(0)
        if plan.kernel.mask == "bias":
            axes = ("batch", unit.batch), ("head", self.head), ("query", self.first)
            bias, query_stride = unit.at("mask", *axes), words["mask_query"]
        tensors = (x for n in ("q", "dy") for x in (unit.place(n, self.head, self.first), words[f"{n}_seq"]))
        unit.call("start", unit.scratch, self.count, *tensors, bias, query_stride, self.limit)
        if plan.kernel.segments:
            ids = b.offset(unit.at("mask", ("batch", unit.batch)), self.first, "i32")
            unit.call("row_segments", unit.scratch, self.count, ids)
        begin, end = i64(0), words["k_len"]
        if plan.limited:
            end = b.max(b.sub(b.add(self.limit, self.count), 1), 0)
        if plan.kernel.ahead:
            end = b.min(end, words["k_len"])
        if plan.kernel.mask == "sliding":
            begin = b.max(b.sub(self.limit, plan.kernel.window), 0)

        def block(index: Value) -> None:
            base = b.mul(index, KEY_BLOCK)
            self.block(base, b.min(b.sub(words["k_len"], base), KEY_BLOCK))

        b.loop(b.sdiv(begin, KEY_BLOCK), b.ceil_div(end, KEY_BLOCK), 1, block)
        unit.call("give", unit.scratch, self.count, unit.place("dq", self.head, self.first), words["dq_seq"])

    @property
    def limit(self) -> Value:
        """The first key that the first row does not see, ignoring the number of keys."""
        b, words = self.unit.b, self.unit.words
        return b.add(b.add(b.sub(words["k_len"], words["q_len"]), self.first), 1 + self.unit.plan.kernel.ahead)

    def block(self, base: Value, count: Value) -> None:
        """All rows against the keys `base` .. `base + count`."""
        unit, b, plan = self.unit, self.unit.b, self.unit.plan
        if plan.kernel.segments:
            ids = b.offset(unit.at("mask", ("batch", unit.batch)), base, "i32")
            unit.call("meet", unit.scratch, self.count, ids, count)
            first, end = (segments.bound(b, plan, unit.scratch, n) for n in (segments.FIRST, segments.END))
            b.when(b.icmp("slt", first, end), lambda: Block(self, base, count, count, (first, end)).emit())
            return
        if plan.kernel.mask != "custom":
            Block(self, base, count, count).emit()
            return
        flags = b.offset(unit.at("mask", ("batch", unit.batch)), b.mul(base, plan.mask_dtype.size))
        visible = unit.call("keep", unit.scratch, flags, count, result="i64")
        b.when(b.icmp("sgt", visible, 0), lambda: Block(self, base, count, visible).emit())


@dataclass(frozen=True, slots=True)
class Block:
    """Rows against the keys `base` .. `base + count`, of which a custom mask keeps `visible`.

    `met`: the first row that shares a segment with a key, and the row after the last one.
    """

    rows: Rows
    base: Value
    count: Value
    visible: Value
    met: tuple[Value, Value] | None = None

    @property
    def unit(self) -> Unit:
        return self.rows.unit

    def emit(self) -> None:
        unit, b, plan, words = self.unit, self.unit.b, self.unit.plan, self.unit.words
        for operand, region, part in (("k", "key_rows", "pack_keys"), ("v", "value_rows", "turn_values")):
            places, source = self.region(region), unit.place(operand, unit.key_head, self.base)
            unit.call("addresses", unit.scratch, places, source, words[f"{operand}_seq"], self.count)
            next_block = b.mul(words[f"{operand}_seq"], KEY_BLOCK * plan.stride_bytes)
            unit.call(part, unit.scratch, i64(KEY_BLOCK), next_block)
        unit.call("key_lines", unit.scratch)
        first, end = i64(0), self.rows.count
        if plan.limited:  # the first row that sees a key of the block
            first = b.min(b.max(b.sub(b.add(self.base, 1), self.rows.limit), 0), end)
        if plan.kernel.mask == "sliding":
            end = b.min(end, b.sub(b.add(b.add(self.base, self.count), plan.kernel.window), self.rows.limit))
        if self.met is not None:
            end = b.min(end, self.met[1])
            first = b.min(b.max(first, self.met[0]), end)
        height = plan.target.tile_rows
        b.loop(first, end, height, lambda row: self.tile(row, b.min(b.sub(end, row), height)))
        b.loop(0, self.count, height, lambda key: self.sums(key, b.min(b.sub(self.count, key), height), first, end))
        for name in ("dk", "dv"):
            place = unit.place(name, unit.key_head, self.base)
            unit.call(f"add_{name}", unit.scratch, self.count, place, words[f"{name}_seq"])

    def region(self, name: str, index: Value | int = 0) -> Value:
        return self.unit.plan.region(self.unit.b, self.unit.scratch, name, index)

    def kernel(self, vectors: int, height: Value, *, transposed: bool = False) -> Value:
        """The address of the micro-kernel of `vectors` vectors and `height` rows."""
        b, plan = self.unit.b, self.unit.plan
        index = (plan.widths.index(vectors) + transposed * len(plan.widths)) * plan.target.tile_rows - 1
        return b.load("ptr", b.offset(self.unit.words["parts"], b.add(height, index), "ptr"), align=8)

    def columns(self, extent: int, body: Callable[[Value, int], None]) -> None:
        """`body(first column, vectors)` for each strip of these columns."""
        b, plan = self.unit.b, self.unit.plan
        for strips in plan.cut(extent):
            start, width = strips.first * plan.lanes, strips.vectors * plan.lanes
            end = start + strips.count * width
            b.loop(start, end, width, lambda column, n=strips.vectors: body(column, n))

    # -- rows by keys -------------------------------------------------------------------------------------------------
    def tile(self, row: Value, height: Value) -> None:
        """Weights and score gradients of some rows, and their dQ."""
        unit, b, plan = self.unit, self.unit.b, self.unit.plan
        reach = self.count
        if plan.limited:  # how far into the block the last row sees
            reach = b.min(reach, b.sub(b.sub(b.add(self.rows.limit, b.add(row, height)), 1), self.base))

        def products(span: int) -> None:
            self.products(row, height, reach, span)

        if len(plan.spans) == 1:
            products(KEY_BLOCK)
        else:
            b.when(b.icmp("sle", reach, plan.spans[0]), *(functools.partial(products, s) for s in plan.spans))
        axes = ("batch", unit.batch), ("head", self.rows.head)
        places = (b.offset(unit.at(n, *axes), b.add(self.rows.first, row), plan.scalar) for n in ("lse", "delta"))
        unit.call("differentiate", unit.scratch, row, height, self.base, self.count, self.visible, *places)
        lines, inner = plan.head_row, self.region("inner", b.mul(row, KEY_BLOCK))

        def strip(column: Value, vectors: int) -> None:
            right, place = self.region("key_lines", column), self.region("dq", b.add(b.mul(row, lines), column))
            b.call_pointer(
                self.kernel(vectors, height), inner, i64(KEY_BLOCK), right, i64(lines), reach, place, i64(lines),
                right, i64(0), i64(1),
            )  # fmt: skip

        self.columns(plan.kernel.head_dim, strip)

    def products(self, row: Value, height: Value, reach: Value, span: int) -> None:
        """weights = queries · keys and inner = dys · values, for as many keys as are in reach."""
        b, plan = self.unit.b, self.unit.plan
        sides = (
            ("queries", plan.head_row, "keys", plan.kernel.head_dim, "weights"),
            ("dys", plan.value_row, "values", plan.kernel.value_dim, "inner"),
        )
        tile = self.kernel(min(span, plan.panel) // plan.lanes, height)

        def panel(index: Value) -> None:
            for left, stride, right, extent, result in sides:
                block = self.region(right, b.mul(index, plan.padded(extent) * plan.panel))
                place = self.region(result, b.add(b.mul(row, KEY_BLOCK), b.mul(index, plan.panel)))
                b.call_pointer(
                    tile, self.region(left, b.mul(row, stride)), i64(stride), block, i64(plan.panel), i64(extent),
                    place, i64(KEY_BLOCK), block, i64(0), i64(0),
                )  # fmt: skip

        if plan.panel == KEY_BLOCK:
            panel(i64(0))
        else:
            b.loop(0, b.ceil_div(reach, plan.panel), 1, panel)

    # -- sums over rows -----------------------------------------------------------------------------------------------
    def sums(self, key: Value, height: Value, first: Value, end: Value) -> None:
        """dV = weightsᵀ · dys and dK = innerᵀ · queries of some keys, over those rows `first` .. `end` that see one."""
        b, plan = self.unit.b, self.unit.plan
        start = i64(0)
        if plan.limited:
            start = b.min(b.max(b.sub(b.add(b.add(self.base, key), 1), self.rows.limit), 0), end)
        if self.met is not None:
            start = b.max(start, first)
        rows, left = b.sub(end, start), b.add(b.mul(start, KEY_BLOCK), key)
        sides = (
            ("weights", "dys", plan.kernel.value_dim, plan.value_row, "dv"),
            ("inner", "queries", plan.kernel.head_dim, plan.head_row, "dk"),
        )
        for left_side, lines, extent, stride, result in sides:

            def strip(
                column: Value, vectors: int, left_side: str = left_side, lines: str = lines, stride: int = stride,
                result: str = result,
            ) -> None:  # fmt: skip
                right = self.region(lines, b.add(b.mul(start, stride), column))
                place = self.region(result, b.add(b.mul(key, stride), column))
                b.call_pointer(
                    self.kernel(vectors, height, transposed=True), self.region(left_side, left), i64(KEY_BLOCK),
                    right, i64(stride), rows, place, i64(stride), right, i64(0), i64(0),
                )  # fmt: skip

            self.columns(extent, strip)


# -- parts ------------------------------------------------------------------------------------------------------------
def _copy_line(b: Builder, plan: GradPlan, source: Value, place: Value, extent: int) -> None:
    """Copies a row to scratch, zero-padded to a full vector."""

    def piece(at: Value, live: int) -> None:
        loaded = load(b, plan, plan.compute, b.offset(source, at, plan.scalar), live)
        b.store(loaded, b.offset(place, at, plan.scalar), align=plan.size)

    sweep(b, extent, plan.lanes, piece)


def _define_lines(module: Module, plan: GradPlan) -> None:
    """K of the block row by row, zeros for masked keys."""

    def emit(b: Builder, scratch: Value) -> None:
        def key(j: Value) -> None:
            row = b.load("ptr", plan.region(b, scratch, "key_rows", j, "ptr"), align=8)
            place = plan.region(b, scratch, "key_lines", b.mul(j, plan.head_row))
            _copy_line(b, plan, row, place, plan.kernel.head_dim)

        b.loop(0, KEY_BLOCK, 1, key)

    plan.define(module, "key_lines", "ptr scratch", emit)


def _define_start(module: Module, plan: GradPlan) -> None:
    """Initialises a block of rows: q and dy, zeros for dQ, limits and biases."""
    sides = (("queries", plan.kernel.head_dim), ("dys", plan.kernel.value_dim))

    def emit(
        b: Builder, scratch: Value, count: Value, q: Value, q_seq: Value, dy: Value, dy_seq: Value, bias: Value,
        query_stride: Value, limit: Value,
    ) -> None:  # fmt: skip
        def row(i: Value) -> None:
            for (region, extent), source, stride in zip(sides, (q, dy), (q_seq, dy_seq), strict=True):
                place = plan.region(b, scratch, region, b.mul(i, plan.row_stride(extent)))
                _copy_line(b, plan, b.offset(source, b.mul(i, stride), plan.scalar), place, extent)
            if plan.limited:
                b.store(b.add(limit, i), plan.region(b, scratch, "limits", i, "i64"), align=8)
            if plan.kernel.mask == "bias":
                place = b.offset(bias, b.mul(b.mul(i, query_stride), plan.mask_dtype.size))
                b.store(place, plan.region(b, scratch, "biases", i, "ptr"), align=8)

        clear(b, plan.region(b, scratch, "dq"), b.mul(count, plan.head_row * plan.size))
        b.loop(0, count, 1, row)

    plan.define(
        module, "start", "ptr scratch, i64 count, ptr q, i64 q_seq, ptr dy, i64 dy_seq, ptr bias, i64 query_stride, "
        "i64 limit", emit,
    )  # fmt: skip


def _define_differentiate(module: Module, plan: GradPlan) -> None:
    """Turns products of some rows with all keys of the block into weights, and into gradients of the products q · k."""
    kernel = plan.kernel

    def emit(
        b: Builder, scratch: Value, first: Value, height: Value, base: Value, count: Value, visible: Value, lse: Value,
        delta: Value,
    ) -> None:  # fmt: skip
        def row(i: Value) -> None:
            number = b.add(first, i)
            scorer = Scorer(b, plan, KEY_BLOCK, scratch, number, base, count, visible)
            # Never inf, not even for a row that sees nothing: adding it to a masked score must give -inf and not NaN.
            highest = const(plan.scalar, float(np.finfo(plan.compute.numpy).max))
            loaded = b.load(plan.scalar, b.offset(lse, i, plan.scalar), align=plan.size)
            shift = b.op("fmul", loaded, const(plan.scalar, -LOG2_E))
            own = b.splat(b.select(b.fcmp("ogt", shift, highest), highest, shift), scorer.width)
            less = b.splat(b.load(plan.scalar, b.offset(delta, i, plan.scalar), align=plan.size), scorer.width)

            def several(j: Value, unmasked: bool) -> None:
                type_, start = scorer.type, b.add(b.mul(number, KEY_BLOCK), j)
                weights, inner = (plan.region(b, scratch, region, start) for region in ("weights", "inner"))
                capped = scorer.soft_cap(b.load(type_, weights, align=plan.size))
                scores = scorer.from_capped(capped, j, unmasked)
                weight = exp2(b, fma(b, scores, const(type_, plan.exponent), own, plan.target), plan.target)
                b.store(weight, weights, align=plan.size)
                slope = const(type_, kernel.scale)
                if kernel.softcap:
                    square = b.op("fmul", capped, capped)
                    slope = b.op("fmul", b.op("fsub", const(type_, 1.0), square), slope)
                change = b.op("fsub", b.load(type_, inner, align=plan.size), less)
                gradient = b.op("fmul", b.op("fmul", weight, change), slope)
                if not unmasked or kernel.mask == "bias":
                    # The product with a masked key may be anything.
                    zero = const(type_, 0.0)
                    gradient = b.select(b.fcmp("oeq", weight, zero), zero, gradient)
                b.store(gradient, inner, align=plan.size)

            def scan(unmasked: bool) -> None:
                if scorer.width == KEY_BLOCK:
                    several(i64(0), unmasked)
                else:
                    b.loop(0, KEY_BLOCK, scorer.width, lambda j: several(j, unmasked))

            b.when(scorer.sees_all(), lambda: scan(True), lambda: scan(False))

        b.loop(0, height, 1, row)

    plan.define(
        module, "differentiate", "ptr scratch, i64 first, i64 height, i64 base, i64 count, i64 kept, ptr lse, "
        "ptr delta", emit,
    )  # fmt: skip


def _define_add(module: Module, plan: GradPlan) -> None:
    """Adds dK or dV of the block to memory."""
    for name, extent in (("dk", plan.kernel.head_dim), ("dv", plan.kernel.value_dim)):

        def emit(
            b: Builder, scratch: Value, count: Value, place: Value, stride: Value, name: str = name,
            extent: int = extent,
        ) -> None:  # fmt: skip
            def move(fresh: Value, place: Value, live: int) -> None:
                store(b, plan, b.op("fadd", load(b, plan, plan.compute, place, live), fresh), place, live)

            _each_piece(b, plan, plan.region(b, scratch, name), extent, count, place, stride, move)

        plan.define(module, f"add_{name}", "ptr scratch, i64 count, ptr place, i64 stride", emit)


def _define_store_queries(module: Module, plan: GradPlan) -> None:
    """Stores dQ of the rows from scratch to memory."""

    def emit(b: Builder, scratch: Value, count: Value, place: Value, stride: Value) -> None:
        def move(value: Value, place: Value, live: int) -> None:
            store(b, plan, value, place, live)

        _each_piece(b, plan, plan.region(b, scratch, "dq"), plan.kernel.head_dim, count, place, stride, move)

    plan.define(module, "give", "ptr scratch, i64 count, ptr place, i64 stride", emit)


def _each_piece(
    b: Builder, plan: GradPlan, source: Value, extent: int, count: Value, place: Value, stride: Value,
    body: Callable[[Value, Value, int], None],
) -> None:  # fmt: skip
    """`body(vector, place, live)` for `count` rows in scratch and their destination in memory."""

    def row(i: Value) -> None:
        line, target = b.mul(i, plan.row_stride(extent)), b.offset(place, b.mul(i, stride), plan.scalar)

        def piece(at: Value, live: int) -> None:
            value = b.load(plan.vector, b.offset(source, b.add(line, at), plan.scalar), align=plan.size)
            body(value, b.offset(target, at, plan.scalar), live)

        sweep(b, extent, plan.lanes, piece)

    b.loop(0, count, 1, row)


def _define_clear(module: Module, plan: GradPlan) -> None:
    """Zeros dK or dV of a unit, row by row."""

    def emit(b: Builder, place: Value, count: Value, stride: Value, size: Value) -> None:
        b.loop(0, count, 1, lambda i: clear(b, b.offset(place, b.mul(i, stride), plan.scalar), size))

    plan.define(module, "clear", "ptr place, i64 count, i64 stride, i64 size", emit)

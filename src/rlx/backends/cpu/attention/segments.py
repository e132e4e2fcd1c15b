"""Segments of packed sequences: ids of the rows and keys at hand, and the rows that may see keys of a block.

Ids in scratch are such that equal ones see each other: padding is -1 for keys and -2 for rows. A block is left out for
rows whose ids lie outside the range of its own, which asks nothing of the order of ids; others are masked.
"""

from __future__ import annotations

from rlx.backends.cpu.attention.plan import BOUNDS, Plan
from rlx.backends.cpu.builder import Builder, Module, Value, const, i64, intrinsic_suffix, vector
from rlx.backends.cpu.targets import KEY_BLOCK

NO_ROW, NO_KEY, SEVERAL = -2, -1, -3  # ids of padding, and of a block whose keys have no one id
# Places in the region `segment_bounds`.
LOW, HIGH, OF_BLOCK, FIRST, END = range(BOUNDS)


def bound(b: Builder, plan: Plan, scratch: Value, index: int) -> Value:
    """One of the numbers about the rows and the block at hand."""
    return b.load("i64", plan.region(b, scratch, "segment_bounds", index, "i64"), align=8)


def _note(b: Builder, plan: Plan, scratch: Value, index: int, value: Value) -> None:
    b.store(value, plan.region(b, scratch, "segment_bounds", index, "i64"), align=8)


def define_row_segments(module: Module, plan: Plan, group: int) -> None:
    """The ids of rows, `group` of them per position, and their range."""
    if not plan.kernel.segments:
        return

    def emit(b: Builder, scratch: Value, positions: Value, ids: Value) -> None:
        def position(i: Value, low: Value, high: Value) -> list[Value]:
            own = b.convert("sext", b.load("i32", b.offset(ids, i, "i32"), align=4), "i64")
            present = b.icmp("sge", own, 0)
            first = plan.region(b, scratch, "row_segments", b.mul(i, group), "i64")
            stored = b.select(present, own, i64(NO_ROW))
            b.loop(0, group, 1, lambda g: b.store(stored, b.offset(first, g, "i64"), align=8))
            return [b.select(present, b.min(low, own), low), b.max(high, own)]

        low, high = b.loop(0, positions, 1, position, [i64(2**62), i64(-1)])
        _note(b, plan, scratch, LOW, low)
        _note(b, plan, scratch, HIGH, high)

    plan.define(module, "row_segments", "ptr scratch, i64 positions, ptr ids", emit)


def define_meet(module: Module, plan: Plan) -> None:
    """The ids of the keys of a block, and the rows that may see them, from FIRST up to END; none if FIRST is END."""
    if not plan.kernel.segments:
        return
    lanes = plan.lanes
    type_ = vector(lanes, "i32")

    def emit(b: Builder, scratch: Value, rows: Value, ids: Value, count: Value) -> None:
        padding, beyond = const(type_, NO_KEY), const(type_, 2**31 - 1)

        def less(x: Value, y: Value) -> Value:
            return b.select(b.icmp("slt", x, y), x, y)

        def greater(x: Value, y: Value) -> Value:
            return b.select(b.icmp("sgt", x, y), x, y)

        def keys(j: Value, least: Value, low: Value, high: Value) -> list[Value]:
            there = b.lane_mask(b.sub(count, j), lanes)
            name = f"llvm.masked.load.{intrinsic_suffix(type_)}.p0"
            own = greater(b.call(type_, name, b.offset(ids, j, "i32"), there, padding), padding)
            wide = b.convert("sext", own, vector(lanes, plan.word)) if plan.word != "i32" else own
            b.store(wide, plan.region(b, scratch, "kept", j, plan.word), align=plan.size)
            present = b.select(b.icmp("sge", own, const(type_, 0)), own, beyond)
            return [less(least, own), less(low, present), greater(high, own)]

        found = b.loop(0, KEY_BLOCK, lanes, keys, [beyond, beyond, padding])
        least, low, high = (
            b.convert("sext", b.fold(x, combine), "i64")
            for x, combine in zip(found, (less, less, greater), strict=True)
        )
        _note(b, plan, scratch, OF_BLOCK, b.select(b.icmp("eq", least, high), high, i64(SEVERAL)))

        def row(i: Value, first: Value, end: Value) -> list[Value]:
            own = b.load("i64", plan.region(b, scratch, "row_segments", i, "i64"), align=8)
            meets = b.op("and", b.icmp("sge", own, low), b.icmp("sle", own, high))
            return [b.select(meets, b.min(first, i), first), b.select(meets, b.add(i, 1), end)]

        none = [rows, i64(0)]
        lowest, highest = (bound(b, plan, scratch, index) for index in (LOW, HIGH))
        meet = b.op("and", b.icmp("sle", lowest, high), b.icmp("sge", highest, low))
        first, end = b.when(meet, lambda: b.loop(0, rows, 1, row, none), lambda: none)
        _note(b, plan, scratch, FIRST, b.min(first, end))
        _note(b, plan, scratch, END, end)

    plan.define(module, "meet", "ptr scratch, i64 rows, ptr ids, i64 count", emit)

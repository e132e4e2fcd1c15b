"""What is kept for each query row of a unit: its query, its range of keys, its sums; and the result made of them."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlx.backends.cpu.attention.elements import clear, load, store, sweep
from rlx.backends.cpu.attention.plan import LOG2_E, Plan
from rlx.backends.cpu.builder import Builder, Module, Value, const, i64
from rlx.backends.cpu.math.exponential import log
from rlx.lir.kernels import BEYOND_CAPACITY


def define_newest(module: Module, plan: Plan) -> None:
    """Over a ring: the newest position of a sequence, -1 without any. Ragged tokens say which ones are its own."""
    if not plan.kernel.ring:
        return

    def emit(b: Builder, positions: Value, count: Value, step: Value, rows: Value, row: Value) -> Value:
        def position(i: Value, newest: Value) -> list[Value]:
            at = _position(b, positions, b.mul(i, step))
            if plan.kernel.ragged:
                at = b.select(b.icmp("eq", _position(b, rows, i), row), at, i64(-1))
            return [b.max(newest, at)]

        return b.loop(0, count, 1, position, [i64(-1)])[0]

    plan.define(module, "newest", "ptr positions, i64 count, i64 step, ptr rows, i64 row", emit, result="i64")


def _position(b: Builder, positions: Value, i: Value) -> Value:
    return b.convert("sext", b.load("i32", b.offset(positions, i, "i32"), align=4), "i64")


def define_locate(module: Module, plan: Plan) -> None:
    """Over a cache: which query positions of the unit are there, the limits of their rows, and zeros for the others.

    The result is how many are there. From here on rows are theirs alone, so that padding costs no more than this.
    """
    kernel = plan.kernel
    if not kernel.cached:
        return

    def emit(
        b: Builder, scratch: Value, positions: Value, count: Value, capacity: Value, newest: Value, out: Value,
        out_seq: Value, out_head: Value,
    ) -> Value:  # fmt: skip
        def position(i: Value, found: Value) -> list[Value]:
            at = _position(b, positions, i)
            # A ring has to hold what lies between the oldest key of the row and the newest of all.
            oldest = b.max(b.sub(at, kernel.window - 1), 0)
            beyond = b.icmp("sge", b.sub(newest, oldest) if kernel.ring else at, capacity)
            present = b.icmp("sge", at, 0)
            fault, fits = b.op("and", present, beyond), b.op("and", present, b.op("xor", beyond, Value("i1", "true")))
            b.when(fault, lambda: b.store(i64(BEYOND_CAPACITY), scratch, align=8))

            def keep() -> list[Value]:
                b.store(i, plan.region(b, scratch, "present", found, "i64"), align=8)
                row = b.mul(found, kernel.group)
                limits = plan.region(b, scratch, "limits", row, "i64")
                b.loop(0, kernel.group, 1, lambda g: b.store(b.add(at, 1), b.offset(limits, g, "i64"), align=8))
                return [b.add(found, 1)]

            def leave_out() -> list[Value]:
                def head(g: Value) -> None:
                    offset = b.add(b.mul(i, out_seq), b.mul(g, out_head))
                    clear(b, b.offset(out, b.mul(offset, kernel.dtype.size)), i64(kernel.value_dim * kernel.dtype.size))

                b.loop(0, kernel.group, 1, head)
                return [found]

            return b.when(fits, keep, leave_out)

        found = b.loop(0, count, 1, position, [i64(0)])[0]
        _note_extremes(b, plan, scratch, b.mul(found, kernel.group))
        return found

    plan.define(
        module, "locate", "ptr scratch, ptr positions, i64 count, i64 capacity, i64 newest, ptr out, i64 out_seq, "
        "i64 out_head", emit, result="i64",
    )  # fmt: skip


def _note_extremes(b: Builder, plan: Plan, scratch: Value, rows: Value) -> None:
    """The lowest and the highest limit of each tile and of all rows, which may sit at positions in any order."""

    def tile(first: Value, *all_rows: Value) -> list[Value]:
        def row(i: Value, low: Value, high: Value) -> list[Value]:
            limit = b.load("i64", plan.region(b, scratch, "limits", i, "i64"), align=8)
            return [b.min(low, limit), b.max(high, limit)]

        end = b.min(b.add(first, plan.target.tile_rows), rows)
        own = b.loop(first, end, 1, row, outermost)
        for name, value in zip(("lowest", "highest"), own, strict=True):
            b.store(value, plan.region(b, scratch, name, first, "i64"), align=8)
        return [b.min(all_rows[0], own[0]), b.max(all_rows[1], own[1])]

    outermost = [i64(2**62), i64(0)]
    extremes = b.loop(0, rows, plan.target.tile_rows, tile, outermost)
    for i, value in enumerate(extremes):
        b.store(value, plan.region(b, scratch, "extremes", i, "i64"), align=8)


def define_start(module: Module, plan: Plan) -> None:
    """Queries into scratch, widened, unless they are read where they lie; outputs at 0 unless a block sets them all;
    sums at 0; references, limits and places of the bias per row."""
    kernel = plan.kernel

    def emit(
        b: Builder, scratch: Value, positions: Value, queries: Value, mask: Value, q_seq: Value, q_head: Value,
        mask_query: Value, mask_head: Value, limit: Value,
    ) -> None:  # fmt: skip
        if plan.clears_outputs:
            rows = b.mul(positions, kernel.group)
            clear(b, plan.region(b, scratch, "outputs"), b.mul(rows, plan.value_stride * plan.size))

        def row(index: Value, i: Value, g: Value) -> None:
            source = b.offset(queries, b.mul(b.add(b.mul(i, q_seq), b.mul(g, q_head)), kernel.dtype.size))
            place = plan.region(b, scratch, "queries", b.mul(index, plan.head_stride))

            def piece(at: Value, live: int) -> None:
                loaded = load(b, plan, kernel.dtype, b.offset(source, b.mul(at, kernel.dtype.size)), live)
                b.store(loaded, b.offset(place, at, plan.scalar), align=plan.size)

            if plan.copies_queries:
                sweep(b, kernel.head_dim, plan.lanes, piece)
            sums = plan.region(b, scratch, "sums", b.mul(index, plan.lanes))
            b.store(const(plan.vector, 0.0), sums, align=plan.size)
            reference = plan.region(b, scratch, "references", index)
            b.store(const(plan.scalar, -math.inf), reference, align=plan.size)
            if plan.limited and not kernel.cached:
                b.store(b.add(limit, i), plan.region(b, scratch, "limits", index, "i64"), align=8)
            if kernel.mask == "bias":
                offset = b.mul(b.add(b.mul(i, mask_query), b.mul(g, mask_head)), plan.mask_dtype.size)
                b.store(b.offset(mask, offset), plan.region(b, scratch, "biases", index, "ptr"), align=8)

        each_row(b, plan, scratch, positions, row)

    plan.define(
        module, "start", "ptr scratch, i64 positions, ptr queries, ptr mask, i64 q_seq, i64 q_head, "
        "i64 mask_query, i64 mask_head, i64 limit", emit,
    )  # fmt: skip


def define_finish(module: Module, plan: Plan) -> None:
    """Outputs over sums of weights, rounded to the stored type; zeros for a row that saw no key. Their lse if asked."""
    kernel = plan.kernel

    def emit(
        b: Builder, scratch: Value, positions: Value, out: Value, out_seq: Value, out_head: Value, lse: Value,
        lse_head: Value,
    ) -> None:  # fmt: skip
        def row(index: Value, i: Value, g: Value) -> None:
            sums = b.load(plan.vector, plan.region(b, scratch, "sums", b.mul(index, plan.lanes)), align=plan.size)
            total = b.fold(sums, lambda x, y: b.op("fadd", x, y))
            zero, one = const(plan.scalar, 0.0), const(plan.scalar, 1.0)
            share = b.splat(b.select(b.fcmp("oeq", total, zero), zero, b.op("fdiv", one, total)), plan.lanes)
            source = plan.region(b, scratch, "outputs", b.mul(index, plan.value_stride))
            place = b.offset(out, b.mul(b.add(b.mul(i, out_seq), b.mul(g, out_head)), kernel.dtype.size))

            def piece(at: Value, live: int) -> None:
                loaded = b.load(plan.vector, b.offset(source, at, plan.scalar), align=plan.size)
                # Adding 0 makes -0 a 0: which of them an underflow leaves depends on how many keys were multiplied.
                result = b.op("fadd", b.op("fmul", loaded, share), const(plan.vector, 0.0))
                store(b, plan, result, b.offset(place, b.mul(at, kernel.dtype.size)), live)

            sweep(b, kernel.value_dim, plan.lanes, piece)
            if kernel.lse:
                reference = b.load(plan.scalar, plan.region(b, scratch, "references", index), align=plan.size)
                heaviest = b.op("fmul", reference, const(plan.scalar, plan.exponent / LOG2_E))
                logarithm = b.extract(log(b, b.splat(total, plan.lanes), plan.target), 0)
                place = b.offset(lse, b.add(i, b.mul(g, lse_head)), plan.scalar)
                b.store(b.op("fadd", heaviest, logarithm), place, align=plan.size)

        each_row(b, plan, scratch, positions, row)

    signature = "ptr scratch, i64 positions, ptr out, i64 out_seq, i64 out_head, ptr lse, i64 lse_head"
    plan.define(module, "finish", signature, emit)


def each_row(
    b: Builder, plan: Plan, scratch: Value, positions: Value, body: Callable[[Value, Value, Value], None]
) -> None:
    """`body(row, position, head)` for the rows of a unit: the heads of a position are neighbours."""

    def position(n: Value) -> None:
        i = n
        if plan.kernel.cached:
            i = b.load("i64", plan.region(b, scratch, "present", n, "i64"), align=8)

        def head(g: Value) -> None:
            body(b.add(b.mul(n, plan.kernel.group), g), i, g)

        if plan.kernel.group == 1:
            head(i64(0))
        else:
            b.loop(0, plan.kernel.group, 1, head)

    b.loop(0, positions, 1, position)

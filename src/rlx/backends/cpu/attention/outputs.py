"""Weights times values: adds the keys of a block to the outputs of a tile of rows."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.backends.cpu.attention.packing import each_strip
from rlx.backends.cpu.attention.plan import Plan
from rlx.backends.cpu.attention.tiles import ahead_step, micro_kernel_address
from rlx.backends.cpu.builder import Builder, Int, Module, Value, const, i64
from rlx.backends.cpu.targets import KEY_BLOCK
from rlx.fast_dataclass import dataclass

if TYPE_CHECKING:
    from rlx.backends.cpu.attention.nest import Units


@dataclass(frozen=True, slots=True)
class Outputs:
    """outputs[height] += weights · values, for one tile.

    A masked key is not multiplied: 0 · inf is not zero. However rows are grouped, each adds its keys in order.
    """

    unit: Units
    row: Value
    height: Value
    base: Value
    count: Value
    started: Value

    def emit(self, finite: Value | None) -> None:
        """`finite` (for a bias or segments): V has no inf or NaN, so it does not matter which keys are masked."""
        if finite is None:
            self.all_rows()
        else:
            self.unit.b.when(finite, self.all_rows, self.sparse)

    def all_rows(self) -> None:
        if self.unit.plan.limited:
            self.limited()
        else:
            self.weigh(0, self.height, 0, self.count, self.started)

    def weigh(self, first: Int, height: Int, begin: Int, end: Int, accumulate: Int = 1) -> None:
        """Rows `first` .. of the tile and keys `begin` .. `end` of the block."""
        unit, plan, b = self.unit, self.unit.plan, self.unit.b
        weights = plan.region(b, unit.scratch, "scores", b.mul(i64(first), KEY_BLOCK))
        outputs = plan.region(b, unit.scratch, "outputs", b.mul(b.add(self.row, first), plan.value_stride))
        values, stride = unit.values(self.base), unit.words["v_seq"]
        following = unit.next_values(values)
        if plan.packs_values:
            values = plan.region(b, unit.scratch, "values")
        rows = self.row, i64(height), i64(begin), i64(end)
        places = values, stride, following, outputs
        unit.call("weigh", unit.words["parts"], weights, *rows, *places, i64(accumulate))

    def limited(self) -> None:
        """Keys that all rows of the tile see are multiplied together, those before and after them row by row."""
        b, sliding = self.unit.b, self.unit.plan.kernel.mask == "sliding"
        begin = self.range(self.unit.highest(self.row, self.height))[0]
        end = b.max(self.range(self.unit.lowest(self.row))[1], begin)

        def before(i: Value) -> None:
            own_begin, own_end = self.seen(i)
            self.single_row(i, own_begin, b.min(own_end, begin))

        def after(i: Value) -> None:
            self.single_row(i, end, self.seen(i)[1])

        if sliding:
            b.when(b.icmp("sgt", begin, 0), lambda: b.loop(0, self.height, 1, before))
        b.when(b.icmp("slt", begin, end), lambda: self.weigh(0, self.height, begin, end))
        b.when(b.icmp("slt", end, self.count), lambda: b.loop(0, self.height, 1, after))

    def seen(self, i: Value) -> tuple[Value, Value]:
        """The keys of the block that a row of the tile sees."""
        return self.range(self.unit.limit(self.unit.b.add(self.row, i)))

    def range(self, limit: Value) -> tuple[Value, Value]:
        """The keys of the block that a row with this limit sees."""
        b, kernel = self.unit.b, self.unit.plan.kernel
        end = b.sub(limit, self.base)
        oldest = b.max(b.sub(end, kernel.window), 0) if kernel.mask == "sliding" else i64(0)
        return b.min(oldest, self.count), b.max(b.min(end, self.count), 0)

    def single_row(self, i: Value, begin: Value, end: Value) -> None:
        b = self.unit.b
        b.when(b.icmp("slt", begin, end), lambda: self.weigh(i, 1, begin, end))

    def sparse(self) -> None:
        """The slow path for a block with an inf or NaN in V that a mask may hide: keys of weight 0 are skipped."""
        unit, plan, b = self.unit, self.unit.plan, self.unit.b
        b.when(b.icmp("eq", self.started, 0), lambda: unit.clear_outputs(self.row, self.height))

        def row(i: Value) -> None:
            def key(j: Value) -> None:
                place = plan.region(b, unit.scratch, "scores", b.add(b.mul(i, KEY_BLOCK), j))
                weight = b.load(plan.scalar, place, align=plan.size)
                heavy = b.fcmp("une", weight, const(plan.scalar, 0.0))
                b.when(heavy, lambda: self.weigh(i, 1, j, b.add(j, 1)))

            begin, end = self.seen(i) if plan.limited else (i64(0), self.count)
            b.loop(begin, end, 1, key)

        b.loop(0, self.height, 1, row)


def define_weigh(module: Module, plan: Plan) -> None:
    """outputs[height] += weights[height][begin..end] · values[begin..end], strip by strip."""

    def emit(
        b: Builder, parts: Value, weights: Value, row: Value, height: Value, begin: Value, end: Value, values: Value,
        stride: Value, following: Value, outputs: Value, accumulate: Value,
    ) -> None:  # fmt: skip
        left, keys = b.offset(weights, begin, plan.scalar), b.sub(end, begin)

        def strip(first: Value, vectors: int, _: int) -> None:
            column = b.mul(first, plan.lanes)
            apart, start = stride, column
            if plan.packs_values:
                apart, start = i64(vectors * plan.lanes), b.mul(column, KEY_BLOCK)
            right = b.offset(values, b.add(start, b.mul(begin, apart)), plan.scalar)
            ahead, step = right, i64(0)
            if plan.kernel.cached or not plan.packs_values:
                bytes_apart = b.mul(stride, plan.stride_bytes)
                ahead = b.offset(
                    b.offset(following, b.mul(begin, bytes_apart)), b.mul(first, plan.row_bytes(64) * plan.lanes // 64)
                )
                step = ahead_step(b, plan, row, height, vectors, bytes_apart)
            b.call_pointer(
                micro_kernel_address(b, plan, parts, vectors, height), left, i64(KEY_BLOCK), right, apart, keys,
                b.offset(outputs, column, plan.scalar), i64(plan.value_stride), ahead, step, accumulate,
            )  # fmt: skip

        each_strip(b, plan, strip)

    plan.define(
        module, "weigh", "ptr parts, ptr weights, i64 row, i64 height, i64 begin, i64 end, ptr values, i64 stride, "
        "ptr following, ptr outputs, i64 accumulate", emit,
    )  # fmt: skip

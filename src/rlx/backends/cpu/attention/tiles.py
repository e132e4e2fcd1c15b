"""Calls of matmul micro-kernels: which one a tile needs, and how far ahead it prefetches."""

from __future__ import annotations

from rlx.backends.cpu.attention.plan import Plan
from rlx.backends.cpu.builder import Builder, Int, Value, i64
from rlx.host_memory import LINE


def micro_kernel_address(b: Builder, plan: Plan, parts: Value, width: Int, height: Value) -> Value:
    """The address of the micro-kernel of `width` vectors and `height` rows."""
    rows = plan.target.tile_rows
    index = b.sub(b.add(height, b.mul(i64(width), rows)), rows + 1)
    return b.load("ptr", b.offset(parts, index, "ptr"), align=8)


def ahead_step(b: Builder, plan: Plan, row: Value, height: Value, vectors: int, step: Value) -> Value:
    """How many bytes a prefetch moves on with each row of K or V that a tile reads, if the rows are `step` bytes apart.

    Where nothing is packed, rows that follow each other are a stream, which the hardware fetches by itself unless
    prefetches of some of its lines get in the way. A tile of several rows would make half of those that it needs:
    1.4 times as fast without. What is unpacked is read in bursts, which nobody foresees: the first tile fetches.
    """
    width = vectors * plan.lanes * plan.size
    if plan.widens_keys:
        return b.select(b.icmp("eq", row, 0), step, i64(0))
    if width <= LINE or plan.packs_keys or plan.packs_values:
        return step
    stream = b.op("and", b.icmp("eq", step, width), b.icmp("sgt", height, 1))
    return b.select(stream, i64(0), step)

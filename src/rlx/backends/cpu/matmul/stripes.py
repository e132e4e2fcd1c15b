"""Records passed between the loops of the matmul nest: row blocks, stripes of panels, B of tiles."""

from __future__ import annotations

from rlx.backends.cpu.builder import Value
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class RowBlock:
    """A row block of one batch: `count` tiles, the first of which starts at `first_row`; pointers are the batch's."""

    first_tile: Value
    last_tile: Value
    count: Value
    first_row: Value
    a: Value
    b: Value
    operands: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Stripe:
    """One panel and one piece of k (a slab): valid output columns, and pointers to the first of them."""

    columns: Value
    b: Value
    operands: tuple[Value, ...]
    sums: Value
    start: Value
    length: Value
    whole_k: Value
    last: Value


@dataclass(frozen=True, slots=True)
class Right:
    """Where tiles read B, and what they prefetch: `ahead` moves by `step` bytes per k step and by `move` per tile."""

    b: Value
    ldb: Value
    ahead: Value
    step: Value
    move: Value
    tiles: Value | None = None  # table of tiles to use instead of the kernel's

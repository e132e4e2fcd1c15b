"""Records passed between the loops of the matmul nest: row blocks, stripes of panels, B of tiles."""

from __future__ import annotations

from rlx.backends.cpu.builder import Builder, Value
from rlx.fast_dataclass import dataclass


class Pieces:
    """A number of rows cut into pieces as evenly as possible: the first `longer` have one row more than `short`."""

    def __init__(self, b: Builder, rows: Value, pieces: Value) -> None:
        self.b, self.short, self.longer = b, b.sdiv(rows, pieces), b.srem(rows, pieces)

    def size(self, index: Value) -> Value:
        """Rows of a piece."""
        b = self.b
        return b.add(self.short, b.assign("i64", f"zext {b.icmp('slt', index, self.longer)} to i64"))

    def start(self, index: Value) -> Value:
        """The first row of a piece."""
        return self.b.add(self.b.mul(index, self.short), self.b.min(index, self.longer))


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

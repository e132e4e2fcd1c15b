"""Matmuls in which each row selects its matrix, in the matmul nest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rlx.backends.cpu.builder import Value, i64
from rlx.backends.cpu.matmul.stripes import RowBlock
from rlx.lir.kernels import OUT_OF_RANGE

if TYPE_CHECKING:
    from rlx.backends.cpu.matmul.nest import Nest


def read_index(nest: Nest, at: Value) -> Value:
    """Loads an element of the index operand."""
    b, size = nest.b, nest.kernel.index.size
    element = b.load(f"i{8 * size}", b.offset(nest.word["index"], at, f"i{8 * size}"), align=size)
    return b.convert("sext", element, "i64")


class GroupedRows:
    """Splits row blocks into runs: consecutive rows with the same matrix are multiplied together."""

    def __init__(self, nest: Nest) -> None:
        self.nest, self.b, self.word = nest, nest.b, nest.word

    def row_block(self, index: Value) -> None:
        """One row block, run by run."""
        b, word = self.b, self.word
        first, end = (b.sdiv(b.mul(word["m"], i), word["row_blocks"]) for i in (index, b.add(index, 1)))

        def row(at: Value, start: Value) -> list[Value]:
            group = read_index(self.nest, start)
            other = b.icmp("ne", read_index(self.nest, b.min(at, b.sub(end, 1))), group)
            ends = b.op("or", b.icmp("eq", at, end), other)
            b.when(ends, lambda: self.run(index, start, b.sub(at, start), group))
            return [b.select(ends, at, start)]

        b.loop(b.add(first, 1), b.add(end, 1), 1, row, [first])

    def run(self, index: Value, start: Value, count: Value, group: Value) -> None:
        """All panels in [lo, hi) for rows that share one matrix."""
        b, word, nest = self.b, self.word, self.nest

        def multiply() -> None:
            nest.cut_rows(count)
            rows = RowBlock(
                first_tile=i64(0),
                last_tile=nest.tiles,
                count=nest.tiles,
                first_row=i64(0),
                a=b.offset(word["a"], b.mul(start, nest.left_steps[0]), nest.form.scalar),
                b=b.offset(word["b"], b.mul(group, word["b_batch0"]), nest.form.right_scalar),
                operands=tuple(
                    b.offset(word[name], b.mul(start, word[f"{name}_row"]), element)
                    for name, element in zip(nest.operand_names, nest.elements, strict=True)
                ),
            )
            nest.panels_of(index, rows)

        known = b.icmp("ult", group, word["groups"])
        b.when(known, multiply, lambda: b.store(i64(OUT_OF_RANGE), nest.scratch, align=8))

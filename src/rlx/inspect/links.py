"""Links between levels as text: from blocks to ops to launches, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise

from rlx.inspect.fold_layers import Line
from rlx.inspect.lineage import Lineage, launch_sources
from rlx.inspect.page import ranges
from rlx.ir.registry import HIR

SHOWN = 6  # launches named per line


def link_text(line: Lineage, level: str) -> Callable[[Line], str]:
    """A function that returns the lowered ops and launches of a line of a level, as text."""
    program = line.plan.main
    by_op: dict[int, list[int]] = {}
    for number in range(len(program.launches)):
        for op in launch_sources(line.main, program, number):
            by_op.setdefault(op, []).append(number)

    def launches(ops: Iterable[int]) -> str:
        numbers = sorted({number for op in ops for number in by_op.get(op, ())})
        named = [f"[{n}] {program.launches[n].kernel.symbol}" for n in numbers[:SHOWN]]
        more = [f"and {len(numbers) - SHOWN} more"] if len(numbers) > SHOWN else []
        return ", ".join(named + more)

    def text(shown: Line) -> str:
        if shown.launch >= 0:
            return f"[{shown.launch}] <- {op_ranges(shown.sources)}"
        parts = [op_ranges(shown.sources)] if level == HIR and shown.sources else []
        parts += [launched] if (launched := launches(shown.sources)) else []
        return f"-> {' -> '.join(parts)}" if parts else ""

    return text


def op_ranges(ops: Iterable[int]) -> str:
    """Abbreviated numbers of ops.

    >>> op_ranges({3, 4, 5, 9})
    '%3-%5, %9'
    """
    numbers = ranges(ops)
    pairs = [pair for i, pair in enumerate(pairwise(numbers)) if i % 2 == 0]
    return ", ".join(f"%{first}" if count == 1 else f"%{first}-%{first + count - 1}" for first, count in pairs)

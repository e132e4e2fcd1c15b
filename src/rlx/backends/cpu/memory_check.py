"""Runs that need more memory than is free: the error says how much, for which buffers, and how much is free."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from rlx.backends.base import ArrayType, bytes_of
from rlx.errors import ResourceError
from rlx.free_memory import ADDRESSES, lacking, show
from rlx.lir.memory import Plan

if TYPE_CHECKING:
    from rlx.backends.cpu.executable import CpuExecutable


def out_of_memory(
    executable: CpuExecutable, key: tuple[int, ...], arena: Plan, outputs: Sequence[ArrayType]
) -> ResourceError:
    """The error for a run with these symbol values."""
    layout, program = executable.layout, executable.program
    sizes = ", ".join(f"{symbol} = {size}" for symbol, size in zip(layout.symbols, key, strict=True))
    run = f"graph {layout.name!r}: a run" + (f" with {sizes}" if sizes else "")
    buffers, results = arena.size, bytes_of(outputs)
    if buffers + results < ADDRESSES and max(executable.sizes(key), default=0) >= ADDRESSES:
        return ResourceError(f"{run} goes over more than 2^63 elements", hint="smaller inputs")
    largest = dict(arena.sizes) | {n: bytes_of([a]) for n, a in zip(program.outputs, outputs, strict=True)}
    name = max(largest, key=largest.__getitem__)
    writers = (launch.where for launch in program.launches if any(v.buffer == name for v in launch.views(written=True)))
    note = ", ".join(filter(None, [str(program.buffers[name].type), show(largest[name]), *filter(None, writers)][:3]))
    return lacking(
        f"{run} needs {show(buffers + results)}: {show(buffers)} for buffers, {show(results)} for outputs",
        "smaller inputs or a smaller batch; .memory({...}) lists all buffers",
        [f"the largest: {note}"],
    )

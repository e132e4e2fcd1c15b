"""The matmul generator: micro-kernels (register tiles), the loop nest that calls them, and packing of B.

`entry` compiles a `MatmulKernel` for a target to an `Entry`; `call` turns a launch into an argument block and units.

`plan` has sizes and the scratch map, `tiles` the micro-kernels, `nest` the loops over units, panels and tiles,
`quantised` and `grouped` the variants for packed blocks and for rows that select their matrix, `packing` the panels
packed at run time.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from rlx.backends.cpu import loops
from rlx.backends.cpu.matmul.nest import nest
from rlx.backends.cpu.matmul.packing import packing, widening
from rlx.backends.cpu.matmul.plan import Plan as Plan
from rlx.backends.cpu.matmul.tiles import micro_kernel as micro_kernel
from rlx.backends.cpu.matmul.tiles import panels_tile, tile
from rlx.backends.cpu.routine import Call, Entry
from rlx.backends.cpu.targets import CpuTarget
from rlx.lir.kernels import MatmulKernel
from rlx.lir.program import Launch


def entry(kernel: MatmulKernel, target: CpuTarget) -> Entry:
    """The nest of `kernel`, and the routines it calls by address.

    `tiles` are the micro-kernels by height, starting at one row; if B is not packed, its packing routine follows them.
    With narrow panels, the tiles that widen them come first, then those that do not, then the routine that widens a
    panel, then the one for a single row and several panels.
    """
    plan = Plan(kernel, target)
    heights = range(0) if plan.integers else range(1, target.tile_rows + 1)  # integer matmuls have their own tiles
    transposed = kernel.transposed
    tiles = tuple(micro_kernel(kernel.dtype, h, target.tile_vectors, target, transposed=transposed) for h in heights)
    if kernel.stored is not None:
        narrow = (replace(plan.form, rows=height) for height in heights)
        tiles = (*(tile(each, target, transposed=transposed) for each in narrow), *tiles, widening(plan.form, target))
        tiles += (panels_tile(plan.form, target),) if plan.side_by_side else ()
    tables = {"tiles": tiles if plan.packed else (*tiles, packing(plan.form))}
    if plan.blocks is not None:
        tables["blocks"] = tuple(loops.routine(reader, target) for reader in plan.blocks.kernels)
    if plan.epilogue is not None:
        tables["epilogue"] = (loops.routine(plan.epilogue, target),)
    return Entry(nest(plan), tables)


def call(launch: Launch, target: CpuTarget) -> Call:
    """The argument block of a launch, and its units: (batch, row block, panel)."""
    assert isinstance(launch.kernel, MatmulKernel)
    plan = Plan(launch.kernel, target)
    values: dict[str, Any] = dict(zip(launch.kernel.words, launch.words, strict=True))
    row_blocks = (values["m"] + (plan.row_block - 1)) // plan.row_block
    panels = (values["n"] + (plan.columns - 1)) // plan.columns
    values["row_blocks"] = row_blocks
    units = values["batch0"] * values["batch1"] * panels * row_blocks
    return Call({word: values.get(word) for word in plan.words}, units)


def scratch_bytes(kernel: MatmulKernel, target: CpuTarget, k: int) -> int:
    """Scratch bytes of a launch with this `k`, including the driver's header."""
    return Plan(kernel, target).scratch_bytes(k)

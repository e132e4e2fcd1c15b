"""The attention generator: the matmul micro-kernel twice around an online softmax.

`entry` compiles an `AttentionKernel` for a target to an `Entry`. Keys are processed in blocks of 64 aligned to absolute
positions, each packed once for all query rows of a unit. A row's bits depend on its own query and the keys that it
sees, never on its neighbours in a tile, a chunk or a batch. A score of -inf is a masked key, any finite one is real.

`plan` has sizes and the scratch map, `nest` the loops over units, key blocks and tiles; the functions that they call
are in `rows` (state per query row), `packing` (a block of K and V), `softmax` (scores to weights) and `outputs`
(weights times values). `tiles` calls the micro-kernels. `gradient` has the same for an `AttentionGradKernel`.
"""

from typing import Any

from rlx.backends.cpu.attention.gradient import GradPlan as GradPlan
from rlx.backends.cpu.attention.gradient import grad_entry as grad_entry
from rlx.backends.cpu.attention.nest import entry as entry
from rlx.backends.cpu.attention.plan import MASKS as MASKS
from rlx.backends.cpu.attention.plan import Plan as Plan
from rlx.backends.cpu.routine import Call
from rlx.backends.cpu.targets import CpuTarget
from rlx.lir.kernels import AttentionGradKernel, AttentionKernel
from rlx.lir.program import Launch


def call(launch: Launch, target: CpuTarget) -> Call:
    """The argument block of a launch, and its units.

    Units of attention are (batch, key head, block of query positions). Those of the gradient are (batch, key head): a
    unit loops over blocks of query rows and, inside, over blocks of keys, so every sum has one order.
    """
    kernel = launch.kernel
    values: dict[str, Any] = dict(zip(kernel.words, launch.words, strict=True))
    units = values["batch"] * values["kv_heads"]
    if isinstance(kernel, AttentionKernel):
        positions = Plan(kernel, target).unit_positions
        units = units * ((values["q_len"] + (positions - 1)) // positions)
    return Call({"parts": None, **values}, units)


def scratch_bytes(kernel: AttentionKernel | AttentionGradKernel, target: CpuTarget) -> int:
    """Scratch bytes of a launch, including the driver's header."""
    if isinstance(kernel, AttentionGradKernel):
        return GradPlan(kernel.attention, target).regions["end"]
    return Plan(kernel, target).regions["end"]

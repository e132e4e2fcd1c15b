"""The attention generator: the matmul micro-kernel twice around an online softmax.

In comes an `AttentionKernel` and a target, out comes an `Entry`. Keys are taken in blocks of 64 cut at absolute
positions, each made ready once for all query rows of a unit; a row's bits depend on its own query and on the keys that
it sees, never on its neighbours in a tile, a chunk or a batch. A score of -inf is a masked key, any finite one is real.

`plan` holds sizes and the map of scratch, `nest` the loops over units, key blocks and tiles; the functions that they
call are in `rows` (what is kept for each query row), `packing` (a block of K and V), `softmax` (scores to weights) and
`outputs` (weights times values). `tiles` calls the micro-kernels.
`gradient` has the same for an `AttentionGradKernel`.
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

    Those of attention are (batch, key head, block of query positions). Those of the gradient are (batch, key head): a
    unit goes through blocks of query rows, and for each through blocks of keys, so every sum has one order.
    """
    kernel = launch.kernel
    given: dict[str, Any] = dict(zip(kernel.words, launch.words, strict=True))
    units = given["batch"] * given["kv_heads"]
    if isinstance(kernel, AttentionKernel):
        positions = Plan(kernel, target).unit_positions
        units = units * ((given["q_len"] + (positions - 1)) // positions)
    return Call({"parts": None, **given}, units)


def scratch_bytes(kernel: AttentionKernel | AttentionGradKernel, target: CpuTarget) -> int:
    """Scratch that a launch needs, the driver's header included."""
    if isinstance(kernel, AttentionGradKernel):
        return GradPlan(kernel.attention, target).regions["end"]
    return Plan(kernel, target).regions["end"]

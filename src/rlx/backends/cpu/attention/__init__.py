"""The attention generator: the matmul micro-kernel twice around an online softmax.

In comes an `AttentionKernel` and a target, out comes an `Entry`. Keys are taken in blocks of 64 cut at absolute
positions, each made ready once for all query rows of a unit; a row's bits depend on its own query and on the keys that
it sees, never on its neighbours in a tile, a chunk or a batch. A score of -inf is a masked key, any finite one is real.

`plan` holds sizes and the map of scratch, `nest` the loops over units, key blocks and tiles; the functions that they
call are in `rows` (what is kept for each query row), `packing` (a block of K and V) and `softmax` (scores to weights).
`gradient` has the same for an `AttentionGradKernel`.
"""

from rlx.backends.cpu.attention.gradient import GradPlan as GradPlan
from rlx.backends.cpu.attention.gradient import grad_entry as grad_entry
from rlx.backends.cpu.attention.nest import entry as entry
from rlx.backends.cpu.attention.plan import MASKS as MASKS
from rlx.backends.cpu.attention.plan import Plan as Plan
from rlx.backends.cpu.targets import CpuTarget
from rlx.lir.kernels import AttentionGradKernel, AttentionKernel


def scratch_bytes(kernel: AttentionKernel | AttentionGradKernel, target: CpuTarget) -> int:
    """Scratch that a launch needs, the driver's header included."""
    if isinstance(kernel, AttentionGradKernel):
        return GradPlan(kernel.attention, target).regions["end"]
    return Plan(kernel, target).regions["end"]

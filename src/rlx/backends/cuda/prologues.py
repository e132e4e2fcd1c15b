"""Prologues: a matmul of one row computes that row itself, in every block, instead of waiting for another launch.

The row, such as a normalised one, is computed by the loop kernel that would have computed it, bit by bit, while the
weights are on their way.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.cuda.kernel_plan import EXTRA_WORDS, KernelPlan, Pass, entry
from rlx.backends.cuda.targets import CudaTarget
from rlx.dtypes import F32
from rlx.lir.kernels import MatmulKernel
from rlx.lir.loops import LoopKernel
from rlx.lir.program import ARENA, Program
from rlx.lir.views import View

if TYPE_CHECKING:
    from rlx.backends.cuda.launch_plan import PlannedLaunch

ALIGNMENT = 16  # of the row in shared memory
BARRIER = 15  # of the threads that compute the row; the matmul uses the lower ones


@dataclass(frozen=True)
class PrologueKernel:
    """A loop kernel whose only result is the left operand of a matmul, and that matmul."""

    producer: LoopKernel
    variant: str  # of the producer
    consumer: MatmulKernel

    kind = "prologue"

    @property
    def words(self) -> tuple[str, ...]:
        """Those of the producer, those of the matmul, and where in shared memory the row is."""
        first = tuple(f"{name}.row" for name in (*self.producer.words, *EXTRA_WORDS))
        return (*first, *self.consumer.words, *EXTRA_WORDS, "produced_at")

    @property
    def symbol(self) -> str:
        text = f"{self.producer.fingerprint} {self.variant} {self.consumer.fingerprint}"
        return f"prologue.{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


class PrologueGenerator:
    """Writes CUDA C for matmuls with prologues; variants are those of the matmul."""

    def plan(self, kernel: PrologueKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        raise AssertionError("plans of prologues are made by `fuse_prologues`")

    def source(self, kernel: PrologueKernel, variant: str, target: CudaTarget) -> str:
        from rlx.backends.cuda.generators import generator
        from rlx.backends.cuda.matmul.generator import source_with_prologue

        name, lanes = entry(kernel.producer, kernel.variant), _lanes(kernel.variant)
        text = _as_prologue(generator(kernel.producer).source(kernel.producer, kernel.variant, target), name, lanes)
        (output,) = (p.name for p in kernel.producer.params if p.written)
        compute = f"""
  float* const produced = (float*)(shared + all.produced_at);
  if (threadIdx.x < {lanes}) {{
    Words_{name} row = all.row;
    row.{output} = produced;
    {name}(row);
  }}
  __syncthreads();
"""
        struct = f"{text}\nstruct All {{ Words_{name} row; Words product; i64 produced_at; }};"
        return source_with_prologue(kernel.consumer, variant, target, entry(kernel, variant), struct, compute)


def _lanes(variant: str) -> int:
    """The threads that a variant of a loop kernel runs a row with."""
    match = re.match(r"rows_(\d+)", variant)
    return int(match[1]) if match else 0


def _as_prologue(source: str, name: str, lanes: int) -> str:
    from rlx.backends.cuda.sequences import as_device_function

    text = as_device_function(source, name, blocks=1)
    return text.replace("__syncthreads();", f"team_barrier({BARRIER}, {lanes});")


def fuse_prologues(planned: Sequence[PlannedLaunch], program: Program) -> list[PlannedLaunch]:
    """Replaces each launch that computes the only row of the next matmul, and that matmul, by one launch."""
    fused = list(planned)
    readers = Counter(view.buffer for launch in program.launches for view in set(launch.views(written=False)))
    edges = {edge for control in program.controls for edge in control.edges}
    for i in range(len(planned) - 1):
        if i + 1 not in edges and _fits(fused[i], fused[i + 1], program, readers):
            fused[i + 1] = _joined(fused[i], fused[i + 1])
            fused[i] = replace(fused[i], plan=KernelPlan(()))
    return fused


def _fits(first: PlannedLaunch, second: PlannedLaunch, program: Program, readers: Mapping[str, int]) -> bool:
    producer, consumer = first.kernel, second.kernel
    if not isinstance(producer, LoopKernel) or not isinstance(consumer, MatmulKernel) or first.steps or second.steps:
        return False
    if len(first.plan.passes) != 1 or len(second.plan.passes) != 1 or first.plan.scratch:
        return False
    (one,), (product,) = first.plan.passes, second.plan.passes
    words = dict(zip(consumer.words, second.words.tolist(), strict=False))
    if one.grid != (1, 1, 1) or one.shared or not product.variant.startswith("rows") or words["m"] != 1:
        return False
    if not 0 < _lanes(one.variant) <= product.threads or _has_warp_loops(one.variant):
        return False
    outputs = [view for view in program.launches[first.number].views(written=True)]
    row = dict(zip(consumer.words, program.launches[second.number].words, strict=True))["a"]
    if len(outputs) != 1 or not isinstance(row, View) or row.buffer != outputs[0].buffer or consumer.dtype is not F32:
        return False
    alone = readers[row.buffer] == 1 and program.buffers[row.buffer].kind == ARENA
    return alone and outputs[0].dtype is F32 and row.is_contiguous() and row.offset == 0


def _has_warp_loops(variant: str) -> bool:
    """Whether warps of the unit run loops of their own, with barriers for the whole block."""
    return re.search(r"_w\d", variant) is not None


def _joined(first: PlannedLaunch, second: PlannedLaunch) -> PlannedLaunch:
    assert isinstance(first.kernel, LoopKernel) and isinstance(second.kernel, MatmulKernel)
    (one,), (product,) = first.plan.passes, second.plan.passes
    kernel = PrologueKernel(first.kernel, one.variant, second.kernel)
    at = -(-product.shared // ALIGNMENT) * ALIGNMENT
    depth = int(second.words[second.kernel.words.index("k")])
    words = np.concatenate([first.words, second.words, [at]])
    operands = (*first.operands, *((len(first.words) + word, buffer) for word, buffer in second.operands))
    plan = replace(second.plan, passes=(Pass(product.variant, product.grid, product.threads, at + 4 * depth),))
    return replace(second, kernel=kernel, plan=plan, words=words, operands=operands)

"""Prologues: a matmul of one row computes that row itself, in every block, instead of waiting for another launch.

The row, such as a normalised one, is computed by the loop kernel that would have computed it, bit by bit, while the
weights are on their way.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.cuda.kernel_plan import EXTRA_WORDS, KernelPlan, entry
from rlx.backends.cuda.loops.emitter import WARP, Emitter, Variant
from rlx.backends.cuda.matmul.common import multiplied
from rlx.backends.cuda.sized import Sizes, with_sizes
from rlx.backends.cuda.targets import CudaTarget
from rlx.dtypes import F32
from rlx.fast_dataclass import dataclass
from rlx.lir.kernels import MatmulKernel
from rlx.lir.loops import LoopKernel
from rlx.lir.program import ARENA, Program
from rlx.lir.views import View

if TYPE_CHECKING:
    from rlx.backends.cuda.launch_plan import PlannedLaunch


@dataclass(frozen=True)
class PrologueKernel:
    """A loop kernel whose only result is the left operand of a matmul, and that matmul."""

    producer: LoopKernel
    variant: str  # of the producer
    consumer: MatmulKernel
    width: int  # threads that compute the row
    fetched: tuple[str, ...]  # operands of the producer that no launch writes, which are fetched early
    sizes: tuple[Sizes, Sizes]  # words of the producer and of the matmul that are constants

    kind = "prologue"

    @property
    def words(self) -> tuple[str, ...]:
        """Those of the producer, those of the matmul, and the bytes of fetched operands."""
        first = tuple(f"{name}.row" for name in (*self.producer.words, *EXTRA_WORDS))
        return (*first, *self.consumer.words, *EXTRA_WORDS, *(f"bytes_{name}" for name in self.fetched))

    @property
    def fault_words(self) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self.words) if name in ("fault", "fault.row"))

    @property
    def symbol(self) -> str:
        kernels = f"{self.producer.fingerprint} {self.variant} {self.consumer.fingerprint}"
        text = f"{kernels} {self.width} {self.fetched} {self.sizes}"
        return f"prologue.{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


class PrologueGenerator:
    """Writes CUDA C for matmuls with prologues; variants are those of the matmul."""

    def plan(self, kernel: PrologueKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        raise AssertionError("plans of prologues are made by `fuse_prologues`")

    def source(self, kernel: PrologueKernel, variant: str, target: CudaTarget) -> str:
        from rlx.backends.cuda.matmul.generator import source_with_prologue

        name, width = entry(kernel.producer, kernel.variant), kernel.width
        (output,) = (p.name for p in kernel.producer.params if p.written)
        # The row goes to where the matmul wants it, in the type that it multiplies.
        params = tuple(
            replace(p, dtype=multiplied(kernel.consumer)) if p.written else p for p in kernel.producer.params
        )
        producer, producer_variant = replace(kernel.producer, params=params), Variant.parse(kernel.variant)
        text = Emitter(producer, producer_variant, name, ranged=True, width=width).source()
        text = with_sizes(text, kernel.sizes[0])
        fetches = "".join(f"  fetch(all.row.{operand}, all.bytes_{operand});\n" for operand in kernel.fetched)
        compute = f"""
  for (int i = k + threadIdx.x; i < (k + 31) / 32 * 32; i += blockDim.x) xs[i] = T{{}};
  if (threadIdx.x < {width}) {{
    Words_{name} row = all.row;
    row.{output} = xs;
    {name}(row, 0, 1);
  }}
"""
        sizes = "".join(f" i64 bytes_{operand};" for operand in kernel.fetched)
        struct = f"{text}\nstruct All {{ Words_{name} row; Words product;{sizes} }};"
        own = entry(kernel, variant)
        source = source_with_prologue(kernel.consumer, variant, target, own, struct, fetches, compute)
        return with_sizes(source, kernel.sizes[1])


def fuse_prologues(
    planned: Sequence[PlannedLaunch], program: Program, fetched: Callable[[int], Mapping[str, int]]
) -> list[PlannedLaunch]:
    """Replaces each launch that computes the only row of the next matmul, and that matmul, by one launch.

    `fetched` are the bytes of small operands of a launch that no launch writes, by name.
    """
    fused = list(planned)
    readers = Counter(view.buffer for launch in program.launches for view in set(launch.views(written=False)))
    edges = {edge for control in program.controls for edge in control.edges}
    for i in range(len(planned) - 1):
        if i + 1 not in edges and _fits(fused[i], fused[i + 1], program, readers):
            fused[i + 1] = _joined(fused[i], fused[i + 1], fetched(i))
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
    variant = Variant.parse(one.variant)
    if not variant.lanes or product.threads < WARP or variant.warps or variant.piece:
        return False
    outputs = [view for view in program.launches[first.number].views(written=True)]
    row = dict(zip(consumer.words, program.launches[second.number].words, strict=True))["a"]
    if len(outputs) != 1 or not isinstance(row, View) or row.buffer != outputs[0].buffer or not consumer.dtype.is_float:
        return False
    alone = readers[row.buffer] == 1 and program.buffers[row.buffer].kind == ARENA
    takes = outputs[0].dtype in (F32, multiplied(consumer))
    return alone and takes and row.is_contiguous() and row.offset == 0


def _joined(first: PlannedLaunch, second: PlannedLaunch, fetched: Mapping[str, int]) -> PlannedLaunch:
    assert isinstance(first.kernel, LoopKernel) and isinstance(second.kernel, MatmulKernel)
    variant, threads = first.plan.passes[0].variant, second.plan.passes[0].threads
    width = min(Variant.parse(variant).lanes, 1 << (threads.bit_length() - 1))  # powers of two
    kernel = PrologueKernel(first.kernel, variant, second.kernel, width, tuple(fetched), (first.sizes, second.sizes))
    words = np.concatenate([first.words, second.words, np.array([*fetched.values()], np.int64)])
    operands = (*first.operands, *((len(first.words) + word, buffer) for word, buffer in second.operands))
    covers = first.number, second.number
    return replace(second, kernel=kernel, words=words, operands=operands, sizes=(), covers=covers)

"""Sequences: small consecutive loop launches as one kernel of one block, with barriers only between those that depend.

A launch of a few microseconds of latency and little work, such as the norm of one token's heads, costs more to start
than to run. Each piece computes what it computes by itself, bit by bit.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.cuda.kernel_plan import EXTRA_WORDS, KernelPlan, Pass, entry
from rlx.backends.cuda.targets import CudaTarget
from rlx.lir.loops import LoopKernel
from rlx.lir.program import Launch

if TYPE_CHECKING:
    from rlx.backends.cuda.launch_plan import PlannedLaunch

PIECE_THREADS = 256  # of a block of the loop kernels that may be pieces
THREADS = 1024
AT_ONCE = THREADS // PIECE_THREADS  # blocks of a piece that the threads of a sequence stand for
MOST_TURNS = 4  # of the threads of a sequence over one piece
MOST_WORDS = 400  # of the parameters of a kernel: 4 KB are 512
VARIANT = "sequence"


@dataclass(frozen=True)
class Piece:
    """A loop kernel of a sequence, and whether it must wait for the pieces before it."""

    kernel: LoopKernel
    variant: str
    waits: bool


@dataclass(frozen=True)
class SequenceKernel:
    """Several loop kernels, one after the other."""

    pieces: tuple[Piece, ...]

    kind = "sequence"

    @property
    def words(self) -> tuple[str, ...]:
        return tuple(
            f"{name}.{i}" for i, piece in enumerate(self.pieces) for name in (*piece.kernel.words, *EXTRA_WORDS)
        )

    @property
    def symbol(self) -> str:
        text = "|".join(f"{p.kernel.fingerprint} {p.variant} {p.waits}" for p in self.pieces)
        return f"sequence.{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


class SequenceGenerator:
    """Writes CUDA C for sequences, from that of their pieces."""

    def plan(self, kernel: SequenceKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        return KernelPlan((Pass(VARIANT, (1, 1, 1), THREADS),))

    def source(self, kernel: SequenceKernel, variant: str, target: CudaTarget) -> str:
        from rlx.backends.cuda.generators import generator

        texts: dict[str, str] = {}
        for piece in kernel.pieces:
            name = entry(piece.kernel, piece.variant)
            if name not in texts:
                text = generator(piece.kernel).source(piece.kernel, piece.variant, target)
                texts[name] = as_device_function(text, name)
        names = [entry(piece.kernel, piece.variant) for piece in kernel.pieces]
        fields = "\n".join(f"  Words_{name} p{i};" for i, name in enumerate(names))
        calls = "\n".join(
            ("  __syncthreads();\n" if piece.waits else "") + f"  {name}(w.p{i});"
            for i, (piece, name) in enumerate(zip(kernel.pieces, names, strict=True))
        )
        own = entry(kernel, variant)
        head = (
            f'extern "C" __global__ void __launch_bounds__({THREADS}) {own}(const __grid_constant__ Words_{own} w) {{'
        )
        parts = (
            *texts.values(),
            f"struct Words_{own} {{\n{fields}\n}};",
            head,
            "  start_next();",
            "  wait_for_inputs();",
        )
        return "\n".join((*parts, calls, "}", ""))


def as_device_function(source: str, name: str, *, blocks: int = AT_ONCE) -> str:
    """The source of a kernel as a function for the threads of one block, which stand for so many blocks of it."""
    head = rf'extern "C" __global__ void __launch_bounds__\(\d+\) {name}\(const (__grid_constant__ )?Words_{name} w\)'
    text, count = re.subn(head, f"INLINE void {name}(const Words_{name}& w)", source)
    assert count == 1, "a loop kernel has one entry"
    for line in ("wait_for_inputs();", "start_next();"):
        text = text.replace(line, "")
    places = {"blockIdx.x": "0", "blockIdx.y": "0", "gridDim.x": str(blocks), "gridDim.y": "1"}
    return re.sub(r"\b(blockIdx|gridDim)\.[xy]", lambda match: places[match[0]], text)


def fuse_sequences(
    planned: Sequence[PlannedLaunch], launches: Sequence[Launch], edges: Iterable[int]
) -> list[PlannedLaunch]:
    """Replaces runs of small loop launches by sequences: the first of a run becomes the sequence, the others nothing.

    `edges` are launches at which a loop or branch begins or ends.
    """
    fused = list(planned)
    stops = set(edges)
    run: list[int] = []
    for i in range(len(planned) + 1):
        ends = i == len(planned) or i in stops or not _is_small(planned[i])
        if run and (ends or sum(len(planned[j].words) for j in (*run, i)) > MOST_WORDS):
            _replace(fused, launches, run)
            run = []
        if not ends:
            run.append(i)
    return fused


def _is_small(launch: PlannedLaunch) -> bool:
    passes = launch.plan.passes
    if not isinstance(launch.kernel, LoopKernel) or len(passes) != 1 or launch.plan.scratch or launch.steps:
        return False
    (one,) = passes
    blocks = one.grid[0] * one.grid[1]
    cooperative = re.match(r"rows_(\d+)", one.variant)
    wide = cooperative is not None and int(cooperative[1]) > 32  # its threads meet at barriers of a block of their own
    return one.threads == PIECE_THREADS and not one.shared and not wide and blocks <= MOST_TURNS * AT_ONCE


def _replace(fused: list[PlannedLaunch], launches: Sequence[Launch], run: Sequence[int]) -> None:
    if len(run) < 2:
        return
    read, written = set[str](), set[str]()
    pieces, operands, at = list[Piece](), list[tuple[int, str]](), 0
    for i in run:
        reads = {v.buffer for v in launches[i].views(written=False)}
        writes = {v.buffer for v in launches[i].views(written=True)}
        waits = bool(written & (reads | writes) or read & writes)
        if waits:
            read, written = set(), set()
        read |= reads
        written |= writes
        kernel = fused[i].kernel
        assert isinstance(kernel, LoopKernel)
        pieces.append(Piece(kernel, fused[i].plan.passes[0].variant, waits))
        operands += [(at + word, buffer) for word, buffer in fused[i].operands]
        at += len(fused[i].words)
    kernel = SequenceKernel(tuple(pieces))
    words = np.concatenate([fused[i].words for i in run])
    plan = KernelPlan((Pass(VARIANT, (1, 1, 1), THREADS),))
    first = run[0]
    fused[first] = replace(fused[first], kernel=kernel, plan=plan, words=words, operands=tuple(operands))
    for i in run[1:]:
        fused[i] = replace(fused[i], plan=KernelPlan(()))

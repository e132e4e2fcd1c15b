"""Chains: consecutive small loop launches as one kernel whose blocks each run some units of all of them.

The norm, the rotation and the append of a head, for example, depend on that head alone, so a block runs them one after
the other for its heads, with barriers of the block between them. A *track* is a set of launches that depend on each
other; `footprints.py` says into how many groups of units a track falls apart. Each launch computes what it computes by
itself, bit by bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate, combinations
from typing import TYPE_CHECKING

import numpy as np

from rlx.arrays import Array
from rlx.backends.cuda.kernel_plan import EXTRA_WORDS, KernelPlan, Pass, entry
from rlx.backends.cuda.loops.emitter import WARP, Emitter, Variant
from rlx.backends.cuda.loops.footprints import Footprint, footprints
from rlx.backends.cuda.sized import Sizes, digest, with_sizes
from rlx.backends.cuda.targets import CudaTarget
from rlx.fast_dataclass import dataclass
from rlx.lir.loops import LoopKernel
from rlx.lir.program import Program

if TYPE_CHECKING:
    from rlx.backends.cuda.launch_plan import PlannedLaunch

THREADS = 256  # of a block, at most
MOST_WORK = 4 * 1024  # threads that the units of one group can use
MOST_WORDS = 400  # of the parameters of a kernel: 4 KB are 512
BLOCKS_PER_PROCESSOR = 8  # at most; larger launches fill the GPU each by itself
VARIANT = "chain"
Fetched = Callable[[int], Mapping[str, int]]


@dataclass(frozen=True)
class Piece:
    """A loop kernel of a chain."""

    kernel: LoopKernel
    variant: str
    waits: bool  # for the pieces of the track before it
    fetched: tuple[str, ...]  # operands that no launch writes, which are fetched early
    sizes: Sizes  # words that are constants

    @property
    def text(self) -> str:
        return f"{self.kernel.fingerprint} {self.variant} {self.waits} {self.fetched} {self.sizes}"

    @property
    def function(self) -> str:
        """The name of its function."""
        return f"{entry(self.kernel, self.variant)}_{digest(self.sizes)}"


@dataclass(frozen=True)
class ChainKernel:
    """Tracks of loop kernels. Blocks are numbered track by track."""

    tracks: tuple[tuple[Piece, ...], ...]

    kind = "chain"

    @property
    def pieces(self) -> tuple[Piece, ...]:
        return tuple(piece for track in self.tracks for piece in track)

    @property
    def words(self) -> tuple[str, ...]:
        """Those of each piece, the units of a block and the bytes of fetched operands; then the blocks of tracks."""
        names: list[str] = []
        for i, piece in enumerate(self.pieces):
            own = (*piece.kernel.words, *EXTRA_WORDS, "share", *(f"bytes_{name}" for name in piece.fetched))
            names += (f"{name}.{i}" for name in own)
        return (*names, *(f"end.{i}" for i in range(len(self.tracks))))

    @property
    def fault_words(self) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self.words) if name.startswith("fault."))

    @property
    def symbol(self) -> str:
        text = "||".join("|".join(piece.text for piece in track) for track in self.tracks)
        return f"chain.{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


# -- code -------------------------------------------------------------------------------------------------------------
class ChainGenerator:
    """Writes CUDA C for chains, from that of their pieces."""

    def plan(self, kernel: ChainKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        raise AssertionError("plans of chains are made by `fuse_chains`")

    def source(self, kernel: ChainKernel, variant: str, target: CudaTarget) -> str:
        functions: dict[str, str] = {}
        fields: list[str] = []
        for i, piece in enumerate(kernel.pieces):
            name = piece.function
            if name not in functions:
                emitter = Emitter(piece.kernel, Variant.parse(piece.variant), name, ranged=True)
                functions[name] = with_sizes(emitter.source(), piece.sizes)
            fields += [f"  Words_{name} p{i};", f"  i64 share{i};"]
            fields += [f"  i64 bytes{i}_{operand};" for operand in piece.fetched]
        fields += [f"  i64 end{i};" for i in range(len(kernel.tracks))]
        own = entry(kernel, variant)
        head = (
            f'extern "C" __global__ void __launch_bounds__({THREADS}) {own}(const __grid_constant__ Words_{own} w) {{'
        )
        lines = [*functions.values(), f"struct Words_{own} {{", *fields, "};", head]
        at = 0
        for i, track in enumerate(kernel.tracks):
            begin = f"w.end{i - 1}" if i else "0"
            lines.append(f"  if (blockIdx.x >= {begin} && blockIdx.x < w.end{i}) {{")
            lines.append(f"    const i64 group = blockIdx.x - {begin};")
            lines += [
                f"    fetch(w.p{at + j}.{x}, w.bytes{at + j}_{x});" for j, p in enumerate(track) for x in p.fetched
            ]
            lines += ["    start_next();", "    wait_for_inputs();"]
            for j, piece in enumerate(track):
                lines += _call(piece, at + j)
            lines.append("  }")
            at += len(track)
        return "\n".join((*lines, "}", ""))


def _call(piece: Piece, i: int) -> list[str]:
    variant, extent = Variant.parse(piece.variant), piece.kernel.root.extent
    kind = "i32" if variant.narrow else "i64"
    units = str(extent) if isinstance(extent, int) else f"w.p{i}.{extent.name}"
    range_of = f"({kind})(group * w.share{i}), ({kind})smaller(group * w.share{i} + w.share{i}, (i64){units})"
    guard = f"if (threadIdx.x < {variant.lanes}) " if variant.lanes > WARP else ""
    barrier = ["    __syncthreads();"] if piece.waits else []
    return [*barrier, f"    {guard}{piece.function}(w.p{i}, {range_of});"]


# -- plans ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Candidate:
    """A launch that may be a piece: what it touches, and how many units it has."""

    at: int
    launch: PlannedLaunch
    variant: Variant
    units: int
    reads: frozenset[str]
    writes: frozenset[str]

    @property
    def kernel(self) -> LoopKernel:
        assert isinstance(self.launch.kernel, LoopKernel)
        return self.launch.kernel

    def threads(self, units: int) -> int:
        """The threads that some of its units can use."""
        return -(-units // self.variant.pack) if self.kernel.chunk else units * self.variant.lanes


@dataclass(frozen=True)
class _Track:
    members: tuple[int, ...]  # of the run
    groups: int
    shares: tuple[int, ...]  # units per group, by member


class _Fusion:
    """Finds chains in a program."""

    def __init__(
        self, planned: Sequence[PlannedLaunch], program: Program, fetched: Fetched, target: CudaTarget
    ) -> None:
        self.planned, self.program, self.fetched, self.target = planned, program, fetched, target
        self.known: dict[tuple[object, ...], list[_Track]] = {}

    def fused(self) -> list[PlannedLaunch]:
        result = list(self.planned)
        stops = {edge for control in self.program.controls for edge in control.edges}
        run: list[_Candidate] = []
        for i in range(len(result) + 1):
            candidate = self.candidate(i) if i < len(result) else None
            full = candidate is not None and sum(len(c.launch.words) + 4 for c in (*run, candidate)) > MOST_WORDS
            if run and (i in stops or full or candidate is None):
                self.replace(result, run)
                run = []
            if candidate is not None:
                run.append(candidate)
        return result

    def candidate(self, i: int) -> _Candidate | None:
        launch = self.planned[i]
        passes = launch.plan.passes
        if not isinstance(launch.kernel, LoopKernel) or len(passes) != 1 or launch.plan.scratch or launch.steps:
            return None
        variant = Variant.parse(passes[0].variant)
        if variant.warps or variant.piece or variant.lanes > THREADS:
            return None
        extent = launch.kernel.root.extent
        words = dict(zip(launch.kernel.words, launch.words.tolist(), strict=False))
        units = extent if isinstance(extent, int) else words[extent.name]
        touched = [frozenset(v.buffer for v in self.program.launches[i].views(written=w)) for w in (False, True)]
        return _Candidate(i, launch, variant, units, *touched)

    # -- dependence --
    @staticmethod
    def conflict(a: _Candidate, b: _Candidate) -> bool:
        """Whether one writes what the other touches. Launches of a chain share no memory besides (`joined`)."""
        return bool(a.writes & (b.reads | b.writes) or a.reads & b.writes)

    def tracks(self, run: Sequence[_Candidate]) -> list[_Track]:
        """The run as tracks. Layers have the same ones: only names of buffers differ."""
        numbers: dict[str, int] = {}
        key: list[object] = []
        for c in run:
            buffers = [numbers.setdefault(buffer, len(numbers)) for _, buffer in c.launch.operands]
            words = c.launch.words[: len(c.kernel.words)].tobytes()
            key.append((c.kernel.symbol, str(c.variant), words, *buffers))
        known = tuple(key)
        if known not in self.known:
            self.known[known] = self.found_tracks(run)
        return self.known[known]

    def found_tracks(self, run: Sequence[_Candidate]) -> list[_Track]:
        track_of = list(range(len(run)))
        pairs = [(i, j) for i, j in combinations(range(len(run)), 2) if self.conflict(run[i], run[j])]
        for i, j in pairs:
            track_of = [track_of[i] if t == track_of[j] else t for t in track_of]
        tracks = []
        for number in dict.fromkeys(track_of):
            members = tuple(i for i, t in enumerate(track_of) if t == number)
            groups, shares = self.groups([run[i] for i in members])
            work = max(run[i].threads(share) for i, share in zip(members, shares, strict=True))
            if work <= MOST_WORK and groups <= BLOCKS_PER_PROCESSOR * self.target.processors:
                tracks.append(_Track(members, groups, shares))
        return tracks

    def groups(self, members: Sequence[_Candidate]) -> tuple[int, tuple[int, ...]]:
        """The most groups of consecutive units that do not depend on each other, and the units of each in a group."""
        together = 1, tuple(c.units for c in members)
        most = BLOCKS_PER_PROCESSOR * self.target.processors
        if any(c.kernel.chunk or c.threads(c.units) > MOST_WORK * most for c in members):
            return together
        touched = [self.touched(c) for c in members]
        for groups in range(min(most, *(c.units for c in members)), 1, -1):
            if any(c.units % groups for c in members):
                continue
            if all(_apart(a, b, groups) for a, b in combinations(touched, 2)):
                return groups, tuple(c.units // groups for c in members)
        return together

    def touched(self, c: _Candidate) -> list[tuple[str, Footprint]]:
        """Footprints in bytes of buffers."""
        words = dict(zip(c.kernel.words, c.launch.words.tolist(), strict=False))
        buffers = dict(c.launch.operands)
        result = []
        for f in footprints(c.kernel, words, c.units):
            size, offset = c.kernel.params[f.param].dtype.size, int(c.launch.words[f.param])
            moved = replace(f, low=f.low * size + offset, high=f.high * size + (size - 1) + offset)
            result.append((buffers[f.param], moved))
        return result

    # -- results --
    def replace(self, result: list[PlannedLaunch], run: Sequence[_Candidate]) -> None:
        tracks = self.tracks(run)
        members = [run[i] for track in tracks for i in track.members]
        if len(members) < 2:
            return
        kernels: list[tuple[Piece, ...]] = []
        words: list[Array] = []
        operands: list[tuple[int, str]] = []
        at = 0
        for track in tracks:
            pieces: list[Piece] = []
            pending: list[_Candidate] = []
            for i, share in zip(track.members, track.shares, strict=True):
                c = run[i]
                waits = any(self.conflict(before, c) for before in pending)
                pending = [c] if waits else [*pending, c]
                fetched = self.fetched(c.at)
                pieces.append(Piece(c.kernel, str(c.variant), waits, tuple(fetched), c.launch.sizes))
                operands += [(at + word, buffer) for word, buffer in c.launch.operands]
                words.append(np.array([*c.launch.words, share, *fetched.values()], np.int64))
                at += len(words[-1])
            kernels.append(tuple(pieces))
        ends = list(accumulate(track.groups for track in tracks))
        words.append(np.array(ends, np.int64))
        kernel = ChainKernel(tuple(kernels))
        shares = [(run[i], s) for track in tracks for i, s in zip(track.members, track.shares, strict=True)]
        most = max(max(c.threads(s), c.variant.lanes) for c, s in shares)
        threads = min(THREADS, max(WARP, 1 << (most - 1).bit_length()))
        plan = KernelPlan((Pass(VARIANT, (ends[-1], 1, 1), threads),))
        first = min(c.at for c in members)
        for c in members:
            result[c.at] = replace(result[c.at], plan=KernelPlan(()))
        result[first] = replace(
            result[first], kernel=kernel, plan=plan, words=np.concatenate(words), operands=tuple(operands), sizes=(),
            covers=tuple(c.at for c in members),
        )  # fmt: skip


def _apart(a: Iterable[tuple[str, Footprint]], b: Sequence[tuple[str, Footprint]], groups: int) -> bool:
    """Whether no group of one launch touches what another group of the other launch writes, or the other way round."""
    for buffer, one in a:
        for other_buffer, other in b:
            if buffer == other_buffer and (one.written or other.written) and not _in_order(one, other, groups):
                return False
    return True


def _in_order(a: Footprint, b: Footprint, groups: int) -> bool:
    """Whether what group i of `a` touches is before group i + 1 of `b` and after group i - 1."""
    low, high = a.low.reshape(groups, -1).min(1), a.high.reshape(groups, -1).max(1)
    other_low, other_high = b.low.reshape(groups, -1).min(1), b.high.reshape(groups, -1).max(1)
    rising = bool((other_low[1:] > other_high[:-1]).all())
    return rising and bool((high[:-1] < other_low[1:]).all() and (low[1:] > other_high[:-1]).all())


def fuse_chains(
    planned: Sequence[PlannedLaunch], program: Program, fetched: Fetched, target: CudaTarget
) -> list[PlannedLaunch]:
    """Replaces runs of small loop launches by chains: the first of a run becomes the chain, the others nothing.

    `fetched` are the bytes of small operands of a launch that no launch writes, by name.
    """
    return _Fusion(planned, program, fetched, target).fused()

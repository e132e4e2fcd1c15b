"""Plans launches of loop kernels and writes their variants.

The threads of a unit and the size of packs follow from the extents of its loops alone, never from the number of units:
they determine the order of sums, so results do not depend on the batch size.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from rlx.backends.cuda.kernel_plan import KernelPlan, Pass, entry
from rlx.backends.cuda.loops.emitter import BLOCK, PART, WARP, Emitter, Variant
from rlx.backends.cuda.loops.independence import WarpLoop, are_disjoint, warp_loops
from rlx.backends.cuda.loops.ranges import Ranges
from rlx.backends.cuda.loops.structure import SharedLoop, is_free, largest_pack, shared_loops, split_reductions
from rlx.backends.cuda.targets import CudaTarget
from rlx.fast_dataclass import dataclass
from rlx.lir.kernels import Kernel
from rlx.lir.loops import Arg, LoopKernel, Place, Ref

MOST_LANES = 1024
PACKS_PER_THREAD = 2  # of a row
UNKNOWN_EXTENT = 256  # of loops whose length depends on data
WAVES = 4  # blocks per slot of a processor, at most; threads then go on to further units
THREADS_PER_PROCESSOR = 2048
MOST_SPLITS = 65535  # blocks along y
LONG_ROW = 4 * PART  # terms from which blocks split a reduction


class LoopsGenerator:
    """Writes CUDA C for loop kernels."""

    def plan(self, kernel: Kernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        assert isinstance(kernel, LoopKernel)
        return plan(kernel, words, target)

    def source(self, kernel: Kernel, variant: str, target: CudaTarget) -> str:
        assert isinstance(kernel, LoopKernel)
        return Emitter(kernel, Variant.parse(variant), entry(kernel, variant)).source()


def plan(kernel: LoopKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
    """The pass of a launch; none if there are no units."""
    sizes = _Sizes(kernel, words)
    units = sizes.extent(kernel.root.extent)
    if units <= 0:
        return KernelPlan(())
    narrow = sizes.ranges.fit()
    loops, free, serial = _loops(kernel)
    pack = sizes.pack(loops, free=free)
    distinct = _are_distinct(kernel, words)
    slots = target.processors * THREADS_PER_PROCESSOR * WAVES
    if kernel.chunk:
        variant = Variant(0, pack, narrow, distinct)
        blocks = -(-units // (BLOCK * pack))
        return KernelPlan((Pass(str(variant), (min(blocks, slots // BLOCK), 1, 1), BLOCK),))
    reductions = split_reductions(kernel)
    terms = sizes.extent(reductions[0].extent) if reductions else 0
    if LONG_ROW <= terms <= MOST_SPLITS * PART:
        parts = -(-terms // PART)
        part = Variant(BLOCK, pack, narrow, distinct, piece="part")
        join = replace(part, lanes=min(MOST_LANES, max(2 * WARP, _power(parts))), pack=1, piece="join")
        blocks = min(units, slots // BLOCK)
        passes = Pass(str(part), (blocks, parts, 1), BLOCK), Pass(str(join), (blocks, 1, 1), join.threads)
        return KernelPlan(passes, 8 * units * parts * len(reductions))
    longest = max((sizes.threads(loop, 1 if free else PACKS_PER_THREAD, pack) for loop in loops), default=1)
    split = [distinct and are_disjoint(each.loop, sizes.ranges) for each in serial]
    rounds = [sizes.extent(each.loop.extent) for each, is_split in zip(serial, split, strict=True) if is_split]
    longest = max(longest, *(WARP * steps for steps in rounds), 1)
    lanes = _power(min(longest, BLOCK if free else MOST_LANES))
    warps = sum(1 << i for i, is_split in enumerate(split) if is_split) if lanes > WARP else 0
    variant = Variant(lanes, pack, narrow, distinct, warps)
    blocks = -(-units * lanes // variant.threads)
    splits = max(1, min(-(-longest // lanes), slots // (units * lanes), MOST_SPLITS)) if free else 1
    grid = (max(1, min(blocks, slots // variant.threads)), splits, 1)
    return KernelPlan((Pass(str(variant), grid, variant.threads),))


_known: dict[str, tuple[list[SharedLoop], bool]] = {}  # by fingerprint


def _loops(kernel: LoopKernel) -> tuple[list[SharedLoop], bool, list[WarpLoop]]:
    """The loops that the threads of a unit share, whether they never wait for each other, and loops for warps."""
    if kernel.fingerprint not in _known:
        _known[kernel.fingerprint] = shared_loops(kernel), is_free(kernel)
    return *_known[kernel.fingerprint], warp_loops(kernel)


def _are_distinct(kernel: LoopKernel, words: Mapping[str, int]) -> bool:
    """Whether nothing that the kernel writes has a second name: words of operands number their buffers."""
    buffers = Counter(words[p.name] for p in kernel.params)
    return all(buffers[words[p.name]] == 1 for p in kernel.params if p.written)


def _power(threads: int) -> int:
    """The smallest power of two that is at least `threads`."""
    return 1 << max(0, threads - 1).bit_length()


@dataclass
class _Sizes:
    """The sizes of a launch."""

    kernel: LoopKernel
    words: Mapping[str, int]

    def __post_init__(self) -> None:
        self.ranges = Ranges(self.kernel, self.words)

    def extent(self, extent: int | Arg | Ref) -> int:
        """The iterations of a loop; those of a length that depends on data are bounded."""
        if isinstance(extent, int):
            return extent
        if isinstance(extent, Arg):
            return self.words[extent.name]
        return self.ranges.longest.get(extent.name, UNKNOWN_EXTENT)

    def threads(self, loop: SharedLoop, packs: int, pack: int) -> int:
        """The threads that a loop can use, with so many packs for each."""
        extent = max(1, self.extent(loop.extent))
        if loop.heavy:
            return extent
        elements = pack if loop.packing is not None else 1
        return -(-extent // (elements * packs))

    def pack(self, loops: list[SharedLoop], *, free: bool) -> int:
        """The largest pack that divides the extents of all loops that access packs; chunks may have a tail."""
        packed = [(loop, loop.packing) for loop in loops if loop.packing is not None]
        pack = min((largest_pack(self.kernel, loop) for loop, _ in packed), default=1)
        if self.kernel.chunk:
            return pack
        while any(self.extent(loop.extent) % pack for loop, _ in packed):
            pack //= 2
        if free:  # no sums depend on it: packs only where rows begin at multiples of them
            places = [access.at for _, packing in packed for access in packing.accesses]
            while pack > 1 and any(not self._is_aligned(at, pack) for at in places):
                pack //= 2
        return pack

    def _is_aligned(self, at: Place, pack: int) -> bool:
        strides = [stride if isinstance(stride, int) else self.words[stride.name] for _, stride in at]
        return all(stride % pack == 0 for stride in strides if stride != 1)

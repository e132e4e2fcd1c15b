"""Heads: an attention launch of one token whose blocks compute the queries, keys and values that they read.

A chain whose groups are heads (norm, rotation and append of a head) becomes a prologue of the attention of that head:
each block runs the group of its head, so several blocks write the same numbers. That costs less than another launch.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.cuda.attention.generator import TILE, heads_source
from rlx.backends.cuda.chains import ChainKernel, fetches, functions, run_group
from rlx.backends.cuda.kernel_plan import EXTRA_WORDS, KernelPlan, entry
from rlx.backends.cuda.loops.footprints import Footprint
from rlx.backends.cuda.sized import Sizes, with_sizes
from rlx.backends.cuda.targets import CudaTarget
from rlx.lir.kernels import AttentionKernel

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rlx.backends.cuda.launch_plan import PlannedLaunch

THREADS = 128  # of the attention blocks
VARIANT = "splits_early"


@dataclass(frozen=True)
class HeadsKernel:
    """A chain whose groups are heads, and the attention of these heads."""

    chain: ChainKernel
    attention: AttentionKernel
    sizes: Sizes  # words of the attention kernel that are constants

    kind = "attention"

    @property
    def words(self) -> tuple[str, ...]:
        """Those of the pieces of the chain, then those of the attention kernel."""
        return (*self.chain.piece_words, *self.attention.words, *EXTRA_WORDS)

    @property
    def fault_words(self) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self.words) if name.partition(".")[0] == "fault")

    @property
    def symbol(self) -> str:
        text = f"{self.chain.symbol} {self.attention.fingerprint} {self.sizes}"
        return f"heads.{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


class HeadsGenerator:
    """Writes CUDA C from that of the chain and of the attention kernel."""

    def plan(self, kernel: HeadsKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        raise AssertionError("plans of heads are made by `fuse_chains`")

    def source(self, kernel: HeadsKernel, variant: str, target: CudaTarget) -> str:
        code, fields = functions(kernel.chain.pieces)
        chain = ["struct Chain {", *fields, "};", "INLINE void run_group(const Chain& w, i64 group) {"]
        for track, first in kernel.chain.numbered:
            chain += run_group(track, first)
        early = [line for track, first in kernel.chain.numbered for line in fetches(track, first)]
        entry_code = f"""
struct All {{ Chain chain; Words attention; }};
extern "C" __global__ void __launch_bounds__({THREADS}) {entry(kernel, variant)}(const __grid_constant__ All all) {{
  {{
    const Chain& w = all.chain;
{chr(10).join(early)}
  }}
  attend(all.attention, blockIdx.x, gridDim.x, blockIdx.y, [&](i32 head) {{
    run_group(all.chain, head);
    __syncthreads();
  }});
}}
"""
        attention = with_sizes(heads_source(kernel.attention, variant, target), kernel.sizes)
        return "\n".join((*code, *chain, "}", attention, entry_code))


# -- plans ------------------------------------------------------------------------------------------------------------
def reads_of(launch: PlannedLaunch) -> dict[str, Footprint] | None:
    """What each head of an attention launch of one token reads of queries, keys and values, in bytes of buffers.

    None if it is not such a launch, or if heads do not come one after the other.
    """
    kernel, passes = launch.kernel, launch.plan.passes
    if not isinstance(kernel, AttentionKernel) or kernel.ragged or len(passes) != 1 or passes[0].variant != VARIANT:
        return None
    words = dict(zip(kernel.words, launch.words.tolist(), strict=False))
    if words["batch"] != 1 or words["q_len"] != 1 or kernel.group > TILE or launch.steps:
        return None
    buffers = {kernel.words[word]: buffer for word, buffer in launch.operands}
    stored = (kernel.cache_dtype or kernel.dtype).size
    heads = np.arange(words["kv_heads"], dtype=np.int64)

    def rows(name: str, head: int, last: int, size: int, period: int) -> Footprint:
        low = words[name] + heads * head * size
        return Footprint(0, False, low, low + (last + 1) * size - 1, period * size)

    group, page = kernel.group, kernel.page or 0
    last_query = (group - 1) * words["q_head"] + kernel.head_dim - 1
    reads = {buffers["q"]: rows("q", group * words["q_head"], last_query, kernel.dtype.size, 0)}
    for name, dim in (("k", kernel.head_dim), ("v", kernel.value_dim)):
        last = (page - 1) * words[f"{name}_seq"] + dim - 1
        reads[buffers[name]] = rows(name, words[f"{name}_head"], last, stored, words[f"{name}_page"])
    return reads if len(reads) == 3 else None


def are_apart(writes: Sequence[tuple[str, Footprint]], reads: Mapping[str, Footprint]) -> bool:
    """Whether each head reads only what its own group writes."""
    for buffer, one in writes:
        if buffer not in reads:
            continue
        read, groups = reads[buffer], len(reads[buffer].low)
        low, high = one.low.reshape(groups, -1).min(1), one.high.reshape(groups, -1).max(1)
        if one.period != read.period or (read.period and (low.min() < 0 or high.max() >= read.period)):
            return False
        if (
            (low[1:] <= read.high[:-1]).any()
            or (high[:-1] >= read.low[1:]).any()
            or (read.low[1:] <= read.high[:-1]).any()
        ):
            return False
    return True

"""The code of kernels for people: CUDA C, or PTX, of the variant that small sizes get."""

from __future__ import annotations

from collections.abc import Iterable

from rlx.backends.cuda.generators import generator
from rlx.backends.cuda.nvrtc import compile_ptx
from rlx.backends.cuda.prelude import PRELUDE
from rlx.backends.cuda.targets import CudaTarget
from rlx.lir.kernels import Kernel

TYPICAL = 256  # every size and stride, where a launch's own are not at hand


def kernel_text(kernels: Iterable[Kernel], target: CudaTarget, *, assembly: bool = False) -> str:
    """CUDA C of kernels without the prelude, or with `assembly` their PTX."""
    sources = [_source(kernel, target) for kernel in kernels]
    if not assembly:
        return "\n\n".join(sources)
    capability = target.arch.removeprefix("sm_")
    return compile_ptx(PRELUDE + "\n".join(sources), f"compute_{capability}")


def _source(kernel: Kernel, target: CudaTarget) -> str:
    words = dict.fromkeys(kernel.words, TYPICAL)
    planner = generator(kernel)
    names = dict.fromkeys(one.variant for one in planner.plan(kernel, words, target).passes)
    return "\n".join(planner.source(kernel, name, target) for name in names)

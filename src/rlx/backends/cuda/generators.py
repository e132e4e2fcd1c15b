"""The generator of CUDA C for each kind of kernel."""

from __future__ import annotations

import functools
import importlib

from rlx.backends.cuda.chains import ChainKernel
from rlx.backends.cuda.heads import HeadsKernel
from rlx.backends.cuda.kernel_plan import AnyKernel, Generator
from rlx.backends.cuda.prologues import PrologueKernel
from rlx.backends.cuda.sized import SizedKernel
from rlx.errors import LowerError
from rlx.lir.kernels import AttentionGradKernel, AttentionKernel, MatmulKernel
from rlx.lir.loops import LoopKernel

WHERE: dict[type, str] = {
    LoopKernel: "loops.generator:LoopsGenerator",
    MatmulKernel: "matmul.generator:MatmulGenerator",
    AttentionKernel: "attention.generator:AttentionGenerator",
    AttentionGradKernel: "attention.gradient:AttentionGradGenerator",
    ChainKernel: "chains:ChainGenerator",
    PrologueKernel: "prologues:PrologueGenerator",
    HeadsKernel: "heads:HeadsGenerator",
    SizedKernel: "sized:SizedGenerator",
}


def generator(kernel: AnyKernel) -> Generator:
    """The generator for a kernel."""
    return _generator(type(kernel))


@functools.cache
def _generator(kind: type) -> Generator:
    if kind not in WHERE:
        raise LowerError(f"cuda: {kind.__name__} has no generator", hint="see backends/cuda/generators.py")
    module, _, name = WHERE[kind].partition(":")
    maker = getattr(importlib.import_module(f"rlx.backends.cuda.{module}"), name)
    result: Generator = maker()
    return result

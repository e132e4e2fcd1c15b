"""The generator of CUDA C for each kind of LIR kernel."""

from __future__ import annotations

import functools
import importlib

from rlx.backends.cuda.kernel_plan import AnyKernel, Generator
from rlx.errors import LowerError

WHERE = {
    "loops": "rlx.backends.cuda.loops.generator:LoopsGenerator",
    "matmul": "rlx.backends.cuda.matmul.generator:MatmulGenerator",
    "attention": "rlx.backends.cuda.attention.generator:AttentionGenerator",
    "sequence": "rlx.backends.cuda.sequences:SequenceGenerator",
    "prologue": "rlx.backends.cuda.prologues:PrologueGenerator",
    "attention_grad": "rlx.backends.cuda.attention.gradient:AttentionGradGenerator",
}


def generator(kernel: AnyKernel) -> Generator:
    """The generator for a kernel."""
    return _generator(kernel.kind)


@functools.cache
def _generator(kind: str) -> Generator:
    if kind not in WHERE:
        raise LowerError(f"cuda: kernels of kind {kind!r} have no generator", hint="see backends/cuda/generators.py")
    module, _, name = WHERE[kind].partition(":")
    generator: Generator = getattr(importlib.import_module(module), name)()
    return generator

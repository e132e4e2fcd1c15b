"""Kernels of ops compile with NVRTC, within budgets of registers and spills; no GPU is needed.

Plain runs take a few ops for one architecture, `RLX_EMULATE=all` every op in every element type for all of them.
"""

from __future__ import annotations

import os

import pytest
from sample_graphs import element_types, sample_graph, user_ops

from rlx.backends.cuda.kernel_plan import entry
from rlx.backends.cuda.launch_plan import plan_launches, variants
from rlx.backends.cuda.modules import source
from rlx.backends.cuda.nvrtc import compile_source
from rlx.backends.cuda.prelude import PRELUDE
from rlx.backends.cuda.targets import BY_NAME, SM_80, SM_90, CudaTarget
from rlx.errors import CapabilityError
from rlx.lir.loops import LoopKernel
from rlx.lir.module import plan_lir
from rlx.profile import CompileProfile

MOST_REGISTERS = 255
MOST_SPILLED = 512  # bytes per thread; sampling has the most
EVERY = os.environ.get("RLX_EMULATE") == "all"
FEW = ["softmax", "rms_norm", "gather", "conv2d", "cumsum", "argmax"]
OPS = [op.name for op in user_ops()] if EVERY else FEW
TARGETS = list(BY_NAME.values()) if EVERY else [SM_80, SM_90]


def sources(op: str, element_type: str, target: CudaTarget) -> dict[str, str]:
    program = plan_lir(sample_graph(op, element_type).graph, target, CompileProfile()).main
    planned = variants(plan_launches(program, {}, target))
    return {entry(k, v): source(k, v, target) for k, v, _ in planned if isinstance(k, LoopKernel)}


@pytest.mark.parametrize("target", TARGETS, ids=lambda target: target.name)
@pytest.mark.parametrize("op", OPS)
def test_kernels_of_an_op_compile(op: str, target: CudaTarget) -> None:
    types = element_types(next(o for o in user_ops() if o.name == op))
    kernels: dict[str, str] = {}
    for element_type in types if EVERY else types[1:3]:
        kernels |= sources(op, element_type, target)
    try:
        cubin = compile_source(PRELUDE + "".join(kernels.values()), target.arch)
    except CapabilityError as error:
        pytest.skip(str(error))
    resources = cubin.resources()
    assert set(resources) == set(kernels)
    for name, used in resources.items():
        assert used.registers <= MOST_REGISTERS and used.spilled <= MOST_SPILLED, name

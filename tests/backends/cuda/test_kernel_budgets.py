"""Kernels of ops and models compile with NVRTC for six architectures, within budgets; no GPU is needed.

A kernel takes about 0.4 s, so all of them for one architecture take a quarter of an hour. Plain runs take a sample:
each architecture has one model with all its kernels and every 64th op, other ones for each. `RLX_EMULATE=all` takes
every op in every element type and every model for every architecture.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import kernel_programs
import pytest
from sample_graphs import element_types, sample_graph, user_ops

from rlx.backends.cuda.cubin import Resources, resources
from rlx.backends.cuda.kernel_plan import AnyKernel, entry
from rlx.backends.cuda.launch_plan import plan_launches
from rlx.backends.cuda.modules import source
from rlx.backends.cuda.nvrtc import compile_source
from rlx.backends.cuda.prelude import PRELUDE
from rlx.backends.cuda.targets import BY_NAME, CudaTarget
from rlx.errors import CapabilityError, FormatError
from rlx.lir.program import Program
from rlx.module import plan_lir
from rlx.profile import CompileProfile

REGISTER_FILE = 65_536  # per processor: a block that needs more cannot start
SPILLED = {"loops": 512, "chain": 512, "matmul": 16, "attention": 64, "attention_grad": 64, "prologue": 512}  # bytes
EVERY = os.environ.get("RLX_EMULATE") == "all"
MODELS = ("llama_f32", "gemma3", "mamba", "moe", "encoder_f32", "training_step")
SIZES = {"batch": 1, "blocks": 4, "pages": 8, "picked": 1, "n": 8, "seq": 1, "rows": 1}
SEQUENCES = (1, 24)  # tokens of a call: decode and prefill
UNIT = 40  # kernels per translation unit


@dataclass(frozen=True)
class Use:
    """A kernel variant as launches use it, with the most threads and dynamic shared memory."""

    kernel: AnyKernel
    variant: str
    threads: int
    shared: int


def uses(program: Program, sizes: Mapping[str, int], target: CudaTarget) -> Iterator[Use]:
    for launch in plan_launches(program, sizes, target):
        for one in launch.plan.passes:
            yield Use(launch.kernel, one.variant, one.threads, one.shared)


def op_uses(number: int, target: CudaTarget) -> Iterator[Use]:
    for i, op in list(enumerate(user_ops()))[:: 1 if EVERY else 64]:
        if not EVERY:
            op = user_ops()[(i + 10 * number) % len(user_ops())]
        types = element_types(op)
        for element_type in types if EVERY else types[number % len(types) :][:1]:
            graph = sample_graph(op.name, element_type).graph
            yield from uses(plan_lir(graph, target, CompileProfile()).main, {}, target)


def model_uses(number: int, target: CudaTarget, folder: Path) -> Iterator[Use]:
    for name in MODELS if EVERY else (MODELS[number],):
        (folder / name).mkdir()
        lir = kernel_programs.plan(name, folder / name, target)
        for program in filter(None, (lir.main, lir.bind)):
            for tokens in SEQUENCES:
                sizes = {symbol: SIZES.get(symbol, 1) for symbol in program.symbols}
                yield from uses(program, sizes | {"seq": tokens} if "seq" in sizes else sizes, target)


def distinct(all_uses: Iterator[Use]) -> dict[str, Use]:
    kernels: dict[str, Use] = {}
    for use in all_uses:
        name = entry(use.kernel, use.variant)
        before = kernels.get(name, use)
        kernels[name] = replace(use, threads=max(use.threads, before.threads), shared=max(use.shared, before.shared))
    return kernels


@pytest.mark.parametrize("number", range(len(BY_NAME)), ids=list(BY_NAME))
def test_kernels_keep_their_budgets(number: int, tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    target = list(BY_NAME.values())[number]
    kernels = distinct(iter([*op_uses(number, target), *model_uses(number, target, tmp_path)]))
    names = sorted(kernels)
    assert len(names) >= 8
    for begin in range(0, len(names), UNIT):
        unit = [kernels[name] for name in names[begin : begin + UNIT]]
        text = PRELUDE + "".join(source(use.kernel, use.variant, target) for use in unit)
        taken = compile_source(text, target.arch).resources()
        assert list(taken) and set(taken) == {entry(use.kernel, use.variant) for use in unit}
        for use in unit:
            check(use, taken[entry(use.kernel, use.variant)], target)


def check(use: Use, taken: Resources, target: CudaTarget) -> None:
    name = entry(use.kernel, use.variant)
    registers = -(-taken.registers // 8) * 8  # as they are handed out
    assert registers * use.threads <= REGISTER_FILE, f"{name}: {taken.registers} registers, {use.threads} threads"
    assert taken.spilled <= SPILLED[use.kernel.kind], f"{name}: {taken.spilled} bytes are spilled"
    assert taken.shared + use.shared <= target.shared_bytes, f"{name}: {taken.shared} + {use.shared} bytes are shared"


KERNELS = r"""
extern "C" __global__ void arrays(float* x, int n) {
  __shared__ float s[1000];
  float a[64];
  for (int i = 0; i < 64; i++) a[i] = x[i * n];
  for (int i = 0; i < 64; i++) a[(i * n) & 63] += a[i];
  s[threadIdx.x] = a[n & 63];
  __syncthreads();
  x[threadIdx.x] = s[n];
}
extern "C" __global__ void nothing(float* x) { x[threadIdx.x] = 1; }
"""


@pytest.mark.parametrize("arch", ["sm_80", "sm_90a", "sm_120"])
def test_resources_are_those_that_the_compiler_reports(arch: str) -> None:
    try:
        cubin = compile_source(KERNELS, arch)
    except CapabilityError as error:
        pytest.skip(str(error))
    taken = cubin.resources()
    assert (taken["arrays"].spilled, taken["arrays"].shared) == (256, 4000)
    assert (taken["nothing"].spilled, taken["nothing"].shared) == (0, 0)
    for one in taken.values():
        assert f"Used {one.registers} registers" in cubin.log


@pytest.mark.parametrize("code", [b"", b"\x7fELF", b"\x7fELF" + bytes(60), b"MZ" + bytes(100)])
def test_what_is_no_cubin_is_refused(code: bytes) -> None:
    with pytest.raises(FormatError, match="are no cubin"):
        resources(code)

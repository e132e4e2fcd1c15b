"""How a launch runs on the GPU: the CUDA kernels it takes, their grids, and scratch memory.

Each kind of LIR kernel has a generator: `plan` decides, for concrete sizes, and `source` writes CUDA C for a variant
that `plan` chose. All variants of a kernel take one struct by value: the words of the launch in order (addresses and
64-bit integers), then `scratch`, `fault` and `launch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from rlx.backends.cuda.targets import CudaTarget
from rlx.fast_dataclass import dataclass

EXTRA_WORDS = ("scratch", "fault", "launch")  # after the words of the kernel


@dataclass(frozen=True, slots=True)
class Pass:
    """One CUDA kernel of a launch. `variant` names one of the sources of the LIR kernel, such as `rows_32`."""

    variant: str
    grid: tuple[int, int, int]
    threads: int
    shared: int = 0  # dynamic shared memory in bytes


@dataclass(frozen=True, slots=True)
class KernelPlan:
    """The passes of a launch, in order, and the bytes of scratch memory that they share."""

    passes: tuple[Pass, ...]
    scratch: int = 0
    zeroed: int = 0  # leading bytes of scratch that are zero when the first pass starts and must be zero after the last


class AnyKernel(Protocol):
    """A kernel of LIR, or several as one."""

    @property
    def kind(self) -> str: ...
    @property
    def symbol(self) -> str: ...
    @property
    def words(self) -> tuple[str, ...]: ...


class Generator(Protocol):
    """Writes CUDA C for one kind of LIR kernel."""

    def plan(self, kernel: Any, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        """Decides how to run a launch.

        `words` has all sizes by name, and for each operand that is present the number of its buffer, from 1, negative
        if no launch of the program writes it, such as a weight. Operands of one buffer may share memory.
        """

    def source(self, kernel: Any, variant: str, target: CudaTarget) -> str:
        """CUDA C of a variant, after `PRELUDE`: an `extern "C" __global__` function called `entry(kernel, variant)`."""


def entry(kernel: AnyKernel, variant: str) -> str:
    """The name of the CUDA function of a variant."""
    return f"{kernel.symbol.replace('.', '_')}_{variant}"


def words_struct(fields: Mapping[str, str], name: str = "Words") -> str:
    """The parameter struct of a kernel: C types by field name, all of 8 bytes. Names are unique in a module."""
    lines = [f"  {kind} {name};" for name, kind in fields.items()]
    return "\n".join([f"struct {name} {{", *lines, "  u8* scratch;", "  Fault* fault;", "  i64 launch;", "};"])

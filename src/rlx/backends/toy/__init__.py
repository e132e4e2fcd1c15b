"""The toy backend: interprets LIR kernels with NumPy, in memory of its own.

Small enough to read, see `docs/adding-a-backend.md`. It proves that `loops` kernels are all a backend must implement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType

import numpy as np

from rlx import dims, types
from rlx.backends.base import Allocator, Backend, InputSpec
from rlx.backends.toy.executable import ToyExecutable
from rlx.backends.toy.memory import ToyAllocator, ToyBuffer
from rlx.lir import expressions, interface, kernels, loops, program, views
from rlx.lir.kernels import Kernel
from rlx.lir.program import Program
from rlx.target import Target

__all__ = ["TOY", "ToyAllocator", "ToyBackend", "ToyBuffer", "ToyExecutable"]


TOY = Target("toy", device="toy")


class ToyBackend(Backend):
    """Interprets LIR with NumPy."""

    name = "toy"
    allocator: Allocator = ToyAllocator()

    def targets(self) -> tuple[Target, ...]:
        return (TOY,)

    def identity(self, target: Target) -> str:
        return f"numpy {np.__version__}"

    def versions(self) -> Mapping[str, str]:
        return {"numpy": np.__version__}

    def compile(
        self, program: Program, target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> ToyExecutable:  # fmt: skip
        return ToyExecutable(program, target)

    def kernel_text(self, kernels: Iterable[Kernel], target: Target, *, assembly: bool = False) -> str:
        """An interpreter generates none: it runs the loops as they are."""
        return "\n\n".join(kernel.text() for kernel in kernels)

    def image_modules(self) -> Sequence[ModuleType]:
        """An image is the program itself, made of LIR records."""
        return (dims, types, expressions, loops, kernels, views, interface, program)

    def load(
        self, image: Program, program: Callable[[], Program], target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> ToyExecutable:  # fmt: skip
        return ToyExecutable(image, target)

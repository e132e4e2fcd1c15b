"""`device="cuda"`: NVIDIA GPUs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import ModuleType
from typing import Any

from rlx import dims, types
from rlx.backends.base import Backend, InputSpec
from rlx.backends.cuda import nvrtc
from rlx.backends.cuda.executable import CudaExecutable
from rlx.backends.cuda.gpu import gpu, gpu_count
from rlx.backends.cuda.memory import CudaAllocator
from rlx.backends.cuda.store_factors import store_factors
from rlx.backends.cuda.targets import BY_NAME, CudaTarget, cuda_target
from rlx.errors import CapabilityError, nearest
from rlx.lir import expressions, interface, kernels, loops, program, views
from rlx.lir.kernels import Kernel
from rlx.lir.program import Program
from rlx.target import Target


class CudaBackend(Backend):
    """Compiles LIR to CUDA C and runs it on a GPU."""

    name = "cuda"
    is_accelerator = True

    def __init__(self, index: int = 0) -> None:
        super().__init__(index)
        self.allocator = CudaAllocator(index)

    # -- targets
    def targets(self) -> tuple[CudaTarget, ...]:
        return (gpu(self.index).target,)

    def known_targets(self) -> Mapping[str, Target]:
        return BY_NAME

    def target(self, name: str | None = None) -> Target:
        own = self.targets()[0]
        if name is None or name == own.name:
            return own
        if name not in BY_NAME:
            raise CapabilityError(f"target: {name!r} is not known to cuda", hint=nearest(name, BY_NAME))
        if BY_NAME[name].capability // 10 != own.capability // 10 or BY_NAME[name].capability > own.capability:
            raise CapabilityError(f"target: this machine does not run {name!r}", hint=f"it runs {own.name}")
        chosen = BY_NAME[name]
        return replace(own, name=chosen.name, arch=chosen.arch, capability=chosen.capability)

    def device_count(self) -> int:
        return gpu_count()

    def identity(self, target: Target) -> str:
        return f"nvrtc {nvrtc.version()} {cuda_target(target)}"

    def versions(self) -> Mapping[str, str]:
        from importlib.metadata import version

        return {"cuda-bindings": version("cuda-bindings"), "nvrtc": nvrtc.version()}

    # -- compiling
    def compile(
        self, program: Program, target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> CudaExecutable:  # fmt: skip
        return CudaExecutable(store_factors(program), cuda_target(target), gpu(self.index), inputs)

    def kernel_text(self, kernels: Iterable[Kernel], target: Target, *, assembly: bool = False) -> str:
        from rlx.backends.cuda.kernel_text import kernel_text

        return kernel_text(kernels, cuda_target(target), assembly=assembly)

    def image_modules(self) -> Sequence[ModuleType]:
        """An image is the program itself, made of LIR records."""
        return (dims, types, expressions, loops, kernels, views, interface, program)

    def load(
        self, image: Program, program: Callable[[], Program], target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> CudaExecutable:  # fmt: skip
        return self.compile(image, target, inputs=inputs)

    def target_from(self, record: Mapping[str, Any]) -> Target:
        return CudaTarget(**{k: v for k, v in record.items() if k in CudaTarget.__dataclass_fields__})

    # -- reports
    def describe(self) -> Mapping[str, str]:
        try:
            devices = [gpu(i) for i in range(gpu_count())]
        except CapabilityError as error:
            return {"runs": f"nothing: {error}"}
        own = [f"{g.name} ({g.target.name}, {g.total_bytes / 2**30:.0f} GiB)" for g in devices]
        return {"runs": ", ".join(own), "compiler": f"NVRTC {nvrtc.version()}"}

    def kernels_compiled(self) -> int:
        return nvrtc.units_compiled()

    def trim(self) -> None:
        gpu(self.index).trim()

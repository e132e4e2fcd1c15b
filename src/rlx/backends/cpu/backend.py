"""The CPU backend: machine code for this processor, generated through LLVM, run on all its cores."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar

from rlx.backends.base import Backend, InputSpec
from rlx.backends.cpu import targets
from rlx.backends.cpu.executable import CpuExecutable
from rlx.backends.cpu.executable_image import Image
from rlx.backends.cpu.kernel_library import kernels_compiled, library
from rlx.backends.cpu.memory import CpuAllocator
from rlx.backends.cpu.targets import cpu_target
from rlx.backends.cpu.toolchain import cpu_identity, llvm_version, trim_compiler_memory
from rlx.errors import CapabilityError, FormatError, shortened
from rlx.operand_layouts import Layout
from rlx.target import Target

if TYPE_CHECKING:
    from rlx.backends.reports import Ceilings, Code
    from rlx.lir.kernels import Kernel
    from rlx.lir.program import Program


class CpuBackend(Backend):
    """Compiles programs to machine code and runs them on this machine's cores."""

    name = "cpu"
    allocator = CpuAllocator()
    options: ClassVar[Mapping[str, type]] = {"unfuse_regions": bool}  # keeps elementwise ops in separate kernels

    # -- targets -------------------------------------------------------------------------------------------------------
    def targets(self) -> tuple[targets.CpuTarget, ...]:
        return targets.supported()

    def known_targets(self) -> Mapping[str, Target]:
        return targets.BY_NAME

    def layouts(self) -> Mapping[str, type[Layout]]:
        return targets.layouts()

    def target(self, name: str | None = None) -> Target:
        return super().target(os.environ.get("RLX_TARGET") or None if name is None else name)

    def accepts(self, target: Target) -> bool:
        return isinstance(target, targets.CpuTarget) and target.arch == targets.best().arch

    def identity(self, target: Target) -> str:
        return cpu_identity(cpu_target(target))

    def versions(self) -> Mapping[str, str]:
        return {"llvm": llvm_version()}

    def target_from(self, record: Mapping[str, Any]) -> Target:
        kinds = {"name": str, "arch": str, "has_fma": bool, "cpu": str, "features": str, "has_dot": bool}
        sizes = {"vector_bytes": (16, 32, 64), "tile_rows": range(1, 65), "tile_vectors": range(1, 65)}
        wrong = [name for name, kind in kinds.items() if type(record.get(name)) is not kind]
        wrong += [n for n, known in sizes.items() if type(record.get(n)) is not int or record[n] not in known]
        if wrong:
            raise FormatError(f"target: {', '.join(wrong)} of {shortened(repr(dict(record)), 200)} cannot be a CPU's")
        return super().target_from(record)

    def check_runs(self, target: Target, where: str) -> None:
        target, runs = cpu_target(target), self.targets()
        needed = set(filter(None, target.features.split(",")))
        if not any(t.arch == target.arch and needed <= set(t.features.split(",")) for t in runs):
            raise CapabilityError(
                f"{where}: its code is for {target.name} ({target.arch} {target.features}), this machine runs "
                + ", ".join(t.name for t in runs),
                hint=f"export it on this machine, or with RLX_TARGET={runs[0].name} on the machine that made it",
            )

    # -- compiling -----------------------------------------------------------------------------------------------------
    def start_compiler(self, target: Target) -> None:
        library(cpu_target(target)).prepare()

    def start_compiling(self, programs: Iterable[Program], target: Target) -> None:
        for program in programs:
            library(cpu_target(target)).start_compiling(program.kernels().values())

    def compile(
        self, program: Program, target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> CpuExecutable:  # fmt: skip
        return CpuExecutable.of(program, cpu_target(target), threads, inputs=inputs, long_lived=long_lived)

    def kernel_text(self, kernels: Iterable[Kernel], target: Target, *, assembly: bool = False) -> str:
        from rlx.backends.cpu.kernel_generators import kernel_text

        return kernel_text(kernels, cpu_target(target), level="asm" if assembly else "llvm")

    # -- images and exports
    # ----------------------------------------------------------------------------------------------
    def image_modules(self) -> Sequence[ModuleType]:
        from rlx import dims, types
        from rlx.backends.cpu import executable_image, launch_records, program_layout
        from rlx.lir import interface, memory

        return dims, types, interface, memory, launch_records, program_layout, executable_image

    def load(
        self, image: Any, program: Callable[[], Program], target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> CpuExecutable | None:  # fmt: skip
        assert isinstance(image, Image)
        if not library(cpu_target(target)).load(image.locations):
            return None
        return CpuExecutable(image.layout, program, cpu_target(target), threads, inputs=inputs, long_lived=long_lived)

    def code(self, programs: Iterable[Program], target: Target) -> Code:
        return library(cpu_target(target)).code({s: k for p in programs for s, k in p.kernels().items()}.values())

    def adopt(self, code: Code, target: Target) -> None:
        library(cpu_target(target)).adopt(code)

    # -- reports
    # ---------------------------------------------------------------------------------------------------------
    def describe(self) -> Mapping[str, str]:
        from importlib.metadata import version

        from rlx.backends.cpu.pool import default_threads, shared

        target, threads = cpu_target(self.target()), shared(default_threads())
        return {
            "llvmlite": f"{version('llvmlite')} (LLVM {llvm_version()})",
            "processor": targets.processor(),
            "target": f"{target.name} ({target.vector_bytes * 8}-bit vectors)",
            "runs": ", ".join(t.name for t in self.targets()),
            "threads": f"{threads.threads}" + (f" ({threads.why_single})" if threads.why_single else ""),
        }

    def ceilings(self, target: Target, threads: int) -> Ceilings:
        from rlx.backends.cpu.ceilings import ceilings

        return ceilings(cpu_target(target), threads)

    def kernels_compiled(self) -> int:
        return kernels_compiled()

    def trim(self) -> None:
        trim_compiler_memory()

    def catch_bus_errors(self, status: int, before: str, after: str, *, compiling: bool = True) -> None:
        from rlx.backends.cpu import bus_errors

        bus_errors.install(status, before, after, compiling=compiling)

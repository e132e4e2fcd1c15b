"""The LLVM tool chain: IR text in, relocatable objects and addresses of loaded functions out.

llvmlite is imported by the first call that needs it. Objects are position-independent ELF of the small code model, so
the same bytes serve the process that made them and any later one that finds them on disk; where `elf.py` can load them,
that later one needs no LLVM, elsewhere JITLink links them.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import platform
import re
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

from rlx.backends.cpu import elf
from rlx.backends.cpu.elf import LIBC as LIBC
from rlx.backends.cpu.elf import Object
from rlx.errors import LowerError
from rlx.target import Target

_INLINE_ASSEMBLY = re.compile(r'\basm\b[^"\n]*"[^"]')  # one that is not empty
MESSAGE_LINES = 6  # of an LLVM error; a parse error has the place and the line in the first three

# One thread at a time is inside LLVM (llvmlite allows no more), and a fork waits for it: otherwise a child could
# inherit LLVM half-way through a compile, with locks that nobody will release.
_guard = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_guard.release)


@functools.cache
def _llvm() -> ModuleType:
    """llvmlite's binding, able to make code for this machine."""
    from llvmlite import binding

    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    binding.initialize_native_asmparser()  # for inline assembly
    module: ModuleType = binding
    return module


def _host_arch() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def _triple(target: Target) -> str:
    triple: str = _llvm().get_default_triple()
    if target.arch != _host_arch():
        triple = "-".join([target.arch, *triple.split("-")[1:]])
    # ELF everywhere: one object format means one symbol table reader.
    return triple if sys.platform == "linux" else triple + "-elf"


@functools.cache
def _machine(target: Target) -> Any:
    """The code generator. Small and PIC: constants are one RIP-relative operand, not a movabs and a load."""
    llvm = _llvm()
    if target.arch != _host_arch():
        llvm.initialize_all_targets()
        llvm.initialize_all_asmprinters()
    return llvm.Target.from_triple(_triple(target)).create_target_machine(
        cpu=target.cpu, features=target.features, opt=3, reloc="pic", codemodel="small", jit=True
    )


def _generate(ir: str, target: Target, emit: Callable[[Any, Any], Any]) -> Any:
    """Parse and verify `ir`, then `emit(machine, module)`; what LLVM refuses is a defect of the generator."""
    if target.arch != _host_arch() and _INLINE_ASSEMBLY.search(ir):
        # llvmlite can only initialise the native assembler, and without one LLVM ends the process.
        raise LowerError(f"toolchain: inline assembly for {target.arch} cannot be assembled on {_host_arch()}")
    with _guard:
        llvm, machine = _llvm(), _machine(target)
        try:
            # Closed here, not when the collector comes by: no thread may be inside LLVM without the guard.
            with llvm.create_context() as context, llvm.parse_assembly(ir, context) as module:
                module.triple = machine.triple
                module.data_layout = str(machine.target_data)
                module.verify()
                return emit(machine, module)
        except RuntimeError as error:
            message = "\n".join(str(error).strip().splitlines()[:MESSAGE_LINES])
            raise LowerError(f"toolchain: LLVM refuses the module for {target.name}: {message}") from error


def compile_text(ir: str, target: Target) -> bytes:
    """The object file of a module. Codegen level 3, no mid-level passes: they bought no speed and cost time."""
    return bytes(_generate(ir, target, lambda machine, module: machine.emit_object(module)))


def assembly(ir: str, target: Target) -> str:
    """The assembly of a module, for people and tests."""
    return str(_generate(ir, target, lambda machine, module: machine.emit_assembly(module)))


def llvm_version() -> str:
    """The version of LLVM in use, such as `22.1.0`."""
    with _guard:
        return ".".join(map(str, _llvm().llvm_version_info))


@functools.cache
def llvm_identity() -> str:
    """Tells LLVM libraries apart without loading one, which takes longer than all else of a warm start."""
    spec = importlib.util.find_spec("llvmlite")
    folder = Path(spec.origin).parent / "binding" if spec is not None and spec.origin else None
    files = sorted(folder.glob("*llvmlite*")) if folder is not None else []
    if not files:  # packed in another way: only LLVM itself can tell
        return llvm_version()
    found = ((path, path.stat()) for path in files)
    return " ".join(f"{path} {stat.st_size} {stat.st_mtime_ns}" for path, stat in found)


def cpu_identity(target: Target) -> str:
    """What an object depends on beside its text; part of every cache key."""
    return f"llvm={llvm_identity()} target={target.name} cpu={target.cpu} features={target.features}"


def undefined_symbols(obj: bytes) -> list[str]:
    """Names that the object uses and does not define."""
    return sorted(s.name for s in Object.read(obj).symbols if s.name and not s.defined)


class CodeLibrary:
    """Objects that this process has loaded. They stay loaded as long as the process lives."""

    # Addresses become plain numbers in records and tables, so nobody could tell when the last user is gone.
    _all: ClassVar[list[CodeLibrary]] = []

    def __init__(self) -> None:
        self._linker: Any = None
        self._loaded: list[Any] = []  # llvmlite unloads an object whose tracker is gone
        CodeLibrary._all.append(self)

    def load(self, obj: bytes, symbols: Sequence[str]) -> dict[str, int]:
        """The addresses of `symbols` in this process. Equal names in different objects do not meet."""
        self._refuse(obj, symbols)
        if elf.can_load():
            return elf.load(obj, symbols)
        with _guard:
            llvm = _llvm()
            if self._linker is None:
                # JITLink puts an object into one block, as the small code model needs; MCJIT's memory manager
                # promises no distance between code and constants, and turns link errors into an abort.
                self._linker = llvm.create_lljit_compiler(use_jit_link=True, suppress_errors=True)
            builder = llvm.JITLibraryBuilder().add_object_img(obj).add_current_process()
            for symbol in symbols:
                builder.export_symbol(symbol)
            try:
                tracker = builder.link(self._linker, f"object{len(self._loaded)}")
            except RuntimeError as error:
                self._loaded.append(None)  # the name of a failed library is spent
                raise LowerError(f"toolchain: the object does not link: {error}") from error
            self._loaded.append(tracker)
            return {symbol: int(tracker[symbol]) for symbol in symbols}

    @staticmethod
    def _refuse(obj: bytes, symbols: Sequence[str]) -> None:
        present = [s for s in Object.read(obj).symbols if s.name]
        foreign = sorted({s.name for s in present if not s.defined} - LIBC)
        if foreign:
            raise LowerError(
                f"toolchain: the object calls {', '.join(foreign)}, which no generator may rely on",
                hint="LLVM turned an operation that the target lacks into a library call",
            )
        missing = sorted(set(symbols) - {s.name for s in present if s.defined})
        if missing:
            raise LowerError(f"toolchain: the object does not define {', '.join(missing)}")

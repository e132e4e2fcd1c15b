"""The LLVM tool chain: IR text in, relocatable objects and addresses of loaded functions out.

LLVM is loaded by the first call that needs it. Objects are position-independent ELF of the small code model, so the
same bytes serve the process that compiled them and any later one that finds them on disk. Where `elf.py` can load them,
that later process needs no LLVM; elsewhere JITLink links them.
"""

from __future__ import annotations

import contextlib
import functools
import platform
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from rlx import host_memory
from rlx.backends.cpu import elf, llvm
from rlx.backends.cpu.elf import LIBC as LIBC
from rlx.backends.cpu.elf import Object
from rlx.backends.cpu.targets import CpuTarget
from rlx.errors import LowerError
from rlx.fork_safe_locks import Lock, Waits

_INLINE_ASSEMBLY = re.compile(r'\basm\b[^"\n]*"[^"]')  # non-empty
MESSAGE_LINES = 6  # of an LLVM error; a parse error has place and line in the first three

# LLVM is entered through slots, each used by one thread at a time, and a fork waits until all are free: otherwise a
# child could inherit LLVM in mid-compilation, with locks that nobody will release.
LANES = 2
_slots = [Lock(waits=Waits.LLVM) for _ in range(LANES)]


@contextlib.contextmanager
def _slot() -> Iterator[int]:
    """Acquires an LLVM slot; yields its index."""
    free = next((i for i, slot in enumerate(_slots) if slot.acquire(blocking=False)), None)
    number = 0 if free is None else free
    if free is None:
        _slots[number].acquire()
    try:
        yield number
    finally:
        _slots[number].release()


def _host_arch() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def _triple(target: CpuTarget) -> str:
    triple = llvm.default_triple()
    if target.arch != _host_arch():
        triple = "-".join([target.arch, *triple.split("-")[1:]])
    # ELF everywhere: one object format means one symbol table reader.
    return triple if sys.platform == "linux" else triple + "-elf"


@functools.cache
def _machine(target: CpuTarget, slot: int) -> llvm.Machine:
    """The code generator of a slot."""
    if target.arch != _host_arch():
        llvm.init_all_targets()
    return llvm.Machine(_triple(target), target.cpu, target.features)


def _generate(ir: str, target: CpuTarget, *, assembly: bool = False) -> bytes:
    """Runs LLVM on a module; a module that LLVM rejects is a generator bug."""
    if target.arch != _host_arch() and _INLINE_ASSEMBLY.search(ir):
        # llvmlite can only initialise the native assembler, and without one LLVM aborts the process.
        raise LowerError(f"toolchain: inline assembly for {target.arch} cannot be assembled on {_host_arch()}")
    with _slot() as slot:
        try:
            return _machine(target, slot).code(ir, assembly=assembly)
        except llvm.Refused as error:
            message = "\n".join(str(error).strip().splitlines()[:MESSAGE_LINES])
            raise LowerError(f"toolchain: LLVM refuses the module for {target.name}: {message}") from error


def compile_text(ir: str, target: CpuTarget) -> bytes:
    """The object file of a module. Codegen level 3, no mid-level passes: they gained no speed and cost time."""
    return _generate(ir, target)


def assembly(ir: str, target: CpuTarget) -> str:
    """The assembly of a module, for people and tests."""
    return _generate(ir, target, assembly=True).decode()


class Compilation:
    """Compiles modules in background threads; LLVM runs without the GIL."""

    def __init__(self, target: CpuTarget) -> None:
        self.target = target
        self._futures: list[Future] = []
        self._waiting: deque[Future] = deque()
        self._guard = Lock()
        self._workers = 0

    def add(self, ir: str) -> None:
        """Compiles one more module."""
        with self._guard:
            self._futures.append(Future(ir))
            self._waiting.append(self._futures[-1])
            if self._workers == LANES:
                return
            self._workers += 1
        try:
            # Not a daemon: interpreter exit waits for it, since no thread may be stopped inside LLVM.
            threading.Thread(target=self._work, name="rlx-compile").start()
        except RuntimeError:  # the process has no more threads
            self._work()

    def objects(self) -> list[bytes]:
        """Waits for the objects of all modules; returns them in order."""
        return [future.result() for future in self._futures]

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._waiting:
                    self._workers -= 1
                    return
                module = self._waiting.popleft()
            module.compile(self.target)


class Future:
    """An object file that is being compiled."""

    def __init__(self, ir: str) -> None:
        self._ir = ir
        self._is_done = threading.Event()
        self._result: bytes | BaseException = b""

    def compile(self, target: CpuTarget) -> None:
        """Compiles the module; errors are raised by `result`."""
        try:
            self._result = compile_text(self._ir, target)
        except BaseException as error:
            self._result = error
        self._ir = ""
        self._is_done.set()

    def result(self) -> bytes:
        """Waits for the object."""
        self._is_done.wait()
        if isinstance(self._result, BaseException):
            raise self._result
        return self._result


def trim_compiler_memory() -> None:
    """Returns memory that only compiling needed to the system: LLVM's code, and the allocator's free memory."""
    if sys.platform == "linux":
        llvm.release()
        host_memory.trim()


def llvm_version() -> str:
    """The version of LLVM in use, such as `22.1.0`."""
    with _slot():
        return ".".join(map(str, llvm.version()))


@functools.cache
def llvm_identity() -> str:
    """Identifies an LLVM library without loading it, which takes longer than the rest of a warm start."""
    path = llvm.library()
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def cpu_identity(target: CpuTarget) -> str:
    """Everything an object depends on besides its text; part of every cache key."""
    return f"llvm={llvm_identity()} target={target.name} cpu={target.cpu} features={target.features}"


def undefined_symbols(obj: bytes) -> list[str]:
    """Names that the object uses and does not define."""
    return sorted(s.name for s in Object.read(obj).symbols if s.name and not s.defined)


class CodeLibrary:
    """Objects that this process has loaded. They stay loaded as long as the process lives."""

    # Addresses become plain numbers in records and tables, so nothing tracks the last user.
    _all: ClassVar[list[CodeLibrary]] = []

    def __init__(self) -> None:
        self._linker: Any = None
        self._loaded: list[Any] = []  # llvmlite unloads an object whose tracker is gone
        CodeLibrary._all.append(self)

    def load(self, obj: bytes, symbols: Sequence[str]) -> dict[str, int]:
        """Loads an object; returns the addresses of `symbols`. Equal names in different objects do not clash."""
        self._refuse(obj, symbols)
        if elf.can_load():
            return elf.load(obj, symbols)
        with _slot():
            from llvmlite import binding

            llvm.load()
            if self._linker is None:
                # JITLink puts an object into one block, as the small code model needs; MCJIT's memory manager
                # guarantees no distance between code and constants, and aborts on link errors.
                self._linker = binding.create_lljit_compiler(use_jit_link=True, suppress_errors=True)
            builder = binding.JITLibraryBuilder().add_object_img(obj).add_current_process()
            for symbol in symbols:
                builder.export_symbol(symbol)
            try:
                tracker = builder.link(self._linker, f"object{len(self._loaded)}")
            except RuntimeError as error:
                self._loaded.append(None)  # a failed library's name cannot be reused
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

"""The LLVM tool chain: IR text in, relocatable objects and addresses of loaded functions out.

LLVM is loaded by the first call that needs it. Objects are position-independent ELF of the small code model, so
the same bytes serve the process that made them and any later one that finds them on disk; where `elf.py` can load them,
that later one needs no LLVM, elsewhere JITLink links them.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import platform
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

from rlx.backends.cpu import elf, llvm
from rlx.backends.cpu.elf import LIBC as LIBC
from rlx.backends.cpu.elf import Object
from rlx.backends.cpu.targets import CpuTarget
from rlx.errors import LowerError
from rlx.fork_safe_locks import Lock, Waits

_INLINE_ASSEMBLY = re.compile(r'\basm\b[^"\n]*"[^"]')  # one that is not empty
MESSAGE_LINES = 6  # of an LLVM error; a parse error has the place and the line in the first three

# LLVM is entered through lanes, a lane by one thread at a time, and a fork waits until all are empty: otherwise a child
# could inherit LLVM half-way through a compile, with locks that nobody will release.
LANES = 2
_lanes = [Lock(waits=Waits.LLVM) for _ in range(LANES)]


@contextlib.contextmanager
def _lane() -> Iterator[int]:
    """Be in LLVM; gives the number of the lane."""
    free = next((i for i, lane in enumerate(_lanes) if lane.acquire(blocking=False)), None)
    number = 0 if free is None else free
    if free is None:
        _lanes[number].acquire()
    try:
        yield number
    finally:
        _lanes[number].release()


def _host_arch() -> str:
    return {"AMD64": "x86_64", "arm64": "aarch64"}.get(platform.machine(), platform.machine())


def _triple(target: CpuTarget) -> str:
    triple = llvm.default_triple()
    if target.arch != _host_arch():
        triple = "-".join([target.arch, *triple.split("-")[1:]])
    # ELF everywhere: one object format means one symbol table reader.
    return triple if sys.platform == "linux" else triple + "-elf"


@functools.cache
def _machine(target: CpuTarget, lane: int) -> llvm.Machine:
    """The code generator of a lane."""
    if target.arch != _host_arch():
        llvm.know_all_targets()
    return llvm.Machine(_triple(target), target.cpu, target.features)


def _generate(ir: str, target: CpuTarget, *, assembly: bool = False) -> bytes:
    """What LLVM makes of a module; what it refuses is a defect of the generator."""
    if target.arch != _host_arch() and _INLINE_ASSEMBLY.search(ir):
        # llvmlite can only initialise the native assembler, and without one LLVM ends the process.
        raise LowerError(f"toolchain: inline assembly for {target.arch} cannot be assembled on {_host_arch()}")
    with _lane() as lane:
        try:
            return _machine(target, lane).code(ir, assembly=assembly)
        except llvm.Refused as error:
            message = "\n".join(str(error).strip().splitlines()[:MESSAGE_LINES])
            raise LowerError(f"toolchain: LLVM refuses the module for {target.name}: {message}") from error


def compile_text(ir: str, target: CpuTarget) -> bytes:
    """The object file of a module. Codegen level 3, no mid-level passes: they bought no speed and cost time."""
    return _generate(ir, target)


def assembly(ir: str, target: CpuTarget) -> str:
    """The assembly of a module, for people and tests."""
    return _generate(ir, target, assembly=True).decode()


class Compilation:
    """Modules that become objects in threads of their own, beside whatever Python does: LLVM does not hold it up."""

    def __init__(self, target: CpuTarget) -> None:
        self.target = target
        self._made: list[Future] = []
        self._waiting: deque[Future] = deque()
        self._guard = Lock()
        self._workers = 0

    def add(self, ir: str) -> None:
        """Compile one more module."""
        with self._guard:
            self._made.append(Future(ir))
            self._waiting.append(self._made[-1])
            if self._workers == LANES:
                return
            self._workers += 1
        try:
            # Not a daemon: the interpreter waits for it at its end, since nothing may be stopped inside LLVM.
            threading.Thread(target=self._work, name="rlx-compile").start()
        except RuntimeError:  # no more threads for this process
            self._work()

    def objects(self) -> list[bytes]:
        """The objects of all modules, in order; waits for them."""
        return [made.result() for made in self._made]

    def _work(self) -> None:
        while True:
            with self._guard:
                if not self._waiting:
                    self._workers -= 1
                    return
                module = self._waiting.popleft()
            module.compile(self.target)


class Future:
    """An object file that is being made."""

    def __init__(self, ir: str) -> None:
        self._ir = ir
        self._is_done = threading.Event()
        self._found: bytes | BaseException = b""

    def compile(self, target: CpuTarget) -> None:
        """Make it; what goes wrong is told to whoever asks for the result."""
        try:
            self._found = compile_text(self._ir, target)
        except BaseException as error:
            self._found = error
        self._ir = ""
        self._is_done.set()

    def result(self) -> bytes:
        """The object, when it is there."""
        self._is_done.wait()
        if isinstance(self._found, BaseException):
            raise self._found
        return self._found


def trim_compiler_memory() -> None:
    """Give the system what only compiling needed: LLVM's code, and what the allocator has free."""
    if sys.platform == "linux":
        llvm.release()
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
        if trim is not None:
            trim(0)


def llvm_version() -> str:
    """The version of LLVM in use, such as `22.1.0`."""
    with _lane():
        return ".".join(map(str, llvm.version()))


@functools.cache
def llvm_identity() -> str:
    """Tells LLVM libraries apart without loading one, which takes longer than all else of a warm start."""
    path = llvm.library()
    status = path.stat()
    return f"{path} {status.st_size} {status.st_mtime_ns}"


def cpu_identity(target: CpuTarget) -> str:
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
        with _lane():
            from llvmlite import binding

            llvm.load()
            if self._linker is None:
                # JITLink puts an object into one block, as the small code model needs; MCJIT's memory manager
                # promises no distance between code and constants, and turns link errors into an abort.
                self._linker = binding.create_lljit_compiler(use_jit_link=True, suppress_errors=True)
            builder = binding.JITLibraryBuilder().add_object_img(obj).add_current_process()
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

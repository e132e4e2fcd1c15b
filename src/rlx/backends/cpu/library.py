"""Kernels as machine code: finds, loads or compiles the routines of a program's kernels.

Routines are named by content, so a process compiles each once; objects are kept in the cache folder, with an index from
routine to object. `kernels_compiled()` counts what LLVM has had to compile in this process.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from rlx.backends import cache
from rlx.backends.cpu import attention, driver, elf, loops, matmul
from rlx.backends.cpu.builder import Module
from rlx.backends.cpu.routine import Entry, Routine
from rlx.backends.cpu.toolchain import CodeLibrary, assembly, compile_text, cpu_identity
from rlx.lir.kernels import AttentionKernel, Kernel, MatmulKernel
from rlx.lir.loops import LoopKernel
from rlx.target import Target
from rlx.types import Size

# One thread at a time finds, loads or compiles, and a fork waits for it: a child inherits whole libraries, and no lock
# of a thread that it does not have. Registered after the tool chain's, this guard is taken first, here as in a compile.
_guard = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_guard.acquire, after_in_parent=_guard.release, after_in_child=_guard.release)


@dataclass(frozen=True, slots=True)
class Linked:
    """A kernel that can run: the address of its entry and the values of its address words."""

    address: int
    words: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Code:
    """Machine code of some kernels and of the driver, good for every process of the same sources and target."""

    routines: bytes  # an object
    symbols: tuple[str, ...]  # what it defines
    driver: bytes


def entry(kernel: Kernel, target: Target) -> Entry:
    """The routines of a kernel."""
    match kernel:
        case LoopKernel():
            return Entry(loops.routine(kernel, target))
        case MatmulKernel():
            return matmul.entry(kernel, target, loops.routine)
        case AttentionKernel():
            return attention.entry(kernel, target)


def scratch_bytes(kernel: Kernel, target: Target, k: int) -> int:
    """Bytes of scratch a thread needs for a kernel; `k` is the inner size of a matmul."""
    match kernel:
        case MatmulKernel():
            return matmul.scratch_bytes(kernel, target, k)
        case AttentionKernel():
            return attention.scratch_bytes(kernel, target)
        case _:
            return 64


def inner_size(kernel: Kernel, words: Sequence[object]) -> Size:
    """The run-time word that scratch depends on: k of a matmul, 0 for others."""
    if isinstance(kernel, MatmulKernel):
        return words[kernel.words.index("k")]  # type: ignore[return-value]
    return 0


class KernelLibrary:
    """All routines of one target that this process has loaded."""

    def __init__(self, target: Target) -> None:
        self.target = target
        self.compiled = 0
        self._code = CodeLibrary()
        self._addresses: dict[str, int] = {}
        self._driver: Mapping[str, int] = {}
        self._tables: dict[tuple[str, ...], np.ndarray[tuple[int], np.dtype[np.int64]]] = {}

    def link(self, kernels: Iterable[Kernel]) -> dict[str, Linked]:
        """Machine code for all kernels, by kernel symbol."""
        entries = {kernel.symbol: entry(kernel, self.target) for kernel in kernels}
        with _guard:
            self._need([r for e in entries.values() for r in e.routines()])
            return {symbol: self._linked(e) for symbol, e in entries.items()}

    def code(self, kernels: Iterable[Kernel]) -> Code:
        """Machine code of these kernels and of the driver, made anew, for other processes to adopt."""
        routines = {r.symbol: r for k in kernels for r in entry(k, self.target).routines()}
        texts = module_text(list(routines.values())), driver.driver_text(self.target)
        made, drives = (compile_text(text, self.target) for text in texts)
        self.compiled += len(routines)
        return Code(made, tuple(routines), drives)

    def adopt(self, code: Code) -> None:
        """Load machine code that is given, where it is not here already: no LLVM, no cache."""
        load = elf.load if elf.can_load() else self._code.load
        with _guard:
            if not self._addresses.keys() >= set(code.symbols):
                self._addresses = load(code.routines, code.symbols) | self._addresses
            if not self._driver:
                self._driver = load(code.driver, driver.SYMBOLS)

    def driver(self) -> Mapping[str, int]:
        """The addresses of the driver's functions."""
        if self._driver:
            return self._driver
        text = driver.driver_text(self.target)
        names = [f"driver.{hashlib.blake2b(text.encode(), digest_size=8).hexdigest()}"]
        with _guard:
            key = self._key(names[0])
            stored = cache.current().read("objects", key)
            if stored is None:
                stored = compile_text(text, self.target)
                cache.current().write("objects", key, stored)
            self._driver = self._code.load(stored, list(driver.SYMBOLS))
            return self._driver

    def _linked(self, found: Entry) -> Linked:
        words = {}
        for word, routines in found.tables.items():
            symbols = tuple(r.symbol for r in routines)
            if len(symbols) == 1:
                words[word] = self._addresses[symbols[0]]
            elif symbols:
                words[word] = self._table(symbols)
        return Linked(self._addresses[found.routine.symbol], words)

    def _table(self, symbols: tuple[str, ...]) -> int:
        if symbols not in self._tables:
            self._tables[symbols] = np.array([self._addresses[s] for s in symbols], dtype=np.int64)
        return int(self._tables[symbols].ctypes.data)

    def _need(self, routines: Sequence[Routine]) -> None:
        """Load what is cached, compile the rest as one object."""
        missing = {r.symbol: r for r in routines if r.symbol not in self._addresses}
        if not missing:
            return
        store = cache.current()
        wanted: dict[str, list[str]] = {}
        for symbol in list(missing):
            home = store.read("routines", self._key(symbol))
            if home is not None:
                wanted.setdefault(home.decode(), []).append(symbol)
        for place, symbols in wanted.items():
            data = store.read("objects", place)
            if data is not None:
                self._addresses |= self._code.load(data, symbols)
                for symbol in symbols:
                    del missing[symbol]
        if missing:
            self._compile(list(missing.values()))

    def _compile(self, routines: Sequence[Routine]) -> None:
        data = compile_text(module_text(routines), self.target)
        symbols = [r.symbol for r in routines]
        self._addresses |= self._code.load(data, symbols)
        self.compiled += len(routines)
        store = cache.current()
        home = self._key("\n".join(symbols))
        store.write("objects", home, data)
        for symbol in symbols:
            store.write("routines", self._key(symbol), home.encode())

    def _key(self, text: str) -> str:
        whole = f"{cpu_identity(self.target)}|{self.target}|{cache.source_digest()}|{text}"
        return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


def module_text(routines: Sequence[Routine]) -> str:
    """The LLVM IR of some routines."""
    module = Module()
    for routine in routines:
        routine.emit(module)
    return module.text()


def kernel_text(kernels: Iterable[Kernel], target: Target, *, level: str) -> str:
    """The LLVM IR or assembly of kernels, for people."""
    routines = {r.symbol: r for k in kernels for r in entry(k, target).routines()}
    text = module_text(list(routines.values()))
    return text if level == "llvm" else assembly(text, target)


_libraries: dict[Target, KernelLibrary] = {}


def library(target: Target) -> KernelLibrary:
    """The process's library for a target."""
    with _guard:
        if target not in _libraries:
            _libraries[target] = KernelLibrary(target)
        return _libraries[target]


def kernels_compiled() -> int:
    """How many routines LLVM has compiled in this process, over all targets."""
    return sum(lib.compiled for lib in _libraries.values())

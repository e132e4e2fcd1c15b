"""Kernels as machine code: finds, loads or compiles the routines of a program's kernels.

Routines are named by content, so a process compiles each once; objects are kept in the cache folder, with an index from
routine to object. `kernels_compiled()` counts what LLVM has had to compile in this process. The generators and LLVM are
imported when something must be compiled: a start that finds all objects on disk does without them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends import cache_folder
from rlx.backends.cpu import driver
from rlx.backends.cpu.executable_image import CodeLocations
from rlx.backends.cpu.targets import CpuTarget
from rlx.backends.cpu.toolchain import CodeLibrary, Compilation, compile_text, cpu_identity
from rlx.errors import RlxError
from rlx.fork_safe_locks import Lock, Waits, in_child

if TYPE_CHECKING:
    from rlx.backends.cpu.routine import Entry, Routine
    from rlx.backends.reports import Code
    from rlx.lir.kernels import Kernel

# One thread at a time finds, loads or compiles, and a fork waits for it: a child inherits whole libraries, and no lock
# of a thread that it does not have.
_guard = Lock(waits=Waits.LIBRARY)
MODULE_CHARACTERS = 60_000  # of LLVM IR, about, after which another module begins: several are compiled at once


class KernelLibrary:
    """All routines of one target that this process has loaded."""

    def __init__(self, target: CpuTarget) -> None:
        self.target = target
        self.compiled = 0
        self._code = CodeLibrary()
        self._addresses: dict[str, int] = {}
        self._homes: dict[str, str] = {}  # the objects in the cache folder, by routine
        self._driver: Mapping[str, int] = {}
        self._driver_home = ""
        self._begun: list[tuple[Compilation, list[list[str]]]] = []  # and the routines of each module
        self._driver_begun: Compilation | None = None
        self._tables: dict[tuple[str, ...], np.ndarray[tuple[int], np.dtype[np.int64]]] = {}

    def prepare(self) -> None:
        """Begin with what any program needs, if that must be compiled: LLVM is loaded while passes run."""
        with _guard:
            if self._driver or self._driver_begun is not None:
                return
            if cache_folder.current().read("objects", self._key("driver")) is None:
                self._driver_begun = self._compiling([driver.driver_text(self.target)])

    def begin(self, kernels: Iterable[Kernel]) -> None:
        """Begin to compile what `link` will want of these kernels."""
        entries = self._entries(kernels)
        with _guard:
            self._need(entries)

    def link(self, kernels: Iterable[Kernel]) -> dict[str, Entry]:
        """The routines of all kernels, by kernel symbol, as machine code."""
        entries = self._entries(kernels)
        with _guard:
            self._need(entries)
            self._finish()
        return entries

    def code(self, kernels: Iterable[Kernel]) -> Code:
        """Machine code of these kernels and of the driver, made anew, for other processes to adopt."""
        from rlx.backends.cpu.kernel_generators import entry, module_text
        from rlx.backends.reports import Code

        routines = {r.symbol: r for k in kernels for r in entry(k, self.target).routines()}
        texts = module_text(list(routines.values())), driver.driver_text(self.target)
        made, drives = self._compiling(texts).objects()
        self.compiled += len(routines)
        return Code(tuple(routines), {"code": made, "driver": drives})

    def adopt(self, code: Code) -> None:
        """Load machine code that is given, where it is not here already: no LLVM, no cache."""
        with _guard:
            if not self._addresses.keys() >= set(code.symbols):
                self._addresses = self._code.load(code.sections["code"], code.symbols) | self._addresses
            if not self._driver:
                self._driver = self._code.load(code.sections["driver"], driver.SYMBOLS)

    def homes(self, routines: Iterable[str]) -> CodeLocations | None:
        """Where the code of loaded routines lies on disk; None where some of it does not."""
        with _guard:
            found: dict[str, list[str]] = {}
            for symbol in sorted(routines):
                found.setdefault(self._homes.get(symbol, ""), []).append(symbol)
            if "" in found or not self._driver_home:
                return None
            return CodeLocations({home: tuple(symbols) for home, symbols in found.items()}, self._driver_home)

    def load(self, homes: CodeLocations) -> bool:
        """Load what lies on disk, where it is not here already; False where some of it is lost or damaged."""
        store = cache_folder.current()
        with _guard:
            try:
                for home, symbols in homes.objects.items():
                    if not self._addresses.keys() >= set(symbols):
                        self._addresses = self._stored(store, home, symbols) | self._addresses
                        self._homes |= dict.fromkeys(symbols, home)
                if not self._driver:
                    self._driver = self._stored(store, homes.driver, driver.SYMBOLS)
                    self._driver_home = homes.driver
            except (RlxError, LookupError):
                return False
            return True

    def driver(self) -> Mapping[str, int]:
        """The addresses of the driver's functions."""
        if self._driver:
            return self._driver
        store = cache_folder.current()
        with _guard:
            key = self._key("driver")
            stored = store.read("objects", key)
            if stored is None:
                begun = self._driver_begun or self._compiling([driver.driver_text(self.target)])
                self._driver_begun = None
                (stored,) = begun.objects()
                store.write("objects", key, stored)
            self._driver, self._driver_home = self._code.load(stored, driver.SYMBOLS), key
            return self._driver

    def kept(self, name: str, text: Callable[[], str], *, compiling: bool = True) -> bytes | None:
        """The object of a module that no program belongs to; None where it is not cached, and is not to be compiled."""
        store, key = cache_folder.current(), self._key(name)
        found = store.read("objects", key)
        if found is None and compiling:
            found = compile_text(text(), self.target)
            store.write("objects", key, found)
        return found

    def address(self, symbols: Sequence[str]) -> int:
        """Of a routine; of a table of the addresses of several; 0 of none."""
        if len(symbols) < 2:
            return self._addresses[symbols[0]] if symbols else 0
        key = tuple(symbols)
        if key not in self._tables:
            self._tables[key] = np.array([self._addresses[s] for s in key], dtype=np.int64)
        return int(self._tables[key].ctypes.data)

    def _stored(self, store: cache_folder.Cache, home: str, symbols: Sequence[str]) -> dict[str, int]:
        data = store.read("objects", home)
        if data is None:
            raise LookupError(home)
        return self._code.load(data, symbols)

    def _entries(self, kernels: Iterable[Kernel]) -> dict[str, Entry]:
        from rlx.backends.cpu.kernel_generators import entry

        return {kernel.symbol: entry(kernel, self.target) for kernel in kernels}

    def _compiling(self, texts: Iterable[str]) -> Compilation:
        compilation = Compilation(self.target)
        for text in texts:
            compilation.add(text)
        return compilation

    def _need(self, entries: Mapping[str, Entry]) -> None:
        """Load what is cached, begin to compile the rest."""
        begun = {symbol for _, modules in self._begun for symbols in modules for symbol in symbols}
        routines = {r.symbol: r for e in entries.values() for r in e.routines()}
        missing = {s: r for s, r in routines.items() if s not in self._addresses and s not in begun}
        store = cache_folder.current()
        wanted: dict[str, list[str]] = {}
        for symbol in missing:
            home = store.read("routines", self._key(symbol))
            if home is not None:
                wanted.setdefault(home.decode(), []).append(symbol)
        for place, symbols in wanted.items():
            data = store.read("objects", place)
            if data is not None:
                self._addresses |= self._code.load(data, symbols)
                self._homes |= dict.fromkeys(symbols, place)
                for symbol in symbols:
                    del missing[symbol]
        if missing:
            self._compile(list(missing.values()))

    def _compile(self, routines: Sequence[Routine]) -> None:
        """Compile routines, some to a module, each module as soon as its text is there."""
        from rlx.backends.cpu.builder import Module

        compilation, modules = Compilation(self.target), list[list[str]]()
        self._begun.append((compilation, modules))
        module, symbols = Module(), list[str]()
        for routine in routines:
            routine.emit(module)
            symbols.append(routine.symbol)
            if len(module) > MODULE_CHARACTERS or routine is routines[-1]:
                compilation.add(module.text())
                modules.append(symbols)
                module, symbols = Module(), []

    def _finish(self) -> None:
        """Load and keep what was begun."""
        store = cache_folder.current()
        while self._begun:
            compilation, modules = self._begun.pop()
            for symbols, data in zip(modules, compilation.objects(), strict=True):
                self._addresses |= self._code.load(data, symbols)
                self.compiled += len(symbols)
                home = self._key("\n".join(symbols))
                store.write("objects", home, data)
                for symbol in symbols:
                    store.write("routines", self._key(symbol), home.encode())
                    self._homes[symbol] = home

    def _key(self, text: str) -> str:
        whole = f"{cpu_identity(self.target)}|{self.target}|{cache_folder.source_digest()}|{text}"
        return hashlib.blake2b(whole.encode(), digest_size=16).hexdigest()


_libraries: dict[CpuTarget, KernelLibrary] = {}


@in_child
def _forget_compilations() -> None:
    """What was begun goes on in the parent alone."""
    for each in _libraries.values():
        each._begun, each._driver_begun = [], None


def library(target: CpuTarget) -> KernelLibrary:
    """The process's library for a target."""
    with _guard:
        if target not in _libraries:
            _libraries[target] = KernelLibrary(target)
        return _libraries[target]


def kernels_compiled() -> int:
    """How many routines LLVM has compiled in this process, over all targets."""
    return sum(lib.compiled for lib in _libraries.values())

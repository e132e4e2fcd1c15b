"""Kernels as machine code: finds, loads or compiles the routines of a program's kernels.

Routines are named by content, so a process compiles each once; objects are stored in the cache folder, with an index
from routine to object. `kernels_compiled()` counts the routines that LLVM compiled in this process. The generators and
LLVM are imported only to compile: a warm start does without them.
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

# One thread at a time finds, loads or compiles, and a fork waits for it, so that a child inherits consistent libraries
# and no lock held by a thread it does not have.
_guard = Lock(waits=Waits.LIBRARY)
MODULE_CHARACTERS = 60_000  # approximate LLVM IR size of a module; several modules are compiled in parallel


class KernelLibrary:
    """All routines of one target that this process has loaded."""

    def __init__(self, target: CpuTarget) -> None:
        self.target = target
        self.compiled = 0
        self._code = CodeLibrary()
        self._addresses: dict[str, int] = {}
        self._locations: dict[str, str] = {}  # cache keys of objects, by routine
        self._driver: Mapping[str, int] = {}
        self._driver_location = ""
        self._compilations: list[tuple[Compilation, list[list[str]]]] = []  # with the routines of each module
        self._driver_compilation: Compilation | None = None
        self._tables: dict[tuple[str, ...], np.ndarray[tuple[int], np.dtype[np.int64]]] = {}

    def prepare(self) -> None:
        """Starts compiling the driver unless it is cached, so that LLVM loads while passes run."""
        with _guard:
            if self._driver or self._driver_compilation is not None:
                return
            if cache_folder.current().read("objects", self._key("driver")) is None:
                self._driver_compilation = self._compiling([driver.driver_text(self.target)])

    def start_compiling(self, kernels: Iterable[Kernel]) -> None:
        """Starts compiling the routines that `link` will need for these kernels."""
        entries = self._entries(kernels)
        with _guard:
            self._load_or_compile(entries)

    def link(self, kernels: Iterable[Kernel]) -> dict[str, Entry]:
        """Loads the machine code of all kernels; returns their routines by kernel symbol."""
        entries = self._entries(kernels)
        with _guard:
            self._load_or_compile(entries)
            self._finish()
        return entries

    def code(self, kernels: Iterable[Kernel]) -> Code:
        """Compiles these kernels and the driver from scratch, for other processes to adopt."""
        from rlx.backends.cpu.kernel_generators import entry, module_text
        from rlx.backends.reports import Code

        routines = {r.symbol: r for k in kernels for r in entry(k, self.target).routines()}
        texts = module_text(list(routines.values())), driver.driver_text(self.target)
        kernel_object, driver_object = self._compiling(texts).objects()
        self.compiled += len(routines)
        return Code(tuple(routines), {"code": kernel_object, "driver": driver_object})

    def adopt(self, code: Code) -> None:
        """Loads the given machine code unless it is loaded already, without LLVM or cache."""
        with _guard:
            if not self._addresses.keys() >= set(code.symbols):
                self._addresses = self._code.load(code.sections["code"], code.symbols) | self._addresses
            if not self._driver:
                self._driver = self._code.load(code.sections["driver"], driver.SYMBOLS)

    def locations(self, routines: Iterable[str]) -> CodeLocations | None:
        """Where the code of loaded routines is cached; None if some of it is not."""
        with _guard:
            by_location: dict[str, list[str]] = {}
            for symbol in sorted(routines):
                by_location.setdefault(self._locations.get(symbol, ""), []).append(symbol)
            if "" in by_location or not self._driver_location:
                return None
            objects = {location: tuple(symbols) for location, symbols in by_location.items()}
            return CodeLocations(objects, self._driver_location)

    def load(self, locations: CodeLocations) -> bool:
        """Loads cached code that is not loaded yet; False if some of it is missing or damaged."""
        store = cache_folder.current()
        with _guard:
            try:
                for location, symbols in locations.objects.items():
                    if not self._addresses.keys() >= set(symbols):
                        self._addresses = self._load_cached(store, location, symbols) | self._addresses
                        self._locations |= dict.fromkeys(symbols, location)
                if not self._driver:
                    self._driver = self._load_cached(store, locations.driver, driver.SYMBOLS)
                    self._driver_location = locations.driver
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
                compilation = self._driver_compilation or self._compiling([driver.driver_text(self.target)])
                self._driver_compilation = None
                (stored,) = compilation.objects()
                store.write("objects", key, stored)
            self._driver, self._driver_location = self._code.load(stored, driver.SYMBOLS), key
            return self._driver

    def cached_object(self, name: str, text: Callable[[], str], *, compiling: bool = True) -> bytes | None:
        """The object of a module that belongs to no program; None if it is not cached and must not be compiled."""
        store, key = cache_folder.current(), self._key(name)
        cached = store.read("objects", key)
        if cached is None and compiling:
            cached = compile_text(text(), self.target)
            store.write("objects", key, cached)
        return cached

    def address(self, symbols: Sequence[str]) -> int:
        """The address of one routine, or of a table of several routines' addresses; 0 for none."""
        if len(symbols) < 2:
            return self._addresses[symbols[0]] if symbols else 0
        key = tuple(symbols)
        if key not in self._tables:
            self._tables[key] = np.array([self._addresses[s] for s in key], dtype=np.int64)
        return int(self._tables[key].ctypes.data)

    def _load_cached(self, store: cache_folder.Cache, location: str, symbols: Sequence[str]) -> dict[str, int]:
        data = store.read("objects", location)
        if data is None:
            raise LookupError(location)
        return self._code.load(data, symbols)

    def _entries(self, kernels: Iterable[Kernel]) -> dict[str, Entry]:
        from rlx.backends.cpu.kernel_generators import entry

        return {kernel.symbol: entry(kernel, self.target) for kernel in kernels}

    def _compiling(self, texts: Iterable[str]) -> Compilation:
        compilation = Compilation(self.target)
        for text in texts:
            compilation.add(text)
        return compilation

    def _load_or_compile(self, entries: Mapping[str, Entry]) -> None:
        """Loads what is cached, starts compiling the rest."""
        in_progress = {symbol for _, modules in self._compilations for symbols in modules for symbol in symbols}
        routines = {r.symbol: r for e in entries.values() for r in e.routines()}
        missing = {s: r for s, r in routines.items() if s not in self._addresses and s not in in_progress}
        store = cache_folder.current()
        wanted: dict[str, list[str]] = {}
        for symbol in missing:
            location = store.read("routines", self._key(symbol))
            if location is not None:
                wanted.setdefault(location.decode(), []).append(symbol)
        for place, symbols in wanted.items():
            data = store.read("objects", place)
            if data is not None:
                self._addresses |= self._code.load(data, symbols)
                self._locations |= dict.fromkeys(symbols, place)
                for symbol in symbols:
                    del missing[symbol]
        if missing:
            self._compile(list(missing.values()))

    def _compile(self, routines: Sequence[Routine]) -> None:
        """Compiles routines in modules of several; each module starts as soon as its text is complete."""
        from rlx.backends.cpu.builder import Module

        compilation, modules = Compilation(self.target), list[list[str]]()
        self._compilations.append((compilation, modules))
        module, symbols = Module(), list[str]()
        for routine in routines:
            routine.emit(module)
            symbols.append(routine.symbol)
            if len(module) > MODULE_CHARACTERS or routine is routines[-1]:
                compilation.add(module.text())
                modules.append(symbols)
                module, symbols = Module(), []

    def _finish(self) -> None:
        """Waits for the compilations in progress, then loads and caches their objects."""
        store = cache_folder.current()
        while self._compilations:
            compilation, modules = self._compilations.pop()
            for symbols, data in zip(modules, compilation.objects(), strict=True):
                self._addresses |= self._code.load(data, symbols)
                self.compiled += len(symbols)
                location = self._key("\n".join(symbols))
                store.write("objects", location, data)
                for symbol in symbols:
                    store.write("routines", self._key(symbol), location.encode())
                    self._locations[symbol] = location

    def _key(self, text: str) -> str:
        identity = f"{cpu_identity(self.target)}|{self.target}|{cache_folder.source_digest()}|{text}"
        return hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()


_libraries: dict[CpuTarget, KernelLibrary] = {}


@in_child
def _forget_compilations() -> None:
    """Compilations in progress continue only in the parent."""
    for each in _libraries.values():
        each._compilations, each._driver_compilation = [], None


def library(target: CpuTarget) -> KernelLibrary:
    """The process's library for a target."""
    with _guard:
        if target not in _libraries:
            _libraries[target] = KernelLibrary(target)
        return _libraries[target]


def kernels_compiled() -> int:
    """Number of routines LLVM has compiled in this process, over all targets."""
    return sum(lib.compiled for lib in _libraries.values())

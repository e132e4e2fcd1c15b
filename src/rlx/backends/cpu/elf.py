"""An ELF loader without LLVM: reads object tables and places code in memory, ready to be called.

Objects come from our tool chain: position-independent, small code model, nothing undefined but a few C library
functions. Memory is written first and made executable afterwards, never both at once.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import struct
import sys
from collections.abc import Iterable, Sequence

from rlx.errors import CapabilityError, FormatError
from rlx.fast_dataclass import dataclass

# C library functions that LLVM may call on its own; anything else undefined is a generator bug.
LIBC = frozenset({"memcpy", "memmove", "memset"})

_HEADER, _SECTION, _SYMBOL = (
    struct.Struct("<18xH20xQ10xHH2x"),
    struct.Struct("<4xIQ8xQQIIQ8x"),
    struct.Struct("<IBBHQQ"),
)
_RELOCATION = struct.Struct("<QIIq")
_X86_64 = 62
_PROGRAM, _SYMBOL_TABLE, _RELOCATIONS = 1, 2, 4  # section kinds
_WRITTEN, _LOADED, _EXECUTED = 1, 2, 4  # section flags
_ABSOLUTE, _RELATIVE, _CALL = 1, 2, 4  # relocation kinds: S + A in 64 bits, S + A - P in 32
_READ, _EXECUTE = 1, 4  # mprotect rights
_JUMP = bytes.fromhex("ff25020000000f0b")  # jmp [rip + 2], then the address: a call reaches 2 GiB, libc may be farther


@dataclass(frozen=True, slots=True)
class Section:
    """A section of an object; the meaning of `link` and `info` depends on the kind."""

    kind: int
    flags: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name and its place: an offset in a section; section 0 means undefined."""

    name: str
    section: int
    value: int

    @property
    def defined(self) -> bool:
        return self.section != 0


@dataclass(frozen=True)
class Object:
    """The tables of an object file."""

    data: bytes
    machine: int
    sections: list[Section]
    symbols: list[Symbol]  # in relocation order; some have no name

    @classmethod
    def read(cls, data: bytes) -> Object:
        """Reads the tables of a 64-bit little-endian ELF object."""
        if data[:6] != b"\x7fELF\x02\x01":
            raise FormatError(f"object: expected a 64-bit ELF file, found {data[:6]!r} in {len(data)} bytes")
        try:
            machine, table, entry_bytes, count = _HEADER.unpack_from(data)
            sections = [Section(*_SECTION.unpack_from(data, table + i * entry_bytes)) for i in range(count)]
            symbols = []
            for section in (s for s in sections if s.kind == _SYMBOL_TABLE):
                names = sections[section.link].offset
                for at in range(section.offset, section.offset + section.size, _SYMBOL.size):
                    name, _, _, home, value, _ = _SYMBOL.unpack_from(data, at)
                    start = names + name
                    symbols.append(Symbol(data[start : data.index(b"\0", start)].decode(), home, value))
            return cls(data, machine, sections, symbols)
        except (struct.error, IndexError, ValueError, OverflowError) as error:
            raise FormatError(f"object: the ELF tables of {len(data)} bytes do not hold together: {error}") from error

    def loaded(self, *, executed: bool) -> list[int]:
        """The numbers of the sections with code, or of those with constants."""
        numbers = []
        for number, section in enumerate(self.sections):
            if section.flags & _LOADED and section.size:
                if section.flags & _WRITTEN:
                    raise FormatError(f"object: section {number} is writable, but generators emit no variables")
                if section.kind == _PROGRAM and bool(section.flags & _EXECUTED) == executed:
                    numbers.append(number)
        return numbers


def with_word(data: bytes, name: str, value: int) -> bytes:
    """A copy of an object in which the constant word `name` has this value."""
    obj = Object.read(data)
    symbol = next((s for s in obj.symbols if s.defined and s.name == name), None)
    if symbol is None:
        raise FormatError(f"object: it does not define {name}")
    place = obj.sections[symbol.section].offset + symbol.value
    return data[:place] + struct.pack("<q", value) + data[place + 8 :]


def can_load() -> bool:
    """Whether `load` works on this machine: it supports x86-64 relocations and Linux system calls only."""
    return sys.platform == "linux" and platform.machine() == "x86_64"


def load(data: bytes, names: Sequence[str]) -> dict[str, int]:
    """Loads an object into memory for good and returns the addresses of its functions."""
    obj = Object.read(data)
    if obj.machine != _X86_64:
        raise CapabilityError(f"object: expected code for machine {_X86_64} (x86-64), found {obj.machine}")
    undefined = {s.name for s in obj.symbols if not s.defined and s.name}
    if undefined - LIBC:
        raise FormatError(f"object: it calls {', '.join(sorted(undefined - LIBC))}, which is not part of it")
    try:
        return _Image(obj, sorted(undefined)).functions(names)
    except (struct.error, IndexError, ValueError, OverflowError) as error:
        raise FormatError(f"object: the sections of {len(data)} bytes do not hold together: {error}") from error


class _Image:
    """An object in memory: code and jumps to the C library on executable pages, constants on others."""

    def __init__(self, obj: Object, libc: Sequence[str]) -> None:
        self.obj = obj
        self.places: dict[int, int] = {}  # by section
        jumps = self._place(obj.loaded(executed=True), 0)
        self.jumps = {name: _round_up(jumps, 16) + 16 * i for i, name in enumerate(libc)}
        constants = _round_up(max(jumps, *(at + 16 for at in self.jumps.values()), 1), mmap.PAGESIZE)
        size = _round_up(self._place(obj.loaded(executed=False), constants), mmap.PAGESIZE)
        self.memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.base = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self._write()
        _protect(self.base, constants, _READ | _EXECUTE)
        _protect(self.base + constants, size - constants, _READ)
        # Addresses become plain numbers, so nothing tracks the last user. Not even interpreter exit may free the
        # memory: a daemon thread can be executing it.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.memory))

    def functions(self, names: Iterable[str]) -> dict[str, int]:
        known = {s.name: s for s in self.obj.symbols if s.defined}
        missing = sorted(set(names) - known.keys())
        if missing:
            raise FormatError(f"object: it does not define {', '.join(missing)}")
        return {name: self.base + self._offset(known[name]) for name in names}

    def _place(self, numbers: Sequence[int], end: int) -> int:
        """Assigns offsets to sections from `end` on; returns the new end."""
        for number in numbers:
            section = self.obj.sections[number]
            if section.alignment > mmap.PAGESIZE or section.offset + section.size > len(self.obj.data):
                raise FormatError(f"object: section {number} is not inside its {len(self.obj.data)} bytes")
            self.places[number] = _round_up(end, max(section.alignment, 1))
            end = self.places[number] + section.size
        return end

    def _write(self) -> None:
        for number, place in self.places.items():
            section = self.obj.sections[number]
            self.memory[place : place + section.size] = self.obj.data[section.offset : section.offset + section.size]
        for name, place in self.jumps.items():
            function = ctypes.cast(getattr(ctypes.CDLL(None), name), ctypes.c_void_p).value or 0
            self.memory[place : place + 16] = _JUMP + function.to_bytes(8, "little")
        for section in self.obj.sections:
            if section.kind == _RELOCATIONS and section.info in self.places:
                for at in range(section.offset, section.offset + section.size, _RELOCATION.size):
                    self._relocate(section.info, *_RELOCATION.unpack_from(self.obj.data, at))

    def _relocate(self, number: int, offset: int, kind: int, symbol: int, addend: int) -> None:
        """Writes an absolute address or a relative distance into a section."""
        width = 8 if kind == _ABSOLUTE else 4
        if offset + width > self.obj.sections[number].size:
            raise FormatError(f"object: a relocation at byte {offset} lies outside section {number}")
        at, goal = self.places[number] + offset, self._offset(self.obj.symbols[symbol]) + addend
        if kind == _ABSOLUTE:
            self.memory[at : at + 8] = struct.pack("<Q", self.base + goal)
        elif kind in (_RELATIVE, _CALL):
            self.memory[at : at + 4] = struct.pack("<i", goal - at)
        else:
            raise FormatError(f"object: relocation kind {kind} is not among {_ABSOLUTE}, {_RELATIVE} and {_CALL}")

    def _offset(self, symbol: Symbol) -> int:
        """Offset of a symbol from the start of the memory."""
        if not symbol.defined:
            if symbol.name not in self.jumps:
                raise FormatError(f"object: a relocation goes to symbol {symbol.name!r}, which is undefined")
            return self.jumps[symbol.name]
        if symbol.section not in self.places:
            raise FormatError(f"object: symbol {symbol.name!r} lies in section {symbol.section}, which is not loaded")
        return self.places[symbol.section] + symbol.value


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple


def _protect(address: int, size: int, rights: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if size and libc.mprotect(ctypes.c_void_p(address), ctypes.c_size_t(size), rights):
        reason = os.strerror(ctypes.get_errno())
        raise CapabilityError(f"object: this system does not let memory become executable: {reason}")

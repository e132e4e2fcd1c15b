"""What the kernels of a cubin take: registers, local and shared memory, from the sections of its ELF file."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from rlx.errors import FormatError
from rlx.fast_dataclass import dataclass

INFO, SHARED, TEXT = ".nv.info", ".nv.shared.", ".text."
WORDS, REGISTERS, FRAME = 0x04, 0x2F, 0x11  # a record with words of its own, and what it is about
RESERVED = 1024  # bytes of shared memory per block that the system takes from compute capability 9.0 on
RESERVED_MARK = ".nv.shared.reserved.0"


@dataclass(frozen=True, slots=True)
class Resources:
    """What a kernel takes: registers per thread, bytes spilled per thread, bytes of static shared memory per block.

    Spilled is all that is in local memory: registers that there was no room for, and arrays indexed at run time.
    """

    registers: int
    spilled: int
    shared: int


class _Section(NamedTuple):
    name: str
    offset: int
    size: int
    link: int  # number of the section that has its symbols or names


def resources(code: bytes) -> Mapping[str, Resources]:
    """By the name of the kernel."""
    try:
        sections = _sections(code)
        symbols = _symbols(code, sections)
        facts = {REGISTERS: dict[str, int](), FRAME: dict[str, int]()}
        for section in sections:
            if section.name == INFO:
                for about, symbol, value in _records(code, section):
                    if about in facts:
                        facts[about][symbols[symbol]] = value
    except (struct.error, LookupError, ValueError, StopIteration) as error:
        raise FormatError(f"cubin: {len(code)} bytes are no cubin: {error}") from error
    reserved = RESERVED * any(section.name == RESERVED_MARK for section in sections)
    shared = {s.name.removeprefix(SHARED): s.size - reserved for s in sections if s.name.startswith(SHARED)}
    kernels = [s.name.removeprefix(TEXT) for s in sections if s.name.startswith(TEXT)]
    return {k: Resources(facts[REGISTERS][k], facts[FRAME].get(k, 0), shared.get(k, 0)) for k in kernels}


def _sections(code: bytes) -> list[_Section]:
    if code[:4] != b"\x7fELF":
        raise ValueError("it does not begin like an ELF file")
    (table,) = struct.unpack_from("<Q", code, 40)
    size, count, names = struct.unpack_from("<HHH", code, 58)
    headers = [struct.unpack_from("<IIQQQQII", code, table + i * size) for i in range(count)]
    return [_Section(_text(code, headers[names][4] + h[0]), h[4], h[5], h[6]) for h in headers]


def _text(code: bytes, at: int) -> str:
    return code[at : code.index(b"\0", at)].decode()


def _symbols(code: bytes, sections: list[_Section]) -> list[str]:
    table = next(s for s in sections if s.name == ".symtab")
    names = sections[table.link].offset
    entries = range(table.offset, table.offset + table.size, 24)
    return [_text(code, names + struct.unpack_from("<I", code, at)[0]) for at in entries]


def _records(code: bytes, section: _Section) -> Iterator[tuple[int, int, int]]:
    """Records about symbols: what they say, the symbol, the value."""
    at, end = section.offset, section.offset + section.size
    while at < end:
        kind, about, size = struct.unpack_from("<BBH", code, at)
        at += 4
        if kind == WORDS:
            if size >= 8:
                yield about, *struct.unpack_from("<II", code, at)
            at += size

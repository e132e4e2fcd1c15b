"""Checks free memory before allocating, to raise a clear error instead of being killed by the OOM killer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlx.cgroups import groups
from rlx.errors import FormatError, ResourceError

SMALL = 64 << 20  # allocations up to this size are not checked
ADDRESSES = 1 << 63  # more bytes or elements than this cannot be addressed
_FILES = {  # per cgroup version: limit, usage, and the page cache's name in memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
SMALLER = "close other programs, or choose a smaller model"


def available(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still allocate, given the machine, its control groups and its own limit.

    None if unknown. `root` is where /proc and /sys are.
    """
    return min(_limits(root), default=None)


def fits(needed: int) -> bool:
    """Whether `needed` more bytes can be allocated, as far as the system reports."""
    if needed <= SMALL:
        return True
    room = available()
    return needed < ADDRESSES if room is None else needed <= room


def require(subject: str, needed: int, hint: str | None = None, notes: Iterable[str] = ()) -> None:
    """Raise ResourceError if `needed` more bytes cannot be allocated."""
    if not fits(needed):
        raise lacking(f"{subject}: needs {show(needed)}", hint, notes)


def lacking(needs: str, hint: str | None = None, notes: Iterable[str] = ()) -> ResourceError:
    """The error with the bytes needed and the bytes free."""
    room = available()
    free = "more than there can be" if room is None else f"{show(max(room, 0))} are free"
    return ResourceError(f"{needs}, {free}", hint=hint or SMALLER, notes=notes)


def show(size: int) -> str:
    """Formats bytes for people.

    >>> show(300 << 20), show(1 << 70)
    ('300 MiB', '2^70 bytes')
    """
    return f"{size / 2**20:,.0f} MiB" if size < ADDRESSES else f"2^{size.bit_length() - 1} bytes"


def writable(path: str | os.PathLike[str]) -> Path:
    """Checks that a file can be written to a path, before the work of producing it."""
    target = Path(path)
    if target.is_dir():
        raise FormatError(f"{target}: is a folder, expected the path of a file")
    if not target.parent.is_dir():
        raise FormatError(f"{target}: there is no folder {target.parent}", hint="make it first")
    return target


def _limits(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, LookupError):
        yield _fields(root / "proc/meminfo")["MemAvailable:"] * 1024
    for folder, version in groups(root, "memory"):
        limit, used, cached = _FILES[version]
        with contextlib.suppress(OSError, ValueError, LookupError):  # "max" is not a number: no limit
            # A control group counts the page cache as used, but reclaims it before refusing.
            reclaimable = _fields(folder / "memory.stat").get(cached, 0)
            yield _number(folder / limit) - _number(folder / used) + reclaimable
    with contextlib.suppress(ImportError, OSError, ValueError, LookupError):
        import resource  # not on every system

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            yield soft - int((root / "proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _number(path: Path) -> int:
    return int(path.read_text())


def _fields(path: Path) -> dict[str, int]:
    """Parses a file of `name number` lines."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}

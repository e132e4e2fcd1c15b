"""How much memory may still be allocated, and a clear error before it runs out: better than the kernel's killer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from rlx.cgroups import groups
from rlx.errors import FormatError, ResourceError

SMALL = 64 << 20  # bytes that are allocated without a look at what is free
ADDRESSES = 1 << 63  # bytes and elements beyond this have no address, whatever the machine has
_FILES = {  # of a control group, by version: limit, use, and the name of the page cache in memory.stat
    1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: ("memory.max", "memory.current", "inactive_file"),
}
SMALLER = "close other programs, or choose a smaller model"


def available(root: Path = Path("/")) -> int | None:
    """Bytes that this process may still allocate: of the machine, its control groups and its own limit.

    None if nothing says. `root` is where /proc and /sys are.
    """
    return min(_limits(root), default=None)


def fits(needed: int) -> bool:
    """Whether `needed` more bytes can be allocated, as far as the system says."""
    if needed <= SMALL:
        return True
    room = available()
    return needed < ADDRESSES if room is None else needed <= room


def require(what: str, needed: int, hint: str | None = None, notes: Iterable[str] = ()) -> None:
    """Raise ResourceError where `needed` more bytes cannot be allocated."""
    if not fits(needed):
        raise lacking(f"{what}: needs {show(needed)}", hint, notes)


def lacking(needs: str, hint: str | None = None, notes: Iterable[str] = ()) -> ResourceError:
    """The error that says what is needed and what is free."""
    room = available()
    free = "more than there can be" if room is None else f"{show(max(room, 0))} are free"
    return ResourceError(f"{needs}, {free}", hint=hint or SMALLER, notes=notes)


def show(size: int) -> str:
    """Bytes for people.

    >>> show(300 << 20), show(1 << 70)
    ('300 MiB', '2^70 bytes')
    """
    return f"{size / 2**20:,.0f} MiB" if size < ADDRESSES else f"2^{size.bit_length() - 1} bytes"


def writable(path: str | os.PathLike[str]) -> Path:
    """A path that a file may be written to, or an error before the work of making it."""
    found = Path(path)
    if found.is_dir():
        raise FormatError(f"{found}: is a folder, wanted the path of a file")
    if not found.parent.is_dir():
        raise FormatError(f"{found}: there is no folder {found.parent}", hint="make it first")
    return found


def _limits(root: Path) -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, LookupError):
        yield _fields(root / "proc/meminfo")["MemAvailable:"] * 1024
    for folder, version in groups(root, "memory"):
        limit, used, cached = _FILES[version]
        with contextlib.suppress(OSError, ValueError, LookupError):  # "max" is no number: no limit
            # A control group counts the page cache as used, but gives it up before it refuses.
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
    """The numbers of a file of names and numbers."""
    rows = (line.split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdecimal()}

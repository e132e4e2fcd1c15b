"""How much memory may still be taken, and a clear no before it is not enough: better than the kernel's killer."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from rlx.errors import FormatError, ResourceError

SMALL = 64 << 20  # bytes that nobody needs to ask for


def available() -> int | None:
    """Bytes that this process may still take: of the machine, its control group and its own limit; None if unknown."""
    return min(_limits(), default=None)


def require(what: str, needed: int, hint: str | None = None) -> None:
    """Raise where `needed` more bytes are not to be had."""
    if needed <= SMALL:
        return
    room = available()
    if room is not None and needed > room:
        raise ResourceError(
            f"{what}: needs {needed / 2**20:,.0f} MiB, {max(room, 0) / 2**20:,.0f} MiB are free",
            hint=hint or "close other programs, or choose a smaller model",
        )


def writable(path: str | os.PathLike[str]) -> Path:
    """A path that a file may be written to, or an error before the work of making it."""
    found = Path(path)
    if found.is_dir():
        raise FormatError(f"{found}: is a folder, wanted the path of a file")
    if not found.parent.is_dir():
        raise FormatError(f"{found}: there is no folder {found.parent}", hint="make it first")
    return found


def _limits() -> Iterator[int]:
    with contextlib.suppress(OSError, ValueError, LookupError):
        yield _field("/proc/meminfo", "MemAvailable:") * 1024
    # A control group counts the page cache as used, but gives it up before it refuses.
    for folder, limit, used in (
        ("/sys/fs/cgroup", "memory.max", "memory.current"),
        ("/sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes"),
    ):
        with contextlib.suppress(OSError, ValueError, LookupError):  # "max" is no number: no limit
            cached = _field(f"{folder}/memory.stat", "inactive_file")
            yield _number(f"{folder}/{limit}") - _number(f"{folder}/{used}") + cached
    with contextlib.suppress(ImportError, OSError, ValueError, LookupError):
        import resource  # not on every system

        soft, _ = resource.getrlimit(resource.RLIMIT_AS)
        if soft != resource.RLIM_INFINITY:
            yield soft - int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def _number(path: str) -> int:
    return int(Path(path).read_text())


def _field(path: str, name: str) -> int:
    """The number behind a name in a file of names and numbers."""
    for line in Path(path).read_text().splitlines():
        key, number, *_ = line.split()
        if key == name:
            return int(number)
    raise LookupError(name)

"""Memory-mapped files that detect changes on disk.

A map shows the current file. If the file is overwritten in place, a model computes with other weights; if it is
truncated, reading beyond its new end raises SIGBUS. So `FileMap.check` is called once per request, and all maps of the
process are listed in `TABLE`, where a signal handler can look up which file a faulting address belongs to.
"""

from __future__ import annotations

import itertools
import mmap
import os
import sys
from pathlib import Path
from typing import Any, Self

import numpy as np

from rlx.errors import FormatError
from rlx.host_memory import address

SLOTS = 4096  # entries of the table; further maps are not listed
START, END, PATH, LENGTH = range(4)  # words of a slot: addresses of the map, address and length of the path; 0 is free
TABLE: np.ndarray[Any, np.dtype[np.int64]] = np.zeros((SLOTS, 4), np.int64)

_unused = itertools.count()  # slots that were never used
_freed: list[int] = []
_HINT = "load the model again, and replace files by renaming new ones over them"


class FileMap(mmap.mmap):
    """A read-only map of an entire file.

    It keeps the file open, so renaming or removing the file leaves the map intact and does not count as a change.
    """

    _descriptor = _slot = -1
    path: Path
    state: os.stat_result

    def __new__(cls, path: Path, descriptor: int) -> Self:
        state = os.fstat(descriptor)
        # mmap would duplicate the descriptor too, which is useless here but unavoidable before Python 3.13.
        options: dict[str, Any] = {"trackfd": False} if sys.version_info >= (3, 13) else {}
        self = super().__new__(cls, descriptor, 0, access=mmap.ACCESS_READ, **options)
        self.path, self.state = path, state
        self._descriptor = os.dup(descriptor)
        self._list()
        return self

    def _list(self) -> None:
        """Add the map to the table; its start is written last, since that makes the slot valid."""
        slot = _freed.pop() if _freed else next(_unused)
        if slot >= SLOTS:
            return
        self._name = np.frombuffer(os.fsencode(self.path), np.uint8)  # must outlive its address in the table
        start = address(np.frombuffer(self, np.uint8))
        self._slot = slot
        TABLE[slot, END:] = start + len(self), address(self._name), self._name.size
        TABLE[slot, START] = start

    def __del__(self) -> None:
        if self._slot >= 0:
            TABLE[self._slot, START] = 0
            _freed.append(self._slot)
        if self._descriptor >= 0:
            os.close(self._descriptor)

    def check(self) -> None:
        """Raise if the file has changed since it was mapped. Takes about a microsecond."""
        now, then = os.fstat(self._descriptor), self.state
        if now.st_size == then.st_size and now.st_mtime_ns == then.st_mtime_ns:
            return
        if now.st_size != then.st_size:
            change = f"it had {then.st_size} bytes, now {now.st_size}"
        else:
            change = f"it was modified at {_format_time(then.st_mtime_ns)}, now at {_format_time(now.st_mtime_ns)}"
        raise FormatError(f"{self.path}: the file has changed since it was loaded: {change}", hint=_HINT)


def map_of(view: memoryview) -> list[FileMap]:
    """The map behind a view, as a list; empty for other memory."""
    return [view.obj] if isinstance(view.obj, FileMap) else []


def _format_time(nanoseconds: int) -> str:
    """Format a timestamp as `ls --full-time` does."""
    import datetime

    seconds, rest = divmod(nanoseconds, 10**9)
    return f"{datetime.datetime.fromtimestamp(seconds):%Y-%m-%d %H:%M:%S}.{rest:09d}"

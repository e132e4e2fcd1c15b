"""Host memory: where arrays lie, who owns it, and how to drop pages of mapped files."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
LINE = 64  # bytes of a cache line
_EMPTY = ctypes.c_char * 0


def address(array: np.ndarray[Any, Any]) -> int:
    """Where the data of a contiguous array is."""
    try:
        return ctypes.addressof(_EMPTY.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, empty, or of a type that has no buffer protocol
        return int(array.__array_interface__["data"][0])


def root_buffer(array: np.ndarray[Any, Any]) -> Any:
    """The array that owns the memory, or the map of a file."""
    found: Any = array
    while isinstance(found, np.ndarray) and found.base is not None:
        found = found.base
    # Asked of the map, not of the view: what was written to a private one is in no file.
    if isinstance(found, memoryview) and not (isinstance(found.obj, mmap.mmap) and memoryview(found.obj).readonly):
        return np.frombuffer(found, np.uint8)
    return found


def release(array: np.ndarray[Any, Any]) -> None:
    """Let go of the pages of an array that lies in a file: whoever reads it next gets them from there."""
    file = getattr(root_buffer(array), "obj", None)
    if not isinstance(file, mmap.mmap) or not array.nbytes or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = address(array) - address(np.frombuffer(file, np.uint8))
    start = first // PAGE * PAGE
    with contextlib.suppress(OSError):  # locked into memory, by mlockall
        file.madvise(mmap.MADV_DONTNEED, start, first + array.nbytes - start)

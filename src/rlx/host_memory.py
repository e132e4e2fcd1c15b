"""Host memory: addresses and owners of arrays, dropping pages of mapped files, and the allocator's free memory."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import sys
from typing import Any

import numpy as np

PAGE = mmap.PAGESIZE
LINE = 64  # bytes per cache line
_EMPTY = ctypes.c_char * 0


def address(array: np.ndarray[Any, Any]) -> int:
    """The address of a contiguous array's data."""
    try:
        return ctypes.addressof(_EMPTY.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, empty, or no buffer protocol for its type
        return int(array.__array_interface__["data"][0])


def root_buffer(array: np.ndarray[Any, Any]) -> Any:
    """The array that owns the memory, or the memory map of a file."""
    owner: Any = array
    while isinstance(owner, np.ndarray) and owner.base is not None:
        owner = owner.base
    # Checks the map, not the view: writes to a private map are not in the file.
    if isinstance(owner, memoryview) and not (isinstance(owner.obj, mmap.mmap) and memoryview(owner.obj).readonly):
        return np.frombuffer(owner, np.uint8)
    return owner


def release(array: np.ndarray[Any, Any]) -> None:
    """Drops the resident pages of an array mapped from a file; the next read loads them again."""
    file = getattr(root_buffer(array), "obj", None)
    if not isinstance(file, mmap.mmap) or not array.nbytes or not hasattr(mmap, "MADV_DONTNEED"):
        return
    first = address(array) - address(np.frombuffer(file, np.uint8))
    start = first // PAGE * PAGE
    with contextlib.suppress(OSError):  # locked by mlockall
        file.madvise(mmap.MADV_DONTNEED, start, first + array.nbytes - start)


def trim() -> None:
    """Returns the free memory of C's allocator to the system, where that is glibc's: a millisecond or so."""
    if sys.platform == "linux" and (trimmed := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trimmed(0)

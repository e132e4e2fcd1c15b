"""Memory between pages that nobody may touch: a kernel that reads or writes past an array dies there."""

from __future__ import annotations

import ctypes
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

_NO_ACCESS = 0  # PROT_NONE
_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mprotect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def guarded(size: int, *, at_end: bool) -> Array:
    """`size` bytes that touch a page without access at their end, or at their start."""
    page = mmap.PAGESIZE
    body = -(-max(size, 1) // page) * page
    memory = np.frombuffer(mmap.mmap(-1, body + 2 * page), np.uint8)
    for guard in (0, body + page):
        if _LIBC.mprotect(memory.ctypes.data + guard, page, _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    start = page + (body - size if at_end else 0)
    return memory[start : start + size]


def guarded_copy(array: Array, *, at_end: bool) -> Array:
    copy = guarded(array.nbytes, at_end=at_end).view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy

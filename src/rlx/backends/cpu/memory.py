"""Memory for runs: aligned blocks, and for `RLX_CHECK=1` blocks full of NaN that end at a page nobody may touch."""

from __future__ import annotations

import ctypes
import mmap
import os
from typing import Any

import numpy as np

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
_EMPTY = ctypes.c_char * 0
_PROT_NONE = 0


def checking() -> bool:
    """Whether runs use guarded memory."""
    return os.environ.get("RLX_CHECK") == "1"


def address(array: np.ndarray[Any, Any]) -> int:
    """Where the data of a contiguous array is."""
    try:
        return ctypes.addressof(_EMPTY.from_buffer(array))  # type: ignore[arg-type]
    except (TypeError, ValueError):  # read-only, empty, or of a type that has no buffer protocol
        return int(array.__array_interface__["data"][0])


def aligned(nbytes: int, alignment: int = 64) -> Bytes:
    """Uninitialised memory that starts at a multiple of `alignment`."""
    block = np.empty(nbytes + alignment, np.uint8)
    start = -block.ctypes.data % alignment
    return block[start : start + nbytes]


class Guarded:
    """`nbytes` bytes of 0xFF (NaN in every float type) that end where an inaccessible page begins."""

    def __init__(self, nbytes: int) -> None:
        page = mmap.PAGESIZE
        body = -(-nbytes // page) * page
        self._map = mmap.mmap(-1, body + page)
        whole = np.frombuffer(self._map, np.uint8)
        libc = ctypes.CDLL(None, use_errno=True)
        guard = whole.ctypes.data + body
        if libc.mprotect(ctypes.c_void_p(guard), ctypes.c_size_t(page), _PROT_NONE):
            raise OSError(ctypes.get_errno(), "mprotect failed")
        self.bytes: Bytes = whole[body - nbytes : body]
        self.bytes[:] = 0xFF

    @property
    def address(self) -> int:
        return int(self.bytes.ctypes.data)

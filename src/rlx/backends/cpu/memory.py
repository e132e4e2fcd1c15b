"""Memory for runs: aligned blocks, and for `RLX_CHECK=1` blocks full of NaN between pages nobody may touch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
import mmap
import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import ArrayType, HostAllocator
from rlx.host_memory import LINE, PAGE, address

Bytes = np.ndarray[Any, np.dtype[np.uint8]]
HUGE = 2 << 20  # bytes of a huge page
HUGE_FROM = 3 << 19  # bytes in a huge page from which on it is worth having: it is there as a whole
_NOBODY, _READERS = 0, 1  # PROT_NONE, PROT_READ


def checking() -> bool:
    """Whether runs use guarded memory."""
    return os.environ.get("RLX_CHECK") == "1"


def aligned(nbytes: int) -> Bytes:
    """Uninitialised memory that starts on a cache line."""
    block = np.empty(nbytes + LINE, np.uint8)
    start = -address(block) % LINE
    return block[start : start + nbytes]


class CpuAllocator(HostAllocator):
    """Host memory; arrays that live long start on cache lines, in huge pages."""

    def long_lived(self, types: Sequence[ArrayType]) -> list[Array]:
        return alloc_packed(types)


def alloc_packed(types: Sequence[ArrayType]) -> list[Array]:
    """Uninitialised arrays, each from a cache line on, that are read again and again: in huge pages where that pays.

    An encoder's weights are read once a run, in pages that the processor has forgotten since: with pages of 4 KiB it
    looks up one for every 64 lines, which cost a sixth of the time of 32 rows times weights in memory.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in types]
    starts = np.cumsum([0, *(-(-size // LINE) * LINE for size in sizes)]).tolist()
    block = _huge(starts[-1]) if starts[-1] >= HUGE_FROM else aligned(starts[-1])
    return [
        block[start : start + size].view(dtype).reshape(shape)
        for start, size, (shape, dtype) in zip(starts, sizes, types, strict=False)
    ]


def _huge(nbytes: int) -> Bytes:
    """Zeros in huge pages, as far as they fill them and the system has them."""
    try:
        whole = mmap.mmap(-1, -(-nbytes // HUGE) * HUGE + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # what NumPy says of memory that is not there
        raise MemoryError(f"{nbytes / 2**20:,.0f} MiB of weights: {error.strerror}") from error
    start = -address(np.frombuffer(whole, np.uint8)) % HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            whole.madvise(mmap.MADV_HUGEPAGE, start, (nbytes + HUGE - HUGE_FROM) // HUGE * HUGE)
    return np.frombuffer(memoryview(whole)[start : start + nbytes], np.uint8)  # what is around it takes no memory


class Guarded:
    """`nbytes` bytes of 0xFF (NaN in every float type) between two pages nobody may touch, up to the second one."""

    def __init__(self, nbytes: int) -> None:
        body = _pages(nbytes)
        whole = np.frombuffer(mmap.mmap(-1, body + 2 * PAGE), np.uint8)
        whole[PAGE:-PAGE] = 0xFF
        for guard in (whole[:PAGE], whole[-PAGE:]):
            _protect(guard, _NOBODY)
        start = PAGE + body - nbytes
        self.bytes: Bytes = whole[start:-PAGE]
        self._before: Bytes = whole[PAGE:start]

    @classmethod
    def copy(cls, array: np.ndarray[Any, Any], *, written: bool = False) -> Guarded:
        """The bytes of an array, which nobody may write to unless they are to be `written`."""
        guard = cls(array.nbytes)
        guard.bytes[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not written and array.nbytes:
            _protect(guard.bytes, _READERS)
        return guard

    @property
    def address(self) -> int:
        return address(self.bytes)

    @property
    def intact(self) -> bool:
        """Whether nobody has written to what is left of the first page."""
        return bool((self._before == 0xFF).all())


def guarded_stride(scratch: int, private: int) -> int:
    """Bytes from a thread's guarded scratch to the next one's: a page nobody may touch is after each part of it."""
    return _pages(scratch) + PAGE + _pages(private) + PAGE


def guarded_scratch(scratch: int, private: int, threads: int) -> Bytes:
    """Scratch of 0xFF. Of each thread, the first part ends where a page begins that nobody may touch; another follows
    what is after that page, which belongs to loops.
    """
    stride = guarded_stride(scratch, private)
    whole = np.frombuffer(mmap.mmap(-1, stride * threads), np.uint8)
    whole[:] = 0xFF
    for thread in np.split(whole, threads):
        for end in (_pages(scratch), stride - PAGE):
            _protect(thread[end : end + PAGE], _NOBODY)
    return whole[_pages(scratch) - scratch :]


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _protect(block: Bytes, allowed: int) -> None:
    """Change what may be done with all pages that a block touches."""
    first = address(block) // PAGE * PAGE
    length = address(block) + block.nbytes - first
    if _libc().mprotect(ctypes.c_void_p(first), ctypes.c_size_t(length), allowed):
        raise OSError(ctypes.get_errno(), "mprotect failed")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

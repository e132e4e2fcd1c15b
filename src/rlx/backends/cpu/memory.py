"""`CpuAllocator`, and memory for runs: aligned blocks and, for `RLX_CHECK=1`, blocks of NaN between guard pages."""

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
HUGE_FROM = 3 << 19  # of data in the last huge page, from which on it is worth allocating in full
_NO_ACCESS, _READ_ONLY = 0, 1  # PROT_NONE, PROT_READ


def checking() -> bool:
    """Whether runs use guarded memory."""
    return os.environ.get("RLX_CHECK") == "1"


def alloc_aligned(nbytes: int) -> Bytes:
    """Allocates uninitialised memory aligned to a cache line."""
    block = np.empty(nbytes + LINE, np.uint8)
    start = -address(block) % LINE
    return block[start : start + nbytes]


class CpuAllocator(HostAllocator):
    """Host memory; long-lived arrays are aligned to cache lines, in huge pages."""

    def long_lived(self, types: Sequence[ArrayType]) -> list[Array]:
        return alloc_packed(types)


def alloc_packed(types: Sequence[ArrayType]) -> list[Array]:
    """Allocates uninitialised arrays for repeated reading, aligned to cache lines, in huge pages where they pay off.

    An encoder reads its weights once per run, by when their page translations have left the TLB: 4 KiB pages need a
    lookup per 64 cache lines, which cost a sixth of the time of a 32-row matmul with weights in memory.
    """
    sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in types]
    offsets = np.cumsum([0, *(-(-size // LINE) * LINE for size in sizes)]).tolist()
    block = _huge(offsets[-1]) if offsets[-1] >= HUGE_FROM else alloc_aligned(offsets[-1])
    return [
        block[start : start + size].view(dtype).reshape(shape)
        for start, size, (shape, dtype) in zip(offsets, sizes, types, strict=False)
    ]


def _huge(nbytes: int) -> Bytes:
    """Allocates zeros in huge pages, as far as they fill them and the system has them."""
    try:
        mapping = mmap.mmap(-1, -(-nbytes // HUGE) * HUGE + HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # as NumPy raises it
        raise MemoryError(f"{nbytes / 2**20:,.0f} MiB of weights: {error.strerror}") from error
    start = -address(np.frombuffer(mapping, np.uint8)) % HUGE
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages
            mapping.madvise(mmap.MADV_HUGEPAGE, start, (nbytes + HUGE - HUGE_FROM) // HUGE * HUGE)
    return np.frombuffer(memoryview(mapping)[start : start + nbytes], np.uint8)  # the margins around it take no memory


class Guarded:
    """`nbytes` bytes of 0xFF (NaN in every float type) between two guard pages, ending at the second one."""

    def __init__(self, nbytes: int) -> None:
        body = _pages(nbytes)
        memory = np.frombuffer(mmap.mmap(-1, body + 2 * PAGE), np.uint8)
        memory[PAGE:-PAGE] = 0xFF
        for guard in (memory[:PAGE], memory[-PAGE:]):
            _protect(guard, _NO_ACCESS)
        start = PAGE + body - nbytes
        self.bytes: Bytes = memory[start:-PAGE]
        self._before: Bytes = memory[PAGE:start]

    @classmethod
    def copy(cls, array: np.ndarray[Any, Any], *, written: bool = False) -> Guarded:
        """Copies the bytes of an array, read-only unless `written`."""
        guard = cls(array.nbytes)
        guard.bytes[:] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        if not written and array.nbytes:
            _protect(guard.bytes, _READ_ONLY)
        return guard

    @property
    def address(self) -> int:
        return address(self.bytes)

    @property
    def intact(self) -> bool:
        """Whether the gap before the data is untouched."""
        return bool((self._before == 0xFF).all())


def guarded_stride(scratch: int, private: int) -> int:
    """Bytes from one thread's guarded scratch to the next: a guard page follows each of its two parts."""
    return _pages(scratch) + PAGE + _pages(private) + PAGE


def guarded_scratch(scratch: int, private: int, threads: int) -> Bytes:
    """Allocates scratch of 0xFF with guard pages: per thread, one ends the kernels' part and one the part of loops."""
    stride = guarded_stride(scratch, private)
    memory = np.frombuffer(mmap.mmap(-1, stride * threads), np.uint8)
    memory[:] = 0xFF
    for thread in np.split(memory, threads):
        for end in (_pages(scratch), stride - PAGE):
            _protect(thread[end : end + PAGE], _NO_ACCESS)
    return memory[_pages(scratch) - scratch :]


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE) * PAGE


def _protect(block: Bytes, allowed: int) -> None:
    """Changes the access rights of all pages that a block touches."""
    first = address(block) // PAGE * PAGE
    length = address(block) + block.nbytes - first
    if _libc().mprotect(ctypes.c_void_p(first), ctypes.c_size_t(length), allowed):
        raise OSError(ctypes.get_errno(), "mprotect failed")


@functools.cache
def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)

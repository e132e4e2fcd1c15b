"""Reserved host memory: address space for a buffer's maximum size, backed by memory only where it is written."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np

# Python 3.11 and 3.12 do not define it. With this flag Linux does not count the mapping against free memory.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def reserved_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """Returns zeros that the system backs with memory page by page, at the first write.

    Returns None where that is not possible: outside Linux, under address space limits or strict overcommit accounting.
    """
    size = math.prod(shape) * dtype.itemsize
    if not hasattr(mmap, "MADV_NOHUGEPAGE") or not size:
        return None
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, OverflowError):
        return None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        # The first token of each head would allocate a huge page and leave most of it unused.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)

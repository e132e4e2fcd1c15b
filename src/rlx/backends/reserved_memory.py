"""Reserved host memory: address space for all that a buffer may ever hold, which takes memory where it is written."""

from __future__ import annotations

import contextlib
import math
import mmap
from typing import Any

import numpy as np

# Python 3.11 and 3.12 have no name for it. Linux then does not weigh the mapping against free memory.
_NORESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000)


def reserved_zeros(shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any] | None:
    """Zeros whose memory the system provides page by page at the first write.

    None where it does not: other systems than Linux, limits on address space, or strict accounting of memory.
    """
    size = math.prod(shape) * dtype.itemsize
    if not hasattr(mmap, "MADV_NOHUGEPAGE") or not size:
        return None
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE)
    except (OSError, OverflowError):
        return None
    with contextlib.suppress(OSError):  # a kernel without huge pages
        # A huge page would be provided for the first token of each head, and most of it stay unused.
        memory.madvise(mmap.MADV_NOHUGEPAGE)
    return np.frombuffer(memory, dtype).reshape(shape)

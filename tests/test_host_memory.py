"""Host memory: what C's allocator has free goes back to the system."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest

from rlx import host_memory

BLOCKS, BYTES = 2000, 64 << 10  # below the size from which each block has a mapping of its own
STATUS = Path("/proc/self/status")


def anonymous_bytes() -> int:
    match = re.search(r"RssAnon:\s+(\d+) kB", STATUS.read_text())
    assert match is not None
    return int(match[1]) << 10


@pytest.mark.skipif(
    not STATUS.exists() or not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs Linux and glibc"
)
def test_trim_returns_free_blocks_below_one_in_use() -> None:
    c = ctypes.CDLL(None)
    c.malloc.restype, c.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
    blocks = [c.malloc(BYTES) for _ in range(BLOCKS)]
    for block in blocks:
        ctypes.memset(block, 1, BYTES)
    before = anonymous_bytes()
    for block in blocks[:-1]:
        c.free(block)
    host_memory.trim()
    freed = before - anonymous_bytes()
    c.free(blocks[-1])
    assert freed > BLOCKS * BYTES * 3 // 4

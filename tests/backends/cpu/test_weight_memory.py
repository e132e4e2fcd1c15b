"""Memory for weights: side by side, on cache lines, in huge pages where there is enough of it."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from rlx.backends.cpu.memory import HUGE, HUGE_FROM, LINE, address, side_by_side

Types = list[tuple[tuple[int, ...], np.dtype[np.generic]]]
SMALL: Types = [((3, 5), np.dtype(np.float32)), ((0,), np.dtype(np.int8)), ((7,), np.dtype(np.int8))]
LARGE: Types = [((HUGE_FROM // 4,), np.dtype(np.float32)), ((5,), np.dtype(np.uint8)), ((2, 9), np.dtype(np.int64))]


@pytest.mark.parametrize("types", [[], SMALL, LARGE, [*SMALL, *LARGE]], ids=["none", "small", "large", "both"])
def test_arrays_do_not_share_lines(types: Types) -> None:
    arrays = side_by_side(types)
    assert [(a.shape, a.dtype) for a in arrays] == types
    for i, array in enumerate(arrays):
        array.view(np.uint8)[...] = i
        assert array.flags.c_contiguous
        assert array.nbytes == 0 or address(array) % LINE == 0
    for i, array in enumerate(arrays):
        assert (array.view(np.uint8) == i).all()


@pytest.mark.skipif(not hasattr(mmap, "MADV_HUGEPAGE"), reason="this system has no huge pages to ask for")
def test_much_memory_begins_with_a_huge_page() -> None:
    first, *_ = side_by_side(LARGE)
    assert address(first) % HUGE == 0


def test_memory_outlives_the_other_arrays() -> None:
    kept = side_by_side(LARGE)[-1]
    kept[...] = 7
    assert (kept == 7).all()

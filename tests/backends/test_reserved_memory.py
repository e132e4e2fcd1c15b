"""Reserved memory: zeros that can be written, and None where the system refuses."""

from __future__ import annotations

import mmap

import numpy as np
import pytest

from rlx.backends.reserved_memory import reserved_zeros
from rlx.dtypes import BY_NAME

pytestmark = pytest.mark.skipif(not hasattr(mmap, "MADV_NOHUGEPAGE"), reason="only Linux reserves memory")


@pytest.mark.parametrize("dtype", ("f32", "f16", "bf16", "q8_0"))
def test_reserved_memory_is_zeros_that_can_be_written(dtype: str) -> None:
    kind = BY_NAME[dtype].numpy
    array = reserved_zeros((3, 5, 7), kind)
    assert array is not None and array.shape == (3, 5, 7) and array.dtype == kind
    assert not any(array.tobytes()) and array.flags.writeable and array.flags.aligned
    array[1, 2] = np.ones((), kind)
    assert any(array[1, 2].tobytes()) and not any(array[2].tobytes())


@pytest.mark.parametrize("size", (1 << 50, 1 << 62))
def test_more_than_the_address_space_is_refused(size: int) -> None:
    assert reserved_zeros((size,), np.dtype(np.float32)) is None

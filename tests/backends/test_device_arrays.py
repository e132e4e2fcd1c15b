"""Arrays of a device as users hold them: what NumPy, DLPack and the buffer protocol see of them."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest

from rlx.backends.base import DeviceArray, device_of, host_view

NUMBERS = np.arange(6, dtype=np.float32).reshape(2, 3)


class Mapped(DeviceArray):
    """Memory of a device that the host can address."""

    device = "mapped"

    def __init__(self, contents: np.ndarray[Any, Any]) -> None:
        super().__init__(contents.shape, contents.dtype)
        self.contents = contents

    def numpy(self) -> np.ndarray[Any, Any]:
        return self.contents.copy()

    def host_view(self) -> np.ndarray[Any, Any] | None:
        return self.contents


class Remote(Mapped):
    """Memory of a device that the host cannot address."""

    def host_view(self) -> None:
        return None


def test_memory_that_the_host_addresses_is_shared_without_a_copy() -> None:
    array = Mapped(NUMBERS.copy())
    views = [np.asarray(array), np.asarray(array, copy=False), np.from_dlpack(array), np.asarray(array.__buffer__(0))]
    if sys.version_info >= (3, 12):
        views.append(np.asarray(memoryview(array)))
    array.contents[1, 2] = 70
    assert [view[1, 2] for view in views] == [70] * len(views)
    assert all(view.dtype == np.float32 and view.shape == (2, 3) for view in views)


def test_a_copy_that_is_asked_for_is_made() -> None:
    array = Mapped(NUMBERS.copy())
    copies = [np.array(array), np.array(array, copy=True), np.asarray(array, np.float64)]
    array.contents[...] = 0
    assert all((copy == NUMBERS).all() for copy in copies) and copies[2].dtype == np.float64
    with pytest.raises(ValueError, match="copy"):
        np.asarray(array, np.float64, copy=False)


def test_memory_that_the_host_cannot_address_is_downloaded_and_has_no_buffer() -> None:
    array = Remote(NUMBERS.copy())
    downloads = [np.asarray(array), np.from_dlpack(array)]
    array.contents[...] = 0
    assert all((download == NUMBERS).all() for download in downloads)
    with pytest.raises(BufferError, match=r"float32\[2, 3\]>: the host cannot address memory of mapped"):
        array.__buffer__(0)
    if sys.version_info >= (3, 12):
        with pytest.raises(BufferError):
            memoryview(array)


def test_buffers_of_every_kind_have_a_device_and_perhaps_a_host_view() -> None:
    mapped, remote = Mapped(NUMBERS.copy()), Remote(NUMBERS.copy())
    assert [device_of(b) for b in (NUMBERS, mapped, remote)] == ["cpu", "mapped", "mapped"]
    assert host_view(NUMBERS) is NUMBERS and host_view(mapped) is mapped.contents and host_view(remote) is None

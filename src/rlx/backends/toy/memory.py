"""Memory of the toy device, visible to its kernels only: the host uploads to it and downloads from it.

It is really host memory, hidden so that no code can assume that buffers are NumPy arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Allocator, ArrayType, DeviceArray
from rlx.errors import BindError


class ToyBuffer(DeviceArray):
    """An array in toy device memory."""

    device = "toy"

    def __init__(self, contents: Array) -> None:
        super().__init__(contents.shape, contents.dtype)
        self._contents = contents  # for the allocator and kernels only

    def numpy(self) -> Array:
        return self._contents.copy()

    @property
    def memory(self) -> Array:
        """The bytes that kernels read and write."""
        if not self._contents.flags.c_contiguous:
            raise BindError(f"{self!r}: is a strided part of a buffer", hint="copy it into a buffer of its own")
        return self._contents.reshape(-1).view(np.uint8)


class ToyAllocator(Allocator):
    """Allocates toy buffers. Every transfer between host and device copies."""

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> ToyBuffer:
        return ToyBuffer(np.zeros(shape, dtype))

    def upload(self, array: Array, owner: str = "an array") -> ToyBuffer:
        return ToyBuffer(np.array(array, order="C"))

    def download(self, buffer: ToyBuffer) -> Array:
        return buffer.numpy()

    def copy(self, source: ToyBuffer | Array, target: ToyBuffer | Array) -> None:
        contents = target._contents if isinstance(target, ToyBuffer) else target
        contents[...] = source._contents if isinstance(source, ToyBuffer) else source

    def part(self, buffer: ToyBuffer, *index: int | slice) -> ToyBuffer:
        return ToyBuffer(buffer._contents[(*index, ...)])

    def clear(self, buffer: ToyBuffer) -> None:
        buffer._contents[...] = np.zeros((), buffer.dtype)

    def long_lived(self, types: Sequence[ArrayType]) -> list[ToyBuffer]:
        return [self.zeros(shape, dtype) for shape, dtype in types]

    def owns(self, value: object) -> bool:
        return isinstance(value, ToyBuffer)

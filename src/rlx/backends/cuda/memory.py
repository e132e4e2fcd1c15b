"""Memory of a GPU: arrays that users hold, and the allocator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Allocator, ArrayType, DeviceArray
from rlx.backends.cuda.gpu import Gpu, gpu
from rlx.errors import BindError

if TYPE_CHECKING:
    from rlx.backends.cuda.dlpack import Borrowed

ALIGNMENT = 256  # of arrays that share an allocation
RESERVED_SHARE = 128  # reservations of one buffer are at most this part of the free memory
DLPACK_CUDA = 2  # device type of DLPack
STAGED = 1 << 20  # bytes of an input up to which it travels with others


class Memory:
    """An allocation, freed when nothing refers to it any more."""

    def __init__(self, device: Gpu, size: int, owner: str = "an array") -> None:
        self.gpu, self.size = device, size
        self.address = device.allocate(size, owner)

    def __del__(self) -> None:
        try:
            self.gpu.free(self.address)
        except Exception:  # the allocation failed, or the process is ending
            return


class CudaArray(DeviceArray):
    """An array in GPU memory. What is uploaded stays on the host until a run or a copy needs its address."""

    def __init__(
        self, shape: tuple[int, ...], dtype: np.dtype[Any], device: Gpu, memory: Memory | Borrowed | None,
        offset: int = 0, strides: tuple[int, ...] | None = None, host: Array | None = None,
    ) -> None:  # fmt: skip
        super().__init__(shape, dtype)
        self.gpu, self._memory, self._offset, self._host = device, memory, offset, host
        self.device = f"cuda:{device.index}"
        contiguous = _contiguous(shape, dtype.itemsize)
        self.strides = contiguous if strides is None else strides  # in bytes
        self.is_contiguous = strides is None or 0 in shape or _same_steps(shape, strides, contiguous)

    @property
    def memory(self) -> Memory | Borrowed:
        """The allocation that holds the array."""
        if self._memory is None:
            assert self._host is not None
            self._memory = Memory(self.gpu, self.nbytes)
            self.gpu.upload(self._memory.address, self._host)
            self._host = None
        return self._memory

    @property
    def address(self) -> int:
        """Where kernels read it."""
        if not self.is_contiguous:
            raise BindError(f"{self!r}: is a strided part of a buffer", hint="copy it into a buffer of its own")
        return self.start

    @property
    def start(self) -> int:
        """The address of the first element."""
        return self.memory.address + self._offset

    @property
    def host(self) -> Array | None:
        """The contents, as long as they are only on the host."""
        return self._host

    def numpy(self) -> Array:
        if self._host is not None:
            return self._host.copy()
        result = np.empty(self.shape, self.dtype)
        if self.is_contiguous:
            self.gpu.download(result, self.start)
        else:
            for index, at in self.runs():
                self.gpu.download(result[index], at)
        return result

    def runs(self) -> list[tuple[tuple[int, ...], int]]:
        """The indices and addresses of the longest contiguous parts."""
        inner, size = len(self.shape), self.dtype.itemsize
        while inner and self.strides[inner - 1] == size:
            size *= self.shape[inner - 1]
            inner -= 1
        return [
            (index, self.start + sum(i * s for i, s in zip(index, self.strides, strict=False)))
            for index in np.ndindex(*self.shape[:inner])
        ]

    def __dlpack__(self, **options: Any) -> Any:
        from rlx.backends.cuda.dlpack import capsule

        self.gpu.synchronize()
        return capsule(self)

    def __dlpack_device__(self) -> tuple[Any, Any]:
        return (DLPACK_CUDA, self.gpu.index)

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if self.dtype.kind == "V":
            raise AttributeError(f"{self.dtype.name} has no form in the CUDA array interface")
        return {
            "shape": self.shape, "typestr": self.dtype.str, "data": (self.start, False), "strides": self.strides,
            "version": 3, "stream": self.gpu.stream,
        }  # fmt: skip


def _contiguous(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    strides = [itemsize]
    for size in reversed(shape[1:]):
        strides.append(strides[-1] * max(size, 1))
    return tuple(reversed(strides)) if shape else ()


def _same_steps(shape: tuple[int, ...], strides: tuple[int, ...], others: tuple[int, ...]) -> bool:
    return all(n == 1 or a == b for n, a, b in zip(shape, strides, others, strict=True))


class CudaAllocator(Allocator):
    """Allocates memory of one GPU."""

    def __init__(self, index: int) -> None:
        self.index = index

    @property
    def gpu(self) -> Gpu:
        return gpu(self.index)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any], owner: str = "an array") -> CudaArray:
        size = math.prod(shape) * dtype.itemsize
        return CudaArray(shape, dtype, self.gpu, Memory(self.gpu, size, owner))

    def zeros(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaArray:
        array = self.empty(shape, dtype)
        self.gpu.clear(array.start, array.nbytes)
        return array

    def reserve(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> CudaArray | None:
        """All of it at once, if that leaves most of the memory free; there is no memory page by page."""
        size = math.prod(shape) * dtype.itemsize
        return self.zeros(shape, dtype) if RESERVED_SHARE * size <= self.gpu.free_bytes() else None

    def upload(self, array: Array, owner: str = "an array") -> CudaArray:
        """Small arrays stay on the host until a run copies them together; large ones are copied now, once."""
        if array.nbytes <= STAGED:
            return CudaArray(array.shape, array.dtype, self.gpu, None, host=np.array(array, order="C"))
        result = self.empty(array.shape, array.dtype, owner)
        self.gpu.upload(result.start, np.ascontiguousarray(array))
        return result

    def download(self, buffer: CudaArray) -> Array:
        return buffer.numpy()

    def copy(self, source: Any, target: Any) -> None:
        if isinstance(target, np.ndarray):
            target[...] = source.numpy() if isinstance(source, CudaArray) else source
            return
        if not isinstance(source, CudaArray):
            source = self.upload(np.broadcast_to(np.asarray(source, target.dtype), target.shape))
        if source.is_contiguous and target.is_contiguous:
            self.gpu.copy(target.start, source.start, target.nbytes)
            return
        for piece, onto in zip(_pieces(source, target), _pieces(target, source), strict=True):
            self.gpu.copy(onto[0], piece[0], piece[1])

    def part(self, buffer: CudaArray, *index: int | slice) -> CudaArray:
        memory, offset = buffer.memory, buffer.start - buffer.memory.address
        shape, strides = list[int](), list[int]()
        for chosen, size, stride in zip(index, buffer.shape, buffer.strides, strict=False):
            if isinstance(chosen, slice):
                begin, end, _ = chosen.indices(size)
                shape.append(max(end - begin, 0))
                strides.append(stride)
            else:
                begin = chosen + size * (chosen < 0)
            offset += begin * stride
        shape += buffer.shape[len(index) :]
        strides += buffer.strides[len(index) :]
        return CudaArray(tuple(shape), buffer.dtype, self.gpu, memory, offset, tuple(strides))

    def clear(self, buffer: CudaArray) -> None:
        if buffer.is_contiguous:
            self.gpu.clear(buffer.start, buffer.nbytes)
            return
        for at, size in _pieces(buffer, buffer):
            self.gpu.clear(at, size)

    def long_lived(self, types: Sequence[ArrayType]) -> list[CudaArray]:
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in types]
        rounded = [-(-size // ALIGNMENT) * ALIGNMENT for size in sizes]
        memory = Memory(self.gpu, sum(rounded), "weights")
        offsets = np.cumsum([0, *rounded]).tolist()
        return [CudaArray(s, d, self.gpu, memory, at) for (s, d), at in zip(types, offsets, strict=False)]

    def borrow(self, value: object) -> CudaArray | None:
        from rlx.backends.cuda.dlpack import borrow

        return borrow(value, self.gpu)

    def owns(self, value: object) -> bool:
        return isinstance(value, CudaArray) and value.gpu.index == self.index

    def free_bytes(self) -> int | None:
        return self.gpu.free_bytes()


def _pieces(array: CudaArray, other: CudaArray) -> list[tuple[int, int]]:
    """Addresses and bytes of the parts that are contiguous in both arrays, which have the same shape."""
    inner, size = len(array.shape), array.dtype.itemsize
    while inner and array.strides[inner - 1] == size and other.strides[inner - 1] == size:
        inner -= 1
        size *= array.shape[inner]
    places = np.ndindex(*array.shape[:inner])
    return [(array.start + sum(i * s for i, s in zip(at, array.strides, strict=False)), size) for at in places]

"""Copies through pinned memory, which the GPU reads and writes by itself while the host goes on.

Large copies go in chunks through two pinned slots: the host fills one while the GPU empties the other.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import Lock

if TYPE_CHECKING:
    from rlx.backends.cuda.gpu import Gpu

CHUNK = 16 << 20  # bytes of a slot for large copies
DIRECT = 1 << 16  # bytes up to which the driver copies from ordinary memory without waiting
MOST_SLOTS = 32  # of a size that wait for the GPU; then the host waits, too
SMALLEST = 4096  # sizes of slots are powers of two from here on


@dataclass(slots=True, eq=False)
class Slot:
    """Pinned memory, and the event after which the GPU no longer touches it."""

    array: Array  # u8
    event: Any = None

    @property
    def address(self) -> int:
        return int(self.array.ctypes.data)


class PinnedSlots:
    """Pinned memory of one GPU by size. A slot that is given back may still be in use by the GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self._gpu = gpu
        self._free: dict[int, deque[Slot]] = {}
        self._lock = Lock()

    def take(self, size: int) -> Slot:
        """A slot of at least so many bytes that the GPU no longer touches."""
        rounded = max(SMALLEST, 1 << (size - 1).bit_length())
        with self._lock:
            slots = self._free.setdefault(rounded, deque())
            is_over = bool(slots) and self._gpu.is_over(slots[0].event)
            if not is_over and len(slots) < MOST_SLOTS:
                return Slot(self._gpu.pin(rounded))
            oldest = slots.popleft()
        if not is_over:
            self._gpu.wait(oldest.event)
        return oldest

    def give_back(self, slot: Slot) -> None:
        """Returns a slot whose event is enqueued after its last use."""
        with self._lock:
            self._free.setdefault(slot.array.size, deque()).append(slot)


def upload(gpu: Gpu, address: int, source: Array) -> None:
    """Copies a contiguous host array to the device. The array may change as soon as this returns."""
    if source.nbytes <= DIRECT:
        gpu.start_upload(address, source.ctypes.data, source.nbytes)
        return
    data = source.reshape(-1).view(np.uint8)
    slots: deque[Slot] = deque()
    for begin in range(0, data.size, CHUNK):
        part = data[begin : begin + CHUNK]
        if len(slots) < 2:
            slots.append(gpu.slots.take(min(data.size, CHUNK)))
        else:
            slots.rotate(-1)
            gpu.wait(slots[-1].event)
        slot = slots[-1]
        slot.array[: part.size] = part
        with gpu.lock:
            gpu.start_upload(address + begin, slot.address, part.size)
            slot.event = gpu.mark(slot.event)
    for slot in slots:
        gpu.slots.give_back(slot)


def download(gpu: Gpu, target: Array, address: int) -> None:
    """Copies device memory to a contiguous host array, after all work enqueued so far."""
    data = target.reshape(-1).view(np.uint8)
    slots: deque[tuple[Slot, Array]] = deque()
    for begin in range(0, data.size, CHUNK):
        part = data[begin : begin + CHUNK]
        slot = gpu.slots.take(part.size)
        with gpu.lock:
            gpu.start_download(slot.address, address + begin, part.size)
            slot.event = gpu.mark(slot.event)
        slots.append((slot, part))
        if len(slots) == 2:
            _empty(gpu, *slots.popleft())
    while slots:
        _empty(gpu, *slots.popleft())


def _empty(gpu: Gpu, slot: Slot, target: Array) -> None:
    gpu.wait(slot.event)
    target[...] = slot.array[: target.size]
    gpu.slots.give_back(slot)

"""Memory use of a loaded model: graphs, weights and caches."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from rlx.fast_dataclass import dataclass
from rlx.host_memory import address, root_buffer
from rlx.runtime.compiled import CompiledGraph


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory use of a model in bytes. `mapped` are weights read in place from the file, which the system may evict."""

    weights: int
    mapped: int
    cache: int
    arena: int

    @property
    def total(self) -> int:
        return self.weights + self.mapped + self.cache + self.arena

    def __str__(self) -> str:
        parts = {"weights": self.weights, "mapped": self.mapped, "cache": self.cache, "arena": self.arena}
        shown = ", ".join(f"{name} {size / 2**20:.1f}" for name, size in parts.items())
        return f"{self.total / 2**20:.1f} MiB ({shown})"


def memory_of(graphs: Iterable[CompiledGraph], cache: int) -> Memory:
    """Memory use of compiled graphs, each weight counted once, plus `cache` bytes."""
    weights: dict[int, int] = {}
    mapped: dict[int, int] = {}
    arena = 0
    for compiled in graphs:
        arena += compiled.executable.reserved_bytes()
        for buffer in compiled.executable.weights.values():  # sources of derived weights are released
            held_by = root_buffer(buffer)
            if isinstance(held_by, np.ndarray):
                weights[address(held_by)] = held_by.nbytes
            elif isinstance(buffer, np.ndarray):
                mapped[address(buffer)] = max(buffer.nbytes, mapped.get(address(buffer), 0))
            else:  # in memory of a device
                weights[id(buffer)] = buffer.nbytes
    return Memory(sum(weights.values()), sum(mapped.values()), cache, arena)

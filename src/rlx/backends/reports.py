"""Records that backends report about runs and machines: times, memory, ceilings, and compiled code for exports."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlx.arrays import Array

if TYPE_CHECKING:
    from rlx.backends.base import Key
    from rlx.lir.memory import Plan


@dataclass(frozen=True)
class Trace:
    """Times of a run in seconds since an arbitrary origin; one row per thread, stream or other unit of execution.

    For a launch inside a loop, `end` is its first start plus the sum of its run times. A loop or branch has the time it
    was first entered and the time it was last left; `steps` counts the steps of each loop, by loop number.
    """

    launches: Array  # [launches, rows, 2], 0 for rows that took no part
    controls: Array  # [loops and branches, rows, 2]
    steps: Mapping[int, int]


@dataclass(frozen=True)
class RunMemory:
    """The memory of a run: the sizes it was planned for, the arena, and scratch bytes per thread."""

    key: Key
    plan: Plan
    scratch: int


@dataclass(frozen=True)
class Ceilings:
    """The best rates measured on this device. A multiply-add counts as two operations."""

    gops: Mapping[str, float]  # by arithmetic (`kernel.arithmetic`): f32, f64, dot_u7, ...
    cache_gb_per_second: float
    memory_gb_per_second: float

    @property
    def gflops(self) -> float:
        """Peak rate of f32."""
        return self.gops["f32"]

    def peak(self, arithmetic: str) -> float:
        """Peak operations per second."""
        return self.gops[arithmetic] * 1e9


@dataclass(frozen=True)
class Code:
    """Compiled kernels as bytes for another machine: the symbols they define, and sections the backend understands."""

    symbols: tuple[str, ...]
    sections: Mapping[str, bytes]

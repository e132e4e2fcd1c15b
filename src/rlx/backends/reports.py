"""Records that backends report about runs and machines: times, memory, ceilings, and compiled code for exports."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass

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
class Share:
    """How close work came to the limit of this machine that applies to it."""

    fraction: float  # at most 1
    limit: str  # the arithmetic ("int8", "f32", "f64"), "cache" or "memory"

    def __str__(self) -> str:
        return f"{self.fraction:.0%} {self.limit}"


@dataclass(frozen=True)
class Work:
    """What some launches do at least: operations by arithmetic, bytes from any level, and bytes from memory."""

    flops: Mapping[str, float]
    bytes: float
    memory_bytes: float = 0.0  # weights of a program that is larger than the caches

    def __add__(self, other: Work) -> Work:
        names = {**self.flops, **other.flops}
        flops = {name: self.flops.get(name, 0.0) + other.flops.get(name, 0.0) for name in names}
        return Work(flops, self.bytes + other.bytes, self.memory_bytes + other.memory_bytes)


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

    def share(self, work: Work, seconds: float) -> Share | None:
        """The limit that takes most of the time at least, and its share of the seconds.

        None if nothing is known to be done, or if it was done faster than any limit: then the limits were measured
        while the machine was busy.
        """
        needed: dict[str, float] = {}
        for name, flops in work.flops.items():
            needed[_LIMITS[name]] = needed.get(_LIMITS[name], 0.0) + flops / self.peak(name)
        needed["cache"] = work.bytes / (self.cache_gb_per_second * 1e9)
        needed["memory"] = work.memory_bytes / (self.memory_gb_per_second * 1e9)
        if seconds and needed["memory"] > CACHED * seconds:  # the weights were in a cache after all
            del needed["memory"]
        limit = max(needed, key=needed.__getitem__)
        tolerance = CACHED if limit == "memory" else NOISE
        if not seconds or not needed[limit] or needed[limit] > tolerance * seconds:
            return None
        return Share(min(needed[limit] / seconds, 1.0), limit)


NOISE = 1.1  # measured rates vary by this factor
CACHED = 2.0  # what is faster than memory by this factor came from a cache; below it, other programs read memory too
_LIMITS = {"f32": "f32", "f64": "f64", "dot_u7": "int8", "dot_u8": "int8"}


@dataclass(frozen=True)
class Code:
    """Compiled kernels as bytes for another machine: the symbols they define, and sections the backend understands."""

    symbols: tuple[str, ...]
    sections: Mapping[str, bytes]

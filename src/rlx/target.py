"""Targets: what a machine can do, as data that the generators read.

A `Target` says how wide vectors are, how many registers there are and which instructions exist. The host's own
target is found once; `RLX_TARGET` forces a lesser one.
"""

from __future__ import annotations

import functools
import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlx.errors import CapabilityError, nearest


@dataclass(frozen=True, slots=True)
class Target:
    """One kind of CPU. `tile_rows` × `tile_vectors` is the matmul micro-kernel; a panel is one tile wide."""

    name: str
    arch: str  # x86_64 or aarch64
    vector_bytes: int
    tile_rows: int
    tile_vectors: int
    has_fma: bool
    cpu: str
    features: str  # LLVM feature string, "" = those of `cpu`
    has_dot: bool = False  # multiplies bytes and adds four products in one instruction
    device: str = "cpu"  # the backend that generates code for it
    prepacks: bool = True  # the matmul kernel reads weights in a layout of its own, made when weights are bound

    def lanes(self, element_bytes: int) -> int:
        """Elements of one vector register."""
        return self.vector_bytes // element_bytes

    def panel(self, element_bytes: int) -> int:
        """Columns of a packed weight panel."""
        return self.lanes(element_bytes) * self.tile_vectors

    def forms(self) -> Mapping[str, Callable[..., Any]]:
        """Loop forms (see `lir/schedule.py`) by op name that this target has in place of the default ones."""
        return {}


AVX512 = Target(
    "avx512", "x86_64", 64, 6, 4, True, "skylake-avx512", "+avx512f,+avx512bw,+avx512dq,+avx512vl,+fma,+f16c"
)
AVX512VNNI = replace(
    AVX512, name="avx512vnni", cpu="cascadelake", features=AVX512.features + ",+avx512vnni", has_dot=True
)
AVX2 = Target("avx2", "x86_64", 32, 6, 2, True, "haswell", "+avx2,+fma,+f16c")
BASELINE = Target("baseline", "x86_64", 16, 4, 2, False, "x86-64", "")
NEON = Target("neon", "aarch64", 16, 6, 4, True, "generic", "+neon")

BY_NAME = {t.name: t for t in (AVX512VNNI, AVX512, AVX2, BASELINE, NEON)}


def _cpu_flags() -> set[str]:
    try:
        with open("/proc/cpuinfo", encoding="ascii", errors="replace") as lines:
            for line in lines:
                if line.startswith(("flags", "Features")):
                    return set(line.split(":", 1)[1].split())
    except OSError:
        pass
    return set()


@functools.cache
def best() -> Target:
    """The widest target that this machine runs."""
    return supported()[0]


@functools.cache
def supported() -> tuple[Target, ...]:
    """All targets that this machine runs, the widest first."""
    if platform.machine() in ("aarch64", "arm64"):
        return (NEON,)
    flags = _cpu_flags()
    found = []
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"} <= flags:
        found += [AVX512VNNI, AVX512] if "avx512_vnni" in flags else [AVX512]
    if {"avx2", "fma", "f16c"} <= flags:
        found.append(AVX2)
    return (*found, BASELINE)


def host() -> Target:
    """The target in force: `RLX_TARGET` if set, else the best one."""
    forced = os.environ.get("RLX_TARGET")
    return named(forced) if forced else best()


def named(name: str) -> Target:
    """The target called `name`, if this machine runs it."""
    target = BY_NAME.get(name)
    if target is None:
        raise CapabilityError(f"target: {name!r} is not known", hint=nearest(name, BY_NAME))
    if target not in supported():
        raise CapabilityError(
            f"target: this machine does not run {name!r}",
            hint="it runs " + ", ".join(t.name for t in supported()),
        )
    return target


def processor() -> str:
    """The name of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"

"""The processors that code is generated for, and which of them this machine is."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from rlx.dtypes import DType
from rlx.layouts import Layout, WeightLayout
from rlx.target import Target
from rlx.types import TensorType


@dataclass(frozen=True, slots=True)
class CpuTarget(Target):
    """One kind of processor."""

    def layout(self, x: DType, w: TensorType, *, rounded: bool = False) -> WeightLayout | None:
        from rlx.backends.cpu.packing import weight_layout

        return weight_layout(self, x, w, rounded) if self.prepacks else None

    def forms(self) -> Mapping[str, Callable[..., Any]]:
        from rlx.backends.cpu.forms import FORMS

        return FORMS


AVX512 = CpuTarget(
    "avx512", "x86_64", 64, 6, 4, True, "skylake-avx512", "+avx512f,+avx512bw,+avx512dq,+avx512vl,+fma,+f16c"
)
AVX512VNNI = replace(
    AVX512, name="avx512vnni", cpu="cascadelake", features=AVX512.features + ",+avx512vnni", has_dot=True
)
AVX2 = CpuTarget("avx2", "x86_64", 32, 6, 2, True, "haswell", "+avx2,+fma,+f16c")
BASELINE = CpuTarget("baseline", "x86_64", 16, 4, 2, False, "x86-64", "")
NEON = CpuTarget("neon", "aarch64", 16, 6, 4, True, "generic", "+neon")

BY_NAME = {t.name: t for t in (AVX512VNNI, AVX512, AVX2, BASELINE, NEON)}


def layouts() -> Mapping[str, type[Layout]]:
    """The layouts of operands that these targets ask for, by name."""
    from rlx.backends.cpu.packing import LAYOUTS

    return LAYOUTS


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
def best() -> CpuTarget:
    """The widest target that this machine runs."""
    return supported()[0]


@functools.cache
def supported() -> tuple[CpuTarget, ...]:
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


def processor() -> str:
    """The name of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"

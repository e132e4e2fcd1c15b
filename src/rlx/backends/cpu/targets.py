"""The processors that code is generated for, and detection of this machine's."""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlx.dtypes import DType
from rlx.errors import CapabilityError
from rlx.fast_dataclass import dataclass
from rlx.kv_layout import KV_PAGE, KvLayout
from rlx.operand_layouts import Layout, WeightLayout
from rlx.target import Target
from rlx.types import TensorType

KEY_BLOCK = KV_PAGE  # keys per attention step, aligned to absolute positions; also the page size of a KV cache


@dataclass(frozen=True, slots=True)
class CpuTarget(Target):
    """A kind of processor. `tile_rows` × `tile_vectors` is the matmul micro-kernel; a panel is one tile wide."""

    device: str = "cpu"
    prepacks: bool = True
    arch: str = ""  # x86_64 or aarch64
    vector_bytes: int = 16
    tile_rows: int = 1
    tile_vectors: int = 1
    has_fma: bool = False
    cpu: str = ""
    features: str = ""  # LLVM feature string; "" means those of `cpu`
    has_dot: bool = False  # has an instruction that multiplies bytes and adds four products

    def lanes(self, element_bytes: int) -> int:
        """Elements per vector register."""
        return self.vector_bytes // element_bytes

    def panel(self, element_bytes: int) -> int:
        """Columns per packed weight panel."""
        return self.lanes(element_bytes) * self.tile_vectors

    def layout(self, x: DType, w: TensorType, *, rounded: bool = False) -> WeightLayout | None:
        from rlx.backends.cpu.packing import weight_layout

        return weight_layout(self, x, w, rounded) if self.prepacks else None

    @property
    def kv_layout(self) -> KvLayout:
        """Pages of a head are contiguous, a stream that the hardware prefetches; keys are interleaved in lanes."""
        return KvLayout(keys="hpds", values="hpsd")

    def forms(self) -> Mapping[str, Callable[..., Any]]:
        from rlx.backends.cpu.forms import FORMS

        return FORMS


AVX512 = CpuTarget(
    "avx512", arch="x86_64", vector_bytes=64, tile_rows=6, tile_vectors=4, has_fma=True, cpu="skylake-avx512",
    features="+avx512f,+avx512bw,+avx512dq,+avx512vl,+fma,+f16c",
)  # fmt: skip
AVX512VNNI = replace(
    AVX512, name="avx512vnni", cpu="cascadelake", features=AVX512.features + ",+avx512vnni", has_dot=True
)
AVX2 = CpuTarget(
    "avx2", arch="x86_64", vector_bytes=32, tile_rows=6, tile_vectors=2, has_fma=True, cpu="haswell",
    features="+avx2,+fma,+f16c",
)  # fmt: skip
BASELINE = CpuTarget("baseline", arch="x86_64", tile_rows=4, tile_vectors=2, cpu="x86-64")
NEON = CpuTarget(
    "neon", arch="aarch64", tile_rows=6, tile_vectors=4, has_fma=True, cpu="generic", features="+neon"
)  # fmt: skip

BY_NAME = {t.name: t for t in (AVX512VNNI, AVX512, AVX2, BASELINE, NEON)}


def cpu_target(target: Target) -> CpuTarget:
    """Checks that a target from the backend protocol is a CPU's."""
    if not isinstance(target, CpuTarget):
        raise CapabilityError(f"cpu: target {target.name!r} is for {target.device}", hint="pass a target of the CPU")
    return target


def layouts() -> Mapping[str, type[Layout]]:
    """The operand layouts that these targets use, by name."""
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
    """All targets that this machine runs, widest first."""
    if platform.machine() in ("aarch64", "arm64"):
        return (NEON,)
    flags = _cpu_flags()
    targets = []
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "fma", "f16c"} <= flags:
        targets += [AVX512VNNI, AVX512] if "avx512_vnni" in flags else [AVX512]
    if {"avx2", "fma", "f16c"} <= flags:
        targets.append(AVX2)
    return (*targets, BASELINE)


def processor() -> str:
    """The name of this machine's processor."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown"

"""The NVIDIA GPUs that code is generated for, by compute capability."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from rlx.dtypes import DType
from rlx.errors import CapabilityError
from rlx.fast_dataclass import dataclass
from rlx.kv_layout import KvLayout
from rlx.target import Target

SMALLEST_CLASS = 16  # tokens of a prompt to which shorter ones are padded


@dataclass(frozen=True, slots=True)
class CudaTarget(Target):
    """A kind of GPU. `arch` is what NVRTC compiles for; processors and cache sizes are those of the device at hand."""

    device: str = "cuda"
    reads_rows: bool = True
    overlaps_launches: bool = True
    prompt_tokens: int = 4096
    arch: str = ""  # sm_90a
    capability: int = 80  # 10 * major + minor
    processors: int = 108  # streaming multiprocessors
    shared_bytes: int = 163 * 1024  # shared memory that one block may ask for
    l2_bytes: int = 40 << 20

    def multiplied(self, dtype: DType) -> DType:
        """Tensor cores multiply 16-bit floats and add in f32."""
        return dtype

    @property
    def multiplies_in_groups(self) -> bool:
        """Whether groups of four warps multiply matrices in shared memory (wgmma), which only Hopper does."""
        return self.arch == "sm_90a"

    @property
    def runs_behind(self) -> bool:
        return True

    def padded(self, tokens: int) -> int:
        """Powers of two, and one and a half times those: a graph per size is captured once and replayed."""
        if tokens <= SMALLEST_CLASS:
            return tokens if tokens <= 1 else SMALLEST_CLASS
        power = 1 << (tokens - 1).bit_length()
        return power * 3 // 4 if tokens <= power * 3 // 4 else power

    @property
    def kv_layout(self) -> KvLayout:
        """A page of a head is contiguous, with whole keys and values one after the other."""
        return KvLayout(64, keys="phsd", values="phsd")

    def forms(self) -> Mapping[str, Callable[..., Any]]:
        from rlx.backends.cuda.forms import FORMS

        return FORMS


# Shared memory per block and processors: those of the largest common card of each capability.
SM_80 = CudaTarget("sm_80", arch="sm_80", capability=80)
SM_86 = CudaTarget("sm_86", arch="sm_86", capability=86, processors=84, shared_bytes=99 * 1024, l2_bytes=6 << 20)
SM_89 = CudaTarget("sm_89", arch="sm_89", capability=89, processors=128, shared_bytes=99 * 1024, l2_bytes=72 << 20)
SM_90 = CudaTarget("sm_90", arch="sm_90a", capability=90, processors=132, shared_bytes=227 * 1024, l2_bytes=50 << 20)
SM_100 = CudaTarget(
    "sm_100", arch="sm_100", capability=100, processors=148, shared_bytes=227 * 1024, l2_bytes=126 << 20
)
SM_120 = CudaTarget("sm_120", arch="sm_120", capability=120, processors=170, shared_bytes=99 * 1024, l2_bytes=96 << 20)

BY_NAME = {t.name: t for t in (SM_80, SM_86, SM_89, SM_90, SM_100, SM_120)}


def nearest_target(capability: int, **facts: Any) -> CudaTarget:
    """The target of a device: the newest one in the table that it runs, with the facts of the device."""
    runs = [t for t in BY_NAME.values() if t.capability <= capability]
    if not runs:
        have = f"{capability // 10}.{capability % 10}"
        raise CapabilityError(
            f"cuda: this GPU has compute capability {have}, at least 8.0 is needed", hint="device='cpu'"
        )
    best = max(runs, key=lambda t: t.capability)
    if best.capability != capability:  # machine code runs on its own major version only, and 90a on 9.0 only
        best = replace(best, name=f"sm_{capability}", arch=f"sm_{capability}", capability=capability)
    return replace(best, **facts)


def cuda_target(target: Target) -> CudaTarget:
    """Checks that a target from the backend protocol is a GPU's."""
    if not isinstance(target, CudaTarget):
        raise CapabilityError(f"cuda: target {target.name!r} is for {target.device}", hint="pass a target of a GPU")
    return target

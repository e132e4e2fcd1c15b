"""The NVIDIA wheels that the backend needs, imported on first use."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from rlx.errors import CapabilityError


class Wheels(NamedTuple):
    """The modules of cuda-bindings."""

    driver: Any
    nvrtc: Any


@functools.cache
def require_wheels() -> Wheels:
    """The bindings of the driver and of NVRTC; raises if the wheels are missing."""
    try:
        from cuda.bindings import driver, nvrtc
    except ImportError as error:
        hint = "in the clone, pip install -e '.[cuda]'; '.[cuda12]' for CUDA 12 drivers"
        raise CapabilityError(f"cuda: the package cuda-bindings is missing ({error})", hint=hint) from error
    try:
        nvrtc.nvrtcVersion()
    except Exception as error:  # cuda.pathfinder's own errors, one per way to fail
        hint = ".venv/bin/pip install -e '.[cuda]' (nvidia-cuda-nvrtc); '.[cuda12]' for CUDA 12 drivers"
        raise CapabilityError(f"cuda: the compiler NVRTC cannot be loaded: {_brief(error)}", hint=hint) from error
    return Wheels(driver, nvrtc)


def _brief(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__

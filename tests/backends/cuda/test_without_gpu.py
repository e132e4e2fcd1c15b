"""What works, and what errors say, on a machine without a GPU, driver or wheels."""

from __future__ import annotations

import builtins
import re
from pathlib import Path
from typing import Any

import pytest
import tiny_llama
from emulator import emulated_gpu

import rlx
from rlx.backends.base import automatic, device
from rlx.backends.cuda import gpu, wheels
from rlx.backends.cuda.targets import BY_NAME, nearest_target
from rlx.errors import CapabilityError, ResourceError
from rlx.fork_safe_locks import Lock


def no_gpu() -> bool:
    try:
        gpu.gpu_count()
    except CapabilityError:
        return True
    return False


needs_none = pytest.mark.skipif(not no_gpu(), reason="this machine has a GPU")


@needs_none
def test_a_session_says_what_is_missing() -> None:
    with pytest.raises(CapabilityError, match=r"cuda: .*(driver|GPU|package|NVRTC)") as caught:
        rlx.Session("cuda")
    assert caught.value.hint


@needs_none
def test_automatic_devices_are_the_cpu() -> None:
    assert str(automatic(0)) == "cpu"


def test_missing_wheels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("cuda"):
            raise ImportError(f"No module named {name!r}")
        return real(name, *args, **kwargs)

    real = builtins.__import__
    wheels.require_wheels.cache_clear()
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(CapabilityError, match="cuda-bindings is missing") as caught:
        wheels.require_wheels()
    wheels.require_wheels.cache_clear()
    assert "[cuda]" in (caught.value.hint or "") and "cuda12" in (caught.value.hint or "")


def test_targets_by_capability() -> None:
    assert nearest_target(90).arch == "sm_90a"
    assert nearest_target(87).arch == "sm_87" and nearest_target(121, processors=48).processors == 48
    with pytest.raises(CapabilityError, match=r"compute capability 7\.5, at least 8\.0"):
        nearest_target(75)
    assert set(BY_NAME) == {"sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"}


def test_a_device_parses_without_a_gpu() -> None:
    assert str(device("cuda")) == "cuda"


# -- drivers ----------------------------------------------------------------------------------------------------------
class Driver:
    """Stands in for the bindings of the driver."""

    class CUresult:
        CUDA_SUCCESS = 0

    def __init__(self, *, error: int = 0, version: int = 13000, count: int = 1, library: bool = True) -> None:
        self.error, self.version, self.count, self.library = error, version, count, library

    def cuInit(self, flags: int) -> tuple[int]:
        if not self.library:
            raise RuntimeError("libcuda.so.1: cannot open shared object file")
        return (self.error,)

    def cuGetErrorName(self, error: int) -> tuple[int, bytes]:
        return 0, b"CUDA_ERROR_NO_DEVICE"

    def cuDriverGetVersion(self) -> tuple[int, int]:
        return 0, self.version

    def cuDeviceGetCount(self) -> tuple[int, int]:
        return 0, self.count


@pytest.mark.parametrize(
    ("driver", "compiler", "says", "hint"),
    [
        (Driver(library=False), "13.0", r"no NVIDIA driver \(libcuda\)", "install NVIDIA's driver"),
        (Driver(error=100), "13.0", "no GPU can be used: CUDA_ERROR_NO_DEVICE", "CUDA_VISIBLE_DEVICES"),
        (Driver(count=0), "13.0", "this machine has no GPU", "nvidia-smi"),
        (Driver(version=12040), "13.0", r"the driver is for CUDA 12\.4, the compiler for CUDA 13", r"\[cuda12\]"),
        (Driver(version=11080), "12.9", r"the driver is for CUDA 11\.8, the compiler for CUDA 12", "^a newer driver"),
    ],
)
def test_what_a_driver_lacks_is_said(
    driver: Driver, compiler: str, says: str, hint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu, "require_wheels", lambda: wheels.Wheels(driver, None))
    monkeypatch.setattr(gpu, "version", lambda: compiler)
    gpu.gpu_count.cache_clear()
    try:
        with pytest.raises(CapabilityError, match=says) as caught:
            gpu.gpu_count()
    finally:
        gpu.gpu_count.cache_clear()
    assert re.search(hint, caught.value.hint or "")


def test_a_newer_driver_runs_what_an_older_compiler_makes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "require_wheels", lambda: wheels.Wheels(Driver(count=2), None))
    monkeypatch.setattr(gpu, "version", lambda: "12.9")
    monkeypatch.setattr("rlx.backends.cuda.backend.gpu_count", gpu.gpu_count)
    gpu.gpu_count.cache_clear()
    try:
        assert gpu.gpu_count() == 2
        assert str(device("cuda:1")) == "cuda:1"
        with pytest.raises(CapabilityError, match="'cuda:2' is asked for, 'cuda' has 2 devices here"):
            device("cuda:2")
    finally:
        gpu.gpu_count.cache_clear()


# -- memory -----------------------------------------------------------------------------------------------------------
def test_a_model_larger_than_the_memory_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path / "model")
    with emulated_gpu() as small:
        small.__dict__["free_bytes"] = lambda: 1 << 10
        with pytest.raises(
            ResourceError, match=r"model: its weights take [\d,]+ MiB, 0 MiB are free on cuda"
        ) as caught:
            rlx.load(tmp_path / "model", device="cuda")
        assert "device='cpu'" in (caught.value.hint or "") and not small.blocks
        assert str(automatic(1 << 20)) == "cpu"
    with emulated_gpu():
        assert str(automatic(1 << 20)) == "cuda"


def test_an_allocation_that_fails_says_who_asked_and_what_is_free() -> None:
    class Full(Driver):
        class CUresult:
            CUDA_SUCCESS = 0
            CUDA_ERROR_OUT_OF_MEMORY = 2

        trimmed = 0
        enough = 99  # times that memory must be returned to the device

        def cuMemAllocAsync(self, size: int, stream: int) -> tuple[int, int]:
            return (0, 4096) if self.trimmed >= self.enough else (2, 0)

        def cuStreamSynchronize(self, stream: int) -> tuple[int]:
            return (0,)

        def cuMemPoolTrimTo(self, pool: int, size: int) -> tuple[int]:
            self.trimmed += 1
            return (0,)

        def cuDeviceTotalMem(self, number: int) -> tuple[int, int]:
            return 0, 80 << 30

        def cuCtxSetCurrent(self, context: int) -> tuple[int]:
            return (0,)

    card = gpu.Gpu.__new__(gpu.Gpu)
    driver = Full()
    card.__dict__.update(index=1, lock=Lock(reentrant=True), _cu=driver, _stream=0, _context=0, _device=0, _pool=0)
    card.__dict__["free_bytes"] = lambda: 3 << 20
    with pytest.raises(ResourceError, match=r"cuda:1: weight 'w' asks for 512 MiB, 3 MiB of 81,920 MiB are free"):
        card.allocate(512 << 20, "weight 'w'")
    assert driver.trimmed == 2  # the second time, so that a pool that failed does not keep the memory of others
    driver.trimmed, driver.enough = 0, 1
    assert card.allocate(512 << 20) == 4096  # what was freed before, in other sizes, is enough

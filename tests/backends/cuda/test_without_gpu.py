"""What works, and what errors say, on a machine without a GPU, driver or wheels."""

from __future__ import annotations

import builtins
from typing import Any

import pytest

import rlx
from rlx.backends.base import automatic, device
from rlx.backends.cuda import gpu, wheels
from rlx.backends.cuda.targets import BY_NAME, nearest_target
from rlx.errors import CapabilityError


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

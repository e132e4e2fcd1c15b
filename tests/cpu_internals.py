"""The inside of the CPU backend that tests of other packages need. No other file outside its folder names it."""

from __future__ import annotations

import importlib

import pytest
from targets import host

PACKAGE = "rlx.backends.cpu"
GENERATORS = f"{PACKAGE}.kernel_generators"
# The code of a child process in which a start fails that does any of the work it should find in the cache.
FORBID_WORK = f"""
import rlx.runtime.plan, {PACKAGE}.kernel_library, {PACKAGE}.pool, {PACKAGE}.toolchain
def forbidden(*args, **kwargs): raise AssertionError("work that the cache should have saved")
rlx.runtime.plan.make_plan = forbidden
{PACKAGE}.toolchain.compile_text = {PACKAGE}.pool.compile_text = forbidden
{PACKAGE}.toolchain._generate = forbidden
"""


def set_barrier_cost(patch: pytest.MonkeyPatch, cost: float) -> None:
    """Sets what the launch planner believes a barrier to cost: below 0, threads share the smallest loops."""
    patch.setattr(f"{PACKAGE}.launch_records.BARRIER", cost)


def allow_threads(patch: pytest.MonkeyPatch, count: int) -> None:
    """Lets pools have more threads than this machine has cores."""
    patch.setattr(f"{PACKAGE}.pool.thread_limit", lambda: count)


def forget_code(patch: pytest.MonkeyPatch) -> None:
    """Forgets loaded code: what other tests have loaded is from other cache folders."""
    libraries = importlib.import_module(f"{PACKAGE}.kernel_library")
    patch.setattr(libraries, "_libraries", {})
    libraries.library(host()).driver()  # the pool has that of the library before


def pretend_other_llvm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(f"{PACKAGE}.toolchain.llvm_identity", lambda: "another")


def loaded_files(modules: set[str]) -> set[str]:
    """Which files of the backend are among the names of imported modules."""
    return {name.split(".")[3] for name in modules if name.startswith(f"{PACKAGE}.")}

"""The library of kernels: what is begun is compiled beside Python, and is there when it is asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
from targets import host

import rlx
from rlx.backends.cpu import kernel_library, toolchain
from rlx.lir.kernels import Kernel
from rlx.runtime.plan import make_plan


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> Iterator[kernel_library.KernelLibrary]:
    """An empty library, without a cache."""
    monkeypatch.setenv("RLX_CACHE", "off")
    monkeypatch.setattr(kernel_library, "_libraries", {})
    yield kernel_library.library(host())


def kernels() -> list[Kernel]:
    g = rlx.Graph("some")
    x = g.input("x", ("n", 24))
    g.set_outputs([(x @ g.input("y", (24, 40))).silu(), x.softmax(), x.exp().sum(axis=1)])
    return list(make_plan(g, host()).main.kernels().values())


def test_what_is_begun_is_linked_once(code: kernel_library.KernelLibrary) -> None:
    wanted = kernels()
    code.start_compiling(wanted)
    code.start_compiling(wanted)
    entries = code.link(wanted)
    routines = {r.symbol for e in entries.values() for r in e.routines()}
    assert code.compiled == len(routines) > 3
    assert all(code.address([symbol]) for symbol in routines)
    code.link(wanted)
    assert code.compiled == len(routines)


def test_modules_may_be_of_any_size(code: kernel_library.KernelLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[str] = []
    add = toolchain.Compilation.add
    monkeypatch.setattr(toolchain.Compilation, "add", lambda self, ir: (added.append(ir), add(self, ir))[1])
    monkeypatch.setattr(kernel_library, "MODULE_CHARACTERS", 1)
    code.link(kernels())
    assert len(added) == code.compiled


def test_a_driver_that_was_begun_is_the_driver(code: kernel_library.KernelLibrary) -> None:
    code.prepare()
    code.prepare()
    addresses = code.driver()
    assert all(addresses.values()) and code.driver() is addresses


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_child_compiles_what_its_parent_has_begun(code: kernel_library.KernelLibrary) -> None:
    wanted = kernels()
    code.prepare()
    code.start_compiling(wanted)
    child = os.fork()
    if child == 0:
        is_whole = len(code.link(wanted)) == len(wanted) and all(code.driver().values())
        os._exit(0 if is_whole else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(code.link(wanted)) == len(wanted)


def test_a_target_has_one_library() -> None:
    assert kernel_library.library(host()) is kernel_library.library(host())

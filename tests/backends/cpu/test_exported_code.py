"""Machine code of exports, on machines where rlx's own loader of objects does not work."""

from __future__ import annotations

from pathlib import Path

import pytest

import rlx
from rlx.backends.cpu import driver, elf
from rlx.backends.cpu.kernel_library import KernelLibrary
from rlx.backends.reports import Code
from rlx.runtime.export import open_export


def test_on_other_machines_llvm_loads_the_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    g = rlx.Graph("small")
    g.set_outputs([(g.input("x", ("n", 4)) @ g.param("w", (4, 8))).gelu()])
    path = rlx.compile(g).export(tmp_path / "small.rlxp")
    monkeypatch.setattr(elf, "can_load", lambda: False)
    file = open_export(path)
    code = Code(tuple(file.manifest["routines"]), {name: file.section(name) for name in file.manifest["code"]})
    own = KernelLibrary(file.target)
    own.adopt(code)
    assert own._addresses.keys() == set(code.symbols) and set(own.driver()) == set(driver.SYMBOLS)

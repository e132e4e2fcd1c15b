"""What a backend need not have says so by a typed error."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import rlx
from rlx.backends.base import Backend, Executable
from rlx.errors import CapabilityError


def test_an_executable_need_not_tell_the_sizes_of_its_outputs() -> None:
    plain: Any = SimpleNamespace(target=SimpleNamespace(device="plain"))
    with pytest.raises(CapabilityError, match="outputs: device 'plain' does not report output sizes"):
        Executable.outputs(plain, ())


def test_a_backend_need_not_run_graphs_as_they_are() -> None:
    plain: Any = SimpleNamespace(name="plain")
    with pytest.raises(CapabilityError, match="compile: device 'plain' does not run MIR graphs"):
        Backend.interpret(plain, rlx.Graph("g"))

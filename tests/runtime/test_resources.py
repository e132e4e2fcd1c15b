"""Memory is asked for before it is taken."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest

import rlx
from rlx.errors import ResourceError
from rlx.runtime import resources


def test_what_is_available_is_a_number_of_bytes() -> None:
    room = resources.available()
    assert room is None or 0 < room < 1 << 50


def test_too_much_is_refused_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resources, "available", lambda: 100 << 20)
    resources.require("small things", 1 << 20)
    resources.require("what fits", 100 << 20)
    with pytest.raises(ResourceError, match="KV cache: needs 300 MiB, 100 MiB are free") as caught:
        resources.require("KV cache", 300 << 20)
    assert isinstance(caught.value, MemoryError) and caught.value.hint


def test_weights_that_do_not_fit_are_refused_before_they_are_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    g = rlx.Graph("large")
    g.set_outputs([g.input("x", ("m", 4096)) @ g.param("w", (4096, 4608))])
    f = rlx.compile(g)
    f.set_param("w", np.zeros((4096, 4608), np.float32))
    monkeypatch.setattr(resources, "available", lambda: 70 << 20)
    with pytest.raises(ResourceError, match="weights of 'large': needs 72 MiB, 70 MiB are free"):
        f.prepare()
    monkeypatch.undo()
    f.prepare()


def test_the_limit_of_the_process_counts() -> None:
    """A child with little address space left."""
    code = """
import resource, rlx.runtime.resources as r
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (200 << 20), resource.RLIM_INFINITY))
print(r.available() <= 200 << 20)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "True"

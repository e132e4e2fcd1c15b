"""Ceilings: rates that a machine can have, one for each kind of arithmetic."""

from __future__ import annotations

import pytest
from targets import host, supported

from rlx.backends.cpu.ceilings import PRODUCTS, ceilings, ticks_per_second
from rlx.target import Target


def test_ceilings_are_those_of_a_machine() -> None:
    measured = ceilings(host(), 1)
    assert 1 < measured.gflops < 1000
    assert 1 < measured.memory_gb_per_second < 2000 and measured.cache_gb_per_second < 5000
    assert ceilings(host(), 1) is measured


@pytest.mark.parametrize("target", supported(), ids=lambda t: t.name)
def test_integers_have_a_ceiling_of_their_own(target: Target) -> None:
    measured = ceilings(target, 1)  # how they relate depends on what else the machine did meanwhile
    assert list(measured.gops) == list(PRODUCTS) and min(measured.gops.values()) > 0
    assert [measured.peak(kind) / 1e9 for kind in PRODUCTS] == pytest.approx(list(measured.gops.values()))


def test_the_counter_of_traces_runs_at_a_sane_rate() -> None:
    assert 1e7 < ticks_per_second(host()) < 1e10

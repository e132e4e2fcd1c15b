"""The pass runner: order, log, and what it leaves behind."""

from __future__ import annotations

import gc

import pytest

from rlx import Graph
from rlx.ir.passes import PassLog, run_passes


def graph() -> Graph:
    g = Graph("g")
    return g.set_outputs([g.input("x", (2,)).tanh()])


def test_passes_run_in_order_and_are_logged() -> None:
    seen: list[str] = []

    def first(g: Graph) -> Graph:
        seen.append("first")
        return g

    def second(g: Graph) -> Graph:
        seen.append("second")
        return replaced

    replaced = graph()
    log = PassLog()
    result = run_passes(graph(), (first, second, first), log)
    assert seen == ["first", "second", "first"] and result is replaced
    assert [(e.name, e.before, e.after) for e in log.entries] == [
        ("first", 2, 2),
        ("second", 2, 2),
        ("first", 2, 2),
    ]


def test_garbage_collection_goes_on_afterwards_also_when_a_pass_fails() -> None:
    def fails(g: Graph) -> Graph:
        assert not gc.isenabled()
        raise ValueError("no")

    assert gc.isenabled()
    run_passes(graph(), (lambda g: g,))
    assert gc.isenabled()
    with pytest.raises(ValueError, match="no"):
        run_passes(graph(), (fails,))
    assert gc.isenabled()


def test_garbage_collection_stays_off_where_the_user_disabled_it() -> None:
    gc.disable()
    try:
        run_passes(graph(), (lambda g: g,))
        assert not gc.isenabled()
    finally:
        gc.enable()

"""Derived weights are shared where that is safe, and made anew where it is not."""

from __future__ import annotations

import gc

import numpy as np
import pytest

import rlx

ONES = np.ones((2, 64), np.float32)


def product(name: str) -> rlx.Graph:
    g = rlx.Graph(name)
    g.set_outputs([g.input("x", ("m", 64)) @ g.param("w", (64, 64))])
    return g


def full(value: float) -> np.ndarray:  # type: ignore[type-arg]
    return np.full((64, 64), value, np.float32)


def test_a_new_weight_at_an_old_address_counts() -> None:
    f = rlx.compile(product("g"))
    for value in (1, 5, 7, 2, 9, 3):
        f.set_param("w", full(value))
        assert f.run({"x": ONES})[0][0, 0] == 64 * value


def test_a_weight_that_was_changed_and_set_again_counts() -> None:
    f = rlx.compile(product("g"))
    w = full(1)
    for value in (1, 2, 3):
        w[:] = value
        f.set_param("w", w)
        assert f.run({"x": ONES})[0][0, 0] == 64 * value


def test_two_graphs_of_a_session_do_not_mix_their_weights() -> None:
    session = rlx.Session("cpu")
    first, second = session.compile(product("a")), session.compile(product("b"))
    first.set_param("w", full(2))
    second.set_param("w", full(3))
    assert first.run({"x": ONES})[0][0, 0] == 128 and second.run({"x": ONES})[0][0, 0] == 192


def test_graphs_of_a_session_share_what_they_derive_from_the_same_fixed_array() -> None:
    session = rlx.Session("cpu")
    w = full(2)
    w.flags.writeable = False
    graphs = [session.compile(product(name)) for name in "ab"]
    for f in graphs:
        f.set_param("w", w)
        f.prepare()
    held = [f.executable.weights for f in graphs]  # type: ignore[attr-defined]
    assert held[0]["@0"] is held[1]["@0"]
    del graphs, held, f
    gc.collect()
    assert all(entry.derived() is None for entry in session.weights._entries.values())


def test_a_weight_that_comes_on_top_does_not_keep_a_second_copy_of_the_others() -> None:
    session = rlx.Session("cpu")
    more = rlx.Graph("more")
    x = more.input("x", ("m", 64))
    more.set_outputs([x @ more.param("w", (64, 64)), (x * x) @ more.param("v", (64, 64))])
    params = {"w": full(2), "v": full(3)}
    for array in params.values():
        array.flags.writeable = False
    first, second = session.compile(product("a")), session.compile(more)
    first.set_param("w", params["w"])
    second.set_params(params)
    assert first.run({"x": ONES})[0][0, 0] == 128
    assert [y[0, 0] for y in second.run({"x": ONES})] == [128, 192]
    (shared,) = first.executable.weights.values()  # type: ignore[attr-defined]
    others = [a for a in second.executable.weights.values() if a is not shared]  # type: ignore[attr-defined]
    assert len(others) == 1
    while others[0].base is not None:
        others = [others[0].base]
    assert others[0].nbytes < 2 * shared.nbytes


def test_the_old_name_for_dropping_pages_of_tables_still_works() -> None:
    g = rlx.Graph("exp")
    f = rlx.compile(g.set_outputs([g.input("x", (2,)).exp()]))
    with pytest.warns(DeprecationWarning, match="forget_rows is now called drop_table_pages"):
        f.forget_rows()

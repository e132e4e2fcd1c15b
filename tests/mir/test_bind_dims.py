"""Binding dims: symbols become numbers everywhere, and nothing else changes."""

from __future__ import annotations

import numpy as np
import pytest
from layers import Llama, llama_graph, llama_inputs, weights

import rlx
from rlx import DimBinding, Graph
from rlx.errors import BindError
from rlx.ir.evaluate import run
from rlx.mir.bind_dims import bind_dims, substitute
from rlx.types import parse_dim


@pytest.mark.parametrize(
    ("size", "known", "want"),
    [
        ("n", {"n": 3}, 3), ("n*m + 2", {"n": 3}, "3*m + 2"), ("(n + 63) // 64", {"n": 65}, 2),
        ("min(n, m)", {"n": 4}, "min(4, m)"), ("max(n, 2*m)", {"n": 4, "m": 1}, 4), ("n - m", {}, "n - m"),
        ("n*n", {"n": 0}, 0),
    ],
)  # fmt: skip
def test_sizes(size: str, known: dict[str, int], want: int | str) -> None:
    assert substitute(parse_dim(size), known) == (parse_dim(want) if isinstance(want, str) else want)


@pytest.mark.parametrize("past", [False, True])
def test_a_layer_means_the_same(past: bool) -> None:
    sizes = Llama(16, 4, 2, 4, 24)
    g, binding = llama_graph(sizes, past=past), {"batch": 2, "seq": 5} | ({"past": 3} if past else {})
    leaves = weights(sizes) | llama_inputs(sizes, 2, 5, 3 if past else None)
    bound = bind_dims(g, binding)
    assert bound.symbols() == [] and bound.fingerprint() != g.fingerprint()
    for have, want in zip(run(bound, leaves, {}), run(g, leaves, binding), strict=True):
        np.testing.assert_array_equal(have, want)
    part = bind_dims(g, DimBinding({"batch": 2}))
    assert part.symbols() == sorted(set(binding) - {"batch"})
    for have, want in zip(run(part, leaves, binding), run(g, leaves, binding), strict=True):
        np.testing.assert_array_equal(have, want)


def test_limits_are_kept_and_checked() -> None:
    g = Graph("g")
    x = g.input("x", (rlx.dim("n", max=4), rlx.dim("m", max=9)))
    g.set_outputs([x.tanh()])
    assert bind_dims(g, {"n": 4}).limits == {"m": 9}
    with pytest.raises(BindError, match="n is 5, the graph allows at most 4"):
        bind_dims(g, {"n": 5})


def test_unknown_symbols() -> None:
    g = Graph("g")
    g.set_outputs([g.input("x", ("n",)).tanh()])
    with pytest.raises(BindError, match="graph 'g' has no symbol 'm'"):
        bind_dims(g, {"m": 2})
    assert bind_dims(g, {"m": 2}, strict=False) == g


def test_bodies_are_bound_too() -> None:
    body = Graph("body")
    body.set_outputs([body.input("c", ("n", 2)).tanh()])
    g = Graph("g")
    g.set_outputs([g.scan(g.input("x", ("n", 2)), body, 3)])
    bound = bind_dims(g, {"n": 4})
    assert "[n" not in bound.text() and bound.outputs[0].shape == (4, 2)


def test_sizes_that_an_op_refuses_are_refused() -> None:
    g = Graph("g")
    x = g.input("x", ("n",))
    g.set_outputs([x.assume_equal(shape=(4,)) + g.input("y", (4,))])
    assert bind_dims(g, {"n": 4}).outputs[0].shape == (4,)
    with pytest.raises(BindError, match=r"graph 'g' does not take n = 5: .*assume_equal"):
        bind_dims(g, {"n": 5})

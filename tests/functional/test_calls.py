"""How functions are called: defaults, static arguments, and errors that name the argument that does not fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import GraphError


# -- defaults --------------------------------------------------------------------------------------------------------
def decay(rate: Any, start: Any = 1.0, steps: int = 5, mode: str = "power") -> Any:
    """start * rate^steps: `steps` and `mode` are Python values that code depends on."""
    if mode == "power":
        return start * rate**steps
    return rlx.scan(lambda c, _: (c * rate, None), start, length=steps)[0]


def test_jit_leaves_a_default_that_nobody_passed_to_the_function() -> None:
    rates = np.array([0.5, 0.9], np.float32)
    np.testing.assert_allclose(rlx.jit(decay)(rates), rates**5, rtol=1e-6)
    np.testing.assert_allclose(rlx.jit(rlx.vmap(decay))(rates), rates**5, rtol=1e-6)
    np.testing.assert_allclose(rlx.jit(rlx.grad(decay))(0.5), 5 * 0.5**4, rtol=1e-6)
    np.testing.assert_allclose(rlx.jit(rlx.vmap(rlx.grad(decay)))(rates), 5 * rates**4, rtol=1e-6)
    np.testing.assert_allclose(rlx.jit(np.tanh)(1.0), np.tanh(1.0), rtol=1e-6)


def test_what_is_passed_is_traced_whether_by_position_or_by_name() -> None:
    jitted = rlx.jit(decay, static_argnames=("steps", "mode"))
    np.testing.assert_allclose([jitted(0.5, 3.0), jitted(0.5, start=3.0)], 3 * 0.5**5, rtol=1e-6)
    assert len(jitted.history) == 1
    np.testing.assert_allclose(jitted(0.5, steps=2), 0.25)  # the argument between them keeps its default
    np.testing.assert_allclose(jitted(0.5, mode="scan", start=2.0), 2 * 0.5**5, rtol=1e-6)
    assert len(jitted.history) == 3


# -- what is no function ---------------------------------------------------------------------------------------------
def test_a_graph_is_not_a_function() -> None:
    graph = rlx.Graph("square")
    x = graph.input("x", (3,))
    graph.set_outputs([x * x])
    module = rlx.Graph.define("block", lambda m: m.input("x", (3,)) * 2.0)
    takers = {
        "jit": rlx.jit, "grad": rlx.grad, "value_and_grad": rlx.value_and_grad, "vmap": rlx.vmap, "jacfwd": rlx.jacfwd,
        "jacrev": rlx.jacrev, "checkpoint": rlx.checkpoint, "vjp": lambda g: rlx.vjp(g, 1.0),
        "jvp": lambda g: rlx.jvp(g, (1.0,), (1.0,)),
    }  # fmt: skip
    for name, taker in takers.items():
        for given in (graph, module):
            with pytest.raises(GraphError, match=f"{name}: takes a function, found graph '{given.name}'") as caught:
                taker(given)
            assert caught.value.hint == f"{'rlx.compile' if name == 'jit' else f'rlx.transforms.{name}'} takes graphs"
            assert rlx.transforms.__dict__.get(name) or name == "jit"
    with pytest.raises(GraphError, match="jit: takes a function, found ndarray"):
        rlx.jit(np.ones(3))
    with pytest.raises(GraphError, match="jit: takes a function, found graph 'square'"):
        rlx.jit(dims={"x": ("n",)})(graph)

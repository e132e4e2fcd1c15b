"""Every op on views whose strides, offsets and sizes are known only at run time: against outside oracles."""

from __future__ import annotations

import numpy as np
import pytest
from sample_graphs import VIEWS, element_types, sample_graph, user_ops
from targets import supported

import rlx
from rlx.ir import registry

BEST = supported()[0].name
ALIKE = {registry.ELEMENTWISE, registry.COMPOSED}  # one loop form, or none of their own
SOME = ("add", "where", "cast")  # of the elementwise ops
OPS = [
    o.name
    for o in user_ops()
    if element_types(o) and o.level == registry.MIR and (o.name in SOME or not o.traits & ALIKE)
]


@pytest.mark.parametrize("leaf", VIEWS)
@pytest.mark.parametrize("op", OPS)
def test_views_of_run_time_strides_give_what_inputs_give(op: str, leaf: str) -> None:
    case = sample_graph(op, element_types(registry.get(op))[0], leaf)
    if case.graph.outputs:
        case.check(rlx.compile(case.graph, target=BEST).run(case.inputs))


@pytest.mark.parametrize("n", [2, 3, 8, 41])
def test_a_running_sum_over_the_columns_of_a_run_time_slice(n: int) -> None:
    size = rlx.dim("n")
    g = rlx.Graph("columns")
    x = g.input("x", (size, 2))
    g.set_outputs([x[size // 2 :, :].transpose(axes=(1, 0)).cumsum(axis=0)])
    array = np.random.default_rng(n).uniform(-1, 1, (n, 2)).astype(np.float32)
    (actual,) = rlx.compile(g).run({"x": array})
    np.testing.assert_allclose(actual, np.cumsum(array[n // 2 :].T, axis=0), rtol=1e-6)


def test_a_traced_slice_from_a_run_time_size() -> None:
    f = rlx.jit(lambda x: x[x.shape[0] // 2 :] * 2, dims={"x": ("n", None)})
    array = np.arange(10, dtype=np.float32).reshape(5, 2)
    np.testing.assert_array_equal(f(array), array[2:] * 2)

"""Large `topk`s and sorts, which merge runs: the order, ties, NaN, widths around powers of two, and gradients."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from targets import compiled, supported

import rlx
from rlx.lir.forms.reduce import MAX_SELECTED

PLACES = ["reference", "toy", *(t.name for t in supported())]


def largest(x: Any) -> Any:
    """The order of `topk` along the last axis: NaN first, then descending; of equals the lower index."""
    reversed_ = np.flip(x, -1)
    return x.shape[-1] - 1 - np.flip(np.argsort(reversed_, -1, kind="stable"), -1)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "i4", "i8", "u1"])
def test_many_of_a_row_are_sorted(place: str, dtype: str) -> None:
    rng = np.random.default_rng(0)
    widths = (MAX_SELECTED + 1, 31, 32, 33, 129) if place != "toy" else (MAX_SELECTED + 1, 33)
    for width in widths:
        x = rng.integers(0, width // 2, (3, width)).astype(dtype)  # with ties
        x = x if x.dtype.kind != "f" else x / 8
        if x.dtype.kind == "f":
            x[0, 3:9] = np.nan, -0.0, 0.0, np.inf, np.nan, -np.inf
        graph = rlx.Graph("largest")
        graph.set_outputs(graph.input("x", x.shape, x.dtype).topk(k=width - 1))
        values, indices = map(np.asarray, compiled(graph, place).run({"x": x}))
        order = largest(x)[:, :-1]
        np.testing.assert_array_equal(indices, order)
        np.testing.assert_array_equal(values, np.take_along_axis(x, order, -1))


def test_one_kernel_sorts_rows_of_any_width() -> None:
    graph = rlx.Graph("largest")
    graph.set_outputs(graph.input("x", (2, "n"), "f32").topk(k=40))
    program = rlx.compile(graph)
    for width in (40, 64, 65, 700):
        x = np.random.default_rng(width).normal(size=(2, width)).astype(np.float32)
        np.testing.assert_array_equal(program.run({"x": x})[1], largest(x)[:, :40])


def test_few_are_selected_and_many_are_sorted() -> None:
    for k, kernel in ((MAX_SELECTED, "topk"), (MAX_SELECTED + 1, "sort")):
        graph = rlx.Graph("largest")
        graph.set_outputs(graph.input("x", (2, 100), "f32").topk(k=k))
        assert [launch.kernel.split(".")[0] for launch in rlx.compile(graph).report().launches] == [kernel]


def test_long_vectors_are_sorted_and_differentiated() -> None:
    x = np.random.default_rng(0).normal(size=20_000).astype(np.float32).round(3)
    x[[7, 100]] = np.nan
    order = np.argsort(x, kind="stable")
    np.testing.assert_array_equal(rlx.jit(np.sort)(x), x[order])
    np.testing.assert_array_equal(rlx.jit(np.argsort)(x), order)
    weights = np.arange(x.size, dtype=np.float32)
    gradient = rlx.grad(lambda x: np.sum(np.sort(x)[:-2] * weights[:-2]))(x)
    expected = np.zeros_like(x)
    expected[order[:-2]] = weights[:-2]
    np.testing.assert_array_equal(gradient, expected)

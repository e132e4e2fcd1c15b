"""Reductions whose kept axis is contiguous and long: columns are reduced side by side, each in the order of rows."""

from __future__ import annotations

import numpy as np
import pytest

import rlx

SHAPES = [(1, 768), (7, 384), (8, 1024), (37, 128), (3, 21, 256)]  # the axis before the last is reduced


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("op", ["sum", "mean", "prod", "max", "min"])
def test_columns_are_those_of_a_loop_over_rows(shape: tuple[int, ...], op: str) -> None:
    x = np.random.default_rng(len(shape)).standard_normal(shape, dtype=np.float32)
    x[..., -1, :9] = np.nan
    combine = {"sum": np.add, "mean": np.add, "prod": np.multiply, "max": np.maximum, "min": np.minimum}[op]
    wanted = x[..., 0, :].copy()
    for row in range(1, shape[-2]):
        wanted = combine(wanted, x[..., row, :])
    wanted = wanted / np.float32(shape[-2]) if op == "mean" else wanted
    graph = rlx.Graph("columns")
    value = graph.input("x", (*shape[:-2], "rows", shape[-1]))
    graph.set_outputs([getattr(value, op)(axis=-2)])
    for threads in (1, 2):
        (found,) = rlx.compile(graph, threads=threads).run({"x": x})
        np.testing.assert_array_equal(found, wanted)


def test_no_rows_give_what_nothing_adds_up_to() -> None:
    graph = rlx.Graph("columns")
    graph.set_outputs([graph.input("x", ("rows", 256)).sum(axis=0)])
    (found,) = rlx.compile(graph).run({"x": np.empty((0, 256), np.float32)})
    np.testing.assert_array_equal(found, np.zeros(256))


def test_halves_are_added_in_f32() -> None:
    x = np.full((4000, 128), 1.0, np.float16)
    graph = rlx.Graph("columns")
    graph.set_outputs([graph.input("x", x.shape, "f16").sum(axis=0)])
    (found,) = rlx.compile(graph).run({"x": x})
    np.testing.assert_array_equal(found, np.full(128, 4000))  # in f16 the sum would stay at 2048

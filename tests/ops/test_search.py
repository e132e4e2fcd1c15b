"""`nearest_rows` against its NumPy reference: sizes around tiles and chunks, ties, special numbers, memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from targets import AVX512

import rlx
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import optimise

Array = np.ndarray[Any, Any]
SIZES = (0, 1, 2, 5, 23, 24, 25, 1023, 1025, 3001)


def search(
    dim: int, k: int, *, rows: str = "f32", metric: str = "dot", scales: bool = False, offsets: bool = False,
    among: int = 0,
) -> rlx.Graph:  # fmt: skip
    g = rlx.Graph("search")
    operands: list[Any] = [g.input("queries", ("q", dim)), g.input("rows", ("n", dim), rows)]
    operands += [g.input(name, ("n",)) if has else None for name, has in (("scales", scales), ("offsets", offsets))]
    operands.append(g.input("among", ("q", among), "i32") if among else None)
    return g.set_outputs(list(g.apply("nearest_rows", *operands, k=k, metric=metric)))


def integers(rng: np.random.Generator, *shape: int) -> Array:
    """Floats whose sums are exact, so that every order gives the same bits; with many ties."""
    return rng.integers(-2, 3, shape).astype(np.float32)


def assert_same(graph: rlx.Graph, inputs: dict[str, Array], device: str = "cpu") -> None:
    have, want = (rlx.compile(graph, d).run(inputs) for d in (device, "reference"))
    for x, y in zip(have, want, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("metric", ["dot", "l2"])
@pytest.mark.parametrize("dim", [1, 7, 16, 33])
def test_any_number_of_rows_and_queries(metric: str, dim: int) -> None:
    rng, graph = np.random.default_rng(dim), search(dim, 6, metric=metric)
    for n in SIZES:
        for q in (1, 4, 7):
            assert_same(graph, {"queries": integers(rng, q, dim), "rows": integers(rng, n, dim)})


@pytest.mark.parametrize("dim", [8, 64, 70])
def test_rows_of_bytes(dim: int) -> None:
    rng, graph = np.random.default_rng(dim), search(dim, 6, rows="i8", scales=True, offsets=True)
    for n in SIZES:
        rows = rng.integers(-128, 128, (n, dim)).astype(np.int8)
        queries = rng.standard_normal((5, dim)).astype(np.float32)
        factors = {"scales": rng.random(n, np.float32), "offsets": rng.random(n, np.float32)}
        assert_same(graph, {"queries": queries, "rows": rows, **factors})


def test_the_extremes_of_bytes_do_not_overflow() -> None:
    """Sums of two products reach 32640 of 32767."""
    queries = np.array([[64.0] * 64, [-64.0] * 64], np.float32)
    rows = np.array([[127] * 64, [-128] * 64], np.int8)
    scores, best_rows = rlx.compile(search(64, 2, rows="i8")).run({"queries": queries, "rows": rows})
    np.testing.assert_array_equal(best_rows, [[0, 1], [1, 0]])
    np.testing.assert_array_equal(scores, np.array([[127, -128], [128, -127]], np.float32) * 4096)


@pytest.mark.parametrize("k", [1, 100, 2000])
def test_more_candidates_than_there_is_room_for(k: int) -> None:
    """Rising scores replace all candidates again and again; equal ones none."""
    rising = np.arange(5000, dtype=np.float32)[:, None]
    for rows in (rising, rising[::-1], rising // 50, rising * 0, -rising):
        assert_same(search(1, k), {"queries": np.ones((1, 1), np.float32), "rows": np.ascontiguousarray(rows)})


def test_rows_that_are_not_numbers_are_left_out() -> None:
    rng = np.random.default_rng(0)
    rows = integers(rng, 300, 9)
    rows[5], rows[40, 3], rows[41, 2] = np.nan, np.inf, -np.inf
    offsets = np.zeros(300, np.float32)
    offsets[100:] = -np.inf
    graph = search(9, 250, offsets=True)
    inputs = {"queries": np.ones((2, 9), np.float32), "rows": rows, "offsets": offsets}
    assert_same(graph, inputs)
    scores, best_rows = rlx.compile(graph).run(inputs)
    assert best_rows[0, 0] == 40 and (best_rows[0, 98:] == -1).all() and np.isneginf(scores[0, 98:]).all()
    assert sorted(best_rows[0, :98]) == [i for i in range(100) if i not in (5, 41)]


def test_among_scores_only_these_rows() -> None:
    rng = np.random.default_rng(0)
    for n in (0, 1, 200):
        among = rng.integers(-3, n + 3, (4, 37)).astype(np.int32)
        assert_same(
            search(20, 9, among=37, metric="l2"),
            {"queries": integers(rng, 4, 20), "rows": integers(rng, n, 20), "among": among},
        )


def test_scores_do_not_depend_on_other_queries_rows_or_threads() -> None:
    rng = np.random.default_rng(0)
    rows, queries = rng.standard_normal((2600, 50), np.float32), rng.standard_normal((9, 50), np.float32)
    graph = search(50, 2600)
    scores, best_rows = rlx.compile(graph, threads=1).run({"queries": queries, "rows": rows})
    by_row = np.take_along_axis(scores, np.argsort(best_rows, 1), 1)
    for threads in (1, 2):
        f = rlx.compile(graph, threads=threads)
        for q in range(9):
            some, places = f.run({"queries": queries[q : q + 1], "rows": rows[:1301]})
            np.testing.assert_array_equal(some[0, :1301], by_row[q][places[0, :1301]])
    by_among = rlx.compile(search(50, 5, among=5)).run(
        {"queries": queries, "rows": rows, "among": np.ascontiguousarray(best_rows[:, :5])}
    )
    np.testing.assert_array_equal(by_among[0], scores[:, :5])


def test_the_kernels_are_the_same_for_all_sizes_and_there_is_no_matrix_of_scores() -> None:
    programs = [schedule(optimise(search(dim, k), AVX512).main, AVX512) for dim, k in ((16, 1), (64, 50), (384, 10))]
    kernels = [{launch.kernel.fingerprint for launch in p.launches} for p in programs]
    assert kernels[0] == kernels[1] == kernels[2] and len(kernels[0]) == 2
    f = rlx.compile(search(16, 10))
    inputs = {"queries": np.zeros((32, 16), np.float32), "rows": np.zeros((60_000, 16), np.float32)}
    assert f.report(inputs).arena_bytes < 32 * 60_000 * 4 / 2


def test_vmap_over_queries_rows_or_both() -> None:
    rng = np.random.default_rng(0)
    queries, rows = rng.standard_normal((3, 2, 6), np.float32), rng.standard_normal((3, 40, 6), np.float32)

    def best(q: Any, r: Any) -> Any:
        return q.nearest_rows(r, k=4)[1]

    for axes in ((0, None), (None, 0), (0, 0)):
        have = rlx.vmap(best, in_axes=axes)(
            queries if axes[0] == 0 else queries[0], rows if axes[1] == 0 else rows[0]
        )  # fmt: skip
        for i in range(3):
            scores = queries[i if axes[0] == 0 else 0] @ rows[i if axes[1] == 0 else 0].T
            np.testing.assert_array_equal(have[i], np.argsort(-scores, axis=1)[:, :4])

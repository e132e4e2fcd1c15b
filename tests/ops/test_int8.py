"""Rows of 8-bit integers and products of them, to the bit as NumPy has them, and norms that are written as such."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from targets import supported

import rlx
from rlx.errors import DTypeError

Array = np.ndarray[Any, Any]
TARGETS = [t.name for t in supported()]
PLACES = pytest.mark.parametrize("place", ["reference", *TARGETS])
rng = np.random.default_rng(5)


def run(place: str, graph: rlx.Graph, **arrays: Array) -> list[Array]:
    f = rlx.compile(graph, "reference") if place == "reference" else rlx.compile(graph, target=place)
    f.set_params({name: arrays[name] for name in f.param_types})
    return f.run({name: arrays[name] for name in f.input_types})


def quantised(x: Array) -> tuple[Array, Array, Array]:
    """The definition in float32, one rounding an operation."""
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    scale = np.maximum((high - low) / np.float32(255), np.float32(1e-12))
    return np.rint((x - low) * (np.float32(1) / scale)).astype(np.uint8), scale, low


def rows_graph(k: int) -> rlx.Graph:
    g = rlx.Graph("rows")
    return g.set_outputs(list(g.input("x", ("n", k)).quantise_rows()))


@PLACES
@pytest.mark.parametrize("k", [1, 5, 16, 17, 64, 130, 384])
def test_rows_have_the_bits_of_the_definition(place: str, k: int) -> None:
    x = rng.normal(size=(40, k)).astype(np.float32) * np.float32(10.0) ** rng.integers(-9, 9, (40, 1)).astype(
        np.float32
    )
    x[3], x[4], x[5] = 0, 7.25, np.abs(x[5])  # zeros, one number, one sign
    for actual, wanted in zip(run(place, rows_graph(k), x=x), quantised(x), strict=True):
        np.testing.assert_array_equal(actual, wanted)
    assert np.abs(run(place, rows_graph(k), x=x[3:4])[0]).max() == 0


@PLACES
def test_halves_go_to_the_even_integer(place: str) -> None:
    x = np.array([[0, 255, 0.5, 1.5, 2.5, 3.5, 100.5, 101.5, 254.5, 253.5]], np.float32)
    integers, scale, offset = run(place, rows_graph(10), x=x)
    np.testing.assert_array_equal(integers, [[0, 255, 0, 2, 2, 4, 100, 102, 254, 254]])
    assert scale == 1 and offset == 0


@PLACES
def test_numbers_come_back_within_half_a_step(place: str) -> None:
    x = rng.normal(size=(9, 77)).astype(np.float32)
    integers, scale, offset = run(place, rows_graph(77), x=x)
    back = integers.astype(np.float64) * scale + offset
    assert (np.abs(back - x) <= 0.5001 * scale).all()
    assert integers.min() == 0 and integers.max() == 255


@PLACES
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_with_what_is_no_number_spoils_itself_alone(place: str, bad: float) -> None:
    x = rng.normal(size=(3, 20)).astype(np.float32)
    clean = run(place, rows_graph(20), x=x)
    x[1, 7] = bad
    integers, scale, offset = run(place, rows_graph(20), x=x)
    assert not np.isfinite(scale[1] * offset[1]).any()
    for actual, wanted in zip((integers, scale, offset), clean, strict=True):
        np.testing.assert_array_equal(actual[[0, 2]], wanted[[0, 2]])


@PLACES
def test_rows_that_lie_apart(place: str) -> None:
    g = rlx.Graph("columns")
    x = g.input("x", (6, "n", 4))
    g.set_outputs([*x.transpose(axes=(1, 2, 0)).quantise_rows(), *x[1:5:2].quantise_rows()])
    a = rng.normal(size=(6, 5, 4)).astype(np.float32)
    wanted = [*quantised(np.ascontiguousarray(a.transpose(1, 2, 0))), *quantised(a[1:5:2])]
    for actual, want in zip(run(place, g, x=a), wanted, strict=True):
        np.testing.assert_array_equal(actual, want)


@PLACES
@pytest.mark.parametrize(("m", "k", "n"), [(1, 64, 64), (7, 65, 33), (3, 384, 130), (2, 5, 1)])
def test_integer_products_are_exact(place: str, m: int, k: int, n: int) -> None:
    a, b = rng.integers(0, 256, (2, m, k)).astype(np.uint8), rng.integers(-128, 128, (k, n)).astype(np.int8)
    a[0, 0], b[:, 0] = 255, -128  # the largest sum
    for leaf in ("input", "param"):
        g = rlx.Graph("product")
        w = getattr(g, leaf)("b", (k, n), "i8")
        g.set_outputs([g.one("integer_matmul", g.input("a", (2, "m", k), "u8"), w)])
        (actual,) = run(place, g, a=a, b=b)
        assert actual.dtype == np.int32
        np.testing.assert_array_equal(actual, np.einsum("bmk,kn->bmn", a.astype(np.int64), b.astype(np.int64)))


def test_integer_products_take_bytes_alone() -> None:
    g = rlx.Graph("bad")
    with pytest.raises(DTypeError, match=r"takes u8 and i8, found i8\[2, 4\] and i8\[4, 3\]"):
        g.one("integer_matmul", g.input("a", (2, 4), "i8"), g.input("b", (4, 3), "i8"))


@PLACES
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("even", [False, True])
def test_norms_are_written_as_rows(place: str, kind: str, residual: bool, keep: bool, even: bool) -> None:
    """The same bits as the norm and then the rows of it, and both near float64."""
    k = 70
    arrays = {name: rng.normal(size=(5, k)).astype(np.float32) for name in "xr"}
    arrays |= {name: rng.normal(size=k).astype(np.float32) for name in ("gamma", "beta", "even")}
    g, h = rlx.Graph("fused"), rlx.Graph("apart")
    outputs: list[list[rlx.Value]] = []
    for graph in (g, h):
        x, r = (graph.input(name, ("n", k)) for name in "xr")
        gamma, beta, factor = (graph.param(name, (k,)) for name in ("gamma", "beta", "even"))
        if graph is g:
            operands = x, r if residual else None, gamma, beta, factor if even else None
            outputs.append(list(graph.apply("quantised_norm", *operands, kind=kind, eps=1e-5, keep=keep)))
        else:
            y = graph.one(f"{kind}_norm", x + r if residual else x, gamma, beta, eps=1e-5)
            rows = (y * factor if even else y).quantise_rows()
            outputs.append([*rows, *([y] if keep else []), *([x + r] if residual else [])])
        graph.set_outputs(outputs[-1])
    actual, wanted = run(place, g, **arrays), run(place, h, **arrays)
    assert len(actual) == 3 + keep + residual
    for a, b in zip(actual, wanted, strict=True):
        np.testing.assert_array_equal(a, b)
    total = arrays["x"].astype(np.float64) + (arrays["r"] if residual else 0)
    centred = total - (total.mean(-1, keepdims=True) if kind == "layer" else 0)
    exact = centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * arrays["gamma"] + arrays["beta"]
    exact = exact * arrays["even"] if even else exact
    assert (np.abs(actual[0] * actual[1].astype(np.float64) + actual[2] - exact) <= 0.501 * actual[1]).all()

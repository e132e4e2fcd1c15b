"""Indexed updates and dynamic slices, against NumPy's in-place forms."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, GraphError, KernelError, ShapeError

X = np.array([3.0, -1.0, 4.0, 1.5, -5.0])
REPEATED = np.array([0, 3, 0, 0, 4])
Y = np.array([2.0, 7.0, -3.0, 9.0, 0.5])
UFUNCS = {"add": np.add, "subtract": np.subtract, "multiply": np.multiply, "mul": np.multiply, "divide": np.divide,
          "max": np.maximum, "min": np.minimum}  # fmt: skip


@pytest.mark.parametrize("name", UFUNCS)
@pytest.mark.parametrize("key", [1, slice(1, 4), -2, np.array([4, 1]), REPEATED, slice(None, None, 2)], ids=str)
def test_an_update_is_that_of_the_ufunc(name: str, key: Any) -> None:
    y = Y[: X[key].size].reshape(X[key].shape)
    wanted = X.copy()
    UFUNCS[name].at(wanted, key, y)
    np.testing.assert_allclose(getattr(rlx.at(X)[key], name)(y), wanted)
    np.testing.assert_allclose(rlx.jit(lambda x, y: getattr(x.at[key], name)(y))(X, y), wanted)


def test_updates_of_matrices_and_by_traced_indices() -> None:
    x = np.arange(12.0).reshape(3, 4)
    rows, columns = np.array([0, 2, 0]), np.array([1, 1, 1])
    for name, ufunc in UFUNCS.items():
        wanted = x.copy()
        ufunc.at(wanted, (rows, columns), Y[:3])
        update = rlx.jit(lambda x, r, c, y, name=name: getattr(x.at[r, c], name)(y))
        np.testing.assert_allclose(update(x, rows, columns, Y[:3]), wanted)
    np.testing.assert_array_equal(rlx.at(x)[:, 1].get(), x[:, 1])
    np.testing.assert_array_equal(rlx.at(x)[1].power(2.0)[1], x[1] ** 2)
    np.testing.assert_array_equal(rlx.at(x)[1].apply(np.sqrt)[1], np.sqrt(x[1]))
    counts = rlx.at(np.zeros(3, np.int32))[np.array([1, 1, 2])].max(np.array([5, 3, 2]))
    np.testing.assert_array_equal(counts, [0, 5, 2])
    with pytest.raises(DTypeError, match="at: divide takes floats"):
        rlx.at(np.ones(3, np.int32))[0].divide(2)


@pytest.mark.parametrize("name", ["set", "add", "multiply", "divide", "max", "min"])
def test_updates_have_gradients(name: str) -> None:
    def f(x: Any, y: Any) -> Any:
        return np.sum(getattr(rlx.at(x)[REPEATED], name)(y) * np.arange(1.0, 6.0))

    gradients = rlx.grad(f, (0, 1))(X, Y)
    for i, (argument, gradient) in enumerate(zip((X, Y), gradients, strict=True)):
        for j in range(5):
            step = 1e-6 * np.eye(5)[j]
            ahead, behind = ([X, Y], [X, Y])
            ahead[i], behind[i] = argument + step, argument - step
            np.testing.assert_allclose(gradient[j], (f(*ahead) - f(*behind)) / 2e-6, atol=1e-6)


# -- slices whose start is data ---------------------------------------------------------------------------------------
def test_a_slice_of_static_length_may_start_anywhere() -> None:
    x = np.arange(24.0).reshape(6, 4)
    cases: list[tuple[Any, Any]] = [
        (lambda x, i: x[i : i + 2], lambda i: x[i : i + 2]),
        (lambda x, i: x[2 * i : (i + 1) * 2], lambda i: x[2 * i : 2 * i + 2]),
        (lambda x, i: x[1 + i : 3 + i, 1], lambda i: x[i + 1 : i + 3, 1]),
        (lambda x, i: x[:, i : i + 3], lambda i: x[:, i : i + 3]),
        (lambda x, i: x[i - 1 + 1 : np.negative(-i) + 1, None], lambda i: x[i : i + 1, None]),
        (lambda x, i: x.at[i : i + 2].set(0.0), lambda i: np.where((np.arange(6) - i)[:, None] // 2 == 0, 0.0, x)),
    ]
    for traced, wanted in cases:
        f = rlx.jit(traced)
        for i in (0, 1):
            np.testing.assert_array_equal(f(x, i), wanted(i))
            np.testing.assert_array_equal(f(x, np.int64(i)), wanted(i))
        assert len(f.history) == 2
    windows = rlx.vmap(lambda x, i: rlx.fori_loop(0, 2, lambda k, c: c + np.sum(x[i + k : i + k + 2]), 0.0), (None, 0))(
        x, np.arange(3)
    )
    np.testing.assert_allclose(windows, [x[i : i + 2].sum() + x[i + 1 : i + 3].sum() for i in range(3)])
    gradient = rlx.grad(lambda x, i: np.sum(x[i : i + 2] ** 2))(x[:, 0], 3)
    np.testing.assert_array_equal(gradient, np.where((np.arange(6) == 3) | (np.arange(6) == 4), 2 * x[:, 0], 0))


def test_a_slice_that_is_not_inside_or_has_no_length() -> None:
    f = rlx.jit(lambda x, i: x[i : i + 2])
    for i in (-1, 4):
        with pytest.raises(KernelError, match="lies outside"):
            f(X, i)
    for wrong in (
        lambda x, i: x[i:],
        lambda x, i: x[: i + 1],
        lambda x, i: x[i : 2 * i],
        lambda x, i: x[i : i + 4 : 2],
    ):
        with pytest.raises(ShapeError, match="is not known while it is traced") as caught:
            rlx.jit(wrong)(X, 1)
        assert caught.value.hint is not None and "dynamic_slice" in caught.value.hint


def test_dynamic_slices_are_moved_inside() -> None:
    x = np.arange(20.0).reshape(4, 5)
    for row in (-9, -1, 0, 2, 9):
        for column in (0, 3, 7):
            top = min(max(row + 4 if row < 0 else row, 0), 2)
            left = min(column, 2)
            wanted = x[top : top + 2, left : left + 3]
            np.testing.assert_array_equal(rlx.dynamic_slice(x, (row, column), (2, 3)), wanted)
            moved = rlx.jit(lambda x, r, c: rlx.dynamic_slice(x, (r, c), (2, 3)))(x, row, column)
            np.testing.assert_array_equal(moved, wanted)
            updated = x.copy()
            updated[top : top + 2, left : left + 3] = -1
            block = -np.ones((2, 3))
            np.testing.assert_array_equal(rlx.dynamic_update_slice(x, block, (row, column)), updated)
            corner = np.array([row, column])
            np.testing.assert_array_equal(rlx.jit(rlx.dynamic_update_slice)(x, block, corner), updated)
    np.testing.assert_array_equal(rlx.dynamic_slice(X, 1, 2), X[1:3])
    slopes = rlx.grad(lambda x: np.sum(rlx.dynamic_slice(x, (1, 1), (2, 2)) ** 2))(x)
    wanted = np.zeros((4, 5))
    wanted[1:3, 1:3] = 2 * x[1:3, 1:3]
    np.testing.assert_array_equal(slopes, wanted)
    with pytest.raises(ShapeError, match=r"dynamic_slice: 1 starts and 2 sizes"):
        rlx.dynamic_slice(x, (0,), (2, 3))
    with pytest.raises(ShapeError, match="size 6 does not fit an axis of size 5"):
        rlx.dynamic_slice(x, (0, 0), (2, 6))
    with pytest.raises(DTypeError, match="starts are integers"):
        rlx.dynamic_slice(x, (0.0, 0), (2, 3))


def test_keywords_of_jax_have_hints() -> None:
    for name in ("set", "add", "max"):
        with pytest.raises(GraphError, match=f"{name}: has no argument 'mode'") as caught:
            getattr(rlx.at(X)[0], name)(1.0, mode="drop")
        assert caught.value.hint is not None and "out of range" in caught.value.hint
    with pytest.raises(GraphError, match="get: has no argument 'fill_value'"):
        rlx.jit(lambda x: x.at[0].get(fill_value=0.0))(X)
    with pytest.raises(TypeError, match="unexpected keyword argument"):
        rlx.at(X)[0].set(1.0, modes="drop")

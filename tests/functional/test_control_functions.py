"""switch, associative_scan, linearize and eval_shape, against NumPy and finite differences."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, GraphError, ShapeError

BRANCHES = [lambda x: x * 2.0, lambda x: x + 10.0, lambda x: -x, np.sin, lambda x: x**2]
X = np.array([0.5, 1.5, -2.0])


# -- switch -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_switch_calls_the_branch_of_the_index(count: int) -> None:
    jitted = rlx.jit(lambda i, x: rlx.switch(i, BRANCHES[:count], x))
    for i in range(-2, count + 2):  # outside, the nearest
        wanted = BRANCHES[min(max(i, 0), count - 1)](X)
        np.testing.assert_allclose(jitted(i, X), wanted)
        np.testing.assert_allclose(rlx.switch(i, BRANCHES[:count], X), wanted)
    assert len(jitted.history) == 1


def test_switch_differentiates_batches_and_reads_what_is_around() -> None:
    def f(i: Any, x: Any, scale: Any) -> Any:
        return np.sum(rlx.switch(i, [lambda v: v * scale, lambda v: v**3, np.cos], x))

    gradients = rlx.vmap(rlx.grad(f, 1), (0, None, None))(np.arange(3), X, 4.0)
    np.testing.assert_allclose(gradients, [np.full(3, 4.0), 3 * X**2, -np.sin(X)], rtol=1e-6)
    pairs = rlx.jit(lambda i: rlx.switch(i, [lambda: (1.0, np.ones(2)), lambda: (2.0, np.zeros(2))]))(1)
    assert float(pairs[0]) == 2.0 and not pairs[1].any()


def test_switch_names_what_does_not_fit() -> None:
    with pytest.raises(DTypeError, match=r"switch: the index is f32\[\], expected one integer"):
        rlx.switch(1.0, BRANCHES, X)
    with pytest.raises(ShapeError, match=r"switch: branch 2 returns f64\[\], branch 0 f64\[3\]"):
        rlx.jit(lambda i: rlx.switch(i, [np.sin, np.cos, np.sum], X))(0)
    with pytest.raises(GraphError, match=r"switch: branch 1 returns tuple\(array, array\), branch 0 array"):
        rlx.jit(lambda i: rlx.switch(i, [np.sin, lambda x: (x, x)], X))(0)
    with pytest.raises(GraphError, match="expected a list of functions"):
        rlx.switch(0, [], X)


# -- associative_scan -------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("n", [0, 1, 2, 3, 4, 5, 8, 13, 16])
@pytest.mark.parametrize("reverse", [False, True])
def test_associative_scan_is_a_running_combination(n: int, reverse: bool) -> None:
    x = np.random.default_rng(n).normal(size=(2, n, 3))
    wanted = np.flip(np.cumsum(np.flip(x, 1), 1), 1) if reverse else np.cumsum(x, 1)
    np.testing.assert_allclose(rlx.associative_scan(np.add, x, reverse=reverse, axis=1), wanted, atol=1e-12)


def test_associative_scan_of_what_does_not_commute() -> None:
    matrices = np.random.default_rng(0).normal(size=(7, 2, 2))
    products = [matrices[0]]
    for m in matrices[1:]:
        products.append(products[-1] @ m)
    np.testing.assert_allclose(rlx.associative_scan(np.matmul, matrices), products, rtol=1e-10)
    backwards = [matrices[-1]]
    for m in matrices[-2::-1]:
        backwards.insert(0, backwards[0] @ m)  # as in JAX: the function combines the reversed rows
    np.testing.assert_allclose(rlx.associative_scan(np.matmul, matrices, reverse=True), backwards, rtol=1e-10)


def test_a_linear_recurrence_as_a_tree() -> None:
    a, b = np.random.default_rng(1).uniform(0.5, 1.5, (2, 9))

    def recurrence(a: Any, b: Any) -> Any:
        combine = lambda p, q: {"a": p["a"] * q["a"], "b": q["a"] * p["b"] + q["b"]}
        return rlx.associative_scan(combine, {"a": a, "b": b})["b"]

    h, wanted = 0.0, []
    for i in range(9):
        h = a[i] * h + b[i]
        wanted.append(h)
    np.testing.assert_allclose(recurrence(a, b), wanted)
    slopes = rlx.grad(lambda a: recurrence(a, b)[-1])(a)
    for i in range(9):
        step = 1e-6 * np.eye(9)[i]
        difference = (recurrence(a + step, b)[-1] - recurrence(a - step, b)[-1]) / 2e-6
        np.testing.assert_allclose(slopes[i], difference, rtol=1e-6)
    batched = rlx.vmap(recurrence)(np.stack([a, a]), np.stack([b, 2 * b]))
    np.testing.assert_allclose(batched, [wanted, np.multiply(wanted, 2)])


def test_associative_scan_names_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"fn returns f64\[\] for f64\[2\]"):
        rlx.associative_scan(lambda a, b: np.sum(a), np.ones(5))
    with pytest.raises(ShapeError, match="expected one static size on axis 0"):
        rlx.associative_scan(np.add, (np.ones(3), np.ones(4)))
    with pytest.raises(GraphError, match=r"elems are array, the function returns tuple"):
        rlx.associative_scan(lambda a, b: (a, b), np.ones(3))


# -- linearize and eval_shape -----------------------------------------------------------------------------------------
def test_linearize_is_jvp_at_a_point() -> None:
    def f(x: Any, w: dict[str, Any], n: Any) -> Any:
        hidden = np.tanh(x @ w["a"]) * n
        return {"y": hidden @ w["b"], "n": n + 1}

    rng = np.random.default_rng(0)
    x, w = rng.normal(size=(2, 3)), {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=4)}
    value, linear = rlx.linearize(f, x, w, 2)
    np.testing.assert_allclose(value["y"], np.tanh(x @ w["a"]) * 2 @ w["b"])
    for seed in range(2):
        rng = np.random.default_rng(seed)
        dx, dw = rng.normal(size=(2, 3)), {"a": rng.normal(size=(3, 4)), "b": rng.normal(size=4)}
        tangent = linear(dx, dw, 0)
        step = 1e-6
        ahead, behind = (
            np.tanh((x + s * dx) @ (w["a"] + s * dw["a"])) * 2 @ (w["b"] + s * dw["b"]) for s in (step, -step)
        )
        np.testing.assert_allclose(tangent["y"], (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-8)
        assert tangent["n"] == 0
    with pytest.raises(ShapeError, match=r"linearize: tangents\[0\] is f64\[3\], expected f64\[2, 3\]"):
        linear(np.ones(3), w, 0)


def test_linearize_inside_of_a_trace_and_of_a_loop() -> None:
    def solve(b: Any) -> Any:
        """Conjugate gradients with the derivative of a function."""
        _, matvec = rlx.linearize(lambda x: np.array([[4.0, 1.0], [1.0, 3.0]]) @ x, np.zeros(2))
        x, r = np.zeros(2), b
        p = r
        for _ in range(2):
            q = matvec(p)
            alpha = (r @ r) / (p @ q)
            x, before, r = x + alpha * p, r @ r, r - alpha * q
            p = r + (r @ r) / before * p
        return x

    b = np.array([1.0, 2.0])
    np.testing.assert_allclose(rlx.jit(solve)(b), np.linalg.solve([[4.0, 1.0], [1.0, 3.0]], b))
    np.testing.assert_allclose(solve(b), np.linalg.solve([[4.0, 1.0], [1.0, 3.0]], b))

    def looped(x: Any) -> Any:
        return rlx.scan(lambda c, k: (np.sin(c) * k, c), x, np.array([1.0, 2.0, 3.0]))[0]

    value, linear = rlx.linearize(looped, 0.7)
    np.testing.assert_allclose(linear(1.0), rlx.jvp(looped, (0.7,), (1.0,))[1], rtol=1e-6)
    np.testing.assert_allclose(value, looped(0.7))


def test_eval_shape_computes_nothing() -> None:
    def f(x: Any, n: Any) -> Any:
        return {"product": x @ x.T, "count": n + 1, "none": None}

    types = rlx.eval_shape(f, rlx.TensorType((1 << 20, 4), rlx.dtype("f32")), 3)
    assert types["product"] == rlx.TensorType((1 << 20, 1 << 20), rlx.dtype("f32"))
    assert types["count"] == rlx.TensorType((), rlx.dtype("i32")) and types["none"] is None


def test_a_carry_that_turns_f64_says_why() -> None:
    with pytest.raises(ShapeError, match=r"carry starts as f32\[2\], the function returns f64\[2\]") as caught:
        rlx.scan(lambda c, x: (c + x, None), np.zeros(2, np.float32), np.ones((3, 2)))
    assert caught.value.hint is not None and "dtype=np.float32" in caught.value.hint

"""Numbers beside arrays: Python's and NumPy's scalars take the element type of the arrays, everywhere alike.

The oracle is what a Python number does in the same place, and for values NumPy. JAX has the same rule for Python's
numbers, and no 64-bit types by default, so that a NumPy scalar does not widen anything there either.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, ShapeError

Array = np.ndarray[Any, Any]
X = np.array([1.0, 2.0, 4.0], np.float32)
FLOATS = (np.float32, np.float16, ml_dtypes.bfloat16, np.float64)
ROOT = np.sqrt(2.0)  # np.float64


@pytest.mark.parametrize("kind", FLOATS)
@pytest.mark.parametrize(
    "number", [np.float64(0.5), np.float32(0.5), np.int64(2), np.bool_(True), 0.5, 2, True], ids=repr
)
def test_a_number_takes_the_type_of_the_array_next_to_it(kind: Any, number: Any) -> None:
    x = X.astype(kind)
    wanted = (X.astype(np.float64) * float(number)).astype(kind)

    def calls() -> dict[str, Callable[[], Any]]:
        return {
            "closure": lambda: rlx.jit(lambda x: x * number)(x),
            "closure on the left": lambda: rlx.jit(lambda x: number * x)(x),
            "argument": lambda: rlx.jit(lambda x, n: x * n)(x, number),
            "what numbers become": lambda: rlx.jit(lambda x, n: x * (n * 1.0 + 0.0))(x, number),
            "eager": lambda: rlx.multiply(x, number),
            "eager, swapped": lambda: rlx.multiply(number, x),
            "under vmap": lambda: rlx.vmap(lambda x, n: x * n, in_axes=(0, None))(x, number),
            "under jvp": lambda: rlx.jvp(lambda x: x * number, (x,), (x,))[1],
            "under grad": lambda: rlx.grad(lambda y: np.sum(y * number * x))(np.ones_like(x)),
            "in a loop": lambda: rlx.scan(lambda c, x: (c, x * c), number, x)[1],
            "in a branch": lambda: rlx.jit(lambda x: rlx.cond(x.sum() > 0, lambda x: x * number, lambda x: x, x))(x),
        }  # fmt: skip

    for name, call in calls().items():
        result = np.asarray(call())
        assert result.dtype == np.dtype(kind), (name, result.dtype)
        np.testing.assert_allclose(result.astype(np.float64), wanted.astype(np.float64), rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("number", [np.float64(0.5), 0.5, np.int64(2), 2], ids=repr)
def test_graphs_and_flows_have_the_same_rule(number: Any) -> None:
    graph = rlx.Graph("numbers")
    x = graph.input("x", (3,))
    values = [
        x * number,
        number * x,
        x / number,
        graph.maximum(x, number),
        graph.where(x > number, x, number),
        x**number,
    ]
    assert {str(v.type) for v in values} == {"f32[3]"}
    graph.set_outputs([values[0]])
    (result,) = rlx.compile(graph).run({"x": X})
    np.testing.assert_allclose(result, X * np.float32(number))
    ids = graph.input("ids", (3,), "i32")
    assert str((ids + np.int64(3)).type) == str((ids + 3).type) == "i32[3]"
    with pytest.raises(DTypeError, match="5000000000 does not fit i32"):
        ids + np.int64(5_000_000_000)
    built = rlx.ModelFlow("m").input("x", (3,)).custom(lambda emit, v: v * number).build({})
    assert str(built.module.outputs[0].type) == "f32[3]"


def test_an_array_of_rank_0_has_the_type_it_says() -> None:
    wide = np.array(ROOT)
    assert rlx.jit(lambda x: x * wide)(X).dtype == np.float64
    assert rlx.jit(lambda x, w: x * w)(X, wide).dtype == np.float64
    assert rlx.multiply(X, wide).dtype == np.float64
    graph = rlx.Graph("wide")
    assert str((graph.input("x", (3,)) * wide).type) == "f64[3]"


def test_numbers_alone_have_their_own_type() -> None:
    assert rlx.sin(np.float64(1)).dtype == np.float64 and rlx.sin(1.0).dtype == np.float32
    assert rlx.add(np.float32(1), np.float64(1)).dtype == np.float64
    assert rlx.power(np.float64(2), 0.5).dtype == np.float64
    assert rlx.divide(np.float64(1), 3).dtype == np.float64
    np.testing.assert_allclose(rlx.divide(np.float64(1), 3), 1 / 3, rtol=1e-15)
    second = rlx.grad(rlx.grad(lambda x: np.exp(np.sin(x))))(np.float64(0.3))
    np.testing.assert_allclose(second, np.exp(np.sin(0.3)) * (np.cos(0.3) ** 2 - np.sin(0.3)), rtol=1e-12)


def test_a_function_of_f32_stays_f32() -> None:
    """What a network says to NumPy scalars: scales, rates, limits."""

    def loss(w: Any, x: Any, rate: Any) -> Any:
        hidden = np.tanh(x @ w / np.sqrt(w.shape[0])) * rate
        hidden = np.clip(hidden, -np.float64(3), np.float64(3)) + np.where(hidden > 0, np.float64(1), 0.0)
        return np.mean(np.stack([hidden, np.maximum(hidden, np.float64(0.1))]) ** np.int64(2))

    w, x = np.ones((3, 2), np.float32), np.ones((4, 3), np.float32)
    graph = rlx.trace(loss)(w, x, np.float64(0.1))
    assert not [n for n in graph.nodes if n.op not in ("input", "cast", "const") and "f64" in str(n.types)]
    value, gradient = rlx.jit(rlx.value_and_grad(loss))(w, x, np.float64(0.1))
    assert value.dtype == gradient.dtype == np.float32
    np.testing.assert_allclose(value, loss(w.astype(np.float64), x.astype(np.float64), 0.1), rtol=1e-6)


def test_a_list_takes_the_type_of_its_arrays() -> None:
    assert rlx.jit(lambda x: rlx.stack([x[0], ROOT, 1.0, x[1]]))(X).dtype == np.float32
    stacked = rlx.jit(lambda x: rlx.asarray([x[0], 0.1]))(X.astype(np.float64))
    np.testing.assert_array_equal(stacked, [1.0, 0.1])  # not 0.1 rounded to f32
    with pytest.raises(DTypeError, match="300 does not fit i8"):
        rlx.jit(lambda x: rlx.stack([x, 300]))(np.int8([1])[0:1].reshape(()))


# -- carries and branches ---------------------------------------------------------------------------------------------
def test_a_carry_that_begins_as_a_number_takes_the_type_the_body_gives() -> None:
    def add(c: Any, x: Any) -> Any:
        return c + x, c

    for start in (0.1, np.float64(0.1), np.float32(0.1)):
        for kind in (np.float64, np.float32):
            total, ys = rlx.scan(add, start, np.ones(3, kind))
            assert total.dtype == ys.dtype == kind
            np.testing.assert_allclose(total, kind(float(start)) + 3, rtol=1e-7 if kind is np.float32 else 1e-15)
    total, _ = rlx.scan(add, 0, np.ones(3))
    assert total.dtype == np.float64 and total == 3.0
    pair, _ = rlx.scan(lambda c, x: ({"n": c["n"] + 1, "s": c["s"] + x}, None), {"n": 0, "s": 0}, np.ones(3))
    assert (pair["n"].dtype, pair["s"].dtype) == (np.int32, np.float64)
    looped = rlx.while_loop(lambda c: c < 10, lambda c: c * np.array(2.5), 1)
    assert looped.dtype == np.float64 and looped == 15.625
    assert rlx.fori_loop(0, 3, lambda i, c: c + np.ones(()), 0.0).dtype == np.float64
    gradient = rlx.jit(rlx.grad(lambda s, xs: rlx.scan(lambda c, x: (c * x, None), s, xs)[0]))(2.0, np.full(3, 3.0))
    np.testing.assert_allclose(gradient, 27.0)
    with pytest.raises(ShapeError, match=r"scan: carry starts as f32\[\], the function returns i32\[\]"):
        rlx.scan(lambda c, x: (x, c), 0.5, np.arange(3, dtype=np.int32))


def test_branches_that_give_numbers_give_the_type_of_the_other() -> None:
    choose = rlx.jit(lambda p, x: rlx.cond(p > 0, lambda x: x, lambda x: 0.1, x))
    for kind in (np.float32, np.float64):
        assert [choose(p, np.array(2, kind)).dtype for p in (1, -1)] == [kind, kind]
    np.testing.assert_allclose(choose(-1, np.array(2.0)), 0.1, rtol=1e-15)
    assert rlx.jit(lambda p: rlx.cond(p > 0, lambda: 1, lambda: 0.5))(1).dtype == np.float32


# -- rules, tangents --------------------------------------------------------------------------------------------------
def test_tangents_and_rules_take_numbers() -> None:
    x = np.float64(0.3)
    _, moved = rlx.jvp(np.sin, (x,), (1.0,))
    np.testing.assert_allclose(moved, np.cos(0.3), rtol=1e-14)
    _, back = rlx.vjp(np.sin, np.array(0.3))
    np.testing.assert_allclose(back(0.1)[0], 0.1 * np.cos(0.3), rtol=1e-14)

    @rlx.custom_vjp
    def scaled(x: Any, factor: Any) -> Any:
        return x * factor

    scaled.defvjp(lambda x, f: (x * f, (x, f)), lambda residuals, ct: (ct * residuals[1], np.sum(ct * residuals[0])))
    for factor in (ROOT, 2.0, np.int64(2)):
        dx = rlx.grad(lambda x, f=factor: np.sum(scaled(x, f)))(X)
        assert dx.dtype == np.float32
        np.testing.assert_allclose(dx, np.full(3, float(factor)), rtol=1e-6)
    df = rlx.grad(lambda f: np.sum(scaled(X, f)))(ROOT)
    assert df.dtype == np.float64 and df == 7.0


def test_random_numbers_take_numpy_scalars() -> None:
    key = rlx.random.key(0)
    samples = rlx.random.uniform(key, (1000,), minval=np.float64(2), maxval=np.float64(3))
    assert samples.dtype == np.float32 and samples.min() >= 2 and samples.max() < 3
    np.testing.assert_array_equal(samples, rlx.random.uniform(key, (1000,), minval=2.0, maxval=3.0))
    assert rlx.random.bernoulli(key, np.float64(0.5), (3,)).dtype == np.bool_


# -- jit -------------------------------------------------------------------------------------------------------------
def test_a_number_and_an_array_are_traced_apart() -> None:
    f = rlx.jit(lambda x, n: x * n)
    for n in (1.0, 2.0, np.float32(3.0)):
        f(X, n)
    f(X, np.array(3.0, np.float32))
    assert rlx.explain(f).splitlines() == [
        "1. traced for n: f32 number, x: f32[3]", "2. traced again, n is f32[], was f32 number",
    ]  # fmt: skip

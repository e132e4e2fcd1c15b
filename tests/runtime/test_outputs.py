"""What a compiled graph gives: arrays that belong to the caller, whatever the graph returns."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import rlx

f32 = np.float32
DEVICES = ["cpu", "reference"]
X = np.arange(8, dtype=f32).reshape(2, 4)
Build = Callable[[rlx.Graph], list[rlx.Value]]


@pytest.fixture(params=DEVICES)
def make(request: pytest.FixtureRequest) -> Callable[..., rlx.CompiledGraph]:
    """Compiles what a function builds, for each device."""

    def compiled(build: Build, **params: Any) -> rlx.CompiledGraph:
        g = rlx.Graph("small")
        f = rlx.compile(g.set_outputs(build(g)), request.param)
        f.set_params(params)
        return f

    return compiled


Make = Callable[..., rlx.CompiledGraph]


def spoil(arrays: list[Any]) -> None:
    """Outputs may be written to, and doing so must not reach anything else."""
    for array in arrays:
        assert array.flags.writeable and array.flags.c_contiguous and type(array) is np.ndarray
        array.fill(99)


def test_a_second_run_leaves_the_first_result_alone(make: Make) -> None:
    f = make(lambda g: [g.input("x", ("n", 4)).exp()])
    first = f.run({"x": X})[0]
    copy = first.copy()
    second = f.run({"x": X + 1})[0]
    assert np.array_equal(first, copy) and not np.shares_memory(first, second)


def test_an_output_that_is_an_input(make: Make) -> None:
    f = make(lambda g: [g.input("x", ("n", 4))])
    x = X.copy()
    outputs = f.run({"x": x})
    assert np.array_equal(outputs[0], X)
    spoil(outputs)
    assert np.array_equal(x, X)


def test_an_output_that_is_a_weight(make: Make) -> None:
    weight = X.copy()
    f = make(lambda g: [g.param("w", (2, 4))], w=weight)
    for _ in range(2):
        outputs = f.run()
        assert np.array_equal(outputs[0], X)
        spoil(outputs)
    assert np.array_equal(weight, X)


def test_an_output_that_is_made_of_weights_alone(make: Make) -> None:
    f = make(lambda g: [g.param("w", (2, 4)).mT, g.named("w") * 2.0], w=X)
    for _ in range(2):
        outputs = f.run()
        assert np.array_equal(outputs[0], X.T) and np.array_equal(outputs[1], X * 2)
        spoil(outputs)


def test_an_output_that_is_a_constant(make: Make) -> None:
    f = make(lambda g: [g.constant(X), g.constant(X) + 1.0])
    for _ in range(2):
        outputs = f.run()
        assert np.array_equal(outputs[0], X) and np.array_equal(outputs[1], X + 1)
        spoil(outputs)


def test_an_output_that_is_given_twice(make: Make) -> None:
    def build(g: rlx.Graph) -> list[rlx.Value]:
        y = g.input("x", ("n", 4)) * 2.0
        return [y, y, g.named("x"), g.named("x")]

    outputs = make(build).run({"x": X})
    for output, wanted in zip(outputs, (X * 2, X * 2, X, X), strict=True):
        assert np.array_equal(output, wanted)
    spoil(outputs[:1])
    assert np.array_equal(outputs[1], X * 2)


def test_outputs_that_are_views_of_one_another(make: Make) -> None:
    def build(g: rlx.Graph) -> list[rlx.Value]:
        y = g.input("x", ("n", 4)).exp()
        return [y.mT, y, y[:, 1:3], y[0], y.reshape(rlx.dim("n") * 4), y.reshape(4, "n")]

    outputs = make(build).run({"x": X})
    e = np.exp(X)
    for output, wanted in zip(outputs, (e.T, e, e[:, 1:3], e[0], e.reshape(8), e.reshape(4, 2)), strict=True):
        np.testing.assert_allclose(output, wanted, rtol=1e-6)
    spoil(outputs[1:2])
    np.testing.assert_allclose(outputs[0], e.T, rtol=1e-6)


def test_an_output_that_other_outputs_are_computed_from(make: Make) -> None:
    def build(g: rlx.Graph) -> list[rlx.Value]:
        y = g.input("x", ("n", 4)) @ g.param("w", (4, 4))
        return [y, y + 1.0, (y + 1.0).sum(axis=1)]

    y, more, total = make(build, w=np.eye(4, dtype=f32)).run({"x": X})
    assert np.array_equal(y, X) and np.array_equal(more, X + 1) and np.array_equal(total, (X + 1).sum(1))


def test_a_graph_without_inputs_and_weights(make: Make) -> None:
    f = make(lambda g: [g.constant(3.0).sqrt()])
    assert f.run() == f.run({}) == f() == [np.sqrt(f32(3))]


def test_scalar_outputs(make: Make) -> None:
    f = make(lambda g: [g.input("x", ("n", 4)).sum(), g.named("x").max(), g.input("s", ()) * 2.0])
    total, top, twice = f.run({"x": X, "s": np.array(4, f32)})
    assert total.shape == top.shape == twice.shape == ()
    assert [float(v) for v in (total, top, twice)] == [28, 7, 8]


def test_outputs_without_elements(make: Make) -> None:
    f = make(lambda g: [g.input("x", ("n", 4)) * 2.0, g.named("x").sum(axis=0), g.named("x") @ g.param("w", (4, 0))],
             w=np.zeros((4, 0), f32))  # fmt: skip
    for n in (2, 0):
        doubled, total, none = f.run({"x": X[:n]})
        assert doubled.shape == (n, 4) and none.shape == (n, 0)
        assert np.array_equal(total, X[:n].sum(0))


def test_inputs_and_weights_that_nothing_reads(make: Make) -> None:
    def build(g: rlx.Graph) -> list[rlx.Value]:
        g.input("unused", ("m", 3), "i32"), g.param("idle", (5,))
        return [g.input("x", ("n", 4)) * 2.0]

    f = make(build, idle=np.zeros(5, f32))
    assert np.array_equal(f.run({"x": X, "unused": np.zeros((7, 3), np.int32)})[0], X * 2)


def test_inputs_and_weights_in_any_order(make: Make) -> None:
    def build(g: rlx.Graph) -> list[rlx.Value]:
        b = g.input("b", ("n",))
        w = g.param("w", (4, 3))
        a = g.input("a", ("n", 4))
        return [g.param("c", (3,)) + a @ w, b]

    f = make(build, c=np.ones(3, f32), w=np.ones((4, 3), f32))
    y, b = f.run({"a": X, "b": X[:, 0]})
    assert np.array_equal(y, X @ np.ones((4, 3)) + 1) and np.array_equal(b, X[:, 0])


@pytest.mark.parametrize("dtype", ["f64", "f32", "f16", "bf16", "i64", "i32", "i16", "i8", "u32", "u8", "bool"])
def test_every_element_type_comes_back(make: Make, dtype: str) -> None:
    numpy = rlx.dtype(dtype).numpy
    f = make(lambda g: [g.input("x", ("n", 3), dtype), g.param("w", (2, 3), dtype).mT],
             w=np.array([[0, 1, 1], [1, 0, 1]]).astype(numpy))  # fmt: skip
    x = np.array([[1, 0, 1]] * 5).astype(numpy)
    y, w = f.run({"x": x})
    assert y.dtype == w.dtype == numpy
    assert np.array_equal(y, x) and w.shape == (3, 2)


@pytest.mark.parametrize("device", DEVICES)
def test_names_like_those_that_rlx_makes_up(device: str) -> None:
    g = rlx.Graph("clash")
    total = g.constant(X[0])
    for name in ("output0", "output1", "t2", "t5", "t6", "c3", "c7", "const1", "const4"):
        total = total + g.input(name, ("n", 4))
    for name in ("@0", "@1", "t9", "t20"):
        total = total @ g.param(name, (4, 4))
    f = rlx.compile(g.set_outputs([total.exp().sum(axis=1), total, total.mT]), device)
    rng = np.random.default_rng(0)
    params = {n: (rng.random((4, 4), dtype=f32) + 1) / 8 for n in f.param_types}
    f.set_params(params)
    outputs = f.run({n: X for n in f.input_types})
    wanted = functools.reduce(np.matmul, params.values(), X[0] + 9 * X)
    for output, want in zip(outputs, (np.exp(wanted).sum(1), wanted, wanted.T), strict=True):
        np.testing.assert_allclose(output, want, rtol=1e-5)

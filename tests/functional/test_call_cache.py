"""Calls outside of a trace are cached, and never give a result of something that changed since."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import pytest

import rlx
from rlx.errors import NonFiniteError
from rlx.functional import tracing
from rlx.functional.cache_keys import Reader, Unkeyable

X = np.array([1.0, 2.0, 3.0], np.float32)
SCALE = 1.0
TABLE = np.ones(3, np.float32)
SETTINGS = {"scale": 1.0, "order": [1, 2]}
CALLS: list[int] = []
MODULE = types.ModuleType("a_module")


@pytest.fixture
def traces(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of all functions that are traced."""
    seen: list[str] = []
    before = tracing.trace_leaves

    def counted(function: Any, *args: Any, **kwargs: Any) -> Any:
        seen.append(tracing.label_of(function))
        return before(function, *args, **kwargs)

    for module in ("tracing", "transforms", "jitted", "control"):
        monkeypatch.setattr(f"rlx.functional.{module}.trace_leaves", counted)
    return seen


# -- what is cached ---------------------------------------------------------------------------------------------------
def square_loss(w: Any, x: Any) -> Any:
    return np.sum((w * x) ** 2)


def test_a_transform_is_traced_once_for_each_kind_of_arguments(traces: list[str]) -> None:
    for _ in range(3):
        np.testing.assert_allclose(rlx.grad(square_loss)(X, X), 2 * X**3)
    first = len(traces)
    assert first > 0
    for step in range(3):
        w = X + step
        np.testing.assert_allclose(rlx.grad(square_loss)(w, X), 2 * w * X**2)
    assert len(traces) == first
    rlx.grad(square_loss)(X.astype(np.float64), X)
    assert len(traces) > first


def test_jit_in_a_loop_and_lambdas_are_traced_once(traces: list[str]) -> None:
    results = [float(rlx.jit(lambda x: np.sum(x * 3.0))(X)) for _ in range(4)]
    assert results == [18.0] * 4 and len(traces) == 1
    del traces[:]
    loops = [rlx.scan(lambda c, x: (c + x, c), np.float32(0.0), X)[0] for _ in range(4)]
    assert [float(x) for x in loops] == [6.0] * 4
    body_and_call = len(traces)
    rlx.scan(lambda c, x: (c + x, c), np.float32(0.0), X)  # another lambda of the same kind is another piece of code
    assert body_and_call <= 3
    assert len(traces) > body_and_call


def test_results_own_their_memory() -> None:
    gradient = rlx.grad(square_loss)
    first = gradient(X, X)
    copy = first.copy()
    gradient(X + 1, X)
    np.testing.assert_array_equal(first, copy)


# -- what is never stale ----------------------------------------------------------------------------------------------
def test_a_closure_over_a_number_that_changes() -> None:
    k = 1.0

    def f(x: Any) -> Any:
        return np.sum(x * k)

    for k in (1.0, 2.0, -0.0, 0.0, 3):
        np.testing.assert_allclose(rlx.grad(f)(X), np.full(3, k), atol=0)
        np.testing.assert_allclose(rlx.jit(lambda x: x * k)(X), X * np.float32(k))  # noqa: B023
        np.testing.assert_allclose(rlx.vmap(lambda x: x * k)(X), X * np.float32(k))  # noqa: B023
    signs = [float(rlx.grad(lambda x: x * k)(1.0)) for k in (0.0, -0.0)]  # noqa: B023
    assert np.signbit(signs).tolist() == [False, True]


def test_a_closure_over_an_array_that_is_changed_in_place_or_replaced() -> None:
    table = np.ones(3, np.float32)

    def f(x: Any) -> Any:
        return np.sum(x * table)

    gradient = rlx.grad(f)
    np.testing.assert_array_equal(gradient(X), [1, 1, 1])
    table[2] = 5.0
    np.testing.assert_array_equal(gradient(X), [1, 1, 5])
    table = np.full(3, 7.0, np.float32)
    np.testing.assert_array_equal(gradient(X), [7, 7, 7])
    table = np.full(3, np.nan, np.float32)
    for _ in range(2):
        assert np.isnan(gradient(X)).all()
    big = np.zeros((3, 1 << 20), np.float64)  # too large to be compared
    for value in (1.0, 2.0):
        big[:, -1] = value
        np.testing.assert_allclose(rlx.grad(lambda x: np.sum(x * big[:, -1]))(X), [value] * 3)


def test_globals_defaults_and_attributes_that_change(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(x: Any, power: float = 2.0) -> Any:
        return np.sum(x**power) * SCALE + np.sum(x * TABLE) * SETTINGS["scale"] + len(SETTINGS["order"])  # type: ignore[arg-type]

    def wanted(power: float) -> Any:
        return power * X ** (power - 1) * SCALE + TABLE * np.float32(SETTINGS["scale"])

    gradient = rlx.grad(f)
    np.testing.assert_allclose(gradient(X), wanted(2.0), rtol=1e-6)
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    np.testing.assert_allclose(gradient(X), wanted(2.0), rtol=1e-6)
    TABLE[0] = 4.0
    np.testing.assert_allclose(gradient(X), wanted(2.0), rtol=1e-6)
    monkeypatch.setitem(SETTINGS, "scale", 2.0)
    np.testing.assert_allclose(gradient(X), wanted(2.0), rtol=1e-6)
    f.__defaults__ = (3.0,)
    np.testing.assert_allclose(gradient(X), wanted(3.0), rtol=1e-6)
    value = rlx.value_and_grad(f)(X)[0]
    monkeypatch.setitem(SETTINGS, "order", [1, 2, 3])
    np.testing.assert_allclose(rlx.value_and_grad(f)(X)[0], value + 1)


def test_functions_that_are_called_may_be_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    def outer(x: Any) -> Any:
        return np.sum(MODULE.inner(x))

    for factor in (1.0, 2.0, 3.0):
        monkeypatch.setattr(MODULE, "inner", lambda x, factor=factor: x * factor, raising=False)
        np.testing.assert_allclose(rlx.grad(outer)(X), [factor] * 3)

    def recursive(n: int, x: Any) -> Any:
        return x if n == 0 else recursive(n - 1, x) * SCALE

    for scale in (2.0, 3.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        np.testing.assert_allclose(rlx.grad(lambda x: recursive(3, x))(1.0), scale**3)


@dataclass
class Layer:
    w: Any
    gain: float = field(default=1.0, metadata={"static": True})

    def __call__(self, x: Any) -> Any:
        return x * self.w * self.gain * SCALE


class Pair(NamedTuple):
    a: Any
    b: Any

    def total(self) -> Any:
        return np.sum(self.a * self.b) * SCALE


class Counter:
    def __init__(self) -> None:
        self.factor = 1.0

    def loss(self, x: Any) -> Any:
        return np.sum(x) * self.factor


class Hidden:
    """An object whose attributes are made up."""

    def __getattr__(self, name: str) -> Any:
        return len(name)

    def loss(self, x: Any) -> Any:
        return np.sum(x) * self.factor


class Logged(Counter):
    """An object that writes when it is called."""

    def loss(self, x: Any) -> Any:
        print("called")
        return super().loss(x)


class Slotted:
    __slots__ = ("factor",)

    def __init__(self) -> None:
        self.factor = 1.0

    def loss(self, x: Any) -> Any:
        return np.sum(x) * self.factor


class Counting(Counter):
    calls = 0

    def loss(self, x: Any) -> Any:
        self.calls += 1
        return np.sum(x) * self.calls


class Layered:
    def __init__(self) -> None:
        self.inner = Counter()
        self.inner.parent = self  # type: ignore[attr-defined]
        self.table = np.ones(3, np.float32)

    def loss(self, x: Any) -> Any:
        return np.sum(x * self.table) * self.inner.factor


def test_objects_by_their_attributes(traces: list[str]) -> None:
    layered, slotted, counting = Layered(), Slotted(), Counting()
    gradient = rlx.grad(layered.loss)
    np.testing.assert_array_equal(gradient(X), [1.0] * 3)
    before = len(traces)
    np.testing.assert_array_equal(gradient(X), [1.0] * 3)
    np.testing.assert_array_equal(rlx.grad(Layered().loss)(X), [1.0] * 3)  # an equal object
    assert len(traces) == before
    layered.inner.factor = 2.0
    np.testing.assert_array_equal(gradient(X), [2.0] * 3)
    layered.table[1] = 5.0
    np.testing.assert_array_equal(gradient(X), [2.0, 10.0, 2.0])
    layered.inner = Counter()
    np.testing.assert_array_equal(gradient(X), [1.0, 5.0, 1.0])
    for i in (1.0, 2.0, 3.0):
        slotted.factor = i
        np.testing.assert_array_equal(rlx.grad(slotted.loss)(X), [i] * 3)
        np.testing.assert_array_equal(rlx.grad(counting.loss)(X), [i] * 3)  # it changes itself
    before_class = Counter.loss
    try:
        Counter.loss = lambda self, x: np.sum(x) * 7.0  # type: ignore[method-assign]
        np.testing.assert_array_equal(rlx.grad(lambda x: layered.inner.loss(x))(X), [7.0] * 3)
    finally:
        Counter.loss = before_class  # type: ignore[method-assign]
    np.testing.assert_array_equal(rlx.grad(lambda x: layered.inner.loss(x))(X), [1.0] * 3)


def test_methods_of_arguments_and_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    def f(layer: Layer) -> Any:
        return np.sum(layer(X))

    counter = Counter()
    for scale in (1.0, 2.0):
        monkeypatch.setitem(globals(), "SCALE", scale)
        counter.factor = scale
        np.testing.assert_allclose(rlx.grad(f)(Layer(X)).w, X * scale)
        np.testing.assert_allclose(rlx.grad(f)(Layer(X, 3.0)).w, X * scale * 3)
        np.testing.assert_allclose(rlx.grad(lambda p: p.total())(Pair(X, X)).a, X * scale)
        np.testing.assert_allclose(rlx.grad(counter.loss)(X), [scale] * 3)
        np.testing.assert_allclose(rlx.grad(lambda x: counter.loss(x))(X), [scale] * 3)
        np.testing.assert_allclose(rlx.grad(functools.partial(lambda s, x: np.sum(x) * s, scale))(X), [scale] * 3)


class Config(dict[str, Any]):
    """A dict with attributes."""


def test_attributes_beside_the_fields_of_a_tree() -> None:
    layer, config = Layer(X), Config(scale=1.0)
    for extra in (1.0, 2.0):
        layer.extra = config.extra = extra  # type: ignore[attr-defined]
        np.testing.assert_allclose(rlx.grad(lambda x: np.sum(x) * layer.extra)(X), [extra] * 3)  # type: ignore[attr-defined]
        np.testing.assert_allclose(rlx.grad(lambda x: np.sum(x) * config.extra)(X), [extra] * 3)  # type: ignore[attr-defined]
    for scale in (1.0, 2.0):
        layer.w = X * scale
        config["scale"] = scale
        np.testing.assert_allclose(rlx.grad(lambda x: np.sum(x * layer.w) * config["scale"])(X), X * scale**2)


def test_custom_rules_that_change() -> None:
    @rlx.custom_vjp
    def clipped(x: Any) -> Any:
        return x

    for limit in (1.0, 2.0):
        clipped.defvjp(lambda x: (x, None), lambda _, ct, limit=limit: (np.clip(ct, -limit, limit),))
        assert float(rlx.grad(lambda x: clipped(x) * 100.0)(2.0)) == limit


@pytest.mark.usefixtures("own_ops")
def test_an_op_that_is_declared_again() -> None:
    for factor in (2.0, 3.0):
        rlx.op(
            "scaled_for_the_call_cache", decompose=lambda x, factor=factor: x * factor,
            reference=lambda x, factor=factor: x * factor, replace=True,
        )(lambda x: x)  # fmt: skip
        np.testing.assert_allclose(rlx.vmap(lambda x: x.scaled_for_the_call_cache())(X), X * factor)


# -- what is run each time --------------------------------------------------------------------------------------------
def test_side_effects_happen_on_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    count = 0

    def counting(x: Any) -> Any:
        nonlocal count
        count += 1
        return np.sum(x) * count

    def appending(x: Any) -> Any:
        CALLS.append(1)
        return np.sum(x)

    def printing(x: Any) -> Any:
        print("traced")
        return np.sum(x)

    rng = np.random.default_rng(0)
    noisy: Callable[[Any], Any] = lambda x: np.sum(x * rng.normal())
    global_noise: Callable[[Any], Any] = lambda x: np.sum(x * np.random.rand())
    for i in range(1, 4):
        np.testing.assert_allclose(rlx.grad(counting)(X), [i] * 3)
        rlx.grad(appending)(X)
        assert len(CALLS) == i
        rlx.grad(printing)(X)
    assert capsys.readouterr().out == "traced\n" * 3
    for draw in (noisy, global_noise):
        assert len({float(rlx.grad(draw)(X)[0]) for _ in range(4)}) == 4


def test_debug_print_prints_on_every_call(capsys: pytest.CaptureFixture[str]) -> None:
    def f(x: Any) -> Any:
        rlx.debug.print("x {}", x)
        return x * x

    for x in (1.0, 2.0):
        rlx.grad(f)(x)
    assert capsys.readouterr().out == "x 1.0\nx 2.0\n"


def test_nan_checks_see_cached_calls() -> None:
    def f(x: Any) -> Any:
        return np.sum(np.log(x))

    rlx.vmap(f)(np.ones((2, 3)))
    with rlx.debug.nans(), pytest.raises(NonFiniteError, match="log"):
        rlx.vmap(f)(-np.ones((2, 3)))


@pytest.mark.parametrize(
    "function",
    [
        open, lambda x: globals()["SCALE"] * x, lambda x: eval("SCALE") * x, lambda x: np.empty(3) * x,
        lambda x: np.random.default_rng().normal() * x, lambda x: vars(MODULE), lambda x: MODULE,
        Hidden().loss, Logged().loss, Slotted().loss,
        lambda x: __import__("time").time() * x, functools.lru_cache(lambda x: x), lambda x: setattr(MODULE, "n", x),
    ],
)  # fmt: skip
def test_what_may_change_unseen_has_no_key(function: Any) -> None:
    with pytest.raises(Unkeyable):
        Reader().value(function)


def test_imports_and_globals_that_are_written_have_no_key() -> None:
    def imports(x: Any) -> Any:
        import time

        return x * time.time()

    def writes(x: Any) -> Any:
        global SCALE
        SCALE = 2.0
        return x

    for function in (imports, writes):
        with pytest.raises(Unkeyable):
            Reader().value(function)


def test_statics_that_are_equal_but_not_the_same() -> None:
    @functools.partial(rlx.jit, static_argnames="mode")
    def f(x: Any, mode: Any) -> Any:
        return x * 2.0 if mode is True else x * 3.0

    assert [float(f(1.0, mode)) for mode in (1, True, 1.0)] == [3.0, 2.0, 3.0]


def test_threads_share_the_cache() -> None:
    def work(i: int) -> None:
        for step in range(50):
            k = float(i * 100 + step % 5)
            gradient = rlx.grad(lambda x: np.sum(x * k))(X)  # noqa: B023
            if not np.array_equal(gradient, np.full(3, k, np.float32)):
                errors.append((i, step, gradient))

    errors: list[Any] = []
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors

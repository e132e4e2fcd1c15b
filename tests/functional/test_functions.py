"""Functions traced, transformed and compiled: trees, closures, nesting, loops, rules, random numbers, errors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest

import rlx
from rlx.errors import DTypeError, GraphError, ShapeError

Array = np.ndarray[Any, Any]
rng = np.random.default_rng(1)


def loss(params: Any, x: Any, y: Any) -> Any:
    hidden = np.tanh(x @ params["w1"] + params["b1"])
    return np.mean((hidden @ params["w2"] - y) ** 2)


def example() -> tuple[dict[str, Array], Array, Array]:
    params = {"w1": rng.normal(size=(4, 8)), "b1": rng.normal(size=8), "w2": rng.normal(size=(8, 1))}
    return params, rng.normal(size=(16, 4)), rng.normal(size=(16, 1))


def slope(f: Any, x: Array, direction: Array, h: float = 1e-6) -> float:
    return float((np.asarray(f(x + h * direction)) - np.asarray(f(x - h * direction))).sum() / (2 * h))


# -- gradients -------------------------------------------------------------------------------------------------------
def test_the_gradient_of_a_function_of_trees() -> None:
    params, x, y = example()
    value, gradient = rlx.value_and_grad(loss)(params, x, y)
    np.testing.assert_allclose(value, loss(params, x, y))
    assert set(gradient) == set(params)
    for name, array in gradient.items():
        direction = rng.normal(size=array.shape)
        wanted = slope(lambda a, name=name: loss({**params, name: a}, x, y), params[name], direction)
        np.testing.assert_allclose((array * direction).sum(), wanted, rtol=1e-6)


def test_arguments_are_chosen_by_number() -> None:
    def f(a: Any, b: Any, *, c: Any) -> Any:
        return np.sum(a * b * c)

    a, b, c = (rng.normal(size=3) for _ in range(3))
    da, db = rlx.grad(f, (0, -1))(a, b, c=c)
    np.testing.assert_allclose(da, b * c)
    np.testing.assert_allclose(db, a * c)
    np.testing.assert_allclose(rlx.grad(f, argnums=1)(a, b, c=c), a * c)
    gradient, aux = rlx.grad(lambda x: (np.sum(x * x), {"twice": 2 * x}), has_aux=True)(a)
    np.testing.assert_allclose(gradient, aux["twice"])


def test_derivatives_nest_and_close_over_what_is_around() -> None:
    assert rlx.grad(rlx.grad(rlx.grad(lambda x: x**3)))(2.0) == 6.0

    def outer(a: Any) -> Any:
        inner = rlx.grad(lambda b: np.sum(a * b * b))(a)  # 2 a b at b = a
        return np.sum(inner * a)  # 2 a³

    np.testing.assert_allclose(rlx.grad(outer)(np.array([1.0, 2.0])), [6.0, 24.0])
    nested = rlx.vmap(lambda x: rlx.vmap(lambda y: x * y)(np.arange(3.0)))(np.arange(2.0))
    np.testing.assert_allclose(nested, np.outer(np.arange(2.0), np.arange(3.0)))


def test_forward_mode_and_products() -> None:
    x, t = rng.normal(size=3), rng.normal(size=3)
    value, moved = rlx.jvp(lambda v: {"a": np.sin(v), "n": v.argmax()}, (x,), (t,))
    np.testing.assert_allclose(value["a"], np.sin(x))
    np.testing.assert_allclose(moved["a"], np.cos(x) * t)
    assert moved["n"] == 0
    np.testing.assert_allclose(rlx.hvp(lambda v: np.sum(v**3), (x,), (t,)), 6 * x * t)
    value, back = rlx.vjp(lambda a, b: (a * b, np.sum(a)), x, t)
    da, db = back((np.ones(3), np.float64(2.0)))
    np.testing.assert_allclose(da, t + 2)
    np.testing.assert_allclose(db, x)
    np.testing.assert_allclose(rlx.jit(lambda a: rlx.vjp(np.sin, a)[1](np.ones(3))[0])(x), np.cos(x))


def test_jacobians_have_the_structure_of_what_they_are_of() -> None:
    x = rng.normal(size=3)
    for transform in (rlx.jacfwd, rlx.jacrev):
        jacobian = transform(lambda p: {"square": p["x"] ** 2, "sum": np.sum(p["x"])})({"x": x})
        np.testing.assert_allclose(jacobian["square"]["x"], np.diag(2 * x))
        np.testing.assert_allclose(jacobian["sum"]["x"], np.ones(3))
    np.testing.assert_allclose(rlx.hessian(lambda v: np.sum(v**3))(x), np.diag(6 * x), atol=1e-12)


def test_vmap_takes_axes_as_trees() -> None:
    p = {"w": rng.normal(size=(5, 3)), "b": rng.normal(size=())}
    x = rng.normal(size=(3, 5))
    rows = rlx.vmap(lambda p, x: p["w"] @ x + p["b"], in_axes=({"w": 0, "b": None}, 1))(p, x)
    np.testing.assert_allclose(rows, (p["w"] * x.T).sum(1) + p["b"])
    pair = rlx.vmap(lambda a: (a, a.sum()), out_axes=(1, 0))(x)
    np.testing.assert_allclose(pair[0], x.T)
    np.testing.assert_allclose(pair[1], x.sum(1))
    each = rlx.vmap(rlx.grad(lambda w, v: np.sum(np.tanh(w * v))), (None, 0))(x[0], x)
    np.testing.assert_allclose(each, (1 - np.tanh(x[0] * x) ** 2) * x)


def test_checkpoints_and_constants() -> None:
    x = rng.normal(size=4)
    inside = rlx.checkpoint(lambda v: np.sin(np.sin(v)))
    np.testing.assert_allclose(rlx.grad(lambda v: np.sum(inside(v)))(x), np.cos(np.sin(x)) * np.cos(x))
    assert rlx.grad(lambda v: rlx.stop_gradient(v) * v)(3.0) == 3.0


# -- containers ------------------------------------------------------------------------------------------------------
class Pair(NamedTuple):
    a: Any
    b: Any


@dataclass(frozen=True)
class Layer:
    w: Any
    b: Any = None


def test_trees_of_every_kind() -> None:
    tree = {"layers": [Layer(np.ones(2)), Layer(np.ones(3), np.zeros(1))], "pair": Pair(np.float64(1.0), (np.ones(1),))}
    leaves, structure = rlx.tree.flatten(tree)
    assert len(leaves) == structure.leaves == 5
    assert structure.paths("p") == ["p.layers[0].w", "p.layers[1].w", "p.layers[1].b", "p.pair.a", "p.pair.b[0]"]
    again = structure.unflatten(leaves)
    assert isinstance(again["layers"][0], Layer) and isinstance(again["pair"], Pair) and again["layers"][0].b is None
    gradient = rlx.grad(lambda t: sum(np.sum(leaf**2) for leaf in rlx.tree.leaves(t)))(tree)
    np.testing.assert_array_equal(gradient["layers"][1].w, 2 * np.ones(3))
    assert gradient["pair"].a == 2.0
    doubled = rlx.tree.map(lambda a, b: a + b, tree, tree)
    np.testing.assert_array_equal(doubled["layers"][0].w, [2.0, 2.0])
    with pytest.raises(GraphError, match="structures differ"):
        rlx.tree.map(lambda a, b: a, [1, 2], [1])


# -- jit -------------------------------------------------------------------------------------------------------------
def test_a_function_is_traced_once_for_each_kind_of_arguments() -> None:
    count = 0

    @rlx.jit
    def f(x: Any, scale: Any = 2.0) -> Any:
        nonlocal count
        count += 1
        return x * scale

    for scale in (2.0, 3.0, 4.0):
        np.testing.assert_allclose(f(np.ones(3), scale), [scale] * 3)
    assert count == 1
    f(np.ones(4), 2.0)
    f(np.ones(4), scale=3.0)
    assert count == 2
    assert rlx.explain(f).splitlines() == [
        "1. traced for scale: f32 number, x: f64[3]", "2. traced again, x is f64[4], was f64[3]",
    ]  # fmt: skip
    assert repr(f) == "<rlx.jit of f, traced 2 times>"


def test_named_axes_are_sizes_of_run_time() -> None:
    count = 0

    @rlx.jit(dims={"x": ("rows", None), "p.w": (None, "out")})
    def f(p: Any, x: Any) -> Any:
        nonlocal count
        count += 1
        return rlx.softmax(x @ p["w"]).sum(0)

    for rows, out in ((1, 2), (5, 3), (17, 2)):
        assert f({"w": np.ones((3, out))}, np.ones((rows, 3))).shape == (out,)
    assert count == 1
    grown = rlx.jit(lambda xs: rlx.scan(lambda c, x: (c + x, c), np.zeros(2), xs), dims={"xs": ("t", None)})
    for t in (1, 4):
        last, all_ = grown(np.ones((t, 2)))
        assert all_.shape == (t, 2) and last[0] == t
    assert len(grown.history) == 1


def test_static_arguments_are_python_values() -> None:
    power = rlx.jit(lambda x, n: x if n == 0 else x**n, static_argnums=1)
    assert power(3.0, 2) == 9.0 and power(3.0, 0) == 3.0
    assert len(power.history) == 2 and "n is 0, was 2" in power.history[1]
    assert rlx.jit(lambda x, kind: getattr(rlx, kind)(x), static_argnames="kind")(0.0, kind="cos") == 1.0
    with pytest.raises(GraphError, match="static argument 'n' cannot be hashed, list"):
        power(3.0, [1])
    with pytest.raises(GraphError, match="has no parameter 'y'"):
        rlx.jit(lambda x: x, dims={"y": ("n",)})
    with pytest.raises(GraphError, match=r"dims of 'x' are \('n',\), it has 2 axes"):
        rlx.jit(lambda x: x, dims={"x": ("n",)})(np.ones((2, 2)))


def test_a_training_step_is_one_call() -> None:
    @rlx.jit
    def step(params: Any, x: Any, y: Any) -> Any:
        value, gradient = rlx.value_and_grad(loss)(params, x, y)
        return value, rlx.tree.map(lambda p, g: p - 0.05 * g, params, gradient)

    params, x, y = example()
    values = []
    for _ in range(40):
        value, params = step(params, x, y)
        values.append(float(value))
    assert values[-1] < 0.5 * values[0]
    assert len(step.history) == 1


def test_a_transform_of_a_jitted_function_may_be_jitted() -> None:
    assert rlx.jit(rlx.grad(rlx.jit(lambda x: x**3)))(2.0) == 12.0


def test_a_method_may_be_jitted() -> None:
    @dataclass(frozen=True)
    class Model:
        w: Any

        @rlx.jit
        def __call__(self, x: Any) -> Any:
            return x @ self.w

    np.testing.assert_allclose(Model(np.ones((2, 3)))(np.ones((1, 2))), [[2.0, 2.0, 2.0]])


# -- loops -----------------------------------------------------------------------------------------------------------
def rnn(w: Any, c: Any, xs: Any, checkpoints: int | None = None) -> Any:
    def step(c: Any, x: Any) -> Any:
        c = np.tanh(c @ w + x)
        return c, {"twice": c * 2}

    last, ys = rlx.scan(step, c, xs, checkpoints=checkpoints)
    return np.sum(last) + np.sum(ys["twice"] ** 2)


def rnn_in_numpy(w: Array, c: Array, xs: Array) -> float:
    total = 0.0
    for x in xs:
        c = np.tanh(c @ w + x)
        total += ((c * 2) ** 2).sum()
    return float(c.sum() + total)


@pytest.mark.parametrize("checkpoints", [None, 1, 2, 6])
def test_a_scan_over_a_function_that_reads_what_is_around_it(checkpoints: int | None) -> None:
    w, c, xs = rng.normal(size=(3, 3)), rng.normal(size=3), rng.normal(size=(6, 3))
    np.testing.assert_allclose(rnn(w, c, xs, checkpoints), rnn_in_numpy(w, c, xs))
    dw, dxs = rlx.grad(lambda w, xs: rnn(w, c, xs, checkpoints), (0, 1))(w, xs)
    direction = rng.normal(size=(3, 3))
    np.testing.assert_allclose((dw * direction).sum(), slope(lambda a: rnn_in_numpy(a, c, xs), w, direction), rtol=1e-6)
    direction = rng.normal(size=(6, 3))
    np.testing.assert_allclose(
        (dxs * direction).sum(), slope(lambda a: rnn_in_numpy(w, c, a), xs, direction), rtol=1e-6
    )


def test_while_fori_and_cond() -> None:
    value, steps = rlx.while_loop(lambda c: c[0] < 10, lambda c: (c[0] * 2, c[1] + 1), (1.5, 0))
    assert (value, steps) == (12.0, 3)
    assert rlx.fori_loop(2, 5, lambda i, c: c + i, 0) == 9
    assert rlx.jit(lambda n: rlx.fori_loop(0, n, lambda i, c: c * 2.0, 1.0))(5) == 32.0
    square = rlx.grad(lambda x: rlx.while_loop(lambda c: c < 10, lambda c: c * c, x, max_steps=4))
    np.testing.assert_allclose(square(2.0), 4 * 2.0**3)
    pick = rlx.jit(lambda x: rlx.cond(x.sum() > 0, lambda v: v * 2, lambda v: v - 1, x))
    np.testing.assert_array_equal(pick(np.ones(2)), [2.0, 2.0])
    np.testing.assert_array_equal(pick(-np.ones(2)), [-2.0, -2.0])
    branch = rlx.grad(lambda x: rlx.cond(x > 0, lambda v: v * v, lambda v: v * 3, x))
    assert branch(2.0) == 4.0 and branch(-2.0) == 3.0
    lanes = rlx.vmap(lambda x: rlx.cond(x > 0, lambda v: v * 2, lambda v: v - 1, x))(np.array([1.0, -1.0]))
    np.testing.assert_array_equal(lanes, [2.0, -2.0])


# -- rules -----------------------------------------------------------------------------------------------------------
def test_functions_with_rules_of_their_own() -> None:
    @rlx.custom_vjp
    def product(x: Any, y: Any) -> Any:
        return x * y

    product.defvjp(lambda x, y: (x * y, (x, y)), lambda residuals, ct: (10 * ct * residuals[1], ct * residuals[0]))
    assert product(2.0, 3.0) == 6.0
    assert rlx.grad(product, (0, 1))(2.0, 3.0) == (30.0, 2.0)
    assert rlx.jvp(product, (2.0, 3.0), (1.0, 0.0))[1] == 30.0
    np.testing.assert_allclose(rlx.vmap(rlx.grad(product))(np.ones(2), np.arange(2.0)), [0.0, 10.0])

    @rlx.custom_jvp
    def sine(x: Any) -> Any:
        return np.sin(x)

    @sine.defjvp
    def rule(primals: Any, tangents: Any) -> Any:
        return sine(primals[0]), 7 * tangents[0] * np.cos(primals[0])

    np.testing.assert_allclose(rlx.grad(sine)(0.5), 7 * np.cos(0.5), rtol=1e-6)
    np.testing.assert_allclose(rlx.grad(rlx.grad(sine))(0.5), -7 * np.sin(0.5), rtol=1e-6)
    with pytest.raises(GraphError, match=r"has no rule yet"):
        rlx.custom_vjp(lambda x: x)(1.0)
    with pytest.raises(GraphError, match=r"reads <traced f32\[\]> from the enclosing scope"):
        rlx.jit(lambda a: rlx.custom_vjp(lambda x: x * a)(1.0))(2.0)


# -- random numbers --------------------------------------------------------------------------------------------------
def test_random_numbers_belong_to_their_key() -> None:
    key = rlx.random.key(7)
    first, second = rlx.random.split(key)
    x = rlx.random.normal(first, (10000,))
    np.testing.assert_array_equal(x, rlx.jit(lambda k: rlx.random.normal(k, (10000,)))(first))
    assert abs(float(x.mean())) < 0.05 and abs(float(x.std()) - 1) < 0.05
    assert not np.array_equal(x, rlx.random.normal(second, (10000,)))
    keys = rlx.random.split(key, 3)
    lanes = rlx.vmap(lambda k: rlx.random.uniform(k, (4,)))(keys)
    np.testing.assert_array_equal(lanes[1], rlx.random.uniform(keys[1], (4,)))
    u = rlx.random.uniform(first, (10000,), minval=2.0, maxval=4.0)
    assert u.min() >= 2 and u.max() < 4 and abs(float(u.mean()) - 3) < 0.05
    n = rlx.random.randint(first, (10000,), -2, 3)
    assert sorted(set(n.tolist())) == [-2, -1, 0, 1, 2]
    drawn = rlx.random.categorical(first, np.broadcast_to(np.log(np.array([0.1, 0.6, 0.3], np.float32)), (10000, 3)))
    np.testing.assert_allclose(np.bincount(drawn) / 10000, [0.1, 0.6, 0.3], atol=0.02)
    assert abs(float(rlx.random.bernoulli(first, 0.3, (10000,)).mean()) - 0.3) < 0.02
    folded = [tuple(rlx.random.fold_in(key, i).tolist()) for i in range(5)]
    assert len(set(folded)) == 5
    with pytest.raises(GraphError, match="seed is -1"):
        rlx.random.key(-1)


# -- errors ----------------------------------------------------------------------------------------------------------
def test_errors_name_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match=r"grad: <lambda> returns f64\[3\], expected one float"):
        rlx.grad(lambda x: x * 2)(np.ones(3))
    with pytest.raises(DTypeError, match=r"'x' is i32\[3\], only floats have a gradient"):
        rlx.grad(lambda x: np.sum(x) * 1.5)(np.ones(3, np.int32))
    with pytest.raises(GraphError, match="argnums is 2, there are 1 arguments"):
        rlx.grad(lambda x: x, 2)(1.0)
    with pytest.raises(ShapeError, match=r"scan: carry starts as f64\[3\], the function returns f64\[\]"):
        rlx.scan(lambda c, x: (c.sum(), x), np.zeros(3), np.ones((2, 3)))
    with pytest.raises(ShapeError, match="expected one number of rows"):
        rlx.scan(lambda c, x: (c, x), 0.0, (np.ones(2), np.ones(3)))
    with pytest.raises(GraphError, match=r"expected a pair \(carry, y\)"):
        rlx.scan(lambda c, x: c, 0.0, np.ones(2))
    with pytest.raises(ShapeError, match=r"cond: the branches return f32\[\] and f32\[2\]"):
        rlx.jit(lambda x: rlx.cond(x > 0, lambda v: v, lambda v: np.ones(2, np.float32) * v, x))(1.0)
    with pytest.raises(ShapeError, match="batch sizes differ, a: 2, b: 3"):
        rlx.vmap(lambda a, b: a + b)(np.ones(2), np.ones(3))
    with pytest.raises(GraphError, match="jvp: tangents are"):
        rlx.jvp(np.sin, (1.0,), (1.0, 2.0))
    leaked: list[Any] = []
    rlx.jit(lambda x: leaked.insert(0, x))(1.0)
    with pytest.raises(GraphError, match="is used outside of the traced function"):
        rlx.jit(lambda x: x + leaked[0])(1.0)
    with pytest.raises(GraphError, match=r"explain: .* is not a function made by rlx\.jit"):
        rlx.explain(np.sin)
    with pytest.raises(GraphError) as not_jitted:
        rlx.explain(rlx.grad(np.sin))
    assert str(not_jitted.value.hint).startswith("rlx.jit(rlx.grad(f)) can be explained; outside of jit a program is")
    with pytest.raises(GraphError) as flag:
        rlx.jit(lambda x, flag: x if flag else -x)(1.0, True)
    assert "rlx.jit(f, static_argnames=...)" in str(flag.value.hint)
    with pytest.raises(GraphError) as indexed:
        rlx.jit(lambda i: rlx.asarray([1.0, 2.0])[i])(1)
    assert "rlx.at(table)[i].get()" in str(indexed.value.hint)


def test_a_trace_is_a_graph() -> None:
    params, x, y = example()
    graph = rlx.trace(loss)(params, x, y)
    assert [n.attrs["name"] for n in graph.inputs] == ["params.b1", "params.w1", "params.w2", "x", "y"]
    symbolic = rlx.trace(loss)(
        params, rlx.TensorType((rlx.dim("n"), 4), rlx.dtype("f64")), rlx.TensorType((rlx.dim("n"), 1), rlx.dtype("f64"))
    )
    assert symbolic.symbols() == ["n"]


def test_modules_list_what_they_are_for() -> None:
    for module in (rlx.random, rlx.tree):
        made_here = {n for n, v in vars(module).items() if getattr(v, "__module__", "") == module.__name__}
        names = {n for n in made_here if not n.startswith("_")} - {"broadcast_prefix", "Node", "node", "sorted_keys"}
        assert set(dir(module)) == names


def test_the_gradient_of_a_function_without_a_return_says_so() -> None:
    with pytest.raises(ShapeError, match="returns no array, expected one float") as error:
        rlx.grad(lambda x: None)(1.0)
    assert error.value.hint == "does it end in a return?"


def test_vmap_over_the_params_of_a_model_says_how_to_share_them() -> None:
    params, x, y = example()
    with pytest.raises(ShapeError, match="batch sizes differ") as caught:
        rlx.vmap(loss)(params, x, y)
    assert "in_axes=(None, 0)" in str(caught.value.hint)

"""How functions are called: defaults, static arguments, and errors that name the argument that does not fit."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import BindError, DTypeError, GraphError, KernelError, RlxError, ShapeError


# -- Python values of transforms -------------------------------------------------------------------------------------
def powers(x: Any, count: int, mode: str = "sum") -> Any:
    total = sum((x**i).sum() for i in range(count))
    return total if mode == "sum" else -total


def test_arguments_that_are_not_differentiated_stay_python_values() -> None:
    x = np.arange(1.0, 4.0)
    for gradient in (
        rlx.grad(powers), rlx.jit(rlx.grad(powers), static_argnums=1), rlx.grad(rlx.jit(powers, static_argnums=1)),
        rlx.jacrev(powers), rlx.checkpoint(rlx.grad(powers)),
    ):  # fmt: skip
        np.testing.assert_allclose(gradient(x, 3), 1 + 2 * x)
        np.testing.assert_allclose(gradient(x, 4), 1 + 2 * x + 3 * x**2)
    np.testing.assert_allclose(rlx.grad(powers)(x, count=3, mode="negative"), -1 - 2 * x)
    np.testing.assert_allclose(rlx.value_and_grad(powers)(x, 2, "other")[1], -np.ones(3))
    np.testing.assert_allclose(rlx.hessian(powers)(x, 3), 2 * np.eye(3))
    np.testing.assert_allclose(rlx.grad(lambda count, x: powers(x, count), argnums=-1)(3, x), 1 + 2 * x)


def test_arguments_that_are_not_batched_stay_python_values() -> None:
    x = np.arange(1.0, 4.0)
    np.testing.assert_allclose(rlx.vmap(powers, (0, None, None))(x, 3, "sum"), 1 + x + x**2)
    np.testing.assert_allclose(rlx.vmap(rlx.grad(powers), (0, None))(x, 3), 1 + 2 * x)


def test_each_python_value_has_its_own_program() -> None:
    """True, 1 and 1.0 are equal, and functions are compared by their code."""
    x = np.array(2.0)
    chosen = rlx.grad(lambda x, flag: x * (3.0 if flag is True else 5.0))
    assert [chosen(x, flag) for flag in (True, 1, False, True)] == [3.0, 5.0, 5.0, 3.0]
    applied = rlx.grad(lambda x, activation: activation(x))
    assert [applied(x, f) for f in (lambda x: 2 * x, lambda x: 7 * x, np.sin)] == [2.0, 7.0, np.cos(2.0)]


def test_drawing_from_numpy_while_tracing_warns() -> None:
    noisy = rlx.jit(lambda x: x + np.random.normal())
    with pytest.warns(UserWarning, match="draws from np.random while it is traced") as caught:
        first = noisy(1.0)
    assert caught[0].filename == __file__ and noisy(1.0) == first


def test_names_of_other_libraries_are_answered() -> None:
    jitted = rlx.jit(np.sin)
    for name, hint in {"lower": "f.graph", "asm": "rlx inspect", "plan": "f.program", "raport": "report"}.items():
        with pytest.raises(AttributeError, match=hint):
            getattr(jitted, name)


def test_python_values_inside_a_tree_stay_python_values() -> None:
    def scaled(x: Any, options: dict[str, Any]) -> Any:
        assert type(options["steps"]) is int
        return x ** options["steps"] * options["scale"] * options["rate"]

    for steps, rate in ((2, 1.0), (2, 3.0), (3, 3.0)):
        options = {"steps": steps, "scale": np.array(2.0), "rate": rate}
        assert rlx.grad(scaled)(np.array(2.0), options) == steps * 2.0 ** (steps - 1) * 2.0 * rate


# -- defaults --------------------------------------------------------------------------------------------------------
def decay(rate: Any, start: Any = 1.0, steps: int = 5, mode: str = "power") -> Any:
    """start * rate^steps: `steps` and `mode` are Python values that code depends on."""
    if mode == "power":
        return start * rate**steps
    return rlx.scan(lambda c, _: (c * rate, None), start, length=steps)[0]


def test_jit_leaves_a_default_that_nobody_passed_to_the_function() -> None:
    rates = np.array([0.5, 0.9], np.float32)
    np.testing.assert_allclose(rlx.jit(decay)(rates), rates**5, rtol=1e-6)
    np.testing.assert_allclose(rlx.jit(rlx.vmap(decay))(rates), rates**5, rtol=1e-6)
    np.testing.assert_allclose(rlx.jit(rlx.grad(decay))(0.5), 5 * 0.5**4, rtol=1e-6)
    np.testing.assert_allclose(rlx.jit(rlx.vmap(rlx.grad(decay)))(rates), 5 * rates**4, rtol=1e-6)
    np.testing.assert_allclose(rlx.jit(np.tanh)(1.0), np.tanh(1.0), rtol=1e-6)


def test_what_is_passed_is_traced_whether_by_position_or_by_name() -> None:
    jitted = rlx.jit(decay, static_argnames=("steps", "mode"))
    np.testing.assert_allclose([jitted(0.5, 3.0), jitted(0.5, start=3.0)], 3 * 0.5**5, rtol=1e-6)
    assert len(jitted.history) == 1
    np.testing.assert_allclose(jitted(0.5, steps=2), 0.25)  # the argument between them keeps its default
    np.testing.assert_allclose(jitted(0.5, mode="scan", start=2.0), 2 * 0.5**5, rtol=1e-6)
    assert len(jitted.history) == 3


# -- what is no function ---------------------------------------------------------------------------------------------
def test_a_graph_is_not_a_function() -> None:
    graph = rlx.Graph("square")
    x = graph.input("x", (3,))
    graph.set_outputs([x * x])
    module = rlx.Graph.define("block", lambda m: m.input("x", (3,)) * 2.0)
    takers = {
        "jit": rlx.jit, "grad": rlx.grad, "value_and_grad": rlx.value_and_grad, "vmap": rlx.vmap, "jacfwd": rlx.jacfwd,
        "jacrev": rlx.jacrev, "checkpoint": rlx.checkpoint, "vjp": lambda g: rlx.vjp(g, 1.0),
        "jvp": lambda g: rlx.jvp(g, (1.0,), (1.0,)),
    }  # fmt: skip
    for name, taker in takers.items():
        for argument in (graph, module):
            with pytest.raises(GraphError, match=f"{name}: takes a function, found graph '{argument.name}'") as caught:
                taker(argument)
            assert caught.value.hint == f"{'rlx.compile' if name == 'jit' else f'rlx.transforms.{name}'} takes graphs"
            assert rlx.transforms.__dict__.get(name) or name == "jit"
    with pytest.raises(GraphError, match="jit: takes a function, found ndarray"):
        rlx.jit(np.ones(3))
    with pytest.raises(GraphError, match="jit: takes a function, found graph 'square'"):
        rlx.jit(dims={"x": ("n",)})(graph)


# -- what does not fit is named --------------------------------------------------------------------------------------
X = np.array([1.0, 2.0, 3.0], np.float32)
KEY = rlx.random.key(0)


@dataclass
class Config:
    act: str
    w: Any


class Plain:
    def scaled(self, x: Any) -> Any:
        return x * 2.0


def changed(x: Any) -> Any:
    x[0] = 5.0
    return x


def filled(x: Any) -> Any:
    array = np.zeros(3)
    array[:] = x
    return array


@rlx.custom_vjp
def custom(x: Any, scale: Any) -> Any:
    return x * scale


def with_rule(fwd: Any, bwd: Any) -> Any:
    custom.defvjp(fwd, bwd)
    return rlx.grad(lambda x: custom(x, 2.0).sum())(X[:2])


@rlx.custom_jvp
def tangent_of_one(x: Any) -> Any:
    return x * 2


tangent_of_one.defjvp(lambda primals, tangents: (primals[0] * 2, tangents[0][:1]))


class Box:
    x = X


@dataclass
class Named:
    x: Any
    name: str


@dataclass
class Fixed:
    x: Any
    name: str = field(metadata={"static": True})


MISTAKES: dict[str, tuple[Callable[[], Any], type[Exception], str, str]] = {
    "a string": (
        lambda: rlx.jit(lambda x, mode: x)(X, "a"),
        DTypeError,
        "jit: mode is a str, expected an array",
        "static_argnames='mode'",
    ),
    "a string in a dict": (
        lambda: rlx.jit(lambda cfg: cfg["n"])({"act": "relu", "n": 2}),
        DTypeError,
        "jit: cfg.act is a str",
        "argument of its own",
    ),
    "a string in a dataclass": (
        lambda: rlx.jit(lambda cfg: cfg.w)(Config("relu", X)),
        DTypeError,
        "jit: cfg.act is a str",
        "argument of its own",
    ),
    "self": (
        lambda: rlx.jit(Plain.scaled)(Plain(), X),
        DTypeError,
        "jit: self is an object of class Plain",
        "static_argnames='self'",
    ),
    "grad of a string": (
        lambda: rlx.grad(lambda x, mode: x, argnums=1)(1.0, "a"),
        DTypeError,
        "grad: mode is a str",
        "functools.partial",
    ),
    "vmap over a string": (
        lambda: rlx.vmap(lambda x, mode: x)(X, "a"),
        DTypeError,
        "vmap: mode is a str",
        "functools.partial",
    ),
    "grad of an integer": (
        lambda: rlx.grad(lambda x: (x > 0).sum())(X),
        DTypeError,
        "grad: <lambda> returns i32[], expected one float",
        "x.astype(np.float32)",
    ),
    "hvp without arguments": (
        lambda: rlx.hvp(lambda x: x.sum())(X),
        GraphError,
        "hvp: takes a function, its arguments and their tangents",
        "rlx.hvp(f, (x,), (tangent,))",
    ),
    "vjp without arguments": (lambda: rlx.vjp(np.sin)(X), GraphError, "vjp: takes a function", "rlx.vjp(f, x)"),
    "einsum of lists": (
        lambda: rlx.jit(lambda x: np.einsum(x, [0, 1], [1, 0]))(np.ones((2, 2))),
        GraphError,
        "einsum: the first argument is Traced, expected a string",
        "ij->ji",
    ),
    "einsum that drops axes": (
        lambda: rlx.jit(lambda x: np.einsum("...i->i", x))(np.ones((2, 2))),
        GraphError,
        "has no ... in its result",
        "sum these axes",
    ),
    "np.asarray": (lambda: rlx.jit(lambda x: np.asarray(x))(X), GraphError, "no values", "rlx.numpy.asarray(x)"),
    "np.vectorize": (lambda: rlx.jit(lambda x: np.vectorize(abs)(x))(X), GraphError, "no values", "rlx.vmap(f)(x)"),
    "searchsorted": (lambda: rlx.jit(lambda x: X.searchsorted(x))(X), GraphError, "no values", "np.searchsorted(array"),
    "np.sum": (lambda: rlx.jit(lambda x: np.sum([x[0], x[1]]))(X), GraphError, "no values", "np.sum(np.stack([x, y]))"),
    "np.unique": (lambda: rlx.jit(np.unique)(X), GraphError, "unique: the number", "rlx.numpy.unique(x, size=8)"),
    "np.argwhere": (
        lambda: rlx.jit(np.argwhere)(X),
        GraphError,
        "argwhere: the number",
        "rlx.numpy.argwhere(x, size=8)",
    ),
    "an object of a class": (
        lambda: rlx.jit(lambda box: box.x)(Box()),
        DTypeError,
        "jit: box is a Box",
        "rlx.tree.register(Box), or make it a dataclass",
    ),
    "a field in a dataclass": (
        lambda: rlx.jit(lambda named: named.x)(Named(X, "a")),
        DTypeError,
        "jit: named.name is a str",
        'field(metadata={"static": True})',
    ),
    "trees of different static data": (
        lambda: rlx.tree.map(np.add, Fixed(X, "a"), Fixed(X, "b")),
        GraphError,
        "Fixed(x: array, name='a') and Fixed(x: array, name='b')",
        "",
    ),
    "a carry that grows": (
        lambda: rlx.scan(lambda c, x: (np.concatenate([c, x[None]]), None), np.zeros(1), np.ones(3)),
        ShapeError,
        "scan: carry starts as f64[1], the function returns f64[2]",
        "a carry keeps its shape in every step",
    ),
    "a number as a carry that grows": (
        lambda: rlx.scan(lambda c, x: (c + np.ones(2), None), np.float32(1.0), np.ones(3)),
        ShapeError,
        "scan: carry starts as f32[], the function returns f64[2]",
        "return carry, y",
    ),
    "a string as a result": (
        lambda: rlx.jit(lambda x: {"a": x, "b": "no"})(X),
        DTypeError,
        "<lambda>: its result.b is a str",
        "returns arrays",
    ),
    "an int too large": (
        lambda: rlx.jit(lambda n: n)(2**40),
        DTypeError,
        "jit: n: 1099511627776: does not fit i32",
        "np.int64(1099511627776)",
    ),
    "a type rlx does not have": (
        lambda: rlx.jit(lambda n: n)(np.uint64(3)),
        DTypeError,
        "jit: n: dtype: dtype('uint64') has no counterpart",
        "known: f64",
    ),
    "a word for a shape": (lambda: rlx.random.normal(KEY, "3"), ShapeError, "is a string", ""),
    "a number for a key": (
        lambda: rlx.random.normal(0, (3,)),
        DTypeError,
        "a key is two numbers of u32, found i32[]",
        "rlx.random.key(seed)",
    ),
    "a batch of keys": (
        lambda: rlx.random.normal(rlx.random.split(KEY), (3,)),
        ShapeError,
        "a key is two numbers of u32",
        "vmap",
    ),
    "floats for randint": (
        lambda: rlx.random.randint(KEY, (3,), 0.0, 4.0),
        GraphError,
        "randint: minval is 0.0, expected an integer",
        "",
    ),
    "jvp of numbers": (
        lambda: rlx.jvp(np.sin, 2.0, 1.0),
        GraphError,
        "jvp: primals is a float, expected a tuple",
        "(x,)",
    ),
    "jvp of an array": (lambda: rlx.jvp(np.sin, (X,), X), GraphError, "jvp: tangents is a ndarray", "(tangent,)"),
    "hvp of an array": (lambda: rlx.hvp(np.sum, X, X), GraphError, "hvp: primals is a ndarray", "rlx.hvp(f, (x,)"),
    "change in place": (lambda: rlx.jit(changed)(X), GraphError, "cannot be changed in place", "x.at[key].set(y)"),
    "a format": (
        lambda: rlx.jit(lambda x: f"{x:.2f}")(X),
        GraphError,
        "has no number to format as '.2f'",
        "rlx.debug.print",
    ),
    "trace at once": (
        lambda: rlx.trace(np.sin, X),
        GraphError,
        "trace: takes a function, found 1",
        "rlx.trace(f)(*args)",
    ),
    "np.linalg": (
        lambda: rlx.jit(np.linalg.eigvals)(X),
        GraphError,
        "numpy.linalg.eigvals: is not supported",
        "eigh",
    ),
    "np.add.at": (
        lambda: rlx.jit(lambda x: np.add.at(x, 0, 1.0))(X),
        GraphError,
        "numpy.add.at: is not supported",
        "x.at",
    ),
    "out=": (lambda: rlx.jit(lambda x: np.add(x, x, where=X > 0))(X), GraphError, "numpy.add with where=", "assign"),
    "np.array of a list": (
        lambda: rlx.jit(lambda x: np.array([x, x]))(X),
        GraphError,
        "has no values for NumPy",
        "np.stack([x, y])",
    ),
    "grad of an int": (lambda: rlx.grad(lambda x: x * 2)(3), DTypeError, "grad: 'x' is i32[], only floats", "3.0"),
    "argnums by name": (lambda: rlx.grad(lambda x: x, "x")(1.0), GraphError, "grad: argnums is 'x'", "counted from 0"),
    "argnums of a keyword": (
        lambda: rlx.grad(lambda x, y: x * y, 1)(1.0, y=2.0),
        GraphError,
        "there are 1 arguments",
        "not by name",
    ),
    "scan without a pair": (
        lambda: rlx.scan(lambda c, x: c, 0.0, X),
        GraphError,
        "scan: the function returns array, expected a pair",
        "carry, y",
    ),
    "cond of an array": (
        lambda: rlx.jit(lambda x: rlx.cond(x, lambda: 1.0, lambda: 2.0))(X),
        ShapeError,
        "cond: the predicate is f32[3], expected one bool",
        "rlx.where",
    ),
    "while_loop of a number": (
        lambda: rlx.while_loop(lambda c: c, lambda c: c - 1, 3.0),
        DTypeError,
        "while_loop: cond_fun returns f32[], expected one bool",
        "c > 0",
    ),
    "scan over nothing": (lambda: rlx.scan(lambda c, x: (c, x), 0.0), ShapeError, "length is None", "length="),
    "vmap along a word": (
        lambda: rlx.vmap(np.sin, in_axes="batch")(X),
        GraphError,
        "vmap: in_axes has 'batch'",
        "an axis is an integer",
    ),
    "a static list": (
        lambda: rlx.jit(lambda x, n: x, static_argnums=1)(X, [1]),
        GraphError,
        "static argument 'n' cannot be hashed, list",
        "a tuple for a list",
    ),
    "a tangent of another shape": (
        lambda: rlx.jvp(np.sin, (X,), (X[:2],)),
        ShapeError,
        "jvp: tangents[0] is f32[2], expected f32[3]",
        "has the shape",
    ),
    "a traced size": (
        lambda: rlx.jit(lambda n: np.zeros(n))(3),
        GraphError,
        "has no value for an index",
        "static_argnums",
    ),
    "sym as a function": (lambda: rlx.sym("n"), GraphError, "is not called", "rlx.dim('n')"),
    "fori_loop to a float": (
        lambda: rlx.fori_loop(0, 3.5, lambda i, c: c, 0),
        DTypeError,
        "fori_loop: upper is 3.5, expected an integer",
        "int(",
    ),
    "a keyword of tree.map": (lambda: rlx.tree.map(abs, [1], is_leaf=None), GraphError, "'is_leaf'", "tree.register"),  # type: ignore[call-arg]
    "a keyword of scan": (lambda: rlx.scan(abs, 0.0, X, unroll=2), GraphError, "'unroll'", "machine code"),
    "a keyword of vmap": (lambda: rlx.vmap(abs, axis_size=3), GraphError, "'axis_size'", "np.arange(n)"),  # type: ignore[call-arg]
    "float of a traced array": (lambda: rlx.jit(float)(X[0]), GraphError, "has no value for float()", "np.exp(x)"),
    "a function of math": (lambda: rlx.jit(math.exp)(X[0]), GraphError, "has no value for float()", "np.exp(x)"),
    "trans of a triangular solve": (
        lambda: rlx.numpy.linalg.solve_triangular(np.eye(2), np.ones(2), trans=3),
        GraphError,
        "trans is 3",
        "transpose",
    ),
    "a keyword of jit": (lambda: rlx.jit(abs, donate_argnums=0), GraphError, "'donate_argnums'", "own their memory"),  # type: ignore[call-overload]
    "a forgotten has_aux": (
        lambda: rlx.grad(lambda x: (x.sum(), x))(X),
        ShapeError,
        "expected one float",
        "has_aux=True",
    ),
    "einsum": (
        lambda: rlx.jit(lambda a, b: np.einsum("ij,jk->ik", a, b))(np.ones((2, 3)), np.ones((2, 3))),
        ShapeError,
        "einsum: 'j' of 'ij,jk->ik' has the sizes 3 and 2",
        "",
    ),
    "a fraction added to integers": (
        lambda: rlx.at(np.arange(3))[0].add(1.5),
        DTypeError,
        "at[...]: an update of f32[] does not fit",
        "astype",
    ),
    "an update of another size": (
        lambda: rlx.jit(lambda x: x.at[:2].add(np.ones(3)))(X),
        ShapeError,
        "at[...]: an update of f32[3] does not broadcast to the selected f32[2]",
        "",
    ),
    "an index below the first": (
        lambda: rlx.jit(lambda x, i: x[i])(X, -5),
        KernelError,
        "gather: index -5 lies outside the 3 entries of 'x'",
        "",
    ),
    "an update of a NumPy array in place": (
        lambda: rlx.jit(filled)(X),
        GraphError,
        "while it is traced",
        "rlx.at(array)[0]",
    ),
    "a traced range": (lambda: rlx.jit(lambda n: list(range(n)))(3), GraphError, "for an index", "range(n): rlx.fori"),
    "a complex number": (lambda: rlx.jit(lambda x: x * 1j)(X), DTypeError, "complex", "two real arrays"),
    "a float as an index": (lambda: rlx.jit(lambda x: x[1.0])(X), GraphError, "index: 1.0", "x[1]"),
    "vmap over a number": (lambda: rlx.vmap(np.sin)(1.0), ShapeError, "is f32[], one number", "in_axes=None"),
    "solve of other sizes": (
        lambda: rlx.numpy.linalg.solve(np.eye(2), np.ones(3)),
        ShapeError,
        "f64[2, 2] and f64[3]",
        "one row of b",
    ),
    "a string for a custom function": (
        lambda: custom(X, "a"),
        DTypeError,
        "custom_vjp custom: scale is a str",
        "nondiff_argnums=(1,)",
    ),
    "a forward rule without residuals": (
        lambda: with_rule(lambda x, s: x * s, None),
        GraphError,
        "custom: fwd returns array, expected a pair",
        "",
    ),
    "a cotangent of another shape": (
        lambda: with_rule(lambda x, s: (x * s, None), lambda r, ct: (ct[:1], None)),
        ShapeError,
        "custom_vjp custom: bwd returns f32[1] for x, expected f32[2]",
        "sum over axes",
    ),
    "a tangent of another size": (
        lambda: rlx.grad(lambda x: tangent_of_one(x).sum())(X),
        ShapeError,
        "custom_jvp tangent_of_one: its rule returns f32[1] for the result, expected f32[3]",
        "",
    ),
    "a compiled graph by position": (
        lambda: rlx.compile(rlx.trace(np.sin)(X))(X),
        BindError,
        "1 given by position, they go by name",
        "f(x=...)",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_named_with_what_to_do(mistake: str) -> None:
    call, kind, message, hint = MISTAKES[mistake]
    with pytest.raises(kind) as caught:
        call()
    assert isinstance(caught.value, RlxError) and message in str(caught.value)
    assert hint in (caught.value.hint or "") and len(str(caught.value)) < 500


def test_names_of_jax_say_where_they_are() -> None:
    for name, place in {
        "lax": "rlx.scan",
        "nn": "rlx.relu",
        "PRNGKey": "rlx.random.key",
        "pmap": "one device",
        "swish": "rlx.silu",
        "flatten_util": "rlx.tree.ravel",
        "expit": "rlx.sigmoid",
        "iota": "rlx.arange",
        "leaky_relu": "rlx.where",
    }.items():
        with pytest.raises(AttributeError, match=f"no attribute '{name}': .*{place}.*coming-from-jax"):
            getattr(rlx, name)
    with pytest.raises(AttributeError, match="has no data while it is traced"):
        rlx.jit(lambda x: x.tolist())(X)


def test_an_assignment_to_an_element_is_told_from_a_conversion() -> None:
    def assigned(x: Any) -> None:
        np.zeros(3)[0] = x

    with pytest.raises(ValueError, match="setting an array element") as caught:
        rlx.jit(assigned)(X[0])
    assert "rlx.at(array)[0].set(x)" in caught.value.__cause__.hint  # type: ignore[union-attr]
    with pytest.raises(GraphError) as converted:
        rlx.jit(float)(X[0])
    assert "array[0]" not in (converted.value.hint or "")


def test_names_of_scipy_say_where_they_are() -> None:
    for module, name, place in (
        (rlx.numpy, "scipy", "rlx.logsumexp"),
        (rlx.numpy.linalg, "cho_solve", "solve_triangular"),
        (rlx.numpy.linalg, "eigvals", "eigh"),
        (rlx.numpy.linalg, "solv", "did you mean 'solve'"),
    ):
        with pytest.raises(AttributeError, match=f"no attribute '{name}': .*{place}"):
            getattr(module, name)


def test_a_number_may_be_a_condition() -> None:
    choose = rlx.jit(lambda n: rlx.cond(n, lambda: 1.0, lambda: 2.0))
    assert [float(choose(n)) for n in (3, 0, -1)] == [1.0, 2.0, 1.0]


def test_an_error_names_the_line_of_the_caller_not_of_numpy() -> None:
    with pytest.raises(GraphError) as caught:
        rlx.jit(lambda x: np.testing.assert_allclose(x, 1))(X)
    assert any("test_calls.py" in note for note in caught.value.notes)


# -- what was refused and need not be --------------------------------------------------------------------------------
def test_vmap_takes_arguments_by_name_on_their_first_axis() -> None:
    y = np.arange(6.0, dtype=np.float32).reshape(3, 2)
    np.testing.assert_allclose(rlx.vmap(lambda x, y: x * y)(X, y=y), X[:, None] * y)
    np.testing.assert_allclose(rlx.vmap(lambda x, *, y: x * y, in_axes=(None,))(X[:2], y=y), X[:2] * y)
    with pytest.raises(ShapeError, match="batch sizes differ, x: 3, y: 2"):
        rlx.vmap(lambda x, y: x * y)(X, y=y.T)


def test_axes_and_sizes_may_be_integers_of_numpy() -> None:
    m, one, two = np.arange(6.0).reshape(2, 3), np.int64(1), np.int32(2)
    np.testing.assert_allclose(rlx.sum(m, axis=one), m.sum(1))
    np.testing.assert_allclose(rlx.max(m, axis=one), m.max(1))
    np.testing.assert_allclose(rlx.argmax(m, axis=one), m.argmax(1))
    np.testing.assert_allclose(rlx.mean(m, (np.int64(0), one)), m.mean())
    np.testing.assert_allclose(rlx.reshape(m, np.int64(3), two), m.reshape(3, 2))
    np.testing.assert_allclose(rlx.roll(m, one, one), np.roll(m, 1, 1))
    np.testing.assert_allclose(rlx.expand_dims(m, one), m[:, None])
    np.testing.assert_allclose(rlx.softmax(m, axis=np.int64(0)).sum(0), np.ones(3))
    np.testing.assert_allclose(
        rlx.rms_norm(m, np.ones(3), eps=np.float64(0)), m / np.sqrt((m**2).mean(1, keepdims=True))
    )
    drawn = rlx.random.randint(KEY, (100,), np.int64(2), np.int64(5))
    assert set(drawn.tolist()) == {2, 3, 4}
    np.testing.assert_allclose(rlx.power(-m, np.int64(2)), m**2)
    assert rlx.fori_loop(np.int64(0), np.int64(3), lambda i, c: c + i, 0) == 3


def test_no_gradient_of_an_argument_may_be_none() -> None:
    @rlx.custom_vjp
    def looked_up(table: Any, ids: Any, scale: Any) -> Any:
        return table["t"][ids] * scale["s"]

    def back(residuals: Any, ct: Any) -> Any:
        table, ids, scale = residuals
        return {"t": np.zeros_like(table["t"]).at[ids].add(ct * scale["s"])}, None, None

    looked_up.defvjp(lambda t, i, s: (looked_up(t, i, s), (t, i, s)), back)
    table, ids, scale = {"t": X}, np.array([0, 2, 2]), {"s": np.float32(3)}
    dt, ds = rlx.grad(lambda t, s: np.sum(looked_up(t, ids, s)), (0, 1))(table, scale)
    np.testing.assert_allclose(dt["t"], [3.0, 0.0, 6.0])
    assert ds["s"] == 0.0
    looked_up.defvjp(lambda t, i, s: (looked_up(t, i, s), None), lambda residuals, ct: ct)
    with pytest.raises(
        GraphError, match=r"bwd returns array, the arguments are tuple\(dict\(t: array\), array,"
    ) as caught:
        rlx.grad(lambda t: np.sum(looked_up(t, ids, scale)))(table)
    assert caught.value.hint and "one cotangent per argument" in caught.value.hint


def test_custom_functions_take_names_and_python_values() -> None:
    """As in JAX: arguments by name, and `nondiff_argnums`, which the rules get first."""

    def scaled(x: Any, scale: Any = 2.0, mode: str = "plain") -> Any:
        return x * scale if mode == "plain" else -x * scale

    f = rlx.custom_vjp(scaled, nondiff_argnums=(2,))
    f.defvjp(
        lambda x, scale, mode: (f(x, scale, mode), scale),
        lambda mode, scale, ct: (ct * scale * (10 if mode == "plain" else -10), None),
    )
    np.testing.assert_allclose(f(X, mode="minus"), -2 * X)
    for mode, sign in (("plain", 10), ("minus", -10)):
        gradient = rlx.grad(lambda x, mode=mode: f(x, scale=3.0, mode=mode).sum())
        np.testing.assert_allclose(gradient(X), np.full(3, sign * 3.0))
        np.testing.assert_allclose(rlx.jit(gradient)(X), np.full(3, sign * 3.0))
    g = rlx.custom_jvp(lambda function, x: function(x), nondiff_argnums=0)
    g.defjvp(lambda function, primals, tangents: (function(primals[0]), 7.0 * tangents[0]))
    assert rlx.grad(lambda x: g(np.sin, x))(1.0) == 7.0
    np.testing.assert_allclose(g(np.sin, X), np.sin(X), rtol=1e-6)
    with pytest.raises(TypeError, match="custom_vjp scaled: got an unexpected keyword argument 'sclae'"):
        f(X, sclae=1.0)
    np.testing.assert_allclose(f(X), 2 * X)
    with pytest.raises(GraphError, match=r"nondiff_argnums is \(3,\), there are 1 arguments"):
        rlx.custom_vjp(lambda x: x, nondiff_argnums=3)(X)

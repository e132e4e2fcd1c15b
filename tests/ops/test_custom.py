"""Custom functions: numbers, fusion through them, derivative bodies that are kept and checked."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from targets import AVX2

import rlx
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.mir.bind_dims import bind_dims
from rlx.mir.pipeline import optimise

Array = np.ndarray[Any, Any]
BOTH = pytest.mark.parametrize("device", ("reference", "cpu"))
rng = np.random.default_rng(11)


def body(name: str, inputs: dict[str, Any], *outputs: Any) -> rlx.Graph:
    """A graph from inputs by name (a shape, or a shape and a type) and functions of them."""
    g = rlx.Graph(name)
    values = {}
    for label, arrays in inputs.items():
        shape, kind = (
            arrays
            if arrays and isinstance(arrays[-1], str) and arrays[-1] in ("f32", "i32", "f16")
            else (arrays, "f32")
        )
        values[label] = g.input(label, shape, kind)
    return g.set_outputs([f(**values) for f in outputs])


def square(shape: Any = ("n", 3)) -> rlx.Graph:
    return body("square", {"x": shape}, lambda x: x * x)


def square_vjp(shape: Any = ("n", 3)) -> rlx.Graph:
    names = {"x": shape, "primal_output": shape, "d_output": shape}
    return body("square_vjp", names, lambda x, primal_output, d_output: 2 * x * d_output)


def square_jvp(shape: Any = ("n", 3)) -> rlx.Graph:
    return body("square_jvp", {"x": shape, "tangent_0": shape}, lambda x, tangent_0: 2 * x * tangent_0)


def run(graph: rlx.Graph, device: str, **inputs: Array) -> list[Array]:
    f = rlx.compile(graph, device)
    f.set_params({n.attrs["name"]: inputs.pop(n.attrs["name"]) for n in graph.params})
    return f.run(inputs)


@BOTH
def test_a_vjp_that_does_not_read_the_result_need_not_declare_it(device: str) -> None:
    vjp = body("vjp", {"x": ("n", 3), "d_output": ("n", 3)}, lambda x, d_output: 3 * x * d_output)
    g = rlx.Graph("g")
    g.set_outputs([g.custom_fn([g.param("x", ("n", 3))], square(), vjp).sum()])
    a = rng.normal(size=(5, 3)).astype(np.float32)
    np.testing.assert_allclose(run(rlx.transforms.grad(g), device, x=a)[0], 3 * a, rtol=1e-6)


# -- numbers ----------------------------------------------------------------------------------------------------------
@BOTH
def test_a_custom_function_gives_what_its_body_gives(device: str) -> None:
    g = rlx.Graph("g")
    x = g.input("x", ("n", 3))
    g.set_outputs([g.custom_fn([x + 1], square(), square_vjp(), square_jvp()) - 2])
    a = rng.normal(size=(5, 3)).astype(np.float32)
    np.testing.assert_allclose(run(g, device, x=a)[0], (a.astype(np.float64) + 1) ** 2 - 2, rtol=1e-5, atol=1e-6)


@BOTH
def test_several_outputs_of_several_types_and_shapes(device: str) -> None:
    forward = body(
        "forward", {"x": ("n", 4), "ids": (("n",), "i32")},
        lambda x, ids: x.exp(), lambda x, ids: ids * 2, lambda x, ids: x.sum(), lambda x, ids: x.astype("f16")[:, :1],
    )  # fmt: skip
    g = rlx.Graph("g")
    x, ids = g.input("x", ("n", 4)), g.input("ids", ("n",), "i32")
    handle = g.custom_fn_multi([x, ids], forward)
    assert isinstance(handle, rlx.MultiOutputHandle)
    n = rlx.dim("n")
    assert handle.n_outputs == 4 and handle.source.op == "custom_fn"
    assert handle.sub_shapes == ((n, 4), (n,), (), (n, 1)) and handle.offsets == (0, 4 * n, 5 * n, 5 * n + 1)
    power, doubled, total, first = handle
    assert [str(v.dtype) for v in handle] == ["f32", "i32", "f32", "f16"] and handle.output(1) is doubled
    g.set_outputs([power, doubled + 1, total, first])
    a, b = rng.normal(size=(3, 4)).astype(np.float32), np.array([3, -1, 7], np.int32)
    actual = run(g, device, x=a, ids=b)
    np.testing.assert_allclose(actual[0], np.exp(a.astype(np.float64)), rtol=1e-6)
    np.testing.assert_array_equal(actual[1], b * 2 + 1)
    np.testing.assert_allclose(actual[2], a.astype(np.float64).sum(), rtol=1e-6)
    np.testing.assert_array_equal(actual[3], a[:, :1].astype(np.float16))


@BOTH
def test_bodies_nest_and_live_in_loops(device: str) -> None:
    """x -> (x²)² / 2 three times, as a loop of a custom function of a custom function."""
    inner = body(
        "inner", {"x": (4,)}, lambda x: x.graph.custom_fn([x.graph.custom_fn([x], square((4,)))], square((4,))) / 2
    )
    step = body("step", {"x": (4,)}, lambda x: x.graph.custom_fn([x], inner))
    g = rlx.Graph("g")
    g.set_outputs([g.scan(g.input("x", (4,)), step, 3)])
    a = np.array([0.5, 1.0, -1.1, 1.2], np.float32)
    exact = a.astype(np.float64)
    for _ in range(3):
        exact = exact**4 / 2
    np.testing.assert_allclose(run(g, device, x=a)[0], exact, rtol=1e-5)


@BOTH
def test_a_loop_inside_a_custom_function(device: str) -> None:
    step = body("step", {"x": ("n",)}, lambda x: x * 2)
    forward = body("forward", {"x": ("n",)}, lambda x: x.graph.scan(x, step, 5) + 1)
    g = rlx.Graph("g")
    g.set_outputs([g.custom_fn([g.input("x", ("n",))], forward)])
    a = np.arange(3, dtype=np.float32)
    np.testing.assert_array_equal(run(g, device, x=a)[0], a * 32 + 1)


@BOTH
@pytest.mark.parametrize("policy", list(rlx.FusionPolicy))
def test_blocks_in_a_body_are_lowered(policy: rlx.FusionPolicy, device: str) -> None:
    inner = rlx.Graph("inner", level="hir")
    x, w, b = inner.input("x", ("n", 4)), inner.input("w", (4, 6)), inner.input("b", (6,))
    inner.set_outputs([inner.linear(x, w, b, activation="relu")])
    module = rlx.Graph.hir("outer").with_fusion_policy(policy)
    operands = [module.input("x", ("n", 4)), module.param("w", (4, 6)), module.param("b", (6,))]
    module.set_outputs([module.hir_mir("custom_fn", operands, fwd_body=inner)])
    arrays = {"x": (3, 4), "w": (4, 6), "b": (6,)}
    a = {k: rng.normal(size=s).astype(np.float32) for k, s in arrays.items()}
    f = rlx.compile(module, device)
    f.set_params({"w": a["w"], "b": a["b"]})
    exact = np.maximum(a["x"].astype(np.float64) @ a["w"] + a["b"], 0)
    np.testing.assert_allclose(f.run({"x": a["x"]})[0], exact, rtol=1e-5, atol=1e-6)


# -- what becomes of it -----------------------------------------------------------------------------------------------
def test_passes_fuse_through_it() -> None:
    """A projection as a custom function: its weight is packed at bind time, its epilogue joins the matmul."""
    project = body("project", {"x": ("n", 8), "w": (8, 16)}, lambda x, w: x @ w)

    def graph(custom: bool) -> rlx.Graph:
        g = rlx.Graph("g")
        x, w = g.input("x", ("n", 8)), g.param("w", (8, 16))
        g.set_outputs([(g.custom_fn([x, w], project) if custom else x @ w).gelu()])
        return g

    custom, plain = (optimise(graph(c), AVX2) for c in (True, False))
    assert custom.main == plain.main and custom.bind == plain.bind
    f = rlx.compile(graph(True))
    (row, *_) = f.dispatch().rows
    assert (row.op, row.path, row.became) == ("custom_fn", "decomposed", ("matmul",))


def test_text_pickle_and_equality_know_the_bodies() -> None:
    g = rlx.Graph("g")
    x = g.input("x", ("n", 3))
    g.set_outputs([g.custom_fn([x], square(), square_vjp(), square_jvp())])
    again = rlx.Graph.parse(g.text(full=True))
    assert again == g and again.text() == g.text() and pickle.loads(pickle.dumps(g)) == g
    attrs = again.nodes[1].attrs
    assert attrs["vjp_body"] == square_vjp() and attrs["jvp_body"] == square_jvp()
    other = rlx.Graph("g")
    x = other.input("x", ("n", 3))
    other.set_outputs(
        [other.custom_fn([x], body("cube", {"x": ("n", 3)}, lambda x: x * x.exp()), square_vjp(), square_jvp())]
    )
    assert other != g


@BOTH
def test_sizes_are_bound_in_all_bodies(device: str) -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.custom_fn([g.input("x", ("n", 3))], square(), square_vjp(), square_jvp())])
    bound = bind_dims(g, {"n": 2})
    assert not bound.symbols() and bound.nodes[1].attrs["vjp_body"] == square_vjp((2, 3))
    a = rng.normal(size=(2, 3)).astype(np.float32)
    np.testing.assert_allclose(run(bound, device, x=a)[0], a * a, rtol=1e-6)


def test_derivative_bodies_of_several_results_have_numbered_inputs() -> None:
    forward = body("forward", {"x": (3,), "i": ((3,), "i32")}, lambda x, i: x.exp(), lambda x, i: x * i)
    names: dict[str, Any] = {"x": (3,), "i": ((3,), "i32")}
    pairs = {f"{stem}_{i}": (3,) for stem in ("primal_output", "d_output") for i in range(2)}
    vjp = body("vjp", names | pairs, lambda x, i, d_output_0, **_: d_output_0 * x, lambda i, **_: i)
    jvp = body("jvp", names | {"tangent_0": (3,), "tangent_1": (3,), "primal_output_0": (3,)},
               lambda x, tangent_0, **_: x * tangent_0, lambda x, tangent_0, **_: tangent_0)  # fmt: skip
    g = rlx.Graph("g")
    handle = g.custom_fn_multi([g.input("x", (3,)), g.input("i", (3,), "i32")], forward, vjp, jvp)
    assert handle.n_outputs == 2
    with pytest.raises(GraphError, match="output 2 does not exist, there are 2"):
        handle.output(2)


def test_a_single_output_is_a_multiple_of_one() -> None:
    names = {"x": (3,), "primal_output_0": (3,), "d_output_0": (3,)}
    vjp = body("vjp", names, lambda x, primal_output_0, d_output_0: x * d_output_0)
    g = rlx.Graph("g")
    handle = g.custom_fn_multi([g.input("x", (3,))], square((3,)), vjp)
    assert handle.n_outputs == 1 and handle.sub_shapes == ((3,),) and handle.offsets == (0,)


# -- errors -----------------------------------------------------------------------------------------------------------
S = (3,)
TWO = body("two", {"x": S}, lambda x: x, lambda x: x * 2)
WRONG: list[tuple[str, tuple[Any, ...], type[GraphError], str]] = [
    ("two outputs", (TWO,), GraphError, "custom_fn: fwd_body: has 2 outputs, expected 1"),
    ("no outputs", (body("none", {"x": S}),), GraphError, "custom_fn: fwd_body: has 0 outputs, expected 1"),
    ("inputs", (body("b", {"x": S, "y": S}, lambda x, y: x),), GraphError, "fwd_body: has 2 inputs, expected 1: one"),
    ("shape", (square((4,)),), ShapeError, r"fwd_body: input 'x' is f32\[4\], operand 0 is f32\[3\]"),
    ("type", (body("b", {"x": (S, "i32")}, lambda x: x),), DTypeError, r"input 'x' is i32\[3\], operand 0 is f32\[3\]"),
    ("no graph", (lambda x: x,), GraphError, "custom_fn: attribute 'fwd_body' cannot be a function"),
    ("a number", (3,), GraphError, "fwd_body: is a int, expected a Graph"),
    ("vjp without d_output", (square(S), body("b", {"x": S, "primal_output": S}, lambda x, primal_output: x)),
     GraphError, r"vjp_body: has no input called 'd_output' among \['x', 'primal_output'\]"),
    ("another name of a size", (square(("rows",)),), ShapeError, r"input 'x' is f32\[rows\], operand 0 is f32\[3\]"),
    ("vjp with a primal too many",
     (square(S), body("b", {"x": S, "y": S, "primal_output": S, "d_output": S}, lambda x, **_: x)),
     GraphError, "vjp_body: has 2 inputs that stand for operands, expected 1: the rest are d_output"),
    ("vjp with a gradient too many",
     (square(S), body("b", {"x": S, "primal_output": S, "d_output": S}, lambda x, **_: x, lambda x, **_: x)),
     GraphError, "vjp_body: has 2 outputs, expected 1: one gradient for each operand"),
    ("vjp with a gradient of another shape",
     (square(S), body("b", {"x": S, "primal_output": S, "d_output": S}, lambda x, **_: x.sum())),
     ShapeError, r"vjp_body: output 0 is f32\[\], operand 0 is f32\[3\]"),
    ("vjp with another d_output",
     (square(S), body("b", {"x": S, "primal_output": S, "d_output": (4,)}, lambda x, **_: x)),
     ShapeError, r"vjp_body: input 'd_output' is f32\[4\], result 0 is f32\[3\]"),
    ("vjp with a second d_output",
     (square(S), body("b", {"x": S, "primal_output": S, "d_output": S, "d_output_1": S}, lambda x, **_: x)),
     GraphError, "vjp_body: input 'd_output_1' stands for nothing, there are 1 of 'd_output' or 1 of 'primal_output'"),
    ("vjp with one value twice",
     (square(S), body("b", {"x": S, "primal_output": S, "d_output": S, "d_output_0": S}, lambda x, **_: x)),
     GraphError, "has the inputs 'd_output' and 'd_output_0' for one value"),
    ("jvp without a tangent", (square(S), None, square(S)), GraphError, "jvp_body: has no input called 'tangent_0'"),
    ("jvp with two results",
     (square(S), None, body("b", {"x": S, "tangent_0": S}, lambda x, **_: x, lambda x, **_: x)),
     GraphError, "jvp_body: has 2 outputs, expected 1: one tangent for each result"),
    ("jvp with a tangent of another shape",
     (square(S), None, body("b", {"x": S, "tangent_0": (4,)}, lambda x, **_: x)),
     ShapeError, r"jvp_body: input 'tangent_0' is f32\[4\], operand 0 is f32\[3\]"),
]  # fmt: skip


@pytest.mark.parametrize(("bodies", "error", "says"), [w[1:] for w in WRONG], ids=[w[0] for w in WRONG])
def test_what_does_not_fit_is_named_with_both_numbers(
    bodies: tuple[Any, ...], error: type[GraphError], says: str
) -> None:
    g = rlx.Graph("g")
    with pytest.raises(GraphError, match=says) as caught:
        g.custom_fn([g.input("x", S)], *bodies)
    assert type(caught.value) is error


def test_a_body_has_no_weights_of_its_own() -> None:
    inner = rlx.Graph("inner")
    inner.set_outputs([inner.input("x", S) * inner.param("w", S)])
    g = rlx.Graph("g")
    with pytest.raises(GraphError, match="fwd_body: has the param 'w'") as caught:
        g.custom_fn([g.input("x", S)], inner)
    assert "operand" in str(caught.value.hint)
    with pytest.raises(GraphError, match="has 1 inputs, expected 0: one for each operand"):
        g.custom_fn([], square(S))


@pytest.mark.parametrize("i", ["a", 1.0, True, 2, -1])
def test_outputs_have_numbers(i: Any) -> None:
    g = rlx.Graph("g")
    with pytest.raises(GraphError, match="does not exist"):
        g.custom_fn_multi([g.input("x", (3,))], square((3,))).output(i)

"""Integer matmuls: which products become such, and that they are what NumPy computes from the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from layers import Bert, bert_graph, bert_inputs, bert_numpy, relative, weights
from targets import AVX512, supported

import rlx
from rlx import Graph
from rlx.dtypes import U8
from rlx.errors import CapabilityError
from rlx.mir.pipeline import optimise
from rlx.profile import CompileProfile, Fusion, Precision

Array = np.ndarray[Any, Any]
INT8 = CompileProfile(precision=Precision("int8"))
TARGETS = [t.name for t in supported()]
PLACES = pytest.mark.parametrize("place", ["reference", *TARGETS])
rng = np.random.default_rng(3)


def compiled(graph: Graph, place: str, **params: Array) -> rlx.CompiledGraph:
    options = {"device": "reference"} if place == "reference" else {"target": place}
    f = rlx.compile(graph, profile=INT8, **options)  # type: ignore[arg-type]
    f.set_params(params)
    return f


def product(x: Array, w: Array) -> Array:
    """x @ w by 8-bit integers, in float32 with one rounding an operation; sums are exact."""
    f = np.float32
    low, high = x.min(-1, keepdims=True), x.max(-1, keepdims=True)
    step = np.maximum((high - low) / f(255), f(1e-12))
    left = np.rint((x - low) * (f(1) / step)).astype(np.int64)
    scale = np.maximum(np.abs(w).max(0) / f(127), f(1e-12))
    right = np.rint(w / scale).astype(np.int64)
    y: Array = (left @ right).astype(f) * step * scale + low * (right.sum(0).astype(f) * scale)
    return y


def ops(graph: Graph) -> list[str]:
    return [node.op for node in graph.nodes]


# -- meaning ---------------------------------------------------------------------------------------------------------
@PLACES
@pytest.mark.parametrize(("k", "n"), [(64, 64), (130, 70), (384, 200)])
def test_a_product_has_the_bits_of_the_definition(place: str, k: int, n: int) -> None:
    g = Graph("product")
    g.set_outputs([g.input("x", ("m", k)) @ g.param("w", (k, n))])
    x, w = rng.normal(size=(9, k)).astype(np.float32), rng.normal(size=(k, n)).astype(np.float32)
    x[2], x[3], w[:, 5] = 0, np.abs(x[3]) * 1e4, 0
    f = compiled(g, place, w=w)
    (y,) = f.run({"x": x})
    np.testing.assert_array_equal(y, product(x, w))
    np.testing.assert_array_equal(y[2], 0)
    for m in (1, 2, 8):
        np.testing.assert_array_equal(f.run({"x": x[:m]})[0], y[:m])
    exact = x.astype(np.float64) @ w
    assert np.abs(y - exact).max() < 0.02 * np.abs(exact).max()


@PLACES
def test_what_is_around_a_product_stays_f32(place: str) -> None:
    g = Graph("around")
    x, r = g.input("x", ("b", "m", 96)), g.input("r", ("b", "m", 64))
    y = (x @ g.param("w", (96, 64)) + g.param("bias", (64,))).tanh() * r
    g.set_outputs([y])
    a, s = (rng.normal(size=(2, 5, k)).astype(np.float32) for k in (96, 64))
    w, bias = rng.normal(size=(96, 64)).astype(np.float32), rng.normal(size=64).astype(np.float32)
    (result,) = compiled(g, place, w=w, bias=bias).run({"x": a, "r": s})
    wanted = np.tanh((product(a, w) + bias).astype(np.float64)) * s
    assert np.abs(result - wanted).max() <= 1e-6 * np.abs(wanted).max()


@PLACES
@pytest.mark.parametrize("kind", ["layer_norm", "rms_norm"])
def test_columns_of_a_norm_that_reach_far_leave_steps_to_the_others(place: str, kind: str) -> None:
    """Against float64: far better than rounding the norm as it is, for products that share it too."""
    k, n = 96, 64
    g = Graph("far")
    gamma, beta = g.param("gamma", (k,)), g.param("beta", (k,))
    y = g.one(kind, g.input("x", ("m", k)), gamma, beta, eps=1e-5)
    g.set_outputs([y @ g.param("a", (k, n)), y @ g.param("b", (k, n)), y])
    x = rng.normal(size=(20, k)).astype(np.float32)
    params = {name: rng.normal(size=(k, n)).astype(np.float32) for name in "ab"}
    params |= {name: rng.normal(size=k).astype(np.float32) for name in ("gamma", "beta")}
    params["gamma"][7], params["beta"][9], params["gamma"][11], params["beta"][11] = 60, -40, 0, 0
    for name in "ab":
        params[name][[7, 9]] *= 0.01  # as in trained models, where such columns would drown the others
    *products, normed = compiled(g, place, **params).run({"x": x})
    wide = x.astype(np.float64)
    wide = wide - wide.mean(-1, keepdims=True) if kind == "layer_norm" else wide
    exact = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + 1e-5) * params["gamma"] + params["beta"]
    assert relative(normed, exact) < 1e-6
    for name, have in zip("ab", products, strict=True):
        wanted = exact @ params[name]
        plain = product(normed, params[name])
        assert np.isfinite(have).all()
        assert relative(have, wanted) < 0.02 and relative(have, wanted) < relative(plain, wanted) / 3


def test_devices_agree_on_an_encoder() -> None:
    sizes = Bert(96, 3, 128, layers=2)
    params, inputs = weights(sizes), bert_inputs(sizes, 2, 7)
    results = [compiled(bert_graph(sizes), place, **params).run(inputs)[0] for place in ("reference", TARGETS[0])]
    (exact,) = bert_numpy(sizes, params, **inputs)
    # An activation that lies between two integers may go to either by its last bit.
    assert relative(results[0], results[1]) < 0.005
    for result in results:
        assert 1e-4 < relative(result, exact) < 0.05


# -- which products --------------------------------------------------------------------------------------------------
def integer_products(graph: Graph, profile: CompileProfile = INT8) -> int:
    """Matmuls of bytes, whatever the passes have made of them."""
    nodes = optimise(graph, AVX512, profile).main.nodes
    return sum(
        len(node.operands) > 1 and node.operands[0] is not None and node.operands[0].dtype is U8 for node in nodes
    )


def test_an_input_of_several_products_is_quantised_once() -> None:
    g = Graph("shared")
    x = g.input("x", ("n", 64)).layer_norm()
    g.set_outputs([x @ g.param(name, (64, 64)) + g.param(f"{name}.bias", (64,)) for name in ("q", "k", "v")])
    names = ops(optimise(g, AVX512, INT8).main)
    assert names.count("quantised_norm") == 1 and "quantise_rows" not in names
    assert integer_products(g) == 1, "products of one left side are one"
    plain = CompileProfile(Fusion(skip=True), precision=Precision("int8"))
    assert ops(optimise(g, AVX512, plain).main).count("quantise_rows") == 1 and integer_products(g, plain) == 3


def test_weights_are_bytes() -> None:
    g = Graph("bytes")
    g.set_outputs([g.input("x", ("n", 128)) @ g.param("w", (128, 256), "f16").astype("f32")])
    f = rlx.compile(g, profile=INT8)
    held = [f.plan.main.buffers[name].type for name in f.plan.main.weights]
    assert sum(t.elements * t.dtype.size for t in held) <= 128 * 256 + 3 * 4 * 256, "scales and sums are vectors"


@pytest.mark.parametrize(("k", "n"), [(63, 128), (128, 63)])
def test_small_weights_stay_floats(k: int, n: int) -> None:
    g = Graph("small")
    g.set_outputs([g.input("x", ("m", k)) @ g.param("w", (k, n))])
    assert integer_products(g) == 0


def test_products_without_a_weight_stay_floats() -> None:
    g = Graph("free")
    x, y, w = g.input("x", ("n", 64)), g.input("y", (64, 64)), g.param("w", (64, 64))
    g.set_outputs([x @ y, y @ (w @ w), g.input("batch", (2, 64, 64)) @ g.param("several", (2, 64, 64))])
    assert integer_products(g) == 1, "the product of weights is a weight"


def test_f64_and_packed_weights_stay_as_they_are() -> None:
    g = Graph("others")
    x = g.input("x", ("n", 64))
    packed = g.param("packed", (64, 64), "q8_0").dequantise().mT
    g.set_outputs([x.astype("f64") @ g.param("w", (64, 64), "f64"), x @ packed])
    assert integer_products(g) == 0


def test_gates_are_integer_products_too() -> None:
    g = Graph("gate")
    x = g.input("x", ("n", 64))
    g.set_outputs([(x @ g.param("gate", (64, 96))).silu() * (x @ g.param("up", (64, 96)))])
    assert integer_products(g) == 1
    w = {name: rng.normal(size=(64, 96)).astype(np.float32) for name in ("gate", "up")}
    a = rng.normal(size=(5, 64)).astype(np.float32)
    (y,) = compiled(g, TARGETS[0], **w).run({"x": a})
    gate, up = (product(a, w[name]).astype(np.float64) for name in ("gate", "up"))
    wanted = gate / (1 + np.exp(-gate)) * up
    assert np.abs(y - wanted).max() <= 2e-6 * np.abs(wanted).max()


@PLACES
def test_loops_stay_f32(place: str) -> None:
    body = Graph("body")
    carry, w = body.input("carry", (3, 64)), body.input("w", (64, 64))
    body.set_outputs([(carry @ w).tanh()])
    g = Graph("loop")
    g.set_outputs([g.apply("scan", g.input("x", (3, 64)), g.param("w", (64, 64)), body=body, length=2, carries=1,
                           broadcasts=1)])  # fmt: skip
    x, array = rng.normal(size=(3, 64)).astype(np.float32), rng.normal(size=(64, 64)).astype(np.float32) / 8
    (y,) = compiled(g, place, w=array).run({"x": x})
    wanted = np.tanh(np.tanh(x.astype(np.float64) @ array) @ array)
    assert np.abs(y - wanted).max() < 1e-5


def test_an_encoder_layer_has_no_other_launches() -> None:
    """Three norms make integers themselves; attention and GELU need a pass over their rows."""
    f = rlx.compile(bert_graph(Bert(96, 3, 128)), profile=INT8)
    names = [launch.kernel.symbol.split(".")[0] for launch in f.plan.main.launches]
    assert names.count("quantise_rows") == 3 and names.count("quantised_layer_norm") == 1, names


def test_a_profile_says_what_does_not_go_together() -> None:
    with pytest.raises(CapabilityError, match=r"precision\.mixed is 'auto', precision\.compute is 'int8'"):
        Precision("int8", "auto")
    assert CompileProfile.from_toml(INT8.to_toml()) == INT8

"""Corners of the public surface: checked shapes, levels, symbols by number, sources of weights, clear errors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx import Graph, GraphModule, ModelFlow, ModelVariant, sym
from rlx.errors import BindError, GraphError, RlxError, ShapeError
from rlx.flow.stages import GeGlu, LmHead, SwiGlu
from rlx.types import TensorType

Array = np.ndarray[Any, Any]


def draws(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


# -- shapes that are given are checked -------------------------------------------------------------------------------
def test_the_shapes_of_a_linear_pair_are_checked() -> None:
    m = GraphModule.hir("m")
    x, a, b = m.input("x", (3, 4)), m.param("a", (4, 5)), m.param("b", (4, 6))
    for fits in ((3, 5), ((3, 5), (3, 6)), [[3, 5], [3, 6]]):
        assert [v.shape for v in m.shared_linear_pair(x, a, b, out_shape=fits)] == [(3, 5), (3, 6)]
    for wrong in ((3, 6), ((3, 5), (3, 5)), ((3, 5),)):
        with pytest.raises(ShapeError, match=r"shared_linear_pair: .*out_shape"):
            m.shared_linear_pair(x, a, b, out_shape=wrong)


def test_the_shape_of_a_carried_delta_net_is_checked() -> None:
    m = GraphModule.hir("m")
    heads, gates, state = m.input("h", (1, 3, 2, 4)), m.input("g", (1, 3, 2)), m.input("s", (1, 2, 4, 4))
    operands = (heads, heads, heads, gates, gates, state)
    out, _ = m.gated_delta_net_carry(*operands, state_size=4, out_shape=(1, 3, 2, 4))
    assert out.shape == (1, 3, 2, 4)
    with pytest.raises(ShapeError, match=r"out_shape is \[7\]"):
        m.gated_delta_net_carry(*operands, state_size=4, out_shape=(7,))


def test_the_shapes_of_scans_backwards_are_checked() -> None:
    forward = Graph("f")
    forward.set_outputs([forward.input("c", (2,)) * forward.input("x", (2,))])
    back = Graph("b")
    c, x, d = (back.input(name, (2,)) for name in ("c", "x", "d_output"))
    back.set_outputs([d * x, d * c])
    g = Graph("g")
    init, rows, few = g.input("init", (2,)), g.input("rows", (4, 2)), g.input("few", (2, 2))
    plain: tuple[Any, ...] = (init, rows, init, [rows], back, 4)
    arguments: tuple[Any, ...] = (init, few, init, [rows], back, 4)
    makers: list[tuple[Any, tuple[int, ...]]] = [
        (lambda **k: g.scan_backward(*plain, save_trajectory=False, **k), (2,)),
        (lambda **k: g.scan_backward_xs(*plain, 0, save_trajectory=False, **k), (4, 2)),
        (lambda **k: g.scan_backward_with_checkpoints(*arguments, 2, forward, save_trajectory=False, **k), (2,)),
        (
            lambda **k: g.scan_backward_xs_with_checkpoints(*arguments, 0, 2, forward, save_trajectory=False, **k),
            (4, 2),
        ),
    ]
    for make, shape in makers:
        assert make().shape == make(out_shape=shape).shape == shape
        with pytest.raises(ShapeError, match=r"scan_backward.*: the result is f32\[.*\], out_shape is \[7\]"):
            make(out_shape=(7,))


# -- levels ----------------------------------------------------------------------------------------------------------
def test_a_module_at_hir_builds_every_op() -> None:
    m = GraphModule.hir("m")
    x = m.input("x", TensorType((2, 3), rlx.dtype("f32")))
    body = Graph("body")
    body.set_outputs([body.input("c", (2, 3)) * 0.5])
    square = Graph("square")
    y = square.input("y", (2, 3))
    square.set_outputs([y * y])
    m.finish_hir((m.softmax(x), m.scan(x, body, 3), m.custom_fn([x], square), m.reshape(x, (3, 2))))
    f = rlx.compile(m)
    inputs = draws(2, 3)
    softmax, scanned, squared, reshaped = f.run({"x": inputs})
    e = np.exp(inputs.astype(np.float64))
    np.testing.assert_allclose(softmax, e / e.sum(-1, keepdims=True), rtol=1e-6)
    np.testing.assert_allclose(scanned, inputs / 8, rtol=1e-6)
    np.testing.assert_allclose(squared, inputs * inputs, rtol=1e-6)
    np.testing.assert_array_equal(reshaped, inputs.reshape(3, 2))


def test_outputs_are_set_at_any_level_that_builds() -> None:
    for m in (GraphModule.hir("m"), GraphModule.mir("m")):
        x = m.input("x", (2,))
        assert m.set_hir_outputs([x]) is m and m.finish_hir(x) is m
        assert m.as_hir_mut() is m.as_hir()
    with pytest.raises(GraphError, match="planned already"):
        m.plan().finish_hir(x)


# -- custom functions ------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_a_custom_function_may_have_no_inputs(device: str) -> None:
    body = Graph("body")
    body.set_outputs([body.constant([1.0, 2.0]) * 3.0])
    g = Graph("g")
    x = g.input("x", (2,))
    g.set_outputs([g.custom_fn([], body) + x])
    (actual,) = rlx.compile(g, device).run({"x": np.float32([10, 20])})
    np.testing.assert_array_equal(actual, [13, 26])
    pulled = rlx.transforms.grad(_total(g), ["x"])
    np.testing.assert_array_equal(rlx.compile(pulled, device).run({"x": np.float32([1, 1])})[-1], [1, 1])


def _total(g: Graph) -> Graph:
    copy = g.copy()
    return copy.set_outputs([copy.outputs[0].sum(axis=0)])


@pytest.mark.parametrize("device", ["cpu", "reference"])
def test_the_source_of_several_outputs_is_a_value(device: str) -> None:
    """They lie end to end, each at its offset, in a type that holds them all."""
    body = Graph("body")
    x = body.input("x", (2, 3))
    body.set_outputs([x * 2.0, x.argmax(axis=-1), x.sum(axis=0)])
    g = Graph("g")
    handle = g.custom_fn_multi([g.input("x", (2, 3))], body)
    g.set_outputs([handle.source, g.neg(handle.source)])
    inputs = draws(2, 3)
    flat, negative = rlx.compile(g, device).run({"x": inputs})
    wanted = np.concatenate([(inputs * 2).ravel(), inputs.argmax(-1), inputs.sum(0)])
    np.testing.assert_allclose(flat, wanted, rtol=1e-6)
    np.testing.assert_allclose(negative, -wanted, rtol=1e-6)
    assert list(handle.offsets) == [0, 6, 8]


# -- symbols by number -----------------------------------------------------------------------------------------------
def test_symbols_have_numbers() -> None:
    variant = ModelVariant.prefill(2, 8).with_extra(7, 64)
    assert variant.dim_binding().get(7) == variant.dim_binding().get("s7") == 64
    assert variant.dim_binding().get(0) == 2 and variant.dim_binding().get(1) == 8
    assert variant.dim_binding().get(2) == variant.dim_binding().get(sym.ROWS) == 16
    assert variant.dim_binding().get(3) is None and variant.dim_binding().get(9) is None
    assert variant.cache_key() != ModelVariant.prefill(2, 8).with_extra(8, 64).cache_key()
    assert ModelVariant.prefill(2, 8).with_extra(1, 9).dim_binding().get(sym.SEQ) == 9
    for wrong in (2, sym.ROWS):
        with pytest.raises(GraphError, match=r"batch.*seq is an expression, not a symbol"):
            variant.with_extra(wrong, 4)
    for wrong in (-1, 1.5, "a b", True):
        with pytest.raises(GraphError, match="not a symbol"):
            variant.with_extra(wrong, 4)  # type: ignore[arg-type]


# -- what flows take -------------------------------------------------------------------------------------------------
class Taking:
    """A source that can only give, and gives each weight once."""

    def __init__(self, as_pair: bool) -> None:
        self.arrays = {"w": draws(4, 6), "b": draws(4, seed=1)}
        self.as_pair = as_pair

    def take(self, key: str, transpose: bool) -> Any:
        array = self.arrays.pop(key)
        array = array.T if transpose else array
        return (array.ravel().tolist(), array.shape) if self.as_pair else array


@pytest.mark.parametrize("as_pair", [False, True])
def test_weights_may_come_from_something_that_only_gives(as_pair: bool) -> None:
    source, x = Taking(as_pair), draws(2, 6, seed=2)
    wanted = x.astype(np.float64) @ source.arrays["w"].T + source.arrays["b"]
    flow = ModelFlow("f").input("x", (2, 6)).linear("w", bias_key="b")
    built = flow.linear("w", transpose=False).build(source)
    np.testing.assert_allclose(built.compile().run({"x": x})[0], wanted @ Taking(False).arrays["w"], rtol=1e-4)
    with pytest.raises(BindError, match="weight 'v' is not among the weights"):
        flow.linear("v").build(Taking(as_pair))
    with pytest.raises(GraphError, match="weights: a int is not a weight source"):
        flow.build(3)  # type: ignore[arg-type]


def test_a_skip_is_set_replaced_and_taken_away() -> None:
    state = rlx.FlowState()
    g = Graph("g", level="hir")
    a, b, c = (g.input(name, (size,)) for name, size in (("a", 2), ("b", 3), ("c", 4)))
    state.residual_skip = a
    assert state.residual_skip is a and state.residual_shape == (2,)
    state.residual_skip = b
    assert state.residual_skip is b and len(state.residuals) == 1
    state.residuals.append(rlx.FlowValue.of(c))
    state.residual_skip = None
    assert state.residual_skip is b and state.residual_shape == (3,)
    state.residual_skip = None
    assert state.residual_skip is None and state.residual_shape is None
    state.residual_skip = None
    with pytest.raises(GraphError, match="residual_skip: 3 is not a value"):
        state.residual_skip = 3  # type: ignore[assignment]


def test_an_input_is_declared_by_a_type() -> None:
    half = TensorType(("n", 4), "f16")  # type: ignore[arg-type]
    assert half.dtype is rlx.dtype("f16")
    assert Graph("g").input("x", half).type == GraphModule.hir("m").input("x", half).type
    flow = ModelFlow("f").input("x", half).custom(lambda e, v: v * 1.0)
    assert str(flow.build().module.inputs[0].types[0]) == "f16[n, 4]"


# -- errors ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [lambda: Graph("g"), lambda: GraphModule.hir("m"), lambda: ModelFlow("f")])
def test_a_number_is_not_a_shape(make: Any) -> None:
    with pytest.raises(ShapeError, match="shape: 8 is not a shape") as caught:
        make().input("x", 8)
    assert "(8,)" in (caught.value.hint or "")


def test_a_packed_weight_wants_its_bytes() -> None:
    g = Graph("g")
    g.set_outputs([g.input("x", (2, 256)) @ g.param("w", (8, 256), "q4_k").dequantise().mT])
    with pytest.raises(BindError, match="param 'w': element type is f32, expected q4_k") as caught:
        rlx.compile(g).set_param("w", np.zeros((8, 256), np.float32))
    assert "144 for each 256" in (caught.value.hint or "") and "void" not in str(caught.value.notes)


def test_errors_of_attention_and_rope_name_what_was_called() -> None:
    m = GraphModule.hir("m")
    x, table = m.input("x", (1, 2, 8)), m.input("t", (9, 2))
    for call, name in (
        (lambda: m.attention(x, x, x, num_heads=3, head_dim=4), "attention"),
        (lambda: m.attention(x, x, x, num_heads=2, head_dim=4, mask="causal"), "attention"),
        (lambda: m.attention(x, x, x), "attention"),
        (lambda: m.rope(x, table, table, head_dim=5), "rope"),
        (lambda: m.rope(x, table, table), "rope"),
    ):
        with pytest.raises(GraphError, match=f"^{name}: ") as caught:
            call()
        assert "_block" not in "\n".join([str(caught.value), *caught.value.notes])


def test_weights_that_are_in_no_file_are_not_looked_for_in_one() -> None:
    flow = ModelFlow("f").input("x", (2, 6)).linear("w")
    with pytest.raises(BindError, match="weight 'w' is not among the weights") as caught:
        flow.build()
    assert "build(weights)" in (caught.value.hint or "") and "file" not in str(caught.value)


def test_a_feed_forward_is_named_as_its_stage_wants_it() -> None:
    assert SwiGlu.hf_mlp("model.layers.0.mlp").up_key == "model.layers.0.mlp.up_proj.weight"
    assert GeGlu.hf_mlp("model.layers.0").up_key == "model.layers.0.mlp.up_proj.weight"
    with pytest.raises(GraphError, match=r"SwiGlu.hf_mlp: 'model.layers.0' is a layer") as caught:
        SwiGlu.hf_mlp("model.layers.0")
    assert "hf_mlp('model.layers.0.mlp')" in (caught.value.hint or "")
    for layer in ("encoder.block.11", "h.3", "0"):
        with pytest.raises(GraphError, match=r"is a layer, expected its feed-forward"):
            SwiGlu.hf_mlp(layer)
    for inner in ("model.layers.0.mlp.experts.3", "model.layers.0.mlp.shared_expert", "l"):
        assert SwiGlu.hf_mlp(inner).gate_key == f"{inner}.gate_proj.weight"
    weights = {f"l.mlp.{name}_proj.weight": draws(4, 4) for name in ("gate", "up", "down")}
    with pytest.raises(BindError, match=r"weight 'l.gate_proj.weight' is not among the weights") as missing:
        ModelFlow("f").input("x", (2, 4)).swiglu_hf_mlp("l").build(weights)
    assert "did you mean 'l.mlp.gate_proj.weight'" in (missing.value.hint or "")
    with pytest.raises(GraphError, match=r"GeGlu.hf_mlp: 'l.mlp' is a feed-forward") as caught:
        GeGlu.hf_mlp("l.mlp")
    assert "hf_mlp('l')" in (caught.value.hint or "")


@pytest.mark.parametrize(("vocab", "hidden"), [(10, 6), (9, 5)])
def test_a_tied_head_checks_its_sizes(vocab: int, hidden: int) -> None:
    flow = ModelFlow("f").input("t", (1, 3), "i32").token_embed("e")
    table = {"e": draws(9, 6)}
    head = LmHead(9, 6, tie_word_embeddings=True)
    assert flow.stage(head).build(table).primary_shape == (1, 3, 9)
    with pytest.raises(ShapeError, match=rf"token table is \[9, 6\], expected \[{vocab}, {hidden}\]"):
        flow.stage(LmHead(vocab, hidden, tie_word_embeddings=True)).build(table)
    with pytest.raises(RlxError, match=rf"\[9, 6\], expected \[{vocab}, {hidden}\]"):
        flow.stage(LmHead(vocab, hidden, "e2")).build(table | {"e2": draws(9, 6)})

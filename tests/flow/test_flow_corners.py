"""Flows as newcomers write them: what weights begin with, what training changes, names, origins, captures, variants."""

from __future__ import annotations

import functools
import inspect
import pickle
import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import rlx
from rlx import ModelExecutionConfig, ModelFlow
from rlx.errors import BindError, GraphError, RequestError, ShapeError
from rlx.flow.stage_values import stage_values
from rlx.flow.stages import Custom, LmHead, Named, RmsNorm, Sequence
from rlx.flow.weights import MapWeights
from rlx.hir.lower import lower

Array = np.ndarray[Any, Any]
KEY = rlx.random.key(0)
X = np.random.default_rng(0).standard_normal((2, 6)).astype(np.float32)


def flow() -> ModelFlow:
    return ModelFlow("f").input("x", (2, 6))


def line() -> int:
    """The line of the caller."""
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


# -- init ------------------------------------------------------------------------------------------------------------
def test_a_scalar_weight_is_a_scalar() -> None:
    gated = flow().custom(lambda e, v: v * e.load_param("alpha", shape=()))
    weights = gated.init(KEY)
    assert weights["alpha"].shape == ()
    np.testing.assert_allclose(gated.build(weights).compile().run({"x": X})[0], X * weights["alpha"], rtol=1e-6)


def test_only_scales_of_norms_begin_as_one() -> None:
    def ramp(key: Any, shape: Any) -> Array:
        return np.arange(shape[0], dtype=np.float32)

    def gates(emit: Any, value: Any) -> Any:
        value = value * emit.load_param("gate", shape=(6,)) + emit.load_param("shift.bias", shape=(6,))
        return value * emit.load_param("half", shape=(6,), init=0.5) + emit.load_param("by", shape=(6,), init=ramp)

    model = flow().rms_norm("n", 1e-5).layer_norm("l", 1e-5).gemma_rms_norm("g", 1e-5).layer_scale("s").custom(gates)
    weights = model.init(KEY)
    assert (weights["n"] == 1).all() and (weights["l.weight"] == 1).all() and (weights["s"] == 1).all()
    assert (weights["l.bias"] == 0).all() and (weights["g"] == 0).all() and (weights["shift.bias"] == 0).all()
    assert 0 < np.abs(weights["gate"]).max() < 0.1 and np.unique(weights["gate"]).size == 6
    assert (weights["half"] == 0.5).all() and weights["by"].tolist() == [0, 1, 2, 3, 4, 5]
    other = model.initialised({"gate": 2.0, "half": lambda key, shape: np.zeros(shape)}).init(KEY)
    assert (other["gate"] == 2).all() and (other["half"] == 0).all(), "rules come before what stages say"
    with pytest.raises(GraphError, match="init: 'one' is neither a number nor a function"):
        model.initialised({"gate": "one"})  # type: ignore[dict-item]


def test_stages_that_know_their_sizes_need_no_shapes() -> None:
    sized = flow().swiglu("g", "u", "d", intermediate_size=10).geglu("g2", "u2", "d2", intermediate_size=7)
    sized = sized.swiglu_hf_mlp("m", intermediate_size=5).geglu_hf_mlp("l", intermediate_size=4)
    weights = sized.linear("w", out=3, bias_key="b").linear("v", transpose=False, out=2).init(KEY)
    assert {name: array.shape for name, array in weights.items()} == {
        "g": (10, 6), "u": (10, 6), "d": (6, 10), "g2": (7, 6), "u2": (7, 6), "d2": (6, 7),
        "m.gate_proj.weight": (5, 6), "m.up_proj.weight": (5, 6), "m.down_proj.weight": (6, 5),
        "l.mlp.gate_proj.weight": (4, 6), "l.mlp.up_proj.weight": (4, 6), "l.mlp.down_proj.weight": (6, 4),
        "w": (3, 6), "b": (3,), "v": (3, 2),
    }  # fmt: skip
    with pytest.raises(ShapeError, match="'w'"):
        flow().linear("w", out=4).build({"w": np.zeros((3, 6), np.float32)})


def test_shapes_of_weights_that_nobody_asks_for_are_an_error() -> None:
    linear = flow().linear("weight")
    assert linear.init(KEY, shapes={"weight": (3, 6)})["weight"].shape == (3, 6)
    with pytest.raises(BindError, match="init: shapes has 'wieght', but no stage asks for it") as caught:
        linear.init(KEY, shapes={"weight": (3, 6), "wieght": (3, 6)})
    assert "'weight'" in (caught.value.hint or "")


def test_unused_weights_are_known() -> None:
    weights = {"w": np.ones((3, 6), np.float32), "v": np.ones(3, np.float32)}
    assert flow().linear("w").build(weights).unused_weights == ["v"]
    assert flow().linear("w", bias_key="v").build(weights, strict=True).unused_weights == []
    with pytest.raises(BindError, match="flow 'f': 1 weight is not used: 'v'"):
        flow().linear("w").build(weights, strict=True)


class OfAFile(MapWeights):
    """Weights of a file, which are compared with its configuration when it is opened."""

    file = SimpleNamespace(path="f.safetensors")


def test_unused_weights_are_a_warning_that_names_them(caplog: pytest.LogCaptureFixture) -> None:
    weights = {"w": np.ones((3, 6), np.float32), "wieght": np.ones(3, np.float32), "x" * 500: np.ones(3, np.float32)}
    with caplog.at_level("WARNING", logger="rlx"):
        flow().linear("w").build(weights)
    (record,) = caplog.records
    message = record.getMessage()
    assert record.name == "rlx.flow" and message.startswith("flow 'f': 2 weights are not used: 'wieght', 'xxx")
    assert "strict=False" in message and len(message) < 500
    caplog.clear()
    with caplog.at_level("WARNING", logger="rlx"):
        flow().linear("w").build_with(OfAFile({"w": weights["w"], "unused": weights["w"]}), {"v": weights["w"]})
    assert [r.getMessage().partition(";")[0] for r in caplog.records] == ["flow 'f': 1 weight is not used: 'v'"]
    caplog.clear()
    with caplog.at_level("WARNING", logger="rlx"):
        flow().linear("w").build(weights, strict=False)
        flow().linear("w").build({"w": weights["w"]})
        flow().linear("w").init(KEY, shapes={"w": (3, 6)})
    assert not caplog.records


# -- names -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "make",
    [
        lambda f: f.named_layer("a", RmsNorm("n", 1e-5)).named_layer("a", RmsNorm("n", 1e-5)),
        lambda f: f.custom_named("a", lambda e, v: v).custom_named("a", lambda e, v: v),
        lambda f: f.layer("a", lambda s: s.rms_norm("n", 1e-5)).custom_named("a", lambda e, v: v),
        lambda f: f.repeat_layers(1, lambda i: RmsNorm("n", 1e-5), "a").repeat_layers(2, lambda i: Sequence(()), "a"),
    ],
)
def test_two_layers_of_one_name_are_refused(make: Any) -> None:
    with pytest.raises(GraphError, match=r"flow: two stages are called 'a(\.0)?'"):
        make(flow()).build({"n": np.ones(6, np.float32)})


def test_names_repeat_in_other_layers_and_without_being_given() -> None:
    named = flow().repeat_layers(2, lambda i: Sequence([Named("inner", Custom(lambda e, v: v + 1.0, "inner"))]))
    doubled = named.rms_norm("n", 1e-5).rms_norm("n", 1e-5).build({"n": np.ones(6, np.float32)}, ["layers.*.inner"])
    assert doubled.output_names == ["output", "layers.0.inner", "layers.1.inner"]


# -- captures --------------------------------------------------------------------------------------------------------
def test_a_star_stops_at_dots_and_two_do_not() -> None:
    def layer(i: int) -> Sequence:
        return Sequence([Custom(lambda e, v: v * 2.0, "a"), Custom(lambda e, v: v + 1.0, "b")])

    deep = flow().repeat_layers(2, layer)

    def captured(pattern: str) -> list[str]:
        names = sorted(deep.build(capture=[pattern]).output_names[1:])
        assert sorted(deep.build(capture=pattern).output_names[1:]) == names  # one pattern may be a plain string
        return names

    layers = ["layers.0", "layers.1"]
    assert captured("layers.*") == layers and captured("*.1") == layers[1:]
    parts = ["layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"]
    assert captured("layers.**") == sorted([*layers, *parts])
    assert captured("**.b") == ["layers.0.b", "layers.1.b"] and captured("layers.[01].?") == parts
    assert captured("layers.*.out") == ["layers.0.out", "layers.1.out"]
    with pytest.raises(RequestError, match=r"no stage of 'f' matches '\*\.a\.b'"):
        captured("*.a.b")


def test_a_captured_stage_is_what_it_gave_whatever_it_built_besides() -> None:
    side = rlx.SideOutputs()

    def doubled(emit: Any, value: Any) -> Any:
        twice = value * 2.0
        side.push(twice + 1.0, "aside")
        return twice

    taps = Sequence([Custom(doubled, "a"), Custom(lambda e, v: side.push(v - 5.0, "tap"), "tap")])
    tapped = flow().repeat_layers(1, lambda i: taps).logit_softcap(9.0).with_extra_outputs(side)
    names = ["output", "aside", "tap", "layers.0", "layers.0.a"]
    built = tapped.build(capture=["layers.0", "layers.0.a"])
    assert built.output_names == names
    for model in (built, built.with_extra_outputs(rlx.SideOutputs())):
        outputs = dict(zip(names, model.compile("reference").run({"x": X}), strict=True))
        np.testing.assert_array_equal(outputs["layers.0"], 2 * X)
        np.testing.assert_array_equal(outputs["layers.0.a"], 2 * X)
        np.testing.assert_array_equal(outputs["tap"], 2 * X - 5)
        assert stage_values(model.module)["layers.0"].graph is model.module


def test_a_captured_stage_does_not_take_the_place_of_an_output() -> None:
    weights = {"n": np.ones(6, np.float32), "w": np.ones((3, 6), np.float32)}
    plain = flow().rms_norm("n", 1e-5).linear("w")
    with pytest.raises(RequestError, match="capture: 'norm' is a stage of 'f' and the name of its main output"):
        plain.output("norm").build(weights, ["norm"])
    assert plain.output("norm").build(weights).primary_shape == (2, 3)
    built = plain.output("out").build(weights, ["norm"])
    assert built.output_names == ["out", "norm"] and [v.shape for v in built.module.outputs] == [(2, 3), (2, 6)]
    named = (
        flow().rms_norm("n", 1e-5).custom(lambda e, v: e.set_named("norm", v * 2.0)).linear("w").outputs("y", "norm")
    )
    _, captured = named.build(weights, ["norm"]).compile("reference").run({"x": X})
    wanted = X / np.sqrt((X.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(captured, 2 * wanted, rtol=1e-5)


# -- training --------------------------------------------------------------------------------------------------------
def test_tables_of_a_flow_are_not_trained_unless_they_are_named() -> None:
    def loss(emit: Any, value: Any) -> Any:
        return (value * emit.synth_param("table", np.ones(6))).sum(axis=0).sum(axis=0)

    module = flow().linear("w").custom(loss).build({"w": np.eye(6, dtype=np.float32)}).module
    arrays = {"w": np.eye(6, dtype=np.float32), "table": np.ones(6, np.float32)}
    for wrt, trained in ((None, {"w"}), (["table"], {"table"}), (["w", "table"], {"w", "table"})):
        step = rlx.train.step(module, rlx.train.sgd(0.5), wrt, device="reference")
        step.set_params(arrays)
        step.run({"x": X})
        assert set(step.params) == trained
    again = rlx.train.step(module.copy(), rlx.train.sgd(0.5), device="reference")
    assert set(again.params) == {"w"}, "copies know it too"


def test_vmap_has_an_axis_of_its_own() -> None:
    """Gradients of each example by itself: the batch of the flow is 1 in all of them."""
    g = rlx.Graph("g")
    x, w = g.input("x", ("batch", 3)), g.param("w", (3,))
    g.set_outputs([(x * w * w).sum(axis=1).sum(axis=0)])
    each = rlx.transforms.vmap(rlx.transforms.grad(g, ["w"]))
    assert str(each.named("x").type) == "f32[batch_1, batch, 3]"
    f = rlx.compile(each, "reference")
    f.set_param("w", np.float32([1, 2, 3]))
    rows = np.random.default_rng(1).standard_normal((8, 1, 3)).astype(np.float32)
    np.testing.assert_allclose(f.run({"x": rows})[-1], 2 * rows[:, 0] * [1, 2, 3], rtol=1e-5)
    plain = rlx.Graph("p")
    plain.set_outputs([plain.input("x", (3,)) * 2.0])
    assert str(rlx.transforms.vmap(plain).named("x").type) == "f32[batch, 3]"
    twice = rlx.transforms.vmap(rlx.transforms.vmap(plain))
    assert str(twice.named("x").type) == "f32[batch_1, batch, 3]"


def test_tables_of_a_flow_stay_fixed_in_text_transforms_and_exports(tmp_path: Any) -> None:
    def loss(emit: Any, value: Any) -> Any:
        return (value * emit.synth_param("table", np.ones(6))).sum(axis=0).sum(axis=0)

    arrays = {"w": np.eye(6, dtype=np.float32), "table": np.ones(6, np.float32)}
    module = flow().linear("w").custom(loss).build({"w": arrays["w"]}).module
    text = module.text()
    assert text.startswith('graph @f hir fixed("table") {')
    parsed = rlx.Graph.parse(text)
    assert parsed.fixed == {"table"} and parsed == module and parsed.text() == text
    assert pickle.loads(pickle.dumps(module)).fixed == {"table"}
    compiled = rlx.compile(module)
    compiled.set_params(arrays)
    exported: Any = rlx.load_exported(compiled.export(tmp_path / "f.rlxp"))
    assert rlx.transforms.vmap(module).fixed == {"table"}
    for graph in (parsed, exported.graph, rlx.transforms.value_and_grad(module)):
        step = rlx.train.step(graph, rlx.train.sgd(0.5), has_aux=True, device="reference")
        assert set(step.params) == {"w"}
    tables = flow().custom(loss).build().module  # no param is left to be trained, so inputs are what is meant
    assert [str(v.type) for v in rlx.transforms.grad(tables).outputs] == ["f32[2, 6]"]


# -- origins ---------------------------------------------------------------------------------------------------------
def test_nodes_come_from_the_line_that_added_their_stage() -> None:
    at = line() + 1
    first = flow().rms_norm("n", 1e-5)
    second = first.layer("block", lambda stack: stack.rms_norm("n", 1e-5).linear("w"))
    third = second.custom(lambda e, v: v * 2.0)
    module = third.build({"n": np.ones(6, np.float32), "w": np.eye(6, dtype=np.float32)}).module
    nodes = [n for n in lower(module).nodes if n.op in ("rms_norm", "matmul", "mul")]
    assert [(n.op, n.origin.stage, n.origin.line) for n in nodes] == [
        ("rms_norm", "norm", at), ("rms_norm", "block.norm", at + 1), ("matmul", "block.w", at + 1), ("mul", "", at + 2)
    ]  # fmt: skip
    assert {n.origin.file for n in nodes} == {__file__}


def test_an_edit_leaves_stages_where_they_were_added() -> None:
    weights = {"n": np.ones(6, np.float32), "w": np.eye(6, dtype=np.float32)}
    at = line() + 1
    first = flow().layer("block", lambda stack: stack.rms_norm("n", 1e-5).linear("w"))
    second = first.repeat_layers(2, lambda i: RmsNorm("n", 1e-5)).rms_norm("n", 1e-5)
    third = second.edit("block.norm", lambda s: RmsNorm("n", 1e-4)).edit("layers.1", lambda s: s)
    fourth = third.edit("norm", lambda s: RmsNorm("n", 1e-3))
    nodes = [n for n in fourth.build(weights).module.nodes if n.op in ("norm", "linear_stored")]
    assert [(n.origin.stage, n.origin.line) for n in nodes] == [
        ("block.norm", at), ("block.w", at), ("layers.0", at + 1), ("layers.1", at + 1), ("norm", at + 3)
    ]  # fmt: skip


def test_errors_name_the_line_that_added_the_stage() -> None:
    at = line() + 1
    wrong = flow().layer_scale("s").linear("w")
    with pytest.raises(GraphError) as caught:
        wrong.build({"s": np.ones(6, np.float32), "w": np.ones((3, 4), np.float32)})
    assert any(f"test_flow_corners.py:{at}" in note for note in caught.value.notes), caught.value.notes


def test_the_standard_library_and_numpy_are_not_users() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (3,))

    class Lazy:
        value = functools.cached_property(functools.partial(lambda self: g.add(x, x)))

    assert Lazy().value.node.origin.file == __file__
    at = line() + 1
    total = functools.reduce(g.add, [x, x])
    assert (total.node.origin.file, total.node.origin.line) == (__file__, at)
    at = line() + 1
    applied = np.vectorize(functools.partial(g.mul, x), otypes=[object])([1.0, 2.0])
    assert {(v.node.origin.file, v.node.origin.line) for v in applied} == {(__file__, at)}


# -- errors of an author's own code ----------------------------------------------------------------------------------
def test_plain_errors_say_which_stage_they_are_of() -> None:
    named = flow().layer("block", lambda stack: stack.custom_named("mine", lambda e, v: e.hir.softmax(v)))
    with pytest.raises(AttributeError) as caught:
        named.build()
    assert caught.value.__notes__ == ["  in stage: block.mine", "  hint: hir is a method: hir().softmax"]
    with pytest.raises(ValueError, match="mine") as other:
        flow().custom(lambda e, v: (_ for _ in ()).throw(ValueError("mine"))).build()
    assert other.value.__notes__ == ["  in stage: Custom"]
    with pytest.raises(GraphError, match=r"stage Custom: its function is called as f\(emit, value\)"):
        flow().custom(lambda v: v)  # type: ignore[arg-type, misc]


def test_functions_of_numpy_take_what_flows() -> None:
    custom = flow().custom(lambda e, v: np.maximum(np.tanh(v), np.float32(0.1)) + np.ones(6, np.float32) * np.exp(v))
    result = custom.build().compile("reference").run({"x": X})[0]
    np.testing.assert_allclose(result, np.maximum(np.tanh(X), 0.1) + np.exp(X), rtol=1e-6)
    with pytest.raises(GraphError, match=r"numpy\.unwrap"):
        flow().custom(lambda e, v: np.unwrap(v)).build()


def test_a_linear_weight_of_the_other_order_is_named() -> None:
    with pytest.raises(GraphError, match=r"weight 'w': takes vectors of 3, the value is f32\[2, 6\]") as caught:
        flow().linear("w").build({"w": np.ones((6, 3), np.float32)})
    assert caught.value.hint == "the weight is read as [out, in]: is it the transpose?"
    ones = flow().linear("w", transpose=False).build({"w": np.ones((6, 3), np.float32)})
    assert ones.primary_shape == (2, 3)


# -- variants --------------------------------------------------------------------------------------------------------
def test_a_past_that_a_flow_does_not_take_is_an_error() -> None:
    weights = {"e": np.ones((9, 6), np.float32)}
    plain = ModelFlow("m").input("tokens", ("batch", "seq"), "i32").token_embed("e").stage(LmHead(9, 6, "e"))
    built = plain.build(weights)
    assert built.with_execution_config(ModelExecutionConfig.prefill(1, 4)).primary_shape == (1, 4, 9)
    attempts: list[Any] = [
        built.with_execution_config, lambda c: c.compile(built.module), lambda c: c.specialise(built.into_hir()),
    ]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(GraphError, match="decode has a past of 16 tokens, and graph 'm' takes none") as caught:
            attempt(ModelExecutionConfig.decode(1, 16, 1))
        assert "kv_cache" in (caught.value.hint or "")
    past = plain.input("past_k_0", ("batch", rlx.sym.PAST_SEQ, 4)).build(weights)
    special = past.with_execution_config(ModelExecutionConfig.decode(1, 16, 1)).module
    assert str(special.named("past_k_0").type) == "f32[1, 16, 4]"


# -- fusion ----------------------------------------------------------------------------------------------------------
def report(build: Any) -> tuple[Any, int]:
    g = rlx.Graph("g")
    x, w, v = g.input("x", ("n", 8)), g.param("w", (8, 8)), g.param("v", (8,))
    g.set_outputs([build(g, x, w, v)])
    compiled: Any = rlx.compile(g)
    return compiled.plan.fusion, len(compiled.plan.main.launches)


def conv(g: Any, x: Any, w: Any, v: Any) -> Any:
    pad = g.input("pad", (1, 2, 8))
    return g.depthwise_conv1d_causal(x.reshape(1, "n", 8), w[:, :3], pad, kernel_size=3).silu()


@pytest.mark.parametrize(
    ("build", "what", "why"),
    [
        (lambda g, x, w, v: x.softmax(axis=-1) * 2.0 + v, "softmax -> mul + add", "softmax has no epilogue"),
        (
            lambda g, x, w, v: x.tanh().softmax(axis=-1),
            "tanh -> softmax",
            "softmax reads its input from memory, in several passes",
        ),
        (lambda g, x, w, v: x.sum(axis=-1).tanh(), "sum -> tanh", "sum has no epilogue"),
        (lambda g, x, w, v: (x @ w).mT.gelu(), "matmul -> gelu", "there is a transpose in between"),
        (lambda g, x, w, v: x.tanh() @ w, "tanh -> matmul", "matmul reads its input from memory"),
        (conv, "depthwise_conv1d_causal -> silu", "has no epilogue"),
    ],
)
def test_what_did_not_fuse_is_named_with_its_reason(build: Any, what: str, why: str) -> None:
    fusion, launches = report(build)
    assert launches > 1
    missed = {m.op: m.why for m in fusion.missed}
    assert what in missed and re.search(why, missed[what]), str(fusion)


def test_a_norm_after_a_matmul_is_said_to_be_apart() -> None:
    fusion, launches = report(lambda g, x, w, v: (x @ w).rms_norm(v))
    assert launches == 2 and not fusion.missed
    assert [(m.op, m.why) for m in fusion.separate] == [
        ("matmul -> rms_norm", "rms_norm needs complete rows, and no kernel computes both")
    ]
    assert "separate 1" in str(fusion)


def test_what_fuses_is_neither_missed_nor_apart() -> None:
    fusion, launches = report(lambda g, x, w, v: (x @ w + v).gelu())
    assert launches == 1 and not fusion.missed and not fusion.separate


def test_attention_without_heads_is_refused() -> None:
    flow = ModelFlow("m").input("tokens", ("batch", "seq"), "i32").rope(8, 16).embed("embed", shape=(9, 64))
    with pytest.raises(rlx.errors.ShapeError, match="num_heads is 0, expected an integer from 1"):
        flow.attention("attn", 0).init(rlx.random.key(0))


def test_devices_of_other_libraries_are_named() -> None:
    flow = ModelFlow("m").input("x", (2,)).custom(lambda emit, value: value * 2.0)
    with pytest.raises(rlx.errors.CapabilityError) as error:
        rlx.compile(flow.build(), device="gpu")
    assert 'device="cuda"' in str(error.value.hint)

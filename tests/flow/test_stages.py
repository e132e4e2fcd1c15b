"""Stages that arrange others, streams, the author's own, and small parts: each against NumPy, on both devices."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import BindError, GraphError, ShapeError
from rlx.flow import Emit, FlowCtx, FlowStage, FlowValue, GdnInputSlots, LayerStack, ModelFlow, SideOutputs
from rlx.flow.stages import (
    AttnMask,
    BertEncoderLayer,
    BindDecodeInputs,
    ClsTokenPool,
    Custom,
    DecodeRopeParams,
    DualStream,
    Embed,
    EmbedScale,
    GatherAdd,
    GatherFromInput,
    GatherLastToken,
    GdnScan,
    GeluFfn,
    LayerNorm,
    LayerScale,
    Linear,
    LlamaDecoder,
    LoadStream,
    LogitSoftcap,
    Named,
    Repeat,
    ResidualAdd,
    ResidualSave,
    RmsNorm,
    Sequence,
    StoreStream,
    SwiGlu,
    ZeroBeta,
)
from rlx.flow.stages.custom import PLUGINS
from rlx.ir.graph import Graph
from rlx.ir.registry import HIR

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(0)
X = RNG.standard_normal((3, 6)).astype(np.float32)


@pytest.fixture(params=["cpu", "reference"])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def flow(*stages: FlowStage) -> ModelFlow:
    return ModelFlow("f").input("x", (3, 6)).with_stages(stages)


def run(of: ModelFlow, device: str, weights: dict[str, Array] | None = None, **inputs: Array) -> list[Array]:
    return of.build(weights).compile(device).run({"x": X, **inputs})


def context(**weights: Array) -> FlowCtx:
    return FlowCtx(Graph("g", level=HIR), weights=rlx.MapWeights(weights))


@dataclass(frozen=True)
class Times(FlowStage):
    """x times a number."""

    factor: float

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        return ctx.wrap(ctx.need(value, "Times") * self.factor)

    @property
    def path(self) -> str:
        return "times"


@dataclass(frozen=True)
class Remember(FlowStage):
    """Does something on the side and gives nothing."""

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> None:
        ctx.state.named["remembered"] = ctx.need(value, "Remember")


def close(actual: Array, wanted: Array, tolerance: float = 1e-6) -> None:
    assert actual.shape == wanted.shape
    assert np.abs(actual - wanted).max() <= tolerance * max(1.0, float(np.abs(wanted).max()))


# -- order -----------------------------------------------------------------------------------------------------------
def test_a_sequence_is_its_stages_in_order(device: str) -> None:
    result = run(flow(Sequence([Times(2), Remember(), Custom(lambda emit, v: v.id + 1.0), Times(3)])), device)
    close(result[0], (X * 2 + 1) * 3)


def test_an_empty_sequence_lets_the_value_pass(device: str) -> None:
    close(run(flow(Sequence(()), Times(2)), device)[0], X * 2)


def test_residuals_nest(device: str) -> None:
    inner = [ResidualSave(), Times(5), ResidualAdd()]
    result = run(flow(ResidualSave(), Times(2), *inner, Times(3), ResidualAdd()), device)
    close(result[0], X + 3 * (2 * X + 5 * 2 * X))


def test_the_state_shows_the_top_of_the_stack() -> None:
    ctx = context()
    first, second = (ctx.wrap(ctx.input(name, shape)) for name, shape in (("a", (2,)), ("b", (3,))))
    assert ctx.state.residual_skip is None and ctx.state.residual_shape is None
    for value in (first, second):
        ResidualSave().emit(ctx, value)
    assert ctx.state.residual_skip is second.id and ctx.state.residual_shape == (3,)
    ResidualAdd().emit(ctx, second)
    assert ctx.state.residual_skip is first.id and ctx.state.residual_shape == (2,)


def test_adding_what_nobody_saved_is_an_error() -> None:
    with pytest.raises(GraphError, match="stage ResidualAdd: nothing was saved"):
        flow(ResidualSave(), ResidualAdd(), ResidualAdd()).build()


def test_a_residual_that_nobody_adds_is_named() -> None:
    for stage, where in ((Named("first", ResidualSave()), " in stage 'first'"), (ResidualSave(), "")):
        with pytest.raises(GraphError, match=f"flow 'f': residual <value .*> was saved{where} and never added"):
            flow(stage, Times(3)).build()


def test_a_named_stage_is_found_by_its_name(device: str) -> None:
    named = flow(Named("doubled", Times(2)), Times(3), Custom(lambda emit, v: v.id + emit.named("doubled")))
    close(run(named, device)[0], X * 6 + X * 2)
    built = named.outputs("sum", "doubled").build()
    assert built.output_names == ["sum", "doubled"]
    for result, wanted in zip(built.compile(device).run({"x": X}), (X * 8, X * 2), strict=True):
        close(result, wanted)
    assert {"doubled"} <= {node.origin.stage for node in built.module.nodes}


def test_a_stage_that_gives_no_flow_value_is_named() -> None:
    @dataclass(frozen=True)
    class Wrong(FlowStage):
        def emit(self, ctx: FlowCtx, value: FlowValue | None) -> Any:
            return ctx.need(value, "Wrong") + 1.0

    with pytest.raises(GraphError, match="stage Wrong: returned a Value, expected a FlowValue"):
        flow(Wrong()).build()


@pytest.mark.parametrize("wrong", [Times, "times", None])
def test_only_stages_are_stages(wrong: Any) -> None:
    with pytest.raises(GraphError, match="is not a stage"):
        ModelFlow("f").stage(wrong)


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda f: f.logit_softcap(0.0), "stage LogitSoftcap: cap is 0.0"),
        (lambda f: f.logit_softcap(-2.0), "stage LogitSoftcap: cap is -2.0"),
        (lambda f: f.logit_softcap(float("nan")), "stage LogitSoftcap: cap is nan"),
        (lambda f: f.logit_softcap("3"), "stage LogitSoftcap: cap is '3'"),
        (lambda f: f.rms_norm("w", -1e-5), "stage RmsNorm: eps is -1e-05"),
        (lambda f: f.layer_norm("w", -1.0), "stage LayerNorm: eps is -1.0"),
        (lambda f: f.repeat_layers(-1, lambda i: Times(2)), "stage Repeat 'layers': count is -1"),
        (lambda f: f.repeat_layers(1.5, lambda i: Times(2)), "stage Repeat 'layers': count is 1.5"),
        (lambda f: f.repeat_layers(2, Times(2)), r"stage Repeat 'layers': Times.* is not a function"),
        (lambda f: f.repeat_layers(2, lambda i: None).build(), r"stage Repeat: 'layers\.0' is a NoneType"),
        (
            lambda f: f.repeat_layers(2, lambda i: None).edit("x", lambda s: s),
            r"stage Repeat: 'layers\.0' is a NoneType",
        ),
        (lambda f: f.sequence(Times(2), 3), "stage Sequence: a part is a int, expected a stage"),
        (lambda f: f.named_layer("n", 3), "stage Named 'n': its part is a int, expected a stage"),
        (lambda f: f.dual_stream("d", "a", "a", lambda e, a, b: (a, b)), "stage DualStream 'd': both streams are 'a'"),
        (lambda f: f.dual_stream("d", "a", "b", 3), "stage DualStream 'd': 3 is not a function"),
        (lambda f: f.custom(3), "stage Custom: 3 is not a function"),
        (lambda f: f.custom_named("c", None), "stage Custom 'c': None is not a function"),
    ],
)
def test_settings_that_cannot_be_meant_name_their_stage(make: Any, error: str) -> None:
    with pytest.raises(GraphError, match=error):
        make(flow())


@pytest.mark.parametrize(
    ("f", "error"),
    [
        (lambda e, v: e.node_shape(None), "node_shape: None is not a value"),
        (lambda e, v: e.synth_zeros("z", -1), "param 'z': -1 is not a length"),
        (lambda e, v: e.synth_zeros("z", "4"), "param 'z': '4' is not a length"),
    ],
)
def test_errors_inside_a_function_name_its_stage(f: Any, error: str) -> None:
    with pytest.raises(GraphError, match=error) as caught:
        flow().custom_named("mine", f).build()
    assert "  in stage: mine" in caught.value.notes


# -- streams ---------------------------------------------------------------------------------------------------------
def test_streams_are_stored_and_loaded(device: str) -> None:
    stages = (Times(2), StoreStream("kept"), Times(10), StoreStream("other"), LoadStream("kept"), Times(3))
    built = flow(*stages).outputs("main", "other").build()
    for result, wanted in zip(built.compile(device).run({"x": X}), (X * 6, X * 20), strict=True):
        close(result, wanted)


def test_two_streams_go_through_one_stage(device: str) -> None:
    def mix(emit: Emit, img: FlowValue, txt: FlowValue) -> tuple[Any, Any]:
        return emit.add(img, txt), emit.wrap(txt.id * 2.0)

    two = flow().input("txt", (3, 6)).bind_inputs_to_streams([("x", "img"), ("txt", "txt")]).stage(Times(7))
    built = two.dual_stream("mix", "img", "txt", mix).outputs("main", "img", "txt").build()
    other = RNG.standard_normal((3, 6)).astype(np.float32)
    outputs = built.compile(device).run({"x": X, "txt": other})
    for a, wanted in zip(outputs, (X * 7, X + other, other * 2), strict=True):
        close(a, wanted)
    assert any(node.origin.stage == "mix" for node in built.module.nodes)


@pytest.mark.parametrize("stage", [LoadStream("img"), DualStream("mix", "img", "txt", lambda emit, a, b: (a, b))])
def test_a_stream_that_is_not_there_is_named_with_its_stage(stage: FlowStage) -> None:
    with pytest.raises(GraphError, match=f"stage {type(stage).__name__}.*: no stream is called 'img'") as caught:
        flow(StoreStream("imgs"), stage).build()
    assert "imgs" in (caught.value.hint or "")


@pytest.mark.parametrize("wrong", [lambda emit, a, b: a, lambda emit, a, b: (a, None), lambda emit, a, b: (a, 3)])
def test_both_streams_must_come_back(wrong: Any) -> None:
    with pytest.raises(GraphError, match="stage DualStream 'd'"):
        flow(StoreStream("a"), StoreStream("b"), DualStream("d", "a", "b", wrong)).build()


# -- the author's own ------------------------------------------------------------------------------------------------
def test_a_function_builds_a_part_of_the_graph(device: str) -> None:
    table = RNG.standard_normal((6, 4)).astype(np.float32)

    def head(emit: Emit, value: FlowValue) -> rlx.Value:
        shift = emit.input("shift", (4,))
        scores = emit.matmul(value, emit.load_param("table")) + shift * emit.constant(0.5)
        return emit.softmax(emit.wrap(scores), axis=-1)  # type: ignore[no-any-return]

    shift = np.arange(4, dtype=np.float32)
    built = flow(Custom(head, "head")).output("p").build({"table": table})
    scores = X.astype(np.float64) @ table + shift / 2
    wanted = np.exp(scores) / np.exp(scores).sum(-1, keepdims=True)
    close(built.compile(device).run({"x": X, "shift": shift})[0], wanted)
    assert all(node.origin.stage == "head" for node in built.module.nodes if node.op == "softmax")


def test_a_function_may_use_other_stages_and_give_nothing(device: str) -> None:
    side = SideOutputs()

    def tap(emit: Emit, value: FlowValue) -> None:
        twice = emit.stage(Times(2), value)
        assert twice is not None
        six = emit.stage(Times(3), twice.id, "inner")
        assert six is not None
        side.push(six, "six")

    built = flow(Custom(tap), Times(-1)).with_extra_outputs(side).build()
    assert built.output_names == ["output", "six"] and len(side) == 0
    for result, wanted in zip(built.compile(device).run({"x": X}), (-X, 6 * X), strict=True):
        close(result, wanted)


@pytest.mark.parametrize(
    ("f", "wanted"),
    [
        (lambda e, v: v * 2, X * 2),
        (lambda e, v: 1 - v / 4 + v, 1 - X / 4 + X),
        (lambda e, v: np.ones(6, np.float32) - v, 1 - X),
        (lambda e, v: v.id * v + v * v.id, 2 * X * X),
        (lambda e, v: e.tanh(v) * v, np.tanh(X) * X),
        (lambda e, v: (abs(v) > 0.5).where(v, -v), np.where(abs(X) > 0.5, X, -X)),
        (lambda e, v: v @ v.mT, X @ X.T),
        (lambda e, v: v[:, 1:].sum(axis=-1), X[:, 1:].sum(-1)),
        (lambda e, v: e.wrap(v.reshape(2, 9).maximum(v.reshape(2, 9) * 2), (2, 9)), np.maximum(X, 2 * X).reshape(2, 9)),
        (lambda e, v: e.concatenate([v, v * 2], axis=0), np.concatenate([X, X * 2])),
    ],
)
def test_what_flows_has_the_operators_and_ops_of_a_value(device: str, f: Any, wanted: Array) -> None:
    close(run(flow().custom(f), device)[0], wanted)


def test_what_operators_give_flows_too() -> None:
    ctx = context()
    x = ctx.wrap(ctx.input("x", (2, 3)))
    for result in (x + 1, 1 - x, -x, x < 0, x[0], x.mT, x.exp(), x.astype("f16")):
        assert isinstance(result, FlowValue) and result.shape == result.id.shape and result.id.graph is ctx.hir()
    assert (str(x.dtype), x.rank, x == ctx.wrap(x), {x: 1}[x]) == ("f32", 2, True, 1)
    with pytest.raises(AttributeError, match=r"no op 'tahn'.*'tanh'"):
        x.tahn()
    with pytest.raises(AttributeError):
        x.shape = (3, 2)  # type: ignore[misc]
    for wrong in (lambda: bool(x > 0), lambda: float(x), lambda: list(x)):
        with pytest.raises(GraphError, match="value <value"):
            wrong()


def test_what_flows_belongs_to_one_build() -> None:
    other = context()
    stray = other.wrap(other.input("x", (3, 6)))
    with pytest.raises(GraphError, match="is not a value of graph 'f'"):
        flow().custom(lambda emit, v: stray).build()


def test_a_named_function_is_found_by_its_name(device: str) -> None:
    named = flow().custom_named("a", lambda e, v: v * 2).custom_named("b", lambda e, v: None).stage(Times(3))
    for result, factor in zip(run(named.outputs("main", "a", "b"), device), (6, 2, 2), strict=True):
        close(result, X * factor)
    own = flow().custom_named("a", lambda e, v: e.set_named("a", v + 1)).outputs("main", "a")
    close(run(own, device)[1], X + 1)  # the function's own word stays


def test_what_a_function_gives_must_be_a_value() -> None:
    with pytest.raises(GraphError, match="stage Custom 'odd': its function returned a int, expected a value"):
        flow(Custom(lambda emit, v: 3, "odd")).build()


def test_emit_builds_any_op_and_block_and_says_what_it_lacks() -> None:
    emit = Emit.of(context())
    x = emit.wrap(emit.input("x", (2, 8)))
    assert emit.concatenate([x, x], axis=0).shape == (4, 8)
    assert emit.reshape(x, (4, -1)).shape == (4, 4)
    assert emit.linear(x, np.ones((8, 3), np.float32), activation="relu").shape == (2, 3)
    assert emit.node_shape(x) == (2, 8)
    with pytest.raises(AttributeError, match=r"Emit has no op 'sofmax'.*'softmax'"):
        emit.sofmax(x)


def test_plugins_are_stages_or_registered_names(device: str) -> None:
    name = "test_stages.times"
    try:
        assert rlx.flow.register_stage(name)(Times) is Times
        assert rlx.flow.register_stage(name)(Times) is Times  # a module that is loaded again
        result = run(flow().plugin(name, factor=3.0).plugin(Times(2.0)).plugin_named("last", name, factor=5.0), device)
        close(result[0], X * 30)
        with pytest.raises(GraphError, match=r"register_stage .* is the name of .*Times"):
            rlx.flow.register_stage(name)(Remember)
        with pytest.raises(GraphError, match=r"plugin 'test_stages.times': .*facto"):
            flow().plugin(name, facto=3.0)
    finally:
        PLUGINS.pop(name, None)
    with pytest.raises(GraphError, match=r"no stage is registered as 'test_stages.times'"):
        flow().plugin(name)
    with pytest.raises(GraphError, match="takes no settings, found factor"):
        flow().plugin(Times(2.0), factor=3.0)
    with pytest.raises(GraphError, match="is not a class of stages"):
        rlx.flow.register_stage("number")(3)  # type: ignore[type-var]


# -- layers ----------------------------------------------------------------------------------------------------------
def test_a_layer_is_a_stack_of_stages_under_one_name(device: str) -> None:
    gamma = RNG.standard_normal(6).astype(np.float32)
    weight = RNG.standard_normal((6, 6)).astype(np.float32)

    def build(stack: LayerStack) -> LayerStack:
        return stack.residual_save().rms_norm("g", 1e-5).linear("w").residual_add()

    layered = flow().layer("block", build).outputs("out", "block")
    x = X.astype(np.float64)
    wanted = x + (x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * gamma) @ weight.T
    for result in run(layered, device, {"g": gamma, "w": weight}):
        close(result, wanted)
    assert {n.origin.stage for n in layered.build({"g": gamma, "w": weight}).module.nodes} >= {"block", "block.norm"}


def test_a_layer_without_a_stack_is_an_error() -> None:
    with pytest.raises(GraphError, match="layer 'block': its function returned a NoneType"):
        flow().layer("block", lambda stack: None)  # type: ignore[arg-type, return-value]


def test_patches_and_conditions(device: str) -> None:
    base = flow(Times(2)).patch(lambda f: f.stage(Times(3))).when(False, lambda f: f.stage(Times(100)))
    close(run(base.when(True, lambda f: f.stage(Times(5))), device)[0], X * 30)


def test_recipes_keep_their_patches_to_themselves(device: str) -> None:
    def assemble(factor: float = 2.0) -> ModelFlow:
        return flow(Times(factor))

    plain = rlx.ModelRecipe("scaled", assemble)
    patched = plain.patch(lambda f: f.logit_softcap(0.5)).when(False, lambda f: f.stage(Times(9)))
    both = patched.when(True, lambda f: f.stage(Times(10)))
    for recipe, factor, wanted in (
        (plain, 4.0, X * 4), (patched, 2.0, np.tanh(X * 4) / 2), (both, 2.0, np.tanh(X * 4) * 5),
    ):  # fmt: skip
        close(recipe.assemble(factor).build().compile(device).run({"x": X})[0], wanted)
    close(both.build(None, 1.0).compile(device).run({"x": X})[0], np.tanh(X * 2) * 5)
    with pytest.raises(GraphError, match="recipe 'scaled': a patch returned a NoneType"):
        plain.patch(lambda f: None).assemble()  # type: ignore[arg-type, return-value]


@pytest.mark.parametrize(
    ("method", "arguments", "stage"),
    [
        ("embed", ("w",), Embed("w")), ("token_embed", (), Embed("model.embed_tokens.weight")),
        ("embed_scale", (4,), EmbedScale(4)), ("gather_from_input", ("i", "w"), GatherFromInput("i", "w")),
        ("gather_add", ("i", "w"), GatherAdd("i", "w")), ("zero_beta", (4,), ZeroBeta("zero_beta", 4)),
        ("zero_beta_named", ("z", 4), ZeroBeta("z", 4)), ("attn_mask", (2, 3, "m"), AttnMask(2, 3, "m")),
        ("attn_mask_ones", (2, 3), AttnMask(2, 3)), ("bind_decode_inputs", (2, True), BindDecodeInputs(2, True)),
        ("rms_norm", ("w", 1e-5), RmsNorm("w", 1e-5)), ("final_norm", (1e-5,), RmsNorm("model.norm.weight", 1e-5)),
        ("layer_norm", ("n", 1e-5), LayerNorm("n.weight", "n.bias", 1e-5)),
        ("linear", ("w", False, "b"), Linear("w", transpose=False, bias_key="b")),
        ("swiglu", ("g", "u", "d"), SwiGlu("g", "u", "d")), ("swiglu_hf_mlp", ("p",), SwiGlu.hf_mlp("p")),
        ("gelu_ffn", ("a", "b", "c", "d"), GeluFfn(*"abcd")), ("layer_scale", ("g",), LayerScale("g")),
        ("gdn_scan", (4, True, "s"), GdnScan(4, True, "s")), ("cls_token_pool", (), ClsTokenPool()),
        ("gather_last_token", (), GatherLastToken()), ("logit_softcap", (3.0,), LogitSoftcap(3.0)),
        ("residual_save", (), ResidualSave()), ("residual_add", (), ResidualAdd()),
        ("store_stream", ("s",), StoreStream("s")), ("load_stream", ("s",), LoadStream("s")),
        ("sequence", (Times(2), Times(3)), Sequence([Times(2), Times(3)])),
        ("named_layer", ("n", Times(2)), Named("n", Times(2))),
        ("bert_encoder_layer", ("p", 8, 2, 1e-5), BertEncoderLayer("p", 8, 2, 4, 1e-5)),
        ("llama_prefill_layer", (1, 4, 2, 8, 1e-5),
         Named("layers.1", LlamaDecoder("model.layers.1", 4, 2, 8, 1e-5, layer_idx=1))),
    ],
    ids=lambda x: x if isinstance(x, str) else "",
)  # fmt: skip
def test_methods_append_the_stage_that_they_name(method: str, arguments: tuple[Any, ...], stage: FlowStage) -> None:
    for start in (flow(), LayerStack()):
        longer: Any = getattr(start, method)(*arguments)
        assert longer.stages == (stage,) and type(longer) is type(start) and start.stages == ()


# -- editing ---------------------------------------------------------------------------------------------------------
def line() -> ModelFlow:
    return flow(Times(2), Repeat(3, lambda i: Times(1.0 + i)), Named("end", Sequence([Times(10), LogitSoftcap(50.0)])))


@pytest.mark.parametrize(
    ("pattern", "edit", "wanted"),
    [
        ("times", lambda s: Times(7), 50 * np.tanh(X * 7 * 6 * 10 / 50)),
        ("layers.1", lambda s: Sequence([s, Times(-1)]), 50 * np.tanh(X * -120 / 50)),
        ("layers.*", lambda s: None, 50 * np.tanh(X * 20 / 50)),
        ("end.softcap", lambda s: None, X * 120),
        ("**softcap", lambda s: None, X * 120),
        ("*.softcap", lambda s: None, X * 120),
        ("end", lambda s: Times(0.5), X * 6),
    ],
)
def test_stages_are_edited_by_path(device: str, pattern: str, edit: Any, wanted: Array) -> None:
    before = line()
    close(run(before.edit(pattern, edit), device)[0], wanted, 2e-6)
    close(run(before, device)[0], 50 * np.tanh(X * 120 / 50), 2e-6)


def test_an_edit_that_meets_nothing_says_what_there_is() -> None:
    with pytest.raises(GraphError, match=r"edit: no stage of 'f' matches 'layer\.1'") as caught:
        line().edit("layer.1", lambda s: s)
    assert "layers.1" in (caught.value.hint or "")


def test_a_star_of_an_edit_stops_at_dots() -> None:
    """The same patterns as those of captures."""
    for pattern in ("*softcap", "l*1.0", "?imes.*", "end?softcap"):
        with pytest.raises(GraphError, match="edit: no stage of 'f' matches"):
            line().edit(pattern, lambda s: None)
    seen: list[FlowStage] = []
    line().edit("**", lambda s: seen.append(s) or s)
    assert [type(s) for s in seen] == [Times, Repeat, Sequence]
    seen.clear()
    line().edit("layers.[!1]", lambda s: seen.append(s) or s)
    assert seen == [Times(1.0), Times(3.0)]


def test_an_edit_must_give_a_stage() -> None:
    with pytest.raises(GraphError, match=r"edit 'layers\.0': its function returned a int, expected a stage or None"):
        line().edit("layers.0", lambda s: 3)  # type: ignore[arg-type, return-value]


def test_a_stage_without_a_path_goes_by_its_class(device: str) -> None:
    close(run(flow(EmbedScale(9), Times(2)).edit("EmbedScale", lambda s: None), device)[0], X * 2)


# -- side outputs ----------------------------------------------------------------------------------------------------
def test_side_outputs_come_after_the_main_one(device: str) -> None:
    side = SideOutputs()

    def layer(i: int) -> FlowStage:
        def tap(emit: Emit, value: FlowValue) -> None:
            side.push(value.id * 2.0, f"k{i}")
            side.push(value)

        return Sequence([Times(2), Custom(tap)])

    built = flow().repeat_layers(2, layer).output("logits").build()
    more = built.with_extra_outputs(side)
    assert more.output_names == ["logits", "k0", "side.1", "k1", "side.3"] and built.output_names == ["logits"]
    assert len(built.module.outputs) == 1 and len(side) == 0
    for result, factor in zip(more.compile(device).run({"x": X}), (4, 4, 2, 8, 4), strict=True):
        close(result, X * factor)


def test_a_build_that_was_thrown_away_leaves_nothing_behind() -> None:
    side = SideOutputs()
    tapped = flow(Custom(lambda emit, v: side.push(v, "tap")))
    tapped.build()
    assert tapped.build().with_extra_outputs(side).output_names == ["output", "tap"]


def test_side_outputs_of_another_build_are_refused() -> None:
    side = SideOutputs()
    tapped = flow(Custom(lambda emit, v: side.push(v, "tap")))
    first = tapped.build()
    tapped.build()
    with pytest.raises(GraphError, match="extra output 'tap': is not of this build of 'f'"):
        first.with_extra_outputs(side)


def test_two_outputs_of_one_name_are_refused() -> None:
    side = SideOutputs()
    with pytest.raises(GraphError, match="outputs: two are called 'output'"):
        flow(Custom(lambda emit, v: side.push(v, "output"))).with_extra_outputs(side).build()


def test_an_output_that_nobody_named_is_an_error() -> None:
    with pytest.raises(GraphError, match="flow 'f': no value is called 'hiden'") as caught:
        flow(Named("hidden", Times(2))).outputs("main", "hiden").build()
    assert "'hidden'" in (caught.value.hint or "")


def doubling_layers() -> ModelFlow:
    return flow().repeat_layers(2, lambda i: LayerStack().custom_named("conv", lambda e, v: v * 2.0).stage(Times(5)))


def test_outputs_of_layers_are_named_by_their_path(device: str) -> None:
    paths = ("layers.0.conv", "layers.0", "layers.1.conv", "layers.1")
    for result, factor in zip(run(doubling_layers().outputs("y", *paths), device), (100, 2, 10, 20, 100), strict=True):
        close(result, X * factor)
    values = doubling_layers().build({}, capture=paths).compile(device).run({"x": X})
    for result, factor in zip(values, (100, 2, 10, 20, 100), strict=True):  # as `capture` does
        close(result, X * factor)
    named = flow().repeat_layers(2, lambda i: Custom(lambda e, v: e.set_named("half", v * 0.5) or v * 3.0))
    close(run(named.outputs("y", "layers.1.half"), device)[1], X * 1.5)


def test_a_name_that_several_stages_use_needs_its_path(device: str) -> None:
    with pytest.raises(GraphError, match="flow 'f': 2 values are called 'conv'") as caught:
        doubling_layers().outputs("y", "conv").build()
    assert caught.value.hint == "give the path: layers.0.conv, layers.1.conv"
    with pytest.raises(GraphError, match=r"no value is called 'layers\.2'") as caught:
        doubling_layers().outputs("y", "layers.2").build()
    assert caught.value.hint == "layers are 0 to 1"
    own = flow().custom_named("conv", lambda e, v: v * 3.0).stage(*doubling_layers().stages)
    close(run(own.outputs("y", "conv"), device)[1], X * 3)  # a path of its own


@pytest.mark.parametrize("make", [lambda f: f.named_layer("first", Times(2)), lambda f: f.store_stream("first")])
def test_the_main_output_is_not_called_like_another_value(make: Any) -> None:
    assert make(flow()).outputs("first").build().output_names == ["first"]  # it is that value
    longer = make(flow()).stage(Times(3))
    for wrong in (longer.output("first"), longer.outputs("first")):
        with pytest.raises(GraphError, match="flow 'f': the main output is called 'first', and so is another value"):
            wrong.build()
    assert longer.outputs("main", "first").build().output_names == ["main", "first"]


# -- parts -----------------------------------------------------------------------------------------------------------
def test_linear_in_both_layouts_with_a_bias(device: str) -> None:
    weights = {n: RNG.standard_normal(s).astype(np.float32) for n, s in {"w": (4, 6), "b": (4,), "v": (4, 5)}.items()}
    result = run(flow(Linear("w", bias_key="b"), Linear("v", transpose=False)), device, weights)
    close(result[0], (X.astype(np.float64) @ weights["w"].T + weights["b"]) @ weights["v"])


def test_scales_and_caps(device: str) -> None:
    gamma = RNG.standard_normal(6).astype(np.float32)
    result = run(flow(EmbedScale(10), LayerScale("g"), LogitSoftcap(3.0)), device, {"g": gamma})
    close(result[0], 3 * np.tanh(X.astype(np.float64) * math.sqrt(10) * gamma / 3))


def test_rows_by_an_input_take_the_place_of_the_value(device: str) -> None:
    table = RNG.standard_normal((5, 4)).astype(np.float32)
    index = np.array([[4, 0], [2, 2]], np.int64)
    stages = flow(GatherFromInput("index", "table")).input("index", (2, 2), "i64")  # the flow decides the type
    close(run(stages, device, {"table": table}, index=index)[0], table[index])


def test_the_class_token_is_the_first(device: str) -> None:
    x = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    built = ModelFlow("pool").input("x", ("batch", "seq", 4)).cls_token_pool().build()
    close(built.compile(device).run({"x": x})[0], x[:, 0])
    with pytest.raises(GraphError, match=r"stage ClsTokenPool: takes .*, found f32"):
        flow(ClsTokenPool()).build()


def test_zero_vectors_by_name() -> None:
    ctx = context()
    for stage in (ZeroBeta("zero_beta", 6), ZeroBeta("zero_beta.head", 4)):
        assert stage.emit(ctx, None) is None
    assert ctx.state.zero_beta is ctx.state.named["zero_beta"] and ctx.state.named["zero_beta.head"].shape == (4,)
    assert ctx.params["zero_beta"].tolist() == [0] * 6


def test_masks_are_inputs_or_ones(device: str) -> None:
    def masked(emit: Emit, value: FlowValue) -> rlx.Value:
        return value.id * emit.named("attn_mask")

    mask = np.array([[1, 0, 1, 0, 0, 1]] * 3, np.float32)
    close(run(flow(AttnMask(3, 6, "mask"), Custom(masked)), device, mask=mask)[0], X * mask)
    close(run(flow(AttnMask(3, 6), Custom(masked)), device)[0], X)


@pytest.mark.parametrize("tables", [True, False])
def test_the_inputs_of_a_decode_step(device: str, tables: bool) -> None:
    """One step of attention with a cache that the caller keeps, written as a stage of one's own."""
    heads, past, half = 2, 5, 2
    q, k, v = (RNG.standard_normal((1, 1, heads, 4)).astype(np.float32) for _ in range(3))
    past_k, past_v = (RNG.standard_normal((1, past, heads, 4)).astype(np.float32) for _ in range(2))
    mask = np.array([[0, 1, 1, 0, 1, 1]], np.float32)
    cos, sin = np.cos([[0.3, 0.7]]).astype(np.float32), np.sin([[0.3, 0.7]]).astype(np.float32)

    def attend(emit: Emit, value: FlowValue) -> rlx.Value:
        step = emit.state.decode
        assert step is not None and step.mask is not None
        rotated = [
            emit.rope(x, step.cos, step.sin, emit.constant([[0]])) for x in (value, emit.flow_input("k"))
        ]  # fmt: skip
        keys, values = (
            emit.concatenate([before, now], axis=1)
            for before, now in ((step.past_k[0], rotated[1]), (step.past_v[0], emit.flow_input("v")))
        )
        return emit.attention(rotated[0], keys, values, step.mask, mask_kind="custom")  # type: ignore[no-any-return]

    shape = (1, 1, heads, 4)
    step = (
        ModelFlow("step").input("q", shape).input("k", shape).input("v", shape).input("mask", (1, rlx.dim("past") + 1))
    )
    step = step.input("past_k_0", (1, "past", heads, 4)).input("past_v_0", (1, "past", heads, 4))
    feeds = {"q": q, "k": k, "v": v, "mask": mask, "past_k_0": past_k, "past_v_0": past_v}
    if tables:
        step = step.stage(DecodeRopeParams(cos, sin))
    else:
        step = step.input("rope_cos", (1, half)).input("rope_sin", (1, half))
        feeds |= {"rope_cos": cos, "rope_sin": sin}
    built = step.bind_decode_inputs(1, use_custom_mask=True).custom(attend).build()

    def turn(x: Array) -> Array:
        a, b = x[..., :half].astype(np.float64), x[..., half:].astype(np.float64)
        return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)

    keys, values = np.concatenate([past_k, turn(k)], 1), np.concatenate([past_v, v], 1)
    scores = np.einsum("bqhd,bkhd->bhqk", turn(q), keys) / 2
    scores = np.exp(np.where(mask[:, None, None] > 0.5, scores, -np.inf))
    wanted = np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), values)
    close(built.compile(device).run(feeds)[0], wanted)


def test_decode_inputs_that_the_flow_lacks_are_named() -> None:
    with pytest.raises(GraphError, match=r"stage BindDecodeInputs: .*'rope_cos'"):
        flow(BindDecodeInputs(1)).build()


@pytest.mark.parametrize("carry", [False, True])
def test_a_gated_delta_net_reads_what_a_stage_published(device: str, carry: bool) -> None:
    size, seq = 4, 3
    feeds = {n: (RNG.standard_normal((1, seq, 2, size)) / 2).astype(np.float32) for n in "qkv"}
    feeds |= {n: RNG.uniform(-1, 0, (1, seq, 2)).astype(np.float32) for n in ("g", "beta")}
    feeds["beta"] = -feeds["beta"]
    state = RNG.standard_normal((1, 2, size, size)).astype(np.float32)

    def publish(emit: Emit, value: FlowValue) -> None:
        emit.state.gdn = GdnInputSlots(*(emit.flow_input(n).id for n in ("q", "k", "v", "g", "beta")))
        if carry:
            emit.set_named("s", emit.input("s", state.shape))

    net = ModelFlow("gdn")
    for name, array in feeds.items():
        net = net.input(name, array.shape)
    net = net.custom(publish).gdn_scan(size, carry, "s" if carry else None)
    built = net.outputs("out", "s").build() if carry else net.build()
    outputs = built.compile(device).run({**feeds, "s": state} if carry else feeds)

    s = state.astype(np.float64) if carry else np.zeros(state.shape)
    out = np.empty((1, seq, 2, size))
    for t in range(seq):
        q, k, v = (feeds[n][:, t].astype(np.float64) for n in "qkv")
        s = s * np.exp(feeds["g"][:, t])[..., None, None]
        change = (v - np.einsum("bhij,bhi->bhj", s, k)) * feeds["beta"][:, t][..., None]
        s = s + k[..., :, None] * change[..., None, :]
        out[:, t] = np.einsum("bhij,bhi->bhj", s, q) / math.sqrt(size)
    for a, wanted in zip(outputs, (out, s), strict=False):
        close(a, wanted)


def test_a_gated_delta_net_without_inputs_or_a_state_says_so() -> None:
    with pytest.raises(GraphError, match="stage GdnScan: no inputs were published"):
        flow(GdnScan(4)).build()


@pytest.mark.parametrize(
    "stage",
    [
        Named("n", Times(2)), Linear("w"), ResidualSave(), ResidualAdd(), ClsTokenPool(), GatherFromInput("i", "w"),
        EmbedScale(4), LayerScale("w"), LogitSoftcap(3.0), GdnScan(4),
    ],
    ids=lambda stage: type(stage).__name__,
)  # fmt: skip
def test_a_stage_that_needs_a_value_and_gets_none_says_so(stage: FlowStage) -> None:
    with pytest.raises(GraphError, match=f"stage {type(stage).__name__}.*: needs a value"):
        stage.emit(context(w=np.ones((4, 4), np.float32)), None)


@pytest.mark.parametrize(
    "stage",
    [
        ZeroBeta("z", 4), AttnMask(2, 3), DecodeRopeParams(np.ones((1, 2)), np.ones((1, 2))),
        Repeat(2, lambda i: ZeroBeta(f"z{i}", 4)), Sequence([ZeroBeta("z", 4)]), StoreStream("s"),
        Custom(lambda emit, v: None),
    ],
    ids=lambda stage: type(stage).__name__,
)  # fmt: skip
def test_stages_that_work_on_the_side_need_no_value(stage: FlowStage) -> None:
    assert stage.emit(context(), None) is None


def test_streams_start_a_flow_where_none_flows() -> None:
    ctx = context()
    ctx.state.streams["img"] = ctx.wrap(ctx.input("x", (2,)))
    assert LoadStream("img").emit(ctx, None) is ctx.state.streams["img"]
    ctx.state.streams["txt"] = ctx.state.streams["img"]
    assert DualStream("d", "img", "txt", lambda emit, a, b: (a, b)).emit(ctx, None) is None


# -- the context -----------------------------------------------------------------------------------------------------
def test_a_module_is_as_good_as_a_graph() -> None:
    module = rlx.GraphModule.hir("m")
    ctx = FlowCtx(module, {}, rlx.MapWeights({"w": np.ones((2, 3), np.float32)}), rlx.CompileProfile(), rlx.FlowState())
    assert ctx.hir() is module.as_hir() and ctx.load_param("w", True).shape == (3, 2)
    with pytest.raises(GraphError, match="module 'm' is at MIR, stages build at HIR"):
        FlowCtx(rlx.GraphModule.mir("m")).hir()


def test_made_params_are_made_once_and_only_once() -> None:
    ctx = context()
    table = ctx.synth_param("t", [1.0, 2.0, 3.0, 4.0], (2, 2))
    assert str(table.type) == "f32[2, 2]" and ctx.params["t"].tolist() == [[1, 2], [3, 4]]
    assert ctx.synth_param("t", np.array([[1, 2], [3, 4]], np.float32)) is table
    assert str(ctx.synth_param("n", [1, 2]).type) == "i32[2]" and str(ctx.synth_param("s", 2.0).type) == "f32[]"
    with pytest.raises(GraphError, match="param 't': exists already with other values"):
        ctx.synth_param("t", [1.0, 2.0, 3.0, 5.0], (2, 2))
    with pytest.raises(ShapeError, match=r"param 'u': 3 numbers cannot have the shape \[2, 2\]"):
        ctx.synth_param("u", [1.0, 2.0, 3.0], (2, 2))


def test_a_weight_and_a_made_param_of_one_name_are_refused() -> None:
    ctx = context(w=np.ones(3, np.float32), v=np.ones(3, np.float32))
    ctx.synth_param("w", [7.0, 8.0, 9.0])
    with pytest.raises(GraphError, match="param: 'w' exists already in graph 'g'"):
        ctx.load_param("w")
    ctx.load_param("v")
    with pytest.raises(GraphError, match="param: 'v' exists already in graph 'g'"):
        ctx.synth_param("v", [7.0, 8.0, 9.0])


def test_wrapping_checks_graph_and_shape() -> None:
    ctx, other = context(), context()
    x = ctx.input("x", (2, "seq"))
    assert ctx.wrap(x, (2, "seq")).shape == x.shape
    with pytest.raises(ShapeError, match=r"wrap: the value is f32\[2, seq\], the shape given is \[2, 3\]"):
        ctx.wrap(x, (2, 3))
    with pytest.raises(GraphError, match="is not a value of graph"):
        other.wrap(x)


def test_an_input_asked_for_in_another_way_is_an_error() -> None:
    ctx = context()
    x = ctx.input("x", (2, 3), "i32")
    assert ctx.input("x", ("batch", 3), "i64") is x
    for shape, kind in (((2, 4), "i32"), ((2, 3, 1), "i32"), ((2, 3), "f32")):
        with pytest.raises(ShapeError, match=r"input 'x': is i32\[2, 3\], this stage wants"):
            ctx.input("x", shape, kind)
    with pytest.raises(GraphError, match="flow: no input is called 'y'"):
        ctx.flow_input("y")


def test_a_vector_cannot_be_transposed() -> None:
    with pytest.raises(ShapeError, match=r"weight 'v': f32\[3\] cannot be transposed"):
        context(v=np.ones(3, np.float32)).load_param("v", transpose=True)


def test_two_inputs_of_one_name_are_refused() -> None:
    with pytest.raises(GraphError, match="flow 'f': has an input 'x' already"):
        flow().input("x", (2,))


# -- what is built ---------------------------------------------------------------------------------------------------
def test_what_is_built_has_its_weights_and_compiles(device: str) -> None:
    weight = RNG.standard_normal((4, 6)).astype(np.float32)
    built = flow(ZeroBeta("zeros", 4), Linear("w")).profile("decode").build({"w": weight, "unused": weight})
    assert dict(built.params).keys() == {"zeros", "w"} and built.primary_shape == (3, 4)
    assert built.profile.fusion.policy is rlx.FusionPolicy.FUSABLE
    with pytest.raises(KeyError):
        built.params["unused"]
    close(built.compile(device).run({"x": X})[0], X @ weight.T)
    assert built.into_graph().level == "mir" and built.into_hir().fusion_policy is rlx.FusionPolicy.FUSABLE
    f = rlx.compile(built.module, device)
    f.set_params(built.params)
    close(f.run({"x": X})[0], X @ weight.T)


def test_a_param_that_nobody_has_is_asked_for_by_name(device: str) -> None:
    built = flow(Custom(lambda emit, v: v.id + emit.hir().param("bias", (6,)))).build()
    assert "bias" not in built.params
    f = built.compile(device)
    with pytest.raises(BindError, match="'bias' not set"):
        f.run({"x": X})
    f.set_param("bias", np.ones(6, np.float32))
    close(f.run({"x": X})[0], X + 1)

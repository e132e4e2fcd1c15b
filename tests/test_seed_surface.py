"""The seed surface, line by line: flow context and stages, GraphModule, execution variants, and builders of graphs.

Every name exists with the parameters that were promised, and a small example of each runs on both devices and equals
NumPy's float64. What each part does beyond that is tested where the part is.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
from scipy.special import erf

import rlx
from rlx import (
    CompileProfile,
    DecodeBindings,
    DimBinding,
    FlowCtx,
    FlowStage,
    FlowState,
    FlowValue,
    FusionPolicy,
    GdnInputSlots,
    Graph,
    GraphModule,
    GraphStage,
    MapWeights,
    MaskKind,
    ModelFlow,
    ModelPhase,
    ModelVariant,
    MultiOutputHandle,
    QuantScheme,
    Value,
    sym,
)
from rlx.errors import GraphError, LowerError, RlxError, ShapeError
from rlx.flow import stages
from rlx.ir import registry

Array = np.ndarray[Any, Any]
DEVICES = ("reference", "cpu")
device = pytest.fixture(params=DEVICES)(lambda request: request.param)


def numbers(*shape: int, seed: int = 0, scale: float = 1.0) -> Array:
    return (np.random.default_rng([seed, *shape]).standard_normal(shape) * scale).astype(np.float32)


def close(actual: Array, wanted: Array, most: float = 2e-6) -> None:
    assert actual.shape == wanted.shape, f"{actual.shape} and {wanted.shape}"
    assert np.abs(actual - wanted).max(initial=0) <= most * max(1.0, float(np.abs(wanted).max(initial=0)))


def takes(function: Callable[..., Any], wanted: str) -> None:
    """The function has these parameters: positional ones in this order, others by name, with these defaults."""
    have = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    named = {p.name: p for p in have}
    rest = any(p.kind is p.VAR_KEYWORD for p in have)
    for i, p in enumerate(inspect.signature(eval(f"lambda {wanted}: None")).parameters.values()):
        if p.kind is p.KEYWORD_ONLY and p.name not in named:
            assert rest, f"{function}: no keyword {p.name!r}"
            continue
        assert p.name in named, f"{function}: no parameter {p.name!r}"
        mine = named[p.name]
        assert mine.kind is p.kind if p.kind is p.KEYWORD_ONLY else have[i].name == p.name, f"{function}: {p.name!r}"
        if p.default is not p.empty:
            assert mine.default == p.default, f"{function}: {p.name} is {mine.default!r} unless given"
    optional = {p.name for p in have if p.default is not p.empty or p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
    extra = set(named) - optional - set(inspect.signature(eval(f"lambda {wanted}: None")).parameters)
    assert not extra, f"{function}: needs {extra} too"


def op_takes(name: str, wanted: str) -> None:
    takes(registry.get(name).rule, wanted)


def run(of: Graph | GraphModule, device: str, **arrays: Array) -> list[Array]:
    """Params and inputs by name."""
    f = rlx.compile(of, device)
    f.set_params({name: arrays.pop(name) for name in f.param_types})
    return f.run(arrays)


# == A. flow context =================================================================================================
@dataclasses.dataclass(frozen=True)
class Add(FlowStage):
    """A stage as a user writes one."""

    amount: float

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        return ctx.wrap(ctx.need(value, "Add") + self.amount)


def context(**weights: Array) -> FlowCtx:
    return FlowCtx(GraphModule.hir("m"), {}, MapWeights(weights), CompileProfile(), FlowState())


# Classes, and the fields and methods that stages use.
CONTEXT = {
    "FlowStage": "", "FlowValue": "", "GdnInputSlots": "",
    "FlowState": "rope_cos rope_sin zero_beta embed_weight hidden_shape decode residual_skip residual_shape streams "
    "inputs named gdn loaded_params",
    "DecodeBindings": "", "FlowCtx": "hir node_shape load_param synth_param synth_zeros input wrap",
}  # fmt: skip
AROUND_STAGES = (
    "ModelFlow", "CompileProfile", "Emit", "WeightSource", "MapWeights", "BuiltModel", "ModelRecipe", "SideOutputs",
    "LayerStack",
)  # fmt: skip


def test_names_of_the_flow_context() -> None:
    for name in CONTEXT:
        assert getattr(rlx, name) is getattr(rlx.flow, name)
    for name in AROUND_STAGES:
        assert hasattr(rlx, name)
    assert rlx.SideOutputs is rlx.flow.SideOutputs and rlx.LayerStack is rlx.flow.LayerStack
    assert rlx.flow.stages is stages


def test_a_flow_stage_is_a_frozen_record_that_emits(device: str) -> None:
    takes(FlowStage.emit, "ctx, value")
    with pytest.raises(TypeError, match="abstract"):
        FlowStage()  # type: ignore[abstract]
    built = ModelFlow("f").input("x", (2,)).stage(Add(1.5)).build()
    close(built.compile(device).run({"x": numbers(2)})[0], numbers(2) + 1.5)
    classes = [c for c in vars(stages).values() if inspect.isclass(c) and issubclass(c, FlowStage)]
    for stage in classes:
        params = getattr(stage, "__dataclass_params__", None)
        assert stage is FlowStage or (params is not None and params.frozen), stage


def test_flow_value() -> None:
    takes(FlowValue, "id, shape")
    ctx = context()
    x = ctx.input("x", (2, 3))
    assert (FlowValue(x, x.shape).id, FlowValue(id=x, shape=(2, 3)).shape) == (x, (2, 3))


def gated_delta(inputs: dict[str, Array], state: Array | None = None) -> tuple[Array, Array]:
    """Token by token."""
    q, k, v, g, beta = (inputs[name].astype(np.float64) for name in ("q", "k", "v", "g", "beta"))
    batch, seq, heads, n = q.shape
    s = np.zeros((batch, heads, n, n)) if state is None else state.astype(np.float64)
    out = np.empty(q.shape)
    for t in range(seq):
        s = s * np.exp(g[:, t])[..., None, None]
        change = (v[:, t] - np.einsum("bhij,bhi->bhj", s, k[:, t])) * beta[:, t][..., None]
        s = s + k[:, t][..., :, None] * change[..., None, :]
        out[:, t] = np.einsum("bhij,bhi->bhj", s, q[:, t]) / math.sqrt(n)
    return out, s


GDN = {name: numbers(2, 5, 3, 4, seed=i, scale=0.4) for i, name in enumerate(("q", "k", "v"))} | {
    "g": -abs(numbers(2, 5, 3)), "beta": 1 / (1 + np.exp(-numbers(2, 5, 3, seed=1)))
}  # fmt: skip
STATE = numbers(2, 3, 4, 4, scale=0.5)


def test_gdn_input_slots(device: str) -> None:
    takes(GdnInputSlots, "q, k, v, g, beta")

    def publish(emit: rlx.Emit, value: FlowValue) -> None:
        emit.state.gdn = GdnInputSlots(*(emit.flow_input(name).id for name in GDN))

    flow = ModelFlow("gdn")
    for name, array in GDN.items():
        flow = flow.input(name, array.shape)
    built = flow.custom(publish).stage(stages.GdnScan(state_size=4)).build()
    close(built.compile(device).run(GDN)[0], gated_delta(GDN)[0])


def test_flow_state_has_what_stages_share() -> None:
    ctx = context(table=numbers(9, 6), w=numbers(6, 6))
    state = ctx.state
    assert (state.rope_cos, state.zero_beta, state.embed_weight, state.hidden_shape) == (None,) * 4
    assert (state.decode, state.residual_skip, state.residual_shape, state.gdn) == (None,) * 4
    tokens = ctx.wrap(ctx.input("tokens", (2, 3), "i32"))
    hidden = stages.Embed(weight_key="table").emit(ctx, tokens)
    assert state.embed_weight is state.loaded_params["table"] and state.hidden_shape == (2, 3, 6) == hidden.shape
    stages.RopeTables(cos=numbers(4, 2), sin=numbers(4, 2)).emit(ctx, hidden)
    assert state.rope_cos is not None and state.rope_sin is not None and state.rope_cos.shape == (4, 2)
    stages.ZeroBeta(name="zeros", len=6).emit(ctx, hidden)
    stages.ZeroBeta(name="others", len=2).emit(ctx, hidden)
    assert state.zero_beta is state.named["zeros"] and state.named["others"].shape == (2,)
    stages.ResidualSave().emit(ctx, hidden)
    assert state.residual_skip is hidden.id and state.residual_shape == hidden.shape
    inner = stages.ResidualSave().emit(ctx, ctx.wrap(hidden.id * 2.0))
    assert state.residual_skip is inner.id, "nesting works"
    stages.StoreStream("img").emit(ctx, hidden)
    assert state.streams == {"img": hidden}
    value, shape = state.inputs["tokens"]
    assert value is tokens.id and shape == (2, 3)
    named = stages.Named(name="n", inner=Add(1.0)).emit(ctx, hidden)
    assert state.named["n"] is named.id
    stages.Linear(weight_key="w").emit(ctx, hidden)
    stages.Linear(weight_key="w").emit(ctx, hidden)
    assert [n.attrs["name"] for n in ctx.hir().params].count("w") == 1, "two stages that load one key share one param"


def test_decode_bindings() -> None:
    takes(DecodeBindings, "cos, sin, mask, past_k, past_v")
    ctx = context()
    for name in ("rope_cos", "rope_sin", "past_k_0", "past_v_0", "past_k_1", "past_v_1", "mask"):
        ctx.input(name, (1, 4))
    stages.BindDecodeInputs(num_layers=2).emit(ctx, None)
    first = ctx.state.decode
    assert first is not None and first.mask is None
    assert first.past_k == [ctx.state.inputs[f"past_k_{i}"][0] for i in range(2)]
    stages.BindDecodeInputs(num_layers=1, use_custom_mask=True).emit(ctx, None)
    second = ctx.state.decode
    assert second is not None and second.mask is ctx.state.inputs["mask"][0] and len(second.past_v) == 1
    assert second.cos is ctx.state.inputs["rope_cos"][0] and second.sin is ctx.state.inputs["rope_sin"][0]


def test_flow_ctx(device: str) -> None:
    takes(FlowCtx, "module, params, weights, profile, state")
    takes(FlowCtx.load_param, "key, transpose=False")
    takes(FlowCtx.synth_param, "name, data, shape")
    takes(FlowCtx.synth_zeros, "name, len")
    takes(FlowCtx.input, "name, shape")
    takes(FlowCtx.node_shape, "id")
    takes(FlowCtx.wrap, "id, shape")
    w = numbers(4, 6)
    ctx = context(w=w)
    assert isinstance(ctx.module, GraphModule) and ctx.hir() is ctx.module.into_hir()
    assert isinstance(ctx.profile, CompileProfile) and isinstance(ctx.weights, rlx.WeightSource)
    x = ctx.input("x", (2, 6))
    assert ctx.node_shape(x) == (2, 6) and ctx.input("x", (2, 6)) is x
    wide = ctx.hir().matmul(x, ctx.load_param("w", transpose=True))
    back = wide @ ctx.load_param("w")
    assert len(ctx.hir().params) == 1, "both orientations are one param and a transposed view"
    table, zeros = ctx.synth_param("table", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0], (1, 6)), ctx.synth_zeros("zeros", 6)
    result = ctx.wrap(back * table + zeros, (2, 6))
    assert isinstance(result, FlowValue) and set(ctx.params) == {"table", "zeros"}
    ctx.hir().set_outputs([result.id])
    array = numbers(2, 6, seed=1)
    (actual,) = run(ctx.hir(), device, x=array, w=w, **ctx.params)
    close(actual, array.astype(np.float64) @ w.T @ w * np.arange(1, 7))
    with pytest.raises(RlxError, match="'v'"):
        ctx.load_param("v")


# == B. flow stages ==================================================================================================
HEADS = "num_heads, num_kv_heads, head_dim"
DECODE = f"layer_prefix, layer_idx, {HEADS}, eps"
QWEN = "qk_norm=True, attention_bias=False, kv_sink=None"
ENCODER = "layer_prefix, hidden_size, num_heads, head_dim, eps"
MASKED = "attention_mask_input='attention_mask'"
CAPPED = "score_scale=None, attn_logit_softcap=None"
PAST = "use_custom_mask=False, kv_out=None"
STAGES = {
    "Embed": "weight_key, axis=0",
    "RopeTables": "cos, sin, cos_key='rope.cos', sin_key='rope.sin'",
    "ZeroBeta": "name, len",
    "BindDecodeInputs": "num_layers, use_custom_mask=False",
    "AttnMask": "batch, seq, input_name=None",
    "LlamaDecodeLayer": f"{DECODE}, {PAST}",
    "LlamaDecoder": f"layer_prefix, {HEADS}, eps, mask=MaskKind.CAUSAL",
    "LlamaKvTap": "layer_prefix, head_dim, eps, outputs",
    "Repeat": "count, stage_for_index",
    "Named": "name, inner",
    "Sequence": "stages",
    "RmsNorm": "weight_key, eps",
    "GatherLastToken": "batch=None, input_name='last_token_idx', index=None",
    "LmHead": "vocab_size, hidden_size, weight_key='lm_head.weight', tie_word_embeddings=False",
    "Linear": "weight_key, transpose=True, bias_key=None",
    "ResidualSave": "",
    "ResidualAdd": "",
    "SwiGlu": "gate_key, up_key, down_key",
    "SelfAttnPrefill": f"q_key, k_key, v_key, {HEADS}, mask=MaskKind.CAUSAL, {CAPPED}",
    "GdnScan": "state_size, carry_state=False, state_key=None",
    "StoreStream": "name",
    "LoadStream": "name",
    "DualStream": "name, a, b, f",
    "Custom": "f, name=None",
    "BertEncoderLayer": f"{ENCODER}, qkv_style='bert', {MASKED}",
    "NomicEncoderLayer": f"{ENCODER}, {MASKED}",
    "Qwen3Decoder": f"layer_prefix, {HEADS}, eps, {QWEN}",
    "Qwen3DecodeLayer": f"{DECODE}, {QWEN}, {PAST}",
    "VitSelfAttn": "qkv_weight, qkv_bias, out_weight, out_bias, num_heads, head_dim",
    "LayerScale": "gamma_key",
    "VisionSwiGluFfn": "layer_prefix, eps",
    "ClsTokenPool": "",
    "LayerNorm": "gamma_key, beta_key, eps",
    "GeluFfn": "intermediate_w, intermediate_b, output_w, output_b, approx_gelu=False",
    "GatherFromInput": "input_name, weight_key, axis=0",
    "GatherAdd": "input_name, weight_key, axis=0",
    "EmbedScale": "hidden_size",
    "GemmaRmsNorm": "weight_key, eps",
    "LogitSoftcap": "cap",
    "DecodeRopeParams": "cos, sin",
    "GemmaDecodeLayer": f"{DECODE}, style, mask, {CAPPED}, {PAST}",
    "GemmaKvTap": "layer_prefix, head_dim, outputs",
    "GeGlu": "gate_key, up_key, down_key",
}
# These are content where no value flows.
WITHOUT_VALUE = (
    "RopeTables", "ZeroBeta", "BindDecodeInputs", "AttnMask", "DecodeRopeParams", "Repeat", "Sequence", "StoreStream",
    "LoadStream", "DualStream", "Custom",
)  # fmt: skip
NUMBERS = {"eps": 1e-6, "cap": 2.0, "cos": np.ones((1, 2)), "sin": np.ones((1, 2)), "mask": MaskKind.CAUSAL}


def example(name: str) -> FlowStage:
    """A stage with something for everything that it needs, by name."""
    special: dict[str, Any] = {
        "stages": [Add(1.0)], "inner": Add(1.0), "stage_for_index": lambda i: Add(1.0), "outputs": rlx.SideOutputs(),
        "f": lambda emit, *values: values if name == "DualStream" else None, "style": "gemma2", **NUMBERS,
    }  # fmt: skip
    counts = ("count", "len", "batch", "seq", "layer_idx", "state_size", "cap")
    arguments: dict[str, Any] = {}
    for p in inspect.signature(eval(f"lambda {STAGES[name]}: None")).parameters.values():
        is_count = p.name in counts or p.name.startswith("num_") or p.name.endswith(("_size", "_dim"))
        if p.default is p.empty:
            arguments[p.name] = special.get(p.name, 2 if is_count else p.name)
    result = getattr(stages, name)(**arguments)
    assert isinstance(result, FlowStage)
    return result


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_has_the_parameters_that_were_promised(name: str) -> None:
    """By name, with these defaults; what else there is may be left out."""
    assert len(STAGES) == 43
    have = inspect.signature(getattr(stages, name)).parameters
    for p in inspect.signature(eval(f"lambda {STAGES[name]}: None")).parameters.values():
        assert p.name in have, f"{name}: no parameter {p.name!r}"
        if p.default is not p.empty:
            assert have[p.name].default == p.default, f"{name}: {p.name} is {have[p.name].default!r} unless given"
    example(name)


@pytest.mark.parametrize("name", STAGES)
def test_a_stage_that_needs_a_value_says_its_name(name: str) -> None:
    ctx = context()
    stage = example(name)
    if name not in WITHOUT_VALUE:
        with pytest.raises(GraphError, match=name):
            stage.emit(ctx, None)
        return
    if name in ("Repeat", "Sequence"):
        stage = stages.Repeat(count=0, stage_for_index=example) if name == "Repeat" else stages.Sequence(stages=[])
    if name.endswith("Stream"):
        ctx.state.streams |= {stream: ctx.wrap(ctx.input(stream, (2, 2))) for stream in ("a", "b", "name")}
    if name == "BindDecodeInputs":
        for part, shape in {
            "rope_cos": (1, 2),
            "rope_sin": (1, 2),
            "past_k_{}": (1, 3, 4),
            "past_v_{}": (1, 3, 4),
        }.items():
            _ = [ctx.input(part.format(i), shape) for i in range(2 if "{" in part else 1)]
    actual = stage.emit(ctx, None)
    assert actual is None or name == "LoadStream"


def test_other_ways_to_name_the_weights_of_a_feed_forward() -> None:
    assert stages.SwiGlu.hf_mlp("p").gate_key == "p.gate_proj.weight"
    assert stages.GeGlu.hf_mlp("p").down_key == "p.mlp.down_proj.weight"
    assert stages.GeluFfn.hf_bert("p").intermediate_w == "p.intermediate.dense.weight"
    assert stages.GeluFfn.dinov2("p").output_b == "p.mlp.fc2.bias"


# How a flow appends each stage.
SIDE = rlx.SideOutputs()
LAYER = (0, 4, 2, 8, 1e-6)
FLUENT: dict[str, tuple[str, tuple[Any, ...]]] = {
    "Embed": ("embed", ("w",)), "RopeTables": ("rope_tables", (np.ones((1, 2)), np.ones((1, 2)))),
    "ZeroBeta": ("zero_beta_named", ("z", 3)), "BindDecodeInputs": ("bind_decode_inputs", (2,)),
    "AttnMask": ("attn_mask_ones", (1, 2)), "LlamaDecodeLayer": ("llama_decode_layer", (*LAYER, SIDE)),
    "LlamaDecoder": ("llama_prefill_layer", LAYER), "LlamaKvTap": ("llama_kv_tap", (0, 8, 1e-6, SIDE)),
    "Repeat": ("repeat_layers", (2, Add)), "Named": ("named_layer", ("n", Add(1.0))),
    "Sequence": ("sequence", (Add(1.0),)), "RmsNorm": ("rms_norm", ("w", 1e-6)),
    "GatherLastToken": ("gather_last_token", ()), "LmHead": ("lm_head", (9, 4)), "Linear": ("linear", ("w",)),
    "ResidualSave": ("residual_save", ()), "ResidualAdd": ("residual_add", ()), "SwiGlu": ("swiglu", ("g", "u", "d")),
    "SelfAttnPrefill": ("self_attn_prefill", ("q", "k", "v", 4, 2, 8)), "GdnScan": ("gdn_scan", (4,)),
    "StoreStream": ("store_stream", ("s",)), "LoadStream": ("load_stream", ("s",)),
    "DualStream": ("dual_stream", ("n", "a", "b", min)), "Custom": ("custom", (min,)),
    "BertEncoderLayer": ("bert_encoder_layer", ("p", 8, 2, 1e-6)),
    "NomicEncoderLayer": ("nomic_encoder_layer", ("p", 8, 2, 1e-6)), "Qwen3Decoder": ("qwen3_prefill_layer", LAYER),
    "Qwen3DecodeLayer": ("qwen3_decode_layer", LAYER), "VitSelfAttn": ("vit_self_attn", ("w", "b", "o", "c", 2, 4)),
    "LayerScale": ("layer_scale", ("g",)), "VisionSwiGluFfn": ("vision_swiglu_ffn", ("p", 1e-6)),
    "ClsTokenPool": ("cls_token_pool", ()), "LayerNorm": ("layer_norm", ("p", 1e-6)),
    "GeluFfn": ("gelu_ffn", ("a", "b", "c", "d")), "GatherFromInput": ("gather_from_input", ("i", "w")),
    "GatherAdd": ("gather_add", ("i", "w")), "EmbedScale": ("embed_scale", (4,)),
    "GemmaRmsNorm": ("gemma_rms_norm", ("w", 1e-6)), "LogitSoftcap": ("logit_softcap", (3.0,)),
    "DecodeRopeParams": ("decode_rope_params", (np.ones((1, 2)), np.ones((1, 2)))),
    "GemmaDecodeLayer": ("gemma_decode_layer", (*LAYER, "gemma2")), "GemmaKvTap": ("gemma_kv_tap", (0, 8, SIDE)),
    "GeGlu": ("geglu", ("g", "u", "d")),
}  # fmt: skip


@pytest.mark.parametrize("name", STAGES)
def test_a_flow_has_a_method_for_each_stage(name: str) -> None:
    method, arguments = FLUENT[name]
    flow = getattr(ModelFlow("f"), method)(*arguments, **({"tied": True} if name == "LmHead" else {}))
    (stage,) = flow.stages
    inner = stage.inner if isinstance(stage, stages.Named) and name != "Named" else stage
    assert type(inner) is getattr(stages, name)


# == C. GraphModule ==================================================================================================
MODULE = {
    "define": "name, build", "hir": "name", "mir": "name", "from_hir": "graph", "from_graph": "graph",
    "from_mir": "graph", "from_lir": "lir", "block": "name, build", "named": "name, build",
    "with_fusion_policy": "policy", "set_outputs": "outputs", "set_hir_outputs": "outputs", "finish_hir": "output",
    "input": "name, shape, dtype='f32'", "param": "name, shape, dtype='f32'",
    "linear": "x, w, bias=None, *, activation=None", "linear_fused": "x, w, bias, *, activation=None",
    "shared_linear_pair": "x, w_first, w_second", "swiglu_ffn": "x, up_w, gate_w, down_w",
    "residual_rms_norm": "x, residual, gamma, beta=None, *, eps",
    "attention": "q, k, v, mask=None, *, num_heads, head_dim, mask_kind",
    "depthwise_conv1d_causal": "x, weight, left_pad, *, kernel_size",
    "dequant_matmul": "x, w, scale=None, zp=None, *, scheme",
    "gated_delta_net": "q, k, v, g, beta, *, state_size",
    "gated_delta_net_carry": "q, k, v, g, beta, state, *, state_size",
    "rope": "x, cos, sin, *, head_dim, n_rot=None", "rms_norm": "x, gamma=None, beta=None, *, eps",
    "hir_mir": "op, inputs", "lower": "", "into_mir": "", "into_graph": "", "into_hir": "", "into_lir": "",
    "as_hir": "", "as_lir": "", "as_mir": "", "as_graph": "", "inspect": "",
}  # fmt: skip


def test_names_of_the_module() -> None:
    assert [s.name for s in GraphStage] == ["HIR", "MIR", "LIR"] and {p.name for p in FusionPolicy} == {
        "DIRECT",
        "FUSABLE",
    }
    for name, wanted in MODULE.items():
        takes(getattr(GraphModule, name), wanted)
    takes(Graph.define, "name, build")
    takes(Graph.hir, "name")


def silu(x: Array) -> Array:
    return np.asarray(x / (1 + np.exp(-x)))


def small(m: GraphModule) -> Value:
    x = m.input("x", ("n", 6))
    return m.named("ffn", lambda m: m.swiglu_ffn(x, m.param("u", (6, 8)), m.param("g", (6, 8)), m.param("d", (8, 6))))


SMALL = {"x": numbers(3, 6), "u": numbers(6, 8, seed=1), "g": numbers(6, 8, seed=2), "d": numbers(8, 6, seed=3)}


def small_expected() -> Array:
    x, u, g, d = (SMALL[name].astype(np.float64) for name in "xugd")
    return np.asarray((silu(x @ g) * (x @ u)) @ d)


def test_constructors_and_conversions(device: str) -> None:
    defined = GraphModule.define("small", small)
    by_hand = GraphModule.hir("small")
    by_hand.finish_hir(small(by_hand))
    graph = defined.as_hir()
    assert graph is not None and defined.name == "small" and defined.stage is GraphStage.HIR
    lowered = defined.lower()
    mir, lir = lowered.as_mir(), lowered.plan().into_lir()
    assert mir is not None and lir is not None
    modules = {
        GraphStage.HIR: [
            defined,
            by_hand,
            Graph.define("small", small),
            GraphModule(graph),
            GraphModule.from_hir(graph),
        ],
        GraphStage.MIR: [lowered, GraphModule(mir), GraphModule.from_mir(mir), GraphModule.from_graph(mir)],
        GraphStage.LIR: [GraphModule.from_lir(lir)],
    }
    for stage, actual in modules.items():
        for module in actual:
            assert module.stage is stage and module.name == "small" and module == actual[0]
            close(run(module, device, **SMALL)[0], small_expected())
    two = GraphModule.define("two", lambda m: (m.input("x", (2,)), m.input("y", (3,))))
    assert [o.shape for o in two.into_graph().outputs] == [(2,), (3,)]


def test_blocks_have_names() -> None:
    module = GraphModule.define("outer", lambda m: m.block("part", small))
    graph = module.as_hir()
    assert graph is not None and graph.outputs[0].node.origin.stage == "part.ffn"


def test_the_fusion_policy(device: str) -> None:
    module = GraphModule.define("small", small)
    assert module.fusion_policy is FusionPolicy.DIRECT and module.lower().fusion_policy is None
    assert module.with_fusion_policy(FusionPolicy.FUSABLE) is module and module.fusion_policy is FusionPolicy.FUSABLE
    close(run(module, device, **SMALL)[0], small_expected())
    for other in (module.lower(), module.plan()):
        assert other.fusion_policy is None
        with pytest.raises(GraphError, match="HIR"):
            other.with_fusion_policy(FusionPolicy.DIRECT)


def test_outputs_are_set_at_the_upper_levels(device: str) -> None:
    m = GraphModule.hir("m")
    x = m.input("x", (2, 3))
    y = m.rms_norm(x, eps=1e-5)
    for results in (m.set_outputs([y, x]), m.set_hir_outputs([x]), m.finish_hir(y)):
        assert results is m
    x64 = numbers(2, 3).astype(np.float64)
    close(run(m, device, x=numbers(2, 3))[0], x64 / np.sqrt((x64 * x64).mean(-1, keepdims=True) + 1e-5))
    low = m.lower()
    low.set_outputs([low.inputs[0][0]])
    close(run(low, device, x=numbers(2, 3))[0], numbers(2, 3))
    planned = m.plan()
    for attempt in (planned.set_outputs, planned.set_hir_outputs, planned.finish_hir):
        with pytest.raises(GraphError, match="LIR"):
            attempt(planned.outputs[0])


def test_leaves_at_hir_and_mir(device: str) -> None:
    for module in (GraphModule.hir("m"), GraphModule.mir("m")):
        module.set_outputs([module.input("x", (2,), "i32") + module.param("w", (2,), dtype="i32")])
        (actual,) = run(module, device, x=np.array([1, 2], np.int32), w=np.array([10, 20], np.int32))
        assert actual.dtype == np.int32 and actual.tolist() == [11, 22]
    with pytest.raises(GraphError, match="planned"):
        GraphModule.define("small", small).plan().input("y", (2,))


X, W, B = numbers(2, 5, 6), numbers(6, 8, seed=1), numbers(8, seed=2)
Q, K, V = (numbers(2, 5, 8, seed=i) for i in range(3))
COS, SIN = (f(np.outer(np.arange(7), [1.0, 0.3])).astype(np.float32) for f in (np.cos, np.sin))
MASK = np.array([[1, 1, 1, 1, 0], [1, 0, 1, 0, 1]], np.float32)


def gelu(x: Array) -> Array:
    return np.asarray(0.5 * x * (1 + erf(x / math.sqrt(2))))


def rms(x: Array) -> Array:
    x = x.astype(np.float64)
    return np.asarray(x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5))


def attended(q: Array, k: Array, v: Array, hidden: Array) -> Array:
    """Two heads of four; `hidden` broadcasts to [batch, heads, queries, keys]."""
    q, k, v = (a.astype(np.float64).reshape(2, 5, 2, 4) for a in (q, k, v))
    scores = np.exp(np.where(hidden, -np.inf, np.einsum("bqhd,bkhd->bhqk", q, k) / 2))
    return np.einsum("bhqk,bkhd->bqhd", scores / scores.sum(-1, keepdims=True), v).reshape(2, 5, 8)


def rotated(x: Array, n_rot: int) -> Array:
    """The first `n_rot` elements of heads of four, halves."""
    heads, half = x.astype(np.float64).reshape(2, 5, 2, 4), n_rot // 2
    a, b, rest = heads[..., :half], heads[..., half:n_rot], heads[..., n_rot:]
    c, s = (t[:5, None, :half] for t in (COS, SIN))
    return np.concatenate([a * c - b * s, b * c + a * s, rest], -1).reshape(2, 5, 8)


def convolved(x: Array, w: Array, left: Array) -> Array:
    padded = np.concatenate([left, x], 1).astype(np.float64)
    return np.asarray(sum(padded[:, k : k + 5] * w.reshape(6, 3)[:, k] for k in range(3)))


ROWS = 5
BLOCKS = np.random.default_rng(0).integers(0, 256, (ROWS, 144), np.uint8)
BLOCKS[:, :4] = np.array([0.01, 0.02], np.float16).view(np.uint8)  # the scales of Q4_K stand first
WIDE = numbers(3, 256, scale=0.1)
INT8, SCALES = np.random.default_rng(1).integers(-128, 128, (32, 4)).astype(np.int8), abs(numbers(2, 4)) + 0.1

# name -> (what it builds from values by name, arrays, what it gives)
BUILDERS: dict[str, tuple[Callable[[GraphModule, Any], Any], dict[str, Array], Callable[[], Any]]] = {
    "linear": (lambda m, v: m.linear(v("x"), v("w")), {"x": X, "w": W}, lambda: X.astype(np.float64) @ W),
    "linear with a bias": (
        lambda m, v: m.linear(v("x"), v("w"), v("b"), activation=rlx.Activation.GELU),
        {"x": X, "w": W, "b": B}, lambda: gelu(X.astype(np.float64) @ W + B),
    ),
    "linear_fused": (
        lambda m, v: m.linear_fused(v("x"), v("w"), v("b"), activation="silu"),
        {"x": X, "w": W, "b": B}, lambda: silu(X.astype(np.float64) @ W + B),
    ),
    "shared_linear_pair": (
        lambda m, v: m.shared_linear_pair(v("x"), v("w"), v("w2")),
        {"x": X, "w": W, "w2": -W[:, :3]}, lambda: (X.astype(np.float64) @ W, -X.astype(np.float64) @ W[:, :3]),
    ),
    "swiglu_ffn": (
        lambda m, v: m.swiglu_ffn(v("x"), v("up"), v("gate"), v("down")),
        {"x": X, "up": W, "gate": W[::-1].copy(), "down": W.T.copy()},
        lambda: (silu(X.astype(np.float64) @ W[::-1]) * (X.astype(np.float64) @ W)) @ W.T,
    ),
    "residual_rms_norm": (
        lambda m, v: m.residual_rms_norm(v("q"), v("k"), v("gamma"), v("beta"), eps=1e-5),
        {"q": Q, "k": K, "gamma": B, "beta": B + 1}, lambda: rms(Q.astype(np.float64) + K) * B + B + 1,
    ),
    "attention": (
        lambda m, v: m.attention(v("q"), v("k"), v("v"), num_heads=2, head_dim=4, mask_kind=MaskKind.CAUSAL),
        {"q": Q, "k": K, "v": V}, lambda: attended(Q, K, V, np.triu(np.ones((5, 5), bool), 1)),
    ),
    "attention that sees all": (
        lambda m, v: m.attention(v("q"), v("k"), v("v"), num_heads=2, head_dim=4, mask_kind=MaskKind.NONE),
        {"q": Q, "k": K, "v": V}, lambda: attended(Q, K, V, np.array(False)),
    ),
    "attention through a window": (
        lambda m, v: m.attention(v("q"), v("k"), v("v"), num_heads=2, head_dim=4, mask_kind=MaskKind.sliding(2)),
        {"q": Q, "k": K, "v": V},  # two keys, the token itself among them
        lambda: attended(Q, K, V, ~(np.tri(5, dtype=bool) & ~np.tri(5, k=-2, dtype=bool))),
    ),
    "attention with a mask": (
        lambda m, v: m.attention(v("q"), v("k"), v("v"), v("mask"), num_heads=2, head_dim=4, mask_kind=MaskKind.CUSTOM),
        {"q": Q, "k": K, "v": V, "mask": MASK}, lambda: attended(Q, K, V, MASK[:, None, None] < 0.5),
    ),
    "depthwise_conv1d_causal": (
        lambda m, v: m.depthwise_conv1d_causal(v("x"), v("w"), v("left"), kernel_size=3),
        {"x": X, "w": numbers(6, 1, 1, 3), "left": numbers(2, 2, 6)},
        lambda: convolved(X, numbers(6, 1, 1, 3), numbers(2, 2, 6)),
    ),
    "gated_delta_net": (
        lambda m, v: m.gated_delta_net(*map(v, GDN), state_size=4), GDN, lambda: gated_delta(GDN)[0],
    ),
    "gated_delta_net_carry": (
        lambda m, v: m.gated_delta_net_carry(*map(v, GDN), v("state"), state_size=4),
        {**GDN, "state": STATE}, lambda: gated_delta(GDN, STATE),
    ),
    "rope": (
        lambda m, v: m.rope(v("q"), v("cos"), v("sin"), head_dim=4), {"q": Q, "cos": COS, "sin": SIN},
        lambda: rotated(Q, 4),
    ),
    "rope of a part": (
        lambda m, v: m.rope(v("q"), v("cos"), v("sin"), head_dim=4, n_rot=2), {"q": Q, "cos": COS, "sin": SIN},
        lambda: rotated(Q, 2),
    ),
    "rms_norm": (
        lambda m, v: m.rms_norm(v("q"), v("gamma"), v("beta"), eps=1e-5), {"q": Q, "gamma": B, "beta": B - 1},
        lambda: rms(Q) * B + B - 1,
    ),
    "hir_mir": (
        lambda m, v: m.hir_mir("softmax", [m.hir_mir("mul", [v("x"), v("x")])], axis=-1), {"x": X},
        lambda: np.exp(X.astype(np.float64) ** 2) / np.exp(X.astype(np.float64) ** 2).sum(-1, keepdims=True),
    ),
    "dequant_matmul": (
        lambda m, v: m.dequant_matmul(v("x"), v("w"), v("scale"), scheme=QuantScheme.INT8_BLOCK(16)),
        {"x": numbers(3, 32), "w": INT8, "scale": SCALES},
        lambda: numbers(3, 32).astype(np.float64) @ (INT8 * np.repeat(SCALES.astype(np.float64), 16, 0)),
    ),
}  # fmt: skip


@pytest.mark.parametrize("policy", FusionPolicy)
@pytest.mark.parametrize("name", BUILDERS)
def test_builders_of_hir(name: str, policy: FusionPolicy, device: str) -> None:
    build, arrays, expected = BUILDERS[name]
    m = GraphModule.hir("m").with_fusion_policy(policy)
    leaf = {key: m.input(key, array.shape, array.dtype) for key, array in arrays.items()}
    m.set_outputs(build(m, leaf.__getitem__))
    wanted = expected() if isinstance(expected(), tuple) else (expected(),)
    for level in (m, m.lower()):
        for actual, want in zip(run(level, device, **arrays), wanted, strict=True):
            close(actual, want, 5e-6)


def test_a_packed_weight_is_multiplied_as_it_lies_in_files(device: str) -> None:
    m = GraphModule.hir("m")
    w = m.param("w", (ROWS, 256), QuantScheme.GGUF_Q4K.storage)
    m.set_outputs(m.dequant_matmul(m.input("x", (3, 256)), w, scheme=QuantScheme.GGUF_Q4K))
    stored = BLOCKS.view(QuantScheme.GGUF_Q4K.storage.numpy)
    exact = gguf.quants.dequantize(BLOCKS, gguf.GGMLQuantizationType.Q4_K).astype(np.float64)
    close(run(m, device, x=WIDE, w=stored)[0], WIDE @ exact.T)
    with pytest.raises(ShapeError, match="256"):  # the seeds have K=128, half a block
        m.dequant_matmul(m.input("y", (3, 128)), m.param("v", (ROWS, 128), "q4_k"), scheme=QuantScheme.GGUF_Q4K)


def test_a_given_shape_is_checked() -> None:
    g = Graph("g")
    x = g.input("x", ("n", 4))
    assert g.softmax(x, axis=-1, out_shape=("n", 4)).shape == x.shape
    with pytest.raises(ShapeError, match=r"matmul: the result is f32\[n, 2\], out_shape is \[n, 3\]"):
        g.matmul(x, g.param("w", (4, 2)), out_shape=("n", 3))
    m = GraphModule.hir("m")
    h, w, c = m.input("h", (1, 3, 4)), m.param("w", (4, 4)), m.param("c", (4,))
    heads, gates = m.input("heads", (1, 3, 1, 4)), m.input("gates", (1, 3, 1))
    makers: list[Callable[..., Value]] = [
        lambda **k: m.linear(h, w, **k), lambda **k: m.linear_fused(h, w, c, **k), lambda **k: m.rms_norm(h, c, **k),
        lambda **k: m.swiglu_ffn(h, w, w, w, **k), lambda **k: m.residual_rms_norm(h, h, c, eps=1e-5, **k),
        lambda **k: m.attention(h, h, h, num_heads=1, head_dim=4, **k),
        lambda **k: m.depthwise_conv1d_causal(h, m.constant(numbers(4, 3)), h[:, :2], kernel_size=3, **k),
        lambda **k: m.rope(h, m.constant(COS), m.constant(SIN), head_dim=4, **k),
        lambda **k: m.dequant_matmul(h, m.constant(INT8[:4]), m.constant(SCALES[:1]), scheme="int8/4", **k),
        lambda **k: m.gated_delta_net(heads, heads, heads, gates, gates, state_size=4, **k),
        lambda **k: m.hir_mir("exp", [h], **k),
    ]  # fmt: skip
    for make in makers:
        shape = make().shape
        assert make(out_shape=shape).shape == shape
        with pytest.raises(ShapeError, match=r"out_shape is \[7\]"):
            make(out_shape=(7,))


def test_levels_answer_for_themselves() -> None:
    hir = GraphModule.define("small", small)
    mir, lir = hir.lower(), hir.plan()
    assert mir.lower() is mir and lir.lower() is lir, "other levels unchanged"
    assert [m.into_hir() is not None for m in (hir, mir, lir)] == [m.as_hir() is not None for m in (hir, mir, lir)]
    assert [m.as_hir() is not None for m in (hir, mir, lir)] == [True, False, False]
    for name in ("into_lir", "as_lir"):
        assert [getattr(m, name)() is not None for m in (hir, mir, lir)] == [False, False, True]
    for name in ("as_mir", "as_graph"):
        assert [getattr(m, name)() is not None for m in (hir, mir, lir)] == [False, True, True]
    for name in ("into_mir", "into_graph"):
        assert all(getattr(m, name)() == mir.as_mir() for m in (hir, mir, lir))


def test_levels_are_shown() -> None:
    hir = GraphModule.define("small", small)
    mir, lir = hir.lower(), hir.plan()
    for module, wanted in ((hir, "swiglu_ffn"), (mir, "matmul"), (lir, "arena")):
        assert wanted in module.inspect() and f"{module.stage.value} @small" in module.inspect()
        again = GraphModule(Graph.parse(str(module)))
        assert again == (module if module is not lir else GraphModule(lir.into_mir()))
    assert "fusion direct" in hir.inspect()


def test_a_module_reads_as_its_graph() -> None:
    hir = GraphModule.define("small", small)
    mir, lir = hir.lower(), hir.plan()
    assert len(mir) == len(mir.nodes) == len(lir) == len(lir.nodes)
    assert mir.exp(mir.outputs[0]).shape == mir.outputs[0].shape, "at MIR it builds too"
    with pytest.raises(GraphError, match="planned"):
        lir.exp(lir.outputs[0])
    for read in (len, lambda m: m.nodes, lambda m: m.outputs):
        with pytest.raises(GraphError) as caught:
            read(hir)
        assert "lower()" in (caught.value.hint or "")


def test_a_lowering_error_names_block_expected_and_found() -> None:
    m = GraphModule.hir("m")
    x = m.input("x", (1, 2, 8))
    with pytest.raises((GraphError, LowerError), match=r"^attention: q is f32\[1, 2, 8\], expected 3 heads of 4"):
        m.attention(x, x, x, num_heads=3, head_dim=4, mask_kind=MaskKind.NONE)


# -- the seeds' own tests --------------------------------------------------------------------------------------------
def test_define_lowers_to_mir_graph() -> None:
    def ffn(m: GraphModule) -> Value:
        return m.linear(m.input("x", (4, 8)), m.param("w", (8, 16)), m.param("b", (16,)), activation="gelu")

    module = GraphModule.define("ffn", ffn)
    graph = module.lower().into_graph()
    assert module.stage is GraphStage.HIR and len(graph.outputs) == 1 and graph.outputs[0].shape == (4, 16)


def test_mir_module_deref_builds_graph() -> None:
    m = GraphModule.mir("g")
    m.set_outputs([m.matmul(m.input("x", (2, 4)), m.param("w", (4, 3)))])
    assert len(m) == 3 and m.stage is GraphStage.MIR and m.outputs[0].shape == (2, 3)


def test_hir_module_block_builders_via_graph_module() -> None:
    m = GraphModule.hir("blocks")
    x = m.input("x", (1, 4, 256))
    y = m.dequant_matmul(x, m.param("w", (64, 256), "q4_k"), scheme=QuantScheme.GGUF_Q4K)
    conv = m.depthwise_conv1d_causal(y, m.param("k", (64, 1, 1, 4)), m.input("left", (1, 3, 64)), kernel_size=4)
    heads = m.hir_mir("reshape", [conv], shape=(1, 4, 4, 16))
    gates = m.hir_mir("mean", [heads], axis=-1)
    out, state = m.gated_delta_net_carry(heads, heads, heads, gates, gates, m.input("s", (1, 4, 16, 16)), state_size=16)
    low = m.finish_hir((out, state)).lower()
    assert [o.shape for o in low.outputs] == [(1, 4, 4, 16), (1, 4, 16, 16)]


def test_graph_hir_entry_matches_define() -> None:
    by_hand = Graph.hir("small")
    assert by_hand.finish_hir(small(by_hand)) == Graph.define("small", small) == GraphModule.define("small", small)


# == D. execution variants ===========================================================================================
VARIANT = {
    "prefill": "batch, seq", "decode": "batch, past_seq, new_tokens", "encoder": "batch, seq",
    "with_extra": "symbol, size", "cache_key": "", "dim_binding": "",
}  # fmt: skip
BINDING = {"batch_seq": "batch, seq", "batch_past_seq": "batch, past", "get": "symbol", "set": "symbol, size"}


def test_names_of_variants() -> None:
    assert [p.name for p in ModelPhase] == ["PREFILL", "DECODE", "ENCODER", "INFERENCE"]
    takes(ModelVariant, "batch, seq, past_seq, phase, extra")
    for name, wanted in VARIANT.items():
        takes(getattr(ModelVariant, name), wanted)
    for name, wanted in BINDING.items():
        takes(getattr(DimBinding, name), wanted)


def test_prefill_binding_sets_batch_seq() -> None:
    for variant in (ModelVariant.prefill(2, 128), ModelVariant.encoder(2, 128)):
        binding = variant.dim_binding()
        assert (binding.get(sym.BATCH), binding.get(sym.SEQ), binding.get(sym.PAST_SEQ)) == (2, 128, None)
        assert binding.get(sym.ROWS) == 256, "ROWS is the expression BATCH × SEQ"


def test_decode_binding_sets_past_and_new_seq() -> None:
    binding = ModelVariant.decode(batch=3, past_seq=64, new_tokens=2).dim_binding()
    assert (binding.get(sym.BATCH), binding.get(sym.PAST_SEQ), binding.get(sym.SEQ)) == (3, 64, 2)


def test_cache_key_differs_by_phase() -> None:
    variants = [
        ModelVariant.prefill(1, 8),
        ModelVariant.encoder(1, 8),
        ModelVariant(1, 8),
        ModelVariant.decode(1, 0, 8),
    ]
    assert len({v.cache_key() for v in variants}) == 4


def test_cache_keys_differ_by_dims_and_extras_in_any_order() -> None:
    base = ModelVariant.prefill(1, 8)
    others = [ModelVariant.prefill(2, 8), ModelVariant.prefill(1, 9), base.with_extra("images", 2)]
    assert len({v.cache_key() for v in (base, *others)}) == 4
    one, other = base.with_extra("a", 1).with_extra("b", 2), base.with_extra("b", 2).with_extra("a", 1)
    assert one.cache_key() == other.cache_key()
    later = base.with_extra("a", 1).with_extra("a", 7)
    assert later.dim_binding().get("a") == 7, "later ones win"


def test_cache_keys_are_the_same_in_every_process() -> None:
    code = "import rlx; print(rlx.ModelVariant.decode(2, 64, 1).with_extra('images', 3).cache_key())"
    environments = [{**os.environ, "PYTHONHASHSEED": seed} for seed in ("1", "2")]
    keys = {
        subprocess.run([sys.executable, "-c", code], env=e, capture_output=True, text=True, check=True).stdout.strip()
        for e in environments
    }
    assert keys == {ModelVariant.decode(2, 64, 1).with_extra("images", 3).cache_key()}


def test_bindings() -> None:
    binding = DimBinding.batch_past_seq(2, 64)
    assert (binding.get(sym.BATCH), binding.get(sym.PAST_SEQ), binding.get(sym.SEQ)) == (2, 64, None)
    binding.set(sym.SEQ, 3)
    binding.set("heads", 4)
    assert binding.get("heads") == 4 and binding.get(sym.ROWS) == 6 and DimBinding.batch_seq(2, 3).get(sym.ROWS) == 6


def test_a_variant_specialises_a_graph(device: str) -> None:
    g = Graph("g")
    x = g.input("x", (sym.BATCH, sym.SEQ, "width"))
    g.set_outputs([x.sum(axis=1)])
    variant = ModelVariant.prefill(2, 3).with_extra("width", 4)
    f = rlx.ModelExecutionConfig(variant).compile(g, rlx.Session(device))
    assert f.input_types["x"].shape == (2, 3, 4)
    close(f.run({"x": numbers(2, 3, 4)})[0], numbers(2, 3, 4).astype(np.float64).sum(1))


# == E. sequence, scan and custom-function builders ==================================================================
_BACKWARD = "init, trajectory, upstream, xs, body_vjp, length"
_POINTS = "num_checkpoints, forward_body=None"
SEQUENCE_OPS = {
    "selective_scan": "x, delta, a, b, c, *, state_size",
    "gated_delta_net": "q, k, v, g, beta, *, state_size",
    "gated_delta_net_carry": "q, k, v, g, beta, state, *, state_size",
}
GRAPH_BUILDERS = {
    "scan": "init, body, length", "scan_trajectory": "init, body, length",
    "scan_with_xs": "init, xs, body, length", "scan_with_bcasts_and_xs": "init, bcasts, xs, body, length",
    "scan_checkpointed": "init, body, length, num_checkpoints",
    "scan_backward": f"{_BACKWARD}, *, save_trajectory",
    "scan_backward_xs": f"{_BACKWARD}, xs_idx, *, save_trajectory",
    "scan_backward_with_checkpoints": f"{_BACKWARD}, {_POINTS}, *, save_trajectory",
    "scan_backward_xs_with_checkpoints": f"{_BACKWARD}, xs_idx, {_POINTS}, *, save_trajectory",
    "custom_fn": "inputs, fwd_body, vjp_body=None, jvp_body=None",
    "custom_fn_multi": "inputs, fwd_body, vjp_body=None, jvp_body=None",
}  # fmt: skip
HANDLE = ("source", "n_outputs", "output", "sub_shapes", "offsets")


def test_names_of_the_builders() -> None:
    for name, wanted in SEQUENCE_OPS.items():
        op_takes(name, wanted)
    for name, wanted in GRAPH_BUILDERS.items():
        takes(getattr(Graph, name), wanted)
    for name in HANDLE:
        assert name in {f.name for f in dataclasses.fields(MultiOutputHandle)} or hasattr(MultiOutputHandle, name)
    assert isinstance(MultiOutputHandle.n_outputs, property)


def built(device: str, build: Callable[[Graph, Callable[[str], Value]], Any], **arrays: Array) -> list[Array]:
    """What a function builds from inputs by name, run on them."""
    g = Graph("g")
    leaf = {name: g.input(name, array.shape, array.dtype) for name, array in arrays.items()}
    g.set_outputs(build(g, leaf.__getitem__))
    return run(g, device, **arrays)


def test_selective_scan(device: str) -> None:
    x, delta, a = numbers(2, 5, 3), abs(numbers(2, 5, 3, seed=1)), -abs(numbers(3, 4))
    b, c = numbers(2, 5, 4), numbers(2, 5, 4, seed=1)
    arrays = {"x": x, "delta": delta, "a": a, "b": b, "c": c}
    (actual,) = built(device, lambda g, v: g.selective_scan(*map(v, arrays), state_size=4), **arrays)
    h, wanted = np.zeros((2, 3, 4)), np.empty((2, 5, 3))
    for t in range(5):
        step = delta[:, t, :, None].astype(np.float64)
        h = np.exp(step * a) * h + step * b[:, t, None] * x[:, t, :, None]
        wanted[:, t] = (h * c[:, t, None]).sum(-1)
    close(actual, wanted)


def test_gated_delta_net_with_and_without_carry(device: str) -> None:
    close(built(device, lambda g, v: g.gated_delta_net(*map(v, GDN), state_size=4), **GDN)[0], gated_delta(GDN)[0])
    actual = built(
        device, lambda g, v: g.gated_delta_net_carry(*map(v, GDN), v("state"), state_size=4), **GDN, state=STATE
    )
    for a, b in zip(actual, gated_delta(GDN, STATE), strict=True):
        close(a, b)


LENGTH = 6
INIT, XS, BIAS = numbers(3), numbers(LENGTH, 3, seed=1), numbers(3, seed=2)


def body(bcasts: int = 0, xs: int = 0) -> Graph:
    """carry -> tanh(carry · 0.9 [+ bias] [· x])."""
    g = Graph("body")
    carry = g.input("carry", (3,)) * 0.9
    for i in range(bcasts):
        carry = carry + g.input(f"b{i}", (3,))
    for i in range(xs):
        carry = carry * g.input(f"x{i}", (3,))
    return g.set_outputs([carry.tanh()])


def steps(bias: Array | float = 0.0, xs: Array | None = None) -> Array:
    """The carries after each step."""
    carry, rows = INIT.astype(np.float64), []
    for t in range(LENGTH):
        carry = np.tanh((carry * 0.9 + bias) * (1.0 if xs is None else xs[t]))
        rows.append(carry)
    return np.array(rows)


def test_scans(device: str) -> None:
    (actual,) = built(device, lambda g, v: g.scan(v("init"), body(), LENGTH), init=INIT)
    close(actual, steps()[-1])
    (rows,) = built(device, lambda g, v: g.scan_trajectory(v("init"), body(), LENGTH), init=INIT)
    close(rows, steps())
    assert rows[-1].tobytes() == actual.tobytes(), "the last row equals scan"
    (actual,) = built(device, lambda g, v: g.scan_with_xs(v("init"), [v("xs")], body(xs=1), LENGTH), init=INIT, xs=XS)
    close(actual, steps(xs=XS)[-1])
    (actual,) = built(
        device, lambda g, v: g.scan_with_bcasts_and_xs(v("init"), [v("b")], [v("xs")], body(1, 1), LENGTH),
        init=INIT, b=BIAS, xs=XS,
    )  # fmt: skip
    close(actual, steps(BIAS, XS)[-1])
    for k in (1, 4, LENGTH):
        (actual,) = built(device, lambda g, v, k=k: g.scan_checkpointed(v("init"), body(), LENGTH, k), init=INIT)
        close(actual, steps()[-1])
    for k in (0, LENGTH + 1):
        with pytest.raises(GraphError, match=f"{k} checkpoints for {LENGTH} steps"):
            built(device, lambda g, v, k=k: g.scan_checkpointed(v("init"), body(), LENGTH, k), init=INIT)


def body_vjp() -> Graph:
    """The gradients of carry and x of tanh(carry · 0.9 · x)."""
    g = Graph("body_vjp")
    carry, x, d = g.input("carry", (3,)), g.input("x0", (3,)), g.input("d_output", (3,))
    y = (carry * 0.9 * x).tanh()
    inner = d * (1.0 - y * y)
    return g.set_outputs([inner * 0.9 * x, inner * carry * 0.9])


def swept(upstream: Array, save: bool) -> tuple[Array, Array]:
    """The gradients of init and xs, step by step from the last."""
    before = np.concatenate([INIT[None].astype(np.float64), steps(xs=XS)[:-1]])
    d, dxs = np.zeros(3) if save else upstream.astype(np.float64), np.empty((LENGTH, 3))
    for t in reversed(range(LENGTH)):
        d = d + upstream[t] if save else d
        inner = d * (1 - np.tanh(before[t] * 0.9 * XS[t]) ** 2)
        d, dxs[t] = inner * 0.9 * XS[t], inner * before[t] * 0.9
    return d, dxs


@pytest.mark.parametrize("save", [False, True])
def test_scans_backwards(device: str, save: bool) -> None:
    rows = steps(xs=XS).astype(np.float32)
    upstream = numbers(LENGTH, 3, seed=5) if save else numbers(3, seed=5)
    arrays = {"init": INIT, "rows": rows, "up": upstream, "xs": XS}
    wanted = swept(upstream, save)

    def full_trajectory(g: Graph, v: Callable[[str], Value]) -> list[Value]:
        operands = (v("init"), v("rows"), v("up"), [v("xs")], body_vjp(), LENGTH)
        return [
            g.scan_backward(*operands, save_trajectory=save), g.scan_backward_xs(*operands, 0, save_trajectory=save)
        ]  # fmt: skip

    for actual, want in zip(built(device, full_trajectory, **arrays), wanted, strict=True):
        close(actual, want)
    g = Graph("g")
    leaves = {name: g.input(name, array.shape) for name, array in arrays.items()}
    lir = GraphModule(g.set_outputs(full_trajectory(g, leaves.__getitem__))).plan().as_lir()
    assert lir is not None and [n.op for n in lir.optimised.main.nodes].count("scan") == 1, "one sweep for both"
    stored = rows[[-(-(k + 1) * LENGTH // 4) - 1 for k in range(4)]]

    def pieces(g: Graph, v: Callable[[str], Value]) -> list[Value]:
        operands = (v("init"), v("stored"), v("up"), [v("xs")], body_vjp(), LENGTH)
        return [
            g.scan_backward_with_checkpoints(*operands, 4, body(xs=1), save_trajectory=save),
            g.scan_backward_xs_with_checkpoints(*operands, 0, 4, body(xs=1), save_trajectory=save),
        ]

    for actual, want in zip(built(device, pieces, init=INIT, stored=stored, up=upstream, xs=XS), wanted, strict=True):
        close(actual, want)
    with pytest.raises(GraphError, match="forward_body"):
        built(
            device, lambda g, v: g.scan_backward_with_checkpoints(
                v("init"), v("stored"), v("up"), [v("xs")], body_vjp(), LENGTH, 4, save_trajectory=save
            ), init=INIT, stored=stored, up=upstream, xs=XS,
        )  # fmt: skip


def test_gradients_of_a_scan_are_those_of_finite_differences(device: str) -> None:
    """Of the sum of the last carry, in float64: the sweep that the seeds describe is the derivative."""
    wanted, _ = swept(np.ones(3, np.float32), save=False)

    def total(init: Array) -> float:
        carry = init
        for t in range(LENGTH):
            carry = np.tanh(carry * 0.9 * XS[t])
        return float(carry.sum())

    for i in range(3):
        nudge = np.eye(3)[i] * 1e-6
        slope = (total(INIT.astype(np.float64) + nudge) - total(INIT.astype(np.float64) - nudge)) / 2e-6
        assert abs(slope - wanted[i]) < 1e-8


def graph(outputs: Callable[..., Any], **inputs: tuple[Any, ...]) -> Graph:
    """A body: inputs by name, and what a function makes of them."""
    g = Graph("body")
    leaves = [g.input(name, shape) for name, shape in inputs.items()]
    return g.set_outputs(outputs(*leaves))


def test_custom_fn(device: str) -> None:
    fwd = graph(lambda a, b: a * b.tanh(), a=(3,), b=(3,))
    vjp = graph(
        lambda a, b, y, d: [d * b.tanh(), d * a * (1.0 - b.tanh() * b.tanh())],
        a=(3,), b=(3,), primal_output=(3,), d_output=(3,),
    )  # fmt: skip
    jvp = graph(
        lambda a, b, s, t, y: s * b.tanh() + t * a * (1.0 - b.tanh() * b.tanh()),
        a=(3,), b=(3,), tangent_0=(3,), tangent_1=(3,), primal_output=(3,),
    )  # fmt: skip
    for rules in ((), (vjp,), (None, jvp), (vjp, jvp)):
        (actual,) = built(
            device, lambda g, v, rules=rules: g.custom_fn([v("a"), v("b")], fwd, *rules), a=INIT, b=BIAS
        )  # fmt: skip
        close(actual, INIT * np.tanh(BIAS.astype(np.float64)))


ONE = graph(lambda a: a.exp(), a=(3,))
WRONG: dict[str, tuple[tuple[Any, ...], str]] = {
    "fwd inputs": ((graph(lambda a, b: a + b, a=(3,), b=(3,)),), "fwd_body: has 2 inputs, expected 1"),
    "fwd outputs": ((graph(lambda a: [a, a], a=(3,)),), "fwd_body: has 2 outputs, expected 1"),
    "vjp without d_output": (
        (ONE, graph(lambda a, y: y, a=(3,), primal_output=(3,))), "vjp_body: has no input called 'd_output'",
    ),
    "vjp inputs": (
        (ONE, graph(lambda a, b, y, d: d, a=(3,), b=(3,), primal_output=(3,), d_output=(3,))),
        "vjp_body: has 2 inputs that stand for operands, expected 1",
    ),
    "vjp outputs": (
        (ONE, graph(lambda a, y, d: [d, d], a=(3,), primal_output=(3,), d_output=(3,))),
        "vjp_body: has 2 outputs, expected 1",
    ),
    "jvp without a tangent": ((ONE, None, graph(lambda a: a, a=(3,))), "jvp_body: has no input called 'tangent_0'"),
    "jvp outputs": (
        (ONE, None, graph(lambda a, t: [t, t], a=(3,), tangent_0=(3,))), "jvp_body: has 2 outputs, expected 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_counts_of_custom_functions_are_checked(what: str) -> None:
    bodies, message = WRONG[what]
    g = Graph("g")
    with pytest.raises(GraphError, match=message):
        g.custom_fn([g.input("x", (3,))], *bodies)


def test_custom_fn_multi(device: str) -> None:
    """Mixed types and run-time sizes: what the reference could not."""
    fwd = Graph("fwd")
    x = fwd.input("x", ("n", 4))
    largest, where = x.topk(k=1)
    fwd.set_outputs([x * 2.0, where, largest.reshape(-1)])
    g = Graph("g")
    handle = g.custom_fn_multi([g.input("x", ("n", 4))], fwd)
    assert isinstance(handle, MultiOutputHandle) and handle.n_outputs == 3
    n = rlx.dim("n")
    assert [tuple(s) for s in handle.sub_shapes] == [(n, 4), (n, 1), (n,)]
    assert list(handle.offsets) == [0, n * 4, n * 5]
    assert handle.output(1).node is handle.source and handle.output(1).dtype is not handle.output(0).dtype
    g.set_outputs([handle.output(i) for i in range(3)])
    array = numbers(5, 4)
    actual = run(g, device, x=array)
    close(actual[0], array * 2)
    assert actual[1].dtype.kind == "i" and actual[1][:, 0].tolist() == array.argmax(1).tolist()
    close(actual[2], array.max(1))
    with pytest.raises(GraphError, match="output 3 does not exist, there are 3"):
        handle.output(3)


def test_derivative_bodies_of_several_outputs(device: str) -> None:
    names = {f"{kind}_{i}": (3,) for kind in ("primal_output", "d_output") for i in range(2)}
    fwd = graph(lambda a: [a.exp(), a * a], a=(3,))
    vjp = graph(lambda a, y0, y1, d0, d1: d0 * y0 + d1 * a * 2.0, a=(3,), **names)
    actual = built(device, lambda g, v: list(g.custom_fn_multi([v("a")], fwd, vjp)), a=INIT)
    for a, want in zip(actual, (np.exp(INIT.astype(np.float64)), INIT.astype(np.float64) ** 2), strict=True):
        close(a, want)
    with pytest.raises(GraphError, match="'d_output_1'"):
        wrong = graph(lambda a, y0, y1, d0: d0, a=(3,), **{n: s for n, s in names.items() if n != "d_output_1"})
        g = Graph("g")
        g.custom_fn_multi([g.input("x", (3,))], fwd, wrong)

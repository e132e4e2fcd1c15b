"""Flows: what stages build, how nodes and errors say where they come from, and a Llama against NumPy's float64."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from small_llama import SETTINGS, Driver, difference, forward, random_weights

import rlx
from rlx.errors import BindError, CapabilityError, GraphError, ShapeError
from rlx.flow.built import BuiltModel
from rlx.flow.context import FlowCtx
from rlx.flow.flow import ModelFlow
from rlx.flow.layers import StageList
from rlx.flow.stages import (
    Embed,
    FlowStage,
    GatherAdd,
    GeluFfn,
    LayerNorm,
    LlamaDecoder,
    LmHead,
    Qwen3Decoder,
    Repeat,
    RmsNorm,
    SwiGlu,
)
from rlx.flow.state import FlowState, FlowValue
from rlx.flow.weights import MapWeights
from rlx.hir.lower import lower
from rlx.ir.graph import Graph
from rlx.ir.registry import HIR
from rlx.models import config as configs
from rlx.models import llama
from rlx.types import sym

Array = np.ndarray[Any, Any]
TOKENS = [7, 1, 42, 63, 0, 9, 9, 30]


def settings(**changes: Any) -> dict[str, Any]:
    return {**SETTINGS, **changes}


def built(c: dict[str, Any], weights: dict[str, Array], context: int = 128) -> BuiltModel:
    return llama.llama.flow(configs.from_hf(llama.Config, c, "test"), context).build(MapWeights(weights))


# -- meaning ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "num_key_value_heads": 1},
        {"attention_bias": True, "mlp_bias": True},
        {"head_dim": 10, "num_attention_heads": 3, "num_key_value_heads": 3},
        {"num_key_value_heads": None, "num_hidden_layers": 1, "rms_norm_eps": 0.1, "rope_theta": 50.0},
    ],
)
def test_a_llama_equals_its_forward_pass_in_numpy(changes: dict[str, Any]) -> None:
    c = settings(**changes)
    weights = random_weights(c)
    driver = Driver(built(c, weights), MapWeights(weights), 1, 128)
    assert difference(driver.forward([TOKENS], [0])[0], forward(c, weights, TOKENS)) < 1e-5


def test_a_window_shows_the_last_keys_and_the_token_itself() -> None:
    c = settings(model_type="mistral", sliding_window=3)
    weights = random_weights(c)
    config = configs.from_hf(llama.MistralConfig, c, "test")
    flow = llama.mistral.flow(config, 128)
    wanted = forward(c, weights, TOKENS, window=3)
    for chunk in (len(TOKENS), 1, 3):
        driver = Driver(flow.build(MapWeights(weights)), MapWeights(weights), 1, 128)
        assert difference(driver.by_chunks(TOKENS, chunk), wanted) < 1e-5
    assert difference(wanted, forward(c, weights, TOKENS)) > 0.1  # the window matters


def test_heads_of_qwen3_are_normed_before_they_turn() -> None:
    c = settings(num_hidden_layers=1)
    plain = random_weights(c)
    norms = {f"model.layers.0.self_attn.{n}_norm.weight": np.linspace(0.5, 2, 8, dtype=np.float32) for n in "qk"}
    flow = ModelFlow("q").input("tokens", (sym.BATCH, sym.SEQ), "i32").kv_cache(1, 2, 8).rope_tables(*tables(8))
    flow = flow.token_embed().stage(Qwen3Decoder("model.layers.0", 4, 2, 8, 1e-5, layer_idx=0)).final_norm(1e-5)
    flow = flow.gather_last_token().lm_head(64, 32, tied=False)
    weights = MapWeights(plain | norms)
    logits = Driver(flow.build(weights), weights, 1, 64).forward([TOKENS], [0])[0]
    assert difference(logits, forward(c, plain | norms, TOKENS)) < 1e-5
    assert difference(logits, forward(c, plain, TOKENS)) > 0.01  # the norms matter


def tables(head_dim: int) -> tuple[Array, Array]:
    angles = np.arange(64)[:, None] / 10000.0 ** (np.arange(0, head_dim, 2) / head_dim)
    return np.cos(angles), np.sin(angles)


def test_without_a_cache_attention_is_over_the_tokens_given() -> None:
    c = settings()
    weights = random_weights(c)
    flow = ModelFlow("prefill").input("tokens", (sym.BATCH, sym.SEQ), "i32").rope_tables(*tables(8)).token_embed()
    for i in range(2):
        flow = flow.llama_prefill_layer(i, 4, 2, 8, 1e-5)
    model = flow.final_norm(1e-5).lm_head(64, 32, tied=False).build(MapWeights(weights))
    (logits,) = model.compile().run({"tokens": np.array([TOKENS], np.int32)})
    assert model.cache is None and difference(logits[0], forward(c, weights, TOKENS)) < 1e-5


@pytest.mark.parametrize(
    ("name", "activation"),
    [
        ("gelu", lambda x: x * np.vectorize(math.erfc)(-x / 2**0.5) / 2),
        ("gelu_new", lambda x: x / 2 * (1 + np.tanh((2 / np.pi) ** 0.5 * (x + 0.044715 * x**3)))),
        ("relu", lambda x: np.maximum(x, 0)),
        ("silu", lambda x: x / (1 + np.exp(-x))),
    ],
)
def test_activations_are_those_of_their_names(name: str, activation: Callable[[Array], Array]) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 6)).astype(np.float32)
    w = {
        k: rng.standard_normal(s).astype(np.float32)
        for k, s in {"a": (9, 6), "b": (9,), "c": (6, 9), "d": (6,)}.items()
    }
    model = ModelFlow("f").input("x", (3, 6)).stage(GeluFfn(*"abcd", activation=name)).build(MapWeights(w))
    f = rlx.compile(model.module)
    f.set_params(w)
    wanted = activation(x.astype(np.float64) @ w["a"].T + w["b"]) @ w["c"].T + w["d"]
    assert np.abs(f.run({"x": x})[0] - wanted).max() < 1e-5


# -- where things come from ------------------------------------------------------------------------------------------
def test_nodes_carry_the_path_of_their_stage() -> None:
    c = settings()
    module = built(c, random_weights(c)).module
    paths = {node.origin.stage for node in module.nodes}
    assert {"embed", "layers.0.attn", "layers.1.attn", "layers.1.ffn.norm", "layers.1.ffn", "norm", "head"} <= paths
    blocks = {(node.origin.stage, node.op) for node in module.nodes}
    assert ("layers.1.attn", "cached_self_attention") in blocks and ("layers.0.attn", "linear_stored") in blocks
    assert ("layers.1.ffn", "gated_ffn") in blocks and ("norm", "norm") in blocks
    ops = {(node.origin.stage, node.op) for node in lower(module).nodes}
    assert ("layers.1.attn", "cached_attention") in ops and ("layers.0.attn", "rope") in ops
    assert ("layers.1.ffn", "silu") in ops and ("norm", "rms_norm") in ops


def test_a_missing_weight_names_its_stage_and_the_nearest_key() -> None:
    c = settings()
    weights = random_weights(c)
    weights["model.layers.1.mlp.up_pro.weight"] = weights.pop("model.layers.1.mlp.up_proj.weight")
    with pytest.raises(
        BindError, match=r"weight 'model\.layers\.1\.mlp\.up_proj\.weight' is not among the weights"
    ) as caught:
        built(c, weights)
    notes = "\n".join(caught.value.notes)
    assert "did you mean 'model.layers.1.mlp.up_pro.weight'" in notes
    assert [note for note in caught.value.notes if "in stage" in note] == ["  in stage: layers.1.ffn"]


@pytest.mark.parametrize(
    ("key", "shape", "wanted", "stage"),
    [
        ("model.embed_tokens.weight", (63, 32), (64, 32), "embed"),
        ("model.layers.1.self_attn.q_proj.weight", (16, 32), (32, 32), "layers.1.attn"),
        ("model.layers.0.self_attn.k_proj.weight", (32, 32), (16, 32), "layers.0.attn"),
        ("model.layers.0.self_attn.o_proj.weight", (32, 16), (32, 32), "layers.0.attn"),
        ("model.layers.0.self_attn.v_proj.bias", (32,), (16,), "layers.0.attn"),
        ("model.layers.1.mlp.gate_proj.weight", (47, 32), (48, 32), "layers.1.ffn"),
        ("model.layers.1.mlp.down_proj.weight", (48, 32), (32, 48), "layers.1.ffn"),
        ("model.layers.1.mlp.up_proj.bias", (1,), (48,), "layers.1.ffn"),
        ("model.layers.1.input_layernorm.weight", (1,), (32,), "layers.1.attn"),
        ("model.norm.weight", (33,), (32,), "norm"),
        ("lm_head.weight", (64, 31), (64, 32), "head"),
    ],
)
def test_a_weight_of_another_shape_names_stage_key_and_shapes(
    key: str, shape: tuple[int, ...], wanted: tuple[int, ...], stage: str
) -> None:
    c = settings(attention_bias=True, mlp_bias=True)
    weights = random_weights(c)
    weights[key] = np.zeros(shape, np.float32)
    with pytest.raises(ShapeError, match=re.escape(f"weight {key!r}")) as caught:
        built(c, weights)
    assert f"shape is {list(shape)}, expected {list(wanted)}" in str(caught.value)  # as the file has them
    assert caught.value.notes == [f"  in stage: {stage}"]


def test_a_weight_that_does_not_fit_the_value_is_named_too() -> None:
    weights = MapWeights({"g": np.zeros((5, 9)), "u": np.zeros((5, 9)), "d": np.zeros((6, 5))})
    with pytest.raises(ShapeError, match=r"weight 'g': takes vectors of 9, the value is f32\[3, 6\]") as caught:
        ModelFlow("f").input("x", (3, 6)).stage(SwiGlu("g", "u", "d")).build(weights)
    assert "test_flow.py:" in caught.value.notes[0] and caught.value.notes[-1] == "  in stage: ffn"


@pytest.mark.parametrize(
    "stage",
    [
        Embed("w"), GatherAdd("i", "w"), RmsNorm("w", 1e-5), LayerNorm("w", "b", 1e-5), SwiGlu("g", "u", "d"),
        GeluFfn(*"abcd"), LlamaDecoder("p", 4, 2, 8, 1e-5), Qwen3Decoder("p", 4, 2, 8, 1e-5), LmHead(64, 32),
    ],
    ids=lambda stage: type(stage).__name__,
)  # fmt: skip
def test_a_stage_that_needs_a_value_and_gets_none_says_so(stage: FlowStage) -> None:
    with pytest.raises(GraphError, match=f"stage {type(stage).__name__}: needs a value"):
        stage.emit(FlowCtx(Graph("g", level=HIR)), None)


def test_layers_without_rope_tables_say_what_is_missing() -> None:
    c = settings()
    flow = ModelFlow("f").input("tokens", (sym.BATCH, sym.SEQ), "i32").token_embed()
    with pytest.raises(GraphError, match="stage LlamaDecoder: no RoPE tables flow here"):
        flow.stage(LlamaDecoder("model.layers.0", 4, 2, 8, 1e-5)).build(MapWeights(random_weights(c)))


def test_a_tied_head_needs_a_table() -> None:
    with pytest.raises(GraphError, match="stage LmHead: is tied"):
        ModelFlow("f").input("x", (3, 6)).lm_head(9, 6, tied=True).build(MapWeights({}))


def test_an_unknown_activation_is_refused_by_name() -> None:
    weights = MapWeights({k: np.zeros((6, 6) if k in "ac" else 6) for k in "abcd"})
    with pytest.raises(CapabilityError, match="activation 'nosuch'"):
        ModelFlow("f").input("x", (3, 6)).stage(GeluFfn(*"abcd", activation="nosuch")).build(weights)


# -- the pieces ------------------------------------------------------------------------------------------------------
def test_a_flow_is_a_value_and_building_leaves_it_alone() -> None:
    flow = ModelFlow("f").input("x", (3, 6))
    longer = flow.stage(RmsNorm("w", 1e-5))
    assert flow.stages == () and len(longer.stages) == 1
    weights = MapWeights({"w": np.ones(6, np.float32)})
    assert longer.build(weights).module == longer.build(weights).module


def test_a_flow_without_an_input_cannot_be_built() -> None:
    with pytest.raises(GraphError, match="flow 'f': has no input"):
        ModelFlow("f").build(MapWeights({}))


def test_what_is_built_knows_its_outputs_and_what_stages_made() -> None:
    c = settings()
    model = built(c, random_weights(c), context=40)
    assert model.output_names == ["logits"] and set(model.params.computed) == {"rope.cos", "rope.sin"}
    assert set(model.params) == {*random_weights(c), "rope.cos", "rope.sin"} and len(model.params) == 23
    assert model.params["rope.cos"].shape == (40, 4)
    assert model.cache is not None and (model.cache.layers, model.cache.kv_heads, model.cache.head_dim) == (2, 2, 8)


def test_two_stages_that_load_one_key_share_one_param() -> None:
    ctx = FlowCtx(Graph("g", level=HIR), weights=MapWeights({"w": np.zeros((4, 6), np.float32)}))
    first, again, transposed = ctx.load_param("w"), ctx.load_param("w"), ctx.load_param("w", transpose=True)
    assert first is again and transposed.shape == (6, 4)
    assert [node.op for node in ctx.module.nodes].count("param") == 1


def test_an_input_by_name_is_one_input() -> None:
    ctx = FlowCtx(Graph("g", level=HIR))
    assert ctx.input("x", (2, 3)) is ctx.input("x", (2, 3)) and list(ctx.state.inputs) == ["x"]


def test_a_value_that_flows_knows_its_shape() -> None:
    ctx = FlowCtx(Graph("g", level=HIR))
    value = ctx.wrap(ctx.input("x", (2, 3)))
    assert isinstance(value, FlowValue) and value.shape == (2, 3) and ctx.need(value, "s") is value.id
    assert ctx.hir() is ctx.module and isinstance(ctx.state, FlowState)


def test_repeat_numbers_its_stages() -> None:
    @dataclass(frozen=True)
    class Add(FlowStage):
        amount: int

        def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
            return ctx.wrap(ctx.need(value, "Add") + float(self.amount))

    model = ModelFlow("f").input("x", (3,)).stage(Repeat(3, Add, name="steps")).build(MapWeights({}))
    f = rlx.compile(model.module)
    assert f.run({"x": np.zeros(3, np.float32)})[0].tolist() == [3, 3, 3]  # 0 + 1 + 2
    assert {"steps.0", "steps.1", "steps.2"} <= {node.origin.stage for node in model.module.nodes}


def test_weights_of_a_dictionary_say_the_nearest_name() -> None:
    weights = MapWeights({"norm.weight": np.ones(3, np.float32)})
    assert weights.has("norm.weight") and str(weights.type("norm.weight")) == "f32[3]"
    with pytest.raises(BindError, match=r"no tensor is called 'norm\.wieght'") as caught:
        weights.array("norm.wieght")
    assert caught.value.hint == "did you mean 'norm.weight'?"


def test_help_explains_every_method_of_a_flow() -> None:
    methods = [name for name in dir(StageList) if not name.startswith("_") and callable(getattr(StageList, name))]
    assert len(methods) > 60
    assert [name for name in methods if not inspect.getdoc(getattr(StageList, name))] == []

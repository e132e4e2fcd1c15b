"""What a built model can be made into, and what a flow can be built with."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import pytest
import small_llama

import rlx
from rlx import BuiltModel, Emit, FlowValue, GraphModule, ModelExecutionConfig, ModelFlow, sym
from rlx.errors import BindError, GraphError
from rlx.flow.weights import MapWeights
from rlx.ir.graph import Graph

Array = np.ndarray[Any, Any]
W = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
X = np.random.default_rng(1).normal(size=(2, 4)).astype(np.float32)


def flow() -> ModelFlow:
    return ModelFlow("f").input("x", ("rows", 4)).linear("w")


def run(built: BuiltModel, **inputs: Array) -> list[Array]:
    return built.compile().run(inputs)


def test_parts_of_a_model() -> None:
    built = flow().build({"w": W})
    module, params = built.into_parts()
    assert isinstance(module, GraphModule) and module.as_hir() is not None and np.array_equal(params["w"], W)
    graph, params = built.into_graph_parts()
    assert isinstance(graph, Graph) and graph.level == "mir" and list(params) == ["w"]
    lowered = built.lower()
    assert lowered.module.level == "mir" and lowered.lower().module is lowered.module
    for each in (built, lowered):
        np.testing.assert_allclose(run(each, x=X)[0], X @ W.T, rtol=1e-5)
    with pytest.raises(GraphError, match="'f' is at MIR"):
        lowered.into_hir()


def test_a_model_of_a_graph_that_was_built_by_hand() -> None:
    module = Graph.define("by hand", lambda m: m.linear(m.input("x", (2, 4)), m.param("w", (4, 3))))
    built = BuiltModel.from_hir(module, {"w": W.T})
    assert built.output_names == ["output"] and built.primary_shape == (2, 3)
    np.testing.assert_allclose(run(built, x=X)[0], X @ W.T, rtol=1e-5)
    again = BuiltModel.from_graph(module.into_graph(), {"w": np.ascontiguousarray(W.T)}, ["y"])
    assert again.output_names == ["y"]
    np.testing.assert_allclose(run(again, x=X)[0], X @ W.T, rtol=1e-5)
    with pytest.raises(GraphError, match="from_graph: the graph is at"):
        BuiltModel.from_graph(module)
    with pytest.raises(GraphError, match="2 names for 1 outputs"):
        BuiltModel.from_hir(module, {}, ["a", "b"])
    with pytest.raises(BindError, match="no param of 'by hand' is called 'v'"):
        BuiltModel.from_hir(module, {"v": W})


def test_a_model_for_one_variant() -> None:
    built = ModelFlow("f").input("x", (sym.BATCH, sym.SEQ, 4)).linear("w").build({"w": W})
    config = ModelExecutionConfig.encoder(2, 5)
    special = built.with_execution_config(config)
    assert built.primary_shape == (sym.BATCH, sym.SEQ, 3)
    assert special.primary_shape == (2, 5, 3) and special.profile == config.profile


def test_typed_params_are_those_that_are_not_f32() -> None:
    wide = np.random.default_rng(2).normal(size=(3, 32)).astype(np.float32)
    blocks = gguf.quants.quantize(wide, gguf.GGMLQuantizationType.Q8_0)
    packed = blocks.view(rlx.dtype("q8_0").numpy)
    base = ModelFlow("f").input("x", (2, 32)).linear("w", bias_key="b")
    built = base.build_with({"w": wide, "b": np.zeros(3, np.float32)}, {"w": packed})
    assert built.typed_params == [("w", blocks.tobytes(), rlx.dtype("q8_0"))]
    x = np.random.default_rng(3).normal(size=(2, 32)).astype(np.float32)
    numbers = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.Q8_0)
    np.testing.assert_allclose(run(built, x=x)[0], x @ numbers.T, rtol=2e-2, atol=2e-2)


def test_extensions_build_on_after_the_last_stage() -> None:
    def total(emit: Emit, output: FlowValue) -> dict[str, FlowValue]:
        return {"total": output.sum(axis=-1), "input": emit.flow_input("x")}

    built = flow().with_extensions(total, lambda emit, output: None).build({"w": W})
    assert built.output_names == ["output", "total", "input"]
    outputs = run(built, x=X)
    np.testing.assert_allclose(outputs[1], (X @ W.T).sum(-1), rtol=1e-5)
    assert np.array_equal(outputs[2], X)
    with pytest.raises(GraphError, match="an extension returned a int, expected outputs by name"):
        flow().with_extensions(lambda emit, output: 3).build({"w": W})  # type: ignore[arg-type, return-value]


def test_a_cut_has_what_comes_after_it() -> None:
    built = ModelFlow("f").input("x", (2, 4)).linear("w").custom_named("twice", lambda emit, v: v * 2.0).build({"w": W})
    middle = built.module.outputs[0].node.operands[0]
    assert middle is not None
    part = built.cut({"middle": middle}, {"end": built.module.outputs[0]})
    assert part.output_names == ["end"] and not part.module.params
    assert [node.attrs["name"] for node in part.module.inputs] == ["x", "middle"]
    array = np.arange(6, dtype=np.float32).reshape(2, 3)
    assert np.array_equal(run(part, x=X, middle=array)[0], 2 * array)


def test_a_layer_of_small_stages_is_the_layer() -> None:
    c = small_llama.SETTINGS
    weights = small_llama.random_weights(c)
    table = np.random.default_rng(4).normal(size=(8, 4)).astype(np.float32)
    x = np.random.default_rng(5).normal(size=(1, 5, c["hidden_size"])).astype(np.float32)
    base = ModelFlow("f").input("x", (1, 5, c["hidden_size"])).rope_tables(np.cos(table), np.sin(table))
    heads = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"] // c["num_attention_heads"]
    results = []
    for mask in (rlx.MaskKind.CAUSAL, rlx.MaskKind.sliding(2)):
        for method in ("llama_prefill_layer", "llama_prefill_layer_composed"):
            built = getattr(base, method)(0, *heads, 1e-5, mask=mask).build(weights)
            results += run(built, x=x)
    for single, composed in (results[:2], results[2:]):
        np.testing.assert_allclose(composed, single, rtol=1e-5, atol=1e-5)
    assert np.abs(results[0] - results[2]).max() > 1e-3


def test_a_model_of_small_stages_takes_part_in_a_cache() -> None:
    """Prefill and steps of a flow that was put together by hand, against NumPy."""
    c = small_llama.SETTINGS
    weights = small_llama.random_weights(c)
    heads = c["num_attention_heads"], c["num_key_value_heads"], c["hidden_size"] // c["num_attention_heads"]
    angles = np.outer(np.arange(32), c["rope_theta"] ** (-np.arange(0, heads[2], 2) / heads[2]))
    flow = ModelFlow("f").input("tokens", ("batch", "seq"), "i32").rope_tables(np.cos(angles), np.sin(angles))
    flow = flow.kv_cache(c["num_hidden_layers"], *heads[1:]).token_embed()
    for i in range(c["num_hidden_layers"]):
        flow = flow.llama_prefill_layer_composed(i, *heads, c["rms_norm_eps"])
    flow = flow.final_norm(c["rms_norm_eps"]).gather_last_token()
    flow = flow.lm_head(c["vocab_size"], c["hidden_size"], tied=c["tie_word_embeddings"])
    driver = small_llama.Driver(flow.build(weights), MapWeights(weights), 1, 32)
    tokens = [7, 1, 42, 63, 0, 9, 5]
    for chunk in (7, 3, 1):
        logits = driver.by_chunks(tokens, chunk)
        assert small_llama.difference(logits, small_llama.forward(c, weights, tokens)) < 1e-4
    plain = ModelFlow("f").input("x", ("batch", "seq", 8)).kv_cache(1, 2, 4)
    plain = plain.self_attn_prefill("q", "k", "v", 2, 2, 4, rope=None)
    keys = {n: np.ones((8, 8), np.float32) for n in "qkv"}
    assert plain.build(keys).module.has("keys.0")  # layers without an index are counted
    with pytest.raises(GraphError, match="kv_cache: layer 1 is not one of its 1"):
        plain.self_attn_prefill("q", "k", "v", 2, 2, 4, rope=None).build(keys)

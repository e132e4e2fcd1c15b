"""GraphModule: every name and every rule of the three levels, and that all levels compute the same."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
from scipy.special import erf
from targets import supported

import rlx
from rlx import FusionPolicy, Graph, GraphModule, GraphStage, LirModule, MaskKind, Value
from rlx.errors import BindError, CapabilityError, GraphError, ParseError, ShapeError
from rlx.ir.registry import HIR
from rlx.lir.program import Program
from rlx.profile import CompileProfile, Fusion

Array = np.ndarray[Any, Any]
DEVICES = pytest.mark.parametrize("device", ["reference", "cpu"])


def mlp(m: GraphModule) -> Value:
    """gelu(x w + b), then a gated feed-forward, in two named parts."""
    x = m.input("x", ("n", 8))
    h = m.named("up", lambda m: m.linear(x, m.param("w", (8, 16)), m.param("b", (16,)), activation="gelu"))
    return m.block(
        "ffn",
        lambda m: m.swiglu_ffn(h, m.param("u", (16, 12)), m.param("g", (16, 12)), m.param("d", (12, 16))),
    )


def weights(module: GraphModule) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    graph = module.into_mir()
    return {n.attrs["name"]: rng.standard_normal(n.types[0].shape).astype(np.float32) * 0.3 for n in graph.params}


X = np.random.default_rng(1).standard_normal((5, 8)).astype(np.float32)


def mlp_expected(w: dict[str, Array]) -> Array:
    a = {k: v.astype(np.float64) for k, v in w.items()}
    h = X @ a["w"] + a["b"]
    h = 0.5 * h * (1 + erf(h / np.sqrt(2)))
    gate = h @ a["g"]
    return np.asarray((gate / (1 + np.exp(-gate)) * (h @ a["u"])) @ a["d"])


def run(module: Any, device: str, inputs: dict[str, Array], w: dict[str, Array], **options: Any) -> list[Array]:
    f = rlx.compile(module, device, **options)
    f.set_params(w)
    return f.run(inputs)


# -- the seeds' own tests ---------------------------------------------------------------------------------------------
def test_define_lowers_to_mir_graph() -> None:
    module = GraphModule.define("mlp", mlp)
    assert module.stage is GraphStage.HIR and module.name == "mlp"
    low = module.lower()
    assert low.stage is GraphStage.MIR and low.name == "mlp" and len(low) > 0
    assert not any(n.definition.level == HIR for n in low.nodes)
    assert module.stage is GraphStage.HIR, "lowering leaves the module as it was"


def test_mir_module_deref_builds_graph() -> None:
    m = GraphModule.mir("g")
    x = m.input("x", (2, 3))
    y = m.softmax(m.matmul(x, m.param("w", (3, 4))), axis=-1)
    m.set_outputs([y])
    assert len(m) == 4 and [n.op for n in m.nodes] == ["input", "param", "matmul", "softmax"]
    assert m.into_graph() == Graph.parse(str(m))


def test_hir_module_block_builders_via_graph_module() -> None:
    m = GraphModule.hir("blocks")
    x, w = m.input("x", (1, 4, 256)), m.param("w", (256, 16))
    y = m.linear(x, w)
    z = m.swiglu_ffn(y, m.param("u", (16, 8)), m.param("g", (16, 8)), m.param("d", (8, 16)))
    a, b = m.shared_linear_pair(z, m.param("w1", (16, 16)), m.param("w2", (16, 16)))
    c = m.residual_rms_norm(a, b, m.param("s", (16,)), eps=1e-6)
    conv = m.depthwise_conv1d_causal(c, m.param("k", (16, 3)), m.input("pad", (1, 2, 16)), kernel_size=3)
    rotated = m.rope(conv, m.param("cos", (4, 4)), m.param("sin", (4, 4)), head_dim=8)
    seen = m.attention(rotated, rotated, c, num_heads=2, head_dim=8, mask_kind=MaskKind.CAUSAL)
    normed = m.rms_norm(seen, m.param("t", (16,)), eps=1e-6)
    heads = [m.hir_mir("reshape", [normed], shape=(1, 4, 2, 8)) for _ in range(3)]
    gates = [m.hir_mir("sum", [h], axis=-1) for h in heads[:2]]
    out = m.gated_delta_net(*heads, *gates, state_size=8)
    carried, state = m.gated_delta_net_carry(*heads, *gates, m.input("state", (1, 2, 8, 8)), state_size=8)
    fused = m.linear_fused(normed, m.param("w3", (16, 2)), m.param("b3", (2,)), activation="relu")
    m.finish_hir([out, carried, state, fused])
    low = m.lower()
    assert [o.shape for o in low.outputs] == [(1, 4, 2, 8), (1, 4, 2, 8), (1, 2, 8, 8), (1, 4, 2)]
    hir = m.as_hir()
    assert hir is not None and low.into_mir().verify() is low.as_mir()
    assert {n.op for n in hir.nodes} >= {"attention_block", "rope_block", "swiglu_ffn", "gated_delta_net_carry"}


@DEVICES
def test_a_quantised_weight_in_hir(device: str) -> None:
    """K is a whole number of blocks, or an error says so; the numbers are those that the `gguf` package reads."""
    m = GraphModule.hir("quantised")
    x = m.input("x", (2, 256))
    m.finish_hir(m.dequant_matmul(x, m.param("w", (256, 16)), scheme=rlx.QuantScheme.GGUF_Q4K))
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (16, 144)).astype(np.uint8)
    blocks = raw.view(rlx.dtype("q4_k").numpy)
    blocks["d"], blocks["dmin"] = 0.1, 0.05
    numbers = gguf.quants.dequantize(blocks.view(np.uint8), gguf.GGMLQuantizationType.Q4_K).astype(np.float64)
    a = rng.standard_normal((2, 256)).astype(np.float32)
    want = a @ numbers.T
    for policy in FusionPolicy:
        (have,) = run(m.with_fusion_policy(policy), device, {"x": a}, {"w": blocks})
        np.testing.assert_allclose(have, want, rtol=0, atol=1e-5 * float(np.abs(want).max()))
    odd = GraphModule.hir("odd")
    with pytest.raises(ShapeError, match="128, not whole blocks of 256"):
        odd.dequant_matmul(odd.input("x", (2, 128)), odd.param("w", (128, 16)), scheme=rlx.QuantScheme.GGUF_Q4K)


def test_graph_hir_entry_matches_define() -> None:
    by_hand = Graph.hir("mlp")
    assert by_hand.finish_hir(mlp(by_hand)) == GraphModule.define("mlp", mlp) == Graph.define("mlp", mlp)


# -- making one -------------------------------------------------------------------------------------------------------
def test_define_takes_one_output_or_several() -> None:
    one = GraphModule.define("m", lambda m: m.input("x", (2,)))
    two = GraphModule.define("m", lambda m: (m.input("x", (2,)), m.input("y", (3,))))
    inside = GraphModule.define("m", lambda m: m.set_outputs([m.input("x", (2,))]) and None)
    assert [len(m.into_mir().outputs) for m in (one, two, inside)] == [1, 2, 1]
    with pytest.raises(GraphError, match="define 'm': the function returned no value"):
        GraphModule.define("m", lambda m: None)


def test_conversions_say_which_level_they_want() -> None:
    hir, mir = Graph("h", level="hir"), Graph("m")
    assert GraphModule(hir).stage is GraphModule.from_hir(hir).stage is GraphStage.HIR
    assert GraphModule(mir).stage is GraphModule.from_mir(mir).stage is GraphModule.from_graph(mir).stage
    for make, graph, wanted in (
        (GraphModule.from_hir, mir, "from_hir: takes a graph at hir, found one at mir"),
        (GraphModule.from_mir, hir, "from_mir: takes a graph at mir, found one at hir"),
        (GraphModule.from_graph, hir, "from_graph: takes a graph at mir, found one at hir"),
        (GraphModule.from_lir, mir, "from_lir: takes an LirModule, found Graph"),
        (GraphModule, 3, "GraphModule: takes a Graph, found int"),
    ):
        with pytest.raises(GraphError, match=wanted):
            make(graph)  # type: ignore[operator]


def test_equal_modules_are_equal_and_levels_and_policies_tell_apart() -> None:
    one, other = GraphModule.define("a", mlp), GraphModule.define("b", mlp)
    assert one == other and hash(one) == hash(other)
    assert one.lower() != one and one.plan() != one.lower()
    assert one != GraphModule.define("a", mlp).with_fusion_policy(FusionPolicy.FUSABLE)
    assert one != "mlp"


# -- levels -----------------------------------------------------------------------------------------------------------
def at(stage: GraphStage) -> GraphModule:
    module = GraphModule.define("mlp", mlp)
    return {GraphStage.HIR: module, GraphStage.MIR: module.lower(), GraphStage.LIR: module.plan()}[stage]


@pytest.mark.parametrize("stage", GraphStage)
def test_what_each_level_answers(stage: GraphStage) -> None:
    m = at(stage)
    is_hir, is_lir = stage is GraphStage.HIR, stage is GraphStage.LIR
    assert m.stage is stage
    assert (m.into_hir() is not None) == (m.as_hir() is not None) == is_hir
    assert (m.into_lir() is not None) == (m.as_lir() is not None) == is_lir
    assert (m.as_mir() is None) == (m.as_graph() is None) == is_hir
    assert m.into_mir().level == m.into_graph().level == "mir"
    assert (m.lower() is m) == (not is_hir)
    assert (m.plan() is m) == is_lir
    assert m.fusion_policy is (FusionPolicy.DIRECT if is_hir else None)


def test_a_plan_keeps_the_mir_it_was_made_from() -> None:
    module = at(GraphStage.LIR)
    lir = module.as_lir()
    assert isinstance(lir, LirModule) and GraphModule.from_lir(lir) == module
    assert module.into_mir() == at(GraphStage.MIR).into_mir()
    assert module.into_mir() is module.as_mir() is module.as_graph() is lir.mir


@pytest.mark.parametrize("policy", FusionPolicy)
def test_the_fusion_policy_decides_what_blocks_become(policy: FusionPolicy) -> None:
    module = GraphModule.define("mlp", mlp)
    assert module.with_fusion_policy(policy) is module and module.fusion_policy is policy
    ops = [n.op for n in module.lower().nodes]
    assert ("fused_matmul" in ops) == (policy is FusionPolicy.DIRECT)
    assert ("gelu" in ops) == (policy is FusionPolicy.FUSABLE)
    assert module.with_fusion_policy("direct").fusion_policy is FusionPolicy.DIRECT  # type: ignore[arg-type]


@pytest.mark.parametrize("stage", [GraphStage.MIR, GraphStage.LIR])
def test_a_policy_is_for_hir(stage: GraphStage) -> None:
    with pytest.raises(GraphError, match=f"with_fusion_policy: expected a module at HIR, 'mlp' is at {stage.name}"):
        at(stage).with_fusion_policy(FusionPolicy.DIRECT)


@DEVICES
def test_every_level_computes_the_same(device: str) -> None:
    w = weights(at(GraphStage.HIR))
    want = mlp_expected(w)
    modules = [at(s) for s in GraphStage] + [at(GraphStage.HIR).with_fusion_policy(FusionPolicy.FUSABLE)]
    results = [run(m, device, {"x": X}, w)[0] for m in modules]
    for have in results:
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-5)
        assert have.tobytes() == results[0].tobytes()
    session = rlx.Session(device)
    f = session.compile(at(GraphStage.HIR))
    f.set_params(w)
    assert f.run({"x": X})[0].tobytes() == results[0].tobytes()


def test_a_planned_module_is_for_one_target_and_one_profile() -> None:
    module = at(GraphStage.HIR)
    other = supported()[-1]
    lir = module.plan(target=other)
    if other != supported()[0]:
        with pytest.raises(CapabilityError, match=f"is planned for {other.name}, this session is for "):
            rlx.compile(lir)
    assert rlx.compile(lir, target=other.name).device == "cpu"
    with pytest.raises(GraphError, match="is planned already, a profile comes too late"):
        rlx.compile(lir, target=other.name, profile=CompileProfile())


def test_planning_takes_a_profile() -> None:
    plain, unfused = (at(GraphStage.HIR).plan(profile=p).as_lir() for p in (None, CompileProfile.unfused()))
    assert plain is not None and unfused is not None
    assert len(plain.main.launches) == 3 and len(unfused.main.launches) == 8


def test_a_module_without_outputs_cannot_be_compiled_or_planned() -> None:
    for module in (GraphModule.hir("m"), GraphModule.mir("m")):
        module.input("x", (2,))
        with pytest.raises(GraphError, match="graph 'm' has no outputs"):
            rlx.compile(module)
        with pytest.raises(GraphError, match="module 'm' has no outputs"):
            module.plan()
    with pytest.raises(GraphError, match="takes a Graph, found str"):
        rlx.compile("graph")  # type: ignore[arg-type]


def test_compiled_modules_check_their_inputs() -> None:
    f = rlx.compile(at(GraphStage.HIR))
    with pytest.raises(BindError):
        f.run({"y": X})


# -- building ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [GraphModule.hir, GraphModule.mir])
def test_leaves_at_the_upper_levels(make: Callable[[str], GraphModule]) -> None:
    m = make("m")
    x, w = m.input("x", ("n", 2)), m.param("w", (2,), "f16")
    s, c = m.state("s", (3,)), m.constant([1.0, 2.0])
    assert [v.node.op for v in (x, w, s, c)] == ["input", "param", "state", "const"] and str(w.dtype) == "f16"
    assert m.set_outputs(x) is m and m.set_outputs([x, c]) is m
    assert [len(o) for o in (m.into_mir().outputs,)] == [2]


def test_named_parts_nest() -> None:
    m = GraphModule.hir("m")
    x = m.input("x", (2, 4))
    y = m.named("outer", lambda m: m.block("inner", lambda m: m.linear(x, m.param("w", (4, 4)))))
    assert y.node.origin.stage == "outer.inner"
    pair = m.block("two", lambda m: m.shared_linear_pair(y, m.param("a", (4, 4)), m.param("b", (4, 4))))
    assert len(pair) == 2 and m.finish_hir(pair) is m
    assert all(n.origin.stage for n in m.lower().nodes if n.op == "matmul")


def test_any_mir_op_in_hir() -> None:
    m = GraphModule.hir("m")
    x = m.input("x", (2, 5))
    values, indices = m.hir_mir("topk", [x], k=2)
    y = m.hir_mir("softmax", [values], axis=-1)
    m.finish_hir((y, indices))
    (have, at_) = run(m, "cpu", {"x": np.array([[1, 5, 2, 4, 3], [0, 0, 9, 0, 8]], np.float32)}, {})
    np.testing.assert_array_equal(at_, [[1, 3], [2, 4]])
    np.testing.assert_allclose(have.sum(-1), 1, rtol=1e-6)
    for op, wanted in (("linear", "linear is not an MIR op"), ("input", "input is not an MIR op")):
        with pytest.raises(GraphError, match=f"hir_mir: {wanted}"):
            m.hir_mir(op, [x])
    with pytest.raises(GraphError, match="no op is called 'sofmax'") as caught:
        m.hir_mir("sofmax", [x])
    assert "'softmax'" in str(caught.value.hint)
    with pytest.raises(GraphError, match="hir_mir: expected a module at HIR, 'g' is at MIR"):
        GraphModule.mir("g").hir_mir("exp", [x])


@pytest.mark.parametrize("name", ["nodes", "outputs", "users", "fingerprint"])
def test_hir_does_not_read_as_a_graph(name: str) -> None:
    with pytest.raises(GraphError, match=f"{name}: module 'mlp' is at HIR and does not read as a graph") as caught:
        getattr(at(GraphStage.HIR), name)
    assert caught.value.hint is not None and "lower()" in caught.value.hint
    with pytest.raises(GraphError, match="len: module 'mlp' is at HIR"):
        len(at(GraphStage.HIR))


def test_mir_reads_and_builds() -> None:
    m = at(GraphStage.MIR)
    before = len(m)
    m.set_outputs([m.tanh(m.outputs[0])])
    assert len(m) == before + 1 and m.outputs[0].node.op == "tanh" and m.symbols() == ["n"]
    assert m.has("x") and m.verify() is m.as_mir()


def test_lir_reads_and_does_not_build() -> None:
    m = at(GraphStage.LIR)
    assert len(m) == len(m.nodes) == len(m.into_mir().nodes) and m.outputs == m.into_mir().outputs
    x = m.inputs[0][0]
    attempts: list[Callable[[], Any]] = [
        lambda: m.input("y", (2,)), lambda: m.param("y", (2,)), lambda: m.constant(1.0), lambda: m.set_outputs([x]),
        lambda: m.tanh(x), lambda: m.apply("tanh", x), lambda: m.rms_norm(x), lambda: m.attention(x, x, x),
        lambda: m.rope(x, x, x, x),
    ]  # fmt: skip
    for attempt in attempts:
        with pytest.raises(GraphError, match="planned already"):
            attempt()
    for attempt in (lambda: m.set_hir_outputs([x]), lambda: m.finish_hir(x), lambda: m.block("b", lambda m: x)):
        with pytest.raises(GraphError, match="is at LIR"):
            attempt()


@pytest.mark.parametrize("stage", [GraphStage.MIR, GraphStage.LIR])
def test_blocks_are_built_at_hir(stage: GraphStage) -> None:
    m = at(stage)
    x = m.inputs[0][0]
    for attempt in (
        lambda: m.linear(x, x), lambda: m.linear_fused(x, x, x), lambda: m.swiglu_ffn(x, x, x, x),
        lambda: m.shared_linear_pair(x, x, x), lambda: m.residual_rms_norm(x, x, x, eps=1e-6),
        lambda: m.llama_decoder_block(x), lambda: m.qwen35_mtp_head(x), lambda: m.attention_block(x, x, x),
    ):  # fmt: skip
        with pytest.raises(GraphError, match=f"is an HIR block, module 'mlp' is at {stage.name}"):
            attempt()
    for attempt in (lambda: m.set_hir_outputs([x]), lambda: m.finish_hir(x)):
        if stage is GraphStage.MIR:
            assert attempt().outputs == (x,)
            continue
        with pytest.raises(GraphError, match="is at LIR, it is planned already"):
            attempt()


def test_attention_and_rope_are_the_ops_at_mir() -> None:
    m = GraphModule.mir("m")
    x, t = m.input("x", (1, 3, 2, 4)), m.param("t", (3, 2))
    at_ = m.input("at", (1, 3), "i32")
    rotated = m.rope(x, t, t, at_)
    m.set_outputs([m.attention(rotated, rotated, x, mask_kind=MaskKind.CAUSAL)])
    assert [n.op for n in m.nodes if n.op not in ("input", "param")] == ["rope", "attention"]


def test_a_misspelt_name_has_a_hint() -> None:
    for stage in GraphStage:
        with pytest.raises(AttributeError, match="'linear'"):
            _ = at(stage).lineer
        assert not hasattr(at(stage), "_ipython_display_")


def test_values_of_another_module_are_refused() -> None:
    a, b = GraphModule.hir("a"), GraphModule.hir("b")
    with pytest.raises(GraphError, match="belongs to graph 'a', not to 'b'"):
        b.linear(a.input("x", (2, 3)), b.param("w", (3, 4)))


# -- text -------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("stage", GraphStage)
def test_the_text_of_a_module_parses(stage: GraphStage) -> None:
    m = at(stage)
    lir = m.as_lir()
    if lir is None:
        assert GraphModule(Graph.parse(str(m))) == m
    else:
        assert str(m) == str(lir.main) and Program.parse(lir.main.text(full=True)) == lir.main
        with pytest.raises(ParseError, match="short text of a program") as caught:
            Program.parse(str(m))
        assert "text(full=True)" in str(caught.value.hint)
    assert repr(m).startswith(f"<module 'mlp' {stage.value}: ")


def test_inspect_of_hir() -> None:
    lines = at(GraphStage.HIR).inspect().splitlines()
    assert lines[0] == "hir @mlp: 8 nodes (1 input, 5 params), 1 output, fusion direct"
    assert lines[1:4] == ["  blocks: linear 1, swiglu_ffn 1", "  symbols: n", "  weights: 2880 bytes"]
    assert any('linear(%0, %1, %2, activation="gelu")' in line and "# up, test_module.py:" in line for line in lines)
    assert Graph.parse("\n".join(lines[5:])) == at(GraphStage.HIR).as_hir()


def test_inspect_of_mir() -> None:
    lines = at(GraphStage.MIR).inspect().splitlines()
    assert lines[0].startswith("mir @mlp: 9 nodes (1 input, 5 params), 1 output")
    assert lines[1] == "  ops: fused_matmul 2, matmul 1"
    assert any("from %3 linear" in line for line in lines), "where each op came from"


def test_inspect_of_lir() -> None:
    module = at(GraphStage.LIR)
    text = module.inspect()
    lines = text.splitlines()
    assert lines[0].startswith("lir @mlp: 3 launches of 3 kernels for ")
    assert lines[2] == "  arena: at most 112*n bytes, by n"
    assert "fused 3" in lines and "missed 0" in lines and "--- mir ---" in lines
    assert "program @mlp(n)" in text and "program @mlp.bind()" in text and "kernel matmul." in text
    arena = module.inspect({"n": 4}).splitlines()[2]
    assert arena == "  arena: 448 bytes (least possible 448, 448 without sharing)"
    assert module.inspect(rlx.DimBinding({"n": 4})).splitlines()[2] == arena


# -- defects not repeated ---------------------------------------------------------------------------------------------
def test_equality_looks_inside_bodies() -> None:
    """Graphs of equal size with loops whose bodies differ are different graphs."""

    def looped(op: str) -> Graph:
        body = Graph("body")
        body.set_outputs([body.apply(op, body.input("c", (2,)))])
        g = Graph("g")
        return g.set_outputs([g.scan(g.input("x", (2,)), body, 3)])

    assert looped("tanh") == looped("tanh") and looped("tanh") != looped("sin")
    one, other = (GraphModule(looped(op)) for op in ("tanh", "sin"))
    assert one != other and one.into_mir().fingerprint() != other.into_mir().fingerprint()


@DEVICES
@pytest.mark.parametrize("policy", FusionPolicy)
def test_a_product_that_is_an_output_stays_itself(device: str, policy: FusionPolicy) -> None:
    """A matmul that is an output is not replaced by what follows it, in any block."""
    m = GraphModule.hir("m").with_fusion_policy(policy)
    x, w, b = m.input("x", (3, 8)), m.param("w", (8, 8)), m.param("b", (8,))
    product = m.hir_mir("matmul", [x, w])
    biased = m.linear(x, w, b, activation="silu")
    m.finish_hir([product, product + b, biased, m.linear(x, w)])
    rng = np.random.default_rng(0)
    inputs = {"w": rng.standard_normal((8, 8)).astype(np.float32), "b": rng.standard_normal(8).astype(np.float32)}
    a = rng.standard_normal((3, 8)).astype(np.float32)
    plain, added, active, again = run(m, device, {"x": a}, inputs)
    want = a.astype(float) @ inputs["w"]
    np.testing.assert_allclose(plain, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(again, want, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(added, want + inputs["b"], rtol=1e-5, atol=1e-5)
    z = want + inputs["b"]
    np.testing.assert_allclose(active, z / (1 + np.exp(-z)), rtol=1e-5, atol=1e-5)


@DEVICES
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_gelus_of_constants_fold_to_the_right_numbers(device: str, dtype: str) -> None:
    """Both forms, by Python's own erf and tanh; f64 constants keep their bits."""
    numbers = [-3.0, -0.5, 0.0, 0.1, 1.0, 2.5]
    m = GraphModule.hir("m")
    c = m.constant(numbers, dtype)
    x = m.input("x", (6,), dtype)
    m.finish_hir([x + m.hir_mir("gelu", [c]), x + m.hir_mir("gelu_tanh", [c]), x + m.hir_mir("neg", [c])])
    for profile in (CompileProfile(), CompileProfile(Fusion(policy=FusionPolicy.FUSABLE))):
        by_error_function, by_tanh, negative = run(
            m, device, {"x": np.zeros(6, dtype.replace("f", "float"))}, {}, profile=profile
        )
        tolerance = 1e-6 if dtype == "f32" else 1e-15
        want = [v * (1 + math.erf(v / math.sqrt(2))) / 2 for v in numbers]
        np.testing.assert_allclose(by_error_function, want, atol=tolerance)
        want = [v * (1 + math.tanh(math.sqrt(2 / math.pi) * (v + 0.044715 * v**3))) / 2 for v in numbers]
        np.testing.assert_allclose(by_tanh, want, atol=tolerance)
        np.testing.assert_array_equal(negative, -np.array(numbers, negative.dtype))


@DEVICES
def test_broadcasting_promotes_both_ways(device: str) -> None:
    """The type of a sum does not depend on which operand comes first."""
    m = GraphModule.hir("m")
    narrow, wide, integer = m.input("a", (2, 1), "f16"), m.input("b", (3,), "f32"), m.input("c", (2, 3), "i32")
    m.finish_hir([narrow + wide, wide + narrow, integer * wide, wide * integer, narrow * integer])
    assert [str(o.dtype) for o in m.into_mir().outputs] == ["f32", "f32", "f32", "f32", "f16"]
    a, b = np.array([[0.5], [2]], np.float16), np.array([1e-6, 1e6, 3], np.float32)
    c = np.array([[1, 2, 3], [4, 5, 6]], np.int32)
    results = run(m, device, {"a": a, "b": b, "c": c}, {})
    wanted = [a.astype(float) + b, a.astype(float) + b, c * b.astype(float), c * b.astype(float), a.astype(float) * c]
    for have, want in zip(results, wanted, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-6)


def test_what_define_gets_is_checked() -> None:
    with pytest.raises(GraphError, match="define 'm': the function returned a float"):
        GraphModule.define("m", lambda m: 3.0)

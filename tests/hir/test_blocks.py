"""Every block means what its oracle says, under both fusion policies, on both devices, and becomes the same kernels."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import pytest
from oracles import Array, expected
from targets import host

import rlx
from rlx import FusionPolicy, Graph, GraphModule
from rlx.errors import BindError, DTypeError, GraphError, KernelError, LowerError, ShapeError
from rlx.hir.blocks import ACTIVATIONS, Activation
from rlx.hir.lower import direct, lower, lowering
from rlx.ir.registry import FUSED, HIR, MIXES_TOKENS, OPS, PER_TOKEN, Sample, get
from rlx.lir.module import plan_lir
from rlx.profile import CompileProfile, Fusion

BLOCKS = sorted(name for name, d in OPS.items() if d.level == HIR)
EVERY_BLOCK = pytest.mark.parametrize("name", BLOCKS)
EVERY_POLICY = pytest.mark.parametrize("policy", FusionPolicy, ids=lambda p: p.value)


def graph_of(name: str, s: Sample, arrays: list[Array | None]) -> Graph:
    """The first operand is an input, the others are weights, except what only runs give: tokens and masks."""
    g = Graph(name, level="hir")
    values: list[Any] = []
    for i, (spec, array) in enumerate(zip(s.operands, arrays, strict=True)):
        if array is None or spec is None:
            values.append(None)
        else:
            optional = ("mask", "keys", "values", "conv_state", "state")
            is_input = i == 0 or spec.dtype != "f32" or get(name).schema.operands[i] in optional
            values.append((g.input if is_input else g.param)(f"x{i}", array.shape, array.dtype))
    result = g.apply(name, *values, **s.attrs)
    return g.set_outputs(result)


@functools.cache
def numbers(name: str, which: int) -> list[Array | None]:
    rng = np.random.default_rng(which)
    return [None if spec is None else spec.array(rng) for spec in get(name).samples[which].operands]


def run(graph: Graph | GraphModule, arrays: list[Array | None], device: str, **options: Any) -> list[Array]:
    f = rlx.compile(graph, device, **options)
    inputs = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}
    f.set_params({n: inputs[n] for n in f.param_types})
    return f.run({n: inputs[n] for n in f.input_types})


def profile(policy: FusionPolicy) -> CompileProfile:
    return CompileProfile(Fusion(policy=policy))


@EVERY_BLOCK
@EVERY_POLICY
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_a_block_gives_what_its_oracle_says(name: str, policy: FusionPolicy, device: str) -> None:
    for which, s in enumerate(get(name).samples):
        arrays = numbers(name, which)
        have = run(graph_of(name, s, arrays), arrays, device, profile=profile(policy))
        for h, want in zip(have, expected(name, arrays, s.attrs), strict=True):
            np.testing.assert_allclose(h, want, rtol=0, atol=2e-5 * float(np.abs(want).max()))


@EVERY_BLOCK
def test_a_block_states_whether_it_mixes_tokens(name: str) -> None:
    assert len(get(name).traits & {PER_TOKEN, MIXES_TOKENS}) == 1


@pytest.mark.parametrize("name", [name for name in BLOCKS if PER_TOKEN in get(name).traits])
def test_a_block_per_token_gives_the_other_tokens_the_same_if_one_changes(name: str) -> None:
    for which, s in enumerate(get(name).samples):
        arrays = numbers(name, which)
        assert arrays[0] is not None
        axis = int(arrays[0].ndim > 2)  # of tokens
        lead = arrays[0].shape[: axis + 1]
        others = []
        for array in arrays:
            of_tokens = array is not None and array.shape[: axis + 1] == lead and array.dtype == np.float32
            first = np.arange(array.shape[axis]) == 0 if of_tokens and array is not None else None
            others.append(array if first is None else array + first.reshape(-1, *(1,) * (array.ndim - axis - 1)))
        before, after = (expected(name, operands, s.attrs) for operands in (arrays, others))
        for x, y in zip(before, after, strict=True):
            rest = (slice(None),) * axis + (slice(1, None),)
            np.testing.assert_array_equal(x[rest], y[rest])
            assert not np.array_equal(x, y)


@EVERY_BLOCK
def test_both_policies_become_the_same_program(name: str) -> None:
    for which, s in enumerate(get(name).samples):
        g = graph_of(name, s, numbers(name, which))
        one, other = (plan_lir(g, host(), profile(p)) for p in FusionPolicy)
        assert one.main.fingerprint() == other.main.fingerprint()
        assert one.bind.fingerprint() == other.bind.fingerprint()
        assert len(one.optimised.report.fused) == len(other.optimised.report.fused)


@EVERY_BLOCK
def test_lowering_keeps_types_and_names_the_block(name: str) -> None:
    for which, s in enumerate(get(name).samples):
        g = graph_of(name, s, numbers(name, which))
        for policy in FusionPolicy:
            low = lower(g, policy).verify()
            assert low.level == "mir" and [o.type for o in low.outputs] == [o.type for o in g.outputs]
            new_nodes = [n for n in low.nodes if n.op not in ("input", "param")]
            assert all(n.origin.source == f"%{g.nodes[-1].id} {name}" for n in new_nodes)
            assert not any(n.definition.level == HIR for n in low.nodes)


def fused_ops(name: str, policy: FusionPolicy, which: int = 0) -> list[str]:
    low = lower(graph_of(name, get(name).samples[which], numbers(name, which)), policy)
    return [n.op for n in low.nodes if FUSED in n.definition.traits]


def test_direct_lowering_gives_fused_ops_and_fusable_gives_none() -> None:
    wanted = {"linear": ["fused_matmul"], "swiglu_ffn": ["fused_matmul"], "residual_rms_norm": ["residual_norm"]}
    assert sorted(direct) == sorted(wanted) and set(direct) < set(lowering)
    for name, ops in wanted.items():
        assert fused_ops(name, FusionPolicy.DIRECT) == ops
        assert fused_ops(name, FusionPolicy.FUSABLE) == []
    for policy in FusionPolicy:
        assert fused_ops("linear_fused", policy) == ["fused_matmul"]
    assert fused_ops("linear", FusionPolicy.DIRECT, which=2) == [], "without bias and activation it is a matmul"


def test_a_gate_is_one_matmul_over_both_weights() -> None:
    low = lower(graph_of("swiglu_ffn", get("swiglu_ffn").samples[0], numbers("swiglu_ffn", 0)), FusionPolicy.DIRECT)
    (node,) = (n for n in low.nodes if n.op == "fused_matmul")
    assert node.attrs["weights"] == 2 and [n.op for n in node.attrs["body"].nodes[2:]] == ["silu", "mul"]


@pytest.mark.parametrize("types", [("bf16", "f32"), ("f32", "f64"), ("i32", "f32")], ids="-".join)
def test_direct_blocks_of_mixed_types_are_plain(types: tuple[str, str]) -> None:
    g = Graph("g", level="hir")
    y = g.linear(g.input("x0", (2, 4), types[0]), g.param("w", (4, 3), types[1]), g.param("b", (3,), types[1]))
    low = lower(g.set_outputs([y]), FusionPolicy.DIRECT).verify()
    assert low.outputs[0].type == y.type and not any(n.op == "fused_matmul" for n in low.nodes)


@EVERY_POLICY
def test_blocks_over_weights_that_are_inputs(policy: FusionPolicy) -> None:
    g, rng = Graph("g", level="hir"), np.random.default_rng(0)
    shapes = {"x": (2, 3, 8), "up": (2, 8, 6), "gate": (2, 8, 6), "down": (2, 6, 8)}
    x, up, gate, down = (g.input(n, s) for n, s in shapes.items())
    a = {n: rng.standard_normal(s).astype(np.float32) for n, s in shapes.items()}
    f = rlx.compile(g.set_outputs([g.swiglu_ffn(x, up, gate, down)]), profile=profile(policy))
    z = a["x"] @ a["gate"]
    want = (z / (1 + np.exp(-z)) * (a["x"] @ a["up"])) @ a["down"]
    np.testing.assert_allclose(f.run(a)[0], want, rtol=1e-4, atol=1e-4)


@EVERY_POLICY
@pytest.mark.parametrize("device", ["reference", "cpu"])
def test_blocks_in_the_body_of_a_loop(policy: FusionPolicy, device: str) -> None:
    body = Graph("body", level="hir")
    c, w = body.input("c", (2, 4)), body.input("w", (4, 4))
    body.set_outputs([body.linear(c, w, activation="tanh")])
    g = Graph("loop", level="hir")
    x, weight = g.input("x0", (2, 4)), g.param("x1", (4, 4))
    g.set_outputs([g.apply("scan", x, weight, body=body, length=3, carries=1, broadcasts=1)])
    assert Graph.parse(g.text()) == g and lower(g).verify()
    rng = np.random.default_rng(0)
    arrays: list[Array | None] = [rng.standard_normal(s).astype(np.float32) for s in ((2, 4), (4, 4))]
    want, step = arrays
    assert want is not None and step is not None
    for _ in range(3):
        want = np.tanh(want @ step)
    np.testing.assert_allclose(run(g, arrays, device, profile=profile(policy))[0], want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["llama_decoder_block", "qwen35_mtp_head", "rope_block"])
def test_batch_and_sequence_may_be_symbols(name: str) -> None:
    s, arrays = get(name).samples[0], numbers(name, 0)
    g = Graph(name, level="hir")
    values = []
    for i, (operand, array) in enumerate(zip(get(name).schema.operands, arrays, strict=False)):
        leading = {"x": ("batch", "seq"), "ids": ("batch", "seq"), "last": ("batch",)}.get(operand)
        assert array is not None
        shape = (*leading, *array.shape[len(leading) :]) if leading else array.shape
        values.append((g.input if leading else g.param)(f"x{i}", shape, array.dtype))
    g.set_outputs([g.apply(name, *values, **s.attrs)])
    (want,) = expected(name, arrays, s.attrs)
    for device in ("reference", "cpu"):
        np.testing.assert_allclose(run(g, arrays, device)[0], want, rtol=0, atol=2e-5 * float(np.abs(want).max()))


def test_a_decoder_block_is_eight_launches_and_one_for_the_positions_of_all() -> None:
    g = Graph("g", level="hir")
    x = g.input("x0", ("batch", "seq", 8))
    cos, sin = g.param("cos", (6, 2)), g.param("sin", (6, 2))
    sizes = ((8,), (8, 16), (8, 8), (8, 8), (16, 8), (8,), (8, 12), (8, 12), (12, 8))
    for layer in range(3):
        weights = [g.param(f"w{layer}.{i}", shape) for i, shape in enumerate(sizes)]
        x = g.llama_decoder_block(x, *weights, cos, sin, num_heads=4, num_kv_heads=2, head_dim=4, eps=1e-5)
    lir = plan_lir(g.set_outputs([x]), host(), CompileProfile())
    assert len(lir.main.launches) == 3 * 8 + 1
    assert lir.optimised.report.missed == []


# -- attention ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("preset", ["prefill", "decode", "unfused"])
def test_scale_and_softcap_count_in_every_path(device: str, preset: str) -> None:
    """The block, the op, with and without a mask, and over a cache: against one softmax written out in float64."""
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((1, 5, 8)).astype(np.float32) * 3 for _ in range(3))
    mask = np.array([[1, 0, 1, 1, 1]], np.float32)
    attrs: dict[str, Any] = {"scale": 0.7, "softcap": 2.0}

    def want(kind: str) -> Array:
        heads = [t.astype(float).reshape(5, 2, 4).transpose(1, 0, 2) for t in (q, k, v)]
        scores = 2.0 * np.tanh(0.7 * heads[0] @ heads[1].swapaxes(1, 2) / 2.0)
        seen = np.tri(5, dtype=bool) if kind == "causal" else np.broadcast_to(mask[0] > 0, (5, 5))
        weights = np.exp(np.where(seen, scores, -np.inf))
        return (weights / weights.sum(-1, keepdims=True) @ heads[2]).transpose(1, 0, 2).reshape(1, 5, 8)

    g = Graph("g", level="hir")
    a, b, c = (g.input(n, (1, 5, 8)) for n in ("q", "k", "v"))
    m = g.input("mask", (1, 5))
    split = [t.reshape(1, 5, 2, 4) for t in (a, b, c)]
    keys, values = g.state("keys", (1, 2, 4, 64)), g.state("values", (1, 2, 64, 4))
    at = g.constant(np.arange(5, dtype=np.int32)[None])
    table = g.constant(np.zeros((1, 1), np.int32))
    keys, values = keys.kv_append(split[1], at, table, axes="phds"), values.kv_append(split[2], at, table)
    sizes = {"num_heads": 2, "head_dim": 4}
    actual = [
        g.attention_block(a, b, c, mask_kind="causal", **sizes, **attrs),
        g.attention_block(a, b, c, m, mask_kind="custom", **sizes, **attrs),
        g.attention(*split, mask_kind="causal", **attrs).reshape(1, 5, 8),
        g.attention(*split, m, mask_kind="custom", **attrs).reshape(1, 5, 8),
        split[0].cached_attention(keys, values, at, table, key_axes="phds", **attrs).reshape(1, 5, 8),
    ]
    f = rlx.compile(g.set_outputs(actual), device, profile=CompileProfile.preset(preset))
    caches = {"keys": np.zeros((1, 2, 4, 64), np.float32), "values": np.zeros((1, 2, 64, 4), np.float32)}
    results = f.run({"q": q, "k": k, "v": v, "mask": mask, **caches})
    for have, kind in zip(results, ["causal", "custom", "causal", "custom", "causal"], strict=True):
        np.testing.assert_allclose(have, want(kind), rtol=1e-4, atol=1e-5)


def test_four_axes_are_read_by_where_the_heads_are() -> None:
    g = Graph("g", level="hir")
    first, second = g.input("a", (2, 3, 7, 4)), g.input("b", (2, 7, 3, 4))
    for q in (first, second):
        y = g.attention_block(q, q, q, num_heads=3, head_dim=4)
        assert y.type == q.type
    ops = [n.op for n in lower(g.set_outputs([y])).nodes]
    assert ops.count("transpose") == 4, "only the layout with heads first is turned, there and back"


# -- errors ---------------------------------------------------------------------------------------------------------
BAD = [
    ("linear", {1: (5, 3)}, ShapeError, "inner sizes differ, 17 and 5"),
    ("linear_fused", {2: (9,)}, ShapeError, "linear_fused: bias f32[9] does not fit 70 columns"),
    ("shared_linear_pair", {2: (5, 3)}, ShapeError, "inner sizes differ, 17 and 5"),
    ("attention_block", {0: (2, 5, 12)}, ShapeError, "q is f32[2, 5, 12], expected 4 heads of 4"),
    ("attention_block", {1: (2, 7, 6)}, ShapeError, "k is f32[2, 7, 6], expected [batch, seq, heads * 4]"),
    ("rope_block", {0: (2, 3, 12)}, ShapeError, "x is f32[2, 3, 12], expected [batch, seq, heads * 8]"),
    ("rope_block", {1: (5, 3)}, ShapeError, "cos is f32[5, 3], expected [positions, 4] or wider"),
    ("rope_block", {1: (2, 4), 2: (2, 4)}, ShapeError, "tables have 2 positions, the sequence has 3"),
    ("llama_decoder_block", {4: (8, 12)}, ShapeError, "llama_decoder_block: v is f32[8, 12], expected [8, 8]"),
    ("llama_decoder_block", {0: (5, 8)}, ShapeError, "x is f32[5, 8], expected [batch, seq, hidden]"),
    ("qwen35_mtp_head", {6: (8, 8)}, ShapeError, "eh_proj is f32[8, 8], expected [16, 8]"),
    ("qwen35_mtp_head", {8: (8, 8)}, ShapeError, "q is f32[8, 8], expected [8, 16]"),
    ("qwen35_mtp_head", {2: (3,)}, ShapeError, "last is i32[3], expected integers [2]"),
]


@pytest.mark.parametrize(("name", "shapes", "error", "says"), BAD)
def test_a_block_names_what_it_expected_and_found(
    name: str, shapes: dict[int, tuple[int, ...]], error: type[GraphError], says: str
) -> None:
    g, s = Graph("g", level="hir"), get(name).samples[0]
    values = []
    for i, spec in enumerate(s.operands):
        values.append(None if spec is None else g.input(f"x{i}", shapes.get(i, spec.shape), spec.dtype))
    with pytest.raises(error) as caught:
        g.apply(name, *values, **s.attrs)
    assert says in str(caught.value) and (name in str(caught.value) or "matmul" in str(caught.value))


def test_weights_of_another_type_are_refused() -> None:
    g, s = Graph("g", level="hir"), get("llama_decoder_block").samples[0]
    values = [g.input(f"x{i}", spec.shape, "f64" if i == 9 else "f32") for i, spec in enumerate(s.operands) if spec]
    with pytest.raises(DTypeError, match=r"down is f64\[12, 8\], x is f32; both have one type"):
        g.llama_decoder_block(*values, **s.attrs)


def test_a_node_with_too_few_operands_names_block_expected_and_found() -> None:
    g = Graph("g", level="hir")
    x, w = g.input("x", (2, 4)), g.param("w", (4, 3))
    y = g.append("linear_fused", (x, w), {"activation": None}, (x.type.with_shape(2, 3),))[0]
    with pytest.raises(LowerError, match=r"linear_fused: expected 3 operands \(x, weight, bias\), found 2") as caught:
        lower(g.set_outputs([y]))
    assert "test_blocks.py" in caught.value.notes[0]


def test_a_missing_bias_names_block_and_operand() -> None:
    g = Graph("g", level="hir")
    x, w = g.input("x", (2, 4)), g.param("w", (4, 3))
    with pytest.raises(GraphError, match="linear_fused: operand 'bias' is missing"):
        g.linear_fused(x, w, None)
    y = g.append("linear_fused", (x, w, None), {"activation": None}, (x.type.with_shape(2, 3),))[0]
    with pytest.raises(LowerError, match="linear_fused: expected operand 'bias', found none"):
        lower(g.set_outputs([y]))


def test_a_node_of_a_wrong_type_is_a_lower_error() -> None:
    g = Graph("g", level="hir")
    x, w = g.input("x", (2, 4)), g.param("w", (4, 3))
    y = g.append("linear", (x, w, None), {"activation": None}, (x.type.with_shape(2, 5),))[0]
    with pytest.raises(LowerError, match=r"linear: became f32\[2, 3\], expected f32\[2, 5\]"):
        lower(g.set_outputs([y]))


# -- activations and text ---------------------------------------------------------------------------------------------
def test_activations_are_ops_by_name_or_member() -> None:
    assert {a.value for a in Activation} == set(ACTIVATIONS)
    g = Graph("g", level="hir")
    x, w = g.input("x", (2, 4)), g.param("w", (4, 3))
    member, name = g.linear(x, w, activation=Activation.GELU_APPROX), g.linear(x, w, activation="gelu_tanh")
    assert member.node.attrs == name.node.attrs


@EVERY_BLOCK
def test_blocks_print_and_parse(name: str) -> None:
    for which, s in enumerate(get(name).samples):
        g = graph_of(name, s, numbers(name, which))
        assert Graph.parse(g.text()) == g
        assert lower(Graph.parse(g.text())) == lower(g)


@pytest.mark.parametrize("device", ["reference", "cpu"])
@pytest.mark.parametrize("last", [(0, -1), (5, 0), (0, 5)])
def test_a_place_outside_its_row_is_no_place_in_another(device: str, last: tuple[int, int]) -> None:
    s, arrays = get("qwen35_mtp_head").samples[0], list(numbers("qwen35_mtp_head", 0))
    assert arrays[0] is not None and arrays[0].shape[:2] == (2, 5)
    arrays[2] = np.array(last, np.int32)
    with pytest.raises((KernelError, BindError)):
        run(graph_of("qwen35_mtp_head", s, arrays), arrays, device)

"""Blocks: their types are those of what they become, and lowering keeps what they mean."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from targets import host

from rlx import Graph, Value
from rlx.errors import DTypeError, GraphError, LowerError, ShapeError
from rlx.hir.blocks import ACTIVATIONS
from rlx.hir.lower import lower, lowering
from rlx.ir.evaluate import run
from rlx.ir.registry import OPS
from rlx.lir.module import plan_lir
from rlx.profile import CompileProfile
from rlx.types import concrete

BLOCKS = sorted(name for name, d in OPS.items() if d.level == "hir")


def hir() -> Graph:
    return Graph("g", level="hir")


def test_every_block_has_a_lowering() -> None:
    assert sorted(lowering) == BLOCKS


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("bias", [True, False])
def test_linear(activation: str | None, bias: bool) -> None:
    g, rng = hir(), np.random.default_rng(0)
    x, w = g.input("x", ("n", 4)), g.param("w", (4, 3))
    b = g.param("b", (3,)) if bias else None
    low = lower(g.set_outputs([g.linear(x, w, b, activation=activation)])).verify()
    assert low.level == "mir" and low.outputs[0].type == g.outputs[0].type
    X, W, B = (rng.standard_normal(s).astype(np.float32) for s in ((5, 4), (4, 3), (3,)))
    (have,) = run(low, {"x": X, "w": W, "b": B}, {"n": 5})
    want = X @ W + (B if bias else 0)
    if activation is not None:
        plain = Graph("p")
        p = plain.input("x", (5, 3))
        (want,) = run(plain.set_outputs([getattr(p, activation)()]), {"x": want.astype(np.float32)}, {})
    np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_swiglu_ffn_and_residual_rms_norm() -> None:
    g, rng = hir(), np.random.default_rng(0)
    x, r = g.input("x", ("n", 4)), g.input("r", ("n", 4))
    up, gate, down, gamma = g.param("up", (4, 6)), g.param("gate", (4, 6)), g.param("down", (6, 4)), g.param("s", (4,))
    g.set_outputs([g.swiglu_ffn(x, up, gate, down), g.residual_rms_norm(x, r, gamma, eps=1e-3)])
    low = lower(g).verify()
    assert [o.type for o in low.outputs] == [o.type for o in g.outputs]
    leaves = {n.attrs["name"]: concrete(n.types[0].shape, {"n": 3}) for n in (*g.inputs, *g.params)}
    a = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in leaves.items()}
    ffn, norm = run(low, a, {"n": 3})
    z, s = a["x"] @ a["gate"], a["x"] + a["r"]
    np.testing.assert_allclose(ffn, (z / (1 + np.exp(-z)) * (a["x"] @ a["up"])) @ a["down"], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(norm, s / np.sqrt((s * s).mean(-1, keepdims=True) + 1e-3) * a["s"], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("x", "w", "b"), [("bf16", "bf16", "f32"), ("f32", "f64", "f32"), ("i32", "f32", "f16"), ("f16", "f16", "f16")]
)
def test_a_block_has_the_type_of_what_it_becomes(x: str, w: str, b: str) -> None:
    g = hir()
    y = g.linear(g.input("x", (2, 4), x), g.param("w", (4, 3), w), g.param("b", (3,), b), activation="tanh")
    low = lower(g.set_outputs([y * 2.0])).verify()
    assert low.outputs[0].type == g.outputs[0].type


@pytest.mark.parametrize(
    ("build", "error", "problem"),
    [
        (lambda g, x, w: g.linear(x, w, activation="prelu"), GraphError, "'prelu' is not one of gelu, "),
        (lambda g, x, w: g.linear(x, w, x), ShapeError, "bias .* does not fit 3 columns"),
        (lambda g, x, w: g.linear(w, x), ShapeError, "inner sizes differ"),
        (lambda g, x, w: g.swiglu_ffn(x, w, x, x), ShapeError, "up .* and gate .* differ"),
        (lambda g, x, w: g.swiglu_ffn(x.astype("i32"), *[w.astype("i32")] * 3), DTypeError, "silu: takes floats"),
        (lambda g, x, w: g.residual_rms_norm(x, w, w, eps=0.1), ShapeError, "types differ"),
        (
            lambda g, x, w: g.linear(x.astype("i32"), w.astype("i32"), activation="silu"),
            DTypeError,
            "silu: takes floats",
        ),
    ],
)
def test_blocks_refuse_what_does_not_fit(
    build: Callable[[Graph, Value, Value], Value], error: type, problem: str
) -> None:
    g = hir()
    with pytest.raises(error, match=problem):
        build(g, g.input("x", (2, 4)), g.param("w", (4, 3)))


def test_tensor_ops_pass_through_and_mir_stays_itself() -> None:
    g = hir()
    x = g.input("x", ("n", 4))
    a, b = x.topk(k=2)
    low = lower(g.set_outputs([a, b]))
    assert low.text() == g.text().replace(" hir {", " mir {")
    assert lower(low) is low


def test_limits_survive_lowering() -> None:
    g = hir()
    g.limits["n"] = 7
    g.set_outputs([g.linear(g.input("x", ("n", 4)), g.param("w", (4, 3)))])
    assert lower(g).limits == {"n": 7}


def test_a_block_without_lowering_says_where_it_belongs() -> None:
    with pytest.raises(LowerError, match="op nothing: has no lowering") as caught:
        lowering["nothing"]
    assert caught.value.hint == "add it in src/rlx/hir/lower.py"


def test_the_fusion_report_says_which_blocks_were_fused() -> None:
    g = Graph("g", level="hir")
    x = g.input("x", ("batch", "seq", 8))
    gate, up, down = g.param("gate", (12, 8)), g.param("up", (12, 8)), g.param("down", (8, 12))
    normed = g.norm(x, g.param("n", (8,)), kind="rms", eps=1e-5)
    g.set_outputs([x + g.gated_ffn(normed, gate, up, down)])
    report = plan_lir(g, host(), CompileProfile()).optimised.report
    assert "gated_ffn" in report.by_block and all(fusion.blocks == ("gated_ffn",) for fusion in report.fused)
    counts = dict(report.by_block["gated_ffn"])
    separate = [miss for miss in report.separate if "gated_ffn" in miss.blocks]
    assert counts.pop("separate") == len(separate) > 0
    assert sum(counts.values()) == len(report.fused) > 0
    assert "  in gated_ffn: " in str(report)
    report.miss("matmul epilogue", lower(g).nodes[-2], "why not")
    assert report.by_block["gated_ffn"]["missed"] == 1
    assert report._repr_html_().count(">gated_ffn</td>") == len(report.fused) + len(separate) + 1


def test_leaves_wait_for_the_op_that_reads_them_and_keep_their_order() -> None:
    g = Graph("g", level="hir")
    x = g.input("x", (2, 4))
    w, b = g.param("w", (3, 4)), g.param("b", (3,))
    y = g.linear_stored(x, w, b)
    down, up, gate = g.param("down", (3, 5)), g.param("up", (5, 3)), g.param("gate", (5, 3))
    unused = g.input("unused", (1,))
    low = lower(g.set_outputs([g.gated_ffn(y, gate, up, down), unused]))
    assert [n.attrs.get("name", n.op) for n in low.nodes[:6]] == ["x", "w", "transpose", "matmul", "b", "add"]
    # the block reads its gate first; what was declared before it comes before it
    assert [n.attrs["name"] for n in low.params] == ["w", "b", "down", "up", "gate"]
    assert [n.attrs["name"] for n in low.inputs] == [n.attrs["name"] for n in g.inputs] == ["x", "unused"]


def test_stored_weights_are_unpacked_and_cast_where_they_are_read() -> None:
    g = Graph("g", level="hir")
    x = g.input("x", (2, 32))
    packed, half = g.param("packed", (6, 32), "q8_0"), g.param("half", (6,), "f16")
    low = lower(g.set_outputs([g.linear_stored(x, packed, half, heads=2)]))
    ops = [n.op for n in low.nodes]
    assert ops == ["input", "param", "dequantise", "transpose", "matmul", "param", "cast", "add", "reshape"]
    assert str(low.outputs[0].type) == "f32[2, 2, 3]"

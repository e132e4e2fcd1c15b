"""Bodies of loops and branches in the pipeline: optimised like graphs, and rid of what every step would do again."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from targets import AVX512

import rlx
from rlx.errors import GraphError, VerifyError
from rlx.hir.lower import lower
from rlx.ir.graph import Node
from rlx.ir.value import bind_value
from rlx.mir.pipeline import optimise

f32 = np.float32
SHAPES: dict[str, tuple[Any, ...]] = {"c": (2, 8), "w": (8, 8), "v": (8, 8), "x": (2, 8)}


def body_of(*names: str, build: Any, level: str = "mir") -> rlx.Graph:
    g = rlx.Graph("body", level=level)
    results = build(*(g.input(n, SHAPES[n]) for n in names))
    return g.set_outputs(results if isinstance(results, list) else [results])


def ops(graph: rlx.Graph) -> list[str]:
    return [n.op for n in graph.nodes if n.op not in ("input", "param", "const")]


def only(graph: rlx.Graph, op: str) -> Node:
    (node,) = [n for n in graph.nodes if n.op == op]
    return node


def rnn(leaf: str, length: int = 5) -> rlx.Graph:
    body = body_of("c", "w", "v", "x", build=lambda c, w, v, x: (c @ w.mT + (x @ v) * 2.0).tanh())
    g = rlx.Graph("rnn")
    c, xs = g.input("c", (2, 8)), g.input("xs", (length, 2, 8))
    w, v = (getattr(g, leaf)(n, (8, 8)) for n in ("w", "v"))
    return g.set_outputs([g.scan_with_bcasts_and_xs(c, [w, v], [xs], body, length)])


def test_weights_of_a_body_are_packed_when_they_are_bound() -> None:
    done = optimise(rnn("param"), AVX512)
    assert ops(done.bind) == ["transpose", "prepack", "prepack"]
    assert ops(done.main) == ["scan"]
    body = only(done.main, "scan").attrs["body"]
    assert ops(body) == ["fused_matmul", "fused_matmul"]
    assert all(n.attrs["layout"] for n in body.nodes if n.op == "fused_matmul")


def test_matrices_of_a_run_are_packed_before_the_loop() -> None:
    done = optimise(rnn("input"), AVX512)
    assert not ops(done.bind)
    assert ops(done.main) == ["transpose", "prepack", "prepack", "scan"]


def test_what_may_not_run_has_only_its_weights_prepared() -> None:
    """Work moved out of a loop that does not run would be done, and might fail, in vain."""
    g = rlx.Graph("g")
    c, v, w = g.input("c", (2, 8)), g.input("v", (8, 8)), g.param("w", (8, 8))
    more = body_of("c", "v", "w", build=lambda c, v, w: c.sum() > 0.0)
    step = body_of("c", "v", "w", build=lambda c, v, w: (c @ v.tanh()) @ w.tanh())
    other = body_of("c", "v", "w", build=lambda c, v, w: c @ w)
    looped = g.while_loop(c, more, step, broadcasts=[v, w])
    chosen = g.cond(c.sum() > 1.0, [c, v, w], step, other)
    done = optimise(g.set_outputs([looped, chosen]), AVX512)
    assert ops(done.bind) == ["region", "prepack", "prepack"]  # tanh(w), and both packed
    loop, branch = only(done.main, "while_loop"), only(done.main, "cond")
    for body in (loop.attrs["body"], branch.attrs["then_body"]):
        assert ops(body) == ["region", "matmul", "fused_matmul"], "tanh(v) stays, and is packed by the matmul"
    assert len(loop.operands) == 3 and len(branch.operands) == 5  # both panels of w, since both sides get all
    arrays = {"c": np.full((2, 8), 0.25, f32), "v": np.eye(8, dtype=f32) * 0.1}
    f, right = rlx.compile(g), rlx.compile(g, "reference")
    for compiled in (f, right):
        compiled.set_param("w", np.eye(8, dtype=f32) * -0.5)
    for a, b in zip(f.run(arrays), right.run(arrays), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_what_is_steady_in_two_loops_leaves_both() -> None:
    inner = body_of("c", "w", build=lambda c, w: c @ w.tanh())
    outer = body_of("c", "w", build=lambda c, w: c.graph.scan_with_bcasts_and_xs(c, [w], [], inner, 3))
    g = rlx.Graph("g")
    done = optimise(
        g.set_outputs([g.scan_with_bcasts_and_xs(g.input("c", (2, 8)), [g.param("w", (8, 8))], [], outer, 4)]), AVX512
    )
    assert ops(done.bind) == ["region", "prepack"]
    assert ops(only(done.main, "scan").attrs["body"]) == ["scan"]


def test_matmuls_of_a_body_that_share_an_input_are_one() -> None:
    body = body_of("c", "w", "v", build=lambda c, w, v: (c @ w).silu() * (c @ v))
    g = rlx.Graph("g")
    leaves = [g.param(n, (8, 8)) for n in ("w", "v")]
    done = optimise(g.set_outputs([g.scan_with_bcasts_and_xs(g.input("c", (2, 8)), leaves, [], body, 4)]), AVX512)
    assert ops(only(done.main, "scan").attrs["body"]) == ["fused_matmul"]
    assert "gated matmul pair" in str(done.report)


def test_equal_scans_are_one_and_others_are_not() -> None:
    """Bodies count: two of them may have equally many nodes."""

    def scans(*factors: float) -> int:
        g = rlx.Graph("g")
        c = g.input("c", (2, 8))
        loops = [g.scan(c, body_of("c", build=lambda c, k=k: c * k), 3) for k in factors]
        return ops(optimise(g.set_outputs(loops), AVX512).main).count("scan")

    assert (scans(2.0, 2.0), scans(2.0, 3.0), scans(2.0, 3.0, 2.0)) == (1, 2, 2)


def test_a_scan_of_constants_is_not_run_while_compiling() -> None:
    g = rlx.Graph("g")
    count = rlx.Graph("count")
    total = g.scan(g.constant(0, "i32"), count.set_outputs([count.input("i", (), "i32") + 1]), 10**7)
    g.set_outputs([total + g.input("x", (), "i32")])
    f = rlx.compile(g)
    assert f.run({"x": np.array(5, np.int32)})[0] == 10**7 + 5


def test_unused_results_and_inputs_do_no_harm() -> None:
    body = body_of("c", "w", "x", build=lambda c, w, x: [c + 1.0, x.tanh(), c.softmax(axis=1)])
    g = rlx.Graph("g")
    c, w, xs = g.input("c", (2, 8)), g.input("w", (8, 8)), g.input("xs", (3, 2, 8))
    _, ys = g.scan_general([c], body, 3, broadcasts=[w], xs=[xs])
    f = rlx.compile(g.set_outputs([ys[0]]))
    x = np.linspace(-1, 1, 48, dtype=f32).reshape(3, 2, 8)
    (result,) = f.run({"c": np.zeros((2, 8), f32), "w": np.zeros((8, 8), f32), "xs": x})
    np.testing.assert_allclose(result, np.tanh(x), rtol=1e-5)


def test_blocks_inside_bodies_are_lowered() -> None:
    body = body_of("c", "w", "x", level="hir", build=lambda c, w, x: c.graph.linear(c, w, activation="tanh") + x)
    g = rlx.Graph("g", level="hir")
    c, w, xs = g.input("c", (2, 8)), g.param("w", (8, 8)), g.input("xs", (3, 2, 8))
    g.set_outputs([g.scan_with_bcasts_and_xs(c, [w], [xs], body, 3)])
    assert ops(only(lower(g), "scan").attrs["body"])[:2] == ["matmul", "tanh"]
    rng = np.random.default_rng(0)
    arrays = {n: rng.uniform(-1, 1, s).astype(f32) for n, s in {"c": (2, 8), "w": (8, 8), "xs": (3, 2, 8)}.items()}
    state = arrays["c"].astype(np.float64)
    for x in arrays["xs"]:
        state = np.tanh(state @ arrays["w"]) + x
    for device in ("cpu", "reference"):
        f = rlx.compile(g, device)
        f.set_param("w", arrays["w"])
        np.testing.assert_allclose(f.run({n: arrays[n] for n in ("c", "xs")})[0], state, rtol=1e-5, atol=1e-6)


def test_a_body_is_verified_with_its_graph() -> None:
    body = body_of("c", build=lambda c: c.tanh())
    g = rlx.Graph("g")
    g.set_outputs([g.scan(g.input("c", (2, 8)), body, 3)]).verify()
    inner = g.nodes[-1].attrs["body"]
    inner.nodes[1] = replace(inner.nodes[1], op="sum")
    bind_value(inner.nodes[1][0], inner.nodes[1])
    with pytest.raises(VerifyError, match="sum") as caught:
        g.verify()
    assert any("in body of %1 scan" in note for note in caught.value.notes)
    upper = body_of("c", "w", level="hir", build=lambda c, w: c.graph.linear(c, w))
    other = rlx.Graph("other")
    c, w = other.input("c", (2, 8)), other.input("w", (8, 8))
    other.set_outputs([other.scan_with_bcasts_and_xs(c, [w], [], upper, 3)])
    with pytest.raises(VerifyError, match="has an HIR graph as its body"):
        other.verify()


def test_the_name_of_a_target_is_no_target() -> None:
    graph = rlx.Graph("g")
    graph.set_outputs([graph.input("x", (3,)).exp()])
    with pytest.raises(GraphError, match="optimise: the target is 'avx2'") as caught:
        optimise(graph, "avx2")  # type: ignore[arg-type]
    assert "known_target('avx2')" in (caught.value.hint or "")

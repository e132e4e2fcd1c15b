"""The whole pipeline: it keeps what a graph means, says what it did, and writes down each step if asked."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import examples, float_graphs, random_leaves
from hypothesis import given
from hypothesis import strategies as st
from layers import Bert, Llama, bert_graph, llama_graph
from targets import AVX2, AVX512, BASELINE, host

import rlx
from rlx import Graph
from rlx.errors import CapabilityError, GraphError, VerifyError
from rlx.ir.evaluate import run
from rlx.ir.passes import run_passes
from rlx.ir.rewrite import rebuild
from rlx.mir import pipeline as module
from rlx.mir.pipeline import PIPELINE, Optimised, Pipeline, Step, optimise, with_step
from rlx.runtime.program_cache import Keys
from rlx.types import concrete

Array = np.ndarray[Any, Any]


def evaluate(done: Optimised, leaves: dict[str, Array], binding: dict[str, int]) -> list[Array]:
    """The optimised graph by the reference, its derived weights first."""
    derived = run(done.bind, leaves, binding)
    return run(done.main, leaves | dict(zip(done.derived, derived, strict=True)), binding)


def close(have: list[Array], want: list[Array], tolerance: float) -> None:
    for a, b in zip(have, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        scale = np.abs(b).max() if b.size else 0
        np.testing.assert_allclose(a, b, rtol=0, atol=tolerance * (scale or 1))


# -- meaning ----------------------------------------------------------------------------------------------------------
@given(float_graphs(), st.sampled_from([AVX512, AVX2, BASELINE]), st.integers(0, 3))
@examples(150)
def test_optimising_keeps_what_a_graph_means(g: Graph, target: Any, n: int) -> None:
    binding = {"n": n}
    leaves = random_leaves(g, binding)
    done = optimise(g, target)
    close(evaluate(done, leaves, binding), run(g, leaves, binding), 1e-12)
    bare = {op.op for part in (done.main, done.bind) for op in part.nodes} & {"tanh", "add", "mul", "silu"}
    assert not bare, "elementwise work is in regions and epilogues"


LAYERS = {
    "bert": (bert_graph(Bert(16, 2, 24, layers=2)), {"batch": 2, "seq": 5}),
    "llama": (llama_graph(Llama(16, 4, 2, 4, 24, layers=2)), {"batch": 2, "seq": 5}),
    "llama with a past": (llama_graph(Llama(16, 4, 2, 4, 24), past=True), {"batch": 1, "seq": 1, "past": 6}),
    "llama without one yet": (llama_graph(Llama(16, 4, 2, 4, 24), past=True), {"batch": 2, "seq": 3, "past": 0}),
}


def in_f64(g: Graph) -> Graph:
    return Graph.parse(g.text(full=True).replace("f32[", "f64["))


@pytest.mark.parametrize("name", LAYERS)
def test_layers_mean_the_same_in_float64(name: str) -> None:
    g, binding = LAYERS[name]
    wide = in_f64(g)
    leaves = random_leaves(wide, binding)
    close(evaluate(optimise(wide, AVX512), leaves, binding), run(wide, leaves, binding), 1e-12)


def test_outputs_may_be_inputs_params_constants_and_repeated() -> None:
    g = Graph("g")
    x, w = g.input("x", ("n", 4)), g.param("w", (4, 4))
    g.set_outputs([x, w, g.constant([1.0]), x @ w, x @ w, w + 1.0, x])
    leaves = random_leaves(g, {"n": 2})
    close(evaluate(optimise(g, AVX512), leaves, {"n": 2}), run(g, leaves, {"n": 2}), 1e-6)


def test_interfaces_stay() -> None:
    g = Graph("g")
    x = g.input("x", (rlx.dim("n", max=9), 4))
    g.input("unused", (2,))
    g.param("idle", (2,))
    done = optimise(g.set_outputs([x * 2.0]), AVX512)
    assert [n.attrs["name"] for n in done.main.inputs] == ["x", "unused"]
    assert done.main.limits == {"n": 9} and done.main.name == "g" and done.bind.name == "g.bind"
    assert done.derived == []


def test_what_was_optimised_optimises_again() -> None:
    for g, _ in LAYERS.values():
        once = optimise(g, AVX512).main
        twice = optimise(once, AVX512)
        assert twice.main == once and not twice.derived


def test_no_pass_changes_its_input() -> None:
    for g, _ in LAYERS.values():
        before = g.text(full=True, origins=True)
        optimise(g, AVX512)
        assert g.text(full=True, origins=True) == before


# -- fused ops against their parts ------------------------------------------------------------------------------------
def fused_op(done: Optimised, op: str) -> Any:
    (node,) = (n for n in done.main.nodes if n.op == op)
    return node


@pytest.mark.parametrize("op", ["region", "fused_matmul", "gated", "residual_norm layer", "residual_norm rms"])
def test_a_fused_op_is_the_chain_it_came_from(op: str) -> None:
    g = Graph("g")
    x, y = g.input("x", ("n", 6), "f64"), g.input("y", ("n", 6), "f64")
    w, v, b = g.param("w", (6, 70), "f64"), g.param("v", (6, 70), "f64"), g.param("b", (70,), "f64")
    rng = np.random.default_rng(0)
    leaves = {n.attrs["name"]: rng.standard_normal(concrete(n.types[0].shape, {"n": 3})) for n in g.nodes}
    X, Y, W, V, B = (leaves[k] for k in "xywvb")
    sigmoid = 1 / (1 + np.exp(-(X @ W)))
    total = X + Y
    centred = total - total.mean(-1, keepdims=True)

    def over_root_mean(a: Array) -> Array:
        return np.asarray(a / np.sqrt((a**2).mean(-1, keepdims=True) + 1e-3))

    table: dict[str, tuple[rlx.Value, Array]] = {
        "region": (g.where(x > y, x.tanh() * 2.0, y - 1.0), np.where(X > Y, np.tanh(X) * 2, Y - 1)),
        "fused_matmul": ((x @ w + b).tanh(), np.tanh(X @ W + B)),
        "gated": ((x @ w).silu() * (x @ v), X @ W * sigmoid * (X @ V)),
        "residual_norm layer": (g.layer_norm(x + y, eps=1e-3), over_root_mean(centred)),
        "residual_norm rms": (g.rms_norm(x + y, eps=1e-3), over_root_mean(total)),
    }  # fmt: skip
    value, want = table[op]
    done = optimise(g.set_outputs([value]), AVX512)
    assert fused_op(done, "fused_matmul" if op == "gated" else op.split()[0]).origin.made_by
    (have,) = evaluate(done, leaves, {"n": 3})
    np.testing.assert_allclose(have, want, rtol=1e-12)


# -- reports ----------------------------------------------------------------------------------------------------------
def test_the_report_says_what_fused() -> None:
    report = optimise(LAYERS["llama"][0], AVX512).report
    assert report.counts == {
        "gated matmul pair": 2, "matmul epilogue": 4, "matmuls that share an input": 2, "ropes of neighbouring heads": 2
    }  # fmt: skip
    assert report.missed == []
    gate = next(f for f in report.fused if f.kind == "gated matmul pair")
    assert gate.ops == ("matmul", "matmul", "silu", "mul")
    assert gate.where.startswith("layers.0, layers.py:")
    assert str(gate).startswith("gated matmul pair: matmul + matmul + silu + mul  (layers.0, ")


def test_bert_fuses_into_five_kinds_of_work() -> None:
    done = optimise(LAYERS["bert"][0], AVX512)
    assert done.report.counts == {"elementwise region": 6, "matmul epilogue": 8, "matmuls that share an input": 2}
    ops = [n.op for n in done.main.nodes if n.op not in ("input", "param", "reshape", "slice")]
    assert (
        ops
        == ["fused_matmul", "attention", "fused_matmul", "layer_norm", "fused_matmul", "fused_matmul", "layer_norm"] * 2
    )


def test_the_report_says_what_was_missed_and_why() -> None:
    g = Graph("g")
    x, y = g.input("x", ("n", 4)), g.input("y", (2, "n", 4))
    with rlx.stage("ffn"):
        p = x @ g.param("w", (4, 4))
        q = (y @ g.param("v", (4, 4))) * x
    report = optimise(g.set_outputs([p.tanh(), p, q]), AVX512).report
    assert [(m.kind, m.op, m.why) for m in report.missed] == [
        ("epilogue", "region", "operand f32[n, 4] cannot follow the tiles of f32[2, n, 4]"),
        ("epilogue", "region", "the product is an output of the graph"),
    ]
    text = str(report)
    assert text.startswith("fused 0\nmissed 2\n  epilogue: region: operand f32[n, 4]")
    assert re.search(r"\(ffn, test_pipeline\.py:\d+\)", text)


def test_the_log_lists_every_pass_with_its_time() -> None:
    log = optimise(LAYERS["bert"][0], AVX512).log
    names = [e.name for e in log.entries]
    assert names[:4] == ["canonicalize", "fold_constants", "cse", "dce"] and "fuse_epilogues" in names
    assert all(e.seconds >= 0 and e.before > 0 and e.after > 0 for e in log.entries)
    assert re.match(r"canonicalize +\d+\.\d\d ms +\d+ -> +\d+ nodes +\d+ rewritten", log.text())


# -- the list of passes -----------------------------------------------------------------------------------------------
def test_the_pipeline_prints_as_its_table_of_contents() -> None:
    lines = str(PIPELINE).splitlines()
    assert len(lines) == len(PIPELINE)
    for line, step in zip(lines, PIPELINE, strict=True):
        assert step.name in line and step.part in line and (step.apply.__doc__ or "").split("\n")[0] in line


def test_the_table_says_what_each_pass_did() -> None:
    done = optimise(LAYERS["bert"][0], AVX512)
    lines = dict(zip((step.name for step in PIPELINE), PIPELINE.text(done.log).splitlines(), strict=True))
    assert re.search(r"fuse_epilogues +\d+ -> +\d+ nodes +[1-9]\d* rewritten +\d+\.\d\d ms", lines["fuse_epilogues"])
    assert re.search(r"int8_matmuls +not run", lines["int8_matmuls"])


def test_rewrites_are_nodes_that_were_replaced_or_dropped() -> None:
    g = Graph("g")
    x = g.input("x", (2, 3))
    shaped = x.reshape(3, 2)
    g.tanh(x)  # dead
    g.set_outputs([(shaped * 1.0).tanh(), shaped.tanh() + shaped.tanh()])
    entries = {e.name: e for e in optimise(g, AVX512).log.entries[:4]}
    counts = {name: (e.before, e.after, e.rewrites) for name, e in entries.items()}
    assert counts["canonicalize"] == (9, 8, 1), "shaped * 1.0 is shaped"
    assert counts["cse"] == (8, 6, 2), "three tanh of the same are one"
    assert counts["dce"] == (6, 4, 2), "the constant and the tanh of x are dead"


@pytest.mark.parametrize("step", PIPELINE, ids=lambda step: step.name)
def test_a_pass_is_found_under_its_name(step: Any) -> None:
    assert step.apply.__module__ == f"rlx.mir.{step.name}"
    assert (Path(__file__).parent.parent / "fixtures" / "mir" / f"{step.name}.ir").exists()


# -- dumps ------------------------------------------------------------------------------------------------------------
def test_rlx_dump_writes_a_file_after_each_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_DUMP", str(tmp_path / "dumps"))
    g = Graph("my/graph")
    x = g.input("x", ("n", 4))
    done = optimise(g.set_outputs([(x @ g.param("w", (4, 4))).tanh() + 0.5]), AVX512)
    files = sorted((tmp_path / "dumps").iterdir())
    steps = [f.name.split(".")[-2] for f in files]
    assert steps[0] == "built" and steps.count("hoist_weights") == 2
    assert steps[1:5] == ["canonicalize", "fold_constants", "cse", "dce"]
    assert len(files) == 2 + len(done.log.entries)
    assert all(re.fullmatch(r"\d{3,}-my_graph(\.bind)?\.\w+\.rlx", f.name) for f in files)
    assert all(Graph.parse(f.read_text()) for f in files), "every dump reads back"
    assert Graph.parse(files[0].read_text()) == g
    assert "test_pipeline.py:" in files[0].read_text()
    main = [f for f in files if ".bind." not in f.name][-1]
    assert Graph.parse(main.read_text()) == done.main


def test_a_graph_that_is_in_the_cache_is_dumped_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path / "cache"))
    g = Graph("cached")
    g.set_outputs([g.input("x", ("n", 4)).tanh() + 0.25])
    rlx.compile(g)
    for folder in ("first", "second"):
        monkeypatch.setenv("RLX_DUMP", str(tmp_path / folder))
        rlx.compile(g)
        assert any(f.name.endswith("cached.built.rlx") for f in (tmp_path / folder).iterdir())


@pytest.mark.parametrize("place", ["below", "x" * 300, "nul\0"], ids=["a file", "a long name", "nul"])
def test_a_folder_of_dumps_that_cannot_be_written_is_named(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "below").write_text("a file where a folder should be")
    monkeypatch.setattr(os, "environ", dict(os.environ) | {"RLX_DUMP": str(tmp_path / place)})
    g = Graph("cached")
    g.set_outputs([g.input("x", ("n", 4)).tanh() + 0.25])
    with pytest.raises(CapabilityError, match=r"RLX_DUMP: the folder '.*' cannot be written: ") as caught:
        rlx.compile(g)
    assert caught.value.hint is not None and "RLX_DUMP" in caught.value.hint


def test_nothing_is_written_without_being_asked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLX_DUMP", raising=False)
    monkeypatch.chdir(tmp_path)
    optimise(LAYERS["bert"][0], AVX512)
    assert list(tmp_path.iterdir()) == []


def test_old_names_of_the_fusion_report_still_work() -> None:
    g = Graph("g")
    x = g.input("x", ("n", 8))
    g.set_outputs([(x @ g.param("w", (8, 8))).rms_norm(g.param("v", (8,)))])
    report = optimise(g, AVX512).report
    assert [m.op for m in report.separate] == ["matmul -> rms_norm"]
    with pytest.warns(DeprecationWarning, match="FusionReport.apart is now called separate"):
        assert report.apart is report.separate
    with pytest.warns(DeprecationWarning, match="FusionReport.keep_apart is now called keep_separate"):
        report.keep_apart(g.nodes[0], "a reason", "one -> other")
    assert str(report.separate[-1]) == f"separate: one -> other: a reason  ({g.nodes[0].origin})"


def test_every_launch_boundary_has_one_line_with_its_reason() -> None:
    g = Graph("g")
    x, w = g.input("x", ("n", 8)), g.param("w", (8, 8))
    h = x.rms_norm(g.param("v", (8,))) @ w @ g.param("u", (8, 8))
    g.set_outputs([h.softmax(axis=-1) @ w, g.input("y", ("n",)).exp()])
    done = optimise(g, AVX512)
    pairs = ["rms_norm -> matmul", "matmul -> matmul", "matmul -> softmax", "softmax -> matmul", "exp"]
    assert [m.op for m in done.report.separate] == pairs and not done.report.missed
    text = str(done.report).split("separate 5\n")[1]
    assert len(text.splitlines()) == 5 and "separate" not in text and "by fuse" not in text
    assert "matmul -> softmax: softmax needs complete rows" in text and "reads no result of another launch" in text
    off = optimise(g, AVX512, rlx.CompileProfile.unfused()).report
    assert str(off).startswith("fusion is switched off") and not off.separate


def test_a_matmul_with_an_epilogue_is_told_from_one_that_takes_none() -> None:
    g = Graph("g")
    x, w = g.input("x", ("n", 8)), g.param("w", (8, 8))
    first = (x @ w).gelu()
    product = (g.input("i", ("n", 8), "i32") @ g.input("j", (8, 8), "i32")).abs()
    g.set_outputs([first, first.exp(), product])
    why = {m.op: m.why for m in optimise(g, AVX512).report.missed}
    assert why == {"matmul -> exp": "matmul already has an epilogue", "matmul -> abs": "matmul supports no epilogue"}


def test_reports_do_not_dump_a_second_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RLX_DUMP", str(tmp_path))
    g = Graph("g")
    g.set_outputs([g.input("x", ("n", 8)).tanh() + 0.5])
    f = rlx.compile(g)
    before = sorted(tmp_path.iterdir())
    assert before and str(f.dispatch()) and sorted(tmp_path.iterdir()) == before


def test_the_columns_of_the_pass_table_are_aligned() -> None:
    columns = {re.search(r"\S+\s+\S+\s+\S+\s+", line).end() for line in str(PIPELINE).splitlines()}  # type: ignore[union-attr]
    assert len(columns) == 1


def test_a_matmul_that_takes_in_a_residual_stays_in_its_own_stage() -> None:
    flow = rlx.ModelFlow("stages").input("x", ("rows", 16)).layer(
        "layer",
        lambda stack: stack.residual_save().swiglu("gate", "up", "down", intermediate_size=24).residual_add(),
    )  # fmt: skip
    done = optimise(flow.build(flow.init(rlx.random.key(0))).into_graph(), AVX512)
    matmuls = [node for node in done.main.nodes if node.op == "fused_matmul"]
    assert [node.origin.stage for node in matmuls] == ["layer.ffn", "layer.ffn"]
    assert "layer" in {origin.stage for origin in matmuls[-1].origin.merged}  # the residual


# -- passes from outside ----------------------------------------------------------------------------------------------
def doubled(graph: rlx.Graph) -> rlx.Graph:
    """tanh(x) -> 2 x, which is wrong, so that it is seen."""

    def visit(rewriter: Any, node: Any) -> Any:
        if node.op != "tanh":
            return None
        (x,) = rewriter.operands(node)
        return rewriter.make(node, "add", x, x)[0]

    return rebuild(graph, visit, made_by="doubled")


def test_a_step_is_in_the_pipeline_inside_its_block_only_and_leaves_nothing_in_the_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RLX_CACHE", str(tmp_path))
    g = rlx.Graph("stepped")
    g.set_outputs([g.input("x", (2,)).tanh()])
    x = np.float32([1, 2])
    with with_step(Step("simplify", doubled), before="cse") as pipeline:
        assert "doubled" in str(pipeline) and rlx.compile(g).run({"x": x})[0].tolist() == [2, 4]
        assert Keys.of(g, host(), rlx.CompileProfile()) == Keys(None, None)
    assert "doubled" not in str(module.PIPELINE)
    np.testing.assert_allclose(rlx.compile(g).run({"x": x})[0], np.tanh(x), rtol=1e-6)
    monkeypatch.setattr(module, "PIPELINE", Pipeline((*module.PIPELINE,)))  # somebody else's
    assert Keys.of(g, host(), rlx.CompileProfile()) == Keys(None, None)


def test_a_step_comes_before_one_that_exists() -> None:
    with (
        pytest.raises(GraphError, match="the pipeline has no step 'csee'") as caught,
        with_step(Step("simplify", doubled), before="csee"),
    ):
        pass
    assert "'cse'" in caught.value.notes[0]


def test_a_pass_may_not_change_the_types_of_outputs() -> None:
    def summed(graph: rlx.Graph) -> rlx.Graph:
        def visit(rewriter: Any, node: Any) -> Any:
            return rewriter.make(node, "sum", *rewriter.operands(node))[0] if node.op == "tanh" else None

        return rebuild(graph, visit, made_by="summed")

    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (2, 3)).tanh()])
    with pytest.raises(VerifyError, match=r"output 0 is f32\[\], before f32\[2, 3\]") as caught:
        run_passes(g, [summed])
    assert caught.value.notes[-1] == "  after pass: summed"

"""Reports: what became of each node, where the memory is, when each thread does what."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import numpy as np
import pytest
from inspected import looped
from layers import MINILM, TINY_LLAMA, bert_graph, compiled, llama_graph, llama_inputs, weights
from targets import AVX2

import rlx
from rlx.errors import BindError, CapabilityError
from rlx.inspect.code import busiest
from rlx.inspect.dispatch import dispatch_report
from rlx.inspect.lineage import lineage, sources
from rlx.inspect.picture import picture
from rlx.ir.graph import Graph
from rlx.lir.program import ARENA
from rlx.runtime.plan import make_plan


def dispatch(graph: Graph) -> dict[str, str]:
    """The path of each node, by number and op."""
    return {f"{row.node} {row.op}": row.path for row in dispatch_report(lineage(graph, AVX2)).rows}


# -- dispatch ---------------------------------------------------------------------------------------------------------
def test_every_node_of_a_layer_is_accounted_for() -> None:
    """All work of a layer is in its launches: each of them is some node's, and each node that works has one."""
    for graph in (llama_graph(TINY_LLAMA), bert_graph(MINILM)):
        line = lineage(graph, AVX2)
        report = dispatch_report(line)
        assert [row.node for row in report.rows] == [f"%{n.id}" for n in graph.nodes if n.operands]
        assert not report["host"] and not report["decomposed"] and not report["unused"]
        assert {row.op for row in report["view"] + report["removed"]} == {"reshape"}
        assert {i for row in report.rows for i in row.launches} == set(range(len(line.plan.main.launches)))
        for row in report["native"]:
            assert len(row.launches) == 1, row
            assert (row.op == "attention") == row.kernels[0].startswith("attention."), row
            assert row.op not in ("matmul", "silu", "gelu", "add") or row.kernels[0].startswith("matmul."), row


def test_merged_matmuls_are_one_launch() -> None:
    report = dispatch_report(lineage(bert_graph(MINILM), AVX2))
    q, k, v = [row for row in report.rows if row.op == "matmul"][:3]
    assert q.launches == k.launches == v.launches == (0,)


def test_nodes_without_work_say_why() -> None:
    g = rlx.Graph("g")
    x, w = g.input("x", (4, 8)), g.param("w", (8, 8))
    number = g.constant(2.0) * g.constant(3.0)  # %4
    x.exp()  # %5: nobody needs it
    y = (x * 1.0).mT.mT + number  # %7 %8 %9 %10
    g.set_outputs([y @ (w + 1.0), y.mT.reshape(32)])  # %12 %13, %14 %15
    assert dispatch(g) == {
        "%4 mul": "folded", "%5 exp": "unused", "%7 mul": "removed", "%8 transpose": "removed",
        "%9 transpose": "removed", "%10 add": "native", "%12 add": "weights", "%13 matmul": "native",
        "%14 transpose": "view", "%15 reshape": "native",
    }  # fmt: skip


def test_blocks_say_what_they_became() -> None:
    g = rlx.Graph("g", level="hir")
    x, w, b = g.input("x", ("n", 8)), g.param("w", (8, 8)), g.param("b", (8,))
    g.set_outputs([g.linear(x, w, b, activation="gelu")])
    (row,) = dispatch_report(lineage(g, AVX2)).rows
    assert row.path == "native" and {"add", "gelu"} <= set(row.became) and len(row.launches) == 1
    assert "as matmul + add + gelu" in str(row)


def test_an_op_without_a_kernel_is_called_decomposed() -> None:
    body = rlx.Graph("body")
    body.set_outputs([body.input("x", (4,)).exp() * 2.0])
    g = rlx.Graph("g")
    g.set_outputs([g.custom_fn([g.input("x", (4,)) + 1.0], body).tanh()])
    row = dispatch_report(lineage(g, AVX2))["decomposed"][0]
    assert row.op == "custom_fn" and row.became == ("exp", "mul") and "as exp + mul" in str(row)
    assert row.kernels[0].startswith("add_exp_mul_tanh.")


def test_loops_belong_to_the_node_that_loops() -> None:
    report = rlx.compile(looped()).dispatch()
    assert [(row.op, row.path) for row in report.rows] == [("scan", "native"), ("cond", "native"), ("sum", "native")]
    scan, cond, total = report.rows
    assert set(scan.launches).isdisjoint(cond.launches) and len(scan.launches) >= 2 and len(cond.launches) == 2
    assert total.launches and not set(total.launches) & set(scan.launches + cond.launches)


def test_a_report_counts_and_prints() -> None:
    f = rlx.compile(llama_graph(TINY_LLAMA))
    report = f.dispatch()
    assert report.counts["native"] == len(report["native"]) > 10 and report.counts["host"] == 0
    head, *rows = str(report).splitlines()
    assert head.startswith("llama: 20 nodes: ") and "0 decomposed, 0 host" in head and len(rows) == 20
    assert all("layers.py:" in row for row in rows)


def test_the_reference_runs_everything_in_python(tmp_path: Path) -> None:
    f = rlx.compile(llama_graph(TINY_LLAMA), "reference")
    assert set(f.dispatch().counts.items()) >= {("host", 20), ("native", 0)}
    with pytest.raises(CapabilityError, match="op by op"):
        f.memory()
    with pytest.raises(CapabilityError, match="op by op"):
        f.page(tmp_path / "x.html")


# -- lineage ----------------------------------------------------------------------------------------------------------
def test_marks_change_nothing_but_origins() -> None:
    graph = llama_graph(TINY_LLAMA)
    line = lineage(graph, AVX2)
    assert line.lowered == graph
    assert line.plan.main.text() == make_plan(graph, AVX2).main.text()
    names = [name for name, _ in line.steps]
    assert names[0] == "built" and "hoist_weights" in names and names[-1] == "dce"
    assert all(sources(n) <= set(range(len(graph))) for n in line.main.nodes)
    derived = next(n for n in line.main.nodes if n.attrs.get("name") == "@0")
    made_of = {graph.nodes[i].attrs.get("name") for i in line.sources(derived)}
    assert {"0.q", "0.k", "0.v"} <= made_of


# -- memory -----------------------------------------------------------------------------------------------------------
def test_memory_is_what_the_types_say() -> None:
    f = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA))
    report = f.memory({"batch": 2, "seq": 33})
    assert report.bytes("input") == 2 * 33 * 12 * 4 + 2 * 33 * 4 and report.bytes("output") == 2 * 33 * 12 * 4
    arena = [b for b in report.buffers if b.kind == ARENA]
    assert report.bound <= report.arena <= report.unshared and report.saved == report.unshared - report.arena
    for i, a in enumerate(arena):
        assert a.offset is not None and a.offset + a.bytes <= report.arena and 0 <= a.first <= a.last < report.phases
        for b in arena[:i]:
            assert b.offset is not None
            apart = a.offset + a.bytes <= b.offset or b.offset + b.bytes <= a.offset
            assert apart or a.last < b.first or b.last < a.first, (a, b)
    text = str(report)
    assert text.startswith("memory of llama at batch = 2, seq = 33\n") and "|##" in text
    assert "f32[2, 33, 12]" in text


def test_memory_follows_the_last_run_and_asks_for_sizes_before() -> None:
    f = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA))
    with pytest.raises(BindError, match="batch, seq not known yet"):
        f.memory()
    with pytest.raises(BindError, match="nothing is called 'sequence'"):
        f.memory({"batch": 1, "sequence": 3})
    f.run(llama_inputs(TINY_LLAMA, 1, 5))
    assert f.memory().sizes == {"batch": 1, "seq": 5}
    assert f.memory() == f.report().memory


def test_memory_of_a_graph_that_needs_none() -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.input("x", (4,)).exp()])
    report = rlx.compile(g).memory()
    assert report.arena == report.bound == report.saved == 0 and "lives" not in str(report)


# -- pictures ---------------------------------------------------------------------------------------------------------
def test_a_picture_of_loops() -> None:
    ElementTree.fromstring(picture(lineage(looped(), AVX2), AVX2, "a < b & c"))


def test_the_busiest_lines_are_those_with_most_arithmetic() -> None:
    lines = ["mov", "vaddps %ymm0", "vfmadd213ps %ymm1", "vfmadd213ps %ymm2", "ret"]
    assert busiest(lines, 2) == lines[2:4]
    assert busiest(["mov", "ret"], 5) == ["mov", "ret"] and busiest([], 3) == []


# -- traces -----------------------------------------------------------------------------------------------------------
def test_a_trace_has_what_perfetto_wants(tmp_path: Path) -> None:
    f = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA), threads=2)
    f.run(llama_inputs(TINY_LLAMA, 2, 33), trace=tmp_path / "t.json")
    trace = json.loads((tmp_path / "t.json").read_text())
    assert trace["otherData"] == {"batch": 2, "seq": 33}
    metadata = {e["name"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
    assert metadata["process_name"].startswith("llama on ") and metadata["thread_name"] == "thread 1"
    events = [e for e in trace["traceEvents"] if e["ph"] == "X"]
    assert {e["args"]["launch"] for e in events} == set(range(8))
    report = f.report(llama_inputs(TINY_LLAMA, 2, 33))
    for event in events:
        assert {"name", "cat", "ph", "pid", "tid", "ts", "dur", "args"} <= set(event)
        launch = report.launches[event["args"]["launch"]]
        assert (event["args"]["bytes"], event["args"]["flops"]) == (launch.bytes, launch.flops)


def test_traces_of_loops_say_how_often(tmp_path: Path) -> None:
    f = rlx.compile(looped())
    inputs = {"c": np.zeros(4, np.float32), "xs": np.ones((10, 4), np.float32), "p": np.array(True)}
    f.run(inputs, trace=tmp_path / "t.json")
    events = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert any(e["cat"] == "loop" and e["args"]["steps"] == 10 for e in events)

"""Where nodes come from: the user's line, the stage, the block, the pass; through every pass down to the launches."""

from __future__ import annotations

import inspect
import threading
from pathlib import Path

from targets import AVX512

import rlx
from rlx import Graph
from rlx.hir.lower import lower
from rlx.ir.provenance import Origin
from rlx.lir.schedule import schedule
from rlx.mir.pipeline import optimise


def line() -> int:
    frame = inspect.currentframe()
    assert frame is not None and frame.f_back is not None
    return frame.f_back.f_lineno


def test_a_node_keeps_the_line_that_made_it() -> None:
    g = Graph("g")
    x, at = g.input("x", (2,)), line()
    y, also = g.tanh(x) * 2.0, line()
    for value, wanted in ((x, at), (y, also), (y.node.operands[1], also)):
        assert value is not None
        assert (Path(value.node.origin.file), value.node.origin.line) == (Path(__file__), wanted)


def test_stages_nest_and_end() -> None:
    g = Graph("g")
    x = g.input("x", (2,))
    with rlx.stage("layers.3"):
        a = x + 1.0
        with rlx.stage("attn"):
            b = a + 1.0
    c = b + 1.0
    assert [v.node.origin.stage for v in (x, a, b, c)] == ["", "layers.3", "layers.3.attn", ""]


def test_stages_of_one_thread_are_unknown_to_another() -> None:
    actual = []

    def build() -> None:
        actual.append(Graph("g").input("x", (2,)).node.origin.stage)

    with rlx.stage("outer"):
        thread = threading.Thread(target=build)
        thread.start()
        thread.join()
    assert actual == [""]


def test_an_origin_reads_as_one_line() -> None:
    origin = Origin("/a/b/model.py", 7, "layers.0", "%3 linear")
    assert str(origin.by("fuse")) == "layers.0, model.py:7, from %3 linear, by fuse"
    assert str(Origin()) == ""


def test_lowering_names_the_block_and_passes_name_themselves() -> None:
    g = Graph("g", level="hir")
    x, w, b = g.input("x", ("n", 4)), g.param("w", (4, 6)), g.param("b", (6,))
    with rlx.stage("ffn"):
        at = line() + 1
        y = g.linear(x, w, b, activation="silu")
    g.set_outputs([y])
    lowered = lower(g)
    new_nodes = [n for n in lowered.nodes if n.op in ("matmul", "add", "silu")]
    assert len(new_nodes) == 3
    for node in new_nodes:
        assert node.origin == Origin(__file__, at, "ffn", f"%{y.node.id} linear")
    done = optimise(lowered, AVX512)
    (fused,) = (n for n in done.main.nodes if n.op == "fused_matmul")
    assert fused.origin.by("") == new_nodes[0].origin and fused.origin.made_by == "fuse_epilogues"
    program = schedule(done.main, AVX512)
    assert program.launches[0].where == f"ffn, test_provenance.py:{at}, from %{y.node.id} linear, by fuse_epilogues"


def test_every_node_after_the_passes_still_knows_the_users_file() -> None:
    g = Graph("g")
    x = g.input("x", ("n", 4))
    y = (x @ g.constant([[1.0, 2.0]] * 4) + g.constant(1.0) * 2.0).tanh() * 1.0
    done = optimise(g.set_outputs([y]), AVX512)
    for part in (done.main, done.bind):
        assert part.nodes and all(n.origin.file == __file__ for n in part.nodes)

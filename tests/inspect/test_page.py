"""The page of a graph: one file whose data has every line of every level, and links between them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from inspected import looped, stacked
from layers import TINY_LLAMA, compiled, llama_graph, llama_inputs, weights
from targets import AVX2, host

import rlx
from rlx.errors import GraphError
from rlx.inspect.page import IS_FOLD, IS_OPEN, IS_STAGE, as_script, graph_page, ranges
from rlx.ir.graph import Graph

HOSTILE = [
    "</script><script>alert(1)</script>",
    "</div></pre><script>alert(1)</script>\"'&<img src=x onerror=alert(2)>",
    "<!--<script>",
    "]]><svg onload=alert(3)>",
    "javascript:alert(4)",
    "\u2028\u2029\u202e\\u003cscript\\u003e",
    "${alert(5)}`+alert(6)+`",
    'a"onmouseover="alert(7)',
    "&lt;script&gt;",
    "__proto__",
]


class Page(HTMLParser):
    """Reads a page as a browser does: its elements, whatever it would load or run, and its data."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.attributes: list[tuple[str, str]] = []
        self.tags: list[str] = []
        self.json: dict[str, str] = {}
        self.id: str | None = None
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"
        self.data: dict[str, Any] = json.loads(self.json["data"])
        self.data["columns"][-1] = json.loads(self.json["passes"])
        self.columns = {c["title"]: c for c in self.data["columns"]}

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += [(k, v or "") for k, v in attrs]
        self.id = dict(attrs).get("id") if ("type", "application/json") in attrs else None
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open[-1:] == ["script"] and self.id:
            self.json[self.id] = self.json.get(self.id, "") + data

    def rows(self, title: str) -> Iterator[tuple[str, frozenset[int]]]:
        """Lines of a column and the ops that they came from."""
        column = self.columns[title]
        for text, number in zip(column["text"], column["set"], strict=True):
            yield text, self.ops(number)

    def ops(self, number: int) -> frozenset[int]:
        numbers = self.data["sets"][number] if number >= 0 else []
        pairs = zip(numbers[::2], numbers[1::2], strict=True)
        return frozenset(op for first, count in pairs for op in range(first, first + count))


def page_of(graph: Graph, **options: Any) -> Page:
    return Page(graph_page(graph, AVX2, **options))


def test_a_page_shows_the_levels_and_links_their_lines() -> None:
    graph = llama_graph(TINY_LLAMA)
    page = page_of(graph)
    assert list(page.columns) == ["Stages", "MIR, as built", "MIR, optimised", "LIR", "Kernels", "Passes"]
    wanted = next(n.id for n in graph.nodes if n.op == "attention")

    def lines(title: str) -> list[str]:
        column = page.columns[title]
        titles = [f & (IS_STAGE | IS_FOLD) or str(i) in column["note"] for i, f in enumerate(column["flags"])]
        rows = zip(page.rows(title), titles, strict=True)
        return [text.split("(")[0] for (text, ops), is_title in rows if wanted in ops and not is_title]

    assert lines("MIR, as built") == [f"%{wanted} = attention"]
    assert len(lines("MIR, optimised")) == 1 and lines("MIR, optimised")[0].endswith("= attention")
    assert any(text.startswith("launch attention.") for text in lines("LIR"))
    assert lines("Kernels")[0].startswith("kernel attention.")
    every = {op for title in ("MIR, optimised", "LIR") for _, ops in page.rows(title) for op in ops}
    assert {n.id for n in graph.nodes if n.op != "reshape"} <= every


def test_every_line_of_a_graph_is_in_the_page() -> None:
    graph = stacked(6)
    texts = page_of(graph).columns["HIR, as built"]["text"]
    assert {line.strip() for line in graph.text().splitlines()[:-1]} <= set(texts)


def test_alike_layers_are_folded_at_every_level() -> None:
    page = page_of(stacked(30))
    for title in ("Stages", "HIR, as built", "MIR, lowered", "MIR, optimised", "LIR"):
        column = page.columns[title]
        folds = {t: column["inside"][i] for i, t in enumerate(column["text"]) if column["flags"][i] & IS_FOLD}
        assert any(inside >= 27 for inside in folds.values()), title
        assert any(name.startswith("layers.") for name in folds), title
        notes = [note for note in column["note"].values() if note.startswith("30 × layer")]
        assert notes, title
    stages = page.columns["Stages"]
    assert stages["text"][:5] == ["embed", "layers", "layers.0", "layers.0.norm", "layers.0.ffn"]
    assert "layers.17.ffn" in stages["text"]


def test_rows_inside_a_group_follow_it() -> None:
    for column in page_of(stacked(5), assembly=True).data["columns"]:
        count = len(column["text"])
        assert {len(column[k]) for k in ("depth", "inside", "flags", "set", "kernel")} == {count}
        for row, (depth, inside) in enumerate(zip(column["depth"], column["inside"], strict=True)):
            assert all(d > depth for d in column["depth"][row + 1 : row + 1 + inside])
            assert row + 1 + inside == count or column["depth"][row + 1 + inside] <= depth


def test_a_block_is_linked_to_its_ops_its_launches_and_their_code() -> None:
    """Each op of a block has links of its own: two launches of one block are not the same to them."""
    g = rlx.Graph("g", level="hir")
    x = g.input("x", ("n", 8))
    with rlx.stage("ffn"):
        g.set_outputs([g.swiglu_ffn(x, g.param("up", (8, 16)), g.param("gate", (8, 16)), g.param("down", (16, 8)))])
    page = page_of(g, assembly=True)
    block = next(ops for text, ops in page.rows("HIR, as built") if "swiglu_ffn(" in text)
    lowered = {text: ops for text, ops in page.rows("MIR, lowered") if text.startswith("%") and ops <= block}
    assert {"fused_matmul", "matmul"} <= {text.split(" = ")[1].split("(")[0] for text in lowered}
    launches = [(text, ops) for text, ops in page.rows("LIR") if text.startswith("launch matmul")]
    assert len(launches) == 2 and all(ops and ops <= block for _, ops in launches)
    assert not launches[0][1] & launches[1][1]
    lir, kernels, code = (page.columns[t] for t in ("LIR", "Kernels", "Assembly"))
    used = {k for t, k in zip(lir["text"], lir["kernel"], strict=True) if t.startswith("launch matmul")}
    assert used <= set(kernels["kernel"]) and used <= set(code["kernel"])
    assert any("vfmadd" in text for text in code["text"])


def test_a_graph_without_stages_has_no_tree_but_all_levels() -> None:
    page = page_of(looped())
    assert page.columns["Stages"]["text"] == []
    scan = next(ops for text, ops in page.rows("MIR, as built") if "= scan(" in text)
    launches = [text for text, ops in page.rows("LIR") if scan <= ops and text.lstrip().startswith("launch")]
    assert len(launches) >= 2 and any("loop" in text for text, _ in page.rows("LIR"))


def test_a_report_gives_launches_kernels_and_stages_their_time() -> None:
    f = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA))
    report = f.report(llama_inputs(TINY_LLAMA, 2, 33))
    page = Page(graph_page(f.graph, f.target, profile=f.profile, report=report))
    lir, kernels, stages = (page.columns[t] for t in ("LIR", "Kernels", "Stages"))
    launches = [
        lir["micros"][str(i)] for i, t in enumerate(lir["text"]) if t.startswith("launch") and str(i) in lir["micros"]
    ]
    assert launches == [pytest.approx(x.seconds * 1e6, abs=0.01) for x in report.launches if x.seconds]
    assert sum(kernels["micros"].values()) == pytest.approx(sum(launches), abs=0.5)
    roots = [str(i) for i, d in enumerate(stages["depth"]) if d == 0]
    assert sum(stages["micros"].get(i, 0) for i in roots) == pytest.approx(sum(launches), abs=0.5)


def test_the_report_of_another_graph_is_refused() -> None:
    report = compiled(llama_graph(TINY_LLAMA), weights(TINY_LLAMA)).report()
    with pytest.raises(GraphError, match="the report has 8 launches, this graph") as caught:
        graph_page(stacked(2), host(), report=report)
    assert any("same compiled graph" in note for note in caught.value.__notes__)


def test_a_compiled_graph_writes_its_page(tmp_path: Path) -> None:
    f = rlx.compile(stacked(3))
    f.set_params({n: np.ones(t.shape, np.float32) for n, t in f.param_types.items()})
    report = f.report({"x": np.ones((4, 16), np.float32)})
    path = f.page(tmp_path / "stacked.html", report=report, assembly=True)
    page = Page(path.read_text(encoding="utf-8"))
    assert path == tmp_path / "stacked.html" and page.data["name"] == "stacked"
    assert page.columns["LIR"]["micros"] and "Assembly" in page.columns


def test_what_passes_did_is_there_and_closed() -> None:
    column = page_of(stacked(2)).columns["Passes"]
    titles = [i for i, depth in enumerate(column["depth"]) if depth == 0]
    assert {"fuse_epilogues", "fusion", "dispatch"} <= {column["text"][i] for i in titles}
    assert not any(column["flags"][i] & IS_OPEN for i in titles)


@pytest.mark.parametrize("hostile", HOSTILE)
def test_a_page_loads_nothing_and_runs_nothing_that_a_graph_says(hostile: str) -> None:
    g = rlx.Graph(hostile)
    with rlx.stage(hostile):
        g.set_outputs([g.input(hostile, (4, 4)).exp() @ g.param(f"{hostile} w", (4, 4))])
    text = graph_page(g, host())
    page = Page(text)
    assert page.tags.count("script") == 3 and not {"img", "svg", "iframe", "link"} & set(page.tags)
    assert not [k for k, _ in page.attributes if k.startswith("on") or k in ("src", "href")]
    assert "://" not in text and "url(" not in text and "@import" not in text
    policy = next(v for _, v in page.attributes if v.startswith("default-src"))
    assert policy.startswith("default-src 'none'; style-src 'sha256-") and "unsafe" not in policy
    assert page.data["name"] == hostile
    assert sum(json.dumps(hostile)[1:-1] in line for line in page.columns["MIR, as built"]["text"]) >= 2


def test_data_inside_a_script_element_has_no_markup() -> None:
    for text in HOSTILE:
        written = as_script([text, {text: 1}])
        assert not set("<>&\u2028\u2029") & set(written) and json.loads(written) == [text, {text: 1}]
    assert json.loads(as_script("\ud800")) == "\ud800"  # half a character is no UTF-8


def test_sets_are_ranges() -> None:
    assert ranges(frozenset({1, 2, 3, 7})) == (1, 3, 7, 1) and ranges(()) == ()

"""What notebooks show of results: escaped, bounded, readable in both themes, and short at a prompt."""

from __future__ import annotations

from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, needs_chromium

import rlx
from rlx import ModelFlow
from rlx.engine.language_model import Completion
from rlx.engine.sequence import Timings, Usage
from rlx.flow.built import Params
from rlx.mir.report import FusionReport
from rlx.notebook import MAX_ROWS, Bar, box, fold, marked, note, preformatted, prose, table

HOSTILE = "<img src=x onerror=\"document.title='hurt'\"><script>document.title='hurt'</script>'&"
ALLOWED = {"div", "pre", "span", "details", "summary", "table", "thead", "tbody", "tr", "th", "td"}


class Tags(HTMLParser):
    """The elements, attributes and text of some HTML; every element has to be closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.opened: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.opened

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.opened.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        assert self.opened.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


def graph(name: str = HOSTILE, scale: float = 1.0) -> rlx.Graph:
    g = rlx.Graph(name)
    x = g.input(f"x{HOSTILE}", ("rows", 8))
    with rlx.stage(HOSTILE):
        y = ((x * scale) @ g.param(f"w{HOSTILE}", (8, 8))).gelu()
    g.set_outputs([y.softmax(axis=-1)])
    return g


def results() -> Iterator[tuple[str, Any]]:
    g = graph()
    compiled = rlx.compile(g)
    compiled.set_params({name: np.eye(8, dtype=np.float32) for name in compiled.param_types})
    fusion = FusionReport()
    fusion.add(HOSTILE, [g.nodes[4], g.nodes[5]])
    fusion.miss("matmul epilogue", g.nodes[5], HOSTILE)
    usage, timings = Usage(5, 2, 3), Timings(0.1, 0.2, 50.0, 10.0)
    module = rlx.GraphModule.from_mir(g)
    yield "graph", g
    yield "compiled", compiled
    yield "report", compiled.report()
    yield "timed report", compiled.report({f"x{HOSTILE}": np.ones((4, 8), np.float32)})
    yield "dispatch", compiled.dispatch()
    yield "memory", compiled.memory({"rows": 4})
    yield "fusion", fusion
    yield "diff", rlx.diff(g, graph(scale=2.0))
    yield "completion", Completion(f"Hello {HOSTILE}", list(range(500)), "stop", usage, timings, 7, "f")
    yield "module", module
    yield "planned module", module.plan()
    yield "params", Params(g, {f"w{HOSTILE}": np.eye(8)}, rlx.MapWeights({}))
    yield "flow", ModelFlow(HOSTILE).input(HOSTILE, (2, 8)).rope_tables(np.ones((64, 4)), np.ones((64, 4)))


RESULTS = dict(results())


@pytest.mark.parametrize("name", RESULTS)
def test_a_result_is_escaped_html_without_scripts_and_has_a_short_repr(name: str) -> None:
    result = RESULTS[name]
    tags = Tags(result._repr_html_())
    assert set(tags.tags) <= ALLOWED and tags.attributes <= {"style", "open"}
    if name not in ("fusion", "memory"):  # which name no part of the graph, or only buffers
        assert "<script>" in tags.text
    assert len(repr(result)) < 500 and "\n" not in repr(result)


def test_what_results_show() -> None:
    shown = {name: Tags(result._repr_html_()).text for name, result in RESULTS.items()}
    assert "softmax(%" in shown["graph"] and "gelu(%" in shown["graph"]
    assert "µs" in shown["timed report"] and "GFLOPS" in shown["timed report"] and "µs" not in shown["report"]
    assert "native" in shown["dispatch"] and "kept for all runs" in shown["memory"]
    assert f"{HOSTILE}1" in shown["fusion"] and "missed 1" in shown["fusion"]  # one of that kind
    assert "- %1 = const(value=1.0)" in shown["diff"] and "+ %1 = const(value=2.0)" in shown["diff"]
    assert "5 prompt tokens (2 cached), 3 generated, stop; 10.0 tokens/s; seed 7" in shown["completion"]
    assert "launch" in shown["planned module"] and "f32[8, 8]" in shown["params"] and "RopeTables" in shown["flow"]


def test_layers_that_are_alike_are_shown_once_and_long_graphs_are_cut() -> None:
    deep = rlx.Graph("deep")
    x = deep.input("x", (4,))
    for i in range(100):
        with rlx.stage(f"layers.{i}"):
            x = x.exp().tanh()
    deep.set_outputs([x])
    html = deep._repr_html_()
    assert html.count("tanh(") == 1 and "99 × like layers.0" in html
    long = rlx.Graph("long")
    x = long.input("x", (4,))
    for i in range(1000):
        x = x * float(i)
    long.set_outputs([x])
    html = long._repr_html_()
    assert "more lines; print the graph to see all" in html and html.count("mul(") < MAX_ROWS + 1
    wide = rlx.Graph("wide")
    x = wide.input("x", (4,))
    for i in range(1000):
        with rlx.stage("part_" + "".join("abcdefghij"[int(digit)] for digit in str(i))):
            x = x.exp()
    wide.set_outputs([x])
    assert len(wide._repr_html_()) < 200_000 and wide._repr_html_().count("see all") == 1


def test_the_parts_of_results() -> None:
    rows = [(f"row {i}", i, 0.5, Bar("half", 0.5)) for i in range(MAX_ROWS + 7)]
    html = table(("name", "number", "float", "bar"), rows)
    assert html.count("<tr>") == MAX_ROWS + 1 and "… and 7 more rows" in html
    assert "transparent 50.0%" in html and ">0.5<" in html
    assert "… and 3 more lines" in preformatted(["x"] * (MAX_ROWS + 3))
    assert len(preformatted(["x" * 100_000])) < 2000
    for text in (box(HOSTILE, note(HOSTILE)), prose(HOSTILE), fold(HOSTILE, note(HOSTILE)), marked([("+", HOSTILE)])):
        tags = Tags(text)
        assert set(tags.tags) <= ALLOWED and HOSTILE in tags.text


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_a_browser_shows_results_in_the_colours_of_the_page_and_runs_nothing(tmp_path: Path, dark: bool) -> None:
    ink = "rgb(221, 221, 221)" if dark else "rgb(34, 34, 34)"
    paper = "#111" if dark else "#fff"
    html = "".join(result._repr_html_() for result in RESULTS.values())
    page = tmp_path / "results.html"
    page.write_text(f'<meta charset="utf-8"><title>safe</title><body style="color:{ink};background:{paper}">{html}')
    with Browser(dark=dark) as browser:
        browser.open(page)
        assert browser.evaluate("document.title") == "safe"
        assert len(browser.requests) == 1 and not browser.complaints  # the page itself
        colours = "[...new Set([...document.querySelectorAll('pre,td,summary')].map(e => getComputedStyle(e).color))]"
        assert browser.evaluate(colours) == [ink]
        assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")

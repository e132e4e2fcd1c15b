"""The explorer page in a browser: what a user sees and can do with pointer and keyboard. Needs Chromium."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browser import Browser, needs_chromium
from inspected import looped, stacked
from targets import AVX2
from test_page import HOSTILE

import rlx
from rlx.inspect.page import graph_page
from rlx.ir.graph import Graph

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with Browser() as one:
        yield one


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a stack of 40 layers with times."""
    f = rlx.compile(stacked(40), threads=1)
    f.set_params({n: np.ones(t.shape, np.float32) for n, t in f.param_types.items()})
    path = tmp_path_factory.mktemp("page") / "page.html"
    return f.page(path, report=f.report({"x": np.ones((64, 16), np.float32)}), assembly=True)


def opened(browser: Browser, folder: Path, graph: Graph) -> Browser:
    (folder / "page.html").write_text(graph_page(graph, AVX2), "utf-8")
    browser.open(folder / "page.html")
    return browser


def seen(browser: Browser, column: int, kind: str = "") -> list[str]:
    """The rows on screen of a column, from top to bottom; those of a class, if asked."""
    rows = f"[...columns[{column}].space.querySelectorAll('.row{kind}')]"
    texts = f"{rows}.sort((a, b) => a.number - b.number).map(r => r.querySelector('.label').textContent)"
    rows: list[str] = browser.evaluate(texts)
    return rows


def click(browser: Browser, column: int, text: str, part: str = "label") -> None:
    row = f"[...columns[{column}].space.children].find(r => r.querySelector('.label').textContent.startsWith({text!r}))"
    browser.evaluate(f"{row}.querySelector('.{part}').click()")
    browser.frames(1)


def index(browser: Browser, title: str) -> int:
    number: int = browser.evaluate(f"columns.findIndex(c => c.title === {title!r})")
    return number


def test_the_page_is_all_it_needs_and_holds_only_what_is_on_screen(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert len(browser.requests) == 1 and browser.complaints == []
    assert seen(browser, 0)[:3] == ["embed", "layers", "layers.0"]
    for _ in range(2):
        assert browser.evaluate("document.querySelectorAll('.row').length") < 600
        browser.evaluate("columns.forEach(c => c.setAll(true))")
    assert browser.evaluate("columns.reduce((n, c) => n + c.visible.length, 0)") > 2000


def test_a_fold_opens_to_any_single_layer(browser: Browser, page: Path) -> None:
    browser.open(page)
    assert "layers.17" not in seen(browser, 1)
    click(browser, 1, "layers.1-39", "arrow")
    assert "layers.17" in seen(browser, 1) and "layers.17.ffn" not in seen(browser, 1)
    click(browser, 1, "layers.17", "arrow")
    assert "layers.17.ffn" in seen(browser, 1) and "layers.16.ffn" not in seen(browser, 1)


def test_a_layer_can_be_the_beginning(browser: Browser, page: Path) -> None:
    browser.open(page, "#layers.31")
    assert seen(browser, 0, ".picked") == ["layers.31"]
    assert seen(browser, 1, ".linked") and "layers.31" in " ".join(seen(browser, 1))
    browser.open(page, "#%3")
    assert [text.split()[0] for text in seen(browser, 1, ".picked")] == ["%3"]


def test_blocks_lead_to_launches_and_code_and_back(browser: Browser, page: Path) -> None:
    browser.open(page)
    lir, kernels, code = (index(browser, title) for title in ("LIR", "Kernels", "Assembly"))
    block = next(text for text in seen(browser, 1) if "= linear(" in text)
    click(browser, 1, block[:12])
    launches = [text for text in seen(browser, lir, ".linked") if text.startswith("launch")]
    assert len(launches) == 1 and launches[0].startswith("launch matmul.")
    assert seen(browser, lir, ".active") == launches  # not its buffers, which are further up
    symbol = launches[0].split("(")[0].removeprefix("launch ")
    assert symbol in seen(browser, kernels, ".linked") and seen(browser, code, ".linked") == [symbol]
    click(browser, kernels, symbol)  # all its launches, and the blocks of all layers
    assert browser.evaluate(f"columns[{lir}].linkedRows.length") == 40
    assert browser.evaluate("columns[1].linkedRows.filter(r => columns[1].text[r].includes('linear(')).length") == 40
    click(browser, lir, launches[0])
    assert block in seen(browser, 1, ".linked")


def test_a_stage_lights_its_lines_at_every_level(browser: Browser, page: Path) -> None:
    browser.open(page)
    click(browser, 0, "layers.0.norm")
    assert any("rms_norm" in text for text in seen(browser, 1, ".linked"))
    assert any("rms_norm" in text for text in seen(browser, index(browser, "LIR"), ".linked"))
    assert not any("linear" in text for text in seen(browser, 1, ".linked"))


def test_it_can_be_used_by_keyboard_alone(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.evaluate("columns[0].view.focus()")
    for key in ("ArrowDown", "ArrowDown", "ArrowLeft"):
        browser.press(key)
    assert "layers.0.norm" not in seen(browser, 0)  # closed
    browser.press("ArrowRight")
    browser.press("ArrowDown")
    browser.press("Enter")
    assert seen(browser, 0, ".picked") == ["layers.0.norm"] and seen(browser, 1, ".linked")
    active = "document.getElementById(document.activeElement.getAttribute('aria-activedescendant'))"
    assert browser.evaluate(f"{active}.getAttribute('aria-selected')") == "true"
    browser.evaluate("columns[1].view.focus()")  # the row that the stage leads to is the current one
    assert browser.evaluate(f"{active}.classList.contains('linked')")
    browser.press("End")
    assert seen(browser, 1, ".active")[0].startswith("return")
    browser.press("Escape")
    assert seen(browser, 0, ".picked") == [] and seen(browser, 1, ".linked") == []
    browser.press("/")
    assert browser.evaluate("document.activeElement === find")


def test_search_finds_what_is_folded(browser: Browser, page: Path) -> None:
    browser.open(page)
    browser.press("/")
    browser.write("Layers.33.up")
    browser.press("Enter")
    assert browser.evaluate("state.textContent").startswith("1 of ")
    assert any("layers.33.up" in text for text in seen(browser, 1, ".hit"))
    first = browser.evaluate("hits[hitAt].map(x => x.title || x)")
    browser.press("Enter")
    assert browser.evaluate("hits[hitAt].map(x => x.title || x)") != first
    browser.press("Enter", shift=True)
    assert browser.evaluate("hits[hitAt].map(x => x.title || x)") == first
    browser.press("Escape")
    assert browser.evaluate("find.value + state.textContent") == ""


def test_launches_show_their_share_of_the_time(browser: Browser, page: Path) -> None:
    browser.open(page)
    lir = index(browser, "LIR")
    rows = browser.evaluate(
        f"[...columns[{lir}].space.children].map(r => [r.children[2].textContent, r.firstChild.textContent,"
        " r.firstChild.style.getPropertyValue('--hue')])"
    )
    launches = [row for row in rows if row[0].startswith("launch")]
    assert launches and all(share.endswith(" %") and 0 <= int(hue) <= 55 for _, share, hue in launches)
    assert next(share for text, share, _ in rows if text == "layers") not in ("", "0.0 %")


@pytest.mark.parametrize("width", [320, 700, 1000, 2560])
def test_nothing_is_cut_off(width: int, browser: Browser, page: Path) -> None:
    browser.resize(width, 700)
    try:
        browser.open(page)
        assert browser.evaluate("document.documentElement.scrollWidth") <= width
        shown = browser.evaluate("columns.filter(c => c.section.offsetWidth > 0).length")
        assert shown == (1 if width <= 700 else 7)
        assert browser.evaluate("Math.min(...columns.map(c => c.view.clientHeight || 999))") > 250
        browser.evaluate("columns[1].tab.click()")
        if width <= 700:
            assert browser.evaluate("columns.filter(c => c.section.offsetWidth > 0).map(c => c.number)") == [1]
            click(browser, 1, "%3")
            links = "[...document.querySelectorAll('.links button')]"
            browser.evaluate(f"{links}.find(b => b.textContent.startsWith('LIR')).click()")
            assert browser.evaluate("columns.filter(c => c.section.offsetWidth > 0).map(c => c.title)") == ["LIR"]
            assert browser.evaluate("document.documentElement.scrollWidth") <= width
            browser.evaluate("columns.at(-1).tab.click()")
            assert seen(browser, index(browser, "Passes"))
    finally:
        browser.resize(1440, 900)


def test_hostile_names_are_text(browser: Browser, tmp_path: Path) -> None:
    g = rlx.Graph(HOSTILE[1])
    x: Any = g.input("x", (4, 4))
    for name in HOSTILE:
        with rlx.stage(name):
            x = x @ g.param(name, (4, 4))
    opened(browser, tmp_path, g.set_outputs([x]))
    browser.evaluate("columns.forEach(c => { c.setAll(true); for (let r = 0; r < c.count; r += 3) pick(c, r); })")
    for name in HOSTILE:
        browser.evaluate(f"find.value = {name!r}; search(); go(1)" if "\\" not in repr(name) else "0")
    assert browser.complaints == [] and len(browser.requests) == 1
    assert browser.evaluate("document.scripts.length") == 3
    assert browser.evaluate("document.querySelectorAll('img, svg, iframe').length") == 0
    assert browser.evaluate("document.querySelector('h1').textContent") == HOSTILE[1]


def test_a_graph_without_stages_opens_with_its_nodes(browser: Browser, tmp_path: Path) -> None:
    opened(browser, tmp_path, looped())
    assert browser.evaluate("columns[0].section.hidden") and browser.complaints == []
    click(browser, 1, "%", "label")
    assert seen(browser, 1, ".picked")
    browser.resize(320, 600)
    try:
        opened(browser, tmp_path, looped())
        assert browser.evaluate("columns.filter(c => c.section.offsetWidth > 0).map(c => c.number)") == [1]
    finally:
        browser.resize(1440, 900)

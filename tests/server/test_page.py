"""The page at `/` in headless Chromium: a chat by keyboard only, hostile texts, narrow screens, dark and light."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, needs_chromium

from rlx.server.page import page_text, policy
from rlx.server.serve import Server

pytestmark = [pytest.mark.serve]
HOSTILE = [
    "<script>document.title = 'owned'</script>", "<img src=x onerror=\"document.title='owned'\">",
    "<svg onload=document.title='owned'>", "javascript:document.title='owned'", "</textarea><b>bold</b>",
    "{{constructor.constructor('document.title=1')()}}", "<a href='javascript:alert(1)'>x</a>", "\u202eabc",
    "<style>*{}</style>",
]  # fmt: skip


def test_the_page_is_one_small_file_that_loads_nothing(http: Any) -> None:
    text = page_text()
    assert len(text.encode()) < 40_000
    assert not re.search(
        r"https?://|//[a-z]+\.|\bsrc=|@import|\son\w+=|innerHTML|outerHTML|insertAdjacent|document\.write", text
    )
    assert not re.search(r"\seval\(|new Function|style=", text)
    answer = http.get("/")
    assert answer.headers["content-security-policy"] == policy()
    assert "default-src 'self'" in policy() and "unsafe" not in policy() and "frame-ancestors 'none'" in policy()


class Page:
    """The page in a browser."""

    def __init__(self, browser: Browser, address: str) -> None:
        self.browser, self.address = browser, address

    def open(self) -> None:
        self.browser.events.clear()
        self.browser.send("Page.navigate", url="about:blank")
        self.browser.send("Page.navigate", url=f"{self.address}/")
        self.until("document.readyState == 'complete' && document.getElementById('model')?.value != ''")

    def until(self, condition: str) -> None:
        end = time.monotonic() + 20
        while not self.browser.evaluate(f"Boolean({condition})"):
            assert time.monotonic() < end, condition
            time.sleep(0.02)

    def value(self, expression: str) -> Any:
        return self.browser.evaluate(expression)

    def set(self, field: str, value: str) -> None:
        self.value(f"document.getElementById({field!r}).value = {json.dumps(value)}")

    def ask(self, text: str) -> str:
        """Send a message by keyboard, and wait for the answer."""
        self.value("document.getElementById('prompt').focus()")
        self.browser.write(text)
        self.browser.press("Enter")
        self.until("!document.getElementById('again').disabled")
        return str(self.value("[...document.querySelectorAll('article.assistant .text')].at(-1).textContent"))


@pytest.fixture(scope="module")
def page(server: Server) -> Iterator[Page]:
    with Browser(1200, 800) as browser:
        yield Page(browser, server.address)


@needs_chromium
def test_a_chat_by_keyboard(page: Page, model: Any) -> None:
    page.open()
    page.value("localStorage.clear()")
    page.open()
    page.set("max_tokens", "20")
    page.set("seed", "7")
    answer = page.ask("hello")
    assert answer == model.chat("hello", max_tokens=20, temperature=1.0, seed=7).text
    assert "seed 7" in page.value("document.querySelector('article.assistant .facts').textContent")
    assert "tok/s" in page.value("document.querySelector('article.assistant .facts').textContent")
    page.set("seed", "8")
    page.value("document.getElementById('again').focus()")
    page.browser.press("Enter")
    page.until(
        "document.querySelector('article.assistant .facts')?.textContent.includes('seed 8') "
        "&& !document.getElementById('again').disabled"
    )
    other = model.chat("hello", max_tokens=20, temperature=1.0, seed=8).text
    assert page.value("document.querySelectorAll('article').length") == 2 and other != answer
    assert page.value("document.querySelector('article.assistant .text').textContent") == other
    assert page.browser.complaints == []
    assert all(url.startswith(page.address) for url in page.browser.requests)


@needs_chromium
def test_a_schema_shapes_the_answer(page: Page) -> None:
    page.set(
        "schema",
        '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"], '
        '"additionalProperties": false}',
    )
    assert json.loads(page.ask("again"))["a"] in (True, False)
    page.set("schema", "{")
    page.ask("wrong")
    assert "not JSON" in page.value("document.querySelector('article:last-child .error').textContent")
    page.set("schema", "")


@needs_chromium
def test_stop_ends_a_stream(page: Page, server: Server) -> None:
    page.set("max_tokens", "1000")
    page.value("document.getElementById('prompt').focus()")
    page.browser.write("go on")
    page.browser.press("Enter")
    page.until("!document.getElementById('stop').disabled || !document.getElementById('again').disabled")
    page.browser.press("Escape")
    page.until("document.getElementById('stop').disabled")
    scheduler = server.state.engine.served["tiny"].scheduler
    assert scheduler is not None
    end = time.monotonic() + 5
    while scheduler.statistics().requests_running and time.monotonic() < end:
        time.sleep(0.02)
    assert scheduler.statistics().requests_running == 0
    page.set("max_tokens", "5")


@needs_chromium
def test_hostile_texts_are_text(page: Page) -> None:
    page.value("document.getElementById('new').click()")
    for text in HOSTILE:
        page.ask(text)
    shown = page.value("[...document.querySelectorAll('article.user .text')].map(node => node.textContent)")
    assert shown == HOSTILE
    assert page.value("document.title") == "rlx"
    assert (
        page.value("document.querySelectorAll('article script, article img, article svg, article a, article b').length")
        == 0
    )
    for text in HOSTILE[:4]:  # the model writes it
        page.set("schema", json.dumps({"const": text}))
        page.set("max_tokens", "200")
        assert json.loads(page.ask("say it")) == text
    page.set("schema", "")
    page.set("max_tokens", "5")
    shown += ["say it"] * 4
    page.open()  # the conversation is kept, and still text
    assert page.value("[...document.querySelectorAll('article.user .text')].map(node => node.textContent)") == shown
    assert page.value("document.title") == "rlx" and page.browser.complaints == []


@needs_chromium
def test_conversations_are_kept_in_the_browser(page: Page) -> None:
    count = page.value("document.querySelectorAll('#chats li').length")
    page.value("document.getElementById('new').click()")
    page.ask("another talk")
    assert page.value("document.querySelectorAll('#chats li').length") == count + 1
    page.open()
    assert page.value("document.querySelector('#chats [aria-current=true]').textContent") == "another talk"
    page.value("document.querySelector('#chats li button:last-child').click()")
    assert page.value("document.querySelectorAll('#chats li').length") == count


@needs_chromium
def test_requests_can_be_copied(page: Page, http: Any) -> None:
    page.set("temperature", "0")
    page.value("document.getElementById('new').click()")
    page.set("prompt", 'it\'s "quoted" $HOME')
    curl = page.value("asCurl()")
    body = json.loads(re.search(r"-d '(.*)'\n$", curl, re.S)[1].replace("'\\''", "'"))  # type: ignore[index]
    assert body["messages"] == [{"role": "user", "content": 'it\'s "quoted" $HOME'}] and body["temperature"] == 0
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    python = page.value("asPython()")
    compile(python, "copied", "exec")
    assert "chat.completions.create(" in python and "temperature=0," in python
    page.set("temperature", "")


@needs_chromium
def test_every_control_is_reached_by_tab(page: Page) -> None:
    page.open()
    page.value(
        "document.getElementById('details').open = true; document.getElementById('menu').focus(); document.body.focus()"
    )
    seen = set()
    for _ in range(100):  # every message has a button too
        page.browser.press("Tab")
        seen.add(page.value("document.activeElement.id || document.activeElement.textContent"))
    assert {
        "model",
        "theme",
        "new",
        "prompt",
        "send",
        "curl",
        "python",
        "system",
        "temperature",
        "schema",
        "key",
    } <= seen


@needs_chromium
@pytest.mark.parametrize("dark", [False, True])
def test_a_narrow_screen_needs_no_scrolling_sideways(server: Server, dark: bool, tmp_path: Path) -> None:
    with Browser(320, 640, dark=dark) as browser:
        page = Page(browser, server.address)
        page.open()
        page.set("max_tokens", "10")
        page.ask("a_very_long_word_" * 20)
        assert page.value("document.documentElement.scrollWidth") <= 320
        page.value("document.getElementById('details').open = true")
        assert page.value("document.documentElement.scrollWidth") <= 320
        background = page.value("getComputedStyle(document.body).backgroundColor")
        assert (background == "rgb(22, 24, 28)") == dark
        page.value("document.getElementById('menu').click()")
        assert page.value("getComputedStyle(document.getElementById('side')).display") == "block"
        browser.press("Escape")
        assert page.value("getComputedStyle(document.getElementById('side')).display") == "none"
        browser.screenshot(tmp_path / "page.png")
        assert browser.complaints == []

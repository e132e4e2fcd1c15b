"""The documentation as a static site: it builds without a warning, and its pages load nothing from elsewhere."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from browser import Browser, needs_chromium

DOCS = Path(__file__).parent.parent / "docs"
NEEDED = ("sphinx", "myst_parser", "furo")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
needs_generator = pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: pip install -e '.[docs]'")
# What a page loads, as opposed to links that a reader may follow.
LOADED = re.compile(r'<(?:script|img|iframe)[^>]*\ssrc="([^"]+)"|<link[^>]*\shref="([^"]+)"')
IN_STYLES = re.compile(r"url\(\s*['\"]?(\w+:|//)|@import")


def build(source: Path, target: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "sphinx", "-W", "-q", str(source), str(target)]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    result = build(DOCS, target)
    assert result.returncode == 0, result.stderr
    return target


@needs_generator
def test_every_page_is_on_the_site_and_in_its_sidebar(site: Path) -> None:
    index = (site / "index.html").read_text()
    sidebar = index[index.index('<div class="sidebar-tree">') : index.index("<article")]
    for page in DOCS.glob("*.md"):
        assert (site / f"{page.stem}.html").exists()
        assert page.stem == "index" or f'href="{page.stem}.html"' in sidebar, f"{page.stem} is not in the sidebar"


@needs_generator
def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        for url in LOADED.findall(page.read_text()):
            assert not re.match(r"\w+:|//", "".join(url)) or "".join(url).startswith("data:"), (page, url)
    for style in site.rglob("*.css"):
        schemes = {match[1] for match in IN_STYLES.finditer(style.read_text())}
        assert schemes <= {"data:"}, style


@needs_generator
@needs_chromium
def test_a_browser_asks_for_nothing_but_files(site: Path) -> None:
    with Browser() as browser:
        browser.open(site / "stages.html")
        assert browser.requests and all(url.startswith(("file:", "data:")) for url in browser.requests)


@needs_generator
def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    source = tmp_path / "docs"
    source.mkdir()
    (source / "conf.py").write_text((DOCS / "conf.py").read_text())
    (source / "index.md").write_text("# Index\n## Pages\n- [Page](page.md): one.\n")
    (source / "page.md").write_text("# Page\nSee [there](index.md#pages).\n")
    assert build(source, tmp_path / "good").returncode == 0
    (source / "page.md").write_text("# Page\nSee [there](nowhere.md), or [there](index.md#nowhere).\n")
    result = build(source, tmp_path / "bad")
    assert result.returncode != 0 and "nowhere" in result.stderr

"""The site that Sphinx makes of these pages: sphinx-build -W docs build/docs

docs/index.md is the table of contents: each of its sections with pages becomes a group in the sidebar.
"""

import re

from sphinx.application import Sphinx

project = "rlx"
extensions = ["myst_parser"]
myst_heading_anchors = 4  # anchors as on GitHub
highlight_language = "none"  # of blocks that name no language
html_theme = "furo"  # fonts of the reader's system; nothing is loaded from elsewhere
html_title = "rlx"
html_copy_source = False
html_show_copyright = False
html_show_sphinx = False

PAGE = re.compile(r"^- \[[^\]]+\]\((?P<name>[\w-]+)\.md\)", re.M)


def add_contents(app: Sphinx, name: str, source: list[str]) -> None:
    """Append a hidden table of contents for each section of the index."""
    if name != app.config.root_doc:
        return
    for section in re.split(r"^## ", source[0], flags=re.M)[1:]:
        caption, _, body = section.partition("\n")
        pages = "\n".join(m["name"] for m in PAGE.finditer(body))
        if pages:
            source[0] += f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{pages}\n```\n"


def setup(app: Sphinx) -> None:
    app.connect("source-read", add_contents)

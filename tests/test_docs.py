"""Documentation that runs: Python blocks of a page are executed in order, the output block after each must match.

`pytest --update tests/test_docs.py` rewrites the outputs.
"""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parent.parent / "docs"
BLOCK = re.compile(r"```python\n(?P<code>.*?)```\n(?:```output\n(?P<output>.*?)```\n)?", re.S)


@pytest.mark.parametrize("page", ["tour.md"])
def test_a_page_shows_what_its_code_prints(page: str, update: bool) -> None:
    path = DOCS / page
    text = path.read_text()
    scope: dict[str, Any] = {}

    def run(match: re.Match[str]) -> str:
        printed = io.StringIO()
        line = text[: match.start()].count("\n") + 2
        code = compile("\n" * (line - 1) + match["code"], page, "exec")
        with contextlib.redirect_stdout(printed):
            exec(code, scope)
        output = f"```output\n{printed.getvalue()}```\n" if printed.getvalue() else ""
        return f"```python\n{match['code']}```\n{output}"

    result = BLOCK.sub(run, text)
    if update:
        path.write_text(result)
    assert result == text or update

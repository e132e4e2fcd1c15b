"""`docs/adding-an-op.md`, beside what `test_docs.py` runs: the lines that it shows of rlx are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "adding-an-op.md").read_text()
STEP = re.compile(r"^\d\. \*\*[^*]+\*\*, in `(?P<file>[\w/.]+)`(?P<rest>.*?)(?=^\d\. |\n\n)", re.S | re.M)


def test_lines_shown_of_a_file_are_in_the_file() -> None:
    steps = {m["file"]: re.findall(r"```py\n(.*?)```", m["rest"], re.S) for m in STEP.finditer(PAGE)}
    assert len(steps) == 5 and sum(map(len, steps.values())) == 4
    for file, blocks in steps.items():
        source = (ROOT / file).read_text()
        for line in "".join(blocks).splitlines():
            assert line.strip() in source, f"{file} has no {line.strip()!r}"


def test_an_op_by_decomposition_takes_ten_lines() -> None:
    first = PAGE.split("```python\n")[1].split("```")[0]
    assert len([line for line in first.splitlines() if line.strip()]) <= 10

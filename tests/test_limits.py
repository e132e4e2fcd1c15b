"""No test fails because the machine is busy: whoever waits for a process or a thread waits long enough."""

from __future__ import annotations

import re
from pathlib import Path

from limits import LONGEST_S

# What waits for at most so many seconds. A Barrier(n), an Event and the like without a number wait for ever.
WAITS = re.compile(r"\b(?:timeout=|(?:wait|join|communicate|settimeout|within|alarm)\()(\d+(?:\.\d+)?)\b")


def test_no_time_limit_is_short() -> None:
    texts = {path: path.read_text() for path in Path(__file__).parent.rglob("*.py")}
    short = [
        f"{path.name}: {match[0]}"
        for path, text in texts.items()
        for match in WAITS.finditer(text)
        if float(match[1]) < LONGEST_S
    ]
    assert not short, f"use limits.LONGEST_S: {short}"

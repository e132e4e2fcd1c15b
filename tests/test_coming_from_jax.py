"""The table of `docs/coming-from-jax.md`: every name on the right side exists, and none is listed twice."""

from __future__ import annotations

import re
from pathlib import Path

import rlx

PAGE = Path(__file__).parent.parent / "docs" / "coming-from-jax.md"
ROW = re.compile(r"^\| (?P<jax>`.*?) \| (?P<here>`.*?) \| (?P<note>.*?)\|$", re.M)
NAME = re.compile(r"rlx\.([a-z_.0-9A-Z]+)")


def test_every_name_of_the_table_exists() -> None:
    rows = list(ROW.finditer(PAGE.read_text()))
    assert len(rows) > 25
    names = [name for row in rows for name in NAME.findall(row["here"])]
    assert len(names) > 40
    for name in names + [name for row in rows for name in NAME.findall(row["note"])]:
        value: object = rlx
        for part in name.rstrip(".").split("."):
            assert hasattr(value, part), name
            value = getattr(value, part)
    left = [row["jax"] for row in rows]
    assert len(set(left)) == len(left)

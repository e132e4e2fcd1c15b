"""docs/models.md lists exactly the families that there are, and what it says of their parity holds."""

from __future__ import annotations

from pathlib import Path

import pytest
from model_table import PAGE, known, measure, rows_of

from rlx.models.family import FAMILIES

TOLERANCE = 2e-4
BUILTIN = sorted(name for name, family in FAMILIES.items() if family.config.__module__.startswith("rlx."))


def test_the_page_lists_the_families_that_there_are() -> None:
    rows = rows_of(PAGE.read_text())
    hint = "python tests/models/model_table.py --update"
    assert list(rows) == BUILTIN, hint
    for name, row in rows.items():
        assert row[: len(known(FAMILIES[name]))] == known(FAMILIES[name]), hint
        assert float(row[4]) < TOLERANCE and float(row[5] or 0) < TOLERANCE


@pytest.mark.parity
@pytest.mark.parametrize("name", BUILTIN)
def test_a_family_is_as_close_to_transformers_as_the_page_says(tmp_path: Path, name: str) -> None:
    """Within a factor, because another machine rounds elsewhere."""
    row, said = measure(name, tmp_path), rows_of(PAGE.read_text())[name]
    assert row.prefill.largest < TOLERANCE and row.prefill.largest <= 10 * float(said[4])
    if row.decode is not None:
        assert row.decode.largest < TOLERANCE and row.decode.largest <= 10 * float(said[5])
        assert row.prefill.agreement == 1.0

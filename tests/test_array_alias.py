"""The alias of NumPy arrays has one home."""

from __future__ import annotations

import re
from pathlib import Path

import rlx

ROOT = Path(rlx.__file__).parent


def test_the_type_of_arrays_is_named_in_one_place() -> None:
    alias = re.compile(r"^\w+(: TypeAlias)? = np\.ndarray\[Any, Any\]$", re.M)
    assert [p.name for p in ROOT.rglob("*.py") if alias.search(p.read_text(encoding="utf-8"))] == ["arrays.py"]

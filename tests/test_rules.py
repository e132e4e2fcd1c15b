"""Rules of the house that a program can check by reading the source."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import rlx

ROOT = Path(rlx.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# A tree of a user's frozen dataclass is put together again without calling its constructor.
SETS_FIELDS = {"functional/tree.py"}


@functools.cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def forced_writes(tree: ast.AST, inside: str = "") -> Iterator[int]:
    """Lines that write to a frozen object, but for one that completes itself in `__post_init__`."""
    for child in ast.iter_child_nodes(tree):
        name = child.name if isinstance(child, (ast.FunctionDef, ast.ClassDef)) else inside
        forced = isinstance(child, ast.Call) and ast.unparse(child.func) == "object.__setattr__"
        if forced and not (name == "__post_init__" and ast.unparse(child).startswith("object.__setattr__(self,")):
            yield child.lineno
        yield from forced_writes(child, name)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_frozen_objects_stay_as_they_were_made(path: Path) -> None:
    lines = list(forced_writes(parsed(path)))
    assert not lines or name_of(path) in SETS_FIELDS, f"{name_of(path)} writes to frozen objects in lines {lines}"


def test_nodes_are_copied_one_by_one_in_one_place() -> None:
    """Who wants a part of a graph asks `live_copy` or `copy_nodes`."""
    copies = re.compile(r"\.update\(zip\((\w+)\.results, [\w.]+\.copy\(\1\)")
    assert [name_of(p) for p in FILES if copies.search(p.read_text())] == ["ir/rewrite.py"]

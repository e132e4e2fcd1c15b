"""Words that names may not be: each of them leaves the reader to guess what a value is."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(p for folder in ("src", "tests", "benchmarks", "examples") for p in (ROOT / folder).rglob("*.py"))
# A variable says its role: `matches`, `new_graph`, `attrs`, not that it was found, made or given.
VARIABLES = {"found", "made", "given", "whole", "kept", "there"}
# Words that engineers do not use for these things: transposed, prepare, snapshots, sidecar, sequence, prefill.
API = {"turned", "arrive", "arrives", "starts", "beside", "growing"}
# `feed` is a word of its own only in feed-forward.
ALONE = "feed"


def names(tree: ast.Module) -> Iterator[tuple[str, int, bool]]:
    """Every name that a module introduces, its line, and whether it is a test's own sentence."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name, node.lineno, node.name.startswith("test_")
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id, node.lineno, False
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr, node.lineno, False
        elif isinstance(node, ast.arg):
            yield node.arg, node.lineno, False
        elif isinstance(node, ast.ExceptHandler | ast.MatchAs | ast.MatchStar) and node.name:
            yield node.name, node.lineno, False
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((alias.asname, node.lineno, False) for alias in node.names if alias.asname)


def is_banned(name: str) -> bool:
    words = name.strip("_").lower().split("_")
    feeds = any(a == ALONE and b != "forward" for a, b in zip(words, [*words[1:], ""], strict=True))
    return name.strip("_").lower() in VARIABLES or bool(API & set(words)) or feeds


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(ROOT)))
def test_names_say_what_values_are(path: Path) -> None:
    tree = ast.parse(path.read_text())
    bad = [f"{path.name}:{line} {name}" for name, line, sentence in names(tree) if not sentence and is_banned(name)]
    assert not bad, "a noun that says the role would be better: " + ", ".join(bad[:20])


@pytest.mark.parametrize("name", ["found", "_made", "GIVEN", "turned_heads", "feed", "cache_starts"])
def test_the_words_are_refused(name: str) -> None:
    assert is_banned(name)


@pytest.mark.parametrize("name", ["feed_forward", "foundation", "starting_row", "wholesale"])
def test_words_that_only_look_alike_pass(name: str) -> None:
    assert not is_banned(name)

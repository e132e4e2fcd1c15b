"""Rules of the house that a program can check by reading the source."""

from __future__ import annotations

import ast
import functools
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

import rlx
from rlx.mir.pipeline import PIPELINE

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


LONGEST_REPEAT = 12  # lines


def lines_of_code(path: Path) -> list[tuple[int, str]]:
    """Numbered lines without white space at their ends; no imports, comments, blank lines and lone punctuation."""
    imports: set[int] = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            imports.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = enumerate(map(str.strip, path.read_text().splitlines()), 1)
    return [(i, line) for i, line in lines if i not in imports and re.search(r"\w", line) and line[0] != "#"]


def repeats(files: Sequence[Path], longest: int) -> list[str]:
    """Places whose next lines, one more than `longest`, stand somewhere else too."""
    places: dict[str, str] = {}
    result = []
    for path in files:
        lines = lines_of_code(path)
        for at in range(len(lines) - longest):
            text, place = "\n".join(line for _, line in lines[at : at + longest + 1]), f"{path}:{lines[at][0]}"
            if places.setdefault(text, place) != place:
                result.append(f"{place} and {places[text]}")
    return result


def test_no_two_places_share_many_lines() -> None:
    """Generated stubs (`.pyi`) may: each class has its own copy of every op's signature."""
    assert not repeats(FILES, LONGEST_REPEAT)


def test_a_repeat_is_found(tmp_path: Path) -> None:
    same = [f"    x{i} = f({i})" for i in range(4)]
    (tmp_path / "a.py").write_text("\n".join(["import os", "def a():", *same]))
    (tmp_path / "b.py").write_text("\n".join(["def b():", *same[:2], "", "    # why", *same[2:]]))
    files = [tmp_path / "a.py", tmp_path / "b.py"]
    assert repeats(files, 3) == [f"{files[1]}:2 and {files[0]}:3"] and not repeats(files, 4)


# -- names of files ---------------------------------------------------------------------------------------------------
def test_a_pass_has_a_file_of_its_name() -> None:
    for step in PIPELINE:
        assert step.apply.__module__ == f"rlx.mir.{step.name}"
        assert step.apply.__name__ == step.name and step.apply.__doc__


VAGUE = re.compile(r"(utils?|helpers?|misc|common|\w*manager)\.py")
SHARED_CODE = {"backends/cuda/matmul/common.py"}  # the C that all matmul variants begin with


def test_no_file_has_a_name_for_anything() -> None:
    assert {name_of(p) for p in FILES if VAGUE.fullmatch(p.name)} <= SHARED_CODE


# -- test files -------------------------------------------------------------------------------------------------------
def colliding(folder: Path) -> list[str]:
    """Names of test files that several folders without `__init__.py` have: pytest imports such files by name alone."""
    loose = [p for p in folder.rglob("*.py") if not (p.parent / "__init__.py").exists() and p.name != "conftest.py"]
    return sorted({p.name for p in loose if sum(q.name == p.name for q in loose) > 1})


def test_test_files_of_one_name_are_in_packages() -> None:
    assert not colliding(Path(__file__).parent)


def test_a_collision_of_test_files_is_found(tmp_path: Path) -> None:
    for folder in ("a", "b", "package"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_same.py").touch()
    (tmp_path / "package" / "__init__.py").touch()
    assert colliding(tmp_path) == ["test_same.py"]
    (tmp_path / "a" / "__init__.py").touch()
    assert colliding(tmp_path) == []


# -- private names ----------------------------------------------------------------------------------------------------
KEPT_APART = ("dims", "dim_binding", "types", "ir", "ops", "hir", "mir", "transforms", "functional", "lir", "engine")
OF_PYTHON = {"_getframe", "_fields"}  # of `sys`, and of named tuples
OURS = [p for p in FILES if p.relative_to(ROOT).with_suffix("").parts[0] in KEPT_APART]


def own_names(tree: ast.Module) -> set[str]:
    """What a file defines: functions, classes, variables, and attributes of `self`."""
    result: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            result.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            result.add(node.id)
        elif isinstance(node, ast.Attribute) and ast.unparse(node.value) == "self":
            result.add(node.attr)
    return result


def private_reaches(tree: ast.Module) -> list[str]:
    """Private names that are taken from elsewhere: attributes of other files' objects, and imports."""
    own, result = own_names(tree), []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr not in own | OF_PYTHON:
            result += [ast.unparse(node)] if re.match("_[^_]", node.attr) else []
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("rlx"):
            result += [f"{node.module}.{alias.name}" for alias in node.names if re.match("_[^_]", alias.name)]
    return result


@pytest.mark.parametrize("path", OURS, ids=name_of)
def test_private_names_stay_in_their_file(path: Path) -> None:
    assert private_reaches(parsed(path)) == []


def test_a_private_reach_is_found() -> None:
    tree = ast.parse("from rlx.ir.graph import _operands\n\ndef f(graph):\n    return graph._named, graph.named\n")
    assert private_reaches(tree) == ["rlx.ir.graph._operands", "graph._named"]


def test_every_mark_is_left_out_of_plain_pytest(request: pytest.FixtureRequest) -> None:
    """One that is declared in one place only would be run by nobody, or by everybody."""
    project = tomllib.loads((ROOT.parents[1] / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    marks = [line.partition(":")[0] for line in project["markers"]]
    plugin = next(p for p in request.config.pluginmanager.get_plugins() if hasattr(p, "BY_NEED"))
    assert set(marks) == {"targets", *plugin.BY_NEED}
    assert set(re.findall(r"not (\w+)", project["addopts"])) == set(marks)


def test_dataclasses_are_created_fast() -> None:
    """The standard decorator takes three times as long, and importing rlx is mostly that."""
    slow = re.compile(r"^\s*from dataclasses import .*\bdataclass\b|@dataclasses\.dataclass", re.M)
    found_in = [name_of(path) for path in FILES if slow.search(path.read_text())]
    assert found_in == ["fast_dataclass.py"]

"""Nobody reaches into another package: a name with an underscore belongs to the package that defines it."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

import rlx

ROOT = Path(rlx.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))
# Private names of other libraries, which have no public ones: the type of argparse's subcommands and of hashlib's
# digests, the frame of a caller, the fields of a named tuple, a library handle, an iterable that Jinja wraps.
FOREIGN = {"_SubParsersAction", "_Hash", "_getframe", "_fields", "_name", "_iterable"}


def package(path: Path) -> str:
    """The part of rlx that a file belongs to: a folder, or a module beside them."""
    return path.relative_to(ROOT).with_suffix("").parts[0]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def defined(path: Path) -> set[str]:
    """Private names that a file defines: functions, methods, attributes that are set on self, fields, slots."""
    result: set[str] = set()
    for node in ast.walk(tree(path)):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                result.add(name)
            case ast.Attribute(value=ast.Name(id="self" | "cls"), attr=name, ctx=ast.Store()):
                result.add(name)
            case ast.Name(id=name, ctx=ast.Store()):
                result.add(name)
            case ast.Assign(targets=[ast.Name(id="__slots__")], value=ast.Tuple(elts=elements)):
                result |= {e.value for e in elements if isinstance(e, ast.Constant) and isinstance(e.value, str)}
    return {name for name in result if is_private(name)}


@functools.cache
def defined_by_package() -> dict[str, set[str]]:
    result: dict[str, set[str]] = {}
    for path in FILES:
        result.setdefault(package(path), set()).update(defined(path))
    return result


def used(path: Path) -> dict[str, int]:
    """Private names that a file asks something for, or imports, and on which line."""
    result: dict[str, int] = {}
    for node in ast.walk(tree(path)):
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            result[node.attr] = node.lineno
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "rlx":
            result |= {alias.name: node.lineno for alias in node.names if is_private(alias.name)}
    return result


def test_private_names_stay_in_their_package() -> None:
    own = defined_by_package()
    reaches = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in FILES
        for name, line in used(path).items()
        if name not in own[package(path)] and name not in FOREIGN
    ]
    assert not reaches, "give it a public name, or move the function:\n" + "\n".join(reaches)


# Benchmarks, scripts and examples use public names. Of torch: settings of its compiler, and packed products of oneDNN.
PROGRAMS = [p for name in ("benchmarks", "scripts", "examples") for p in sorted((ROOT.parents[1] / name).rglob("*.py"))]
OF_TORCH = {"_inductor", "_reorder_linear_weight", "_linear_pointwise"}


def test_programs_beside_the_package_use_public_names() -> None:
    if not PROGRAMS:
        pytest.skip("needs a checkout")
    reaches = [
        f"{path.name}:{line}: {name}"
        for path in PROGRAMS
        for name, line in used(path).items()
        if name not in defined(path) | FOREIGN | OF_TORCH
    ]
    assert not reaches, "give it a public name:\n" + "\n".join(reaches)


def test_each_exception_is_still_used() -> None:
    assert set().union(*(used(path) for path in FILES)) >= FOREIGN

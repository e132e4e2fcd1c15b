"""Runs notebooks without Jupyter: cells in order, in one namespace, with the outputs that a kernel would keep.

A cell tagged `varies` prints times or depends on files that are not everywhere: it has to run and to show something,
and what it showed last is kept.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import linecache
from pathlib import Path
from typing import Any

Cell = dict[str, Any]
VARIES = "varies"


def load(path: Path) -> dict[str, Any]:
    """A notebook, nbformat 4."""
    notebook: dict[str, Any] = json.loads(path.read_text("utf-8"))
    assert notebook["nbformat"] == 4
    return notebook


def save(path: Path, notebook: dict[str, Any]) -> None:
    """Write a notebook as Jupyter does."""
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", "utf-8")


def executed(notebook: dict[str, Any]) -> dict[str, Any]:
    """The notebook with the outputs of its cells."""
    scope: dict[str, Any] = {"__name__": "__main__"}
    cells, count = [], 0
    for cell in notebook["cells"]:
        if cell["cell_type"] == "code":
            count += 1
            cell = cell | {"execution_count": count, "outputs": run("".join(cell["source"]), scope, count)}
        cells.append(cell)
    return notebook | {"cells": cells}


def varies(cell: Cell) -> bool:
    return VARIES in cell["metadata"].get("tags", ())


def run(source: str, scope: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """The outputs of a cell: what it prints, and the value of its last line."""
    name = f"<cell {count}>"
    linecache.cache[name] = len(source), None, source.splitlines(True), name  # for tracebacks
    *statements, last = ast.parse(source, name).body
    value = None
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        if isinstance(last, ast.Expr):
            exec(compile(ast.Module(statements, []), name, "exec"), scope)
            value = eval(compile(ast.Expression(last.value), name, "eval"), scope)
        else:
            exec(compile(ast.Module([*statements, last], []), name, "exec"), scope)
    outputs: list[dict[str, Any]] = []
    if printed.getvalue():
        outputs.append({"name": "stdout", "output_type": "stream", "text": printed.getvalue().splitlines(True)})
    if value is not None:
        shown = {"execution_count": count, "metadata": {}, "output_type": "execute_result"}
        outputs.append({"data": _data(value), **shown})
    return outputs


def _data(value: Any) -> dict[str, list[str]]:
    """A value as a notebook shows it."""
    html = {"text/html": value._repr_html_().splitlines(True)} if hasattr(value, "_repr_html_") else {}
    return html | {"text/plain": repr(value).splitlines(True)}

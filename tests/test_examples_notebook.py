"""The notebooks of `examples/` run, and show what they keep. `pytest --update` rewrites their outputs."""

from __future__ import annotations

from pathlib import Path

import notebooks
import pytest

NOTEBOOKS = sorted((Path(__file__).parents[1] / "examples").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_a_notebook_shows_what_it_keeps(path: Path, update: bool) -> None:
    stored = notebooks.load(path)
    result = notebooks.executed(stored)
    if update:
        notebooks.save(path, result)
        stored = result
    for before, after in zip(stored["cells"], result["cells"], strict=True):
        if before["cell_type"] == "code" and notebooks.varies(before):
            assert after["outputs"] and before["outputs"]
        else:
            assert after == before


def test_the_first_look_is_there() -> None:
    assert "first_look.ipynb" in [path.name for path in NOTEBOOKS]


def test_the_runner_keeps_what_a_kernel_would(tmp_path: Path) -> None:
    scope: dict[str, object] = {}
    assert notebooks.run("x = 2", scope, 1) == []
    (printed, value) = notebooks.run("print('a')\nprint('b')\nx + 1", scope, 2)
    assert printed == {"name": "stdout", "output_type": "stream", "text": ["a\n", "b\n"]}
    assert value["data"] == {"text/plain": ["3"]} and value["execution_count"] == 2
    assert notebooks.run("None", scope, 3) == []
    with pytest.raises(ZeroDivisionError):
        notebooks.run("x / 0", scope, 4)
    cell = {"cell_type": "code", "metadata": {}, "source": ["1\n", "2"], "outputs": [], "execution_count": None}
    notebook = {"cells": [cell], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    notebooks.save(tmp_path / "a.ipynb", notebook)
    result = notebooks.executed(notebooks.load(tmp_path / "a.ipynb"))
    assert result["cells"][0]["outputs"][0]["data"] == {"text/plain": ["2"]}

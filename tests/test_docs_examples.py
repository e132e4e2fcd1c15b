"""The page of examples: its commands are run, and print and draw what the page shows.

`pytest --update tests/test_docs_examples.py` rewrites outputs and pictures; so does `-m weights` with those of models.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from targets import AVX2, supported

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "examples.md"
BLOCK = re.compile(r"```console\n(.*?)```\n", re.S)
PROMPT = "> "  # what a person types comes after it
MODELS = ("chat.py", "search.py", "steer.py")  # these load real models
BLOCKS = [match[1] for match in BLOCK.finditer(PAGE.read_text())]


def needs_model(block: str) -> bool:
    return any(f"examples/{name}" in block for name in MODELS)


def session(block: str, folder: Path) -> str:
    """A block with what its commands print now; pictures go to the folder."""
    lines = block.splitlines()
    typed = [line.removeprefix(PROMPT) for line in lines if line.startswith(PROMPT) and line != PROMPT]
    return "".join(f"{line}\n{printed(line[2:], typed, folder)}" for line in lines if line.startswith("$ "))


def printed(command: str, typed: list[str], folder: Path) -> str:
    python, *words = shlex.split(command)
    assert python == "python"
    words = [str(folder / Path(word).name) if word.startswith("docs/images/") else word for word in words]
    own = {"RLX_TARGET": "avx2", "PYTHONPATH": str(ROOT / "src"), "PYTHONIOENCODING": "utf-8"}
    run = subprocess.run(
        [sys.executable, *words], cwd=ROOT, env=os.environ | own, input="".join(f"{line}\n" for line in typed),
        capture_output=True, encoding="utf-8", timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    start, *answers = run.stdout.split(PROMPT) if typed else [run.stdout]
    shown = [f"{PROMPT}{line}\n{answer}" for line, answer in zip(typed, answers, strict=False)]
    return start + "".join(shown)


def check(index: int, folder: Path, update: bool) -> None:
    block = BLOCKS[index]
    result = session(block, folder)
    if update:
        PAGE.write_text(PAGE.read_text().replace(f"```console\n{block}```", f"```console\n{result}```"))
        for picture in folder.glob("*.svg"):
            shutil.copy(picture, ROOT / "docs" / "images" / picture.name)
    assert result == block or update
    for picture in folder.glob("*.svg"):
        np.testing.assert_allclose(*map(numbers, (picture, ROOT / "docs" / "images" / picture.name)), atol=2)


def numbers(path: Path) -> list[float]:
    """All numbers of a picture. Places are pixels."""
    return [float(number) for number in re.findall(r"-?\d+(?:\.\d+)?", path.read_text())]


@pytest.mark.skipif(AVX2 not in supported(), reason="this machine has no AVX2")
@pytest.mark.parametrize("index", [i for i, block in enumerate(BLOCKS) if not needs_model(block)])
def test_an_example_prints_and_draws_what_the_page_shows(index: int, tmp_path: Path, update: bool) -> None:
    check(index, tmp_path, update)


@pytest.mark.weights
@pytest.mark.skipif(AVX2 not in supported(), reason="this machine has no AVX2")
@pytest.mark.parametrize("index", [i for i, block in enumerate(BLOCKS) if needs_model(block)])
def test_an_example_with_a_real_model_prints_what_the_page_shows(index: int, tmp_path: Path, update: bool) -> None:
    check(index, tmp_path, update)


def test_every_example_is_on_the_page_and_is_short() -> None:
    page = PAGE.read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f"examples/{path.name}" in page
        assert len(path.read_text().splitlines()) <= 105, path.name
    for picture in (ROOT / "docs" / "images").iterdir():
        assert f"(images/{picture.name})" in page

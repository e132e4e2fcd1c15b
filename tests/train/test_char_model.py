"""The example that trains a character model: it learns a small text by heart, and says what it cannot do."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

PATH = Path(__file__).parents[2] / "examples" / "char_model.py"


def _imported() -> Any:
    spec = importlib.util.spec_from_file_location("char_model", PATH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["char_model"] = module
    spec.loader.exec_module(module)
    return module


char_model = _imported()
SMALL = ["--dim", "32", "--layers", "1", "--heads", "2", "--context", "16", "--batch", "8", "--write", "40"]


def test_a_character_model_learns_a_small_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 20, "utf-8")
    losses = char_model.main([str(text), *SMALL, "--steps", "60", "--save", str(tmp_path / "model.safetensors"),
                              "--plot", str(tmp_path / "loss.svg")])  # fmt: skip
    assert len(losses) == 60 and losses[0] > 2.2  # of 11 characters, none is likelier than others
    assert losses[-1] < 1.0
    said = capsys.readouterr()
    assert re.search(r"step +60/60  loss +\d\.\d+ +[\d,]+ tok/s  [▁-█]+", said.err)
    assert len(said.out.rstrip("\n")) <= 41 and set(said.out) <= set("the cat sat on the mat. \n")
    assert (tmp_path / "model.safetensors").stat().st_size > 10_000
    picture = ElementTree.parse(tmp_path / "loss.svg").getroot()
    curves = picture.findall("{http://www.w3.org/2000/svg}polyline")
    assert [len(c.attrib["points"].split()) for c in curves] == [60, 60]


def test_a_text_that_is_not_there_or_too_short_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        char_model.main([str(tmp_path / "none.txt")])
    assert "there is no text file" in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(SystemExit):
        char_model.main([str(tmp_path / "short.txt")])
    assert "has 5 characters, a context of 128 needs more" in capsys.readouterr().err


def test_a_sparkline_shows_where_losses_are_high() -> None:
    assert char_model.sparkline([8.0, 3.0, 1.0, 1.0]) == "█▃▁▁"
    assert len(char_model.sparkline(list(range(100)))) == 40
    assert char_model.sparkline([1.0]) == "▁"

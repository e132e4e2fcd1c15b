"""Errors say enough and not too much: messages and notes have a bounded length and keep both ends."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlx
from rlx.errors import MESSAGE, FormatError, RlxError, nearest, shortened
from rlx.profile import CompileProfile


def lines_of(error: RlxError) -> list[str]:
    return [str(error), *(error.hint or "").split("\n"), *(line for n in error.notes for line in n.split("\n"))]


def test_a_long_message_keeps_both_ends() -> None:
    error = RlxError("begin" + "x" * 10_000 + "end", hint="try" + "y" * 10_000 + "this", notes=["z" * 10_000])
    error.add_note("first\n" + "w" * 10_000)
    assert all(len(line) <= MESSAGE for line in lines_of(error))
    assert str(error).startswith("begin") and str(error).endswith("end") and "..." in str(error)
    assert error.hint is not None and error.hint.startswith("try") and error.hint.endswith("this")
    assert error.notes[-1].startswith("first\nw")


def test_a_message_of_the_longest_length_stays_as_it_is() -> None:
    text = "".join(chr(97 + i % 26) for i in range(MESSAGE))
    assert str(RlxError(text)) == text
    assert len(str(RlxError(text + "!"))) == MESSAGE
    assert [len(shortened(text, n)) for n in (3, 4, 5, 100)] == [3, 4, 5, 100]


def test_a_long_value_in_a_file_does_not_fill_the_message(tmp_path: Path) -> None:
    with pytest.raises(FormatError) as caught:
        CompileProfile.from_toml(f"fusion = '{'x' * 5000}'")
    assert len(str(caught.value)) <= MESSAGE and "expected a table" in str(caught.value)
    (tmp_path / "model.safetensors").write_bytes(b"\x02\0\0\0\0\0\0\0{}")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "q" * 5000}))
    with pytest.raises(RlxError) as wrong:
        rlx.load(str(tmp_path))
    assert all(len(line) <= MESSAGE for line in lines_of(wrong.value)) and "is not supported" in str(wrong.value)


def test_the_nearest_of_a_megabyte_is_not_looked_for() -> None:
    assert nearest("x" * 1_000_000, ["abc", "def"]) == "known: abc, def"

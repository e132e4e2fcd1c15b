"""`rlx verify`: it says what ran, finds what is wrong, and asks transformers where that is installed."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import struct
from pathlib import Path
from typing import Any

import golden_encoders
import numpy as np
import pytest

from rlx.cli.main import main
from rlx.cli.verify import _compare_with_f32, _decode_is_prefill, answer_of, check_files
from rlx.engine.decoder import Decoder, Pick
from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load
from rlx.hub import catalogue
from rlx.hub.catalogue import Archive, Entry, File, Piece

ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STORIES = ASSETS / "stories260K"
needs_stories = pytest.mark.skipif(not STORIES.exists(), reason=f"{STORIES} is absent")


def results(out: str) -> dict[str, str]:
    return {line[9:29].strip(): line[:8].strip() for line in out.splitlines()[:-1]}


@needs_stories
@pytest.mark.usefixtures("without_torch")
def test_a_good_model_passes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(STORIES / "stories260K.bin")]) == 0
    out = capsys.readouterr().out
    assert results(out) == {
        "checksum": "skipped", "weights": "ok", "tokenizer": "ok", "runs": "ok", "decode is prefill": "ok",
        "threads": "ok", "reference": "ok", "transformers": "skipped",
    }  # fmt: skip
    assert "not installed" in out and out.splitlines()[-1] == "6 checks ran, all fine"


@needs_stories
@pytest.mark.usefixtures("without_torch")
def test_logits_that_rounding_does_not_explain_are_found() -> None:
    with load(STORIES / "stories260K.bin") as model:
        logits = answer_of(model)
    rounded = logits + 0.02 * np.abs(logits).max() * np.random.default_rng(0).uniform(-1, 1, logits.shape)
    good, wrong = (
        _compare_with_f32(str(STORIES / "stories260K.bin"), "f32", here) for here in (rounded, logits[:, ::-1])
    )
    assert good.ok is True and wrong.ok is False and "(more than 50% must)" in wrong.detail


def test_of_a_folder_the_weights_are_hashed_and_an_empty_one_is_a_bad_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["verify", str(tmp_path)]) == 4
    assert "no weights are there" in capsys.readouterr().err
    for name in ("config.json", "a.safetensors", "b.safetensors"):
        (tmp_path / name).write_bytes(name.encode())
    detail = check_files(str(tmp_path)).detail
    assert all(f"{n}.safetensors: {hashlib.sha256(f'{n}.safetensors'.encode()).hexdigest()}" in detail for n in "ab")
    assert "config.json" not in detail


@needs_stories
@pytest.mark.usefixtures("without_torch")
def test_a_decode_that_differs_from_a_prefill_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same choices are not enough: the numbers behind them are compared."""
    decode = Decoder.decode

    def inexact(*args: Any, **settings: Any) -> list[Pick]:
        return [pick._replace(logprob=pick.logprob * 1.01) for pick in decode(*args, **settings)]

    monkeypatch.setattr(Decoder, "decode", inexact)
    with load(STORIES / "stories260K.bin") as model:
        assert isinstance(model, LanguageModel)
        check = _decode_is_prefill(model)
    assert check.ok is False and "log-probabilities" in check.detail


@needs_stories
@pytest.mark.usefixtures("without_torch")
def test_weights_that_are_no_numbers_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shutil.copy(STORIES / "tok512.bin", tmp_path)
    data = bytearray((STORIES / "stories260K.bin").read_bytes())
    data[28 + 4 * 5000 : 28 + 4 * 5001] = struct.pack("<f", float("nan"))  # in the table of tokens
    (tmp_path / "stories260K.bin").write_bytes(data)
    assert main(["verify", str(tmp_path / "stories260K.bin")]) == 1
    out = capsys.readouterr().out
    assert results(out)["weights"] == "FAILED" and "holds NaN or infinity" in out
    assert "FAILED: weights" in out.splitlines()[-1]


def test_a_file_that_is_not_the_catalogues_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = b"0123456789"
    sha256 = hashlib.sha256(right).hexdigest()
    archive = Archive("pypi", "p", "1", 10, sha256)
    file = File("m.gguf", 10, sha256, (Piece(archive, "m", 10, sha256),))
    entry = Entry("tiny", "for tests", "chat", "llama", "MIT", "tests", (file,))
    monkeypatch.setitem(catalogue.CATALOGUE, "tiny", entry)
    monkeypatch.setenv("RLX_HOME", str(tmp_path))
    folder = tmp_path / "models" / "tiny"
    folder.mkdir(parents=True)
    assert "m.gguf is absent" in check_files("tiny").detail
    (folder / "m.gguf").write_bytes(right[:-1])
    assert "has 9 bytes, expected 10" in check_files("tiny").detail
    (folder / "m.gguf").write_bytes(b"0123456780")
    wrong = check_files("tiny")
    assert wrong.ok is False and f"expected {sha256}" in wrong.detail and "rlx pull tiny" in wrong.detail
    (folder / "m.gguf").write_bytes(right)
    assert check_files("tiny").ok is True


@needs_stories
@pytest.mark.parity
@pytest.mark.parametrize("name", ["stories260K.bin", "tinyllamas-stories-260k-f32.gguf"])
def test_transformers_agrees(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert main(["verify", str(STORIES / name)]) == 0
    out = capsys.readouterr().out
    assert results(out)["transformers"] == "ok" and "top-1 agrees on 100%" in out


@pytest.mark.usefixtures("without_torch")
def test_an_encoder_without_a_tokenizer_is_run_on_numbers(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    golden_encoders.write_folder(tmp_path, json.loads((golden_encoders.FOLDER / "bert.json").read_text()))
    assert main(["verify", str(tmp_path)]) == 0
    outcomes = results(capsys.readouterr().out)
    assert (outcomes["runs"], outcomes["threads"], outcomes["reference"]) == ("ok",) * 3
    assert (outcomes["tokenizer"], outcomes["transformers"]) == ("skipped",) * 2

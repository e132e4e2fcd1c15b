"""Files of a loaded model that change: every request notices, and says which file it was."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import small_bert
import tiny_llama
from cpu_internals import forget_code

from rlx.backends import cache_folder
from rlx.engine.load import load
from rlx.engine.model_snapshot import SnapshotCheckpoint
from rlx.errors import FormatError

from .test_model_snapshot import settle

TOKENS = [3, 14, 15]
DECODER: dict[str, Callable[[Any], Any]] = {
    "generate": lambda m: m.generate(TOKENS, max_tokens=2),
    "batch": lambda m: m.generate([TOKENS, [1]], max_tokens=2),
    "stream": lambda m: m.stream(TOKENS, max_tokens=2),
    "logits": lambda m: m.logits(TOKENS),
    "run": lambda m: m.run(TOKENS),
    "capture": lambda m: m.run(TOKENS, capture=["layers.0"]),
    "apply": lambda m: m.apply({}, TOKENS),
    "save": lambda m: m.save(m.name + ".gguf"),
    "export": lambda m: m.export("model.rlxp"),
}
ENCODER: dict[str, Callable[[Any], Any]] = {
    "embed": lambda m: m.embed("bal bam"),
    "embed_tokens": lambda m: m.embed_tokens([[2, 7, 3]]),
    "similarity": lambda m: m.similarity("bal", "bam"),
}
KINDS = {"decoder": DECODER, "encoder": ENCODER}


@pytest.fixture(params=["off", "warm"])
def start(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    tiny_llama.write(tmp_path / "decoder")
    small_bert.write(tmp_path / "encoder", files=small_bert.sentence_transformers("cls"))
    settle()
    monkeypatch.setenv("RLX_CACHE", "off" if request.param == "off" else str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    forget_code(monkeypatch)
    mode: str = request.param
    return mode


def opened(path: Path, start: str) -> Any:
    if start == "warm":
        load(path)
    model = load(path)
    assert isinstance(model._checkpoint, SnapshotCheckpoint) == (start == "warm")
    return model


def touched(path: Path) -> None:
    """Overwrite a byte in place."""
    with open(path, "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x01")


@pytest.mark.parametrize("kind", KINDS)
def test_every_request_notices_a_file_that_was_overwritten(tmp_path: Path, start: str, kind: str) -> None:
    path = tmp_path / kind
    model = opened(path, start)
    for job in KINDS[kind].values():
        job(model)
    stream = model.stream(TOKENS) if kind == "decoder" else None
    touched(path / "model.safetensors")
    for name, job in KINDS[kind].items():
        with pytest.raises(FormatError, match=r"model.safetensors: the file has changed"):
            job(model)
            pytest.fail(f"{name} went on")
    if stream is not None:
        with pytest.raises(FormatError, match=r"model.safetensors: the file has changed"):
            next(stream)
    again = load(path)
    next(iter(KINDS[kind].values()))(again)


@pytest.mark.parametrize("start", ["warm"], indirect=True)
@pytest.mark.parametrize("kind", KINDS)
def test_a_changed_snapshot_is_noticed(tmp_path: Path, start: str, kind: str) -> None:
    model = opened(tmp_path / kind, start)
    (file,) = cache_folder.current().snapshots()
    touched(file)
    with pytest.raises(FormatError, match=f"{file.name}: the file has changed"):
        next(iter(KINDS[kind].values()))(model)


@pytest.mark.parametrize("start", ["warm"], indirect=True)
def test_another_process_may_use_the_same_start(tmp_path: Path, start: str) -> None:
    """Which notes that it did, in the time of access of the file."""
    model = opened(tmp_path / "decoder", start)
    wanted = model.logits(TOKENS)
    (file,) = cache_folder.current().snapshots()
    os.utime(file, ns=(0, file.stat().st_mtime_ns))
    load(tmp_path / "decoder")
    assert file.stat().st_atime > 0
    assert np.array_equal(model.logits(TOKENS), wanted)


@pytest.mark.parametrize("kind", KINDS)
def test_files_that_are_renamed_removed_or_replaced_are_fine(tmp_path: Path, start: str, kind: str) -> None:
    path = tmp_path / kind
    model = opened(path, start)
    use = list(KINDS[kind].values())[-1] if kind == "encoder" else DECODER["logits"]
    wanted = use(model)
    other = path / "other"
    shutil.copy(path / "model.safetensors", other)
    touched(other)
    other.replace(path / "model.safetensors")
    assert np.array_equal(use(model), wanted)
    for file in cache_folder.current().snapshots():
        file.unlink()
    shutil.rmtree(path)
    assert np.array_equal(use(model), wanted)


@pytest.mark.parametrize("start", ["off"], indirect=True)
@pytest.mark.parametrize("weights", [False, True])
def test_a_changed_export_is_noticed(tmp_path: Path, start: str, weights: bool) -> None:
    file = load(tmp_path / "decoder").export(tmp_path / "model.rlxp", weights=weights)
    model: Any = load(file)
    wanted = model.logits(TOKENS)
    assert np.array_equal(model.logits(TOKENS), wanted)
    touched(file)
    with pytest.raises(FormatError, match=r"model.rlxp: the file has changed"):
        model.logits(TOKENS)

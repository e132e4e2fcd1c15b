"""Fixtures of the hub tests: a model folder, a package index and a catalogue."""

from __future__ import annotations

import os
from pathlib import Path

import fake_index
import pytest

from rlx.hub import catalogue


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty model folder, isolated from the user's settings and caches."""
    for name in list(os.environ):
        if name.startswith(fake_index.ENVIRONMENT):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    monkeypatch.setenv("RLX_HOME", str(folder))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # a closed port
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


@pytest.fixture
def index(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that serves as pip's index; the catalogue is `fake_index.table`."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(catalogue, "CATALOGUE", fake_index.table(folder))
    monkeypatch.setattr(catalogue, "DEFAULT", "one")
    return folder

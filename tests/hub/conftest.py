"""A folder of models, an index and a catalogue of their own for the tests of the hub."""

from __future__ import annotations

import os
from pathlib import Path

import fake_index
import pytest

from rlx.hub import catalogue


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of models; nothing of the user's settings or caches is seen."""
    for name in list(os.environ):
        if name.startswith(fake_index.ENVIRONMENT):
            monkeypatch.delenv(name)
    folder = tmp_path / "home"
    monkeypatch.setenv("RLX_HOME", str(folder))
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    monkeypatch.setenv("NO_PROXY", "*")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return folder


@pytest.fixture
def index(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that pip takes its wheels from; the catalogue is that of `fake_index.table`."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(catalogue, "CATALOGUE", fake_index.table(folder))
    monkeypatch.setattr(catalogue, "DEFAULT", "one")
    return folder

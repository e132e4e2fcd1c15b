"""Models for the tests of flows: the stories of the assets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))


@pytest.fixture(scope="session")
def stories() -> Path:
    """A folder with a model that tells stories, and its tokenizer."""
    folder = ASSETS / "stories260K"
    if not folder.exists():
        pytest.skip(f"{folder} is absent")
    return folder

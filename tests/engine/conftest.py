"""Models for the tests of the engine: a small random Llama, and the stories of the assets."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import tiny_llama

from rlx.engine.language_model import LanguageModel
from rlx.engine.load import load

ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
STORIES = ASSETS / "stories260K" / "stories260K.bin"


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny_llama.write(folder)
    return folder


@pytest.fixture
def tiny(tiny_folder: Path) -> LanguageModel:
    """A small random Llama without a tokenizer, with nothing cached."""
    return language_model(tiny_folder)


@pytest.fixture
def stories() -> LanguageModel:
    """A model that tells stories, with nothing cached."""
    if not STORIES.exists():
        pytest.skip(f"{STORIES} is absent")
    return language_model(STORIES)


def language_model(path: Path, **settings: object) -> LanguageModel:
    model = load(path, **settings)  # type: ignore[arg-type]
    assert isinstance(model, LanguageModel)
    return model

"""Where the files of these tests are: models that `rlx pull` has fetched, and a text."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlx.errors import NotFoundError
from rlx.hub.pull import resolve

MODELS = ("smollm2-135m", "qwen2.5-coder-1.5b", "gemma3-270m")
ASSETS = Path(os.environ.get("RLX_ASSETS", Path(__file__).parents[3] / "shared" / "assets"))
Ask = Callable[[dict[str, Any]], str]
Greedy = Callable[[Path, list[str], int], list[dict[str, Any]]]  # (model, prompts, count) -> an answer for each


def model_file(name: str) -> Path:
    """The GGUF file of a model; nothing is downloaded."""
    try:
        return resolve(name, offline=True).path
    except NotFoundError:
        pytest.skip(f"{name} is absent: rlx pull {name}")

"""What tests on real models share: the models, a text, llama-cpp-python, the float64 oracle.

`RLX_PEERS_PYTHON` names the interpreter of an environment with llama-cpp-python. Models are those that `rlx pull` has
fetched; nothing is downloaded. Whatever is absent is the reason of a skip.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from real_models import ASSETS, MODELS, Ask, Greedy, model_file

import rlx
from rlx.engine.language_model import LanguageModel


@pytest.fixture(scope="module", params=MODELS)
def path(request: pytest.FixtureRequest) -> Path:
    """The GGUF file of a model."""
    return model_file(request.param)


@pytest.fixture(scope="module")
def model(path: Path) -> Iterator[LanguageModel]:
    with rlx.load(path, threads=2, context=1024, precision="f32") as model:
        assert isinstance(model, LanguageModel)
        yield model


@pytest.fixture(scope="session")
def wiki() -> str:
    """The first pages of WikiText-2's test part."""
    file = ASSETS / "text" / "wiki.test.raw"
    if not file.exists():
        pytest.skip(f"{file} is absent")
    return file.read_text(encoding="utf-8")[:20_000]


@pytest.fixture(scope="session")
def ask_llama_cpp() -> Ask:
    """A request to llama-cpp-python, and what it answers."""
    python = os.environ.get("RLX_PEERS_PYTHON")
    if not python:
        pytest.skip("RLX_PEERS_PYTHON does not name an interpreter with llama-cpp-python")
    if subprocess.run([python, "-c", "import llama_cpp"], capture_output=True).returncode:
        pytest.skip(f"{python} has no llama-cpp-python")

    def ask(request: dict[str, Any]) -> str:
        script = Path(__file__).with_name("llama_cpp_peer.py")
        done = subprocess.run([python, script], input=json.dumps(request), capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout

    return ask


@pytest.fixture(scope="session")
def llama_cpp(ask_llama_cpp: Ask) -> Greedy:
    """Greedy tokens of prompts by llama-cpp-python, with the two largest logits of each step."""

    def greedy(file: Path, prompts: list[str], count: int) -> list[dict[str, Any]]:
        answers: list[dict[str, Any]] = json.loads(
            ask_llama_cpp({"model": str(file), "prompts": prompts, "tokens": count})
        )
        return answers

    return greedy

"""A server of small models for all tests of this folder, and clients of it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stand_ins
from limits import LONGEST_S
from tool_templates import HERMES, THINKING

pytest.importorskip("uvicorn")
pytest.importorskip("llguidance")
openai = pytest.importorskip("openai")

import httpx2 as httpx  # noqa: E402  the client that openai brings

import rlx  # noqa: E402
from rlx.server.serve import Server, running  # noqa: E402
from rlx.server.settings import ServerSettings  # noqa: E402


def write_model(folder: Path, template: str = HERMES) -> Path:
    """A small chat model with another template."""
    stand_ins.write_chat(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("served")
    return {
        "tiny": write_model(root / "tiny"), "thinker": write_model(root / "thinker", THINKING),
        "encoder": stand_ins.write_encoder(root / "encoder"),
    }  # fmt: skip


@pytest.fixture(scope="session")
def loaders(folders: dict[str, Path]) -> dict[str, Callable[[], Any]]:
    return {name: lambda path=path: rlx.load(path) for name, path in folders.items()}


@pytest.fixture(scope="session")
def server(loaders: dict[str, Callable[[], Any]]) -> Iterator[Server]:
    settings = ServerSettings(port=0, aliases={"gpt-4o": "tiny"}, matryoshka=True)
    with running(loaders, settings) as one:
        yield one


@pytest.fixture(scope="session")
def model(folders: dict[str, Path]) -> Iterator[rlx.LanguageModel]:
    """The model that the server has, on its own."""
    with rlx.load(folders["tiny"]) as one:
        assert isinstance(one, rlx.LanguageModel)
        yield one


@pytest.fixture(scope="session")
def client(server: Server) -> Iterator[Any]:
    """OpenAI's client, which raises on any answer that does not fit its types."""
    with openai.OpenAI(
        base_url=f"{server.address}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as one:
        yield one


@pytest.fixture(scope="session")
def http(server: Server) -> Iterator[Any]:
    with httpx.Client(base_url=server.address, timeout=LONGEST_S) as one:
        yield one


@pytest.fixture
def copied(folders: dict[str, Path], tmp_path: Path) -> Path:
    """A model of the test's own."""
    return Path(shutil.copytree(folders["tiny"], tmp_path / "model"))

"""The page on serving shows what its code prints, on small models."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import stand_ins
from test_docs import executed

import rlx
from rlx.server.serve import running

pytestmark = pytest.mark.serve
PAGE = Path(__file__).parents[2] / "docs" / "serving.md"


def test_the_page_on_serving_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, update: bool) -> None:
    openai = pytest.importorskip("openai")
    folder = stand_ins.write_chat(tmp_path)
    load = rlx.load
    with running({"smollm2-135m": lambda: load(folder)}) as server:

        def client(base_url: str, **options: Any) -> Any:
            assert base_url == "http://127.0.0.1:8000/v1"
            return openai_client(base_url=f"{server.address}/v1", **options)

        openai_client = openai.OpenAI
        monkeypatch.setattr(openai, "OpenAI", client)
        monkeypatch.setattr(rlx, "load", lambda name: load(folder))
        result = executed(PAGE.read_text(), "serving.md")
    if update:
        PAGE.write_text(result)
    assert result == PAGE.read_text()

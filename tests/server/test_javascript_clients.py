"""Clients for JavaScript: OpenAI's own, and Vercel's AI SDK, which validates every chunk.

`npm install --prefix tests/server/javascript` fetches them.
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from limits import LONGEST_S

from rlx.server.serve import Server

FOLDER = Path(__file__).parent / "javascript"
pytestmark = [
    pytest.mark.serve,
    pytest.mark.skipif(shutil.which("node") is None, reason="there is no node"),
    pytest.mark.skipif(not (FOLDER / "node_modules").exists(), reason="the clients are not installed"),
]


@pytest.mark.parametrize("script", ["openai_client.mjs", "ai_sdk.mjs"])
def test_a_javascript_client(server: Server, script: str) -> None:
    command = ["node", str(FOLDER / script), f"{server.address}/v1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONGEST_S)
    assert done.returncode == 0 and done.stdout == "ok\n", done.stderr[-3000:]

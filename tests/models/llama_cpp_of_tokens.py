"""What llama-cpp-python, of the interpreter that RLX_PEERS_PYTHON names, makes of some tokens: logits, or a vector."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Array = np.ndarray[Any, Any]
SCRIPT = """
import json, sys, llama_cpp
request = json.load(sys.stdin)
size, tokens = request["size"], request["tokens"]
m = llama_cpp.Llama(
    request["model"], n_ctx=256, logits_all=not size, embedding=size > 0, verbose=False, type_k=0, type_v=0
)
if size:
    m._batch.add_sequence(tokens, 0, True)
    m._ctx.decode(m._batch)
    found = llama_cpp.llama_get_embeddings_seq(m._ctx.ctx, 0)[:size]
else:
    m.eval(tokens)
    found = m.scores[: len(tokens)].tolist()
json.dump(found, sys.stdout)
"""


def computed(path: Path, tokens: list[int], size: int = 0) -> Array:
    """Logits `[tokens, vocab]`; with a size, the vector that so many numbers are."""
    python = os.environ.get("RLX_PEERS_PYTHON")
    if not python:
        pytest.skip("RLX_PEERS_PYTHON does not name an interpreter with llama-cpp-python")
    request = json.dumps({"model": str(path), "tokens": tokens, "size": size})
    done = subprocess.run([python, "-c", SCRIPT], input=request, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return np.array(json.loads(done.stdout))

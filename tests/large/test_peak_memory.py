"""A GGUF file of 1.1 GB with a context of 4,096 in less than 1.3 GB, with nothing kept from before and with a start."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from real_models import model_file
from runtime.test_caches import source

pytestmark = [
    pytest.mark.large,
    pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the system does not say how much memory it was"),
]
LIMIT = 1.3e9
# The peak is written down before anything else is looked at. 20,000 characters are more than 4,000 tokens.
CHILD = """
import json, sys
sys.path.insert(0, {source!r})
import rlx
model = rlx.load({path!r}, context=4096)
prompt = model.token_ids(json.load(sys.stdin))[:4000]
completion = model.generate(prompt, max_tokens=16, temperature=0.0)
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
memory = model.memory()
print(json.dumps({{
    "peak": peak, "read": len(prompt), "tokens": completion.tokens, "cache": model.cache_dtype,
    "kept": memory.weights == 0,
    "compiled": "llvmlite" in open("/proc/self/maps").read(),
}}))
"""


def test_a_gguf_of_1_1_gb_runs_in_less_than_1_3_gb_at_a_context_of_4096(tmp_path: Path, wiki: str) -> None:
    path = model_file("qwen2.5-coder-1.5b")
    assert path.stat().st_size > 1.1e9
    env = {n: v for n, v in os.environ.items() if n != "PYTHONPATH"} | {"RLX_CACHE": str(tmp_path / "cache")}
    code = CHILD.format(source=source(), path=str(path))
    reports = []
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code], env=env, input=json.dumps(wiki), capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        reports.append(json.loads(done.stdout))
    cold, warm = reports
    assert cold["compiled"] and not warm["compiled"] and cold["kept"] and warm["kept"]
    assert cold["read"] == warm["read"] == 4000 and cold["cache"] == warm["cache"] == "f16"
    assert cold["tokens"] == warm["tokens"]
    assert max(cold["peak"], warm["peak"]) < LIMIT, (
        f"{cold['peak'] / 1e6:.0f} MB cold, {warm['peak'] / 1e6:.0f} MB warm"
    )
    print(f"{cold['peak'] / 1e6:.0f} MB cold, {warm['peak'] / 1e6:.0f} MB warm")

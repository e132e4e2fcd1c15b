"""Thousands of random templates in a process with a memory limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import fuzz_templates
import pytest

from rlx.formats.jinja_budget import MAX_BYTES


@pytest.mark.fuzz
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does")
def test_a_random_template_renders_within_its_budget_or_is_refused(fuzz_seeds: range) -> None:
    megabytes = (MAX_BYTES >> 20) + 128
    command = [sys.executable, "-W", "error", fuzz_templates.__file__]
    command += [str(number) for number in (fuzz_seeds.start, len(fuzz_seeds), megabytes)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    outcomes = json.loads(done.stdout)
    print(outcomes)
    assert sum(outcomes.values()) == len(fuzz_seeds)
    if len(fuzz_seeds) >= 1000:  # else the templates are too weak or too strong
        assert outcomes["rendered"] > len(fuzz_seeds) // 5 and outcomes["over budget"] > len(fuzz_seeds) // 50

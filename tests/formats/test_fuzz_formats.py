"""Thousands of mutated files, some with a memory limit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import fuzz
import pytest


@pytest.mark.parametrize("name", fuzz.SEEDS)
def test_a_mutated_file_opens_or_is_refused(tmp_path: Path, name: str) -> None:
    outcomes = fuzz.run(name, range(1200), tmp_path)
    assert outcomes["opened"] > 5 and outcomes["refused"] > 200, outcomes  # else mutations are too weak or too strong


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="limits memory as Linux does")
def test_a_mutated_file_does_not_ask_for_much_memory() -> None:
    command = [sys.executable, "-W", "error", str(Path(fuzz.__file__)), "100000", "400", "64"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OPENBLAS_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("refused") == len(fuzz.SEEDS)

"""Commands as a user types them: what they print, and their exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import rlx
from rlx.cli.main import main


def test_ops_lists_groups_and_shows_every_cell_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["ops"]) == 0
    assert "attention: attention" in capsys.readouterr().out
    assert main(["ops", "matmul"]) == 0
    out = capsys.readouterr().out
    assert "matmul(a, b)" in out and "rlx/ops/linear.py:" in out and "rlx/lir/forms/linear.py:" in out
    assert out.count("rlx/transforms/rules/linear.py:") == 3, "VJP, JVP and vmap"
    assert "cpu form     rlx/backends/cpu/forms/linear.py, matmul" in out
    assert main(["ops", "matmull"]) == 1
    assert "did you mean 'matmul'" in capsys.readouterr().err


def test_stages_lists_groups_and_shows_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["stages"]) == 0
    assert "norm: RmsNorm, GemmaRmsNorm, LayerNorm\n" in capsys.readouterr().out
    assert main(["stages", "RmsNorm"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("RmsNorm\n`RmsNorm(weight_key, eps)`\n") and "√(mean(x²) + eps)" in out
    assert "- weights: `model.norm.weight` `[hidden]`\n" in out and "- declared in: rlx/flow/stages/norm.py:" in out
    assert main(["stages", "swiglu"]) == 0
    assert capsys.readouterr().out.startswith("SwiGlu\n")
    assert main(["stages", "attention"]) == 0
    assert capsys.readouterr().out.startswith("Attention\n")
    assert main(["stages", "norm"]) == 0
    assert "LayerNorm\n" in capsys.readouterr().out
    assert main(["stages", "RmsNrm"]) == 2
    assert "did you mean 'RmsNorm'" in capsys.readouterr().err


def test_env_and_cache_say_where_things_are(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    assert "llvmlite" in out and "target" in out and "cache" in out
    assert main(["cache"]) == 0
    assert "files" in capsys.readouterr().out


def test_the_demo_compiles_runs_and_agrees_with_numpy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--rows", "-7"]) == 2
    assert "demo: --rows is -7, expected a number from 0" in capsys.readouterr().err
    assert main(["demo", "--rows", "7"]) == 0
    assert "Largest difference to NumPy" in capsys.readouterr().out


def test_without_a_command_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "chat with a model, or have it answer one prompt" in capsys.readouterr().err


def test_the_package_runs_as_a_module() -> None:
    env = dict(os.environ, PYTHONPATH=str(Path(rlx.__file__).parents[1]))
    assert "usage: rlx" in subprocess.check_output([sys.executable, "-m", "rlx", "--help"], env=env, text=True)

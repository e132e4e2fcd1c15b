"""What it costs to begin: importing rlx and building graphs load nothing heavy."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from pathlib import Path

from limits import LONGEST_S

import rlx

SOURCE = Path(rlx.__file__).resolve().parent.parent
SECONDS, SLACK = 0.15, 2
CHILD = """
import json, sys, time
sys.path.insert(0, {source!r})
import numpy
begin = time.process_time()
import rlx
rlx.Graph, rlx.errors, rlx.dim
imported = time.process_time() - begin
loaded = {{name.split(".")[0] for name in sys.modules}}
g = rlx.Graph("mlp")
x = g.input("x", ("n", 8))
g.set_outputs([g.softmax((x @ g.param("w", (8, 4))).gelu(), axis=-1)])
g.text(), g.fingerprint(), g.verify()
built = {{name.split(".")[0] for name in sys.modules}}
print(json.dumps({{"seconds": imported, "loaded": sorted(loaded), "built": sorted(built)}}))
"""
HEAVY = {"llvmlite", "torch", "scipy", "transformers", "hypothesis", "pytest", "multiprocessing", "asyncio"}


def child() -> dict[str, object]:
    code = CHILD.format(source=str(SOURCE))
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=LONGEST_S, check=True)
    return dict(json.loads(run.stdout))


def test_importing_rlx_is_quick_and_loads_nothing_heavy() -> None:
    said = [child() for _ in range(5)]
    typical = statistics.median(float(s["seconds"]) for s in said)  # type: ignore[arg-type]
    assert typical < SECONDS * SLACK, f"importing rlx takes {typical:.3f} s beyond NumPy"
    for s in said:
        assert not HEAVY & set(s["loaded"])  # type: ignore[call-overload]
        assert not HEAVY & set(s["built"]), "building a graph"  # type: ignore[call-overload]

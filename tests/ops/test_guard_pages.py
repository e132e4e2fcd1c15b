"""Every op under `RLX_CHECK=1`: arrays end at pages nobody may touch, and start out full of NaN.

A kernel that reads or writes past an array dies there, so this runs in a process of its own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from limits import LONGEST_S
from targets import supported, widths

import rlx

HERE = Path(__file__).resolve().parent

DRIVER = """
import sys
import numpy as np
from sample_graphs import compile_sample, element_types, sample_graph, user_ops

target, wanted = sys.argv[1], sys.argv[2].split(",")
for op in user_ops():
    for element_type in element_types(op):
        if element_type in wanted:
            print(op.name, element_type, flush=True)  # the last line names what died
            case = sample_graph(op.name, element_type)
            found = compile_sample(op.name, element_type, target).run(case.inputs)
            case.check(found)
            for x, y in zip(found, compile_sample(op.name, element_type, "reference").run(case.inputs), strict=True):
                assert x.shape == y.shape and x.dtype == y.dtype
                assert np.array_equal(np.isnan(x.astype(np.float64)), np.isnan(y.astype(np.float64)))
print("all ops")
"""

SHAPES_DRIVER = """
import sys
from test_shapes import CASES, check_every_size

for case in CASES:
    print(case.op, case.name, flush=True)
    check_every_size(case, sys.argv[1], "f32")
print("all shapes")
"""


EMPTY_DRIVER = """
import sys
import numpy as np
import rlx

for op in ("gather", "scatter", "scatter_add"):
    for rows in (0, "n"):
        print(op, rows, flush=True)
        g = rlx.Graph("empty")
        table, at = g.input("table", (rows, 5)), g.input("at", ("count",), "i32")
        updates = () if op == "gather" else (g.input("updates", ("count", 5)),)
        g.set_outputs([getattr(g, op)(table, at, *updates)])
        compiled = rlx.compile(g, target=sys.argv[1])
        for count in (0, 4):
            inputs = {"table": np.zeros((0, 5)), "at": np.zeros(count, np.int32), "updates": np.ones((count, 5))}
            given = {name: inputs[name].astype(compiled.input_types[name].dtype.numpy) for name in compiled.input_types}
            try:
                (out,) = compiled.run(given)
                assert count == 0 and out.size == 0
            except rlx.errors.KernelError as error:
                assert count and "an index lies outside" in str(error)
print("all tables")
"""


def run(driver: str, *arguments: str) -> str:
    """What a driver prints in a process that checks its memory."""
    package = Path(rlx.__file__).resolve().parent.parent
    paths = os.pathsep.join(map(str, (package, HERE, HERE.parent)))
    done = subprocess.run(
        [sys.executable, "-c", driver, *arguments], env={**os.environ, "RLX_CHECK": "1", "PYTHONPATH": paths},
        capture_output=True, text=True, timeout=LONGEST_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, f"{done.stdout[-200:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.mark.parametrize("target", [t.name for t in widths()])
def test_no_op_leaves_its_arrays(target: str) -> None:
    best = target == supported()[0].name  # the others have the same loops with other widths
    assert run(DRIVER, target, "f32,bf16,i32,i8,bool" if best else "f32,i8").endswith("all ops\n")


def test_no_size_makes_an_op_leave_its_arrays() -> None:
    assert run(SHAPES_DRIVER, supported()[0].name).endswith("all shapes\n")


def test_an_index_into_an_empty_table_is_an_error_that_touches_nothing() -> None:
    assert run(EMPTY_DRIVER, supported()[0].name).endswith("all tables\n")

"""An index into a table without rows is an error, and nothing is read or written there."""

from __future__ import annotations

import numpy as np
import pytest

import rlx


@pytest.mark.parametrize("rows", [0, "n"])
@pytest.mark.parametrize("op", ["gather", "scatter", "scatter_add"])
def test_an_index_into_an_empty_table_is_an_error_that_touches_nothing(
    op: str, rows: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CHECK", "1")  # a kernel that touches the table ends the process
    g = rlx.Graph("empty")
    table, at = g.input("table", (rows, 5)), g.input("at", ("count",), "i32")
    updates = () if op == "gather" else (g.input("updates", ("count", 5)),)
    g.set_outputs([getattr(g, op)(table, at, *updates)])
    compiled = rlx.compile(g)

    def run(count: int) -> np.ndarray:
        arrays = {"table": np.zeros((0, 5), np.float32), "at": np.zeros(count, np.int32)}
        if updates:
            arrays["updates"] = np.ones((count, 5), np.float32)
        return compiled.run(arrays)[0]

    assert run(0).size == 0
    with pytest.raises(rlx.errors.KernelError, match="lies outside"):
        run(4)

"""Every op, on every device and target, in every element type, on its samples: against outside oracles.

The CPU runs with `RLX_CHECK=1`: arrays end at pages that nobody may touch and start out full of NaN, so a kernel that
reads or writes past one ends the process here.
"""

from __future__ import annotations

import pytest
from sample_graphs import compile_sample, element_types, sample_graph, user_ops
from targets import widths

PLACES = ["reference", *(t.name for t in widths())]
EVERY_CASE = [(op.name, name) for op in user_ops() for name in element_types(op)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("op", "element_type"), EVERY_CASE)
def test_an_op_gives_what_its_oracle_says(
    op: str, element_type: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RLX_CHECK", "1")
    case = sample_graph(op, element_type)
    case.check(compile_sample(op, element_type, place).run(case.inputs))

"""Every op, on every device and target, in every element type, on its samples: against outside oracles."""

from __future__ import annotations

import pytest
from sample_graphs import compile_sample, element_types, sample_graph, user_ops
from targets import widths

PLACES = ["reference", *(t.name for t in widths())]
EVERY_CASE = [(op.name, name) for op in user_ops() for name in element_types(op)]


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("op", "element_type"), EVERY_CASE)
def test_an_op_gives_what_its_oracle_says(op: str, element_type: str, place: str) -> None:
    case = sample_graph(op, element_type)
    case.check(compile_sample(op, element_type, place).run(case.inputs))

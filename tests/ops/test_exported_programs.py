"""The program of every op goes into a file and comes back as it was."""

from __future__ import annotations

import pytest
from sample_graphs import element_types, sample_graph, user_ops
from targets import host

from rlx.runtime import record_json
from rlx.runtime.plan import make_plan, plan_records

NAMES = [op.name for op in user_ops() if element_types(op)]


@pytest.mark.parametrize("name", NAMES)
def test_a_program_comes_back_as_it_was(name: str) -> None:
    op = next(op for op in user_ops() if op.name == name)
    plan = make_plan(sample_graph(name, element_types(op)[0]).graph, host())
    text, arrays = record_json.encode(plan, plan_records())
    actual = record_json.decode(text, plan_records(), arrays, name)
    assert record_json.encode(actual, plan_records())[0] == text
    assert actual.main.fingerprint() == plan.main.fingerprint()

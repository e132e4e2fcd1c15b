"""Every op in every element type on the toy device, on its samples: against outside oracles."""

from __future__ import annotations

import pytest
from on_toy import OnToy
from sample_graphs import element_types, sample_graph, user_ops

EVERY_CASE = [(op.name, name) for op in user_ops() for name in element_types(op)]


@pytest.mark.parametrize(("op", "element_type"), EVERY_CASE)
def test_an_op_gives_what_its_oracle_says(op: str, element_type: str) -> None:
    case = sample_graph(op, element_type)
    case.check(OnToy(case.graph).run(case.inputs))


@pytest.mark.parametrize("op", ["matmul", "grouped_matmul", "attention", "attention_grad", "cached_attention"])
@pytest.mark.parametrize("leaf", ["strided", "sized", "param"])
def test_portable_forms_read_views_and_sizes_of_run_time(op: str, leaf: str) -> None:
    case = sample_graph(op, "f32", leaf)
    toy = OnToy(case.graph)
    if leaf == "param":
        toy.set_params(case.inputs)
        case.check(toy.run())
    else:
        case.check(toy.run(case.inputs))

"""Every op in every element type on a GPU, on its samples: against outside oracles."""

from __future__ import annotations

import numpy as np
import pytest
from sample_graphs import element_types, rounded_on_gpus, sample_graph, user_ops

import rlx

pytestmark = pytest.mark.gpu
EVERY_CASE = [(op.name, name) for op in user_ops() for name in element_types(op)]


@pytest.mark.parametrize(("op", "element_type"), EVERY_CASE)
def test_an_op_gives_what_its_oracle_says(op: str, element_type: str) -> None:
    case = sample_graph(op, element_type)
    compiled = rlx.compile(case.graph, "cuda")
    for _ in range(3):  # launch by launch, captured, replayed
        outputs = [np.asarray(output) for output in compiled.run(case.inputs)]
        case.check(outputs, rounded_on_gpus(op, element_type))


VIEWS = [(op, leaf) for op in ("matmul", "grouped_matmul") for leaf in ("strided", "sized", "param")]
VIEWS += [(op, leaf) for op in ("attention", "attention_grad", "cached_attention") for leaf in ("strided", "param")]


@pytest.mark.parametrize(("op", "leaf"), VIEWS)
def test_kernels_read_views_and_weights(op: str, leaf: str) -> None:
    case = sample_graph(op, "f32", leaf)
    compiled = rlx.compile(case.graph, "cuda")
    if leaf == "param":
        compiled.set_params(case.inputs)
    case.check([np.asarray(y) for y in compiled.run({} if leaf == "param" else case.inputs)])

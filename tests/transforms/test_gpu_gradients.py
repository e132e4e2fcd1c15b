"""Gradients of every op on a GPU: its VJP against the same graph in NumPy, which others compare with differences."""

from __future__ import annotations

import numpy as np
import pytest
from numeric import assert_close, evaluate, reverse_case, sample_case
from test_every_op import CASES, has_float_result

import rlx
from rlx.ir.registry import Sample

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("op", "sample"), CASES)
def test_gradients_are_those_of_numpy(op: str, sample: Sample) -> None:
    forward = sample_case(op, sample)
    if not has_float_result(forward):
        pytest.skip("its results are no f64")
    case = reverse_case(forward, np.random.default_rng(0))
    results = rlx.compile(case.graph, "cuda").run(case.arrays)
    for actual, wanted in zip(results, evaluate(case.graph, case.arrays), strict=True):
        assert_close(np.asarray(actual), wanted, 1e-9, op)

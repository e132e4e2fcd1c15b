"""Matmuls with epilogues whose operands lie in memory in other orders than the product."""

from __future__ import annotations

import numpy as np
import pytest

import rlx


@pytest.mark.parametrize("axes", [(0, 1, 3, 2), (1, 0, 2, 3), (3, 2, 1, 0)])
@pytest.mark.parametrize("dtype", ["f32", "f64"])
def test_operands_of_epilogues_may_be_transposed(axes: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(5)
    a, b = rng.normal(size=(2, 3, 10, 5)), rng.normal(size=(2, 3, 5, 8))
    shape = [0] * 4
    for axis, size in zip(axes, (2, 3, 10, 8), strict=True):
        shape[axis] = size
    c = rng.normal(size=shape)
    g = rlx.Graph("epilogue")
    x, y, z = (g.input(n, v.shape, dtype) for n, v in (("x", a), ("y", b), ("z", c)))
    g.set_outputs([x @ y + z.transpose(axes=axes)])
    arrays = {n: v.astype(dtype.replace("f", "float")) for n, v in (("x", a), ("y", b), ("z", c))}
    (found,) = rlx.compile(g).run(arrays)
    np.testing.assert_allclose(found, a @ b + c.transpose(axes), rtol=1e-4, atol=1e-4)

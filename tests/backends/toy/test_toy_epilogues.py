"""Epilogues of matmul records can be run by any backend, for any shape of tile: here as columns, by the toy."""

from __future__ import annotations

import math

import numpy as np
import pytest
from targets import AVX2, AVX512

import rlx
from rlx.backends.toy import interpreter
from rlx.dtypes import F32
from rlx.lir.kernels import MatmulKernel
from rlx.lir.loops import Arg, Expr, For, Index, Let, Load, LoopKernel, Param, Place, Store, substitute
from rlx.lir.module import plan_lir
from rlx.profile import CompileProfile
from rlx.target import Target

ROWS, COLUMNS = 5, 7


def by_columns(kernel: MatmulKernel) -> LoopKernel:
    """The epilogue over sums that lie column by column: a unit is a column."""
    assert kernel.epilogue is not None
    r, c = Index("r"), Index("c")
    sums = {f"acc{i or ''}": Load(i, ((c, Arg("rows")), (r, 1)), F32) for i in range(kernel.weights)}
    params = [Param(name, F32) for name in sums]
    places: list[Place] = []
    known: dict[str, Expr] = {**sums}
    for operand in kernel.epilogue_operands:
        places.append(((r, Arg("columns")), (c, 1)) if operand.columns else ((r, 1),))
        known[operand.name] = Load(len(params), places[-1], operand.dtype)
        params.append(Param(operand.name, operand.dtype, operand.written))
    lets = (Let(let.name, substitute(let.value, known)) for let in kernel.epilogue.lets)
    (value,) = (substitute(value, known) for value in kernel.epilogue.values)
    body = For("r", Arg("rows"), (*lets, Store(len(params) - 1, places[-1], value)), vector=True)
    return LoopKernel(kernel.epilogue.name, tuple(params), ("rows", "columns"), For("c", Arg("columns"), (body,)))


@pytest.mark.parametrize("target", (AVX512, AVX2), ids=lambda t: t.name)
@pytest.mark.parametrize("gated", (True, False), ids=("two weights", "an operand per row"))
def test_an_epilogue_has_no_shape_of_tile(target: Target, gated: bool) -> None:
    g = rlx.Graph("gated")
    x, scale = g.input("x", ("n", 64)), g.input("scale", ("n", 1))
    gate, up = g.param("gate", (64, COLUMNS)), g.param("up", (64, COLUMNS))
    g.set_outputs([(x @ gate).gelu() * (x @ up if gated else scale)])
    kernels = (launch.kernel for launch in plan_lir(g, target, CompileProfile()).main.launches)
    (kernel,) = (k for k in kernels if isinstance(k, MatmulKernel))
    assert (kernel.weights, [o.columns for o in kernel.epilogue_operands]) == (
        (2, [True]) if gated else (1, [False, True])
    )
    rng = np.random.default_rng(0)
    first = rng.normal(size=(ROWS, COLUMNS)).astype(np.float32)
    factor = rng.normal(size=(ROWS, COLUMNS if gated else 1)).astype(np.float32)
    out = np.zeros((ROWS, COLUMNS), np.float32)
    memory = [(array.reshape(-1), 0) for array in (first.T, factor.T, out)]
    interpreter.run(by_columns(kernel), COLUMNS, memory, [ROWS, COLUMNS], [])
    erf = np.vectorize(math.erf)(first.astype(np.float64) / math.sqrt(2))
    np.testing.assert_allclose(out, 0.5 * first * (1 + erf) * factor, rtol=2e-6, atol=1e-7)

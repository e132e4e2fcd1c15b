"""Temporaries that only products read are stored in the type of factors: the same bits, smaller, fewer launches."""

from __future__ import annotations

from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from emulator import emulated_gpu, missing

import rlx
from rlx.backends.cuda import backend
from rlx.backends.cuda.store_factors import store_factors
from rlx.backends.cuda.targets import SM_90
from rlx.dtypes import BF16, F32
from rlx.lir.module import plan_lir
from rlx.lir.program import ARENA, Program
from rlx.profile import CompileProfile

ROWS, SIZE, INNER = 40, 64, 96


def feed_forward(*, also: bool = False) -> rlx.Graph:
    """A norm, a gate and a product back; `also`: what is normalised is a result too."""
    g = rlx.Graph("feed_forward")
    x = g.input("x", ("rows", SIZE))
    shapes = {"gate": (INNER, SIZE), "up": (INNER, SIZE), "down": (SIZE, INNER)}
    gate, up, down = (g.param(name, shape, "bf16").cast("f32").mT for name, shape in shapes.items())
    normed = g.rms_norm(x, g.param("gamma", (SIZE,)), eps=1e-6)
    doubled = normed + normed.tanh()
    result = x + ((normed @ gate).silu() * (normed @ up)) @ down
    return g.set_outputs([result, doubled] if also else [result])


def temporaries(program: Program) -> list[Any]:
    return [b.type.dtype for b in program.buffers.values() if b.kind == ARENA]


def test_only_what_products_alone_read_is_rounded() -> None:
    plain = plan_lir(feed_forward(), SM_90, CompileProfile()).main
    assert temporaries(plain) == [F32, F32]
    assert temporaries(store_factors(plain)) == [BF16, BF16]
    assert store_factors(store_factors(plain)).text() == store_factors(plain).text()
    assert F32 in temporaries(store_factors(plan_lir(feed_forward(also=True), SM_90, CompileProfile()).main))


@pytest.mark.skipif(bool(missing()), reason=missing())
@pytest.mark.parametrize("rows", [1, ROWS])
def test_results_keep_their_bits(rows: int) -> None:
    rng = np.random.default_rng(0)
    params: dict[str, Any] = {"gamma": rng.random(SIZE).astype(np.float32) + 0.5}
    for name, shape in {"gate": (INNER, SIZE), "up": (INNER, SIZE), "down": (SIZE, INNER)}.items():
        params[name] = (rng.standard_normal(shape) / 8).astype(ml_dtypes.bfloat16)
    x = rng.standard_normal((ROWS, SIZE)).astype(np.float32)[:rows]

    def run() -> tuple[bytes, int]:
        with emulated_gpu() as gpu:
            compiled = rlx.compile(feed_forward(), "cuda")
            compiled.set_params(params)
            (y,) = compiled.run({"x": x})
            return np.asarray(y).tobytes(), gpu.launches

    bits, launches = run()
    with mock.patch.object(backend, "store_factors", lambda program: program):
        plain, more = run()
    assert bits == plain
    assert launches <= more

"""Launches that run as one kernel: the same bits as each by itself, in fewer kernels."""

from __future__ import annotations

from typing import Any
from unittest import mock

import ml_dtypes
import numpy as np
import pytest
from emulator import emulated_gpu, missing

import rlx
from rlx.backends.cuda import launch_plan

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
f32 = np.float32
BF16 = ml_dtypes.bfloat16


def layer(size: int) -> rlx.Graph:
    """A norm before a product of stored 16-bit weights, then a chain of small ops on its heads."""
    g = rlx.Graph("layer")
    x = g.input("x", ("rows", size))
    w = g.cast(g.param("w", (96, size), "bf16"), "f32").transpose(axes=(1, 0))
    y = g.rms_norm(x, g.param("gamma", (size,)), eps=1e-6) @ w
    heads = g.reshape(y, shape=("rows", 6, 16))
    normed = g.rms_norm(heads, g.param("head", (16,)), eps=1e-6)
    return g.set_outputs([y, normed.tanh() + 1.0, (normed * 2.0).softmax(axis=-1)])


def run(size: int, rows: int, **options: Any) -> tuple[list[np.ndarray[Any, Any]], int]:
    rng = np.random.default_rng(size)
    x = rng.standard_normal((9, size)).astype(f32)[:rows]
    params = {"w": rng.standard_normal((96, size)).astype(BF16), "gamma": rng.random(size).astype(f32) + 0.5}
    params["head"] = rng.random(16).astype(f32) + 0.5
    with emulated_gpu(**options) as gpu:
        compiled = rlx.compile(layer(size), "cuda")
        compiled.set_params(params)
        outputs = [np.asarray(y) for y in compiled.run({"x": x})]
        return outputs, gpu.launches


@pytest.mark.parametrize("size", [64, 544, 1024])
@pytest.mark.parametrize("backwards", [False, True])
def test_fused_launches_have_the_bits_of_single_ones(size: int, backwards: bool) -> None:
    fused, fewer = run(size, 1, backwards=backwards)
    with (
        mock.patch.object(launch_plan, "fuse_prologues", lambda planned, *_: list(planned)),
        mock.patch.object(launch_plan, "fuse_chains", lambda planned, *_: list(planned)),
    ):
        single, more = run(size, 1)
    assert fewer == 2 and more >= 5
    many, _ = run(size, 9)
    for one, other, batch in zip(fused, single, many, strict=True):
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, batch[:1])


def test_fused_launches_compute_what_numpy_does() -> None:
    (y, *_), _ = run(544, 1)
    rng = np.random.default_rng(544)
    x = rng.standard_normal((9, 544)).astype(f32)[:1].astype(np.float64)
    w, gamma = rng.standard_normal((96, 544)).astype(BF16).astype(np.float64), rng.random(544).astype(f32) + 0.5
    normed = (x / np.sqrt((x * x).mean() + 1e-6) * gamma).astype(f32).astype(BF16).astype(np.float64)
    np.testing.assert_allclose(y, normed @ w.T, rtol=1e-4, atol=1e-3)

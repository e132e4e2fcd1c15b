"""Matmuls on a GPU: against NumPy in f64, and the same bits for any number of rows."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.arrays import Array
from rlx.profile import Precision

pytestmark = pytest.mark.gpu
DEVICE = "cuda"
BF16 = np.dtype(ml_dtypes.bfloat16)
NUMPY = {"bf16": BF16, "f16": np.dtype(np.float16), "f32": np.dtype(np.float32), "f64": np.dtype(np.float64)}
BOUND = {"f32": 3e-6, "f64": 1e-13, "bf16": 3e-6, "f16": 3e-6}  # of sums; factors are exact


def numbers(kind: str, *shape: int, seed: int = 0) -> Array:
    """Random numbers, scaled so that products sum to about 1."""
    values = np.random.default_rng(seed + sum(shape)).standard_normal(shape) * shape[-1] ** -0.25
    return values.astype(NUMPY[kind])


def rounded(x: Array, kind: str) -> Array:
    """In f64, after rounding to a type."""
    return x.astype(NUMPY[kind]).astype(np.float64)


def close(actual: Any, expected: Array, kind: str) -> None:
    np.testing.assert_allclose(np.asarray(actual).astype(np.float64), expected, rtol=BOUND[kind], atol=BOUND[kind] * 3)


SHAPES = [(1, 1), (7, 3), (16, 31), (100, 77), (128, 64), (1000, 136), (96, 1024), (768, 3072), (40, 9000), (4104, 256)]
ROWS = (1, 2, 3, 8, 9, 16, 31, 33, 65, 130, 513)


@pytest.mark.parametrize("stored", ["bf16", "f16", "f32", "f64"])
@pytest.mark.parametrize("by_rows", [True, False], ids=["rows", "columns"])
def test_rows_do_not_depend_on_their_number(stored: str, by_rows: bool) -> None:
    wide = "f64" if stored == "f64" else "f32"
    for n, k in SHAPES:
        g = rlx.Graph("product")
        x = g.input("x", ("rows", k), wide)
        w = g.param("w", (n, k) if by_rows else (k, n), stored).cast(wide)
        g.set_outputs([x @ (w.mT if by_rows else w)])
        compiled = rlx.compile(g, DEVICE)
        weight, inputs = numbers(stored, n, k), numbers(wide, max(ROWS), k, seed=1)
        compiled.set_params({"w": weight if by_rows else np.ascontiguousarray(weight.T)})
        expected = rounded(inputs, stored) @ weight.astype(np.float64).T
        most = np.asarray(compiled.run({"x": inputs})[0])
        close(most, expected, stored)
        for rows in ROWS:
            part = np.asarray(compiled.run({"x": inputs[:rows]})[0])
            assert part.tobytes() == most[:rows].tobytes(), (n, k, rows)


@pytest.mark.parametrize("compute", ["f32", "bf16"])
@pytest.mark.parametrize("rows", [1, 5, 40, 300])
def test_a_gated_feed_forward(rows: int, compute: str) -> None:
    hidden, inner = 256, 640
    g = rlx.Graph("feed_forward")
    x = g.input("x", (rows, hidden), "f32")
    weights = {name: g.param(name, shape, "bf16") for name, shape in
               (("gate", (inner, hidden)), ("up", (inner, hidden)), ("down", (hidden, inner)))}  # fmt: skip
    gate, up, down = (w.cast("f32").mT for w in weights.values())
    g.set_outputs([x + ((x @ gate).silu() * (x @ up)) @ down])
    profile = rlx.CompileProfile(precision=Precision(compute=compute))
    compiled = rlx.compile(g, DEVICE, profile=profile)
    values = {name: numbers("bf16", *w.shape, seed=i) for i, (name, w) in enumerate(weights.items())}
    compiled.set_params(values)
    inputs = numbers("f32", rows, hidden)
    w = {name: value.astype(np.float64) for name, value in values.items()}
    first = rounded(inputs, "bf16")
    gated = first @ w["gate"].T
    inner_values = gated / (1 + np.exp(-gated)) * (first @ w["up"].T)
    expected = inputs + rounded(inner_values, "bf16") @ w["down"].T
    actual = np.asarray(compiled.run({"x": inputs})[0]).astype(np.float64)
    np.testing.assert_allclose(actual, expected, rtol=2e-2, atol=3e-2 if compute == "bf16" else 4e-3)


@pytest.mark.parametrize("kind", ["f32", "bf16", "f64"])
def test_batches_broadcast_and_transpose(kind: str) -> None:
    a, b = numbers(kind, 2, 3, 17, 40), numbers(kind, 3, 40, 29, seed=1)
    g = rlx.Graph("batches")
    x, y = g.input("x", a.shape, kind), g.input("y", b.shape, kind)
    g.set_outputs([(x @ y).cast("f64"), (y.mT @ x.mT).cast("f64"), (x.mT @ x).cast("f64")])
    outputs = rlx.compile(g, DEVICE).run({"x": a, "y": b})
    a64, b64 = a.astype(np.float64), b.astype(np.float64)
    expected = a64 @ b64, b64.swapaxes(-1, -2) @ a64.swapaxes(-1, -2), a64.swapaxes(-1, -2) @ a64
    for actual, wanted in zip(outputs, expected, strict=True):
        bound = {"f32": 1e-5, "f64": 1e-12, "bf16": 1e-2}[kind]
        np.testing.assert_allclose(np.asarray(actual), wanted, rtol=bound, atol=bound)


@pytest.mark.parametrize("rows", [1, 4, 20, 200])
def test_epilogues_with_biases_and_two_results(rows: int) -> None:
    g = rlx.Graph("epilogue")
    x = g.input("x", (rows, 128), "f32")
    w, bias = g.param("w", (72, 128), "f32").mT, g.param("bias", (72,), "f32")
    product = x @ w + bias
    g.set_outputs([product.gelu(), product.tanh() * 2.0])
    compiled = rlx.compile(g, DEVICE)
    weight, offset, inputs = numbers("f32", 72, 128), numbers("f32", 72), numbers("f32", rows, 128, seed=3)
    compiled.set_params({"w": weight, "bias": offset})
    sums = inputs.astype(np.float64) @ weight.astype(np.float64).T + offset
    import scipy.special

    gelu, twice = compiled.run({"x": inputs})
    close(gelu, sums * scipy.special.ndtr(sums), "f32")
    close(twice, np.tanh(sums) * 2, "f32")


@pytest.mark.parametrize("stored", ["bf16", "f32"])
@pytest.mark.parametrize("rows", [3, 64, 300])
def test_rows_select_their_matrix(rows: int, stored: str) -> None:
    groups, n, k = 6, 72, 200
    g = rlx.Graph("experts")
    x, index = g.input("x", (rows, k), "f32"), g.input("index", (rows,), "i32")
    gate, up = (g.param(name, (groups, n, k), stored).cast("f32").mT for name in ("gate", "up"))
    g.set_outputs([g.one("grouped_matmul", x, gate, index).silu() * g.one("grouped_matmul", x, up, index)])
    compiled = rlx.compile(g, DEVICE)
    values = {"gate": numbers(stored, groups, n, k), "up": numbers(stored, groups, n, k, seed=1)}
    compiled.set_params(values)
    chosen, inputs = np.random.default_rng(0).integers(0, groups, rows).astype(np.int32), numbers("f32", rows, k)
    a = rounded(inputs, stored)
    first, second = (np.einsum("ik,ink->in", a, values[name].astype(np.float64)[chosen]) for name in ("gate", "up"))
    outputs = compiled.run({"x": inputs, "index": chosen})
    np.testing.assert_allclose(np.asarray(outputs[0]), first / (1 + np.exp(-first)) * second, rtol=1e-5, atol=1e-5)
    order = np.argsort(chosen, kind="stable")
    again = np.asarray(compiled.run({"x": inputs[order], "index": chosen[order]})[0])
    assert again.tobytes() == np.asarray(outputs[0])[order].tobytes()
    chosen[1] = groups
    with pytest.raises(rlx.errors.RlxError, match=r"index|range"):
        compiled.run({"x": inputs, "index": chosen})

"""8-bit activations: matmuls by packed weights in whole numbers, against float64 on the same rounded numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from oracles import ORACLES, Array
from targets import supported

import rlx
from rlx.dtypes import DType, dtype
from rlx.ir.registry import packed
from rlx.ops.quantised_activations import INT8_DOT_TYPES
from rlx.profile import CompileProfile, Precision

TARGETS = [t.name for t in supported()]
INT8 = CompileProfile(precision=Precision(activations="int8"))
EVERY_TYPE = pytest.mark.parametrize("storage", [dtype(name) for name in INT8_DOT_TYPES], ids=str)
rng = np.random.default_rng(11)


def product(storage: DType, n: int, k: int, where: str, stored: Array, **options: Any) -> Any:
    g = rlx.Graph("product")
    w, x = g.param("w", (n, k), storage), g.input("x", ("m", k))
    g.set_outputs([x @ w.dequantise().mT])
    f = rlx.compile(g, "reference", **options) if where == "reference" else rlx.compile(g, target=where, **options)
    f.set_param("w", stored)
    return f


def blocks(storage: DType, *shape: int) -> Array:
    return packed(str(storage), *shape).array(rng)


def activations(m: int, k: int) -> Array:
    """Numbers that are nowhere near halfway between two codes, so that float64 rounds them as float32 does."""
    codes = rng.integers(-126, 127, (m, k)) + rng.uniform(-0.4, 0.4, (m, k))
    codes[:, ::32] = 127
    return (codes * rng.uniform(0.01, 0.02, (m, 1))).astype(np.float32)


def exact(storage: DType, x: Array, stored: Array) -> Array:
    rounded = ORACLES["round_blocks"](x.astype(np.float64), block=storage.block)
    return rounded @ ORACLES["dequantise"](stored).astype(np.float64).T  # type: ignore[no-any-return]


@EVERY_TYPE
@pytest.mark.parametrize("where", ["reference", *TARGETS])
def test_products_are_those_of_the_rounded_numbers(storage: DType, where: str) -> None:
    """Right against float64, bits that depend neither on m nor on what else is in the batch."""
    n, k = 100, 3 * storage.block if storage.block == 32 else 2 * storage.block
    stored = blocks(storage, n, k)
    f = product(storage, n, k, where, stored, profile=INT8)
    x = activations(200, k)
    x[3] = 0
    (actual,) = f.run({"x": x})
    wanted = exact(storage, x, stored)
    assert np.abs(actual - wanted).max() <= 1e-6 * np.abs(wanted).max()
    for m in (1, 2, 3, 4, 5, 7, 8, 9, 17, 199) if where != "reference" else ():
        np.testing.assert_array_equal(f.run({"x": x[3 : 3 + m]})[0], actual[3 : 3 + m])
    if where != "reference":
        assert [launch.kernel.kind for launch in f.plan.main.launches] == ["loops", "matmul"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["q4_1", "q4_k", "q6_k"])
def test_pieces_of_long_rows_and_blocks_of_many_do_not_show(name: str, target: str) -> None:
    """More of k than is taken apart at a time, more rows than a unit has: the bits are those of a row alone."""
    storage = dtype(name)
    n, k, m = 70, 2304, 300
    stored = blocks(storage, n, k)
    f = product(storage, n, k, target, stored, profile=INT8)
    x = activations(m, k)
    (actual,) = f.run({"x": x})
    wanted = exact(storage, x, stored)
    assert np.abs(actual - wanted).max() <= 1e-6 * np.abs(wanted).max()
    for rows in (slice(0, 1), slice(126, 131), slice(255, 258), slice(298, 300), slice(3, 259)):
        np.testing.assert_array_equal(f.run({"x": x[rows]})[0], actual[rows])


@EVERY_TYPE
def test_the_ends_of_the_ranges_do_not_overflow(storage: DType) -> None:
    """The largest codes, scales and activations there are: sums of whole numbers stay whole."""
    n, k = 70, 512
    stored = blocks(storage, n, k)
    raw = stored.view(np.uint8).reshape(n, -1)
    raw[:35], raw[35:] = 0xFF, 0x7F
    for name in ("d", "m", "dmin"):
        if name in (stored.dtype.names or ()):
            stored[name] = 1
    if str(storage) == "mxfp4":
        stored["e"] = 128  # a scale of 1
    x = np.full((9, k), 5.0, np.float32)
    x[1::2] *= -1
    x[4, ::2] = -5
    wanted = exact(storage, x, stored)
    for target in TARGETS:
        (actual,) = product(storage, n, k, target, stored, profile=INT8).run({"x": x})
        assert np.abs(actual - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_targets_with_fused_multiply_add_agree_to_the_bit() -> None:
    fused = [t.name for t in supported() if t.has_fma]
    for name in INT8_DOT_TYPES:
        storage = dtype(name)
        stored = blocks(storage, 70, 512)
        x = rng.normal(size=(6, 512)).astype(np.float32)
        actual = [product(storage, 70, 512, target, stored, profile=INT8).run({"x": x})[0] for target in fused]
        for other in actual[1:]:
            np.testing.assert_array_equal(actual[0], other)


def test_one_input_is_rounded_once_for_all_its_weights() -> None:
    """Gate and up share a kernel, and values of another type read the same words."""
    g = rlx.Graph("several")
    k = 256
    x = g.input("x", ("m", k))
    gate, up = (g.param(name, (96, k), "q4_k") for name in ("gate", "up"))
    value = g.param("value", (32, k), "q6_k")
    g.set_outputs([(x @ gate.dequantise().mT).silu() * (x @ up.dequantise().mT), x @ value.dequantise().mT])
    f = rlx.compile(g, profile=INT8)
    assert sum("activation_blocks" in launch.kernel.symbol for launch in f.plan.main.launches) == 1
    weights = {name: blocks(dtype(kind), rows, k) for name, kind, rows in
               (("gate", "q4_k", 96), ("up", "q4_k", 96), ("value", "q6_k", 32))}  # fmt: skip
    for name, stored in weights.items():
        f.set_param(name, stored)
    a = activations(5, k) / 64
    both, other = f.run({"x": a})
    gates, ups = (exact(dtype("q4_k"), a, weights[name]) for name in ("gate", "up"))
    wanted = gates / (1 + np.exp(-gates)) * ups
    assert np.abs(both - wanted).max() <= 1e-5 * np.abs(wanted).max()
    last = exact(dtype("q6_k"), a, weights["value"])
    assert np.abs(other - last).max() <= 1e-6 * np.abs(last).max()


def test_a_normalised_row_is_rounded_where_it_is_made() -> None:
    g = rlx.Graph("norm")
    x, gamma, w = g.input("x", ("b", "s", 64)), g.param("gamma", (64,)), g.param("w", (40, 64), "q4_0")
    g.set_outputs([x.rms_norm(gamma, eps=1e-6) @ w.dequantise().mT])
    f = rlx.compile(g, profile=INT8)
    assert [launch.kernel.kind for launch in f.plan.main.launches] == ["loops", "matmul"]  # type: ignore[attr-defined]
    stored, scale = blocks(dtype("q4_0"), 40, 64), rng.uniform(0.5, 1.5, 64).astype(np.float32)
    f.set_param("w", stored)
    f.set_param("gamma", scale)
    for shape in ((1, 1, 64), (2, 3, 64), (1, 300, 64)):
        a = rng.normal(size=shape).astype(np.float32)
        normed = a / np.sqrt((a.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-6) * scale
        rounded = ORACLES["round_blocks"](normed, block=32)
        wanted = rounded @ ORACLES["dequantise"](stored).astype(np.float64).T
        (actual,) = f.run({"x": a})
        # A number between two codes may go to either by its last bit.
        assert np.abs(actual - wanted).max() <= 0.02 * np.abs(wanted).max()
        assert np.median(np.abs(actual - wanted)) <= 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("where", ["reference", TARGETS[0]])
def test_blocks_of_tiny_numbers_are_zeros(where: str) -> None:
    stored = blocks(dtype("q4_1"), 40, 96)
    x = activations(3, 96)
    x[1, :32], x[1, 40], x[2, 64:] = 1e-38, 0, 1e-42
    wanted = exact(dtype("q4_1"), np.where(np.abs(x) < 1e-30, 0, x), stored)
    (actual,) = product(dtype("q4_1"), 40, 96, where, stored, profile=INT8).run({"x": x})
    assert np.abs(actual - wanted).max() <= 1e-6 * np.abs(wanted).max()


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", ["q4_0", "q4_1", "q4_k", "q6_k"])
def test_what_is_not_a_number_stays_so(name: str, target: str) -> None:
    """Wherever it is, it spoils its block and therefore its row, and no other."""
    storage = dtype(name)
    k = 2 * storage.block
    f = product(storage, 40, k, target, blocks(storage, 40, k), profile=INT8)
    for bad in (np.nan, np.inf, -np.inf):
        x = rng.normal(size=(2 * k, k)).astype(np.float32)
        x[2 * np.arange(k), np.arange(k)] = bad
        for rows in (x, x[:3]):  # tiles, dots
            (actual,) = f.run({"x": rows})
            assert not np.isfinite(actual[::2]).any() and np.isfinite(actual[1::2]).all()


def test_types_without_whole_numbers_keep_their_arithmetic() -> None:
    stored = blocks(dtype("q3_k"), 40, 256)
    x = rng.normal(size=(3, 256)).astype(np.float32)
    plain = product(dtype("q3_k"), 40, 256, TARGETS[0], stored).run({"x": x})[0]
    np.testing.assert_array_equal(
        plain, product(dtype("q3_k"), 40, 256, TARGETS[0], stored, profile=INT8).run({"x": x})[0]
    )

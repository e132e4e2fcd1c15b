"""Quantised numbers: packed weights to the bit as the `gguf` package reads them, and matmuls that read blocks where
they lie; integers with scales, and floats of eight and four bits as `ml_dtypes` has them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from oracles import ORACLES, Array, wide
from targets import supported

import rlx
from rlx import QuantScheme
from rlx.dtypes import FLOAT8_PACKED, PACKED, DType
from rlx.errors import BindError, DTypeError, GraphError, ShapeError
from rlx.ir.registry import packed
from rlx.profile import CompileProfile, Precision

TARGETS = [t.name for t in supported()]
EVERY_TYPE = pytest.mark.parametrize("storage", PACKED, ids=str)
FIRST = PACKED[:11]  # of these every target is compiled
SLOW = ("tq1_0", "iq1_s", "iq2_xs", "iq2_s", "iq3_xxs", "iq3_s")  # to compile; other types share all parts of these
EVERY_TYPE_SOMEWHERE = pytest.mark.parametrize(
    ("storage", "target"),
    [
        pytest.param(d, t, marks=[pytest.mark.large] if str(d) in SLOW else [], id=f"{d}-{t}")
        for d in PACKED for t in TARGETS if d in FIRST or t == TARGETS[0]
    ],
)  # fmt: skip
rng = np.random.default_rng(7)


def blocks(storage: DType, *shape: int) -> Array:
    return packed(str(storage), *shape).array(rng)


def numbers(x: Array) -> Array:
    return ORACLES["dequantise"](x)  # type: ignore[no-any-return]


@EVERY_TYPE
@pytest.mark.parametrize("where", ["reference", *TARGETS])
def test_blocks_become_the_numbers_that_gguf_reads(storage: DType, where: str) -> None:
    g = rlx.Graph("unpack")
    g.set_outputs([g.param("w", (3, 2 * storage.block), storage).dequantise()])
    f = rlx.compile(g, "reference") if where == "reference" else rlx.compile(g, target=where)
    x = blocks(storage, 3, 2 * storage.block)
    f.set_param("w", x)
    (actual,) = f.run()
    np.testing.assert_array_equal(actual, numbers(x))


@pytest.mark.parametrize("storage", FLOAT8_PACKED, ids=str)
def test_every_code_of_8_bit_floats_is_that_of_ml_dtypes(storage: DType) -> None:
    x = np.zeros((1, 256 // storage.block), storage.numpy)
    x["d"] = 0.3
    x["codes"] = np.arange(256, dtype=np.uint8).reshape(x["codes"].shape)
    wanted = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32) * np.float32(0.3)
    g = rlx.Graph("unpack")
    w = g.param("w", (1, 256), storage).dequantise()
    g.set_outputs([w, g.input("x", ("rows", 256)) @ w.mT])
    f = rlx.compile(g)
    f.set_param("w", x)
    numbers, products = f.run({"x": np.eye(256, dtype=np.float32)[[0, 6, 9, 126, 200]]})
    np.testing.assert_array_equal(numbers[0], wanted)
    assert np.isnan(wanted).sum() == 2 and np.isnan(products).all()  # NaN times zero
    x["codes"][x["codes"] & 127 == 127] = 0
    f.set_param("w", x)
    products = f.run({"x": np.eye(256, dtype=np.float32)})[1]
    np.testing.assert_array_equal(products[:, 0], np.where(np.isnan(wanted), 0, wanted))


def test_infinite_and_nan_scales_come_out_as_they_are() -> None:
    x = blocks(PACKED[1], 3, 32)
    x["d"][:, 0] = np.array([np.inf, -np.inf, np.nan], np.float16)
    g = rlx.Graph("unpack")
    g.set_outputs([g.param("w", (3, 32), "q4_1").dequantise()])
    f = rlx.compile(g)
    f.set_param("w", x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(f.run()[0], numbers(x))


@EVERY_TYPE_SOMEWHERE
def test_a_matmul_unpacks_on_the_way(storage: DType, target: str) -> None:
    """Right against float64, one kernel, weights in as many bytes as the file has, bits that do not depend on m."""
    n, k = 100, (3 if storage.block == 32 else 2) * storage.block
    g = rlx.Graph("product")
    w, x = g.param("w", (n, k), storage), g.input("x", ("m", k))
    g.set_outputs([x @ w.dequantise().mT])
    f = rlx.compile(g, target=target)
    stored = blocks(storage, n, k)
    f.set_param("w", stored)
    a = rng.normal(size=(200, k)).astype(np.float32)
    (actual,) = f.run({"x": a})
    exact = a.astype(np.float64) @ numbers(stored).astype(np.float64).T
    assert np.abs(actual - exact).max() <= 2e-6 * np.abs(exact).max()
    for m in (1, 2, 3, 4, 5, 6, 7, 13, 199):
        np.testing.assert_array_equal(f.run({"x": a[3 : 3 + m]})[0], actual[3 : 3 + m][:m])
    plan = f.plan  # type: ignore[attr-defined]
    assert len(plan.main.launches) == 1
    (panels,) = (plan.main.buffers[name].type for name in plan.main.weights)
    width = panels.shape[2] * panels.shape[3] * 2 // storage.size  # columns of a panel
    assert panels.bytes == -(-n // width) * width * stored.nbytes // n


def test_weights_that_share_an_input_are_joined_while_packed() -> None:
    """q, k and v of one type are one matmul; a value of another type is its own."""
    g = rlx.Graph("qkv")
    x = g.input("x", ("m", 256))
    sizes = {"q": (96, "q4_1"), "k": (40, "q4_1"), "v": (40, "q6_k")}
    stored = {name: blocks(rlx.dtype(kind), n, 256) for name, (n, kind) in sizes.items()}
    g.set_outputs([x @ g.param(name, (n, 256), kind).dequantise().mT for name, (n, kind) in sizes.items()])
    f = rlx.compile(g)
    f.set_params(stored)
    kinds = [launch.kernel.kind for launch in f.plan.main.launches]  # type: ignore[attr-defined]
    assert kinds.count("matmul") == 2
    for m in (1, 9):
        a = rng.normal(size=(m, 256)).astype(np.float32)
        for actual, w in zip(f.run({"x": a}), stored.values(), strict=True):
            exact = a.astype(np.float64) @ numbers(w).T
            assert np.abs(actual - exact).max() <= 2e-6 * np.abs(exact).max()


@pytest.mark.parametrize("kinds", [("q4_k", "q4_k"), ("q4_k", "q6_k")])
def test_a_gated_pair_of_packed_weights(kinds: tuple[str, str]) -> None:
    """silu(x gate) · (x up): one matmul when both are of one type, right in any case."""
    g = rlx.Graph("gate")
    x = g.input("x", ("m", 256))
    gate, up = (g.param(f"w{i}", (130, 256), kind).dequantise().mT for i, kind in enumerate(kinds))
    g.set_outputs([(x @ gate).silu() * (x @ up)])
    f = rlx.compile(g)
    stored = [blocks(rlx.dtype(kind), 130, 256) for kind in kinds]
    f.set_params({f"w{i}": w for i, w in enumerate(stored)})
    launches = f.plan.main.launches  # type: ignore[attr-defined]
    assert len(launches) == (1 if kinds[0] == kinds[1] else 2)
    for m in (1, 7):
        a = rng.normal(size=(m, 256)).astype(np.float32)
        left, right = (a.astype(np.float64) @ numbers(w).T for w in stored)
        with np.errstate(over="ignore"):
            exact = left / (1 + np.exp(-left)) * right
        assert np.abs(f.run({"x": a})[0] - exact).max() <= 1e-5 * np.abs(exact).max()


@EVERY_TYPE
@pytest.mark.parametrize("where", ["reference", *TARGETS])
def test_rows_of_a_packed_table_are_unpacked_as_they_are_taken(storage: DType, where: str) -> None:
    g = rlx.Graph("rows")
    k = 2 * storage.block
    table, at = g.param("w", (9, k), storage), g.input("at", ("batch", "seq"), "i32")
    g.set_outputs([table.dequantise().gather(at), table.gather(at)])
    f = rlx.compile(g, "reference") if where == "reference" else rlx.compile(g, target=where)
    stored = blocks(storage, 9, k)
    f.set_param("w", stored)
    picked = rng.integers(0, 9, (2, 3)).astype(np.int32)
    for actual in f.run({"at": picked}):
        np.testing.assert_array_equal(actual, numbers(stored)[picked])
    if where != "reference":
        assert f.plan.main.weights == ["w"]  # type: ignore[attr-defined]  # the table itself, not a copy of it


def test_narrow_tables_are_widened_after_rows_are_taken() -> None:
    g = rlx.Graph("rows")
    table, at = g.param("w", (9, 40), "f16"), g.input("at", ("n",), "i32")
    g.set_outputs([table.astype("f32").gather(at)])
    f = rlx.compile(g)
    stored = rng.normal(size=(9, 40)).astype(np.float16)
    f.set_param("w", stored)
    np.testing.assert_array_equal(f.run({"at": np.array([8, 0], np.int32)})[0], stored[[8, 0]].astype(np.float32))
    assert f.plan.main.weights == ["w"]  # type: ignore[attr-defined]


def test_a_tied_table_is_read_both_ways() -> None:
    """The head interleaves the table, the embedding takes its rows."""
    g = rlx.Graph("tied")
    table, at = g.param("w", (70, 64), "q8_0"), g.input("at", ("n",), "i32")
    numbers_ = table.dequantise()
    g.set_outputs([numbers_.gather(at) @ numbers_.mT])
    f = rlx.compile(g)
    stored = blocks(rlx.dtype("q8_0"), 70, 64)
    f.set_param("w", stored)
    w = numbers(stored).astype(np.float64)
    exact = w[[69, 3]] @ w.T
    assert np.abs(f.run({"at": np.array([69, 3], np.int32)})[0] - exact).max() <= 2e-6 * np.abs(exact).max()


def test_bytes_are_taken_for_blocks() -> None:
    g = rlx.Graph("unpack")
    g.set_outputs([g.param("w", (3, 64), "q4_1").dequantise()])
    f = rlx.compile(g)
    stored = blocks(rlx.dtype("q4_1"), 3, 64)
    f.set_param("w", stored.view(np.uint8))
    np.testing.assert_array_equal(f.run()[0], numbers(stored))


def test_the_type_prints_and_parses() -> None:
    g = rlx.Graph("unpack")
    g.set_outputs([g.param("w", (3, 64), "q4_1").dequantise()])
    assert "q4_1[3, 64]" in g.text() and rlx.Graph.parse(g.text()) == g


# -- integers and small floats ----------------------------------------------------------------------------------------
PLACES = pytest.mark.parametrize("where", ["reference", *TARGETS])


def compiled(g: rlx.Graph, where: str, **options: Any) -> rlx.CompiledGraph:
    return rlx.compile(g, "reference", **options) if where == "reference" else rlx.compile(g, target=where, **options)


def run(where: str, build: Callable[..., Any], *arrays: Array) -> Array:
    """One output; operands are inputs."""
    g = rlx.Graph("quant")
    g.set_outputs([build(*(g.input(f"x{i}", a.shape, a.dtype) for i, a in enumerate(arrays)))])
    return compiled(g, where).run({f"x{i}": a for i, a in enumerate(arrays)})[0]


@PLACES
@pytest.mark.parametrize(("scheme", "theirs"), [("fp8e4m3", "float8_e4m3fn"), ("fp8e5m2", "float8_e5m2")])
def test_every_eight_bit_float(scheme: str, theirs: str, where: str) -> None:
    """All 256, NaN and infinities included; E4M3 has no infinities and goes to 448."""
    every = np.arange(256, dtype=np.uint8).reshape(8, 32)
    actual = run(where, lambda x: x.dequantise(scheme=scheme), every)
    np.testing.assert_array_equal(actual, every.view(getattr(ml_dtypes, theirs)).astype(np.float32))
    finite = actual[np.isfinite(actual)]
    assert finite.max() == (448 if scheme == "fp8e4m3" else 57344)
    assert np.isinf(actual).sum() == (0 if scheme == "fp8e4m3" else 2)
    assert np.isnan(actual).sum() == (2 if scheme == "fp8e4m3" else 6)


@PLACES
def test_every_four_bit_float_and_integer(where: str) -> None:
    """A byte holds two, the low nibble first; int4 is signed."""
    every = np.arange(256, dtype=np.uint8).reshape(16, 16)
    low, high = every & 15, every >> 4
    nibbles = np.stack([low, high], axis=-1).reshape(16, 32)
    integers = np.where(nibbles > 7, nibbles.astype(np.int32) - 16, nibbles)
    ones = np.ones((1, 32), np.float32)
    np.testing.assert_array_equal(run(where, lambda x, s: x.dequantise(s, scheme="int4/16"), every, ones), integers)
    assert integers.min() == -8 and integers.max() == 7
    shifted = run(where, lambda x, s, z: x.dequantise(s, z, scheme="int4/16"), every, ones * 2, ones * 3)
    np.testing.assert_array_equal(shifted, (integers - 3) * 2)
    table = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    floats = np.array([*table, *(-v for v in table)], np.float32)[nibbles]
    one = np.full((1, 32), 0x38, np.uint8)  # 1.0 as E4M3
    np.testing.assert_array_equal(run(where, lambda x, s: x.dequantise(s, scheme="nvfp4/16"), every, one), floats)
    scaled = run(
        where, lambda x, s, g: x.dequantise(s, g, scheme="nvfp4/16"), every, one + 8, np.array(0.5, np.float32)
    )
    np.testing.assert_array_equal(scaled, floats)  # 2.0 · 0.5


@PLACES
@pytest.mark.parametrize("kind", [np.float32, np.float64])
def test_halves_go_to_even_and_nothing_wraps(kind: Any, where: str) -> None:
    x = np.array([0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5, 127.5, 1e30, -1e30, np.inf, -np.inf, np.nan, -128.5], kind)
    integers = [0, 2, 2, 0, -2, -2, 126, 127, 127, -128, 127, -128, 0, -128]
    np.testing.assert_array_equal(run(where, lambda x: x.quantise(1.0), x), np.array(integers, np.int8))
    np.testing.assert_array_equal(run(where, lambda x: x.quantise(1.0, 3), x)[:6], np.array(integers[:6]) + 3)
    unsigned = run(where, lambda x: x.quantise(1.0, 128, dtype="u8"), x)
    np.testing.assert_array_equal(unsigned, [128, 130, 130, 128, 126, 126, 254, 255, 255, 0, 255, 0, 0, 0])


def tiny_cases(kind: Any, floats: Any) -> Array:
    """All numbers of a type of few bits, what lies just between two of them and beside that, and what is special."""
    every = np.arange(16 if floats is ml_dtypes.float4_e2m1fn else 256, dtype=np.uint8).view(floats).astype(kind)
    sorted_ = np.unique(every[np.isfinite(every)])
    middles = (sorted_[1:] + sorted_[:-1]) / 2
    special = [np.nan, np.inf, -np.inf, 0.0, -0.0, 1e30, -1e30, 1e-30, -1e-30]
    spread = rng.normal(size=2000) * 10.0 ** rng.integers(-9, 6, 2000)
    neighbours = [np.nextafter(middles, kind(s * np.inf)) for s in (1, -1)]
    cases = np.concatenate([every, middles, *neighbours, special, spread]).astype(kind)
    return np.pad(cases, (0, -cases.size % 32)).reshape(16, -1)


@PLACES
@pytest.mark.parametrize(("scheme", "theirs"), [("fp8e4m3", "float8_e4m3fn"), ("fp8e5m2", "float8_e5m2")])
def test_eight_bit_floats_are_rounded_as_ml_dtypes_rounds_and_cut_off_at_the_largest(
    scheme: str, theirs: str, where: str
) -> None:
    floats, top = getattr(ml_dtypes, theirs), 448.0 if scheme == "fp8e4m3" else 57344.0
    x = tiny_cases(np.float32, floats)
    actual = run(where, lambda x: x.quantise(1.0, scheme=scheme), x)
    expected = np.where(np.isnan(x), np.abs(x), np.clip(x, -top, top)).astype(floats).view(np.uint8)
    np.testing.assert_array_equal(actual, expected)
    x = tiny_cases(np.float64, floats)  # `ml_dtypes` rounds these to f32 first, so twice
    actual = run(where, lambda x: x.quantise(1.0, scheme=scheme), x)
    sure = ~np.isnan(x)
    np.testing.assert_array_equal(actual[sure], ORACLES["quantise"](x, 1.0, scheme=scheme)[sure])


@PLACES
def test_four_bit_floats_are_rounded_as_ml_dtypes_rounds(where: str) -> None:
    x = tiny_cases(np.float32, ml_dtypes.float4_e2m1fn)
    x = np.where(np.isnan(x), np.float32(0), x)
    one = np.full((1, x.shape[1]), 0x38, np.uint8)  # 1.0 as E4M3
    actual = run(where, lambda x, s: x.quantise(s, scheme="nvfp4/16"), x, one)
    expected = x.astype(ml_dtypes.float4_e2m1fn).view(np.uint8)
    np.testing.assert_array_equal(actual & 15, expected[:, 0::2])
    np.testing.assert_array_equal(actual >> 4, expected[:, 1::2])
    nan = run(where, lambda x, s: x.quantise(s, scheme="nvfp4/16"), np.full((16, 2), np.nan, np.float32), one[:, :2])
    assert not nan.any()  # there is no NaN


@PLACES
def test_numbers_come_back_from_small_floats(where: str) -> None:
    """Eight bit floats lose 1/16 or 1/8 of a number at most, NVFP4 one part in six of the largest of its block."""
    x = (rng.normal(size=(64, 10)) * 10.0 ** rng.integers(-1, 2, (64, 1))).astype(np.float32)
    for scheme, part in (("fp8e4m3", 1 / 16), ("fp8e5m2", 1 / 8)):
        g = rlx.Graph("there and back")
        q, scale = g.input("x", x.shape).quantise(scheme=scheme)
        assert scale.shape == (10,)
        g.set_outputs([q.dequantise(scale, scheme=scheme)])
        (actual,) = compiled(g, where).run({"x": x})
        assert np.all(np.abs(actual - x) <= np.abs(x) * part + np.abs(x).max(0) * 2.0**-15)
    x[16:32] = 0  # a block of zeros has a scale of 0
    g = rlx.Graph("there and back")
    q, small, full = g.input("x", x.shape).quantise(scheme=QuantScheme.NVFP4)
    assert str(q.type) == "u8[64, 5]" and str(small.type) == "u8[4, 10]" and str(full.type) == "f32[]"
    g.set_outputs([q.dequantise(small, full, scheme=QuantScheme.NVFP4), small, full])
    actual, block_scales, tensor_scale = compiled(g, where).run({"x": x})
    largest = np.abs(x).reshape(4, 16, 10).max(1)
    np.testing.assert_allclose(tensor_scale, largest.max() / 6 / 448, rtol=1e-6)
    scales = (largest / 6 / tensor_scale).astype(ml_dtypes.float8_e4m3fn)
    np.testing.assert_array_equal(block_scales, scales.view(np.uint8))
    assert np.all(np.abs(actual - x) <= np.repeat(largest, 16, axis=0) * (1 / 6 + 1 / 16)) and not actual[16:32].any()


# -- training ---------------------------------------------------------------------------------------------------------
@PLACES
def test_a_running_scale_begins_with_what_it_sees_and_then_follows(where: str) -> None:
    g = rlx.Graph("calibrate")
    x, state = g.input("x", (6, 4)), g.input("state", (4,))
    after = x.running_scale(state, axis=1, decay=0.9)
    g.set_outputs([x.fake_quantise(after, axis=1), after])
    f = compiled(g, where)
    held, expected = np.zeros(4, np.float32), np.zeros(4)
    for _ in range(3):
        a = rng.normal(size=(6, 4)).astype(np.float32)
        seen = np.abs(a).max(0) / 127.0
        expected = np.where(expected > 0, 0.9 * expected + 0.1 * seen, seen)
        y, held = f.run({"x": a, "state": held})
        np.testing.assert_allclose(held, expected, rtol=1e-6)
        np.testing.assert_allclose(y, np.clip(np.rint(a / held), -127, 127) * held, rtol=1e-6)


@PLACES
def test_the_gradient_of_a_learned_scale_is_that_of_the_paper(where: str) -> None:
    """Inside the range the slope of the result over the scale, with rounding held, is round(z) - z; outside ±top."""
    x = rng.normal(size=(40, 3)).astype(np.float32)
    scale, dy = np.array([0.05, 0.2, 0.4], np.float32), rng.normal(size=(40, 3)).astype(np.float32)
    actual = run(where, lambda x, s, d: x.fake_quantise_scale_grad(s, d, bits=4, axis=1), x, scale, dy)
    expected = np.zeros(3)
    for (i, j), value in np.ndenumerate(x):
        z = float(value) / float(scale[j])
        expected[j] += float(dy[i, j]) * (round(z) - z if abs(z) <= 7 else 7 if z > 0 else -7)
    np.testing.assert_allclose(actual, expected, rtol=2e-5, atol=1e-5)
    remaining = run(where, lambda x, d, s: x.fake_quantise_grad(d, s, bits=4, axis=1, ste="clipped"), x, dy, scale)
    np.testing.assert_array_equal(remaining, np.where(np.abs(x) <= 7 * scale, dy, 0))


@PLACES
def test_quantising_loses_half_a_step_at_most(where: str) -> None:
    x = rng.normal(size=(64, 10)).astype(np.float32)
    for scheme in (None, "int8/16", "int4/32"):
        g = rlx.Graph("there and back")
        a = g.input("x", x.shape)
        q, scale = a.quantize(scheme=scheme)
        g.set_outputs([q.dequantize(scale, scheme=scheme), scale])
        actual, step = compiled(g, where).run({"x": x})
        steps = step if scheme is None else np.repeat(step, int(scheme.split("/")[1]), axis=0)
        assert np.all(np.abs(actual - x) <= steps * 0.5001)
        assert np.abs(actual - x).max() > steps.max() * 0.3  # and that is what it does lose
    axis = run(where, lambda x: x.quantise(x.quant_scale(axis=1), axis=1).dequantise(x.quant_scale(axis=1), axis=1), x)
    fake = run(where, lambda x: x.fake_quantise(axis=1), x)
    np.testing.assert_array_equal(axis, fake)
    zeros = np.zeros((4, 2), np.float16)
    np.testing.assert_array_equal(run(where, lambda x: x.fake_quantise(), zeros), zeros)


@PLACES
@pytest.mark.parametrize("scheme", ["int8/8", "int4/8"])
def test_views_and_run_time_sizes_are_quantised_where_they_lie(scheme: str, where: str) -> None:
    """[batch, n, k] seen as [batch, k, n], in blocks along k, there and back."""
    g = rlx.Graph("strided")
    x = g.input("x", ("batch", 6, 32)).mT
    q, scale = x.quantise(scheme=scheme)
    g.set_outputs([q.dequantise(scale, scheme=scheme)])
    a = rng.normal(size=(3, 6, 32)).astype(np.float32)
    rotated = a.swapaxes(1, 2).astype(np.float64)
    step = ORACLES["quant_scale"](rotated, scheme=scheme)
    exact = ORACLES["dequantise"](ORACLES["quantise"](rotated, step, scheme=scheme), step, scheme=scheme)
    np.testing.assert_allclose(compiled(g, where).run({"x": a})[0], exact, rtol=1e-6, atol=1e-6)


def test_a_table_of_integers_keeps_its_scales_when_rows_are_taken() -> None:
    g = rlx.Graph("rows")
    table, at = g.param("w", (9, 6), "i8"), g.input("at", ("n",), "i32")
    g.set_outputs([table.dequantise(g.param("s", (6,)), axis=1).gather(at)])
    f = rlx.compile(g)
    w, s = rng.integers(-128, 128, (9, 6)).astype(np.int8), rng.uniform(0.1, 1, 6).astype(np.float32)
    f.set_params({"w": w, "s": s})
    np.testing.assert_array_equal(f.run({"at": np.array([8, 2], np.int32)})[0], (w * s)[[8, 2]])


# -- weights ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["reference", TARGETS[0]])
@pytest.mark.parametrize("declared", ["packed", "rows", "columns", "row bytes", "bytes"])
@pytest.mark.parametrize("storage", [rlx.dtype(name) for name in ("q4_1", "q4_k", "q8_k", "iq4_nl")], ids=str)
def test_a_param_becomes_what_the_scheme_stores(storage: DType, declared: str, where: str) -> None:
    """However it is declared, it holds packed rows [n, k] and the matmul unpacks them."""
    n, k = 70, 2 * storage.block
    stored = blocks(storage, n, k)
    raw = np.ascontiguousarray(stored).view(np.uint8)
    shapes: dict[str, Any] = {
        "packed": ((n, k), storage), "rows": ((n, k), "f32"), "columns": ((k, n), "f32"),
        "row bytes": (raw.shape, "u8"), "bytes": ((raw.size,), "u8"),
    }  # fmt: skip
    scheme = f"gguf_{str(storage).replace('_k', 'k')}"
    g = rlx.Graph("product")
    x, w = g.input("x", ("m", k)), g.param("w", *shapes[declared])
    y = g.dequant_matmul(x, w, scheme=QuantScheme(scheme))
    assert w.type == rlx.TensorType((n, k), storage) and str(y.type) == f"f32[m, {n}]"
    g.set_outputs([y])
    assert rlx.Graph.parse(g.text()) == g and f'scheme="{scheme}"' in g.text()
    f = compiled(g, where)
    f.set_param("w", raw.reshape(-1) if declared == "bytes" else raw)
    a = rng.normal(size=(3, k)).astype(np.float32)
    exact = a.astype(np.float64) @ numbers(stored).astype(np.float64).T
    assert np.abs(f.run({"x": a})[0] - exact).max() <= 2e-6 * np.abs(exact).max()
    if where != "reference":
        (launch,) = f.plan.main.launches  # type: ignore[attr-defined]
        assert launch.kernel.kind == "matmul" and launch.kernel.layout.storage is storage


INT_WEIGHTS = {
    "int8/32": ((64, 48), "i8", True, False), "int8a/16": ((64, 48), "i8", True, True),
    "int4/32": ((64, 24), "u8", True, False), "fp8e4m3": ((64, 48), "u8", False, False),
}  # fmt: skip


@pytest.mark.parametrize("where", ["reference", TARGETS[0]])
@pytest.mark.parametrize("scheme", INT_WEIGHTS)
def test_weights_with_scales_of_their_own(scheme: str, where: str) -> None:
    """Numbers once, when weights are set: a run is one matmul. A module builds it as a graph does."""
    shape, kind, has_scale, has_zp = INT_WEIGHTS[scheme]
    block = int(scheme.partition("/")[2]) if has_scale else 1
    module = rlx.GraphModule.hir("product")
    x, w = module.input("x", ("m", 64)), module.param("w", shape, kind)
    scale = module.param("scale", (64 // block, 48)) if has_scale else None
    zp = module.param("zp", (64 // block, 48)) if has_zp else None
    module.set_outputs([module.dequant_matmul(x, w, scale, zp, scheme=QuantScheme(scheme)).relu()])
    f = rlx.compile(module, "reference") if where == "reference" else rlx.compile(module, target=where)
    low, high = (0, 120) if scheme == "fp8e4m3" else (-128, 128) if kind == "i8" else (0, 256)
    params: dict[str, Array] = {"w": rng.integers(low, high, shape).astype(rlx.dtype(kind).numpy)}
    if has_scale:
        params["scale"] = rng.uniform(0.01, 0.1, (64 // block, 48)).astype(np.float32)
    if has_zp:
        params["zp"] = rng.uniform(-3, 3, (64 // block, 48)).astype(np.float32)
    f.set_params(params)
    a = rng.normal(size=(3, 64)).astype(np.float32)
    exact = np.maximum(ORACLES["dequant_matmul"](*map(wide, (a, params["w"])), *_wide(params), scheme=scheme), 0)
    assert np.abs(f.run({"x": a})[0] - exact).max() <= 2e-6 * np.abs(exact).max()
    if where != "reference":
        assert [launch.kernel.kind for launch in f.plan.main.launches] == ["matmul"]  # type: ignore[attr-defined]


def _wide(params: dict[str, Array]) -> list[Array | None]:
    return [wide(params[name]) if name in params else None for name in ("scale", "zp")]


def test_bytes_in_one_row_are_a_weight() -> None:
    g = rlx.Graph("flat")
    x, w, s = g.input("x", (2, 32)), g.param("w", (32 * 6 // 2,), "u8"), g.param("s", (1, 6))
    y = g.dequant_matmul(x, w, s, scheme=QuantScheme.INT4_BLOCK(32))
    assert y.shape == (2, 6)


def test_a_weight_of_integers_seen_from_the_other_side() -> None:
    """x @ dequantise(w).mT with scales is not what the packed kernels take."""
    g = rlx.Graph("t")
    x, w = g.input("x", (2, 6)), g.param("w", (9, 6), "i8")
    g.set_outputs([x @ w.dequantise(g.param("s", (9,)), axis=0).mT])
    f = rlx.compile(g)
    stored, s = rng.integers(-128, 128, (9, 6)).astype(np.int8), rng.uniform(0.1, 1, 9).astype(np.float32)
    f.set_params({"w": stored, "s": s})
    a = rng.normal(size=(2, 6)).astype(np.float32)
    exact = a.astype(np.float64) @ (stored * s[:, None].astype(np.float64)).T
    assert np.abs(f.run({"x": a})[0] - exact).max() <= 2e-6 * np.abs(exact).max()


@pytest.mark.parametrize("where", ["reference", TARGETS[0]])
@pytest.mark.parametrize("scheme", ["gguf_q4k", "int8/64"])
def test_narrow_precision_leaves_quantised_weights_alone(scheme: str, where: str) -> None:
    """Scales rounded to bf16 would be wrong by up to 2^-9; x and the result are rounded, the weight is not."""
    g = rlx.Graph("g")
    x = g.input("x", ("m", 256))
    packed_ = scheme.startswith("gguf")
    w = g.param("w", (70, 256), "q4_k") if packed_ else g.param("w", (256, 70), "i8")
    s = None if packed_ else g.param("s", (4, 70))
    g.set_outputs([g.dequant_matmul(x, w, s, scheme=scheme)])
    f = compiled(g, where, profile=CompileProfile(precision=Precision("bf16")))
    a = np.eye(256, dtype=np.float32)[:9]  # one weight each: sums would hide what is rounded
    params = (
        {"w": blocks(rlx.dtype("q4_k"), 70, 256)}
        if packed_
        else {"w": rng.integers(-128, 128, (256, 70)).astype(np.int8)}
    )
    if not packed_:
        params["s"] = np.full((4, 70), 1 + 2**-9, np.float32)
    f.set_params(params)
    exact = numbers(params["w"]).T[:9] if packed_ else (params["w"][:9] * params["s"][:1])
    np.testing.assert_array_equal(f.run({"x": a})[0], exact.astype(ml_dtypes.bfloat16).astype(np.float32))


# -- errors ----------------------------------------------------------------------------------------------------------
def test_there_is_no_arithmetic_on_blocks() -> None:
    g = rlx.Graph("g")
    w, x = g.param("w", (2, 32), "q8_0"), g.input("x", (2, 32))
    for build in (lambda: w + 1, lambda: x * w, lambda: w.exp(), lambda: x.mT @ w, lambda: w.mT, lambda: w.sum()):
        with pytest.raises(DTypeError, match="packed") as caught:
            build()
        assert "dequantise" in str(caught.value.hint)
    with pytest.raises(DTypeError, match=r"dequantise: takes packed blocks, i8 or u8, found f32\[2, 32\]"):
        x.dequantise()


def test_rows_are_whole_blocks() -> None:
    with pytest.raises(ShapeError, match=r"q4_k\[4, 128\]: its rows are not whole blocks of 256"):
        rlx.Graph("g").param("w", (4, 128), "q4_k")
    with pytest.raises(ShapeError, match="not whole blocks"):
        rlx.Graph("g").param("w", (4, "k"), "q4_0")


def test_wrong_bytes_are_refused() -> None:
    g = rlx.Graph("g")
    g.set_outputs([g.param("w", (2, 32), "q8_0").dequantise()])
    f = rlx.compile(g)
    with pytest.raises(BindError, match="not whole blocks of 34"):
        f.set_param("w", np.zeros((2, 33), np.uint8))
    with pytest.raises(BindError, match=r"shape is \[2, 2\]"):
        f.set_param("w", np.zeros((2, 68), np.uint8))
    with pytest.raises(BindError, match="element type is f32, expected q8_0"):
        f.set_param("w", np.zeros((2, 32), np.float32))


def test_params_that_cannot_hold_a_scheme() -> None:
    g = rlx.Graph("g")
    x = g.input("x", (2, 128))
    with pytest.raises(ShapeError, match=r"dequant_matmul: k is 128, not whole blocks of 256 \(gguf_q4k\)"):
        g.dequant_matmul(x, g.param("a", (64, 128)), scheme=QuantScheme.GGUF_Q4K)
    with pytest.raises(ShapeError, match=r"w is f32\[64, 96\], expected \[n, 128\], or u8\[n, 136\]"):
        g.dequant_matmul(x, g.param("b", (64, 96)), scheme=QuantScheme.GGUF_Q8_0)
    with pytest.raises(DTypeError, match=r"w is f32\[2, 128\], expected q8_0\[n, k\] or a param"):
        g.dequant_matmul(x, x, scheme=QuantScheme.GGUF_Q8_0)
    c = g.param("c", (64, 128))
    used = c + 1
    with pytest.raises(DTypeError, match=rf"'c' is f32\[64, 128\] to %{used.node.id} add, it cannot be q8_0") as caught:
        g.dequant_matmul(x, c, scheme=QuantScheme.GGUF_Q8_0)
    assert "g.param('c', (n, 128), 'q8_0')" in str(caught.value.hint)
    d = g.param("d", (64, 128))
    g.dequant_matmul(x, d, scheme=QuantScheme.GGUF_Q8_0)
    g.dequant_matmul(x, d, scheme=QuantScheme.GGUF_Q8_0)
    with pytest.raises(DTypeError, match=r"gguf_q4_0 is stored as q4_0\[n, k\], found q8_0\[64, 128\]"):
        g.dequant_matmul(x, d, scheme=QuantScheme.GGUF_Q4_0)
    with pytest.raises(ShapeError, match=r"w is u8\[100\], not 128 rows of bytes"):
        g.dequant_matmul(x, g.param("e", (100,), "u8"), g.param("s", (4, 2)), scheme="int4/32")
    with pytest.raises(GraphError, match="quantise: has a zp, but no scale"):
        x.quantise(zp=3)


# -- a second opinion -------------------------------------------------------------------------------------------------
@pytest.mark.parity
@PLACES
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")  # they are deprecated, and still the oracle
def test_torch_quantises_the_same(where: str) -> None:
    """Scales are powers of two: torch multiplies by 1 / scale, which is not always the quotient."""
    torch = pytest.importorskip("torch")
    x = rng.normal(size=(6, 40)).astype(np.float32) * 3
    ours = run(where, lambda x: x.quantise(2**-5, 7), x)
    theirs = torch.quantize_per_tensor(torch.tensor(x), 2**-5, 7, torch.qint8)
    np.testing.assert_array_equal(ours, theirs.int_repr().numpy())
    np.testing.assert_array_equal(run(where, lambda q: q.dequantise(2**-5, 7), ours), theirs.dequantize().numpy())
    scales = 2.0 ** -rng.integers(3, 7, 6)
    zeros = rng.integers(0, 20, 6)
    theirs = torch.quantize_per_channel(torch.tensor(x), torch.tensor(scales), torch.tensor(zeros), 0, torch.quint8)
    s, z = scales.astype(np.float32), zeros.astype(np.int32)
    ours = run(where, lambda x, s, z: x.quantise(s, z, axis=0, dtype="u8"), x, s, z)
    np.testing.assert_array_equal(ours, theirs.int_repr().numpy())
    actual = run(where, lambda q, s, z: q.dequantise(s, z, axis=0), ours, s, z)
    np.testing.assert_array_equal(actual, theirs.dequantize().numpy())


@pytest.mark.parity
@PLACES
def test_torch_fakes_the_same(where: str) -> None:
    torch = pytest.importorskip("torch")
    x = rng.uniform(-3.9, 3.9, (6, 40)).astype(np.float32)
    x.flat[0] = 127 * 2**-5  # the largest, so that the scale is a power of two
    theirs = torch.fake_quantize_per_tensor_affine(torch.tensor(x), 2**-5, 0, -127, 127).numpy()
    np.testing.assert_array_equal(run(where, lambda x: x.fake_quantise(), x), theirs)


@pytest.mark.parity
@PLACES
@pytest.mark.parametrize(("scheme", "theirs"), [("fp8e4m3", "float8_e4m3fn"), ("fp8e5m2", "float8_e5m2")])
def test_torch_reads_the_same_eight_bit_floats(scheme: str, theirs: str, where: str) -> None:
    torch = pytest.importorskip("torch")
    every = np.arange(256, dtype=np.uint8).reshape(1, 256)
    wanted = torch.tensor(every).view(getattr(torch, theirs)).float().numpy()
    np.testing.assert_array_equal(run(where, lambda x: x.dequantise(scheme=scheme), every), wanted)


def test_unsigned_integers_have_no_scale_that_is_found() -> None:
    g = rlx.Graph("u8")
    with pytest.raises(GraphError, match="u8 needs a scale and a zp"):
        g.quantise(g.input("x", (3,)), dtype="u8")


@pytest.mark.parametrize("axis", [None, 1])
def test_nothing_has_a_scale_on_both_devices(axis: int | None) -> None:
    g = rlx.Graph("empty")
    x = g.input("x", (0, 3))
    g.set_outputs([g.quant_scale(x, axis=axis), g.fake_quantise(x, axis=axis)])
    for device in ("reference", "cpu"):
        scale, same = rlx.compile(g, device).run({"x": np.zeros((0, 3), np.float32)})
        np.testing.assert_array_equal(scale, np.full(() if axis is None else (3,), 1e-12, np.float32))
        assert same.shape == (0, 3)

"""Packed weights: numbers to the bit as the `gguf` package reads them, and matmuls that read blocks where they lie."""

from __future__ import annotations

import numpy as np
import pytest
from oracles import ORACLES, Array

import rlx
from rlx.dtypes import PACKED, DType
from rlx.errors import BindError, DTypeError, ShapeError
from rlx.ir.registry import packed
from rlx.target import supported

TARGETS = [t.name for t in supported()]
EVERY_TYPE = pytest.mark.parametrize("storage", PACKED, ids=str)
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
    (found,) = f.run()
    np.testing.assert_array_equal(found, numbers(x))


def test_infinite_and_nan_scales_come_out_as_they_are() -> None:
    x = blocks(PACKED[1], 3, 32)
    x["d"][:, 0] = np.array([np.inf, -np.inf, np.nan], np.float16)
    g = rlx.Graph("unpack")
    g.set_outputs([g.param("w", (3, 32), "q4_1").dequantise()])
    f = rlx.compile(g)
    f.set_param("w", x)
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(f.run()[0], numbers(x))


@EVERY_TYPE
@pytest.mark.parametrize("target", TARGETS)
def test_a_matmul_unpacks_on_the_way(storage: DType, target: str) -> None:
    """Right against float64, one kernel, weights in as many bytes as the file has, bits that do not depend on m."""
    n, k = 100, 3 * storage.block if storage.block == 32 else 2 * storage.block
    g = rlx.Graph("product")
    w, x = g.param("w", (n, k), storage), g.input("x", ("m", k))
    g.set_outputs([x @ w.dequantise().mT])
    f = rlx.compile(g, target=target)
    stored = blocks(storage, n, k)
    f.set_param("w", stored)
    a = rng.normal(size=(200, k)).astype(np.float32)
    (found,) = f.run({"x": a})
    exact = a.astype(np.float64) @ numbers(stored).astype(np.float64).T
    assert np.abs(found - exact).max() <= 2e-6 * np.abs(exact).max()
    for m in (1, 2, 5, 6, 7, 13, 199):
        np.testing.assert_array_equal(f.run({"x": a[3 : 3 + m]})[0], found[3 : 3 + m][:m])
    plan = f.plan  # type: ignore[attr-defined]
    assert len(plan.main.launches) == 1
    (panels,) = (plan.main.buffers[name].type for name in plan.main.weights)
    width = panels.shape[-1]
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
        for found, w in zip(f.run({"x": a}), stored.values(), strict=True):
            exact = a.astype(np.float64) @ numbers(w).T
            assert np.abs(found - exact).max() <= 2e-6 * np.abs(exact).max()


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
    for found in f.run({"at": picked}):
        np.testing.assert_array_equal(found, numbers(stored)[picked])
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
    with pytest.raises(BindError, match="element type is f32, wanted q8_0"):
        f.set_param("w", np.zeros((2, 32), np.float32))

"""Reductions whose kept axis is contiguous: blocks of whole rows, then what the blocks came to; against NumPy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import rlx
from rlx.lir.forms.reduce import BLOCK, LONG, STRIP
from rlx.transforms import vjp

Array = np.ndarray[Any, Any]
OPS = ["sum", "mean", "prod", "max", "min"]


def block(columns: int) -> int:
    """The rows of a block: short rows are taken together."""
    return BLOCK * max(1, -(-LONG // columns))


def columns_of(op: str, shape: tuple[int | str, ...], dtype: str = "f32", threads: int = 1, **attrs: Any) -> Any:
    g = rlx.Graph("columns")
    g.set_outputs([getattr(g.input("x", shape, dtype), op)(**{"axis": -2} | attrs)])
    return rlx.compile(g, threads=threads)


def near_one(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).uniform(0.99, 1.01, shape).astype(np.float32)


# -- what comes out ---------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("columns", [1, 15, 64, 100, 768, STRIP + 904])
@pytest.mark.parametrize("op", OPS)
def test_columns_are_those_of_numpy_in_f64(op: str, columns: int) -> None:
    compiled, size = columns_of(op, ("rows", columns)), block(columns)
    for rows in (1, 7, 8, 9, size - 1, size, size + 1, 3 * size + 9):
        x = near_one(rows, columns, seed=rows)
        (actual,) = compiled.run({"x": x})
        np.testing.assert_allclose(actual, getattr(np, op)(x.astype(np.float64), axis=0), rtol=2e-5)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", [("rows", "columns"), ("batch", "rows", "columns"), (3, "rows", 40), (3, 2000, 40)])
def test_any_size_may_wait_for_run_time(shape: tuple[int | str, ...], threads: int) -> None:
    compiled = columns_of("sum", shape, threads=threads)
    for columns in (40,) if shape[-1] == 40 else (0, 1, 40, 2 * STRIP + 1):
        for rows in (2000,) if shape[-2] == 2000 else (0, 5, 2 * BLOCK + 3):
            x = near_one(*(3,) * (len(shape) - 2), rows, columns)
            (actual,) = compiled.run({"x": x})
            np.testing.assert_allclose(actual, x.astype(np.float64).sum(axis=-2), rtol=2e-6)


def transposed(x: Any, *axes: int) -> Any:
    return x.transpose(axes) if isinstance(x, np.ndarray) else x.transpose(axes=axes)


VIEWS: dict[str, tuple[Callable[[Any], Any], int | tuple[int, ...]]] = {  # of [4, 90, 200]; the axes to reduce
    "leading axes": (lambda x: x, (0, 1)),
    "both ends kept": (lambda x: x, 1),
    "two axes with gaps": (lambda x: x[:, 5:80], (0, 1)),
    "columns with gaps": (lambda x: x[:, :, 7:150], 1),
    "every third row": (lambda x: x[:, ::3], 1),
    "other order": (lambda x: transposed(x, 1, 0, 2), 0),
    "kept axes in other order": (lambda x: transposed(x, 2, 1, 0), 1),
    "transposed": (lambda x: x.mT, 2),
}


@pytest.mark.parametrize("keepdims", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_views_are_read_where_they_are(name: str, keepdims: bool) -> None:
    view, axis = VIEWS[name]
    x = near_one(4, 90, 200)
    g = rlx.Graph("view")
    value = view(g.input("x", ("batch", 90, 200)))
    g.set_outputs([value.sum(axis=axis, keepdims=keepdims), value.max(axis=axis, keepdims=keepdims)])
    total, top = rlx.compile(g).run({"x": x})
    wanted = view(x)
    np.testing.assert_allclose(total, wanted.astype(np.float64).sum(axis=axis, keepdims=keepdims), rtol=2e-6)
    np.testing.assert_array_equal(top, wanted.max(axis=axis, keepdims=keepdims))


# -- types and special numbers ----------------------------------------------------------------------------------------
@pytest.mark.parametrize("dtype", ["i8", "u8", "i16", "i32", "u32", "i64"])
@pytest.mark.parametrize("op", ["sum", "prod", "max", "min"])
def test_whole_numbers_wrap_as_those_of_numpy(op: str, dtype: str) -> None:
    kind = np.dtype({"i": "int", "u": "uint"}[dtype[0]] + dtype[1:])
    x = np.random.default_rng(0).integers(np.iinfo(kind).min, np.iinfo(kind).max, (1500, 70), kind, endpoint=True)
    (actual,) = columns_of(op, ("rows", 70), dtype).run({"x": x})
    wanted = getattr(np, op)(x, axis=0, **({"dtype": kind} if op in ("sum", "prod") else {}))
    np.testing.assert_array_equal(actual, wanted)


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f64"])
def test_floats_are_rounded_once(op: str, dtype: str) -> None:
    kind = np.dtype({"f16": np.float16, "bf16": ml_dtypes.bfloat16, "f64": np.float64}[dtype])
    x = near_one(3000, 70).astype(kind)
    (actual,) = columns_of(op, ("rows", 70), dtype).run({"x": x})
    wanted = getattr(np, op)(x.astype(np.float64), axis=0)
    half_step = {"f16": 2**-11, "bf16": 2**-8, "f64": 0}[dtype]
    np.testing.assert_allclose(actual.astype(np.float64), wanted, rtol=half_step + (1e-12 if dtype == "f64" else 2e-5))


@pytest.mark.parametrize("op", OPS)
def test_no_number_is_found_wherever_it_is(op: str) -> None:
    rows = 2 * block(768) + 11
    compiled = columns_of(op, ("rows", 768))
    for row in (0, block(768), 2 * block(768), rows - 1):
        x = near_one(rows, 768)
        x[row, 5:700:5] = np.nan
        (actual,) = compiled.run({"x": x})
        np.testing.assert_array_equal(np.isnan(actual), np.isnan(x[row]))


@pytest.mark.parametrize("dtype", ["f32", "f16"])
@pytest.mark.parametrize(
    ("op", "wanted"), [("sum", 0), ("prod", 1), ("mean", np.nan), ("max", -np.inf), ("min", np.inf)]
)
def test_no_rows_give_what_nothing_comes_to(op: str, wanted: float, dtype: str) -> None:
    x = np.empty((0, 256), np.float32 if dtype == "f32" else np.float16)
    (actual,) = columns_of(op, ("rows", 256), dtype).run({"x": x})
    np.testing.assert_array_equal(actual, np.full(256, wanted))


def test_long_columns_lose_little() -> None:
    x = np.full((300_000, 16), 0.1, np.float32)
    (actual,) = columns_of("sum", ("rows", 16)).run({"x": x})
    one_by_one = np.add.accumulate(x[:, 0])[-1]
    exact = x[:, 0].astype(np.float64).sum()
    assert abs(one_by_one - exact) > 10 * abs(actual - exact).max()


# -- how it is done ---------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("many_cores")
@pytest.mark.parametrize("shape", [("rows", 768), ("rows", 5000), ("rows", "columns"), (2, "rows", 96), (1500, 1000)])
@pytest.mark.parametrize("op", ["sum", "mean", "prod"])
def test_bits_do_not_depend_on_threads(op: str, shape: tuple[int | str, ...]) -> None:
    sizes = {"rows": 1007, "columns": 5003}
    actual = [d if isinstance(d, int) else sizes[d] for d in shape]
    x = np.random.default_rng(3).standard_normal(actual, dtype=np.float32)
    results = [columns_of(op, shape, threads=n).run({"x": x})[0].tobytes() for n in (1, 2, 3)]
    assert results[0] == results[1] == results[2]


def launches(compiled: Any) -> list[tuple[str, str]]:
    """The kernel of each launch, and over how many units it is split."""
    return [(x.kernel.name, str(x.units)) for x in compiled.plan.main.launches]


@pytest.mark.parametrize(("columns", "rows"), [(1024, 3 * BLOCK + 5), (40, 2 * block(40) + 9)])
def test_padding_in_a_batch_changes_no_bit(columns: int, rows: int) -> None:
    """A text is as long as the longest of its batch: zeros follow where it ends."""
    compiled, x = columns_of("sum", ("batch", "rows", columns)), near_one(2, rows, columns)
    for n in (1, BLOCK + 1, rows // 2, rows):
        (alone,), padded = compiled.run({"x": x[:1, :n]}), x.copy()
        padded[0, n:] = 0
        assert compiled.run({"x": padded})[0][0].tobytes() == alone.tobytes()


def test_few_rows_are_one_launch() -> None:
    for rows in (0, 5, 2 * block(384) - 1):
        assert launches(columns_of("sum", (rows, 384))) == [("sum", "2")]  # two strips of columns


def test_matrices_of_a_batch_are_one_launch() -> None:
    assert launches(columns_of("sum", (8, 2 * BLOCK, 2 * LONG))) == [("sum", str(8 * 2))]
    assert launches(columns_of("mean", (6, 9 * BLOCK, 40), "f16")) == [("mean", "6")]


def test_many_rows_are_blocks_and_what_they_came_to() -> None:
    assert launches(columns_of("max", (7 * block(384) + 1, 384))) == [("max_blocks", "7"), ("max", "2")]
    assert launches(columns_of("sum", (2 * BLOCK, 2 * STRIP))) == [("sum_blocks", "4"), ("sum", "32")]
    assert launches(columns_of("mean", (2 * BLOCK, LONG), "f16")) == [("mean_blocks", "2"), ("mean", "4")]
    blocks = f"((rows) // ({block(100)}))"
    assert launches(columns_of("sum", ("rows", 100))) == [("sum_blocks", blocks), ("sum", "1")]


def test_sums_of_any_width_share_kernels() -> None:
    g = rlx.Graph("widths")
    g.set_outputs([g.input(f"x{n}", (f"r{n}", n)).sum(axis=0) for n in (96, 384, 768, 5000)])
    assert len(rlx.compile(g).plan.main.kernels()) == 2  # type: ignore[attr-defined]


# -- gradients of norms -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("kind", ["layer", "rms"])
@pytest.mark.parametrize("shape", [(3, 2 * block(96) // 3 + 7, 96), (70, LONG + 6)], ids=str)
def test_scales_of_norms_have_gradients_over_many_rows(kind: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    x, dy = (rng.standard_normal(shape, dtype=np.float32) for _ in range(2))
    g = rlx.Graph("norm")
    operands = [g.input("x", ("batch", *shape[1:])), *(g.input(n, shape[-1:]) for n in ("gamma", "beta"))]
    g.set_outputs([g.one(f"{kind}_norm", *operands, eps=0.1)])
    ones = np.ones(shape[-1], np.float32)
    arrays = {"x": x, "gamma": ones, "beta": ones, "d_output": dy}
    back = vjp(g, ["gamma", "beta"])
    (_, *actual), (_, *again) = (rlx.compile(back, threads=n).run(arrays) for n in (1, 2))
    wide, slope = x.astype(np.float64), dy.astype(np.float64)
    centred = wide - wide.mean(axis=-1, keepdims=True) if kind == "layer" else wide
    normal = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + 0.1)
    rows = tuple(range(len(shape) - 1))
    for i, wanted in enumerate(((slope * normal).sum(axis=rows), slope.sum(axis=rows))):
        np.testing.assert_allclose(actual[i], wanted, atol=1e-4)
        assert actual[i].tobytes() == again[i].tobytes()

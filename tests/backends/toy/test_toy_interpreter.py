"""The interpreter and the meanings of scalar operations, on kernels written by hand: against NumPy."""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from rlx.backends.toy import interpreter
from rlx.dtypes import BF16, F32, F64, I8, I16, I32, I64, U8, U32, DType
from rlx.dtypes import dtype as dtype_of
from rlx.lir.loops import (
    SCALAR_OPS,
    Apply,
    Arg,
    Assign,
    Check,
    Choose,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    Lookup,
    LoopKernel,
    Param,
    Reduce,
    Ref,
    Stmt,
    Store,
    Table,
    Var,
)
from rlx.lir.scalar_meanings import MEANINGS

Array = np.ndarray[Any, Any]
U, J = Index("u"), Index("j")


def launch(
    params: tuple[Param, ...], body: tuple[Stmt, ...], arrays: list[Array], units: int, **args: int
) -> list[int]:
    """Run a kernel over so many units; gives the faults."""
    kernel = LoopKernel("by_hand", params, tuple(args), For("u", Arg("n"), body))
    faults: list[int] = []
    with np.errstate(all="ignore"):
        interpreter.run(kernel, units, [(a.reshape(-1), 0) for a in arrays], list(args.values()), faults)
    return faults


def computed(expr: Expr, dtype: DType, *arrays: Array) -> Array:
    """An expression of the elements of flat arrays (parameters 0, 1, ...), element by element."""
    result = np.zeros(len(arrays[0]), dtype.numpy)
    params = [Param(f"x{i}", dtype_of(a.dtype)) for i, a in enumerate(arrays)]
    store = Store(len(arrays), ((U, 1),), expr)
    assert not launch((*params, Param("y", dtype, True)), (store,), [*arrays, result], len(result), n=len(result))
    return result


def element(param: int, dtype: DType) -> Load:
    return Load(param, ((U, 1),), dtype)


# -- loops ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("vector", [False, True])
def test_a_loop_that_ends_where_data_says_touches_nothing_beyond(vector: bool) -> None:
    n, at = 5, Ref("t_", I64)
    y = np.zeros((n, n), np.float32)
    inside: tuple[Stmt, ...] = (
        Let("t_", J),
        Check(at <= U, 7),
        Store(0, ((U, Arg("n")), (at, 1)), Const(1.0, F32)),
    )
    body = (Let("count", U + 1), For("j", Ref("count", I64), inside, vector))
    assert not launch((Param("y", F32, True),), body, [y], n, n=n)
    assert np.array_equal(y, np.tri(n, dtype=np.float32))


@pytest.mark.parametrize("vector", [False, True])
def test_a_check_counts_only_where_the_loop_runs(vector: bool) -> None:
    body = (Let("count", U + 1), For("j", Ref("count", I64), (Check(J < 3, 9),), vector))
    assert launch((), body, [], 3, n=3) == [] and launch((), body, [], 4, n=4) == [9]


def test_variables_are_carried_by_each_unit_for_itself() -> None:
    total, x, y = Ref("total", F32), np.arange(1, 7, dtype=np.float32), np.zeros(6, np.float32)
    body = (
        Var("total", Const(0.0, F32)),
        Let("count", U + 1),
        For("j", Ref("count", I64), (Let("before", total), Assign("total", total * 2.0 + Load(0, ((J, 1),), F32)),
                                     Store(1, ((U, 1),), Ref("before", F32) * 10.0 + total))),
    )  # fmt: skip
    launch((Param("x", F32), Param("y", F32, True)), body, [x, y], 6, n=6)
    for unit in range(6):
        before = after = 0.0
        for value in x[: unit + 1]:
            before, after = after, after * 2 + value
        assert y[unit] == before * 10 + after


def test_a_side_that_is_not_taken_is_not_loaded() -> None:
    x, y = np.arange(3, dtype=np.float32), np.zeros(6, np.float32)
    beyond = Choose(U < 3, Load(0, ((U, 1),), F32), Const(-1.0, F32))
    launch((Param("x", F32), Param("y", F32, True)), (Store(1, ((U, 1),), beyond),), [x, y], 6, n=6)
    assert y.tolist() == [0, 1, 2, -1, -1, -1]
    launch((Param("x", F32), Param("y", F32, True)), (Store(1, ((U, 1),), beyond),), [x[:0], y[3:]], 0, n=3)


@pytest.mark.parametrize("op", ["sum", "max", "min", "prod"])
@pytest.mark.parametrize("extent", [0, 1, 31, 32, 33, 100])
def test_a_reduction_of_any_extent(op: str, extent: int) -> None:
    x, y = np.random.default_rng(extent).uniform(0.9, 1.1, (3, 100)), np.zeros(3)
    value = Load(0, ((U, 100), (J, 1)), F64)
    body = (Store(1, ((U, 1),), Reduce(op, "j", Arg("extent"), value)),)
    launch((Param("x", F64), Param("y", F64, True)), body, [x, y], 3, n=3, extent=extent)
    start = {"sum": 0.0, "prod": 1.0, "max": -np.inf, "min": np.inf}[op]
    np.testing.assert_allclose(y, getattr(np, op)(x[:, :extent], axis=1, initial=start), rtol=1e-13)


def test_zeros_at_the_end_of_a_sum_change_no_bit() -> None:
    x = np.random.default_rng(1).standard_normal(70).astype(np.float32)
    total = Reduce("sum", "j", Arg("n"), Load(0, ((J, 1),), F32))
    sums = np.zeros(3, np.float32)
    for i, n in enumerate((70, 96, 200)):
        params, store = (Param("x", F32), Param("y", F32, True)), Store(1, ((U, 1),), total)
        launch(params, (store,), [np.pad(x, (0, n - 70)), sums[i : i + 1]], 1, n=n)
    assert sums[0] == sums[1] == sums[2] != 0


def test_a_name_inside_a_loop_hides_one_outside() -> None:
    y, value = np.zeros(4, np.float32), Ref("v", F32)
    inner = (Let("v", Const(2.0, F32)), Store(0, ((U, 2),), value))
    body = (Let("v", Const(1.0, F32)), For("j", 3, inner), Store(0, ((U, 2), (Const(1, I64), 1)), value))
    launch((Param("y", F32, True),), body, [y], 2, n=2)
    assert y.tolist() == [2, 1, 2, 1]


# -- scalars ----------------------------------------------------------------------------------------------------------
def test_every_scalar_operation_has_a_meaning() -> None:
    assert set(MEANINGS) == set(SCALAR_OPS) - {"cast"}


def test_integers_wrap_and_shift_as_signed_numbers() -> None:
    x = np.array([-128, -1, 0, 1, 127], np.int8)
    assert computed(element(0, I8) + element(0, I8), I8, x).tolist() == [0, -2, 0, 2, -2]
    assert computed(-element(0, I8), I8, x).tolist() == [-128, 1, 0, -1, -127]
    assert computed(element(0, I8) >> 1, I8, x).tolist() == [-64, -1, 0, 0, 63]
    assert computed(element(0, I8).cast(U8), U8, x).tolist() == [128, 255, 0, 1, 127]
    zero = np.zeros(5, np.int8)
    assert computed(Apply("floordiv", (element(0, I8), element(1, I8)), I8), I8, x, zero).tolist() == [0] * 5
    assert computed(Apply("mod", (element(0, I8), Const(3, I8)), I8), I8, x).tolist() == (x % 3).tolist()


@pytest.mark.parametrize("want", [I8, U8, I16, I32, U32, I64], ids=str)
@pytest.mark.parametrize("have", [F32, F64], ids=str)
def test_floats_saturate_as_integers(have: DType, want: DType) -> None:
    limits = np.iinfo(want.numpy)
    x = np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 2.9, -2.9, 0.0, float(limits.max)], have.numpy)
    result = computed(element(0, have).cast(want), want, x)
    wanted = [0, limits.max, limits.min, limits.max, limits.min, 2, max(-2, limits.min), 0, limits.max]
    assert result.tolist() == wanted


def test_a_wide_float_is_rounded_once() -> None:
    """1 + 2^-8 + 2^-40 lies above the middle of two bf16 numbers, but its f32 is the middle."""
    x = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, 1 + 2.0**-8 - 2.0**-40, -1 - 2.0**-8 - 2.0**-40, np.inf, np.nan])
    result = computed(element(0, F64).cast(BF16), BF16, x).astype(np.float64)
    assert result[:5].tolist() == [1 + 2.0**-7, 1, 1, -1 - 2.0**-7, np.inf] and np.isnan(result[5])


def test_functions_of_bits() -> None:
    x = np.array([-np.inf, -1.5, -0.0, 0.0, 2.5, np.inf, np.nan], np.float32)
    keys = computed(element(0, F32).order(), I32, x)
    assert (np.diff(keys) >= 0).all() and keys[2] == keys[3] == 0
    assert computed(element(0, F32).nearest(), I32, x[1:5]).tolist() == [-2, 0, 0, 2]
    assert computed(element(0, I32).bits(), F32, x.view(np.int32))[:6].tolist() == x[:6].tolist()
    assert computed(element(0, F32).bits(), I32, x).tolist() == x.view(np.int32).tolist()
    words = np.array([[255, 1, 2, 3], [1, 0, 0, 0]], np.uint8).view(np.int32)[:, 0]
    signed = np.array([[-1, 2, 3, -4], [5, 6, 7, 8]], np.int8).view(np.int32)[:, 0]
    for op in ("dot_u8", "dot_u7"):
        total = Apply(op, (Const(10, I32), element(0, I32), element(1, I32)), I32)
        assert computed(total, I32, words, signed).tolist() == [10 - 255 + 2 + 6 - 12, 10 + 5]
    table = Lookup(Table.of("squares", (0, 1, 4, 9)), element(0, I64))
    assert computed(table, I32, np.array([3, 0, 2])).tolist() == [9, 0, 4]


def test_gelu_keeps_its_digits_far_below_zero() -> None:
    x = np.array([-6.0, -3.0, 0.5], np.float32)
    wanted = [0.5 * float(v) * math.erfc(-float(v) / math.sqrt(2)) for v in x]
    np.testing.assert_allclose(computed(Apply("gelu", (element(0, F32),), F32), F32, x), wanted, rtol=1e-6)
    np.testing.assert_allclose(computed(Apply("erf", (element(0, F32),), F32), F32, x), [math.erf(v) for v in x])


def test_narrow_floats_are_loaded_and_stored_as_they_are() -> None:
    x = np.array([1.0, 3.140625, -2.5], ml_dtypes.bfloat16)
    assert computed(element(0, BF16).cast(F32) * 2.0, BF16, x).tolist() == (x * 2).tolist()

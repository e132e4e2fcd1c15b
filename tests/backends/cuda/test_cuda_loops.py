"""Loop kernels as CUDA C, on kernels written by hand: run on the host in every kind of variant, against NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from emulator import EmulatedGpu, emulated_gpu, launch, missing

from rlx.backends.cuda.loops.emitter import Variant
from rlx.backends.cuda.loops.generator import plan
from rlx.backends.cuda.targets import SM_90
from rlx.dtypes import BF16, F16, F32, F64, I8, I16, I32, I64, U8, U32, DType
from rlx.dtypes import dtype as dtype_of
from rlx.errors import LowerError
from rlx.lir.loops import (
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

Array = np.ndarray[Any, Any]
U, J, Q = Index("u"), Index("j"), Index("q")
N = Arg("n")
emulated = pytest.mark.skipif(bool(missing()), reason=missing())
ROWS = [Variant(1), Variant(4, narrow=True), Variant(32), Variant(64, narrow=True), Variant(1024)]


@pytest.fixture(scope="module")
def gpu() -> Iterator[EmulatedGpu]:
    with emulated_gpu() as gpu:
        yield gpu


@pytest.fixture(scope="module")
def backwards() -> Iterator[EmulatedGpu]:
    with emulated_gpu(backwards=True) as gpu:
        yield gpu


def kernel_of(body: tuple[Stmt, ...], params: tuple[Param, ...], *args: str) -> LoopKernel:
    return LoopKernel("by_hand", params, ("n", *args), For("u", N, body))


F32_PARAMS = (Param("x", F32), Param("y", F32, True))


def x_at(*at: tuple[Expr, int | Arg], dtype: DType = F32, param: int = 0) -> Load:
    return Load(param, at, dtype)


# -- threads of a unit ------------------------------------------------------------------------------------------------
@emulated
@pytest.mark.parametrize("variant", ROWS, ids=str)
@pytest.mark.parametrize("extent", [0, 1, 33, 4096])
def test_a_row_is_reduced_by_all_threads_of_its_unit(
    gpu: EmulatedGpu, backwards: EmulatedGpu, variant: Variant, extent: int
) -> None:
    rows = 3
    x = np.random.default_rng(extent).standard_normal((rows, extent)).astype(np.float32)
    total, top = Ref("total", F32), Ref("top", F32)
    value = x_at((U, Arg("extent")), (Q, 1))
    body: tuple[Stmt, ...] = (
        Let("top", Reduce("max", "q", Arg("extent"), value)),
        Let("total", Reduce("sum", "q", Arg("extent"), value)),
        For(
            "j", Arg("extent"), (Store(1, ((U, Arg("extent")), (J, 1)), x_at((U, Arg("extent")), (J, 1)) - top),), True
        ),
        Store(2, ((U, 1),), total),
    )
    kernel = kernel_of(body, (*F32_PARAMS, Param("z", F32, True)), "extent")
    results = []
    for device in (gpu, backwards):
        y, z = np.zeros_like(x), np.zeros(rows, np.float32)
        assert not launch(kernel, [x, y, z], {"n": rows, "extent": extent}, variant, device)
        results.append((y, z))
    y, z = results[0]
    np.testing.assert_array_equal(y, x - x.max(1, initial=-np.inf, keepdims=True))
    np.testing.assert_allclose(z, x.astype(np.float64).sum(1), rtol=1e-5, atol=1e-4)
    assert all(a.tobytes() == b.tobytes() for a, b in zip(*results, strict=True))


@emulated
@pytest.mark.parametrize("aliased", [False, True])
def test_threads_wait_for_what_others_wrote(gpu: EmulatedGpu, backwards: EmulatedGpu, aliased: bool) -> None:
    """A row is reversed twice through memory; then each element is the sum of its neighbours so far."""
    n = Arg("size")
    reversed_ = x_at((U, n), (n - 1 - J, 1), param=0)
    again = x_at((U, n), (n - 1 - J, 1), param=1)
    running = x_at((U, n), (Q, 1), param=2) + x_at((U, n), (Q + 1, 1), param=2)
    body: tuple[Stmt, ...] = (
        For("j", n, (Store(1, ((U, n), (J, 1)), reversed_),), True),
        For("j", n, (Store(2, ((U, n), (J, 1)), again),), True),
        Let("last", n - 1),
        For("q", Ref("last", I64), (Store(2, ((U, n), (Q + 1, 1)), running),)),
    )
    kernel = kernel_of(body, (Param("x", F32), Param("y", F32, True), Param("z", F32, True)), "size")
    x = np.arange(200, dtype=np.float32).reshape(2, 100)
    for device in (gpu, backwards):
        for lanes in (2, 32, 128):
            y, z = np.zeros_like(x), np.zeros_like(x)
            launch(kernel, [x, y, z], {"n": 2, "size": 100}, Variant(lanes, distinct=not aliased), device)
            np.testing.assert_array_equal(z, np.cumsum(x, 1))


@emulated
@pytest.mark.parametrize("variant", [Variant(0, pack, n) for pack in (1, 2, 8) for n in (False, True)], ids=str)
@pytest.mark.parametrize("offset", [0, 1])
def test_chunks_have_packs_and_a_tail(gpu: EmulatedGpu, variant: Variant, offset: int) -> None:
    kernel = LoopKernel(
        "twice", F32_PARAMS, ("n",), For("j", N, (Store(1, ((J, 1),), x_at((J, 1)) * 2.0),), True), 4096
    )
    x = np.arange(1005, dtype=np.float32)[offset:]
    y = np.full(1006, -1, np.float32)
    assert not launch(kernel, [x, y[offset:]], {"n": 1000}, variant, gpu)
    np.testing.assert_array_equal(y[offset : offset + 1000], x[:1000] * 2)
    assert (y[:offset] == -1).all() and (y[offset + 1000 :] == -1).all()


@emulated
def test_loops_that_depend_on_data_touch_nothing_beyond(gpu: EmulatedGpu) -> None:
    at = Ref("at", I64)
    inside: tuple[Stmt, ...] = (Let("at", J), Check(at <= U, 7), Store(0, ((U, N), (at, 1)), Const(1.0, F32)))
    body = (Let("count", U + 1), For("j", Ref("count", I64), inside, True), Check(U < 5, 9))
    kernel = kernel_of(body, (Param("y", F32, True),))
    for variant in ROWS:
        y = np.zeros((5, 5), np.float32)
        assert launch(kernel, [y], {"n": 5}, variant, gpu) == 0
        assert np.array_equal(y, np.tri(5, dtype=np.float32))
        assert launch(kernel, [np.zeros((6, 6), np.float32)], {"n": 6}, variant, gpu) == 9


@emulated
def test_variables_belong_to_a_unit(gpu: EmulatedGpu) -> None:
    total = Ref("total", F32)
    body = (
        Var("total", Const(0.0, F32)),
        Let("count", U + 1),
        For("j", Ref("count", I64), (Let("before", total), Assign("total", total * 2.0 + x_at((J, 1))),
                                     Store(1, ((U, 1),), Ref("before", F32) * 10.0 + total))),
    )  # fmt: skip
    x = np.arange(1, 7, dtype=np.float32)
    for variant in ROWS:
        y = np.zeros(6, np.float32)
        launch(kernel_of(body, F32_PARAMS), [x, y], {"n": 6}, variant, gpu)
        for unit in range(6):
            before = after = 0.0
            for value in x[: unit + 1]:
                before, after = after, after * 2 + value
            assert y[unit] == before * 10 + after


@emulated
def test_a_side_that_is_not_taken_is_not_loaded() -> None:
    beyond = Choose(U < 3, x_at((U, 1)), Const(-1.0, F32))
    body = (Store(1, ((U, 1),), beyond),)
    with emulated_gpu(guarded=True) as gpu:
        address = gpu.allocate(12)
        x = np.frombuffer((np.ctypeslib.ctypes.c_char * 12).from_address(address), np.float32)
        x[:] = [5, 6, 7]
        y = np.zeros(3000, np.float32)
        launch(kernel_of(body, F32_PARAMS), [x, y], {"n": 3000}, Variant(1), gpu)
        assert y[:4].tolist() == [5, 6, 7, -1] and (y[3:] == -1).all()


# -- scalars ----------------------------------------------------------------------------------------------------------
class Elements:
    """Expressions of the elements of flat arrays, computed together by one kernel."""

    def __init__(self) -> None:
        self.arrays: list[Array] = []
        self.params: list[Param] = []
        self.stores: list[tuple[Expr, DType]] = []

    def array(self, values: Array) -> Load:
        self.arrays.append(values)
        self.params.append(Param(f"x{len(self.params)}", dtype_of(values.dtype)))
        return Load(len(self.params) - 1, ((U, 1),), dtype_of(values.dtype))

    def computed(self, gpu: EmulatedGpu, *exprs: tuple[Expr, DType]) -> list[Array]:
        size = len(self.arrays[0])
        outputs = [np.zeros(size, dtype.numpy) for _, dtype in exprs]
        params = [Param(f"y{i}", dtype, True) for i, (_, dtype) in enumerate(exprs)]
        body = tuple(Store(len(self.params) + i, ((U, 1),), expr) for i, (expr, _) in enumerate(exprs))
        kernel = kernel_of(body, (*self.params, *params))
        for variant in (Variant(1), Variant(2, narrow=True)):
            assert not launch(kernel, [*self.arrays, *outputs], {"n": size}, variant, gpu)
        return outputs


@emulated
def test_integers_wrap_and_divisions_round_down(gpu: EmulatedGpu) -> None:
    table = Elements()
    x = table.array(np.array([-128, -1, 0, 1, 127], np.int8))
    zero = table.array(np.zeros(5, np.int8))
    wide = table.array(np.array([-(2**31), -7, 0, 7, 2**31 - 1], np.int32))
    large = table.array(np.array([-(2**63), -7, 0, 7, 2**63 - 1], np.int64))
    numbers = table.arrays
    three, minus = Const(3, I32), Const(-1, I64)
    with np.errstate(over="ignore"):
        exprs: list[tuple[Expr, DType, Any]] = [
            (x + x, I8, [0, -2, 0, 2, -2]),
            (-x, I8, [-128, 1, 0, -1, -127]),
            (abs(x), I8, [-128, 1, 0, 1, 127]),
            (x >> 1, I8, [-64, -1, 0, 0, 63]),
            (x.cast(U8), U8, [128, 255, 0, 1, 127]),
            (x // zero, I8, [0] * 5),
            (x % zero, I8, [0] * 5),
            (wide // three, I32, numbers[2] // 3),
            (wide % three, I32, numbers[2] % 3),
            (wide * wide, I32, numbers[2] * numbers[2]),
            (wide << 3, I32, numbers[2] << 3),
            (large // minus, I64, -numbers[3]),
            (large % minus, I64, [0] * 5),
            (large + 1, I64, numbers[3] + 1),
            (large.min(5).max(-5), I64, np.clip(numbers[3], -5, 5)),
            (wide.cast(F32), F32, numbers[2].astype(np.float32)),
            (large.cast(F64), F64, numbers[3].astype(np.float64)),
            (wide.cast(U32), U32, numbers[2].astype(np.uint32)),
        ]
    results = table.computed(gpu, *((e, d) for e, d, _ in exprs))
    for result, (expr, dtype, wanted) in zip(results, exprs, strict=True):
        np.testing.assert_array_equal(result, np.asarray(wanted, dtype.numpy), err_msg=str(expr))


@emulated
@pytest.mark.parametrize("have", [F32, F64], ids=str)
def test_floats_saturate_as_integers(gpu: EmulatedGpu, have: DType) -> None:
    table, kinds = Elements(), (I8, U8, I16, I32, U32, I64)
    x = table.array(np.array([np.nan, np.inf, -np.inf, 1e30, -1e30, 2.9, -2.9, 0.0, 2.0**31], have.numpy))
    for kind, result in zip(kinds, table.computed(gpu, *((x.cast(k), k) for k in kinds)), strict=True):
        low, high = np.iinfo(kind.numpy).min, np.iinfo(kind.numpy).max
        assert result.tolist() == [0, high, low, high, low, 2, max(-2, low), 0, min(2**31, high)]


@emulated
def test_narrow_floats_are_rounded_once(gpu: EmulatedGpu) -> None:
    """1 + 2^-8 + 2^-40 lies above the middle of two bf16 numbers, but its f32 is the middle."""
    table = Elements()
    values = np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-8, -1 - 2.0**-8 - 2.0**-40, 1e300, np.inf, np.nan, 65520.0])
    with np.errstate(over="ignore"):
        small = values[::-1].astype(ml_dtypes.bfloat16)
    x, narrow = table.array(values), table.array(small)
    bf16, f16, same, twice = table.computed(
        gpu, (x.cast(BF16), BF16), (x.cast(F16), F16), (narrow, BF16), (narrow.cast(F32) * 2.0, F32)
    )
    assert bf16.astype(float)[:5].tolist() == [1 + 2.0**-7, 1, -1 - 2.0**-7, np.inf, np.inf] and np.isnan(bf16[5])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(f16, values.astype(np.float16))
    np.testing.assert_array_equal(same.view(np.int16), small.view(np.int16))
    np.testing.assert_array_equal(twice, small.astype(np.float32) * 2)


@emulated
def test_functions_of_floats_and_bits(gpu: EmulatedGpu) -> None:
    table = Elements()
    values = np.array([-np.inf, -6.0, -1.5, -0.0, 0.0, 2.5, np.inf, np.nan], np.float32)
    x, bits = table.array(values), table.array(values.view(np.int32))
    words = np.array([[255, 1, 2, 3], [1, 0, 0, 0]] * 4, np.uint8).view(np.int32)[:, 0]
    signed = np.array([[-1, 2, 3, -4], [5, 6, 7, 8]] * 4, np.int8).view(np.int32)[:, 0]
    a, b = table.array(words), table.array(signed)
    squares = Lookup(Table.of("squares", (0, 1, 4, 9)), table.array(np.array([3, 0, 2, 1] * 2)))
    zero = Const(0.0, F32)
    order, nearest, same, back, dot, looked, gelu, top, least, pow_, sqrt = table.computed(
        gpu, (x.order(), I32), (x.nearest(), I32), (bits.bits(), F32), (x.bits(), I32),
        (Apply("dot_u8", (Const(10, I32), a, b), I32), I32), (squares, I32), (Apply("gelu", (x,), F32), F32),
        (x.max(zero), F32), (zero.min(x), F32), (Apply("pow", (abs(x), Const(0.5, F32)), F32), F32),
        (abs(x).sqrt(), F32),
    )  # fmt: skip
    assert (np.diff(order) >= 0).all() and order[3] == order[4] == 0
    assert nearest[1:6].tolist() == [-6, -2, 0, 0, 2] and looked.tolist() == [9, 0, 4, 1] * 2
    np.testing.assert_array_equal(same, values)
    np.testing.assert_array_equal(back, values.view(np.int32))
    assert dot.tolist() == [10 - 255 + 2 + 6 - 12, 10 + 5] * 4
    wanted = [0.5 * float(v) * math.erfc(-float(v) / math.sqrt(2)) for v in values[1:6]]
    np.testing.assert_allclose(gelu[1:6], wanted, rtol=1e-6)
    np.testing.assert_array_equal(top, np.maximum(values, 0))
    np.testing.assert_array_equal(least, np.minimum(values, 0))
    np.testing.assert_array_equal(sqrt, np.sqrt(np.abs(values)))
    np.testing.assert_allclose(pow_, np.sqrt(np.abs(values)), rtol=1e-6)


# -- plans ------------------------------------------------------------------------------------------------------------
def norm_kernel(dtype: DType) -> LoopKernel:
    row, extent = Arg("row"), Arg("extent")
    value = Load(0, ((U, row), (Q, 1)), dtype).cast(F32)
    element = Load(0, ((U, row), (J, 1)), dtype).cast(F32)
    body: tuple[Stmt, ...] = (
        Let("total", Reduce("sum", "q", extent, value * value)),
        For("j", extent, (Store(1, ((U, row), (J, 1)), element * Ref("total", F32)),), True),
    )
    return kernel_of(body, (Param("x", dtype), Param("y", dtype, True)), "row", "extent")


def planned(kernel: LoopKernel, **sizes: int) -> tuple[str, tuple[int, int, int], int]:
    words = {p.name: i + 1 for i, p in enumerate(kernel.params)} | sizes
    (one,) = plan(kernel, words, SM_90).passes
    return one.variant, one.grid, one.threads


def test_a_plan_depends_on_rows_and_not_on_their_number() -> None:
    kernel = norm_kernel(BF16)
    assert planned(kernel, n=1, row=4096, extent=4096) == ("rows_256_v8_n_d", (1, 1, 1), 256)
    assert planned(kernel, n=5000, row=4096, extent=4096) == ("rows_256_v8_n_d", (4224, 1, 1), 256)
    assert planned(kernel, n=64, row=128, extent=128) == ("rows_8_v8_n_d", (2, 1, 1), 256)
    assert planned(kernel, n=64, row=99, extent=99)[0] == "rows_64_v1_n_d"
    assert planned(kernel, n=2, row=10**6, extent=10**6)[0] == "rows_1024_v8_n_d"
    assert planned(norm_kernel(F32), n=2, row=4096, extent=4096)[0] == "rows_512_v4_n_d"


def test_a_launch_without_units_has_no_passes() -> None:
    kernel = norm_kernel(F32)
    assert plan(kernel, {"x": 1, "y": 2, "n": 0, "row": 4, "extent": 4}, SM_90).passes == ()


def test_indices_have_32_bits_where_all_offsets_fit() -> None:
    kernel = norm_kernel(F32)
    assert planned(kernel, n=2**20, row=2**11 - 4, extent=1024)[0].endswith("_n_d")
    assert planned(kernel, n=2**20, row=2**11 + 4, extent=1024)[0] == "rows_128_v4_d"


def test_operands_of_one_buffer_are_not_distinct() -> None:
    kernel = norm_kernel(F32)
    (one,) = plan(kernel, {"x": 1, "y": 1, "n": 2, "row": 256, "extent": 256}, SM_90).passes
    assert one.variant == "rows_32_v4_n"


def test_wide_elementwise_rows_are_split_over_blocks() -> None:
    row = For("j", Arg("extent"), (Store(1, ((U, Arg("row")), (J, 1)), x_at((U, Arg("row")), (J, 1)) * 2.0),), True)
    kernel = kernel_of((row,), F32_PARAMS, "row", "extent")
    assert planned(kernel, n=2, row=2**20, extent=2**20) == ("rows_256_v4_n_d", (2, 1024, 1), 256)
    assert planned(kernel, n=2**16, row=20, extent=20) == ("rows_8_v4_n_d", (2048, 1, 1), 256)
    assert planned(kernel, n=7, row=21, extent=20)[0] == "rows_32_v1_n_d"


def test_a_variant_has_one_name() -> None:
    for variant in (*ROWS, Variant(0, 8, True, True)):
        assert Variant.parse(str(variant)) == variant
    with pytest.raises(LowerError, match="no variant"):
        Variant.parse("rows_032_v1")

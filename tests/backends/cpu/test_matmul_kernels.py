"""Matmul kernels on every target that runs here: values, bits, bounds and the shape of the machine code."""

from __future__ import annotations

import ctypes
import functools
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import targets
from guarded import guarded, guarded_copy
from targets import AVX2, AVX512, BASELINE, NEON

from rlx.backends.cpu import matmul, toolchain
from rlx.backends.cpu.builder import Module
from rlx.backends.cpu.matmul.plan import ROW_BLOCK, SLAB, Plan
from rlx.backends.cpu.packing.panels import Panels
from rlx.backends.cpu.routine import HEADER_BYTES, Routine
from rlx.dtypes import BF16, F16, F32, F64, I32, DType
from rlx.errors import LowerError
from rlx.host_memory import LINE
from rlx.lir.kernels import Epilogue, EpilogueOperand, MatmulKernel
from rlx.lir.loops import Expr, Ref
from rlx.target import Target

Array = npt.NDArray[Any]

TARGETS = targets.supported()
EVERY_TARGET = pytest.mark.parametrize("target", TARGETS, ids=lambda t: t.name)
EVERY_DTYPE = pytest.mark.parametrize("dtype", (F32, F64), ids=str)
EVERY_NARROW_TYPE = pytest.mark.parametrize("stored", (BF16, F16), ids=str)
EITHER_LAYOUT = pytest.mark.parametrize("packed", (True, False), ids=("panels", "rows"))


C = EpilogueOperand("c", F32, True, True)


def layout(packed: bool, dtype: DType, target: Target) -> Panels | None:
    return Panels(target.panel(dtype.size)) if packed else None


# -- compiling and calling --------------------------------------------------------------------------------------------
_LIBRARY = toolchain.CodeLibrary()
_FUNCTION = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)


def text(routines: Iterable[Routine]) -> str:
    module = Module()
    for routine in routines:
        routine.emit(module)
    return module.text()


def load(routines: Sequence[Routine], target: Target) -> dict[str, int]:
    return _LIBRARY.load(toolchain.compile_text(text(routines), target), [r.symbol for r in routines])


@dataclass(frozen=True)
class Operand:
    """An array with its batch axes first: [batch0, batch1, rows, columns]; a size-1 axis is broadcast."""

    array: Array

    def stride(self, axis: int) -> int:
        return 0 if self.array.shape[axis] == 1 else self.array.strides[axis] // self.array.itemsize


class Compiled:
    """A matmul kernel ready to be called on arrays."""

    def __init__(self, kernel: MatmulKernel, target: Target) -> None:
        self.kernel, self.target = kernel, target
        self.entry = matmul.entry(kernel, target)
        addresses = load(self.entry.routines(), target)
        self.function = _FUNCTION(addresses[self.entry.routine.symbol])
        self.tiles = np.array([addresses[r.symbol] for r in self.entry.tables["tiles"]], np.int64)
        epilogue = self.entry.tables.get("epilogue", ())
        self.epilogue = addresses[epilogue[0].symbol] if epilogue else 0

    def run(
        self, a: Array, b: Array, n: int, operands: Sequence[Array], *, row_blocks: int | None = None,
        splits: Sequence[int] = (), calls: Sequence[tuple[int, int]] = (), scratch: Array | None = None,
        batch: tuple[int, int] = (1, 1),
    ) -> None:  # fmt: skip
        """`a` and operands are [batch0, batch1, m, columns], `b` is [batch0, batch1, k, n] or panels after two axes."""
        k, m = a.shape[3], a.shape[2]
        left, right = Operand(a), Operand(b)
        blocks = row_blocks or -(-m // ROW_BLOCK)
        words: dict[str, int] = {
            "tiles": self.tiles.ctypes.data, "epilogue": self.epilogue, "a": a.ctypes.data, "b": b.ctypes.data,
            "m": m, "n": n, "k": k, "row_blocks": blocks, "batch0": batch[0], "batch1": batch[1],
            "a_row": a.strides[3 if self.kernel.transposed else 2] // a.itemsize,
            "a_batch0": left.stride(0), "a_batch1": left.stride(1),
            "b_k": 0 if self.kernel.layout else b.strides[2] // b.itemsize,
            "b_n": 0 if self.kernel.layout else b.strides[3] // b.itemsize,
            "b_batch0": right.stride(0), "b_batch1": right.stride(1),
        }  # fmt: skip
        for i, array in enumerate(operands):
            operand = Operand(array)
            row = 0 if array.shape[2] == 1 and m > 1 else array.strides[2] // array.itemsize
            name = self.kernel.epilogue_operands[i].name
            words |= {name: array.ctypes.data, f"{name}_row": row}
            words |= {f"{name}_batch0": operand.stride(0), f"{name}_batch1": operand.stride(1)}
        args = np.array([words[w] for w in Plan(self.kernel, self.target).words], np.int64)
        if scratch is None:
            scratch = aligned(matmul.scratch_bytes(self.kernel, self.target, k))
        units = batch[0] * batch[1] * blocks * -(-n // Plan(self.kernel, self.target).columns)
        for lo, hi in calls or itertools.pairwise([0, *splits, units]):
            scratch[HEADER_BYTES:] = 0xFF  # NaN: nothing may depend on what an earlier call left there
            self.function(args.ctypes.data, lo, hi, scratch.ctypes.data)
        self.units = units


def aligned(size: int) -> Array:
    raw = np.zeros(size + 64, np.uint8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size]


@functools.cache
def plain(
    dtype: DType, packed: bool, target: Target, *, transposed: bool = False, stored: DType | None = None
) -> Compiled:
    operands, right = (replace(C, dtype=dtype),), layout(packed, dtype, target)
    return Compiled(MatmulKernel(dtype, right, 1, None, operands, transposed=transposed, stored=stored), target)


def to_panels(weights: Sequence[Array], target: Target) -> Array:
    """[..., panels, k, panel] from one matrix or two, as the weight store packs them."""
    first = weights[0]
    k, n = first.shape[-2:]
    share = target.panel(max(first.itemsize, 4)) // len(weights)  # narrow ones are widened to f32
    count = -(-n // share)
    panels = np.zeros((*first.shape[:-2], count, k, share * len(weights)), first.dtype)
    for w, weight in enumerate(weights):
        for p in range(count):
            part = weight[..., p * share : (p + 1) * share]
            panels[..., p, :, w * share : w * share + part.shape[-1]] = part
    return panels


def multiply(compiled: Compiled, a: Array, b: Array, **options: Any) -> Array:
    """a @ b for matrices, into an output full of NaN."""
    c = np.full((1, 1, a.shape[0], b.shape[1]), np.nan, a.dtype)
    right = to_panels([b], compiled.target) if compiled.kernel.layout else b
    compiled.run(a[None, None], right[None, None], b.shape[1], [c], **options)
    result: Array = c[0, 0]
    return result


def random(shape: tuple[int, ...], dtype: DType, seed: int = 0) -> Array:
    return np.random.default_rng((seed, *shape)).standard_normal(shape).astype(dtype.numpy)


def assert_product(got: Array, a: Array, b: Array) -> None:
    """Within the error bound of a sum of k rounded products."""
    exact = a.astype(np.float64) @ b.astype(np.float64)
    size = np.abs(a).astype(np.float64) @ np.abs(b).astype(np.float64)
    bound = np.finfo(got.dtype).eps * (8 + 4 * np.sqrt(a.shape[-1])) * size
    assert np.all(np.abs(got - exact) <= bound)


# -- epilogues --------------------------------------------------------------------------------------------------------
def epilogue(name: str, dtype: DType) -> Epilogue:
    def named(name: str) -> Expr:
        return Ref(name, dtype)

    acc, acc1 = named("acc"), named("acc1")
    values = {
        "bias_residual": lambda: acc + named("bias") + named("residual"),
        "row_scale": lambda: acc * named("scale"),
        "gated": lambda: acc / (abs(acc) + 1.0) * acc1,
    }
    return Epilogue(name, (), (values[name](),))


@functools.cache
def bias_residual(dtype: DType, packed: bool, target: Target) -> Compiled:
    """out = a @ b + bias + residual."""
    operands = (EpilogueOperand(name, dtype, True, name == "out") for name in ("out", "bias", "residual"))
    right, finish = layout(packed, dtype, target), epilogue("bias_residual", dtype)
    return Compiled(MatmulKernel(dtype, right, 1, finish, tuple(operands)), target)


@functools.cache
def row_scale(target: Target) -> Compiled:
    """out = (a @ b) * scale, one number a row."""
    operands = (EpilogueOperand("out", F32, True, True), EpilogueOperand("scale", F32, False))
    return Compiled(MatmulKernel(F32, layout(True, F32, target), 1, epilogue("row_scale", F32), operands), target)


@functools.cache
def gated(dtype: DType, target: Target) -> Compiled:
    """out = squash(a @ gate) * (a @ up), squash(x) = x / (1 + |x|)."""
    operands = (EpilogueOperand("out", dtype, True, True),)
    return Compiled(MatmulKernel(dtype, layout(True, dtype, target), 2, epilogue("gated", dtype), operands), target)


# -- values -----------------------------------------------------------------------------------------------------------
SHAPES = [
    (1, 1, 1), (1, 64, 64), (1, 400, 193), (1, 65, 1300), (2, 63, 5), (2, 128, 1024), (5, 65, 7), (6, 64, 400),
    (6, 193, 600), (7, 13, 12), (7, 128, 513), (8, 400, 700), (12, 193, 65), (13, 5, 128), (13, 65, 1025), (63, 63, 63),
    (64, 64, 64), (65, 65, 65), (128, 12, 193), (193, 193, 13), (193, 64, 520), (400, 7, 2), (400, 193, 65),
    (400, 128, 1100),
]  # fmt: skip


@EVERY_TARGET
@EVERY_DTYPE
@EITHER_LAYOUT
def test_products_are_close_to_float64(target: Target, dtype: DType, packed: bool) -> None:
    for m, n, k in SHAPES:
        a, b = random((m, k), dtype), random((k, n), dtype, 1)
        assert_product(multiply(plain(dtype, packed, target), a, b), a, b)


@EVERY_TARGET
@EVERY_NARROW_TYPE
def test_narrow_panels_give_the_bits_of_the_same_numbers_in_f32(target: Target, stored: DType) -> None:
    for m, n, k in SHAPES:
        a, b = random((m, k), F32), random((k, n), F32, 1).astype(stored.numpy)
        wide = b.astype(np.float32)
        product = multiply(plain(F32, True, target, stored=stored), a, b)
        assert np.array_equal(product, multiply(plain(F32, True, target), a, wide))
        assert_product(product, a, wide)


@EVERY_TARGET
@EVERY_NARROW_TYPE
def test_a_single_row_takes_several_panels_together(target: Target, stored: DType) -> None:
    """Any number of panels, the last one full or not, and k a multiple of the unrolled steps or not."""
    for panels in range(1, 10):
        for n, k in ((panels * target.panel(4), 50), (panels * target.panel(4) - 3, 7), (panels * target.panel(4), 1)):
            a, b = random((1, k), F32), random((k, n), F32, 1).astype(stored.numpy)
            product = multiply(plain(F32, True, target, stored=stored), a, b)
            assert np.array_equal(product, multiply(plain(F32, True, target), a, b.astype(np.float32)))
            assert_product(product, a, b.astype(np.float32))


@EVERY_TARGET
@EVERY_NARROW_TYPE
def test_every_narrow_number_is_widened_exactly(target: Target, stored: DType) -> None:
    """All 65,536 of them, times 1: by tiles that widen what they load, and from a panel that was widened before."""
    every = np.arange(1 << 16, dtype=np.uint16).view(stored.numpy).reshape(1, -1)
    wide = every.astype(np.float32)
    for m in (1, 60):
        product = multiply(plain(F32, True, target, stored=stored), np.ones((m, 1), np.float32), every)
        assert np.array_equal(product, np.repeat(wide, m, axis=0), equal_nan=True)


@EVERY_TARGET
@EITHER_LAYOUT
def test_no_k_gives_zeros(target: Target, packed: bool) -> None:
    for m, n in ((1, 1), (7, 65), (200, 64)):
        got = multiply(plain(F32, packed, target), np.zeros((m, 0), np.float32), np.zeros((0, n), np.float32))
        assert np.array_equal(got, np.zeros((m, n), np.float32))


@EVERY_TARGET
@EVERY_DTYPE
@pytest.mark.parametrize("layout", ("transposed", "spaced rows", "spaced columns", "reversed", "one row", "one column"))
def test_the_right_side_may_have_any_strides(target: Target, dtype: DType, layout: str) -> None:
    for m, n, k in ((1, 65, 33), (5, 193, 7), (13, 64, 600), (200, 70, 70), (3, 300, 550)):
        b = random((k, n), dtype, 1)
        match layout:
            case "transposed":
                right = np.ascontiguousarray(b.T).T
            case "spaced rows":
                right = np.zeros((k, n + 3), b.dtype)[:, :n]
            case "spaced columns":
                right = np.zeros((k, n, 2), b.dtype)[:, :, 1]
            case "reversed":
                right = np.zeros((k, n), b.dtype)[::-1, ::-1]
            case "one row":
                right = np.broadcast_to(b[:1], (k, n))
            case _:
                right = np.broadcast_to(b[:, :1], (k, n))
        if right.flags.writeable:
            right[:] = b
        a = random((m, k), dtype)
        assert_product(multiply(plain(dtype, False, target), a, right), a, right)


@EVERY_TARGET
@EITHER_LAYOUT
def test_rows_of_the_left_side_and_the_result_may_be_spaced(target: Target, packed: bool) -> None:
    a = random((50, 90), F32)[:, 10:80]
    b = random((70, 100), F32, 1)
    wide = np.full((50, 130), np.nan, np.float32)
    compiled = plain(F32, packed, target)
    right = to_panels([b], target) if packed else b
    compiled.run(a[None, None], right[None, None], 100, [wide[None, None, :, 5:105]])
    assert np.array_equal(wide[:, 5:105], multiply(compiled, np.ascontiguousarray(a), b))
    assert np.isnan(wide[:, :5]).all() and np.isnan(wide[:, 105:]).all()


@EVERY_TARGET
@EITHER_LAYOUT
@pytest.mark.parametrize("shared", ("nothing", "a", "b", "a over batch1", "b over batch0"))
def test_batches_may_share_a_side(target: Target, packed: bool, shared: str) -> None:
    m, n, k = 9, 70, 40
    a_batch = {"a": (1, 1), "a over batch1": (2, 1)}.get(shared, (2, 3))
    b_batch = {"b": (1, 1), "b over batch0": (1, 3)}.get(shared, (2, 3))
    a, b = random((*a_batch, m, k), F32), random((*b_batch, k, n), F32, 1)
    c = np.full((2, 3, m, n), np.nan, np.float32)
    compiled = plain(F32, packed, target)
    compiled.run(a, to_panels([b], target) if packed else b, n, [c], batch=(2, 3))
    for i, j in itertools.product(range(2), range(3)):
        one_a = a[min(i, a_batch[0] - 1), min(j, a_batch[1] - 1)]
        one_b = b[min(i, b_batch[0] - 1), min(j, b_batch[1] - 1)]
        assert np.array_equal(c[i, j], multiply(compiled, one_a, one_b))


@EVERY_TARGET
def test_batches_of_the_right_side_may_overlap(target: Target) -> None:
    """The second slab of one batch starts where the first of the next one does, but they differ in length."""
    m, n, k, shift = 13, 5, 600, 304
    base = random((k + shift, n), F32, 1)
    right = np.lib.stride_tricks.as_strided(base, (1, 2, k, n), (0, shift * base.strides[0], *base.strides))
    a = random((1, 2, m, k), F32)
    c = np.full((1, 2, m, n), np.nan, np.float32)
    plain(F32, False, target).run(a, right, n, [c], batch=(1, 2))
    for j in range(2):
        assert np.array_equal(c[0, j], multiply(plain(F32, False, target), a[0, j], right[0, j]))


# -- epilogues --------------------------------------------------------------------------------------------------------
@EVERY_TARGET
@EVERY_DTYPE
@EITHER_LAYOUT
def test_an_epilogue_sees_the_sums_and_its_operands(target: Target, dtype: DType, packed: bool) -> None:
    for m, n, k in ((1, 64, 64), (1, 300, 600), (7, 65, 12), (13, 130, 700), (200, 100, 30)):
        a, b = random((m, k), dtype), random((k, n), dtype, 1)
        bias, residual = random((1, 1, 1, n), dtype, 2), random((1, 1, m, n + 5), dtype, 3)[..., 2 : n + 2]
        out = np.full((1, 1, m, n), np.nan, dtype.numpy)
        right = to_panels([b], target) if packed else b
        bias_residual(dtype, packed, target).run(a[None, None], right[None, None], n, [out, bias, residual])
        product = multiply(plain(dtype, packed, target), a, b)
        assert np.array_equal(out[0, 0], product + bias[0, 0] + residual[0, 0])


@EVERY_TARGET
def test_epilogue_operands_move_with_the_batch(target: Target) -> None:
    a, b = random((2, 2, 8, 30), F32), random((2, 2, 30, 70), F32, 1)
    bias, residual = random((1, 1, 1, 70), F32, 2), random((2, 1, 8, 70), F32, 3)
    out = np.full((2, 2, 8, 70), np.nan, np.float32)
    bias_residual(F32, False, target).run(a, b, 70, [out, bias, residual], batch=(2, 2))
    products = [[multiply(plain(F32, False, target), a[i, j], b[i, j]) for j in range(2)] for i in range(2)]
    assert np.array_equal(out, np.array(products) + bias + residual)


@EVERY_TARGET
def test_an_operand_without_columns_stays_at_its_row(target: Target) -> None:
    a, b, scale = random((13, 20), F32), random((20, 200), F32, 1), random((1, 1, 13, 1), F32, 2)
    out = np.full((1, 1, 13, 200), np.nan, np.float32)
    row_scale(target).run(a[None, None], to_panels([b], target)[None, None], 200, [out, scale])
    assert np.array_equal(out[0, 0], multiply(plain(F32, True, target), a, b) * scale[0, 0])


@EVERY_TARGET
@EVERY_DTYPE
def test_two_weights_share_a_panel(target: Target, dtype: DType) -> None:
    for m, n, k in ((1, 32, 64), (1, 100, 600), (7, 33, 12), (200, 65, 530)):
        a, gate, up = random((m, k), dtype), random((k, n), dtype, 1), random((k, n), dtype, 2)
        out = np.full((1, 1, m, n), np.nan, dtype.numpy)
        gated(dtype, target).run(a[None, None], to_panels([gate, up], target)[None, None], n, [out])
        x, y = multiply(plain(dtype, True, target), a, gate), multiply(plain(dtype, True, target), a, up)
        assert np.array_equal(out[0, 0], x / (1 + np.abs(x)) * y)


# -- bits -------------------------------------------------------------------------------------------------------------
@EVERY_TARGET
@EVERY_DTYPE
@EITHER_LAYOUT
def test_bits_do_not_depend_on_the_split(target: Target, dtype: DType, packed: bool) -> None:
    for m, n, k in ((3, 400, 600), (64, 193, 100), (400, 193, 530)):
        a, b = random((m, k), dtype), random((k, n), dtype, 1)
        compiled = plain(dtype, packed, target)
        full = multiply(compiled, a, b)
        blocks = -(-m // ROW_BLOCK)
        for row_blocks in {blocks, blocks + 1, 2 * blocks + 1}:
            assert np.array_equal(full, multiply(compiled, a, b, row_blocks=row_blocks))
            for splits in (range(1, compiled.units), [compiled.units // 2], range(2, compiled.units, 5)):
                cuts = sorted(set(splits) - {0, compiled.units})
                assert np.array_equal(full, multiply(compiled, a, b, row_blocks=row_blocks, splits=cuts))


@EVERY_TARGET
def test_a_split_may_fall_between_panels_of_equal_columns(target: Target) -> None:
    b = np.broadcast_to(random((30, 1), F32, 1), (30, target.panel(4) + 6))  # both panels start at the same address
    a = random((400, 30), F32)
    assert_product(multiply(plain(F32, False, target), a, b, splits=[1]), a, b)


@EVERY_TARGET
@EITHER_LAYOUT
def test_a_call_writes_its_own_units_only(target: Target, packed: bool) -> None:
    panel = target.panel(4)
    a, b = random((24, 30), F32), random((30, 5 * panel), F32, 1)
    c = np.full((1, 1, 24, 5 * panel), np.nan, np.float32)
    compiled = plain(F32, packed, target)
    right = to_panels([b], target) if packed else b
    compiled.run(a[None, None], right[None, None], 5 * panel, [c], row_blocks=2, calls=[(3, 7)])
    written = ~np.isnan(c[0, 0]).reshape(2, 12, 5, panel).any(axis=(1, 3))
    assert np.array_equal(written.ravel().nonzero()[0], range(3, 7))


@EVERY_TARGET
@EVERY_DTYPE
@EITHER_LAYOUT
def test_bits_of_a_row_do_not_depend_on_the_others(target: Target, dtype: DType, packed: bool) -> None:
    a, b = random((400, 1100), dtype), random((1100, 300), dtype, 1)
    compiled = plain(dtype, packed, target)
    full = multiply(compiled, a, b)
    for first, last in ((0, 1), (399, 400), (10, 12), (0, 6), (50, 57), (100, 293)):
        assert np.array_equal(multiply(compiled, a[first:last], b), full[first:last])


@EVERY_TARGET
def test_bits_do_not_depend_on_the_layout(target: Target) -> None:
    for m in (1, 8, 100):
        a, b = random((m, 700), F32), random((700, 320), F32, 1)
        panels = multiply(plain(F32, True, target), a, b)
        for right in (b, np.ascontiguousarray(b.T).T, np.repeat(b, 2, axis=1)[:, ::2]):
            assert np.array_equal(panels, multiply(plain(F32, False, target), a, right))


@EVERY_TARGET
@EVERY_DTYPE
@EITHER_LAYOUT
def test_a_transposed_left_side_gives_the_same_bits(target: Target, dtype: DType, packed: bool) -> None:
    rows, columns = plain(dtype, packed, target), plain(dtype, packed, target, transposed=True)
    for m, n, k in SHAPES:
        a, b = random((m, k), dtype), random((k, n), dtype, 1)
        wide = np.zeros((k, m + 3), a.dtype)  # columns of A are rows of this, further apart than they are long
        wide[:, 1 : m + 1] = a.T
        assert np.array_equal(multiply(columns, wide[:, 1 : m + 1].T, b), multiply(rows, a, b))


@EVERY_TARGET
def test_a_transposed_left_side_may_have_batches(target: Target) -> None:
    a, b = random((2, 3, 40, 200), F32).swapaxes(2, 3), random((1, 3, 40, 70), F32, 1)
    c = np.full((2, 3, 200, 70), np.nan, np.float32)
    plain(F32, False, target, transposed=True).run(a, b, 70, [c], batch=(2, 3), splits=(1, 7, 9))
    for i, j in itertools.product(range(2), range(3)):
        assert np.array_equal(c[i, j], multiply(plain(F32, False, target), np.ascontiguousarray(a[i, j]), b[0, j]))


def test_sums_run_over_k_in_index_order() -> None:
    a, b = random((3, 600), F32), random((600, 9), F32, 1)
    expected = np.zeros((3, 9), np.float32)
    for k in range(600):  # the baseline has no fused multiply-add, so NumPy can repeat its rounding
        expected = (a[:, k : k + 1] * b[k : k + 1]) + expected
    assert np.array_equal(multiply(plain(F32, True, BASELINE), a, b), expected)


@EVERY_TARGET
def test_a_row_of_nan_stays_in_its_row(target: Target) -> None:
    a, b = random((20, 65), F32), random((65, 70), F32, 1)
    clean = multiply(plain(F32, False, target), a, b)
    a[7] = np.nan
    got = multiply(plain(F32, False, target), a, b)
    assert np.isnan(got[7]).all()
    assert np.array_equal(np.delete(got, 7, axis=0), np.delete(clean, 7, axis=0))


# -- bounds -----------------------------------------------------------------------------------------------------------
@EVERY_TARGET
@EVERY_DTYPE
@pytest.mark.parametrize("right", ("panels", "rows", "columns", "rows, A transposed"))
@pytest.mark.parametrize("at_end", (True, False), ids=("end", "start"))
def test_nothing_outside_a_buffer_is_touched(target: Target, dtype: DType, right: str, at_end: bool) -> None:
    transposed = right == "rows, A transposed"
    shapes = [
        (1, 1, 1),
        (1, 300, 530),
        (6, 65, 7),
        (7, 63, 65),
        (13, 5, 512),
        (14, 70, 1000),
        (200, 130, 33),
        (2, 64, 0),
    ]
    for m, n, k in shapes:
        a, b = random((m, k), dtype), random((k, n), dtype, 1)
        compiled = plain(dtype, right == "panels", target, transposed=transposed)
        match right:
            case "panels":
                held = guarded_copy(to_panels([b], target), at_end=at_end)
            case "rows" | "rows, A transposed":
                held = guarded_copy(b, at_end=at_end)
            case _:
                held = guarded_copy(np.ascontiguousarray(b.T), at_end=at_end).T
        c = guarded_copy(np.full((1, 1, m, n), np.nan, dtype.numpy), at_end=at_end)
        scratch = guarded(matmul.scratch_bytes(compiled.kernel, target, k), at_end=at_end)
        left = (
            guarded_copy(np.ascontiguousarray(a.T), at_end=at_end).T if transposed else guarded_copy(a, at_end=at_end)
        )
        compiled.run(left[None, None], held[None, None], n, [c], scratch=scratch)
        assert_product(c[0, 0], a, b)
        assert not scratch[:HEADER_BYTES].any()


# -- machine code -----------------------------------------------------------------------------------------------------
def all_tiles(dtype: DType, target: Target, *, transposed: bool = False) -> list[Routine]:
    sizes = itertools.product(range(1, target.tile_rows + 1), range(1, target.tile_vectors + 1))
    return [matmul.micro_kernel(dtype, height, vectors, target, transposed=transposed) for height, vectors in sizes]


@pytest.mark.skipif(AVX512 not in TARGETS, reason="needs AVX-512")
def test_the_largest_tile_is_all_wide_multiply_adds() -> None:
    lines = toolchain.assembly(text([matmul.micro_kernel(F32, 6, 4, AVX512)]), AVX512).splitlines()
    assert sum(bool(re.search(r"vfmadd\d+ps.*zmm", line)) for line in lines) == 6 * 4 * (4 + 1)
    assert not [line for line in lines if "zmm" in line and "rsp" in line]


@EVERY_TARGET
@EVERY_DTYPE
def test_no_tile_spills_a_vector(target: Target, dtype: DType) -> None:
    tiles = [*all_tiles(dtype, target), *all_tiles(dtype, target, transposed=True)]
    lines = toolchain.assembly(text(tiles), target).splitlines()
    assert not [line for line in lines if re.search(r"[xyz]mm\d", line) and "%rsp" in line]


@EVERY_TARGET
@EVERY_DTYPE
def test_micro_kernels_of_every_size_multiply(target: Target, dtype: DType) -> None:
    tiles = all_tiles(dtype, target)
    addresses = load(tiles, target)
    lanes = target.lanes(dtype.size)
    signature = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p, ctypes.c_int64] * 2, ctypes.c_int64,
                                 *[ctypes.c_void_p, ctypes.c_int64] * 2, ctypes.c_int64)  # fmt: skip
    sizes = itertools.product(range(1, target.tile_rows + 1), range(1, target.tile_vectors + 1))
    for (height, vectors), tile in zip(sizes, tiles, strict=True):
        width = vectors * lanes
        for k, accumulate in ((0, 0), (1, 1), (7, 0), (40, 1)):
            a, b = random((height, k + 3), dtype), random((k, width + 5), dtype, 1)
            c = random((height, width + 1), dtype, 2)
            before = c.copy()
            sides = (a.ctypes.data, k + 3, b.ctypes.data, width + 5, k, c.ctypes.data, width + 1)
            signature(addresses[tile.symbol])(*sides, b.ctypes.data, 64, accumulate)
            start = before[:, :width] if accumulate else 0 * before[:, :width]
            extended = np.concatenate([np.ones((height, 1), a.dtype), a[:, :k]], axis=1)
            for row in range(height):
                right = np.concatenate([start[row : row + 1], b[:, :width]])
                assert_product(c[row, :width], extended[row], right)
            assert np.array_equal(c[:, width:], before[:, width:])


@EVERY_TARGET
@EVERY_DTYPE
@EITHER_LAYOUT
def test_no_symbol_is_undefined(target: Target, dtype: DType, packed: bool) -> None:
    entries = [plain(dtype, packed, target).entry, bias_residual(dtype, packed, target).entry]
    routines = {r.symbol: r for entry in entries for r in entry.routines()}.values()
    assert set(toolchain.undefined_symbols(toolchain.compile_text(text(routines), target))) <= toolchain.LIBC


# -- what the backend asks for ----------------------------------------------------------------------------------------
def test_nests_are_shared_by_what_they_do() -> None:
    def symbol(compiled: MatmulKernel) -> str:
        return matmul.entry(compiled, BASELINE).routine.symbol

    def kernel(name: str, *operands: EpilogueOperand, dtype: DType = F32, packed: bool = True, weights: int = 1) -> str:
        return symbol(MatmulKernel(dtype, layout(packed, dtype, BASELINE), weights, epilogue(name, dtype), operands))

    out, bias = EpilogueOperand("out", F32, True, True), EpilogueOperand("bias", F32, True)
    assert kernel("gated", out, bias) == kernel("bias_residual", out, EpilogueOperand("other", I32, True))
    different = {
        kernel("gated", out), kernel("gated", out, bias), kernel("gated", out, EpilogueOperand("bias", F32, False)),
        kernel("gated", EpilogueOperand("out", BF16, True, True)), kernel("gated", out, dtype=F64),
        kernel("gated", out, packed=False), kernel("gated", out, weights=2), symbol(plain(F32, True, BASELINE).kernel),
    }  # fmt: skip
    assert len(different) == 8


def test_the_table_has_a_tile_for_every_height() -> None:
    entry = plain(F32, True, BASELINE).entry
    assert [r.symbol for r in entry.tables["tiles"]] == [f"tile.f32.{h}x2" for h in range(1, BASELINE.tile_rows + 1)]
    assert "epilogue" not in entry.tables
    assert [r.symbol for r in plain(F32, False, BASELINE).entry.tables["tiles"]][BASELINE.tile_rows :] == [
        "pack_panel.f32.2"
    ]
    assert [r.symbol[:11] for r in gated(F32, BASELINE).entry.tables["epilogue"]] == ["loops.gated"]


def test_panel_columns_are_shared_by_the_weights() -> None:
    assert Plan(plain(F32, True, AVX512).kernel, AVX512).columns == 64 if AVX512 in TARGETS else True
    assert Plan(plain(F64, True, BASELINE).kernel, BASELINE).columns == 4
    assert Plan(gated(F32, BASELINE).kernel, BASELINE).columns == 4


@EVERY_TARGET
def test_scratch_does_not_grow_with_k_beyond_a_slab(target: Target) -> None:
    packed, rows = plain(F32, True, target).kernel, plain(F32, False, target).kernel
    sums = ROW_BLOCK * target.panel(4) * 4
    assert matmul.scratch_bytes(packed, target, 100_000) == matmul.scratch_bytes(packed, target, 0) == 64 + sums
    assert matmul.scratch_bytes(rows, target, 16) == 64 + sums + 16 * target.panel(4) * 4
    assert matmul.scratch_bytes(rows, target, 100_000) == matmul.scratch_bytes(rows, target, SLAB)


@EVERY_TARGET
@EVERY_NARROW_TYPE
def test_narrow_panels_have_tiles_that_widen_and_tiles_that_do_not(target: Target, stored: DType) -> None:
    entry, vectors = plain(F32, True, target, stored=stored).entry, target.tile_vectors
    heights = range(1, target.tile_rows + 1)
    assert [r.symbol for r in entry.tables["tiles"]] == [
        *(f"tile.f32.{stored}.{h}x{vectors}" for h in heights), *(f"tile.f32.{h}x{vectors}" for h in heights),
        f"widen_panel.f32.{stored}.{vectors}",
        *([f"tile.f32.{stored}.1x{vectors}.panels"] if target.panel(4) * 2 < LINE else []),
    ]  # fmt: skip
    object_file = toolchain.compile_text(text({r.symbol: r for r in entry.routines()}.values()), target)
    assert set(toolchain.undefined_symbols(object_file)) <= toolchain.LIBC


@pytest.mark.parametrize("target", (AVX512, AVX2, NEON), ids=lambda t: t.name)
@EVERY_NARROW_TYPE
def test_no_tile_that_widens_spills_a_vector(target: Target, stored: DType) -> None:
    tiles = []
    for transposed in (False, True):
        kernel = MatmulKernel(F32, layout(True, F32, target), 1, None, (C,), transposed=transposed, stored=stored)
        tiles += matmul.entry(kernel, target).tables["tiles"][: target.tile_rows]
    lines = toolchain.assembly(text(tiles), target).splitlines()
    assert not [line for line in lines if re.search(r"[xyz]mm\d.*%rsp|%rsp.*[xyz]mm\d|\bq\d.*\[sp", line)]


@EVERY_NARROW_TYPE
def test_narrow_matrices_must_be_packed(stored: DType) -> None:
    with pytest.raises(LowerError, match=f"no tiles of f32 times {stored}"):
        kernel = MatmulKernel(F32, None, 1, None, (C,), stored=stored)
        matmul.entry(kernel, BASELINE)


def test_narrow_floats_have_no_tiles() -> None:
    with pytest.raises(LowerError, match="no tiles of bf16"):
        Plan(MatmulKernel(BF16, layout(True, BF16, BASELINE), 1, None, ()), BASELINE)


def test_two_weights_must_be_packed() -> None:
    with pytest.raises(LowerError, match="only when they are packed"):
        matmul.entry(MatmulKernel(F32, None, 2, None, (C,)), BASELINE)

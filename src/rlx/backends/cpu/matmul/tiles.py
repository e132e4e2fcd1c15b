"""Micro-kernels: a register tile of C, one chain of multiply-adds over k per element."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.builder import Body, Builder, Module, Value, const, i64, scalar_of, vector
from rlx.backends.cpu.loops.byte_dots import dot
from rlx.backends.cpu.math.conversions import bfloat_to_float, half_to_float
from rlx.backends.cpu.matmul.plan import Geometry
from rlx.backends.cpu.routine import Routine
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import BF16, F16, DType
from rlx.host_memory import LINE

SIDE_BY_SIDE = 4  # panels that a single row of A is multiplied by together
WIDEN = {F16: half_to_float, BF16: bfloat_to_float}
_ARGUMENTS = (
    ("ptr noalias", "a"), ("i64", "lda"), ("ptr noalias", "b"), ("i64", "ldb"), ("i64", "k"),
    ("ptr noalias", "c"), ("i64", "ldc"), ("ptr", "ahead"), ("i64", "ahead_step"), ("i64", "accumulate"),
)  # fmt: skip


def micro_kernel(dtype: DType, height: int, vectors: int, target: CpuTarget, *, transposed: bool = False) -> Routine:
    """C[height][w] (+)= A[height][k] B[k][w], where w is `vectors` vectors; A may be stored as A[k][height].

    `tile(a, lda, b, ldb, k, c, ldc, ahead, ahead_step, accumulate)`: strides are in elements; sums start from C if
    `accumulate` is not 0. Each k step prefetches at `ahead`, which advances by `ahead_step` bytes.
    """
    return tile(Geometry(dtype, target.lanes(dtype.size), height, vectors), target, transposed=transposed)


def tile(form: Geometry, target: CpuTarget, *, transposed: bool) -> Routine:
    """The micro-kernel of one geometry, which widens B if it is narrower."""
    types = f"{form.dtype}.{form.stored}" if form.stored else f"{form.dtype}"
    symbol = f"tile.{types}.{form.rows}x{form.vectors}{'.turned' if transposed else ''}"
    left = _left_columns if transposed else _left_rows

    def emit(module: Module) -> None:
        module.define(symbol, _ARGUMENTS, lambda b, *arguments: _emit_tile(b, form, target, left, *arguments))

    return Routine(symbol, emit)


_PANELS_ARGUMENTS = (
    ("ptr noalias", "a"), ("i64", "k"), ("i64", "ahead"),
    *(("ptr noalias", f"b{i}") for i in range(SIDE_BY_SIDE)), *(("ptr noalias", f"c{i}") for i in range(SIDE_BY_SIDE)),
)  # fmt: skip


def panels_tile(form: Geometry, target: CpuTarget) -> Routine:
    """One row of A times neighbouring panels of narrow B: a single panel has too few chains to keep up with memory.

    `tile(a, k, ahead, b0, b1, ..., c0, c1, ...)`: each k step prefetches `ahead` bytes after what it reads.
    """
    symbol = f"tile.{form.dtype}.{form.stored}.1x{form.vectors}.panels"

    def emit(module: Module) -> None:
        module.define(symbol, _PANELS_ARGUMENTS, lambda b, *arguments: _emit_panels(b, form, target, *arguments))

    return Routine(symbol, emit)


def _emit_panels(
    b: Builder, form: Geometry, target: CpuTarget, a: Value, k: Value, ahead: Value, *places: Value
) -> None:
    panels, results = places[:SIDE_BY_SIDE], places[SIDE_BY_SIDE:]
    unroll, vectors = _unroll(form, target), range(form.vectors)

    def steps(count: int) -> Body:
        def body(at: Value, *state: Value) -> list[Value]:
            rows, total = list(state[:SIDE_BY_SIDE]), list(state[SIDE_BY_SIDE:])
            for u in range(count):
                place = b.offset(b.offset(a, at, form.scalar), u, form.scalar)
                left = b.splat(b.load(form.scalar, place, align=form.dtype.size), form.lanes)
                for i in range(SIDE_BY_SIDE):
                    row = b.offset(rows[i], u * form.right_bytes)
                    if u * form.right_bytes % LINE == 0:
                        b.prefetch(b.offset(row, ahead), locality=2)
                    for j in vectors:
                        cell = i * form.vectors + j
                        total[cell] = _multiply_add(b, target, left, load_right(b, form, target, row, j), total[cell])
            return [*(b.offset(row, count * form.right_bytes) for row in rows), *total]

        return body

    unrolled = b.op("and", k, i64(-unroll))
    sums = [const(form.vector, 0.0)] * (SIDE_BY_SIDE * form.vectors)
    state = b.loop(0, unrolled, unroll, steps(unroll), [*panels, *sums])
    state = b.loop(unrolled, k, 1, steps(1), state)
    for i, total in enumerate(state[SIDE_BY_SIDE:]):
        cell = b.offset(results[i // form.vectors], i % form.vectors * form.lanes, form.scalar)
        b.store(total, cell, align=form.dtype.size)


# (k step, position in the unrolled loop, row) -> address of that element of A
_Place = Callable[[Value, int, int], Value]
_Left = Callable[[Builder, Geometry, int, Value, Value], _Place]


def _left_rows(b: Builder, form: Geometry, unroll: int, a: Value, lda: Value) -> _Place:
    # Opaque to loop strength reduction, which would derive these from each other inside the loop; the machine scheduler
    # then groups the loads of equal bases, and the sums spill.
    rows = [_opaque(b, b.offset(a, b.mul(lda, i), form.scalar)) for i in range(form.rows)]
    return lambda at, u, i: b.offset(b.offset(rows[i], at, form.scalar), u, form.scalar)


def _left_columns(b: Builder, form: Geometry, unroll: int, a: Value, lda: Value) -> _Place:
    """The rows of a k step are contiguous, so one address per step suffices."""
    steps = [i64(0), *(_opaque(b, b.mul(lda, u)) for u in range(1, unroll))]
    return lambda at, u, i: b.offset(b.offset(a, b.add(b.mul(at, lda), steps[u]), form.scalar), i, form.scalar)


def _emit_tile(
    b: Builder, form: Geometry, target: CpuTarget, left_side: _Left, a: Value, lda: Value, panel: Value, ldb: Value,
    k: Value, c: Value, ldc: Value, ahead: Value, ahead_step: Value, accumulate: Value,
) -> None:  # fmt: skip
    size, rows, vectors = form.dtype.size, range(form.rows), range(form.vectors)
    unroll = _unroll(form, target)
    cells = [
        b.offset(b.offset(c, b.mul(ldc, i), form.scalar), j * form.lanes, form.scalar) for i in rows for j in vectors
    ]
    a_place = left_side(b, form, unroll, a, lda)
    b_steps = [_opaque(b, b.mul(ldb, u * form.right.size)) for u in range(1, unroll + 1)]
    zeros = [const(form.vector, 0.0)] * len(cells)
    fresh = b.icmp("eq", accumulate, 0)
    start = b.when(fresh, lambda: zeros, lambda: [b.load(form.vector, cell, align=size) for cell in cells])

    def steps(count: int) -> Body:
        def body(at: Value, panel: Value, ahead: Value, *sums: Value) -> list[Value]:
            total = list(sums)
            for u in range(count):
                row = b.offset(panel, b_steps[u - 1]) if u else panel
                right = [load_right(b, form, target, row, j) for j in vectors]
                for line in range(lines_of_a_step(form) if u * form.right_bytes % LINE == 0 else 0):
                    b.prefetch(b.offset(ahead, line * LINE), locality=2)  # into L2
                ahead = b.offset(ahead, ahead_step)
                for i in rows:
                    left = b.splat(b.load(form.scalar, a_place(at, u, i), align=size), form.lanes)
                    for j in vectors:
                        cell = i * form.vectors + j
                        total[cell] = _multiply_add(b, target, left, right[j], total[cell])
            return [b.offset(panel, b_steps[count - 1]), ahead, *total]

        return body

    unrolled = b.op("and", k, i64(-unroll))
    state = b.loop(0, unrolled, unroll, steps(unroll), [panel, ahead, *start])
    state = b.loop(unrolled, k, 1, steps(1), state)
    for cell, total in zip(cells, state[2:], strict=True):
        b.store(total, cell, align=size)


def _unroll(form: Geometry, target: CpuTarget) -> int:
    """K steps per iteration, few enough that sums do not spill."""
    if form.stored and target.arch == "aarch64" and form.rows > 4:
        return 1  # with more steps the scheduler widens all vectors first
    return 4 if target.has_fma else 2  # without FMA a product needs a register of its own


def load_right(b: Builder, form: Geometry, target: CpuTarget, row: Value, j: int) -> Value:
    """Vector `j` of a row of B, widened if it is stored narrow."""
    place = b.offset(row, j * form.lanes, form.right_scalar)
    loaded = b.load(vector(form.lanes, form.right_scalar), place, align=form.right.size)
    return loaded if form.stored is None else WIDEN[form.stored](b, loaded, target)


def _opaque(b: Builder, value: Value) -> Value:
    return b.assign(value.type, f"freeze {value}")


def lines_of_a_step(form: Geometry) -> int:
    """Cache lines that one k step prefetches.

    The tiles of a block together prefetch the complete next slab: with half of its lines the hardware prefetchers lose
    track, which is worse than none. Low tiles run at memory speed; there one line in four opens pages ahead of time.
    """
    return max(1, form.right_bytes // LINE // (4 if form.rows <= 2 else 2))


def _multiply_add(b: Builder, target: CpuTarget, x: Value, y: Value, total: Value) -> Value:
    if scalar_of(total.type) == "i32":
        return dot(b, total, x, y, target, small=False)
    if target.has_fma:
        return b.intrinsic("fma", x, y, total)
    return b.op("fadd", b.op("fmul", x, y), total)

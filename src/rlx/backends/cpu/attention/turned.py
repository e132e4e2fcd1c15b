"""A micro-kernel whose left side is turned: what one product gave by rows, the next one takes by columns."""

from __future__ import annotations

from rlx.backends.cpu.builder import Body, Builder, Module, Value, const, i64
from rlx.backends.cpu.math import fma
from rlx.backends.cpu.matmul import Geometry
from rlx.backends.cpu.routine import Routine
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import DType

_ARGUMENTS = (
    ("ptr noalias", "a"), ("i64", "lda"), ("ptr noalias", "b"), ("i64", "ldb"), ("i64", "k"),
    ("ptr noalias", "c"), ("i64", "ldc"),
)  # fmt: skip
UNROLL = 4


def turned_kernel(dtype: DType, height: int, vectors: int, target: CpuTarget) -> Routine:
    """C[height][w] = A[k][height]ᵀ B[k][w], where w is `vectors` vectors; strides are in elements."""
    form = Geometry(dtype, target.lanes(dtype.size), height, vectors)
    symbol = f"turned_tile.{dtype}.{height}x{vectors}"

    def emit(module: Module) -> None:
        module.define(symbol, _ARGUMENTS, lambda b, *arguments: _emit(b, form, target, *arguments))

    return Routine(symbol, emit)


def _emit(
    b: Builder, form: Geometry, target: CpuTarget, a: Value, lda: Value, right: Value, ldb: Value, k: Value, c: Value,
    ldc: Value,
) -> None:  # fmt: skip
    size, rows, vectors = form.dtype.size, range(form.rows), range(form.vectors)
    cells = [
        b.offset(b.offset(c, b.mul(ldc, i), form.scalar), j * form.lanes, form.scalar) for i in rows for j in vectors
    ]
    # Opaque, so that LLVM does not rebuild one from the other inside the loop, where sums have all registers.
    a_steps, b_steps = (
        [b.assign("i64", f"freeze {b.mul(stride, u * size)}") for u in range(1, UNROLL + 1)] for stride in (lda, ldb)
    )

    def steps(count: int) -> Body:
        def body(_: Value, left: Value, right: Value, *sums: Value) -> list[Value]:
            total = list(sums)
            for u in range(count):
                column = b.offset(left, a_steps[u - 1]) if u else left
                row = b.offset(right, b_steps[u - 1]) if u else right
                loaded = [b.load(form.vector, b.offset(row, j * form.lanes, form.scalar), align=size) for j in vectors]
                for i in rows:
                    element = b.load(form.scalar, b.offset(column, i, form.scalar), align=size)
                    factor = b.splat(element, form.lanes)
                    for j in vectors:
                        cell = i * form.vectors + j
                        total[cell] = fma(b, factor, loaded[j], total[cell], target)
            return [b.offset(left, a_steps[count - 1]), b.offset(right, b_steps[count - 1]), *total]

        return body

    start = [const(form.vector, 0.0)] * len(cells)
    whole = b.op("and", k, i64(-UNROLL))
    state = b.loop(0, whole, UNROLL, steps(UNROLL), [a, right, *start])
    state = b.loop(whole, k, 1, steps(1), state)
    for cell, total in zip(cells, state[2:], strict=True):
        b.store(total, cell, align=size)

"""Panels that a matmul packs at run time: from a strided B, and from narrow floats that are widened."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.builder import Builder, Value, const, i64, intrinsic_suffix
from rlx.backends.cpu.matmul.plan import Geometry
from rlx.backends.cpu.matmul.tiles import load_right
from rlx.backends.cpu.routine import Routine
from rlx.backends.cpu.targets import CpuTarget


def _column_masks(b: Builder, form: Geometry, columns: Value) -> list[Value]:
    return [b.lane_mask(b.sub(columns, j * form.lanes), form.lanes) for j in range(form.vectors)]


def _masked_load(b: Builder, type_: str, pointer: Value, mask: Value) -> Value:
    """Loads a vector with zeros where the mask is off; those lanes are not read."""
    return b.call(type_, f"llvm.masked.load.{intrinsic_suffix(type_)}.p0", pointer, mask, const(type_, 0.0))


def masked_store(b: Builder, value: Value, pointer: Value, mask: Value) -> None:
    b.call("void", f"llvm.masked.store.{intrinsic_suffix(value.type)}.p0", value, pointer, mask)


def widening(form: Geometry, target: CpuTarget) -> Routine:
    """`widen(b, k, panel)`: panel[k][panel] from a narrow panel with contiguous rows."""
    symbol = f"widen_panel.{form.dtype}.{form.stored}.{form.vectors}"
    arguments = (("ptr noalias", "b"), ("i64", "k"), ("ptr noalias", "panel"))

    def body(b: Builder, source: Value, k: Value, panel: Value) -> None:
        def row(i: Value) -> None:
            at = b.mul(i, form.panel)
            narrow, wide = b.offset(source, at, form.right_scalar), b.offset(panel, at, form.scalar)
            for j in range(form.vectors):
                value = load_right(b, form, target, narrow, j)
                b.store(value, b.offset(wide, j * form.lanes, form.scalar), align=form.dtype.size)

        b.loop(0, k, 1, row)

    return Routine(symbol, lambda module: module.define(symbol, arguments, body))


def packing(form: Geometry) -> Routine:
    """`pack(b, b_k, b_n, k, columns, panel)`: panel[k][panel] from strided B, zeros in the columns past `columns`."""
    symbol = f"pack_panel.{form.dtype}.{form.vectors}"
    arguments = (
        ("ptr noalias", "b"), ("i64", "b_k"), ("i64", "b_n"), ("i64", "k"), ("i64", "columns"),
        ("ptr noalias", "panel"),
    )  # fmt: skip

    def body(b: Builder, source: Value, b_k: Value, b_n: Value, k: Value, columns: Value, panel: Value) -> None:
        b.when(
            b.icmp("eq", b_n, 1),
            lambda: _pack_rows(b, form, source, b_k, k, columns, panel),
            lambda: b.when(
                b.icmp("eq", b_k, 1),
                lambda: _pack_transposed(b, form, source, b_n, k, columns, panel),
                lambda: _pack_elements(b, form, source, b_k, b_n, k, columns, panel),
            ),
        )

    return Routine(symbol, lambda module: module.define(symbol, arguments, body))


def _pack_rows(b: Builder, form: Geometry, source: Value, b_k: Value, k: Value, columns: Value, panel: Value) -> None:
    size = form.dtype.size

    def copy(load: Callable[[int, Value], Value]) -> None:
        def row(i: Value) -> None:
            here = b.offset(source, b.mul(i, b_k), form.scalar)
            target = b.offset(panel, b.mul(i, form.panel), form.scalar)
            for j in range(form.vectors):
                value = load(j, b.offset(here, j * form.lanes, form.scalar))
                b.store(value, b.offset(target, j * form.lanes, form.scalar), align=size)

        b.loop(0, k, 1, row)

    def copy_part() -> None:
        masks = _column_masks(b, form, columns)
        copy(lambda j, pointer: _masked_load(b, form.vector, pointer, masks[j]))

    is_full = b.icmp("eq", columns, form.panel)
    b.when(is_full, lambda: copy(lambda _, pointer: b.load(form.vector, pointer, align=size)), copy_part)


def _pack_transposed(
    b: Builder, form: Geometry, source: Value, b_n: Value, k: Value, columns: Value, panel: Value
) -> None:
    """Columns of B are contiguous: square blocks are transposed in registers."""
    lanes = form.lanes

    def vector_of_columns(v: Value) -> None:
        left = b.sub(columns, b.mul(v, lanes))
        here = b.offset(source, b.mul(b.mul(v, lanes), b_n), form.scalar)
        target = b.offset(panel, b.mul(v, lanes), form.scalar)

        def block(load: Callable[[int, Value], Value], at: Value) -> None:
            rows = [
                load(j, b.offset(b.offset(here, b.mul(b_n, j), form.scalar), at, form.scalar)) for j in range(lanes)
            ]
            for i, row in enumerate(_transpose(b, rows)):
                b.store(row, b.offset(target, b.mul(b.add(at, i), form.panel), form.scalar), align=form.dtype.size)

        def partial(at: Value) -> None:
            inside = b.lane_mask(b.sub(k, at), lanes)

            def load(j: int, pointer: Value) -> Value:
                present = b.splat(b.icmp("sgt", left, j), lanes)
                return _masked_load(b, form.vector, pointer, b.op("and", inside, present))

            block(load, at)

        full = b.select(b.icmp("sge", left, lanes), b.op("and", k, i64(-lanes)), i64(0))
        b.loop(0, full, lanes, lambda at: block(lambda _, p: b.load(form.vector, p, align=form.dtype.size), at))
        b.loop(full, k, lanes, partial)

    b.loop(0, form.vectors, 1, vector_of_columns)


def _transpose(b: Builder, rows: list[Value]) -> list[Value]:
    """Transposes a square of vectors by swapping halves of ever smaller blocks."""
    rows, lanes = list(rows), len(rows)
    span = lanes // 2
    while span:
        low = [lane if not lane & span else lanes + lane - span for lane in range(lanes)]
        high = [lane + span if not lane & span else lanes + lane for lane in range(lanes)]
        for i in range(lanes):
            if not i & span:
                upper, lower = rows[i], rows[i + span]
                rows[i], rows[i + span] = b.shuffle(upper, lower, low), b.shuffle(upper, lower, high)
        span //= 2
    return rows


def _pack_elements(
    b: Builder, form: Geometry, source: Value, b_k: Value, b_n: Value, k: Value, columns: Value, panel: Value
) -> None:
    size = form.dtype.size

    def row(i: Value) -> None:
        here = b.offset(source, b.mul(i, b_k), form.scalar)
        target = b.offset(panel, b.mul(i, form.panel), form.scalar)

        def element(j: Value) -> None:
            value = b.load(form.scalar, b.offset(here, b.mul(j, b_n), form.scalar), align=size)
            b.store(value, b.offset(target, j, form.scalar), align=size)

        def pad(j: Value) -> None:
            b.store(const(form.scalar, 0.0), b.offset(target, j, form.scalar), align=size)

        b.loop(0, columns, 1, element)
        b.loop(columns, form.panel, 1, pad)

    b.loop(0, k, 1, row)

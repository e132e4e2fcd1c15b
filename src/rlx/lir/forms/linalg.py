"""Factorisations by blocks: kernels for strips (`matrix_panels`), matrix products for everything else, in place.

Blocks need static sizes. A matrix whose size is known only at run time is one strip.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.ir.graph import Graph, Node
from rlx.lir.forms import small_matrices
from rlx.lir.forms.matrix_panels import (
    factor_definite,
    factor_panel,
    order_rows,
    reflect_panel,
    solve_triangle,
    swap_rows,
)
from rlx.lir.forms.matrix_rotations import diagonalise, orthogonalise
from rlx.lir.loops import Const, Expr, Stmt
from rlx.lir.schedule import Elements, Scheduler, loop_form, map_elements
from rlx.lir.views import View
from rlx.types import Size, TensorType

BLOCK = 64  # rows and columns of a diagonal block
PANEL = 16  # columns of an LU strip of a larger matrix
REFLECTORS = 32  # columns of a QR panel


def part(view: View, rows: tuple[Size, Size], columns: tuple[Size, Size]) -> View:
    """The submatrix of these rows and columns."""
    lead = view.shape[:-2]
    start = (*(0,) * len(lead), rows[0], columns[0])
    shape = (*lead, rows[1] - rows[0], columns[1] - columns[0])
    return view.slice(start, shape, (1,) * view.rank, shape)


def transposed(view: View) -> View:
    axes = list(range(view.rank))
    return view.transpose([*axes[:-2], axes[-1], axes[-2]])


def multiply(s: Scheduler, a: View, b: View, out: View, minus_from: View | None = None) -> None:
    """out = a @ b, or out = minus_from - a @ b, by the matmul of the target."""
    graph = Graph("block")
    x, y = graph.input("a", a.shape, a.dtype), graph.input("b", b.shape, b.dtype)
    if minus_from is None:
        s.body(graph.set_outputs([graph.one("matmul", x, y)]), [a, b], [out])
        return
    z, body = graph.input("c", out.shape, out.dtype), Graph("difference")
    product, total = (body.input(name, out.shape, out.dtype) for name in ("product", "total"))
    body.set_outputs([total - product])
    result = graph.one("fused_matmul", x, y, z, body=body, weights=1, columns=out.shape[-1])
    s.body(graph.set_outputs([result]), [a, b, minus_from], [out])


def scratch(s: Scheduler, like: View, *sizes: Size) -> View:
    return s.temporary(TensorType((*like.shape[:-2], *sizes), like.dtype))


def fill(s: Scheduler, out: View, name: str, value: float | None = None, source: View | None = None) -> None:
    """Fill with a number, the identity (no number), or the upper triangle of `source`."""
    row, column = out.rank - 2, out.rank - 1

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        kind = out.dtype
        if source is not None:
            return [], [(e.index(row) <= e.index(column)).choose(e.load(0), 0.0)]
        if value is not None:
            return [], [Const(value, kind)]
        return [], [e.index(row).eq(e.index(column)).select(Const(1.0, kind), 0.0)]

    reads = [] if source is None else [source]
    map_elements(s, name, out.shape, reads, [out], body, keep=(row, column))


def _is_empty(*views: View) -> bool:
    return any(0 in view.shape for view in views)


Factorisation = Callable[[Scheduler, Sequence[View], Sequence[View], Mapping[str, Any]], None]


def factorisation(name: str) -> Callable[[Factorisation], Factorisation]:
    """Register a form that writes its results to views; narrow floats are computed in f32."""

    def register(form: Factorisation) -> Factorisation:
        def lower(s: Scheduler, node: Node) -> Sequence[View]:
            operands = [_wide(s, s.view(o)) for o in node.operands]
            results = [s.result(node, i) for i in range(len(node.types))]
            wide = [r if _is_wide(r) else s.temporary(TensorType(r.shape, r.dtype.wide)) for r in results]
            form(s, operands, wide, node.attrs)
            for result, computed in zip(results, wide, strict=True):
                if computed != result:
                    s.copy_into(computed, result)
            return results

        loop_form(name)(lower)
        return form

    return register


def _is_wide(view: View) -> bool:
    return not view.dtype.is_float or view.dtype is view.dtype.wide


def _wide(s: Scheduler, view: View) -> View:
    if _is_wide(view):
        return view
    out = s.temporary(TensorType(view.shape, view.dtype.wide))
    s.copy_into(view, out)
    return out


# -- cholesky and triangular systems ----------------------------------------------------------------------------------
@factorisation("cholesky")
def _(s: Scheduler, operands: Sequence[View], results: Sequence[View], attrs: Mapping[str, Any]) -> None:
    """Block columns from left to right: each is reduced by those before it, then divided by its diagonal block."""
    (x,), (out,) = operands, results
    size = x.shape[-1]
    if _is_empty(out):
        return
    if small_matrices.are_small(x):
        small_matrices.cholesky(s, x, out)
        return
    if not isinstance(size, int) or size <= BLOCK:
        factor_definite(s, x, out, scratch(s, x, size, size), None)
        return
    for first in range(0, size, BLOCK):
        last = min(first + BLOCK, size)
        own, below = (first, last), (last, size)
        column = part(x, (first, size), own)
        if first:
            before = (0, first)
            reduced = scratch(s, x, size - first, last - first)
            multiply(s, part(out, (first, size), before), transposed(part(out, own, before)), reduced, column)
            column = reduced
        width = last - first
        block = part(column, (0, width), (0, width))
        inverse = scratch(s, x, width, width) if last < size else None
        factor_definite(s, block, part(out, own, own), scratch(s, x, width, width), inverse)
        if inverse is not None:
            multiply(s, part(column, (width, size - first), (0, width)), transposed(inverse), part(out, below, own))
            fill(s, part(out, own, below), "zeros", 0.0)


@factorisation("triangular_solve")
def _(s: Scheduler, operands: Sequence[View], results: Sequence[View], attrs: Mapping[str, Any]) -> None:
    (a, b), (out,) = operands, results
    lower, unit_diagonal = attrs["lower"], attrs["unit_diagonal"]
    if attrs["transpose"]:
        a, lower = transposed(a), not lower
    if _is_empty(out):
        return
    if all(small_matrices.are_small(view, small_matrices.LARGEST_SYSTEM) for view in (a, b)):
        small_matrices.solve(s, a, b, out, lower=lower, unit_diagonal=unit_diagonal)
    else:
        solve_by_blocks(s, a, b, out, lower=lower, unit_diagonal=unit_diagonal)


def solve_by_blocks(s: Scheduler, a: View, b: View, out: View, *, lower: bool, unit_diagonal: bool) -> None:
    """out = a⁻¹ b for a triangular matrix a; `b` and `out` may be the same."""
    size, everything = b.shape[-2], (0, b.shape[-1])
    if not isinstance(size, int) or size <= BLOCK:
        if b != out:
            s.copy_into(b, out)
        solve_triangle(s, a, out, lower=lower, unit_diagonal=unit_diagonal)
        return
    blocks = [(first, min(first + BLOCK, size)) for first in range(0, size, BLOCK)]
    for own in blocks if lower else reversed(blocks):
        known = (0, own[0]) if lower else (own[1], size)
        mine, rows = part(out, own, everything), part(b, own, everything)
        if known[0] != known[1]:
            multiply(s, part(a, own, known), part(out, known, everything), mine, rows)
        elif b != out:
            s.copy_into(rows, mine)
        solve_triangle(s, part(a, own, own), mine, lower=lower, unit_diagonal=unit_diagonal)


# -- lu ---------------------------------------------------------------------------------------------------------------
@factorisation("lu")
def _(s: Scheduler, operands: Sequence[View], results: Sequence[View], attrs: Mapping[str, Any]) -> None:
    (x,), (out, pivots, order) = operands, results
    size = x.shape[-1]
    if _is_empty(out):
        return
    if small_matrices.are_small(x):
        small_matrices.lu(s, x, out, pivots)
    else:
        s.copy_into(x, out)
        if not isinstance(size, int) or size <= BLOCK:
            factor_panel(s, out, pivots, scratch(s, x, size, size), 0)
        else:
            _factor(s, out, pivots, 0, size)
    order_rows(s, pivots, order)


def _factor(s: Scheduler, a: View, pivots: View, first: int, last: int) -> None:
    """Factor columns [first, last) from row `first` on: the left half, its effect on the right half, the right half."""
    size = a.shape[-1]
    assert isinstance(size, int)
    below = (first, size)
    if last - first <= PANEL:
        strip = part(a, below, (first, last))
        factor_panel(s, strip, _slice(pivots, first, last), scratch(s, a, last - first, size - first), first)
        return
    middle = first + (last - first + 1) // 2 // PANEL * PANEL
    middle = middle if middle > first else first + PANEL
    left, right = (first, middle), (middle, last)
    _factor(s, a, pivots, first, middle)
    swap_rows(s, part(a, (0, size), right), _slice(pivots, first, middle), first)
    top = part(a, left, right)
    solve_by_blocks(s, part(a, left, left), top, top, lower=True, unit_diagonal=True)
    rest = part(a, (middle, size), right)
    multiply(s, part(a, (middle, size), left), top, rest, rest)
    _factor(s, a, pivots, middle, last)
    swap_rows(s, part(a, (0, size), left), _slice(pivots, middle, last), middle)


def _slice(pivots: View, first: int, last: int) -> View:
    lead = pivots.shape[:-1]
    shape = (*lead, last - first)
    return pivots.slice((*(0,) * len(lead), first), shape, (1,) * pivots.rank, shape)


# -- qr ---------------------------------------------------------------------------------------------------------------
@factorisation("qr")
def _(s: Scheduler, operands: Sequence[View], results: Sequence[View], attrs: Mapping[str, Any]) -> None:
    """Panels of reflections, applied to the columns on their right; then to the identity, the last one first."""
    (x,), (q, r) = operands, results
    rows, columns = x.shape[-2:]
    assert isinstance(rows, int) and isinstance(columns, int)
    if _is_empty(x):
        if not _is_empty(q):
            fill(s, q, "identity")
        return
    if small_matrices.are_small(x):
        small_matrices.qr(s, x, q, r)
        return
    work = s.copied(x)
    strips: list[tuple[int, View, View]] = []
    for first in range(0, min(rows, columns), REFLECTORS):
        last = min(first + REFLECTORS, rows, columns)
        vectors, factor = scratch(s, x, last - first, rows - first), scratch(s, x, last - first, last - first)
        reflect_panel(s, part(work, (first, rows), (first, last)), vectors, factor)
        if last < columns:
            _reflect(s, part(work, (first, rows), (last, columns)), vectors, transposed(factor))
        strips.append((first, vectors, factor))
    fill(s, q, "identity")
    for first, vectors, factor in reversed(strips):
        _reflect(s, part(q, (first, rows), (first, q.shape[-1])), vectors, factor)
    fill(s, r, "upper", source=part(work, (0, r.shape[-2]), (0, columns)))


def _reflect(s: Scheduler, c: View, vectors: View, factor: View) -> None:
    """c -= Vᵀ T V c."""
    width, columns = vectors.shape[-2], c.shape[-1]
    inner, scaled = scratch(s, c, width, columns), scratch(s, c, width, columns)
    multiply(s, vectors, c, inner)
    multiply(s, factor, inner, scaled)
    multiply(s, transposed(vectors), scaled, c, c)


# -- eigenvalues ------------------------------------------------------------------------------------------------------
@factorisation("eigh")
def _(s: Scheduler, operands: Sequence[View], results: Sequence[View], attrs: Mapping[str, Any]) -> None:
    if not _is_empty(operands[0]):
        diagonalise(s, operands[0], *results)


@factorisation("orthogonalise")
def _(s: Scheduler, operands: Sequence[View], results: Sequence[View], attrs: Mapping[str, Any]) -> None:
    if not _is_empty(operands[0]):
        rows, companions = (s.copied(view) for view in operands)
        orthogonalise(s, rows, companions, results)

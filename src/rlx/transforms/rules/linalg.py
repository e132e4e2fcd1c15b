"""Factorisations and triangular systems: derivatives are products and triangular solves of the factors.

Rules follow Giles, An extended collection of matrix derivative results for forward and reverse mode AD (2008). Where
eigenvalues or singular values coincide, their vectors are not unique and have no derivative: the terms that would
divide by the difference are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import I64
from rlx.errors import GraphError
from rlx.ir.graph import Value
from rlx.transforms.build import eye, iota, slice_axis, sum_present, zeros, zeros_like
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, vjp


def solve(a: Value, b: Value, *, lower: bool, transpose: bool = False, unit_diagonal: bool = False) -> Value:
    attrs = {"lower": lower, "transpose": transpose, "unit_diagonal": unit_diagonal}
    return a.graph.one("triangular_solve", a, b, **attrs)


def divide_right(b: Value, a: Value, *, lower: bool, transpose: bool = False, unit_diagonal: bool = False) -> Value:
    """Return b A⁻¹ for a triangle A of a, or b A⁻ᵀ."""
    return solve(a, b.mT, lower=lower, transpose=not transpose, unit_diagonal=unit_diagonal).mT


def below(x: Value, diagonal: int = 0) -> Value:
    """Whether an element of a matrix is on or below a diagonal."""
    graph, (rows, columns) = x.graph, x.shape[-2:]
    row, column = iota(graph, rows, I64).reshape(rows, 1), iota(graph, columns, I64).reshape(1, columns)
    return graph.one("less_equal", column, row + diagonal)


def lower_part(x: Value, diagonal: int = 0) -> Value:
    """Zero the elements above a diagonal."""
    keep = below(x, diagonal)
    return x.graph.one("where", keep, x, zeros(x.graph, x.type.with_shape()))


def upper_part(x: Value, diagonal: int = 0) -> Value:
    """Zero the elements below a diagonal."""
    drop = below(x, diagonal - 1)
    return x.graph.one("where", drop, zeros(x.graph, x.type.with_shape()), x)


def of_lower_triangle(symmetric: Value) -> Value:
    """Return the gradient of a lower triangle that stands for a symmetric matrix, from that of the matrix."""
    diagonal = symmetric * eye(symmetric.graph, symmetric.shape[-1], symmetric.dtype)
    return lower_part(symmetric + symmetric.mT, -1) + diagonal


def half_diagonal(x: Value) -> Value:
    """Return the lower triangle, with half of its diagonal."""
    return lower_part(x) - 0.5 * x * eye(x.graph, x.shape[-1], x.dtype)


def inverse_gaps(values: Value) -> Value:
    """Return 1 / (values[j] - values[i]) as a matrix; 0 where they are equal."""
    gap = values.reshape(*values.shape[:-1], 1, values.shape[-1]) - values.reshape(*values.shape, 1)
    g, equal = values.graph, gap.equal(0.0)
    return g.one("where", equal, 0.0, 1.0 / g.one("where", equal, 1.0, gap).astype(gap.dtype)).astype(gap.dtype)


def as_diagonal(values: Value) -> Value:
    """Return the diagonal matrix of values."""
    return values.reshape(*values.shape, 1) * eye(values.graph, values.shape[-1], values.dtype)


@vjp("cholesky")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    """S = L⁻ᵀ Φ(Lᵀ L̄) L⁻¹, where Φ takes the lower triangle and half of the diagonal."""
    factor = at.result
    inner = half_diagonal(factor.mT @ lower_part(ct))
    full = divide_right(solve(factor, inner, lower=True, transpose=True), factor, lower=True)
    return [of_lower_triangle(0.5 * (full + full.mT))]


@vjp("triangular_solve")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    a, x, attrs = at.operand(0), at.result, dict(at.attrs)
    back = solve(a, ct, **(attrs | {"transpose": not attrs["transpose"]}))
    if not at.wanted[0]:
        return [None, back]
    outer = x @ back.mT if attrs["transpose"] else back @ x.mT
    edge = 1 if attrs["unit_diagonal"] else 0
    return [-(lower_part(outer, -edge) if attrs["lower"] else upper_part(outer, edge)), back]


@vjp("lu")
def _(at: NodeCtx, ct: Value | None, _: Value | None, __: Value | None) -> Cotangents:
    """Ā = Pᵀ L⁻ᵀ (tril(Lᵀ L̄, -1) + triu(Ū Uᵀ)) U⁻ᵀ."""
    if ct is None:
        return [None]
    lu, order = at.results[0], at.results[2]
    lower, upper = lower_part(lu, -1) + eye(lu.graph, lu.shape[-1], lu.dtype), upper_part(lu)
    inner = lower_part(lower.mT @ lower_part(ct, -1), -1) + upper_part(upper_part(ct) @ upper.mT)
    left = solve(lu, inner, lower=True, transpose=True, unit_diagonal=True)
    permuted = divide_right(left, lu, lower=False, transpose=True)
    size = order.shape[-1]
    number = iota(lu.graph, size, order.dtype).reshape(size, 1)
    permutation = number.equal(order.reshape(*order.shape[:-1], 1, size)).astype(
        lu.dtype
    )  # rows of x from those of L U
    return [permutation @ permuted]


@vjp("qr")
def _(at: NodeCtx, d_q: Value | None, d_r: Value | None) -> Cotangents:
    """Ā = (Q̄ + Q copyltu(R R̄ᵀ - Q̄ᵀ Q)) R⁻ᵀ; further columns of a wide matrix are Q times those of R."""
    q, r = at.results
    (rows, inner), columns = q.shape[-2:], r.shape[-1]
    assert isinstance(rows, int) and isinstance(inner, int) and isinstance(columns, int), "sizes are static"
    if inner > columns:
        raise GraphError("qr: a complete Q has no derivative: its further columns are any basis of the rest")
    d_q = zeros_like(q) if d_q is None else d_q
    d_r = zeros_like(r) if d_r is None else upper_part(d_r)
    axis = r.rank - 1
    left, d_left = (slice_axis(v, axis, 0, inner) for v in (r, d_r))
    rest = None
    if columns > rows:
        right, d_right = (slice_axis(v, axis, inner, columns) for v in (r, d_r))
        d_q = d_q + (q @ right) @ d_right.mT
        rest = q @ d_right
    m = left @ d_left.mT - d_q.mT @ q
    copied = lower_part(m) + lower_part(m, -1).mT
    d_x = divide_right(d_q + q @ copied, left, lower=False, transpose=True)
    return [d_x if rest is None else at.graph.one("concatenate", d_x, rest, axis=axis)]


@vjp("eigh")
def _(at: NodeCtx, d_values: Value | None, d_vectors: Value | None) -> Cotangents:
    """Ā = V (diag(w̄) + F ∘ (Vᵀ V̄)) Vᵀ, with F = 1 / (w[j] - w[i])."""
    values, v = at.results
    parts = [None if d_values is None else as_diagonal(d_values)]
    if d_vectors is not None:
        parts.append(inverse_gaps(values) * (v.mT @ d_vectors))
    inner = sum_present(parts)
    if inner is None:
        return [None]
    full = v @ inner @ v.mT
    return [of_lower_triangle(0.5 * (full + full.mT))]


@vjp("svd")
def _(at: NodeCtx, d_u: Value | None, d_values: Value | None, d_v: Value | None) -> Cotangents:
    """Ā = U (diag(s̄) + (J + Jᵀ) S + S (K + Kᵀ)) Vᵀ + (I - U Uᵀ) Ū S⁻¹ Vᵀ, with J = F ∘ (Uᵀ Ū), K = F ∘ (Vᵀ V̄)."""
    u, values, v = at.results
    row = values.reshape(*values.shape[:-1], 1, values.shape[-1])
    column = values.reshape(*values.shape, 1)
    gaps = inverse_gaps(values * values)
    parts = [None if d_values is None else as_diagonal(d_values)]
    outside = None
    if d_u is not None:
        j = gaps * (u.mT @ d_u)
        parts.append((j + j.mT) * row)
        if u.shape[-2] != u.shape[-1]:
            zero = row.equal(0.0)
            inverse = at.graph.one("where", zero, 0.0, 1.0 / at.graph.one("where", zero, 1.0, row)).astype(u.dtype)
            outside = ((d_u - u @ (u.mT @ d_u)) * inverse) @ v.mT
    if d_v is not None:
        k = gaps * (v.mT @ d_v)
        parts.append(column * (k + k.mT))
    inner = sum_present(parts)
    if inner is None:
        return [None]
    return [sum_present([u @ inner @ v.mT, outside])]


@batching("cholesky", "triangular_solve", "lu", "qr", "eigh", "svd")
def _(vmapped: Vmapped) -> Sequence[Value]:
    operands = [vmapped.full(i) for i in range(len(vmapped.operands))]
    return vmapped.graph.build(vmapped.node.op, operands, dict(vmapped.attrs)).results

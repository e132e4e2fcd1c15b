"""RoPE: a rotation, whose transpose is the inverse rotation."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.build import cast_to, slice_axis, zeros_like
from rlx.transforms.rule_tables import Cotangents, NodeCtx, Vmapped, batching, vjp
from rlx.transforms.vmap import by_scan, fold_batch
from rlx.types import Size


@vjp("rope")
def _(at: NodeCtx, ct: Value) -> Cotangents:
    x, cos, sin, positions = (at.operand(i) for i in range(4))
    dx = at.graph.one("rope", ct, cos, -sin, positions, **at.attrs) if at.wanted[0] else None
    if not (at.wanted[1] or at.wanted[2]):
        return dx, None, None, None
    n, style = cos.shape[1], at.attrs["style"]
    (a, b), (da, db) = (_pairs(cast_to(v, cos.dtype), n, style) for v in (x, ct))  # [batch, seq, heads, n]
    table_grads: list[Value | None] = []
    for wanted, table, product in ((at.wanted[1], cos, a * da + b * db), (at.wanted[2], sin, a * db - b * da)):
        rows = cast_to(at.graph.one("sum", product, axis=2), table.dtype)
        table_grads.append(at.graph.one("scatter_add", zeros_like(table), positions, rows) if wanted else None)
    return dx, *table_grads, None


def _pairs(x: Value, n: Size, style: str) -> tuple[Value, Value]:
    """Return both elements of each rotated pair."""
    if style == "halves":
        return slice_axis(x, 3, 0, n), slice_axis(x, 3, n, 2 * n)
    both = slice_axis(x, 3, 0, 2 * n)
    pairs = both.reshape(*both.shape[:3], n, 2)
    return pairs[..., 0], pairs[..., 1]


@batching("rope")
def _(vmapped: Vmapped) -> Sequence[Value]:
    if vmapped.batched[1] or vmapped.batched[2]:
        return by_scan(vmapped)
    return fold_batch(vmapped, (0, 3))

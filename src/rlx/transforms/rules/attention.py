"""Attention: its gradient is an op that recomputes the weights block by block; everything else uses plain ops.

Plain ops materialise all scores. They serve second derivatives, forward mode, and the gradient of a bias, which is as
large as the scores itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from rlx.dtypes import I32
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ops.attention import parse_mask, row_type
from rlx.transforms.build import cast_to, count, flat, iota, zeros_like
from rlx.transforms.rule_tables import Cotangents, Pull, Vmapped, batching, linearise, parts
from rlx.transforms.vjp import linearise_decomposition
from rlx.transforms.vmap import fold_batch
from rlx.types import Size

LOW = -1e30  # score of a masked key; -inf would give NaN for a fully masked row


def visible(graph: Graph, kind: str, queries: Size, keys: Size) -> Value | None:
    """Return the mask [queries, keys] of visible keys; None for all. Queries and keys end at the same position."""
    mask = parse_mask(kind)
    if not mask.limited:
        return None
    gap: Any = keys - queries
    if not isinstance(gap, int):
        last: Any = count(graph, keys, I32)
        gap = last - count(graph, queries, I32)
    if mask.ahead:
        gap = gap + mask.ahead
    last_key = (iota(graph, queries) + gap).reshape(queries, 1)
    key = iota(graph, keys).reshape(1, keys)
    seen = key <= last_key
    return seen if not mask.window else graph.one("logical_and", seen, key > last_key - mask.window)


def grouped(x: Value, kv_heads: int) -> Value:
    """Rearrange [batch, seq, heads, d] to [batch, kv_heads, group · seq, d]."""
    batch, seq, heads, d = x.shape
    rows = x.graph.one("transpose", x, axes=(0, 2, 1, 3))
    return rows.reshape(batch, kv_heads, heads // kv_heads * seq, d)


def ungrouped(x: Value, heads: Size, seq: Size) -> Value:
    """Undo `grouped`."""
    batch, d = x.shape[0], x.shape[3]
    return x.graph.one("transpose", x.reshape(batch, heads, seq, d), axes=(0, 2, 1, 3))


@dataclass(frozen=True)
class Scores:
    """Attention scores [batch, heads, ...] and the q and k they come from, [batch, kv_heads, group · queries, ...]."""

    q: Value
    k: Value
    scores: Value
    seen: Value | None  # mask of visible keys; None for all
    capped: Value | None  # tanh of the scores, with softcap
    scale: float

    def where_seen(self, value: Value, other: float) -> Value:
        """Return `value` where keys are visible, else `other`."""
        return value if self.seen is None else value.graph.one("where", self.seen, value, other)


def score(q: Value, k: Value, mask: Value | None, mask_kind: str, scale: float | None, softcap: float | None) -> Scores:
    """Compute the scores of all queries and keys."""
    graph, wide = q.graph, q.dtype.wide
    batch, seq, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    assert isinstance(dim, int) and isinstance(kv_heads, int)
    factor = scale if scale is not None else 1 / math.sqrt(dim)
    qg, kg = (grouped(cast_to(x, wide), kv_heads) for x in (q, k))
    scores = (qg @ kg.mT * factor).reshape(batch, heads, seq, keys)
    capped = None
    if softcap is not None:
        capped = graph.one("tanh", scores / softcap)
        scores = capped * softcap
    seen = visible(graph, mask_kind, seq, keys)
    if mask is not None and parse_mask(mask_kind).segments:
        own = mask.reshape(batch, 1, seq, 1)
        same = graph.one("logical_and", own.equal(mask.reshape(batch, 1, 1, keys)), own >= 0)
        seen = same if seen is None else graph.one("logical_and", same, seen)
    elif mask is not None and mask_kind == "custom":
        keep = mask if mask.dtype.is_bool else mask >= 0.5
        seen = keep.reshape(batch, 1, 1, keys)
    elif mask is not None:
        seen = mask > -math.inf
        scores = scores + cast_to(graph.one("where", seen, mask, 0.0), wide)
    return Scores(qg, kg, scores, seen, capped, factor)


# -- decompositions ---------------------------------------------------------------------------------------------------
@parts("attention_lse")
def _(
    q: Value, k: Value, v: Value, mask: Value | None, *, mask_kind: str, scale: float | None, softcap: float | None
) -> tuple[Value, Value]:
    graph, s = q.graph, score(q, k, mask, mask_kind, scale, softcap)
    masked = s.where_seen(s.scores, LOW)
    top = graph.one("max", masked, axis=-1, keepdims=True)
    lse = graph.one("sum", (masked - top).exp(), axis=-1, keepdims=True).log() + top
    weights = s.where_seen(graph.one("softmax", masked, axis=-1), 0.0)
    batch, seq, heads, _ = q.shape
    kv_heads = k.shape[2]
    assert isinstance(kv_heads, int) and isinstance(heads, int)
    rows = weights.reshape(batch, kv_heads, heads // kv_heads * seq, k.shape[1])
    out = ungrouped(rows @ grouped(cast_to(v, rows.dtype), kv_heads), heads, seq)
    lse = graph.one("where", lse > LOW / 2, lse, -math.inf)
    return cast_to(out, q.dtype), lse.reshape(batch, heads, seq)


@parts("attention")
def _(q: Value, k: Value, v: Value, mask: Value | None, **attrs: Any) -> Value:
    lse_attrs = {name: value for name, value in attrs.items() if name not in ("num_heads", "head_dim")}
    return parts["attention_lse"](q, k, v, mask, **lse_attrs)[0]


@parts("attention_grad")
def _(
    q: Value, k: Value, v: Value, dy: Value, lse: Value, delta: Value, mask: Value | None, *, mask_kind: str,
    scale: float | None, softcap: float | None,
) -> tuple[Value, Value, Value]:  # fmt: skip
    s, wide = score(q, k, mask, mask_kind, scale, softcap), q.dtype.wide
    dy, v, lse, delta = (cast_to(x, wide) for x in (dy, v, lse, delta))
    batch, seq, heads, _ = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    assert isinstance(kv_heads, int) and isinstance(heads, int)

    def of_rows(x: Value) -> Value:
        return x.reshape(batch, kv_heads, heads // kv_heads * seq, x.shape[3])

    weights = of_rows(s.where_seen(s.scores - lse.reshape(batch, heads, seq, 1), LOW).exp())
    dyg, vg = grouped(dy, kv_heads), grouped(v, kv_heads)
    inner = weights * (dyg @ vg.mT - of_rows(delta.reshape(batch, heads, seq, 1))) * s.scale
    if s.capped is not None:
        inner = inner * of_rows(1 - s.capped * s.capped)
    dq = ungrouped(inner @ s.k, heads, seq)
    # Transposes the small operands, not the scores.
    dk, dv = (ungrouped((a.mT @ b).mT, kv_heads, keys) for a, b in ((s.q, inner), (dyg, weights)))
    return cast_to(dq, q.dtype), cast_to(dk, q.dtype), cast_to(dv, q.dtype)


# -- reverse mode -----------------------------------------------------------------------------------------------------
@linearise("attention", "attention_lse")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    if wanted[3] and node.attrs["mask_kind"] == "bias":  # its gradient is as large as the scores: use plain ops
        return linearise_decomposition(into, node, operands, wanted)
    attrs = {name: node.attrs[name] for name in ("mask_kind", "scale", "softcap")}
    q, k, v, mask = operands
    assert q is not None and k is not None and v is not None
    types, wide = (node.types[0], row_type(q.type)), q.dtype.wide
    y, lse = into.append("attention_lse", tuple(operands), attrs, types, node.origin).results

    def pull(cts: Cotangents) -> Cotangents:
        dy = zeros_like(y) if cts[0] is None else cts[0]
        share = cast_to(dy, wide) * cast_to(y, wide)
        delta = into.one("transpose", into.one("sum", share, axis=-1), axes=(0, 2, 1))
        for dlse in cts[1:]:
            delta = delta if dlse is None else delta - dlse
        return [*into.apply("attention_grad", q, k, v, dy, lse, delta, mask, **attrs), None]

    return (y, lse)[: len(node.types)], pull


# -- vmap -------------------------------------------------------------------------------------------------------------
@batching("attention", "attention_lse", "attention_grad")
def _(vmapped: Vmapped) -> Sequence[Value]:
    at = len(vmapped.operands) - 1  # the mask is the last operand
    mask = vmapped.operands[at]
    if mask is None:
        return fold_batch(vmapped, range(at))
    batch = vmapped.full(0).shape[1]
    if not vmapped.batched[at] and mask.shape[0] == 1 and batch != 1:
        return fold_batch(vmapped, range(at))
    each = vmapped.full(at)
    if each.shape[1] == 1 and batch != 1:
        each = vmapped.graph.one("expand", each, shape=(vmapped.size, batch, *each.shape[2:]))
    operands = [flat(vmapped.full(i), 2) for i in range(at)]
    out = vmapped.graph.build(vmapped.node.op, [*operands, flat(each, 2)], dict(vmapped.attrs))
    return [r.reshape(vmapped.size, *t.shape) for r, t in zip(out.results, vmapped.node.types, strict=True)]

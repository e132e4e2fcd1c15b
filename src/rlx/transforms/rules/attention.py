"""Attention: the usual backward formulas, with every mask, softcap and grouped heads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rlx.dtypes import I32
from rlx.ir.graph import Graph, Value
from rlx.ops.attention import split_mask
from rlx.transforms.batch import folded
from rlx.transforms.build import count, counter, flat, in_type, sum_to
from rlx.transforms.tables import Given, Lanes, Site, batching, vjp
from rlx.types import Size

LOW = -1e30  # the score of a key that is not seen; -inf would make NaN of a row that sees nothing


def visible(graph: Graph, kind: str, queries: Size, keys: Size) -> Value | None:
    """[queries, keys]: which keys a query sees; None for all. Both end at the same position."""
    name, window = split_mask(kind)
    if name not in ("causal", "sliding"):
        return None
    gap: Any = keys - queries
    if not isinstance(gap, int):
        last: Any = count(graph, keys, I32)
        gap = last - count(graph, queries, I32)
    row = (counter(graph, queries) + gap).reshape(queries, 1)
    key = counter(graph, keys).reshape(1, keys)
    seen = key <= row
    return seen if not window else graph.one("logical_and", seen, key > row - window)


@dataclass(frozen=True)
class Weights:
    """Attention weights and what they were made of: tensors are [batch, kv_heads, group · queries, ...]."""

    q: Value
    k: Value
    v: Value
    weights: Value
    capped: Value | None  # tanh of the scores, where they are capped
    scale: float
    group: int


def grouped(x: Value, kv_heads: int) -> Value:
    """[batch, seq, heads, d] as [batch, kv_heads, group · seq, d]."""
    batch, seq, heads, d = x.shape
    rows = x.graph.one("transpose", x, axes=(0, 2, 1, 3))
    return rows.reshape(batch, kv_heads, heads // kv_heads * seq, d)


def ungrouped(x: Value, heads: Size, seq: Size) -> Value:
    """The opposite of `grouped`."""
    batch, d = x.shape[0], x.shape[3]
    return x.graph.one("transpose", x.reshape(batch, heads, seq, d), axes=(0, 2, 1, 3))


def weigh(at: Site) -> Weights:
    """The weights again: they are not kept."""
    graph = at.graph
    q, k, v = (at.operand(i) for i in range(3))
    wide = q.dtype.compute
    batch, seq, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    assert isinstance(dim, int) and isinstance(heads, int) and isinstance(kv_heads, int)
    scale = at.attrs["scale"] if at.attrs["scale"] is not None else 1 / math.sqrt(dim)
    qg, kg, vg = (grouped(in_type(x, wide), kv_heads) for x in (q, k, v))
    scores = (qg @ kg.mT * scale).reshape(batch, heads, seq, keys)
    capped, softcap = None, at.attrs["softcap"]
    if softcap is not None:
        capped = graph.one("tanh", scores / softcap)
        scores = capped * softcap
    seen, mask = visible(graph, at.attrs["mask_kind"], seq, keys), at.operands[3]
    if mask is not None and at.attrs["mask_kind"] == "custom":
        keep = mask if mask.dtype.is_bool else mask >= 0.5
        seen = keep.reshape(batch, 1, 1, keys)
    elif mask is not None:
        seen = mask > -math.inf
        scores = scores + graph.one("where", seen, mask, 0.0)
    if seen is None:
        weights = graph.one("softmax", scores, axis=-1)
    else:
        weights = graph.one("softmax", graph.one("where", seen, scores, LOW), axis=-1)
        weights = graph.one("where", seen, weights, 0.0)
    return Weights(qg, kg, vg, weights, capped, scale, heads // kv_heads)


@vjp("attention")
def _(at: Site, ct: Value) -> Given:
    w = weigh(at)
    q, k, v, mask = at.operands
    assert q is not None and k is not None and v is not None
    batch, seq, heads, _ = q.shape
    kv_heads = w.k.shape[1]
    assert isinstance(kv_heads, int)
    ct = grouped(in_type(ct, w.q.dtype), kv_heads)  # [batch, kv_heads, group · seq, value_dim]
    rows = w.weights.reshape(batch, kv_heads, w.group * seq, k.shape[1])
    made: list[Value | None] = [None, None, None, None]
    if at.wanted[2]:
        made[2] = in_type(ungrouped((ct.mT @ rows).mT, kv_heads, v.shape[1]), v.dtype)  # turns what is small
    share = rows * (ct @ w.v.mT)
    scores = share - rows * at.graph.one("sum", share, axis=-1, keepdims=True)
    if mask is not None and at.wanted[3] and at.attrs["mask_kind"] == "bias":
        made[3] = sum_to(scores.reshape(w.weights.shape), mask.type)
    if w.capped is not None:
        scores = scores * (1 - w.capped * w.capped).reshape(scores.shape)
    scores = scores * w.scale
    if at.wanted[0]:
        made[0] = in_type(ungrouped(scores @ w.k, heads, seq), q.dtype)
    if at.wanted[1]:
        made[1] = in_type(ungrouped((w.q.mT @ scores).mT, kv_heads, k.shape[1]), k.dtype)
    return made


@batching("attention")
def _(lanes: Lanes) -> Sequence[Value]:
    mask = lanes.operands[3]
    if mask is None:
        return folded(lanes, (0, 1, 2))
    batch = lanes.full(0).shape[1]
    if not lanes.batched[3] and mask.shape[0] == 1 and batch != 1:
        return folded(lanes, (0, 1, 2))
    each = lanes.full(3)
    if each.shape[1] == 1 and batch != 1:
        each = lanes.graph.one("expand", each, shape=(lanes.size, batch, *each.shape[2:]))
    merged = flat(each, 2)
    operands = [flat(lanes.full(i), 2) for i in range(3)]
    made = lanes.graph.one("attention", *operands, merged, **lanes.attrs)
    return [made.reshape(lanes.size, *lanes.node.types[0].shape)]

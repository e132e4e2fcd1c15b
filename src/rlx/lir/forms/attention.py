"""Attention as plain loops: a unit is one query of one head, with the scores of its keys in a row of memory.

This needs memory for seq × keys scores per head; backends meant for long sequences replace these forms with their own
kernels.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlx.dtypes import BOOL, I64
from rlx.ir.graph import Node, Value
from rlx.lir.forms.linear import Strided, multiply
from rlx.lir.loops import Expr, For, Index, Let, Reduce, Ref, Stmt, number
from rlx.lir.schedule import Scheduler, decode_unit, loop_form
from rlx.lir.views import View
from rlx.ops.attention import parse_mask
from rlx.types import Size, TensorType, product

# The current unit and key.
BATCH, QUERY, HEAD, KV_HEAD, KEY = Ref("b", I64), Ref("i", I64), Ref("h", I64), Ref("kv", I64), Index("t")
POSITION = Ref("position", I64)  # of the query
Read = Callable[[Expr], Expr]  # an element of the current key or value


class Queries(Strided):
    """A kernel with one unit per batch entry, query and head, which computes scores key by key."""

    def __init__(self, s: Scheduler, node: Node, q: View, kv_heads: Size) -> None:
        super().__init__(s, node.op)
        heads, head_dim = q.shape[2:]
        assert isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(head_dim, int)
        scale = node.attrs["scale"]
        self.scale = 1 / math.sqrt(head_dim) if scale is None else scale
        self.softcap: float | None = node.attrs["softcap"]
        self.mask = parse_mask(node.attrs["mask_kind"])
        self.kind = q.dtype.wide  # sums are accumulated in the wide type on every target
        self.q, self.head_dim, self.units = self.read(q), head_dim, product(q.shape[:3])
        unit = decode_unit(self.builder, q.shape[:3], ["b", "i", "h"])
        self.lets: list[Stmt] = [*unit, Let("kv", HEAD.quot(heads // kv_heads))]

    def dot(self, query: int, key: Read, size: int) -> Expr:
        """The dot product of a row of a query tensor and the current key."""
        d = Index("d")
        return Reduce(
            "sum", "d", size, self.load(query, BATCH, QUERY, HEAD, d).cast(self.kind) * key(d).cast(self.kind)
        )

    def score(self, key: Read) -> list[Stmt]:
        """Define `score`, before masking, and `slope`, its derivative with respect to q·k."""
        scaled, capped = self.dot(self.q, key, self.head_dim) * self.scale, Ref("bent", self.kind)
        if self.softcap is None:
            return [Let("score", scaled), Let("slope", number(self.scale, self.kind))]
        return [
            Let("bent", (scaled / self.softcap).tanh()),
            Let("score", capped * self.softcap),
            Let("slope", (1.0 - capped * capped) * self.scale),
        ]

    def masked(self, mask: View | None, visible: Expr) -> list[Stmt]:
        """Define `masked`: the score, or -inf for a masked key."""
        score: Expr = Ref("score", self.kind)
        if mask is not None and self.mask.segments:
            ids = self.read(mask)
            own = self.load(ids, BATCH, QUERY)
            visible = visible & (own >= 0) & own.eq(self.load(ids, BATCH, KEY))
        elif mask is not None and self.mask.name == "custom":
            keep = self.load(self.read(mask), BATCH, KEY)
            visible = visible & (keep if keep.dtype is BOOL else keep >= 0.5)
        elif mask is not None:
            strides = tuple(0 if size == 1 else step for size, step in zip(mask.shape, mask.strides, strict=True))
            bias = self.load(self.read(mask.with_(mask.shape, strides)), BATCH, HEAD, QUERY, KEY).cast(self.kind)
            score, visible = score + bias, visible & bias.ne(-math.inf)
        return [Let("masked", visible.select(score, -math.inf))]

    def visible(self, position: Expr) -> Expr:
        """Whether the query may attend to a key at this position."""
        last = POSITION + self.mask.ahead if self.mask.ahead else POSITION
        if self.mask.window:
            return (position <= last) & (position > last - self.mask.window)
        return position <= last if self.mask.limited else number(True, BOOL)

    def launch(self, s: Scheduler, body: Sequence[Stmt], flops: Size) -> None:
        root = For("u", self.builder.arg("units", self.units), (*self.lets, *body))
        self.builder.launch(s, root, self.units, split="queries", flops=flops)


def _optional(s: Scheduler, operand: Value | None) -> View | None:
    return None if operand is None else s.view(operand)


# -- forward ----------------------------------------------------------------------------------------------------------
@loop_form("attention", "attention_lse")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """`attention`, and `attention_lse`, which also returns the log-sum-exp of the scores."""
    q, k, v = (s.view(o) for o in node.operands[:3])
    results = [s.result(node, i) for i in range(len(node.types))]
    a = Queries(s, node, q, k.shape[2])
    keys, values = a.read(k), a.read(v)
    # Queries and keys end at the same position.
    a.lets.append(Let("position", QUERY + a.builder.arg("ahead", k.shape[1] - q.shape[1])))
    scores = [
        *a.score(lambda d: a.load(keys, BATCH, KEY, KV_HEAD, d)),
        *a.masked(_optional(s, node.operands[3]), a.visible(KEY)),
    ]
    attend(s, a, q, k.shape[1], scores, lambda j: a.load(values, BATCH, KEY, KV_HEAD, j), results)
    return results


def attend(
    s: Scheduler, a: Queries, q: View, keys: Size, scores: Sequence[Stmt], value: Read, results: Sequence[View]
) -> None:
    """softmax(scores) times values. Keys of weight 0 are skipped, even if their values are NaN; no keys give 0."""
    out, j = results[0], Index("j")
    row = a.write(s.temporary(TensorType((*q.shape[:3], keys), a.kind)))
    count = a.builder.arg("keys", keys)
    here, top, total = a.load(row, BATCH, QUERY, HEAD, KEY), Ref("top", a.kind), Ref("total", a.kind)
    weighted = here.ne(0.0).choose(here * value(j).cast(a.kind), 0.0)
    body: list[Stmt] = [
        For("t", count, (*scores, a.store(row, Ref("masked", a.kind), BATCH, QUERY, HEAD, KEY)), vector=True),
        Let("top", Reduce("max", "t", count, here)),
        Let("base", top.eq(-math.inf).select(0.0, top)),
        For("t", count, (a.store(row, (here - Ref("base", a.kind)).exp(), BATCH, QUERY, HEAD, KEY),), vector=True),
        Let("total", Reduce("sum", "t", count, here)),
        Let("divisor", total.eq(0.0).select(1.0, total)),
        For(
            "j",
            a.builder.arg("columns", out.shape[3]),
            (
                a.store(
                    a.write(out), Reduce("sum", "t", count, weighted) / Ref("divisor", a.kind), BATCH, QUERY, HEAD, j
                ),
            ),
            vector=True,
        ),
    ]
    if len(results) == 2:
        body.append(a.store(a.write(results[1]), total.log() + top, BATCH, HEAD, QUERY))
    a.launch(s, body, product(q.shape[:3]) * keys * (2 * (q.shape[3] + out.shape[3])))


# -- gradient ---------------------------------------------------------------------------------------------------------
@loop_form("attention_grad")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """Recompute the weights P and the score gradients dS, then dQ = dS K, dK = dSᵀ Q and dV = Pᵀ dY."""
    q, k, v, dy, lse, delta = (s.view(o) for o in node.operands[:6])
    dq, dk, dv = (s.result(node, i) for i in range(3))
    batch, queries, heads, head_dim = q.shape
    kv_heads, value_dim = k.shape[2], v.shape[3]
    assert isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(value_dim, int)
    a = Queries(s, node, q, kv_heads)
    scratch = TensorType((batch, heads, queries, k.shape[1]), a.kind)
    p, ds = s.temporary(scratch), s.temporary(scratch)
    keys, values, outer, sums, deltas = (a.read(view) for view in (k, v, dy, lse, delta))
    a.lets += [
        Let("position", QUERY + a.builder.arg("ahead", k.shape[1] - queries)),
        Let("lse", a.load(sums, BATCH, HEAD, QUERY).cast(a.kind)),
        Let("base", Ref("lse", a.kind).eq(-math.inf).select(0.0, Ref("lse", a.kind))),
        Let("delta", a.load(deltas, BATCH, HEAD, QUERY).cast(a.kind)),
    ]
    weight, gain = Ref("weight", a.kind), a.dot(outer, lambda d: a.load(values, BATCH, KEY, KV_HEAD, d), value_dim)
    of_key: list[Stmt] = [
        *a.score(lambda d: a.load(keys, BATCH, KEY, KV_HEAD, d)),
        *a.masked(_optional(s, node.operands[6]), a.visible(KEY)),
        Let("weight", (Ref("masked", a.kind) - Ref("base", a.kind)).exp()),
        a.store(a.write(p), weight, BATCH, HEAD, QUERY, KEY),
        Let("change", weight * (gain - Ref("delta", a.kind)) * Ref("slope", a.kind)),
        a.store(a.write(ds), weight.ne(0.0).select(Ref("change", a.kind), 0.0), BATCH, HEAD, QUERY, KEY),
    ]
    row = For("t", a.builder.arg("keys", k.shape[1]), tuple(of_key), vector=True)
    a.launch(s, [row], product(scratch.shape) * (2 * (head_dim + value_dim)))
    group = heads // kv_heads
    by_head = (batch, kv_heads, group)

    def heads_first(view: View) -> View:
        """[batch, seq, heads, size] as [batch, heads, seq, size]."""
        return view.transpose((0, 2, 1, 3))

    def per_key(view: View) -> View:
        """One row per query of each head in a group: [batch, kv_heads, group · queries, size]."""
        return _reshaped(s.contiguous(view), (batch, kv_heads, queries * group, view.shape[3]))

    out = _reshaped(heads_first(dq), (*by_head, queries, head_dim))
    multiply(s, _reshaped(ds, (*by_head, queries, k.shape[1])), [_one_group(heads_first(k))], [], [out], masked=True)
    for left, right, result in ((ds, q, dk), (p, dy, dv)):
        transposed = per_key(left).transpose((0, 1, 3, 2))
        multiply(s, transposed, [per_key(heads_first(right))], [], [heads_first(result)], masked=True)
    return [dq, dk, dv]


def _reshaped(view: View, shape: tuple[Size, ...]) -> View:
    reshaped = view.reshape(shape)
    assert reshaped is not None, "the heads axis can be split, and contiguous axes merged"
    return reshaped


def _one_group(view: View) -> View:
    """[batch, kv_heads, keys, size] with an axis of size 1 for the heads of a group."""
    (batch, heads, *shape), (first, second, *strides) = view.shape, view.strides
    return view.with_((batch, heads, 1, *shape), (first, second, 0, *strides))

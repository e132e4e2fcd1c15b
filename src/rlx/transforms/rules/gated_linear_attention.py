"""Gated linear attention, differentiated as a scan over tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Graph, Value
from rlx.transforms.rules.recurrent import Results, batched, chunked, over_tokens
from rlx.transforms.tables import Vmapped, batching, parts


def _token_of_attention(state: Value, q: Value, k: Value, v: Value, g: Value) -> Results:
    batch, heads, n, m = state.shape
    after = state * g.exp().reshape(batch, heads, 1, 1) + k.reshape(batch, heads, n, 1) * v.reshape(batch, heads, 1, m)
    return after, (q.reshape(batch, heads, 1, n) @ after).reshape(batch, heads, m)


@parts("gated_linear_attention_carry")
def _(q: Value, k: Value, v: Value, g: Value, state: Value, _: None) -> tuple[Value, Value]:
    batch, seq, groups, n = q.shape
    heads = v.shape[2]
    assert isinstance(heads, int) and isinstance(groups, int)

    def for_heads(x: Value) -> Value:
        shape = (batch, seq, groups, heads // groups, n)
        wide = x.graph.one("expand", x.reshape(batch, seq, groups, 1, n), shape=shape)
        return wide.reshape(batch, seq, heads, n)

    def steps(g: Graph, start: Value, shared: Sequence[Value], rows: Sequence[Value]) -> Results:
        return over_tokens(g, start, shared, rows, _token_of_attention)

    def native(g: Graph, start: Value, shared: Sequence[Value], rows: Sequence[Value]) -> Results:
        y, after = g.apply("gated_linear_attention_carry", *rows, start)
        return after, y

    last, y = chunked(state, [], [for_heads(q), for_heads(k), v, g], steps, native)
    return y, last


@batching("gated_linear_attention_carry")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return batched(vmapped)

"""Gated linear attention: differentiated as a scan over tokens."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Value
from rlx.transforms.rule_tables import Vmapped, batching, parts
from rlx.transforms.rules.recurrent import Results, batch_recurrence, reset, scan_chunks


def _token_of_attention(state: Value, q: Value, k: Value, v: Value, g: Value, begins: Value | None = None) -> Results:
    batch, heads, n, m = state.shape
    state = reset(state, begins)
    after = state * g.exp().reshape(batch, heads, 1, 1) + k.reshape(batch, heads, n, 1) * v.reshape(batch, heads, 1, m)
    return after, (q.reshape(batch, heads, 1, n) @ after).reshape(batch, heads, m)


@parts("gated_linear_attention_carry")
def _(
    q: Value, k: Value, v: Value, g: Value, state: Value, segments: Value | None, _: None = None
) -> tuple[Value, Value]:
    batch, seq, groups, n = q.shape
    heads = v.shape[2]
    assert isinstance(heads, int) and isinstance(groups, int)

    def for_heads(x: Value) -> Value:
        shape = (batch, seq, groups, heads // groups, n)
        wide = x.graph.one("expand", x.reshape(batch, seq, groups, 1, n), shape=shape)
        return wide.reshape(batch, seq, heads, n)

    def native(start: Value, shared: Sequence[Value], rows: Sequence[Value], ids: Value | None) -> Results:
        y, after = start.graph.apply("gated_linear_attention_carry", *rows, start, ids)
        return after, y

    last, y = scan_chunks(state, [], [for_heads(q), for_heads(k), v, g], segments, _token_of_attention, native)
    return y, last


@batching("gated_linear_attention_carry")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return batch_recurrence(vmapped)

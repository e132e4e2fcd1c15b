"""The gated delta net. Its gradient has a kernel; the rules here serve second derivatives and forward mode."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.ir.graph import Graph, Node, Value
from rlx.ops.recurrent import chunks_of
from rlx.transforms.build import declare, move_axis, zeros
from rlx.transforms.rule_tables import Cotangents, Pull, Vmapped, batching, linearise, parts
from rlx.transforms.rules.recurrent import (
    Results,
    batch_recurrence,
    declare_step_inputs,
    join_chunks,
    reset,
    scan_chunks,
    scan_tokens,
    segment_begins,
    split_chunks,
)


def _cell(x: Value) -> Value:
    """Reshape [batch, heads] to broadcast against matrices."""
    return x.reshape(*x.shape, 1, 1)


def _row(x: Value) -> Value:
    """Reshape [batch, heads, n] to row vectors."""
    return x.reshape(*x.shape[:2], 1, x.shape[2])


def _column(x: Value) -> Value:
    return x.reshape(*x.shape, 1)


def _token_of_delta(
    state: Value, q: Value, k: Value, v: Value, g: Value, beta: Value, begins: Value | None = None
) -> Results:
    """Return the state after the token, its output, and the prediction error (value minus its prediction)."""
    state = reset(state, begins) * _cell(g.exp())
    miss = _row(v) - _row(k) @ state
    after = state + _column(k) * (miss * _cell(beta))
    return after, (_row(q) @ after).reshape(v.shape) * _scale(v), miss.reshape(v.shape)


def _scale(v: Value) -> float:
    n = v.shape[-1]
    assert isinstance(n, int)
    return 1 / math.sqrt(n)


def _gated_delta_net(rows: Sequence[Value], state: Value, segments: Value | None, n: int) -> tuple[Value, Value]:
    def token(*operands: Value) -> Results:
        return _token_of_delta(*operands)[:2]

    def native(start: Value, shared: Sequence[Value], rows: Sequence[Value], ids: Value | None) -> Results:
        y, after = start.graph.apply("gated_delta_net_carry", *rows, start, ids, state_size=n)
        return after, y

    last, y = scan_chunks(state, [], rows, segments, token, native)
    return y, last


@parts("gated_delta_net_carry")
def _(
    q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value, segments: Value | None, _: None = None, *,
    state_size: int,
) -> tuple[Value, Value]:  # fmt: skip
    return _gated_delta_net([q, k, v, g, beta], state, segments, state_size)


@parts("gated_delta_net")
def _(q: Value, k: Value, v: Value, g: Value, beta: Value, segments: Value | None, *, state_size: int) -> Value:
    return _gated_delta_net([q, k, v, g, beta], _no_state(q, state_size), segments, state_size)[0]


def _no_state(q: Value, n: int) -> Value:
    return zeros(q.graph, q.type.with_shape(q.shape[0], q.shape[2], n, n))


@linearise("gated_delta_net", "gated_delta_net_carry")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    count = 4 + len(node.types)  # with the state, if it is carried
    inputs, segments = operands[:count], operands[count]
    q, k, v, g, beta, *rest = (o for o in inputs if o is not None)
    n = node.attrs["state_size"]
    state = rest[0] if rest else _no_state(q, n)
    out, last, states, misses = into.apply(
        "gated_delta_net_with_states", q, k, v, g, beta, state, segments, state_size=n
    )

    def pull(cts: Cotangents) -> Cotangents:
        back = [zeros(into, x.type) if ct is None else ct for ct, x in zip([*cts, None], (out, last), strict=False)]
        grads = into.apply("gated_delta_net_backward", q, k, g, beta, states, misses, *back, segments, state_size=n)
        return [*grads[:count], *(None for _ in operands[count:])]

    return (out, last)[: len(node.types)], pull


@parts("gated_delta_net_with_states")
def _(
    q: Value,
    k: Value,
    v: Value,
    g: Value,
    beta: Value,
    state: Value,
    segments: Value | None,
    *,
    state_size: int,
    chunk: int,
) -> tuple[Value, Value, Value, Value]:
    pieces, seq = [split_chunks(x, chunk) for x in (q, k, v, g, beta, *segment_begins(segments))], q.shape[1]
    body = Graph("chunk")
    start = declare(body, "state", state.type)
    body.set_outputs([*scan_tokens(body, start, (), declare_step_inputs(body, pieces), _token_of_delta), start])
    (last,), (out, misses, states) = q.graph.scan_general([state], body, chunks_of(seq, chunk), xs=pieces)
    return join_chunks(out, seq), last, move_axis(states, 0, 2), join_chunks(misses, seq)


def _token_again(state: Value, k: Value, g: Value, change: Value, begins: Value | None = None) -> Results:
    """Recompute the state after a token, and the decayed state before its update."""
    before = reset(state, begins) * _cell(g.exp())
    after = before + _column(k) * _row(change)
    return after, before, after


def _token_back(
    ds: Value, q: Value, k: Value, g: Value, beta: Value, miss: Value, ct: Value, before: Value, after: Value,
    begins: Value | None = None,
) -> Results:  # fmt: skip
    """Return gradients of the state before a token and of its q, k, v, g and beta, from that of the state after it."""
    ds = ds + _column(q) * (_row(ct) * _scale(q))
    dq = (after @ _column(ct)).reshape(q.shape) * _scale(q)
    change = _row(k) @ ds
    dbeta = (change * _row(miss)).sum(axis=-1).reshape(beta.shape)
    dv = change * _cell(beta)
    dk = ds @ (_column(miss) * _cell(beta)) - before @ dv.mT
    ds = ds - _column(k) * dv
    dg = (ds * before).sum(axis=(-2, -1))
    return reset(ds * _cell(g.exp()), begins), dq, dk.reshape(k.shape), dv.reshape(q.shape), dg, dbeta


@parts("gated_delta_net_backward")
def _(
    q: Value, k: Value, g: Value, beta: Value, states: Value, misses: Value, d_out: Value, d_last: Value,
    segments: Value | None, *, state_size: int, chunk: int,
) -> tuple[Value, ...]:  # fmt: skip
    seq = q.shape[1]
    begins = segment_begins(segments)
    pieces = [*(split_chunks(x, chunk) for x in (q, k, g, beta, misses, d_out, *begins)), move_axis(states, 2, 0)]
    body = Graph("chunk")
    ds = declare(body, "ds", d_last.type)
    *rows, start = declare_step_inputs(body, pieces)
    rows, begins = rows[:6], rows[6:]
    _, key, gate, rate, miss, _ = rows
    again = [key, gate, miss * rate.reshape(*rate.shape, 1), *begins]
    _, before, after = scan_tokens(body, start, (), again, _token_again)
    body.set_outputs(scan_tokens(body, ds, (), [*rows, before, after, *begins], _token_back, reverse=True))
    (first,), grads = q.graph.scan_general([d_last], body, chunks_of(seq, chunk), xs=pieces, reverse=True)
    return *(join_chunks(x, seq) for x in grads), first


@batching("gated_delta_net", "gated_delta_net_carry", "gated_delta_net_with_states", "gated_delta_net_backward")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return batch_recurrence(vmapped)

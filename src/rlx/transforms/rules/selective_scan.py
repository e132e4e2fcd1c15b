"""The selective scan. Its gradient has a kernel; the rules here serve second derivatives and forward mode."""

from __future__ import annotations

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
from rlx.transforms.vmap import by_scan


def _token_of_scan(
    state: Value, a: Value, x: Value, delta: Value, b: Value, c: Value, begins: Value | None = None
) -> Results:
    batch, channels, n = state.shape
    step = delta.reshape(batch, channels, 1)
    after = (step * a).exp() * reset(state, begins) + step * x.reshape(batch, channels, 1) * b.reshape(batch, 1, n)
    return after, (after * c.reshape(batch, 1, n)).sum(axis=-1)


def _selective_scan(
    x: Value, delta: Value, a: Value, b: Value, c: Value, state: Value, d: Value | None, segments: Value | None, n: int
) -> tuple[Value, Value]:
    def native(start: Value, shared: Sequence[Value], rows: Sequence[Value], ids: Value | None) -> Results:
        x_, delta_, b_, c_ = rows
        operands = x_, delta_, shared[0], b_, c_, start, None, ids
        y, after = start.graph.apply("selective_scan_carry", *operands, state_size=n)
        return after, y

    last, y = scan_chunks(state, [a], [x, delta, b, c], segments, _token_of_scan, native)
    return (y if d is None else y + x * d), last


@parts("selective_scan_carry")
def _(
    x: Value, delta: Value, a: Value, b: Value, c: Value, state: Value, d: Value | None, segments: Value | None,
    _: None = None, *, state_size: int,
) -> tuple[Value, Value]:  # fmt: skip
    return _selective_scan(x, delta, a, b, c, state, d, segments, state_size)


@parts("selective_scan")
def _(
    x: Value, delta: Value, a: Value, b: Value, c: Value, d: Value | None, segments: Value | None, *, state_size: int
) -> Value:
    start = zeros(x.graph, x.type.with_shape(x.shape[0], *a.shape))
    return _selective_scan(x, delta, a, b, c, start, d, segments, state_size)[0]


@linearise("selective_scan", "selective_scan_carry")
def _(into: Graph, node: Node, operands: Cotangents, wanted: Sequence[bool]) -> tuple[Sequence[Value], Pull]:
    count = 4 + len(node.types)  # with the state, if it is carried
    inputs, (d, segments, *ragged) = operands[:count], operands[count:]
    x, delta, a, b, c, *rest = (o for o in inputs if o is not None)
    n = node.attrs["state_size"]
    state = rest[0] if rest else zeros(into, x.type.with_shape(x.shape[0], *a.shape))
    y, last, states = into.apply("selective_scan_with_states", x, delta, a, b, c, state, segments, state_size=n)

    def pull(cts: Cotangents) -> Cotangents:
        ct, back = (zeros(into, v.type) if w is None else w for w, v in zip([*cts, None], (y, last), strict=False))
        rows = x, delta, a, b, c, states, ct, back, segments
        grads = list(into.apply("selective_scan_backward", *rows, state_size=n))
        if d is None:
            return [*grads[:count], None, None, *ragged]
        grads[0] = grads[0] + ct * d
        return [*grads[:count], (ct * x).sum(axis=(0, 1)), None, *ragged]

    return (y if d is None else y + x * d, last)[: len(node.types)], pull


@parts("selective_scan_with_states")
def _(
    x: Value, delta: Value, a: Value, b: Value, c: Value, state: Value, segments: Value | None, *, state_size: int,
    chunk: int,
) -> tuple[Value, Value, Value]:  # fmt: skip
    pieces, seq = [split_chunks(v, chunk) for v in (x, delta, b, c, *segment_begins(segments))], x.shape[1]
    body = Graph("chunk")
    start, rates = declare(body, "state", state.type), declare(body, "a", a.type)
    body.set_outputs([*scan_tokens(body, start, [rates], declare_step_inputs(body, pieces), _token_of_scan), start])
    (last,), (y, states) = x.graph.scan_general([state], body, chunks_of(seq, chunk), broadcasts=[a], xs=pieces)
    return join_chunks(y, seq), last, move_axis(states.mT, 0, 1)


def _scan_again(state: Value, a: Value, x: Value, delta: Value, b: Value, begins: Value | None = None) -> Results:
    """Recompute the state after a token, and the decayed state it adds to."""
    batch, channels, n = state.shape
    step = delta.reshape(batch, channels, 1)
    decayed = (step * a).exp() * reset(state, begins)
    return decayed + step * x.reshape(batch, channels, 1) * b.reshape(batch, 1, n), decayed


def _scan_back(
    ds: Value, a: Value, x: Value, delta: Value, b: Value, c: Value, ct: Value, decayed: Value,
    begins: Value | None = None,
) -> Results:  # fmt: skip
    """Return gradients of the state before a token and of x, delta, a, b and c, from that of the state after it."""
    batch, channels, n = ds.shape
    step, out, key = (v.reshape(batch, channels, 1) for v in (delta, ct, x))
    row = b.reshape(batch, 1, n)
    drive = step * key
    ds = ds + out * c.reshape(batch, 1, n)
    growth, driven = ds * decayed, (ds * row).sum(axis=-1)
    dc, db = ((decayed + drive * row) * out).sum(axis=1), (ds * drive).sum(axis=1)
    back = reset(ds * (step * a).exp(), begins)
    return back, driven * delta, driven * x + (growth * a).sum(axis=-1), growth * step, db, dc


@parts("selective_scan_backward")
def _(
    x: Value, delta: Value, a: Value, b: Value, c: Value, states: Value, d_out: Value, d_last: Value,
    segments: Value | None, *, state_size: int, chunk: int,
) -> tuple[Value, ...]:  # fmt: skip
    seq = x.shape[1]
    begins = segment_begins(segments)
    pieces = [*(split_chunks(v, chunk) for v in (x, delta, b, c, d_out, *begins)), move_axis(states.mT, 0, 1)]
    body = Graph("chunk")
    ds, rates = declare(body, "ds", d_last.type), declare(body, "a", a.type)
    *rows, start = declare_step_inputs(body, pieces)
    rows, begins = rows[:5], rows[5:]
    _, decayed = scan_tokens(body, start, [rates], [*rows[:3], *begins], _scan_again)
    back = [*rows, decayed, *begins]
    before, dx, ddelta, da, db, dc = scan_tokens(body, ds, [rates], back, _scan_back, reverse=True)
    body.set_outputs([before, dx, ddelta, db, dc, da.sum(axis=(0, 1))])
    (first,), grads = x.graph.scan_general(
        [d_last], body, chunks_of(seq, chunk), broadcasts=[a], xs=pieces, reverse=True
    )
    dx, ddelta, db, dc = (join_chunks(v, seq) for v in grads[:4])
    return dx, ddelta, grads[4].sum(axis=0), db, dc, first


# -- vmap -------------------------------------------------------------------------------------------------------------
@batching("selective_scan")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return batch_recurrence(vmapped, 2, 5)


@batching("selective_scan_carry")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return batch_recurrence(vmapped, 2, 6)


@batching("selective_scan_with_states")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return batch_recurrence(vmapped, 2)


@batching("selective_scan_backward")
def _(vmapped: Vmapped) -> Sequence[Value]:
    """Scan over the entries: the gradient of a is a sum over the batch, and each entry has its own."""
    return by_scan(vmapped)

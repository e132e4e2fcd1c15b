"""The selective scan. Its gradient has a kernel; here is how that is differentiated in turn, and forward mode."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.ir.graph import Graph, Node, Value
from rlx.ops.recurrent import chunks_of
from rlx.transforms.build import declare, move_axis, zeros
from rlx.transforms.rule_tables import Cotangents, Pull, Vmapped, batching, linearise, parts
from rlx.transforms.rules.recurrent import (
    Results,
    batched,
    chunked,
    cut,
    each_of,
    joined,
    over_tokens,
    reset,
    row_of_starts,
)
from rlx.transforms.vmap import by_scan


def _token_of_scan(
    state: Value, a: Value, x: Value, delta: Value, b: Value, c: Value, starts: Value | None = None
) -> Results:
    batch, channels, n = state.shape
    step = delta.reshape(batch, channels, 1)
    after = (step * a).exp() * reset(state, starts) + step * x.reshape(batch, channels, 1) * b.reshape(batch, 1, n)
    return after, (after * c.reshape(batch, 1, n)).sum(axis=-1)


def _selective_scan(
    x: Value, delta: Value, a: Value, b: Value, c: Value, state: Value, d: Value | None, segments: Value | None, n: int
) -> tuple[Value, Value]:
    def native(start: Value, shared: Sequence[Value], rows: Sequence[Value], ids: Value | None) -> Results:
        x_, delta_, b_, c_ = rows
        operands = x_, delta_, shared[0], b_, c_, start, None, ids
        y, after = start.graph.apply("selective_scan_carry", *operands, state_size=n)
        return after, y

    last, y = chunked(state, [a], [x, delta, b, c], segments, _token_of_scan, native)
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
    given, (d, segments, *ragged) = operands[:count], operands[count:]
    x, delta, a, b, c, *rest = (o for o in given if o is not None)
    n = node.attrs["state_size"]
    state = rest[0] if rest else zeros(into, x.type.with_shape(x.shape[0], *a.shape))
    y, last, states = into.apply("selective_scan_with_states", x, delta, a, b, c, state, segments, state_size=n)

    def pull(cts: Cotangents) -> Cotangents:
        ct, back = (zeros(into, v.type) if w is None else w for w, v in zip([*cts, None], (y, last), strict=False))
        rows = x, delta, a, b, c, states, ct, back, segments
        made = list(into.apply("selective_scan_backward", *rows, state_size=n))
        if d is None:
            return [*made[:count], None, None, *ragged]
        made[0] = made[0] + ct * d
        return [*made[:count], (ct * x).sum(axis=(0, 1)), None, *ragged]

    return (y if d is None else y + x * d, last)[: len(node.types)], pull


@parts("selective_scan_with_states")
def _(
    x: Value, delta: Value, a: Value, b: Value, c: Value, state: Value, segments: Value | None, *, state_size: int,
    chunk: int,
) -> tuple[Value, Value, Value]:  # fmt: skip
    pieces, seq = [cut(v, chunk) for v in (x, delta, b, c, *row_of_starts(segments))], x.shape[1]
    body = Graph("chunk")
    start, rates = declare(body, "state", state.type), declare(body, "a", a.type)
    body.set_outputs([*over_tokens(body, start, [rates], each_of(body, pieces), _token_of_scan), start])
    (last,), (y, states) = x.graph.scan_general([state], body, chunks_of(seq, chunk), broadcasts=[a], xs=pieces)
    return joined(y, seq), last, move_axis(states.mT, 0, 1)


def _scan_again(state: Value, a: Value, x: Value, delta: Value, b: Value, starts: Value | None = None) -> Results:
    """The state after a token, and what is left in it of the one before."""
    batch, channels, n = state.shape
    step = delta.reshape(batch, channels, 1)
    kept = (step * a).exp() * reset(state, starts)
    return kept + step * x.reshape(batch, channels, 1) * b.reshape(batch, 1, n), kept


def _scan_back(
    ds: Value, a: Value, x: Value, delta: Value, b: Value, c: Value, ct: Value, kept: Value,
    starts: Value | None = None,
) -> Results:  # fmt: skip
    """The gradient of the state before a token from that of the state after it; those of x, delta, a, b and c."""
    batch, channels, n = ds.shape
    step, out, key = (v.reshape(batch, channels, 1) for v in (delta, ct, x))
    row = b.reshape(batch, 1, n)
    drive = step * key
    ds = ds + out * c.reshape(batch, 1, n)
    growth, driven = ds * kept, (ds * row).sum(axis=-1)
    dc, db = ((kept + drive * row) * out).sum(axis=1), (ds * drive).sum(axis=1)
    back = reset(ds * (step * a).exp(), starts)
    return back, driven * delta, driven * x + (growth * a).sum(axis=-1), growth * step, db, dc


@parts("selective_scan_backward")
def _(
    x: Value, delta: Value, a: Value, b: Value, c: Value, states: Value, d_out: Value, d_last: Value,
    segments: Value | None, *, state_size: int, chunk: int,
) -> tuple[Value, ...]:  # fmt: skip
    seq = x.shape[1]
    starts = row_of_starts(segments)
    pieces = [*(cut(v, chunk) for v in (x, delta, b, c, d_out, *starts)), move_axis(states.mT, 0, 1)]
    body = Graph("chunk")
    ds, rates = declare(body, "ds", d_last.type), declare(body, "a", a.type)
    *rows, start = each_of(body, pieces)
    rows, starts = rows[:5], rows[5:]
    _, kept = over_tokens(body, start, [rates], [*rows[:3], *starts], _scan_again)
    back = [*rows, kept, *starts]
    before, dx, ddelta, da, db, dc = over_tokens(body, ds, [rates], back, _scan_back, reverse=True)
    body.set_outputs([before, dx, ddelta, db, dc, da.sum(axis=(0, 1))])
    (first,), made = x.graph.scan_general(
        [d_last], body, chunks_of(seq, chunk), broadcasts=[a], xs=pieces, reverse=True
    )
    dx, ddelta, db, dc = (joined(v, seq) for v in made[:4])
    return dx, ddelta, made[4].sum(axis=0), db, dc, first


# -- vmap -------------------------------------------------------------------------------------------------------------
@batching("selective_scan")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return batched(vmapped, 2, 5)


@batching("selective_scan_carry")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return batched(vmapped, 2, 6)


@batching("selective_scan_with_states")
def _(vmapped: Vmapped) -> Sequence[Value]:
    return batched(vmapped, 2)


@batching("selective_scan_backward")
def _(vmapped: Vmapped) -> Sequence[Value]:
    """One by one: the gradient of a is a sum over the batch, and each entry has its own."""
    return by_scan(vmapped)

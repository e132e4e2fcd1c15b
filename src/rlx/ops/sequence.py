"""Recurrences along a sequence: selective scan (Mamba), gated linear attention (Mamba 2), gated delta net, causal
depthwise convolution.

Each has a form that takes the state of earlier tokens and gives the one after the last (its name ends in `_carry`), so
that a sequence may come in pieces. States start at zero where none is given. A state that the runtime owns is consumed,
as a cache is: on the CPU the new one is written in its place, and nothing may read it again as it was.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from rlx.errors import DTypeError, ShapeError
from rlx.ir.graph import Graph, Value
from rlx.ir.independence import never
from rlx.ir.registry import FUSED, SEGMENTED, f32, i32, op, sample
from rlx.types import Size, TensorType, require_equal

CHUNK = 32  # tokens between the states that a gradient starts from; those of a gated delta net are computed together


def _floats(where: str, *operands: TensorType | None) -> None:
    """Floats of one type: sums of unlike precision would be a surprise."""
    given = [t for t in operands if t is not None]
    if any(t.dtype is not given[0].dtype or not t.dtype.is_float for t in given):
        raise DTypeError(f"{where}: takes floats of one type, found {', '.join(str(t.dtype) for t in given)}")


def _fits(where: str, name: str, operand: TensorType | None, *shape: Size) -> None:
    if operand is None:
        return
    wanted = f"[{', '.join(map(str, shape))}]"
    if operand.rank != len(shape):
        raise ShapeError(f"{where}: {name} is {operand}, wanted {wanted}")
    for have, want in zip(operand.shape, shape, strict=True):
        require_equal(have, want, f"{where}: {name} is {operand}, wanted {wanted}")


def _check_state_size(where: str, n: Any) -> None:
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ShapeError(f"{where}: state_size is {n!r}, wanted an integer from 1")


def chunks_of(seq: Size, chunk: int) -> Size:
    """How many chunks a sequence has, the last one perhaps a part of one."""
    return (seq + (chunk - 1)) // chunk


def _check_chunk(where: str, chunk: Any) -> None:
    if isinstance(chunk, bool) or not isinstance(chunk, int) or chunk < 1:
        raise ShapeError(f"{where}: chunk is {chunk!r}, wanted an integer from 1")


# -- segments ----------------------------------------------------------------------------------------------------------
def _check_segments(where: str, batch: Size, seq: Size, segments: TensorType | None) -> None:
    if segments is not None and not segments.dtype.is_integer:
        raise DTypeError(f"{where}: segment ids are integers, found {segments.dtype}", hint="cast them to i32")
    _fits(where, "segments", segments, batch, seq)


def _starts(segments: Any) -> Any:
    """[batch, seq], NumPy: whether the state is reset before a token, because its id is not that of the one before."""
    return np.diff(segments, axis=1, prepend=segments[:, :1]) != 0


def _reset_gates(g: Any, segments: Any) -> Any:
    """NumPy: logarithms of gates, those of tokens that start a segment closed."""
    return g if segments is None else np.where(_starts(segments)[..., None], -np.inf, g).astype(g.dtype)


def _earlier(x: Value, before: Value, by: int) -> Value:
    """[batch, seq, ...] `by` tokens earlier, with tokens `before` the first."""
    whole = x.graph.one("concatenate", before, x, axis=1)
    at = before.shape[1] - by
    return whole[:, at : x.shape[1] + at]


def _repeated(x: Value, times: int) -> Value:
    """The first token of [batch, seq] so many times; `seq` may be 0."""
    if x.shape[1] == 0:
        return x.graph.one("expand", x.graph.constant(0, x.dtype), shape=(x.shape[0], times))
    return x.graph.one("expand", x[:, 0:1], shape=(x.shape[0], times))


def _starts_apart(segments: Value) -> Value:
    return segments.not_equal(_earlier(segments, _repeated(segments, 1), 1))  # type: ignore[no-any-return]


def _closed_apart(g: Value, segments: Value) -> Value:
    """`g` with the gates of tokens that start a segment closed: nothing of the state is left after them."""
    starts = _starts_apart(segments)
    return g.graph.one("where", starts.reshape(*starts.shape, 1), -math.inf, g)


# -- selective scan ----------------------------------------------------------------------------------------------------
def _selective_scan_carry(
    x: Any, delta: Any, a: Any, b: Any, c: Any, state: Any, d: Any = None, segments: Any = None, *, state_size: int
) -> tuple[Any, Any]:
    state = state.copy()
    y = np.empty_like(x)
    starts = np.zeros(x.shape[:2], bool) if segments is None else _starts(segments)
    for t in range(x.shape[1]):
        state[starts[:, t]] = 0
        step = delta[:, t, :, None]  # [batch, channels, 1]
        state = np.exp(step * a) * state + step * b[:, t, None, :] * x[:, t, :, None]
        y[:, t] = (state * c[:, t, None, :]).sum(-1)
    return (y if d is None else y + d * x), state


def _selective_scan(
    x: Any, delta: Any, a: Any, b: Any, c: Any, d: Any = None, segments: Any = None, *, state_size: int
) -> Any:
    start = np.zeros((x.shape[0], *a.shape), x.dtype)
    return _selective_scan_carry(x, delta, a, b, c, start, d, segments, state_size=state_size)[0]


def _selective_scan_carry_apart(
    x: Value, delta: Value, a: Value, b: Value, c: Value, state: Value, d: Value | None, segments: Value, *,
    state_size: int,
) -> tuple[Value, Value]:  # fmt: skip
    """Token by token: decays differ from one number of the state to the next, and none of them is a gate to close."""
    rows = [v.transpose(axes=(1, 0, *range(2, v.rank))) for v in (x, delta, b, c, _starts_apart(segments))]
    body, wide = Graph("token"), x.dtype.wide
    h, rates = body.input("h", state.shape, wide), body.input("a", a.shape, a.dtype)
    names = ("x", "delta", "b", "c", "starts")
    now, step, key, query, starts = (
        body.input(n, r.shape[1:], r.dtype) for n, r in zip(names, rows, strict=True)
    )  # fmt: skip
    step, now = (v.astype(wide).reshape(*v.shape, 1) for v in (step, now))  # [batch, channels, 1]
    key, query = (v.astype(wide).reshape(v.shape[0], 1, v.shape[1]) for v in (key, query))
    fresh = body.one("where", starts.reshape(starts.shape[0], 1, 1), 0.0, h)
    after = (step * rates.astype(wide)).exp() * fresh + step * key * now
    body.set_outputs([after, (after * query).sum(axis=-1)])
    seq = x.shape[1]
    kept = int(chunks_of(seq, CHUNK)) if isinstance(seq, int) else 0  # states for a gradient, as the kernel keeps them
    (last,), (ys,) = x.graph.scan_general(
        [state.astype(wide)], body, seq, broadcasts=[a], xs=rows, checkpoints=kept
    )  # fmt: skip
    y = ys.transpose(axes=(1, 0, 2))
    y = y if d is None else y + d.astype(wide) * x.astype(wide)
    return y.astype(x.dtype), last.astype(x.dtype)


def _selective_scan_apart(
    x: Value, delta: Value, a: Value, b: Value, c: Value, d: Value | None, segments: Value, *, state_size: int
) -> Value:
    start = x.graph.one("expand", x.graph.constant(0, x.dtype), shape=(x.shape[0], *a.shape))
    return _selective_scan_carry_apart(x, delta, a, b, c, start, d, segments, state_size=state_size)[0]


def _check_selective(
    where: str, x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType,
    state: TensorType | None, d: TensorType | None, n: int, segments: TensorType | None = None,
) -> None:  # fmt: skip
    _check_state_size(where, n)
    if x.rank != 3:
        raise ShapeError(f"{where}: x is [batch, seq, channels], found {x}")
    batch, seq, channels = x.shape
    _fits(where, "delta", delta, batch, seq, channels)
    _fits(where, "a", a, channels, n)
    _fits(where, "b", b, batch, seq, n)
    _fits(where, "c", c, batch, seq, n)
    _fits(where, "state", state, batch, channels, n)
    _fits(where, "d", d, channels)
    _check_segments(where, batch, seq, segments)
    _floats(where, x, delta, a, b, c, state, d)


def _scan_operands(batch: int, seq: int, channels: int, n: int) -> tuple[Any, ...]:
    return (
        f32(batch, seq, channels), f32(batch, seq, channels, low=0.01, high=0.5), f32(channels, n, low=-2, high=-0.1),
        f32(batch, seq, n), f32(batch, seq, n),
    )  # fmt: skip


@op(
    "selective_scan", independent=never,
    reference=_selective_scan, tolerance=5e-6, traits=[SEGMENTED], decompose=_selective_scan_apart,
    samples=[
        sample(*_scan_operands(2, 7, 5, 3), f32(5), i32(2, 7, low=0, high=2), state_size=3),
        sample(*_scan_operands(2, 7, 5, 3), f32(5), state_size=3), sample(*_scan_operands(1, 20, 70, 4), state_size=4),
        sample(*_scan_operands(1, 0, 3, 2), state_size=2),
    ],
)  # fmt: skip
def selective_scan(
    x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType, d: TensorType | None = None,
    segments: TensorType | None = None, *, state_size: int,
) -> TensorType:  # fmt: skip
    """Mamba's scan: h = exp(delta a) h + delta b x along the sequence, y = c · h + d x.

    x and delta are [batch, seq, channels], a is [channels, n], b and c are [batch, seq, n], d (if given) is [channels].
    Where the ids `segments` [batch, seq] change from one token to the next, h starts at zero again.
    """
    _check_selective("selective_scan", x, delta, a, b, c, None, d, state_size, segments)
    return x


@op(
    "selective_scan_carry", independent=never, reference=_selective_scan_carry, tolerance=5e-6, traits=[SEGMENTED],
    decompose=_selective_scan_carry_apart,
    samples=[
        sample(*_scan_operands(2, 7, 5, 3), f32(2, 5, 3), f32(5), i32(2, 7, low=0, high=2), state_size=3),
        sample(*_scan_operands(2, 7, 5, 3), f32(2, 5, 3), f32(5), state_size=3),
        sample(*_scan_operands(3, 1, 33, 2), f32(3, 33, 2), state_size=2),
    ],
)  # fmt: skip
def selective_scan_carry(
    x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType, state: TensorType,
    d: TensorType | None = None, segments: TensorType | None = None, *, state_size: int,
) -> tuple[TensorType, TensorType]:  # fmt: skip
    """`selective_scan` that starts from `state` [batch, channels, n] and also gives the state after the last token."""
    _check_selective("selective_scan_carry", x, delta, a, b, c, state, d, state_size, segments)
    return x, state


def _selective_scan_kept(
    x: Any, delta: Any, a: Any, b: Any, c: Any, state: Any, *, state_size: int, chunk: int
) -> tuple[Any, Any, Any]:
    batch, seq, channels = x.shape
    y, states = np.empty_like(x), np.empty((batch, -(-seq // chunk), state_size, channels), x.dtype)
    for first in range(0, seq, chunk):
        states[:, first // chunk] = state.swapaxes(1, 2)
        tokens = slice(first, first + chunk)
        rows = x[:, tokens], delta[:, tokens], a, b[:, tokens], c[:, tokens]
        y[:, tokens], state = _selective_scan_carry(*rows, state, state_size=state_size)
    return y, state.copy(), states


@op("selective_scan_kept", independent=never, reference=_selective_scan_kept, traits=[FUSED])
def selective_scan_kept(
    x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType, state: TensorType, *,
    state_size: int, chunk: int = CHUNK,
) -> tuple[TensorType, TensorType, TensorType]:  # fmt: skip
    """`selective_scan_carry` without d that also gives the state before each chunk, [batch, chunks, n, channels]."""
    where = "selective_scan_kept"
    _check_selective(where, x, delta, a, b, c, state, None, state_size)
    _check_chunk(where, chunk)
    batch, seq, channels = x.shape
    return x, state, x.with_shape(batch, chunks_of(seq, chunk), state_size, channels)


def _selective_scan_backward(
    x: Any, delta: Any, a: Any, b: Any, c: Any, states: Any, d_out: Any, d_last: Any, *, state_size: int, chunk: int
) -> tuple[Any, ...]:
    dx, ddelta, da, db, dc = (np.zeros_like(v) for v in (x, delta, a, b, c))
    ds, steps = d_last.copy(), delta[..., None]  # [batch, seq, channels, 1]
    drives = steps * x[..., None]
    for first in reversed(range(0, x.shape[1], chunk)):
        state, kept = states[:, first // chunk].swapaxes(1, 2), []
        tokens = range(first, min(first + chunk, x.shape[1]))
        for t in tokens:
            kept.append(np.exp(steps[:, t] * a) * state)
            state = kept[-1] + drives[:, t] * b[:, t, None]
        for t in reversed(tokens):
            ds = ds + d_out[:, t, :, None] * c[:, t, None]
            after, growth = kept[t - first] + drives[:, t] * b[:, t, None], ds * kept[t - first]
            dc[:, t], db[:, t] = (after * d_out[:, t, :, None]).sum(1), (ds * drives[:, t]).sum(1)
            drive = (ds * b[:, t, None]).sum(-1)
            dx[:, t], ddelta[:, t] = drive * delta[:, t], drive * x[:, t] + (growth * a).sum(-1)
            da += (growth * steps[:, t]).sum(0)
            ds = ds * np.exp(steps[:, t] * a)
    return dx, ddelta, da, db, dc, ds


@op("selective_scan_backward", independent=never, reference=_selective_scan_backward, traits=[FUSED])
def selective_scan_backward(
    x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType, states: TensorType,
    d_out: TensorType, d_last: TensorType, *, state_size: int, chunk: int = CHUNK,
) -> tuple[TensorType, TensorType, TensorType, TensorType, TensorType, TensorType]:  # fmt: skip
    """Gradients of x, delta, a, b, c and state of `selective_scan_carry` without d, from those of its results.

    `states` is what `selective_scan_kept` gives for the same chunk; inside a chunk the states are computed again.
    """
    where = "selective_scan_backward"
    _check_selective(where, x, delta, a, b, c, None, None, state_size)
    _check_chunk(where, chunk)
    batch, seq, channels = x.shape
    _fits(where, "states", states, batch, chunks_of(seq, chunk), state_size, channels)
    _fits(where, "d_out", d_out, batch, seq, channels)
    _fits(where, "d_last", d_last, batch, channels, state_size)
    _floats(where, x, states, d_out, d_last)
    return x, delta, a, b, c, d_last


# -- gated delta net ---------------------------------------------------------------------------------------------------
def _gated_delta_net_carry(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, segments: Any = None, *, state_size: int
) -> tuple[Any, Any]:
    state, out, g = state.copy(), np.empty_like(v), _reset_gates(g, segments)
    for t in range(q.shape[1]):
        state = state * np.exp(g[:, t])[..., None, None]
        seen = np.einsum("bhij,bhi->bhj", state, k[:, t])
        change = (v[:, t] - seen) * beta[:, t][..., None]
        state = state + k[:, t][..., :, None] * change[..., None, :]
        out[:, t] = np.einsum("bhij,bhi->bhj", state, q[:, t]) * q.dtype.type(1 / math.sqrt(state_size))
    return out, state


def _gated_delta_net(q: Any, k: Any, v: Any, g: Any, beta: Any, segments: Any = None, *, state_size: int) -> Any:
    start = np.zeros((q.shape[0], q.shape[2], state_size, state_size), q.dtype)
    return _gated_delta_net_carry(q, k, v, g, beta, start, segments, state_size=state_size)[0]


def _gated_delta_net_carry_apart(
    q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value, segments: Value, *, state_size: int
) -> tuple[Value, ...]:
    gates = _closed_apart(g, segments)
    return tuple(q.graph.apply("gated_delta_net_carry", q, k, v, gates, beta, state, state_size=state_size))


def _gated_delta_net_apart(
    q: Value, k: Value, v: Value, g: Value, beta: Value, segments: Value, *, state_size: int
) -> Value:
    return q.graph.one("gated_delta_net", q, k, v, _closed_apart(g, segments), beta, state_size=state_size)


def _check_delta(
    where: str, q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType,
    state: TensorType | None, n: int, segments: TensorType | None = None,
) -> None:  # fmt: skip
    _check_state_size(where, n)
    if q.rank != 4:
        raise ShapeError(f"{where}: q is [batch, seq, heads, state_size], found {q}")
    batch, seq, heads, _ = q.shape
    for name, operand in (("q", q), ("k", k), ("v", v)):
        _fits(where, name, operand, batch, seq, heads, n)
    for name, operand in (("g", g), ("beta", beta)):
        _fits(where, name, operand, batch, seq, heads)
    _fits(where, "state", state, batch, heads, n, n)
    _check_segments(where, batch, seq, segments)
    _floats(where, q, k, v, g, beta, state)


def _delta_operands(batch: int, seq: int, heads: int, n: int) -> tuple[Any, ...]:
    unit = f32(batch, seq, heads, n, low=-1 / n, high=1 / n)  # keys longer than 1 make the recurrence explode
    return (
        unit, unit, f32(batch, seq, heads, n), f32(batch, seq, heads, low=-1, high=0),
        f32(batch, seq, heads, low=0, high=1),
    )  # fmt: skip


@op(
    "gated_delta_net", independent=never,
    reference=_gated_delta_net, tolerance=1e-5, traits=[SEGMENTED], decompose=_gated_delta_net_apart,
    samples=[
        sample(*_delta_operands(2, 5, 3, 4), i32(2, 5, low=0, high=2), state_size=4),
        sample(*_delta_operands(1, 70, 2, 16), i32(1, 70, low=0, high=2), state_size=16),
        sample(*_delta_operands(2, 5, 3, 4), state_size=4), sample(*_delta_operands(1, 9, 1, 33), state_size=33),
        sample(*_delta_operands(1, 0, 2, 4), state_size=4), sample(*_delta_operands(1, 150, 2, 16), state_size=16),
    ],
)  # fmt: skip
def gated_delta_net(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType, segments: TensorType | None = None, *,
    state_size: int,
) -> TensorType:  # fmt: skip
    """Linear attention with a gated delta rule; a head keeps a matrix S from keys to values.

    A token does S = exp(g) S, then S += k ⊗ beta (v - kᵀ S), and gives qᵀ S / sqrt(state_size). q, k and v are
    [batch, seq, heads, state_size], g (the logarithm of the gate) and beta are [batch, seq, heads]. Where the ids
    `segments` [batch, seq] change from one token to the next, the gate is closed: S starts at zero again.
    """
    _check_delta("gated_delta_net", q, k, v, g, beta, None, state_size, segments)
    return v


@op(
    "gated_delta_net_carry", independent=never, reference=_gated_delta_net_carry, tolerance=1e-5, traits=[SEGMENTED],
    decompose=_gated_delta_net_carry_apart,
    samples=[
        sample(*_delta_operands(2, 5, 3, 4), f32(2, 3, 4, 4), i32(2, 5, low=0, high=2), state_size=4),
        sample(*_delta_operands(2, 5, 3, 4), f32(2, 3, 4, 4), state_size=4),
        sample(*_delta_operands(2, 1, 2, 20), f32(2, 2, 20, 20), state_size=20),
        sample(*_delta_operands(1, 131, 1, 16), f32(1, 1, 16, 16), state_size=16),
    ],
)  # fmt: skip
def gated_delta_net_carry(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType, state: TensorType,
    segments: TensorType | None = None, *, state_size: int,
) -> tuple[TensorType, TensorType]:  # fmt: skip
    """`gated_delta_net` that starts from `state` [batch, heads, n, n] and also gives the state after the last token."""
    _check_delta("gated_delta_net_carry", q, k, v, g, beta, state, state_size, segments)
    return v, state


def _outer(a: Any, b: Any) -> Any:
    return a[..., :, None] * b[..., None, :]


def _gated_delta_net_kept(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, *, state_size: int, chunk: int
) -> tuple[Any, Any, Any, Any]:
    batch, seq, heads, n = v.shape
    states, misses = np.empty((batch, heads, -(-seq // chunk), n, n), v.dtype), np.empty_like(v)
    out, state = np.empty_like(v), state.copy()
    for t in range(seq):
        if t % chunk == 0:
            states[:, :, t // chunk] = state
        state = state * np.exp(g[:, t])[..., None, None]
        misses[:, t] = v[:, t] - np.einsum("bhij,bhi->bhj", state, k[:, t])
        state = state + _outer(k[:, t], misses[:, t] * beta[:, t][..., None])
        out[:, t] = np.einsum("bhij,bhi->bhj", state, q[:, t]) * q.dtype.type(1 / math.sqrt(state_size))
    return out, state, states, misses


@op("gated_delta_net_kept", independent=never, reference=_gated_delta_net_kept, traits=[FUSED])
def gated_delta_net_kept(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType, state: TensorType, *,
    state_size: int, chunk: int = CHUNK,
) -> tuple[TensorType, TensorType, TensorType, TensorType]:  # fmt: skip
    """`gated_delta_net_carry` that also gives what its gradient needs.

    That is the state before each chunk of tokens, [batch, heads, chunks, n, n], and what each token found missing,
    v - kᵀ S.
    """
    where = "gated_delta_net_kept"
    _check_delta(where, q, k, v, g, beta, state, state_size)
    _check_chunk(where, chunk)
    batch, seq, heads, n = v.shape
    return v, state, v.with_shape(batch, heads, chunks_of(seq, chunk), n, n), v


def _gated_delta_net_backward(
    q: Any, k: Any, g: Any, beta: Any, states: Any, misses: Any, d_out: Any, d_last: Any, *, state_size: int, chunk: int
) -> tuple[Any, ...]:
    scale, seq, ds = q.dtype.type(1 / math.sqrt(state_size)), q.shape[1], d_last.copy()
    dq, dk, dv, dg, dbeta = (np.empty_like(x) for x in (q, k, misses, g, beta))
    gates, changes = np.exp(g)[..., None, None], misses * beta[..., None]
    for first in reversed(range(0, seq, chunk)):
        before, after, state = [], [], states[:, :, first // chunk]
        tokens = range(first, min(first + chunk, seq))
        for t in tokens:
            before.append(state * gates[:, t])
            state = before[-1] + _outer(k[:, t], changes[:, t])
            after.append(state)
        for t in reversed(tokens):
            old, new = before[t - first], after[t - first]
            ds = ds + _outer(q[:, t], d_out[:, t]) * scale
            dq[:, t] = np.einsum("bhij,bhj->bhi", new, d_out[:, t]) * scale
            change = np.einsum("bhij,bhi->bhj", ds, k[:, t])
            dbeta[:, t] = (change * misses[:, t]).sum(-1)
            dv[:, t] = change * beta[:, t][..., None]
            wrote = np.einsum("bhij,bhj->bhi", ds, changes[:, t])
            dk[:, t] = wrote - np.einsum("bhij,bhj->bhi", old, dv[:, t])
            ds = ds - _outer(k[:, t], dv[:, t])
            dg[:, t] = (ds * old).sum((-2, -1))
            ds = ds * gates[:, t]
    return dq, dk, dv, dg, dbeta, ds


@op("gated_delta_net_backward", independent=never, reference=_gated_delta_net_backward, traits=[FUSED])
def gated_delta_net_backward(
    q: TensorType, k: TensorType, g: TensorType, beta: TensorType, states: TensorType, misses: TensorType,
    d_out: TensorType, d_last: TensorType, *, state_size: int, chunk: int = CHUNK,
) -> tuple[TensorType, TensorType, TensorType, TensorType, TensorType, TensorType]:  # fmt: skip
    """Gradients of q, k, v, g, beta and state of `gated_delta_net_carry`, from those of its results.

    `states` and `misses` are what `gated_delta_net_kept` gives for the same chunk; inside a chunk the states are
    computed again.
    """
    where = "gated_delta_net_backward"
    _check_delta(where, q, k, q, g, beta, None, state_size)
    _check_chunk(where, chunk)
    batch, seq, heads, n = q.shape
    _fits(where, "states", states, batch, heads, chunks_of(seq, chunk), n, n)
    _fits(where, "misses", misses, batch, seq, heads, n)
    _fits(where, "d_out", d_out, batch, seq, heads, n)
    _fits(where, "d_last", d_last, batch, heads, n, n)
    _floats(where, q, states, misses, d_out, d_last)
    return q, k, misses, g, beta, d_last


# -- gated linear attention --------------------------------------------------------------------------------------------
def _gated_linear_attention_carry_apart(
    q: Value, k: Value, v: Value, g: Value, state: Value, segments: Value
) -> tuple[Value, ...]:
    return tuple(q.graph.apply("gated_linear_attention_carry", q, k, v, _closed_apart(g, segments), state))


def _gated_linear_attention_carry(
    q: Any, k: Any, v: Any, g: Any, state: Any, segments: Any = None
) -> tuple[Any, Any]:  # fmt: skip
    state, out, g = state.copy(), np.empty_like(v), _reset_gates(g, segments)
    q, k = (np.repeat(t, v.shape[2] // t.shape[2], axis=2) for t in (q, k))
    for t in range(v.shape[1]):
        state = state * np.exp(g[:, t])[..., None, None] + k[:, t][..., :, None] * v[:, t][..., None, :]
        out[:, t] = np.einsum("bhij,bhi->bhj", state, q[:, t])
    return out, state


@op(
    "gated_linear_attention_carry", independent=never,
    reference=_gated_linear_attention_carry, tolerance=1e-5, traits=[SEGMENTED],
    decompose=_gated_linear_attention_carry_apart,
    samples=[
        sample(
            f32(2, 5, 1, 3), f32(2, 5, 1, 3), f32(2, 5, 4, 16), f32(2, 5, 4, low=-1, high=0), f32(2, 4, 3, 16),
            i32(2, 5, low=0, high=2),
        ),
        sample(
            f32(2, 5, 1, 3), f32(2, 5, 1, 3), f32(2, 5, 4, 16), f32(2, 5, 4, low=-1, high=0), f32(2, 4, 3, 16)
        ),
        sample(
            f32(1, 1, 2, 20), f32(1, 1, 2, 20), f32(1, 1, 6, 5), f32(1, 1, 6, low=-1, high=0), f32(1, 6, 20, 5)
        ),
        sample(
            f32(1, 70, 2, 8), f32(1, 70, 2, 8), f32(1, 70, 2, 32), f32(1, 70, 2, low=-1, high=0), f32(1, 2, 8, 32)
        ),
    ],
)  # fmt: skip
def gated_linear_attention_carry(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, state: TensorType, segments: TensorType | None = None
) -> tuple[TensorType, TensorType]:
    """Linear attention with a gate; a head keeps a matrix S from keys to values. Mamba 2's recurrence, among others.

    A token does S = exp(g) S + k ⊗ v and gives qᵀ S. q and k are [batch, seq, groups, n], v is
    [batch, seq, heads, m], g (the logarithm of the gate) is [batch, seq, heads]; neighbouring heads share a group.
    Starts from `state` [batch, heads, n, m] and also gives the one after the last token. Where the ids `segments`
    [batch, seq] change from one token to the next, the gate is closed: S starts at zero again.
    """
    where = "gated_linear_attention_carry"
    for name, operand in (("q", q), ("v", v)):
        if operand.rank != 4 or not all(isinstance(d, int) and d > 0 for d in operand.shape[2:]):
            raise ShapeError(f"{where}: {name} is [batch, seq, heads, size], the last two fixed, found {operand}")
    batch, seq, groups, n = q.shape
    heads, m = v.shape[2:]
    assert isinstance(heads, int) and isinstance(groups, int)
    if heads % groups:
        raise ShapeError(f"{where}: {heads} heads are no multiple of {groups} groups")
    _fits(where, "k", k, *q.shape)
    _fits(where, "v", v, batch, seq, heads, m)
    _fits(where, "g", g, batch, seq, heads)
    _fits(where, "state", state, batch, heads, n, m)
    _check_segments(where, batch, seq, segments)
    _floats(where, q, k, v, g, state)
    return v, state


# -- causal convolution ------------------------------------------------------------------------------------------------
def _depthwise_conv1d_causal(x: Any, weight: Any, left_pad: Any, segments: Any = None, *, kernel_size: int) -> Any:
    padded, seq = np.concatenate([left_pad, x], axis=1), x.shape[1]
    taps = weight.reshape(weight.shape[0], kernel_size)
    y = np.zeros_like(x)
    ids = np.zeros(x.shape[:2], np.int32) if segments is None else segments
    before = np.pad(ids, ((0, 0), (kernel_size - 1, 0)), "edge" if seq else "constant")
    for k in range(kernel_size):
        same = before[:, k : k + seq] == ids
        y += np.where(same[..., None], padded[:, k : k + seq], 0) * taps[:, k]
    return y


def _depthwise_conv1d_causal_apart(
    x: Value, weight: Value, left_pad: Value, segments: Value, *, kernel_size: int
) -> Value:
    """Tokens of another segment count as zeros; those of `left_pad` are of the first one."""
    taps, wide = weight.reshape(weight.shape[0], kernel_size), x.dtype.wide
    total: Value | None = None
    for k in range(kernel_size):
        back = kernel_size - 1 - k
        token = _earlier(x, left_pad, back)
        if back:
            same = segments.equal(_earlier(segments, _repeated(segments, kernel_size - 1), back))
            token = x.graph.one("where", same.reshape(*same.shape, 1), token, 0.0)
        term = token.astype(wide) * taps[:, k].astype(wide)
        total = term if total is None else total + term
    assert total is not None
    return total.astype(x.dtype)


@op(
    "depthwise_conv1d_causal", independent=never,
    reference=_depthwise_conv1d_causal, tolerance=2e-6, traits=[SEGMENTED],
    decompose=_depthwise_conv1d_causal_apart,
    samples=[
        sample(f32(2, 9, 3), f32(3, 4), f32(2, 3, 3), i32(2, 9, low=0, high=2), kernel_size=4),
        sample(f32(2, 5, 3), f32(3, 4), f32(2, 3, 3), kernel_size=4),
        sample(f32(1, 1, 70), f32(70, 1, 4), f32(1, 3, 70), kernel_size=4),
        sample(f32(2, 9, 5), f32(5, 1, 1, 3), f32(2, 2, 5), kernel_size=3),
        sample(f32(2, 4, 5), f32(5, 1), f32(2, 0, 5), kernel_size=1),
    ],
)  # fmt: skip
def depthwise_conv1d_causal(
    x: TensorType, weight: TensorType, left_pad: TensorType, segments: TensorType | None = None, *, kernel_size: int
) -> TensorType:
    """y[t] = sum over k of weight[k] x[t + k - (kernel_size - 1)], channel by channel.

    x is [batch, seq, channels]; `left_pad` [batch, kernel_size - 1, channels] stands for the tokens before it: zeros at
    the start, the last tokens of the piece before otherwise. The weight is [channels, kernel_size]; axes of size 1
    between them, as in files, are accepted. With ids `segments` [batch, seq], tokens of another segment than that of t
    count as zeros.
    """
    where = "depthwise_conv1d_causal"
    _check_conv(where, x, weight, "left_pad", left_pad, kernel_size)
    _check_segments(where, x.shape[0], x.shape[1], segments)
    return x


def _check_conv(where: str, x: TensorType, weight: TensorType, name: str, before: TensorType, kernel_size: int) -> None:
    if x.rank != 3 or kernel_size < 1:
        raise ShapeError(f"{where}: x is [batch, seq, channels], found {x} and kernel_size {kernel_size}")
    batch, _, channels = x.shape
    ones = (1,) * (weight.rank - 2)
    _fits(where, "weight", weight, channels, *ones, kernel_size)
    _fits(where, name, before, batch, kernel_size - 1, channels)
    _floats(where, x, weight, before)


def _depthwise_conv1d_causal_carry(
    x: Any, weight: Any, state: Any, lengths: Any, *, kernel_size: int
) -> tuple[Any, Any]:
    y = _depthwise_conv1d_causal(x, weight, state, kernel_size=kernel_size)
    all_of_it, ends = np.concatenate([state, x], axis=1), np.clip(lengths, 0, x.shape[1])
    after = [row[end : end + kernel_size - 1] for row, end in zip(all_of_it, ends, strict=True)]
    return y, np.stack(after) if after else state.copy()


@op(
    "depthwise_conv1d_causal_carry", independent=never, reference=_depthwise_conv1d_causal_carry, tolerance=2e-6,
    samples=[
        sample(f32(2, 5, 3), f32(3, 4), f32(2, 3, 3), i32(2, low=0, high=6), kernel_size=4),
        sample(f32(3, 1, 70), f32(70, 1, 4), f32(3, 3, 70), i32(3, low=0, high=2), kernel_size=4),
        sample(f32(2, 2, 5), f32(5, 1), f32(2, 0, 5), i32(2, low=0, high=3), kernel_size=1),
    ],
)  # fmt: skip
def depthwise_conv1d_causal_carry(
    x: TensorType, weight: TensorType, state: TensorType, lengths: TensorType, *, kernel_size: int
) -> tuple[TensorType, TensorType]:
    """`depthwise_conv1d_causal` after the tokens in `state`, and the state after the last token.

    The state has the last kernel_size - 1 tokens, [batch, kernel_size - 1, channels]. Of the tokens of a row the first
    `lengths[b]` count; what comes after them is padding, and no state has it.
    """
    where = "depthwise_conv1d_causal_carry"
    _check_conv(where, x, weight, "state", state, kernel_size)
    _fits(where, "lengths", lengths, x.shape[0])
    if not lengths.dtype.is_integer:
        raise DTypeError(f"{where}: lengths are integers, found {lengths}")
    return x, state

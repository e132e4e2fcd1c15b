"""The gated delta net: linear attention whose update corrects each head's state."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import ShapeError
from rlx.ir.independence import never
from rlx.ir.registry import CHECKS_ROWS, FUSED, f32, i32, op, sample
from rlx.ops.recurrent import (
    CHUNK,
    TOKEN_AXES,
    check_backward,
    check_floats,
    check_rows,
    check_segments,
    check_shape,
    check_state_size,
    checked_chunks,
    count_states,
    row_by_row,
    state_resets,
)
from rlx.types import TensorType


def _outer(a: Any, b: Any) -> Any:
    return a[..., :, None] * b[..., None, :]


def _gated_delta_net_with_states(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, segments: Any = None, *, state_size: int, chunk: int
) -> tuple[Any, Any, Any, Any]:
    batch, seq, heads, n = v.shape
    states, misses = np.empty((batch, heads, -(-seq // chunk), n, n), v.dtype), np.empty_like(v)
    out, state, resets = np.empty_like(v), state.copy(), state_resets(q, segments)
    for t in range(seq):
        if t % chunk == 0:
            states[:, :, t // chunk] = state
        state[resets[:, t]] = 0
        state = state * np.exp(g[:, t])[..., None, None]
        misses[:, t] = v[:, t] - np.einsum("bhij,bhi->bhj", state, k[:, t])
        state = state + _outer(k[:, t], misses[:, t] * beta[:, t][..., None])
        out[:, t] = np.einsum("bhij,bhi->bhj", state, q[:, t]) * q.dtype.type(1 / math.sqrt(state_size))
    return out, state, states, misses


def _gated_delta_net_carry(
    q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any, segments: Any = None, rows: Any = None, *, state_size: int
) -> tuple[Any, Any]:
    if rows is not None:

        def run(tokens: Sequence[Any], start: Any) -> tuple[Any, Any]:
            query, key, value, gate, rate = tokens
            return _gated_delta_net_carry(query, key, value, gate, rate, start, state_size=state_size)

        return row_by_row("gated_delta_net_carry", rows, state, [q, k, v, g, beta], run)
    out, last, *_ = _gated_delta_net_with_states(q, k, v, g, beta, state, segments, state_size=state_size, chunk=CHUNK)
    return out, last


def _gated_delta_net(q: Any, k: Any, v: Any, g: Any, beta: Any, segments: Any = None, *, state_size: int) -> Any:
    start = np.zeros((q.shape[0], q.shape[2], state_size, state_size), q.dtype)
    return _gated_delta_net_carry(q, k, v, g, beta, start, segments, state_size=state_size)[0]


def _check_delta(
    where: str, q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType,
    state: TensorType | None, n: int, segments: TensorType | None = None, rows: TensorType | None = None,
) -> None:  # fmt: skip
    check_state_size(where, n)
    axes = check_rows(where, q, rows, segments)
    if q.rank != axes + 2:
        raise ShapeError(f"{where}: q is [{TOKEN_AXES[axes]}, heads, state_size], found {q}")
    *lead, heads, _ = q.shape
    for name, operand in (("q", q), ("k", k), ("v", v)):
        check_shape(where, name, operand, *lead, heads, n)
    for name, operand in (("g", g), ("beta", beta)):
        check_shape(where, name, operand, *lead, heads)
    check_shape(where, "state", state, count_states(state, lead), heads, n, n)
    check_segments(where, lead, segments)
    check_floats(where, q, k, v, g, beta, state)


def _delta_operands(*lead: int, heads: int, n: int) -> tuple[Any, ...]:
    unit = f32(*lead, heads, n, low=-1 / n, high=1 / n)  # keys longer than 1 make the recurrence explode
    return unit, unit, f32(*lead, heads, n), f32(*lead, heads, low=-1, high=0), f32(*lead, heads, low=0, high=1)


@op(
    "gated_delta_net", independent=never, reference=_gated_delta_net, tolerance=1e-5,
    samples=[
        sample(*_delta_operands(2, 5, heads=3, n=4), i32(2, 5, low=0, high=2), state_size=4),
        sample(*_delta_operands(1, 70, heads=2, n=16), i32(1, 70, low=0, high=2), state_size=16),
        sample(*_delta_operands(2, 5, heads=3, n=4), state_size=4),
        sample(*_delta_operands(1, 9, heads=1, n=33), state_size=33),
        sample(*_delta_operands(1, 0, heads=2, n=4), state_size=4),
        sample(*_delta_operands(1, 150, heads=2, n=16), state_size=16),
    ],
)  # fmt: skip
def gated_delta_net(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType, segments: TensorType | None = None, *,
    state_size: int,
) -> TensorType:  # fmt: skip
    """Linear attention with the gated delta rule; each head has a state matrix S from keys to values.

    Per token, S = exp(g) S, then S += k ⊗ beta (v - kᵀ S), and the output is qᵀ S / sqrt(state_size). q, k and v are
    [batch, seq, heads, state_size], g (the logarithm of the gate) and beta are [batch, seq, heads]. Where the ids
    `segments` [batch, seq] change from one token to the next, S is reset to zero.
    """
    _check_delta("gated_delta_net", q, k, v, g, beta, None, state_size, segments)
    return v


@op(
    "gated_delta_net_carry", independent=never, reference=_gated_delta_net_carry, tolerance=1e-5, traits=[CHECKS_ROWS],
    samples=[
        sample(*_delta_operands(2, 5, heads=3, n=4), f32(2, 3, 4, 4), i32(2, 5, low=0, high=2), state_size=4),
        sample(*_delta_operands(2, 5, heads=3, n=4), f32(2, 3, 4, 4), state_size=4),
        sample(*_delta_operands(2, 1, heads=2, n=20), f32(2, 2, 20, 20), state_size=20),
        sample(*_delta_operands(1, 131, heads=1, n=16), f32(1, 1, 16, 16), state_size=16),
        sample(*_delta_operands(90, heads=2, n=16), f32(3, 2, 16, 16), None, i32(90, low=-1, high=3), state_size=16),
    ],
)  # fmt: skip
def gated_delta_net_carry(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType, state: TensorType,
    segments: TensorType | None = None, rows: TensorType | None = None, *, state_size: int,
) -> tuple[TensorType, TensorType]:  # fmt: skip
    """`gated_delta_net` from `state` [batch, heads, n, n] that also returns the state after the last token.

    With `rows` [tokens], other operands have the axis `tokens` in place of batch and seq, and the state is
    [rows, heads, n, n]: a token continues from the state of its row, as in `selective_scan_carry`.
    """
    _check_delta("gated_delta_net_carry", q, k, v, g, beta, state, state_size, segments, rows)
    return v, state


@op("gated_delta_net_with_states", independent=never, reference=_gated_delta_net_with_states, traits=[FUSED])
def gated_delta_net_with_states(
    q: TensorType, k: TensorType, v: TensorType, g: TensorType, beta: TensorType, state: TensorType,
    segments: TensorType | None = None, *, state_size: int, chunk: int = CHUNK,
) -> tuple[TensorType, TensorType, TensorType, TensorType]:  # fmt: skip
    """`gated_delta_net_carry` that also returns the values stored for its gradient.

    These are the state before each chunk of tokens, [batch, heads, chunks, n, n], and the error of each token, v - kᵀ
    S.
    """
    where = "gated_delta_net_with_states"
    _check_delta(where, q, k, v, g, beta, state, state_size, segments)
    batch, seq, heads, n = v.shape
    return v, state, v.with_shape(batch, heads, checked_chunks(where, seq, chunk), n, n), v


def _gated_delta_net_backward(
    q: Any, k: Any, g: Any, beta: Any, states: Any, misses: Any, d_out: Any, d_last: Any,
    segments: Any = None, *, state_size: int, chunk: int,
) -> tuple[Any, ...]:  # fmt: skip
    scale, seq, ds = q.dtype.type(1 / math.sqrt(state_size)), q.shape[1], d_last.copy()
    dq, dk, dv, dg, dbeta = (np.empty_like(x) for x in (q, k, misses, g, beta))
    gates, changes = np.exp(g)[..., None, None], misses * beta[..., None]
    resets = state_resets(q, segments)
    for first in reversed(range(0, seq, chunk)):
        before, after, state = [], [], states[:, :, first // chunk]
        tokens = range(first, min(first + chunk, seq))
        for t in tokens:
            before.append(state * gates[:, t])
            before[-1][resets[:, t]] = 0
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
            ds[resets[:, t]] = 0
    return dq, dk, dv, dg, dbeta, ds


@op("gated_delta_net_backward", independent=never, reference=_gated_delta_net_backward, traits=[FUSED])
def gated_delta_net_backward(
    q: TensorType, k: TensorType, g: TensorType, beta: TensorType, states: TensorType, misses: TensorType,
    d_out: TensorType, d_last: TensorType, segments: TensorType | None = None, *, state_size: int, chunk: int = CHUNK,
) -> tuple[TensorType, TensorType, TensorType, TensorType, TensorType, TensorType]:  # fmt: skip
    """Gradients of q, k, v, g, beta and state of `gated_delta_net_carry`, from those of its results.

    `states` and `misses` are the results of `gated_delta_net_with_states` for the same chunk; states inside a chunk are
    recomputed.
    """
    where = "gated_delta_net_backward"
    _check_delta(where, q, k, q, g, beta, None, state_size, segments)
    batch, seq, heads, n = q.shape
    stored, last = (batch, heads, checked_chunks(where, seq, chunk), n, n), (batch, heads, n, n)
    of_tokens = {"misses": (misses, q.shape), "d_out": (d_out, q.shape)}
    check_backward(where, q, states=(states, stored), **of_tokens, d_last=(d_last, last))
    return q, k, misses, g, beta, d_last

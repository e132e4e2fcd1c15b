"""The selective scan of Mamba: each channel has a small state vector."""

from __future__ import annotations

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


def _selective_scan_with_states(
    x: Any, delta: Any, a: Any, b: Any, c: Any, state: Any, segments: Any = None, *, state_size: int, chunk: int
) -> tuple[Any, Any, Any]:
    batch, seq, channels = x.shape
    y, states = np.empty_like(x), np.empty((batch, -(-seq // chunk), state_size, channels), x.dtype)
    state, resets = state.copy(), state_resets(x, segments)
    for t in range(seq):
        if t % chunk == 0:
            states[:, t // chunk] = state.swapaxes(1, 2)
        state[resets[:, t]] = 0
        step = delta[:, t, :, None]  # [batch, channels, 1]
        state = np.exp(step * a) * state + step * b[:, t, None, :] * x[:, t, :, None]
        y[:, t] = (state * c[:, t, None, :]).sum(-1)
    return y, state, states


def _selective_scan_carry(
    x: Any, delta: Any, a: Any, b: Any, c: Any, state: Any, d: Any = None, segments: Any = None, rows: Any = None, *,
    state_size: int,
) -> tuple[Any, Any]:  # fmt: skip
    if rows is not None:

        def run(tokens: Sequence[Any], start: Any) -> tuple[Any, Any]:
            inner, step, key, query = tokens
            return _selective_scan_carry(inner, step, a, key, query, start, d, state_size=state_size)

        return row_by_row("selective_scan_carry", rows, state, [x, delta, b, c], run)
    y, last, _ = _selective_scan_with_states(x, delta, a, b, c, state, segments, state_size=state_size, chunk=CHUNK)
    return (y if d is None else y + d * x), last


def _selective_scan(
    x: Any, delta: Any, a: Any, b: Any, c: Any, d: Any = None, segments: Any = None, *, state_size: int
) -> Any:
    start = np.zeros((x.shape[0], *a.shape), x.dtype)
    return _selective_scan_carry(x, delta, a, b, c, start, d, segments, state_size=state_size)[0]


def _check_selective(
    where: str, x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType,
    state: TensorType | None, d: TensorType | None, n: int, segments: TensorType | None = None,
    rows: TensorType | None = None,
) -> None:  # fmt: skip
    check_state_size(where, n)
    axes = check_rows(where, x, rows, segments)
    if x.rank != axes + 1:
        raise ShapeError(f"{where}: x is [{TOKEN_AXES[axes]}, channels], found {x}")
    *lead, channels = x.shape
    check_shape(where, "delta", delta, *lead, channels)
    check_shape(where, "a", a, channels, n)
    check_shape(where, "b", b, *lead, n)
    check_shape(where, "c", c, *lead, n)
    check_shape(where, "state", state, count_states(state, lead), channels, n)
    check_shape(where, "d", d, channels)
    check_segments(where, lead, segments)
    check_floats(where, x, delta, a, b, c, state, d)


def _scan_operands(*lead: int, channels: int, n: int) -> tuple[Any, ...]:
    return (
        f32(*lead, channels), f32(*lead, channels, low=0.01, high=0.5), f32(channels, n, low=-2, high=-0.1),
        f32(*lead, n), f32(*lead, n),
    )  # fmt: skip


@op(
    "selective_scan", independent=never, reference=_selective_scan, tolerance=5e-6,
    samples=[
        sample(*_scan_operands(2, 7, channels=5, n=3), f32(5), i32(2, 7, low=0, high=2), state_size=3),
        sample(*_scan_operands(2, 7, channels=5, n=3), f32(5), state_size=3),
        sample(*_scan_operands(1, 20, channels=70, n=4), state_size=4),
        sample(*_scan_operands(1, 0, channels=3, n=2), state_size=2),
    ],
)  # fmt: skip
def selective_scan(
    x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType, d: TensorType | None = None,
    segments: TensorType | None = None, *, state_size: int,
) -> TensorType:  # fmt: skip
    """Mamba's scan: h = exp(delta a) h + delta b x along the sequence, y = c · h + d x.

    x and delta are [batch, seq, channels], a is [channels, n], b and c are [batch, seq, n], d (optional) is [channels].
    Where the ids `segments` [batch, seq] change from one token to the next, h is reset to zero.
    """
    _check_selective("selective_scan", x, delta, a, b, c, None, d, state_size, segments)
    return x


@op(
    "selective_scan_carry", independent=never, reference=_selective_scan_carry, tolerance=5e-6, traits=[CHECKS_ROWS],
    samples=[
        sample(*_scan_operands(2, 7, channels=5, n=3), f32(2, 5, 3), f32(5), i32(2, 7, low=0, high=2), state_size=3),
        sample(*_scan_operands(2, 7, channels=5, n=3), f32(2, 5, 3), f32(5), state_size=3),
        sample(*_scan_operands(3, 1, channels=33, n=2), f32(3, 33, 2), state_size=2),
        sample(*_scan_operands(9, channels=33, n=2), f32(4, 33, 2), f32(33), None, i32(9, low=-1, high=4),
               state_size=2),
    ],
)  # fmt: skip
def selective_scan_carry(
    x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType, state: TensorType,
    d: TensorType | None = None, segments: TensorType | None = None, rows: TensorType | None = None, *, state_size: int,
) -> tuple[TensorType, TensorType]:  # fmt: skip
    """`selective_scan` from `state` [batch, channels, n] that also returns the state after the last token.

    With `rows` [tokens], x and delta are [tokens, channels], b and c are [tokens, n], and the state is [rows, channels,
    n]: a token continues from the state of its row, and a row without tokens keeps its state. Tokens of a row are in
    order, those of different rows may interleave. A negative row is padding, which changes no state and gives zeros; a
    row that does not exist is an error at run time.
    """
    _check_selective("selective_scan_carry", x, delta, a, b, c, state, d, state_size, segments, rows)
    return x, state


@op("selective_scan_with_states", independent=never, reference=_selective_scan_with_states, traits=[FUSED])
def selective_scan_with_states(
    x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType, state: TensorType,
    segments: TensorType | None = None, *, state_size: int, chunk: int = CHUNK,
) -> tuple[TensorType, TensorType, TensorType]:  # fmt: skip
    """`selective_scan_carry` without d that also returns the state before each chunk, [batch, chunks, n, channels]."""
    where = "selective_scan_with_states"
    _check_selective(where, x, delta, a, b, c, state, None, state_size, segments)
    batch, seq, channels = x.shape
    return x, state, x.with_shape(batch, checked_chunks(where, seq, chunk), state_size, channels)


def _selective_scan_backward(
    x: Any, delta: Any, a: Any, b: Any, c: Any, states: Any, d_out: Any, d_last: Any,
    segments: Any = None, *, state_size: int, chunk: int,
) -> tuple[Any, ...]:  # fmt: skip
    dx, ddelta, da, db, dc = (np.zeros_like(v) for v in (x, delta, a, b, c))
    ds, steps = d_last.copy(), delta[..., None]  # [batch, seq, channels, 1]
    drives, resets = steps * x[..., None], state_resets(x, segments)
    for first in reversed(range(0, x.shape[1], chunk)):
        state, carried = states[:, first // chunk].swapaxes(1, 2), []
        tokens = range(first, min(first + chunk, x.shape[1]))
        for t in tokens:
            carried.append(np.exp(steps[:, t] * a) * state)
            carried[-1][resets[:, t]] = 0
            state = carried[-1] + drives[:, t] * b[:, t, None]
        for t in reversed(tokens):
            ds = ds + d_out[:, t, :, None] * c[:, t, None]
            after, growth = carried[t - first] + drives[:, t] * b[:, t, None], ds * carried[t - first]
            dc[:, t], db[:, t] = (after * d_out[:, t, :, None]).sum(1), (ds * drives[:, t]).sum(1)
            drive = (ds * b[:, t, None]).sum(-1)
            dx[:, t], ddelta[:, t] = drive * delta[:, t], drive * x[:, t] + (growth * a).sum(-1)
            da += (growth * steps[:, t]).sum(0)
            ds = ds * np.exp(steps[:, t] * a)
            ds[resets[:, t]] = 0
    return dx, ddelta, da, db, dc, ds


@op("selective_scan_backward", independent=never, reference=_selective_scan_backward, traits=[FUSED])
def selective_scan_backward(
    x: TensorType, delta: TensorType, a: TensorType, b: TensorType, c: TensorType, states: TensorType,
    d_out: TensorType, d_last: TensorType, segments: TensorType | None = None, *, state_size: int, chunk: int = CHUNK,
) -> tuple[TensorType, TensorType, TensorType, TensorType, TensorType, TensorType]:  # fmt: skip
    """Gradients of x, delta, a, b, c and state of `selective_scan_carry` without d, from those of its results.

    `states` is the result of `selective_scan_with_states` for the same chunk; states inside a chunk are recomputed.
    """
    where = "selective_scan_backward"
    _check_selective(where, x, delta, a, b, c, None, None, state_size, segments)
    batch, seq, channels = x.shape
    stored = batch, checked_chunks(where, seq, chunk), state_size, channels
    last = batch, channels, state_size
    check_backward(where, x, states=(states, stored), d_out=(d_out, x.shape), d_last=(d_last, last))
    return x, delta, a, b, c, d_last

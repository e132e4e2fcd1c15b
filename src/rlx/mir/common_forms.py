"""Common forms: decompositions, into simpler ops, of ops that have a kernel of their own.

A profile asks for them (`kernel_dispatch`) to find out whether a kernel is at fault, or how much it gains.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from rlx.ir.graph import Graph, Value
from rlx.ir.registry import RuleTable
from rlx.ops.recurrent import state_reset_values
from rlx.types import Size

common_form: RuleTable[Callable[..., Any]] = RuleTable("common form", "src/rlx/mir/common_forms.py")


# -- activations ------------------------------------------------------------------------------------------------------
@common_form("sigmoid")
def _(x: Value) -> Any:
    return 1.0 / ((-x).exp() + 1.0)


@common_form("silu")
def _(x: Value) -> Any:
    return x / ((-x).exp() + 1.0)


@common_form("relu")
def _(x: Value) -> Value:
    return x.graph.one("maximum", x, 0.0)


@common_form("rsqrt")
def _(x: Value) -> Any:
    return 1.0 / x.sqrt()


@common_form("gelu")
def _(x: Value) -> Any:
    return x * 0.5 * ((x * math.sqrt(0.5)).erf() + 1.0)


@common_form("gelu_tanh")
def _(x: Value) -> Any:
    return x * 0.5 * (((x + x * x * x * 0.044715) * math.sqrt(2 / math.pi)).tanh() + 1.0)


# -- softmax and norms ------------------------------------------------------------------------------------------------
@common_form("softmax")
def _(x: Value, *, axis: int) -> Any:
    if x.shape[axis] == 0:
        return x  # there is no maximum to subtract
    wide = x.astype(x.dtype.wide)
    powers = (wide - wide.max(axis=axis, keepdims=True)).exp()
    return (powers / powers.sum(axis=axis, keepdims=True)).astype(x.dtype)


def _normed(centred: Value, eps: float, gamma: Value | None, beta: Value | None, like: Value) -> Any:
    y = centred / ((centred * centred).mean(axis=-1, keepdims=True) + eps).sqrt()
    y = y if gamma is None else y * gamma
    return (y if beta is None else y + beta).astype(like.dtype)


@common_form("layer_norm")
def _(x: Value, gamma: Value | None, beta: Value | None, *, eps: float) -> Any:
    wide = x.astype(x.dtype.wide)
    return _normed(wide - wide.mean(axis=-1, keepdims=True), eps, gamma, beta, x)


@common_form("rms_norm")
def _(x: Value, gamma: Value | None, beta: Value | None, *, eps: float) -> Any:
    return _normed(x.astype(x.dtype.wide), eps, gamma, beta, x)


# -- recurrences ------------------------------------------------------------------------------------------------------
def _scan_tokens(
    state: Value, broadcasts: Sequence[Value], xs: Sequence[Value], step: Callable[..., tuple[Value, Value]]
) -> tuple[Value, Value]:
    """Scan along axis 1 of the xs: (ys, last state). A step takes the state, broadcasts and one token of each x."""
    body = Graph("step")
    rows = [x.transpose(axes=(1, 0, *range(2, x.rank))) for x in xs]  # [seq, batch, ...]
    types = [state.type, *(v.type for v in broadcasts), *(r.type.with_shape(*r.shape[1:]) for r in rows)]
    body.set_outputs(step(*(body.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(types))))
    (last,), (ys,) = state.graph.scan_general([state], body, rows[0].shape[0], broadcasts=broadcasts, xs=rows)
    return ys.transpose(axes=(1, 0, *range(2, ys.rank))), last


def _scan_ragged_tokens(
    state: Value, broadcasts: Sequence[Value], xs: Sequence[Value], rows: Value,
    step: Callable[..., tuple[Value, Value]],
) -> tuple[Value, Value]:  # fmt: skip
    """Scan along axis 0 of the xs: each token is a batch of one that continues from the state of its row."""

    def token(states: Value, *operands: Value) -> tuple[Value, Value]:
        shared, tokens, row = operands[: len(broadcasts)], operands[len(broadcasts) : -1], operands[-1].reshape(1)
        present, row = row >= 0, row.maximum(0)
        before = states.gather(row)
        after, y = step(before, *shared, *(x.reshape(1, *x.shape) for x in tokens))
        updated, y = (
            x.graph.one("where", present.reshape(*(1,) * x.rank), x, other) for x, other in ((after, before), (y, 0.0))
        )
        return states.scatter(row, updated), y.reshape(*y.shape[1:])

    body = Graph("step")
    types = [state.type, *(v.type for v in broadcasts), *(x.type.with_shape(*x.shape[1:]) for x in (*xs, rows))]
    body.set_outputs(token(*(body.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(types))))
    (last,), (ys,) = state.graph.scan_general([state], body, rows.shape[0], broadcasts=broadcasts, xs=[*xs, rows])
    return ys, last


def _segment_begins(segments: Value | None) -> list[Value]:
    """Return a mask of the tokens that begin a segment, as a list; empty without segments."""
    return [] if segments is None else [state_reset_values(segments)]


def _reset(state: Value, begins: Value | None) -> Value:
    """Return the state [batch, ...] before a token: zeros if the token begins a segment."""
    if begins is None:
        return state
    return state.graph.one("where", begins.reshape(begins.shape[0], *(1,) * (state.rank - 1)), 0.0, state)


def _zeros(like: Value, *shape: Size) -> Value:
    return like.graph.one("expand", like.graph.constant(0, like.dtype), shape=shape)


@common_form("selective_scan_carry")
def _(
    x: Value, delta: Value, a: Value, b: Value, c: Value, state: Value, d: Value | None,
    segments: Value | None = None, rows: Value | None = None, *, state_size: int,
) -> tuple[Value, Value]:  # fmt: skip
    def step(
        h: Value, rate: Value, x: Value, delta: Value, b: Value, c: Value, begins: Value | None = None
    ) -> tuple[Value, Value]:
        h = _reset(h, begins)
        dt = delta.reshape(*delta.shape, 1)  # [batch, channels, 1]
        b, c = (t.reshape(t.shape[0], 1, t.shape[1]) for t in (b, c))
        h = (dt * rate).exp() * h + dt * b * x.reshape(*x.shape, 1)
        return h, (h * c).sum(axis=-1)

    if rows is not None:
        y, last = _scan_ragged_tokens(state, [a], [x, delta, b, c], rows, step)
        skipped = y if d is None else x.graph.one("where", (rows >= 0).reshape(rows.shape[0], 1), y + d * x, 0.0)
        return skipped, last
    y, last = _scan_tokens(state, [a], [x, delta, b, c, *_segment_begins(segments)], step)
    return (y if d is None else y + d * x), last


@common_form("selective_scan")
def _(
    x: Value, delta: Value, a: Value, b: Value, c: Value, d: Value | None, segments: Value | None, *, state_size: int
) -> Value:
    start = _zeros(x, x.shape[0], *a.shape)
    y: Value = common_form["selective_scan_carry"](x, delta, a, b, c, start, d, segments, state_size=state_size)[0]
    return y


@common_form("gated_delta_net_carry")
def _(
    q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value, segments: Value | None = None,
    rows: Value | None = None, *, state_size: int,
) -> tuple[Value, Value]:  # fmt: skip
    def cell(x: Value) -> Value:
        return x.reshape(*x.shape, 1, 1)

    def row(x: Value) -> Value:
        return x.reshape(*x.shape[:2], 1, x.shape[2])

    def step(
        s: Value, q: Value, k: Value, v: Value, g: Value, beta: Value, begins: Value | None = None
    ) -> tuple[Value, Value]:
        s = _reset(s, begins) * cell(g.exp())
        change = (row(v) - row(k) @ s) * cell(beta)  # [batch, heads, 1, values]
        s = s + k.reshape(*k.shape, 1) * change
        return s, (row(q) @ s).reshape(v.shape) * (1 / math.sqrt(state_size))

    if rows is not None:
        return _scan_ragged_tokens(state, [], [q, k, v, g, beta], rows, step)
    return _scan_tokens(state, [], [q, k, v, g, beta, *_segment_begins(segments)], step)


@common_form("gated_delta_net")
def _(q: Value, k: Value, v: Value, g: Value, beta: Value, segments: Value | None, *, state_size: int) -> Value:
    start = _zeros(q, q.shape[0], q.shape[2], state_size, state_size)
    out: Value = common_form["gated_delta_net_carry"](q, k, v, g, beta, start, segments, state_size=state_size)[0]
    return out


@common_form("depthwise_conv1d_causal")
def _(x: Value, weight: Value, left_pad: Value, _: None, *, kernel_size: int) -> Value:
    taps = weight.reshape(weight.shape[0], kernel_size)
    padded = x.graph.one("concatenate", left_pad, x, axis=1)
    seq = x.shape[1]
    y = padded[:, :seq] * taps[:, 0]
    for k in range(1, kernel_size):
        y = y + padded[:, k : seq + k] * taps[:, k]
    return y

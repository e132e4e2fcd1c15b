"""Recurrences along a sequence: differentiated as scans over tokens, inside scans over chunks that keep one state each.

A chunk has `CHUNK` tokens, so that the gradient of a sequence keeps its states at chunk ends and, while it goes back
through one, those of that chunk. Short sequences are one chunk. Zeros pad the last: they leave the state as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlx.ir.graph import Graph, Value
from rlx.transforms.batch import by_scan, folded
from rlx.transforms.build import declare, move_axis, taken, zeros
from rlx.transforms.tables import Lanes, batching, no_derivative, parts
from rlx.types import Size

CHUNK = 64
Chunk = Callable[[Graph, Value, Sequence[Value], Sequence[Value]], tuple[Value, Value]]


def chunked(
    state: Value, shared: Sequence[Value], rows: Sequence[Value], steps: Chunk, native: Chunk
) -> tuple[Value, Value]:
    """The outputs [batch, seq, ...] of a recurrence and its last state. `rows` are [batch, seq, ...] each.

    `steps` writes a chunk out token by token; `native` is the op itself on one chunk.
    """
    g, seq = state.graph, rows[0].shape[1]
    if isinstance(seq, int) and seq <= CHUNK:
        return steps(g, state, shared, rows)
    many: Size = (seq + (CHUNK - 1)) // CHUNK
    cut = []
    for x in rows:
        high = tuple(many * CHUNK - seq if a == 1 else 0 for a in range(x.rank))
        whole = g.one("pad", x, low=(0,) * x.rank, high=high)
        cut.append(move_axis(whole.reshape(x.shape[0], many, CHUNK, *x.shape[2:]), 1, 0))  # [chunks, batch, CHUNK, ...]
    body = Graph("chunk")
    inner = declare(body, "state", state.type)
    held = [declare(body, f"shared{i}", v.type) for i, v in enumerate(shared)]
    row = [declare(body, f"x{i}", x.type.with_shape(*x.shape[1:])) for i, x in enumerate(cut)]
    y, after = native(body, inner, held, row)
    body.set_outputs([after, y])
    (last,), (ys,) = g.scan_general(
        [state], body, many, broadcasts=shared, xs=cut,
        checkpoints=many,  # type: ignore[arg-type]
    )  # fmt: skip
    joined = move_axis(ys, 0, 1).reshape(ys.shape[1], many * CHUNK, *ys.shape[3:])
    return taken(joined, 1, 0, seq), last


def over_tokens(
    g: Graph, state: Value, shared: Sequence[Value], rows: Sequence[Value],
    token: Callable[..., tuple[Value, Value]],
) -> tuple[Value, Value]:  # fmt: skip
    """A chunk as a scan over its tokens; `token` takes the state, what is shared and a token of each."""
    body = Graph("token")
    inner = declare(body, "state", state.type)
    held = [declare(body, f"shared{i}", v.type) for i, v in enumerate(shared)]
    row = [declare(body, f"x{i}", x.type.with_shape(x.shape[0], *x.shape[2:])) for i, x in enumerate(rows)]
    y, after = token(inner, *held, *row)
    body.set_outputs([after, y])
    xs = [move_axis(x, 1, 0) for x in rows]
    (last,), (ys,) = g.scan_general([state], body, rows[0].shape[1], broadcasts=shared, xs=xs)
    return move_axis(ys, 0, 1), last


# -- selective scan ---------------------------------------------------------------------------------------------------
def _token_of_scan(state: Value, a: Value, x: Value, delta: Value, b: Value, c: Value) -> tuple[Value, Value]:
    batch, channels, n = state.shape
    step = delta.reshape(batch, channels, 1)
    after = (step * a).exp() * state + step * x.reshape(batch, channels, 1) * b.reshape(batch, 1, n)
    return (after * c.reshape(batch, 1, n)).sum(axis=-1), after


def _selective_scan(
    x: Value, delta: Value, a: Value, b: Value, c: Value, state: Value, d: Value | None, n: int
) -> tuple[Value, Value]:
    def steps(g: Graph, start: Value, shared: Sequence[Value], rows: Sequence[Value]) -> tuple[Value, Value]:
        return over_tokens(g, start, shared, rows, _token_of_scan)

    def native(g: Graph, start: Value, shared: Sequence[Value], rows: Sequence[Value]) -> tuple[Value, Value]:
        x_, delta_, b_, c_ = rows
        y, after = g.apply("selective_scan_carry", x_, delta_, shared[0], b_, c_, start, state_size=n)
        return y, after

    y, last = chunked(state, [a], [x, delta, b, c], steps, native)
    return (y if d is None else y + x * d), last


@parts("selective_scan_carry")
def _(
    x: Value, delta: Value, a: Value, b: Value, c: Value, state: Value, d: Value | None, *, state_size: int
) -> tuple[Value, Value]:
    return _selective_scan(x, delta, a, b, c, state, d, state_size)


@parts("selective_scan")
def _(x: Value, delta: Value, a: Value, b: Value, c: Value, d: Value | None, *, state_size: int) -> Value:
    start = zeros(x.graph, x.type.with_shape(x.shape[0], *a.shape))
    return _selective_scan(x, delta, a, b, c, start, d, state_size)[0]


# -- gated delta net --------------------------------------------------------------------------------------------------
def _token_of_delta(state: Value, q: Value, k: Value, v: Value, g: Value, beta: Value) -> tuple[Value, Value]:
    batch, heads, n = q.shape
    state = state * g.exp().reshape(batch, heads, 1, 1)
    key, query = k.reshape(batch, heads, 1, n), q.reshape(batch, heads, 1, n)
    change = (v.reshape(batch, heads, 1, n) - key @ state) * beta.reshape(batch, heads, 1, 1)
    after = state + key.mT * change
    assert isinstance(n, int)
    return (query @ after).reshape(batch, heads, n) * (1 / math.sqrt(n)), after


def _gated_delta_net(rows: Sequence[Value], state: Value, n: int) -> tuple[Value, Value]:
    def steps(g: Graph, start: Value, shared: Sequence[Value], rows: Sequence[Value]) -> tuple[Value, Value]:
        return over_tokens(g, start, shared, rows, _token_of_delta)

    def native(g: Graph, start: Value, shared: Sequence[Value], rows: Sequence[Value]) -> tuple[Value, Value]:
        y, after = g.apply("gated_delta_net_carry", *rows, start, state_size=n)
        return y, after

    return chunked(state, [], rows, steps, native)


@parts("gated_delta_net_carry")
def _(q: Value, k: Value, v: Value, g: Value, beta: Value, state: Value, *, state_size: int) -> tuple[Value, Value]:
    return _gated_delta_net([q, k, v, g, beta], state, state_size)


@parts("gated_delta_net")
def _(q: Value, k: Value, v: Value, g: Value, beta: Value, *, state_size: int) -> Value:
    start = zeros(q.graph, q.type.with_shape(q.shape[0], q.shape[2], state_size, state_size))
    return _gated_delta_net([q, k, v, g, beta], start, state_size)[0]


# -- gated linear attention -------------------------------------------------------------------------------------------
def _token_of_attention(state: Value, q: Value, k: Value, v: Value, g: Value) -> tuple[Value, Value]:
    batch, heads, n, m = state.shape
    after = state * g.exp().reshape(batch, heads, 1, 1) + k.reshape(batch, heads, n, 1) * v.reshape(batch, heads, 1, m)
    return (q.reshape(batch, heads, 1, n) @ after).reshape(batch, heads, m), after


@parts("gated_linear_attention_carry")
def _(q: Value, k: Value, v: Value, g: Value, state: Value) -> tuple[Value, Value]:
    batch, seq, groups, n = q.shape
    heads = v.shape[2]
    assert isinstance(heads, int) and isinstance(groups, int)

    def for_heads(x: Value) -> Value:
        shape = (batch, seq, groups, heads // groups, n)
        wide = x.graph.one("expand", x.reshape(batch, seq, groups, 1, n), shape=shape)
        return wide.reshape(batch, seq, heads, n)

    def steps(g: Graph, start: Value, shared: Sequence[Value], rows: Sequence[Value]) -> tuple[Value, Value]:
        return over_tokens(g, start, shared, rows, _token_of_attention)

    def native(g: Graph, start: Value, shared: Sequence[Value], rows: Sequence[Value]) -> tuple[Value, Value]:
        y, after = g.apply("gated_linear_attention_carry", *rows, start)
        return y, after

    return chunked(state, [], [for_heads(q), for_heads(k), v, g], steps, native)


# -- causal convolution -----------------------------------------------------------------------------------------------
@parts("depthwise_conv1d_causal")
def _(x: Value, weight: Value, left_pad: Value, *, kernel_size: int) -> Value:
    padded = x.graph.one("concatenate", left_pad, x, axis=1)
    taps = weight.reshape(weight.shape[0], kernel_size)
    total: Value | None = None
    for k in range(kernel_size):
        term = taken(padded, 1, k, k + x.shape[1]) * taps[:, k]
        total = term if total is None else total + term
    assert total is not None
    return total


no_derivative(
    "depthwise_conv1d_causal_carry",
    why="its state is written in place while a model generates; for training build the graph with "
    "depthwise_conv1d_causal",
)


# -- vmap -------------------------------------------------------------------------------------------------------------
_OF_ALL = {
    "selective_scan": (2, 5), "selective_scan_carry": (2, 6), "depthwise_conv1d_causal": (1,),
    "depthwise_conv1d_causal_carry": (1,),
}  # operands that have no batch  # fmt: skip


@batching(
    "selective_scan", "selective_scan_carry", "depthwise_conv1d_causal", "depthwise_conv1d_causal_carry",
    "gated_delta_net", "gated_delta_net_carry", "gated_linear_attention_carry",
)  # fmt: skip
def _(lanes: Lanes) -> Sequence[Value]:
    shared = _OF_ALL.get(lanes.node.op, ())
    if any(lanes.batched[i] for i in shared):
        return by_scan(lanes)
    return folded(lanes, [i for i in range(len(lanes.operands)) if i not in shared])

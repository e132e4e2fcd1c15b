"""Recurrent blocks that stages emit, with their lowerings: Mamba, Mamba 2, the gated delta rule; each convolves first.

With a runtime cache, `conv_state` and `state` carry over from earlier tokens and are written in place, and `positions`
marks padding (negative), which leaves every state unchanged. Without them, states start at zero. Weights are as files
store them.

Ragged tokens are a batch of one sequence, with `token_rows` [tokens], the row of the states of each token.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from rlx.dtypes import I32
from rlx.errors import GraphError, ShapeError
from rlx.hir.activations import activate, check_known, softplus
from rlx.hir.blocks import check_shapes
from rlx.hir.lower import lowering, place, project, read
from rlx.hir.ragged import check_token_rows, without_batch
from rlx.ir.graph import Value
from rlx.ir.registry import HIR, MIXES_TOKENS, TAKES_PACKED, Spec, f32, i32, op, sample
from rlx.types import Size, TensorType


# -- shared -----------------------------------------------------------------------------------------------------------
def _check_states(
    where: str, x: TensorType, states: dict[str, tuple[TensorType | None, tuple[Size, ...]]],
    positions: TensorType | None, token_rows: TensorType | None,
) -> None:  # fmt: skip
    if token_rows is not None:
        check_token_rows(where, x, token_rows)
        if positions is None:
            raise GraphError(f"{where}: token_rows are rows of {' and '.join(states)}, and there are none")
    operands = [t for t, _ in states.values()] + [positions]
    if any(t is None for t in operands) and any(t is not None for t in operands):
        raise GraphError(f"{where}: takes {', '.join(states)} and positions, or none of them")
    check_shapes(where, {**states, "positions": (positions, x.shape[:2])})


def _sizes(where: str, **sizes: Size) -> None:
    """Check that every size is a known non-negative number."""
    for name, size in sizes.items():
        if not isinstance(size, int) or size < 0:
            raise ShapeError(f"{where}: {name} is {size}, expected a number that the weights decide")


def _sequence(where: str, x: TensorType, conv: TensorType) -> None:
    if x.rank != 3 or not x.dtype.is_float:
        raise ShapeError(f"{where}: found {x}, expected floats [batch, seq, channels]")
    if conv.rank not in (2, 3):
        raise ShapeError(f"{where}: conv is {conv}, expected [channels, kernel] or [channels, 1, kernel]")


def _conv_shapes(
    conv: TensorType, conv_bias: TensorType | None, channels: Size
) -> dict[str, tuple[TensorType | None, tuple[Size, ...]]]:
    middle = (1,) if conv.rank == 3 else ()
    return {"conv": (conv, (channels, *middle, conv.shape[-1])), "conv_bias": (conv_bias, (channels,))}


def _state_count(x: TensorType, state: TensorType | None, token_rows: TensorType | None) -> Size:
    """The number of sequences that have states."""
    ragged = token_rows is not None and state is not None and state.rank
    return state.shape[0] if ragged else x.shape[0]  # type: ignore[union-attr]


def _zeros(x: Value, *shape: Size) -> Value:
    """Initial state, [batch, *shape]."""
    return x.graph.one("expand", x.graph.constant(0.0, x.dtype), shape=(x.shape[0], *shape))


def _present_rows(rows: Value | None, positions: Value | None) -> Value | None:
    """Rows of ragged tokens for recurrent ops: -1 for padding. Other tokens with a negative row raise an error."""
    if rows is None or positions is None:
        return None
    where, rows = functools.partial(rows.graph.one, "where"), rows if rows.dtype is I32 else rows.astype("i64")
    return where(positions.reshape(*rows.shape) >= 0, where(rows < 0, 2**31 - 1, rows), -1)


def _carry(op: str, tokens: Sequence[Value], *others: Value | None, rows: Value | None, **how: Any) -> list[Value]:
    """Runs a recurrent op; ragged tokens and its first result are [1, tokens, ...]."""
    graph = tokens[0].graph
    if rows is None:
        return list(graph.apply(op, *tokens, *others, **how))
    out, after = graph.apply(op, *(without_batch(x) for x in tokens), *others, rows=rows, **how)
    return [out.reshape(1, *out.shape), after]


def _convolve(
    x: Value, conv: Value, bias: Value | None, state: Value | None, positions: Value | None, rows: Value | None
) -> Value:
    """Depthwise causal convolution."""
    weight, size = place(read(conv, x.dtype)), conv.shape[-1]
    assert isinstance(size, int)
    if state is None or positions is None:
        before = _zeros(x, size - 1, x.shape[-1])
        y = x.graph.one("depthwise_conv1d_causal", x, weight, before, kernel_size=size)
    else:
        before = place(state)
        counts = (positions >= 0).astype("i32").sum(axis=1) if rows is None else None
        y = _carry("depthwise_conv1d_causal_carry", [x], weight, before, counts, rows=rows, kernel_size=size)[0]
    return y if bias is None else y + read(bias, x.dtype)


def _where_present(x: Value, positions: Value | None) -> Value:
    """x [batch, seq, ...] with 0 at padding; unchanged without positions."""
    if positions is None:
        return x
    present = positions >= 0
    return x.graph.one("where", present.reshape(*x.shape[:2], *(1,) * (x.rank - 2)), x, 0.0)


def _decay(rates: Value, is_log: bool) -> Value:
    return -rates.exp() if is_log else rates


def _small(*shape: int) -> Spec:
    return f32(*shape, low=-0.7, high=0.7)


# -- Mamba ------------------------------------------------------------------------------------------------------------
_MAMBA = (f32(2, 5, 12), _small(6, 1, 3), _small(10, 6), _small(6, 4), _small(6), _small(6, 3), _small(6))


@op(
    "mamba_block", level=HIR, traits=[TAKES_PACKED, MIXES_TOKENS],
    samples=[
        sample(*_MAMBA, activation="silu"),
        sample(*_MAMBA, _small(6), f32(2, 2, 6), f32(2, 6, 3), i32(2, 5, low=-1, high=9), activation="gelu",
               log_rates=False),
        sample(f32(1, 9, 12), *_MAMBA[1:], _small(6), f32(3, 2, 6), f32(3, 6, 3), i32(1, 9, low=-1, high=9),
               i32(9, low=0, high=3)),
    ],
)  # fmt: skip
def mamba_block(
    both: TensorType,
    conv: TensorType,
    mix: TensorType,
    step: TensorType,
    step_bias: TensorType,
    rates: TensorType,
    skip: TensorType,
    conv_bias: TensorType | None = None,
    conv_state: TensorType | None = None,
    state: TensorType | None = None,
    positions: TensorType | None = None,
    token_rows: TensorType | None = None,
    *,
    activation: str = "silu",
    log_rates: bool = True,
) -> TensorType:
    """Mamba between its input and its output projection: scan(activation(conv(x))) * silu(gate).

    `both` is [batch, seq, 2 * inner]: x and the gate. `mix` [rank + 2 * n, inner] projects x to the low-rank step, b
    and c; `step` [inner, rank] and `step_bias` project the step to its full width. `rates` [inner, n] are log decay
    rates unless `log_rates` is false; `skip` [inner] scales the part of x that bypasses the scan.
    """
    where = "mamba_block"
    check_known(activation)
    _sequence(where, both, conv)
    if rates.rank != 2 or mix.rank != 2 or not isinstance(both.shape[2], int):
        raise ShapeError(f"{where}: both is {both}, mix {mix}, rates {rates}; expected weights of two axes")
    inner, n = both.shape[2] // 2, rates.shape[1]
    rank = mix.shape[0] - 2 * n
    _sizes(where, n=n, rank=rank)
    check_shapes(where, {
        **_conv_shapes(conv, conv_bias, inner), "mix": (mix, (mix.shape[0], inner)), "step": (step, (inner, rank)),
        "step_bias": (step_bias, (inner,)), "rates": (rates, (inner, n)), "skip": (skip, (inner,)),
    })  # fmt: skip
    count = _state_count(both, conv_state, token_rows)
    states = {"conv_state": (conv_state, (count, conv.shape[-1] - 1, inner))}
    _check_states(where, both, states | {"state": (state, (count, inner, n))}, positions, token_rows)
    return both.with_shape(*both.shape[:2], inner)


@lowering("mamba_block")
def _(
    both: Value, conv: Value, mix: Value, step: Value, step_bias: Value, rates: Value, skip: Value,
    conv_bias: Value | None, conv_state: Value | None, state: Value | None, positions: Value | None,
    token_rows: Value | None, *, activation: str, log_rates: bool,
) -> Value:  # fmt: skip
    graph, kind, width, n = both.graph, both.dtype, both.shape[2], rates.shape[1]
    assert isinstance(width, int) and isinstance(n, int)
    size, rank = width // 2, mix.shape[0] - 2 * n
    inner, gate, rows = both[:, :, :size], both[:, :, size:], _present_rows(token_rows, positions)
    inner = activate(_convolve(inner, conv, conv_bias, conv_state, positions, rows), activation)
    mixed = project(inner, mix, kind=kind)
    steps = softplus(project(mixed[:, :, :rank], step, step_bias, kind=kind))
    if rows is None:
        steps = _where_present(steps, positions)  # a step of 0 leaves the state unchanged
    rates = place(read(rates, kind))
    b, c = mixed[:, :, rank : rank + n], mixed[:, :, rank + n :]
    decay = _decay(rates, log_rates)
    before = _zeros(both, size, n) if state is None else place(state)
    x, delta, b, c = (v if rows is None else without_batch(v) for v in (inner, steps, b, c))
    operands = x, delta, decay, b, c, before, read(skip, kind)
    scanned = graph.apply("selective_scan_carry", *operands, rows=rows, state_size=n)[0]
    scanned = scanned if rows is None else scanned.reshape(*inner.shape)
    gated: Value = scanned * gate.silu()
    return gated


# -- Mamba 2 ----------------------------------------------------------------------------------------------------------
_MAMBA2 = (f32(2, 5, 26), _small(16, 1, 3), _small(2), _small(2, 1), _small(2), f32(8, low=0.5, high=1.5))


@op(
    "mamba2_block", level=HIR, traits=[TAKES_PACKED, MIXES_TOKENS],
    samples=[
        sample(*_MAMBA2, groups=1, eps=1e-5, activation="silu", norm_groups=2),
        sample(*_MAMBA2, _small(16), f32(2, 2, 16), f32(2, 2, 4, 4), i32(2, 5, low=-1, high=9), groups=1, eps=1e-5,
               log_rates=False, least_step=0.1, most_step=0.9),
        sample(f32(1, 9, 26), *_MAMBA2[1:], _small(16), f32(3, 2, 16), f32(3, 2, 4, 4), i32(1, 9, low=-1, high=9),
               i32(9, low=0, high=3), groups=1, eps=1e-5),
    ],
)  # fmt: skip
def mamba2_block(
    mixed: TensorType,
    conv: TensorType,
    step_bias: TensorType,
    rates: TensorType,
    skip: TensorType,
    norm: TensorType,
    conv_bias: TensorType | None = None,
    conv_state: TensorType | None = None,
    state: TensorType | None = None,
    positions: TensorType | None = None,
    token_rows: TensorType | None = None,
    *,
    groups: int,
    eps: float,
    activation: str = "silu",
    log_rates: bool = True,
    least_step: float = 0.0,
    most_step: float | None = None,
    norm_groups: int = 1,
) -> TensorType:
    """Mamba 2 between its projections: rms_norm(gated_linear_attention(activation(conv(x))) * silu(gate)).

    `mixed` is [batch, seq, inner + channels + heads]: the gate, the convolution's input (values per head, keys and
    queries per group), and a step per head. `step_bias`, `rates` and `skip` have one number per head, `norm` one per
    channel; the norm is over all channels, or over each of `norm_groups` parts.
    """
    where = "mamba2_block"
    check_known(activation)
    _sequence(where, mixed, conv)
    heads, inner, channels = step_bias.elements, norm.elements, conv.shape[0]
    _sizes(where, heads=heads, inner=inner, channels=channels)
    assert isinstance(heads, int) and isinstance(inner, int) and isinstance(channels, int)
    if heads < 1 or groups < 1 or norm_groups < 1 or inner % heads or inner % norm_groups or heads % groups:
        raise ShapeError(f"{where}: {inner} channels, {heads} heads and {groups} groups do not fit")
    n = (channels - inner) // (2 * groups)
    check_shapes(where, {
        "mixed": (mixed, (*mixed.shape[:2], inner + inner + 2 * groups * n + heads)),
        **_conv_shapes(conv, conv_bias, inner + 2 * groups * n),
    })  # fmt: skip
    for name, vector in (("rates", rates), ("skip", skip)):
        if vector.elements != heads:
            raise ShapeError(f"{where}: {name} is {vector}, expected {heads} numbers, one per head")
    count = _state_count(mixed, conv_state, token_rows)
    states = {"conv_state": (conv_state, (count, conv.shape[-1] - 1, channels))}
    _check_states(where, mixed, states | {"state": (state, (count, heads, n, inner // heads))}, positions, token_rows)
    return mixed.with_shape(*mixed.shape[:2], inner)


@lowering("mamba2_block")
def _(
    mixed: Value, conv: Value, step_bias: Value, rates: Value, skip: Value, norm: Value, conv_bias: Value | None,
    conv_state: Value | None, state: Value | None, positions: Value | None, token_rows: Value | None, *,
    groups: int, eps: float, activation: str, log_rates: bool, least_step: float, most_step: float | None,
    norm_groups: int,
) -> Value:  # fmt: skip
    heads, size, channels, lead = step_bias.type.elements, norm.type.elements, conv.shape[0], mixed.shape[:2]
    assert isinstance(heads, int) and isinstance(size, int) and isinstance(channels, int)
    n, total = (channels - size) // (2 * groups), size + channels + heads

    def vector(stored: Value) -> Value:
        """Reads a vector that files may store as a column or as one row per group."""
        return read(stored, mixed.dtype).reshape(stored.type.elements)

    gate, inner, steps = (mixed[:, :, a:b] for a, b in ((0, size), (size, total - heads), (total - heads, total)))
    rows = _present_rows(token_rows, positions)
    inner = activate(_convolve(inner, conv, conv_bias, conv_state, positions, rows), activation)
    ends = (0, size, size + groups * n, channels)
    v, k, q = (
        inner[:, :, a:b].reshape(*lead, count, (b - a) // count)
        for a, b, count in zip(ends, ends[1:], (heads, groups, groups), strict=False)
    )
    steps = softplus(steps + vector(step_bias)).maximum(least_step)
    steps = steps if most_step is None else steps.minimum(most_step)
    steps = _where_present(steps, positions) if rows is None else steps
    rates = vector(rates)
    before = _zeros(mixed, heads, n, size // heads) if state is None else place(state)
    # h = exp(dt A) h + dt B x and C h are linear attention: B is the key, dt x the value, C the query
    moved, gates = v * steps.reshape(*steps.shape, 1), steps * _decay(rates, log_rates)
    attended = _carry("gated_linear_attention_carry", [q, k, moved, gates], before, rows=rows)[0]
    attended = attended + v * vector(skip).reshape(heads, 1)
    gated = attended.reshape(*lead, size) * gate.silu()
    weight = vector(norm)
    apart = gated.reshape(*lead, norm_groups, size // norm_groups).rms_norm(eps=eps)
    result: Value = apart.reshape(*lead, size) * weight
    return result


# -- the gated delta rule ---------------------------------------------------------------------------------------------
_DELTA = (f32(2, 5, 24), f32(2, 5, 16), f32(2, 5, 4), f32(2, 5, 4), _small(24, 1, 3), _small(4), _small(4), _small(4))


@op(
    "delta_net_block", level=HIR, traits=[TAKES_PACKED, MIXES_TOKENS],
    samples=[
        sample(*_DELTA, state_size=2, eps=1e-5), sample(*_DELTA, state_size=2, eps=1e-5, tiled=True, activation="gelu"),
        sample(*_DELTA, f32(2, 2, 24), f32(2, 4, 4, 4), i32(2, 5, low=-1, high=9), state_size=2, eps=1e-5,
               log_rates=False),
        sample(*(f32(1, 9, n) for n in (24, 16, 4, 4)), *_DELTA[4:], f32(3, 2, 24), f32(3, 4, 4, 4),
               i32(1, 9, low=-1, high=9), i32(9, low=0, high=3), state_size=2, eps=1e-5),
    ],
)  # fmt: skip
def delta_net_block(
    qkv: TensorType,
    z: TensorType,
    b: TensorType,
    a: TensorType,
    conv: TensorType,
    rates: TensorType,
    step_bias: TensorType,
    norm: TensorType,
    conv_state: TensorType | None = None,
    state: TensorType | None = None,
    positions: TensorType | None = None,
    token_rows: TensorType | None = None,
    *,
    state_size: int,
    eps: float,
    tiled: bool = False,
    activation: str = "silu",
    log_rates: bool = True,
) -> tuple[TensorType, TensorType]:
    """The gated delta rule (Yang et al., 2024) between its projections: the layer's output, and the state after it.

    `qkv` [batch, seq, channels] are queries, keys and values before the convolution; `z` [batch, seq, heads * size]
    gates the output, after a norm per head; `b` and `a` [batch, seq, heads] determine update strength and decay. Query
    and key heads have `state_size` elements and are shared by adjacent value heads, or, if `tiled`, by every n-th.
    States are square, with the larger of both sizes, zero-padded. Returns [batch, seq, heads * size].
    """
    where = "delta_net_block"
    check_known(activation)
    _sequence(where, qkv, conv)
    heads, size = rates.shape[0] if rates.rank == 1 else None, norm.shape[0] if norm.rank == 1 else None
    if not isinstance(heads, int) or not isinstance(size, int) or not isinstance(qkv.shape[2], int):
        raise ShapeError(f"{where}: qkv is {qkv}, rates {rates}, norm {norm}; expected known sizes and vectors")
    lead, keys = qkv.shape[:2], qkv.shape[2] - heads * size
    if state_size < 1 or keys <= 0 or keys % (2 * state_size) or heads % (keys // (2 * state_size)):
        raise ShapeError(
            f"{where}: {qkv.shape[2]} channels do not split into heads of {state_size} and {heads} of {size}"
        )
    check_shapes(where, {
        "z": (z, (*lead, heads * size)), "b": (b, (*lead, heads)), "a": (a, (*lead, heads)),
        **_conv_shapes(conv, None, qkv.shape[2]), "step_bias": (step_bias, (heads,)),
    })  # fmt: skip
    side = max(state_size, size)
    count = _state_count(qkv, conv_state, token_rows)
    states = {"conv_state": (conv_state, (count, conv.shape[-1] - 1, qkv.shape[2]))}
    _check_states(where, qkv, states | {"state": (state, (count, heads, side, side))}, positions, token_rows)
    return qkv.with_shape(*lead, heads * size), qkv.with_shape(count, heads, side, side)


@lowering("delta_net_block")
def _(
    qkv: Value, z: Value, b: Value, a: Value, conv: Value, rates: Value, step_bias: Value, norm: Value,
    conv_state: Value | None, state: Value | None, positions: Value | None, token_rows: Value | None, *,
    state_size: int, eps: float, tiled: bool, activation: str, log_rates: bool,
) -> tuple[Value, Value]:  # fmt: skip
    kind, lead, n, rows = qkv.dtype, qkv.shape[:2], state_size, _present_rows(token_rows, positions)
    heads, size, channels = rates.shape[0], norm.shape[0], qkv.shape[2]
    assert isinstance(heads, int) and isinstance(size, int) and isinstance(channels, int)
    keys, side = (channels - heads * size) // 2, max(n, size)  # states are square, zero-padded
    convolved = activate(_convolve(qkv, conv, None, conv_state, positions, rows), activation)
    q, k, v = (convolved[:, :, i:j] for i, j in ((0, keys), (keys, 2 * keys), (2 * keys, channels)))
    decay = _decay(place(read(rates, kind)), log_rates)
    gates = decay * softplus(a + read(step_bias, kind))
    q, k = (_unit_heads(x, n, heads, tiled) for x in (q, k))
    if side != n:
        q = q * math.sqrt(side / n)  # the scan divides by sqrt(side)
    operands = [_pad(x, side) for x in (q, k)]
    operands.append(_pad(v.reshape(*lead, heads, size), side))
    # no decay and no update at padding, so the state is unchanged
    padded = positions if rows is None else None
    operands.append(_where_present(gates, padded))
    operands.append(_where_present(b.sigmoid(), padded))
    before = _zeros(qkv, heads, side, side) if state is None else place(state)
    seen, after = _carry("gated_delta_net_carry", operands, before, rows=rows, state_size=side)
    normed = seen[:, :, :, :size].rms_norm(read(norm, kind), eps=eps)
    gated = normed * z.reshape(*lead, heads, size).silu()
    return gated.reshape(*lead, heads * size), after


def _unit_heads(x: Value, n: int, heads: int, tiled: bool) -> Value:
    """Queries or keys of unit length, one per value head."""
    lead, count = x.shape[:2], x.shape[2] // n
    assert isinstance(count, int)
    share = heads // count
    one, all_ = ((1, count), (share, count)) if tiled else ((count, 1), (count, share))
    x = x.reshape(*lead, *one, n)
    unit: Value = x * ((x * x).sum(axis=-1, keepdims=True) + 1e-6).rsqrt()
    shared: Value = unit.expand(shape=(*lead, *all_, n))
    return shared.reshape(*lead, heads, n)


def _pad(x: Value, size: int) -> Value:
    """Zero-pads the last axis at its end."""
    last = x.shape[-1]
    if last == size:
        return x
    before = (0,) * (x.rank - 1)
    result: Value = x.pad(low=(*before, 0), high=(*before, size - last))
    return result

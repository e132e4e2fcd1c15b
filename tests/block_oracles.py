"""Oracles of the HIR blocks that models are built from, in float64; `oracles` registers them with those of all ops."""

from __future__ import annotations

from typing import Any

import numpy as np
from oracles import (
    ORACLES,
    Array,
    _attention,
    _cached_attention,
    _kv_append,
    _layer_norm,
    _rms_norm,
    _rope,
    oracle,
    sigmoid,
)


def activated(x: Array, name: str | None) -> Array:
    if name is None:
        return x
    return x * sigmoid(1.702 * x) if name == "quick_gelu" else np.asarray(ORACLES[name](x))


def dense(x: Array, weight: Array, bias: Array | None = None) -> Array:
    """A linear map by a weight [out, in], one output at a time."""
    result = np.einsum("...i,oi->...o", x, weight)
    return result if bias is None else result + bias


@oracle("linear")
def _linear(x: Array, weight: Array, bias: Array | None = None, *, activation: str | None = None) -> Array:
    y = x @ weight
    return activated(y if bias is None else y + bias, activation)


@oracle("linear_stored")
def _linear_stored(
    x: Array, weight: Array, bias: Array | None = None, *, activation: str | None = None, transposed: bool = True,
    heads: int | None = None,
) -> Array:  # fmt: skip
    y = activated(dense(x, weight if transposed else weight.T, bias), activation)
    return y if heads is None else y.reshape(*y.shape[:-1], heads, -1)


@oracle("norm")
def _norm(
    x: Array, weight: Array, bias: Array | None = None, *, kind: str, eps: float, unit_offset: bool = False
) -> Array:
    norms: dict[str, Any] = {"rms": _rms_norm, "layer": _layer_norm}
    result: Array = norms[kind](x, weight + 1 if unit_offset else weight, bias, eps=eps)
    return result


@oracle("split_qkv")
def _split_qkv(qkv: Array, *, num_heads: int) -> tuple[Array, ...]:
    return tuple(part.reshape(*qkv.shape[:2], num_heads, -1) for part in np.split(qkv, 3, axis=-1))


def rotated(
    x: Array, cos: Array | None, sin: Array | None, rows: Array | None, positions: Array | None, style: str
) -> Array:
    if cos is None or sin is None:
        return x
    at = np.broadcast_to(np.arange(x.shape[1]), x.shape[:2]) if positions is None else np.maximum(positions, 0)
    return _rope(x, cos, sin, at if rows is None else rows, style=style)


@oracle("normed_heads")
def _normed_heads(
    x: Array, weight: Array, norm: Array, bias: Array | None = None, cos: Array | None = None,
    sin: Array | None = None, rows: Array | None = None, positions: Array | None = None, *, heads: int, eps: float,
    unit_offset: bool = False, style: str = "halves",
) -> Array:  # fmt: skip
    y = dense(x, weight, bias).reshape(*x.shape[:2], heads, -1)
    return rotated(_rms_norm(y, norm + unit_offset, eps=eps), cos, sin, rows, positions, style)


@oracle("gated_queries")
def _gated_queries(
    x: Array, weight: Array, bias: Array | None = None, norm: Array | None = None, *, heads: int, eps: float = 1e-6,
    unit_offset: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    queries, gate = np.split(dense(x, weight, bias).reshape(*x.shape[:2], heads, -1), 2, axis=-1)
    queries = queries if norm is None else _rms_norm(queries, norm + unit_offset, eps=eps)
    return queries, gate.reshape(*x.shape[:2], -1)


def opened(attended: Array, gate: Array | None) -> Array:
    return attended if gate is None else attended * sigmoid(gate)


@oracle("self_attention")
def _self_attention(
    q: Array, k: Array, v: Array, mask: Array | None = None, cos: Array | None = None, sin: Array | None = None,
    rows: Array | None = None, positions: Array | None = None, kept_tokens: Array | None = None,
    gate: Array | None = None, *, mask_kind: str = "none", scale: float | None = None, softcap: float | None = None,
    style: str = "halves",
) -> Array:  # fmt: skip
    q, k = (rotated(x, cos, sin, rows, positions, style) for x in (q, k))
    how: dict[str, Any] = {"scale": scale, "softcap": softcap}
    if kept_tokens is None:
        seen = _attention(q, k, v, mask, mask_kind=mask_kind, **how)
    elif mask_kind == "none":
        seen = _attention(q, k, v, kept_tokens, mask_kind="custom", **how)
    else:
        segments = np.where(kept_tokens >= 0.5, 0, -1)
        seen = _attention(q, k, v, segments, mask_kind=f"{mask_kind}+segments", **how)
    return opened(seen.reshape(*q.shape[:2], -1), gate)


@oracle("attention_pool")
def _attention_pool(x: Array, weight: Array, bias: Array, probe: Array, *, heads: int) -> Array:
    """Head by head."""
    dim = x.shape[-1]
    parts = zip((probe, x, x), np.split(weight, 3), np.split(bias, 3), strict=True)
    q, k, v = (dense(of, w, b).reshape(*of.shape[:2], heads, -1) for of, w, b in parts)
    scores = np.einsum("hd,bkhd->bhk", q[0, 0], k) / np.sqrt(dim // heads)
    odds = np.exp(scores - scores.max(-1, keepdims=True))
    odds /= odds.sum(-1, keepdims=True)
    return np.einsum("bhk,bkhd->bhd", odds, v).reshape(len(x), dim)


@oracle("cached_self_attention")
def _cached_self_attention(
    q: Array, k: Array, v: Array, keys: Array, values: Array, positions: Array, table: Array,
    cos: Array | None = None, sin: Array | None = None, rows: Array | None = None, token_rows: Array | None = None,
    gate: Array | None = None, *, mask_kind: str = "causal", scale: float | None = None, softcap: float | None = None,
    style: str = "halves", key_axes: str = "phsd", value_axes: str = "phsd",
) -> Array:  # fmt: skip
    ring, lead = mask_kind.startswith("sliding"), q.shape[:2]
    q, k = (rotated(x, cos, sin, rows, positions, style) for x in (q, k))
    if token_rows is not None:
        q, k, v, positions = q[0], k[0], v[0], positions[0]
    keys = _kv_append(keys, k, positions, table, token_rows, axes=key_axes, ring=ring)
    values = _kv_append(values, v, positions, table, token_rows, axes=value_axes, ring=ring)
    how: dict[str, Any] = {"mask_kind": mask_kind, "scale": scale, "softcap": softcap, "ring": ring}
    how |= {"key_axes": key_axes, "value_axes": value_axes}
    return opened(_cached_attention(q, keys, values, positions, table, token_rows, **how).reshape(*lead, -1), gate)


@oracle("gated_ffn")
def _gated_ffn(
    x: Array, gate: Array, up: Array, down: Array, gate_bias: Array | None = None, up_bias: Array | None = None,
    down_bias: Array | None = None, *, activation: str = "silu",
) -> Array:  # fmt: skip
    inner = activated(dense(x, gate, gate_bias), activation) * dense(x, up, up_bias)
    return dense(inner, down, down_bias)


@oracle("fused_gated_ffn")
def _fused_gated_ffn(
    x: Array, both: Array, down: Array, both_bias: Array | None = None, down_bias: Array | None = None, *,
    activation: str = "silu",
) -> Array:  # fmt: skip
    gate, up = np.split(dense(x, both, both_bias), 2, axis=-1)
    return dense(activated(gate, activation) * up, down, down_bias)


@oracle("moe_ffn")
def _moe_ffn(
    x: Array, router: Array, gate: Array, up: Array, down: Array, shared_router: Array | None = None,
    shared_gate: Array | None = None, shared_up: Array | None = None, shared_down: Array | None = None, *, chosen: int,
    normalise: bool = True, activation: str = "silu",
) -> Array:  # fmt: skip
    """Token by token."""
    result = np.zeros_like(x)
    if shared_gate is not None and shared_up is not None and shared_down is not None:
        assert shared_router is not None
        shared = _gated_ffn(x, shared_gate, shared_up, shared_down, activation=activation)
        result += sigmoid(dense(x, shared_router)) * shared
    for at in np.ndindex(x.shape[:2]):
        odds = np.exp(router @ x[at])
        odds /= odds.sum()
        best = np.argsort(-odds, kind="stable")[:chosen]
        total = odds[best].sum() if normalise else 1.0
        for expert in best:
            results = _gated_ffn(x[at], gate[expert], up[expert], down[expert], activation=activation)
            result[at] += odds[expert] / total * results
    return result


@oracle("patch_embedding")
def _patch_embedding(pixels: Array, weight: Array, bias: Array | None = None) -> Array:
    """Square by square."""
    side = weight.shape[2]
    rows, columns = (size // side for size in pixels.shape[2:])
    squares = [
        pixels[:, :, i * side : (i + 1) * side, j * side : (j + 1) * side] for i in range(rows) for j in range(columns)
    ]
    return np.stack([dense(s.reshape(len(s), -1), weight.reshape(len(weight), -1), bias) for s in squares], axis=1)


# -- recurrent layers --------------------------------------------------------------------------------------------------
def carry(op: str, tokens: dict[str, Array], rows: Array | None, **others: Any) -> tuple[Array, Array]:
    """A recurrent op; with rows, on ragged tokens [1, tokens, ...]."""
    if rows is None:
        return ORACLES[op](**tokens, **others)  # type: ignore[no-any-return]
    out, after = ORACLES[op](**{name: x[0] for name, x in tokens.items()}, rows=rows, **others)
    return out[None], after


def present_rows(rows: Array | None, positions: Array | None) -> Array | None:
    """-1 for padding."""
    return None if rows is None or positions is None else np.where(positions[0] >= 0, rows, -1)


def convolved(x: Array, weight: Array, bias: Array | None, before: Array | None, rows: Array | None) -> Array:
    size = weight.shape[-1]
    if rows is not None:
        result = carry("depthwise_conv1d_causal_carry", {"x": x}, rows, weight=weight, state=before, kernel_size=size)[
            0
        ]
        return result if bias is None else result + bias
    before = np.zeros((len(x), size - 1, x.shape[2])) if before is None else before
    result = ORACLES["depthwise_conv1d_causal"](x, weight, before, kernel_size=size)
    return result if bias is None else result + bias


def present(x: Array, positions: Array | None) -> Array:
    """Steps of padding are 0."""
    return x if positions is None else np.where((positions >= 0).reshape(*x.shape[:2], *(1,) * (x.ndim - 2)), x, 0.0)


@oracle("mamba_block")
def _mamba_block(
    both: Array, conv: Array, mix: Array, step: Array, step_bias: Array, rates: Array, skip: Array,
    conv_bias: Array | None = None, conv_state: Array | None = None, state: Array | None = None,
    positions: Array | None = None, token_rows: Array | None = None, *, activation: str = "silu",
    log_rates: bool = True,
) -> Array:  # fmt: skip
    x, gate = np.split(both, 2, axis=-1)
    own = present_rows(token_rows, positions)
    x, n = activated(convolved(x, conv, conv_bias, conv_state, own), activation), rates.shape[1]
    low, b, c = np.split(dense(x, mix), [len(mix) - 2 * n, len(mix) - n], axis=-1)
    steps = present(np.logaddexp(0, dense(low, step, step_bias)), positions)
    decay = -np.exp(rates) if log_rates else rates
    state = np.zeros((len(x), *rates.shape)) if state is None else state
    tokens = {"x": x, "delta": steps, "b": b, "c": c}
    result = carry("selective_scan_carry", tokens, own, a=decay, state=state, d=skip, state_size=n)[0]
    return np.asarray(result * gate * sigmoid(gate))


@oracle("mamba2_block")
def _mamba2_block(
    mixed: Array, conv: Array, step_bias: Array, rates: Array, skip: Array, norm: Array,
    conv_bias: Array | None = None, conv_state: Array | None = None, state: Array | None = None,
    positions: Array | None = None, token_rows: Array | None = None, *, groups: int, eps: float,
    activation: str = "silu", log_rates: bool = True, least_step: float = 0.0, most_step: float | None = None,
    norm_groups: int = 1,
) -> Array:  # fmt: skip
    lead, inner, heads, channels = mixed.shape[:2], norm.size, step_bias.size, len(conv)
    gate, x, steps = np.split(mixed, [inner, inner + channels], axis=-1)
    own = present_rows(token_rows, positions)
    x = activated(convolved(x, conv, conv_bias, conv_state, own), activation)
    n = (channels - inner) // (2 * groups)
    v, k, q = np.split(x, [inner, inner + groups * n], axis=-1)
    v, k, q = v.reshape(*lead, heads, -1), k.reshape(*lead, groups, n), q.reshape(*lead, groups, n)
    steps = present(np.clip(np.logaddexp(0, steps + step_bias.ravel()), least_step, most_step), positions)
    decay = (-np.exp(rates) if log_rates else rates).ravel()
    state = np.zeros((len(x), heads, n, inner // heads)) if state is None else state
    tokens = {"q": q, "k": k, "v": v * steps[..., None], "g": steps * decay}
    result = carry("gated_linear_attention_carry", tokens, own, state=state)[0]
    result = (result + v * skip.reshape(heads, 1)).reshape(*lead, inner) * gate * sigmoid(gate)
    parts = _rms_norm(result.reshape(*lead, norm_groups, -1), eps=eps)
    return parts.reshape(*lead, inner) * norm.ravel()


@oracle("delta_net_block")
def _delta_net_block(
    qkv: Array, z: Array, b: Array, a: Array, conv: Array, rates: Array, step_bias: Array, norm: Array,
    conv_state: Array | None = None, state: Array | None = None, positions: Array | None = None,
    token_rows: Array | None = None, *, state_size: int, eps: float, tiled: bool = False, activation: str = "silu",
    log_rates: bool = True,
) -> tuple[Array, Array]:  # fmt: skip
    lead, heads, size, n = qkv.shape[:2], len(rates), len(norm), state_size
    keys, side = (qkv.shape[2] - heads * size) // 2, max(state_size, size)
    own = present_rows(token_rows, positions)
    x = activated(convolved(qkv, conv, None, conv_state, own), activation)
    q, k, v = np.split(x, [keys, 2 * keys], axis=-1)
    share = heads // (keys // n)

    def unit(part: Array) -> Array:
        part = part.reshape(*lead, -1, n)
        part = part / np.sqrt((part**2).sum(-1, keepdims=True) + 1e-6)
        return np.tile(part, (1, 1, share, 1)) if tiled else np.repeat(part, share, axis=2)

    def padded(part: Array) -> Array:
        return np.pad(part, [(0, 0)] * 3 + [(0, side - part.shape[-1])])

    decay = -np.exp(rates) if log_rates else rates
    gates = present(decay * np.logaddexp(0, a + step_bias), positions)
    operands = (padded(unit(q) * np.sqrt(side / n)), padded(unit(k)), padded(v.reshape(*lead, heads, size)))
    state = np.zeros((len(x), heads, side, side)) if state is None else state
    beta = present(sigmoid(b), positions)
    tokens = dict(zip(("q", "k", "v", "g", "beta"), (*operands, gates, beta), strict=True))
    result, after = carry("gated_delta_net_carry", tokens, own, state=state, state_size=side)
    normed = _rms_norm(result[..., :size], norm, eps=eps)
    return normed.reshape(*lead, -1) * z * sigmoid(z), after

"""Layer blocks with their lowerings: linear maps, norms, attention, feed-forwards, patch embedding.

Weights are operands as files store them: `[out, in]`, quantised or in another element type. They are converted to the
type of x, in matmuls to f32 or wider. Queries, keys and values have split heads: `[batch, seq, heads, head_dim]`.
"""

from __future__ import annotations

from rlx.errors import GraphError, ShapeError
from rlx.hir.activations import activate, check_known
from rlx.hir.blocks import check_shapes, linear_type, one_type, wide
from rlx.hir.lower import apply_activation, default_positions, lowering, place, project, read
from rlx.hir.ragged import check_token_rows, without_batch
from rlx.ir.graph import Value
from rlx.ir.registry import HIR, TAKES_PACKED, f32, i32, op, sample
from rlx.kv_layout import POOL_AXES
from rlx.ops.attention import attention, split_mask
from rlx.ops.conv import conv2d
from rlx.ops.kv_cache import cached_attention, kv_append
from rlx.ops.rope import rope
from rlx.types import Size, TensorType, tensor

NORMS = ("rms", "layer")


# -- linear maps ------------------------------------------------------------------------------------------------------
@op(
    "linear_stored", level=HIR, traits=[TAKES_PACKED],
    samples=[
        sample(f32(3, 17), f32(70, 17), f32(70)), sample(f32(4, 6), f32(6, 5), transposed=False, activation="gelu"),
        sample(f32(2, 5, 8), f32(6, 8), f32(6), heads=3, activation="quick_gelu"),
    ],
)  # fmt: skip
def linear_stored(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    *,
    activation: str | None = None,
    transposed: bool = True,
    heads: int | None = None,
) -> TensorType:
    """activation(x @ weight + bias) with a weight and bias as files store them: quantised, or of any element type.

    They are converted to f32 (f64 if x is f64). The weight is [out, in] if `transposed`, else [in, out]. With `heads`,
    the last axis of the result is split into [..., heads, head_dim].
    """
    where = "linear_stored"
    if weight.rank < 2:
        raise ShapeError(f"{where}: weight is {weight}, expected [out, in]")
    lead, rows, columns = weight.shape[:-2], weight.shape[-2], weight.shape[-1]
    shape = (*lead, columns, rows) if transposed else weight.shape
    added = None if bias is None else TensorType(bias.shape, wide(x))
    result = linear_type(where, x, TensorType(shape, wide(x)), added, activation)
    if heads is None:
        return result
    width = result.shape[-1]
    if not isinstance(width, int) or heads < 1 or width % heads:
        raise ShapeError(f"{where}: {width} columns do not split into {heads} heads")
    return result.with_shape(*result.shape[:-1], heads, width // heads)


@lowering("linear_stored")
def _(
    x: Value, weight: Value, bias: Value | None, *, activation: str | None, transposed: bool, heads: int | None
) -> Value:
    y = apply_activation(project(x, weight, bias, transposed=transposed), activation)
    return y if heads is None else y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads)


# -- norms ------------------------------------------------------------------------------------------------------------
@op(
    "norm", level=HIR, traits=[TAKES_PACKED], tolerance=3e-6,
    samples=[
        sample(f32(3, 33), f32(33), kind="rms", eps=1e-6), sample(f32(3, 8), f32(8), f32(8), kind="layer", eps=1e-5),
        sample(f32(2, 3, 8), f32(8), kind="rms", eps=0.1, unit_offset=True),
    ],
)  # fmt: skip
def norm(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    *,
    kind: str,
    eps: float,
    unit_offset: bool = False,
) -> TensorType:
    """RMSNorm (`kind="rms"`) or LayerNorm (`kind="layer"`) over the last axis, times a stored weight, plus a bias.

    `unit_offset` multiplies by 1 + weight, as in Gemma's files.
    """
    if kind not in NORMS:
        raise GraphError(f"norm: kind is {kind!r}, expected rms or layer")
    if not x.rank or not x.dtype.is_float:
        raise ShapeError(f"norm: takes vectors of floats, found {x}")
    check_shapes("norm", {"weight": (weight, x.shape[-1:]), "bias": (bias, x.shape[-1:])})
    return x


@lowering("norm")
def _(x: Value, weight: Value, bias: Value | None, *, kind: str, eps: float, unit_offset: bool) -> Value:
    weight = read(weight, x.dtype)
    if unit_offset:
        weight = weight + 1.0
    bias = None if bias is None else read(bias, x.dtype)
    return x.graph.one(f"{kind}_norm", x, weight, bias, eps=eps)


# -- attention --------------------------------------------------------------------------------------------------------
@op("split_qkv", level=HIR, samples=[sample(f32(2, 3, 24), num_heads=2)])
def split_qkv(qkv: TensorType, *, num_heads: int) -> tuple[TensorType, TensorType, TensorType]:
    """Splits a fused projection into queries, keys and values [batch, seq, heads, head_dim]."""
    width = qkv.shape[-1] if qkv.rank == 3 else None
    if not isinstance(width, int) or num_heads < 1 or width % (3 * num_heads):
        raise ShapeError(f"split_qkv: found {qkv}, expected [batch, seq, 3 * {num_heads} * head_dim]")
    part = qkv.with_shape(*qkv.shape[:2], num_heads, width // (3 * num_heads))
    return part, part, part


@lowering("split_qkv")
def _(qkv: Value, *, num_heads: int) -> tuple[Value, ...]:
    batch, seq, width = qkv.shape
    assert isinstance(width, int)
    size = width // 3
    parts = (qkv[:, :, i * size : (i + 1) * size] for i in range(3))
    return tuple(part.reshape(batch, seq, num_heads, size // num_heads) for part in parts)


_HEADS = (f32(2, 5, 4, 8), f32(2, 5, 2, 8), f32(2, 5, 2, 8))
_TABLES = (f32(70, 4, low=-1, high=1), f32(70, 4, low=-1, high=1))


def _check_heads(where: str, q: TensorType, k: TensorType, v: TensorType) -> None:
    if not q.rank == k.rank == v.rank == 4:
        raise ShapeError(f"{where}: q, k and v are [batch, seq, heads, head_dim], found {q}, {k}, {v}")


def _check_rotation(
    where: str, heads: tuple[TensorType, ...], cos: TensorType | None, sin: TensorType | None, at: TensorType | None,
    style: str,
) -> None:  # fmt: skip
    if (cos is None) is not (sin is None):
        raise GraphError(f"{where}: takes cos and sin, or neither")
    for x in heads if cos is not None else ():
        rope.rule(x, cos, sin, tensor(x.shape[:2], "i32") if at is None else at, style=style)


@op(
    "self_attention", level=HIR,
    samples=[
        sample(*_HEADS, mask_kind="causal"),
        sample(*_HEADS, f32(2, 5, low=0, high=1), *_TABLES, mask_kind="custom", scale=0.3, softcap=5.0),
        sample(*_HEADS, None, *_TABLES, i32(2, 5, low=0, high=70), mask_kind="causal", style="pairs"),
        sample(*_HEADS, None, *_TABLES, None, i32(2, 5, low=-2, high=70), mask_kind="causal"),
    ],
)  # fmt: skip
def self_attention(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    mask: TensorType | None = None,
    cos: TensorType | None = None,
    sin: TensorType | None = None,
    rows: TensorType | None = None,
    positions: TensorType | None = None,
    *,
    mask_kind: str = "none",
    scale: float | None = None,
    softcap: float | None = None,
    style: str = "halves",
) -> TensorType:
    """Attention of heads [batch, seq, heads, head_dim], joined to [batch, seq, heads * head_dim].

    With `cos` and `sin` queries and keys are rotated first: by the rows of these tables that `rows` picks, else by
    `positions` (a negative one is padding), else by positions that count from 0. Masks, scale and softcap are those of
    `attention`, styles those of `rope`.
    """
    _check_heads("self_attention", q, k, v)
    _check_rotation("self_attention", (q, k), cos, sin, positions if rows is None else rows, style)
    attention.rule(q, k, v, mask, mask_kind=mask_kind, scale=scale, softcap=softcap)
    return q.with_shape(*q.shape[:2], q.shape[2] * v.shape[3])


@lowering("self_attention")
def _(
    q: Value, k: Value, v: Value, mask: Value | None, cos: Value | None, sin: Value | None, rows: Value | None,
    positions: Value | None, *, mask_kind: str, scale: float | None, softcap: float | None, style: str,
) -> Value:  # fmt: skip
    q, k = (rotate_heads(x, cos, sin, rows, positions, style) for x in (q, k))
    return join_heads(q.graph.one("attention", q, k, v, mask, mask_kind=mask_kind, scale=scale, softcap=softcap))


def rotate_heads(
    x: Value, cos: Value | None, sin: Value | None, rows: Value | None, positions: Value | None, style: str
) -> Value:
    """Applies RoPE to queries or keys; the identity if there are no tables."""
    if cos is None or sin is None:
        return x
    if rows is None:  # padding has negative positions; its rotation is never read
        rows = default_positions(x.graph, *x.shape[:2]) if positions is None else positions.maximum(0)
    return x.graph.one("rope", x, cos, sin, rows, style=style)


def join_heads(heads: Value) -> Value:
    """[batch, seq, heads, head_dim] to [batch, seq, heads * head_dim]."""
    batch, seq, count, size = heads.shape
    return heads.reshape(batch, seq, count * size)


_POOLS = (f32(5, 2, 32, 8), f32(5, 2, 32, 8))
_TOKENS = (i32(2, 5, low=-2, high=64), i32(2, 2, low=0, high=5, distinct=True))
_CACHE = (*_POOLS, *_TOKENS)


@op(
    "cached_self_attention", level=HIR, traits=[TAKES_PACKED],
    samples=[
        sample(*_HEADS, *_CACHE, *_TABLES, softcap=5.0), sample(*_HEADS, *_CACHE, mask_kind="sliding(3)", scale=0.3),
        sample(*_HEADS, *_CACHE, *_TABLES, i32(2, 5, low=0, high=70), style="pairs"),
        sample(*_HEADS, f32(2, 5, 8, 32), f32(2, 5, 32, 8), *_TOKENS, *_TABLES, key_axes="hpds", value_axes="hpsd"),
        sample(f32(1, 6, 4, 8), f32(1, 6, 2, 8), f32(1, 6, 2, 8), *_CACHE[:2], i32(1, 6, low=-1, high=32), _CACHE[3],
               *_TABLES, None, i32(6, low=0, high=2)),
    ],
)  # fmt: skip
def cached_self_attention(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    keys: TensorType,
    values: TensorType,
    positions: TensorType,
    table: TensorType,
    cos: TensorType | None = None,
    sin: TensorType | None = None,
    rows: TensorType | None = None,
    token_rows: TensorType | None = None,
    *,
    mask_kind: str = "causal",
    scale: float | None = None,
    softcap: float | None = None,
    style: str = "halves",
    key_axes: str = POOL_AXES,
    value_axes: str = POOL_AXES,
) -> TensorType:
    """`self_attention` over a cache: appends k and v at `positions`, then attends over the cache.

    `keys` and `values` are page pools and `table` maps sequences to pages, as in `kv_append`. Pools are written in
    place; with a window they are ring buffers. With `token_rows` [tokens], the batch is one
    sequence of ragged tokens, and `token_rows` is the table row of each.
    """
    where = "cached_self_attention"
    _check_heads(where, q, k, v)
    _check_rotation(where, (q, k), cos, sin, positions if rows is None else rows, style)
    ring, tokens = split_mask(mask_kind)[1] > 0, (q, k, v, positions)
    if token_rows is not None:
        check_token_rows(where, q, token_rows)
        tokens = tuple(t.with_shape(*t.shape[1:]) for t in tokens)  # type: ignore[assignment]
    keys, values = (
        one_type(kv_append.rule(pool, new, tokens[3], table, token_rows, axes=axes, ring=ring))
        for pool, new, axes in ((keys, tokens[1], key_axes), (values, tokens[2], value_axes))
    )
    how = {"mask_kind": mask_kind, "scale": scale, "softcap": softcap, "ring": ring}
    how |= {"key_axes": key_axes, "value_axes": value_axes}
    seen = one_type(cached_attention.rule(tokens[0], keys, values, tokens[3], table, token_rows, **how))
    return q.with_shape(*q.shape[:2], q.shape[2] * seen.shape[-1])


@lowering("cached_self_attention")
def _(
    q: Value, k: Value, v: Value, keys: Value, values: Value, positions: Value, table: Value, cos: Value | None,
    sin: Value | None, rows: Value | None, token_rows: Value | None, *, mask_kind: str, scale: float | None,
    softcap: float | None, style: str, key_axes: str, value_axes: str,
) -> Value:  # fmt: skip
    graph, ring = q.graph, split_mask(mask_kind)[1] > 0
    q, k = (rotate_heads(x, cos, sin, rows, positions, style) for x in (q, k))
    table, keys, values = place(table), place(keys), place(values)
    lead = q.shape[:2]
    if token_rows is not None:
        q, k, v, positions = (without_batch(x) for x in (q, k, v, positions))
    places = positions, table, token_rows
    keys = graph.one("kv_append", keys, k, *places, axes=key_axes, ring=ring)
    values = graph.one("kv_append", values, v, *places, axes=value_axes, ring=ring)
    how = {"mask_kind": mask_kind, "scale": scale, "softcap": softcap, "ring": ring}
    how |= {"key_axes": key_axes, "value_axes": value_axes}
    seen = graph.one("cached_attention", q, keys, values, *places, **how)
    return join_heads(seen if token_rows is None else seen.reshape(*lead, *seen.shape[1:]))


# -- feed-forwards ----------------------------------------------------------------------------------------------------
@op(
    "gated_ffn", level=HIR, traits=[TAKES_PACKED],
    samples=[
        sample(f32(3, 16, low=-1, high=1), f32(40, 16), f32(40, 16), f32(16, 40)),
        sample(f32(2, 3, 8, low=-1, high=1), f32(12, 8), f32(12, 8), f32(8, 12), f32(12), f32(12), f32(8),
               activation="gelu_tanh"),
    ],
)  # fmt: skip
def gated_ffn(
    x: TensorType,
    gate: TensorType,
    up: TensorType,
    down: TensorType,
    gate_bias: TensorType | None = None,
    up_bias: TensorType | None = None,
    down_bias: TensorType | None = None,
    *,
    activation: str = "silu",
) -> TensorType:
    """down(activation(gate(x)) * up(x)) by stored weights [out, in]: SwiGLU, GeGLU and their relatives."""
    check_known(activation)
    if not x.rank or not x.dtype.is_float or gate.rank != 2 or down.rank != 2:
        raise ShapeError(f"gated_ffn: x is {x}, gate {gate}, down {down}; expected floats and weights [out, in]")
    (inner, hidden), out = (gate.shape[0], x.shape[-1]), down.shape[0]
    check_shapes("gated_ffn", {
        "gate": (gate, (inner, hidden)), "up": (up, (inner, hidden)), "down": (down, (out, inner)),
        "gate_bias": (gate_bias, (inner,)), "up_bias": (up_bias, (inner,)), "down_bias": (down_bias, (out,)),
    })  # fmt: skip
    return TensorType((*x.shape[:-1], out), wide(x))


@lowering("gated_ffn")
def _(
    x: Value, gate: Value, up: Value, down: Value, gate_bias: Value | None, up_bias: Value | None,
    down_bias: Value | None, *, activation: str,
) -> Value:  # fmt: skip
    activated = activate(project(x, gate, gate_bias), activation)
    return project(activated * project(x, up, up_bias), down, down_bias)


@op(
    "fused_gated_ffn", level=HIR, traits=[TAKES_PACKED],
    samples=[
        sample(f32(2, 3, 8, low=-1, high=1), f32(12, 8), f32(8, 6)),
        sample(f32(2, 3, 8, low=-1, high=1), f32(12, 8), f32(8, 6), f32(12), f32(8), activation="gelu"),
    ],
)  # fmt: skip
def fused_gated_ffn(
    x: TensorType,
    both: TensorType,
    down: TensorType,
    both_bias: TensorType | None = None,
    down_bias: TensorType | None = None,
    *,
    activation: str = "silu",
) -> TensorType:
    """`gated_ffn` whose gate and up are the two halves of one weight, [2 * inner, in]."""
    check_known(activation)
    wide_size = both.shape[0] if both.rank == 2 else None
    if not x.rank or not x.dtype.is_float or not isinstance(wide_size, int) or wide_size % 2 or down.rank != 2:
        raise ShapeError(f"fused_gated_ffn: x is {x}, both {both}, down {down}; expected weights of an even height")
    out = down.shape[0]
    check_shapes("fused_gated_ffn", {
        "both": (both, (wide_size, x.shape[-1])), "down": (down, (out, wide_size // 2)),
        "both_bias": (both_bias, (wide_size,)), "down_bias": (down_bias, (out,)),
    })  # fmt: skip
    return TensorType((*x.shape[:-1], out), wide(x))


@lowering("fused_gated_ffn")
def _(
    x: Value, both: Value, down: Value, both_bias: Value | None, down_bias: Value | None, *, activation: str
) -> Value:
    halves = project(x, both, both_bias)
    assert isinstance(halves.shape[-1], int)
    inner = halves.shape[-1] // 2
    return project(activate(halves[..., :inner], activation) * halves[..., inner:], down, down_bias)


@op(
    "moe_ffn", level=HIR, traits=[TAKES_PACKED],
    samples=[
        sample(f32(2, 3, 8, low=-1, high=1), f32(4, 8), f32(4, 6, 8), f32(4, 6, 8), f32(4, 8, 6), chosen=2),
        sample(f32(1, 5, 8, low=-1, high=1), f32(3, 8), f32(3, 6, 8), f32(3, 6, 8), f32(3, 8, 6), chosen=1,
               normalise=False, activation="gelu"),
    ],
)  # fmt: skip
def moe_ffn(
    x: TensorType,
    router: TensorType,
    gate: TensorType,
    up: TensorType,
    down: TensorType,
    *,
    chosen: int,
    normalise: bool = True,
    activation: str = "silu",
) -> TensorType:
    """A mixture of experts: the sum of p * gated_ffn(x) over the `chosen` most likely experts of each token.

    `x` is [batch, seq, hidden], `router` [experts, hidden]; expert weights are stacked, [experts, out, in].
    Probabilities are a softmax over all experts; `normalise` rescales those of the chosen ones to sum to 1.
    """
    check_known(activation)
    if x.rank != 3 or not x.dtype.is_float or gate.rank != 3:
        raise ShapeError(f"moe_ffn: x is {x} and gate {gate}, expected [batch, seq, hidden] and [experts, out, in]")
    hidden, (experts, inner) = x.shape[2], gate.shape[:2]
    check_shapes("moe_ffn", {
        "router": (router, (experts, hidden)), "gate": (gate, (experts, inner, hidden)),
        "up": (up, (experts, inner, hidden)), "down": (down, (experts, hidden, inner)),
    })  # fmt: skip
    if not isinstance(experts, int) or not 1 <= chosen <= experts:
        raise GraphError(f"moe_ffn: {chosen} of {experts} experts cannot be chosen")
    return TensorType(x.shape, wide(x))


@lowering("moe_ffn")
def _(
    x: Value, router: Value, gate: Value, up: Value, down: Value, *, chosen: int, normalise: bool, activation: str
) -> Value:
    graph, (batch, seq, hidden), experts = x.graph, x.shape, router.shape[0]
    rows = x.reshape(batch * seq, hidden)
    count: Size = rows.shape[0]
    odds, expert_ids = project(rows, router).softmax(axis=-1).topk(k=chosen)  # [rows, chosen]
    if normalise:
        odds = odds / odds.sum(axis=-1, keepdims=True)
    expert_ids = expert_ids.reshape(count * chosen)
    order, place, _ = expert_ids.group_rows(groups=experts)  # each expert reads its weights once for all its rows
    each, expert_ids = rows.gather(order // chosen), expert_ids.gather(order)

    def expert(x: Value, weight: Value) -> Value:
        return graph.one("grouped_matmul", x, read(weight, wide(x)).mT, expert_ids)

    inner = activate(expert(each, gate), activation) * expert(each, up)
    out = expert(inner, down).gather(place).reshape(count, chosen, hidden)
    mixed: Value = (out * odds.reshape(count, chosen, 1)).sum(axis=1).reshape(x.shape)
    return mixed


# -- images -----------------------------------------------------------------------------------------------------------
@op(
    "patch_embedding", level=HIR, traits=[TAKES_PACKED],
    samples=[sample(f32(2, 3, 8, 6), f32(5, 3, 2, 2), f32(5)), sample(f32(1, 3, 4, 4), f32(5, 3, 4, 4))],
)  # fmt: skip
def patch_embedding(pixels: TensorType, weight: TensorType, bias: TensorType | None = None) -> TensorType:
    """One vector per patch: [batch, channels, height, width] to [batch, patches, dim], row by row.

    `weight` is [dim, channels, side, side].
    """
    if weight.rank != 4 or weight.shape[2] != weight.shape[3] or not isinstance(weight.shape[2], int):
        raise ShapeError(f"patch_embedding: weight is {weight}, expected [dim, channels, side, side]")
    biased = None if bias is None else TensorType(bias.shape, pixels.dtype)
    sides = {"stride": weight.shape[2], "padding": 0, "dilation": 1, "groups": 1}
    kernel = TensorType(weight.shape, pixels.dtype)
    batch, dim, rows, columns = one_type(conv2d.rule(pixels, kernel, biased, **sides)).shape
    return pixels.with_shape(batch, rows * columns, dim)


@lowering("patch_embedding")
def _(pixels: Value, weight: Value, bias: Value | None) -> Value:
    side = weight.shape[2]
    weight, bias = read(weight, pixels.dtype), None if bias is None else read(bias, pixels.dtype)
    features = pixels.graph.one("conv2d", pixels, weight, bias, stride=side)
    batch, dim, rows, columns = features.shape
    patches: Value = features.reshape(batch, dim, rows * columns).transpose(axes=(0, 2, 1))
    return patches

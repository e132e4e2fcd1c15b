"""Blocks of attention that stages emit, with their lowerings: projections into heads, self-attention, pooling.

Queries, keys and values are [batch, seq, heads, head_dim]; weights are stored, as in `layers.py`.
"""

from __future__ import annotations

from rlx.dtypes import BOOL, I32
from rlx.errors import GraphError, ShapeError
from rlx.hir.blocks import check_shapes, one_type, wide
from rlx.hir.layers import into_heads, linear_stored, scaled_norm
from rlx.hir.lower import default_positions, lowering, place, project, read
from rlx.hir.ragged import check_token_rows, without_batch
from rlx.ir.graph import Value
from rlx.ir.registry import HIR, MIXES_TOKENS, PER_TOKEN, TAKES_PACKED, f32, i32, op, sample
from rlx.kv_layout import POOL_AXES
from rlx.ops.attention import MaskKind, attention, parse_mask, split_mask
from rlx.ops.kv_cache import cached_attention, kv_append
from rlx.ops.rope import rope
from rlx.types import TensorType, tensor


# -- projections ------------------------------------------------------------------------------------------------------
@op("split_qkv", level=HIR, traits=[PER_TOKEN], samples=[sample(f32(2, 3, 24), num_heads=2)])
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


_TABLES = (f32(70, 4, low=-1, high=1), f32(70, 4, low=-1, high=1))


@op(
    "normed_heads", level=HIR, traits=[TAKES_PACKED, PER_TOKEN], tolerance=3e-6,
    samples=[
        sample(f32(2, 3, 12), f32(16, 12), f32(8), heads=2, eps=1e-6),
        sample(f32(2, 3, 12), f32(24, 12), f32(8), f32(24), *_TABLES, heads=3, eps=0.1, unit_offset=True),
        sample(f32(2, 3, 12), f32(16, 12), f32(8), None, *_TABLES, None, i32(2, 3, low=-2, high=70), heads=2, eps=1e-6,
               style="pairs"),
        sample(f32(2, 3, 12), f32(16, 12), f32(8), None, *_TABLES, i32(2, 3, low=0, high=70), heads=2, eps=1e-6),
    ],
)  # fmt: skip
def normed_heads(
    x: TensorType,
    weight: TensorType,
    norm: TensorType,
    bias: TensorType | None = None,
    cos: TensorType | None = None,
    sin: TensorType | None = None,
    rows: TensorType | None = None,
    positions: TensorType | None = None,
    *,
    heads: int,
    eps: float,
    unit_offset: bool = False,
    style: str = "halves",
) -> TensorType:
    """Queries or keys with a norm of their own: rms_norm(x @ weight.T + bias) per head, [batch, seq, heads, head_dim].

    `weight` is [heads * head_dim, hidden], `norm` [head_dim]; `unit_offset` multiplies by 1 + norm. With `cos` and
    `sin`, heads are rotated after the norm, as in `self_attention`.
    """
    result = _projected("normed_heads", x, weight, bias, heads)
    check_shapes("normed_heads", {"norm": (norm, result.shape[-1:])})
    _check_rotation("normed_heads", (result,), cos, sin, positions if rows is None else rows, style)
    return result


@lowering("normed_heads")
def _(
    x: Value, weight: Value, norm: Value, bias: Value | None, cos: Value | None, sin: Value | None, rows: Value | None,
    positions: Value | None, *, heads: int, eps: float, unit_offset: bool, style: str,
) -> Value:  # fmt: skip
    y = into_heads(project(x, weight, bias), heads)
    return rotate_heads(
        scaled_norm(y, norm, kind="rms", eps=eps, unit_offset=unit_offset), cos, sin, rows, positions, style
    )


@op(
    "gated_queries", level=HIR, traits=[TAKES_PACKED, PER_TOKEN], tolerance=3e-6,
    samples=[
        sample(f32(2, 3, 12), f32(32, 12), heads=2),
        sample(f32(2, 3, 12), f32(32, 12), f32(32), f32(8), heads=2, eps=1e-6, unit_offset=True),
    ],
)  # fmt: skip
def gated_queries(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    norm: TensorType | None = None,
    *,
    heads: int,
    eps: float = 1e-6,
    unit_offset: bool = False,
) -> tuple[TensorType, TensorType]:
    """Queries [batch, seq, heads, head_dim] and the gates of attention's output, [batch, seq, heads * head_dim].

    One weight [heads * 2 * head_dim, hidden] gives the query and then the gate of each head. With `norm` [head_dim],
    queries are normed per head, as in `normed_heads`.
    """
    both = _projected("gated_queries", x, weight, bias, heads)
    lead, width = both.shape[:2], both.shape[-1]
    if not isinstance(width, int) or width % 2:
        raise ShapeError(f"gated_queries: weight is {weight}, expected [{heads} * 2 * head_dim, hidden]")
    check_shapes("gated_queries", {"norm": (norm, (width // 2,))})
    return both.with_shape(*lead, heads, width // 2), both.with_shape(*lead, heads * (width // 2))


@lowering("gated_queries")
def _(
    x: Value, weight: Value, bias: Value | None, norm: Value | None, *, heads: int, eps: float, unit_offset: bool
) -> tuple[Value, Value]:
    both = into_heads(project(x, weight, bias), heads)
    assert isinstance(both.shape[-1], int)
    size = both.shape[-1] // 2
    queries = both[..., :size]
    if norm is not None:
        queries = scaled_norm(queries, norm, kind="rms", eps=eps, unit_offset=unit_offset)
    return queries, join_heads(both[..., size:])


def _projected(where: str, x: TensorType, weight: TensorType, bias: TensorType | None, heads: int) -> TensorType:
    """Type of x times a stored weight plus a bias, split into heads."""
    if x.rank != 3:
        raise ShapeError(f"{where}: x is {x}, expected [batch, seq, hidden]")
    return one_type(linear_stored.rule(x, weight, bias, heads=heads))


# -- attention --------------------------------------------------------------------------------------------------------
_HEADS = (f32(2, 5, 4, 8), f32(2, 5, 2, 8), f32(2, 5, 2, 8))
_GATE = f32(2, 5, 32)
_TOKEN_MASK = f32(2, 5, low=0, high=1)


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
    "self_attention", level=HIR, traits=[MIXES_TOKENS],
    samples=[
        sample(*_HEADS, mask_kind="causal"),
        sample(*_HEADS, f32(2, 5, low=0, high=1), *_TABLES, mask_kind="custom", scale=0.3, softcap=5.0),
        sample(*_HEADS, None, *_TABLES, i32(2, 5, low=0, high=70), mask_kind="causal", style="pairs"),
        sample(*_HEADS, None, *_TABLES, None, i32(2, 5, low=-2, high=70), mask_kind="causal"),
        sample(*_HEADS, None, *_TABLES, None, None, _TOKEN_MASK, mask_kind="near(1)"),
        sample(*_HEADS, *(None,) * 5, _TOKEN_MASK), sample(*_HEADS, *(None,) * 6, _GATE, mask_kind="causal"),
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
    kept_tokens: TensorType | None = None,
    gate: TensorType | None = None,
    *,
    mask_kind: str = "none",
    scale: float | None = None,
    softcap: float | None = None,
    style: str = "halves",
) -> TensorType:
    """Attention of heads [batch, seq, heads, head_dim], joined to [batch, seq, heads * head_dim].

    With `cos` and `sin` queries and keys are rotated first: by the rows of these tables that `rows` picks, else by
    `positions` (a negative one is padding), else by positions that count from 0. Masks, scale and softcap are those of
    `attention`, styles those of `rope`. `kept_tokens` [batch, seq], true or at least 0.5 except for padding, also hides
    padding; it goes with mask kinds that take no mask. The result is multiplied by sigmoid(gate).
    """
    where = "self_attention"
    _check_heads(where, q, k, v)
    _check_rotation(where, (q, k), cos, sin, positions if rows is None else rows, style)
    if kept_tokens is not None:
        if mask is not None or parse_mask(mask_kind).takes_operand:
            raise GraphError(f"{where}: takes a mask or kept_tokens, found both, with mask kind {mask_kind!r}")
        if mask_kind == MaskKind.NONE:
            mask, mask_kind = kept_tokens, MaskKind.CUSTOM
        else:
            mask, mask_kind = TensorType(kept_tokens.shape, I32), MaskKind.segments(mask_kind)
    attention.rule(q, k, v, mask, mask_kind=mask_kind, scale=scale, softcap=softcap)
    return _opened(where, q.with_shape(*q.shape[:2], q.shape[2] * v.shape[3]), gate)


def _opened(where: str, result: TensorType, gate: TensorType | None) -> TensorType:
    """Type of an attention's result after its gate, which has the same."""
    if gate is not None and gate != result:
        raise ShapeError(f"{where}: gate is {gate}, expected {result}")
    return result


@lowering("self_attention")
def _(
    q: Value, k: Value, v: Value, mask: Value | None, cos: Value | None, sin: Value | None, rows: Value | None,
    positions: Value | None, kept_tokens: Value | None, gate: Value | None, *, mask_kind: str, scale: float | None,
    softcap: float | None, style: str,
) -> Value:  # fmt: skip
    q, k = (rotate_heads(x, cos, sin, rows, positions, style) for x in (q, k))
    if kept_tokens is not None and mask_kind == MaskKind.NONE:
        mask, mask_kind = kept_tokens, MaskKind.CUSTOM
    elif kept_tokens is not None:
        keep = kept_tokens if kept_tokens.dtype is BOOL else kept_tokens >= 0.5
        mask, mask_kind = keep.astype(I32) - 1, MaskKind.segments(mask_kind)  # segment 0, and -1 for padding
    seen = q.graph.one("attention", q, k, v, mask, mask_kind=mask_kind, scale=scale, softcap=softcap)
    return open_gate(join_heads(seen), gate)


def open_gate(attended: Value, gate: Value | None) -> Value:
    """Multiplies attention's output by sigmoid(gate); the identity without a gate."""
    return attended if gate is None else attended * gate.sigmoid()


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
    "cached_self_attention", level=HIR, traits=[TAKES_PACKED, MIXES_TOKENS],
    samples=[
        sample(*_HEADS, *_CACHE, *_TABLES, softcap=5.0), sample(*_HEADS, *_CACHE, mask_kind="sliding(3)", scale=0.3),
        sample(*_HEADS, *_CACHE, *_TABLES, i32(2, 5, low=0, high=70), style="pairs"),
        sample(*_HEADS, f32(2, 5, 8, 32), f32(2, 5, 32, 8), *_TOKENS, *_TABLES, key_axes="hpds", value_axes="hpsd"),
        sample(f32(1, 6, 4, 8), f32(1, 6, 2, 8), f32(1, 6, 2, 8), *_CACHE[:2], i32(1, 6, low=-1, high=32), _CACHE[3],
               *_TABLES, None, i32(6, low=0, high=2)),
        sample(*_HEADS, *_CACHE, *(None,) * 4, _GATE),
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
    gate: TensorType | None = None,
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
    sequence of ragged tokens, and `token_rows` is the table row of each. The result is multiplied by sigmoid(gate).
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
    return _opened(where, q.with_shape(*q.shape[:2], q.shape[2] * seen.shape[-1]), gate)


@lowering("cached_self_attention")
def _(
    q: Value, k: Value, v: Value, keys: Value, values: Value, positions: Value, table: Value, cos: Value | None,
    sin: Value | None, rows: Value | None, token_rows: Value | None, gate: Value | None, *, mask_kind: str,
    scale: float | None, softcap: float | None, style: str, key_axes: str, value_axes: str,
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
    attended = join_heads(seen if token_rows is None else seen.reshape(*lead, *seen.shape[1:]))
    return open_gate(attended, gate)


@op(
    "attention_pool", level=HIR, traits=[TAKES_PACKED, MIXES_TOKENS],
    samples=[sample(f32(2, 5, 8), f32(24, 8), f32(24), f32(1, 1, 8), heads=2)],
)  # fmt: skip
def attention_pool(x: TensorType, weight: TensorType, bias: TensorType, probe: TensorType, *, heads: int) -> TensorType:
    """Attention of one learned query, `probe` [1, 1, dim], over all tokens: [batch, seq, dim] to [batch, dim].

    `weight` [3 * dim, dim] and `bias` [3 * dim] project to the query, the keys and the values, in this order.
    """
    where = "attention_pool"
    dim = x.shape[-1] if x.rank == 3 and x.dtype.is_float else None
    if not isinstance(dim, int) or heads < 1 or dim % heads:
        raise ShapeError(f"{where}: x is {x}, expected floats [batch, seq, {heads} * head_dim]")
    wanted = {"weight": (weight, (3 * dim, dim)), "bias": (bias, (3 * dim,)), "probe": (probe, (1, 1, dim))}
    check_shapes(where, wanted)
    return TensorType((x.shape[0], dim), wide(x))


@lowering("attention_pool")
def _(x: Value, weight: Value, bias: Value, probe: Value, *, heads: int) -> Value:
    (batch, seq, dim), kind = x.shape, wide(x)
    assert isinstance(dim, int)
    weight = place(read(weight, kind)).mT
    bias, probe = (place(read(stored, kind)) for stored in (bias, probe))
    query = (probe @ weight[:, :dim] + bias[:dim]).reshape(1, 1, heads, dim // heads)
    both = x @ weight[:, dim:] + bias[dim:]
    keys, values = (both[:, :, i * dim : (i + 1) * dim].reshape(batch, seq, heads, dim // heads) for i in (0, 1))
    pooled: Value = query.expand(shape=(batch, 1, heads, dim // heads)).attention(keys, values).reshape(batch, dim)
    return pooled

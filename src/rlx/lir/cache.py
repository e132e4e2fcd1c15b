"""Loop forms of the KV cache: appending writes in place, attention reads where the cache lies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.dtypes import BOOL, I32, I64
from rlx.errors import LowerError
from rlx.ir.graph import Node
from rlx.lir.kernels import BEYOND_CAPACITY, KEY_BLOCK, AttentionKernel
from rlx.lir.loops import Apply, Arg, Check, Choose, Const, Expr, For, Index, Let, Load, Ref, Stmt, Store
from rlx.lir.program import ARENA, INPUT
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, cast, decode_unit, loop_form, map_elements, widened
from rlx.lir.views import View
from rlx.ops.attention import split_mask
from rlx.types import Size, TensorType, dim_min, product

Place = tuple[tuple[Expr, int | Arg], ...]
NEW, POSITIONS, CACHE = range(3)  # parameters of the kernel that appends


@loop_form("kv_append")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is one head of one batch row. It takes the tokens in order, so of two at one position the last one stays,
    and a token that is skipped may write back what lies at position 0, which no other unit touches.
    """
    cache, new, positions = (s.view(o) for o in node.operands)
    if not _may_write(s, node, cache):
        cache = s.copied(cache)
    if new.buffer == cache.buffer:
        new = s.copied(new)
    builder = LoopBuilder("kv_append")
    for view in (new, s.contiguous(positions)):
        builder.param(view)
    builder.param(cache, written=True)
    lets = decode_unit(builder, cache.shape[:2], ["b", "h"])
    keys = node.attrs["kind"] == "keys"
    capacity = cache.shape[2] * KEY_BLOCK if keys else cache.shape[2]
    tokens, size = new.shape[1], builder.arg("capacity", capacity)
    check = Check(_below(_position(builder, Index("c")), size), BEYOND_CAPACITY)
    body: tuple[Stmt, ...] = (
        *lets,
        For("c", builder.arg("tokens", tokens), (check,), vector=True),
        # A cache without room has no position 0 either.
        For("t", builder.arg("room_for", tokens * dim_min(capacity, 1)), _append_token(builder, keys, size)),
    )
    units = product(cache.shape[:2])
    builder.launch(s, For("u", builder.arg("units", units), body), units, split="heads", flops=product(new.shape))
    return [cache]


def _append_token(builder: LoopBuilder, keys: bool, capacity: Arg) -> tuple[Stmt, ...]:
    """Token `t` into its place, one element after the other along `j`."""
    cache, new = builder.views[CACHE], builder.views[NEW]
    old = widened(Load(CACHE, _place_in_cache(builder, keys), cache.dtype))
    fresh = widened(Load(NEW, _terms(builder, NEW, Ref("b", I64), Index("t"), Ref("h", I64), Index("j")), new.dtype))
    kind = max(old.dtype, fresh.dtype, key=lambda d: d.size)  # where they differ, it holds both
    value = Choose(Ref("ok", BOOL), cast(fresh, kind), cast(old, kind))
    p, zero = Ref("p", I64), Const(0, I64)
    return (
        Let("p", _position(builder, Index("t"))),
        Let("ok", Apply("and", (Apply("ge", (p, zero), BOOL), _below(p, capacity)), BOOL)),
        Let("at", Apply("select", (Ref("ok", BOOL), p, zero), I64)),
        For("j", builder.arg("dim", new.shape[3]), (Store(CACHE, _place_in_cache(builder, keys), value),), vector=True),
    )


def _place_in_cache(builder: LoopBuilder, keys: bool) -> Place:
    b, h, at, j = Ref("b", I64), Ref("h", I64), Ref("at", I64), Index("j")
    if not keys:
        return _terms(builder, CACHE, b, h, at, j)
    block, lane = (Apply(op, (at, Const(KEY_BLOCK, I64)), I64) for op in ("quot", "rem"))
    return _terms(builder, CACHE, b, h, block, j, lane)


def _terms(builder: LoopBuilder, param: int, *indices: Expr) -> Place:
    """The address of an element of a parameter, given its index on each axis."""
    strides = builder.views[param].strides
    last = len(strides) - 1
    steps = (builder.stride(param, str(axis), step, unit=axis == last) for axis, step in enumerate(strides))
    return tuple(zip(indices, steps, strict=True))


def _position(builder: LoopBuilder, token: Index) -> Expr:
    positions = builder.views[POSITIONS]
    return cast(Load(POSITIONS, _terms(builder, POSITIONS, Ref("b", I64), token), positions.dtype), I64)


def _below(a: Expr, b: Expr) -> Expr:
    return Apply("lt", (a, b), BOOL)


def _may_write(s: Scheduler, node: Node, cache: View) -> bool:
    """Whether the cache is ours to change: memory of the program that nothing reads again, or the caller's state."""
    if cache.buffer in s.borrowed:
        return False
    later = [o for n in s.graph.nodes if n.id > node.id for o in n.operands if o is not None]
    used = any(o in s.views and s.views[o].buffer == cache.buffer for o in (*later, *s.graph.outputs))
    kind = s.program.buffers[cache.buffer].kind
    if kind != INPUT or s.graph.named(cache.buffer).node.op != "state":
        return kind == ARENA and not used
    if used:
        # A copy would keep the value, but lose what the caller wants to find in the state afterwards.
        raise LowerError(f"kv_append: state {cache.buffer!r} is read again as it was", hint="read the result instead")
    return True


@loop_form("cached_attention")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    q, keys, values, positions = (s.view(o) for o in node.operands)
    q, values = (t if t.strides[-1] == 1 else s.copied(t) for t in (q, values))
    positions = _narrow(s, positions)
    out = s.result(node)
    kind, window = split_mask(node.attrs["mask_kind"])
    kv_heads, value_dim = values.shape[1], values.shape[3]
    heads, head_dim = q.shape[2:]
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    assert isinstance(head_dim, int) and isinstance(value_dim, int)
    if keys.strides[2:] != (head_dim * KEY_BLOCK, KEY_BLOCK, 1):
        keys = s.copied(keys)
    scale = node.attrs["scale"]
    kernel = AttentionKernel(
        dtype=q.dtype, head_dim=head_dim, value_dim=value_dim, group=heads // kv_heads, mask=kind, window=window,
        scale=1 / math.sqrt(head_dim) if scale is None else scale, softcap=node.attrs["softcap"] or 0.0,
        mask_dtype=None, cached=True, cache_dtype=None if keys.dtype is q.dtype else keys.dtype,
    )  # fmt: skip
    capacity = dim_min(keys.shape[2] * KEY_BLOCK, values.shape[2])
    words: dict[str, View | Size | None] = {
        "q": q, "k": keys, "v": values, "out": out, "positions": positions, "batch": q.shape[0], "q_len": q.shape[1],
        "capacity": capacity, "kv_heads": kv_heads, "positions_batch": positions.strides[0],
    }  # fmt: skip
    for name, view, axes in (
        ("q", q, ("batch", "seq", "head")), ("out", out, ("batch", "seq", "head")),
        ("k", keys, ("batch", "head")), ("v", values, ("batch", "head", "seq")),
    ):  # fmt: skip
        words |= {f"{name}_{axis}": stride for axis, stride in zip(axes, view.strides, strict=False)}
    blocks = (q.shape[1] + (kernel.positions - 1)) // kernel.positions
    units = q.shape[0] * kv_heads * blocks
    # How far rows see is data; this is the most that it can be.
    flops = q.shape[0] * q.shape[1] * capacity * (heads * 2 * (head_dim + value_dim))
    s.launch(kernel, words, units, "heads", flops=flops)
    return [out]


def _narrow(s: Scheduler, positions: View) -> View:
    """Positions as i32, one after the other; those that an i32 does not hold stay negative, or beyond any capacity."""
    if positions.dtype is I32:
        return positions if positions.strides[-1] == 1 else s.copied(positions)
    out = s.temporary(TensorType(positions.shape, I32))
    least, most = Const(-1, I64), Const(2**31 - 1, I64)

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        bounded = Apply("max", (Apply("min", (cast(e.load(0), I64), most), I64), least), I64)
        return (), [cast(bounded, I32)]

    map_elements(s, "positions", positions.shape, [positions], [out], body)
    return out

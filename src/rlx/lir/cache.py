"""Loop forms of the KV cache: appending writes in place, attention reads where the cache lies."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.dtypes import BOOL, F16, F32, I8, I32, I64, DType
from rlx.errors import LowerError
from rlx.ir.graph import Node
from rlx.lir.blocks import UNIT
from rlx.lir.kernels import BEYOND_CAPACITY, KEY_BLOCK, AttentionKernel
from rlx.lir.loops import Apply, Arg, Check, Choose, Const, Expr, For, Index, Let, Load, Reduce, Ref, Stmt, Store
from rlx.lir.program import ARENA, INPUT
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, cast, decode_unit, loop_form, map_elements, widened
from rlx.lir.views import View
from rlx.ops.attention import split_mask
from rlx.types import Size, TensorType, contiguous_strides, dim_min, product

Place = tuple[tuple[Expr, int | Arg], ...]
NEW, POSITIONS, CACHE = range(3)  # parameters of the kernel that appends
HALVES, BYTES = 2, 3  # a packed cache, seen twice


@loop_form("kv_append")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is one head of one batch row. It takes the tokens in order, so of two at one position the last one stays,
    and a token that is skipped may write back what lies at position 0, which no other unit touches.
    """
    cache, new, positions = (s.view(o) for o in node.operands)
    if not may_write(s, node, cache):
        cache = s.copied(cache)
    if new.buffer == cache.buffer:
        new = s.copied(new)
    builder = LoopBuilder("kv_append")
    for view in (new, s.contiguous(positions)):
        builder.param(view)
    storage, capacity = node.types[0].dtype, cache.shape[2] * KEY_BLOCK if cache.rank == 5 else cache.shape[2]
    if storage.is_packed:
        rows = cache.reshape((*cache.shape[:2], capacity, cache.shape[-1]))
        assert rows is not None, "a state and a copy have no gaps"
        builder.param(_as_type(rows, F16), written=True)
        builder.param(_as_type(rows, I8), written=True)
    else:
        builder.param(cache, written=True)
    lets = decode_unit(builder, cache.shape[:2], ["b", "h"])
    tokens, size = new.shape[1], builder.arg("capacity", capacity)
    # In a ring every position has its place, unless there is none at all.
    limit = builder.arg("positions", dim_min(capacity, 1) * 2**62) if node.attrs["ring"] else size
    write = _quantise_token(builder, storage) if storage.is_packed else _write_token(builder)
    check = Check(_below(_position(builder, "c"), limit), BEYOND_CAPACITY)
    body: tuple[Stmt, ...] = (
        *lets,
        For("c", builder.arg("tokens", tokens), (check,), vector=True),
        # A cache without room has no position 0 either.
        For("t", builder.arg("room_for", tokens * dim_min(capacity, 1)), (*_find_place(builder, limit, size), *write)),
    )
    units = product(cache.shape[:2])
    builder.launch(s, For("u", builder.arg("units", units), body), units, split="heads", flops=product(new.shape))
    return [cache]


def _find_place(builder: LoopBuilder, limit: Arg, capacity: Arg) -> tuple[Stmt, ...]:
    """`at` is where token `t` goes, and 0 unless it is `ok`."""
    p, place, zero = Ref("p", I64), Ref("place", I64), Const(0, I64)
    return (
        Let("p", _position(builder, "t")),
        Let("ok", Apply("and", (Apply("ge", (p, zero), BOOL), _below(p, limit)), BOOL)),
        Let("place", Apply("select", (Ref("ok", BOOL), p, zero), I64)),
        Let("at", place if limit == capacity else Apply("rem", (place, capacity), I64)),
    )


def _write_token(builder: LoopBuilder) -> tuple[Stmt, ...]:
    """Token `t` into its place, one element after the other along `j`."""
    cache, new = builder.views[CACHE], builder.views[NEW]
    old = widened(Load(CACHE, _place_in_cache(builder), cache.dtype))
    fresh = widened(Load(NEW, _place_in_new(builder, Index("j")), new.dtype))
    kind = max(old.dtype, fresh.dtype, key=lambda d: d.size)  # where they differ, it holds both
    value = Choose(Ref("ok", BOOL), cast(fresh, kind), cast(old, kind))
    return (For("j", builder.arg("dim", new.shape[3]), (Store(CACHE, _place_in_cache(builder), value),), vector=True),)


def _quantise_token(builder: LoopBuilder, storage: DType) -> tuple[Stmt, ...]:
    """Token `t` into its place, block by block: a scale, then a byte a number, rounded as ggml rounds."""
    new, size = builder.views[NEW], storage.block
    scale, ok = Ref("scale", F32), Ref("ok", BOOL)

    def number(index: str) -> Expr:
        term = (Index("k"), builder.arg("block", new.strides[3] * size))
        return cast(widened(Load(NEW, (*_place_in_new(builder, Index(index)), term), new.dtype)), F32)

    def place(param: int, *terms: tuple[Expr, int | Arg]) -> Place:
        row = _terms(builder, param, Ref("b", I64), Ref("h", I64), Ref("at", I64))
        return (*row, (Index("k"), storage.size // builder.views[param].dtype.size), *terms)

    def store(param: int, value: Expr, *terms: tuple[Expr, int | Arg]) -> Store:
        at, dtype = place(param, *terms), builder.views[param].dtype
        return Store(param, at, Choose(ok, value, cast(Load(param, at, dtype), value.dtype)))

    scaled, whole = Ref("scaled", F32), Ref("whole", I32)
    beside = Apply("sub", (scaled, cast(whole, F32)), F32)  # exact, as is twice that: halves are rounded away from 0
    block: tuple[Stmt, ...] = (
        Let("largest", Reduce("max", "i", size, Apply("abs", (number("i"),), F32))),
        Let("scale", Apply("div", (Ref("largest", F32), Const(127.0, F32)), F32)),
        Let("inverse", Apply("select", (
            Apply("eq", (scale, Const(0.0, F32)), BOOL), Const(0.0, F32), Apply("div", (Const(1.0, F32), scale), F32),
        ), F32)),
        store(HALVES, scale),
        For("j", size, (
            Let("scaled", Apply("mul", (number("j"), Ref("inverse", F32)), F32)),
            Let("whole", cast(scaled, I32)),
            store(BYTES, Apply("add", (whole, cast(Apply("add", (beside, beside), F32), I32)), I32),
                  (Const(UNIT, I64), 1), (Index("j"), 1)),
        ), vector=True),
    )  # fmt: skip
    return (For("k", builder.arg("blocks", new.shape[3] // size), block),)


def _as_type(view: View, dtype: DType) -> View:
    """Rows of 16-bit units as elements of another type."""
    if dtype.size == UNIT:
        return View(view.buffer, dtype, view.shape, view.strides, view.offset)
    parts = UNIT // dtype.size
    steps = (*(s * parts for s in view.strides[:-1]), 1)
    return View(view.buffer, dtype, (*view.shape[:-1], view.shape[-1] * parts), steps, view.offset * parts)


def _place_in_cache(builder: LoopBuilder) -> Place:
    b, h, at, j = Ref("b", I64), Ref("h", I64), Ref("at", I64), Index("j")
    if builder.views[CACHE].rank == 4:
        return _terms(builder, CACHE, b, h, at, j)
    block, lane = (Apply(op, (at, Const(KEY_BLOCK, I64)), I64) for op in ("quot", "rem"))
    return _terms(builder, CACHE, b, h, block, j, lane)


def _place_in_new(builder: LoopBuilder, j: Index) -> Place:
    return _terms(builder, NEW, Ref("b", I64), Index("t"), Ref("h", I64), j)


def _terms(builder: LoopBuilder, param: int, *indices: Expr) -> Place:
    """The address of an element of a parameter, given its index on each axis, or on the first ones."""
    strides = builder.views[param].strides
    last = len(strides) - 1
    steps = (builder.stride(param, str(axis), step, unit=axis == last) for axis, step in enumerate(strides))
    return tuple(zip(indices, steps, strict=False))


def _position(builder: LoopBuilder, token: str) -> Expr:
    positions = builder.views[POSITIONS]
    return cast(Load(POSITIONS, _terms(builder, POSITIONS, Ref("b", I64), Index(token)), positions.dtype), I64)


def _below(a: Expr, b: Expr) -> Expr:
    return Apply("lt", (a, b), BOOL)


def may_write(s: Scheduler, node: Node, cache: View) -> bool:
    """Whether a cache is ours to change: memory of the program that nothing reads again, or the caller's state."""
    if cache.buffer in s.borrowed:
        return False
    later = [o for n in s.graph.nodes if n.id > node.id for o in n.operands if o is not None]
    used = any(o in s.views and s.views[o].buffer == cache.buffer for o in (*later, *s.graph.outputs))
    kind = s.program.buffers[cache.buffer].kind
    if kind != INPUT or s.graph.named(cache.buffer).node.op != "state":
        return kind == ARENA and not used
    if used:
        # A copy would keep the value, but lose what the caller wants to find in the state afterwards.
        raise LowerError(f"{node.op}: state {cache.buffer!r} is read again as it was", hint="read the result instead")
    return True


def may_reuse(s: Scheduler, node: Node, view: View) -> bool:
    """Whether a result of `node` may lie where an operand does: memory of the program that nothing reads again.

    Never a state: only ops that say so change what the caller finds there.
    """
    return s.program.buffers[view.buffer].kind == ARENA and may_write(s, node, view)


@loop_form("cached_attention")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    q, keys, values, positions = (s.view(o) for o in node.operands)
    q, values = (t if t.strides[-1] == 1 else s.copied(t) for t in (q, values))
    positions = _narrow(s, positions)
    out = s.result(node)
    kind, window = split_mask(node.attrs["mask_kind"])
    storage, kv_heads = node.operands[1].dtype, values.shape[1]  # type: ignore[union-attr]
    heads, head_dim, value_dim = *q.shape[2:], out.shape[3]
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    assert isinstance(head_dim, int) and isinstance(value_dim, int)
    if keys.strides[2:] != contiguous_strides(keys.shape[2:]):
        keys = s.copied(keys)
    scale = node.attrs["scale"]
    kernel = AttentionKernel(
        dtype=q.dtype, head_dim=head_dim, value_dim=value_dim, group=heads // kv_heads, mask=kind, window=window,
        scale=1 / math.sqrt(head_dim) if scale is None else scale, softcap=node.attrs["softcap"] or 0.0,
        mask_dtype=None, cached=True, cache_dtype=None if storage is q.dtype else storage, ring=node.attrs["ring"],
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

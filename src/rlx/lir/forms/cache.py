"""Loop forms of the KV cache: appending writes in place, attention reads where the cache lies."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, F16, F32, I8, I32, I64, DType
from rlx.ir.graph import Node
from rlx.lir.aliasing import may_write
from rlx.lir.forms import attention as attention  # has `cached_attention`
from rlx.lir.forms.blocks import UNIT
from rlx.lir.kernels import BEYOND_CAPACITY, KEY_BLOCK
from rlx.lir.loops import Arg, Check, Const, Expr, For, Index, Let, Load, Place, Reduce, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit, loop_form
from rlx.lir.views import View
from rlx.types import dim_min, product

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
    check = Check(_position(builder, "c") < limit, BEYOND_CAPACITY)
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
    p, place = Ref("p", I64), Ref("place", I64)
    return (
        Let("p", _position(builder, "t")),
        Let("ok", (p >= 0) & (p < limit)),
        Let("place", Ref("ok", BOOL).select(p, 0)),
        Let("at", place if limit == capacity else place.rem(capacity)),
    )


def _write_token(builder: LoopBuilder) -> tuple[Stmt, ...]:
    """Token `t` into its place, one element after the other along `j`."""
    old = builder.load(CACHE, _place_in_cache(builder))
    fresh = builder.load(NEW, _place_in_new(builder, Index("j")))
    kind = max(old.dtype, fresh.dtype, key=lambda d: d.size)  # where they differ, it holds both
    value = Ref("ok", BOOL).choose(fresh.cast(kind), old.cast(kind))
    return (
        For(
            "j",
            builder.arg("dim", builder.views[NEW].shape[3]),
            (Store(CACHE, _place_in_cache(builder), value),),
            vector=True,
        ),
    )


def _quantise_token(builder: LoopBuilder, storage: DType) -> tuple[Stmt, ...]:
    """Token `t` into its place, block by block: a scale, then a byte a number, rounded as ggml rounds."""
    new, size = builder.views[NEW], storage.block
    scale, ok = Ref("scale", F32), Ref("ok", BOOL)

    def number(index: str) -> Expr:
        term = (Index("k"), builder.arg("block", new.strides[3] * size))
        return builder.load(NEW, (*_place_in_new(builder, Index(index)), term)).cast(F32)

    def place(param: int, *terms: tuple[Expr, int | Arg]) -> Place:
        row = _terms(builder, param, Ref("b", I64), Ref("h", I64), Ref("at", I64))
        return (*row, (Index("k"), storage.size // builder.views[param].dtype.size), *terms)

    def store(param: int, value: Expr, *terms: tuple[Expr, int | Arg]) -> Store:
        at, dtype = place(param, *terms), builder.views[param].dtype
        return Store(param, at, ok.choose(value, Load(param, at, dtype).cast(value.dtype)))

    scaled, whole = Ref("scaled", F32), Ref("whole", I32)
    beside = scaled - whole.cast(F32)  # exact, as is twice that: halves are rounded away from 0
    block: tuple[Stmt, ...] = (
        Let("largest", Reduce("max", "i", size, abs(number("i")))),
        Let("scale", Ref("largest", F32) / 127),
        Let("inverse", scale.eq(0).select(0, 1 / scale)),
        store(HALVES, scale),
        For("j", size, (
            Let("scaled", number("j") * Ref("inverse", F32)),
            Let("whole", scaled.cast(I32)),
            store(BYTES, whole + (beside + beside).cast(I32), (Const(UNIT, I64), 1), (Index("j"), 1)),
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
    return _terms(builder, CACHE, b, h, at.quot(KEY_BLOCK), j, at.rem(KEY_BLOCK))


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
    return Load(POSITIONS, _terms(builder, POSITIONS, Ref("b", I64), Index(token)), positions.dtype).cast(I64)

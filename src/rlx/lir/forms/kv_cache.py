"""Loop forms of the KV cache: appending writes in place, attention reads pages in place."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, F16, F32, I8, I32, I64, DType
from rlx.ir.graph import Node
from rlx.lir.aliasing import may_write
from rlx.lir.forms import attention
from rlx.lir.forms.quant_blocks import UNIT
from rlx.lir.kernels import BEYOND_CAPACITY, OUTSIDE_POOL, OUTSIDE_TABLE
from rlx.lir.loops import Arg, Check, Const, Expr, For, Index, Let, Load, Place, Reduce, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit, loop_form
from rlx.lir.views import View
from rlx.types import Size, dim_min, product

# Parameters of the append kernel. They are followed by the rows of ragged tokens, then by the pool; a quantised pool is
# passed twice, as f16 and as bytes.
NEW, POSITIONS, TABLE = range(3)


@loop_form("kv_append")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is one head of one batch entry, or of all ragged tokens.

    It appends tokens in order, so of two tokens at the same position the last one wins.
    """
    pool, new, positions, table, *ragged = (s.view(o) for o in node.operands if o is not None)
    if not may_write(s, node, pool):
        pool = s.copied(pool)
    if new.buffer == pool.buffer:
        new = s.copied(new)
    storage, ordered = node.types[0].dtype, attention.pages_first(pool, node.attrs["axes"])
    pages, kv_heads, page = ordered.shape[:3]
    assert isinstance(page, int)
    if ragged:  # one batch entry
        new, positions = (_with_axis(v, 0) for v in (new, positions))
    builder = LoopBuilder("kv_append")
    for view in (new, s.contiguous(positions), s.contiguous(table), *map(s.contiguous, ragged)):
        builder.param(view)
    first = len(builder.views)
    for view in (_as_type(ordered, F16), _as_type(ordered, I8)) if storage.is_packed else (ordered,):
        builder.param(view, written=True)
    tokens, (row_count, blocks) = new.shape[1], table.shape
    append = _Append(builder, first, page, ragged=bool(ragged))
    capacity = builder.arg("capacity", blocks * page * dim_min(pages, 1))
    # In a ring every position has a slot, unless there are no slots at all.
    some = dim_min(row_count * blocks * pages, 1)
    limit = builder.arg("positions", some * 2**62) if node.attrs["ring"] else capacity
    checks: list[Stmt] = [Check(append.position("c") < limit, BEYOND_CAPACITY)]
    if ragged:
        row = append.row("c")
        inside = (row >= 0) & (row < builder.arg("rows", row_count))
        checks.append(Check((append.position("c") < 0) | inside, OUTSIDE_TABLE))
    write = append.quantise(storage) if storage.is_packed else append.write()
    units = product((new.shape[0], kv_heads))
    body: tuple[Stmt, ...] = (
        *decode_unit(builder, (new.shape[0], kv_heads), ["b", "h"]),
        For("c", builder.arg("tokens", tokens), tuple(checks), vector=True),
        # With no rows, blocks or pages the loop must not run: even skipped tokens look up entry 0.
        For("t", builder.arg("room_for", tokens * some), (*append.place(limit, capacity, row_count, pages), *write)),
    )
    builder.launch(s, For("u", builder.arg("units", units), body), units, split="heads", flops=product(new.shape))
    return [pool]


class _Append:
    """Statements of a `kv_append` unit: store head `h` of token `t` in slot `slot` of page `page`, if `ok`."""

    def __init__(self, builder: LoopBuilder, pool: int, page: int, *, ragged: bool) -> None:
        self.builder, self.pool, self.page, self.ragged = builder, pool, page, ragged

    def position(self, token: str) -> Expr:
        return self._number(POSITIONS, Ref("b", I64), Index(token))

    def row(self, token: str) -> Expr:
        """The table row of a token."""
        return self._number(TABLE + 1, Index(token)) if self.ragged else Ref("b", I64)

    def _number(self, param: int, *indices: Expr) -> Expr:
        return Load(param, _terms(self.builder, param, *indices), self.builder.views[param].dtype).cast(I64)

    def place(self, limit: Arg, capacity: Arg, rows: Size, pages: Size) -> tuple[Stmt, ...]:
        """Define `page` and `slot` of a token, and `ok`: false for a token that is skipped."""
        p, row, at, number = (Ref(name, I64) for name in ("p", "row", "at", "number"))
        known, ok = Ref("known", BOOL), Ref("ok", BOOL)
        in_table = (row >= 0) & (row < self.builder.arg("rows", rows))
        exists = (number >= 0) & (number < self.builder.arg("pages", pages))
        place = known.select(p, 0)
        return (
            Let("p", self.position("t")),
            Let("row", self.row("t")),
            Let("known", (p >= 0) & (p < limit) & in_table),
            Let("at", place if limit == capacity else place.rem(capacity)),
            Let("number", self._number(TABLE, known.select(row, 0), at.quot(self.page))),
            Let("ok", known & exists),
            Check(~known | exists, OUTSIDE_POOL),
            Let("page", ok.select(number, 0)),
            Let("slot", at.rem(self.page)),
        )

    def write(self) -> tuple[Stmt, ...]:
        """Store one element after the other along `j`."""
        builder, page, h, slot, j = self.builder, Ref("page", I64), Ref("h", I64), Ref("slot", I64), Index("j")
        at = _terms(builder, self.pool, page, h, slot, j)
        fresh = builder.load(NEW, _place_in_new(builder, j))
        size = builder.views[NEW].shape[3]
        assert isinstance(size, int)
        return (
            Let("size", Ref("ok", BOOL).select(Const(size, I64), 0)),
            For("j", Ref("size", I64), (Store(self.pool, at, fresh),), vector=True),
        )

    def quantise(self, storage: DType) -> tuple[Stmt, ...]:
        """Quantise block by block: a scale, then one byte per value, rounded as ggml does."""
        builder, new, size = self.builder, self.builder.views[NEW], storage.block
        halves, codes, scale = self.pool, self.pool + 1, Ref("scale", F32)

        def number(index: str) -> Expr:
            term = (Index("k"), builder.arg("block", new.strides[3] * size))
            return builder.load(NEW, (*_place_in_new(builder, Index(index)), term)).cast(F32)

        def store(param: int, value: Expr, *terms: tuple[Expr, int | Arg]) -> Store:
            row = _terms(builder, param, Ref("page", I64), Ref("h", I64), Ref("slot", I64))
            block = (Index("k"), storage.size // builder.views[param].dtype.size)
            return Store(param, (*row, block, *terms), value)

        scaled, truncated = Ref("scaled", F32), Ref("whole", I32)
        fraction = scaled - truncated.cast(F32)  # exact, as is its double: halves round away from 0
        block: tuple[Stmt, ...] = (
            Let("largest", Reduce("max", "i", size, abs(number("i")))),
            Let("scale", Ref("largest", F32) / 127),
            Let("inverse", scale.eq(0).select(0, 1 / scale)),
            store(halves, scale),
            For("j", size, (
                Let("scaled", number("j") * Ref("inverse", F32)),
                Let("whole", scaled.cast(I32)),
                store(codes, truncated + (fraction + fraction).cast(I32), (Const(UNIT, I64), 1), (Index("j"), 1)),
            ), vector=True),
        )  # fmt: skip
        count = new.shape[3] // size
        assert isinstance(count, int)
        return (
            Let("blocks", Ref("ok", BOOL).select(Const(count, I64), 0)),
            For("k", Ref("blocks", I64), block),
        )


def _as_type(view: View, dtype: DType) -> View:
    """Reinterpret rows of 16-bit units as elements of another type."""
    if dtype.size == UNIT:
        return View(view.buffer, dtype, view.shape, view.strides, view.offset)
    parts = UNIT // dtype.size
    steps = (*(s * parts for s in view.strides[:-1]), 1)
    return View(view.buffer, dtype, (*view.shape[:-1], view.shape[-1] * parts), steps, view.offset * parts)


def _place_in_new(builder: LoopBuilder, j: Index) -> Place:
    return _terms(builder, NEW, Ref("b", I64), Index("t"), Ref("h", I64), j)


def _terms(builder: LoopBuilder, param: int, *indices: Expr) -> Place:
    """The address of an element of a parameter, given its indices on all or the leading axes."""
    strides = builder.views[param].strides
    last = len(strides) - 1
    steps = (builder.stride(param, str(axis), step, unit=axis == last) for axis, step in enumerate(strides))
    return tuple(zip(indices, steps, strict=False))


def _with_axis(view: View, axis: int) -> View:
    """Insert an axis of size 1."""
    shape, strides = list(view.shape), list(view.strides)
    shape.insert(axis, 1)
    strides.insert(axis, product(view.shape))
    return view.with_(tuple(shape), tuple(strides))

"""Loop forms of the KV cache: appending writes in place, attention reads pages in place.

Attention is plain loops, as that of `attention.py`, whose scores and softmax it shares.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import BOOL, F16, F32, I8, I32, I64, DType
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Node
from rlx.kv_layout import POOL_AXES
from rlx.lir.aliasing import may_write
from rlx.lir.forms.attention import BATCH, KEY, KV_HEAD, POSITION, QUERY, Queries, Read, attend
from rlx.lir.forms.quant_blocks import UNIT
from rlx.lir.kernels import BEYOND_CAPACITY, OUTSIDE_POOL, OUTSIDE_TABLE
from rlx.lir.loops import Arg, Check, Const, Expr, For, Index, Let, Load, Place, Reduce, Ref, Stmt, Store, number
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit, loop_form
from rlx.lir.views import View
from rlx.types import Size, dim_min, product


@dataclass(frozen=True)
class AppendOperands:
    """Operands of `kv_append` in rectangular form: ragged tokens become one batch entry."""

    result: View  # the pool, or a copy of it
    pool: View  # the result as [pages, kv_heads, page, dim]
    new: View  # [batch, seq, kv_heads, dim]
    positions: View  # [batch, seq]
    table: View  # [rows, blocks]
    rows: View | None  # [seq], if ragged
    storage: DType

    @classmethod
    def of(cls, s: Scheduler, node: Node) -> AppendOperands:
        pool, new, positions, table, *ragged = (s.view(o) for o in node.operands if o is not None)
        if not may_write(s, node, pool):
            pool = s.copied(pool)
        if new.buffer == pool.buffer:
            new = s.copied(new)
        ordered = pages_first(pool, node.attrs["axes"])
        if ragged:
            new, positions = (_with_axis(v, 0) for v in (new, positions))
        rows = ragged[0] if ragged else None
        return cls(pool, ordered, new, positions, table, rows, node.types[0].dtype)

    @property
    def page(self) -> int:
        """Positions per page."""
        size = self.pool.shape[2]
        assert isinstance(size, int)
        return size

    @property
    def some(self) -> Size:
        """0 if there are no rows, blocks or pages, else 1."""
        return dim_min(product(self.table.shape) * self.pool.shape[0], 1)

    def written(self) -> tuple[View, ...]:
        """The pool as kernels write it: quantised pools as f16 and as bytes."""
        if self.storage.is_packed:
            return _as_type(self.pool, F16), _as_type(self.pool, I8)
        return (self.pool,)


@loop_form("kv_append")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is one head of one batch entry, or of all ragged tokens.

    It appends tokens in order, so of two tokens at the same position the last one wins.
    """
    operands = AppendOperands.of(s, node)
    new = operands.new
    kv_heads, tokens = operands.pool.shape[1], new.shape[1]
    builder = LoopBuilder("kv_append")
    builder.param(new)
    append = Append(builder, operands, Index("t"))
    append.read_places(s)
    append.write_pool()
    limit, capacity = append.limits(ring=node.attrs["ring"])
    checks = append.checks(Index("c"), limit)
    write = append.write()
    units = product((new.shape[0], kv_heads))
    body: tuple[Stmt, ...] = (
        *decode_unit(builder, (new.shape[0], kv_heads), ["b", "h"]),
        For("c", builder.arg("tokens", tokens), checks, vector=True),
        # With no rows, blocks or pages the loop must not run: even skipped tokens look up entry 0.
        For("t", builder.arg("room_for", tokens * operands.some), (*append.place(limit, capacity), *write)),
    )
    builder.launch(s, For("u", builder.arg("units", units), body), units, split="heads", flops=product(new.shape))
    return [operands.result]


class Append:
    """Statements that store head `h` of a token of batch entry `b` in slot `slot` of page `page`, if `ok`."""

    def __init__(self, builder: LoopBuilder, operands: AppendOperands, token: Expr, new: int = 0) -> None:
        self.builder, self.operands, self.token, self.new = builder, operands, token, new
        self.positions = self.table = self.rows = self.pool = -1  # parameters

    def read_places(self, s: Scheduler) -> None:
        """Add the parameters that locate tokens."""
        operands = self.operands
        self.positions = self.builder.param(s.contiguous(operands.positions))
        self.table = self.builder.param(s.contiguous(operands.table))
        if operands.rows is not None:
            self.rows = self.builder.param(s.contiguous(operands.rows))

    def write_pool(self) -> None:
        """Add the pool; a quantised one is two parameters."""
        self.pool, *_ = [self.builder.param(view, written=True) for view in self.operands.written()]

    def limits(self, *, ring: bool) -> tuple[Arg, Arg]:
        """The first position that is a fault, and the capacity."""
        blocks, pages = self.operands.table.shape[1], self.operands.pool.shape[0]
        capacity = self.builder.arg("capacity", blocks * self.operands.page * dim_min(pages, 1))
        # In a ring every position has a slot, unless there are no slots at all.
        return self.builder.arg("positions", self.operands.some * 2**62) if ring else capacity, capacity

    def position(self, token: Expr) -> Expr:
        return self._number(self.positions, Ref("b", I64), token)

    def row(self, token: Expr) -> Expr:
        """The table row of a token."""
        return Ref("b", I64) if self.operands.rows is None else self._number(self.rows, token)

    def _number(self, param: int, *indices: Expr) -> Expr:
        return Load(param, _terms(self.builder, param, *indices), self.builder.views[param].dtype).cast(I64)

    def checks(self, token: Expr, limit: Arg) -> tuple[Stmt, ...]:
        """Faults of a token that has no place."""
        checks: list[Stmt] = [Check(self.position(token) < limit, BEYOND_CAPACITY)]
        if self.operands.rows is not None:
            row = self.row(token)
            inside = (row >= 0) & (row < self.builder.arg("rows", self.operands.table.shape[0]))
            checks.append(Check((self.position(token) < 0) | inside, OUTSIDE_TABLE))
        return tuple(checks)

    def place(self, limit: Arg, capacity: Arg) -> tuple[Stmt, ...]:
        """Define `page` and `slot` of a token, and `ok`: false for a token that is skipped."""
        rows, pages, size = self.operands.table.shape[0], self.operands.pool.shape[0], self.operands.page
        p, row, at, number = (Ref(name, I64) for name in ("p", "row", "at", "number"))
        known, ok = Ref("known", BOOL), Ref("ok", BOOL)
        in_table = (row >= 0) & (row < self.builder.arg("rows", rows))
        exists = (number >= 0) & (number < self.builder.arg("pages", pages))
        place = known.select(p, 0)
        return (
            Let("p", self.position(self.token)),
            Let("row", self.row(self.token)),
            Let("known", (p >= 0) & (p < limit) & in_table),
            Let("at", place if limit == capacity else place.rem(capacity)),
            Let("number", self._number(self.table, known.select(row, 0), at.quot(size))),
            Let("ok", known & exists),
            Check(~known | exists, OUTSIDE_POOL),
            Let("page", ok.select(number, 0)),
            Let("slot", at.rem(size)),
        )

    def write(self) -> tuple[Stmt, ...]:
        """Store the token, quantised if the pool is."""
        return self._quantise() if self.operands.storage.is_packed else self._copy()

    def _copy(self) -> tuple[Stmt, ...]:
        """Store one element after the other along `j`."""
        builder, page, h, slot, j = self.builder, Ref("page", I64), Ref("h", I64), Ref("slot", I64), Index("j")
        at = _terms(builder, self.pool, page, h, slot, j)
        fresh = builder.load(self.new, self._place_in_new(j))
        size = builder.views[self.new].shape[3]
        assert isinstance(size, int)
        return (
            Let("size", Ref("ok", BOOL).select(Const(size, I64), 0)),
            For("j", Ref("size", I64), (Store(self.pool, at, fresh),), vector=True),
        )

    def _quantise(self) -> tuple[Stmt, ...]:
        """Quantise block by block: a scale, then one byte per value, rounded as ggml does."""
        builder, storage = self.builder, self.operands.storage
        new, size = builder.views[self.new], storage.block
        halves, codes, scale = self.pool, self.pool + 1, Ref("scale", F32)

        def number(index: str) -> Expr:
            term = (Index("k"), builder.arg("block", new.strides[3] * size))
            return builder.load(self.new, (*self._place_in_new(Index(index)), term)).cast(F32)

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

    def _place_in_new(self, j: Index) -> Place:
        return _terms(self.builder, self.new, Ref("b", I64), self.token, Ref("h", I64), j)


def _as_type(view: View, dtype: DType) -> View:
    """Reinterpret rows of 16-bit units as elements of another type."""
    if dtype.size == UNIT:
        return View(view.buffer, dtype, view.shape, view.strides, view.offset)
    parts = UNIT // dtype.size
    steps = (*(s * parts for s in view.strides[:-1]), 1)
    return View(view.buffer, dtype, (*view.shape[:-1], view.shape[-1] * parts), steps, view.offset * parts)


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


# -- attention --------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class CachedTokens:
    """Operands of `cached_attention` in rectangular form: ragged tokens become a batch of single tokens."""

    q: View  # [batch, seq, heads, head_dim]
    positions: View  # [batch, seq]
    table: View  # [rows, blocks]
    rows: View | None  # [batch], if ragged
    result: View
    out: View  # the result as [batch, seq, heads, value_dim]

    @classmethod
    def of(cls, s: Scheduler, node: Node) -> CachedTokens:
        q, _, _, positions, table, rows = node.operands
        assert q is not None and positions is not None and table is not None
        result = s.result(node)
        tokens = s.view(q), s.view(positions), s.view(table)
        if rows is None:
            return cls(*tokens, None, result, result)
        return cls(_single(tokens[0]), _single(tokens[1]), tokens[2], s.view(rows), result, _single(result))


def pages_first(pool: View, axes: str) -> View:
    """A pool transposed to [pages, kv_heads, page, dim]."""
    return pool.transpose([axes.index(axis) for axis in POOL_AXES])


def pools(s: Scheduler, node: Node) -> tuple[View, View]:
    """The key and value pools of `cached_attention`, both as [pages, kv_heads, page, dim]."""
    _, keys, values, *_ = node.operands
    assert keys is not None and values is not None
    return pages_first(s.view(keys), node.attrs["key_axes"]), pages_first(s.view(values), node.attrs["value_axes"])


def _single(view: View) -> View:
    """[tokens, ...] as [tokens, 1, ...]."""
    return view.with_((view.shape[0], 1, *view.shape[1:]), (view.strides[0], 1, *view.strides[1:]))


@loop_form("cached_attention")
def cached_attention(s: Scheduler, node: Node) -> Sequence[View]:
    """Loop over all positions of the table; in a ring, over as many from the page of the oldest visible position on.

    So a ring buffer gives bitwise the same results as a full cache.
    """
    tokens, (keys, values) = CachedTokens.of(s, node), pools(s, node)
    storage = node.operands[1].dtype  # type: ignore[union-attr]
    q, (rows, blocks), pages, page = tokens.q, tokens.table.shape, keys.shape[0], values.shape[2]
    assert isinstance(page, int)
    a = Queries(s, node, q, values.shape[1])
    where, table = a.read(tokens.positions), a.read(tokens.table)
    a.lets.append(Let("position", a.load(where, BATCH, QUERY).cast(I64)))
    a.lets += _row(a, tokens)
    some = dim_min(rows * blocks * pages, 1)  # 0 if there are no pages
    size = blocks * page * some
    capacity, count = a.builder.arg("capacity", size), size
    present = POSITION >= 0
    position: Expr = KEY
    place, fits = position, capacity > POSITION
    if node.attrs["ring"]:
        oldest = Ref("oldest", I64)
        a.lets += [_newest(a, tokens, where), Let("oldest", (POSITION + 1 - a.mask.window).max(0))]
        a.lets.append(Let("begin", oldest - oldest.rem(page)))
        position, count = KEY + Ref("begin", I64), size + page * some
        place, fits = position % capacity, (POSITION < 0) | (Ref("newest", I64) - oldest < capacity)
    known = Ref("known", BOOL)
    a.lets += [
        Check(fits, BEYOND_CAPACITY),
        Check((POSITION < 0) | known, OUTSIDE_TABLE),
        Let("looks", present & fits & known),
    ]
    visible = Ref("looks", BOOL) & a.visible(position)

    listed, paged, slot = a.load(table, Ref("row", I64), place // page).cast(I64), Ref("paged", I64), place % page
    in_pool = (listed >= 0) & (listed < a.builder.arg("pages", pages))
    own_page = in_pool.select(listed, 0)  # page 0 replaces a page that does not exist
    exists = Ref("exists", BOOL)
    scores: list[Stmt] = [
        Let("exists", in_pool),
        Check(exists | ~visible, OUTSIDE_POOL),
        Let("paged", own_page),
    ]
    key: Read
    value: Read
    if storage.is_packed:
        packed_keys, packed_values = a.packed(keys, storage), a.packed(values, storage)
        key = lambda d: packed_keys(paged, KV_HEAD, slot, d)
        value = lambda j: packed_values(own_page, KV_HEAD, slot, j)
    else:
        plain_keys, plain_values = a.read(keys), a.read(values)
        key = lambda d: a.load(plain_keys, paged, KV_HEAD, slot, d)
        value = lambda j: a.load(plain_values, own_page, KV_HEAD, slot, j)
    scores += [*a.score(key), *a.masked(None, visible & exists)]
    attend(s, a, q, count, scores, value, [tokens.out])
    return [tokens.result]


def _row(a: Queries, tokens: CachedTokens) -> list[Stmt]:
    """Define `row`, the query's row of the table, and `known`, whether it exists; if not, row 0 replaces it."""
    if tokens.rows is None:
        return [Let("row", BATCH), Let("known", number(True, BOOL))]
    wanted = Ref("wanted", I64)
    return [
        Let("wanted", a.load(a.read(tokens.rows), BATCH).cast(I64)),
        Let("known", (wanted >= 0) & (wanted < a.builder.arg("rows", tokens.table.shape[0]))),
        Let("row", Ref("known", BOOL).select(wanted, 0)),
    ]


def _newest(a: Queries, tokens: CachedTokens, where: int) -> Let:
    """Define `newest`: the highest position in this call of the query's row."""
    p = Index("p")
    if tokens.rows is None:
        newest = a.load(where, BATCH, p).cast(I64)
        return Let("newest", Reduce("max", "p", a.builder.arg("queries", tokens.q.shape[1]), newest))
    same = a.load(a.read(tokens.rows), p).cast(I64).eq(Ref("wanted", I64))
    position = same.select(a.load(where, p).cast(I64), -1)
    return Let("newest", Reduce("max", "p", a.builder.arg("queries", tokens.q.shape[0]), position))

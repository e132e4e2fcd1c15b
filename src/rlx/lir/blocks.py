"""Packed blocks as expressions: the number at a position of a block, from its bytes.

A decoder is written once, for a `Position` that is known (unrolled kernels: offsets and shifts become constants), an
index (one lane an element) or a mixture of both, and for blocks as files have them (`RowBlocks`) as well as for
`Panels`, where the columns of a matmul lie side by side. Bits are those of ggml: widen, then multiply and add in its
order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from rlx.dtypes import BOOL, F16, F32, I16, I32, I64, U8, DType
from rlx.errors import LowerError
from rlx.lir.loops import (
    Apply,
    Arg,
    Assign,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    LoopKernel,
    Param,
    Ref,
    Stmt,
    Store,
    Var,
)
from rlx.ops.fused import apart_of
from rlx.target import Target

UNIT = 2  # bytes
GROUP = 64  # positions that are unrolled at most; longer blocks loop over groups of them
RECENT = 12  # words that stay in registers

Place = tuple[tuple[Expr, int | Arg], ...]


def signed_word(bits: int) -> int:
    """32 bits as the number that an i32 with them is."""
    return bits - ((bits & 1 << 31) << 1)


def unit_of(storage: DType) -> DType:
    """What blocks are read by."""
    return I16 if storage.unit == UNIT else U8


def dot_rows(storage: DType) -> int:
    """Rows of x up to which weights are multiplied without unpacking them to memory; long blocks compile long."""
    return 4 if storage.block <= GROUP else 2


# -- arithmetic on what is known and what is not --------------------------------------------------------------------
@dataclass(frozen=True)
class Term:
    """An integer: a number, or an expression. Known parts are computed at once."""

    of: int | Expr

    def __add__(self, other: Term | int) -> Term:
        return _combine("add", self, other, lambda a, b: a + b)

    def __sub__(self, other: Term | int) -> Term:
        return _combine("sub", self, other, lambda a, b: a - b)

    def __rshift__(self, other: Term | int) -> Term:
        return _combine("shr", self, other, lambda a, b: a >> b)

    def __lshift__(self, other: Term | int) -> Term:
        return _combine("shl", self, other, lambda a, b: a << b)

    def __and__(self, other: Term | int) -> Term:
        return _combine("and", self, other, lambda a, b: a & b)

    def __or__(self, other: Term | int) -> Term:
        return _combine("or", self, other, lambda a, b: a | b)

    def expr(self, dtype: DType) -> Expr:
        """As an expression of an integer type."""
        if isinstance(self.of, int):
            return Const(self.of, dtype)
        return self.of if self.of.dtype is dtype else Apply("cast", (self.of,), dtype)


def _combine(op: str, a: Term, other: Term | int, known: Callable[[int, int], int]) -> Term:
    b = other if isinstance(other, Term) else Term(other)
    if isinstance(a.of, int) and isinstance(b.of, int):
        return Term(known(a.of, b.of))
    if isinstance(b.of, int) and b.of == 0 and op in ("add", "sub", "shr", "shl", "or"):
        return a
    if isinstance(a.of, int) and a.of == 0 and op in ("add", "or"):
        return b
    kinds = [t.of.dtype for t in (a, b) if not isinstance(t.of, int)]
    dtype = I32 if I32 in kinds else I64
    return Term(Apply(op, (a.expr(dtype), b.expr(dtype)), dtype))


def _where(condition: Term, then: Term, other: Term) -> Term:
    """`then` where the condition is not 0."""
    if isinstance(condition.of, int):
        return then if condition.of else other
    test = Apply("ne", (condition.of, Const(0, condition.of.dtype)), BOOL)
    return Term(Apply("select", (test, then.expr(I32), other.expr(I32)), I32))


@dataclass(frozen=True)
class Position:
    """Where in a block: `outer` groups of 2**span, then `inner` positions."""

    outer: Term
    span: int
    inner: int

    @classmethod
    def of(cls, index: Expr) -> Position:
        """A position that is not known at all."""
        return cls(Term(index), 0, 0)

    def __rshift__(self, n: int) -> Term:
        if n > self.span:
            return self.outer >> n - self.span
        return (self.outer << self.span - n) + (self.inner >> n)

    def __and__(self, mask: int) -> Term:
        high = mask >> self.span
        return ((self.outer & high) << self.span) + (self.inner & mask) if high else Term(self.inner & mask)


# -- where blocks lie -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class RowBlocks:
    """A block as files have it, read by 16-bit units, of which all but a few types are a whole number, or by bytes."""

    unit_at: Callable[[Expr], Place]
    units: int  # the parameter that is read as integers
    halves: int  # the same memory read as f16
    size: int = UNIT  # bytes of a unit

    def half(self, unit: int) -> Expr:
        """The f16 at a 16-bit unit of the block."""
        return Load(self.halves, self.unit_at(Const(unit, I64)), F16)

    def single(self, unit: int) -> Expr:
        """The f32 at two units, the low one first."""
        low, high = (Term(self.word(Term(u))) for u in (unit, unit + 1))
        return Apply("bits", ((low & 0xFFFF | high << 16).expr(I32),), F32)

    def split(self, byte: Term) -> tuple[Term, Term]:
        """The word that a byte is in, and its first bit there."""
        return (byte >> 1, (byte & 1) << 3) if self.size == UNIT else (byte, Term(0))

    def byte(self, index: int) -> Expr:
        """A byte, where units are bytes, as an i32."""
        return self.word(Term(index))

    def word(self, index: Term) -> Expr:
        """A unit as an i32."""
        kind = I16 if self.size == UNIT else U8
        return Apply("cast", (Load(self.units, self.unit_at(index.expr(I64)), kind),), I32)


def first_word(storage: DType) -> int:
    """The byte of a block where words begin."""
    return storage.unit * sum(unit == i for i, unit in enumerate(apart_of(storage)))


@dataclass(frozen=True)
class Panels:
    """A block of `lanes` columns side by side: each half or byte that is apart, then each word, of all of them.

    `block` is the number of the block. Parameter 0 is read as words, 1 as halves or bytes.
    """

    storage: DType
    lanes: int
    block: Expr

    def half(self, unit: int) -> Expr:
        start, apart = (self.block, self.storage.size // 2 * self.lanes), apart_of(self.storage)
        if unit in apart:
            return Load(1, (start, (Const(apart.index(unit), I64), self.lanes), (Index("c"), 1)), F16)
        word, high = divmod(unit, 2)
        return Load(1, (start, (Const(word, I64), 2 * self.lanes), (Index("c"), 2), (Const(high, I64), 1)), F16)

    def byte(self, index: int) -> Expr:
        place = (
            (self.block, self.storage.size * self.lanes),
            (Const(apart_of(self.storage).index(index), I64), self.lanes),
        )
        return Apply("cast", (Load(1, (*place, (Index("c"), 1)), U8),), I32)

    def single(self, unit: int) -> Expr:
        return Apply("bits", (self.word(Term(unit // 2)),), F32)

    def split(self, byte: Term) -> tuple[Term, Term]:
        at = byte - first_word(self.storage)
        return at >> 2, (at & 3) << 3

    def word(self, index: Term) -> Expr:
        start = Const(len(apart_of(self.storage)) * self.storage.unit * self.lanes // 4, I64)
        place = ((self.block, self.storage.size * self.lanes // 4), (start, 1), (index.expr(I64), self.lanes))
        return Load(0, (*place, (Index("c"), 1)), I32)


# -- reading a block ------------------------------------------------------------------------------------------------
@dataclass
class Block:
    """A block under decoding. What is read or computed again and again is named by a `Let` in `stmts`, if asked."""

    source: RowBlocks | Panels
    lets: bool = True
    prefix: str = ""
    stmts: list[Stmt] = field(default_factory=list)
    _kept: dict[object, Expr] = field(default_factory=dict)
    _recent: dict[object, Expr] = field(default_factory=dict)

    def half(self, unit: int) -> Expr:
        """The f16 at a unit, widened."""
        return self.keep(("half", unit), lambda: Apply("cast", (self.source.half(unit),), F32))

    def single(self, unit: int) -> Expr:
        """The f32 at two units."""
        return self.keep(("single", unit), lambda: self.source.single(unit))

    def keep(self, key: object, make: Callable[[], Expr]) -> Expr:
        """A value that is computed once a block or group."""
        if key not in self._kept:
            self._kept[key] = self.let(make())
        return self._kept[key]

    def bits(self, byte: Term, first: Term | int, width: int) -> Term:
        """`width` bits of a byte, from bit `first` on."""
        index, start = self.source.split(byte)
        return Term(self.word(index)) >> (start + first) & (1 << width) - 1

    def signed(self, byte: Term) -> Term:
        """A byte as a signed number."""
        index, start = self.source.split(byte)
        return Term(self.word(index)) << (Term(24) - start) >> 24

    def word(self, index: Term) -> Expr:
        """A word, as wide as the source has them; the last few stay in registers."""
        found = self._recent.pop(index.of, None)
        if found is None:
            found = self.let(self.source.word(index))
        self._recent[index.of] = found
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return found

    def let(self, value: Expr) -> Expr:
        """A name for a value, where names are wanted."""
        if not self.lets:
            return value
        name = f"{self.prefix}v{len(self.stmts)}"
        self.stmts.append(Let(name, value))
        return Ref(name, value.dtype)


def _float(term: Term) -> Expr:
    return Apply("cast", (term.expr(I32),), F32)


def _mul(a: Expr, b: Expr) -> Expr:
    return Apply("mul", (a, b), F32)


# -- the types ------------------------------------------------------------------------------------------------------
Decoder = Callable[[Block, Position], Expr]


def _nibble(b: Block, base: int, i: Position) -> Term:
    return b.bits((i & 15) + base, (i >> 4) << 2, 4)


def _fifth(b: Block, base: int, i: Position) -> Term:
    return b.bits((i >> 3) + base, i & 7, 1) << 4


def _q4_0(b: Block, i: Position) -> Expr:
    return _mul(_float(_nibble(b, 2, i) - 8), b.half(0))


def _q4_1(b: Block, i: Position) -> Expr:
    return Apply("add", (_mul(_float(_nibble(b, 4, i)), b.half(0)), b.half(1)), F32)


def _q5_0(b: Block, i: Position) -> Expr:
    return _mul(_float((_nibble(b, 6, i) | _fifth(b, 2, i)) - 16), b.half(0))


def _q5_1(b: Block, i: Position) -> Expr:
    return Apply("add", (_mul(_float(_nibble(b, 8, i) | _fifth(b, 4, i)), b.half(0)), b.half(1)), F32)


def _q8_0(b: Block, i: Position) -> Expr:
    return _mul(_float(b.signed((i & 31) + 2)), b.half(0))


def _pair(b: Block, base: int, i: Position) -> Term:
    """Two bits: 128 positions are four planes of 32 bytes."""
    return b.bits(((i >> 7) << 5) + (i & 31) + base, (i >> 5 & 3) << 1, 2)


def _q2_k(b: Block, i: Position) -> Expr:
    s = i >> 4
    scale = b.keep(("scale", s.of), lambda: _mul(b.half(40), _float(b.bits(s, 0, 4))))
    least = b.keep(("min", s.of), lambda: _mul(b.half(41), _float(b.bits(s, 4, 4))))
    return Apply("sub", (_mul(_float(_pair(b, 16, i)), scale), least), F32)


def _q3_k(b: Block, i: Position) -> Expr:
    s = i >> 4

    def scale() -> Expr:
        low, high = b.bits((s & 7) + 96, (s >> 3) << 2, 4), b.bits((s & 3) + 104, (s >> 2) << 1, 2)
        return _mul(b.half(54), _float((low | high << 4) - 32))

    high = b.bits(i & 31, i >> 5, 1) << 2
    return _mul(_float((_pair(b, 32, i) | high) - 4), b.keep(("scale", s.of), scale))


def _k_scales(b: Block, i: Position) -> tuple[Expr, Expr]:
    """A 6-bit scale and minimum: four whole in the low bits of bytes 4-7 and 8-11, four as bytes 12-15 + top bits."""
    j = i >> 5
    late, at = j >> 2, j & 3

    def scale() -> Expr:
        split = b.bits(at + 12, 0, 4) | b.bits(at + 4, 6, 2) << 4
        return _mul(b.half(0), _float(_where(late, split, b.bits(at + 4, 0, 6))))

    def least() -> Expr:
        split = b.bits(at + 12, 4, 4) | b.bits(at + 8, 6, 2) << 4
        return _mul(b.half(1), _float(_where(late, split, b.bits(at + 8, 0, 6))))

    return b.keep(("scale", j.of), scale), b.keep(("min", j.of), least)


def _k_nibble(b: Block, base: int, i: Position) -> Term:
    """Four bits: 64 positions are 32 bytes, low halves first."""
    return b.bits(((i >> 6) << 5) + (i & 31) + base, (i >> 5 & 1) << 2, 4)


def _q4_k(b: Block, i: Position) -> Expr:
    scale, least = _k_scales(b, i)
    return Apply("sub", (_mul(_float(_k_nibble(b, 16, i)), scale), least), F32)


def _q5_k(b: Block, i: Position) -> Expr:
    scale, least = _k_scales(b, i)
    q = _k_nibble(b, 48, i) | b.bits((i & 31) + 16, i >> 5, 1) << 4
    return Apply("sub", (_mul(_float(q), scale), least), F32)


def _q6_k(b: Block, i: Position) -> Expr:
    s = i >> 4
    scale = b.keep(("scale", s.of), lambda: _mul(b.half(104), _float(b.signed(s + 192))))
    low = b.bits(((i >> 7) << 6) + (i & 63), (i >> 6 & 1) << 2, 4)
    return _mul(_float((low | _pair(b, 128, i) << 4) - 32), scale)


def _q8_k(b: Block, i: Position) -> Expr:
    return _mul(_float(b.signed((i & 255) + 4)), b.single(0))


DECODERS: dict[str, Decoder] = {
    "q4_0": _q4_0, "q4_1": _q4_1, "q5_0": _q5_0, "q5_1": _q5_1, "q8_0": _q8_0, "q2_k": _q2_k, "q3_k": _q3_k,
    "q4_k": _q4_k, "q5_k": _q5_k, "q6_k": _q6_k, "q8_k": _q8_k,
}  # fmt: skip


def decode(storage: DType, block: Block, position: Position) -> Expr:
    """The number at a position."""
    if storage.name not in DECODERS:  # one with tables, or one that nobody knows
        from rlx.lir.grid_blocks import DECODERS as WITH_TABLES  # which needs this module

        DECODERS.update(WITH_TABLES)
    if storage.name not in DECODERS:
        raise LowerError(f"blocks of {storage}: no kernel reads them", hint="known: " + ", ".join(DECODERS))
    return DECODERS[storage.name](block, position)


# -- kernels that the matmul calls ----------------------------------------------------------------------------------
# Weights lie as [panel][block][vector of columns][halves and words][lane]: all columns of a panel take a block of x
# before the next comes, so that x is read once a panel, and weights in order. All kernels of a type take the same
# words: two views of a panel, two of the rows of x, what is written; then `blocks` to go over, `x_row` elements from
# one row of x to the next.
ARGUMENTS = ("blocks", "x_row")


def block_number(vector: Expr, width: int, lanes: int) -> Expr:
    """The number of block `u` of a vector of columns."""
    return Apply("add", (Apply("mul", (Index("u"), Const(width // lanes, I64)), I64), vector), I64)


def over_panel(width: int, lanes: int, body: tuple[Stmt, ...]) -> For:
    """`body` for each block `u`, vector `v` and column `c` of a panel, as they lie. There is one unit."""
    columns = For("v", width // lanes, (For("c", lanes, body, vector=True),))
    return For("all", 1, (For("u", Arg("blocks"), (columns,)),))


def _grouped(storage: DType) -> tuple[Term, int, int]:
    """How a block is walked: the group as a term, its length as a power of two, and how many groups there are."""
    length = min(storage.block, GROUP)
    groups = storage.block // length
    return (Term(Index("g")) if groups > 1 else Term(0)), length.bit_length() - 1, groups


def _over_groups(groups: int, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """`body` for each group `g` of a block."""
    return (For("g", groups, tuple(body)),) if groups > 1 else tuple(body)


def unpack_kernel(storage: DType, width: int, lanes: int) -> LoopKernel:
    """Blocks of one panel as f32 rows: out[k][width]."""
    outer, span, groups = _grouped(storage)
    block = Block(Panels(storage, lanes, block_number(Index("v"), width, lanes)))
    body = block.stmts
    for inner in range(1 << span):
        value = decode(storage, block, Position(outer, span, inner))
        row = ((Index("u"), storage.block * width), (outer.expr(I64), width << span), (Const(inner, I64), width))
        body.append(Store(4, (*row, (Index("v"), lanes), (Index("c"), 1)), value))
    params = (*panel_params(storage), Param("x_words", I32), Param("x", F32), Param("out", F32, True))
    return LoopKernel(f"unpack_{storage}", params, ARGUMENTS, over_panel(width, lanes, _over_groups(groups, body)))


def panel_params(storage: DType) -> tuple[Param, Param]:
    """The two views of a panel."""
    return Param("words", I32), Param("halves", F16) if storage.unit == UNIT else Param("bytes", U8)


def dot_kernel(storage: DType, width: int, target: Target, rows: int) -> LoopKernel:
    """sums[rows][width] += x[rows][k] · blocks of one panel: one chain of multiply-adds over k a sum.

    There is one unit, with all columns, so that enough chains run side by side; a weight is unpacked once for all rows.
    """
    outer, span, groups = _grouped(storage)
    lanes = target.lanes(4)
    vectors = range(width // lanes)
    cells = [(r, v) for v in vectors for r in range(rows)]
    place = {(r, v): ((Index("c"), 1), (Const(r * width + v * lanes, I64), 1)) for r, v in cells}
    blocks = [Block(Panels(storage, lanes, block_number(Const(v, I64), width, lanes)), prefix=f"c{v}") for v in vectors]
    body: list[Stmt] = [Let(f"sum{r}_{v}_0", Ref(f"sum{r}_{v}", F32)) for r, v in cells]
    for inner in range(1 << span):
        at: Place = ((Index("u"), storage.block), (outer.expr(I64), 1 << span), (Const(inner, I64), 1))
        for r in range(rows):
            here = (*at, (Const(r, I64), Arg("x_row"))) if r else at
            body.append(Let(f"x{r}_{inner}", Load(3, here, F32)))
        for v in vectors:
            before = len(blocks[v].stmts)
            weight = decode(storage, blocks[v], Position(outer, span, inner))
            body += [*blocks[v].stmts[before:], Let(f"w{v}_{inner}", weight)]
            for r in range(rows):
                x, w, total = (Ref(n, F32) for n in (f"x{r}_{inner}", f"w{v}_{inner}", f"sum{r}_{v}_{inner}"))
                body.append(Let(f"sum{r}_{v}_{inner + 1}", multiply_add(x, w, total, target)))
    body += [Assign(f"sum{r}_{v}", Ref(f"sum{r}_{v}_{1 << span}", F32)) for r, v in cells]
    params = (*panel_params(storage), Param("x_words", I32), Param("x", F32), Param("sums", F32, True))
    columns: tuple[Stmt, ...] = (
        *(Var(f"sum{r}_{v}", Load(4, place[r, v], F32)) for r, v in cells),
        For("u", Arg("blocks"), _over_groups(groups, body)),
        *(Store(4, place[r, v], Ref(f"sum{r}_{v}", F32)) for r, v in cells),
    )
    root = For("all", 1, (For("c", lanes, columns, vector=True),))
    return LoopKernel(f"dot_{storage}_{rows}", params, ARGUMENTS, root)


def multiply_add(x: Expr, y: Expr, total: Expr, target: Target) -> Expr:
    """x · y + total, rounded once where the target does that."""
    if target.has_fma:
        return Apply("fma", (x, y, total), F32)
    return Apply("add", (_mul(x, y), total), F32)

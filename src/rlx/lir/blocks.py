"""Packed blocks as expressions: the number at a position of a block, from its 16-bit units.

Every packed type is a whole number of units long, so blocks move and interleave without anybody knowing what is inside.
A decoder is written once, for a `Position` that is known (unrolled kernels: offsets and shifts become constants), an
index (one lane an element) or a mixture of both. Bits are those of ggml: widen, then multiply and add in its order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from rlx.dtypes import BOOL, F16, F32, I16, I32, I64, DType
from rlx.errors import LowerError
from rlx.lir.loops import Apply, Arg, Const, Expr, For, Index, Let, Load, LoopKernel, Param, Ref, Stmt, Store
from rlx.target import Target

UNIT = 2  # bytes
GROUP = 64  # positions that are unrolled at most; longer blocks loop over groups of them
RECENT = 4  # units that stay in registers

Place = tuple[tuple[Expr, int | Arg], ...]


def units_of(storage: DType) -> int:
    """16-bit units of a block."""
    return storage.size // UNIT


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


# -- reading a block ------------------------------------------------------------------------------------------------
@dataclass
class Block:
    """A block under decoding. What is read or computed again and again is named by a `Let` in `stmts`, if asked."""

    unit_at: Callable[[Expr], Place]
    units: int  # the parameter that is read as i16
    halves: int  # the same memory read as f16
    lets: bool = True
    prefix: str = ""
    stmts: list[Stmt] = field(default_factory=list)
    _kept: dict[object, Expr] = field(default_factory=dict)
    _recent: dict[object, Expr] = field(default_factory=dict)

    def half(self, unit: int) -> Expr:
        """The f16 at a unit, widened."""
        load = Load(self.halves, self.unit_at(Const(unit, I64)), F16)
        return self.keep(("half", unit), lambda: Apply("cast", (load,), F32))

    def single(self, unit: int) -> Expr:
        """The f32 at two units, the low one first."""

        def joined() -> Expr:
            low, high = (Term(self._word(Term(u))) for u in (unit, unit + 1))
            return Apply("bits", ((low & 0xFFFF | high << 16).expr(I32),), F32)

        return self.keep(("single", unit), joined)

    def keep(self, key: object, make: Callable[[], Expr]) -> Expr:
        """A value that is computed once a block or group."""
        if key not in self._kept:
            self._kept[key] = self._let(make())
        return self._kept[key]

    def bits(self, byte: Term, first: Term | int, width: int) -> Term:
        """`width` bits of a byte, from bit `first` on."""
        word = Term(self._word(byte >> 1))
        return word >> (((byte & 1) << 3) + first) & (1 << width) - 1

    def signed(self, byte: Term) -> Term:
        """A byte as a signed number."""
        if not isinstance(byte.of, int):
            return (self.bits(byte, 0, 8) + 128 & 255) - 128
        word = Term(self._word(byte >> 1))  # comes sign-extended
        return word >> 8 if byte.of & 1 else word << 24 >> 24

    def _word(self, unit: Term) -> Expr:
        found = self._recent.pop(unit.of, None)
        if found is None:
            load = Load(self.units, self.unit_at(unit.expr(I64)), I16)
            found = self._let(Apply("cast", (load,), I32))
        self._recent[unit.of] = found
        if len(self._recent) > RECENT:
            del self._recent[next(iter(self._recent))]
        return found

    def _let(self, value: Expr) -> Expr:
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
    if storage.name not in DECODERS:
        raise LowerError(f"blocks of {storage}: no kernel reads them", hint="known: " + ", ".join(DECODERS))
    return DECODERS[storage.name](block, position)


# -- kernels that the matmul calls ----------------------------------------------------------------------------------
# Weights lie as [panel][block][unit][column]: one vector of columns after the other, unit by unit.
def _grouped(storage: DType) -> tuple[Term, int, int]:
    """How a block is walked: the group as a term, its length as a power of two, and how many groups there are."""
    length = min(storage.block, GROUP)
    groups = storage.block // length
    return (Term(Index("g")) if groups > 1 else Term(0)), length.bit_length() - 1, groups


def _over_blocks(groups: int, body: For) -> For:
    return For("u", Arg("blocks"), (For("g", groups, (body,)) if groups > 1 else body,))


def unpack_kernel(storage: DType, width: int) -> LoopKernel:
    """Blocks of one panel as f32 rows: out[k][width]. A unit is a block."""
    outer, span, groups = _grouped(storage)
    block = Block(_unit_place(storage, width), units=0, halves=1)
    body = block.stmts
    for inner in range(1 << span):
        value = decode(storage, block, Position(outer, span, inner))
        row = ((Index("u"), storage.block * width), (outer.expr(I64), width << span), (Const(inner, I64), width))
        body.append(Store(2, (*row, (Index("c"), 1)), value))
    params = (Param("units", I16), Param("halves", F16), Param("out", F32, True))
    root = _over_blocks(groups, For("c", width, tuple(body), vector=True))
    return LoopKernel(f"unpack_{storage}", params, (), root)


def dot_kernel(storage: DType, width: int, target: Target, rows: int) -> LoopKernel:
    """sums[rows][width] += x[rows][k] · blocks of one panel: one chain of multiply-adds over k a sum.

    A unit is a block. The rows of x lie `x_row` elements apart; a weight is unpacked once for all of them.
    """
    outer, span, groups = _grouped(storage)
    lanes = target.lanes(4)
    vectors = range(width // lanes)
    cells = [(r, v) for v in vectors for r in range(rows)]
    place = {(r, v): ((Index("c"), 1), (Const(r * width + v * lanes, I64), 1)) for r, v in cells}
    blocks = [Block(_unit_place(storage, width, v * lanes), units=0, halves=1, prefix=f"c{v}") for v in vectors]
    body: list[Stmt] = [Let(f"sum{r}_{v}_0", Load(3, place[r, v], F32)) for r, v in cells]
    for inner in range(1 << span):
        at: Place = ((Index("u"), storage.block), (outer.expr(I64), 1 << span), (Const(inner, I64), 1))
        for r in range(rows):
            here = (*at, (Const(r, I64), Arg("x_row"))) if r else at
            body.append(Let(f"x{r}_{inner}", Load(2, here, F32)))
        for v in vectors:
            before = len(blocks[v].stmts)
            weight = decode(storage, blocks[v], Position(outer, span, inner))
            body += [*blocks[v].stmts[before:], Let(f"w{v}_{inner}", weight)]
            for r in range(rows):
                x, w, total = (Ref(n, F32) for n in (f"x{r}_{inner}", f"w{v}_{inner}", f"sum{r}_{v}_{inner}"))
                if target.has_fma:
                    more: Expr = Apply("fma", (x, w, total), F32)
                else:
                    more = Apply("add", (_mul(x, w), total), F32)
                body.append(Let(f"sum{r}_{v}_{inner + 1}", more))
    body += [Store(3, place[r, v], Ref(f"sum{r}_{v}_{1 << span}", F32)) for r, v in cells]
    params = (Param("units", I16), Param("halves", F16), Param("x", F32), Param("sums", F32, True))
    root = _over_blocks(groups, For("c", lanes, tuple(body), vector=True))
    return LoopKernel(f"dot_{storage}_{rows}", params, ("x_row",), root)


def _unit_place(storage: DType, width: int, column: int = 0) -> Callable[[Expr], Place]:
    def place(unit: Expr) -> Place:
        return ((Index("u"), units_of(storage) * width), (unit, width), (Index("c"), 1), (Const(column, I64), 1))

    return place

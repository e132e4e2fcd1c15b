"""Products of packed weights and 8-bit activations, in whole numbers.

A weight is `scale · code - minimum`: codes are small unsigned numbers, of which a word holds four, so that the inner
loop is `dot_u8` alone; scales and minima come in once a run of `step` codes. Sums of whole numbers are exact, and what
is added in f32 is added block by block in one order, so bits depend neither on the number of rows nor on the target.

x is words that `activation_blocks` makes (see `ops/activations.py`). Few rows are multiplied straight from panels; for
many, `codes_kernel` takes a piece of a panel apart once and `tile_kernel` goes over it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rlx.dtypes import F32, I32, I64, DType
from rlx.lir.blocks import (
    ARGUMENTS,
    Block,
    Panels,
    Place,
    Term,
    block_number,
    multiply_add,
    over_panel,
    panel_params,
    signed_word,
)
from rlx.lir.grid_blocks import power_scale
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
from rlx.ops.activations import Activations, activations_for
from rlx.target import Target

DOT_ROWS = 4  # rows of x up to which codes do not go through memory
TILE_ROWS = 8  # rows of a tile: as many sums in f32, and as many in whole numbers, as registers hold

NIBBLES = 0x0F0F0F0F
UPPER = signed_word(NIBBLES << 4)
PAIRS = 0x03030303
TOP_PAIRS = signed_word(PAIRS << 6)
SIXES = 0x3F3F3F3F
ONES = 0x01010101
SPREAD = 0x00204081  # times four bits: each in the lowest bit of a byte


# -- the types ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Codes:
    """How blocks of a type are whole numbers. Expressions hold one i32, or four bytes, a column."""

    step: int  # codes that share a scale
    offset: int  # what is taken off each code
    word: Callable[[Block, int], Term]  # four codes, the first of which is at 4 times the number
    scale: Callable[[Block, int], Term] | None = None  # a whole number for each run, beside the f16 of the block
    minima: Callable[[Block], list[Term]] | None = None  # four in a word, beside the other f16
    plus: bool = False  # the other f16 is added to each weight
    halves: tuple[int, ...] = (0,)
    unit: Callable[[Block], Expr] | None = None  # the scale of the block, where that is not an f16
    # Four codes times 2 to the power of `raised`, where they are the upper bits of bytes: an operation less than to
    # move them down.
    upper: Callable[[Block, int], Term | None] = lambda b, t: None
    raised: int = 4

    def floats(self, b: Block) -> list[Expr]:
        """What whole numbers are multiplied by at the end of a block, and the other f16 if there is one."""
        return [b.half(unit) for unit in self.halves] if self.unit is None else [self.unit(b)]

    @property
    def dot(self) -> str:
        return "dot_u8" if self.offset == 128 else "dot_u7"


def _w(b: Block, index: int) -> Term:
    return Term(b.word(Term(index)))


def _nibbles(b: Block, first: int, t: int) -> Term:
    """Sixteen low halves, then sixteen high ones."""
    return _w(b, first + t % 4) >> 4 * (t // 4) & NIBBLES


def _upper(b: Block, t: int) -> Term | None:
    return _w(b, t % 4) & UPPER if t // 4 else None


def _fifth_bits(b: Block, t: int) -> Term:
    bits = Term(b.keep("fifth", lambda: b.source.word(Term(0)))) >> 4 * t & 15
    return Term(Apply("mul", (bits.expr(I32), Const(SPREAD, I32)), I32)) << 4 & ONES << 4


def _flipped(b: Block, t: int) -> Term:
    """Signed bytes with 128 added."""
    return Term(Apply("xor", (_w(b, t).expr(I32), Const(signed_word(0x80808080), I32)), I32))


def _k_nibbles(b: Block, first: int, t: int) -> Term:
    """64 codes are 32 bytes: low halves, then high ones."""
    run = t // 8
    return _w(b, first + 8 * (run // 2) + t % 8) >> 4 * (run % 2) & NIBBLES


def _k_upper(b: Block, first: int, t: int) -> Term | None:
    run = t // 8
    return _w(b, first + 8 * (run // 2) + t % 8) & UPPER if run % 2 else None


def _k_fifth_bits(b: Block, t: int) -> Term:
    return Term(b.keep(("fifth", t % 8), lambda: b.source.word(Term(3 + t % 8)))) >> t // 8 & ONES


def _six_bits(b: Block, group: int, which: int) -> Term:
    """Four scales (0) or minima (1) of 6 bits: the first four lie together, the others are split."""

    def word(index: int) -> Term:
        return Term(b.keep(("scales", index), lambda: b.source.word(Term(index))))

    def made() -> Expr:
        if group == 0:
            return (word(which) & SIXES).expr(I32)
        return (word(2) >> 4 * which & NIBBLES | (word(which) >> 6 & PAIRS) << 4).expr(I32)

    return Term(b.keep(("six", group, which), made))


def _k_scale(b: Block, run: int) -> Term:
    return _six_bits(b, run // 4, 0) >> 8 * (run % 4) & 63


def _k_minima(b: Block) -> list[Term]:
    return [_six_bits(b, group, 1) for group in range(2)]


def _six_bit_words(b: Block, t: int) -> list[Term]:
    """The words that four codes of 6 bits are in: one, or for each fourth run of codes the top bits of three."""
    run, at = divmod(t, 4)
    group, which = divmod(run, 4)
    return [_w(b, 4 + 12 * group + 4 * i + at) for i in (range(3) if which == 3 else (which,))]


def _six_bit_codes(b: Block, t: int) -> Term:
    first, *others = _six_bit_words(b, t)
    if not others:
        return first & SIXES
    second, third = others
    return first >> 6 & PAIRS | second >> 4 & PAIRS << 2 | third >> 2 & PAIRS << 4


def _six_bit_upper(b: Block, t: int) -> Term | None:
    first, *others = _six_bit_words(b, t)
    if not others:
        return None
    second, third = others
    # Bits are chosen before the lowest two are cleared: that is one operation a choice.
    high = third & TOP_PAIRS | second >> 2 & ~TOP_PAIRS
    return (high & UPPER | first >> 4 & NIBBLES) & signed_word(SIXES << 2)


def _fp4_codes(b: Block, t: int) -> Term:
    """Sixteen more than 0, 1, 2, 3, 4, 6, 8, 12 or what is below zero by that: a sign, two bits of exponent, one more.

    From 4 on a number has more than its bits say: one for the last bit, two for the one before, two more for both.
    """
    bits = Term(b.let(_nibbles(b, 0, t).expr(I32)))
    large, sign = Term(b.let((bits >> 2 & ONES).expr(I32))), Term(b.let((bits >> 3 & ONES).expr(I32)))
    last, second = (Term(b.let((bits >> n & large).expr(I32))) for n in range(2))
    size = (bits & 0x07070707) + last + (second << 1) + ((last & second) << 1)
    # Per byte: s becomes 31 - s where the sign is set, so that taking 15 off that and adding 16 to others is the same.
    flip = b.let(((sign << 5) - sign).expr(I32))
    turned = Term(Apply("xor", (size.expr(I32), flip), I32))
    return turned + 16 * ONES - Term(flip)


CODES = {
    "q4_0": Codes(32, 8, lambda b, t: _nibbles(b, 0, t), upper=_upper),
    "q4_1": Codes(32, 0, lambda b, t: _nibbles(b, 0, t), plus=True, halves=(0, 1), upper=_upper),
    "q5_0": Codes(32, 16, lambda b, t: _nibbles(b, 1, t) | _fifth_bits(b, t)),
    "q5_1": Codes(32, 0, lambda b, t: _nibbles(b, 1, t) | _fifth_bits(b, t), plus=True, halves=(0, 1)),
    "q8_0": Codes(32, 128, _flipped),
    "q4_k": Codes(
        32, 0, lambda b, t: _k_nibbles(b, 3, t), _k_scale, _k_minima, halves=(0, 1),
        upper=lambda b, t: _k_upper(b, 3, t),
    ),
    "q5_k": Codes(
        32, 0, lambda b, t: _k_nibbles(b, 11, t) | _k_fifth_bits(b, t) << 4, _k_scale, _k_minima, halves=(0, 1)
    ),
    "q6_k": Codes(
        16, 32, _six_bit_codes, lambda b, run: b.signed(Term(run)), halves=(104,), upper=_six_bit_upper, raised=2
    ),
    "mxfp4": Codes(32, 16, _fp4_codes, unit=power_scale),
}  # fmt: skip


# -- one block of a vector of columns ---------------------------------------------------------------------------------
@dataclass(frozen=True)
class _Rows:
    """The rows of x: block `u` of each, as words and as floats."""

    form: Activations
    count: int

    def load(self, param: int, row: int, *at: tuple[Expr, int | Arg]) -> Expr:
        place: Place = ((Index("u"), self.form.words), *at)
        if row:
            place = (*place, (Const(row, I64), Arg("x_row")))
        return Load(param, place, I32 if param == 2 else F32)

    def word(self, row: int, index: int, *more: tuple[Expr, int | Arg]) -> Expr:
        return self.load(2, row, (Const(index, I64), 1), *more)

    def number(self, row: int, index: int) -> Expr:
        return self.load(3, row, (Const(index, I64), 1))


def _sum(rows: _Rows, codes: Codes, r: int, run: int | Expr) -> Expr:
    """Where the sum of a run starts: what its codes have too much, taken off."""
    if codes.offset == 0:
        return Const(0, I32)
    at = rows.form.sums
    place: tuple[tuple[Expr, int | Arg], ...] = ()
    if rows.form.block > 32:
        if isinstance(run, int):
            at += run * (codes.step // 16)
        else:
            place = ((run, codes.step // 16),)
    return (Term(rows.word(r, at, *place)) << codes.offset.bit_length() - 1).expr(I32)


def _finish(
    rows: _Rows, codes: Codes, target: Target, wholes: Sequence[Expr], scale: Expr, other: Expr | None,
    minima: Sequence[Expr],
) -> list[Stmt]:  # fmt: skip
    """The end of a block: whole numbers times scales, added to the sums of the rows."""
    stmts: list[Stmt] = []
    form = rows.form
    for r in range(rows.count):
        unit = Let(f"d{r}", rows.number(r, form.scale))
        both = Apply("mul", (scale, Ref(unit.name, F32)), F32)
        total = multiply_add(Apply("cast", (wholes[r],), F32), both, Ref(f"sum{r}", F32), target)
        stmts += [unit, Let(f"t{r}", total)]
        total = Ref(f"t{r}", F32)
        if codes.plus:
            assert other is not None
            total = multiply_add(other, rows.number(r, form.total), total, target)
        if minima:
            assert other is not None
            parts: list[Expr] = []
            for base in (form.high, form.low):
                part: Expr = Const(0, I32)
                for i, four in enumerate(minima):
                    part = Apply("dot_u7", (part, four, rows.word(r, base + i)), I32)
                parts.append(part)
            least = (Term(parts[0]) << 7) + Term(parts[1])
            below = Apply("neg", (Apply("mul", (other, Ref(unit.name, F32)), F32),), F32)
            total = multiply_add(Apply("cast", (least.expr(I32),), F32), below, total, target)
        stmts.append(Assign(f"sum{r}", total))
    return stmts


# -- kernels --------------------------------------------------------------------------------------------------------
def dot_kernel(storage: DType, width: int, target: Target, count: int) -> LoopKernel:
    """sums[count][width] += x · blocks of one panel, codes in registers."""
    codes, lanes = CODES[storage.name], target.lanes(4)
    rows = _Rows(activations_for(storage.block), count)
    block = Block(Panels(storage, lanes, block_number(Index("v"), width, lanes)))
    stmts = block.stmts
    runs, words = storage.block // codes.step, codes.step // 4
    wholes: list[Expr] = [Const(0, I32)] * count
    for run in range(runs):
        sums = [_sum(rows, codes, r, run) for r in range(count)]
        uppers: list[Expr] = [Const(0, I32)] * count
        for t in range(run * words, (run + 1) * words):
            upper = codes.upper(block, t) if target.has_dot else None  # without it, eight bits cost more than seven
            four = block.let((upper or codes.word(block, t)).expr(I32))
            into, dot = (sums, codes.dot) if upper is None else (uppers, "dot_u8")
            for r in range(count):
                into[r] = block.let(Apply(dot, (into[r], four, rows.word(r, rows.form.codes + t)), I32))
        if isinstance(uppers[0], Ref):
            sums = [
                block.let((Term(x) + (Term(y) >> codes.raised)).expr(I32)) for x, y in zip(sums, uppers, strict=True)
            ]
        if codes.scale is None:
            wholes = sums
        else:
            scale = block.let(codes.scale(block, run).expr(I32))
            for r in range(count):
                more = Term(Apply("mul", (sums[r], scale), I32))
                wholes[r] = block.let((Term(wholes[r]) + more if isinstance(wholes[r], Ref) else more).expr(I32))
    minima = [m.expr(I32) for m in codes.minima(block)] if codes.minima else []
    floats = codes.floats(block)
    other = floats[1] if len(floats) > 1 else None
    body = (*stmts, *_finish(rows, codes, target, wholes, floats[0], other, minima))
    root = over_panel(width, lanes, _summed(width, lanes, count, body))
    return _kernel(f"dot_{storage}_int_{count}", panel_params(storage), root)


@dataclass(frozen=True)
class _Apart:
    """A block of `lanes` columns taken apart: words of codes, scales of runs, minima, then one or two floats."""

    storage: DType

    @property
    def codes(self) -> Codes:
        return CODES[self.storage.name]

    @property
    def scales(self) -> int:
        return self.storage.block // 4

    @property
    def minima(self) -> int:
        return self.scales + (self.storage.block // self.codes.step if self.codes.scale else 0)

    @property
    def floats(self) -> int:
        return self.minima + (2 if self.codes.minima else 0)

    @property
    def words(self) -> int:
        return self.floats + len(self.codes.halves)

    def at(self, lanes: int, word: int, *more: tuple[Expr, int | Arg]) -> Place:
        number = Apply("add", (Apply("mul", (Index("v"), Arg("blocks")), I64), Index("u")), I64)
        return ((number, self.words * lanes), (Const(word, I64), lanes), (Index("c"), 1), *more)


def apart_words(storage: DType) -> int:
    """Words that a block of one column is in scratch."""
    return _Apart(storage).words


def codes_kernel(storage: DType, width: int, lanes: int) -> LoopKernel:
    """Blocks of one panel taken apart in scratch."""
    apart, codes = _Apart(storage), CODES[storage.name]
    block = Block(Panels(storage, lanes, block_number(Index("v"), width, lanes)))
    stmts = block.stmts
    for t in range(apart.scales):
        four = codes.word(block, t).expr(I32)
        stmts.append(Store(3, apart.at(lanes, t), four))
    if codes.scale is not None:
        for run in range(storage.block // codes.step):
            scale = codes.scale(block, run).expr(I32)
            stmts.append(Store(3, apart.at(lanes, apart.scales + run), scale))
    for i, four_minima in enumerate(codes.minima(block) if codes.minima else []):
        stmts.append(Store(3, apart.at(lanes, apart.minima + i), four_minima.expr(I32)))
    for i, number in enumerate(codes.floats(block)):
        stmts.append(Store(4, apart.at(lanes, apart.floats + i), number))
    params = (*panel_params(storage), Param("x_words", I32), Param("codes", I32, True), Param("numbers", F32, True))
    return LoopKernel(f"codes_{storage}", params, ARGUMENTS, over_panel(width, lanes, tuple(stmts)))


def tile_kernel(storage: DType, width: int, target: Target, count: int) -> LoopKernel:
    """sums[count][width] += x · blocks that `codes_kernel` took apart. A unit is a vector of columns."""
    apart, codes, lanes = _Apart(storage), CODES[storage.name], target.lanes(4)
    rows = _Rows(activations_for(storage.block), count)
    runs, words = storage.block // codes.step, codes.step // 4
    run: int | Expr = 0 if runs == 1 else Index("g")

    def moved(stride: int) -> tuple[tuple[Expr, int | Arg], ...]:
        return () if isinstance(run, int) else ((run, stride),)

    inner: list[Stmt] = []
    sums = [_sum(rows, codes, r, run) for r in range(count)]
    for t in range(words):
        inner.append(Let(f"w{t}", Load(0, apart.at(lanes, t, *moved(words * lanes)), I32)))
        for r in range(count):
            x = rows.word(r, rows.form.codes + t, *moved(words))
            inner.append(Let(f"s{r}_{t}", Apply(codes.dot, (sums[r], Ref(f"w{t}", I32), x), I32)))
            sums[r] = Ref(f"s{r}_{t}", I32)
    body: list[Stmt]
    if codes.scale is None:
        body, wholes = inner, sums
    else:
        inner.append(Let("scale", Load(0, apart.at(lanes, apart.scales, *moved(lanes)), I32)))
        wholes = [Ref(f"whole{r}", I32) for r in range(count)]
        for r in range(count):
            more = Apply("mul", (sums[r], Ref("scale", I32)), I32)
            inner.append(Assign(f"whole{r}", Apply("add", (wholes[r], more), I32)))
        body = [*(Var(f"whole{r}", Const(0, I32)) for r in range(count)), For("g", runs, tuple(inner))]
    floats = [Load(1, apart.at(lanes, apart.floats + i), F32) for i in range(len(codes.halves))]
    minima = [Load(0, apart.at(lanes, apart.minima + i), I32) for i in range(2 if codes.minima else 0)]
    body += [Let(f"f{i}", value) for i, value in enumerate(floats)] + [Let(f"m{i}", v) for i, v in enumerate(minima)]
    other = Ref("f1", F32) if len(floats) > 1 else None
    least = [Ref(f"m{i}", I32) for i in range(len(minima))]
    body += _finish(rows, codes, target, wholes, Ref("f0", F32), other, least)
    params = (Param("codes", I32), Param("numbers", F32))
    columns = _summed(width, lanes, count, (For("u", Arg("blocks"), tuple(body)),))
    root = For("v", width // lanes, (For("c", lanes, columns, vector=True),))
    return _kernel(f"tile_{storage}_{count}", params, root)


def _summed(width: int, lanes: int, count: int, body: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """`body` with the sums of a vector of columns in registers."""
    place = [((Const(r * width, I64), 1), (Index("v"), lanes), (Index("c"), 1)) for r in range(count)]
    return (
        *(Var(f"sum{r}", Load(4, place[r], F32)) for r in range(count)),
        *body,
        *(Store(4, place[r], Ref(f"sum{r}", F32)) for r in range(count)),
    )


def _kernel(name: str, source: tuple[Param, ...], root: For) -> LoopKernel:
    params = (*source, Param("x_words", I32), Param("x", F32), Param("sums", F32, True))
    return LoopKernel(name, params, ARGUMENTS, root)

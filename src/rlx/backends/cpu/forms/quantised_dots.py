"""Integer kernels for quantised weights and 8-bit activations.

A weight is `scale · code - minimum`: codes are small unsigned integers, four per word, so that the inner loop is
`dot_u8` alone; scales and minima are applied once per run of `step` codes. Integer sums are exact, and f32 sums are
accumulated block by block in one order, so bits depend neither on the number of rows nor on the target.

x is `ActivationWords`. Few rows are multiplied straight from panels; for many, `codes_kernel` unpacks a piece of a
panel once and `tile_kernel` multiplies by it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from rlx.backends.cpu.forms.panels import ARGUMENTS, Panels, block_number, multiply_add, over_panel, panel_params
from rlx.backends.cpu.packing.quantised_activations import Activations, activations_for
from rlx.backends.cpu.quant_blocks import Blocks
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import F32, I32, I64, DType
from rlx.fast_dataclass import dataclass
from rlx.formats.iq_blocks import power_scale
from rlx.formats.quant_blocks import signed_word
from rlx.lir.forms.quant_blocks import Block
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
    Place,
    Ref,
    Stmt,
    Store,
    Var,
)

DOT_ROWS = 4  # rows of x up to which codes do not go through memory
TILE_SUMS = 12  # vectors of sums per tile: twice as many, and their operands, fill 32 registers

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
    """The integer form of a block type. Expressions hold one i32, or four bytes, per column."""

    step: int  # codes that share a scale
    offset: int  # zero point, subtracted from each code
    word: Callable[[Block, int], Expr]  # four codes, the first of which is at 4 times the index
    scale: Callable[[Block, int], Expr] | None = None  # an integer per run, besides the f16 of the block
    minima: Callable[[Block], list[Expr]] | None = None  # four per word, besides the other f16
    plus: bool = False  # whether the other f16 is added to each weight
    halves: tuple[int, ...] = (0,)
    unit: Callable[[Block], Expr] | None = None  # the scale of the block, if it is not an f16
    # Four codes times 2 to the power of `raised`, where they are the upper bits of bytes: saves the operation that
    # would move them down.
    upper: Callable[[Block, int], Expr | None] = lambda b, t: None
    raised: int = 4

    def floats(self, b: Block) -> list[Expr]:
        """The factor of integers at the end of a block, and the other f16 if there is one."""
        return [b.half(unit) for unit in self.halves] if self.unit is None else [self.unit(b)]

    @property
    def dot(self) -> str:
        return "dot_u8" if self.offset == 128 else "dot_u7"


def _nibbles(b: Block, first: int, t: int) -> Expr:
    """Sixteen low halves, then sixteen high ones."""
    return b.word(first + t % 4) >> 4 * (t // 4) & NIBBLES


def _upper(b: Block, t: int) -> Expr | None:
    return b.word(t % 4) & UPPER if t // 4 else None


def _fifth_bits(b: Block, t: int) -> Expr:
    bits = b.keep("fifth", lambda: b.source.word(0)) >> 4 * t & 15
    return bits * SPREAD << 4 & ONES << 4


def _flipped(b: Block, t: int) -> Expr:
    """Signed bytes plus 128."""
    return b.word(t) ^ signed_word(0x80808080)


def _k_nibbles(b: Block, first: int, t: int) -> Expr:
    """64 codes in 32 bytes: low halves, then high ones."""
    run = t // 8
    return b.word(first + 8 * (run // 2) + t % 8) >> 4 * (run % 2) & NIBBLES


def _k_upper(b: Block, first: int, t: int) -> Expr | None:
    run = t // 8
    return b.word(first + 8 * (run // 2) + t % 8) & UPPER if run % 2 else None


def _k_fifth_bits(b: Block, t: int) -> Expr:
    return b.keep(("fifth", t % 8), lambda: b.source.word(3 + t % 8)) >> t // 8 & ONES


def _six_bits(b: Block, group: int, which: int) -> Expr:
    """Four scales (0) or minima (1) of 6 bits: the first four are contiguous, the others are split."""

    def word(index: int) -> Expr:
        return b.keep(("scales", index), lambda: b.source.word(index))

    def join() -> Expr:
        if group == 0:
            return word(which) & SIXES
        return word(2) >> 4 * which & NIBBLES | (word(which) >> 6 & PAIRS) << 4

    return b.keep(("six", group, which), join)


def _k_scale(b: Block, run: int) -> Expr:
    return _six_bits(b, run // 4, 0) >> 8 * (run % 4) & 63


def _k_minima(b: Block) -> list[Expr]:
    return [_six_bits(b, group, 1) for group in range(2)]


def _six_bit_words(b: Block, t: int) -> list[Expr]:
    """The words that hold four codes of 6 bits: one, or for every fourth run of codes the top bits of three."""
    run, at = divmod(t, 4)
    group, which = divmod(run, 4)
    return [b.word(4 + 12 * group + 4 * i + at) for i in (range(3) if which == 3 else (which,))]


def _six_bit_codes(b: Block, t: int) -> Expr:
    first, *others = _six_bit_words(b, t)
    if not others:
        return first & SIXES
    second, third = others
    return first >> 6 & PAIRS | second >> 4 & PAIRS << 2 | third >> 2 & PAIRS << 4


def _six_bit_upper(b: Block, t: int) -> Expr | None:
    first, *others = _six_bit_words(b, t)
    if not others:
        return None
    second, third = others
    # Bits are selected before the lowest two are cleared: that is one operation per selection.
    high = third & TOP_PAIRS | second >> 2 & ~TOP_PAIRS
    return (high & UPPER | first >> 4 & NIBBLES) & signed_word(SIXES << 2)


def _fp4_codes(b: Block, t: int) -> Expr:
    """0, 1, 2, 3, 4, 6, 8, 12 or their negatives, plus 16, from a sign, two exponent bits and one more.

    From 4 on a number exceeds its bits: by one for the last bit, by two for the one before, by two more for both.
    """
    bits = b.let(_nibbles(b, 0, t))
    large, sign = b.let(bits >> 2 & ONES), b.let(bits >> 3 & ONES)
    last, second = (b.let(bits >> n & large) for n in range(2))
    size = (bits & 0x07070707) + last + (second << 1) + ((last & second) << 1)
    # Per byte: s becomes 31 - s if the sign is set, so that taking 15 off that and adding 16 to others is the same.
    flip = b.let((sign << 5) - sign)
    return (size ^ flip) + 16 * ONES - flip


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
        16, 32, _six_bit_codes, lambda b, run: b.signed(run), halves=(104,), upper=_six_bit_upper, raised=2
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
    """Initial accumulator of a run: minus the codes' zero point times the activation sum."""
    if codes.offset == 0:
        return Const(0, I32)
    at = rows.form.sums
    place: Place = ()
    if rows.form.block > 32:
        if isinstance(run, int):
            at += run * (codes.step // 16)
        else:
            place = ((run, codes.step // 16),)
    return rows.word(r, at, *place) << codes.offset.bit_length() - 1


@dataclass(frozen=True)
class _End:
    """Per-block factors of a vector of columns: a scale, the other float and minima if there are any."""

    scale: Expr
    other: Expr | None
    minima: Sequence[Expr]


def _finish(rows: _Rows, codes: Codes, target: CpuTarget, row: int, integer: Expr, end: _End, total: Expr) -> Expr:
    """The end of a block: integers times scales, added to the sum of a row."""
    form, number = rows.form, integer.cast(F32)
    unit = rows.number(row, form.scale)
    if end.minima:
        assert end.other is not None
        parts: list[Expr] = []
        for base in (form.high, form.low):
            part: Expr = Const(0, I32)
            for i, four in enumerate(end.minima):
                part = Apply("dot_u7", (part, four, rows.word(row, base + i)), I32)
            parts.append(part)
        minima = ((parts[0] << 7) + parts[1]).cast(F32)
        both = multiply_add(minima, -end.other, number * end.scale, target)
        return multiply_add(both, unit, total, target)
    total = multiply_add(number, end.scale * unit, total, target)
    if codes.plus:
        assert end.other is not None
        total = multiply_add(end.other, rows.number(row, form.total), total, target)
    return total


# -- kernels --------------------------------------------------------------------------------------------------------
_ROWS_AND_SUMS = (Param("x_words", I32), Param("x", F32), Param("sums", F32, True))


def _in_registers(sums: Mapping[str, Place], *body: Stmt) -> tuple[Stmt, ...]:
    """Holds sums in registers while `body` adds to them."""
    loads = (Var(name, Load(4, at, F32)) for name, at in sums.items())
    return (*loads, *body, *(Store(4, at, Ref(name, F32)) for name, at in sums.items()))


def dot_kernel(storage: DType, width: int, target: CpuTarget, count: int) -> LoopKernel:
    """sums[count][width] += x · blocks of one panel, codes in registers."""
    codes, lanes = CODES[storage.name], target.lanes(4)
    rows = _Rows(activations_for(storage.block), count)
    block = Block(Panels(storage, lanes, block_number(Index("v"), width, lanes)))
    stmts = block.stmts
    runs, words = storage.block // codes.step, codes.step // 4
    integers: list[Expr] = [Const(0, I32)] * count
    for run in range(runs):
        sums = [_sum(rows, codes, r, run) for r in range(count)]
        uppers: list[Expr] = [Const(0, I32)] * count
        for t in range(run * words, (run + 1) * words):
            upper = codes.upper(block, t) if target.has_dot else None  # without it, eight bits cost more than seven
            four = block.let(codes.word(block, t) if upper is None else upper)
            into, dot = (sums, codes.dot) if upper is None else (uppers, "dot_u8")
            for r in range(count):
                into[r] = block.let(Apply(dot, (into[r], four, rows.word(r, rows.form.codes + t)), I32))
        if isinstance(uppers[0], Ref):
            sums = [block.let(x + (y >> codes.raised)) for x, y in zip(sums, uppers, strict=True)]
        if codes.scale is None:
            integers = sums
        else:
            scale = block.let(codes.scale(block, run))
            integers = [block.let(integer + x * scale) for integer, x in zip(integers, sums, strict=True)]
    minima = codes.minima(block) if codes.minima else []
    floats = codes.floats(block)
    end = _End(floats[0], floats[1] if len(floats) > 1 else None, minima)
    for r in range(count):
        stmts.append(Assign(f"sum{r}", _finish(rows, codes, target, r, integers[r], end, Ref(f"sum{r}", F32))))
    place = {f"sum{r}": ((Const(r * width, I64), 1), (Index("v"), lanes), (Index("c"), 1)) for r in range(count)}
    root = over_panel(width, lanes, _in_registers(place, *stmts))
    return LoopKernel(f"dot_{storage}_int_{count}", (*panel_params(storage), *_ROWS_AND_SUMS), ARGUMENTS, root)


@dataclass(frozen=True)
class _UnpackedBlock:
    """An unpacked block of a panel: rows of codes, scales of runs, minima, then one or two floats."""

    storage: DType
    width: int

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

    def at(self, vector: tuple[Expr, int], word: int, *more: tuple[Expr, int | Arg]) -> Place:
        return ((Index("u"), self.words * self.width), (Const(word, I64), self.width), vector, (Index("c"), 1), *more)


def unpacked_words(storage: DType) -> int:
    """Words per block of one column in scratch."""
    return _UnpackedBlock(storage, 1).words


def codes_kernel(storage: DType, width: int, lanes: int) -> LoopKernel:
    """Unpacks blocks of one panel to scratch."""
    unpacked, codes = _UnpackedBlock(storage, width), CODES[storage.name]
    vector = (Index("v"), lanes)
    block = Block(Panels(storage, lanes, block_number(Index("v"), width, lanes)))
    stmts = block.stmts
    for t in range(unpacked.scales):
        four = codes.word(block, t)
        stmts.append(Store(3, unpacked.at(vector, t), four))
    if codes.scale is not None:
        for run in range(storage.block // codes.step):
            scale = codes.scale(block, run)
            stmts.append(Store(3, unpacked.at(vector, unpacked.scales + run), scale))
    for i, four_minima in enumerate(codes.minima(block) if codes.minima else []):
        stmts.append(Store(3, unpacked.at(vector, unpacked.minima + i), four_minima))
    for i, number in enumerate(codes.floats(block)):
        stmts.append(Store(4, unpacked.at(vector, unpacked.floats + i), number))
    params = (*panel_params(storage), Param("x_words", I32), Param("codes", I32, True), Param("numbers", F32, True))
    return LoopKernel(f"codes_{storage}", params, ARGUMENTS, over_panel(width, lanes, tuple(stmts)))


def tile_heights(target: CpuTarget) -> range:
    """Tile heights: more rows than `DOT_ROWS` are split as evenly as possible into tiles as wide as a panel."""
    max_rows = TILE_SUMS // target.tile_vectors
    return range((max_rows + 1) // 2, max_rows + 1)


def tile_kernel(storage: DType, width: int, target: CpuTarget, count: int) -> LoopKernel:
    """sums[count][width] += x · blocks that `codes_kernel` unpacked.

    There is one unit, with all columns: each word of x is loaded once for all of them.
    """
    unpacked, codes, lanes = _UnpackedBlock(storage, width), CODES[storage.name], target.lanes(4)
    rows = _Rows(activations_for(storage.block), count)
    runs, words = storage.block // codes.step, codes.step // 4
    run: int | Expr = 0 if runs == 1 else Index("g")
    vectors = range(width // lanes)
    cells = [(r, v) for r in range(count) for v in vectors]

    def moved(stride: int) -> Place:
        return () if isinstance(run, int) or not stride else ((run, stride),)

    def load(param: int, v: int, word: int, stride: int = 0) -> Expr:
        return Load(param, unpacked.at((Const(v, I64), lanes), word, *moved(stride)), F32 if param else I32)

    inner: list[Stmt] = [Let(f"start{r}", _sum(rows, codes, r, run)) for r in range(count)]
    sums: dict[tuple[int, int], Expr] = {(r, v): Ref(f"start{r}", I32) for r, v in cells}
    for t in range(words):
        inner += [Let(f"w{v}_{t}", load(0, v, t, words * width)) for v in vectors]
        for r in range(count):
            inner.append(Let(f"x{r}_{t}", rows.word(r, rows.form.codes + t, *moved(words))))
            for v in vectors:
                four = Ref(f"w{v}_{t}", I32), Ref(f"x{r}_{t}", I32)
                inner.append(Let(f"s{r}_{v}_{t}", Apply(codes.dot, (sums[r, v], *four), I32)))
                sums[r, v] = Ref(f"s{r}_{v}_{t}", I32)
    body = inner
    if codes.scale is not None:
        inner += [Let(f"scale{v}", load(0, v, unpacked.scales, width)) for v in vectors]
        for r, v in cells:
            integer = Ref(f"whole{r}_{v}", I32)
            inner.append(Assign(integer.name, integer + sums[r, v] * Ref(f"scale{v}", I32)))
            sums[r, v] = integer
        body = [*(Var(f"whole{r}_{v}", Const(0, I32)) for r, v in cells), For("g", runs, tuple(inner))]
    # Sums of runs take the registers that f32 sums would need: those go through memory, once per block.
    in_registers = codes.scale is None
    place = {f"sum{r}_{v}": ((Const(r * width + v * lanes, I64), 1), (Index("c"), 1)) for r, v in cells}
    for v in vectors:
        floats = [Let(f"f{v}_{i}", load(1, v, unpacked.floats + i)) for i in range(len(codes.halves))]
        minima = [Let(f"m{v}_{i}", load(0, v, at)) for i, at in enumerate(range(unpacked.minima, unpacked.floats))]
        body += [*floats, *minima]
        scale, *other = (Ref(let.name, F32) for let in floats)
        end = _End(scale, other[0] if other else None, [Ref(let.name, I32) for let in minima])
        for r in range(count):
            name = f"sum{r}_{v}"
            before = Ref(name, F32) if in_registers else Load(4, place[name], F32)
            total = _finish(rows, codes, target, r, sums[r, v], end, before)
            body.append(Assign(name, total) if in_registers else Store(4, place[name], total))
    columns = _in_registers(place if in_registers else {}, For("u", Arg("blocks"), tuple(body)))
    root = For("all", 1, (For("c", lanes, columns, vector=True),))
    params = (Param("codes", I32), Param("numbers", F32), *_ROWS_AND_SUMS)
    return LoopKernel(f"tile_{storage}_{count}", params, ARGUMENTS, root)


@functools.cache
def block_kernels(storage: DType, target: CpuTarget) -> Blocks:
    """The kernels of one type for 8-bit activations; cached, since every layer asks for them."""
    width, lanes = target.panel(F32.size), target.lanes(F32.size)
    dots = tuple(dot_kernel(storage, width, target, n + 1) for n in range(DOT_ROWS))
    heights = tile_heights(target)
    tiles = tuple(tile_kernel(storage, width, target, n) for n in heights)
    size, x_words = unpacked_words(storage) * I32.size, activations_for(storage.block).words
    return Blocks(storage, codes_kernel(storage, width, lanes), size, dots, tiles, heights[-1], x_words)


def dot_of(storage: DType) -> str:
    """The operation that multiplies codes of a type; the faster one if there are two."""
    codes = CODES[storage.name]
    return "dot_u7" if codes.minima else codes.dot

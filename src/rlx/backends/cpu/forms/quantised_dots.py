"""Integer kernels for quantised weights and 8-bit activations.

A weight is `scale · code - minimum`: codes are small unsigned integers, four per word, so that the inner loop is
`dot_u8` alone; scales and minima are applied once per run of `step` codes. Integer sums are exact, and f32 sums are
accumulated block by block in one order, so bits depend neither on the number of rows nor on the target. `CodeWords`
reads codes, scales and minima.

x is `ActivationWords`. Few rows are multiplied straight from panels; for many, `codes_kernel` unpacks a piece of a
panel once and `tile_kernel` multiplies by it.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

from rlx.backends.cpu.forms.code_words import CodeWords, PartWords
from rlx.backends.cpu.forms.panels import ARGUMENTS, Panels, block_number, multiply_add, over_panel, panel_params
from rlx.backends.cpu.packing.quantised_activations import Activations, activations_for
from rlx.backends.cpu.quant_blocks import Blocks
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import F32, I32, I64, DType
from rlx.fast_dataclass import dataclass
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

DOT_ROWS = 4  # rows of x that are multiplied by codes in registers
DOT_ROWS_AVX512 = 8  # the same with 32 registers
PASSES = 4  # of so many rows, up to which codes do not go through memory
TILE_SUMS = 12  # vectors of sums per tile: twice as many, and their operands, fill 32 registers


# -- the types ------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Codes:
    """What the kernels of a type depend on."""

    step: int  # codes that share a scale
    offset: int  # zero point, subtracted from each code
    scaled: bool  # whether runs have integer scales
    minima: int  # words of minima
    floats: int  # per block

    @property
    def dot(self) -> str:
        return "dot_u8" if self.offset == 128 else "dot_u7"


def code_words(storage: DType, width: int, lanes: int) -> CodeWords:
    """Reads block `u` of vector `v` of a panel."""
    return CodeWords(storage, Block(Panels(storage, lanes, block_number(Index("v"), width, lanes))))


@functools.cache
def codes_of(storage: DType) -> Codes:
    """The codes of a type, from its description."""
    words = code_words(storage, 1, 1)
    form, minima, floats = words.form, words.minima(), words.floats()
    step = form.run or storage.block
    return Codes(step, words.codes(0).offset, form.scale is not None, len(minima), len(floats))


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


Runs = tuple[tuple[Expr, int], ...]  # indices of loops over runs, and the number of runs per turn


def _sum(rows: _Rows, codes: Codes, r: int, run: int, more: Runs) -> Expr:
    """Initial accumulator of a run: minus the codes' zero point times the activation sum."""
    if codes.offset == 0:
        return Const(0, I32)
    step = codes.step // 16 if rows.form.block > 32 else 0
    moved = tuple((index, runs * step) for index, runs in more)
    return rows.word(r, rows.form.sums + run * step, *moved) << codes.offset.bit_length() - 1


@dataclass(frozen=True)
class _End:
    """Per-block factors of a vector of columns: a scale, the other float and minima if there are any."""

    scale: Expr
    other: Expr | None
    minima: Sequence[Expr]


def _finish(rows: _Rows, target: CpuTarget, row: int, integer: Expr, end: _End, total: Expr) -> Expr:
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
    return total if end.other is None else multiply_add(end.other, rows.number(row, form.total), total, target)


# -- kernels --------------------------------------------------------------------------------------------------------
_ROWS_AND_SUMS = (Param("x_words", I32), Param("x", F32), Param("sums", F32, True))


def _in_registers(sums: Mapping[str, Place], *body: Stmt) -> tuple[Stmt, ...]:
    """Holds sums in registers while `body` adds to them."""
    loads = (Var(name, Load(4, at, F32)) for name, at in sums.items())
    return (*loads, *body, *(Store(4, at, Ref(name, F32)) for name, at in sums.items()))


def dot_kernel(storage: DType, width: int, target: CpuTarget, count: int) -> LoopKernel:
    """sums[count][width] += x · blocks of one panel, codes in registers.

    The parts of a long block are a loop, because the prefetchers of a core learn from the addresses of few
    instructions: all loads unrolled read memory at half the speed.
    """
    codes, lanes = codes_of(storage), target.lanes(4)
    rows = _Rows(activations_for(storage.block), count)
    weights = code_words(storage, width, lanes)
    stmts = weights.block.stmts
    if codes.scaled:
        integers = _part_sums(rows, codes, target, weights)
    else:
        integers = _run_sums(rows, codes, target, weights, 0)
    minima = weights.minima()
    scale, *other = weights.floats()
    end = _End(scale, other[0] if other else None, minima)
    for r in range(count):
        stmts.append(Assign(f"sum{r}", _finish(rows, target, r, integers[r], end, Ref(f"sum{r}", F32))))
    place = {f"sum{r}": ((Const(r * width, I64), 1), (Index("v"), lanes), (Index("c"), 1)) for r in range(count)}
    root = over_panel(width, lanes, _in_registers(place, *stmts))
    params = (*panel_params(storage), *_ROWS_AND_SUMS)
    return LoopKernel(f"dot_{storage}_int_{count}", params, ARGUMENTS, root, streams=(params[0].name,))


def _part_sums(rows: _Rows, codes: Codes, target: CpuTarget, weights: CodeWords) -> list[Expr]:
    """x · scaled codes of a long block of a vector of columns, for each row: a loop over its parts."""
    p = Index("p")
    part = PartWords(weights, Block(weights.block.source, prefix="p"), p)
    totals = [Ref(f"whole{r}", I32) for r in range(rows.count)]
    for run in range(4):
        sums = _run_sums(rows, codes, target, part, run, ((p, 4),))
        scale = part.block.let(part.scale(run))
        part.block.stmts += [Assign(total.name, total + x * scale) for total, x in zip(totals, sums, strict=True)]
    weights.block.stmts += [Var(total.name, Const(0, I32)) for total in totals]
    weights.block.stmts.append(For(p.name, part.parts, tuple(part.block.stmts)))
    return list(totals)


def _run_sums(
    rows: _Rows, codes: Codes, target: CpuTarget, weights: CodeWords | PartWords, run: int, more: Runs = ()
) -> list[Expr]:
    """x · codes of one run of a vector of columns, for each row."""
    block, words = weights.block, codes.step // 4
    moved = tuple((index, runs * words) for index, runs in more)
    sums = [_sum(rows, codes, r, run, more) for r in range(rows.count)]
    uppers: list[Expr] = [Const(0, I32)] * rows.count
    for t in range(run * words, (run + 1) * words):
        four = weights.codes(t)
        high = target.has_dot and four.is_high  # without it, eight bits cost more than seven
        word = block.let(four.raised() if high else four.word())
        into, dot = (uppers, "dot_u8") if high else (sums, codes.dot)
        for r in range(rows.count):
            into[r] = block.let(Apply(dot, (into[r], word, rows.word(r, rows.form.codes + t, *moved)), I32))
    if isinstance(uppers[0], Ref):
        sums = [block.let(x + (y >> four.room)) for x, y in zip(sums, uppers, strict=True)]
    return sums


@dataclass(frozen=True)
class _UnpackedBlock:
    """An unpacked block of a panel: rows of codes, scales of runs, minima, then one or two floats."""

    storage: DType
    width: int

    @property
    def codes(self) -> Codes:
        return codes_of(self.storage)

    @property
    def scales(self) -> int:
        return self.storage.block // 4

    @property
    def minima(self) -> int:
        return self.scales + (self.storage.block // self.codes.step if self.codes.scaled else 0)

    @property
    def floats(self) -> int:
        return self.minima + self.codes.minima

    @property
    def words(self) -> int:
        return self.floats + self.codes.floats

    def at(self, vector: tuple[Expr, int], word: int, *more: tuple[Expr, int | Arg]) -> Place:
        return ((Index("u"), self.words * self.width), (Const(word, I64), self.width), vector, (Index("c"), 1), *more)


def unpacked_words(storage: DType) -> int:
    """Words per block of one column in scratch."""
    return _UnpackedBlock(storage, 1).words


def codes_kernel(storage: DType, width: int, lanes: int) -> LoopKernel:
    """Unpacks blocks of one panel to scratch."""
    unpacked, weights = _UnpackedBlock(storage, width), code_words(storage, width, lanes)
    vector, stmts = (Index("v"), lanes), weights.block.stmts
    for t in range(unpacked.scales):
        four = weights.codes(t).word()
        stmts.append(Store(3, unpacked.at(vector, t), four))
    for run in range(unpacked.minima - unpacked.scales):
        scale = weights.scale(run)
        stmts.append(Store(3, unpacked.at(vector, unpacked.scales + run), scale))
    for i, four_minima in enumerate(weights.minima()):
        stmts.append(Store(3, unpacked.at(vector, unpacked.minima + i), four_minima))
    for i, number in enumerate(weights.floats()):
        stmts.append(Store(4, unpacked.at(vector, unpacked.floats + i), number))
    params = (*panel_params(storage), Param("x_words", I32), Param("codes", I32, True), Param("numbers", F32, True))
    return LoopKernel(f"codes_{storage}", params, ARGUMENTS, over_panel(width, lanes, tuple(stmts)))


def tile_heights(target: CpuTarget) -> range:
    """Tile heights: rows that take more than `PASSES` are split as evenly as possible into tiles as wide as a panel."""
    max_rows = TILE_SUMS // target.tile_vectors
    return range((max_rows + 1) // 2, max_rows + 1)


def tile_kernel(storage: DType, width: int, target: CpuTarget, count: int) -> LoopKernel:
    """sums[count][width] += x · blocks that `codes_kernel` unpacked.

    There is one unit, with all columns: each word of x is loaded once for all of them.
    """
    unpacked, codes, lanes = _UnpackedBlock(storage, width), codes_of(storage), target.lanes(4)
    rows = _Rows(activations_for(storage.block), count)
    runs, words = storage.block // codes.step, codes.step // 4
    more: Runs = () if runs == 1 else ((Index("g"), 1),)
    vectors = range(width // lanes)
    cells = [(r, v) for r in range(count) for v in vectors]

    def moved(stride: int) -> Place:
        return tuple((index, stride) for index, _ in more if stride)

    def load(param: int, v: int, word: int, stride: int = 0) -> Expr:
        return Load(param, unpacked.at((Const(v, I64), lanes), word, *moved(stride)), F32 if param else I32)

    inner: list[Stmt] = [Let(f"start{r}", _sum(rows, codes, r, 0, more)) for r in range(count)]
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
    if codes.scaled:
        inner += [Let(f"scale{v}", load(0, v, unpacked.scales, width)) for v in vectors]
        for r, v in cells:
            integer = Ref(f"whole{r}_{v}", I32)
            inner.append(Assign(integer.name, integer + sums[r, v] * Ref(f"scale{v}", I32)))
            sums[r, v] = integer
        body = [*(Var(f"whole{r}_{v}", Const(0, I32)) for r, v in cells), For("g", runs, tuple(inner))]
    # Sums of runs take the registers that f32 sums would need: those go through memory, once per block.
    in_registers = not codes.scaled
    place = {f"sum{r}_{v}": ((Const(r * width + v * lanes, I64), 1), (Index("c"), 1)) for r, v in cells}
    for v in vectors:
        floats = [Let(f"f{v}_{i}", load(1, v, unpacked.floats + i)) for i in range(codes.floats)]
        minima = [Let(f"m{v}_{i}", load(0, v, at)) for i, at in enumerate(range(unpacked.minima, unpacked.floats))]
        body += [*floats, *minima]
        scale, *other = (Ref(let.name, F32) for let in floats)
        end = _End(scale, other[0] if other else None, [Ref(let.name, I32) for let in minima])
        for r in range(count):
            name = f"sum{r}_{v}"
            before = Ref(name, F32) if in_registers else Load(4, place[name], F32)
            total = _finish(rows, target, r, sums[r, v], end, before)
            body.append(Assign(name, total) if in_registers else Store(4, place[name], total))
    columns = _in_registers(place if in_registers else {}, For("u", Arg("blocks"), tuple(body)))
    root = For("all", 1, (For("c", lanes, columns, vector=True),))
    params = (Param("codes", I32), Param("numbers", F32), *_ROWS_AND_SUMS)
    return LoopKernel(f"tile_{storage}_{count}", params, ARGUMENTS, root)


@functools.cache
def block_kernels(storage: DType, target: CpuTarget) -> Blocks:
    """The kernels of one type for 8-bit activations; cached, since every layer asks for them."""
    width, lanes = target.panel(F32.size), target.lanes(F32.size)
    rows = DOT_ROWS_AVX512 if target.vector_bytes == 64 else DOT_ROWS
    dots = tuple(dot_kernel(storage, width, target, n + 1) for n in range(rows))
    heights = tile_heights(target)
    tiles = tuple(tile_kernel(storage, width, target, n) for n in heights)
    size, x_words = unpacked_words(storage) * I32.size, activations_for(storage.block).words
    return Blocks(storage, codes_kernel(storage, width, lanes), size, dots, PASSES * rows, tiles, heights[-1], x_words)


def dot_of(storage: DType) -> str:
    """The operation that multiplies codes of a type; the faster one if there are two."""
    codes = codes_of(storage)
    return "dot_u7" if codes.minima else codes.dot

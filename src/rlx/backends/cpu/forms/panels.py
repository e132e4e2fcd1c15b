"""Packed weights in panels: the offsets of their blocks, and the kernels that read them for the matmul.

Decoders are those of `lir/forms/quant_blocks.py`; here a lane is a column of the matmul.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from rlx.backends.cpu.packing.quantised_weights import first_word, separate_fields
from rlx.backends.cpu.quant_blocks import Blocks
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import F16, F32, I32, I64, U8, DType
from rlx.fast_dataclass import dataclass
from rlx.formats.quant_blocks import Position
from rlx.lir.forms.quant_blocks import UNIT, Block, Int, decode
from rlx.lir.loops import (
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
    fma,
    known,
)  # fmt: skip

GROUP = 64  # maximum number of unrolled positions; longer blocks loop over groups of them


def dot_rows(storage: DType) -> int:
    """Rows of x up to which weights are multiplied without unpacking them to memory; long blocks compile slowly."""
    return 4 if storage.block <= GROUP else 2


@dataclass(frozen=True)
class Panels:
    """A block of `lanes` interleaved columns: each separate half or byte of all columns, then each word.

    `block` is the block number. Parameter 0 is read as words, 1 as halves or bytes.
    """

    storage: DType
    lanes: int
    block: Expr

    def half(self, unit: int) -> Expr:
        start, apart = (self.block, self.storage.size // 2 * self.lanes), separate_fields(self.storage)
        if unit in apart:
            return Load(1, (start, (Const(apart.index(unit), I64), self.lanes), (Index("c"), 1)), F16)
        word, high = divmod(unit, 2)
        return Load(1, (start, (Const(word, I64), 2 * self.lanes), (Index("c"), 2), (Const(high, I64), 1)), F16)

    def byte(self, index: int) -> Expr:
        place = (
            (self.block, self.storage.size * self.lanes),
            (Const(separate_fields(self.storage).index(index), I64), self.lanes),
        )
        return Load(1, (*place, (Index("c"), 1)), U8).cast(I32)

    def single(self, unit: int) -> Expr:
        return self.word(unit // 2).bits()

    def split(self, byte: Int) -> tuple[Int, Int]:
        at = byte - first_word(self.storage)
        return at >> 2, (at & 3) << 3

    def word(self, index: Int) -> Expr:
        start = Const(len(separate_fields(self.storage)) * self.storage.unit * self.lanes // 4, I64)
        place = ((self.block, self.storage.size * self.lanes // 4), (start, 1), (known(index, I64), self.lanes))
        return Load(0, (*place, (Index("c"), 1)), I32)


# -- kernels that the matmul calls ----------------------------------------------------------------------------------
# Weights are stored as [panel][block][vector of columns][halves and words][lane]: all columns of a panel process a
# block of x before the next, so that x is read once per panel, and weights in order. All kernels of a type take the
# same words: two views of a panel, two of the rows of x, the output; then the number of `blocks`, and the row stride
# `x_row` of x.
ARGUMENTS = ("blocks", "x_row")


def block_number(vector: Expr, width: int, lanes: int) -> Expr:
    """The number of block `u` of a vector of columns."""
    return Index("u") * (width // lanes) + vector


def over_panel(width: int, lanes: int, body: tuple[Stmt, ...]) -> For:
    """`body` for each block `u`, vector `v` and column `c` of a panel, in memory order. There is one unit."""
    columns = For("v", width // lanes, (For("c", lanes, body, vector=True),))
    return For("all", 1, (For("u", Arg("blocks"), (columns,)),))


def _grouped(storage: DType) -> tuple[Int, int, int]:
    """How a block is walked: the group, its length as a power of two, and the number of groups."""
    length = min(storage.block, GROUP)
    groups = storage.block // length
    return (Index("g") if groups > 1 else 0), length.bit_length() - 1, groups


def _over_groups(groups: int, body: Sequence[Stmt]) -> tuple[Stmt, ...]:
    """`body` for each group `g` of a block."""
    return (For("g", groups, tuple(body)),) if groups > 1 else tuple(body)


def unpack_kernel(storage: DType, width: int, lanes: int) -> LoopKernel:
    """Unpacks blocks of one panel to f32 rows: out[k][width]."""
    outer, span, groups = _grouped(storage)
    block = Block(Panels(storage, lanes, block_number(Index("v"), width, lanes)))
    body = block.stmts
    for inner in range(1 << span):
        value = decode(storage, block, Position(outer, span, inner))
        row = ((Index("u"), storage.block * width), (known(outer, I64), width << span), (Const(inner, I64), width))
        body.append(Store(4, (*row, (Index("v"), lanes), (Index("c"), 1)), value))
    params = (*panel_params(storage), Param("x_words", I32), Param("x", F32), Param("out", F32, True))
    return LoopKernel(f"unpack_{storage}", params, ARGUMENTS, over_panel(width, lanes, _over_groups(groups, body)))


def panel_params(storage: DType) -> tuple[Param, Param]:
    """The two views of a panel."""
    return Param("words", I32), Param("halves", F16) if storage.unit == UNIT else Param("bytes", U8)


def dot_kernel(storage: DType, width: int, target: CpuTarget, rows: int) -> LoopKernel:
    """sums[rows][width] += x[rows][k] · blocks of one panel: one chain of multiply-adds over k per sum.

    There is one unit, with all columns, so that enough chains run in parallel; a weight is unpacked once for all rows.
    """
    outer, span, groups = _grouped(storage)
    lanes = target.lanes(4)
    vectors = range(width // lanes)
    cells = [(r, v) for v in vectors for r in range(rows)]
    place = {(r, v): ((Index("c"), 1), (Const(r * width + v * lanes, I64), 1)) for r, v in cells}
    blocks = [Block(Panels(storage, lanes, block_number(Const(v, I64), width, lanes)), prefix=f"c{v}") for v in vectors]
    body: list[Stmt] = [Let(f"sum{r}_{v}_0", Ref(f"sum{r}_{v}", F32)) for r, v in cells]
    for inner in range(1 << span):
        at: Place = ((Index("u"), storage.block), (known(outer, I64), 1 << span), (Const(inner, I64), 1))
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


@functools.cache
def block_kernels(storage: DType, target: CpuTarget) -> Blocks:
    """All kernels of one type; cached, since every layer asks for them."""
    width, lanes = target.panel(F32.size), target.lanes(F32.size)
    dots = tuple(dot_kernel(storage, width, target, rows) for rows in range(1, dot_rows(storage) + 1))
    return Blocks(storage, unpack_kernel(storage, width, lanes), storage.block * F32.size, dots, len(dots))


def multiply_add(x: Expr, y: Expr, total: Expr, target: CpuTarget) -> Expr:
    """x · y + total, rounded once if the target has FMA."""
    return fma(x, y, total) if target.has_fma else x * y + total

"""Activations as the words that integer kernels read: 8-bit codes with their scales and sums, by blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.dtypes import F32, I8, I32, I64
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Node
from rlx.lir.forms.quantised_activations import BLOCK, code, over_rows, scales
from rlx.lir.loops import Arg, Const, Expr, For, Index, Let, Load, Place, Reduce, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler
from rlx.lir.views import View
from rlx.operand_layouts import Layout
from rlx.ops.quantised_activations import check_blocks, quantise_blocks
from rlx.types import TensorType


@dataclass(frozen=True, slots=True)
class Activations:
    """Offsets of the parts of a block, in 32-bit words.

    `scale` is an f32. `codes` are signed bytes. `sums` are negated sums of codes: of the full block in blocks of 32, of
    each run of 16 in blocks of 256. `total` is scale · sum, an f32, in blocks of 32. Blocks of 256 also have the sums
    of runs of 32 as bytes: 128 · `high` + `low`, which `dot_u7` multiplies by four minima at once.
    """

    block: int
    words: int
    scale: int
    sums: int
    codes: int
    total: int = -1
    high: int = -1
    low: int = -1


SHORT = Activations(block=32, words=11, scale=0, total=1, sums=2, codes=3)
LONG = Activations(block=256, words=85, scale=0, high=1, low=3, sums=5, codes=21)


def activations_for(block: int) -> Activations:
    """The activation layout for weights in blocks of this length."""
    return {32: SHORT, 256: LONG}[block]


@dataclass(frozen=True, slots=True)
class ActivationWords(Layout):
    """x as quantised by `round_blocks`, in words: scales, sums and four codes per word, per block (`Activations`)."""

    block: int

    device = "cpu"
    name = "activation_words"
    by_rows = True

    def packed_type(self, *xs: TensorType) -> TensorType:
        (x,) = xs
        k = check_blocks(self.name, x, self.block)
        assert x.dtype is F32, "x is f32"
        return TensorType((*x.shape[:-1], k // self.block * activations_for(self.block).words), I32)

    def pack(self, *xs: Any) -> Any:
        return activation_words(*xs, block=self.block)

    def loops(self, scheduler: Scheduler, node: Node) -> Sequence[View]:
        return _write_words(scheduler, node, activations_for(self.block))


def activation_words(x: Any, *, block: int) -> Any:
    """x as words, in NumPy."""
    form = activations_for(block)
    codes, scale = quantise_blocks(x, block)
    codes = np.nan_to_num(codes).astype(np.int8)
    words = np.zeros((*codes.shape[:-1], form.words), np.int32)
    numbers, signed = words.view(np.float32), words.view(np.int8)
    numbers[..., form.scale] = scale[..., 0]
    signed[..., 4 * form.codes :] = codes
    wide = codes.astype(np.int32)
    if form is SHORT:
        words[..., form.sums] = -wide.sum(axis=-1)
        numbers[..., form.total] = wide.sum(axis=-1).astype(np.float32) * scale[..., 0]
    else:
        words[..., form.sums : form.codes] = -wide.reshape(*wide.shape[:-1], 16, 16).sum(axis=-1)
        runs = wide.reshape(*wide.shape[:-1], 8, 32).sum(axis=-1)
        signed[..., 4 * form.high : 4 * form.high + 8] = runs >> 7
        signed[..., 4 * form.low : 4 * form.low + 8] = runs & 127
    return words.reshape(*x.shape[:-1], -1)


def numbers_of(words: Any, block: int) -> Any:
    """The numbers that words represent."""
    form = activations_for(block)
    blocks = words.reshape(*words.shape[:-1], -1, form.words)
    codes = np.ascontiguousarray(blocks[..., form.codes :]).view(np.int8).astype(np.float32)
    scale = np.ascontiguousarray(blocks[..., form.scale]).view(np.float32)
    return (codes * scale[..., None]).reshape(*words.shape[:-1], -1)


def _write_words(s: Scheduler, node: Node, form: Activations) -> Sequence[View]:
    x, out = s.contiguous(s.view(node.operands[0])), s.result(node)
    builder = LoopBuilder("activation_blocks")
    builder.param(x)
    for dtype in (I32, F32, I8):
        builder.param(View(out.buffer, dtype, out.shape, out.strides, out.offset * (4 // dtype.size)), written=True)
    words_out, numbers, signed = 1, 2, 3
    u, i, run = BLOCK, Index("i"), Index("g")

    def word(index: int, *more: tuple[Expr, int | Arg]) -> Place:
        return ((u, form.words), (Const(index, I64), 1), *more)

    def byte(index: int, *more: tuple[Expr, int | Arg]) -> Place:
        return ((u, 4 * form.words), (Const(4 * index, I64), 1), *more)

    def total(length: int, *more: tuple[Expr, int | Arg]) -> Expr:
        """The sum of the codes written so far."""
        written = Load(signed, byte(form.codes, *more, (i, 1)), I8)
        return Reduce("sum", "i", length, written.cast(I32))

    codes = Store(signed, byte(form.codes, (i, 1)), code(builder, (u, form.block), (i, 1)))
    body: list[Stmt] = [*scales(builder, form.block), Store(numbers, word(form.scale), Ref("scale", F32))]
    body.append(For("i", form.block, (codes,), vector=True))
    sum_ = Ref("sum", I32)
    if form is SHORT:
        body.append(Let("sum", total(form.block)))
        body.append(Store(words_out, word(form.sums), -sum_))
        body.append(Store(numbers, word(form.total), sum_.cast(F32) * Ref("scale", F32)))
    else:
        pair = [-Load(words_out, word(form.sums + j, (run, 2)), I32) for j in range(2)]
        high = Store(signed, byte(form.high, (run, 1)), sum_ >> 7)
        low = Store(signed, byte(form.low, (run, 1)), sum_ & 127)
        short = Store(words_out, word(form.sums, (run, 1)), -total(16, (run, 16)))
        body.append(For("g", 16, (short,)))
        body.append(For("g", 8, (Let("sum", pair[0] + pair[1]), high, low)))
    over_rows(s, builder, form.block, body, 5)
    return [out]

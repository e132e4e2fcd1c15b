"""Quantised weights in the matmul nest: their layout's kernels unpack them slab by slab, or multiply them directly."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rlx.backends.cpu.builder import Value, const, i64
from rlx.backends.cpu.matmul.stripes import Pieces, Right, RowBlock, Stripe
from rlx.backends.cpu.quant_blocks import Blocks
from rlx.host_memory import LINE
from rlx.lir.loops import LoopKernel

if TYPE_CHECKING:
    from rlx.backends.cpu.matmul.nest import Nest


class Quantised:
    """B of a nest whose panels hold packed blocks."""

    def __init__(self, nest: Nest, blocks: Blocks) -> None:
        self.nest, self.b, self.blocks = nest, nest.b, blocks
        self.args = nest.b.stack("i64", 7)  # argument block of the kernels

    def bytes(self, k: Value) -> Value:
        """Bytes of a panel per `k` steps."""
        storage = self.blocks.storage
        return self.b.mul(self.b.sdiv(k, storage.block), storage.size * self.nest.form.panel)

    def multiply(self, rows: RowBlock, stripe: Stripe) -> None:
        """All tiles of a row block, over one slab of one panel."""
        many = self.each_tile_of_codes if self.blocks.tiles else self.each_tile_of_numbers
        self.b.when(self.nest.few, lambda: self.dot(rows, stripe), lambda: many(rows, stripe))

    def _call(self, address: Value, kernel: LoopKernel, count: Value, *pointers: Value) -> None:
        """Calls a kernel of the table over `count` blocks; `kernel` has its signature. Each pointer is passed as two
        views.
        """
        b, (panel, x, out) = self.b, pointers
        for i, word in enumerate((panel, panel, x, x, out, count, self.nest.word["a_row"])):
            b.store(word, b.offset(self.args, 8 * i), align=8)
        assert isinstance(kernel.root.extent, int)
        function = b.load("ptr", b.offset(self.nest.word["blocks"], b.mul(address, 8)), align=8)
        b.call_pointer(function, self.args, i64(0), i64(kernel.root.extent), self.nest.scratch)

    def _unpack(self, stripe: Stripe) -> Value:
        """Unpacks the blocks of a slab to scratch, as numbers or as codes; returns their count."""
        b, blocks, panel = self.b, self.blocks, self.nest.packed
        count = b.sdiv(stripe.length, blocks.storage.block)
        here = b.offset(stripe.b, self.bytes(stripe.start))
        self._call(i64(0), blocks.unpack, count, here, panel, panel)
        return count

    def each_tile_of_numbers(self, rows: RowBlock, stripe: Stripe) -> None:
        """Unpacks each slab to a panel of numbers in scratch."""
        self._unpack(stripe)
        panel, width = self.nest.packed, self.nest.form.panel
        self.nest.each_tile(rows, stripe, Right(panel, i64(width), panel, i64(0), i64(0)))

    def each_tile_of_codes(self, rows: RowBlock, stripe: Stripe) -> None:
        """Unpacks each slab to codes in scratch, and multiplies rows of activation words by them."""
        b, nest, blocks = self.b, self.nest, self.blocks
        form, word = nest.form, nest.word
        count = self._unpack(stripe)
        k_words = b.sdiv(b.mul(stripe.start, blocks.x_words), blocks.storage.block)
        b.when(b.icmp("eq", stripe.start, 0), lambda: self._clear(stripe, self._rows_of(rows)))
        lowest = blocks.tile_rows - len(blocks.tiles) + 1
        fetch = self._next_slab(rows, stripe)

        def tile(index: Value, row: Value) -> list[Value]:
            height = nest.pieces.size(index)
            sums = b.offset(stripe.sums, b.mul(b.sub(row, rows.first_row), form.panel), form.scalar)
            x = b.offset(rows.a, b.add(b.mul(row, word["a_row"]), k_words), form.scalar)
            fetch(b.sub(index, rows.first_tile))
            address = b.add(height, 1 + len(blocks.dots) - lowest)
            self._call(address, blocks.tiles[0], count, nest.packed, x, sums)
            b.when(stripe.last, lambda: nest.finish(stripe, row, height, sums))
            return [b.add(row, height)]

        b.loop(rows.first_tile, rows.last_tile, 1, tile, [rows.first_row])

    def _next_slab(self, rows: RowBlock, stripe: Stripe) -> Callable[[Value], None]:
        """Returns a function that prefetches a tile's share of the next slab to unpack."""
        b, end = self.b, self.b.add(stripe.start, stripe.length)
        here = b.offset(stripe.b, self.bytes(end))  # in this panel or the next
        length = self.bytes(stripe.length)
        share = b.mul(b.add(b.sdiv(length, b.mul(b.max(rows.count, 1), LINE)), 1), LINE)

        def fetch(tile: Value) -> None:
            start = b.mul(tile, share)
            b.loop(start, b.add(start, share), LINE, lambda at: b.prefetch(b.offset(here, at), locality=2))

        return fetch

    def _rows_of(self, rows: RowBlock) -> Value:
        return self.b.sub(self.nest.pieces.start(rows.last_tile), rows.first_row)

    def dot(self, rows: RowBlock, stripe: Stripe) -> None:
        """Multiplies a few rows by packed weights without unpacking to memory: the same chains over k as a tile's."""
        b, nest, blocks = self.b, self.nest, self.blocks
        m, form = nest.m, nest.form
        self._clear(stripe, m)
        count = b.sdiv(nest.word["k"], blocks.storage.block)
        passes = b.ceil_div(m, len(blocks.dots))
        pieces = Pieces(b, m, passes)

        def some(index: Value, row: Value) -> list[Value]:
            height = pieces.size(index)
            x = b.offset(rows.a, b.mul(row, nest.word["a_row"]), form.scalar)
            sums = b.offset(stripe.sums, b.mul(row, form.panel), form.scalar)
            self._call(height, blocks.dots[0], count, stripe.b, x, sums)
            return [b.add(row, height)]

        b.loop(0, passes, 1, some, [i64(0)])
        nest.finish(stripe, i64(0), m, stripe.sums)

    def _clear(self, stripe: Stripe, rows: Value) -> None:
        b, form = self.b, self.nest.form

        def clear(cell: Value) -> None:
            place = b.offset(stripe.sums, b.mul(cell, form.lanes), form.scalar)
            b.store(const(form.vector, 0.0), place, align=form.dtype.size)

        b.loop(0, b.mul(rows, form.vectors), 1, clear)

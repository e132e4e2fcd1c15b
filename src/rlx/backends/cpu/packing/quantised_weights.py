"""Quantised weights in panels: blocks of a vector's columns are interleaved, f16 fields first, then word by word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.cpu.packing.quantised_activations import ActivationWords, activations_for, numbers_of
from rlx.backends.cpu.quant_blocks import BlockLayout, Blocks
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import F32, I16, I32, I64, DType
from rlx.dtypes import dtype as dtype_of
from rlx.fast_dataclass import dataclass
from rlx.formats.quant_blocks import signed_word
from rlx.ir.graph import Node
from rlx.lir.forms.quant_blocks import unit_of
from rlx.lir.loops import Const, Expr, For, Index, Load, Place, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit
from rlx.lir.views import View
from rlx.operand_layouts import Layout
from rlx.ops.quant import unpack_blocks
from rlx.types import Size, TensorType, product


@dataclass(frozen=True, slots=True)
class Interleaved(BlockLayout):
    """Packed weights [..., n, k] as [..., panels, blocks, vectors, 16-bit units].

    A vector is `lanes` columns. Each block stores the f16 fields of all columns (in blocks of an odd number of bytes,
    the scale byte), then the rest as 32-bit words: in file order or, if `integer`, in the order of the integer kernels,
    which read x as `ActivationWords`.
    """

    storage: DType
    width: int
    lanes: int
    integer: bool

    device = "cpu"
    name = "interleaved"

    @property
    def left(self) -> Layout | None:  # type: ignore[override]
        return ActivationWords(self.storage.block) if self.integer else None

    def packed_type(self, *ws: TensorType) -> TensorType:
        *groups, n, blocks = ws[0].array_shape
        part, units = self.width // len(ws), self.storage.size * self.lanes // 2
        return TensorType((*groups, (n + (part - 1)) // part, blocks, self.width // self.lanes, units), I16)

    def pack(self, *ws: Any) -> Any:
        return interleave_array(*ws, width=self.width, lanes=self.lanes, integer=self.integer)

    def inner(self, x: TensorType, packed: TensorType) -> tuple[Size, DType]:
        words = activations_for(self.storage.block).words if self.integer else self.storage.block
        return packed.shape[-3] * words, F32

    def products(self, x: Any, packed: Any, columns: int, weights: int) -> list[Any]:
        matrices = deinterleave_array(packed, self.storage, columns, weights, self.integer)
        x = numbers_of(x, self.storage.block) if self.integer else x
        return [np.matmul(x, w.astype(x.dtype, copy=False)) for w in matrices]

    def loops(self, scheduler: Scheduler, node: Node) -> Sequence[View]:
        return _interleave(scheduler, node, self)

    def blocks(self, target: CpuTarget) -> Blocks:
        from rlx.backends.cpu.forms import panels, quantised_dots  # kernels that read this layout

        kernels = quantised_dots.block_kernels if self.integer else panels.block_kernels
        return kernels(self.storage, target)

    def arithmetic(self) -> str | None:
        from rlx.backends.cpu.forms.quantised_dots import dot_of

        return dot_of(self.storage) if self.integer else None


def separate_fields(storage: DType) -> list[int]:
    """The units of a block that panels store separately: its f16 fields, if the rest is 32-bit words.

    In a block of an odd number of bytes, whose units are bytes, that is the scale.
    """
    fields: Mapping[str, Any] = storage.numpy.fields or {}
    alone = np.float16 if storage.unit == 2 else np.uint8
    units = [offset // storage.unit for base, offset, *_ in fields.values() if base == alone]
    return units if (storage.size - storage.unit * len(units)) % 4 == 0 else []


def first_word(storage: DType) -> int:
    """The byte offset in a block where words begin."""
    return storage.unit * sum(unit == i for i, unit in enumerate(separate_fields(storage)))


def has_panels(storage: DType) -> bool:
    """Whether blocks of a type can be interleaved."""
    return (storage.size - storage.unit * len(separate_fields(storage))) % 4 == 0


@dataclass(frozen=True, slots=True)
class Bits:
    """Moves some bits of a block's words to their position in a panel's word: `word >> right & mask`."""

    word: int
    right: int = 0  # negative: left shift
    mask: int = (1 << 32) - 1

    def moved(self, word: Any) -> Any:
        return (word >> self.right if self.right >= 0 else word << -self.right) & self.mask

    def back(self, word: Any) -> Any:
        selected = word & self.mask
        return selected << self.right if self.right >= 0 else selected >> -self.right


@dataclass(frozen=True, slots=True)
class WordRun:
    """Words of a panel, each combined from `bits`, which name the first of `count` source words."""

    count: int
    bits: tuple[Bits, ...]


def _six_bit_runs() -> list[WordRun]:
    """Blocks of q6_k: scales, then three words per four words of codes; the codes of the fourth fill the top bits.

    A file stores low halves and high bits of codes apart, and a code of any of the four planes takes two shifts. Here
    three of four codes take only a mask, and memory is read in order.
    """
    low, pair, top = (each * 0x01010101 for each in (0x0F, 0x30, 0xC0))

    def where(run: int) -> tuple[int, int, int]:
        """The words and the plane of a run of 16 codes: the first word of its low halves and of its high bit pairs."""
        half, plane, first = run // 8, run // 2 % 4, 4 * (run % 2)
        return 16 * half + 8 * (plane % 2) + first, 32 + 8 * half + first, plane

    runs = [WordRun(4, (Bits(48),))]
    for group in range(4):
        halves, pairs, plane = where(4 * group + 3)
        nibble = 4 * (plane // 2)
        fourth = [Bits(halves, nibble - 6, top), Bits(halves, nibble - 4, top), Bits(pairs, 2 * plane - 6, top)]
        for i, more in enumerate(fourth):
            halves, pairs, plane = where(4 * group + i)
            code = Bits(halves, 4 * (plane // 2), low), Bits(pairs, 2 * plane - 4, pair)
            runs.append(WordRun(4, (*code, more)))
    return runs


SIX_BIT_RUNS = _six_bit_runs()


def word_runs(storage: DType, integer: bool) -> list[WordRun]:
    """The order of a block's 32-bit words in panels: that of files, or that of integer kernels."""
    if integer and storage.name == "q6_k":
        return SIX_BIT_RUNS
    return [WordRun((storage.size - storage.unit * len(separate_fields(storage))) // 4, (Bits(0),))]


def panel_bits(storage: DType, wanted: Bits) -> list[Bits]:
    """Where panels of integer kernels store some bits of a block's words: the inverse of `word_runs`."""
    places, at = [], 0
    for run in word_runs(storage, integer=True):
        for bits in run.bits:
            common = wanted.back(wanted.mask) & bits.back(bits.mask)
            index = wanted.word - bits.word
            if common and 0 <= index < run.count:
                places.append(Bits(at + index, wanted.right - bits.right, wanted.moved(common)))
        at += run.count
    return places


def _word_units(storage: DType) -> list[int]:
    """The units of a block that belong to words."""
    apart = separate_fields(storage)
    return [u for u in range(storage.size // storage.unit) if u not in apart]


def _unit_type(storage: DType) -> Any:
    return np.int16 if storage.unit == 2 else np.uint8


def interleave_array(*ws: Any, width: int, lanes: int, integer: bool) -> Any:
    """Packed rows [..., n, blocks] as panels of `width` columns: [..., panels, blocks, vectors, units]."""
    if ws[0].ndim == 3:
        groups = zip(*ws, strict=True)
        return np.stack([interleave_array(*w, width=width, lanes=lanes, integer=integer) for w in groups])
    n, blocks = ws[0].shape
    part, storage = width // len(ws), dtype_of(ws[0].dtype)
    count, units = -(-n // part), storage.size // storage.unit
    apart, rest = separate_fields(storage), _word_units(storage)
    rows = [np.ascontiguousarray(w).view(_unit_type(storage)).reshape(n, blocks, units) for w in ws]
    padded = [np.pad(r, ((0, count * part - n), (0, 0), (0, 0))).reshape(count, part, blocks, units) for r in rows]
    columns = np.concatenate(padded, axis=1).reshape(count, width // lanes, lanes, blocks, units)
    words = np.ascontiguousarray(columns[..., rest]).view(np.uint32)
    panel_words = np.zeros_like(words)
    at = 0
    for run in word_runs(storage, integer):
        for bits in run.bits:
            panel_words[..., at : at + run.count] |= bits.moved(words[..., bits.word : bits.word + run.count])
        at += run.count
    units_of_words = panel_words.view(_unit_type(storage)).reshape(*columns.shape[:-1], -1, 4 // storage.unit)
    split = [columns[..., apart], units_of_words]
    ordered = [p.transpose(0, 3, 1, 4, 2, *range(5, p.ndim)).reshape(count, blocks, width // lanes, -1) for p in split]
    return np.ascontiguousarray(np.concatenate(ordered, axis=-1)).view(np.int16)


def deinterleave_array(panels: Any, storage: DType, columns: int, weights: int, integer: bool) -> list[Any]:
    """The matrices [k, n] in f32 whose packed rows were interleaved."""
    panels = np.ascontiguousarray(panels).view(_unit_type(storage))
    count, blocks, vectors, size = panels.shape
    units = storage.size // storage.unit
    lanes = size // units
    apart, rest = separate_fields(storage), _word_units(storage)
    rows = np.empty((count, vectors, lanes, blocks, units), panels.dtype)
    cut = len(apart) * lanes
    halves = panels[..., :cut].reshape(count, blocks, vectors, -1, lanes)
    rows[..., apart] = halves.transpose(0, 2, 4, 1, 3)
    pairs = panels[..., cut:].reshape(count, blocks, vectors, -1, lanes, 4 // storage.unit).transpose(0, 2, 4, 1, 3, 5)
    panel_words = np.ascontiguousarray(pairs.reshape(count, vectors, lanes, blocks, -1)).view(np.uint32)
    words = np.zeros_like(panel_words)
    at = 0
    for run in word_runs(storage, integer):
        for bits in run.bits:
            words[..., bits.word : bits.word + run.count] |= bits.back(panel_words[..., at : at + run.count])
        at += run.count
    rows[..., rest] = words.view(panels.dtype)
    part = vectors * lanes // weights
    split = rows.reshape(count, weights, part, blocks * units)
    packed = [np.ascontiguousarray(split[:, i]).reshape(count * part, -1)[:columns] for i in range(weights)]
    return [unpack_blocks(p.view(storage.numpy)).T for p in packed]


def _moved(word: Expr, bits: Bits) -> Expr:
    """Bits of a word, moved to their position in a panel; no mask includes bits filled by shifting signed words."""
    shifted = word >> bits.right if bits.right >= 0 else word << -bits.right
    return shifted & signed_word(bits.mask)


def _interleave(s: Scheduler, node: Node, layout: Interleaved) -> Sequence[View]:
    """A unit is one block of all columns of a panel; zeros beyond the last column."""
    out = s.result(node)
    matrices = [s.view(o) for o in node.operands]
    storage, lanes, width = layout.storage, layout.lanes, layout.width
    part, unit_type, units = width // len(matrices), unit_of(storage), storage.size // storage.unit
    builder = LoopBuilder("interleave_blocks")
    for view in matrices:
        builder.param(View(view.buffer, unit_type, view.shape, view.strides, view.offset))
    words = builder.param(View(out.buffer, I32, out.shape, out.strides, out.offset // 2), written=True)
    half = builder.param(
        View(out.buffer, unit_type, out.shape, out.strides, out.offset * 2 // storage.unit), written=True
    )
    *groups, n, blocks = node.operands[0].type.array_shape  # type: ignore[union-attr]
    lets = decode_unit(builder, [*groups, out.shape[-4], blocks], ["g", "p", "k"][-2 - len(groups) :])
    columns, count = builder.arg("columns", n), builder.arg("blocks", blocks)
    row = builder.arg("row", blocks * units)
    separate, first, c = separate_fields(storage), first_word(storage) // storage.unit, Index("c")
    vectors, start = width // lanes, len(separate) * lanes * storage.unit // 4
    many_units, bits = 4 // storage.unit, 8 * storage.unit  # units per word, and bits per unit
    body: list[Stmt] = []
    for source in range(len(matrices)):  # matrices' vectors follow each other in a panel
        v, many = Index("v"), vectors // len(matrices)
        panel: Expr = Ref("p", I64)
        at = panel * part + v * lanes + c
        inside, row_number = at < columns, at
        if groups:
            group = Ref("g", I64)
            row_number, panel = group * columns + at, group * builder.arg("panels", out.shape[-4]) + panel
        number = (panel * count + Ref("k", I64)) * vectors + source * many + v
        column: Place = ((row_number, row), (Ref("k", I64), units))

        def unit(*more: tuple[Expr, int], source: int = source, column: Place = column, inside: Expr = inside) -> Expr:
            return inside.choose(Load(source, (*column, *more), unit_type), 0)

        inner: list[Stmt] = []
        for i, offset in enumerate(separate):
            place: Place = ((number, units * lanes), (Const(i, I64), lanes), (c, 1))
            inner.append(For("c", lanes, (Store(half, place, unit((Const(offset, I64), 1))),), vector=True))
        done = 0
        for run in word_runs(storage, layout.integer):
            w = Index("w")
            value: Expr = Const(0, I32)
            for moved in run.bits:
                word: Expr = Const(0, I32)
                for i in range(many_units):
                    piece = unit((w, many_units), (Const(first + many_units * moved.word + i, I64), 1)).cast(I32)
                    word = word | (piece & (1 << bits) - 1) << bits * i
                value = value | _moved(word, moved)
            place = ((number, storage.size * lanes // 4), (Const(start + done * lanes, I64), 1), (w, lanes), (c, 1))
            store = Store(words, place, value)
            inner.append(For("w", run.count, (For("c", lanes, (store,), vector=True),)))
            done += run.count
        body.append(For("v", many, tuple(inner)))
    total = product((*groups, out.shape[-4], blocks))
    builder.launch(s, For("u", builder.arg("units", total), (*lets, *body)), total, flops=product(out.shape))
    return [out]

"""Unquantised weights in panels: the columns that a matmul tile covers are contiguous."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from rlx.dtypes import I8, I16, I32, I64, DType
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Node
from rlx.lir.loops import Const, Expr, For, Index, Load, Place, Ref, Stmt, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit
from rlx.lir.views import View
from rlx.operand_layouts import WeightLayout
from rlx.types import Size, TensorType, product

FOUR = 4  # bytes per word, multiplied and added up by one instruction


@dataclass(frozen=True, slots=True)
class Panels(WeightLayout):
    """Matrices [..., k, n] as [..., panels, k, width]; each has an equal part of every panel, zero-padded."""

    width: int

    device = "cpu"
    name = "panels"
    plain = True

    def packed_type(self, *ws: TensorType) -> TensorType:
        *groups, k, n = ws[0].shape
        part = self.width // len(ws)
        return ws[0].with_shape(*groups, (n + (part - 1)) // part, k, self.width)

    def pack(self, *ws: Any) -> Any:
        return pack_array(*ws, width=self.width)

    def inner(self, x: TensorType, packed: TensorType) -> tuple[Size, DType]:
        return packed.shape[-2], x.dtype

    def products(self, x: Any, packed: Any, columns: int, weights: int) -> list[Any]:
        return [np.matmul(x, w.astype(x.dtype, copy=False)) for w in unpack_panels(packed, columns, weights)]

    def loops(self, scheduler: Scheduler, node: Node) -> Sequence[View]:
        return _pack(scheduler, node, "pack_panels", self.width)


@dataclass(frozen=True, slots=True)
class Quads(WeightLayout):
    """Weights of 8 bits in panels of words, each with four numbers of a column: [panels, k / 4, width]."""

    width: int

    device = "cpu"
    name = "quads"

    def packed_type(self, *ws: TensorType) -> TensorType:
        k, n = ws[0].shape
        assert ws[0].dtype is I8 and isinstance(k, int) and k % FOUR == 0, "legal before it is packed"
        return TensorType(((n + (self.width - 1)) // self.width, k // FOUR, self.width), I32)

    def pack(self, *ws: Any) -> Any:
        panels = pack_array(*ws, width=self.width)
        count, k, _ = panels.shape
        words = panels.reshape(count, k // FOUR, FOUR, self.width).transpose(0, 1, 3, 2)
        return np.ascontiguousarray(words).view(np.int32)[..., 0]

    def inner(self, x: TensorType, packed: TensorType) -> tuple[Size, DType]:
        return packed.shape[-2] * FOUR, I32

    def products(self, x: Any, packed: Any, columns: int, weights: int) -> list[Any]:
        count, words, width = packed.shape
        numbers = np.ascontiguousarray(packed).view(np.int8).reshape(count, words, width, FOUR)
        (w,) = unpack_panels(numbers.transpose(0, 1, 3, 2).reshape(count, words * FOUR, width), columns, 1)
        exact = np.matmul(x.astype(np.float64), w.astype(np.float64))  # sums are far below 2^53
        return [exact.astype(np.int32)]

    def loops(self, scheduler: Scheduler, node: Node) -> Sequence[View]:
        return _pack(scheduler, node, "pack_bytes", self.width)


def unpack_panels(panels: Any, columns: int, weights: int) -> list[Any]:
    """The matrices that `pack_array` interleaved."""
    count, k, width = panels.shape
    part = width // weights
    split = panels.reshape(count, k, weights, part).transpose(2, 1, 0, 3).reshape(weights, k, count * part)
    return [w[:, :columns] for w in split]


def pack_array(*ws: Any, width: int) -> Any:
    """[..., k, n] matrices as panels of `width` columns, each an equal part of every matrix, zero-padded."""
    if ws[0].ndim == 3:
        return np.stack([pack_array(*each, width=width) for each in zip(*ws, strict=True)])
    k, n = ws[0].shape
    part = width // len(ws)
    count = -(-n // part)
    padded = [np.pad(w, ((0, 0), (0, count * part - n))).reshape(k, count, part) for w in ws]
    return np.ascontiguousarray(np.stack(padded, axis=2).reshape(k, count, width).transpose(1, 0, 2))


def _pack(s: Scheduler, node: Node, name: str, width: int) -> Sequence[View]:
    """A unit is one row of one panel: an equal part of each matrix [k, n], zeros beyond the last column.

    A row of words has four rows of bytes. Narrow floats are moved as bits.
    """
    out = s.result(node)
    matrices = [s.view(o) for o in node.operands]
    panels = out
    if out.dtype.is_float and out.dtype.size == I16.size:
        panels, *matrices = (replace(view, dtype=I16) for view in (out, *matrices))
    builder = LoopBuilder(name)
    part = width // len(matrices)
    for view in matrices:
        builder.param(view)
    target = builder.param(panels, written=True)
    *groups, _, n = matrices[0].shape
    lets = decode_unit(builder, out.shape[:-1], ["g", "p", "k"][-2 - len(groups) :])
    columns, depth = builder.arg("columns", n), builder.arg("depth", out.shape[-2])
    j = Index("j")
    body: list[Stmt] = []
    for i, view in enumerate(matrices):
        row = builder.stride(i, "k", view.strides[-2])
        column = builder.stride(i, "n", view.strides[-1], unit=True)
        group: Place = ((Ref("g", I64), builder.stride(i, "g", view.strides[0])),) if groups else ()
        at = Ref("p", I64) * part + j
        inside = at < columns
        if name == "pack_bytes":
            value: Expr = Const(0, I32)
            for byte in range(FOUR):
                number = inside.choose(Load(i, ((Ref("k", I64) * FOUR + byte, row), (at, column)), view.dtype), 0)
                value = value | (number.cast(I32) & 255) << 8 * byte
        else:
            value = inside.choose(Load(i, (*group, (Ref("k", I64), row), (at, column)), view.dtype), 0)
        which: Expr = Ref("p", I64)
        if groups:
            which = Ref("g", I64) * builder.arg("panels", out.shape[-3]) + which
        place = ((which * depth, width), (Ref("k", I64), width), (j, 1), (Const(part * i, I64), 1))
        body.append(For("j", part, (Store(target, place, value),), vector=True))
    units = product(out.shape[:-1])
    builder.launch(s, For("u", builder.arg("units", units), (*lets, *body)), units, flops=product(out.shape))
    return [out]

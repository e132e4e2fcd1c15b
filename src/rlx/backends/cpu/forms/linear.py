"""Matmuls as launches: floats through the matmul kernel with its epilogue, integers as plain loops."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.packing.panels import FOUR
from rlx.backends.cpu.packing.quantised_activations import activations_for
from rlx.backends.cpu.packing.quantised_weights import Interleaved
from rlx.dtypes import F32, I32, I64, U8, DType
from rlx.ir.graph import Node
from rlx.lir.forms.matmul_launch import is_transposed, launch_matmul
from rlx.lir.loops import Arg, Expr, For, Index, Let, Load, Place, Reduce, Ref, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit
from rlx.lir.views import View
from rlx.types import Size, contiguous_strides, product


def matmul(s: Scheduler, node: Node) -> Sequence[View]:
    a, b = (s.view(o) for o in node.operands)
    out = s.result(node)
    if node.types[0].dtype.is_integer:
        _integer_matmul(s, a, b, out)
    else:
        launch_matmul(s, a, [b], [], [out], None, weights=1, layout=None, columns=out.shape[-1])
    return [out]


def fused_matmul(s: Scheduler, node: Node) -> Sequence[View]:
    attrs = node.attrs
    a, *rest = (s.view(o) for o in node.operands)
    layout = attrs["layout"]
    used = attrs["weights"] if layout is None else 1
    assert used == 1, "two weights come packed"
    outs = [s.result(node, i) for i in range(len(node.types))]
    index = rest.pop(used) if node.op == "fused_grouped" else None
    dtype: DType | None = None
    k: Size | None = None
    if a.dtype is U8:
        a = _as_words(a if a.is_contiguous() and a.offset == 0 else s.copied(a))
    if isinstance(layout, Interleaved):
        a = s.copied(a) if is_transposed(a) else a
        if layout.integer:  # rows are words of 8-bit activations
            block = layout.storage.block
            dtype, k = F32, a.shape[-1] // activations_for(block).words * block
    launch_matmul(
        s, a, rest[:1], rest[used:], outs, attrs["body"], weights=attrs["weights"], layout=layout,
        columns=attrs["columns"], index=index, dtype=dtype, k=k,
    )  # fmt: skip
    return outs


def _as_words(view: View) -> View:
    """Bytes in groups of four: rows are a multiple of words."""
    *leading, k = view.shape
    shape = (*leading, k // FOUR)
    return View(view.buffer, I32, shape, contiguous_strides(shape))


def _integer_matmul(s: Scheduler, a: View, b: View, out: View) -> None:
    """Plain loops: a unit is one row of the result, lanes run over its columns."""
    builder = LoopBuilder("matmul_int")
    lead = out.shape[:-2]
    a, b = a.expand((*lead, *a.shape[-2:])), b.expand((*lead, *b.shape[-2:]))
    for view, written in ((a, False), (b, False), (out, True)):
        builder.param(view, written=written)
    names = [f"i{d}" for d in range(len(lead) + 1)]
    lets: list[Let] = decode_unit(builder, [*lead, out.shape[-2]], names)
    k, j, kind = Index("q"), Index("j"), out.dtype

    def place(param: int, view: View, axes: int, *inner: tuple[Expr, Size, bool]) -> Place:
        terms: list[tuple[Expr, int | Arg]] = []
        for axis in range(axes):
            step = builder.stride(param, names[axis], view.strides[axis])
            if step != 0:
                terms.append((Ref(names[axis], I64), step))
        for n, (index, size, unit) in enumerate(inner):
            terms.append((index, builder.stride(param, f"e{n}", size, unit=unit)))
        return tuple(terms)

    rows = len(lead) + 1
    left = Load(0, place(0, a, rows, (k, a.strides[-1], False)), a.dtype).cast(kind)
    right_place = place(1, b, rows - 1, (k, b.strides[-2], False), (j, b.strides[-1], True))
    right = Load(1, right_place, b.dtype).cast(kind)
    total = Reduce("sum", "q", builder.arg("k", a.shape[-1]), left * right)
    store = Store(2, place(2, out, rows, (j, 1, True)), total)
    units = product(out.shape[:-1])
    inner = For("j", builder.arg("n", out.shape[-1]), (store,), vector=True)
    root = For("u", builder.arg("units", units), (*lets, inner))
    builder.launch(s, root, units, flops=product(out.shape) * a.shape[-1] * 2)

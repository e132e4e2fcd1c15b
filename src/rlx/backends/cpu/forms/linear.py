"""Matmuls as launches: floats through the matmul kernel with its epilogue, integers as plain loops."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

from rlx.backends.cpu.forms import block_dots
from rlx.backends.cpu.forms.panels import dot_kernel, dot_rows, unpack_kernel
from rlx.backends.cpu.packing.activations import activations_for
from rlx.backends.cpu.packing.interleaved import Interleaved
from rlx.backends.cpu.packing.panels import FOUR
from rlx.backends.cpu.targets import CpuTarget, cpu_target
from rlx.dtypes import F32, I32, I64, U8, DType
from rlx.ir.graph import Graph, Node
from rlx.lir.forms.elementwise import body_lets
from rlx.lir.kernels import Blocks, MatmulKernel, TileOperand
from rlx.lir.loops import Arg, Const, Expr, For, Index, Let, Load, LoopKernel, Param, Place, Reduce, Ref, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit, map_elements
from rlx.lir.views import View, collapse
from rlx.types import Size, TensorType, contiguous_strides, product


def matmul(s: Scheduler, node: Node) -> Sequence[View]:
    a, b = (s.view(o) for o in node.operands)
    out = s.result(node)
    if node.types[0].dtype.is_integer:
        _integer_matmul(s, a, b, out)
    else:
        launch_matmul(s, a, b, [], [out], None, weights=1, packed=False, columns=out.shape[-1])
    return [out]


def fused_matmul(s: Scheduler, node: Node) -> Sequence[View]:
    attrs = node.attrs
    a, *rest = (s.view(o) for o in node.operands)
    layout = attrs["layout"]
    used = attrs["weights"] if layout is None else 1
    assert used == 1, "two weights come packed"
    outs = [s.result(node, i) for i in range(len(node.types))]
    index = rest.pop(used) if node.op == "fused_grouped" else None
    launch_matmul(
        s, a, rest[0], rest[used:], outs, attrs["body"], weights=attrs["weights"], packed=layout is not None,
        columns=attrs["columns"], storage=layout.storage if isinstance(layout, Interleaved) else None, index=index,
    )  # fmt: skip
    return outs


def _is_turned(a: View) -> bool:
    """Whether the elements of a row do not follow each other."""
    return a.strides[-1] != 1 and a.shape[-1] != 1


def _is_plain(body: Graph | None) -> bool:
    return body is None or (len(body.nodes) == len(body.outputs) == 1 and body.outputs[0].node is body.nodes[0])


def launch_matmul(
    s: Scheduler,
    a: View,
    b: View,
    operands: Sequence[View],
    outs: Sequence[View],
    body: Graph | None,
    *,
    weights: int,
    packed: bool,
    columns: Size,
    storage: DType | None = None,
    index: View | None = None,
    depth: bool = False,
) -> None:
    """One matmul launch. Leading axes and rows collapse into at most two batch axes and one row axis.

    With an `index` each row has one of the matrices of b; with `depth` too, index is where the pieces of k begin of
    which each batch of the outputs has one (see `MatmulKernel`).
    """
    if a.dtype is U8:
        a = _as_words(a if a.is_contiguous() and a.offset == 0 else s.copied(a))
    if storage is not None and _is_turned(a):
        a = s.copied(a)
    operands = [v if v.rank == 0 or v.shape[-1] == 1 or v.strides[-1] in (0, 1) else s.copied(v) for v in operands]

    def collapsed() -> tuple[list[Size], list[list[Size]]] | None:
        return _pieces(a, outs[0]) if depth else _collapse(a, b, operands, outs, packed or index is not None)

    plan = collapsed()
    if plan is not None and _is_turned(a) and plan[1][0][-1] != 1:  # neither its rows nor its columns are contiguous
        a = s.copied(a)
        plan = collapsed()
    if plan is None:
        a = s.contiguous(a)
        operands = [s.copied(v) if v.rank == outs[0].rank and not v.is_contiguous() else v for v in operands]
        plan = collapsed()
        if plan is None:
            leading = outs[0].shape[:-2]
            b = s.copied(b.expand((*leading, *b.shape[-2:])))
            a = s.copied(a.expand((*leading, *a.shape[-2:])))
            operands = [s.copied(v.expand(outs[0].shape)) if v.rank > 2 else v for v in operands]
            plan = collapsed()
    assert plan is not None
    sizes, strides = plan
    m, k = sizes[-1], a.shape[-1]
    whole = storage is not None and a.dtype is I32  # words of 8-bit activations
    if storage is not None and whole:
        k = k // activations_for(storage.block).words * storage.block
    batch1, batch0 = (sizes[-2] if len(sizes) > 1 else 1), (sizes[-3] if len(sizes) > 2 else 1)

    def steps(index: int) -> tuple[Size, Size, Size]:
        own = [0, 0, *strides[index]][-3:]
        return own[0], own[1], own[2]

    tile = _tile_operands(operands, outs)
    dtype = F32 if whole else a.dtype
    target = cpu_target(s.target)
    panel = target.panel(dtype.size)
    epilogue = None if _is_plain(body) else _epilogue(s, body, tile, dtype.wide, panel, weights)
    blocks = None if storage is None else (_whole_blocks if whole else _blocks)(storage, target)
    turned = _is_turned(a)
    sums = None if dtype is dtype.wide else dtype.wide
    stored = b.dtype if storage is None and b.dtype is not dtype and b.dtype.is_float else None
    kernel = MatmulKernel(dtype, packed, weights, epilogue, tuple(tile), blocks, turned, sums=sums, stored=stored)
    b_batch0 = steps(1)[0]
    if index is not None:
        index = _plain_index(s, index)
        kernel = replace(kernel, grouped="depth" if depth else "rows", index=index.dtype)
        b_batch0 = 0 if depth else b.strides[0] * b.dtype.size // (stored or dtype).size
    row_blocks = (m + (kernel.row_block - 1)) // kernel.row_block
    words: dict[str, View | Size | None] = {
        "a": a, "b": b, "m": m, "n": columns, "k": k, "row_blocks": row_blocks, "batch0": batch0, "batch1": batch1,
        "a_row": a.strides[-1] if turned else steps(0)[2], "a_batch0": steps(0)[0], "a_batch1": steps(0)[1],
        "b_batch0": b_batch0, "b_batch1": steps(1)[1],
        "b_k": 0 if packed else b.strides[-2], "b_n": 0 if packed else b.strides[-1],
        "index": index, "groups": b.shape[0],
    }  # fmt: skip
    for i, view in enumerate([*operands, *outs]):
        outer, inner, row = steps(2 + i)
        words |= {f"ptr{i}": view, f"row{i}": row, f"outer{i}": outer, f"inner{i}": inner}
    width = panel // weights  # columns of a panel
    panels = (columns + (width - 1)) // width
    units = batch0 * batch1 * panels * row_blocks
    products = batch1 * m if depth else product(outs[0].shape[:-1])  # rows, each of which has all of k
    flops = products * columns * k * (2 * weights) * (4 if dtype is I32 else 1)
    s.launch(kernel, words, units, "panels", flops=flops)


def _plain_index(s: Scheduler, index: View) -> View:
    """An index as the nest reads it."""
    if index.dtype in (I32, I64) and index.is_contiguous():
        return index
    plain = s.temporary(TensorType(index.shape, I64))
    map_elements(s, "copy", plain.shape, [index], [plain], lambda e: ((), [e.load(0).cast(I64)]))
    return plain


def _pieces(a: View, out: View) -> tuple[list[Size], list[list[Size]]]:
    """Sizes and strides as `_collapse` gives them, of one result for each piece of k."""
    groups, m, _ = out.shape
    return [groups, 1, m], [[0, 0, a.strides[0]], [0, 0, 0], [out.strides[0], 0, out.strides[1]]]


@functools.cache
def _blocks(storage: DType, target: CpuTarget) -> Blocks:
    """The kernels for packed weights; made once, since every layer asks."""
    width, lanes = target.panel(F32.size), target.lanes(F32.size)
    dots = tuple(dot_kernel(storage, width, target, rows) for rows in range(1, dot_rows(storage) + 1))
    return Blocks(storage, unpack_kernel(storage, width, lanes), storage.block * F32.size, dots)


@functools.cache
def _whole_blocks(storage: DType, target: CpuTarget) -> Blocks:
    """The kernels for packed weights and 8-bit activations."""
    width, lanes = target.panel(F32.size), target.lanes(F32.size)
    dots = tuple(block_dots.dot_kernel(storage, width, target, n + 1) for n in range(block_dots.DOT_ROWS))
    heights = block_dots.tile_heights(target)
    tiles = tuple(block_dots.tile_kernel(storage, width, target, n) for n in heights)
    size = block_dots.apart_words(storage) * I32.size
    x_words = activations_for(storage.block).words
    return Blocks(storage, block_dots.codes_kernel(storage, width, lanes), size, dots, tiles, heights[-1], x_words)


def _as_words(view: View) -> View:
    """Bytes four by four: rows are a whole number of words."""
    *leading, k = view.shape
    shape = (*leading, k // FOUR)
    return View(view.buffer, I32, shape, contiguous_strides(shape))


def _collapse(
    a: View, b: View, operands: Sequence[View], outs: Sequence[View], flat: bool
) -> tuple[list[Size], list[list[Size]]] | None:
    """Sizes and strides of [batch0, batch1, rows] for a, b, each operand and each output; None if that does not do."""
    out = outs[0]
    lead = (*out.shape[:-2], out.shape[-2])
    rows: list[list[Size]] = [list(a.expand((*lead, a.shape[-1])).strides[:-1])]
    if flat:
        rows.append([0] * len(lead))
    else:
        rows.append([*b.expand((*out.shape[:-2], *b.shape[-2:])).strides[:-2], 0])
    for view in (*operands, *outs):
        rows.append(list(view.expand(out.shape).strides[:-1]))
    sizes, strides, _ = collapse(lead, rows)
    if not sizes or strides[1][-1] != 0:
        sizes, strides = [*sizes, 1], [[*x, 0] for x in strides]
    return (sizes, strides) if len(sizes) <= 3 else None


def _tile_operands(operands: Sequence[View], outs: Sequence[View]) -> list[TileOperand]:
    tile = []
    for i, view in enumerate([*operands, *outs]):
        columns = 0 if view.rank == 0 or view.shape[-1] == 1 or view.strides[-1] == 0 else 1
        written = i >= len(operands)
        tile.append(TileOperand(f"{'y' if written else 'x'}{i}", view.dtype, 1 if written else columns, written))
    return tile


def _epilogue(
    s: Scheduler, body: Graph | None, tile: Sequence[TileOperand], sums: DType, width: int, weights: int
) -> LoopKernel:
    """The body over one tile: rows of sums in scratch, `width` apart, operands at the tile's place."""
    assert body is not None
    r, j = Index("r"), Index("j")
    params = (Param("sums", sums), *(Param(o.name, o.dtype, o.written) for o in tile))
    inputs: list[Expr] = []
    for i in range(weights):
        offset: Place = ((Const(width // weights * i, I64), 1),) if i else ()
        inputs.append(Load(0, ((r, width), (j, 1), *offset), sums))

    def place(i: int) -> Place:
        row: Place = ((r, Arg(f"row{i}")),)
        return (*row, (j, 1)) if tile[i].columns else row

    reads = [i for i, o in enumerate(tile) if not o.written]
    inputs += [Load(1 + i, place(i), tile[i].dtype).cast(s.target.native(tile[i].dtype)) for i in reads]
    lets, values = body_lets(body, inputs, s.target)
    writes = [i for i, o in enumerate(tile) if o.written]
    stores = [Store(1 + i, place(i), value) for i, value in zip(writes, values, strict=True)]
    inner = For("j", Arg("columns"), (*lets, *stores), vector=True)
    args = ("columns", *(f"row{i}" for i in range(len(tile))))
    name = "_".join(n.op for n in body.nodes if n.op not in ("input", "const"))[:40]
    return LoopKernel(name, params, args, For("r", Arg("rows"), (inner,)))


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

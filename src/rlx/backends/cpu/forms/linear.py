"""Matmuls as launches: floats through the matmul kernel with its epilogue, integers as plain loops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.backends.cpu.packing.interleaved import Interleaved
from rlx.backends.cpu.packing.panels import FOUR
from rlx.backends.cpu.packing.quantised_activations import activations_for
from rlx.dtypes import F32, I32, I64, U8, DType
from rlx.ir.graph import Graph, Node
from rlx.lir.forms.elementwise import body_lets
from rlx.lir.kernels import Epilogue, EpilogueOperand, MatmulKernel, sum_name
from rlx.lir.loops import Arg, Expr, For, Index, Let, Load, Place, Reduce, Ref, Store
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit, map_elements
from rlx.lir.views import View, collapse
from rlx.operand_layouts import WeightLayout
from rlx.types import Size, TensorType, contiguous_strides, product

AXES = ("batch0", "batch1", "row")


def matmul(s: Scheduler, node: Node) -> Sequence[View]:
    a, b = (s.view(o) for o in node.operands)
    out = s.result(node)
    if node.types[0].dtype.is_integer:
        _integer_matmul(s, a, b, out)
    else:
        launch_matmul(s, a, b, [], [out], None, weights=1, layout=None, columns=out.shape[-1])
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
        s, a, rest[0], rest[used:], outs, attrs["body"], weights=attrs["weights"], layout=layout,
        columns=attrs["columns"], index=index,
    )  # fmt: skip
    return outs


def _is_transposed(a: View) -> bool:
    """Whether the elements of a row are not contiguous."""
    return a.strides[-1] != 1 and a.shape[-1] != 1


def _is_plain(body: Graph) -> bool:
    """Whether the sums are the result."""
    return len(body.nodes) == len(body.outputs) == 1 and body.outputs[0].node is body.nodes[0]


def launch_matmul(
    s: Scheduler,
    a: View,
    b: View,
    operands: Sequence[View],
    outs: Sequence[View],
    body: Graph | None,
    *,
    weights: int,
    layout: WeightLayout | None,
    columns: Size,
    index: View | None = None,
    depth: bool = False,
) -> None:
    """One matmul launch. Leading axes and rows collapse into at most two batch axes and one row axis.

    With `index`, each row selects one of the matrices of b; with `depth` as well, index has the offsets of the pieces
    of k, one per batch of the outputs (see `MatmulKernel`).
    """
    blocks = layout if isinstance(layout, Interleaved) else None
    packed = layout is not None
    if a.dtype is U8:
        a = _as_words(a if a.is_contiguous() and a.offset == 0 else s.copied(a))
    if blocks is not None and _is_transposed(a):
        a = s.copied(a)
    operands = [v if v.rank == 0 or v.shape[-1] == 1 or v.strides[-1] in (0, 1) else s.copied(v) for v in operands]

    def collapse_axes() -> tuple[list[Size], list[list[Size]]] | None:
        return _pieces(a, outs[0]) if depth else _collapse(a, b, operands, outs, packed or index is not None)

    plan = collapse_axes()
    if (
        plan is not None and _is_transposed(a) and plan[1][0][-1] != 1
    ):  # neither its rows nor its columns are contiguous
        a = s.copied(a)
        plan = collapse_axes()
    if plan is None:
        a = s.contiguous(a)
        operands = [s.copied(v) if v.rank == outs[0].rank and not v.is_contiguous() else v for v in operands]
        plan = collapse_axes()
        if plan is None:
            leading = outs[0].shape[:-2]
            b = s.copied(b.expand((*leading, *b.shape[-2:])))
            a = s.copied(a.expand((*leading, *a.shape[-2:])))
            operands = [s.copied(v.expand(outs[0].shape)) if v.rank > 2 else v for v in operands]
            plan = collapse_axes()
    assert plan is not None
    sizes, strides = plan
    m, k = sizes[-1], a.shape[-1]
    if blocks is not None and blocks.integer:  # rows are words of 8-bit activations
        k = k // activations_for(blocks.storage.block).words * blocks.storage.block
    batch1, batch0 = (sizes[-2] if len(sizes) > 1 else 1), (sizes[-3] if len(sizes) > 2 else 1)

    def steps(index: int) -> tuple[Size, Size, Size]:
        own = [0, 0, *strides[index]][-3:]
        return own[0], own[1], own[2]

    epilogue_operands = _operands(operands, outs)
    dtype = F32 if blocks is not None and blocks.integer else a.dtype
    epilogue = None if body is None or _is_plain(body) else _epilogue(s, body, epilogue_operands, dtype.wide, weights)
    transposed = _is_transposed(a)
    sums = None if dtype is dtype.wide else dtype.wide
    stored = b.dtype if blocks is None and b.dtype is not dtype and b.dtype.is_float else None
    kernel = MatmulKernel(
        dtype, layout, weights, epilogue, tuple(epilogue_operands), transposed, sums=sums, stored=stored
    )
    b_batch0 = steps(1)[0]
    if index is not None:
        index = _plain_index(s, index)
        kernel = replace(kernel, grouped="depth" if depth else "rows", index=index.dtype)
        b_batch0 = 0 if depth else b.strides[0] * b.dtype.size // (stored or dtype).size
    words: dict[str, View | Size | None] = {
        "a": a, "b": b, "m": m, "n": columns, "k": k, "batch0": batch0, "batch1": batch1,
        "a_row": a.strides[-1] if transposed else steps(0)[2], "a_batch0": steps(0)[0], "a_batch1": steps(0)[1],
        "b_batch0": b_batch0, "b_batch1": steps(1)[1],
        "b_k": 0 if packed else b.strides[-2], "b_n": 0 if packed else b.strides[-1],
        "index": index, "groups": b.shape[0],
    }  # fmt: skip
    for i, (operand, view) in enumerate(zip(epilogue_operands, [*operands, *outs], strict=True)):
        words[operand.name] = view
        words |= {f"{operand.name}_{axis}": step for axis, step in zip(AXES, steps(2 + i), strict=True)}
    products = batch1 * m if depth else product(outs[0].shape[:-1])  # rows, each of which takes all of k
    flops = products * columns * k * (2 * weights) * (4 if dtype is I32 else 1)
    s.launch(kernel, words, flops=flops)


def _plain_index(s: Scheduler, index: View) -> View:
    """An index as the nest reads it."""
    if index.dtype in (I32, I64) and index.is_contiguous():
        return index
    plain = s.temporary(TensorType(index.shape, I64))
    map_elements(s, "copy", plain.shape, [index], [plain], lambda e: ((), [e.load(0).cast(I64)]))
    return plain


def _pieces(a: View, out: View) -> tuple[list[Size], list[list[Size]]]:
    """Sizes and strides as from `_collapse`, for one result per piece of k."""
    groups, m, _ = out.shape
    return [groups, 1, m], [[0, 0, a.strides[0]], [0, 0, 0], [out.strides[0], 0, out.strides[1]]]


def _as_words(view: View) -> View:
    """Bytes in groups of four: rows are a multiple of words."""
    *leading, k = view.shape
    shape = (*leading, k // FOUR)
    return View(view.buffer, I32, shape, contiguous_strides(shape))


def _collapse(
    a: View, b: View, operands: Sequence[View], outs: Sequence[View], flat: bool
) -> tuple[list[Size], list[list[Size]]] | None:
    """Sizes and strides of [batch0, batch1, rows] for a, b, each operand and each output; None if axes do not merge."""
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


def _operands(views: Sequence[View], outs: Sequence[View]) -> list[EpilogueOperand]:
    """The operands of an epilogue; one element per row where columns are broadcast."""
    operands = []
    for i, view in enumerate([*views, *outs]):
        written = i >= len(views)
        broadcast = view.rank == 0 or view.shape[-1] == 1 or view.strides[-1] == 0
        operands.append(EpilogueOperand(f"{'y' if written else 'x'}{i}", view.dtype, written or not broadcast, written))
    return operands


def _epilogue(s: Scheduler, body: Graph, operands: Sequence[EpilogueOperand], sums: DType, weights: int) -> Epilogue:
    """The epilogue body at (row, column) of the result."""
    inputs: list[Expr] = [Ref(sum_name(i), sums) for i in range(weights)]
    inputs += [Ref(o.name, o.dtype).cast(s.target.native(o.dtype)) for o in operands if not o.written]
    lets, values = body_lets(body, inputs, s.target)
    name = "_".join(n.op for n in body.nodes if n.op not in ("input", "const"))[:40]
    return Epilogue(name, tuple(lets), tuple(values))


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

"""Launching the matmul kernel: collapses axes, builds the epilogue, and gives the kernel its words.

Backends with a matmul kernel call it from their forms; preparing operands in layouts of their own is up to them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from rlx.dtypes import I32, I64, DType
from rlx.ir.graph import Graph, Node
from rlx.lir.forms.elementwise import body_lets
from rlx.lir.kernels import Epilogue, EpilogueOperand, MatmulKernel, sum_name, weight_name
from rlx.lir.loops import Expr, Ref
from rlx.lir.schedule import Scheduler, map_elements
from rlx.lir.views import View, collapse
from rlx.operand_layouts import WeightLayout
from rlx.types import Size, TensorType, product

AXES = ("batch0", "batch1", "row")


def is_transposed(a: View) -> bool:
    """Whether the elements of a row are not contiguous."""
    return a.strides[-1] != 1 and a.shape[-1] != 1


def _is_plain(body: Graph) -> bool:
    """Whether the sums are the result."""
    return len(body.nodes) == len(body.outputs) == 1 and body.outputs[0].node is body.nodes[0]


def launch_matmul(
    s: Scheduler,
    a: View,
    matrices: Sequence[View],
    operands: Sequence[View],
    outs: Sequence[View],
    body: Graph | None,
    *,
    weights: int,
    layout: WeightLayout | None,
    columns: Size,
    index: View | None = None,
    depth: bool = False,
    dtype: DType | None = None,
    k: Size | None = None,
) -> None:
    """One matmul launch. Leading axes and rows collapse into at most two batch axes and one row axis.

    `matrices` are the weights, or one tensor that holds all of them in a `layout`. If rows of a are encoded, `dtype`
    and `k` give the type of the products and the size of a row. With `index`, each row selects one of the matrices of
    b; with `depth` as well, index has the offsets of the pieces of k, one per batch of the outputs (see
    `MatmulKernel`).
    """
    packed = layout is not None
    b, *others = _alike(s, matrices)
    operands = [v if v.rank == 0 or v.shape[-1] == 1 or v.strides[-1] in (0, 1) else s.copied(v) for v in operands]

    def collapse_axes() -> tuple[list[Size], list[list[Size]]] | None:
        return _pieces(a, outs[0]) if depth else _collapse(a, b, operands, outs, packed or index is not None)

    plan = collapse_axes()
    if plan is not None and is_transposed(a) and plan[1][0][-1] != 1:  # neither its rows nor its columns are contiguous
        a = s.copied(a)
        plan = collapse_axes()
    if plan is None:
        a = s.contiguous(a)
        operands = [s.copied(v) if v.rank == outs[0].rank and not v.is_contiguous() else v for v in operands]
        plan = collapse_axes()
        if plan is None:
            leading = outs[0].shape[:-2]
            b, *others = (s.copied(w.expand((*leading, *w.shape[-2:]))) for w in (b, *others))
            a = s.copied(a.expand((*leading, *a.shape[-2:])))
            operands = [s.copied(v.expand(outs[0].shape)) if v.rank > 2 else v for v in operands]
            plan = collapse_axes()
    assert plan is not None
    sizes, strides = plan
    m, k = sizes[-1], a.shape[-1] if k is None else k
    batch1, batch0 = (sizes[-2] if len(sizes) > 1 else 1), (sizes[-3] if len(sizes) > 2 else 1)

    def steps(index: int) -> tuple[Size, Size, Size]:
        own = [0, 0, *strides[index]][-3:]
        return own[0], own[1], own[2]

    epilogue_operands = _operands(operands, outs)
    dtype = dtype or a.dtype
    epilogue = None if body is None or _is_plain(body) else _epilogue(s, body, epilogue_operands, dtype.wide, weights)
    transposed = is_transposed(a)
    sums = None if dtype is dtype.wide else dtype.wide
    stored = b.dtype if b.dtype is not dtype and b.dtype.is_float else None
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
    words |= {weight_name(i): w for i, w in enumerate(others, 1)}
    for i, (operand, view) in enumerate(zip(epilogue_operands, [*operands, *outs], strict=True)):
        words[operand.name] = view
        words |= {f"{operand.name}_{axis}": step for axis, step in zip(AXES, steps(2 + i), strict=True)}
    products = batch1 * m if depth else product(outs[0].shape[:-1])  # rows, each of which takes all of k
    flops = products * columns * k * (2 * weights) * (4 if dtype is I32 else 1)
    s.launch(kernel, words, flops=flops)


def _alike(s: Scheduler, matrices: Sequence[View]) -> Sequence[View]:
    """Matrices with the same strides, which is what a kernel of several weights reads."""
    alike = all(w.strides == matrices[0].strides for w in matrices)
    return matrices if alike else [s.contiguous(w) for w in matrices]


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


# -- forms that need no layout ----------------------------------------------------------------------------------------
def grouped_matmul(s: Scheduler, node: Node) -> Sequence[View]:
    x, w, index = (s.view(o) for o in node.operands)
    out = s.result(node)
    launch_matmul(s, x, [w], [], [out], None, weights=1, layout=None, columns=out.shape[1], index=index)
    return [out]


def outer_of_runs(s: Scheduler, node: Node) -> Sequence[View]:
    x, y, offsets = (s.view(o) for o in node.operands)
    out = s.result(node)
    launch_matmul(s, x, [y], [], [out], None, weights=1, layout=None, columns=out.shape[2], index=offsets, depth=True)
    return [out]

"""Matrix products as plain loops: one sum per element of the result, over run-time strides.

A unit is a row of the result; its columns are a vector loop. Quantised weights are read in their file format.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rlx.dtypes import BOOL, F16, I64, DType
from rlx.errors import LowerError
from rlx.formats.quant_blocks import Position
from rlx.ir.graph import Graph, Node
from rlx.lir.forms.elementwise import body_lets
from rlx.lir.forms.index import in_range
from rlx.lir.forms.quant_blocks import Block, RowBlocks, decode
from rlx.lir.kernels import OUT_OF_RANGE
from rlx.lir.loops import Check, Expr, For, Index, Let, Place, Reduce, Ref, Stmt, Store, number
from rlx.lir.schedule import LoopBuilder, Scheduler, decode_unit, loop_form
from rlx.lir.views import View
from rlx.types import product


class Strided:
    """Parameters of a kernel under construction, addressed by one index per axis."""

    def __init__(self, s: Scheduler, name: str) -> None:
        self.builder = LoopBuilder(name)

    def read(self, view: View) -> int:
        return self.builder.param(view)

    def write(self, view: View) -> int:
        return self.builder.param(view, written=True)

    def at(self, param: int, *indices: Expr) -> Place:
        """The address of an element, given its indices on all or the leading axes."""
        strides = self.builder.views[param].strides
        last = len(strides) - 1
        steps = [self.builder.stride(param, str(axis), size, unit=axis == last) for axis, size in enumerate(strides)]
        return tuple((index, step) for index, step in zip(indices, steps, strict=False) if step != 0)

    def load(self, param: int, *indices: Expr) -> Expr:
        return self.builder.load(param, self.at(param, *indices))

    def store(self, param: int, value: Expr, *indices: Expr) -> Store:
        return Store(param, self.at(param, *indices), value)

    def packed(self, rows: View, storage: DType) -> Callable[..., Expr]:
        """A function that loads from quantised rows: the last index is within the row, the others select it."""
        units, halves = self.read(rows), self.read(View(rows.buffer, F16, rows.shape, rows.strides, rows.offset))

        def load(*indices: Expr) -> Expr:
            *row, at = indices
            block = at >> storage.block.bit_length() - 1
            start = (*self.at(units, *row), (block, storage.size // storage.unit))
            source = RowBlocks(lambda unit: (*start, (unit, 1)), units, halves, storage.unit)
            return decode(storage, Block(source, lets=False), Position.of(at & storage.block - 1))

        return load


# -- forms ------------------------------------------------------------------------------------------------------------
@loop_form("matmul", "integer_matmul")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """Float or integer matmul; leading axes broadcast."""
    a, b = (s.view(o) for o in node.operands)
    out = s.result(node)
    multiply(s, a, [b], [], [out])
    return [out]


@loop_form("fused_matmul", "fused_grouped")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """Matmul with one or more weights and an epilogue, grouped or not."""
    attrs = node.attrs
    if attrs["layout"] is not None:
        hint = "optimise the graph for a target that does not prepack weights"
        raise LowerError(f"{node.op}: the weight is packed for a target other than {s.target.name}", hint=hint)
    a, *rest = (s.view(o) for o in node.operands)
    weights, kind = attrs["weights"], node.operands[1].dtype  # type: ignore[union-attr]
    storage = kind if kind.is_packed else None
    matrices, operands = rest[:weights], rest[weights:]
    index = operands.pop(0) if node.op == "fused_grouped" else None
    outs = [s.result(node, i) for i in range(len(node.types))]
    multiply(s, a, matrices, operands, outs, attrs["body"], storage=storage, index=index)
    return outs


def multiply(
    s: Scheduler, a: View, matrices: Sequence[View], operands: Sequence[View], outs: Sequence[View],
    body: Graph | None = None, *, storage: DType | None = None, index: View | None = None, masked: bool = False,
) -> None:  # fmt: skip
    """outs = body(a @ each matrix, operands). With an `index`, row i is multiplied by `matrix[index[i]]`.

    Matrices are [..., k, n], or quantised rows [..., n, k] with a `storage`. With `masked`, zeros of `a` are skipped:
    NaN in masked keys, for example, does not propagate.
    """
    out, j, q = outs[0], Index("j"), Index("q")
    *lead, rows, columns = out.shape
    t = Strided(s, "matmul" if storage is None else f"matmul_{storage}")
    builder = t.builder
    names = [f"i{axis}" for axis in range(len(lead) + 1)]
    stmts: list[Stmt] = [*decode_unit(builder, [*lead, rows], names)]
    at = [Ref(name, I64) for name in names]
    which: list[Expr] = list(at[:-1])
    if index is not None:
        position = t.load(t.read(index), at[-1]).cast(I64)
        ok = in_range(Ref("group", I64), builder.arg("groups", matrices[0].shape[0]))
        stmts += [Let("group", position), Let("ok", ok), Check(Ref("ok", BOOL), OUT_OF_RANGE)]
        which = [Ref("group", I64)]
    kind = out.dtype if a.dtype.is_integer else a.dtype.wide  # of accumulators
    left = t.load(t.read(a.expand((*lead, rows, a.shape[-1]))), *at, q).cast(kind)
    sums: list[Let] = []
    for i, matrix in enumerate(matrices):
        shape = matrix.shape if index is not None else (*lead, *matrix.shape[-2:])
        if storage is not None:
            right = t.packed(matrix.expand(shape), storage)(*which, j, q).cast(kind)
        else:
            right = t.load(t.read(matrix.expand(shape)), *which, q, j).cast(kind)
        if index is not None:
            right = Ref("ok", BOOL).choose(right, number(0, kind))
        term = left.ne(0.0).choose(left * right, 0.0) if masked else left * right
        sums.append(Let(f"sum{i}", Reduce("sum", "q", builder.arg("k", a.shape[-1]), term)))
    values: list[Expr] = [Ref(let.name, kind) for let in sums]
    lets: list[Let] = []
    if body is not None:
        epilogue_reads = [t.load(t.read(v.expand(out.shape)), *at, j) for v in operands]
        lets, values = body_lets(body, [*values, *epilogue_reads], s.target)
    stores = [t.store(t.write(view), value, *at, j) for view, value in zip(outs, values, strict=True)]
    columns_loop = For("j", builder.arg("n", columns), (*sums, *lets, *stores), vector=True)
    units = product([*lead, rows])
    flops = product(out.shape) * a.shape[-1] * (2 * len(matrices))
    builder.launch(s, For("u", builder.arg("units", units), (*stmts, columns_loop)), units, flops=flops)

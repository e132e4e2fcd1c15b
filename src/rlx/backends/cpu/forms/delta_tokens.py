"""Recurrences whose state is a matrix, token by token: gated linear attention and the gated delta net."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.backends.cpu.targets import cpu_target
from rlx.dtypes import I64, DType
from rlx.ir.graph import Node
from rlx.lir.forms.named_operands import Operands
from rlx.lir.forms.ragged import COUNT, TOKEN, Tokens, clear_padding
from rlx.lir.forms.recurrent import find_start, read_segments, results_of, unless_start
from rlx.lir.loops import Assign, Const, Expr, For, Index, Let, Place, Ref, Stmt, Store, Var, fma, known
from rlx.lir.schedule import Scheduler, decode_unit, map_elements
from rlx.lir.views import View
from rlx.types import Size, TensorType, product

VECTORS = (2, 1)  # columns of one unit, in vectors; the first that divides the matrix, and half the L1 cache has room


def gated_linear_attention(s: Scheduler, node: Node) -> Sequence[View]:
    outs, state = results_of(s, node)
    clear_padding(s, node, outs[0])
    by_token(s, node, outs[0], state, outs[1], 1)
    return outs


def by_token(
    s: Scheduler, node: Node, out: View, state: View | None, last: View | None, times: Size, fewer: int | None = None
) -> None:
    """A unit is some columns of one head's matrix, which no other column needs: a copy of them, without gaps, stays in
    the L1 cache for all tokens. The vector loop goes over columns. There are `times` as many units: none, or all.

    Of ragged tokens, only rows that have `fewer` than so many are walked.
    """
    corrects = node.op.startswith("gated_delta_net")
    operands, tokens = Operands(s, node.op), Tokens.of(s, node)
    names = ("q", "k", "v", "g", "beta") if corrects else ("q", "k", "v", "g")
    out = tokens.rectangular(out)
    batch, (heads, columns) = tokens.states, out.shape[2:]
    rows, kind = s.view(node.operands[0]).shape[-1], out.dtype.wide
    assert isinstance(rows, int) and isinstance(columns, int)
    for name, operand in zip(names, node.operands, strict=False):
        view = tokens.rectangular(s.view(operand))
        operands.read(name, _exponentials(s, view, kind) if name == "g" else view)
    read_segments(operands, node)
    tokens.read(operands)
    operands.write("out", out)
    if state is not None and last is not None:
        operands.carry(state, last)
    span = cpu_target(s.target).lanes(kind.size)
    vectors = next((v for v in VECTORS if columns % (v * span) == 0), 0)  # side by side, so that sums do not wait
    span = span if vectors else columns
    vectors = vectors or 1
    width = vectors * span
    operands.write("matrix", s.temporary(TensorType((batch, heads, columns // width, rows, width), kind)))
    builder = operands.builder
    lets = decode_unit(builder, [batch, heads, columns // width], ["b", "h", "c"])
    b, h, i, j = Ref("b", I64), Ref("h", I64), Index("i"), Index("j")
    entry, t = (tokens.entry(b), TOKEN) if tokens.ragged else (b, Index("t"))
    zero, first = Const(0, I64), Ref("c", I64) * width
    lets.append(operands.base("matrix", b, h, Ref("c", I64), zero, zero))
    group: Expr = h
    if not corrects:
        groups = s.view(node.operands[0]).shape[-2]
        lets.append(Let("group", h.quot(builder.arg("group_heads", heads // groups))))
        group = Ref("group", I64)

    def cell(v: int) -> Place:
        return ((Ref("matrix_base", I64), 1), (i, width), (Const(v * span, I64), 1), (j, 1))

    def column(name: str, v: int) -> Place:
        return ((Ref(f"{name}_base", I64), 1), (Const(v * span, I64), 1), (j, 1))

    def component(name: str) -> Expr:
        return operands.load_at(name, ((Ref(f"{name}_base", I64), 1), (i, 1)))

    def each(*names: str) -> list[list[Ref]]:
        return [[Ref(f"{name}{v}", kind) for v in range(vectors)] for name in names]

    seen, change, read, new = each("seen", "change", "read", "new")
    decay, rate, key, query = (Ref(name, kind) for name in ("decay", "rate", "key", "query"))
    look: list[Stmt] = [Let("key", component("k"))]
    update: list[Stmt] = [Let("key", component("k")), Let("query", component("q"))]
    changes: list[Stmt] = []
    results: list[Stmt] = []
    for v in range(vectors):
        value = operands.load_at("v", column("v", v))
        look.append(Assign(seen[v].name, fma(operands.load_at("matrix", cell(v)), key, seen[v])))
        missing = (value - unless_start(operands, decay * seen[v])) * rate if corrects else value
        changes.append(Let(change[v].name, missing))
        kept = unless_start(operands, decay * operands.load_at("matrix", cell(v)))
        update.append(Let(new[v].name, fma(key, change[v], kept)))
        update.append(operands.store_at("matrix", new[v], cell(v)))
        update.append(Assign(read[v].name, fma(new[v], query, read[v])))
        result = read[v] * (1 / math.sqrt(rows)) if corrects else read[v]
        results.append(operands.store_at("out", result, column("out", v)))
    looks: tuple[Stmt, ...] = (*(Var(x.name, Const(0.0, kind)) for x in seen), For("i", rows, tuple(look)))
    of_columns: tuple[Stmt, ...] = (
        *(looks if corrects else ()),
        *(Var(x.name, Const(0.0, kind)) for x in read),
        *changes,
        For("i", rows, tuple(update)),
        *results,
    )
    token: tuple[Stmt, ...] = (
        *(tokens.find(operands, Index("t")) if tokens.ragged else ()),
        *find_start(operands, b, t),
        Let("decay", operands.load("g", entry, t, h)),
        *((Let("rate", operands.load("beta", entry, t, h)),) if corrects else ()),
        *(operands.base(name, entry, t, group, zero) for name in ("q", "k")),
        *(operands.base(name, entry, t, h, first) for name in ("v", "out")),
        For("j", span, of_columns, vector=True),
    )
    walk = For("t", tokens.own(operands), token)
    units = batch * heads * (columns // width) * times
    whole = _whole_matrix(operands, rows, width, state is not None, walk)
    carried = tokens.unless_idle(operands, *whole)
    if tokens.ragged and fewer is not None:
        few = Let("few", (fewer > COUNT).select(known(1, I64), 0))
        carried = few, For("again", Ref("few", I64), carried)
    root = For("u", builder.arg("units", units), (*lets, *tokens.count_own(operands, b), *carried))
    builder.launch(s, root, units, split="columns", flops=product(out.shape) * (6 * rows) * times)


def _whole_matrix(operands: Operands, rows: int, width: int, carried: bool, walk: For) -> list[Stmt]:
    """The walk, between copying the columns of the state in and out, or from zeros."""
    kind = operands.builder.params[operands.numbers["matrix"]].dtype
    b, h, i, j = Ref("b", I64), Ref("h", I64), Index("i"), Index("j")
    at = Ref("c", I64) * width + j
    here: Place = ((Ref("matrix_base", I64), 1), (i, width), (j, 1))

    def each_cell(store: Store) -> For:
        return For("i", rows, (For("j", width, (store,), vector=True),))

    start = operands.load("state", b, h, i, at) if carried else Const(0.0, kind)
    copied: list[Stmt] = [each_cell(operands.store_at("matrix", start, here)), walk]
    if carried:
        copied.append(each_cell(operands.store("final", operands.load_at("matrix", here), b, h, i, at)))
    return copied


def _exponentials(s: Scheduler, x: View, kind: DType) -> View:
    """exp(x) in a launch of its own: number by number it costs more than a token's whole matrix."""
    out = s.temporary(TensorType(x.shape, kind))
    map_elements(s, "exp", x.shape, [x], [out], lambda e: ((), [e.load_wide(0).cast(kind).exp()]))
    return out

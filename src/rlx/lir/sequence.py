"""Loop forms of recurrences: one pass over the tokens, the state in registers (selective scan) or in its own buffer."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.dtypes import BOOL, I64, DType
from rlx.ir.graph import Node
from rlx.lir.cache import may_write
from rlx.lir.loops import Apply, Arg, Assign, Choose, Const, Expr, For, Index, Let, Load, Ref, Stmt, Store, Var
from rlx.lir.schedule import Elements, LoopBuilder, Scheduler, cast, decode_unit, loop_form, map_elements, widened
from rlx.lir.views import View
from rlx.types import TensorType, product

Place = tuple[tuple[Expr, int | Arg], ...]
CHANNELS = 32  # of one unit of a selective scan
VECTORS = (4, 2, 1)  # columns of one unit of a gated delta net, in vectors; the first that divides the matrix


def _binary(op: str, a: Expr, b: Expr) -> Expr:
    return Apply(op, (a, b), a.dtype)


def _mul(a: Expr, b: Expr) -> Expr:
    return _binary("mul", a, b)


def _fma(a: Expr, b: Expr, c: Expr) -> Expr:
    return Apply("fma", (a, b, c), a.dtype)


def _exp(x: Expr) -> Expr:
    return Apply("exp", (x,), x.dtype)


class _Operands:
    """Contiguous parameters by name, addressed by one index an axis."""

    def __init__(self, s: Scheduler, name: str) -> None:
        self.scheduler = s
        self.builder = LoopBuilder(name)
        self.numbers: dict[str, int] = {}

    def read(self, name: str, view: View) -> None:
        self.numbers[name] = self.builder.param(self.scheduler.contiguous(view), name=name)

    def write(self, name: str, view: View) -> None:
        self.numbers[name] = self.builder.param(view, written=True, name=name)

    def carry(self, node: Node, state: View) -> View:
        """`state` is read and `final` written: the same memory where the state is ours to change."""
        if state.is_contiguous() and may_write(self.scheduler, node, state):
            self.write("state", state)
            self.numbers["final"] = self.numbers["state"]
            return state
        self.read("state", state)
        final = self.scheduler.result(node, 1)
        self.write("final", final)
        return final

    def place(self, name: str, *indices: Expr) -> Place:
        """The last index moves one element at a time."""
        number = self.numbers[name]
        strides = self.builder.views[number].strides
        steps = [self.builder.arg(f"{name}_{i}", stride) for i, stride in enumerate(strides[:-1])]
        return (*zip(indices[:-1], steps, strict=True), (indices[-1], 1))

    def load(self, name: str, *indices: Expr) -> Expr:
        return self.load_at(name, self.place(name, *indices))

    def load_at(self, name: str, place: Place) -> Expr:
        number = self.numbers[name]
        return widened(Load(number, place, self.builder.params[number].dtype))

    def store(self, name: str, value: Expr, *indices: Expr) -> Store:
        return self.store_at(name, value, self.place(name, *indices))

    def store_at(self, name: str, value: Expr, place: Place) -> Store:
        return Store(self.numbers[name], place, value)

    def base(self, name: str, *indices: Expr) -> Let:
        """`{name}_base`, the sum of an address once and for all: loops that are inside need not add it up again."""
        total: Expr = Const(0, I64)
        for index, stride in self.place(name, *indices):
            total = _binary("add", total, _mul(index, Const(stride, I64) if isinstance(stride, int) else stride))
        return Let(f"{name}_base", total)


@loop_form("selective_scan", "selective_scan_carry")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """Lanes are channels; each walks the tokens with its n numbers of state in registers."""
    carried = node.op == "selective_scan_carry"
    names = ("x", "delta", "a", "b", "c", "state", "d") if carried else ("x", "delta", "a", "b", "c", "d")
    operands = _Operands(s, node.op)
    outs = [s.result(node)]
    for name, operand in zip(names, node.operands, strict=True):
        if operand is not None and name != "state":
            operands.read(name, s.view(operand))
    operands.write("y", outs[0])
    if carried:
        outs.append(operands.carry(node, s.view(node.operands[names.index("state")])))
    n, kind = node.attrs["state_size"], outs[0].dtype.compute
    batch, seq, channels = outs[0].shape
    j, b, t = Index("j"), Index("b"), Index("t")

    def number(i: int) -> Const:
        return Const(i, I64)

    rates: list[Stmt] = [Let(f"a{i}", operands.load("a", j, number(i))) for i in range(n)]
    start = [Var(f"h{i}", operands.load("state", b, j, number(i)) if carried else Const(0.0, kind)) for i in range(n)]
    step: list[Stmt] = [Let("dt", operands.load("delta", b, t, j)), Let("now", operands.load("x", b, t, j))]
    step.append(Let("drive", _mul(Ref("dt", kind), Ref("now", kind))))
    y: Expr = _mul(operands.load("d", j), Ref("now", kind)) if "d" in operands.numbers else Const(0.0, kind)
    for i in range(n):
        decay = _exp(_mul(Ref("dt", kind), Ref(f"a{i}", kind)))
        driven = _mul(Ref("drive", kind), operands.load("b", b, t, number(i)))
        step.append(Assign(f"h{i}", _fma(decay, Ref(f"h{i}", kind), driven)))
        step.append(Let(f"y{i}", _fma(operands.load("c", b, t, number(i)), Ref(f"h{i}", kind), y)))
        y = Ref(f"y{i}", kind)
    step.append(operands.store("y", y, b, t, j))
    last = [operands.store("final", Ref(f"h{i}", kind), b, j, number(i)) for i in range(n)] if carried else []
    builder = operands.builder
    walk = For("t", builder.arg("seq", seq), tuple(step))
    rows = For("b", builder.arg("batch", batch), (*start, walk, *last))
    root = For("j", builder.arg("channels", channels), (*rates, rows), vector=True)
    units = (channels + (CHANNELS - 1)) // CHANNELS
    builder.launch(s, root, units, chunk=CHANNELS, split="channels", flops=product(outs[0].shape) * (8 * n))
    return outs


@loop_form("gated_delta_net", "gated_delta_net_carry", "gated_linear_attention_carry")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is some columns of one head's matrix, which no other column needs: a copy of them, without gaps, stays in
    the L1 cache for all tokens. Lanes are columns.
    """
    carried, corrects = node.op.endswith("_carry"), node.op.startswith("gated_delta_net")
    operands = _Operands(s, node.op)
    names = ("q", "k", "v", "g", "beta") if corrects else ("q", "k", "v", "g")
    out = s.result(node)
    batch, seq, heads, columns = out.shape
    rows, kind = s.view(node.operands[0]).shape[3], out.dtype.compute
    assert isinstance(rows, int) and isinstance(columns, int)
    for name, operand in zip(names, node.operands, strict=False):
        operands.read(name, _exponentials(s, s.view(operand), kind) if name == "g" else s.view(operand))
    operands.write("out", out)
    outs = [out, operands.carry(node, s.view(node.operands[-1]))] if carried else [out]
    lanes = s.target.lanes(kind.size)
    vectors = next((v for v in VECTORS if columns % (v * lanes) == 0), 0)  # side by side, so that sums do not wait
    span = lanes if vectors else columns
    vectors = vectors or 1
    width = vectors * span
    operands.write("matrix", s.temporary(TensorType((batch, heads, columns // width, rows, width), kind)))
    builder = operands.builder
    lets = decode_unit(builder, [batch, heads, columns // width], ["b", "h", "c"])
    b, h, t, i, j = Ref("b", I64), Ref("h", I64), Index("t"), Index("i"), Index("j")
    zero, first = Const(0, I64), _mul(Ref("c", I64), Const(width, I64))
    lets.append(operands.base("matrix", b, h, Ref("c", I64), zero, zero))
    group: Expr = h
    if not corrects:
        groups = s.view(node.operands[0]).shape[2]
        lets.append(Let("group", _binary("quot", h, builder.arg("group_heads", heads // groups))))
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
        look.append(Assign(seen[v].name, _fma(operands.load_at("matrix", cell(v)), key, seen[v])))
        missing = _mul(_binary("sub", value, _mul(decay, seen[v])), rate) if corrects else value
        changes.append(Let(change[v].name, missing))
        kept = _mul(decay, operands.load_at("matrix", cell(v)))
        update.append(Let(new[v].name, _fma(key, change[v], kept)))
        update.append(operands.store_at("matrix", new[v], cell(v)))
        update.append(Assign(read[v].name, _fma(new[v], query, read[v])))
        result = _mul(read[v], Const(1 / math.sqrt(rows), kind)) if corrects else read[v]
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
        Let("decay", operands.load("g", b, t, h)),
        *((Let("rate", operands.load("beta", b, t, h)),) if corrects else ()),
        *(operands.base(name, b, t, group, zero) for name in ("q", "k")),
        *(operands.base(name, b, t, h, first) for name in ("v", "out")),
        For("j", span, of_columns, vector=True),
    )
    walk = For("t", builder.arg("seq", seq), token)
    units = batch * heads * (columns // width)
    root = For("u", builder.arg("units", units), (*lets, *_whole_matrix(operands, rows, width, carried, walk)))
    builder.launch(s, root, units, split="columns", flops=product(out.shape) * (6 * rows))
    return outs


def _whole_matrix(operands: _Operands, rows: int, width: int, carried: bool, walk: For) -> list[Stmt]:
    """The walk, between copying the columns of the state in and out, or from zeros."""
    kind = operands.builder.params[operands.numbers["matrix"]].dtype
    b, h, i, j = Ref("b", I64), Ref("h", I64), Index("i"), Index("j")
    at = _binary("add", _mul(Ref("c", I64), Const(width, I64)), j)
    here: Place = ((Ref("matrix_base", I64), 1), (i, width), (j, 1))

    def each_cell(store: Store) -> For:
        return For("i", rows, (For("j", width, (store,), vector=True),))

    start = operands.load("state", b, h, i, at) if carried else Const(0.0, kind)
    copied: list[Stmt] = [each_cell(operands.store_at("matrix", start, here)), walk]
    if carried:
        copied.append(each_cell(operands.store("final", operands.load_at("matrix", here), b, h, i, at)))
    return copied


def _exponentials(s: Scheduler, x: View, kind: DType) -> View:
    """exp(x) in a launch of its own: lane by lane it costs more than a token's whole matrix."""
    out = s.temporary(TensorType(x.shape, kind))
    map_elements(s, "exp", x.shape, [x], [out], lambda e: ((), [_exp(cast(e.load(0), kind))]))
    return out


@loop_form("depthwise_conv1d_causal", "depthwise_conv1d_causal_carry")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    x, weight, before, *lengths = (s.view(o) for o in node.operands)
    out = s.result(node)
    size = node.attrs["kernel_size"]
    taps = s.contiguous(weight)
    shape = out.shape
    reads = [
        View(x.buffer, x.dtype, shape, x.strides, x.offset - x.strides[1] * (size - 1)),
        View(before.buffer, before.dtype, shape, before.strides, before.offset),
        View(taps.buffer, taps.dtype, shape, (0, 0, size), taps.offset),
    ]

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        token = e.index(1)
        total: Expr | None = None
        for k in range(size):
            here = (Const(k, I64), e.arg("x_token", x.strides[1]))
            pad = (Const(k, I64), e.arg("pad_token", before.strides[1]))
            value = e.load(0, here)
            if k < size - 1:
                early = Apply("lt", (token, Const(size - 1 - k, I64)), BOOL)
                value = Choose(early, e.load(1, pad), value)
            tap = e.load(2, (Const(k, I64), 1))
            product_ = _mul(cast(value, tap.dtype), tap)
            total = product_ if total is None else _binary("add", total, product_)
        assert total is not None
        return (), [total]

    map_elements(s, "depthwise_conv1d", shape, reads, [out], body, keep=(1,), flops=2 * size)
    return [out, _last_tokens(s, node, x, before, lengths[0])] if lengths else [out]


def _last_tokens(s: Scheduler, node: Node, x: View, before: View, lengths: View) -> View:
    """The tokens of `before` and `x` up to the length of each row, the last ones: in the order in which they are
    written, none is read after its place was taken. Lanes are channels.
    """
    operands = _Operands(s, f"{node.op}_state")
    final = operands.carry(node, before)
    operands.read("x", x)
    operands.read("lengths", lengths)
    builder, size = operands.builder, node.attrs["kernel_size"]
    batch, seq, channels = x.shape
    j, b, end, limit = Index("j"), Index("b"), Ref("end", I64), builder.arg("seq", seq)
    known = cast(operands.load("lengths", b), I64)
    body: list[Stmt] = [Let("end", _binary("min", _binary("max", known, Const(0, I64)), limit))]
    for k in range(size - 1):
        body.append(Let(f"at{k}", _binary("add", end, Const(k, I64))))
        at = Ref(f"at{k}", I64)
        early = Apply("lt", (at, Const(size - 1, I64)), BOOL)
        late = _binary("sub", at, Const(size - 1, I64))
        body.append(
            operands.store(
                "final",
                Choose(early, operands.load("state", b, at, j), operands.load("x", b, late, j)),
                b,
                Const(k, I64),
                j,
            )
        )
    rows = For("b", builder.arg("batch", batch), tuple(body))
    root = For("j", builder.arg("channels", channels), (rows,), vector=True)
    units = (channels + (CHANNELS - 1)) // CHANNELS
    builder.launch(s, root, units, chunk=CHANNELS, split="channels")
    return final

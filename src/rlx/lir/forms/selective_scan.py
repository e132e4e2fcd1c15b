"""Loop forms of the selective scan (one pass over the tokens with the state in registers) and of its gradient."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.dtypes import I64
from rlx.ir.graph import Node
from rlx.lir.forms.named_operands import Operands, state_after
from rlx.lir.forms.ragged import TOKEN, Tokens, clear_padding
from rlx.lir.forms.recurrent import FIRST, REST, find_start, read_segments, unless_start, walk_chunks
from rlx.lir.loops import Assign, Const, Expr, For, Index, Let, Reduce, Ref, Stmt, Var, fma, known
from rlx.lir.schedule import CHUNK, Scheduler, loop_form
from rlx.lir.views import View
from rlx.ops.recurrent import chunks_of
from rlx.types import TensorType, product

CHANNELS = 32  # per unit of a selective scan
NAMES = ("x", "delta", "a", "b", "c", "states", "d_out", "d_last")
RESULTS = ("dx", "ddelta", "da", "db", "dc", "d_state")


@loop_form("selective_scan", "selective_scan_carry", "selective_scan_with_states")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """Each channel walks the tokens with its n state values in registers."""
    carried, saves = node.op != "selective_scan", node.op == "selective_scan_with_states"
    names = ("x", "delta", "a", "b", "c", *(("state",) if carried else ()), *(() if saves else ("d",)))
    operands, tokens = Operands(s, node.op), Tokens.of(s, node)
    outs = [s.result(node)]
    clear_padding(s, node, outs[0])
    for name, operand in zip(names, node.operands, strict=False):
        if operand is not None and name != "state":
            view = s.view(operand)
            operands.read(name, view if name in ("a", "d") else tokens.rectangular(view))
    read_segments(operands, node)
    tokens.read(operands)
    operands.write("y", tokens.rectangular(outs[0]))
    if carried:
        state = s.view(node.operands[names.index("state")])
        outs.append(s.result(node, 1) if saves else state_after(s, node, state))
        operands.carry(state, outs[1])
    if saves:
        outs.append(s.result(node, 2))
        operands.write("states", outs[2])
    n, kind = node.attrs["state_size"], outs[0].dtype.wide
    seq, channels = tokens.width, outs[0].shape[-1]
    builder = operands.builder
    j, b, t = Index("j"), Index("b"), TOKEN
    entry = tokens.entry(b)

    rates: list[Stmt] = [Let(f"a{i}", operands.load("a", j, Const(i, I64))) for i in range(n)]
    start = [
        Var(f"h{i}", operands.load("state", b, j, Const(i, I64)) if carried else Const(0.0, kind)) for i in range(n)
    ]
    step: list[Stmt] = [*find_start(operands, b, t)]
    step += [Let("dt", operands.load("delta", entry, t, j)), Let("now", operands.load("x", entry, t, j))]
    step.append(Let("drive", Ref("dt", kind) * Ref("now", kind)))
    y: Expr = operands.load("d", j) * Ref("now", kind) if "d" in operands.numbers else Const(0.0, kind)
    for i in range(n):
        decay = (Ref("dt", kind) * Ref(f"a{i}", kind)).exp()
        driven = Ref("drive", kind) * operands.load("b", entry, t, Const(i, I64))
        step.append(Assign(f"h{i}", fma(decay, unless_start(operands, Ref(f"h{i}", kind)), driven)))
        step.append(Let(f"y{i}", fma(operands.load("c", entry, t, Const(i, I64)), Ref(f"h{i}", kind), y)))
        y = Ref(f"y{i}", kind)
    step.append(operands.store("y", y, entry, t, j))
    last = [operands.store("final", Ref(f"h{i}", kind), b, j, Const(i, I64)) for i in range(n)] if carried else []
    if saves:
        chunk, first = Index("chunk"), Ref("first", I64)
        size = node.attrs["chunk"]
        saved = [operands.store("states", Ref(f"h{i}", kind), b, chunk, Const(i, I64), j) for i in range(n)]
        left = builder.arg("seq", seq) - first
        bounds = Let("first", chunk * size), Let("rest", known(size, I64).min(left))
        part = For("t", Ref("rest", I64), (Let("token", first + Index("t")), *step))
        walk = For("chunk", builder.arg("chunks", chunks_of(seq, node.attrs["chunk"])), (*bounds, *saved, part))
    else:
        walk = For("t", tokens.own(operands), (*tokens.find(operands, Index("t")), *step))
    own = tokens.count_own(operands, b), tokens.unless_idle(operands, *start, walk, *last)
    rows = For("b", builder.arg("batch", tokens.states), (*own[0], *own[1]))
    root = For("j", builder.arg("channels", channels), (*rates, rows), vector=True)
    units = (channels + (CHANNELS - 1)) // CHANNELS
    builder.launch(s, root, units, chunk=CHANNELS, split="channels", flops=product(outs[0].shape) * (8 * n))
    return outs


@loop_form("selective_scan_backward")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    """A unit is a batch entry. From the last chunk to the first: recompute the decayed state before each token of the
    chunk (`left`), then walk back through the tokens with the gradient of the state (`ds`).
    """
    operands, results = Operands(s, node.op), [s.result(node, i) for i in range(6)]
    for name, operand in zip(NAMES, node.operands, strict=False):
        operands.read(name, s.view(operand))
    read_segments(operands, node)
    for name, view in zip(RESULTS, results, strict=True):
        if name != "da":
            operands.write(name, view)
    n, chunk, kind = node.attrs["state_size"], node.attrs["chunk"], results[0].dtype.wide
    batch, seq, channels = results[0].shape
    of_entries = s.temporary(TensorType((batch, channels, n), kind))  # the gradient of a, per batch entry
    operands.write("da", of_entries)
    for name, *rows in (("state", n), ("ds", n), ("left", chunk, n)):
        operands.write(name, s.temporary(TensorType((batch, *rows, channels), kind)))
    builder = operands.builder
    b, at, i, j = Index("u"), Ref("at", I64), Index("i"), Index("j")
    step, now, out, grown = (Ref(name, kind) for name in ("step", "now", "out", "grown"))
    width = builder.arg("channels", channels)

    def own_value(name: str, *place: Expr) -> Expr:
        """An element of the unit's scratch memory."""
        return operands.load(name, b, *place, j)

    def store(name: str, value: Expr, *place: Expr) -> Stmt:
        return operands.store(name, value, b, *place, j)

    def of_token(name: str) -> Expr:
        return operands.load(name, b, TOKEN, j)

    def component(name: str) -> Expr:
        """A value of b or c, shared by all channels."""
        return operands.load(name, b, TOKEN, i)

    def each_channel(*stmts: Stmt) -> For:
        return For("j", width, stmts, vector=True)

    def each_number(*stmts: Stmt) -> For:
        """Statements per state value of a channel."""
        return For("i", n, stmts)

    lets = Let("step", of_token("delta")), Let("now", of_token("x"))
    decay = (step * operands.load("a", j, i)).exp()

    def find_token(number: Expr) -> list[Stmt]:
        return [Let("at", number), Let("token", FIRST + at), *find_start(operands, b, TOKEN)]

    forwards = For("t", REST, (
        *find_token(Index("t")),
        each_channel(*lets, each_number(
            Let("kept", unless_start(operands, decay * own_value("state", i))),
            store("left", Ref("kept", kind), at, i),
            store("state", fma(step * now, component("b"), Ref("kept", kind)), i),
        )),
    ))  # fmt: skip
    drive, of_step = Ref("of_drive", kind), Ref("of_step", kind)
    drives = of_token("delta") * of_token("x")
    new = fma(drives, component("b"), own_value("left", at, i))
    backwards = For("back", REST, (
        *find_token(REST - 1 - Index("back")),
        each_channel(
            *lets, Let("out", of_token("d_out")),
            Var(drive.name, Const(0.0, kind)), Var(of_step.name, Const(0.0, kind)),
            each_number(
                Let("d", fma(component("c"), out, own_value("ds", i))),
                store("ds", Ref("d", kind), i),
                Let("grown", Ref("d", kind) * own_value("left", at, i)),
                Assign(drive.name, fma(Ref("d", kind), component("b"), drive)),
                Assign(of_step.name, fma(grown, operands.load("a", j, i), of_step)),
                operands.store("da", fma(grown, step, operands.load("da", b, j, i)), b, j, i),
            ),
            operands.store("dx", drive * step, b, TOKEN, j),
            operands.store("ddelta", fma(drive, now, of_step), b, TOKEN, j),
        ),
        each_number(
            operands.store("db", Reduce("sum", "j", width, own_value("ds", i) * drives), b, TOKEN, i),
            operands.store("dc", Reduce("sum", "j", width, new * of_token("d_out")), b, TOKEN, i),
        ),
        each_channel(*lets, each_number(store("ds", unless_start(operands, own_value("ds", i) * decay), i))),
    ))  # fmt: skip
    start = each_number(each_channel(store("state", operands.load("states", b, Ref("chunk", I64), i, j), i)))
    first = each_channel(each_number(
        store("ds", operands.load("d_last", b, j, i), i), operands.store("da", Const(0.0, kind), b, j, i),
    ))  # fmt: skip
    last = each_channel(each_number(operands.store("d_state", own_value("ds", i), b, j, i)))
    walk = walk_chunks(operands, seq, chunk, start, forwards, backwards, backwards=True)
    root = For("u", builder.arg("batch", batch), (first, walk, last))
    builder.launch(s, root, batch, flops=product([batch, seq, channels, 24 * n]))
    _add_entries(s, of_entries, results[2])
    return results


def _add_entries(s: Scheduler, entries: View, total: View) -> None:
    """Sum over the first axis, in order."""
    operands = Operands(s, "selective_scan_sums")
    operands.read("entries", entries)
    operands.write("total", total)
    size, builder = product(total.shape), operands.builder
    width, j = builder.arg("size", size), Index("j")
    value = operands.load_at("entries", ((Index("b"), width), (j, 1)))
    summed = Reduce("sum", "b", builder.arg("batch", entries.shape[0]), value)
    root = For("j", width, (operands.store_at("total", summed, ((j, 1),)),), vector=True)
    units = (size + (CHUNK - 1)) // CHUNK
    builder.launch(s, root, units, chunk=CHUNK, split="chunks", flops=size * entries.shape[0])

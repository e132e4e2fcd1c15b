"""The gradient of the selective scan, from the last chunk of tokens to the first.

A unit is a block of channels, some spans of them, each a vector loop. For a chunk and a vector, the states of a few
of the n components are computed again, and kept with their decays in memory of the unit; then the tokens go backwards.
The gradients of b and c are sums over channels: a unit adds up its spans channel by channel, then the channels, and a
second launch adds up the units, always in the same order, whichever thread computed them.
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cpu.targets import cpu_target
from rlx.dtypes import I64
from rlx.ir.graph import Node
from rlx.lir.forms.named_operands import Operands
from rlx.lir.forms.recurrent import find_start, read_segments, unless_start
from rlx.lir.loops import Assign, Const, Expr, For, Index, Let, Place, Reduce, Ref, Stmt, Store, Var, fma, known
from rlx.lir.schedule import CHUNK, Scheduler
from rlx.lir.views import View
from rlx.ops.recurrent import chunks_of
from rlx.types import TensorType, product

VECTORS = 4  # of a unit's channels
COMPONENTS = (4, 3, 2, 1)  # of the state that go together, the first that divides them all: their sums are in registers
NAMES = ("x", "delta", "a", "b", "c", "states", "d_out", "d_last")
RESULTS = ("dx", "ddelta", "da", "db", "dc", "d_state")
SUMS = {"db": "part_b", "dc": "part_c"}  # results that are sums over channels, and where those of a unit go
U, B, V, J, G, T, ITH, TURN, BACK = (Index(name) for name in ("u", "b", "v", "j", "g", "t", "i", "turn", "back"))
WORK, BLOCK, CHANNEL, WIDTH, MANY, HERE, FIRST, REST, TOKEN = (
    Ref(name, I64) for name in ("work", "block", "channel", "width", "vectors", "chunk", "first", "rest", "token")
)
ROW: Place = ((Ref("x_base", I64), 1), (J, 1))  # the channels of a token, of all that is [batch, seq, channels]


class _Unit:
    """Memory of a unit by name, each place a number of rows of one span of channels."""

    def __init__(self, s: Scheduler, node: Node, results: Sequence[View]) -> None:
        self.chunk, self.n = node.attrs["chunk"], node.attrs["state_size"]
        self.kind = results[0].dtype.wide
        self.span = cpu_target(s.target).lanes(self.kind.size)
        self.batch, self.seq, self.channels = results[0].shape
        self.blocks = (self.channels + (VECTORS * self.span - 1)) // (VECTORS * self.span)
        self.together = next(g for g in COMPONENTS if self.n % g == 0)
        rows = dict.fromkeys(("rates", "rates_d", "state_d"), VECTORS * self.n)
        rows |= dict.fromkeys(("decay", "kept"), self.chunk * self.together)
        rows |= dict.fromkeys(("drive_d", "step_d"), self.chunk)
        rows |= dict.fromkeys(("db", "dc"), self.chunk * self.n)
        self.starts, self.rows = {}, 0
        for name, many in rows.items():
            self.starts[name] = self.rows
            self.rows += many
        self.operands = Operands(s, node.op)
        for name, operand in zip(NAMES, node.operands, strict=False):
            self.operands.read(name, s.view(operand))
        read_segments(self.operands, node)
        for name, view in zip(RESULTS, results, strict=True):
            if name not in SUMS:
                self.operands.write(name, view)
        sums = TensorType((self.blocks, self.batch, self.seq, self.n), self.kind)
        for name in SUMS.values():
            self.operands.write(name, s.temporary(sums))
        self.operands.write("work", s.temporary(TensorType((self.blocks, self.rows * self.span), self.kind)))

    def at(self, name: str, *rows: tuple[Expr, int], at: Expr = J) -> Place:
        whole = ((row, times * self.span) for row, times in rows)
        return ((WORK, 1), (known(self.starts[name] * self.span, I64), 1), *whole, (at, 1))

    def get(self, name: str, *rows: tuple[Expr, int], at: Expr = J) -> Expr:
        return self.operands.load_at("work", self.at(name, *rows, at=at))

    def put(self, name: str, value: Expr, *rows: tuple[Expr, int]) -> Store:
        return self.operands.store_at("work", value, self.at(name, *rows))

    def value(self, name: str) -> Ref:
        return Ref(name, self.kind)

    def token(self, at: Expr) -> list[Stmt]:
        """A token, its step, its input and their product."""
        return [
            Let("token", FIRST + at),
            *find_start(self.operands, B, TOKEN),
            self.operands.base("x", B, TOKEN, CHANNEL),
            self.operands.base("b", B, TOKEN, known(0, I64)),
            Let("step", self.operands.load_at("delta", ROW)),
            Let("now", self.operands.load_at("x", ROW)),
            Let("drive", self.value("step") * self.value("now")),
        ]

    def component(self, name: str, k: int) -> Expr:
        """Of b or c at a token: one number for all channels."""
        return self.operands.load_at(name, ((Ref("b_base", I64), 1), (G, self.together), (known(k, I64), 1)))

    def each(self, name: str) -> list[Ref]:
        return [self.value(f"{name}{k}") for k in range(self.together)]

    def vectors(self, *body: Stmt) -> For:
        """Statements for each channel of the unit."""
        lets = [Let("channel", BLOCK + V * self.span)]
        width: int | Ref = self.span
        if not isinstance(self.channels, int) or self.channels % self.span:
            left = self.operands.builder.arg("channels", self.channels) - CHANNEL
            lets.append(Let("width", known(self.span, I64).min(left)))
            width = WIDTH
        return For("v", MANY, (*lets, For("j", width, body, vector=True)))

    # -- a vector of channels in a chunk -------------------------------------------------------------------------------
    def of_vector(self, k: int) -> tuple[tuple[Expr, int], ...]:
        return (V, self.n), (G, self.together), (known(k, I64), 1)

    def again(self) -> For:
        """The states of the chunk from the one before it: what is left of each, and its decay."""
        step: list[Stmt] = self.token(T)
        for k, (h, rate) in enumerate(zip(self.each("h"), self.each("rate"), strict=True)):
            decay, kept = self.value(f"decay{k}"), self.value(f"kept{k}")
            row = (T, self.together), (known(k, I64), 1)
            step += [
                Let(decay.name, (self.value("step") * rate).exp()),
                Let(kept.name, unless_start(self.operands, decay * h)),
                self.put("decay", decay, *row),
                self.put("kept", kept, *row),
                Assign(h.name, fma(self.value("drive"), self.component("b", k), kept)),
            ]
        return For("t", REST, tuple(step))

    def backwards(self) -> For:
        at = Ref("at", I64)
        step, drive, out = (self.value(name) for name in ("step", "drive", "out"))
        drive_d: Expr = self.get("drive_d", (at, 1))
        step_d: Expr = self.get("step_d", (at, 1))
        body: list[Stmt] = [Let("at", REST - 1 - BACK), *self.token(at)]
        body.append(Let("out", self.operands.load_at("d_out", ROW)))
        refs = zip(self.each("state_d"), self.each("rate_d"), self.each("rate"), strict=True)
        for k, (state_d, rate_d, rate) in enumerate(refs):
            kept, key, growth = (self.value(f"{name}{k}") for name in ("kept", "key", "growth"))
            row = (at, self.together), (known(k, I64), 1)
            of_token = (at, self.n), (G, self.together), (known(k, I64), 1)
            body += [
                Let(kept.name, self.get("kept", *row)),
                Let(key.name, self.component("b", k)),
                Assign(state_d.name, fma(self.component("c", k), out, state_d)),
                self.put("dc", fma(fma(drive, key, kept), out, self.get("dc", *of_token)), *of_token),
                self.put("db", fma(state_d, drive, self.get("db", *of_token)), *of_token),
                Let(growth.name, state_d * kept),
                Let(f"drive_d{k}", fma(state_d, key, drive_d)),
                Let(f"step_d{k}", fma(growth, rate, step_d)),
                Assign(rate_d.name, fma(growth, step, rate_d)),
                Assign(state_d.name, unless_start(self.operands, state_d * self.get("decay", *row))),
            ]
            drive_d, step_d = self.value(f"drive_d{k}"), self.value(f"step_d{k}")
        body += [self.put("drive_d", drive_d, (at, 1)), self.put("step_d", step_d, (at, 1))]
        return For("back", REST, tuple(body))

    def components(self) -> For:
        """Some components of the state, there and back."""
        starts: list[Stmt] = []
        ends: list[Stmt] = []
        for k in range(self.together):
            where = G * self.together + k
            place = (*self.operands.place("states", B, HERE, where, CHANNEL), (J, 1))
            starts += [
                Var(f"h{k}", self.operands.load_at("states", place)),
                Let(f"rate{k}", self.get("rates", *self.of_vector(k))),
                Var(f"state_d{k}", self.get("state_d", *self.of_vector(k))),
                Var(f"rate_d{k}", self.get("rates_d", *self.of_vector(k))),
            ]
            ends += [
                self.put("state_d", self.value(f"state_d{k}"), *self.of_vector(k)),
                self.put("rates_d", self.value(f"rate_d{k}"), *self.of_vector(k)),
            ]
        return For("g", self.n // self.together, (*starts, self.again(), self.backwards(), *ends))

    def walk(self) -> list[Stmt]:
        """A chunk."""
        zero, drive_d = Const(0.0, self.kind), self.value("of_drive")
        clear = For("t", REST, (self.put("drive_d", zero, (T, 1)), self.put("step_d", zero, (T, 1))))
        ddelta = fma(drive_d, self.value("now"), self.get("step_d", (T, 1)))
        finish = For("t", REST, (
            *self.token(T),
            Let(drive_d.name, self.get("drive_d", (T, 1))),
            self.operands.store_at("dx", drive_d * self.value("step"), ROW),
            self.operands.store_at("ddelta", ddelta, ROW),
        ))  # fmt: skip
        empty = [self.put(name, zero, (T, self.n), (ITH, 1)) for name in SUMS]
        empties = For("t", REST, (For("i", self.n, (For("j", self.span, tuple(empty), vector=True),)),))
        x, row = Index("x"), ((T, self.n), (ITH, 1))
        sums = [
            self.operands.store(into, Reduce("sum", "x", self.span, self.get(name, *row, at=x)), U, B, TOKEN, ITH)
            for name, into in SUMS.items()
        ]
        added = For("t", REST, (Let("token", FIRST + T), For("i", self.n, tuple(sums))))
        return [empties, self.vectors(clear, self.components(), finish), added]

    def root(self) -> For:
        builder, n = self.operands.builder, self.n
        row = (V, n), (ITH, 1)
        chunks = builder.arg("chunks", chunks_of(self.seq, self.chunk))

        def for_state(store: Store) -> For:
            return self.vectors(For("i", n, (store,)))

        def element(name: str, *outer: Expr) -> Place:
            return (*self.operands.place(name, *outer, CHANNEL, ITH), (J, n))

        bounds = (
            Let("chunk", chunks - 1 - TURN),
            Let("first", HERE * self.chunk),
            Let("rest", known(self.chunk, I64).min(builder.arg("seq", self.seq) - FIRST)),
        )
        of_batch = (
            for_state(self.put("state_d", self.operands.load_at("d_last", element("d_last", B)), *row)),
            For("turn", chunks, (*bounds, *self.walk())),
            for_state(self.operands.store_at("d_state", self.get("state_d", *row), element("d_state", B))),
        )
        left = builder.arg("channels", self.channels) - BLOCK + (self.span - 1)
        return For("u", builder.arg("blocks", self.blocks), (
            Let("work", U * (self.rows * self.span)),
            Let("block", U * (VECTORS * self.span)),
            Let("vectors", known(VECTORS, I64).min(left.quot(self.span))),
            for_state(self.put("rates", self.operands.load_at("a", element("a")), *row)),
            for_state(self.put("rates_d", Const(0.0, self.kind), *row)),
            For("b", builder.arg("batch", self.batch), of_batch),
            for_state(self.operands.store_at("da", self.get("rates_d", *row), element("da"))),
        ))  # fmt: skip


def selective_scan_backward(s: Scheduler, node: Node) -> Sequence[View]:
    """The gradients of all operands from those of outputs and last state."""
    results = [s.result(node, i) for i in range(6)]
    unit = _Unit(s, node, results)
    flops = product([unit.batch, unit.seq, unit.channels, 24 * unit.n])
    unit.operands.builder.launch(s, unit.root(), unit.blocks, split="channels", flops=flops)
    _add_up(s, unit, dict(zip(RESULTS, results, strict=True)))
    return results


def _add_up(s: Scheduler, unit: _Unit, results: dict[str, View]) -> None:
    """The sums of all units."""
    operands, given = Operands(s, "selective_scan_sums"), unit.operands
    size = product([unit.batch, unit.seq, unit.n])
    stride = operands.builder.arg("size", size)
    body: list[Stmt] = []
    for name, part in SUMS.items():
        operands.read(part, given.builder.views[given.numbers[part]])
        operands.write(name, results[name])
        here = operands.load_at(part, ((U, stride), (J, 1)))
        total = unit.value(f"total_{name}")
        body += [
            Var(total.name, Const(0.0, unit.kind)),
            For("u", operands.builder.arg("blocks", unit.blocks), (Assign(total.name, total + here),)),
            operands.store_at(name, total, ((J, 1),)),
        ]
    root = For("j", stride, tuple(body), vector=True)
    operands.builder.launch(
        s, root, (size + (CHUNK - 1)) // CHUNK, chunk=CHUNK, split="chunks", flops=size * unit.blocks * 2
    )

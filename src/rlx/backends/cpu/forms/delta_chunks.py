"""The gated delta net chunk by chunk: products of small matrices instead of a pass over the state per token.

A unit is a head. Inside a chunk, b is the product of the gates up to a token, D[t, s] that of the gates after s up to
t, and w the last row of D. With A = D ∘ KKᵀ below the diagonal and P = D ∘ QKᵀ up to it, the residuals are V - b K S -
A C, the changes C are beta times that, the outputs b Q S + P C, and the next state is b S + (w K)ᵀ C (Yang et al.,
"Gated Delta Networks", section 3.3). The backward pass transposes each of these. Nothing is divided by gates, so gates
of zero need no special case.

Rows of operands are copied to the unit's memory, contiguous, with zeros after the last token. States are stored there
in strips of columns, so that data which a product reads repeatedly is close together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlx.backends.cpu.targets import cpu_target
from rlx.dtypes import I64
from rlx.ir.graph import Node
from rlx.lir.forms.named_operands import Operands
from rlx.lir.forms.recurrent import STARTS, find_start, read_segments
from rlx.lir.loops import Assign, Const, Expr, For, Index, Let, Place, Reduce, Ref, Stmt, Store, Var, fma, known
from rlx.lir.schedule import Scheduler, decode_unit
from rlx.lir.views import View
from rlx.types import Size, TensorType, product

Affine = tuple[tuple[Expr, int], ...]  # a sum of indices, each with a factor
Finish = Callable[[Affine, int, Ref], Sequence[Stmt]]  # of a row, a vector of columns and their sum
HEIGHTS = (8, 4, 2, 1)  # rows per tile of a product: the first that divides all rows and fits in registers
WIDTHS = (2, 1)  # columns per tile, in vectors
SOLVED = (8, 4, 2, 1)  # columns solved at once, in vectors
T, S, R, J, TILE, ROWS = (Index(name) for name in ("t", "s", "r", "j", "tile", "rows"))
B, H, FIRST, REST, PADS, START, UPTO, LATER, DONE, LATE, TOKEN = (
    Ref(name, I64) for name in ("b", "h", "first", "rest", "pads", "start", "upto", "later", "done", "late", "token")
)


def _one(*terms: Expr) -> Affine:
    return tuple((term, 1) for term in terms)


@dataclass(frozen=True)
class _Axis:
    """Columns of a vector loop: strips of several adjacent spans, or one strip if spans do not fit."""

    size: int
    span: int
    vectors: int

    @classmethod
    def of(cls, size: int, span: int, widths: Sequence[int] = WIDTHS) -> _Axis:
        vectors = next((v for v in widths if size % (v * span) == 0), 0)
        return cls(size, span, vectors) if vectors else cls(size, size, 1)

    @property
    def width(self) -> int:
        return self.span * self.vectors

    @property
    def strips(self) -> int:
        return self.size // self.width

    def column(self, v: int) -> Affine:
        return ((TILE, self.width), *self.within(v))

    def within(self, v: int) -> Affine:
        return _one(known(v * self.span, I64), J)


@dataclass(frozen=True)
class _Term:
    """A part of a product: over `loops`, outer first, left of a row times right of a column; then `then`."""

    loops: Sequence[tuple[str, int | Ref]]
    left: Callable[[Affine], Expr]
    right: Callable[[int], Expr]
    then: Finish = lambda row, v, total: ()


class _Head:
    """The statements of a unit and the matrices that they use."""

    def __init__(self, s: Scheduler, out: View, chunk: int, times: Size, name: str) -> None:
        self.scheduler, self.chunk = s, chunk
        self.batch, self.seq, self.heads, size = out.shape
        assert isinstance(size, int)
        self.n, self.kind = size, out.dtype.wide
        self.scale = Const(1 / math.sqrt(size), self.kind)
        self.zero = Const(0.0, self.kind)
        self.units = self.batch * self.heads * times
        self.operands = Operands(s, name)
        self.chunks = (self.seq + (chunk - 1)) // chunk
        target = cpu_target(s.target)
        self.accumulators = target.tile_rows * target.tile_vectors
        span = target.lanes(self.kind.size)
        self.columns, self.tokens = _Axis.of(size, span), _Axis.of(chunk, span)
        self.solved_at_once = _Axis.of(size, span, SOLVED)
        self.places: dict[str, tuple[int, int]] = {}  # offset and row length of each matrix
        self.size = 0
        self.matrices(1, chunk, "gate", "rate", "b", "w")
        self.matrices(chunk, chunk, "D", "below", "A", "P")
        self.matrices(chunk, size, "K", "Q")
        self.matrices(size, chunk, "KT")
        self.matrices(size * self.columns.strips, self.columns.width, "state")

    def matrices(self, rows: int, columns: int, *names: str) -> None:
        """Reserves memory for matrices of the unit."""
        for name in names:
            self.places[name] = self.size, columns
            self.size += -(-rows * columns // 16) * 16

    def read(self, node: Node, *names: str) -> None:
        """Names the first operands of the node, and segments."""
        for name, operand in zip(names, node.operands, strict=False):
            self.operands.read(name, self.scheduler.view(operand))
        read_segments(self.operands, node.operands[-1])

    def launch(self, before: Sequence[Stmt], walk: Sequence[Stmt], after: Sequence[Stmt], *, backwards: bool) -> None:
        """A unit runs `before`, then `walk` for each chunk, from the last one if `backwards`, then `after`."""
        builder = self.operands.builder
        chunks = builder.arg("chunks", self.chunks)
        turn = chunks - 1 - Index("turn") if backwards else Index("turn")
        bounds: list[Stmt] = [
            Let("chunk", turn),
            Let("first", Ref("chunk", I64) * self.chunk),
            Let("rest", known(self.chunk, I64).min(builder.arg("seq", self.seq) - FIRST)),
            Let("pads", self.chunk - REST),
        ]
        lets: list[Stmt] = [*decode_unit(builder, [self.batch, self.heads], ["b", "h"])]
        lets.append(Let("work_base", Index("u") * self.size))
        loop = For("turn", chunks, (*bounds, *walk))
        root = For("u", builder.arg("units", self.units), (*lets, *before, loop, *after))
        flops = product([self.units, self.seq, self.n, self.n * (12 if backwards else 6)])
        builder.launch(self.scheduler, root, self.units, split="heads", flops=flops)

    @property
    def has_segments(self) -> bool:
        return "segments" in self.operands.numbers

    def unless_closed(self, total: Expr) -> Expr:
        """The gradient through the gate of token `late`; exactly zero where a segment starts there."""
        return self.get("gate", (), _one(LATE)).eq(0).select(0, total) if self.has_segments else total

    # -- elements ------------------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Allocates the memory, once all matrices are known."""
        self.operands.write("work", self.scheduler.temporary(TensorType((self.units, self.size), self.kind)))

    def at(self, name: str, row: Affine, column: Affine) -> Place:
        offset, stride = self.places[name]
        return ((Ref("work_base", I64), 1), (known(offset, I64), 1), *((e, m * stride) for e, m in row), *column)

    def get(self, name: str, row: Affine, column: Affine) -> Expr:
        return self.operands.load_at("work", self.at(name, row, column))

    def put(self, name: str, value: Expr, row: Affine, column: Affine) -> Store:
        return self.operands.store_at("work", value, self.at(name, row, column))

    def strip_row(self, row: Affine, strip: Expr = TILE) -> Affine:
        """A row of a strip of the state."""
        return ((strip, self.n), *row)

    def each_of_state(self, store: Callable[[Expr, Affine], Store]) -> For:
        """A statement per element: `store` gets its column, and its row and strip."""
        width = self.columns.width
        column = TILE * width + J
        inner = For("j", width, (store(column, self.strip_row(_one(R))),), vector=True)
        return For("tile", self.columns.strips, (For("r", self.n, (inner,)),))

    def each_token(self, *stmts: Stmt, columns: Sequence[Stmt] = ()) -> For:
        """Statements per token of the chunk, and per column of it."""
        inner = (For("j", self.n, tuple(columns), vector=True),) if columns else ()
        return For("t", REST, (Let("token", FIRST + T), *stmts, *inner))

    # -- products ------------------------------------------------------------------------------------------------------
    def product(self, rows: int, axis: _Axis, terms: Sequence[_Term], finish: Finish) -> For:
        """Sums of products for all rows and columns, one register tile at a time.

        A term may stop at `UPTO`, after the rows of the tile, or start at `START`, with them, and take `LATER` steps.
        """
        fits = (h for h in HEIGHTS if rows % h == 0 and h * axis.vectors <= self.accumulators)
        height = next(fits, 1)
        row: list[Affine] = [((ROWS, height), (known(r, I64), 1)) for r in range(height)]
        cells = [(r, v) for r in range(height) for v in range(axis.vectors)]
        total = {(r, v): Ref(f"total{r}_{v}", self.kind) for r, v in cells}
        body: list[Stmt] = [Var(x.name, self.zero) for x in total.values()]
        for term in terms:
            step: list[Stmt] = [Let(f"right{v}", term.right(v)) for v in range(axis.vectors)]
            for r in range(height):
                left = Ref(f"left{r}", self.kind)
                step.append(Let(left.name, term.left(row[r])))
                for v in range(axis.vectors):
                    step.append(Assign(total[r, v].name, fma(left, Ref(f"right{v}", self.kind), total[r, v])))
            for index, extent in reversed(term.loops):
                step = [For(index, extent, tuple(step))]
            body += step
            body += [stmt for (r, v), x in total.items() for stmt in term.then(row[r], v, x)]
        body += [stmt for (r, v), x in total.items() for stmt in finish(row[r], v, x)]
        bounds = (
            Let("start", ROWS * height),
            Let("upto", START + height),
            Let("later", rows - START),
        )
        inner = For("j", axis.span, tuple(body), vector=True)
        return For("tile", axis.strips, (For("rows", rows // height, (*bounds, inner)),))

    def plain(self, left: str, right: str) -> _Term:
        """left @ right, where right has tokens along the vector loop."""
        return _Term(
            [("s", self.n)],
            lambda row: self.get(left, row, _one(S)),
            lambda v: self.get(right, _one(S), self.tokens.column(v)),
        )

    def by_state(self, left: str, *, then: Finish = lambda row, v, total: ()) -> _Term:
        """left @ state."""
        right = self.columns.within
        return _Term(
            [("s", self.n)],
            lambda row: self.get(left, row, _one(S)),
            lambda v: self.get("state", self.strip_row(_one(S)), right(v)),
            then,
        )

    def before(self, left: str, right: str) -> _Term:
        """left @ right, where left is lower triangular."""
        return _Term(
            [("s", UPTO)],
            lambda row: self.get(left, row, _one(S)),
            lambda v: self.get(right, _one(S), self.columns.column(v)),
        )

    def after(self, left: str, right: str) -> _Term:
        """leftᵀ @ right, where left is lower triangular."""
        return _Term(
            [("s", LATER)],
            lambda row: self.get(left, _one(START, S), row),
            lambda v: self.get(right, _one(START, S), self.columns.column(v)),
        )

    def left_transposed(self, left: str, right: str) -> _Term:
        """leftᵀ @ right, along the tokens of a chunk."""
        return _Term(
            [("s", self.chunk)],
            lambda row: self.get(left, _one(S), row),
            lambda v: self.get(right, _one(S), self.columns.column(v)),
        )

    def transpose(self, name: str, source: str) -> For:
        """Transposes rows of tokens to columns."""
        moved = self.put(name, self.get(source, _one(T), _one(R)), _one(R), _one(T))
        return For("t", self.chunk, (For("r", self.n, (moved,)),))

    def store_into(self, into: str) -> Finish:
        """Stores the sums as a matrix."""
        return lambda row, v, total: [self.put(into, total, row, self.columns.column(v))]

    def advance(self, row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        """The state times all gates of the chunk, plus the new terms."""
        at = self.strip_row(row), self.columns.within(v)
        decay = self.get("b", (), _one(known(self.chunk - 1, I64)))
        return [self.put("state", fma(decay, self.get("state", *at), total), *at)]

    def solve(self, x: str, row: Affine, coefficient: Expr, changes: str, known: Affine, scaled: str, by: Expr) -> For:
        """Forward substitution: `x` minus the changes of earlier rows; beta times that is the row's own change.

        `scaled` gets the changes times `by`. Earlier rows are indexed by `S`.
        """
        axis, kind = self.solved_at_once, self.kind
        sums = [Ref(f"sum{v}", kind) for v in range(axis.vectors)]
        left, change = Ref("left", kind), [Ref(f"change{v}", kind) for v in range(axis.vectors)]
        step: list[Stmt] = [Let("left", -coefficient)]
        loads: list[Stmt] = []
        ends: list[Stmt] = []
        for v, total in enumerate(sums):
            column = axis.column(v)
            loads.append(Var(total.name, self.get(x, row, column)))
            step.append(Assign(total.name, fma(left, self.get(changes, known, column), total)))
            ends += [
                self.put(x, total, row, column),
                Let(change[v].name, self.get("rate", (), row) * total),
                self.put(changes, change[v], row, column),
                self.put(scaled, by * change[v], row, column),
            ]
        inner = For("j", axis.span, (*loads, For("s", DONE, tuple(step)), *ends), vector=True)
        lets = Let("done", T), Let("late", (self.chunk - 1) - T)
        return For("tile", axis.strips, (For("t", self.chunk, (*lets, inner)),))

    # -- a chunk -------------------------------------------------------------------------------------------------------
    def gates(self) -> list[Stmt]:
        """`gate`, `rate` (beta), b, w, D, and D without its diagonal as `below`."""
        below, here, power = (Ref(name, self.kind) for name in ("below", "here", "power"))
        row = (
            Let("below", self.get("gate", (), _one(T)) * self.get("w", (), _one(J))),
            Let("here", J.eq(T).select(1, below)),
            self.put("below", below, _one(T), _one(J)),
            self.put("D", here, _one(T), _one(J)),
            self.put("w", here, (), _one(J)),
        )
        start = (
            self.put("gate", self.get("gate", (), _one(J)).exp(), (), _one(J)),
            self.put("w", self.zero, (), _one(J)),
        )
        operand_names = {"gate": "g", "rate": "beta"}
        values = {m: self.operands.load(x, B, TOKEN, H) for m, x in operand_names.items()}
        if self.has_segments:  # the gate of a segment's first token is 0
            values["gate"] = STARTS.select(-math.inf, values["gate"])
        return [
            self.each_token(
                *find_start(self.operands, B, TOKEN), *(self.put(m, value, (), _one(T)) for m, value in values.items())
            ),
            For("t", PADS, tuple(self.put(m, self.zero, (), _one(REST, T)) for m in operand_names)),
            For("j", self.chunk, start, vector=True),
            For("t", self.chunk, (For("j", self.chunk, row, vector=True),)),
            Var("power", Const(1.0, self.kind)),
            For("t", self.chunk, (
                Assign("power", power * self.get("gate", (), _one(T))),
                self.put("b", power, (), _one(T)),
            )),
        ]  # fmt: skip

    def rows(self, values: Mapping[str, Expr]) -> list[Stmt]:
        """Matrices of the chunk: an expression of `token` and column each, zeros after the last token."""
        copies = [self.put(name, value, _one(T), _one(J)) for name, value in values.items()]
        zeros = tuple(self.put(name, self.zero, _one(REST, T), _one(J)) for name in values)
        return [self.each_token(columns=copies), For("t", PADS, (For("j", self.n, zeros, vector=True),))]

    def of_token(self, name: str) -> Expr:
        """The element of an operand at `token` and column."""
        return self.operands.load(name, B, TOKEN, H, J)

    def gate_into(self, gates: str, into: str, *, minus: bool = False) -> Finish:
        """Sums that have tokens along the vector loop, times gates."""

        def finish(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
            column = self.tokens.column(v)
            value = total * self.get(gates, row, column)
            return [self.put(into, -value if minus else value, row, column)]

        return finish

    def scores(self) -> list[Stmt]:
        """A and P, from K, Q and D."""
        return [
            self.product(self.chunk, self.tokens, [self.plain(left, "KT")], self.gate_into(gates, into))
            for left, gates, into in (("K", "below", "A"), ("Q", "D", "P"))
        ]


def forward(
    s: Scheduler, node: Node, out: View, chunk: int, times: Size, *, state: View | None, last: View | None,
    saved: Sequence[View] = (),
) -> None:  # fmt: skip
    """The launch for the complete sequence, with `times` as many units as there are heads.

    `saved` are the states before each chunk, and their residuals.
    """
    head = _Head(s, out, chunk, times, f"{node.op}_chunks")
    head.matrices(chunk, head.n, "miss", "C", "wC", "out")
    operands, columns, tokens = head.operands, head.columns, head.chunk
    head.read(node, "q", "k", "v", "g", "beta")
    operands.write("y", out)
    if state is not None and last is not None:
        operands.carry(state, last)
    for name, view in zip(("states", "misses"), saved, strict=False):
        operands.write(name, view)
    head.open()

    def lacking(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        seen = head.get("b", (), row) * total
        at = row, columns.column(v)
        return [head.put("miss", head.get("miss", *at) - seen, *at)]

    def read(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        return [Assign(total.name, head.get("b", (), row) * total)]

    results = [operands.store("y", head.get("out", _one(T), _one(J)), B, TOKEN, H, J)]
    before: list[Stmt] = []
    if saved:
        results.append(operands.store("misses", head.get("miss", _one(T), _one(J)), B, TOKEN, H, J))
        before.append(
            head.each_of_state(
                lambda j, row: operands.store("states", head.get("state", row, _one(J)), B, H, Ref("chunk", I64), R, j)
            )
        )
    walk = [
        *before,
        *head.gates(),
        *head.rows({"K": head.of_token("k"), "Q": head.scale * head.of_token("q"), "miss": head.of_token("v")}),
        head.transpose("KT", "K"),
        *head.scores(),
        head.product(tokens, columns, [head.by_state("K")], lacking),
        head.solve("miss", _one(T), head.get("A", _one(T), _one(S)), "C", _one(S), "wC", head.get("w", (), _one(T))),
        head.product(tokens, columns, [head.by_state("Q", then=read), head.before("P", "C")], head.store_into("out")),
        head.product(head.n, columns, [head.left_transposed("K", "wC")], head.advance),
        head.each_token(columns=results),
    ]

    def start(j: Expr, row: Affine) -> Store:
        return head.put("state", head.zero if state is None else operands.load("state", B, H, R, j), row, _one(J))

    def end(j: Expr, row: Affine) -> Store:
        return operands.store("final", head.get("state", row, _one(J)), B, H, R, j)

    after = [] if last is None else [head.each_of_state(end)]
    head.launch([head.each_of_state(start)], walk, after, backwards=False)


def backward(s: Scheduler, node: Node, results: Sequence[View]) -> None:
    """The gradients of all operands from those of outputs and last state, from the last chunk to the first."""
    chunk = node.attrs["chunk"]
    head = _Head(s, results[0], chunk, 1, node.op)
    n, columns, tokens, operands, kind = head.n, head.columns, head.tokens, head.operands, head.kind
    head.matrices(chunk, n, "dO", "bdO", "C", "wKdS", "E", "dV", "bdV", "dQ", "dK", "gap")
    head.matrices(n, chunk, "CT", "dOT", "dVT", "QS", "KS", "CS")
    head.matrices(chunk, chunk, "dP", "dA")
    head.matrices(1, chunk, "dG")
    head.matrices(1, columns.width, "both")
    head.read(node, "q", "k", "g", "beta", "states", "misses", "d_out", "d_last")
    for name, view in zip(("dq", "dk", "dv", "dg", "dbeta", "d_state"), results, strict=True):
        operands.write(name, view)
    head.open()

    def through_state(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        scaled = head.get("w", (), row) * total
        return [Assign(total.name, scaled), head.put("wKdS", total, row, columns.column(v))]

    def along_tokens(into: str, *, by: str = "") -> Finish:
        """A product that has tokens along the vector loop."""

        def finish(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
            column = tokens.column(v)
            return [head.put(into, total * head.get(by, (), column) if by else total, row, column)]

        return finish

    def of_start(right: str) -> _Term:
        """The state before the chunk, times a matrix that has tokens along the vector loop."""
        return _Term(
            [("s", n)],
            lambda row: operands.load_at(
                "states", ((Ref("states_base", I64), 1), *((e, m * n) for e, m in row), (S, 1))
            ),
            lambda v: head.get(right, _one(S), tokens.column(v)),
        )

    of_gradient = _Term(
        [("strip", columns.strips), ("s", columns.width)],
        lambda row: head.get("state", head.strip_row(row, Index("strip")), _one(S)),
        lambda v: head.get("CT", ((Index("strip"), columns.width), (S, 1)), tokens.column(v)),
    )

    def queries(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        column = columns.column(v)
        return [head.put("dQ", total + head.get("QS", column, row), row, column)]

    def readers(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        column = columns.column(v)
        return [head.put("dK", total + head.get("KS", column, row), row, column)]

    def writers(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        """Keys used for writing; `gap` is their distance from those used for reading."""
        at = row, columns.column(v)
        wrote, had = Ref(f"wrote{total.name}", kind), Ref(f"had{total.name}", kind)
        return [
            Let(wrote.name, total + head.get("CS", at[1], row)),
            Let(had.name, head.get("dK", *at)),
            head.put("gap", had - wrote, *at),
            head.put("dK", had + wrote, *at),
        ]

    def dot(left: Callable[[Expr], Expr], right: str) -> Expr:
        """Dot product of two rows of a token."""
        i = Index("x")
        return Reduce("sum", "x", n, left(i) * head.get(right, _one(T), _one(i)))

    def row_of(name: str) -> Callable[[Expr], Expr]:
        return lambda i: head.get(name, _one(T), _one(i))

    results_of_token: list[Stmt] = [
        operands.store("dq", head.scale * head.get("dQ", _one(T), _one(J)), B, TOKEN, H, J),
        operands.store("dk", head.get("dK", _one(T), _one(J)), B, TOKEN, H, J),
        operands.store("dv", head.get("dV", _one(T), _one(J)), B, TOKEN, H, J),
    ]
    gate_of_token = dot(row_of("Q"), "dQ") + dot(row_of("K"), "gap")
    rate_of_token = dot(lambda i: operands.load("misses", B, TOKEN, H, i), "E")
    after = _one(LATE, known(1, I64), S)
    minus_b = -head.get("b", (), _one(LATE))
    walk: list[Stmt] = [
        operands.base("states", B, H, Ref("chunk", I64), known(0, I64), known(0, I64)),
        *head.gates(),
        *head.rows({
            "K": head.of_token("k"), "Q": head.scale * head.of_token("q"), "dO": head.of_token("d_out"),
            "bdO": head.get("b", (), _one(T)) * head.of_token("d_out"),
            "C": head.get("rate", (), _one(T)) * head.of_token("misses"),
        }),
        head.transpose("KT", "K"),
        head.transpose("CT", "C"),
        head.transpose("dOT", "bdO"),
        *head.scores(),
        head.product(
            chunk, columns, [head.by_state("K", then=through_state), head.after("P", "dO")], head.store_into("E")
        ),
        head.solve("E", _one(LATE), head.get("A", after, _one(LATE)), "dV", after, "bdV", minus_b),
        head.transpose("dVT", "bdV"),
        head.product(chunk, tokens, [head.plain("dO", "CT")], head.gate_into("D", "dP")),
        head.product(chunk, tokens, [head.plain("dV", "CT")], head.gate_into("below", "dA", minus=True)),
        head.product(n, tokens, [of_start("dOT")], along_tokens("QS")),
        head.product(n, tokens, [of_start("dVT")], along_tokens("KS")),
        head.product(n, tokens, [of_gradient], along_tokens("CS", by="w")),
        head.product(chunk, columns, [head.before("dP", "K")], queries),
        head.product(chunk, columns, [head.before("dA", "K")], readers),
        head.product(chunk, columns, [head.after("dP", "Q"), head.after("dA", "K")], writers),
        head.each_token(
            head.put("dG", gate_of_token, (), _one(T)), operands.store("dbeta", rate_of_token, B, TOKEN, H),
            columns=results_of_token,
        ),
        *_of_ends(head),
        For("t", REST, (
            Let("late", REST - 1 - T),
            Assign("of_gates", head.unless_closed(Ref("of_gates", kind) + head.get("dG", (), _one(LATE)))),
            operands.store("dg", Ref("of_gates", kind), B, FIRST + LATE, H),
        )),
        head.product(n, columns, [head.left_transposed("Q", "bdO"), head.left_transposed("K", "bdV")], head.advance),
    ]  # fmt: skip
    start = head.each_of_state(lambda j, row: head.put("state", operands.load("d_last", B, H, R, j), row, _one(J)))
    end = head.each_of_state(lambda j, row: operands.store("d_state", head.get("state", row, _one(J)), B, H, R, j))
    head.launch([start], walk, [end], backwards=True)


def _of_ends(head: _Head) -> list[Stmt]:
    """`of_gates` after the chunk: the state times its gradient."""
    columns, kind, n = head.columns, head.kind, head.n
    sums = [Ref(f"sum{v}", kind) for v in range(columns.vectors)]

    def start_at(v: int) -> Place:
        return ((Ref("states_base", I64), 1), (R, n), *columns.column(v))

    row: list[Stmt] = []
    for v, x in enumerate(sums):
        gradient = head.get("state", head.strip_row(_one(R)), columns.within(v))
        row.append(Assign(x.name, fma(head.operands.load_at("states", start_at(v)), gradient, x)))
    adding = [
        head.put("both", head.get("both", (), columns.within(v)) + x, (), columns.within(v)) for v, x in enumerate(sums)
    ]
    inner = For(
        "j", columns.span, (*(Var(x.name, head.zero) for x in sums), For("r", n, tuple(row)), *adding), vector=True
    )
    clear = For("j", columns.width, (head.put("both", head.zero, (), _one(J)),), vector=True)
    each = _one(Index("x"))
    product = Reduce("sum", "x", columns.width, head.get("both", (), each))
    changed = Reduce("sum", "x", head.chunk * n, head.get("wKdS", (), each) * head.get("C", (), each))
    decay = head.get("b", (), _one(known(head.chunk - 1, I64)))
    return [clear, For("tile", columns.strips, (inner,)), Var("of_gates", fma(decay, product, changed))]

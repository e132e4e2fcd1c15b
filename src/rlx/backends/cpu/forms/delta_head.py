"""A head of the gated delta net on the CPU: the matrices of a chunk of tokens, and the products that are made of them.

Rows of operands are copied to memory of the unit, without gaps, with zeros after the last token. States lie there in
strips of columns, so that what a product reads again and again lies close together.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from rlx.backends.cpu.targets import cpu_target
from rlx.dtypes import I32, I64
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Node
from rlx.lir.forms.named_operands import Operands
from rlx.lir.forms.ragged import COUNT, Tokens
from rlx.lir.forms.recurrent import AT_START, find_start, read_segments
from rlx.lir.loops import Assign, Const, Expr, For, Index, Let, Place, Ref, Stmt, Store, Var, fma, known
from rlx.lir.schedule import Scheduler, decode_unit
from rlx.lir.views import View
from rlx.ops.recurrent import chunks_of
from rlx.types import Size, TensorType, dim_min, product

Affine = tuple[tuple[Expr, int], ...]  # a sum of indices, each with a factor
Finish = Callable[[Affine, int, Ref], Sequence[Stmt]]  # of a row, a vector of columns and their sum
HEIGHTS = (8, 4, 2, 1)  # rows of a tile of a product: the first that divides all rows and fits into registers
WIDTHS = (2, 1)  # columns of such a tile, in vectors
SOLVED = (8, 4, 2, 1)  # columns that are solved at once, in vectors
T, S, R, J, TILE, ROWS = (Index(name) for name in ("t", "s", "r", "j", "tile", "rows"))
B, H, FIRST, REST, PADS, START, UPTO, LATER, DONE, LATE, TOKEN = (
    Ref(name, I64) for name in ("b", "h", "first", "rest", "pads", "start", "upto", "later", "done", "late", "token")
)


def one(*terms: Expr) -> Affine:
    return tuple((term, 1) for term in terms)


@dataclass(frozen=True)
class Axis:
    """Columns of a vector loop: strips of some spans side by side, or one strip where spans do not fit."""

    size: int
    span: int
    vectors: int

    @classmethod
    def of(cls, size: int, span: int, widths: Sequence[int] = WIDTHS) -> Axis:
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
        return one(known(v * self.span, I64), J)


@dataclass(frozen=True)
class Term:
    """A part of a product: over `loops`, the outer one first, left of a row times right of a column; then `then`."""

    loops: Sequence[tuple[str, int | Ref]]
    left: Callable[[Affine], Expr]
    right: Callable[[int], Expr]
    then: Finish = lambda row, v, total: ()


class Head:
    """The statements of a unit and the matrices that they use."""

    def __init__(self, s: Scheduler, node: Node, out: View, chunk: int, times: Size, name: str) -> None:
        self.scheduler, self.chunk, self.own = s, chunk, Tokens.of(s, node)
        self.heads, size = out.shape[-2:]
        assert isinstance(size, int)
        self.n, self.kind = size, out.dtype.wide
        self.scale = Const(1 / math.sqrt(size), self.kind)
        self.zero = Const(0.0, self.kind)
        self.entry = self.own.entry(B)
        # Of ragged tokens, only rows that have a whole chunk are here.
        self.batch = dim_min(self.own.states, self.own.width // chunk) if self.own.ragged else self.own.states
        self.units = self.batch * self.heads * times
        self.operands = Operands(s, name)
        target = cpu_target(s.target)
        self.accumulators = target.tile_rows * target.tile_vectors
        span = target.lanes(self.kind.size)
        self.columns, self.tokens = Axis.of(size, span), Axis.of(chunk, span)
        self.solved_at_once = Axis.of(size, span, SOLVED)
        self.places: dict[str, tuple[int, int]] = {}  # where a matrix starts, and how long its rows are
        self.size = 0
        self.matrices(1, chunk, "gate", "rate", "b", "w")
        self.matrices(chunk, chunk, "D", "below", "A", "P")
        self.matrices(chunk, size, "K", "Q")
        self.matrices(size, chunk, "KT")
        self.matrices(size * self.columns.strips, self.columns.width, "state")

    def matrices(self, rows: int, columns: int, *names: str) -> None:
        """Memory for matrices of the unit."""
        for name in names:
            self.places[name] = self.size, columns
            self.size += -(-rows * columns // 16) * 16

    def read(self, node: Node, *names: str) -> None:
        """The first operands of the node by name, and segments."""
        for name, operand in zip(names, node.operands, strict=False):
            self.operands.read(name, self.own.rectangular(self.scheduler.view(operand)))
        read_segments(self.operands, node)
        self.own.read(self.operands)
        if self.own.ragged:
            self.operands.read("long", long_rows(self.scheduler, self.own, self.chunk, self.batch))

    def launch(self, before: Sequence[Stmt], walk: Sequence[Stmt], after: Sequence[Stmt], *, backwards: bool) -> None:
        """A unit does `before`, then `walk` for each chunk, from the last one if `backwards`, then `after`."""
        builder, ragged = self.operands.builder, self.own.ragged
        chunks = Ref("chunks", I64) if ragged else builder.arg("chunks", chunks_of(self.own.width, self.chunk))
        turn = chunks - 1 - Index("turn") if backwards else Index("turn")
        bounds: list[Stmt] = [
            Let("chunk", turn),
            Let("first", Ref("chunk", I64) * self.chunk),
            Let("rest", known(self.chunk, I64).min(self.own.own(self.operands) - FIRST)),
            Let("pads", self.chunk - REST),
        ]
        lets: list[Stmt] = [*decode_unit(builder, [self.batch, self.heads], ["number" if ragged else "b", "h"])]
        lets.append(Let("work_base", Index("u") * self.size))
        loop = For("turn", chunks, (*bounds, *walk))
        body: Sequence[Stmt] = (*before, loop, *after)
        if ragged:
            row = self.operands.load("long", Ref("number", I64)).cast(I64)
            lets += [Let("row", row), Let("exists", (Ref("row", I64) >= 0).select(known(1, I64), 0))]
            own = Let("b", Ref("row", I64)), *self.own.count_own(self.operands, B)
            many = Let("chunks", (COUNT + (self.chunk - 1)).quot(self.chunk))
            body = (For("once", Ref("exists", I64), (*own, many, *body)),)
        root = For("u", builder.arg("units", self.units), (*lets, *body))
        tokens = product([self.heads * self.own.width] if ragged else [self.units, self.own.width])
        flops = product([tokens, self.n, self.n * (12 if backwards else 6)])
        builder.launch(self.scheduler, root, self.units, split="heads", flops=flops)

    @property
    def has_segments(self) -> bool:
        return "segments" in self.operands.numbers

    def unless_closed(self, total: Expr) -> Expr:
        """What flows back through the gate of token `late`, exactly: nothing where a segment starts there."""
        return self.get("gate", (), one(LATE)).eq(0).select(0, total) if self.has_segments else total

    # -- elements ------------------------------------------------------------------------------------------------------
    def open(self) -> None:
        """All matrices are known: make their memory."""
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
        """A statement for each element: it is given its column, and its row and strip."""
        width = self.columns.width
        column = TILE * width + J
        inner = For("j", width, (store(column, self.strip_row(one(R))),), vector=True)
        return For("tile", self.columns.strips, (For("r", self.n, (inner,)),))

    def each_token(self, *stmts: Stmt, columns: Sequence[Stmt] = ()) -> For:
        """Statements for each token of the chunk, and for each column of it."""
        inner = (For("j", self.n, tuple(columns), vector=True),) if columns else ()
        return For("t", REST, (*self.own.find(self.operands, FIRST + T), *stmts, *inner))

    # -- products ------------------------------------------------------------------------------------------------------
    def product(self, rows: int, axis: Axis, terms: Sequence[Term], finish: Finish) -> For:
        """Sums of products for all rows and columns, a tile of them at a time in registers.

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

    def plain(self, left: str, right: str) -> Term:
        """left @ right, where right has tokens along the vector loop."""
        return Term(
            [("s", self.n)],
            lambda row: self.get(left, row, one(S)),
            lambda v: self.get(right, one(S), self.tokens.column(v)),
        )

    def by_state(self, left: str, *, then: Finish = lambda row, v, total: ()) -> Term:
        """left @ state."""
        right = self.columns.within
        return Term(
            [("s", self.n)],
            lambda row: self.get(left, row, one(S)),
            lambda v: self.get("state", self.strip_row(one(S)), right(v)),
            then,
        )

    def before(self, left: str, right: str) -> Term:
        """left @ right, where left has nothing above its diagonal."""
        return Term(
            [("s", UPTO)],
            lambda row: self.get(left, row, one(S)),
            lambda v: self.get(right, one(S), self.columns.column(v)),
        )

    def after(self, left: str, right: str) -> Term:
        """leftᵀ @ right, where left has nothing above its diagonal."""
        return Term(
            [("s", LATER)],
            lambda row: self.get(left, one(START, S), row),
            lambda v: self.get(right, one(START, S), self.columns.column(v)),
        )

    def left_transposed(self, left: str, right: str) -> Term:
        """leftᵀ @ right, along the tokens of a chunk."""
        return Term(
            [("s", self.chunk)],
            lambda row: self.get(left, one(S), row),
            lambda v: self.get(right, one(S), self.columns.column(v)),
        )

    def transpose(self, name: str, source: str) -> For:
        """Rows of tokens as columns."""
        moved = self.put(name, self.get(source, one(T), one(R)), one(R), one(T))
        return For("t", self.chunk, (For("r", self.n, (moved,)),))

    def stored(self, into: str) -> Finish:
        """The sums as a matrix."""
        return lambda row, v, total: [self.put(into, total, row, self.columns.column(v))]

    def advance(self, row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
        """The state times all gates of the chunk, and what is new."""
        at = self.strip_row(row), self.columns.within(v)
        all_gates = self.get("b", (), one(known(self.chunk - 1, I64)))
        return [self.put("state", fma(all_gates, self.get("state", *at), total), *at)]

    def solved(self, x: str, row: Affine, coefficient: Expr, changes: str, known: Affine, scaled: str, by: Expr) -> For:
        """Row after row, `x` less the changes of rows that are known; beta times that is the row's own change.

        `scaled` gets the changes times `by`. The rows that are known are numbered by `S`.
        """
        axis, kind = self.solved_at_once, self.kind
        sums = [Ref(f"sum{v}", kind) for v in range(axis.vectors)]
        left, change = Ref("left", kind), [Ref(f"change{v}", kind) for v in range(axis.vectors)]
        step: list[Stmt] = [Let("left", -coefficient)]
        initial: list[Stmt] = []
        ends: list[Stmt] = []
        for v, total in enumerate(sums):
            column = axis.column(v)
            initial.append(Var(total.name, self.get(x, row, column)))
            step.append(Assign(total.name, fma(left, self.get(changes, known, column), total)))
            ends += [
                self.put(x, total, row, column),
                Let(change[v].name, self.get("rate", (), row) * total),
                self.put(changes, change[v], row, column),
                self.put(scaled, by * change[v], row, column),
            ]
        inner = For("j", axis.span, (*initial, For("s", DONE, tuple(step)), *ends), vector=True)
        lets = Let("done", T), Let("late", (self.chunk - 1) - T)
        return For("tile", axis.strips, (For("t", self.chunk, (*lets, inner)),))

    # -- a chunk -------------------------------------------------------------------------------------------------------
    def gates(self) -> list[Stmt]:
        """`gate`, `rate` (beta), b, w, D, and D without its diagonal as `below`."""
        below, here, power = (Ref(name, self.kind) for name in ("below", "here", "power"))
        row = (
            Let("below", self.get("gate", (), one(T)) * self.get("w", (), one(J))),
            Let("here", J.eq(T).select(1, below)),
            self.put("below", below, one(T), one(J)),
            self.put("D", here, one(T), one(J)),
            self.put("w", here, (), one(J)),
        )
        start = (
            self.put("gate", self.get("gate", (), one(J)).exp(), (), one(J)),
            self.put("w", self.zero, (), one(J)),
        )
        sources = {"gate": "g", "rate": "beta"}
        values = {m: self.operands.load(x, self.entry, TOKEN, H) for m, x in sources.items()}
        if self.has_segments:  # the gate of a token that starts one is 0
            values["gate"] = AT_START.select(-math.inf, values["gate"])
        return [
            self.each_token(
                *find_start(self.operands, B, TOKEN), *(self.put(m, value, (), one(T)) for m, value in values.items())
            ),
            For("t", PADS, tuple(self.put(m, self.zero, (), one(REST, T)) for m in sources)),
            For("j", self.chunk, start, vector=True),
            For("t", self.chunk, (For("j", self.chunk, row, vector=True),)),
            Var("power", Const(1.0, self.kind)),
            For("t", self.chunk, (
                Assign("power", power * self.get("gate", (), one(T))),
                self.put("b", power, (), one(T)),
            )),
        ]  # fmt: skip

    def rows(self, values: Mapping[str, Expr]) -> list[Stmt]:
        """Matrices of the chunk: an expression of `token` and column each, zeros after the last token."""
        copies = [self.put(name, value, one(T), one(J)) for name, value in values.items()]
        zeros = tuple(self.put(name, self.zero, one(REST, T), one(J)) for name in values)
        return [self.each_token(columns=copies), For("t", PADS, (For("j", self.n, zeros, vector=True),))]

    def of_token(self, name: str) -> Expr:
        """The element of an operand at `token` and column."""
        return self.operands.load(name, self.entry, TOKEN, H, J)

    def gated(self, gates: str, into: str, *, minus: bool = False) -> Finish:
        """Sums that have tokens along the vector loop, times gates."""

        def finish(row: Affine, v: int, total: Ref) -> Sequence[Stmt]:
            column = self.tokens.column(v)
            value = total * self.get(gates, row, column)
            return [self.put(into, -value if minus else value, row, column)]

        return finish

    def scores(self) -> list[Stmt]:
        """A and P, from K, Q and D."""
        return [
            self.product(self.chunk, self.tokens, [self.plain(left, "KT")], self.gated(gates, into))
            for left, gates, into in (("K", "below", "A"), ("Q", "D", "P"))
        ]


def long_rows(s: Scheduler, tokens: Tokens, chunk: int, limit: Size) -> View:
    """The rows that have at least `chunk` tokens, at most `limit` of them; -1 behind the last."""
    assert tokens.offsets is not None
    operands, long_rows = Operands(s, "list_long_rows"), s.temporary(TensorType((limit + 1,), I32))
    operands.read("starts", tokens.offsets)
    operands.write("long", long_rows)
    builder, at = operands.builder, Ref("at", I64)

    def put(value: Expr, place: Expr) -> Stmt:
        return operands.store("long", value.cast(I32), place)

    begin, end = (operands.load("starts", place).cast(I64) for place in (S, S + 1))
    rows = For("s", builder.arg("rows", tokens.states), (
        put(S, at),  # the next one takes its place if it is short
        Assign("at", at + (end - begin >= chunk).cast(I64)),
    ))  # fmt: skip
    rest = Let("rest", builder.arg("places", limit + 1) - at), For("t", REST, (put(known(-1, I64), at + T),))
    root = For("u", builder.arg("units", 1), (Var("at", known(0, I64)), rows, *rest))
    builder.launch(s, root, 1)
    return long_rows

"""Tokens of recurrences: rectangular, or ragged, where a launch first lists the tokens of each row in order.

`Tokens` tells a form where the tokens of a state are. Kernels of rectangular tokens just count; kernels of ragged
tokens read `order`, all token indices sorted by row, and `offsets`, where each row begins in it.
"""

from __future__ import annotations

from rlx.dtypes import BOOL, I32, I64
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Node
from rlx.lir.forms.named_operands import Operands
from rlx.lir.kernels import OUTSIDE_STATES
from rlx.lir.loops import Arg, Check, Const, Expr, For, Index, Let, Ref, Stmt, known
from rlx.lir.schedule import Scheduler
from rlx.lir.views import View
from rlx.types import Size, TensorType, product

BEGIN, COUNT, TOKEN = Ref("begin", I64), Ref("count", I64), Ref("token", I64)


@dataclass(frozen=True)
class Tokens:
    """Maps states to their tokens. A kernel calls `count_own` for each state before it walks its tokens."""

    states: Size
    width: Size  # tokens per state; of all states together if ragged
    order: View | None = None  # [tokens + 1], if ragged
    offsets: View | None = None  # [states + 3]; tokens after the last state are padding

    @classmethod
    def of(cls, s: Scheduler, node: Node) -> Tokens:
        first, rows, state = node.operands[0], node.operand("rows"), node.operand("state")
        assert first is not None
        if rows is None or state is None:
            return cls(first.shape[0], first.shape[1])
        key = "tokens by row", rows, state.shape[0]
        if key not in s.shared:  # shared by all layers
            s.shared[key] = _list_tokens(s, s.view(rows), state.shape[0])
        return cls(state.shape[0], first.shape[0], *s.shared[key])

    @property
    def ragged(self) -> bool:
        return self.order is not None

    def rectangular(self, view: View) -> View:
        """[batch, seq, ...] as it is, [tokens, ...] as [1, tokens, ...]."""
        if not self.ragged:
            return view
        return view.with_((1, *view.shape), (product(view.shape), *view.strides))

    def read(self, operands: Operands) -> None:
        """Add the parameters that locate ragged tokens."""
        if self.order is not None and self.offsets is not None:
            operands.read("order", self.order)
            operands.read("starts", self.offsets)

    def count_own(self, operands: Operands, state: Expr) -> list[Stmt]:
        """Define `begin` and `count` of the tokens of a state, if ragged."""
        if not self.ragged:
            return []
        begin, end = (operands.load("starts", at).cast(I64) for at in (state, state + 1))
        return [Let("begin", begin), Let("count", end - BEGIN)]

    def own(self, operands: Operands) -> Arg | Ref:
        """The number of tokens of a state."""
        return COUNT if self.ragged else operands.builder.arg("seq", self.width)

    def entry(self, state: Expr) -> Expr:
        """The batch entry of the tokens of a state."""
        return Const(0, I64) if self.ragged else state

    def find(self, operands: Operands, number: Expr) -> list[Stmt]:
        """Define `token`, the index of a state's token `number`."""
        return [Let("token", operands.load("order", BEGIN + number).cast(I64) if self.ragged else number)]

    def unless_idle(self, operands: Operands, *body: Stmt) -> tuple[Stmt, ...]:
        """Statements that update a state; skipped if it has no tokens and is updated in place."""
        in_place = operands.numbers.get("final") == operands.numbers.get("state")
        if not self.ragged or not in_place:
            return body
        return Let("busy", COUNT.min(1)), For("once", Ref("busy", I64), body)


def _list_tokens(s: Scheduler, rows: View, states: Size) -> tuple[View, View]:
    """Compute `order` and `offsets`: a single unit counts the tokens of each row, then sorts them by row.

    Padding and tokens whose row does not exist come after all rows.
    """
    operands, tokens = Operands(s, "list_tokens"), rows.shape[0]
    # One entry past the tokens, where empty rows after the last token begin.
    order, offsets = (s.temporary(TensorType((size,), I32)) for size in (tokens + 1, states + 3))
    operands.read("rows", rows)
    operands.write("order", order)
    operands.write("starts", offsets)
    builder = operands.builder
    count, limit = builder.arg("tokens", tokens), builder.arg("states", states)
    i, row, group, at = Index("i"), Ref("row", I64), Ref("group", I64), Ref("at", I64)

    def number(place: Expr) -> Expr:
        return operands.load("starts", place).cast(I64)

    def put(value: Expr, place: Expr) -> Stmt:
        return operands.store("starts", value.cast(I32), place)

    find_group: tuple[Stmt, ...] = (
        Let("row", operands.load("rows", i).cast(I64)),
        Let("exists", (row >= 0) & (row < limit)),
        Let("group", Ref("exists", BOOL).select(row, limit)),
    )
    # Counts are stored two entries further on, so that placing tokens advances each offset to that of the next group.
    body: tuple[Stmt, ...] = (
        For("i", builder.arg("places", states + 3), (put(known(0, I64), i),)),
        For("i", count, (
            *find_group, Check(row < limit, OUTSIDE_STATES), put(number(group + 2) + 1, group + 2),
        )),
        For("i", builder.arg("groups", states + 1), (put(number(i + 1) + number(i + 2), i + 2),)),
        For("i", count, (
            *find_group,
            Let("at", number(group + 1)),
            operands.store("order", i.cast(I32), at),
            put(at + 1, group + 1),
        )),
    )  # fmt: skip
    builder.launch(s, For("u", builder.arg("units", 1), body), 1, flops=tokens)
    return order, offsets


def clear_padding(s: Scheduler, node: Node, out: View) -> None:
    """Zero the results [tokens, ...] of tokens without a row."""
    rows, state = node.operand("rows"), node.operand("state")
    if rows is None or state is None:
        return
    operands, size = Operands(s, "clear_padding"), product(out.shape[1:])
    operands.read("rows", s.view(rows))
    operands.write("out", out.with_((out.shape[0], size), (size, 1)))
    builder, u, row = operands.builder, Index("u"), Ref("row", I64)
    exists = (row >= 0) & (row < builder.arg("states", state.shape[0]))
    zeros = For("j", Ref("size", I64), (operands.store("out", Const(0.0, out.dtype), u, Index("j")),), vector=True)
    body: tuple[Stmt, ...] = (
        Let("row", operands.load("rows", u).cast(I64)),
        Let("exists", exists),
        Let("size", Ref("exists", BOOL).select(known(0, I64), builder.arg("columns", size))),
        zeros,
    )
    builder.launch(s, For("u", builder.arg("tokens", out.shape[0]), body), out.shape[0])

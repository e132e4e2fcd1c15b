"""The two ends of a model: embeddings and RoPE tables, token selection and the language model head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.arrays import Array
from rlx.errors import GraphError, ShapeError
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.positions import check_style, check_tables
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue
from rlx.hir.lower import take_rows
from rlx.ir.graph import Value
from rlx.types import Size, known_equal


@dataclass(frozen=True)
class Embed(FlowStage):
    """Token embedding lookup: `y = table[x]`, for token ids x. Remembers the table for a tied head."""

    weight_key: str
    axis: int = 0
    shape: tuple[int, int] | None = None  # of the table, rows and width: checks it, and `init` needs it

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        tokens = ctx.need(value, "Embed")
        table = ctx.load_param(self.weight_key, shape=self.shape, known=(None, None))
        ctx.state.embed_weight = table
        hidden = ctx.wrap(table.gather(tokens, axis=self.axis))
        ctx.state.hidden_shape = hidden.shape
        return hidden

    @property
    def path(self) -> str:
        return "embed"


def rows_input(ctx: FlowCtx, name: str, shape: Sequence[Size]) -> Value:
    """Return the input with row indices of a table: the one the flow declares, of any shape, else a new one."""
    return ctx.flow_input(name).id if name in ctx.state.inputs else ctx.input(name, shape, "i32")


@dataclass(frozen=True)
class GatherAdd(FlowStage):
    """Adds position or type embeddings: `y = x + table[index]`, where a named input is the index.

    An index of lower rank, such as `[seq]`, picks rows that all sequences share.
    """

    input_name: str
    weight_key: str
    axis: int = 0
    rows: int | None = None  # of the table: checks it, and `init` needs it; it is as wide as the value

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "GatherAdd")
        index = rows_input(ctx, self.input_name, x.shape[:-1])  # one row per vector
        table = ctx.load_param(self.weight_key, shape=None if self.rows is None else (self.rows, x.shape[-1]))
        added = table.gather(index, axis=self.axis)
        if added.rank > x.rank:
            raise ShapeError(f"stage GatherAdd: rows {added.type} of input {self.input_name!r} do not fit {x.type}")
        return ctx.wrap(x + added)

    @property
    def path(self) -> str:
        return "embed"


@dataclass(frozen=True, eq=False)
class RopeTables(FlowStage):
    """Adds RoPE tables `[positions, half]` as params for the layers that follow; `y = x`.

    A layer rotates each pair (a, b) of a head at position p: `(a · cos[p] - b · sin[p], b · cos[p] + a · sin[p])`.
    Layers that need other tables find them by name: `<name>.cos` and `<name>.sin`.
    """

    cos: Array
    sin: Array
    style: str = "halves"  # how a head is paired: "halves" (i, i + half) or "pairs" (2i, 2i + 1)
    cos_key: str = "rope.cos"
    sin_key: str = "rope.sin"

    def __post_init__(self) -> None:
        check_style("RopeTables", self.style)
        check_tables("RopeTables", self.cos, self.sin)

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        cos = ctx.synth_param(self.cos_key, np.asarray(self.cos, np.float32))
        sin = ctx.synth_param(self.sin_key, np.asarray(self.sin, np.float32))
        ctx.state.bind_rope(cos, sin, self.style, self.cos_key, self.sin_key)
        return value


@dataclass(frozen=True)
class GatherLastToken(FlowStage):
    """Selects one token per sequence, or any tokens, from `[batch, seq, hidden]`.

    With `index`, the same token of every sequence: `y[b] = x[b, index]` (-1 is the last). With `batch`, a named input
    has one index per sequence: `y[b] = x[b, input[b]]`. With neither, the input indexes all batch · seq tokens:
    `y[i] = x.reshape(batch · seq, hidden)[input[i]]`.
    """

    batch: int | None = None
    input_name: str = "last_token_idx"
    index: int | None = None

    def __post_init__(self) -> None:
        if self.index is not None and self.batch is not None:
            raise GraphError("stage GatherLastToken: has a batch and an index", hint="the index is one for all rows")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need_sequence(value, "GatherLastToken")
        if self.index is not None:
            return ctx.wrap(x[:, self.index])
        batch, seq, hidden = x.shape
        if self.batch is None:
            rows = x.reshape(batch * seq, hidden)
            return ctx.wrap(rows.gather(ctx.input(self.input_name, ("picked",), "i32")))
        if known_equal(batch, self.batch) is False:
            raise ShapeError(f"stage GatherLastToken: batch is {self.batch}, the value is {x.type}")
        if batch != self.batch:  # symbolic: checked at run time
            x = x.assume_equal(shape=(self.batch, seq, hidden))
        return ctx.wrap(take_rows(x, ctx.input(self.input_name, (self.batch,), "i32")))


@dataclass(frozen=True)
class LmHead(FlowStage):
    """Logits: `y = x @ tableᵀ`, where the `[vocab, hidden]` table is the tied token table or a weight of its own."""

    vocab_size: int
    hidden_size: int
    weight_key: str = "lm_head.weight"
    tie_word_embeddings: bool = False

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "LmHead")
        if self.tie_word_embeddings:
            if ctx.state.embed_weight is None:
                raise GraphError("stage LmHead: is tied to a token table, but there is none", hint="put Embed first")
            table = ctx.state.embed_weight
            wanted = (self.vocab_size, self.hidden_size)
            if any(known_equal(a, b) is False for a, b in zip(table.shape, wanted, strict=True)):
                shapes = (f"[{a}, {b}]" for a, b in (table.shape, wanted))
                raise ShapeError("stage LmHead: the token table is {}, expected {}: vocabulary, hidden".format(*shapes))
        else:
            table = ctx.stored_param(self.weight_key, transpose=True, shape=(self.hidden_size, self.vocab_size))
        return ctx.wrap(ctx.hir().one("linear_stored", x, table))

    @property
    def path(self) -> str:
        return "head"

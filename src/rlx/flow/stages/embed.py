"""Stages at the two ends of a model: token tables, position and type tables, picking tokens, the head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlx.errors import GraphError
from rlx.flow.context import Array, FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue
from rlx.hir.lower import counted


@dataclass(frozen=True)
class Embed(FlowStage):
    """Rows of the token table; the table is remembered for a tied head."""

    weight_key: str
    axis: int = 0
    shape: tuple[int, int] | None = None  # checks the table: rows, width

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        tokens = ctx.need(value, "Embed")
        table = ctx.load_param(self.weight_key, shape=self.shape)
        ctx.state.embed_weight = table
        hidden = ctx.wrap(table.gather(tokens, axis=self.axis))
        ctx.state.hidden_shape = hidden.shape
        return hidden

    @property
    def path(self) -> str:
        return "embed"


@dataclass(frozen=True)
class GatherAdd(FlowStage):
    """Adds the rows of a table that a named input picks: position and type embeddings."""

    input_name: str
    weight_key: str
    axis: int = 0
    rows: int | None = None  # checks the table, which is as wide as the value

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "GatherAdd")
        index = ctx.input(self.input_name, x.shape[:-1], "i32")  # a row for each vector
        table = ctx.load_param(self.weight_key, shape=None if self.rows is None else (self.rows, x.shape[-1]))
        return ctx.wrap(x + table.gather(index, axis=self.axis))

    @property
    def path(self) -> str:
        return "embed"


@dataclass(frozen=True, eq=False)
class RopeTables(FlowStage):
    """Cosine and sine tables `[positions, half]` as params; the flowing value passes.

    Where layers turn in several ways, each pair has keys of its own, `<name>.cos` and `<name>.sin`.
    """

    cos: Array
    sin: Array
    style: str = "halves"
    cos_key: str = "rope.cos"
    sin_key: str = "rope.sin"

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        ctx.state.rope_cos = ctx.synth_param(self.cos_key, np.asarray(self.cos, np.float32))
        ctx.state.rope_sin = ctx.synth_param(self.sin_key, np.asarray(self.sin, np.float32))
        ctx.state.rope_style, ctx.state.rope_rows = self.style, None
        ctx.state.named |= {self.cos_key: ctx.state.rope_cos, self.sin_key: ctx.state.rope_sin}
        return value


@dataclass(frozen=True)
class GatherLastToken(FlowStage):
    """One token of each sequence, or any tokens, in place of all.

    With `index` it is that token of every row (-1 is the last): `[batch, hidden]`. With `batch` a named input has the
    place of each row's token: `[batch, hidden]`. With neither the input picks out of batch × seq rows:
    `[picked, hidden]`.
    """

    batch: int | None = None
    input_name: str = "last_token_idx"
    index: int | None = None

    def __post_init__(self) -> None:
        if self.index is not None and self.batch is not None:
            raise GraphError("stage GatherLastToken: has a batch and an index", hint="the index is one for all rows")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "GatherLastToken")
        if x.rank != 3:
            raise GraphError(f"stage GatherLastToken: takes [batch, seq, hidden], found {x.type}")
        if self.index is not None:
            return ctx.wrap(x[:, self.index])
        batch, seq, hidden = x.shape
        rows = x.reshape(batch * seq, hidden)
        if self.batch is None:
            return ctx.wrap(rows.gather(ctx.input(self.input_name, ("picked",), "i32")))
        # `seq` is a number of the run: it is what one row of ones adds up to
        graph = ctx.hir()
        length = graph.one("expand", graph.constant(1, "i32"), shape=(seq,)).sum(axis=0)
        first = counted(graph, 1, batch).reshape(batch) * length
        return ctx.wrap(rows.gather(first + ctx.input(self.input_name, (batch,), "i32")))


@dataclass(frozen=True)
class LmHead(FlowStage):
    """Logits by the tied token table or a table of its own, both `[vocab, hidden]`."""

    vocab_size: int
    hidden_size: int
    weight_key: str = "lm_head.weight"
    tie_word_embeddings: bool = False

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "LmHead")
        if self.tie_word_embeddings:
            if ctx.state.embed_weight is None:
                raise GraphError("stage LmHead: is tied to a token table, and none flows here", hint="put Embed first")
            table = ctx.state.embed_weight.mT
        else:
            table = ctx.load_param(self.weight_key, transpose=True, shape=(self.hidden_size, self.vocab_size))
        return ctx.wrap(x @ table)

    @property
    def path(self) -> str:
        return "head"

"""Stages at the two ends of a model: token tables, position and type tables, picking tokens, the head."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlx.errors import GraphError
from rlx.flow.context import Array, FlowCtx
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import FlowValue
from rlx.types import sym


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
        index = ctx.input(self.input_name, (sym.BATCH, sym.SEQ), "i32")
        table = ctx.load_param(self.weight_key, shape=None if self.rows is None else (self.rows, x.shape[-1]))
        return ctx.wrap(x + table.gather(index, axis=self.axis))

    @property
    def path(self) -> str:
        return "embed"


@dataclass(frozen=True, eq=False)
class RopeTables(FlowStage):
    """Cosine and sine tables `[positions, half]` as params; the flowing value passes."""

    cos: Array
    sin: Array
    style: str = "halves"
    cos_key: str = "rope.cos"
    sin_key: str = "rope.sin"

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        ctx.state.rope_cos = ctx.synth_param(self.cos_key, self.cos.astype(np.float32))
        ctx.state.rope_sin = ctx.synth_param(self.sin_key, self.sin.astype(np.float32))
        ctx.state.rope_style = self.style
        return value


@dataclass(frozen=True)
class GatherLastToken(FlowStage):
    """The tokens that a named input picks out of batch × seq rows: `[picked, hidden]`."""

    input_name: str = "last_token_idx"

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue:
        x = ctx.need(value, "GatherLastToken")
        rows = x.reshape(x.shape[0] * x.shape[1], x.shape[2])
        return ctx.wrap(rows.gather(ctx.input(self.input_name, ("picked",), "i32")))


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

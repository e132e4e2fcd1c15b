"""RoPE whose frequencies depend on the sequence length, chosen at run time per sequence.

The length includes all tokens of the call, and of the prompt if the call is a chunk of one. With a KV cache it is the
input `lengths`; without one it is counted up to the last token that is not padding.
"""

from __future__ import annotations

import numpy as np

from rlx.arrays import Array
from rlx.errors import GraphError, ShapeError
from rlx.fast_dataclass import dataclass
from rlx.flow.context import FlowCtx
from rlx.flow.positions import check_rows, check_style, check_tables, has_positions, kept_tokens, token_positions
from rlx.flow.stages.base import FlowStage
from rlx.flow.state import MAIN_ROPE, FlowValue
from rlx.hir.lower import default_positions
from rlx.ir.graph import Value
from rlx.types import sym


@dataclass(frozen=True, eq=False)
class RopeSwitch(FlowStage):
    """RoPE tables that switch at a sequence length (LongRoPE); `y = x`.

    Position p uses row `p` in sequences of up to `limit` tokens and row `limit + p` in longer ones, so the tables are
    `[limit + positions, half]`. Without a cache the input `attention_mask` says which tokens count.
    """

    cos: Array
    sin: Array
    limit: int
    style: str = "halves"
    name: str = MAIN_ROPE

    def __post_init__(self) -> None:
        check_style("RopeSwitch", self.style)
        check_tables("RopeSwitch", self.cos, self.sin)
        _check_limit("RopeSwitch", self.limit)
        if self.limit >= len(self.cos):
            raise ShapeError(f"stage RopeSwitch: limit is {self.limit}, but tables have only {len(self.cos)} rows")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        x = ctx.need(value, "RopeSwitch")
        if not has_positions(ctx):
            check_rows("RopeSwitch", max(self.limit, len(self.cos) - self.limit), x.shape[1])
        is_long = (sequence_lengths(ctx, x, self.limit, grows=False) > self.limit).astype("i32")
        rows = token_positions(ctx, x).maximum(0) + is_long.reshape(x.shape[0], 1) * self.limit
        cos, sin = (
            ctx.synth_param(f"{self.name}.{of}", np.asarray(table, np.float32))
            for of, table in (("cos", self.cos), ("sin", self.sin))
        )
        ctx.state.bind_rope(cos, sin, self.style, f"{self.name}.cos", f"{self.name}.sin", rows)
        return value


@dataclass(frozen=True, eq=False)
class RopeGrowth(FlowStage):
    """RoPE frequencies that depend on the sequence length (dynamic NTK); `y = x`.

    Angles at position p are `p · frequencies[max(0, length - limit)]`, so `frequencies` is `[lengths, half]`. Without a
    cache the input `attention_mask` says which tokens count.
    """

    frequencies: Array
    limit: int
    scale: float = 1.0  # multiplies cosines and sines
    style: str = "halves"
    name: str = MAIN_ROPE

    def __post_init__(self) -> None:
        check_style("RopeGrowth", self.style)
        _check_limit("RopeGrowth", self.limit)
        if len(np.shape(self.frequencies)) != 2 or not len(self.frequencies):
            shape = np.shape(self.frequencies)
            raise ShapeError(f"stage RopeGrowth: frequencies are [lengths, half], found shape {shape}")

    def emit(self, ctx: FlowCtx, value: FlowValue | None) -> FlowValue | None:
        x = ctx.need(value, "RopeGrowth")
        batch, seq = x.shape[:2]
        if not has_positions(ctx):
            check_rows("RopeGrowth", self.limit + len(self.frequencies) - 1, seq)
        lengths = sequence_lengths(ctx, x, self.limit, grows=True)
        table = ctx.synth_param(f"{self.name}.frequencies", np.asarray(self.frequencies, np.float32))
        half = table.shape[1]
        frequencies = table.gather((lengths - self.limit).maximum(0))  # a length without a row is a run-time error
        positions = token_positions(ctx, x).maximum(0).astype("f32").reshape(batch, seq, 1)
        angles = (positions * frequencies.reshape(batch, 1, half)).reshape(batch * seq, half)
        each = default_positions(ctx.hir(), 1, batch * seq).reshape(batch, seq)  # one table row per token
        cos, sin = angles.cos() * self.scale, angles.sin() * self.scale
        ctx.state.bind_rope(cos, sin, self.style, f"{self.name}.cos", f"{self.name}.sin", each)
        return value


def sequence_lengths(ctx: FlowCtx, x: Value, limit: int, grows: bool) -> Value:
    """Return sequence lengths [batch], and tell the cache how its keys depend on the length.

    They depend on whether it is above `limit`, or, with `grows`, on the length itself beyond `limit`.
    """
    if ctx.state.cache is not None:
        if ctx.state.cache.token_rows is not None:
            raise GraphError(
                "stage Rope: tables that depend on the length of sequences take tokens [batch, seq], found ragged ones",
                hint="leave out ragged(), or use a context within the length that the model was trained for",
            )
        ctx.state.cache.lengths.append((limit, grows))
        return ctx.input("lengths", (sym.BATCH,), "i32")
    present = kept_tokens(ctx, x.shape[:2]).astype("i32")
    if has_positions(ctx):  # the tokens may be part of a longer sequence
        return ctx.hir().one("max", (token_positions(ctx, x) + 1) * present, axis=1)
    return ctx.hir().one("sum", present, axis=1)


def _check_limit(stage: str, limit: int) -> None:
    if not hasattr(limit, "__index__") or limit < 1:
        raise GraphError(f"stage {stage}: limit is {limit!r}, expected a number of tokens from 1")

"""Positions, padding and RoPE tables of the tokens that flow: what attention, recurrent layers and embeddings share."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BOOL
from rlx.errors import GraphError, ShapeError, nearest
from rlx.flow.context import FlowCtx
from rlx.flow.state import MAIN_ROPE
from rlx.hir.lower import default_positions
from rlx.ir.graph import Graph, Value
from rlx.ops.rope import STYLES as ROPE_STYLES
from rlx.types import Size


def has_positions(ctx: FlowCtx) -> bool:
    """Whether positions of tokens are an input: a cache needs it, and a flow may declare it."""
    return ctx.state.cache is not None or "positions" in ctx.state.inputs


def token_positions(ctx: FlowCtx, x: Value) -> Value:
    """[batch, seq]: an input where a cache or the flow asks for it, else counted from 0."""
    if ctx.state.cache is not None and ctx.state.cache.token_rows is not None:
        return ctx.input("positions", x.shape[1:2], "i32").reshape(*x.shape[:2])  # ragged: a batch of one
    if has_positions(ctx):
        return ctx.input("positions", x.shape[:2], "i32")
    return default_positions(ctx.hir(), x.shape[0], x.shape[1])


def size_of(graph: Graph, size: Size) -> Value:
    """A size as an i32 scalar; one that is known at run time only is what that many ones add up to."""
    if isinstance(size, int):
        return graph.constant(size, "i32")
    return graph.one("sum", graph.one("expand", graph.constant(1, "i32"), shape=(size,)), axis=0)


def rope_tables_of(ctx: FlowCtx, stage: str, name: str) -> tuple[Value, Value, Value | None, str]:
    """The tables that flow under a name, the row of each token where it is not its position, and their style.

    `rope` is also what flows under no name.
    """
    state = ctx.state
    cos, sin, rows = (state.named.get(f"{name}.{of}") for of in ("cos", "sin", "rows"))
    if name == MAIN_ROPE and (cos is None or sin is None):
        cos, sin, rows = state.rope_cos, state.rope_sin, state.rope_rows
    if cos is not None and sin is not None:
        return cos, sin, rows, state.style_of(name)
    known = [key.removesuffix(".cos") for key in state.named if key.endswith(".cos")]
    hint = nearest(name, known) or "put RopeTables before the layers"
    which = "" if name == MAIN_ROPE else f" under the name {name!r}"
    raise GraphError(f"stage {stage}: no RoPE tables flow here{which}", hint=hint)


def check_rows(stage: str, rows: Size, wanted: Size) -> None:
    """An error where a table is known to have fewer rows than there are positions."""
    if isinstance(rows, int) and isinstance(wanted, int) and rows < wanted:
        raise ShapeError(
            f"stage {stage}: RoPE tables have {rows} rows, positions go up to {wanted - 1}",
            hint="make the tables as long as the longest sequence",
        )


def check_style(stage: str, style: str) -> None:
    """An error where nobody knows which parts of a head turn together."""
    if style not in ROPE_STYLES:
        hint = nearest(str(style), ROPE_STYLES) or f"known: {', '.join(ROPE_STYLES)}"
        raise GraphError(f"stage {stage}: style is {style!r}", hint=hint)


def check_tables(stage: str, cos: Array, sin: Array) -> None:
    """An error where cosines and sines are no two tables of the same shape."""
    shapes = np.shape(cos), np.shape(sin)
    if len(shapes[0]) != 2 or shapes[0] != shapes[1]:
        raise ShapeError(f"stage {stage}: cos and sin are [positions, half], found {shapes[0]} and {shapes[1]}")


def kept_tokens(ctx: FlowCtx, shape: Sequence[Size], name: str = "attention_mask") -> Value:
    """Which tokens are no padding, `[batch, seq]` truth values: an input of whatever type."""
    mask = ctx.mask_input(name, shape)
    return mask if mask.dtype is BOOL else mask >= 0.5

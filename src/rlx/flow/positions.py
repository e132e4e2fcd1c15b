"""Token positions, padding and RoPE tables: shared by attention, recurrent layers and embeddings."""

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
    """Whether token positions are an input: required with a cache, else if the flow declares it."""
    return ctx.state.cache is not None or "positions" in ctx.state.inputs


def token_positions(ctx: FlowCtx, x: Value) -> Value:
    """Return token positions [batch, seq]: an input if `has_positions`, else counted from 0."""
    if ctx.state.cache is not None and ctx.state.cache.token_rows is not None:
        return ctx.input("positions", x.shape[1:2], "i32").reshape(*x.shape[:2])  # ragged: a batch of one
    if has_positions(ctx):
        return ctx.input("positions", x.shape[:2], "i32")
    return default_positions(ctx.hir(), x.shape[0], x.shape[1])


def size_of(graph: Graph, size: Size) -> Value:
    """Return a size as an i32 scalar; a symbolic size is the sum of that many ones."""
    if isinstance(size, int):
        return graph.constant(size, "i32")
    return graph.one("sum", graph.one("expand", graph.constant(1, "i32"), shape=(size,)), axis=0)


def rope_tables_of(ctx: FlowCtx, stage: str, name: str) -> tuple[Value, Value, Value | None, str]:
    """Return cosines and sines bound under a name, the row of each token (None: its position), and the style.

    `rope` also stands for tables bound without a name.
    """
    state = ctx.state
    cos, sin, rows = (state.named.get(f"{name}.{of}") for of in ("cos", "sin", "rows"))
    if name == MAIN_ROPE and (cos is None or sin is None):
        cos, sin, rows = state.rope_cos, state.rope_sin, state.rope_rows
    if cos is not None and sin is not None:
        return cos, sin, rows, state.style_of(name)
    known = [key.removesuffix(".cos") for key in state.named if key.endswith(".cos")]
    hint = nearest(name, known) or "put flow.rope(...) or rope_tables before the layers, or rope=None for no RoPE"
    which = "" if name == MAIN_ROPE else f" under the name {name!r}"
    raise GraphError(f"stage {stage}: no RoPE tables flow here{which}", hint=hint)


def rope_tables(positions: int, head_dim: int, theta: float = 10_000.0) -> tuple[Array, Array]:
    """Return cosines and sines `[positions, head_dim / 2]` of the angles `p · theta^(-2i / head_dim)`, as f32."""
    for name, value in (("positions", positions), ("head_dim", head_dim)):
        if not isinstance(value, int) or value < 1:
            raise ShapeError(f"rope_tables: {name} is {value!r}, expected an integer from 1")
    if head_dim % 2:
        raise ShapeError(f"rope_tables: head_dim is {head_dim}, RoPE rotates pairs", hint="an even number")
    frequencies = float(theta) ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)


def check_rows(stage: str, rows: Size, wanted: Size) -> None:
    """Raise if a table is known to have fewer rows than there are positions."""
    if isinstance(rows, int) and isinstance(wanted, int) and rows < wanted:
        raise ShapeError(
            f"stage {stage}: RoPE tables have {rows} rows, positions go up to {wanted - 1}",
            hint="make the tables as long as the longest sequence",
        )


def check_style(stage: str, style: str) -> None:
    """Raise if the pairing style of a head is unknown."""
    if style not in ROPE_STYLES:
        hint = nearest(str(style), ROPE_STYLES) or f"known: {', '.join(ROPE_STYLES)}"
        raise GraphError(f"stage {stage}: style is {style!r}", hint=hint)


def check_tables(stage: str, cos: Array, sin: Array) -> None:
    """Raise if cosines and sines are not two tables of the same shape."""
    shapes = np.shape(cos), np.shape(sin)
    if len(shapes[0]) != 2 or shapes[0] != shapes[1]:
        raise ShapeError(f"stage {stage}: cos and sin are [positions, half], found {shapes[0]} and {shapes[1]}")


def kept_tokens(ctx: FlowCtx, shape: Sequence[Size], name: str = "attention_mask") -> Value:
    """Return a boolean mask `[batch, seq]` of tokens that are not padding, from an input of any dtype."""
    mask = ctx.mask_input(name, shape)
    return mask if mask.dtype is BOOL else mask >= 0.5

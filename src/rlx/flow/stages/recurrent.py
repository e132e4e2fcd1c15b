"""Operands of recurrent blocks other than weights: the states carried from one call to the next.

With the runtime's cache a state is a leaf of the graph, updated in place by the op that carries it; without one, every
sequence begins with zero states. Padding (a negative position) leaves every state unchanged.
"""

from __future__ import annotations

from rlx.flow.context import FlowCtx
from rlx.flow.positions import token_positions
from rlx.ir.graph import Value


def carried(ctx: FlowCtx, name: str, *shape: int) -> Value | None:
    """The state of a layer `[sequences, *shape]` in the runtime's cache; None in a flow that has none."""
    return None if ctx.state.cache is None else ctx.state.cache.state(name, shape)


def cached_positions(ctx: FlowCtx, x: Value) -> Value | None:
    """Return token positions, negative for padding; None in a flow without a cache, which has no padding."""
    return None if ctx.state.cache is None else token_positions(ctx, x)


def token_rows(ctx: FlowCtx) -> Value | None:
    """The sequence of the cache that each of ragged tokens belongs to; None where tokens are `[batch, seq]`."""
    return None if ctx.state.cache is None else ctx.state.cache.token_rows


def conv_weight(ctx: FlowCtx, key: str, channels: int, size: int) -> Value:
    """Return the weight of a depthwise convolution: `[channels, 1, size]`, or `[channels, size]`."""
    flat = ctx.weights.has(key) and len(ctx.weights.type(key).shape) == 2
    return ctx.stored_param(key, shape=(channels, size) if flat else (channels, 1, size))

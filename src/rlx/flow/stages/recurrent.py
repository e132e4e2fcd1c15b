"""What blocks of recurrent layers take beside their weights: states that wait for the next tokens.

With a cache of the runtime a state is a leaf of the graph, and the op that carries it on writes it in place; without
one, a sequence begins where its tokens do. Padding (a negative position) leaves every state as it is.
"""

from __future__ import annotations

from rlx.flow.context import FlowCtx
from rlx.flow.positions import token_positions
from rlx.ir.graph import Value


def carried(ctx: FlowCtx, name: str, *shape: int) -> Value | None:
    """The state of a layer `[sequences, *shape]` in the runtime's cache; None in a flow that has none."""
    return None if ctx.state.cache is None else ctx.state.cache.state(name, shape)


def cached_positions(ctx: FlowCtx, x: Value) -> Value | None:
    """Positions of tokens, of which padding has negative ones; None in a flow without a cache, which has no padding."""
    return None if ctx.state.cache is None else token_positions(ctx, x)


def token_rows(ctx: FlowCtx) -> Value | None:
    """The sequence of the cache that each of ragged tokens belongs to; None where tokens are `[batch, seq]`."""
    return None if ctx.state.cache is None else ctx.state.cache.token_rows


def conv_weight(ctx: FlowCtx, key: str, channels: int, size: int) -> Value:
    """The weight of a convolution of each channel by itself: `[channels, 1, size]`, or without the axis in between."""
    flat = ctx.weights.has(key) and len(ctx.weights.type(key).shape) == 2
    return ctx.stored_param(key, shape=(channels, size) if flat else (channels, 1, size))

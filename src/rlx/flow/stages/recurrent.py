"""What recurrent layers are made of: a short convolution, and states that wait for the next tokens.

With a cache of the runtime a state is a leaf of the graph, and the op that carries it on writes it in place; without
one, a sequence begins where its tokens do. Padding (a negative position) leaves every state as it is.
"""

from __future__ import annotations

from rlx.flow.context import FlowCtx
from rlx.flow.stages.attention import token_positions
from rlx.ir.graph import Value


def where_present(ctx: FlowCtx, x: Value) -> Value:
    """x `[batch, seq, ...]` with 0 at padding; as it is in a flow that has none."""
    if ctx.state.cache is None:
        return x
    present = token_positions(ctx, x) >= 0
    return x.graph.one("where", present.reshape(*x.shape[:2], *(1,) * (x.rank - 2)), x, 0.0)


def state_of(ctx: FlowCtx, name: str, like: Value, *shape: int) -> Value:
    """The state of a layer `[batch, *shape]`: a leaf of the runtime's cache, or zeros."""
    if ctx.state.cache is not None:
        return ctx.state.cache.state(name, shape)
    return ctx.hir().one("expand", ctx.hir().constant(0.0), shape=(like.shape[0], *shape))


def short_conv(ctx: FlowCtx, x: Value, key: str, bias_key: str | None, size: int, name: str) -> Value:
    """A causal convolution of each channel with its last `size` tokens; `name` is that of its state."""
    channels = x.shape[-1]
    assert isinstance(channels, int)
    # files have [channels, 1, size] or leave out the middle, and the op takes both
    flat = ctx.weights.has(key) and len(ctx.weights.type(key).shape) == 2
    weight = ctx.load_param(key, shape=(channels, size) if flat else (channels, 1, size))
    before = state_of(ctx, name, x, size - 1, channels)
    if ctx.state.cache is None:
        y = ctx.hir().one("depthwise_conv1d_causal", x, weight, before, kernel_size=size)
    else:
        counted = (token_positions(ctx, x) >= 0).astype("i32").sum(axis=1)
        y = ctx.hir().apply("depthwise_conv1d_causal_carry", x, weight, before, counted, kernel_size=size)[0]
    return y if bias_key is None else y + ctx.load_param(bias_key, shape=(channels,))

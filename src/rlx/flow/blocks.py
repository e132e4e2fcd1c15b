"""Blocks over weights by key: the building blocks of stages."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from rlx.errors import GraphError, ShapeError
from rlx.flow.context import FlowCtx
from rlx.ir.graph import Value
from rlx.ir.provenance import here
from rlx.types import Size, known_equal


def stored_weight(
    ctx: FlowCtx, key: str, width: Size, like: Value, out: Size | None = None, transpose: bool = True,
    known_out: Size | None = None,
) -> Value:  # fmt: skip
    """Return a weight as stored, `[out, in]` (or `[in, out]` without `transpose`), for vectors of size `width`.

    A weight of another shape is an error that names its key and the value `like` that it would multiply. `known_out` is
    what `ModelFlow.init` assumes as the output size without an `out`.
    """
    weight = ctx.stored_param(key, transpose, shape=None if out is None else (width, out), known=(width, known_out))
    if weight.rank == 2 and like.rank:
        size = weight.shape[1] if transpose else weight.shape[0]
        if known_equal(width, size) is False:
            raise ShapeError(
                f"weight {key!r}: takes vectors of {size}, the value is {like.type}",
                hint=f"the weight is read as {'[out, in]' if transpose else '[in, out]'}: is it the transpose?",
                notes=[f"built at: {here()}"],
            )
    return weight


def linear(
    ctx: FlowCtx, x: Value, weight_key: str, bias_key: str | None = None, *, out: Size | None = None,
    transpose: bool = True, activation: str | None = None, heads: int | None = None,
) -> Value:  # fmt: skip
    """Multiply x by a weight stored `[out, in]`, add a bias and apply an activation; split into `heads` if given.

    Without `transpose` the weight is stored `[in, out]`. A weight of another shape is an error that names its key.
    """
    weight, bias = _weight_and_bias(ctx, x, weight_key, bias_key, out, transpose)
    attrs = {"activation": activation, "transposed": transpose, "heads": heads}
    with _naming(weight_key):
        return ctx.hir().one("linear_stored", x, weight, bias, **attrs)


def _weight_and_bias(
    ctx: FlowCtx, x: Value, weight_key: str, bias_key: str | None, out: Size | None, transpose: bool = True
) -> tuple[Value, Value | None]:
    weight = stored_weight(ctx, weight_key, x.shape[-1] if x.rank else 0, x, out, transpose)
    if bias_key is None:
        return weight, None
    return weight, ctx.stored_param(bias_key, shape=(weight.shape[0 if transpose else -1],), init=0.0)


@contextmanager
def _naming(weight_key: str) -> Iterator[None]:
    """Errors inside name the weight."""
    try:
        yield
    except GraphError as error:
        error.add_note(f"  weight: {weight_key!r}")
        raise


def normed_heads(
    ctx: FlowCtx, x: Value, keys: tuple[str, str | None, str], *, heads: int, head_dim: int, eps: float,
    unit_offset: bool, rotation: Callable[[], Mapping[str, Any]] = dict,
) -> Value:  # fmt: skip
    """Project x to normed heads; the keys are those of weight, bias and norm.

    `rotation` returns the RoPE tables, positions and style of the block; it is called after the weights are read.
    """
    weight_key, bias_key, norm_key = keys
    weight, bias = _weight_and_bias(ctx, x, weight_key, bias_key, heads * head_dim)
    norm = ctx.stored_param(norm_key, shape=(head_dim,), init=0.0 if unit_offset else 1.0)
    attrs = {"heads": heads, "eps": eps, "unit_offset": unit_offset, **rotation()}
    with _naming(weight_key):
        return ctx.hir().one("normed_heads", x, weight, norm, bias, **attrs)


def gated_queries(
    ctx: FlowCtx, x: Value, keys: tuple[str, str | None, str | None], *, heads: int, head_dim: int, eps: float,
    unit_offset: bool,
) -> tuple[Value, Value]:  # fmt: skip
    """Project x to queries and the gates of attention's output; the keys are those of weight, bias and norm."""
    weight_key, bias_key, norm_key = keys
    weight, bias = _weight_and_bias(ctx, x, weight_key, bias_key, 2 * heads * head_dim)
    norm = None
    if norm_key is not None:
        norm = ctx.stored_param(norm_key, shape=(head_dim,), init=0.0 if unit_offset else 1.0)
    attrs = {"heads": heads, "eps": eps, "unit_offset": unit_offset}
    with _naming(weight_key):
        queries, gate = ctx.hir().apply("gated_queries", x, weight, bias, norm, **attrs)
    return queries, gate


def norm(
    ctx: FlowCtx, x: Value, weight_key: str, bias_key: str | None = None, *, kind: str, eps: float,
    unit_offset: bool = False,
) -> Value:  # fmt: skip
    """Normalise x, then scale by a weight (or by 1 + weight) and add a bias."""
    weight = ctx.stored_param(weight_key, shape=x.shape[-1:], init=0.0 if unit_offset else 1.0)
    bias = None if bias_key is None else ctx.stored_param(bias_key, shape=x.shape[-1:], init=0.0)
    return ctx.hir().one("norm", x, weight, bias, kind=kind, eps=eps, unit_offset=unit_offset)


def gated_ffn(
    ctx: FlowCtx, x: Value, keys: tuple[str, str, str], *, activation: str, bias: bool = False,
    inner: Size | None = None,
) -> Value:  # fmt: skip
    """Compute down(activation(gate(x)) * up(x)), with the keys of gate, up and down; with `bias`, each has a bias."""
    weights, biases = gated_weights(ctx, x, keys, bias=bias, inner=inner)
    return ctx.hir().one("gated_ffn", x, *weights, *biases, activation=activation)


def gated_weights(
    ctx: FlowCtx, x: Value, keys: tuple[str, ...], *, bias: bool = False, inner: Size | None = None
) -> tuple[list[Value], list[Value]]:
    """Read the weights of a gated feed-forward, by the keys of gate, up and down, and their biases."""
    width, gate, up, down = x.shape[-1], *keys
    weights: list[Value] = []
    biases: list[Value] = []
    for key, out in ((gate, inner), (up, inner), (down, width)):  # each bias is read after its weight
        inner_size = weights[0].shape[0] if weights else None
        size = inner_size if key == down and inner_size is not None else width
        weights.append(stored_weight(ctx, key, size, x, out, known_out=inner_size))
        if bias:
            name = key.removesuffix("weight") + "bias"
            biases.append(ctx.stored_param(name, shape=weights[-1].shape[:1], init=0.0))
    return weights, biases


def fused_gated_ffn(ctx: FlowCtx, x: Value, both: str, down: str, *, activation: str, bias: bool, inner: int) -> Value:
    """Like `gated_ffn`, with gate and up as halves of one weight; `both` and `down` are keys without `.weight`."""
    width = x.shape[-1]
    weights: list[Value] = []
    biases: list[Value] = []
    for key, size, out in ((both, width, 2 * inner), (down, inner, width)):
        weights.append(stored_weight(ctx, f"{key}.weight", size, x, out))
        if bias:
            biases.append(ctx.stored_param(f"{key}.bias", shape=(out,), init=0.0))
    return ctx.hir().one("fused_gated_ffn", x, *weights, *biases, activation=activation)

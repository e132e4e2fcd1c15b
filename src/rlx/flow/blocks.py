"""Blocks over weights by key: the building blocks of stages."""

from __future__ import annotations

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
    weight = stored_weight(ctx, weight_key, x.shape[-1] if x.rank else 0, x, out, transpose)
    bias = None
    if bias_key is not None:
        bias = ctx.stored_param(bias_key, shape=(weight.shape[0 if transpose else -1],), init=0.0)
    attrs = {"activation": activation, "transposed": transpose, "heads": heads}
    try:
        return ctx.hir().one("linear_stored", x, weight, bias, **attrs)
    except GraphError as error:
        error.add_note(f"  weight: {weight_key!r}")
        raise


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
    return ctx.hir().one("gated_ffn", x, *weights, *biases, activation=activation)


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

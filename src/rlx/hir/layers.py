"""Blocks that stages emit, with their lowerings: linear maps, norms, feed-forwards, patch embedding.

Blocks of attention are in `heads.py`, recurrent ones in `recurrent.py`, those for graphs built by hand in `blocks.py`.
Weights are operands as files store them: `[out, in]`, quantised or in another element type. They are converted to the
type of x, in matmuls to f32 or wider.
"""

from __future__ import annotations

from rlx.errors import GraphError, ShapeError
from rlx.hir.activations import activate, check_known
from rlx.hir.blocks import check_shapes, linear_type, one_type, wide
from rlx.hir.lower import apply_activation, lowering, project, read
from rlx.ir.graph import Value
from rlx.ir.registry import HIR, MIXES_TOKENS, PER_TOKEN, TAKES_PACKED, f32, op, sample
from rlx.ops.conv import conv2d
from rlx.types import Size, TensorType

NORMS = ("rms", "layer")


# -- linear maps ------------------------------------------------------------------------------------------------------
@op(
    "linear_stored", level=HIR, traits=[TAKES_PACKED, PER_TOKEN],
    samples=[
        sample(f32(3, 17), f32(70, 17), f32(70)), sample(f32(4, 6), f32(6, 5), transposed=False, activation="gelu"),
        sample(f32(2, 5, 8), f32(6, 8), f32(6), heads=3, activation="quick_gelu"),
    ],
)  # fmt: skip
def linear_stored(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    *,
    activation: str | None = None,
    transposed: bool = True,
    heads: int | None = None,
) -> TensorType:
    """activation(x @ weight + bias) with a weight and bias as files store them: quantised, or of any element type.

    They are converted to f32 (f64 if x is f64). The weight is [out, in] if `transposed`, else [in, out]. With `heads`,
    the last axis of the result is split into [..., heads, head_dim].
    """
    where = "linear_stored"
    if weight.rank < 2:
        raise ShapeError(f"{where}: weight is {weight}, expected [out, in]")
    lead, rows, columns = weight.shape[:-2], weight.shape[-2], weight.shape[-1]
    shape = (*lead, columns, rows) if transposed else weight.shape
    added = None if bias is None else TensorType(bias.shape, wide(x))
    result = linear_type(where, x, TensorType(shape, wide(x)), added, activation)
    if heads is None:
        return result
    width = result.shape[-1]
    if not isinstance(width, int) or heads < 1 or width % heads:
        raise ShapeError(f"{where}: {width} columns do not split into {heads} heads")
    return result.with_shape(*result.shape[:-1], heads, width // heads)


@lowering("linear_stored")
def _(
    x: Value, weight: Value, bias: Value | None, *, activation: str | None, transposed: bool, heads: int | None
) -> Value:
    y = apply_activation(project(x, weight, bias, transposed=transposed), activation)
    return y if heads is None else into_heads(y, heads)


def into_heads(y: Value, heads: int) -> Value:
    """[..., heads * head_dim] to [..., heads, head_dim]."""
    result: Value = y.reshape(*y.shape[:-1], heads, y.shape[-1] // heads)
    return result


# -- norms ------------------------------------------------------------------------------------------------------------
@op(
    "norm", level=HIR, traits=[TAKES_PACKED, PER_TOKEN], tolerance=3e-6,
    samples=[
        sample(f32(3, 33), f32(33), kind="rms", eps=1e-6), sample(f32(3, 8), f32(8), f32(8), kind="layer", eps=1e-5),
        sample(f32(2, 3, 8), f32(8), kind="rms", eps=0.1, unit_offset=True),
    ],
)  # fmt: skip
def norm(
    x: TensorType,
    weight: TensorType,
    bias: TensorType | None = None,
    *,
    kind: str,
    eps: float,
    unit_offset: bool = False,
) -> TensorType:
    """RMSNorm (`kind="rms"`) or LayerNorm (`kind="layer"`) over the last axis, times a stored weight, plus a bias.

    `unit_offset` multiplies by 1 + weight, as in Gemma's files.
    """
    if kind not in NORMS:
        raise GraphError(f"norm: kind is {kind!r}, expected rms or layer")
    if not x.rank or not x.dtype.is_float:
        raise ShapeError(f"norm: takes vectors of floats, found {x}")
    check_shapes("norm", {"weight": (weight, x.shape[-1:]), "bias": (bias, x.shape[-1:])})
    return x


def scaled_norm(
    x: Value, weight: Value, bias: Value | None = None, *, kind: str, eps: float, unit_offset: bool
) -> Value:
    """Normalise x, then scale by a stored weight and add a stored bias."""
    weight = read(weight, x.dtype)
    if unit_offset:
        weight = weight + 1.0
    bias = None if bias is None else read(bias, x.dtype)
    return x.graph.one(f"{kind}_norm", x, weight, bias, eps=eps)


lowering("norm")(scaled_norm)


# -- feed-forwards ----------------------------------------------------------------------------------------------------
@op(
    "gated_ffn", level=HIR, traits=[TAKES_PACKED, PER_TOKEN],
    samples=[
        sample(f32(3, 16, low=-1, high=1), f32(40, 16), f32(40, 16), f32(16, 40)),
        sample(f32(2, 3, 8, low=-1, high=1), f32(12, 8), f32(12, 8), f32(8, 12), f32(12), f32(12), f32(8),
               activation="gelu_tanh"),
    ],
)  # fmt: skip
def gated_ffn(
    x: TensorType,
    gate: TensorType,
    up: TensorType,
    down: TensorType,
    gate_bias: TensorType | None = None,
    up_bias: TensorType | None = None,
    down_bias: TensorType | None = None,
    *,
    activation: str = "silu",
) -> TensorType:
    """down(activation(gate(x)) * up(x)) by stored weights [out, in]: SwiGLU, GeGLU and their relatives."""
    check_known(activation)
    if not x.rank or not x.dtype.is_float or gate.rank != 2 or down.rank != 2:
        raise ShapeError(f"gated_ffn: x is {x}, gate {gate}, down {down}; expected floats and weights [out, in]")
    (inner, hidden), out = (gate.shape[0], x.shape[-1]), down.shape[0]
    check_shapes("gated_ffn", {
        "gate": (gate, (inner, hidden)), "up": (up, (inner, hidden)), "down": (down, (out, inner)),
        "gate_bias": (gate_bias, (inner,)), "up_bias": (up_bias, (inner,)), "down_bias": (down_bias, (out,)),
    })  # fmt: skip
    return TensorType((*x.shape[:-1], out), wide(x))


def gated(
    x: Value, gate: Value, up: Value, down: Value, gate_bias: Value | None = None, up_bias: Value | None = None,
    down_bias: Value | None = None, *, activation: str,
) -> Value:  # fmt: skip
    """down(activation(gate(x)) * up(x))."""
    activated = activate(project(x, gate, gate_bias), activation)
    return project(activated * project(x, up, up_bias), down, down_bias)


lowering("gated_ffn")(gated)


@op(
    "fused_gated_ffn", level=HIR, traits=[TAKES_PACKED, PER_TOKEN],
    samples=[
        sample(f32(2, 3, 8, low=-1, high=1), f32(12, 8), f32(8, 6)),
        sample(f32(2, 3, 8, low=-1, high=1), f32(12, 8), f32(8, 6), f32(12), f32(8), activation="gelu"),
    ],
)  # fmt: skip
def fused_gated_ffn(
    x: TensorType,
    both: TensorType,
    down: TensorType,
    both_bias: TensorType | None = None,
    down_bias: TensorType | None = None,
    *,
    activation: str = "silu",
) -> TensorType:
    """`gated_ffn` whose gate and up are the two halves of one weight, [2 * inner, in]."""
    check_known(activation)
    wide_size = both.shape[0] if both.rank == 2 else None
    if not x.rank or not x.dtype.is_float or not isinstance(wide_size, int) or wide_size % 2 or down.rank != 2:
        raise ShapeError(f"fused_gated_ffn: x is {x}, both {both}, down {down}; expected weights of an even height")
    out = down.shape[0]
    check_shapes("fused_gated_ffn", {
        "both": (both, (wide_size, x.shape[-1])), "down": (down, (out, wide_size // 2)),
        "both_bias": (both_bias, (wide_size,)), "down_bias": (down_bias, (out,)),
    })  # fmt: skip
    return TensorType((*x.shape[:-1], out), wide(x))


@lowering("fused_gated_ffn")
def _(
    x: Value, both: Value, down: Value, both_bias: Value | None, down_bias: Value | None, *, activation: str
) -> Value:
    halves = project(x, both, both_bias)
    assert isinstance(halves.shape[-1], int)
    inner = halves.shape[-1] // 2
    return project(activate(halves[..., :inner], activation) * halves[..., inner:], down, down_bias)


@op(
    "moe_ffn", level=HIR, traits=[TAKES_PACKED, PER_TOKEN],
    samples=[
        sample(f32(2, 3, 8, low=-1, high=1), f32(4, 8), f32(4, 6, 8), f32(4, 6, 8), f32(4, 8, 6), chosen=2),
        sample(f32(1, 5, 8, low=-1, high=1), f32(3, 8), f32(3, 6, 8), f32(3, 6, 8), f32(3, 8, 6), chosen=1,
               normalise=False, activation="gelu"),
        sample(f32(2, 3, 8, low=-1, high=1), f32(4, 8), f32(4, 6, 8), f32(4, 6, 8), f32(4, 8, 6), f32(1, 8), f32(5, 8),
               f32(5, 8), f32(8, 5), chosen=2),
    ],
)  # fmt: skip
def moe_ffn(
    x: TensorType,
    router: TensorType,
    gate: TensorType,
    up: TensorType,
    down: TensorType,
    shared_router: TensorType | None = None,
    shared_gate: TensorType | None = None,
    shared_up: TensorType | None = None,
    shared_down: TensorType | None = None,
    *,
    chosen: int,
    normalise: bool = True,
    activation: str = "silu",
) -> TensorType:
    """A mixture of experts: the sum of p * gated_ffn(x) over the `chosen` most likely experts of each token.

    `x` is [batch, seq, hidden], `router` [experts, hidden]; expert weights are stacked, [experts, out, in].
    Probabilities are a softmax over all experts; `normalise` rescales those of the chosen ones to sum to 1. With a
    shared expert, which all tokens go through, sigmoid(x @ shared_router.T) * gated_ffn(x) of its weights is added;
    `shared_router` is [1, hidden].
    """
    check_known(activation)
    if x.rank != 3 or not x.dtype.is_float or gate.rank != 3:
        raise ShapeError(f"moe_ffn: x is {x} and gate {gate}, expected [batch, seq, hidden] and [experts, out, in]")
    hidden, (experts, inner) = x.shape[2], gate.shape[:2]
    check_shapes("moe_ffn", {
        "router": (router, (experts, hidden)), "gate": (gate, (experts, inner, hidden)),
        "up": (up, (experts, inner, hidden)), "down": (down, (experts, hidden, inner)),
    })  # fmt: skip
    if not isinstance(experts, int) or not 1 <= chosen <= experts:
        raise GraphError(f"moe_ffn: {chosen} of {experts} experts cannot be chosen")
    if shared_router is not None and shared_gate is not None and shared_up is not None and shared_down is not None:
        check_shapes(
            "moe_ffn",
            {
                "shared_router": (shared_router, (1, hidden)),
                "shared_down": (shared_down, (hidden, shared_gate.shape[0])),
            },
        )
        gated_ffn.rule(x, shared_gate, shared_up, shared_down, activation=activation)
    elif any(weight is not None for weight in (shared_router, shared_gate, shared_up, shared_down)):
        raise GraphError("moe_ffn: takes all four weights of a shared expert, or none")
    return TensorType(x.shape, wide(x))


@lowering("moe_ffn")
def _(
    x: Value, router: Value, gate: Value, up: Value, down: Value, shared_router: Value | None,
    shared_gate: Value | None, shared_up: Value | None, shared_down: Value | None, *, chosen: int, normalise: bool,
    activation: str,
) -> Value:  # fmt: skip
    share = None if shared_router is None else project(x, shared_router).sigmoid()  # [batch, seq, 1]
    mixed = mixture(x, router, gate, up, down, chosen=chosen, normalise=normalise, activation=activation)
    if share is None or shared_gate is None or shared_up is None or shared_down is None:
        return mixed
    return mixed + share * gated(x, shared_gate, shared_up, shared_down, activation=activation)


def mixture(
    x: Value, router: Value, gate: Value, up: Value, down: Value, *, chosen: int, normalise: bool, activation: str
) -> Value:
    """The weighted sum of each token's chosen experts."""
    graph, (batch, seq, hidden), experts = x.graph, x.shape, router.shape[0]
    rows = x.reshape(batch * seq, hidden)
    count: Size = rows.shape[0]
    odds, expert_ids = project(rows, router).softmax(axis=-1).topk(k=chosen)  # [rows, chosen]
    if normalise:
        odds = odds / odds.sum(axis=-1, keepdims=True)
    expert_ids = expert_ids.reshape(count * chosen)
    order, place, _ = expert_ids.group_rows(groups=experts)  # each expert reads its weights once for all its rows
    each, expert_ids = rows.gather(order // chosen), expert_ids.gather(order)

    def expert(x: Value, weight: Value) -> Value:
        return graph.one("grouped_matmul", x, read(weight, wide(x)).mT, expert_ids)

    inner = activate(expert(each, gate), activation) * expert(each, up)
    out = expert(inner, down).gather(place).reshape(count, chosen, hidden)
    mixed: Value = (out * odds.reshape(count, chosen, 1)).sum(axis=1).reshape(x.shape)
    return mixed


# -- images -----------------------------------------------------------------------------------------------------------
@op(
    "patch_embedding", level=HIR, traits=[TAKES_PACKED, MIXES_TOKENS],
    samples=[sample(f32(2, 3, 8, 6), f32(5, 3, 2, 2), f32(5)), sample(f32(1, 3, 4, 4), f32(5, 3, 4, 4))],
)  # fmt: skip
def patch_embedding(pixels: TensorType, weight: TensorType, bias: TensorType | None = None) -> TensorType:
    """One vector per patch: [batch, channels, height, width] to [batch, patches, dim], row by row.

    `weight` is [dim, channels, side, side].
    """
    if weight.rank != 4 or weight.shape[2] != weight.shape[3] or not isinstance(weight.shape[2], int):
        raise ShapeError(f"patch_embedding: weight is {weight}, expected [dim, channels, side, side]")
    biased = None if bias is None else TensorType(bias.shape, pixels.dtype)
    sides = {"stride": weight.shape[2], "padding": 0, "dilation": 1, "groups": 1}
    kernel = TensorType(weight.shape, pixels.dtype)
    batch, dim, rows, columns = one_type(conv2d.rule(pixels, kernel, biased, **sides)).shape
    return pixels.with_shape(batch, rows * columns, dim)


@lowering("patch_embedding")
def _(pixels: Value, weight: Value, bias: Value | None) -> Value:
    side = weight.shape[2]
    weight, bias = read(weight, pixels.dtype), None if bias is None else read(bias, pixels.dtype)
    features = pixels.graph.one("conv2d", pixels, weight, bias, stride=side)
    batch, dim, rows, columns = features.shape
    patches: Value = features.reshape(batch, dim, rows * columns).transpose(axes=(0, 2, 1))
    return patches

"""HIR blocks for those who build a graph by hand, with `rlx.GraphModule` or `Graph`: weights are values [in, out].

Stages do not emit them: the blocks of stages, over weights as files store them, are in `layers.py`, `heads.py` and
`recurrent.py`. `linear` is not `linear_stored` without its transpose: it keeps the element type of its weight, and can
be lowered straight to a fused op. Lowerings are in `lower.py`. HIR graphs may also use any MIR op. A block that does
what an op does, on tensors laid out as in models (heads packed in the last axis), is called `<op>_block`.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping, Sequence
from typing import Any

from rlx.dtypes import F32, DType, promote
from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.hir.activations import NAMED
from rlx.ir.graph import Value
from rlx.ir.registry import HIR, MIXES_TOKENS, PER_TOKEN, Sample, Spec, f32, get, i32, op, sample
from rlx.ops.attention import attention
from rlx.ops.elementwise import add, silu
from rlx.ops.linear import matmul
from rlx.ops.norm import rms_norm
from rlx.ops.rope import rope
from rlx.types import Size, TensorType, require_equal, tensor


class Activation(enum.Enum):
    """Activations that can follow a linear map; the value is the op's name."""

    GELU = "gelu"
    GELU_APPROX = "gelu_tanh"
    SILU = "silu"
    RELU = "relu"
    SIGMOID = "sigmoid"
    TANH = "tanh"
    EXP = "exp"
    LOG = "log"
    SQRT = "sqrt"
    RSQRT = "rsqrt"
    NEG = "neg"
    ABS = "abs"
    SIN = "sin"
    COS = "cos"
    TAN = "tan"
    ATAN = "atan"
    ROUND = "round"


ACTIVATIONS = {a.value: get(a.value) for a in Activation}
Shape = tuple[Size, ...]


def one_type(types: TensorType | tuple[TensorType, ...]) -> TensorType:
    """The single result type of an op's type rule."""
    assert isinstance(types, TensorType)
    return types


def shape_text(shape: Sequence[Size]) -> str:
    return "[" + ", ".join(map(str, shape)) + "]"


def check_operands(where: str, like: TensorType, wanted: Mapping[str, tuple[TensorType | None, Shape]]) -> None:
    """Check that every present operand has its shape and the float type of `like`."""
    if not like.dtype.is_float:
        raise DTypeError(f"{where}: takes floats, found {like}")
    check_shapes(where, wanted)
    for name, (operand, _) in wanted.items():
        if operand is not None and operand.dtype is not like.dtype:
            raise DTypeError(f"{where}: {name} is {operand}, x is {like.dtype}; both have one type")


def check_shapes(where: str, wanted: Mapping[str, tuple[TensorType | None, Shape]]) -> None:
    """Check that every present operand has its shape."""
    for name, (operand, shape) in wanted.items():
        if operand is None:
            continue
        message = f"{where}: {name} is {operand}, expected {shape_text(shape)}"
        if operand.rank != len(shape):
            raise ShapeError(message)
        for have, want in zip(operand.shape, shape, strict=True):
            require_equal(have, want, message)


# -- linear maps ------------------------------------------------------------------------------------------------------
def wide(x: TensorType | Value) -> DType:
    """Element type to which a linear map's stored weights are converted: f32, or f64 if x is f64."""
    return promote(x.dtype, F32) if x.dtype.is_float else F32


def linear_type(
    where: str, x: TensorType, weight: TensorType, bias: TensorType | None, activation: str | None
) -> TensorType:
    if activation is not None and activation not in ACTIVATIONS and activation not in NAMED:
        raise GraphError(f"{where}: activation {activation!r} is not one of {', '.join(ACTIVATIONS)}")
    result = matmul.rule(x, weight)
    if bias is not None:
        if bias.shape != (weight.shape[-1],):
            raise ShapeError(f"{where}: bias {bias} does not fit {weight.shape[-1]} columns")
        result = add.rule(result, bias)
    if activation in ACTIVATIONS:
        return one_type(ACTIVATIONS[activation].rule(result))
    return one_type(result)


_LINEAR = (sample(f32(3, 17), f32(17, 70), f32(70)), sample(f32(4, 6), f32(6, 5), f32(5), activation="gelu"))


@op("linear", level=HIR, traits=[PER_TOKEN], samples=[*_LINEAR, sample(f32(2, 5, 8), f32(8, 9))])
def linear(
    x: TensorType, weight: TensorType, bias: TensorType | None = None, *, activation: str | None = None
) -> TensorType:
    """activation(x @ weight + bias); `weight` is [in, out]."""
    return linear_type("linear", x, weight, bias, activation)


@op("linear_fused", level=HIR, traits=[PER_TOKEN], samples=_LINEAR)
def linear_fused(x: TensorType, weight: TensorType, bias: TensorType, *, activation: str | None = None) -> TensorType:
    """activation(x @ weight + bias) as a single MIR op under every fusion policy."""
    return linear_type("linear_fused", x, weight, bias, activation)


@op("shared_linear_pair", level=HIR, traits=[PER_TOKEN], samples=[sample(f32(3, 17), f32(17, 70), f32(17, 5))])
def shared_linear_pair(x: TensorType, first: TensorType, second: TensorType) -> tuple[TensorType, TensorType]:
    """x @ first and x @ second, reading x once."""
    return one_type(matmul.rule(x, first)), one_type(matmul.rule(x, second))


@op(
    "swiglu_ffn",
    level=HIR,
    traits=[PER_TOKEN],
    samples=[sample(f32(3, 16, low=-1, high=1), f32(16, 40), f32(16, 40), f32(40, 16))],
)
def swiglu_ffn(x: TensorType, up: TensorType, gate: TensorType, down: TensorType) -> TensorType:
    """(silu(x @ gate) * (x @ up)) @ down."""
    if up != gate:
        raise ShapeError(f"swiglu_ffn: up {up} and gate {gate} differ")
    return one_type(matmul.rule(silu.rule(matmul.rule(x, gate)), down))


@op(
    "residual_rms_norm", level=HIR, traits=[PER_TOKEN],
    samples=[
        sample(f32(3, 33), f32(3, 33), f32(33), eps=1e-6), sample(f32(2, 3, 8), f32(2, 3, 8), f32(8), f32(8), eps=0.1),
    ],
)  # fmt: skip
def residual_rms_norm(
    x: TensorType, residual: TensorType, gamma: TensorType, beta: TensorType | None = None, *, eps: float
) -> TensorType:
    """rms_norm(x + residual)."""
    if x != residual:
        raise ShapeError(f"residual_rms_norm: types differ, {x} and {residual}")
    return one_type(rms_norm.rule(x, gamma, beta, eps=eps))


# -- heads ------------------------------------------------------------------------------------------------------------
def heads_shape(where: str, name: str, t: TensorType, size: int) -> Shape:
    """[batch, seq, heads, size] from [batch, seq, heads · size]; unchanged if the heads are split already."""
    if t.rank == 4:
        return t.shape
    last = t.shape[-1] if t.rank == 3 else None
    if not isinstance(last, int) or size < 1 or last % size:
        raise ShapeError(
            f"{where}: {name} is {t}, expected [batch, seq, heads * {size}] or [batch, seq, heads, {size}]"
        )
    return (*t.shape[:2], last // size, size)


def heads_first(q: TensorType, num_heads: int) -> bool:
    """Whether a rank-4 tensor is [batch, heads, seq, head_dim]; if ambiguous, it is [batch, seq, heads, head_dim]."""
    return q.rank == 4 and q.shape[2] != num_heads and q.shape[1] == num_heads


def swap_heads(shape: Shape) -> Shape:
    return (shape[0], shape[2], shape[1], *shape[3:])


_FLAT = (f32(2, 5, 16), f32(2, 7, 8), f32(2, 7, 8))


@op(
    "attention_block", level=HIR, traits=[MIXES_TOKENS],
    samples=[
        sample(*_FLAT, num_heads=4, head_dim=4, mask_kind="causal"),
        sample(*_FLAT, f32(2, 7, low=0, high=1), num_heads=4, head_dim=4, mask_kind="custom"),
        sample(f32(1, 2, 5, 8), f32(1, 1, 6, 8), f32(1, 1, 6, 8), num_heads=2, head_dim=8, scale=0.3, softcap=5.0),
        sample(f32(1, 5, 2, 8), f32(1, 6, 2, 8), f32(1, 6, 2, 8), num_heads=2, head_dim=8, mask_kind="sliding(2)"),
    ],
)  # fmt: skip
def attention_block(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    mask: TensorType | None = None,
    *,
    num_heads: int,
    head_dim: int,
    mask_kind: str = "none",
    scale: float | None = None,
    softcap: float | None = None,
) -> TensorType:
    """Attention over [batch, seq, heads * head_dim], [batch, seq, heads, head_dim] or [batch, heads, seq, head_dim].

    k and v may have fewer heads than q. The result has q's layout. Masks, scale and softcap are those of `attention`.
    """
    where = "attention_block"
    if not q.rank == k.rank == v.rank or q.rank not in (3, 4):
        raise ShapeError(f"{where}: q, k and v have 3 or 4 axes each, found {q}, {k}, {v}")
    if heads_first(q, num_heads):
        q, k, v = (t.with_shape(*swap_heads(t.shape)) for t in (q, k, v))
        result = attention_block.rule(
            q, k, v, mask, num_heads=num_heads, head_dim=head_dim, mask_kind=mask_kind, scale=scale, softcap=softcap
        )
        return one_type(result).with_shape(*swap_heads(one_type(result).shape))
    split = [t.with_shape(*heads_shape(where, n, t, head_dim)) for n, t in (("q", q), ("k", k), ("v", v))]
    if split[0].shape[2] != num_heads or split[0].shape[3] != head_dim:
        raise ShapeError(f"{where}: q is {q}, expected {num_heads} heads of {head_dim}")
    result = one_type(attention.rule(*split, mask, mask_kind=mask_kind, scale=scale, softcap=softcap))
    return result if q.rank == 4 else q


def rotary_size(where: str, head_dim: int, n_rot: int | None, cos: TensorType) -> int:
    """Number of elements per head that RoPE rotates."""
    width = head_dim if n_rot is None else n_rot
    if width % 2 or not 0 < width <= head_dim:
        raise ShapeError(f"{where}: n_rot is {width}, expected an even number of 2 to {head_dim} elements")
    if cos.rank != 2 or not isinstance(cos.shape[1], int) or cos.shape[1] < width // 2:
        raise ShapeError(f"{where}: cos is {cos}, expected [positions, {width // 2}] or wider")
    return width


@op(
    "rope_block", level=HIR, traits=[PER_TOKEN], tolerance=2e-6,
    samples=[
        sample(f32(2, 3, 16), f32(5, 4), f32(5, 4), head_dim=8),
        sample(f32(2, 3, 2, 8), f32(9, 4), f32(9, 4), i32(2, 3, low=0, high=9), head_dim=8, n_rot=4),
    ],
)  # fmt: skip
def rope_block(
    x: TensorType,
    cos: TensorType,
    sin: TensorType,
    positions: TensorType | None = None,
    *,
    head_dim: int,
    n_rot: int | None = None,
) -> TensorType:
    """Rotate the first `n_rot` elements of each head (default: all) by the angle of its position.

    `x` is [batch, seq, heads * head_dim] or [batch, seq, heads, head_dim]; tables are [positions, n_rot / 2] or wider.
    Positions count from 0 along the sequence, unless passed as [batch, seq].
    """
    where = "rope_block"
    width = rotary_size(where, head_dim, n_rot, cos)
    split = x.with_shape(*heads_shape(where, "x", x, head_dim))
    if split.shape[3] != head_dim:
        raise ShapeError(f"{where}: x is {x}, expected heads of {head_dim}")
    if cos.shape != sin.shape:
        raise ShapeError(f"{where}: cos is {cos} and sin is {sin}, expected one shape")
    if positions is None:
        _enough_rows(where, cos, x)
        positions = tensor(x.shape[:2], "i32")
    tables = [t.with_shape(t.shape[0], width // 2) for t in (cos, sin)]
    rope.rule(split, *tables, positions)
    return x


def _enough_rows(where: str, cos: TensorType, x: TensorType) -> None:
    rows, seq = cos.shape[0], x.shape[1]
    if isinstance(rows, int) and isinstance(seq, int) and rows < seq:
        raise ShapeError(f"{where}: tables have {rows} positions, the sequence has {seq}")


# -- layers -----------------------------------------------------------------------------------------------------------
def _small(*shape: int) -> Spec:
    """A small weight or table, to keep sums over it in range."""
    return f32(*shape, low=-0.7, high=0.7)


def _scale(size: int) -> Spec:
    return f32(size, low=0.5, high=1.5)


def _layer_samples() -> list[Sample]:
    q, kv, o, ffn = _small(8, 16), _small(8, 8), _small(16, 8), (_small(8, 12), _small(8, 12), _small(12, 8))
    operands = (f32(2, 5, 8), _scale(8), q, kv, kv, o, _scale(8), *ffn, _small(6, 2), _small(6, 2))
    sizes: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 4, "eps": 1e-5}
    return [
        sample(*operands, **sizes, mask_kind="causal"),
        sample(*operands, _small(8), _small(8), f32(2, 5, low=0, high=1), **sizes, mask_kind="custom"),
    ]


@op("llama_decoder_block", level=HIR, traits=[MIXES_TOKENS], samples=_layer_samples())
def llama_decoder_block(
    x: TensorType,
    input_norm: TensorType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    o: TensorType,
    post_norm: TensorType,
    gate: TensorType,
    up: TensorType,
    down: TensorType,
    cos: TensorType,
    sin: TensorType,
    input_beta: TensorType | None = None,
    post_beta: TensorType | None = None,
    mask: TensorType | None = None,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    mask_kind: str = "causal",
) -> TensorType:
    """A Llama layer without a cache: x + attention(rms_norm x), then + swiglu(rms_norm ·).

    `x` is [batch, seq, hidden], weights are [in, out], tables [positions, head_dim / 2]; positions count from 0.
    """
    where = "llama_decoder_block"
    if x.rank != 3:
        raise ShapeError(f"{where}: x is {x}, expected [batch, seq, hidden]")
    hidden, wide, narrow = x.shape[2], num_heads * head_dim, num_kv_heads * head_dim
    inner = gate.shape[-1]
    vector = (hidden,)
    check_operands(where, x, {
        "input_norm": (input_norm, vector), "q": (q, (hidden, wide)), "k": (k, (hidden, narrow)),
        "v": (v, (hidden, narrow)), "o": (o, (wide, hidden)), "post_norm": (post_norm, vector),
        "gate": (gate, (hidden, inner)), "up": (up, (hidden, inner)), "down": (down, (inner, hidden)),
        "cos": (cos, (cos.shape[0], head_dim // 2)), "sin": (sin, (cos.shape[0], head_dim // 2)),
        "input_beta": (input_beta, vector), "post_beta": (post_beta, vector),
    })  # fmt: skip
    _enough_rows(where, cos, x)
    rotary_size(where, head_dim, None, cos)
    heads = [x.with_shape(*x.shape[:2], n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads)]
    attention.rule(*heads, mask, mask_kind=mask_kind)
    return x


def _head_samples() -> list[Sample]:
    sizes: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 4, "eps": 1e-6}
    operands = (
        f32(2, 5, 8), i32(2, 5, low=0, high=11), i32(2, low=0, high=5), f32(11, 8), _scale(8), _scale(8), _small(16, 8),
        _scale(8), _small(8, 16), _small(8, 4), _small(8, 4), _small(8, 8), _scale(4), _scale(4), _small(6, 2),
        _small(6, 2), _scale(8), _small(8, 12), _small(8, 12), _small(12, 8), _scale(8), _small(8, 11),
    )  # fmt: skip
    return [sample(*operands, **sizes), sample(*operands, **sizes, n_rot=2)]


@op("qwen35_mtp_head", level=HIR, traits=[MIXES_TOKENS], samples=_head_samples())
def qwen35_mtp_head(
    x: TensorType,
    ids: TensorType,
    last: TensorType,
    embed: TensorType,
    hidden_norm: TensorType,
    embed_norm: TensorType,
    eh_proj: TensorType,
    input_norm: TensorType,
    q: TensorType,
    k: TensorType,
    v: TensorType,
    o: TensorType,
    q_norm: TensorType,
    k_norm: TensorType,
    cos: TensorType,
    sin: TensorType,
    post_norm: TensorType,
    gate: TensorType,
    up: TensorType,
    down: TensorType,
    norm: TensorType,
    head: TensorType,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    eps: float,
    n_rot: int | None = None,
) -> TensorType:
    """The multi-token-prediction head of Qwen3.5: logits of the token after next, [batch, vocab].

    `x` is the trunk's [batch, seq, hidden], `ids` the token after each of them, `last[b]` the index in row b to predict
    from. Normed embeddings and normed x are concatenated and go through `eh_proj` into one layer of gated attention
    (`q` gives queries and gates, [hidden, heads * 2 * head_dim], adjacent per head; queries and keys are normed per
    head; the first `n_rot` elements are rotated) and SwiGLU, then through `norm` and `head`.
    """
    where = "qwen35_mtp_head"
    if x.rank != 3:
        raise ShapeError(f"{where}: x is {x}, expected [batch, seq, hidden]")
    batch, seq, hidden = x.shape
    for name, t, shape in (("ids", ids, (batch, seq)), ("last", last, (batch,))):
        if t.shape != shape or not t.dtype.is_integer:
            raise ShapeError(f"{where}: {name} is {t}, expected integers {shape_text(shape)}")
    wide, narrow, inner = num_heads * head_dim, num_kv_heads * head_dim, gate.shape[-1]
    rotary_size(where, head_dim, n_rot, cos)
    vector = (hidden,)
    check_operands(where, x, {
        "embed": (embed, (embed.shape[0], hidden)), "hidden_norm": (hidden_norm, vector),
        "embed_norm": (embed_norm, vector), "eh_proj": (eh_proj, (2 * hidden, hidden)),
        "input_norm": (input_norm, vector), "q": (q, (hidden, 2 * wide)), "k": (k, (hidden, narrow)),
        "v": (v, (hidden, narrow)), "o": (o, (wide, hidden)), "q_norm": (q_norm, (head_dim,)),
        "k_norm": (k_norm, (head_dim,)), "cos": (cos, cos.shape), "sin": (sin, cos.shape),
        "post_norm": (post_norm, vector), "gate": (gate, (hidden, inner)), "up": (up, (hidden, inner)),
        "down": (down, (inner, hidden)), "norm": (norm, vector), "head": (head, (hidden, head.shape[-1])),
    })  # fmt: skip
    _enough_rows(where, cos, x)
    heads = [x.with_shape(batch, seq, n, head_dim) for n in (num_heads, num_kv_heads, num_kv_heads)]
    attention.rule(*heads, None, mask_kind="causal")
    return x.with_shape(batch, head.shape[-1])

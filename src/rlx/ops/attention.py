"""Scaled dot-product attention with grouped-query heads and every kind of mask."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.errors import DTypeError, GraphError, ShapeError
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Node
from rlx.ir.independence import never
from rlx.ir.registry import Sample, Spec, boolean, f32, i32, op, sample
from rlx.types import TensorType, require_equal

LARGEST_WINDOW = 2**30 - 1  # twice as many keys are counted in 32 bits


class MaskKind:
    """Which keys a query attends to.

    NONE (all), CAUSAL, sliding(w), near(r), CUSTOM ([batch, keys] mask), BIAS (added to scores), SEGMENTS (those of its
    own sequence, by [batch, seq] ids), and segments(kind), the intersection of both.
    """

    NONE = "none"
    CAUSAL = "causal"
    CUSTOM = "custom"
    BIAS = "bias"
    SEGMENTS = "segments"

    @staticmethod
    def sliding(window: int) -> str:
        """The last `window` keys up to and including the query's own position."""
        if window < 1:
            raise GraphError(f"MaskKind.sliding: a window has at least one key, found {window}")
        _window(str(window), f"sliding({window})")
        return f"sliding({window})"

    @staticmethod
    def near(reach: int) -> str:
        """The keys at most `reach` positions before or after the query."""
        if reach < 0:
            raise GraphError(f"MaskKind.near: the reach is at least 0, found {reach}")
        _window(str(reach), f"near({reach})")
        return f"near({reach})"

    @staticmethod
    def segments(kind: str = NONE) -> str:
        """The keys of the query's own segment that `kind` (NONE, CAUSAL, sliding(w) or near(r)) allows."""
        combined = MaskKind.SEGMENTS if kind == MaskKind.NONE else f"{kind}+{MaskKind.SEGMENTS}"
        parse_mask(combined)
        return combined


@dataclass(frozen=True, slots=True)
class Mask:
    """A parsed mask kind: `name` is none, causal, sliding, near, custom or bias."""

    name: str
    window: int = 0  # maximum keys per query, of sliding and near
    ahead: int = 0  # how many of them come after the query
    segments: bool = False

    @property
    def limited(self) -> bool:
        """Whether a query's position determines which keys it sees."""
        return self.name in ("causal", "sliding", "near")

    @property
    def takes_operand(self) -> bool:
        return self.segments or self.name in ("custom", "bias")


def parse_mask(kind: str) -> Mask:
    """Parses a mask kind."""
    name, plus, rest = kind.partition("+")
    if name == MaskKind.SEGMENTS and not plus:
        return Mask("none", segments=True)
    segments = bool(plus) and rest == MaskKind.SEGMENTS
    if not plus or segments:
        if sliding := re.fullmatch(r"sliding\(0*([1-9][0-9]*)\)", name):
            return Mask("sliding", _window(sliding[1], kind), segments=segments)
        if near := re.fullmatch(r"near\(([0-9]+)\)", name):
            reach = _window(near[1], kind)
            return Mask("near", 2 * reach + 1, reach, segments)
        if name == "causal" or (name in ("none", "custom", "bias") and not segments):
            return Mask(name, segments=segments)
    hint = (
        'masks are "none" (all keys), "causal", "sliding(64)", "near(8)", "custom", "bias" and "segments" (MaskKind);'
        " attn_mask(...) of a flow hides padding"
    )
    raise GraphError(f"attention: mask kind {kind!r} is not known", hint=hint)


def _window(digits: str, kind: str) -> int:
    """The size of a window."""
    if len(digits) > 10 or int(digits) > LARGEST_WINDOW:
        raise GraphError(f"attention: the window of mask kind {kind[:40]!r} is larger than {LARGEST_WINDOW}")
    return int(digits)


def split_mask(kind: str) -> tuple[str, int]:
    """The name of a mask kind, with `+segments` if it has them, and its window (0 if none)."""
    mask = parse_mask(kind)
    return mask.name + "+segments" * mask.segments, mask.window


def visible(kind: str, q_len: int, k_len: int) -> Any:
    """[q_len, k_len]: which keys a query sees by position; queries and keys end at the same one."""
    mask = parse_mask(kind)
    rows = np.arange(q_len)[:, None] + (k_len - q_len) + mask.ahead
    keys = np.arange(k_len)[None, :]
    seen = np.ones((q_len, k_len), bool)
    if mask.limited:
        seen &= keys <= rows
    if mask.window:
        seen &= keys > rows - mask.window
    return seen


def _scores(
    q: Any, k: Any, mask: Any, mask_kind: str, scale: float | None, softcap: float | None
) -> tuple[Any, Any]:  # fmt: skip
    """Scores [batch, heads, seq, keys], -inf for masked keys, and their derivative by the product q · k."""
    factor = q.dtype.type(scale if scale is not None else 1 / math.sqrt(q.shape[3]))
    scores, slope = np.einsum("bqhd,bkhd->bhqk", q, k) * factor, factor
    if softcap is not None:
        bent = np.tanh(scores / softcap)
        scores, slope = softcap * bent, factor * (1 - bent * bent)
    seen = np.broadcast_to(visible(mask_kind, q.shape[1], k.shape[1]), scores.shape)
    if parse_mask(mask_kind).segments:
        ids = mask[:, None, :, None]  # of queries, and of keys
        seen = seen & (ids >= 0) & (ids == mask[:, None, None, :])
    if mask_kind == "custom":
        keep = mask if mask.dtype == bool else mask >= 0.5
        seen = seen & keep[:, None, None, :]
    if mask_kind == "bias":
        scores = scores + mask
        seen = seen & ~np.isneginf(np.broadcast_to(mask, scores.shape))
    return np.where(seen, scores, -np.inf), slope


def _for_queries(q: Any, *tensors: Any) -> list[Any]:
    """Repeats the heads of tensors [batch, keys, kv_heads, ...] for those of q."""
    return [np.repeat(t, q.shape[2] // t.shape[2] if t.shape[2] else 1, axis=2) for t in tensors]


def _attention_lse(
    q: Any, k: Any, v: Any, mask: Any, *, mask_kind: str, scale: float | None, softcap: float | None
) -> tuple[Any, Any]:
    k, v = _for_queries(q, k, v)
    scores, _ = _scores(q, k, mask, mask_kind, scale, softcap)
    top = np.max(scores, axis=-1, keepdims=True, initial=-np.inf)
    weights = np.where(np.isneginf(scores), 0, np.exp(scores - np.where(np.isneginf(top), 0, top)))
    total = weights.sum(-1, keepdims=True)
    lse = np.log(total) + top
    weights = weights / np.where(total == 0, 1, total)
    # A masked key adds exactly zero, whatever its value.
    masked = np.where(weights[..., None] == 0, 0, v.transpose(0, 2, 1, 3)[:, :, None])
    return np.einsum("bhqk,bhqkd->bqhd", weights, masked), lse[..., 0]


def _attention(q: Any, k: Any, v: Any, mask: Any, **attrs: Any) -> Any:
    return _attention_lse(q, k, v, mask, **attrs)[0]


def _attention_grad(
    q: Any, k: Any, v: Any, dy: Any, lse: Any, delta: Any, mask: Any, *, mask_kind: str, scale: float | None,
    softcap: float | None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    shape, (wide_k, wide_v) = k.shape[:3], _for_queries(q, k, v)
    scores, slope = _scores(q, wide_k, mask, mask_kind, scale, softcap)
    lse = np.where(np.isneginf(lse), 0, lse)[..., None]
    weights = np.where(np.isneginf(scores), 0, np.exp(scores - lse))
    inner = weights * (np.einsum("bqhd,bkhd->bhqk", dy, wide_v) - delta[..., None]) * slope
    dq = np.einsum("bhqk,bkhd->bqhd", inner, wide_k)
    per_head = (np.einsum("bhqk,bqhd->bkhd", *pair) for pair in ((inner, q), (weights, dy)))
    dk, dv = (x.reshape(*shape, q.shape[2] // shape[2], x.shape[3]).sum(axis=3) for x in per_head)
    return dq, dk, dv


def _heads(batch: int, q: int, k: int, heads: int, kv: int, dim: int) -> tuple[Spec, Spec, Spec]:
    return f32(batch, q, heads, dim), f32(batch, k, kv, dim), f32(batch, k, kv, dim)


def _by_entries(node: Node, batched: Sequence[bool]) -> bool:
    """Whether queries, keys and values of batch entries are independent."""
    return all(batched[:3])


@op(
    "attention", independent=_by_entries, reference=_attention, tolerance=1e-5,
    samples=[
        sample(*_heads(2, 5, 5, 4, 4, 8)), sample(*_heads(1, 70, 70, 4, 2, 16), mask_kind="causal"),
        sample(*_heads(2, 1, 67, 6, 2, 32), mask_kind="causal"),
        sample(*_heads(1, 20, 70, 2, 1, 20), mask_kind="sliding(7)"),
        sample(*_heads(2, 9, 66, 2, 2, 64), boolean(2, 66), mask_kind="custom"),
        sample(*_heads(2, 9, 66, 4, 2, 16), f32(2, 4, 9, 66), mask_kind="bias"),
        sample(*_heads(2, 5, 7, 4, 2, 16), f32(1, 1, 5, 7), mask_kind="bias", softcap=2.0),
        sample(*_heads(1, 8, 8, 2, 2, 80), mask_kind="causal", scale=0.3, softcap=5.0),
        sample(*_heads(1, 20, 150, 2, 1, 20), mask_kind="near(9)"),
        sample(*_heads(2, 70, 70, 4, 2, 16), i32(2, 70, low=-1, high=3), mask_kind="segments"),
        sample(*_heads(1, 9, 9, 2, 2, 8), i32(1, 9, low=-1, high=2), mask_kind="causal+segments", softcap=5.0),
        sample(*_heads(1, 9, 9, 2, 1, 8), i32(1, 9, low=0, high=2), mask_kind="near(2)+segments"),
    ],
)  # fmt: skip
def attention(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    mask: TensorType | None = None,
    *,
    mask_kind: str = "none",
    scale: float | None = None,
    softcap: float | None = None,
    num_heads: int | None = None,
    head_dim: int | None = None,
) -> TensorType:
    """softmax(scale · q kᵀ, softcapped and masked) v per head.

    `q` is [batch, seq, heads, head_dim], `k` and `v` are [batch, keys, kv_heads, ...], heads a multiple of kv_heads.
    Queries and keys end at the same position. A `custom` mask is [batch, keys]: true or >= 0.5 keeps a key; a `bias`
    [batch, heads, seq, keys] (1 broadcasts) is added to the scores. With `segments`, alone or as in `causal+segments`,
    the mask holds ids [batch, seq], integers in the range of i32, of sequences packed into a row: a query attends to
    keys with its own id; ids below 0 are padding, which attends to nothing and is masked. `near(r)` allows r keys on
    each side. The scale defaults to 1/√head_dim. A query without keys gives zeros. `num_heads` and `head_dim` only
    check the shapes.
    """
    result = _check("attention", q, k, v, mask, mask_kind, softcap)
    if num_heads not in (None, q.shape[2]) or head_dim not in (None, q.shape[3]):
        raise ShapeError(f"attention: num_heads {num_heads} and head_dim {head_dim} do not fit q {q}")
    return result


_SAMPLES = [
    sample(*_heads(2, 5, 5, 4, 4, 8)), sample(*_heads(1, 7, 70, 4, 2, 16), mask_kind="causal"),
    sample(*_heads(1, 20, 70, 2, 1, 20), mask_kind="sliding(7)"),
    sample(*_heads(2, 9, 66, 2, 2, 8), boolean(2, 66), mask_kind="custom"),
    sample(*_heads(2, 5, 7, 4, 2, 16), f32(1, 1, 5, 7), mask_kind="bias", softcap=2.0),
    sample(*_heads(1, 8, 8, 2, 2, 80), mask_kind="causal", scale=0.3, softcap=5.0),
    sample(*_heads(1, 8, 70, 2, 1, 16), mask_kind="near(3)"),
    sample(*_heads(2, 20, 20, 4, 2, 16), i32(2, 20, low=0, high=3), mask_kind="segments"),
    sample(*_heads(1, 20, 20, 2, 2, 8), i32(1, 20, low=0, high=2), mask_kind="sliding(7)+segments"),
]  # fmt: skip


@op("attention_lse", independent=never, reference=_attention_lse, tolerance=1e-5, samples=_SAMPLES)
def attention_lse(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    mask: TensorType | None = None,
    *,
    mask_kind: str = "none",
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[TensorType, TensorType]:
    """`attention`, and per query the logsumexp of its scores, [batch, heads, seq], -inf without keys.

    The gradient of `attention` stores it instead of the weights. For narrow floats it is f32.
    """
    result = _check("attention_lse", q, k, v, mask, mask_kind, softcap)
    return result, row_type(q)


def row_type(q: TensorType) -> TensorType:
    """The type of one number per query."""
    return TensorType((q.shape[0], q.shape[2], q.shape[1]), q.dtype.wide)


def _grad_sample(forward: Sample) -> Sample:
    """The gradient of a sample of `attention_lse`."""
    q, k, v, *mask = forward.operands
    assert q is not None and v is not None
    batch, seq, heads = q.shape[:3]
    rows = f32(batch, heads, seq, low=8, high=9), f32(batch, heads, seq)  # an lse that makes weights less than 1
    return sample(q, k, v, f32(*q.shape[:3], v.shape[3]), *rows, *mask, **forward.attrs)


@op(
    "attention_grad",
    independent=never,
    reference=_attention_grad,
    tolerance=2e-5,
    samples=[_grad_sample(s) for s in _SAMPLES],
)
def attention_grad(
    q: TensorType,
    k: TensorType,
    v: TensorType,
    dy: TensorType,
    lse: TensorType,
    delta: TensorType,
    mask: TensorType | None = None,
    *,
    mask_kind: str = "none",
    scale: float | None = None,
    softcap: float | None = None,
) -> tuple[TensorType, TensorType, TensorType]:
    """Gradients of q, k and v from `dy`, the gradient of the result of `attention_lse`.

    `lse` is its second result, `delta` the sum of dy · result per query, minus the gradient of its lse; both are
    [batch, heads, seq]. Weights are recomputed block by block: no memory grows with seq · keys.
    """
    result = _check("attention_grad", q, k, v, mask, mask_kind, softcap)
    for name, tensor, wanted in (("dy", dy, result), ("lse", lse, row_type(q)), ("delta", delta, row_type(q))):
        if not tensor.dtype.is_float:
            raise DTypeError(f"attention_grad: {name} is {tensor}, expected floats")
        if tensor.rank != wanted.rank:
            raise ShapeError(f"attention_grad: {name} is {tensor}, expected {wanted}")
        for have, want in zip(tensor.shape, wanted.shape, strict=True):
            require_equal(have, want, f"attention_grad: {name} is {tensor}, expected {wanted}")
    return q, k, v


def _check(
    where: str, q: TensorType, k: TensorType, v: TensorType, mask: TensorType | None, mask_kind: str,
    softcap: float | None,
) -> TensorType:  # fmt: skip
    """The result type of attention."""
    for name, t in (("q", q), ("k", k), ("v", v)):
        if t.rank != 4:
            raise ShapeError(f"{where}: {name} is [batch, seq, heads, head_dim], found {t}")
        if not t.dtype.is_float or t.dtype is not q.dtype:
            raise DTypeError(f"{where}: q, k, v have one float type, found {q.dtype} and {t.dtype}")
        if not all(isinstance(d, int) and d > 0 for d in t.shape[2:]):
            raise ShapeError(f"{where}: heads and head_dim of {name} are fixed numbers above 0, found {t}")
    batch, seq, heads, dim = q.shape
    keys, kv_heads = k.shape[1], k.shape[2]
    require_equal(dim, k.shape[3], f"{where}: head_dim of q is {dim}, of k {k.shape[3]}")
    require_equal(keys, v.shape[1], f"{where}: k has {keys} keys, v has {v.shape[1]}")
    require_equal(kv_heads, v.shape[2], f"{where}: k has {kv_heads} heads, v has {v.shape[2]}")
    for t in (k, v):
        require_equal(batch, t.shape[0], f"{where}: batch sizes differ, {batch} and {t.shape[0]}")
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    if heads % kv_heads:
        raise ShapeError(f"{where}: {heads} query heads are no multiple of {kv_heads} key heads")
    if softcap is not None and not softcap > 0:
        raise GraphError(f"{where}: softcap is {softcap}, it has to be above 0")
    _check_mask(where, parse_mask(mask_kind), q, keys, mask)
    return q.with_shape(batch, seq, heads, v.shape[3])


def _check_mask(where: str, kind: Mask, q: TensorType, keys: Any, mask: TensorType | None) -> None:
    name = "segments" if kind.segments else kind.name
    if (mask is not None) != kind.takes_operand:
        problem = "takes no mask operand" if mask is not None else "needs a mask operand"
        raise GraphError(f"{where}: mask kind {name!r} {problem}")
    if mask is None:
        return
    if kind.segments:
        if not mask.dtype.is_integer:
            raise DTypeError(f"{where}: segment ids are integers, found {mask.dtype}", hint="cast them to i32")
        problem = f"{where}: segments are of one sequence, found {q.shape[1]} queries, {keys} keys"
        require_equal(q.shape[1], keys, problem)
    if name == "bias" and not mask.dtype.is_float:
        raise DTypeError(f"{where}: a bias is a float tensor, found {mask.dtype}")
    wanted = (q.shape[0], q.shape[2], q.shape[1], keys) if name == "bias" else (q.shape[0], keys)
    shown = "[" + ", ".join(map(str, wanted)) + "]"
    if mask.rank != len(wanted):
        raise ShapeError(f"{where}: a {name} mask has shape {shown}, found {mask}")
    for axis, (have, want) in enumerate(zip(mask.shape, wanted, strict=True)):
        if not (name == "bias" and have == 1 and axis < 3):
            require_equal(have, want, f"{where}: a {name} mask has shape {shown}, found {mask}")

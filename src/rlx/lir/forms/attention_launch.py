"""Attention and its gradient as launches of kernels that backends implement: strides of tensors, pools and masks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from rlx.dtypes import I32, I64
from rlx.ir.graph import Node, Value
from rlx.lir.forms.kv_cache import CachedTokens
from rlx.lir.kernels import AttentionGradKernel, AttentionKernel
from rlx.lir.loops import Expr, Stmt
from rlx.lir.schedule import Elements, Scheduler, map_elements
from rlx.lir.views import View
from rlx.ops.attention import parse_mask, split_mask
from rlx.types import Size, TensorType

Words = dict[str, View | Size | None]


def attention(s: Scheduler, node: Node) -> Sequence[View]:
    """Launches `attention`, or `attention_lse`, as one kernel."""
    q, k, v = _rows(s, node.operands[:3])
    mask = _mask(s, node, node.operands[3])
    results = [s.result(node, i) for i in range(len(node.types))]
    kernel = _kernel(node, q, k, v, mask, lse=len(results) == 2)
    words = _words({"q": q, "k": k, "v": v, "out": results[0]}, mask)
    if kernel.lse:
        words |= _of_rows("lse", results[1])
    s.launch(kernel, words, flops=_products(q, k, v) * 2)
    return results


def attention_grad(s: Scheduler, node: Node) -> Sequence[View]:
    """Launches `attention_grad` as one kernel."""
    q, k, v, dy, lse, delta = _rows(s, node.operands[:6])
    mask = _mask(s, node, node.operands[6])
    dq, dk, dv = (s.result(node, i) for i in range(3))
    kernel = AttentionGradKernel(_kernel(node, q, k, v, mask))
    tensors = {"q": q, "k": k, "v": v, "dy": dy, "dq": dq, "dk": dk, "dv": dv}
    words = _words(tensors, mask) | _of_rows("lse", lse) | _of_rows("delta", delta)
    # Of five products, three have rows of q's size and two of v's.
    flops = _products(q, k, v) * 4 + _products(q, k, q)
    s.launch(kernel, words, flops=flops)
    return [dq, dk, dv]


def _rows(s: Scheduler, operands: Sequence[Value | None]) -> list[View]:
    """Operands whose last axis is contiguous."""
    views = [s.view(o) for o in operands]
    return [t if t.strides[-1] == 1 else s.copied(t) for t in views]


def _mask(s: Scheduler, node: Node, operand: Value | None) -> View | None:
    """The mask operand; segment ids as i32."""
    if operand is None:
        return None
    if not parse_mask(node.attrs["mask_kind"]).segments or operand.dtype is I32:
        return _rows(s, [operand])[0]
    ids = s.temporary(TensorType(operand.shape, I32))
    map_elements(s, "ids", operand.shape, [s.view(operand)], [ids], lambda e: ((), [e.load(0).cast(I32)]))
    return ids


def _products(q: View, k: View, v: View) -> Size:
    """Multiplications of q kᵀ and of weights · v."""
    return q.shape[0] * q.shape[1] * k.shape[1] * (q.shape[2] * (q.shape[3] + v.shape[3]))


def _kernel(node: Node, q: View, k: View, v: View, mask: View | None, *, lse: bool = False) -> AttentionKernel:
    kind = parse_mask(node.attrs["mask_kind"])
    heads, kv_heads, head_dim, value_dim = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    assert isinstance(head_dim, int) and isinstance(value_dim, int)
    scale = node.attrs["scale"]
    return AttentionKernel(
        dtype=q.dtype, head_dim=head_dim, value_dim=value_dim, group=heads // kv_heads,
        mask="sliding" if kind.name == "near" else kind.name, window=kind.window,
        scale=1 / math.sqrt(head_dim) if scale is None else scale, softcap=node.attrs["softcap"] or 0.0,
        mask_dtype=None if mask is None else mask.dtype, lse=lse,
        ahead=kind.ahead, segments=kind.segments,
    )  # fmt: skip


def _words(tensors: Mapping[str, View], mask: View | None) -> Words:
    """The words of tensors [batch, seq, heads, ...] and of the mask, and the sizes."""
    q, k = tensors["q"], tensors["k"]
    words: Words = {"mask": mask, "batch": q.shape[0], "q_len": q.shape[1], "k_len": k.shape[1], "kv_heads": k.shape[2]}
    for name, view in tensors.items():
        words[name] = view
        for axis, part in enumerate(("batch", "seq", "head")):
            words[f"{name}_{part}"] = view.strides[axis]
    return words | _mask_strides(mask)


def _of_rows(name: str, view: View) -> Words:
    """The words of a tensor with one number per query row, [batch, heads, seq]."""
    return {name: view, f"{name}_batch": view.strides[0], f"{name}_head": view.strides[1]}


def _mask_strides(mask: View | None) -> dict[str, Size]:
    if mask is None:
        return {"mask_batch": 0, "mask_head": 0, "mask_query": 0}
    if len(mask.shape) == 2:  # a custom mask or segment ids
        return {"mask_batch": mask.strides[0], "mask_head": 0, "mask_query": 0}
    steps = [0 if d == 1 else s for d, s in zip(mask.shape, mask.strides, strict=True)]
    return {"mask_batch": steps[0], "mask_head": steps[1], "mask_query": steps[2]}


# -- over a KV cache --------------------------------------------------------------------------------------------------
def cached_attention(
    s: Scheduler, node: Node, keys: View, values: View, *, key_axes: str, appends: bool = False
) -> Sequence[View]:
    """Launches `cached_attention` as one kernel, which reads pools [pages, kv_heads, page, dim] in place.

    `key_axes` is the order of slot and element in pages of keys; those of values are "sd". `appends`: see the kernel.
    """
    storage = node.operands[1].dtype  # type: ignore[union-attr]
    tokens = CachedTokens.of(s, node)
    q, out = tokens.q if tokens.q.strides[-1] == 1 else s.copied(tokens.q), tokens.out
    positions, table = (_narrow(s, v) for v in (tokens.positions, tokens.table))
    kind, window = split_mask(node.attrs["mask_kind"])
    kv_heads, page = values.shape[1:3]
    heads, head_dim, value_dim = *q.shape[2:], out.shape[3]
    assert isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(page, int)
    assert isinstance(head_dim, int) and isinstance(value_dim, int)
    scale = node.attrs["scale"]
    kernel = AttentionKernel(
        dtype=q.dtype, head_dim=head_dim, value_dim=value_dim, group=heads // kv_heads, mask=kind, window=window,
        scale=1 / math.sqrt(head_dim) if scale is None else scale, softcap=node.attrs["softcap"] or 0.0,
        mask_dtype=None, page=page, cache_dtype=None if storage is q.dtype else storage, ring=node.attrs["ring"],
        ragged=tokens.rows is not None, key_axes=key_axes, appends=appends,
    )  # fmt: skip
    capacity = table.shape[1] * page
    words: Words = {
        "q": q, "k": keys, "v": values, "out": out, "positions": positions, "table": table, "batch": q.shape[0],
        "q_len": q.shape[1], "capacity": capacity, "kv_heads": kv_heads, "pages": keys.shape[0],
        "table_rows": table.shape[0], "positions_batch": positions.strides[0], "table_row": table.strides[0],
    }  # fmt: skip
    if tokens.rows is not None:
        words["rows"] = _narrow(s, tokens.rows)
    for name, view, axes in (
        ("q", q, ("batch", "seq", "head")), ("out", out, ("batch", "seq", "head")),
        ("k", keys, ("page", "head", "seq")), ("v", values, ("page", "head", "seq")),
    ):  # fmt: skip
        words |= {f"{name}_{axis}": stride for axis, stride in zip(axes, view.strides, strict=False)}
    # How far rows see is data; this is the upper bound.
    flops = q.shape[0] * q.shape[1] * capacity * (heads * 2 * (head_dim + value_dim))
    s.launch(kernel, words, flops=flops)
    return [tokens.result]


def _narrow(s: Scheduler, numbers: View) -> View:
    """Integers as i32, contiguous along the last axis; those that an i32 cannot hold stay negative, or too large."""
    if numbers.dtype is I32:
        return numbers if numbers.strides[-1] == 1 else s.copied(numbers)
    out = s.temporary(TensorType(numbers.shape, I32))

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return (), [e.load(0).cast(I64).min(2**31 - 1).max(-1).cast(I32)]

    map_elements(s, "narrow", numbers.shape, [numbers], [out], body)
    return out

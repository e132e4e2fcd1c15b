"""Attention over a KV cache as a launch: the kernel reads keys and values where the cache has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.dtypes import I32, I64
from rlx.ir.graph import Node
from rlx.lir.kernels import KEY_BLOCK, AttentionKernel
from rlx.lir.loops import Expr, Stmt
from rlx.lir.schedule import Elements, Scheduler, map_elements
from rlx.lir.views import View
from rlx.ops.attention import split_mask
from rlx.types import Size, TensorType, contiguous_strides, dim_min


def cached_attention(s: Scheduler, node: Node) -> Sequence[View]:
    q, keys, values, positions = (s.view(o) for o in node.operands)
    q, values = (t if t.strides[-1] == 1 else s.copied(t) for t in (q, values))
    positions = _narrow(s, positions)
    out = s.result(node)
    kind, window = split_mask(node.attrs["mask_kind"])
    storage, kv_heads = node.operands[1].dtype, values.shape[1]  # type: ignore[union-attr]
    heads, head_dim, value_dim = *q.shape[2:], out.shape[3]
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    assert isinstance(head_dim, int) and isinstance(value_dim, int)
    if keys.strides[2:] != contiguous_strides(keys.shape[2:]):
        keys = s.copied(keys)
    scale = node.attrs["scale"]
    kernel = AttentionKernel(
        dtype=q.dtype, head_dim=head_dim, value_dim=value_dim, group=heads // kv_heads, mask=kind, window=window,
        scale=1 / math.sqrt(head_dim) if scale is None else scale, softcap=node.attrs["softcap"] or 0.0,
        mask_dtype=None, cached=True, cache_dtype=None if storage is q.dtype else storage, ring=node.attrs["ring"],
    )  # fmt: skip
    capacity = dim_min(keys.shape[2] * KEY_BLOCK, values.shape[2])
    words: dict[str, View | Size | None] = {
        "q": q, "k": keys, "v": values, "out": out, "positions": positions, "batch": q.shape[0], "q_len": q.shape[1],
        "capacity": capacity, "kv_heads": kv_heads, "positions_batch": positions.strides[0],
    }  # fmt: skip
    for name, view, axes in (
        ("q", q, ("batch", "seq", "head")), ("out", out, ("batch", "seq", "head")),
        ("k", keys, ("batch", "head")), ("v", values, ("batch", "head", "seq")),
    ):  # fmt: skip
        words |= {f"{name}_{axis}": stride for axis, stride in zip(axes, view.strides, strict=False)}
    # How far rows see is data; this is the most that it can be.
    flops = q.shape[0] * q.shape[1] * capacity * (heads * 2 * (head_dim + value_dim))
    s.launch(kernel, words, flops=flops)
    return [out]


def _narrow(s: Scheduler, positions: View) -> View:
    """Positions as i32, one after the other; those that an i32 does not hold stay negative, or beyond any capacity."""
    if positions.dtype is I32:
        return positions if positions.strides[-1] == 1 else s.copied(positions)
    out = s.temporary(TensorType(positions.shape, I32))

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return (), [e.load(0).cast(I64).min(2**31 - 1).max(-1).cast(I32)]

    map_elements(s, "positions", positions.shape, [positions], [out], body)
    return out

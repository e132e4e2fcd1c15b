"""Attention over a KV cache as a launch: the kernel reads keys and values where the cache has them."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.backends.cpu.targets import KEY_BLOCK
from rlx.dtypes import I32, I64, DType
from rlx.ir.graph import Node
from rlx.lir.forms.attention import CachedTokens, pools
from rlx.lir.forms.attention import cached_attention as portable
from rlx.lir.kernels import AttentionKernel
from rlx.lir.loops import Expr, Stmt
from rlx.lir.schedule import Elements, Scheduler, map_elements
from rlx.lir.views import View
from rlx.ops.attention import split_mask
from rlx.types import Size, TensorType


def cached_attention(s: Scheduler, node: Node) -> Sequence[View]:
    keys, values = pools(s, node)
    storage = node.operands[1].dtype  # type: ignore[union-attr]
    if not _has_own_pages(keys, values, storage):
        return portable(s, node)  # pages of another backend
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
        ragged=tokens.rows is not None,
    )  # fmt: skip
    capacity = table.shape[1] * page
    words: dict[str, View | Size | None] = {
        "q": q, "k": keys, "v": values, "out": out, "positions": positions, "table": table, "batch": q.shape[0],
        "q_len": q.shape[1], "capacity": capacity, "kv_heads": kv_heads, "pages": keys.shape[0],
        "table_rows": table.shape[0], "positions_batch": positions.strides[0], "table_row": table.strides[0],
    }  # fmt: skip
    if tokens.rows is not None:
        words["rows"] = _narrow(s, tokens.rows)
    for name, view, axes in (
        ("q", q, ("batch", "seq", "head")), ("out", out, ("batch", "seq", "head")),
        ("k", keys, ("page", "head")), ("v", values, ("page", "head", "seq")),
    ):  # fmt: skip
        words |= {f"{name}_{axis}": stride for axis, stride in zip(axes, view.strides, strict=False)}
    # How far rows see is data; this is the most that it can be.
    flops = q.shape[0] * q.shape[1] * capacity * (heads * 2 * (head_dim + value_dim))
    s.launch(kernel, words, flops=flops)
    return [tokens.result]


def _has_own_pages(keys: View, values: View, storage: DType) -> bool:
    """Whether a page is what the kernel reads: values as rows, keys as [head_dim, 64], or as rows if they are packed.

    The order of heads and pages does not matter.
    """
    page, head_dim = keys.shape[2:]
    wanted = (head_dim, 1) if storage.is_packed else (1, page)
    return page == KEY_BLOCK and keys.strides[2:] == wanted and values.strides[3] == 1


def _narrow(s: Scheduler, numbers: View) -> View:
    """Numbers as i32, contiguous along the last axis; those that an i32 does not hold stay negative, or too large."""
    if numbers.dtype is I32:
        return numbers if numbers.strides[-1] == 1 else s.copied(numbers)
    out = s.temporary(TensorType(numbers.shape, I32))

    def body(e: Elements) -> tuple[Sequence[Stmt], Sequence[Expr]]:
        return (), [e.load(0).cast(I64).min(2**31 - 1).max(-1).cast(I32)]

    map_elements(s, "narrow", numbers.shape, [numbers], [out], body)
    return out

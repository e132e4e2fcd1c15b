"""Attention as a launch: strides of the tensors and the mask; a unit is a block of query positions of a key head."""

from __future__ import annotations

import math
from collections.abc import Sequence

from rlx.ir.graph import Node
from rlx.lir.kernels import AttentionKernel
from rlx.lir.schedule import Scheduler, loop_form
from rlx.lir.views import View
from rlx.ops.attention import split_mask
from rlx.types import Size


@loop_form("attention")
def _(s: Scheduler, node: Node) -> Sequence[View]:
    q, k, v = (s.view(o) for o in node.operands[:3])
    q, k, v = (t if t.strides[-1] == 1 else s.copied(t) for t in (q, k, v))
    out = s.result(node)
    kind, window = split_mask(node.attrs["mask_kind"])
    mask = None if node.operands[3] is None else s.view(node.operands[3])
    if mask is not None and mask.strides[-1] != 1:
        mask = s.copied(mask)
    heads, kv_heads, head_dim, value_dim = q.shape[2], k.shape[2], q.shape[3], v.shape[3]
    assert isinstance(heads, int) and isinstance(kv_heads, int)
    assert isinstance(head_dim, int) and isinstance(value_dim, int)
    scale = node.attrs["scale"]
    kernel = AttentionKernel(
        dtype=q.dtype, head_dim=head_dim, value_dim=value_dim, group=heads // kv_heads, mask=kind, window=window,
        scale=1 / math.sqrt(head_dim) if scale is None else scale, softcap=node.attrs["softcap"] or 0.0,
        mask_dtype=None if mask is None else mask.dtype,
    )  # fmt: skip
    words: dict[str, View | Size | None] = {
        "q": q, "k": k, "v": v, "out": out, "mask": mask, "batch": q.shape[0], "q_len": q.shape[1],
        "k_len": k.shape[1], "kv_heads": kv_heads,
    }  # fmt: skip
    for name, view in (("q", q), ("k", k), ("v", v), ("out", out)):
        for axis, part in enumerate(("batch", "seq", "head")):
            words[f"{name}_{part}"] = view.strides[axis]
    words |= _mask_strides(kind, mask)
    blocks = (q.shape[1] + (kernel.positions - 1)) // kernel.positions
    units = q.shape[0] * kv_heads * blocks
    flops = q.shape[0] * q.shape[1] * k.shape[1] * (heads * 2 * (head_dim + value_dim))
    s.launch(kernel, words, units, "heads", flops=flops)
    return [out]


def _mask_strides(kind: str, mask: View | None) -> dict[str, Size]:
    if mask is None:
        return {"mask_batch": 0, "mask_head": 0, "mask_query": 0}
    if kind == "custom":
        return {"mask_batch": mask.strides[0], "mask_head": 0, "mask_query": 0}
    steps = [0 if d == 1 else s for d, s in zip(mask.shape, mask.strides, strict=True)]
    return {"mask_batch": steps[0], "mask_head": steps[1], "mask_query": steps[2]}

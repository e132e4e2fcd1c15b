"""Attention as launches; what the kernels do not take keeps its portable form.

| portable | reason |
| --- | --- |
| heads of more than 48 KB per 16 queries (f32: 768 elements, f64: 384) | queries of a tile are in shared memory |
| caches whose keys or values are not rows, as those of CPUs are | kernels read whole keys |
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.attention.generator import takes
from rlx.ir.graph import Node
from rlx.lir.forms import attention_launch
from rlx.lir.forms.attention import cached_attention as portable_cached_attention
from rlx.lir.forms.attention import pools
from rlx.lir.schedule import Scheduler, form_of
from rlx.lir.views import View


def attention(s: Scheduler, node: Node) -> Sequence[View]:
    return (attention_launch.attention if _takes(node) else form_of(node))(s, node)


def attention_grad(s: Scheduler, node: Node) -> Sequence[View]:
    return (attention_launch.attention_grad if _takes(node) else form_of(node))(s, node)


def cached_attention(s: Scheduler, node: Node) -> Sequence[View]:
    keys, values = pools(s, node)
    if not _takes(node) or keys.strides[3] != 1 or values.strides[3] != 1:
        return portable_cached_attention(s, node)
    return attention_launch.cached_attention(s, node, keys, values, key_axes="sd")


def _takes(node: Node) -> bool:
    q, k = node.operands[:2]
    assert q is not None and k is not None
    head_dim = q.shape[-1]
    assert isinstance(head_dim, int)
    return takes(q.dtype, k.dtype, head_dim)

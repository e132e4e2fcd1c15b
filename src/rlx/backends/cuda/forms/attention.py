"""Attention as launches; what the kernels do not take keeps its portable form.

| portable | reason |
| --- | --- |
| heads of more than 48 KB per 16 rows: 768 elements of f32, 384 of f64 | rows of a tile are in shared memory |
| gradients with keys and values of more than that together | the same |
| gradients whose dy, logsumexp or delta have another type than usual | one type per kernel |
"""

from __future__ import annotations

from collections.abc import Sequence

from rlx.backends.cuda.attention.generator import MOST_QUERIES, TILE, takes
from rlx.ir.graph import Node
from rlx.lir.forms import attention_launch
from rlx.lir.schedule import Scheduler, form_of
from rlx.lir.views import View


def attention(s: Scheduler, node: Node) -> Sequence[View]:
    return (attention_launch.attention if kernel_takes(node) else form_of(node))(s, node)


def attention_grad(s: Scheduler, node: Node) -> Sequence[View]:
    q, _, v, dy, lse, delta = (o for o in node.operands[:6] if o is not None)
    head_dim, value_dim = q.shape[3], v.shape[3]
    assert isinstance(head_dim, int) and isinstance(value_dim, int)
    fits = TILE * (head_dim + value_dim) * max(4, q.dtype.size) <= MOST_QUERIES
    same = dy.dtype is q.dtype and lse.dtype is delta.dtype is q.dtype.wide
    return (attention_launch.attention_grad if fits and same else form_of(node))(s, node)


def kernel_takes(node: Node) -> bool:
    """Whether a tile of the kernel takes heads of this size and these types; the first two operands are q and keys."""
    q, k = node.operands[:2]
    assert q is not None and k is not None
    head_dim = q.shape[-1]
    assert isinstance(head_dim, int)
    return takes(q.dtype, k.dtype, head_dim)

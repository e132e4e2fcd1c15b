"""KV caches: updated in place during generation, so nothing is differentiated through them."""

from __future__ import annotations

from collections.abc import Sequence

from rlx.errors import DTypeError
from rlx.ir.graph import Value
from rlx.transforms.rule_tables import Vmapped, batching, no_derivative
from rlx.transforms.vmap import by_scan

no_derivative(
    "kv_append", "cached_attention",
    why="a cache is updated in place during generation; for training build the graph with attention",
)  # fmt: skip


@batching("kv_append", "cached_attention")
def _(vmapped: Vmapped) -> Sequence[Value]:
    """Scan over the entries: each has page numbers of its own."""
    packed = [v for v in vmapped.operands if v is not None and v.dtype.is_packed]
    if packed and vmapped.node.op == "kv_append":
        raise DTypeError(
            f"kv_append: a packed cache is not batched, found {packed[0].type}", hint="its batch is its own"
        )
    return by_scan(vmapped)

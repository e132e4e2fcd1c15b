"""The KV cache of a decoder: memory that the runtime owns and kernels write in place.

Keys lie as `[batch, kv_heads, blocks, head_dim, 64]`, values as `[batch, kv_heads, blocks · 64, head_dim]`.
Capacity grows by doubling, up to the model's context.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from rlx.flow.flow import KvCacheSpec

Array = np.ndarray[Any, Any]
BLOCK = 64


class KvCache:
    """Keys and values of some sequences."""

    def __init__(self, spec: KvCacheSpec, batch: int, context: int) -> None:
        self.spec = spec
        self.batch = batch
        self.most = -(-context // BLOCK)
        self.blocks = 0
        self.arrays: dict[str, Array] = {}
        self.reserve(1)

    def reserve(self, tokens: int) -> None:
        """Room for `tokens` positions in every sequence; what is there stays."""
        needed = -(-tokens // BLOCK)
        if needed <= self.blocks:
            return
        blocks = min(max(needed, 2 * self.blocks, 4), self.most)
        s = self.spec
        for i in range(s.layers):
            self._grow(f"keys.{i}", (self.batch, s.kv_heads, blocks, s.head_dim, BLOCK))
            self._grow(f"values.{i}", (self.batch, s.kv_heads, blocks * BLOCK, s.head_dim))
        self.blocks = blocks

    def _grow(self, name: str, shape: tuple[int, ...]) -> None:
        new = np.zeros(shape, np.float32)
        old = self.arrays.get(name)
        if old is not None:
            new[:, :, : old.shape[2]] = old
        self.arrays[name] = new

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())

"""KV caches: memory that the runtime owns and kernels write in place, and the store of those that calls have left.

Keys lie as `[batch, kv_heads, blocks, head_dim, 64]`, values as `[batch, kv_heads, blocks · 64, head_dim]`.
Capacity grows by doubling, up to the model's context. A cache knows which tokens it holds, so that a prompt which
begins with the same ones can go on from there: same bits, less work.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

import numpy as np

from rlx.dtypes import dtype
from rlx.flow.flow import KvCacheSpec
from rlx.runtime.resources import require

Array = np.ndarray[Any, Any]
BLOCK = 64
KEPT = 4  # caches that wait for the next prompt
KEPT_BYTES = 512 << 20  # of all but the last one
WORTH_COPYING = 32  # tokens; below it, reading them again costs about as much


class KvCache:
    """Keys and values of some sequences, and the tokens they came from."""

    def __init__(self, spec: KvCacheSpec, batch: int, context: int) -> None:
        self.spec = spec
        self.batch = batch
        self.most = -(-context // BLOCK)
        self.blocks = 0
        self.arrays: dict[str, Array] = {}
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.reserve(1)

    def reserve(self, tokens: int) -> None:
        """Room for `tokens` positions in every sequence; what is there stays."""
        needed = -(-tokens // BLOCK)
        if needed <= self.blocks:
            return
        blocks = min(max(needed, 2 * self.blocks, 4), self.most)
        s = self.spec
        size = 2 * s.layers * self.batch * s.kv_heads * blocks * BLOCK * s.head_dim * dtype(s.dtype).size
        require("KV cache", size, hint="a shorter context, a smaller batch, or cache='f16'")
        for i in range(s.layers):
            self._grow(f"keys.{i}", (self.batch, s.kv_heads, blocks, s.head_dim, BLOCK))
            self._grow(f"values.{i}", (self.batch, s.kv_heads, blocks * BLOCK, s.head_dim))
        self.blocks = blocks

    def _grow(self, name: str, shape: tuple[int, ...]) -> None:
        new = np.zeros(shape, dtype(self.spec.dtype).numpy)
        old = self.arrays.get(name)
        if old is not None:
            new[:, :, : old.shape[2]] = old
        self.arrays[name] = new

    def rows(self, first: int, end: int) -> dict[str, Array]:
        """The memory of some neighbouring sequences, as a decoder takes it."""
        if first == 0 and end == self.batch:
            return self.arrays
        return {name: array[first:end] for name, array in self.arrays.items()}

    def copy_row(self, row: int, source: KvCache, source_row: int, count: int) -> None:
        """Take over the first `count` tokens of a sequence of `source`."""
        self.reserve(count)
        blocks = -(-count // BLOCK)
        for name, array in self.arrays.items():
            end = blocks if name.startswith("keys.") else count
            array[row, :, :end] = source.arrays[name][source_row, :, :end]
        self.tokens[row] = source.tokens[source_row][:count]

    def best_row(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The row that shares most with a prompt, and how much."""
        shared = [min(_common(row, tokens), len(tokens) - 1) for row in self.tokens]
        best = max(range(self.batch), key=shared.__getitem__)
        return best, shared[best]

    def gains(self, tokens: Sequence[int], unread: Sequence[Sequence[int]]) -> bool:
        """Whether a prompt would find much more in this cache once the `unread` ones are in it."""
        later = min(max(_common(prompt, tokens) for prompt in unread), len(tokens) - 1)
        return later >= self.best_row(tokens)[1] + WORTH_COPYING

    @property
    def nbytes(self) -> int:
        return sum(a.nbytes for a in self.arrays.values())


class CacheStore:
    """Caches of single sequences. A call takes one out, so it has it to itself, and gives it back when it ends.

    That may be in the garbage collector, at any place of any thread, and so also where this thread has the lock.
    Hence `give` never waits for it: it leaves the cache where whoever has the lock next puts it in order.
    """

    def __init__(self, spec: KvCacheSpec, context: int) -> None:
        self.spec = spec
        self.context = context
        self._given: deque[KvCache] = deque()  # given back, not yet in order
        self._kept: list[KvCache] = []  # the last one given back is last
        self._closed = False
        self._made: weakref.WeakSet[KvCache] = weakref.WeakSet()
        self._lock = threading.Lock()

    def new(self, batch: int) -> KvCache:
        """An empty cache, known to the count of bytes."""
        cache = KvCache(self.spec, batch, self.context)
        with self._lock:
            self._made.add(cache)
        return cache

    def take(self, tokens: Sequence[int]) -> KvCache:
        """A cache for a prompt that holds as much of it as is known; never its last token, whose logits count."""
        found, shared = self._best(tokens)
        if found is not None and 2 * shared >= len(found.tokens[0]):
            del found.tokens[0][shared:]
            return found
        # Another conversation that begins alike keeps what it has; this one gets a copy of the beginning.
        cache = self.new(1)
        if found is not None:
            if shared >= WORTH_COPYING:
                cache.copy_row(0, found, 0, shared)
            self.give(found)
        return cache

    def fill(self, cache: KvCache, row: int, tokens: Sequence[int]) -> int:
        """Copy what is known of a prompt into a row of a batch; gives how many tokens that are."""
        near, best = cache.best_row(tokens)
        found, shared = self._best(tokens)
        if best >= max(shared, WORTH_COPYING):
            cache.copy_row(row, cache, near, best)
        elif found is not None and shared >= WORTH_COPYING:
            cache.copy_row(row, found, 0, shared)
        else:
            cache.tokens[row] = []
        if found is not None:
            self.give(found)
        return len(cache.tokens[row])

    def _best(self, tokens: Sequence[int]) -> tuple[KvCache | None, int]:
        """The cache that shares most with a prompt, taken out, and how much."""
        with self._lock:
            self._sort_in()
            shared = [cache.best_row(tokens)[1] for cache in self._kept]
            best = max(range(len(shared)), key=shared.__getitem__, default=None)
            if best is None or shared[best] <= 0:
                return None, 0
            return self._kept.pop(best), shared[best]

    def give(self, cache: KvCache) -> None:
        """Keep a cache for later prompts; the oldest ones go, and those that are the beginning of this one."""
        if not cache.tokens[0]:
            return
        self._given.append(cache)
        if self._closed:  # looked at after the append, so that `close` or this call sees the cache
            self._given.clear()
        elif self._lock.acquire(blocking=False):
            try:
                self._sort_in()
            finally:
                self._lock.release()

    def give_rows(self, batch: KvCache) -> None:
        """Keep copies of the longest rows of a batch, without the memory of the others."""
        for row in sorted(range(batch.batch), key=lambda r: len(batch.tokens[r]))[-KEPT:]:
            if batch.tokens[row]:
                cache = self.new(1)
                cache.copy_row(0, batch, row, len(batch.tokens[row]))
                self.give(cache)

    def _sort_in(self) -> None:
        """Put caches that were given back in order; the lock is held."""
        while not self._closed:
            try:
                cache = self._given.popleft()
            except IndexError:
                return
            mine = cache.tokens[0]
            kept = [c for c in self._kept if c.tokens[0] != mine[: len(c.tokens[0])]]
            room = KEPT_BYTES
            self._kept = [cache]
            for other in reversed(kept[-(KEPT - 1) :]):
                room -= other.nbytes
                if room < 0:
                    break
                self._kept.insert(0, other)

    def clear(self) -> None:
        """Forget what is kept."""
        with self._lock:
            self._given.clear()
            self._kept = []

    def close(self) -> None:
        """Forget what is kept, and keep nothing that calls give back later."""
        self._closed = True
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, kept and in use."""
        with self._lock:
            self._sort_in()
            return sum(cache.nbytes for cache in self._made)


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements two sequences share at the beginning."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])

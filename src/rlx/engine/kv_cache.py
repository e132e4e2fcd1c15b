"""KV caches, which kernels update in place, and the prefix cache: the store of caches that calls have released.

Keys and values are in pools of pages (see `KvLayout`), one of each per layer; layers with the same window share a page
table `[batch, blocks]`. Rows with a common prefix share its pages until one of them writes. Capacity is the model's
context; a layer with a sliding window has a ring of the window plus `SPARE` positions. Pools reserve address space for
the full capacity if the device can, and allocate memory page by page as positions are written; otherwise they grow by
doubling, which copies them. Recurrent states (`[batch, ...]`) have a fixed size.

A cache records the tokens it holds, so a prompt with the same prefix continues from it: same bits, less work. A ring
can be rewound by about `SPARE` tokens, a recurrent state not at all; prompts that share less are prefilled from the
beginning. Reused states of the delta rule are equal up to rounding, because it accumulates tokens in chunks that depend
on where the call begins. If RoPE depends on the sequence length, only keys with the frequencies of the new length are
reused.
"""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.backends.base import HOST, Allocator
from rlx.dtypes import dtype
from rlx.engine.page_table import PageTable
from rlx.fork_safe_locks import Lock
from rlx.free_memory import require
from rlx.runtime.kv_spec import KvCacheSpec, table_name
from rlx.target import KvLayout
from rlx.types import concrete

KINDS = ("keys", "values")
MAX_CACHES = 4  # in the prefix cache
MAX_BYTES = 512 << 20  # of all but the last one
WORTH_COPYING = 32  # tokens; below it, prefill costs about as much
SPARE = 512  # positions of a ring beyond its window: the maximum tokens per call, and how far a prompt may rewind


class KvCache:
    """Keys, values and recurrent states of a batch of sequences, and their tokens."""

    def __init__(self, spec: KvCacheSpec, batch: int, context: int, memory: Allocator = HOST) -> None:
        self.spec = spec
        self._memory = memory  # of the device that decodes
        self.batch = batch
        self.max_blocks = spec.layout.blocks(context)
        self.blocks = 0
        self.buffers: dict[str, Any] = {}
        self.tokens: list[list[int]] = [[] for _ in range(batch)]
        self.windows = {i: window for i in range(spec.layers) if (window := spec.window(i)) is not None}
        self._tables = {window: PageTable(batch) for window in sorted(set(self.windows.values()))}
        self._rings = {
            window: self._max_blocks(window) * spec.layout.page for window in self.windows.values() if window
        }
        self._reserved = self._reserve_pools()
        # per row: runs of keys (end, RoPE frequencies), if RoPE depends on length
        self._rope_runs: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(batch)]
        self._min_len = [0] * batch  # per row: how far it can be rewound; a ring may have overwritten earlier positions
        self._states = {name: (batch, *shape) for name, shape in spec.states}
        require("recurrent states", sum(map(math.prod, self._states.values())) * 4, hint="a smaller batch")
        self.buffers |= {name: memory.zeros(shape, np.dtype(np.float32)) for name, shape in self._states.items()}
        self.reserve(1)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` positions in every sequence. May reallocate and copy the pools.

        If the device can reserve memory, pools have room for the whole context from the start.
        """
        needed = self.spec.layout.blocks(tokens)
        if needed <= self.blocks:
            return
        blocks = min(max(needed, 2 * self.blocks, 4), self.max_blocks)
        sizes = {window: min(blocks, self._max_blocks(window)) for window in self._tables}
        size = sum(self.batch * sizes[window] * self._page_bytes(window) for window in self._tables)
        require("KV cache", size, hint="a shorter context, a smaller batch, or cache='f16' or 'q8_0'")
        for window, table in self._tables.items():
            table.grow(sizes[window], self._max_blocks(window) if self._reserved else sizes[window])
        if not self._reserved:
            for name, shape in self._pool_shapes(sizes):
                self._grow(name, shape)
        self.blocks = blocks

    def _reserve_pools(self) -> bool:
        """Reserve address space for the full capacity of the pools; False if the device cannot."""
        kind = dtype(self.spec.dtype).numpy
        for name, shape in self._pool_shapes({window: self._max_blocks(window) for window in self._tables}):
            pool = self._memory.reserve(shape, kind)
            if pool is None:
                self.buffers.clear()
                return False
            self.buffers[name] = pool
        return True

    def _pool_shapes(self, blocks: Mapping[int, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and storage shapes of the pools, for these numbers of blocks per sequence by window."""
        block_size = dtype(self.spec.dtype).block
        for i, window in self.windows.items():
            for kind in KINDS:
                *lead, last = concrete(self.spec.pool_shape(kind, self.batch * blocks[window]), {})
                yield f"{kind}.{i}", (*lead, last // block_size)

    def _page_bytes(self, window: int) -> int:
        """Bytes of one page of keys and values in all layers of a window."""
        kind, layers = dtype(self.spec.dtype), sum(own == window for own in self.windows.values())
        numbers = self.spec.kv_heads * self.spec.head_dim * self.spec.layout.page
        return layers * len(KINDS) * numbers // kind.block * kind.size

    def _max_blocks(self, window: int) -> int:
        """Maximum blocks of a layer with a window, or without one (0)."""
        return min(ring_blocks(window, self.spec.layout), self.max_blocks) if window else self.max_blocks

    def _grow(self, name: str, shape: tuple[int, ...]) -> None:
        """Reallocate a pool with more pages; existing pages keep their numbers."""
        old = self.buffers.get(name)
        if old is not None and old.shape == shape:
            return
        new = self._memory.zeros(shape, dtype(self.spec.dtype).numpy)
        if old is not None:
            self._memory.copy(old, self._page_range(new, name, 0, self._page_count(old, name)))
        self.buffers[name] = new

    def _page_count(self, pool: Any, name: str) -> int:
        count: int = pool.shape[self._page_axis(name)]
        return count

    def _page_axis(self, name: str) -> int:
        return self.spec.axes(name.partition(".")[0]).index("p")

    def _page_range(self, pool: Any, name: str, begin: int, end: int) -> Any:
        """A view of consecutive pages of a pool."""
        return self._memory.part(pool, *[slice(None)] * self._page_axis(name), slice(begin, end))

    def _copy_pages(self, window: int, pairs: Sequence[tuple[int, int]], source: KvCache) -> None:
        """Copy pages (from, to) of all layers of a window."""
        for begin, to, count in _runs(pairs):
            for i in (i for i, own in self.windows.items() if own == window):
                for name in (f"{kind}.{i}" for kind in KINDS):
                    pages = self._page_range(source.buffers[name], name, begin, begin + count)
                    self._memory.copy(pages, self._page_range(self.buffers[name], name, to, to + count))

    def prepare_write(self, row: int, start: int, end: int, length: int | None = None) -> None:
        """Prepare to write positions `start` .. `end` of a row, which overwrites the oldest positions of rings.

        `length` is the sequence length that RoPE uses: `end`, unless more of the prompt follows.
        """
        if start == end:
            return
        if self.spec.lengths:
            self._record_rope(row, start, end, self.spec.rope_of_length(end if length is None else length))
        assert not self._states or start in (0, len(self.tokens[row])), "a recurrent state cannot be rewound"
        if start == 0:
            self._min_len[row] = 0
            for name in self._states:
                self._memory.clear(self._memory.part(self.buffers[name], row))
        for window, capacity in self._rings.items():
            if end > capacity:
                self._min_len[row] = max(self._min_len[row], end - capacity + window - 1)
        self._unshare_pages(row, start, end)

    def _unshare_pages(self, row: int, start: int, end: int) -> None:
        """Give positions that are about to be written their own pages (copy on write)."""
        page = self.spec.layout.page
        for window, table in self._tables.items():
            last = -(-end // page)
            for block in range(max(start // page, last - table.blocks), last):
                moved = table.make_private(row, block % table.blocks)
                if moved is not None and (window or block * page < start):
                    self._copy_pages(window, [moved], self)

    def _record_rope(self, row: int, start: int, end: int, rope: tuple[int, ...]) -> None:
        runs = self._rope_runs[row]
        if runs and runs[-1][0] > start:
            runs = self._rope_runs[row] = _cut_runs(runs, start)
        if runs and runs[-1][1] == rope:
            runs.pop()
        runs.append((end, rope))

    def shared(self, row: int, tokens: Sequence[int]) -> int:
        """Length of the prefix of a prompt that a row can reuse, excluding the prompt's last token."""
        count = self._reusable(self.tokens[row][: self._reusable_rope(row, len(tokens))], tokens)
        return count if count >= self._min_len[row] else 0

    def _reusable_rope(self, row: int, length: int) -> int | None:
        """How many tokens of a row have the RoPE frequencies of this sequence length; None: all of them."""
        if not self.spec.lengths:
            return None
        wanted, count = self.spec.rope_of_length(length), 0
        for end, rope in self._rope_runs[row]:
            if rope != wanted:
                break
            count = end
        return count

    def _reusable(self, held: Sequence[int], tokens: Sequence[int]) -> int:
        """Length of the prefix of `tokens` that a row with `held` can serve. A recurrent state needs all of `held`."""
        count = min(_common(held, tokens), len(tokens) - 1)
        return 0 if self._states and count < len(held) else count

    def discard_interrupted(self, first: int, end: int) -> None:
        """Forget the rows of an interrupted call if there are recurrent states, which may be at any token."""
        if self._states:
            for row in self.tokens[first:end]:
                row.clear()

    def rows(self, first: int, end: int) -> dict[str, Any]:
        """Decoder inputs for rows `first` .. `end`: pools, page tables, recurrent states."""
        part = self._memory.part
        states = {name: part(self.buffers[name], slice(first, end)) for name in self._states}
        tables = {table_name(window): table.numbers[first:end] for window, table in self._tables.items()}
        return self.buffers | states | tables

    def copy_row(self, row: int, source: KvCache, source_row: int, count: int) -> None:
        """Copy the first `count` tokens of a row of `source`; within one cache, pages are shared."""
        self.reserve(count)
        end = self.spec.layout.blocks(count)
        for window, table in self._tables.items():
            blocks = range(max(end - self._max_blocks(window), 0), end)
            if source is self:
                table.share(row, source_row, {block % table.blocks for block in blocks})
                continue
            table.release(row)
            pairs, source_table = [], source._tables[window]
            for block in blocks:
                table.make_private(row, block % table.blocks)
                pairs.append(
                    (source_table.page(source_row, block % source_table.blocks), table.page(row, block % table.blocks))
                )
            self._copy_pages(window, pairs, source)
        for name in self._states:
            assert count == len(source.tokens[source_row]), "a recurrent state covers all tokens"
            part = self._memory.part
            self._memory.copy(part(source.buffers[name], source_row), part(self.buffers[name], row))
        self.tokens[row] = source.tokens[source_row][:count]
        self._min_len[row] = source._min_len[source_row]
        self._rope_runs[row] = _cut_runs(source._rope_runs[source_row], count)

    def best_row(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The row with the longest reusable prefix of a prompt, and its length."""
        shared = [self.shared(row, tokens) for row in range(self.batch)]
        best = max(range(self.batch), key=shared.__getitem__)
        return best, shared[best]

    def worth_waiting(self, tokens: Sequence[int], unread: Sequence[Sequence[int]]) -> bool:
        """Whether a prompt would reuse a much longer prefix once the `unread` prompts are prefilled."""
        same_rope = [p for p in unread if self.spec.rope_of_length(len(p)) == self.spec.rope_of_length(len(tokens))]
        shared_later = max((self._reusable(prompt, tokens) for prompt in same_rope), default=0)
        return shared_later >= self.best_row(tokens)[1] + WORTH_COPYING

    def replaces(self, other: KvCache) -> bool:
        """Whether this cache can serve every prompt that another single-sequence cache can."""
        tokens, other_tokens = self.tokens[0], other.tokens[0]
        if _cut_runs(self._rope_runs[0], len(other_tokens)) != other._rope_runs[0]:
            return False
        return tokens == other_tokens if self._states else tokens[: len(other_tokens)] == other_tokens

    @property
    def nbytes(self) -> int:
        """Allocated bytes; reserved pools count the pages that have been written."""
        if not self._reserved:
            return sum(buffer.nbytes for buffer in self.buffers.values())
        touched = sum(table.touched * self._page_bytes(window) for window, table in self._tables.items())
        states: int = sum(self.buffers[name].nbytes for name in self._states)
        return touched + states


class CacheStore:
    """The prefix cache: caches of single sequences. A call acquires one and releases it when it ends.

    The garbage collector may call `release` anywhere, even while this thread holds the lock. So `release` never blocks:
    it appends to a queue that the next holder of the lock merges.
    """

    def __init__(self, spec: KvCacheSpec, context: int, memory: Allocator = HOST) -> None:
        self.spec = spec
        self.context = context
        self.memory = memory
        self._released: deque[KvCache] = deque()  # not merged into _idle yet
        self._idle: list[KvCache] = []  # least recently released first
        self._closed = False
        self._all: weakref.WeakSet[KvCache] = weakref.WeakSet()
        self._lock = Lock()

    def new(self, batch: int) -> KvCache:
        """An empty cache, counted in `nbytes`."""
        cache = KvCache(self.spec, batch, self.context, self.memory)
        with self._lock:
            self._all.add(cache)
        return cache

    def acquire(self, tokens: Sequence[int]) -> KvCache:
        """A cache for a prompt, with the longest known prefix; excludes the last token, whose logits are needed."""
        best, shared = self._take_best(tokens)
        if best is not None and 2 * shared >= len(best.tokens[0]):
            del best.tokens[0][shared:]
            return best
        # The cache belongs to another conversation with the same beginning: copy the common prefix.
        cache = self.new(1)
        if best is not None:
            if shared >= WORTH_COPYING:
                cache.copy_row(0, best, 0, shared)
            self.release(best)
        return cache

    def restore_prefix(self, cache: KvCache, row: int, tokens: Sequence[int]) -> int:
        """Copy the longest known prefix of a prompt into a row of a batch; returns its length."""
        best_row, best_count = cache.best_row(tokens)
        stored, shared = self._take_best(tokens)
        if best_count >= max(shared, WORTH_COPYING):
            cache.copy_row(row, cache, best_row, best_count)
        elif stored is not None and shared >= WORTH_COPYING:
            cache.copy_row(row, stored, 0, shared)
        else:
            cache.tokens[row] = []
        if stored is not None:
            self.release(stored)
        return len(cache.tokens[row])

    def _take_best(self, tokens: Sequence[int]) -> tuple[KvCache | None, int]:
        """Remove and return the cache with the longest reusable prefix of a prompt, and its length."""
        with self._lock:
            self._merge_released()
            shared = [cache.best_row(tokens)[1] for cache in self._idle]
            best = max(range(len(shared)), key=shared.__getitem__, default=None)
            if best is None or shared[best] <= 0:
                return None, 0
            return self._idle.pop(best), shared[best]

    def release(self, cache: KvCache) -> None:
        """Store a cache for later prompts. Evicts the oldest caches, and those whose tokens are a prefix of its own."""
        if not cache.tokens[0]:
            return
        self._released.append(cache)
        if self._closed:  # checked after the append, so that `close` or this call drops the cache
            self._released.clear()
        elif self._lock.acquire(blocking=False):
            try:
                self._merge_released()
            finally:
                self._lock.release()

    def release_rows(self, batch: KvCache) -> None:
        """Store copies of the longest rows of a batch, without the memory of the others."""
        for row in sorted(range(batch.batch), key=lambda r: len(batch.tokens[r]))[-MAX_CACHES:]:
            if batch.tokens[row]:
                cache = self.new(1)
                cache.copy_row(0, batch, row, len(batch.tokens[row]))
                self.release(cache)

    def _merge_released(self) -> None:
        """Merge released caches into the idle ones and evict; the caller holds the lock."""
        while not self._closed:
            try:
                cache = self._released.popleft()
            except IndexError:
                return
            idle = [c for c in self._idle if not cache.replaces(c)]
            room = MAX_BYTES
            self._idle = [cache]
            for other in reversed(idle[-(MAX_CACHES - 1) :]):
                room -= other.nbytes
                if room < 0:
                    break
                self._idle.insert(0, other)

    def clear(self) -> None:
        """Drop all idle caches."""
        with self._lock:
            self._released.clear()
            self._idle = []

    def close(self) -> None:
        """Drop all idle caches, and those that calls release later."""
        self._closed = True
        self.clear()

    @property
    def nbytes(self) -> int:
        """Bytes of all caches, idle and in use."""
        with self._lock:
            self._merge_released()
            return sum(cache.nbytes for cache in self._all)


def ring_blocks(window: int, layout: KvLayout) -> int:
    """Blocks of the ring of a layer with a window, if the context is long enough for one."""
    return layout.blocks(window + SPARE)


def _cut_runs(runs: Sequence[tuple[int, tuple[int, ...]]], count: int) -> list[tuple[int, tuple[int, ...]]]:
    """The runs (end, RoPE frequencies) of the first `count` tokens."""
    begins = [0, *(end for end, _ in runs)]
    return [(min(end, count), rope) for begin, (end, rope) in zip(begins, runs, strict=False) if begin < count]


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Merge consecutive pairs (from, to) of pages into runs (from, to, count)."""
    first = 0
    for i in range(1, len(pairs) + 1):
        begin, to = pairs[first]
        if i == len(pairs) or pairs[i] != (begin + i - first, to + i - first):
            yield begin, to, i - first
            first = i


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """Length of the common prefix of two sequences."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])

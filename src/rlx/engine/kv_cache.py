"""KV caches: memory that the runtime owns and kernels write in place, and the store of those that calls have left.

Keys and values are in pools of pages (see `KvLayout`), one of each per layer; layers with the same window share a table
`[batch, blocks]` of the pages of each sequence. Rows with a common prefix share its pages until one of them writes.
Capacity ends at the model's context; that of a layer with a window ends at the window and `SPARE` more, where new
positions take the place of old ones. Pools reserve address space for all of it where the device can, and take memory
page by page as positions are written; elsewhere they grow by doubling, which copies them. Recurrent states
(`[batch, ...]`) have one size.

A cache knows which tokens it holds, so that a prompt which begins with the same ones can go on from there: same bits,
less work. With rings it cannot go back further than about `SPARE` tokens, and with recurrent states not at all; a
prompt that shares less is read from its beginning. States of the delta rule are the same but for rounding: it adds up
tokens of a call that belong together, and those depend on where the call begins. Where RoPE depends on the length of a
sequence, a prompt goes on only from keys that turned by the frequencies of its length.
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
KEPT = 4  # caches that wait for the next prompt
KEPT_BYTES = 512 << 20  # of all but the last one
WORTH_COPYING = 32  # tokens; below it, reading them again costs about as much
SPARE = 512  # positions of a ring beyond its window: so many tokens a call may have, and a prompt may go back


class KvCache:
    """Keys, values and recurrent states of some sequences, and the tokens they came from."""

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
        self._rings = {window: self._most(window) * spec.layout.page for window in self.windows.values() if window}
        self._reserved = self._reserve_pools()
        # of each row: up to which token keys turned by which frequencies, where RoPE depends on length
        self._turned: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in range(batch)]
        self._min_len = [0] * batch  # tokens of a row that have to stay: what came before them may be overwritten
        self._states = {name: (batch, *shape) for name, shape in spec.states}
        require("recurrent states", sum(map(math.prod, self._states.values())) * 4, hint="a smaller batch")
        self.buffers |= {name: memory.zeros(shape, np.dtype(np.float32)) for name, shape in self._states.items()}
        self.reserve(1)

    def reserve(self, tokens: int) -> None:
        """Room for `tokens` positions in every sequence; what is there stays where it is, or is copied.

        Where the device can reserve memory, pools have room for the whole context from the start.
        """
        needed = self.spec.layout.blocks(tokens)
        if needed <= self.blocks:
            return
        blocks = min(max(needed, 2 * self.blocks, 4), self.max_blocks)
        sizes = {window: min(blocks, self._most(window)) for window in self._tables}
        size = sum(self.batch * sizes[window] * self._page_bytes(window) for window in self._tables)
        require("KV cache", size, hint="a shorter context, a smaller batch, or cache='f16' or 'q8_0'")
        for window, table in self._tables.items():
            table.grow(sizes[window], self._most(window) if self._reserved else sizes[window])
        if not self._reserved:
            for name, shape in self._pool_shapes(sizes):
                self._grow(name, shape)
        self.blocks = blocks

    def _reserve_pools(self) -> bool:
        """Reserve memory for everything that the pools may ever hold, if the device can."""
        kind = dtype(self.spec.dtype).numpy
        for name, shape in self._pool_shapes({window: self._most(window) for window in self._tables}):
            pool = self._memory.reserve(shape, kind)
            if pool is None:
                self.buffers.clear()
                return False
            self.buffers[name] = pool
        return True

    def _pool_shapes(self, blocks: Mapping[int, int]) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names of pools and their shapes in memory, for so many blocks per sequence of each window."""
        packed = dtype(self.spec.dtype).block
        for i, window in self.windows.items():
            for of in KINDS:
                *lead, last = concrete(self.spec.pool_shape(of, self.batch * blocks[window]), {})
                yield f"{of}.{i}", (*lead, last // packed)

    def _page_bytes(self, window: int) -> int:
        """Bytes of a page of keys and one of values in all layers of a window."""
        kind, layers = dtype(self.spec.dtype), sum(own == window for own in self.windows.values())
        numbers = self.spec.kv_heads * self.spec.head_dim * self.spec.layout.page
        return layers * len(KINDS) * numbers // kind.block * kind.size

    def _most(self, window: int) -> int:
        """Blocks that a layer with a window, or without one (0), has at most."""
        return min(ring_blocks(window, self.spec.layout), self.max_blocks) if window else self.max_blocks

    def _grow(self, name: str, shape: tuple[int, ...]) -> None:
        """More pages; those that are there keep their numbers."""
        old = self.buffers.get(name)
        if old is not None and old.shape == shape:
            return
        new = self._memory.zeros(shape, dtype(self.spec.dtype).numpy)
        if old is not None:
            self._memory.copy(old, self._some_pages(new, name, 0, self._page_count(old, name)))
        self.buffers[name] = new

    def _page_count(self, pool: Any, name: str) -> int:
        count: int = pool.shape[self._page_axis(name)]
        return count

    def _page_axis(self, name: str) -> int:
        return self.spec.axes(name.partition(".")[0]).index("p")

    def _some_pages(self, pool: Any, name: str, begin: int, end: int) -> Any:
        """A view of consecutive pages of a pool."""
        return self._memory.part(pool, *[slice(None)] * self._page_axis(name), slice(begin, end))

    def _copy_pages(self, window: int, pairs: Sequence[tuple[int, int]], source: KvCache) -> None:
        """Copy pages (from, to) of all layers of a window."""
        for begin, to, count in _runs(pairs):
            for i in (i for i, own in self.windows.items() if own == window):
                for name in (f"{of}.{i}" for of in KINDS):
                    pages = self._some_pages(source.buffers[name], name, begin, begin + count)
                    self._memory.copy(pages, self._some_pages(self.buffers[name], name, to, to + count))

    def prepare_write(self, row: int, start: int, end: int, length: int | None = None) -> None:
        """Positions `start` .. `end` of a row are about to be written; what rings hold in their places is gone.

        `length` is that of the sequence by which they turn: `end`, unless more of the prompt follows.
        """
        if start == end:
            return
        if self.spec.lengths:
            self._turn(row, start, end, self.spec.rope_of_length(end if length is None else length))
        assert not self._states or start in (0, len(self.tokens[row])), "a recurrent state cannot go back"
        if start == 0:
            self._min_len[row] = 0
            for name in self._states:
                self._memory.clear(self._memory.part(self.buffers[name], row))
        for window, capacity in self._rings.items():
            if end > capacity:
                self._min_len[row] = max(self._min_len[row], end - capacity + window - 1)
        self._own_pages(row, start, end)

    def _own_pages(self, row: int, start: int, end: int) -> None:
        """Pages of its own for positions of a row that are about to be written."""
        page = self.spec.layout.page
        for window, table in self._tables.items():
            last = -(-end // page)
            for block in range(max(start // page, last - table.blocks), last):
                moved = table.own(row, block % table.blocks)
                if moved is not None and (window or block * page < start):
                    self._copy_pages(window, [moved], self)

    def _turn(self, row: int, start: int, end: int, turned: tuple[int, ...]) -> None:
        runs = self._turned[row]
        if runs and runs[-1][0] > start:
            runs = self._turned[row] = _cut(runs, start)
        if runs and runs[-1][1] == turned:
            runs.pop()
        runs.append((end, turned))

    def shared(self, row: int, tokens: Sequence[int]) -> int:
        """How many tokens of a prompt a row can go on from, its last one excepted."""
        count = self._reach(self.tokens[row][: self._turned_for(row, len(tokens))], tokens)
        return count if count >= self._min_len[row] else 0

    def _turned_for(self, row: int, length: int) -> int | None:
        """How many tokens of a row have the keys of a sequence of this length; None: all of them."""
        if not self.spec.lengths:
            return None
        wanted, count = self.spec.rope_of_length(length), 0
        for end, turned in self._turned[row]:
            if turned != wanted:
                break
            count = end
        return count

    def _reach(self, held: Sequence[int], tokens: Sequence[int]) -> int:
        """How many tokens of a prompt a row that holds some can go on from. A recurrent state has all of them in it."""
        count = min(_common(held, tokens), len(tokens) - 1)
        return 0 if self._states and count < len(held) else count

    def interrupted(self, first: int, end: int) -> None:
        """A call has not come to its end: recurrent states of these rows may be of any token."""
        if self._states:
            for row in self.tokens[first:end]:
                row.clear()

    def rows(self, first: int, end: int) -> dict[str, Any]:
        """The memory of some neighbouring sequences, as a decoder takes it: pools, their pages, recurrent states."""
        part = self._memory.part
        states = {name: part(self.buffers[name], slice(first, end)) for name in self._states}
        tables = {table_name(window): table.numbers[first:end] for window, table in self._tables.items()}
        return self.buffers | states | tables

    def copy_row(self, row: int, source: KvCache, source_row: int, count: int) -> None:
        """Take over the first `count` tokens of a sequence of `source`."""
        self.reserve(count)
        end = self.spec.layout.blocks(count)
        for window, table in self._tables.items():
            blocks = range(max(end - self._most(window), 0), end)
            if source is self:
                table.share(row, source_row, {block % table.blocks for block in blocks})
                continue
            table.release(row)
            pairs, old = [], source._tables[window]
            for block in blocks:
                table.own(row, block % table.blocks)
                pairs.append((old.page(source_row, block % old.blocks), table.page(row, block % table.blocks)))
            self._copy_pages(window, pairs, source)
        for name in self._states:
            assert count == len(source.tokens[source_row]), "a recurrent state has all tokens in it"
            part = self._memory.part
            self._memory.copy(part(source.buffers[name], source_row), part(self.buffers[name], row))
        self.tokens[row] = source.tokens[source_row][:count]
        self._min_len[row] = source._min_len[source_row]
        self._turned[row] = _cut(source._turned[source_row], count)

    def best_row(self, tokens: Sequence[int]) -> tuple[int, int]:
        """The row that shares most with a prompt, and how much."""
        shared = [self.shared(row, tokens) for row in range(self.batch)]
        best = max(range(self.batch), key=shared.__getitem__)
        return best, shared[best]

    def worth_waiting(self, tokens: Sequence[int], unread: Sequence[Sequence[int]]) -> bool:
        """Whether a prompt would find much more in this cache once the `unread` ones are in it."""
        same_rope = [p for p in unread if self.spec.rope_of_length(len(p)) == self.spec.rope_of_length(len(tokens))]
        later = max((self._reach(prompt, tokens) for prompt in same_rope), default=0)
        return later >= self.best_row(tokens)[1] + WORTH_COPYING

    def replaces(self, other: KvCache) -> bool:
        """Whether whoever could go on from another cache of one sequence can as well go on from this one."""
        mine, theirs = self.tokens[0], other.tokens[0]
        if _cut(self._turned[0], len(theirs)) != other._turned[0]:
            return False
        return mine == theirs if self._states else mine[: len(theirs)] == theirs

    @property
    def nbytes(self) -> int:
        """Bytes of memory that it takes: of reserved pools, the pages that have been written."""
        if not self._reserved:
            return sum(buffer.nbytes for buffer in self.buffers.values())
        touched = sum(table.touched * self._page_bytes(window) for window, table in self._tables.items())
        states: int = sum(self.buffers[name].nbytes for name in self._states)
        return touched + states


class CacheStore:
    """Caches of single sequences. A call acquires one for itself, and releases it when it ends.

    That may be in the garbage collector, at any place of any thread, and so also where this thread has the lock.
    Hence `release` never waits for it: it leaves the cache where whoever has the lock next puts it in order.
    """

    def __init__(self, spec: KvCacheSpec, context: int, memory: Allocator = HOST) -> None:
        self.spec = spec
        self.context = context
        self.memory = memory
        self._given: deque[KvCache] = deque()  # given back, not yet in order
        self._kept: list[KvCache] = []  # the last one given back is last
        self._closed = False
        self._made: weakref.WeakSet[KvCache] = weakref.WeakSet()
        self._lock = Lock()

    def new(self, batch: int) -> KvCache:
        """An empty cache, known to the count of bytes."""
        cache = KvCache(self.spec, batch, self.context, self.memory)
        with self._lock:
            self._made.add(cache)
        return cache

    def acquire(self, tokens: Sequence[int]) -> KvCache:
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
            self.release(found)
        return cache

    def restore_prefix(self, cache: KvCache, row: int, tokens: Sequence[int]) -> int:
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
            self.release(found)
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

    def release(self, cache: KvCache) -> None:
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

    def release_rows(self, batch: KvCache) -> None:
        """Keep copies of the longest rows of a batch, without the memory of the others."""
        for row in sorted(range(batch.batch), key=lambda r: len(batch.tokens[r]))[-KEPT:]:
            if batch.tokens[row]:
                cache = self.new(1)
                cache.copy_row(0, batch, row, len(batch.tokens[row]))
                self.release(cache)

    def _sort_in(self) -> None:
        """Put caches that were given back in order; the lock is held."""
        while not self._closed:
            try:
                cache = self._given.popleft()
            except IndexError:
                return
            kept = [c for c in self._kept if not cache.replaces(c)]
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


def ring_blocks(window: int, layout: KvLayout) -> int:
    """Blocks of the ring of a layer with a window, where the context is long enough for one."""
    return layout.blocks(window + SPARE)


def _cut(runs: Sequence[tuple[int, tuple[int, ...]]], count: int) -> list[tuple[int, tuple[int, ...]]]:
    """Runs of tokens, each by its end, of the first `count` tokens."""
    begins = [0, *(end for end, _ in runs)]
    return [(min(end, count), turned) for begin, (end, turned) in zip(begins, runs, strict=False) if begin < count]


def _runs(pairs: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int, int]]:
    """Pairs (from, to) of pages as runs (from, to, count) of neighbours."""
    first = 0
    for i in range(1, len(pairs) + 1):
        begin, to = pairs[first]
        if i == len(pairs) or pairs[i] != (begin + i - first, to + i - first):
            yield begin, to, i - first
            first = i


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many elements two sequences share at the beginning."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size
    return next(i for i in range(size) if a[i] != b[i])

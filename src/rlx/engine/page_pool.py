"""The pool of pages of a model: memory for keys and values, shared by running sequences and the prefix cache.

Keys and values are in pools of pages (see `KvLayout`), one of each per layer; layers with the same window share page
numbers. Pools reserve address space if the device can, and take memory page by page as positions are written. Without a
limit they grow by doubling, which copies the pages in use while no call runs. A page has one user per sequence that
holds it and one if the prefix cache does; without users it is free.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any

from rlx.backends.base import HOST, Allocator
from rlx.dtypes import dtype
from rlx.engine.page_table import Pages
from rlx.engine.prefix_tree import Key, Node, PrefixTree, State
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import Lock
from rlx.free_memory import fits, require
from rlx.kv_layout import KvLayout
from rlx.runtime.kv_spec import KvCacheSpec
from rlx.types import concrete

if TYPE_CHECKING:
    from rlx.engine.kv_cache import KvCache

KINDS = ("keys", "values")
MAX_BYTES = 512 << 20  # of the prefix cache, unless the pool has a limit
SPARE = 512  # positions of a ring beyond its window: the maximum tokens per call
FEW_PAGES = 4  # at the beginning, where memory is scarce
FIRST_SHARE = 32  # the first pages, for two sequences, take at most 1/32 of the free memory
MAX_NUMBERS = 1 << 30  # of a pool: kernels address no more
SMALLER = "a shorter context, a smaller batch, or cache='f16' or 'q8_0'"
PAUSE = 0.0002  # seconds between looks at whether calls run
NOTHING: Mapping[int, State] = {}


class PoolFull(Exception):
    """No page is free, and none in the prefix cache can be evicted."""


@dataclass(frozen=True, slots=True)
class Retired:
    """What a sequence held when it ended: its pages by window, and what to add to the prefix cache."""

    pages: Mapping[int, Sequence[int]]
    key: Key | None = None  # None: nothing
    tokens: Sequence[int] = ()
    blocks: Mapping[int, Mapping[int, int]] = field(default_factory=dict)  # pages by window and block
    states: Mapping[int, State] = field(default_factory=dict)


class PagePool:
    """Pages for sequences of one model and its prefix cache. Thread-safe.

    `limit` bounds the bytes of all pages; without one there is room for as much as there is memory. The garbage
    collector may end a sequence anywhere, even in a thread that holds the lock, so `retire` never waits: it appends to
    a queue that the next holder of the lock empties.
    """

    def __init__(self, spec: KvCacheSpec, context: int, memory: Allocator = HOST, limit: int | None = None) -> None:
        self.spec = spec
        self.memory = memory
        self.limit = limit
        self.windows = {i: window for i in range(spec.layers) if (window := spec.window(i)) is not None}
        self.pages = {window: Pages(self._page_bytes(window)) for window in sorted(set(self.windows.values()))}
        self.context = context
        self.max_blocks = spec.layout.blocks(context)
        self.tree = PrefixTree(spec.layout.page, self._share, self._release, self._node_bytes)
        self.buffers: dict[str, Any] = {}  # pools by name, allocated with the first page
        self.version = 0  # changes with the buffers
        self._reserved = False
        self._sequences = 1  # that the first allocation of address space is for
        self._capacity: dict[int, int] = {}  # pages by window
        self._retired: deque[Retired] = deque()
        self._closed = False
        self._caches: weakref.WeakSet[KvCache] = weakref.WeakSet()
        self._lock = Lock()
        self._calls: set[tuple[int, int]] = set()  # process and thread of each call that runs
        self._moving = 0  # the process in which pools move, or 0; a forked child ignores its parent's calls and moves

    def __repr__(self) -> str:
        limit = f"prefix cache up to {MAX_BYTES >> 20}" if self.limit is None else f"limit {self.limit / 2**20:.1f}"
        used, allocated = self.used_bytes / 2**20, self.nbytes / 2**20
        return f"<page pool: {used:.1f} MiB in use, {allocated:.1f} MiB allocated, {limit} MiB>"

    # -- sizes --
    def _page_bytes(self, window: int) -> int:
        """Bytes of one page of keys and values in all layers of a window."""
        kind, layers = dtype(self.spec.dtype), sum(own == window for own in self.windows.values())
        numbers = self.spec.kv_heads * self.spec.head_dim * self.spec.layout.page
        return layers * len(KINDS) * numbers // kind.block * kind.size

    def _node_bytes(self, node: Node) -> int:
        pages = sum(self.pages[window].page_bytes for window in node.pages)
        return pages + node.state_bytes

    def table_blocks(self, window: int) -> int:
        """Maximum blocks of a sequence in a layer with a window, or without one (0)."""
        return min(ring_blocks(window, self.spec.layout), self.max_blocks) if window else self.max_blocks

    def bytes_for(self, tokens: int) -> int:
        """Bytes of the pages of a sequence of this length."""
        blocks = self.spec.layout.blocks(tokens)
        return sum(min(blocks, self.table_blocks(w)) * pages.page_bytes for w, pages in self.pages.items())

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that there are pages for, with one to spare for a copy."""
        if self.limit is None or not self.pages:
            return self.context
        page, limit = self.spec.layout.page, self.limit - self.bytes_for(1)
        blocks = next((n for n in range(self.max_blocks, 0, -1) if self.bytes_for(n * page) <= limit), 0)
        return min(self.context, blocks * page)

    def expect(self, sequences: int) -> None:
        """Reserve address space for so many sequences of the longest length, so that growing copies no pages."""
        self._sequences = max(self._sequences, sequences)

    @property
    def used_bytes(self) -> int:
        """Bytes of pages in use, by sequences or the prefix cache."""
        return sum(pages.used * pages.page_bytes for pages in self.pages.values())

    @property
    def nbytes(self) -> int:
        """Allocated bytes; reserved pools count the pages that have been written."""
        with self._lock:
            self._empty_queue()
            states: int = sum(cache.state_bytes for cache in self._caches) + self.tree.state_bytes
            if not self._reserved:
                return states + sum(int(buffer.nbytes) for buffer in self.buffers.values())
            return states + sum(len(pages.users) * pages.page_bytes for pages in self.pages.values())

    # -- caches and calls --
    def new(self, rows: int) -> KvCache:
        """An empty cache for some sequences."""
        from rlx.engine.kv_cache import KvCache

        cache = KvCache(self, rows)
        with self._lock:
            self._caches.add(cache)
        return cache

    def calling(self) -> Calling:
        """Held while a call runs: pools stay where they are."""
        return Calling(self)

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """Held while pools move: no call runs."""
        self._moving = process = os.getpid()
        try:
            while any(pid == process for pid, _ in list(self._calls)):
                time.sleep(PAUSE)
            yield
        finally:
            self._moving = 0

    @contextlib.contextmanager
    def changing(self) -> Iterator[None]:
        """Held while pages are taken or shared; not by a thread that is `calling`."""
        with self._lock:
            self._empty_queue()
            yield

    # -- pages, under `changing` --
    def take(self, window: int) -> int:
        """A free page; evicts from the prefix cache if necessary."""
        pages = self.pages[window]
        while self.limit is not None and self.used_bytes + pages.page_bytes > self.limit:
            if not self.tree.evict():
                raise PoolFull
        while pages.next_page() >= self._capacity.get(window, 0):
            self._grow(window)
        return pages.take()

    def _share(self, window: int, page: int) -> int:
        return self.pages[window].share(page)

    def _release(self, window: int, page: int) -> None:
        self.pages[window].release(page)

    def copy(self, window: int, source: int, target: int) -> None:
        """Copy a page of all layers of a window."""
        for i in (i for i, own in self.windows.items() if own == window):
            for name in (f"{kind}.{i}" for kind in KINDS):
                self.memory.copy(self._part(name, source, source + 1), self._part(name, target, target + 1))

    def _part(self, name: str, begin: int, end: int, pool: Any = None) -> Any:
        """A view of consecutive pages of a pool."""
        axis = self.spec.axes(name.partition(".")[0]).index("p")
        return self.memory.part(self.buffers[name] if pool is None else pool, *[slice(None)] * axis, slice(begin, end))

    def _grow(self, window: int) -> None:
        """Make room for more pages: for the limit at once, otherwise for one sequence and then twice as many."""
        size, numbers = self.pages[window].page_bytes, self.spec.kv_heads * self.spec.head_dim * self.spec.layout.page
        most = MAX_NUMBERS // max(numbers, 1) if self.limit is None else self.limit // max(size, 1)
        old = self._capacity.get(window, 0)
        used = min(len(self.pages[window].users), old)
        count = most if self.limit is not None else min(max(2 * old, self._first(window, self._sequences)), most)
        if old and not fits(count * size):
            count = min(old + old // 4 + 1, most)
        if count <= old:
            raise PoolFull
        if old:  # both pools exist while pages are copied
            require("KV cache", count * size, hint=SMALLER)
        kind = dtype(self.spec.dtype).numpy
        pools = {name: self.memory.reserve(shape, kind) for name, shape in self._shapes(window, count)}
        self._reserved = all(pool is not None for pool in pools.values())
        if not self._reserved:  # then memory counts, and there is as much as there must be
            count = count if old or self.limit is not None else min(count, self._first(window, 1))
            pools = {name: self.memory.zeros(shape, kind) for name, shape in self._shapes(window, count)}
        with self._still():
            for name, pool in pools.items() if used else ():
                self.memory.copy(self._part(name, 0, used), self._part(name, 0, used, pool))
            self.buffers = {**self.buffers, **pools}
            self._capacity[window] = count
            self.version += 1

    def _first(self, window: int, sequences: int) -> int:
        """Pages at the beginning: address space for all sequences, or memory for two if that is little of it.

        A device that replays recorded calls records them again when pools move.
        """
        blocks = self.table_blocks(window)
        if self.memory.is_host:
            return sequences * blocks
        pages, free = 2 * blocks, self.memory.free_bytes()
        return FEW_PAGES if free is None or FIRST_SHARE * pages * self.pages[window].page_bytes > free else pages

    def _shapes(self, window: int, count: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """Names and storage shapes of the pools of a window, with this number of pages."""
        block_size = dtype(self.spec.dtype).block
        for i in (i for i, own in self.windows.items() if own == window):
            for kind in KINDS:
                *lead, last = concrete(self.spec.pool_shape(kind, count), {})
                yield f"{kind}.{i}", (*lead, last // block_size)

    # -- the prefix cache --
    def find(self, key: Key, tokens: Sequence[int]) -> tuple[list[Node], int]:
        """Pages of the longest beginning of `tokens` from which a sequence can go on; under `changing`.

        A ring must have the pages of its window, a recurrent state a checkpoint.
        """
        path, count = self.tree.match(key, tokens)
        if self.spec.states:
            known = sorted((at for node in path for at in node.states if at <= count), reverse=True)
            count = next((at for at in known if self._rings_reach(path, at) == at), 0)
        else:
            count = self._rings_reach(path, count)
        path = path[: self.spec.layout.blocks(count)]
        if path:
            self.tree.touch(path[-1])
        return path, count

    def _rings_reach(self, path: Sequence[Node], count: int) -> int:
        """The longest beginning, up to `count` tokens, whose windows are in pages of the nodes."""
        page, before = self.spec.layout.page, -1
        while count and count != before:
            before = count
            for window in self.pages:
                first = max(count - window + 1, 0) // page if window else 0
                for block in reversed(range(first, self.spec.layout.blocks(count))):
                    if window not in path[block].pages:
                        count = min(count, block * page)
                        break
        return count

    def publish(self, key: Key, tokens: Sequence[int], pages: Mapping[int, Mapping[int, int]],
                states: Mapping[int, State] = NOTHING) -> None:  # fmt: skip
        """Add a sequence to the prefix cache, then evict older sequences down to the budget; under `changing`."""
        if self._closed:
            return
        self.tree.insert(key, tokens, pages, states)
        budget, newest = MAX_BYTES if self.limit is None else self.limit, self.spec.layout.blocks(len(tokens))
        while self.tree.nbytes > budget and len(self.tree) > newest:
            self.tree.evict()

    def retire(self, retired: Retired) -> None:
        """Release the pages of a sequence, and add it to the prefix cache. Never waits."""
        self._retired.append(retired)
        if self._lock.acquire(blocking=False):
            try:
                self._empty_queue()
            finally:
                self._lock.release()

    def _empty_queue(self) -> None:
        """Release what was retired; the caller holds the lock."""
        while True:
            try:
                retired = self._retired.popleft()
            except IndexError:
                break
            if retired.key is not None:
                self.publish(retired.key, retired.tokens, retired.blocks, retired.states)
            for window, pages in retired.pages.items():
                for page in pages:
                    self._release(window, page)
        if self._closed:
            self._drop_memory()

    def _drop_memory(self) -> None:
        """Free all memory if no page is in use."""
        if self.buffers and not any(pages.used for pages in self.pages.values()):
            self.buffers, self._capacity, self._reserved = {}, {}, False
            self.pages = {window: Pages(pages.page_bytes) for window, pages in self.pages.items()}
            self.version += 1

    def clear(self) -> None:
        """Empty the prefix cache."""
        with self._lock:
            self._empty_queue()
            self.tree.clear()
            self._drop_memory()

    def close(self) -> None:
        """Empty the prefix cache for good; sequences that still run keep their pages until they end."""
        self._closed = True
        self.clear()


class Calling:
    """The context of a call. Every step enters one: a class is quicker than a generator."""

    __slots__ = ("_me", "_pool")

    def __init__(self, pool: PagePool) -> None:
        self._pool, self._me = pool, (os.getpid(), threading.get_ident())

    def __enter__(self) -> None:
        pool, me = self._pool, self._me
        while True:
            pool._calls.add(me)
            if pool._moving != me[0]:
                return
            pool._calls.discard(me)
            time.sleep(PAUSE)

    def __exit__(self, *_: object) -> None:
        self._pool._calls.discard(self._me)


def ring_blocks(window: int, layout: KvLayout) -> int:
    """Blocks of the ring of a layer with a window, if the context is long enough for one."""
    return layout.blocks(window + SPARE)

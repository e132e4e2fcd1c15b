"""Caches: growth, rows, and the store that keeps what calls have left."""

from __future__ import annotations

import mmap
import threading
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from limits import LONGEST_S

from rlx.backends.base import HOST, Allocator, HostAllocator
from rlx.engine import kv_cache
from rlx.engine.kv_cache import CacheStore, KvCache
from rlx.engine.page_table import PageTable
from rlx.flow.flow import KvCacheSpec
from rlx.target import KvLayout

LAYOUT = KvLayout(keys="hpds", values="hpsd")
SPEC = KvCacheSpec(layers=2, kv_heads=3, head_dim=8, layout=LAYOUT)
PAGE_BYTES = 2 * 2 * 3 * 8 * 64 * 4  # of keys and values in both layers


def filled(store: CacheStore, tokens: list[int]) -> KvCache:
    """A cache that says it holds these tokens; its numbers say which position they stand for."""
    cache = store.new(1)
    cache.reserve(len(tokens))
    cache.prepare_write(0, 0, len(tokens))
    cache.tokens[0] = list(tokens)
    write(cache, 0, range(len(tokens)))
    return cache


def write(cache: KvCache, row: int, positions: Iterable[int], shift: int = 0) -> None:
    """What a kernel would: the position, plus `shift`, as every number of a position."""
    for p in positions:
        page = cache.rows(row, row + 1)["table"][0, p // 64]
        cache.buffers["keys.1"][:, page, :, p % 64] = p + shift
        cache.buffers["values.0"][:, page, p % 64] = p + shift


def read(cache: KvCache, row: int, count: int) -> list[int]:
    """The numbers that `write` has left at the first positions of a row."""
    table = cache.rows(row, row + 1)["table"][0]
    keys = [cache.buffers["keys.1"][:, table[p // 64], :, p % 64] for p in range(count)]
    values = [cache.buffers["values.0"][:, table[p // 64], p % 64] for p in range(count)]
    assert all((k == k[0, 0]).all() and (v == k[0, 0]).all() for k, v in zip(keys, values, strict=True))
    return [int(v[0, 0]) for v in values]


class Unreserved(HostAllocator):
    """Host memory of a system that reserves no address space."""

    def reserve(self, shape: tuple[int, ...], dtype: Any) -> None:
        return None


@pytest.mark.parametrize("memory", (HOST, Unreserved()))
def test_capacity_doubles_up_to_the_context_and_keeps_what_is_there(memory: Allocator) -> None:
    cache = KvCache(SPEC, 2, 1000, memory)
    assert cache.blocks == 4
    cache.prepare_write(0, 0, 256)
    cache.prepare_write(1, 0, 200)
    write(cache, 0, range(256))
    write(cache, 1, range(200), shift=1000)
    sizes, before = [], cache.rows(0, 2)["table"].copy()
    for tokens in (256, 257, 600, 1000):
        cache.reserve(tokens)
        sizes.append(cache.blocks)
    assert sizes == [4, 8, 16, 16]
    assert cache.buffers["keys.0"].shape == (3, 32, 8, 64) and cache.buffers["values.0"].shape == (3, 32, 64, 8)
    assert read(cache, 0, 256) == list(range(256)) and read(cache, 1, 200) == list(range(1000, 1200))
    assert (cache.rows(0, 2)["table"][:, :4] == before).all(), "pages keep their numbers"


def test_a_reserved_cache_grows_in_place_and_counts_what_was_written() -> None:
    """The address space of a million positions takes no memory: more than this machine has."""
    spec = KvCacheSpec(layers=16, kv_heads=8, head_dim=128, layout=LAYOUT)
    cache = KvCache(spec, 4, 1 << 20)
    pools, page = dict(cache.buffers), 16 * 2 * 8 * 128 * 64 * 4
    assert sum(pool.nbytes for pool in pools.values()) == 4 * page << 14 and cache.nbytes == 0
    resident = resident_bytes()
    for row, tokens in ((0, 1), (2, 65), (2, 130)):
        cache.reserve(tokens)
        cache.prepare_write(row, 0, tokens)
        for block in range(-(-tokens // 64)):
            for name, pool in pools.items():
                pool[:, cache.rows(row, row + 1)["table"][0, block]] = int(name[-1])
    assert cache.nbytes == 4 * page
    assert 4 * page <= resident_bytes() - resident < 5 * page
    assert all(cache.buffers[name] is pool for name, pool in pools.items())
    assert (np.diff(cache.rows(2, 3)["table"][0, :3]) == 1).all(), "a sequence is contiguous"


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[1]) * mmap.PAGESIZE


def test_rows_share_pages_until_one_of_them_writes() -> None:
    cache = KvCache(SPEC, 3, 1000)
    cache.prepare_write(0, 0, 200)
    write(cache, 0, range(200))
    cache.tokens[0] = list(range(200))
    for row in (1, 2):
        cache.copy_row(row, cache, 0, 100)
    tables = cache.rows(0, 3)["table"]
    assert (tables[1:, :2] == tables[0, :2]).all() and (tables[1:, 2:] == -1).all()
    cache.prepare_write(1, 100, 130)
    write(cache, 1, range(100, 130), shift=1000)
    assert tables[1, 0] == tables[0, 0] and tables[1, 1] not in tables[[0, 2], 1]
    assert read(cache, 0, 200) == list(range(200)) and read(cache, 2, 100) == list(range(100))
    assert read(cache, 1, 130) == [*range(100), *range(1100, 1130)]
    cache.prepare_write(0, 0, 70)  # another prompt in the first row
    write(cache, 0, range(70), shift=5000)
    assert read(cache, 2, 100) == list(range(100)) and read(cache, 1, 64) == list(range(64))


def test_a_ring_that_wraps_around_leaves_shared_pages_alone() -> None:
    spec = KvCacheSpec(1, 1, 8, windows=(64,), layout=LAYOUT)
    cache = KvCache(spec, 2, 4096)
    capacity = 64 * kv_cache.ring_blocks(64, spec.layout)
    cache.reserve(capacity)
    cache.prepare_write(0, 0, capacity)
    cache.tokens[0] = list(range(capacity))
    for p in range(capacity):
        cache.buffers["values.0"][:, cache.rows(0, 1)["table64"][0, p // 64], p % 64] = p
    cache.copy_row(1, cache, 0, capacity)
    before = cache.rows(0, 2)["table64"].copy()
    assert (before[0] == before[1]).all()
    cache.prepare_write(1, capacity, capacity + 3)
    after = cache.rows(0, 2)["table64"]
    assert after[1, 0] != after[0, 0] == before[0, 0] and (after[:, 1:] == before[:, 1:]).all()
    old, new = (cache.buffers["values.0"][:, page] for page in after[:, 0])
    assert (old == new).all() and new[0, 63, 0] == 63, "positions that the window still sees are there"


def test_pages_of_a_row_that_ends_are_used_again() -> None:
    table = PageTable(2)
    table.grow(3, 5)
    for block in range(3):
        assert table.make_private(0, block) is None and table.make_private(1, block) is None
    assert table.numbers.tolist() == [[0, 1, 2], [5, 6, 7]]
    table.release(0)
    table.share(0, 1, range(3))
    assert [table.make_private(0, block) for block in range(2)] == [(5, 0), (6, 1)]
    table.release(1)
    assert table.make_private(1, 2) is None and table.numbers[1, 2] == 2, "the other row still has page 7"
    assert table.touched == 6


def test_f16_takes_half() -> None:
    half, single = KvCache(KvCacheSpec(2, 3, 8, "f16"), 1, 100), KvCache(SPEC, 1, 100)
    for cache in (half, single):
        cache.prepare_write(0, 0, 100)
    assert 2 * half.nbytes == single.nbytes == 2 * 2 * 3 * 128 * 8 * 4


def test_a_small_context_is_not_exceeded() -> None:
    assert KvCache(SPEC, 1, 10).blocks == 1


def test_a_prompt_goes_on_from_the_cache_that_shares_most() -> None:
    store = CacheStore(SPEC, 1000)
    long = filled(store, list(range(100)))
    store.release(filled(store, [500, *range(60)]))
    store.release(long)
    cache = store.acquire([*range(90), 777, 778])
    assert cache is long and cache.tokens[0] == list(range(90))


def test_the_last_token_of_a_prompt_is_always_fed() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, list(range(100))))
    assert store.acquire(list(range(100))).tokens[0] == list(range(99))


def test_a_cache_belongs_to_one_call() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, list(range(100))))
    first, second = store.acquire(list(range(50, 0, -1))), store.acquire(list(range(100)))
    assert first is not second and first.tokens[0] == [] and len(second.tokens[0]) == 99
    assert store.acquire(list(range(100))).tokens[0] == []


def test_another_conversation_that_begins_alike_keeps_its_own() -> None:
    store = CacheStore(SPEC, 1000)
    old = filled(store, list(range(200)))
    store.release(old)
    cache = store.acquire([*range(70), 999, 998])
    assert cache is not old and cache.tokens[0] == list(range(70)) and len(old.tokens[0]) == 200
    assert read(cache, 0, 70) == list(range(70))
    assert store.acquire(list(range(201))) is old


def test_a_short_common_beginning_is_not_worth_a_copy() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, list(range(200))))
    assert store.acquire([0, 1, 2, 900]).tokens[0] == []


def test_only_a_few_are_kept() -> None:
    store = CacheStore(SPEC, 1000)
    for i in range(10):
        store.release(filled(store, [1000 + i] * 10))
    assert store.nbytes == kv_cache.MAX_CACHES * PAGE_BYTES
    assert store.acquire([1009] * 11).tokens[0] == [1009] * 10 and store.acquire([1005] * 11).tokens[0] == []


def test_kept_bytes_are_bounded_but_the_last_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "MAX_BYTES", PAGE_BYTES)
    store = CacheStore(SPEC, 1000)
    for i in range(5):
        store.release(filled(store, [i] * 10))
    assert store.nbytes == 2 * PAGE_BYTES
    monkeypatch.setattr(kv_cache, "MAX_BYTES", 0)
    store.release(filled(store, [9] * 10))
    assert store.nbytes == PAGE_BYTES and store.acquire([9] * 10).tokens[0] == [9] * 9


def test_a_cache_that_is_the_beginning_of_another_goes() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, [1, 2, 3]))
    store.release(filled(store, [1, 2, 3, 4]))
    assert store.nbytes == PAGE_BYTES


def test_rows_of_a_batch_are_filled_from_neighbours_and_from_the_store() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, list(range(100))))
    batch = store.new(3)
    assert store.restore_prefix(batch, 1, [*range(80), 5, 5]) == 80
    assert store.restore_prefix(batch, 2, [*range(50), 6, 6]) == 50
    assert store.restore_prefix(batch, 0, [9] * 50) == 0
    for row, count in ((1, 80), (2, 50)):
        assert read(batch, row, count) == list(range(count))
    assert batch.worth_waiting([*range(150)], [[*range(140)]]) and not batch.worth_waiting([*range(90)], [[*range(85)]])


def test_the_longest_rows_of_a_batch_are_kept_as_copies() -> None:
    store = CacheStore(SPEC, 1000)
    batch = store.new(8)
    rows = [[100 * row + i for i in range(10 * row)] for row in range(8)]
    for row, tokens in enumerate(rows):
        batch.copy_row(row, filled(store, tokens), 0, len(tokens))
    store.release_rows(batch)
    del batch
    assert store.nbytes == (1 + 1 + 1 + 2) * PAGE_BYTES
    cache = store.acquire([*rows[7], 5])
    assert cache.tokens[0] == rows[7]
    assert read(cache, 0, 70) == list(range(70))
    assert store.acquire([*rows[4], 5]).tokens[0] == rows[4] and store.acquire([*rows[3], 5]).tokens[0] == []


def test_clearing_gives_the_memory_back() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, [1, 2, 3]))
    store.clear()
    assert store.nbytes == 0


def test_giving_never_waits_for_the_lock() -> None:
    """The garbage collector may end a stream in a thread that has it."""
    store = CacheStore(SPEC, 1000)
    released = [filled(store, [i] * 10) for i in range(3)]
    giver = threading.Thread(target=lambda: [store.release(cache) for cache in released], daemon=True)
    with store._lock:
        giver.start()
        giver.join(LONGEST_S)
        assert not giver.is_alive()
    assert store.acquire([1] * 11) is released[1]


def test_a_closed_store_keeps_nothing() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, [1, 2, 3]))
    late = filled(store, [4, 5, 6])
    store.close()
    store.release(late)
    del late
    assert store.nbytes == 0 and store.acquire([4, 5, 6, 7]).tokens[0] == []

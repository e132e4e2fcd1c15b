"""Caches: growth, rows, and the store that keeps what calls have left."""

from __future__ import annotations

import threading

import pytest
from limits import LONGEST_S

from rlx.engine import kvcache
from rlx.engine.kvcache import CacheStore, KvCache
from rlx.flow.flow import KvCacheSpec

SPEC = KvCacheSpec(layers=2, kv_heads=3, head_dim=8)


def filled(store: CacheStore, tokens: list[int]) -> KvCache:
    """A cache that says it holds these tokens; its numbers say which position they stand for."""
    cache = store.new(1)
    cache.reserve(len(tokens))
    cache.tokens[0] = list(tokens)
    for p in range(len(tokens)):
        cache.buffers["keys.1"][0, :, p // 64, :, p % 64] = p
        cache.buffers["values.0"][0, :, p] = p
    return cache


def test_capacity_doubles_up_to_the_context_and_keeps_what_is_there() -> None:
    cache = KvCache(SPEC, 2, 1000)
    assert cache.blocks == 4
    cache.buffers["values.1"][:] = 7
    sizes = []
    for tokens in (256, 257, 600, 1000):
        cache.reserve(tokens)
        sizes.append(cache.blocks)
    assert sizes == [4, 8, 16, 16]
    assert cache.buffers["keys.0"].shape == (2, 3, 16, 8, 64) and cache.buffers["values.0"].shape == (2, 3, 1024, 8)
    assert (cache.buffers["values.1"][:, :, :256] == 7).all() and not cache.buffers["values.1"][:, :, 256:].any()


def test_f16_takes_half() -> None:
    half = KvCache(KvCacheSpec(2, 3, 8, "f16"), 1, 100)
    assert 2 * half.nbytes == KvCache(SPEC, 1, 100).nbytes == 2 * 2 * 3 * 128 * 8 * 4


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
    for p in range(70):
        assert (cache.buffers["keys.1"][0, :, p // 64, :, p % 64] == p).all()
        assert (cache.buffers["values.0"][0, :, p] == p).all()
    assert store.acquire(list(range(201))) is old


def test_a_short_common_beginning_is_not_worth_a_copy() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, list(range(200))))
    assert store.acquire([0, 1, 2, 900]).tokens[0] == []


def test_only_a_few_are_kept() -> None:
    store = CacheStore(SPEC, 1000)
    for i in range(10):
        store.release(filled(store, [1000 + i] * 10))
    one = KvCache(SPEC, 1, 1000).nbytes
    assert store.nbytes == kvcache.KEPT * one
    assert store.acquire([1009] * 11).tokens[0] == [1009] * 10 and store.acquire([1005] * 11).tokens[0] == []


def test_kept_bytes_are_bounded_but_the_last_one_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    one = KvCache(SPEC, 1, 1000).nbytes
    monkeypatch.setattr(kvcache, "KEPT_BYTES", one)
    store = CacheStore(SPEC, 1000)
    for i in range(5):
        store.release(filled(store, [i] * 10))
    assert store.nbytes == 2 * one
    monkeypatch.setattr(kvcache, "KEPT_BYTES", 0)
    store.release(filled(store, [9] * 10))
    assert store.nbytes == one and store.acquire([9] * 10).tokens[0] == [9] * 9


def test_a_cache_that_is_the_beginning_of_another_goes() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, [1, 2, 3]))
    store.release(filled(store, [1, 2, 3, 4]))
    assert store.nbytes == KvCache(SPEC, 1, 1000).nbytes


def test_rows_of_a_batch_are_filled_from_neighbours_and_from_the_store() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, list(range(100))))
    batch = store.new(3)
    assert store.restore_prefix(batch, 1, [*range(80), 5, 5]) == 80
    assert store.restore_prefix(batch, 2, [*range(50), 6, 6]) == 50
    assert store.restore_prefix(batch, 0, [9] * 50) == 0
    for row, count in ((1, 80), (2, 50)):
        assert [int(batch.buffers["values.0"][row, 0, p, 0]) for p in range(count)] == list(range(count))
    assert batch.worth_waiting([*range(150)], [[*range(140)]]) and not batch.worth_waiting([*range(90)], [[*range(85)]])


def test_the_longest_rows_of_a_batch_are_kept_as_copies() -> None:
    store = CacheStore(SPEC, 1000)
    batch = store.new(8)
    rows = [[100 * row + i for i in range(10 * row)] for row in range(8)]
    for row, tokens in enumerate(rows):
        batch.copy_row(row, filled(store, tokens), 0, len(tokens))
    store.release_rows(batch)
    del batch
    assert store.nbytes == kvcache.KEPT * KvCache(SPEC, 1, 1000).nbytes
    cache = store.acquire([*rows[7], 5])
    assert cache.tokens[0] == rows[7]
    assert [int(cache.buffers["keys.1"][0, 2, p // 64, 7, p % 64]) for p in range(70)] == list(range(70))
    assert store.acquire([*rows[4], 5]).tokens[0] == rows[4] and store.acquire([*rows[3], 5]).tokens[0] == []


def test_clearing_gives_the_memory_back() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, [1, 2, 3]))
    store.clear()
    assert store.nbytes == 0


def test_giving_never_waits_for_the_lock() -> None:
    """The garbage collector may end a stream in a thread that has it."""
    store = CacheStore(SPEC, 1000)
    given = [filled(store, [i] * 10) for i in range(3)]
    giver = threading.Thread(target=lambda: [store.release(cache) for cache in given], daemon=True)
    with store._lock:
        giver.start()
        giver.join(LONGEST_S)
        assert not giver.is_alive()
    assert store.acquire([1] * 11) is given[1]


def test_a_closed_store_keeps_nothing() -> None:
    store = CacheStore(SPEC, 1000)
    store.release(filled(store, [1, 2, 3]))
    late = filled(store, [4, 5, 6])
    store.close()
    store.release(late)
    del late
    assert store.nbytes == 0 and store.acquire([4, 5, 6, 7]).tokens[0] == []

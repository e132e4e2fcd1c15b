"""The pool of pages: memory, rows that share pages, and the prefix cache that keeps what sequences have left."""

from __future__ import annotations

import gc
import mmap
import threading
from collections.abc import Iterable
from typing import Any

import pytest
from limits import LONGEST_S

from rlx.backends.base import HOST, Allocator, HostAllocator
from rlx.engine import page_pool
from rlx.engine.kv_cache import KvCache
from rlx.engine.page_pool import PagePool, PoolFull
from rlx.kv_layout import KvLayout
from rlx.runtime.kv_spec import KvCacheSpec

LAYOUT = KvLayout(keys="hpds", values="hpsd")
SPEC = KvCacheSpec(layers=2, kv_heads=3, head_dim=8, layout=LAYOUT)
PAGE_BYTES = 2 * 2 * 3 * 8 * 64 * 4  # of keys and values in both layers
SPACE = ("space",)


def fill(cache: KvCache, row: int, tokens: list[int]) -> None:
    """Tokens of a row from where it ends; its numbers say which position they stand for."""
    start = len(cache.tokens[row])
    cache.reserve(len(tokens))
    cache.prepare_write(row, start, len(tokens))
    cache.tokens[row] = list(tokens)
    write(cache, row, range(start, len(tokens)))


def write(cache: KvCache, row: int, positions: Iterable[int], shift: int = 0) -> None:
    """What a kernel would: the position, plus `shift`, as every number of a position."""
    for p in positions:
        page = cache.rows(row, row + 1)["table"][0, p // 64]
        cache.pool.buffers["keys.1"][:, page, :, p % 64] = p + shift
        cache.pool.buffers["values.0"][:, page, p % 64] = p + shift


def read(cache: KvCache, row: int, count: int) -> list[int]:
    """The numbers that `write` has left at the first positions of a row."""
    table, pools = cache.rows(row, row + 1)["table"][0], cache.pool.buffers
    keys = [pools["keys.1"][:, table[p // 64], :, p % 64] for p in range(count)]
    values = [pools["values.0"][:, table[p // 64], p % 64] for p in range(count)]
    assert all((k == k[0, 0]).all() and (v == k[0, 0]).all() for k, v in zip(keys, values, strict=True))
    return [int(v[0, 0]) for v in values]


class Unreserved(HostAllocator):
    """Host memory of a system that reserves no address space."""

    def reserve(self, shape: tuple[int, ...], dtype: Any) -> None:
        return None


# -- memory -----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("memory", (HOST, Unreserved()))
def test_pools_grow_and_keep_what_is_there(memory: Allocator) -> None:
    pool = PagePool(SPEC, 1000, memory)
    cache = pool.new(2)
    assert cache.blocks == 4 and not pool.buffers and pool.nbytes == 0
    fill(cache, 0, list(range(256)))
    fill(cache, 1, list(range(200)))
    before, versions = cache.rows(0, 2)["table"].copy(), {pool.version}
    for count in (257, 600, 1000):
        fill(cache, 0, list(range(count)))
        versions.add(pool.version)
    assert cache.blocks == 16 and read(cache, 0, 1000) == list(range(1000)) and read(cache, 1, 200) == list(range(200))
    assert (cache.rows(0, 2)["table"][:, :4] == before).all(), "pages keep their numbers"
    assert len(versions) > 1, "they have moved"
    assert pool.used_bytes == (16 + 4) * PAGE_BYTES <= pool.nbytes <= 32 * PAGE_BYTES


def test_reserved_pools_take_memory_where_they_are_written() -> None:
    """The address space of a million positions takes no memory: more than this machine has."""
    spec = KvCacheSpec(layers=16, kv_heads=8, head_dim=128, layout=LAYOUT)
    pool, page = PagePool(spec, 1 << 20), 16 * 2 * 8 * 128 * 64 * 4
    cache = pool.new(4)
    cache.reserve(1)
    cache.prepare_write(0, 0, 1)
    pools = dict(pool.buffers)
    assert sum(each.nbytes for each in pools.values()) >= page << 14
    resident = resident_bytes()
    for row, tokens in ((0, 1), (2, 65), (2, 130)):
        cache.reserve(tokens)
        cache.prepare_write(row, 0, tokens)
        for block in range(-(-tokens // 64)):
            for name, each in pools.items():
                each[:, cache.rows(row, row + 1)["table"][0, block]] = int(name[-1])
    assert pool.nbytes == 4 * page
    assert 4 * page <= resident_bytes() - resident < 5 * page
    assert all(pool.buffers[name] is each for name, each in pools.items())


def resident_bytes() -> int:
    with open("/proc/self/statm", encoding="ascii") as sizes:
        return int(sizes.read().split()[1]) * mmap.PAGESIZE


def test_f16_takes_half() -> None:
    sizes = []
    for spec in (KvCacheSpec(2, 3, 8, "f16"), SPEC):
        pool = PagePool(spec, 100)
        cache = pool.new(1)
        cache.prepare_write(0, 0, 100)
        sizes.append(pool.nbytes)
    assert 2 * sizes[0] == sizes[1] == 2 * 2 * 3 * 128 * 8 * 4


def test_a_small_context_is_not_exceeded() -> None:
    assert PagePool(SPEC, 10).new(1).blocks == 1


def test_pages_of_a_cache_that_is_dropped_are_free() -> None:
    pool = PagePool(SPEC, 1000)
    cache = pool.new(2)
    fill(cache, 0, list(range(200)))
    assert pool.used_bytes == 4 * PAGE_BYTES
    del cache
    gc.collect()
    assert pool.nbytes == 4 * PAGE_BYTES and pool.used_bytes == 0
    pool.clear()
    assert pool.nbytes == 0


def test_a_limit_evicts_and_then_refuses() -> None:
    pool = PagePool(SPEC, 1000, limit=4 * PAGE_BYTES)
    cache = pool.new(2)
    fill(cache, 0, list(range(130)))
    cache.release(0, SPACE)
    fill(cache, 0, list(range(500, 628)))
    assert pool.used_bytes == 4 * PAGE_BYTES and len(pool.tree) == 2, "the last page of the first sequence is gone"
    fill(cache, 1, list(range(600, 664)))
    with pytest.raises(PoolFull):
        cache.prepare_write(1, 64, 200)
    assert pool.used_bytes == 4 * PAGE_BYTES and not len(pool.tree)


# -- rows -------------------------------------------------------------------------------------------------------------
def test_rows_share_pages_until_one_of_them_writes() -> None:
    pool = PagePool(SPEC, 1000)
    cache = pool.new(3)
    fill(cache, 0, list(range(200)))
    cache.publish(0, SPACE)
    assert [cache.restore(row, [*range(100), 7], SPACE) for row in (1, 2)] == [100, 100]
    tables = cache.rows(0, 3)["table"]
    assert (tables[1:, 0] == tables[0, 0]).all() and len(set(tables[:, 1])) == 3 and (tables[1:, 2:] == -1).all()
    cache.prepare_write(1, 100, 130)
    write(cache, 1, range(100, 130), shift=1000)
    assert read(cache, 0, 200) == list(range(200)) and read(cache, 2, 100) == list(range(100))
    assert read(cache, 1, 130) == [*range(100), *range(1100, 1130)]
    used = pool.used_bytes
    fill(cache, 0, list(range(210)))  # it goes on in its own last page, of which the prefix cache has the beginning
    assert pool.used_bytes == used and cache.restore(2, [*range(200), 7], SPACE) == 200
    cache.prepare_write(0, 0, 70)  # another prompt in the first row
    write(cache, 0, range(70), shift=5000)
    assert read(cache, 2, 200) == list(range(200)) and read(cache, 1, 64) == list(range(64))


def test_a_ring_that_wraps_around_leaves_shared_pages_alone() -> None:
    spec = KvCacheSpec(1, 1, 8, windows=(64,), layout=LAYOUT)
    pool = PagePool(spec, 4096)
    cache = pool.new(2)
    capacity = 64 * page_pool.ring_blocks(64, spec.layout)
    cache.reserve(capacity)
    cache.prepare_write(0, 0, capacity)
    cache.tokens[0] = list(range(capacity))
    for p in range(capacity):
        pool.buffers["values.0"][:, cache.rows(0, 1)["table64"][0, p // 64], p % 64] = p
    cache.publish(0, SPACE)
    assert cache.restore(1, list(range(capacity + 1)), SPACE) == capacity
    before = cache.rows(0, 2)["table64"].copy()
    assert (before[0] == before[1]).all()
    for row in (1, 0):  # also the row whose own page it is: the prefix cache has it
        cache.prepare_write(row, capacity, capacity + 3)
    after = cache.rows(0, 2)["table64"]
    assert len({after[0, 0], after[1, 0], before[0, 0]}) == 3 and (after[:, 1:] == before[:, 1:]).all()
    assert (pool.buffers["values.0"][0, before[0, 0], :, 0] == range(64)).all()


def test_swapped_rows_take_everything_along() -> None:
    pool = PagePool(KvCacheSpec(2, 3, 8, layout=LAYOUT, states=(("state.0", (2,)),)), 1000)
    cache = pool.new(3)
    for row, count in ((0, 64), (2, 130)):
        fill(cache, row, [row] * count)
        cache.rows(row, row + 1)["state.0"][...] = row + 1
    cache.swap(0, 2)
    assert [len(tokens) for tokens in cache.tokens] == [130, 0, 64]
    assert cache.rows(0, 3)["state.0"][:, 0].tolist() == [3, 0, 1]
    assert read(cache, 0, 130) == list(range(130)) and read(cache, 2, 64) == list(range(64))


# -- the prefix cache -------------------------------------------------------------------------------------------------
def test_a_prompt_goes_on_from_the_sequence_that_shares_most() -> None:
    pool = PagePool(SPEC, 1000)
    cache = pool.new(1)
    for tokens in (list(range(100)), [500, *range(60)], [*range(70), 5, 5]):
        cache.restore(0, tokens, SPACE)
        fill(cache, 0, tokens)
        cache.release(0, SPACE)
    for tokens, count in (([*range(90), 777, 778], 90), ([500, 0, 1, 9], 3), ([*range(70), 5, 6], 71), ([7, 8], 0)):
        assert cache.restore(0, tokens, SPACE) == count
        assert read(cache, 0, count) == list(range(count)) and cache.tokens[0] == tokens[:count]
    assert cache.restore(0, list(range(100)), SPACE) == 99, "the last token of a prompt always runs"
    assert cache.restore(0, list(range(100)), ("other",)) == 0


def test_cached_bytes_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_pool, "MAX_BYTES", 2 * PAGE_BYTES)
    pool = PagePool(SPEC, 1000)
    cache = pool.new(1)
    for i in range(5):
        fill(cache, 0, [i] * 10)
        cache.release(0, SPACE)
    assert pool.used_bytes == 2 * PAGE_BYTES
    assert [cache.restore(0, [i] * 11, SPACE) for i in range(5)] == [0, 0, 0, 10, 10]
    fill(cache, 0, [9] * 300)
    cache.release(0, SPACE)
    assert pool.used_bytes == 5 * PAGE_BYTES, "the newest sequence stays, however long it is"
    assert cache.restore(0, [9] * 301, SPACE) == 300 and cache.restore(0, [4] * 11, SPACE) == 0


def test_retiring_never_waits_for_the_lock() -> None:
    """The garbage collector may end a stream in a thread that has it."""
    pool = PagePool(SPEC, 1000)
    cache = pool.new(3)
    for row in range(3):
        fill(cache, row, [row] * 10)
    giver = threading.Thread(target=lambda: [cache.release(row, SPACE) for row in range(3)], daemon=True)
    with pool._lock:
        giver.start()
        giver.join(LONGEST_S)
        assert not giver.is_alive()
    assert cache.restore(0, [1] * 11, SPACE) == 10


def test_a_closed_pool_keeps_nothing() -> None:
    pool = PagePool(SPEC, 1000)
    cache = pool.new(1)
    fill(cache, 0, [4, 5, 6])
    pool.close()
    assert pool.nbytes == PAGE_BYTES, "a sequence that runs keeps its pages"
    cache.release(0, SPACE)
    assert pool.nbytes == 0 and cache.restore(0, [4, 5, 6, 7], SPACE) == 0

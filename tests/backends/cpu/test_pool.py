"""The pool and the driver: who runs which units, in which order, and that nothing ever hangs."""

from __future__ import annotations

import ctypes
import functools
import gc
import itertools
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import pytest
from forked import in_child
from limits import LONGEST_S
from targets import host

from rlx.backends.cpu import driver, pool
from rlx.backends.cpu.builder import Builder, Module, Value
from rlx.backends.cpu.cores import usable_cores
from rlx.backends.cpu.memory import Guarded
from rlx.backends.cpu.pool import Pool, shared
from rlx.backends.cpu.toolchain import CodeLibrary, compile_text
from rlx.errors import CapabilityError

Words = npt.NDArray[np.int64]
STRIDE = 192
THREADS = (1, 2, 5)  # 5: more than the cores of a small machine, whose threads never spin
SIGNATURE = (("ptr", "args"), ("i64", "lo"), ("i64", "hi"), ("ptr", "scratch"))


def within(seconds: float = LONGEST_S) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a test fail, instead of hanging, when it is not over in time."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def guarded(*args: Any, **kwargs: Any) -> None:
            raised: list[BaseException] = []

            def call() -> None:
                try:
                    test(*args, **kwargs)
                except BaseException as error:
                    raised.append(error)

            thread = threading.Thread(target=call, daemon=True)
            thread.start()
            thread.join(seconds)
            assert not thread.is_alive(), f"{test.__name__} hangs"
            if raised:
                raise raised[0]

        return guarded

    return decorate


@functools.cache
def steady(threads: int) -> Pool:
    """A pool that lets all its threads share every run, however busy the machine is."""
    return Pool(threads, pool.compiled_driver(), adapts=False)


# -- kernels ------------------------------------------------------------------------------------------------------
def word(b: Builder, args: Value, index: int, type_: str = "i64") -> Value:
    return b.load(type_, b.offset(args, index, "i64"), align=8)


def emit_mark(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """out[unit] = (lo, hi, scratch)"""
    out = word(b, args, 0, "ptr")

    def mark(unit: Value) -> None:
        for column, value in enumerate((lo, hi, b.convert("ptrtoint", scratch, "i64"))):
            b.store(value, b.offset(out, b.add(b.mul(unit, 3), column), "i64"), align=8)

    b.loop(lo, hi, 1, mark)


def emit_mirror(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """to[unit] = from[n - 1 - unit] + 1: every thread reads what the others wrote"""
    source, target, n = word(b, args, 0, "ptr"), word(b, args, 1, "ptr"), word(b, args, 2)

    def copy(unit: Value) -> None:
        value = b.load("i64", b.offset(source, b.sub(b.sub(n, 1), unit), "i64"), align=8)
        b.store(b.add(value, 1), b.offset(target, unit, "i64"), align=8)

    b.loop(lo, hi, 1, copy)


def emit_hold(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """args[0] = 1; then wait until args[1] is not 0"""
    b.line(f"store atomic i64 1, {args} seq_cst, align 8")
    b.line("br label %again")
    b.label("again")
    gate = b.assign("i64", f"load atomic i64, {b.offset(args, 1, 'i64')} seq_cst, align 8")
    b.line(f"br {b.icmp('eq', gate, 0)}, label %again, label %open")
    b.label("open")


def emit_delay(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """Take the time of args[1] stores."""
    b.loop(0, word(b, args, 1), 1, lambda i: b.line(f"store volatile {i}, {args}, align 8"))


def emit_fault(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """Put args[0] into the status word."""
    b.store(word(b, args, 0), scratch, align=8)


def emit_control(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """args[unit] = MXCSR"""

    def keep(unit: Value) -> None:
        b.call("void", "llvm.x86.sse.stmxcsr", b.offset(args, unit, "i64"))

    b.loop(lo, hi, 1, keep)


def emit_set_control(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    b.call("void", "llvm.x86.sse.ldmxcsr", args)


def emit_wait_for_others(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """Add the units to args[0]; a thread whose scratch is not args[1] then waits until they are args[2]."""
    b.line(f"atomicrmw add {args}, {b.sub(hi, lo)} seq_cst, align 8")
    own = b.icmp("eq", b.convert("ptrtoint", scratch, "i64"), word(b, args, 1))
    b.line(f"br {own}, label %done, label %again")
    b.label("again")
    count = b.assign("i64", f"load atomic i64, {args} seq_cst, align 8")
    b.line(f"br {b.icmp('slt', count, word(b, args, 2))}, label %again, label %done")
    b.label("done")


def emit_doze(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """Nothing for both of two units at once. Of one, the first waits for the other to begin, which takes its time."""
    both = b.icmp("eq", b.sub(hi, lo), 2)

    def apart() -> None:
        def first() -> None:
            tag, before = "gate", b.block
            b.line(f"br label %{tag}")
            b.label(tag)
            b.line(f"%tries = phi i64 [ 0, %{before} ], [ %more, %{tag} ]")
            b.line("%more = add i64 %tries, 1")
            seen = b.assign("i64", f"load atomic i64, {args} seq_cst, align 8")
            goes_on = b.op("and", b.icmp("eq", seen, 0), b.icmp("slt", Value("i64", "%more"), 1_000_000_000))
            b.line(f"br {goes_on}, label %{tag}, label %open")
            b.label("open")

        def second() -> None:
            b.line(f"store atomic i64 1, {args} seq_cst, align 8")
            b.loop(0, word(b, args, 1), 1, lambda i: b.line(f"store volatile {i}, {b.offset(args, 16)}, align 8"))

        b.when(b.icmp("eq", lo, 0), first, second)

    b.when(both, lambda: None, apart)


EMITTERS = {
    "wait_for_others": emit_wait_for_others,
    "doze": emit_doze,
    "mark": emit_mark,
    "mirror": emit_mirror,
    "hold": emit_hold,
    "delay": emit_delay,
    "fault": emit_fault,
} | ({"control": emit_control, "set_control": emit_set_control} if host().arch == "x86_64" else {})


@functools.cache
def kernels() -> Mapping[str, int]:
    module = Module()
    for name, emit in EMITTERS.items():
        module.define(name, SIGNATURE, emit)
    return CodeLibrary().load(compile_text(module.text(), host()), list(EMITTERS))


def scratch_for(threads: int) -> npt.NDArray[np.uint8]:
    block = np.zeros(threads * STRIDE + 64, np.uint8)
    start = -block.ctypes.data % 64
    return block[start : start + threads * STRIDE]


def records_of(*rows: tuple[str, Words, int, int]) -> Words:
    """Launch records from (kernel, arguments, units, flags)."""
    table = [(kernels()[name], args.ctypes.data, units, flags) for name, args, units, flags in rows]
    return np.array(table, np.int64).reshape(len(table), driver.RECORD_WORDS)


def request_of(records: Words, scratch: npt.NDArray[np.uint8]) -> Words:
    """What `execute` takes, for two threads: the driver's notes in it stay from run to run."""
    words = [records.ctypes.data, len(records), scratch.ctypes.data, STRIDE, 0, 2]
    return np.array(words + [0] * (driver.REQUEST_WORDS - len(words)), np.int64)


class Mirror:
    """A chain of `phases` mirror launches with barriers between two buffers; its result is known."""

    def __init__(self, units: int, phases: int, threads: int) -> None:
        self.units, self.phases = units, phases
        self.buffers = np.zeros((2, units), np.int64)
        address = [b.ctypes.data for b in self.buffers]
        self.args = [np.array([address[i], address[1 - i], units], np.int64) for i in range(2)]
        self.records = records_of(*(("mirror", self.args[i % 2], units, driver.BARRIER_AFTER) for i in range(phases)))
        self.scratch = scratch_for(threads)
        self.round = 0

    def run(self, pool: Pool, threads: int | None = None) -> int:
        """Run once on fresh data and check every element."""
        self.round += 1
        start = np.arange(self.units) * 7 + self.round
        self.buffers[0], self.buffers[1] = start, -1
        took_part = pool.run(self.records, self.scratch, STRIDE, threads=threads)
        last = self.buffers[self.phases % 2]
        expected = (start[::-1] if self.phases % 2 else start) + self.phases
        assert np.array_equal(last, expected)
        return took_part


# -- units and order ----------------------------------------------------------------------------------------------
def chunks(units: int, threads: int) -> set[tuple[int, int]]:
    """What may be claimed at once: half of a thread's slice, half of the rest, and so on."""
    slices = [(units * t // threads, units * (t + 1) // threads) for t in range(threads)]
    ends = [[hi - ((hi - lo) >> i) for i in range(driver.CHUNKS)] + [hi] for lo, hi in slices]
    return {(a, b) for each in ends for a, b in itertools.pairwise(each) if a < b}


@within()
@pytest.mark.parametrize("threads", THREADS)
@pytest.mark.parametrize("units", [0, 1, 2, 3, 64, 1001])
def test_each_unit_runs_once_in_its_chunk_with_the_scratch_of_a_thread(threads: int, units: int) -> None:
    out = np.full((units, 3), -1, np.int64)
    args = np.array([out.ctypes.data], np.int64)
    scratch = scratch_for(threads)
    for _ in range(100):
        assert steady(threads).run(records_of(("mark", args, units, 0)), scratch, STRIDE) == threads
        ran = {(int(lo), int(hi)) for lo, hi, _ in out}
        assert ran == ({(0, units)} - {(0, 0)} if threads == 1 else chunks(units, threads))
        assert all(lo <= unit < hi for unit, (lo, hi, _) in enumerate(out))
        assert {int(place) for place in out[:, 2]} <= {scratch.ctypes.data + t * STRIDE for t in range(threads)}


@within()
def test_a_small_run_claims_whole_slices() -> None:
    out = np.full((64, 3), -1, np.int64)
    args = np.array([out.ctypes.data], np.int64)
    launch, scratch = records_of(("mark", args, 64, 0)), scratch_for(2)
    request = np.zeros(driver.REQUEST_WORDS, np.int64)
    request[: driver.COPIED_WORDS] = launch.ctypes.data, len(launch), scratch.ctypes.data, STRIDE, 0, 2
    own = Pool(2, pool.compiled_driver(), adapts=False)
    own.run(launch, scratch, STRIDE)
    assert own._job is not None
    own._job.view(np.int64)[driver.MILLISECOND // 8] = 1 << 40  # so every run is small, once one was measured
    for claimed in (chunks(64, 2), {(0, 32), (32, 64)}):
        assert own.execute(request.ctypes.data) == 2
        assert {(int(lo), int(hi)) for lo, hi, _ in out} == claimed
    own.close()


@within()
def test_a_run_may_use_fewer_threads_than_the_pool_has_and_no_more() -> None:
    out = np.zeros((64, 3), np.int64)
    args = np.array([out.ctypes.data], np.int64)
    records = records_of(("mark", args, 64, 0))
    for asked, used in ((1, 1), (2, 2), (3, 3), (5, 5), (9, 5)):
        scratch = scratch_for(asked)
        assert steady(5).run(records, scratch, STRIDE, threads=asked) == used
        assert (out[:, 2] < scratch.ctypes.data + used * STRIDE).all()


# -- workers that are late ----------------------------------------------------------------------------------------
@within()
def test_a_run_does_not_need_workers_that_never_come(monkeypatch: pytest.MonkeyPatch) -> None:
    own = Pool(3, pool.compiled_driver(), adapts=False)
    monkeypatch.setattr(pool, "_work", lambda *_: None)
    for phases in (1, 7, 8):
        assert Mirror(units=97, phases=phases, threads=3).run(own) == 3


@within()
@pytest.mark.parametrize("barrier", [0, driver.BARRIER_AFTER])
def test_others_do_what_a_late_worker_has_not_claimed(barrier: int) -> None:
    """The worker has a chunk in hand, half of its slice, until all other units are done."""
    units, scratch, nothing = 64, scratch_for(2), np.zeros(2, np.int64)
    for _ in range(50):
        state = np.array([0, scratch.ctypes.data, units], np.int64)
        records = records_of(("wait_for_others", state, units, barrier), ("delay", nothing, 1, 0))
        assert steady(2).run(records, scratch, STRIDE) == 2
        assert state[0] == units


@within()
def test_runs_stay_on_their_caller_while_workers_are_late_and_are_shared_again_later() -> None:
    own = Pool(2, pool.compiled_driver())
    slow, fast = (np.array([0, stores, 0], np.int64) for stores in (20_000_000, 0))

    def run(state: Words) -> int:
        state[0] = 0
        return own.run(records_of(("doze", state, 2, 0)), scratch_for(2), STRIDE)

    counts = [run(slow) for _ in range(20)]  # shared, the caller sleeps in each of them
    assert counts[0] == 2 and 1 in counts, "the worker was late again and again"
    while run(fast) == 1:  # for some milliseconds
        pass


@within()
@pytest.mark.parametrize(("threads", "shared"), [(2, False), (4, True), (5, True)])
def test_half_of_a_run_asleep_is_less_than_what_many_threads_gain(threads: int, shared: bool) -> None:
    own = Pool(threads, pool.compiled_driver())
    chain = Mirror(units=64, phases=3, threads=threads)
    chain.run(own)
    assert own._job is not None
    words = own._job.view(np.int64)
    words[driver.ALL_SLEPT // 8], words[driver.ALL_TAKEN // 8] = 1 << 49, 1 << 50  # ticks of earlier runs
    chain.run(own)
    assert (words[driver.ALONE_RUNS // 8] == 0) == shared
    own.close()


@within()
def test_runs_are_shared_where_one_alone_would_take_as_long() -> None:
    own = Pool(2, pool.compiled_driver())
    late = np.array([0, 4_000_000], np.int64)  # one unit: whoever has it works, the other sleeps
    records, scratch = records_of(("delay", late, 1, 0)), scratch_for(2)
    request = request_of(records, scratch)
    while own.execute(request.ctypes.data) == 2:  # until workers count as late
        pass
    request[driver.SHARED_AVERAGE // 8] = 1  # tick, so that runs alone are no faster, whatever this machine was doing
    assert 2 in [own.execute(request.ctypes.data) for _ in range(3)]
    assert request[driver.TRUSTED // 8] > 0


@within()
def test_runs_stay_on_their_caller_where_one_alone_was_faster() -> None:
    own = Pool(2, pool.compiled_driver())
    long = np.array([0, 4_000_000], np.int64)
    records, scratch = records_of(("delay", long, 1, 0)), scratch_for(2)
    request = request_of(records, scratch)
    request[driver.BEST_ALONE // 8] = 1  # tick
    assert [own.execute(request.ctypes.data) for _ in range(2)] == [2, 1]


@within()
def test_a_brief_run_does_not_wake_workers() -> None:
    own, chain = Pool(2, pool.compiled_driver()), Mirror(units=64, phases=3, threads=2)
    request = request_of(chain.records, chain.scratch)
    assert own.execute(request.ctypes.data) == 2, "how long it takes is not known yet"
    assert request[driver.SHORTEST // 8] > 0

    def after_a_pause() -> int:
        time.sleep(0.01)
        return own.execute(request.ctypes.data)

    request[driver.SHORTEST // 8] = 1000  # ticks, whatever this machine was doing
    assert [after_a_pause() for _ in range(5)] == [1] * 5
    # In a loop workers are awake; that the machine takes the processor away for a moment may be, but not always.
    assert any(own.execute(request.ctypes.data) == 2 for _ in range(1000))
    request[driver.SHORTEST // 8] = 1 << 40  # a long one; workers that came late meanwhile may be left out for a while
    assert any(after_a_pause() == 2 for _ in range(200))


@within()
def test_runs_that_stay_on_their_callers_are_counted_too() -> None:
    """Whoever pauses between calls for longer than runs stay alone would otherwise meet the late worker each time."""
    own = Pool(2, pool.compiled_driver(), adapts=False)
    chain = Mirror(units=64, phases=3, threads=2)
    chain.run(own)
    assert own._job is not None
    words = own._job.view(np.int64)
    words[driver.MILLISECOND // 8] = 1 << 40  # ticks: no run is late by itself
    words[driver.ALONE_UNTIL // 8], words[driver.ALONE_RUNS // 8] = 0, 3
    assert [chain.run(own) for _ in range(5)] == [1, 1, 1, 2, 2]
    own.close()


# -- cores ---------------------------------------------------------------------------------------------------------
needs_cores = pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or len(os.sched_getaffinity(0)) < 2, reason="needs two cores of Linux"
)


class Placed:
    """A pool with one worker that sleeps, on a core that a test chooses."""

    def __init__(self) -> None:
        before = set(threading.enumerate())
        self.pool = Pool(2, pool.compiled_driver(), adapts=False)
        self.chain = Mirror(units=64, phases=3, threads=2)
        self.chain.run(self.pool)
        (worker,) = set(threading.enumerate()) - before
        assert worker.native_id is not None
        self.worker = worker.native_id

    def word(self, offset: int, size: type[np.signedinteger[Any]] = np.int64) -> int:
        assert self.pool._job is not None
        return int(self.pool._job.view(size)[offset // np.dtype(size).itemsize])

    def sleep(self) -> None:
        while self.word(driver.SEATS + driver.SEAT_BYTES, np.int32) != driver.ASLEEP:
            time.sleep(0.001)

    def run_after_a_pause(self) -> None:
        """Run with the worker asleep, and wait until it sleeps again."""
        self.sleep()
        self.chain.run(self.pool)
        self.sleep()

    def last_core(self) -> int:
        """The core that the worker was on last."""
        text = Path(f"/proc/self/task/{self.worker}/stat").read_text()
        return int(text.rpartition(")")[2].split()[36])


@needs_cores
@within()
def test_a_worker_wakes_on_another_core_than_its_caller() -> None:
    placed, cores = Placed(), os.sched_getaffinity(0)
    first, second, *_ = cores
    elsewhere = 0
    try:
        for _ in range(10):
            for caller in (first, second):
                os.sched_setaffinity(0, {caller})  # the caller is here now
                placed.run_after_a_pause()
                elsewhere += placed.last_core() != caller
                assert os.sched_getaffinity(placed.worker) == cores, "awake, it may use all of its cores"
                assert os.sched_getaffinity(0) == {caller}, "the caller's own affinity stays"
    finally:
        os.sched_setaffinity(0, cores)
    assert elsewhere > 10, "a busy machine may move a worker, but not every time"


@needs_cores
@within()
def test_a_worker_keeps_to_its_cores() -> None:
    placed, cores = Placed(), os.sched_getaffinity(0)
    first, second, *_ = cores
    try:
        for caller, worker in ((first, second), (first, first), (second, first)):
            placed.sleep()
            os.sched_setaffinity(0, {caller})
            os.sched_setaffinity(placed.worker, {worker})
            placed.run_after_a_pause()
            assert os.sched_getaffinity(placed.worker) == {worker}
    finally:
        os.sched_setaffinity(0, cores)


@within()
@pytest.mark.parametrize("threads", THREADS)
def test_no_records_is_a_run_too(threads: int) -> None:
    assert steady(threads).run(np.zeros((0, 4), np.int64), scratch_for(threads), STRIDE) == threads


@within()
@pytest.mark.parametrize("threads, runs", [(1, 2000), (2, 5000), (5, 300)])
def test_barriers_hold_in_thousands_of_runs(threads: int, runs: int) -> None:
    chain = Mirror(units=97, phases=7, threads=threads)
    for _ in range(runs):
        assert chain.run(steady(threads)) == threads


@within()
@pytest.mark.parametrize("threads, phases", [(2, 100_001), (5, 2_000)])
def test_barriers_hold_in_one_long_run(threads: int, phases: int) -> None:
    Mirror(units=16, phases=phases, threads=threads).run(steady(threads))


@within()
def test_runs_with_changing_thread_counts_follow_each_other() -> None:
    chain = Mirror(units=31, phases=4, threads=5)
    for i in range(1000):
        assert chain.run(steady(5), threads=1 + i % 5) == 1 + i % 5


@within()
@pytest.mark.parametrize("threads", [2, 5])
def test_sleeping_workers_wake(threads: int) -> None:
    chain = Mirror(units=64, phases=5, threads=threads)
    for _ in range(10):
        time.sleep(0.05)
        assert chain.run(steady(threads)) == threads


@within()
def test_a_caller_that_sleeps_at_the_barrier_and_at_the_join_wakes() -> None:
    late = np.array([0, 20_000_000], np.int64)  # one unit: the last thread works, the first waits
    records = records_of(("delay", late, 1, driver.BARRIER_AFTER), ("delay", late, 1, 0))
    for _ in range(3):
        assert steady(2).run(records, scratch_for(2), STRIDE) == 2


@within()
@pytest.mark.parametrize("threads", THREADS)
def test_status_words_of_all_slots_are_cleared_before_a_run(threads: int) -> None:
    scratch = scratch_for(threads)
    status = scratch.view(np.int64)[:: STRIDE // 8]
    code = np.array([17], np.int64)
    steady(threads).run(records_of(("fault", code, threads, 0)), scratch, STRIDE)
    assert (status == 17).any()
    status[:] = 17
    steady(threads).run(records_of(("fault", code, 0, 0)), scratch, STRIDE)
    assert (status == 0).all()


# -- reading ahead ------------------------------------------------------------------------------------------------
@within()
@pytest.mark.parametrize("size, units", [(100, 7), (1 << 16, 9), (1 << 20, 2), (1 << 20, 0)])
def test_a_thread_that_waits_reads_its_own_units_ahead_and_no_byte_beyond_them(size: int, units: int) -> None:
    memory = Guarded(max(size * units, 1))  # ends where a page begins that nobody may touch
    late = np.array([0, 20_000_000], np.int64)  # one unit: the last thread works, the first waits
    ahead = np.array([[memory.address, size, units, driver.AHEAD]], np.int64)
    records = np.concatenate([ahead, records_of(("delay", late, 1, driver.BARRIER_AFTER), ("delay", late, 0, 0))])
    for _ in range(20):
        scratch = scratch_for(2)
        assert steady(2).run(records, scratch, STRIDE) == 2
        read = 0
        for tid, head in enumerate(scratch.view(np.int64).reshape(2, -1)):
            first, last = (memory.address + size * (units * t // 2) for t in (tid, tid + 1))
            end = first + min(last - first, driver.READ_AHEAD) // driver.READ_STEP * driver.READ_STEP
            if head[driver.READ_END // 8]:  # else this one came too late
                assert head[driver.READ_END // 8] == end
                assert first <= head[driver.READ_TO // 8] <= end
                read += int(head[driver.READ_TO // 8]) - first
        if read or usable_cores() == 1 or size * (units // 2) < driver.READ_STEP:
            return
    raise AssertionError("nobody has read ahead")


@within()
def test_reading_ahead_changes_nothing_that_is_computed() -> None:
    chain = Mirror(units=97, phases=8, threads=2)
    memory = np.zeros(1 << 20, np.uint8)
    ahead = np.array([[memory.ctypes.data, 4096, 256, driver.AHEAD]], np.int64)
    chain.records = np.concatenate([part for row in chain.records for part in (ahead, row[None])])
    for _ in range(500):
        assert chain.run(steady(2)) == 2


# -- many callers -------------------------------------------------------------------------------------------------
class Holder:
    """A run on another thread that keeps the pool busy until released."""

    def __init__(self, pool: Pool) -> None:
        self.state = np.zeros(2, np.int64)
        self.took_part = 0
        records = records_of(("hold", self.state, 1, 0))
        scratch = scratch_for(pool.threads)

        def run() -> None:
            self.took_part = pool.run(records, scratch, STRIDE)

        self.thread = threading.Thread(target=run, daemon=True)

    def __enter__(self) -> Self:
        self.thread.start()
        while not self.state[0]:
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        self.state[1] = 1
        self.thread.join()


@within()
def test_a_run_that_finds_the_pool_busy_runs_alone_with_the_same_result() -> None:
    chain = Mirror(units=50, phases=3, threads=2)
    with Holder(steady(2)) as holder:
        for _ in range(100):
            assert chain.run(steady(2)) == 1
    assert holder.took_part == 2
    assert chain.run(steady(2)) == 2


@within()
def test_a_run_alone_clears_the_status_of_the_slots_that_it_does_not_use() -> None:
    scratch = scratch_for(2)
    scratch[:] = 255
    with Holder(steady(2)):
        steady(2).run(records_of(), scratch, STRIDE)
    assert (scratch.view(np.int64)[:: STRIDE // 8] == 0).all()


@within()
@pytest.mark.parametrize("threads", [2, 5])
def test_eight_python_threads_may_share_a_pool(threads: int) -> None:
    def work(_: int) -> None:
        chain = Mirror(units=40, phases=6, threads=threads)
        for _ in range(400):
            assert chain.run(steady(threads)) in (1, threads)

    with ThreadPoolExecutor(8) as callers:
        list(callers.map(work, range(8)))


# -- forks and ends -----------------------------------------------------------------------------------------------
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")


@needs_fork
@within()
@pytest.mark.parametrize("threads", [2, 5])
def test_child_and_parent_run_after_a_fork(threads: int) -> None:
    chain, used = Mirror(units=64, phases=5, threads=threads), steady(threads)
    for _ in range(3):
        assert chain.run(used) == threads
        assert in_child(lambda: all(chain.run(used) == threads for _ in range(50)) and used is steady(threads)) == 0
        assert chain.run(used) == threads


@needs_fork
@within()
def test_a_child_runs_although_the_parent_forked_in_the_middle_of_a_run() -> None:
    chain, used = Mirror(units=64, phases=5, threads=2), steady(2)
    with Holder(used):
        assert in_child(lambda: all(chain.run(used) == 2 for _ in range(50))) == 0
    assert chain.run(used) == 2


@needs_fork
@within()
def test_a_child_of_a_child_runs() -> None:
    chain, used = Mirror(units=64, phases=5, threads=2), steady(2)
    assert chain.run(used) == 2
    assert in_child(lambda: chain.run(used) == 2 and in_child(lambda: chain.run(used) == 2) == 0) == 0


PROGRAM = """
import atexit, sys, threading, time
sys.path[:0] = {folders!r}
from test_pool import *
chain = Mirror(units=64, phases=5, threads=2)
assert chain.run(steady(2)) == 2
"""

ENDINGS = {
    "at once": "",
    "with sleeping workers": "time.sleep(0.05)",
    "with another run at exit": "atexit.register(lambda: print('later', chain.run(steady(2))))",
    "with a first run at exit": "atexit.register(lambda: print('late', Mirror(9, 3, 4).run(steady(4)) >= 1))",
    "with a daemon thread inside run": "holder = Holder(steady(2)).__enter__()",
    "with daemon threads in a loop": """
def loop():
    mine = Mirror(units=64, phases=5, threads=2)
    while True:
        mine.run(steady(2))
for _ in range(3):
    threading.Thread(target=loop, daemon=True).start()
time.sleep(0.1)
""",
    "with an error": "raise SystemExit(0)",
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_the_interpreter_ends(ending: str) -> None:
    program = PROGRAM.format(folders=[str(Path(__file__).parent), str(Path(__file__).parents[2])]) + ENDINGS[ending]
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=LONGEST_S)
    assert (done.returncode, done.stderr) == (0, "")


@within()
def test_a_closed_pool_runs_on_the_calling_thread() -> None:
    own = Pool(3, pool.compiled_driver())
    chain = Mirror(units=20, phases=3, threads=3)
    assert chain.run(own) == 3
    own.close()
    own.close()
    for _ in range(100):
        assert chain.run(own) == 1


@within()
def test_the_workers_of_a_forgotten_pool_end() -> None:
    before = set(threading.enumerate())
    own = Pool(3, pool.compiled_driver())
    Mirror(units=20, phases=3, threads=3).run(own)
    workers = set(threading.enumerate()) - before
    assert len(workers) == 2
    del own
    gc.collect()
    assert not any(worker.is_alive() for worker in workers)


# -- what else the driver promises --------------------------------------------------------------------------------
@within()
@pytest.mark.skipif(host().arch != "x86_64", reason="MXCSR is x86's")
@pytest.mark.parametrize("threads", [1, 2])
def test_kernels_see_the_default_mxcsr_and_the_caller_keeps_its_own(threads: int) -> None:
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p)
    control, set_control = call(kernels()["control"]), call(kernels()["set_control"])
    flushing = 0x1F80 | 0x8040  # flush results and operands that are denormal
    here, seen, value = np.zeros(1, np.int64), np.zeros(8, np.int64), np.array([flushing], np.int64)
    records, scratch = records_of(("control", seen, 8, 0)), scratch_for(threads)
    steady(threads).run(records, scratch, STRIDE)  # starts the workers with an unchanged MXCSR
    set_control(value.ctypes.data, 0, 1, None)
    try:
        steady(threads).run(records, scratch, STRIDE)
        control(here.ctypes.data, 0, 1, None)
    finally:
        value[0] = 0x1F80
        set_control(value.ctypes.data, 0, 1, None)
    assert here[0] & 0xFFC0 == flushing
    assert (seen & 0xFFC0 == 0x1F80).all()


@within()
@pytest.mark.parametrize("threads", THREADS)
def test_time_stamps_rise_from_record_to_record(threads: int) -> None:
    chain = Mirror(units=64, phases=9, threads=threads)
    trace = np.zeros((9, threads, 2), np.int64)
    steady(threads).run(chain.records, chain.scratch, STRIDE, trace)
    caller, *workers = trace.transpose(1, 0, 2).reshape(threads, -1)
    assert (caller > 0).all() and (np.diff(caller) >= 0).all()
    for worker in workers:  # who comes late, or never, has fewer
        assert (np.diff(worker[worker > 0]) >= 0).all()


@within()
def test_waiting_at_a_barrier_is_not_counted() -> None:
    late = np.array([0, 20_000_000], np.int64)
    records = records_of(("delay", late, 1, driver.BARRIER_AFTER), ("delay", late, 0, 0))

    def waiting_is_apart() -> bool:
        trace = np.zeros((2, 2, 2), np.int64)
        steady(2).run(records, scratch_for(2), STRIDE, trace)
        times = np.sort(trace[0, :, 1] - trace[0, :, 0])  # of who waited, and of who had the unit
        return bool(0 < times[0] < times[1] / 100)

    assert any(waiting_is_apart() for _ in range(10))  # the system may interrupt a thread between its two stamps


@within()
def test_a_run_alone_traces_into_the_first_thread_of_the_same_layout() -> None:
    chain = Mirror(units=8, phases=3, threads=2)
    trace = np.zeros((3, 2, 2), np.int64)
    with Holder(steady(2)):
        steady(2).run(chain.records, chain.scratch, STRIDE, trace)
    assert (trace[:, 0] > 0).all() and (trace[:, 1] == 0).all()


@within()
def test_a_run_costs_a_few_microseconds() -> None:
    records, scratch = records_of(), scratch_for(1)
    times = []
    for _ in range(2000):
        begin = time.perf_counter()
        steady(1).run(records, scratch, STRIDE)
        times.append(time.perf_counter() - begin)
    assert min(times) < 50e-6  # measured: 2 µs; the bound only catches a mistake of kind


# -- thread counts ------------------------------------------------------------------------------------------------
@pytest.mark.usefixtures("many_cores")
def test_there_is_one_pool_for_a_thread_count() -> None:
    assert shared(2) is shared(2) and shared(2) is not shared(3)
    assert shared() is shared(pool.default_threads())


def test_more_threads_than_cores_are_capped_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    cores = usable_cores()
    with pytest.warns(RuntimeWarning, match=f"64 threads were asked for, but this process may use {cores} core"):
        assert shared(64) is shared(cores)
    monkeypatch.setenv("RLX_THREADS", "1000")
    with pytest.warns(RuntimeWarning, match="1000 threads"):
        assert shared().threads == cores


def test_the_default_thread_count_can_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RLX_THREADS", raising=False)
    assert pool.default_threads() == pool.usable_cores() >= 1
    monkeypatch.setenv("RLX_THREADS", "3")
    assert pool.default_threads() == 3
    for wrong in ("0", "-1", "two", "1.5", " 2", "1e3", "0x2", "4097", "99999999999999999999", "9" * 5000, "٣", "²"):
        monkeypatch.setenv("RLX_THREADS", wrong)
        with pytest.raises(CapabilityError, match="RLX_THREADS"):
            pool.default_threads()


def test_a_pool_of_no_threads_is_refused() -> None:
    with pytest.raises(CapabilityError, match="at least one thread"):
        Pool(0, pool.compiled_driver())


def test_a_pool_says_why_it_has_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Pool(2, pool.compiled_driver()).why_single is None
    assert Pool(1, pool.compiled_driver()).why_single == "one thread was asked for"
    monkeypatch.setattr(sys, "platform", "darwin")
    elsewhere = Pool(4, pool.compiled_driver())
    assert elsewhere.threads == 1 and "darwin" in str(elsewhere.why_single)


@within()
@pytest.mark.parametrize("possible", [0, 1])
def test_a_pool_does_with_the_workers_that_could_be_started(monkeypatch: pytest.MonkeyPatch, possible: int) -> None:
    own, left = Pool(4, pool.compiled_driver()), [possible]
    start = threading.Thread.start

    def limited(thread: threading.Thread) -> None:
        if left[0] == 0:
            raise RuntimeError("can't start new thread")
        left[0] -= 1
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", limited)
    assert Mirror(units=20, phases=3, threads=4).run(own) == 1 + possible
    assert (own.why_single is None) == (possible > 0)


def test_first_runs_of_many_threads_start_the_workers_once() -> None:
    own = Pool(2, pool.compiled_driver())
    before = threading.active_count()
    chains = [Mirror(units=20, phases=3, threads=2) for _ in range(8)]
    with ThreadPoolExecutor(8) as callers:
        list(callers.map(lambda chain: chain.run(own), chains))
    assert threading.active_count() == before + 1

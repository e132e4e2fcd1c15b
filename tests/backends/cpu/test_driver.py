"""Loop and branch records in the driver: addresses move, arguments stay, threads agree, faults end endless loops."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pytest
from targets import host
from test_pool import chunks, emit_mirror, steady, within, word

from rlx.backends.cpu import driver as d
from rlx.backends.cpu.builder import Builder, Module, Value
from rlx.backends.cpu.toolchain import CodeLibrary, compile_text

Words = npt.NDArray[np.int64]
STRIDE, PRIVATE = 1024, 256  # bytes of scratch, and where in it loops have their words
ENDLESS = 1 << 62
THREADS = pytest.mark.parametrize("threads", [1, 2, 5])
SIGNATURE = (("ptr", "args"), ("i64", "lo"), ("i64", "hi"), ("ptr", "scratch"))


def emit_set(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """to[unit] = hi - lo"""
    b.loop(lo, hi, 1, lambda unit: b.store(b.sub(hi, lo), b.offset(word(b, args, 0, "ptr"), unit, "i64"), align=8))


def emit_fault(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """Count in args[1]; when it is args[0], report a fault."""
    count = b.add(word(b, args, 1), 1)
    b.store(count, b.offset(args, 1, "i64"), align=8)
    b.when(b.icmp("eq", count, word(b, args, 0)), lambda: b.store(Value("i64", "7"), scratch, align=8))


def emit_apart(b: Builder, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """A thread whose scratch is args[1] waits until another has begun, which takes the time of args[2] stores."""
    own = b.icmp("eq", b.convert("ptrtoint", scratch, "i64"), word(b, args, 1))
    b.line(f"br {own}, label %again, label %other")
    b.label("again")
    begun = b.assign("i64", f"load atomic i64, {args} seq_cst, align 8")
    b.line(f"br {b.icmp('eq', begun, 0)}, label %again, label %done")
    b.label("other")
    b.line(f"store atomic i64 1, {args} seq_cst, align 8")
    b.loop(0, word(b, args, 2), 1, lambda i: b.line(f"store volatile {i}, {b.offset(args, 3, 'i64')}, align 8"))
    b.line("br label %done")
    b.label("done")


EMITTERS = {"mirror": emit_mirror, "set": emit_set, "fault": emit_fault, "apart": emit_apart}


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


def loop(
    count: int, source: int, words: int, records: tuple[int, int, int], *, home: int = PRIVATE, private: bool = False,
    linear: Sequence[tuple[int, int]] = (), alternating: Sequence[tuple[int, int]] = (),
) -> tuple[Words, Words]:  # fmt: skip
    """A loop block and its moves: (word, bytes). `records` are the first, the one after NEXT, and LEAVE."""
    moves = np.array([(8 * (1 + w), step) for w, step in (*linear, *alternating)], np.int64).reshape(-1, 2)
    first = [count, source, int(private), home, words, moves.ctypes.data, len(linear), len(alternating), *records]
    return np.array(first, np.int64), moves


def table(*rows: tuple[int, int, int, int]) -> Words:
    return np.array(rows, np.int64)


# -- loops ------------------------------------------------------------------------------------------------------------
@THREADS
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 100])
def test_two_rows_alternate_and_the_arguments_stay(threads: int, steps: int) -> None:
    units = 97
    rows = np.zeros((2, units), np.int64)
    args = np.array([rows[0].ctypes.data, rows[1].ctypes.data, units], np.int64)
    before = args.copy()
    block, moves = loop(steps, args.ctypes.data, 3, (1, 3, 3), alternating=[(0, 8 * units), (1, -8 * units)])
    records = table(
        (0, block.ctypes.data, 0, d.ENTER),
        (kernels()["mirror"], PRIVATE + 8, units, d.LAUNCH | d.PRIVATE),
        (0, block.ctypes.data, 0, d.NEXT | d.BARRIER_AFTER),
        (0, 0, 0, d.LEAVE | d.BARRIER_AFTER),
    )
    assert len(moves) == 2
    for _ in range(20):
        rows[0], rows[1] = np.arange(units) * 7, -1
        assert steady(threads).run(records, scratch_for(threads), STRIDE) == threads
        wanted = rows[0] if steps == 0 else (np.arange(units) * 7)[:: -1 if steps % 2 else 1] + steps
        assert np.array_equal(rows[steps % 2], wanted) and np.array_equal(args, before)


@THREADS
def test_loops_in_loops_move_what_both_say(threads: int) -> None:
    """to[outer, inner] is written once each; the inner loop starts where the outer one is."""
    to = np.full((3, 4, 6), -1, np.int64)
    args = np.array([to.ctypes.data], np.int64)
    outer_home, inner_home = PRIVATE, PRIVATE + 16
    inner, _m = loop(4, outer_home + 8, 1, (2, 4, 4), home=inner_home, private=True, linear=[(0, 8 * 6)])
    outer, _n = loop(3, args.ctypes.data, 1, (1, 6, 6), home=outer_home, linear=[(0, 8 * 24)])
    records = table(
        (0, outer.ctypes.data, 0, d.ENTER),
        (0, inner.ctypes.data, 0, d.ENTER),
        (kernels()["set"], inner_home + 8, 6, d.LAUNCH | d.PRIVATE),
        (0, inner.ctypes.data, 0, d.NEXT | d.BARRIER_AFTER),
        (1, 0, 0, d.LEAVE | d.BARRIER_AFTER),
        (0, outer.ctypes.data, 0, d.NEXT | d.BARRIER_AFTER),
        (0, 0, 0, d.LEAVE),
    )
    steady(threads).run(records, scratch_for(threads), STRIDE)
    sizes = np.zeros(6, np.int64)
    for first, last in chunks(6, threads) if threads > 1 else [(0, 6)]:
        sizes[first:last] = last - first
    assert (to == sizes).all()


@THREADS
def test_a_loop_for_one_thread_has_all_units_and_the_others_wait(threads: int) -> None:
    to = np.zeros((5, 8), np.int64)
    after = np.zeros(8, np.int64)
    args, last = np.array([to.ctypes.data], np.int64), np.array([after.ctypes.data], np.int64)
    block, _moves = loop(5, args.ctypes.data, 1, (1, 3, 3), linear=[(0, 64)])
    records = table(
        (0, block.ctypes.data, 0, d.ENTER | d.SOLO),
        (kernels()["set"], PRIVATE + 8, 8, d.LAUNCH | d.PRIVATE | d.BARRIER_AFTER),
        (0, block.ctypes.data, 0, d.NEXT | d.BARRIER_AFTER),
        (0, 0, 0, d.LEAVE | d.SOLO | d.BARRIER_AFTER),
        (kernels()["set"], last.ctypes.data, 8, d.LAUNCH),
    )
    for _ in range(50):
        to[:] = after[:] = 0
        steady(threads).run(records, scratch_for(threads), STRIDE)
        assert (to == 8).all(), "one call for all units"
        assert after.max() < 8 or threads == 1, "the launch after the loop is shared again"


# -- branches ---------------------------------------------------------------------------------------------------------
@THREADS
@pytest.mark.parametrize("flag", [0, 1])
def test_a_branch_goes_one_way(threads: int, flag: int) -> None:
    to = np.zeros((3, 4), np.int64)
    predicate = np.array([flag], np.uint8)
    args = np.array([row.ctypes.data for row in to], np.int64)
    where = np.array([predicate.ctypes.data], np.int64)
    records = table(
        (3, where.ctypes.data, 0, d.TEST),
        (kernels()["set"], args.ctypes.data, 4, d.LAUNCH),
        (4, 0, 0, d.JUMP),
        (kernels()["set"], args.ctypes.data + 8, 4, d.LAUNCH),
        (0, 0, 0, d.LEAVE | d.BARRIER_AFTER),
        (kernels()["set"], args.ctypes.data + 16, 4, d.LAUNCH),
    )
    steady(threads).run(records, scratch_for(threads), STRIDE)
    assert [bool(row.any()) for row in to] == [flag == 1, flag == 0, True]


@within()
def test_a_worker_that_missed_a_test_wakes_those_who_wait_for_its_units() -> None:
    to, predicate = np.zeros(1, np.int64), np.ones(1, np.uint8)
    last, where = np.array([to.ctypes.data], np.int64), np.array([predicate.ctypes.data], np.int64)
    for _ in range(3):
        scratch = scratch_for(2)
        state = np.array([0, scratch.ctypes.data, 20_000_000, 0], np.int64)
        records = table(
            (kernels()["apart"], state.ctypes.data, 2, d.LAUNCH),  # the worker has a unit in hand ...
            (2, where.ctypes.data, 0, d.TEST),
            (3, where.ctypes.data, 0, d.TEST),  # ... while the caller is here
            (kernels()["set"], last.ctypes.data, 1, d.LAUNCH),
        )
        assert steady(2).run(records, scratch, STRIDE) == 2


# -- faults -----------------------------------------------------------------------------------------------------------
@THREADS
@pytest.mark.parametrize("solo", [0, d.SOLO])
def test_a_fault_ends_an_endless_loop_and_what_follows(threads: int, solo: int) -> None:
    after = np.zeros(4, np.int64)
    args, last = np.array([1000, 0], np.int64), np.array([after.ctypes.data], np.int64)
    block, _moves = loop(ENDLESS, 0, 0, (1, 3, 3))
    records = table(
        (0, block.ctypes.data, 0, d.ENTER | solo),
        (kernels()["fault"], args.ctypes.data, 1, d.LAUNCH),
        (0, block.ctypes.data, 0, d.NEXT | d.BARRIER_AFTER),
        (0, 0, 0, d.LEAVE | solo | d.BARRIER_AFTER),
        (kernels()["set"], last.ctypes.data, 4, d.LAUNCH),
    )
    for _ in range(5):
        args[1] = after[:] = 0
        scratch = scratch_for(threads)
        assert steady(threads).run(records, scratch, STRIDE) == threads
        status = scratch.view(np.int64).reshape(threads, -1)[:, :2]
        assert sorted(status.tolist())[-1] == [7, 2], "the code, and the number of the record from 1"
        assert args[1] == 1000, "and not a step more"
        assert after.any() == bool(solo and threads > 1), "who shares a loop ends with it"


@within()
@THREADS
@pytest.mark.parametrize("solo", [0, d.SOLO])
def test_a_fault_in_an_inner_loop_ends_an_endless_outer_one(threads: int, solo: int) -> None:
    to = np.zeros(8, np.int64)
    args, other = np.array([10, 0], np.int64), np.array([to.ctypes.data], np.int64)
    outer, _m = loop(ENDLESS, 0, 0, (1, 6, 6))
    inner, _n = loop(3, 0, 0, (3, 5, 5), home=PRIVATE + 64)
    records = table(
        (0, outer.ctypes.data, 0, d.ENTER),
        (kernels()["set"], other.ctypes.data, 8, d.LAUNCH | d.BARRIER_AFTER),
        (0, inner.ctypes.data, 0, d.ENTER | solo),
        (kernels()["fault"], args.ctypes.data, 1, d.LAUNCH),
        (0, inner.ctypes.data, 0, d.NEXT | d.BARRIER_AFTER),
        (2, 0, 0, d.LEAVE | solo | d.BARRIER_AFTER),
        (0, outer.ctypes.data, 0, d.NEXT | d.BARRIER_AFTER),
        (0, 0, 0, d.LEAVE),
    )
    for _ in range(5):
        args[1] = 0
        scratch = scratch_for(threads)
        assert steady(threads).run(records, scratch, STRIDE) == threads
        assert sorted(scratch.view(np.int64).reshape(threads, -1)[:, :2].tolist())[-1] == [7, 4]
        assert args[1] == 10


# -- time stamps ------------------------------------------------------------------------------------------------------
@THREADS
def test_a_trace_counts_steps_and_adds_their_time(threads: int) -> None:
    to = np.zeros(8, np.int64)
    args = np.array([to.ctypes.data], np.int64)
    block, _moves = loop(40, args.ctypes.data, 1, (1, 3, 3))
    records = table(
        (0, block.ctypes.data, 0, d.ENTER),
        (kernels()["set"], PRIVATE + 8, 8, d.LAUNCH | d.PRIVATE),
        (0, block.ctypes.data, 0, d.NEXT | d.BARRIER_AFTER),
        (0, 0, 0, d.LEAVE | d.BARRIER_AFTER),
    )
    trace = np.zeros((4, threads, 2), np.int64)
    steady(threads).run(records, scratch_for(threads), STRIDE, trace)
    entered, launch, steps, left = trace
    assert (steps[0] == [0, 40]).all() and (steps[:, 1] <= 40).all() and (left == 0).all()
    came = launch[:, 0] > 0  # a worker may come when all is done
    assert came[0]
    assert (entered[came, 0] <= launch[came, 0]).all() and (launch[0, 1] <= entered[0, 1]).all()
    assert (launch[came, 1] > launch[came, 0]).all()

"""What this machine can do at most, measured by kernels that do nothing else: multiply-adds of floats and of 8-bit
integers with the instructions that kernels use, reads from cache and from memory. Takes less than half a second, once
per process, target and thread count; reports use it as their yardstick.
"""

from __future__ import annotations

import functools
import time

import numpy as np

from rlx.backends.cpu import pool
from rlx.backends.cpu.builder import Builder, Module, Value, const, vector
from rlx.backends.cpu.kernel_library import library
from rlx.backends.cpu.loops.byte_dots import dot
from rlx.backends.cpu.math.arithmetic import fma
from rlx.backends.cpu.memory import aligned
from rlx.backends.cpu.routine import ENTRY_ARGUMENTS
from rlx.backends.cpu.targets import CpuTarget
from rlx.backends.cpu.toolchain import CodeLibrary, compile_text
from rlx.backends.reports import Ceilings
from rlx.host_memory import address

CACHE_BYTES = 256 << 10  # a thread; well inside the second-level cache
MEMORY_BYTES = 256 << 20  # all threads; well outside the last-level cache
ROUNDS = 1 << 15
# Kinds of multiply-adds (dot_u7: 8-bit integers, those of one side below 128), and the bytes of each number.
PRODUCTS = {"f32": 4, "f64": 8, "dot_u7": 1, "dot_u8": 1}
UNROLL = 8


@functools.cache
def ceilings(target: CpuTarget, threads: int) -> Ceilings:
    """The ceilings of this machine for a target and a number of threads."""
    code = CodeLibrary().load(compile_text(_text(target), target), [*PRODUCTS, "read"])
    workers = pool.shared(threads, library(target).driver)
    scratch = aligned(threads * 4096)
    scratch[:] = 0

    def seconds(function: int, words: list[int], repeats: int) -> float:
        """The slowest thread of the best run, as reports count: without the time that workers need to wake up."""
        args = np.array(words, np.int64)
        records = np.array([[function, args.ctypes.data, threads, 0]], np.int64)
        stamps = np.zeros((1, workers.threads, 2), np.int64)
        best = float("inf")
        for _ in range(repeats):
            stamps[:] = 0
            workers.run(records, scratch, 4096, stamps)
            best = min(best, float((stamps[0, :, 1] - stamps[0, :, 0]).max()))
        return best / ticks_per_second(target)

    chains = target.tile_rows * target.tile_vectors * ROUNDS * threads
    gops = {
        name: 2.0 * chains * target.vector_bytes / size / seconds(code[name], [ROUNDS], 30) / 1e9
        for name, size in PRODUCTS.items()
    }
    memory = aligned(MEMORY_BYTES)
    memory[:] = 1  # untouched pages would all be the kernel's one zero page
    passes = 400
    cached = seconds(code["read"], [address(memory), CACHE_BYTES, passes], 10)
    share = MEMORY_BYTES // threads // 4096 * 4096
    whole = seconds(code["read"], [address(memory), share, 1], 4)
    return Ceilings(gops, CACHE_BYTES * passes * threads / cached / 1e9, share * threads / whole / 1e9)


@functools.cache
def ticks_per_second(target: CpuTarget) -> float:
    """The rate of the counter that the driver stamps traces with."""
    alone, scratch = pool.shared(1, library(target).driver), aligned(64)
    record, stamps = np.zeros((1, 4), np.int64), np.zeros((1, 1, 2), np.int64)  # a launch of no units

    def now() -> tuple[int, float]:
        stamps[:] = 0
        alone.run(record, scratch, 64, stamps)
        return int(stamps[0, 0, 1]), time.perf_counter()

    now()  # the first call is slow
    first, begin = now()
    time.sleep(0.02)
    last, end = now()
    return (last - first) / (end - begin)


def _text(target: CpuTarget) -> str:
    module = Module()
    for kind, element in (("f32", "float"), ("f64", "double")):
        module.define(kind, ENTRY_ARGUMENTS, lambda b, *given, element=element: _emit_fma(b, target, element, *given))
    for kind in ("dot_u7", "dot_u8"):
        module.define(
            kind, ENTRY_ARGUMENTS, lambda b, *given, kind=kind: _emit_dot(b, target, kind == "dot_u7", *given)
        )
    module.define("read", ENTRY_ARGUMENTS, lambda b, *given: _emit_read(b, target, *given))
    return module.text()


def _emit_fma(b: Builder, target: CpuTarget, element: str, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """As many independent chains as the matmul tile has, each a · 0.5 + 0.5."""
    type_ = vector(target.lanes(4 if element == "float" else 8), element)
    rounds = b.load("i64", args)
    half = b.load(type_, b.offset(scratch, 64))  # zeros from memory, so that nothing folds
    start = [b.op("fadd", half, const(type_, float(i))) for i in range(target.tile_rows * target.tile_vectors)]
    scale = b.op("fadd", half, const(type_, 0.5))
    sums = b.loop(0, rounds, 1, lambda i, *x: [fma(b, v, scale, scale, target) for v in x], start)
    total = functools.reduce(lambda x, y: b.op("fadd", x, y), sums)
    b.store(total, b.offset(scratch, 128))


def _emit_dot(b: Builder, target: CpuTarget, small: bool, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """As many independent chains, each s + s · y, byte by byte: s changes, so nothing can be done before the loop."""
    type_ = vector(target.lanes(4), "i32")
    rounds = b.load("i64", args)
    zero = b.load(type_, b.offset(scratch, 64))  # from memory, so that nothing folds
    start = [b.op("add", zero, const(type_, i)) for i in range(target.tile_rows * target.tile_vectors)]
    y = b.op("add", zero, const(type_, 0x01010101))
    sums = b.loop(0, rounds, 1, lambda i, *x: [dot(b, v, v, y, target, small=small) for v in x], start)
    b.store(functools.reduce(lambda x, y: b.op("add", x, y), sums), b.offset(scratch, 128))


def _emit_read(b: Builder, target: CpuTarget, args: Value, lo: Value, hi: Value, scratch: Value) -> None:
    """Passes over this unit's share of a buffer; the words are or-ed so that every load counts."""
    type_ = vector(target.lanes(4), "i32")
    base = b.load("ptr", args)
    share, passes = b.load("i64", b.offset(args, 8)), b.load("i64", b.offset(args, 16))
    mine = b.offset(base, b.mul(lo, share))
    step = target.vector_bytes * UNROLL

    def read(at: Value, *sums: Value) -> list[Value]:
        here = b.offset(mine, at)
        return [b.op("or", s, b.load(type_, b.offset(here, i * target.vector_bytes))) for i, s in enumerate(sums)]

    zero = const(type_, 0)
    sums = b.loop(0, passes, 1, lambda i, *x: b.loop(0, share, step, read, x), [zero] * UNROLL)
    b.store(functools.reduce(lambda x, y: b.op("or", x, y), sums), b.offset(scratch, 128))

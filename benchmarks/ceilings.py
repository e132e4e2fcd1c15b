"""What this machine can do at most: f32 FMA throughput and read bandwidth, measured by kernels that do nothing else.

Takes a thread count (and a buffer size for reads), emits LLVM IR text for the instruction set at hand, compiles it with
llvmlite and gives callables whose work is known. `harness.py` runs them as further libraries in its rotation, so that a
ceiling comes from the same minutes as the numbers under it; run as a script, this file prints them alone.
"""

from __future__ import annotations

import argparse
import ctypes
import functools
import mmap
import platform
import statistics
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import llvmlite.binding as llvm
import numpy as np
from worker import timed

CALL_SECONDS = 0.02  # a probe call is this long, so that waking its helper threads (some 50 us) is lost in it
DRAM_BYTES = 1 << 30
LINE = 64


@dataclass(frozen=True, slots=True)
class Isa:
    name: str
    lanes: int  # f32 in a vector register
    chains: int  # independent accumulators: enough to hide the FMA latency, few enough not to spill
    fused: bool  # whether the multiply-add is one instruction


AVX512 = Isa("avx512", lanes=16, chains=24, fused=True)
AVX2 = Isa("avx2", lanes=8, chains=12, fused=True)
NEON = Isa("neon", lanes=4, chains=24, fused=True)
BASELINE = Isa("baseline", lanes=4, chains=12, fused=False)


@dataclass(frozen=True, slots=True)
class Pattern:
    """How a read probe walks its buffer; which is fastest depends on the machine's prefetchers, so setup tries all."""

    streams: int
    prefetch: int  # bytes ahead, 0 for none
    lines: int = 1  # of so many lines, one is prefetched
    locality: int = 3  # as LLVM counts: 3 is the first-level cache, 2 the second


PATTERNS = (
    *(Pattern(streams, prefetch) for streams in (1, 2, 4, 8) for prefetch in (0, 1024, 4096)),
    *(Pattern(streams, prefetch, lines=4, locality=2) for streams in (1, 2) for prefetch in (4096, 16384)),
)


@dataclass(frozen=True, slots=True)
class Probe:
    call: Callable[[], None]
    work: float  # FLOPs or bytes of one call
    note: str


def available() -> list[Isa]:
    """Instruction sets of this CPU, widest first."""
    if platform.machine().lower() in ("aarch64", "arm64"):
        return [NEON]
    features = llvm.get_host_cpu_features()
    isas = [BASELINE]
    if features.get("avx2") and features.get("fma"):
        isas.insert(0, AVX2)
    if features.get("avx512f"):
        isas.insert(0, AVX512)
    return isas


def fma_ir(isa: Isa) -> str:
    """`fma(data, n)`: n rounds of `chains` independent a = a * x + y; x, y and the starting values come from data."""
    vec, size = f"<{isa.lanes} x float>", isa.lanes * 4
    fma = f"@llvm.fma.v{isa.lanes}f32"

    def step(i: int) -> str:
        if isa.fused:
            return f"  %b{i} = call {vec} {fma}({vec} %a{i}, {vec} %x, {vec} %y)"
        return f"  %m{i} = fmul {vec} %a{i}, %x\n  %b{i} = fadd {vec} %m{i}, %y"

    chains = range(isa.chains)
    load = [
        f"  %p{i} = getelementptr i8, ptr %data, i64 {(i + 2) * size}\n  %s{i} = load {vec}, ptr %p{i}, align {size}"
        for i in chains
    ]
    phis = [f"  %a{i} = phi {vec} [ %s{i}, %entry ], [ %b{i}, %loop ]" for i in chains]
    return "\n".join([
        f"declare {vec} {fma}({vec}, {vec}, {vec})",
        "define void @fma(ptr %data, i64 %n) {",
        "entry:",
        f"  %x = load {vec}, ptr %data, align {size}",
        f"  %py = getelementptr i8, ptr %data, i64 {size}",
        f"  %y = load {vec}, ptr %py, align {size}",
        *load,
        "  br label %loop",
        "loop:",
        "  %i = phi i64 [ 0, %entry ], [ %next, %loop ]",
        *phis,
        *map(step, chains),
        "  %next = add i64 %i, 1",
        "  %more = icmp slt i64 %next, %n",
        "  br i1 %more, label %loop, label %done",
        "done:",
        *(f"  store {vec} %b{i}, ptr %p{i}, align {size}" for i in chains),
        "  ret void",
        "}",
    ])  # fmt: skip


def read_ir(isa: Isa, pattern: Pattern) -> str:
    """`read(base, stride, reps, sink)`: reps passes over `streams` runs of `stride` bytes, end to end from base."""
    vec, size = f"<{isa.lanes} x i32>", isa.lanes * 4
    block = read_block(isa, pattern)
    places = [(s, offset) for s in range(pattern.streams) for offset in range(0, block, size)]
    loads: list[str] = []
    for n, (s, offset) in enumerate(places):
        loads += [
            f"  %p{n} = getelementptr i8, ptr %q{s}, i64 {offset}",
            f"  %v{n} = load {vec}, ptr %p{n}, align {size}",
            f"  %b{n} = xor {vec} %a{n}, %v{n}",
        ]
        if pattern.prefetch and offset % (pattern.lines * LINE) == 0:
            loads += [
                f"  %f{n} = getelementptr i8, ptr %p{n}, i64 {pattern.prefetch}",
                f"  call void @llvm.prefetch.p0(ptr %f{n}, i32 0, i32 {pattern.locality}, i32 1)",
            ]
    count = range(len(places))
    return "\n".join([
        "declare void @llvm.prefetch.p0(ptr, i32, i32, i32)",
        "define void @read(ptr %base, i64 %stride, i64 %reps, ptr %sink) {",
        "entry:",
        "  br label %pass",
        "pass:",
        "  %r = phi i64 [ 0, %entry ], [ %r1, %after ]",
        *(f"  %c{n} = phi {vec} [ zeroinitializer, %entry ], [ %b{n}, %after ]" for n in count),
        "  br label %loop",
        "loop:",
        "  %i = phi i64 [ 0, %pass ], [ %next, %loop ]",
        *(f"  %a{n} = phi {vec} [ %c{n}, %pass ], [ %b{n}, %loop ]" for n in count),
        *(f"  %o{s} = mul i64 %stride, {s}" for s in range(pattern.streams)),
        *(f"  %w{s} = add i64 %o{s}, %i" for s in range(pattern.streams)),
        *(f"  %q{s} = getelementptr i8, ptr %base, i64 %w{s}" for s in range(pattern.streams)),
        *loads,
        f"  %next = add i64 %i, {block}",
        "  %more = icmp slt i64 %next, %stride",
        "  br i1 %more, label %loop, label %after",
        "after:",
        "  %r1 = add i64 %r, 1",
        "  %again = icmp slt i64 %r1, %reps",
        "  br i1 %again, label %pass, label %done",
        "done:",
        f"  %x0 = xor {vec} %b0, zeroinitializer",  # every sum reaches the sink, or its loads could be dropped
        *(f"  %x{n} = xor {vec} %x{n - 1}, %b{n}" for n in count[1:]),
        f"  store {vec} %x{count[-1]}, ptr %sink, align {size}",
        "  ret void",
        "}",
    ])  # fmt: skip


def read_block(isa: Isa, pattern: Pattern) -> int:
    """Bytes that one turn of the loop takes from each stream: eight accumulators are live, at least a line a stream."""
    return max(LINE, 8 // pattern.streams * isa.lanes * 4)


@functools.cache
def compiled(ir: str, name: str) -> tuple[Callable[..., None], object]:
    """Machine code of `ir` as a ctypes function that releases the GIL, and the engine that must outlive it."""
    machine = target_machine()
    module = llvm.parse_assembly(ir)
    module.verify()
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    return ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(engine.get_function_address(name)), engine


def assembly(ir: str) -> str:
    """Assembly text of `ir` for this machine, to see that the loop is what it should be."""
    return str(target_machine().emit_assembly(llvm.parse_assembly(ir)))


def target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )


def cpu_name() -> str:
    """LLVM's name for this CPU, such as znver4."""
    return str(llvm.get_host_cpu_name())


class Team:
    """The calling thread and `threads - 1` helpers; `run` gives each its arguments and waits for all."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.helpers = ThreadPoolExecutor(threads - 1) if threads > 1 else None

    def run(self, function: Callable[..., None], arguments: Sequence[tuple[int, ...]]) -> None:
        waiting = [self.helpers.submit(function, *a) for a in arguments[1:]] if self.helpers else []
        function(*arguments[0])
        for future in waiting:
            future.result()


def repeated(once: Callable[[int], None], unit: float, note: str) -> Probe:
    """A probe whose call lasts about CALL_SECONDS; `once(reps)` does `unit` of work `reps` times."""
    reps = 1
    while (seconds := timed(functools.partial(once, reps))) < CALL_SECONDS / 4:
        reps *= 2
    reps = max(1, round(reps * CALL_SECONDS / seconds))
    return Probe(functools.partial(once, reps), unit * reps, note)


def fma_probe(threads: int, isa: Isa | None = None) -> Probe:
    """Peak f32 multiply-add throughput; `work` is in FLOPs."""
    isa = isa or available()[0]
    function, _engine = compiled(fma_ir(isa), "fma")
    rows = isa.chains + 2
    # 0.5 * a + 0.5 settles at 1: never an infinity, never a denormal, whatever the number of rounds.
    buffers = [aligned(rows * isa.lanes * 4) for _ in range(threads)]
    for buffer in buffers:
        buffer.view(np.float32)[:] = 0.5
    team = Team(threads)
    rounds = 4096

    def once(reps: int) -> None:
        team.run(function, [(b.ctypes.data, rounds * reps, 0, 0) for b in buffers])

    return repeated(once, 2.0 * isa.chains * isa.lanes * rounds * threads, isa.name)


def read_probe(threads: int, size: int, isa: Isa | None = None) -> Probe:
    """Read bandwidth over `size` bytes, each thread over its own share, in the fastest pattern; `work` is in bytes."""
    isa = isa or available()[0]
    grain = max(p.streams * read_block(isa, p) for p in PATTERNS)
    share = max(grain, size // threads // grain * grain)
    buffer = huge(share * threads)
    buffer[:] = 1  # an untouched page is the kernel's zero page: reading it would be reading cache
    sinks = [aligned(isa.lanes * 4) for _ in range(threads)]
    team = Team(threads)

    def probe(pattern: Pattern) -> Probe:
        function, _engine = compiled(read_ir(isa, pattern), "read")

        def once(reps: int) -> None:
            base = buffer.ctypes.data
            shares = [(base + t * share, share // pattern.streams, reps, sinks[t].ctypes.data) for t in range(threads)]
            team.run(function, shares)

        return repeated(once, float(share * threads), f"{isa.name}, {pattern.streams} streams, +{pattern.prefetch} B")

    probes = [probe(pattern) for pattern in PATTERNS]
    turns = [[p.work / timed(p.call) for p in probes] for _ in range(3)]  # in turns: a slow moment hits all alike
    best = [max(rates) for rates in zip(*turns, strict=True)]
    return probes[best.index(max(best))]


def aligned(size: int) -> np.ndarray:
    """`size` bytes on a cache line of their own."""
    raw = np.zeros(size + 2 * LINE, np.uint8)
    skip = -raw.ctypes.data % LINE
    return raw[skip : skip + size]


def huge(size: int) -> np.ndarray:
    """`size` bytes in huge pages where the system has them: a ceiling should not be a TLB's."""
    page = 2 << 20
    room = (size + 2 * page - 1) // page * page  # so that the data can begin on a huge page
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory = mmap.mmap(-1, room, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)  # shared memory gets no huge pages
        memory.madvise(mmap.MADV_HUGEPAGE)
    else:
        memory = mmap.mmap(-1, room)
    raw = np.frombuffer(memory, np.uint8)
    skip = -raw.ctypes.data % page
    return raw[skip : skip + size]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--read", type=float, nargs="*", default=[0.5, 2, 8, 16, 64], metavar="MB", help="buffer sizes")
    args = parser.parse_args()
    probes: dict[str, tuple[Probe, str]] = {}
    for threads in args.threads:
        for isa in available():
            probes[f"{threads}t FMA f32 {isa.name}"] = fma_probe(threads, isa), "GFLOPS"
        for megabytes in args.read:
            probes[f"{threads}t read {megabytes:g} MB"] = read_probe(threads, int(megabytes * 1e6)), "GB/s"
        probes[f"{threads}t read DRAM (1 GiB)"] = read_probe(threads, DRAM_BYTES), "GB/s"
    rates: dict[str, list[float]] = {name: [] for name in probes}
    for turn in range(args.rounds):
        print(f"round {turn + 1} of {args.rounds}", file=sys.stderr)
        for name, (probe, _unit) in probes.items():
            rates[name].append(probe.work / timed(probe.call) / 1e9)
    for name, (probe, unit) in probes.items():
        median, best = statistics.median(rates[name]), max(rates[name])
        print(f"{name:<24} median {median:7.1f}  best {best:7.1f} {unit:<7} ({probe.note})")


if __name__ == "__main__":
    main()

"""The driver: machine code that walks launch records, on the calling thread or on all threads of a pool.

`driver_text` is its LLVM IR for a target. Records and job blocks are plain memory that Python fills; the constants
below are their layout. Threads that wait spin for a while and then sleep in the kernel, by inline system calls, so
the object has no undefined symbols.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlx.backends.cpu.builder import NULL, Builder, Module, Value, const, i64
from rlx.target import Target

# The functions of the object:
#   execute(job, tid, threads)   walk all records as thread `tid` of `threads`
#   run(job, records, count, scratch, stride, trace, slots) -> how many threads took part
#   call(job, request)           `run` with its other arguments in memory: two words cross over from Python, not seven
#   worker(job, tid)             the life of a pool thread, until `stop`
#   stop(job) -> 1, or 0 where a run is going on; after it, every run stays on the thread that calls
#   spin(count)                  that many pauses, to measure how long one is
SYMBOLS = ("execute", "run", "call", "worker", "stop", "spin")

REQUEST_WORDS = 6  # of `call`: records, count, scratch, stride, trace, slots

# A launch record: the function's address, the address of its arguments, its units, flags.
RECORD_WORDS = 4
BARRIER_AFTER = 1  # flag: no thread starts the next record before all have finished this one

# The head of each thread's scratch: what went wrong (kernels set it), and the number, from 1, of the first record that
# did.
STATUS, FAILED = 0, 8

# A job block. Words that different threads write lie 128 bytes apart, because x86 fetches cache lines in pairs.
LINE = 128
RECORDS, COUNT, SCRATCH, STRIDE, TRACE, SLOTS, THREADS = range(0, 56, 8)  # the current run
POOL_THREADS, SPIN = 64, 72  # set once: how many threads there are, how many pauses before a sleep
BUSY = 1 * LINE  # 1 while a run has the pool
PENDING = 2 * LINE  # workers that are not done; ASLEEP_BIT is added when the caller sleeps
ARRIVED = 3 * LINE  # threads that are at the barrier
PHASE = 4 * LINE  # 2 more after each barrier; bit 0 is set when a thread sleeps at this one
SEATS = 5 * LINE  # a line for each thread: what its worker is to do

IDLE, ASLEEP, CALLED, STOPPED = range(4)  # states of a seat; the last two end a worker's wait
ASLEEP_BIT = 1 << 31
EVERYONE = (1 << 31) - 1

WAIT, WAKE = 128, 129  # futex operations, private to the process
DEFAULT_MXCSR = 0x1F80  # nearest rounding, no traps, denormals are numbers


def job_bytes(threads: int) -> int:
    """The size of a pool's job block."""
    return SEATS + threads * LINE


def driver_text(target: Target) -> str:
    """The driver's LLVM IR; only the architecture of the target matters."""
    module = Module()
    _Driver(_MACHINES[target.arch]).define(module)
    return module.text()


@dataclass(frozen=True, slots=True)
class _Machine:
    """What differs between architectures."""

    system_call: str
    constraints: str  # result; number, address, operation, value, timeout; what else changes
    futex: int  # number of the system call
    pause: str
    pause_arguments: tuple[Value, ...]
    has_mxcsr: bool


_MACHINES = {
    "x86_64": _Machine(
        "syscall",
        "={rax},{rax},{rdi},{rsi},{rdx},{r10},~{rcx},~{r11},~{memory},~{dirflag},~{fpsr},~{flags}",
        202,
        "llvm.x86.sse2.pause",
        (),
        has_mxcsr=True,
    ),
    # `isb` really waits; `yield` is nothing on most cores.
    "aarch64": _Machine(
        "svc #0",
        "={x0},{x8},{x0},{x1},{x2},{x3},~{memory}",
        98,
        "llvm.aarch64.isb",
        (const("i32", 15),),
        has_mxcsr=False,
    ),
}


def _i32(value: int) -> Value:
    return const("i32", value)


def _load(b: Builder, pointer: Value, order: str = "acquire") -> Value:
    return b.assign("i32", f"load atomic i32, {pointer} {order}, align 4")


def _store(b: Builder, value: int | Value, pointer: Value, order: str = "monotonic") -> None:
    word = value if isinstance(value, Value) else _i32(value)
    b.line(f"store atomic {word}, {pointer} {order}, align 4")


def _exchange(b: Builder, operation: str, pointer: Value, value: int | Value) -> Value:
    """An atomic read-modify-write (`add`, `sub`, `or`, `xchg`); the result is the old word."""
    word = value if isinstance(value, Value) else _i32(value)
    return b.assign("i32", f"atomicrmw {operation} {pointer}, {word} acq_rel, align 4")


def _replace(b: Builder, pointer: Value, old: int | Value, new: int | Value) -> Value:
    """Set the word to `new` if it is `old`; the result says whether it was."""
    before, after = (v if isinstance(v, Value) else _i32(v) for v in (old, new))
    pair = b.assign("{ i32, i1 }", f"cmpxchg {pointer}, {before}, {after} acq_rel acquire, align 4")
    return b.assign("i1", f"extractvalue {pair}, 1")


def _has_bit(b: Builder, word: Value, bit: int) -> Value:
    return b.icmp("ne", b.op("and", word, const(word.type, bit)), 0)


class _Driver:
    """Emits the functions of `SYMBOLS` and the barrier between them."""

    def __init__(self, machine: _Machine) -> None:
        self.machine = machine

    def define(self, module: Module) -> None:
        job, tid, threads = ("ptr", "job"), ("i64", "tid"), ("i64", "threads")
        given = [("ptr", "records"), ("i64", "count"), ("ptr", "scratch"), ("i64", "stride"), ("ptr", "trace")]
        module.define("barrier", [job, threads], self.barrier, internal=True, noinline=True)
        module.define("execute", [job, tid, threads], self.execute)
        module.define("run", [job, *given, ("i64", "slots")], self.run, result="i64")
        module.define("call", [job, ("ptr", "request")], self.call, result="i64")
        module.define("worker", [job, tid], self.worker)
        module.define("stop", [job], self.stop, result="i64")
        module.define("spin", [("i64", "count")], self.spin)

    # -- waiting and waking ---------------------------------------------------------------------------------------
    def futex(self, b: Builder, address: Value, operation: int, value: Value) -> None:
        """futex(address, operation, value). Its result never matters: a waiter looks at the word again."""
        m = self.machine
        where, wide = b.convert("ptrtoint", address, "i64"), b.convert("zext", value, "i64")
        arguments = f"i64 {m.futex}, {where}, i64 {operation}, {wide}, i64 0"
        b.assign("i64", f'call i64 asm sideeffect "{m.system_call}", "{m.constraints}"({arguments})')

    def wake(self, b: Builder, address: Value, count: int) -> None:
        self.futex(b, address, WAKE, _i32(count))

    def pause(self, b: Builder) -> None:
        b.call("void", self.machine.pause, *self.machine.pause_arguments)

    def wait(
        self,
        b: Builder,
        job: Value,
        address: Value,
        done: Callable[[Value], Value],
        announce: Callable[[], object],
    ) -> None:
        """Wait until `done(word)` of the word at `address`: spin, then `announce` the sleep in that word, and sleep.

        No wake-up is lost, because the announcement is in the very word that the waker changes, and both change it
        by one atomic operation. Either the waker comes second: it sees the announcement and wakes. Or it comes
        first: then the word the sleeper loads next is done. A change between that load and the sleep makes the
        kernel, which compares the word again, return at once.
        """
        tag = b.fresh("wait")
        limit = b.load("i64", b.offset(job, SPIN), align=8)
        before, index, following = b.block, Value("i64", f"%{tag}.i"), Value("i64", f"%{tag}.n")
        b.line(f"br label %{tag}.look")
        b.label(f"{tag}.look")
        b.line(f"{index.text} = phi i64 [ 0, %{before} ], [ {following.text}, %{tag}.pause ]")
        b.line(f"br {done(_load(b, address))}, label %{tag}.done, label %{tag}.more")
        b.label(f"{tag}.more")
        b.line(f"br {b.icmp('slt', index, limit)}, label %{tag}.pause, label %{tag}.tired")
        b.label(f"{tag}.pause")
        self.pause(b)
        b.line(f"{following.text} = add {index}, 1")
        b.line(f"br label %{tag}.look")

        b.label(f"{tag}.tired")
        announce()
        b.line(f"br label %{tag}.check")
        b.label(f"{tag}.check")
        word = _load(b, address)
        b.line(f"br {done(word)}, label %{tag}.done, label %{tag}.sleep")
        b.label(f"{tag}.sleep")
        self.futex(b, address, WAIT, word)
        b.line(f"br label %{tag}.check")  # woken, interrupted or not even asleep
        b.label(f"{tag}.done")

    def barrier(self, b: Builder, job: Value, threads: Value) -> None:
        """Return when all threads are here. The last to arrive resets the count and opens the next phase.

        The phase cannot move on twice while a thread still waits for it, since the next barrier needs that thread.
        """
        arrived, phase_word = b.offset(job, ARRIVED), b.offset(job, PHASE)
        phase = b.op("and", _load(b, phase_word, "monotonic"), _i32(-2))
        position = _exchange(b, "add", arrived, 1)

        def open_next() -> None:
            _store(b, 0, arrived)
            old = _exchange(b, "xchg", phase_word, b.add(phase, 2))
            b.when(_has_bit(b, old, 1), lambda: self.wake(b, phase_word, EVERYONE))

        def wait_for_it() -> None:
            self.wait(
                b,
                job,
                phase_word,
                done=lambda word: b.icmp("ne", b.op("and", word, _i32(-2)), phase),
                announce=lambda: _replace(b, phase_word, phase, b.op("or", phase, _i32(1))),
            )

        last = b.icmp("eq", b.convert("zext", position, "i64"), b.sub(threads, 1))
        b.when(last, open_next, wait_for_it)

    # -- one thread's walk ----------------------------------------------------------------------------------------
    def execute(self, b: Builder, job: Value, tid: Value, threads: Value) -> None:
        control = b.stack("i32", 2, align=4) if self.machine.has_mxcsr else NULL
        self.default_control(b, control)
        stride, slots = (b.load("i64", b.offset(job, field), align=8) for field in (STRIDE, SLOTS))
        records, base, trace = (b.load("ptr", b.offset(job, field), align=8) for field in (RECORDS, SCRATCH, TRACE))
        count = b.load("i64", b.offset(job, COUNT), align=8)
        scratch = b.offset(base, b.mul(tid, stride))

        def clear(slot: Value) -> None:
            for field in (STATUS, FAILED):
                b.store(i64(0), b.offset(b.offset(base, b.mul(slot, stride)), field), align=8)

        # The status words of slots that no thread has today are cleared too, so that a reader may look at all.
        b.loop(tid, slots, threads, clear)
        traced, several = b.icmp("ne", trace, NULL), b.icmp("ne", threads, 1)

        def stamp(record: Value, end: int) -> None:
            cell = b.add(b.mul(b.add(b.mul(record, slots), tid), 2), end)  # trace[record][tid][end]
            b.store(b.call("i64", "llvm.readcyclecounter"), b.offset(trace, cell, "i64"), align=8)

        def call(record: Value, function: Value, arguments: Value, low: Value, high: Value) -> None:
            b.call_pointer(function, arguments, low, high, scratch)
            status, failed = (b.load("i64", b.offset(scratch, field), align=8) for field in (STATUS, FAILED))
            first = b.op("and", b.icmp("ne", status, 0), b.icmp("eq", failed, 0))
            b.when(first, lambda: b.store(b.add(record, 1), b.offset(scratch, FAILED), align=8))

        def launch(record: Value) -> None:
            at = b.offset(records, b.mul(record, RECORD_WORDS), "i64")
            function, arguments = (b.load("ptr", b.offset(at, word, "i64"), align=8) for word in (0, 1))
            units, flags = (b.load("i64", b.offset(at, word, "i64"), align=8) for word in (2, 3))
            low = b.sdiv(b.mul(units, tid), threads)
            high = b.sdiv(b.mul(units, b.add(tid, 1)), threads)
            b.when(traced, lambda: stamp(record, 0))
            b.when(b.icmp("slt", low, high), lambda: call(record, function, arguments, low, high))
            b.when(traced, lambda: stamp(record, 1))
            meet = b.op("and", several, _has_bit(b, flags, BARRIER_AFTER))
            b.when(meet, lambda: b.line(f"call void @barrier({job}, {threads})"))

        b.loop(0, count, 1, launch)
        if self.machine.has_mxcsr:
            b.call("void", "llvm.x86.sse.ldmxcsr", control)

    def default_control(self, b: Builder, control: Value) -> None:
        """Save the MXCSR of the caller, who may flush denormals, and set the default."""
        if self.machine.has_mxcsr:
            b.call("void", "llvm.x86.sse.stmxcsr", control)
            b.store(_i32(DEFAULT_MXCSR), b.offset(control, 1, "i32"), align=4)
            b.call("void", "llvm.x86.sse.ldmxcsr", b.offset(control, 1, "i32"))

    # -- all threads ----------------------------------------------------------------------------------------------
    def call(self, b: Builder, job: Value, request: Value) -> Value:
        kinds = ("ptr", "i64", "ptr", "i64", "ptr", "i64")  # records, count, scratch, stride, trace, slots
        given = [b.load(kind, b.offset(request, 8 * i), align=8) for i, kind in enumerate(kinds)]
        return b.call("i64", "run", job, *given)

    def run(
        self,
        b: Builder,
        job: Value,
        records: Value,
        count: Value,
        scratch: Value,
        stride: Value,
        trace: Value,
        slots: Value,
    ) -> Value:
        """Execute the records on the pool, or on this thread alone where the pool is busy or has but one."""
        own = b.stack("i8", LINE, align=8)  # a job block for the walk alone, which meets no other thread
        threads = b.min(slots, b.load("i64", b.offset(job, POOL_THREADS), align=8))

        def fill(block: Value, taking_part: Value) -> None:
            fields = (records, count, scratch, stride, trace, slots, taking_part)
            for offset, value in zip(range(RECORDS, THREADS + 8, 8), fields, strict=True):
                b.store(value, b.offset(block, offset), align=8)

        def together() -> list[Value]:
            fill(job, threads)
            pending = b.offset(job, PENDING)
            _store(b, b.convert("trunc", b.sub(threads, 1), "i32"), pending)
            b.loop(1, threads, 1, lambda tid: self.call_worker(b, job, tid, CALLED))
            b.line(f"call void @execute({job}, i64 0, {threads})")
            self.wait(
                b,
                job,
                pending,
                done=lambda word: b.icmp("eq", b.op("and", word, _i32(EVERYONE)), 0),
                announce=lambda: _exchange(b, "or", pending, ASLEEP_BIT),
            )
            _store(b, 0, b.offset(job, BUSY), "release")
            return [threads]

        def alone() -> list[Value]:
            fill(own, i64(1))
            b.line(f"call void @execute({own}, i64 0, i64 1)")
            return [i64(1)]

        several = b.icmp("sgt", threads, 1)
        (free,) = b.when(several, lambda: [_replace(b, b.offset(job, BUSY), 0, 1)], lambda: [const("i1", False)])
        return b.when(free, together, alone)[0]

    def seat(self, b: Builder, job: Value, tid: Value) -> Value:
        return b.offset(b.offset(job, SEATS), b.mul(tid, LINE))

    def call_worker(self, b: Builder, job: Value, tid: Value, state: int) -> None:
        seat = self.seat(b, job, tid)
        old = _exchange(b, "xchg", seat, state)
        b.when(b.icmp("eq", old, ASLEEP), lambda: self.wake(b, seat, 1))

    def worker(self, b: Builder, job: Value, tid: Value) -> None:
        """Wait to be called, take part, report; a caller changes the job and the seat only after the report."""
        seat, pending = self.seat(b, job, tid), b.offset(job, PENDING)
        b.line("br label %again")
        b.label("again")
        self.wait(
            b,
            job,
            seat,
            done=lambda word: b.icmp("ugt", word, ASLEEP),
            announce=lambda: _replace(b, seat, IDLE, ASLEEP),
        )
        b.line(f"br {b.icmp('eq', _load(b, seat), STOPPED)}, label %stopped, label %called")
        b.label("called")
        _store(b, IDLE, seat)
        threads = b.load("i64", b.offset(job, THREADS), align=8)
        b.line(f"call void @execute({job}, {tid}, {threads})")
        old = _exchange(b, "sub", pending, 1)
        b.when(b.icmp("eq", old, _i32(ASLEEP_BIT | 1)), lambda: self.wake(b, pending, 1))
        b.line("br label %again")
        b.label("stopped")

    def stop(self, b: Builder, job: Value) -> Value:
        """Send the workers home. The pool stays taken, so that later runs do not call workers that are gone."""
        free = _replace(b, b.offset(job, BUSY), 0, 1)
        threads = b.load("i64", b.offset(job, POOL_THREADS), align=8)
        b.when(free, lambda: b.loop(1, threads, 1, lambda tid: self.call_worker(b, job, tid, STOPPED)))
        return b.convert("zext", free, "i64")

    def spin(self, b: Builder, count: Value) -> None:
        b.loop(0, count, 1, lambda _: self.pause(b))

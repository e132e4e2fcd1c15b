"""The driver's code: emits the functions of `driver.SYMBOLS` as LLVM IR. The walk over records is in `driver_walk`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlx.backends.cpu import driver as d
from rlx.backends.cpu.builder import NULL, Builder, Module, Value, const, i64
from rlx.backends.cpu.driver_walk import Walk
from rlx.backends.cpu.fast_call_code import repeat
from rlx.backends.cpu.targets import CpuTarget

TAKE = ("function", "arguments", "units", "launch", "record", "scratch")  # what `take` and `barrier` share


def emitted(target: CpuTarget) -> str:
    """The driver's LLVM IR."""
    module = Module()
    Driver(_MACHINES[target.arch]).define(module)
    return module.text()


@dataclass(frozen=True, slots=True)
class _Machine:
    """What differs between architectures."""

    system_call: str
    constraints: str  # result; number, four arguments; what else changes
    futex: int  # numbers of system calls
    set_affinity: int
    get_affinity: int
    get_core: int
    get_thread: int
    pause: str
    pause_arguments: tuple[Value, ...]
    has_mxcsr: bool


_MACHINES = {
    "x86_64": _Machine(
        "syscall",
        "={rax},{rax},{rdi},{rsi},{rdx},{r10},~{rcx},~{r11},~{memory},~{dirflag},~{fpsr},~{flags}",
        futex=202,
        set_affinity=203,
        get_affinity=204,
        get_core=309,
        get_thread=186,
        pause="llvm.x86.sse2.pause",
        pause_arguments=(),
        has_mxcsr=True,
    ),
    # `isb` really waits; `yield` is nothing on most cores.
    "aarch64": _Machine(
        "svc #0",
        "={x0},{x8},{x0},{x1},{x2},{x3},~{memory}",
        futex=98,
        set_affinity=122,
        get_affinity=123,
        get_core=168,
        get_thread=178,
        pause="llvm.aarch64.isb",
        pause_arguments=(const("i32", 15),),
        has_mxcsr=False,
    ),
}


# -- atomic words ---------------------------------------------------------------------------------------------------
# All are sequentially consistent: two threads that each write one word and then read the other's must not both miss it.
def _word(value: int | Value, type_: str) -> Value:
    return value if isinstance(value, Value) else const(type_, value)


def _load(b: Builder, pointer: Value, type_: str = "i32") -> Value:
    return b.assign(type_, f"load atomic {type_}, {pointer} seq_cst, align {int(type_[1:]) // 8}")


def _store(b: Builder, value: Value, pointer: Value) -> None:
    """Publish what was written before."""
    b.line(f"store atomic {value}, {pointer} release, align {int(value.type[1:]) // 8}")


def _exchange(b: Builder, operation: str, pointer: Value, value: int | Value, type_: str = "i32") -> Value:
    """An atomic read-modify-write (`add`, `sub`, `xchg`); the result is the old word."""
    word = _word(value, type_)
    return b.assign(word.type, f"atomicrmw {operation} {pointer}, {word} seq_cst, align {int(word.type[1:]) // 8}")


def _replace(b: Builder, pointer: Value, old: int | Value, new: int | Value, type_: str = "i32") -> Value:
    """Set the word to `new` if it is `old`; the result says whether it was."""
    before, after = _word(old, type_), _word(new, type_)
    size = int(before.type[1:]) // 8
    pair = b.assign(f"{{ {before.type}, i1 }}", f"cmpxchg {pointer}, {before}, {after} seq_cst seq_cst, align {size}")
    return b.assign("i1", f"extractvalue {pair}, 1")


def _announced(b: Builder, pointer: Value, awake: int, asleep: int) -> Value:
    """Say in the very word that a thread waits for that it sleeps."""
    _replace(b, pointer, awake, asleep)
    return const("i32", asleep)


def _do(b: Builder, function: str, *arguments: Value) -> None:
    """Call a function of the driver that has no result."""
    b.line(f"call void @{function}({', '.join(map(str, arguments))})")


class Driver:
    """Emits the functions of `SYMBOLS` and those that they share."""

    def __init__(self, machine: _Machine) -> None:
        self.machine = machine

    def define(self, module: Module) -> None:
        job, tid, threads, run = ("ptr", "job"), ("i64", "tid"), ("i64", "threads"), ("i64", "run")
        part = [("ptr" if name in ("function", "arguments", "scratch") else "i64", name) for name in TAKE]
        done = [("i64", "wanted"), ("i64", "more")]

        def internal(name: str, arguments: list[tuple[str, str]], emit: Callable[..., Value | None], **k: str) -> None:
            module.define(name, arguments, emit, internal=True, noinline=True, **k)

        internal("confine", [job, tid], self.confine)
        internal("free", [job, tid], self.free)
        internal("leave", [job, tid], self.leave)
        internal("wake_sleepers", [job, tid], self.wake_sleepers)
        internal("finish", [job, tid, *done], self.finish)
        internal("take", [job, ("i64", "slot"), *part], self.take, result="i64")
        internal("take_others", [job, tid, *part], self.take_others, result="i64")
        internal("barrier", [job, tid, run, ("i1", "final"), *done, *part], self.barrier, result="i64")
        internal("wait_done", [job, tid, run, ("i64", "wanted"), ("ptr", "scratch")], self.wait_done, result="i64")
        internal("decide", [job, tid, ("i64", "test"), ("ptr", "predicate")], self.decide, result="i64")
        module.define("execute", [job, tid, threads, run], self.execute)
        module.define("call", [job, ("ptr", "request")], self.call, result="i64")
        module.define("repeat", [("ptr", "self"), ("ptr", "inputs")], repeat, result="ptr")
        module.define("worker", [job, tid], self.worker)
        module.define("stop", [job], self.stop, result="i64")
        module.define("spin", [("i64", "count")], self.spin)
        module.define("clock", [], self.now, result="i64")

    # -- the system ---------------------------------------------------------------------------------------------------
    def system(self, b: Builder, number: int, *arguments: Value | int) -> Value:
        """A system call. Errors do not matter here: what was asked for is looked at again, or not vital."""
        m = self.machine
        words = [_word(a, "i64") for a in arguments]
        words = [b.convert("ptrtoint", w, "i64") if w.type == "ptr" else b.convert("zext", w, "i64") for w in words]
        given = ", ".join(map(str, [i64(number), *words, *[i64(0)] * (4 - len(words))]))
        return b.assign("i64", f'call i64 asm sideeffect "{m.system_call}", "{m.constraints}"({given})')

    def wake(self, b: Builder, address: Value, count: int) -> None:
        self.system(b, self.machine.futex, address, d.WAKE, count)

    def pause(self, b: Builder) -> None:
        b.call("void", self.machine.pause, *self.machine.pause_arguments)

    def now(self, b: Builder) -> Value:
        return b.call("i64", "llvm.readcyclecounter")

    def wait(
        self,
        b: Builder,
        job: Value,
        done: Callable[[], Value],
        address: Value,
        announce: Callable[[], Value],
        meanwhile: Callable[[], object] | None = None,
    ) -> Value:
        """Wait until `done()`: spin, then `announce` the sleep, and sleep on the word at `address`. Says if it slept.

        Between two looks there is a pause, or what there is to do `meanwhile`. `announce` gives the word to sleep on.

        No wake-up is lost: who makes it done does so before looking for an announcement, and then changes the word. So
        either the waker sees the announcement, or the look that follows it sees that all is done. A word that is not
        the announced one, be it changed in between, makes the kernel, which compares it again, return at once.
        """
        tag = b.fresh("wait")
        limit = b.load("i64", b.offset(job, d.SPIN), align=8)
        before, index, following = b.block, Value("i64", f"%{tag}.i"), Value("i64", f"%{tag}.n")
        b.line(f"br label %{tag}.look")
        b.label(f"{tag}.look")
        b.line(f"{index.text} = phi i64 [ 0, %{before} ], [ {following.text}, %{tag}.again ]")
        b.line(f"br {done()}, label %{tag}.done, label %{tag}.more")
        b.label(f"{tag}.more")
        b.line(f"br {b.icmp('slt', index, limit)}, label %{tag}.pause, label %{tag}.tired")
        b.label(f"{tag}.pause")
        (meanwhile or (lambda: self.pause(b)))()
        b.line(f"{following.text} = add {index}, 1")
        b.line(f"br label %{tag}.again")
        b.label(f"{tag}.again")
        b.line(f"br label %{tag}.look")

        b.label(f"{tag}.tired")
        word = announce()
        awake = b.block
        b.line(f"br {done()}, label %{tag}.done, label %{tag}.sleep")
        b.label(f"{tag}.sleep")
        self.system(b, self.machine.futex, address, d.WAIT, word)
        b.line(f"br label %{tag}.tired")  # woken, interrupted or not even asleep
        b.label(f"{tag}.done")
        return b.assign("i1", f"phi i1 [ false, %{tag}.look ], [ true, %{awake} ]")

    # -- cores --------------------------------------------------------------------------------------------------------
    def core(self, b: Builder) -> Value:
        """The core that this thread is on."""
        place = b.stack("i32", 1, align=4)
        b.store(const("i32", 0), place, align=4)
        self.system(b, self.machine.get_core, place)
        return b.convert("zext", b.load("i32", place, align=4), "i64")

    def confine(self, b: Builder, job: Value, tid: Value) -> None:
        """Keep a worker that sleeps away from this core, if it may use any other.

        The kernel likes to wake a thread on the core of its waker, where it then waits for a time slice. So the worker
        is confined to other cores while it wakes up. Awake, it may use all of its own again, and the system balances.
        """
        mask, words = b.stack("i64", d.CORES_BYTES // 8, align=8), d.CORES_BYTES // 8
        here = self.core(b)
        seat = self.seat(b, job, tid)
        thread, cores = b.load("i64", b.offset(seat, d.THREAD), align=8), b.offset(seat, d.CORES)
        self.system(b, self.machine.get_affinity, thread, d.CORES_BYTES, cores)

        def without_this(i: Value, has: Value, others: Value) -> list[Value]:
            own = b.icmp("eq", i, b.op("lshr", here, i64(6)))
            bit = b.select(own, b.op("shl", i64(1), b.op("and", here, i64(63))), i64(0))
            word = b.load("i64", b.offset(cores, i, "i64"), align=8)
            left = b.op("and", word, b.op("xor", bit, i64(-1)))
            b.store(left, b.offset(mask, i, "i64"), align=8)
            return [b.op("or", has, b.op("and", word, bit)), b.op("or", others, left)]

        def keep_away() -> None:
            self.system(b, self.machine.set_affinity, thread, d.CORES_BYTES, mask)
            b.store(i64(1), b.offset(seat, d.CONFINED), align=8)

        has, others = b.loop(0, words, 1, without_this, [i64(0), i64(0)])
        b.when(b.op("and", b.icmp("ne", has, 0), b.icmp("ne", others, 0)), keep_away)

    def free(self, b: Builder, job: Value, tid: Value) -> None:
        """Let this thread use all of its cores again."""
        seat = self.seat(b, job, tid)
        confined = b.offset(seat, d.CONFINED)

        def all_again() -> None:
            self.system(b, self.machine.set_affinity, 0, d.CORES_BYTES, b.offset(seat, d.CORES))
            b.store(i64(0), confined, align=8)

        b.when(b.icmp("ne", b.load("i64", confined, align=8), 0), all_again)

    # -- sharing a launch ---------------------------------------------------------------------------------------------
    def take(self, b: Builder, job: Value, slot: Value, *part: Value) -> Value:
        """Claim and run chunks of the slice of `slot` until none is left; the number of units that were run."""
        function, arguments, units, launch, record, scratch = part
        threads, chunks = (b.load("i64", b.offset(job, field), align=8) for field in (d.THREADS, d.SLICE_CHUNKS))
        low, high = (b.sdiv(b.mul(units, s), threads) for s in (slot, b.add(slot, 1)))
        size, word = b.sub(high, low), b.offset(self.seat(b, job, slot), d.CLAIMED)
        claim = b.op("shl", launch, i64(d.CLAIM_SHIFT))

        def start(chunk: Value) -> Value:
            """What comes before a chunk: nothing, half, three quarters, ... of the slice, and at last all of it."""
            past = b.sub(size, b.op("lshr", size, chunk))
            return b.select(b.icmp("slt", chunk, chunks), past, size)

        b.line("br label %next")
        b.label("next")
        total, taken = Value("i64", "%total"), Value("i64", "%taken")
        b.line(f"{total.text} = phi i64 [ 0, %entry ], [ {total.text}, %claim ], [ {taken.text}, %run ]")
        old = _load(b, word, "i64")
        begun = b.icmp("uge", old, claim)
        chunk = b.select(begun, b.sub(old, claim), i64(0))
        chunk = b.select(b.icmp("ult", chunk, chunks), chunk, chunks)  # also where a later launch has begun
        first = start(chunk)
        b.line(f"br {b.icmp('slt', first, size)}, label %claim, label %nothing")
        b.label("claim")
        last = start(b.add(chunk, 1))
        mine = _replace(b, word, old, b.add(b.add(claim, chunk), 1), "i64")
        b.line(f"br {mine}, label %run, label %next")
        b.label("run")
        b.call_pointer(function, arguments, b.add(low, first), b.add(low, last), scratch)
        b.line(f"{taken.text} = add {total}, {b.sub(last, first).text}")
        b.line("br label %next")
        b.label("nothing")

        def report() -> None:
            b.store(record, b.offset(scratch, d.FAILED), align=8)
            _replace(b, b.offset(job, d.FAULT), 0, launch, "i64")

        status, failed = (b.load("i64", b.offset(scratch, field), align=8) for field in (d.STATUS, d.FAILED))
        b.when(b.op("and", b.icmp("ne", status, 0), b.icmp("eq", failed, 0)), report)
        return total

    def take_others(self, b: Builder, job: Value, tid: Value, *part: Value) -> Value:
        """What is left of the slices of others, the next thread's first."""
        threads = b.load("i64", b.offset(job, d.THREADS), align=8)

        def one(i: Value, total: Value) -> list[Value]:
            slot = b.add(tid, i)
            slot = b.select(b.icmp("slt", slot, threads), slot, b.sub(slot, threads))
            return [b.add(total, b.call("i64", "take", job, slot, *part))]

        return b.loop(1, threads, 1, one, [i64(0)])[0]

    # -- barriers -----------------------------------------------------------------------------------------------------
    def finish(self, b: Builder, job: Value, tid: Value, wanted: Value, more: Value) -> None:
        """Report units as done; who makes it `wanted` of them wakes those that sleep until then."""
        before = _exchange(b, "add", b.offset(job, d.DONE), more)

        def last() -> None:
            _exchange(b, "xchg", b.offset(job, d.PASSED), wanted)
            _do(b, "wake_sleepers", job, tid)

        b.when(b.icmp("eq", b.add(before, more), wanted), last)

    def wake_sleepers(self, b: Builder, job: Value, tid: Value) -> None:
        """Wake all threads that sleep in a run."""

        def wake() -> None:
            _exchange(b, "xchg", b.offset(job, d.SLEEPERS), 0)  # before the word: who comes later sees what is done
            _exchange(b, "add", b.offset(job, d.WAKES), 1)
            self.wake(b, b.offset(job, d.WAKES), d.EVERYONE)

        b.when(b.icmp("ne", _load(b, b.offset(job, d.SLEEPERS)), 0), wake)

    def sleep(
        self, b: Builder, job: Value, done: Callable[[], Value], meanwhile: Callable[[], object] | None = None
    ) -> Value:
        """Wait in a run for what other threads do, as long as it takes. Says if it slept."""
        wakes = b.offset(job, d.WAKES)

        def announce() -> Value:
            # The word first: who takes the announcement back, for what others wait for, changes the word after that.
            word = _load(b, wakes)
            _exchange(b, "xchg", b.offset(job, d.SLEEPERS), 1)
            return word

        return self.wait(b, job, done, wakes, announce, meanwhile)

    def done(self, b: Builder, job: Value) -> Value:
        """The units that are done, as far as threads know that wait for them."""
        many = b.icmp("sgt", b.load("i64", b.offset(job, d.THREADS), align=8), d.FEW)
        return _load(b, b.select(many, b.offset(job, d.PASSED), b.offset(job, d.DONE)), "i64")

    def is_done(self, b: Builder, job: Value, wanted: Value) -> Value:
        return b.icmp("sge", self.done(b, job), wanted)

    def barrier(
        self, b: Builder, job: Value, tid: Value, run: Value, final: Value, wanted: Value, more: Value, *part: Value
    ) -> Value:
        """Report `more` units, return when all that are `wanted` are done; 1 where the run is over for this worker.

        A thread that must wait looks at the slices of others, after the moment that threads are usually apart: a look
        takes the line with the claims from the one who works on them. At the `final` barrier only the caller waits.
        """
        scratch = part[-1]
        b.when(b.icmp("ne", more, 0), lambda: _do(b, "finish", job, tid, wanted, more))
        tag, entry = b.fresh("look"), b.block
        looks = b.load("i64", b.offset(job, d.LOOK), align=8)
        index, following = Value("i64", f"%{tag}.i"), Value("i64", f"%{tag}.n")
        b.line(f"br label %{tag}")
        b.label(tag)
        b.line(f"{index.text} = phi i64 [ 0, %{entry} ], [ {following.text}, %{tag}.more ]")
        b.line(f"br {self.is_done(b, job, wanted)}, label %passed, label %{tag}.wait")
        b.label(f"{tag}.wait")
        b.line(f"br {b.icmp('slt', index, looks)}, label %{tag}.pause, label %{tag}.late")
        b.label(f"{tag}.pause")
        self.read_ahead(b, scratch)
        b.line(f"{following.text} = add {index}, 1")
        b.line(f"br label %{tag}.more")
        b.label(f"{tag}.more")
        b.line(f"br label %{tag}")
        b.label("passed")
        # Whoever comes late need not walk to the end of a run that is over.
        behind = b.icmp("sgt", self.done(b, job), wanted)
        closed = b.icmp("ne", _load(b, b.offset(job, d.RUN), "i64"), run)
        b.line(f"ret {b.convert('zext', b.op('and', behind, closed), 'i64')}")

        b.label(f"{tag}.late")
        got = b.call("i64", "take_others", job, tid, *part)
        b.when(b.icmp("ne", got, 0), lambda: _do(b, "finish", job, tid, wanted, got))
        leaves = b.op("and", final, b.icmp("ne", tid, 0))
        wait = lambda: [b.call("i64", "wait_done", job, tid, run, wanted, scratch)]
        return b.when(leaves, lambda: [i64(1)], wait)[0]

    def wait_done(self, b: Builder, job: Value, tid: Value, run: Value, wanted: Value, scratch: Value) -> Value:
        """Return when all units that are `wanted` are done; 1 where the run is over without this worker.

        The caller waits inside, and notes how long it slept. A worker reads ahead as long as there is something to
        read, and then waits outside: a caller that has done everything need not wait for it.
        """

        def done() -> Value:
            return self.is_done(b, job, wanted)

        def caller() -> list[Value]:
            begin = self.now(b)
            slept = self.sleep(b, job, done, lambda: self.read_ahead(b, scratch))
            b.when(slept, lambda: self.note_sleep(b, job, begin))
            return [i64(0)]

        def worker() -> list[Value]:
            tag = b.fresh("read")
            b.line(f"br label %{tag}")
            b.label(tag)
            left = b.icmp("slt", *(b.load("i64", b.offset(scratch, f), align=8) for f in (d.READ_TO, d.READ_END)))
            unfinished = b.op("xor", done(), const("i1", True))
            b.line(f"br {b.op('and', left, unfinished)}, label %{tag}.on, label %{tag}.out")
            b.label(f"{tag}.on")
            self.read_ahead(b, scratch)
            b.line(f"br label %{tag}")
            b.label(f"{tag}.out")
            _do(b, "leave", job, tid)
            self.sleep(b, job, done)
            _exchange(b, "xchg", b.offset(self.seat(b, job, tid), d.INSIDE), d.IN)
            still = b.icmp("eq", _load(b, b.offset(job, d.RUN), "i64"), run)
            return [b.select(still, i64(0), i64(1))]

        return b.when(b.icmp("eq", tid, 0), caller, worker)[0]

    def note_sleep(self, b: Builder, job: Value, begin: Value) -> None:
        place = b.offset(job, d.SLEPT)
        b.store(b.add(b.load("i64", place, align=8), b.sub(self.now(b), begin)), place, align=8)

    def read_ahead(self, b: Builder, scratch: Value) -> None:
        """Some lines more of what this thread will read, or a pause."""
        place = b.offset(scratch, d.READ_TO)
        at = b.load("i64", place, align=8)

        def some() -> None:
            for line in range(0, d.READ_STEP, 64):  # loads: of prefetches a core drops those that come too fast
                b.assign("i64", f"load volatile i64, {b.convert('inttoptr', b.add(at, line), 'ptr')}, align 8")
            b.store(b.add(at, d.READ_STEP), place, align=8)

        more = b.icmp("slt", at, b.load("i64", b.offset(scratch, d.READ_END), align=8))
        b.when(more, some, lambda: self.pause(b))

    def decide(self, b: Builder, job: Value, tid: Value, test: Value, predicate: Value) -> Value:
        """The outcome of a test, the same for all threads: 0, 1, or 2 where the caller is at a later one already.

        The caller reads the predicate and publishes what it is, for later steps may write it again.
        """
        place = b.offset(job, d.TESTED)

        def caller() -> list[Value]:
            value = b.convert("zext", b.icmp("ne", b.load("i8", predicate), 0), "i64")
            _exchange(b, "xchg", place, b.op("or", b.op("shl", test, i64(1)), value))
            _do(b, "wake_sleepers", job, tid)
            return [value]

        def worker() -> list[Value]:
            def number() -> Value:
                return b.op("ashr", _load(b, place, "i64"), i64(1))

            self.sleep(b, job, lambda: b.icmp("sge", number(), test))
            outcome = b.sub(_load(b, place, "i64"), b.op("shl", test, i64(1)))
            return [b.select(b.icmp("ult", outcome, 2), outcome, i64(2))]

        return b.when(b.icmp("eq", tid, 0), caller, worker)[0]

    # -- one thread's walk --------------------------------------------------------------------------------------------
    def execute(self, b: Builder, job: Value, tid: Value, threads: Value, run: Value) -> None:
        control = b.stack("i32", 2, align=4) if self.machine.has_mxcsr else NULL
        self.default_control(b, control)
        Walk(b, job, tid, threads, run, clock=lambda: self.now(b)).emit()
        if self.machine.has_mxcsr:
            b.call("void", "llvm.x86.sse.ldmxcsr", control)

    def default_control(self, b: Builder, control: Value) -> None:
        """Save the MXCSR of the caller, who may flush denormals, and set the default."""
        if self.machine.has_mxcsr:
            b.call("void", "llvm.x86.sse.stmxcsr", control)
            b.store(const("i32", d.DEFAULT_MXCSR), b.offset(control, 1, "i32"), align=4)
            b.call("void", "llvm.x86.sse.ldmxcsr", b.offset(control, 1, "i32"))

    # -- all threads --------------------------------------------------------------------------------------------------
    def call(self, b: Builder, job: Value, request: Value) -> Value:
        """Run the records on the pool, or on this thread alone where that is better.

        So it is where the pool is busy with another run, has but one thread, its workers are late, or they sleep and
        the run is brief.
        """
        own = b.stack("i8", d.LINE, align=8)  # a job block for the walk alone, which meets no other thread

        def word(block: Value, offset: int) -> Value:
            return b.load("i64", b.offset(block, offset), align=8)

        def note(block: Value, offset: int, value: Value) -> None:
            b.store(value, b.offset(block, offset), align=8)

        slots = word(request, d.SLOTS)
        threads = b.min(slots, word(job, d.POOL_THREADS))
        unit = word(job, d.MILLISECOND)

        def fill(block: Value) -> None:
            for i in range(d.COPIED_WORDS):
                note(block, 8 * i, word(request, 8 * i))

        def together(begin: Value) -> list[Value]:
            fill(job)
            number = b.add(word(job, d.RUNS), 1)
            note(job, d.RUNS, number)
            note(job, d.THREADS, threads)
            shortest = word(request, d.SHORTEST)
            small = b.op("and", b.icmp("ne", shortest, 0), b.icmp("slt", b.mul(shortest, d.SMALL), unit))
            note(job, d.SLICE_CHUNKS, b.select(small, i64(1), i64(d.CHUNKS)))
            note(job, d.SLEPT, i64(0))
            note(job, d.FAULT, i64(0))
            for before, after in zip(d.BEFORE, d.AFTER, strict=True):
                note(job, before, word(job, after))
            _store(b, number, b.offset(job, d.RUN))
            b.loop(1, threads, 1, lambda tid: self.call_worker(b, job, tid))
            _do(b, "execute", job, i64(0), threads, number)
            _exchange(b, "xchg", b.offset(job, d.RUN), i64(0))
            # All of the pool: one that this run does not need, but that was called late, may be reading the job block.
            b.loop(1, word(job, d.POOL_THREADS), 1, lambda tid: self.join(b, job, tid))
            b.when(b.icmp("ne", unit, 0), lambda: self.judge(b, job, request, begin))
            _store(b, const("i32", 0), b.offset(job, d.BUSY))
            return [threads]

        def alone() -> list[Value]:
            fill(own)
            _do(b, "execute", own, i64(0), i64(1), i64(0))
            return [i64(1)]

        def several() -> list[Value]:
            begin = self.now(b)
            until, runs = (_load(b, b.offset(job, field), "i64") for field in (d.ALONE_UNTIL, d.ALONE_RUNS))
            shortest, ended = word(request, d.SHORTEST), word(job, d.ENDED)
            brief = b.op("and", b.icmp("ne", shortest, 0), b.icmp("slt", b.mul(shortest, d.BRIEF), unit))
            brief = b.op("and", brief, b.icmp("sgt", b.mul(b.sub(begin, ended), d.REST), unit))

            def held() -> list[Value]:
                _store(b, b.max(b.sub(runs, 1), 0), b.offset(job, d.ALONE_RUNS))
                alone()
                end, average, before = self.now(b), word(request, d.TOGETHER), word(request, d.APART)
                taken, again = b.sub(end, begin), b.icmp("ne", before, 0)
                best = b.select(again, b.min(before, taken), taken)
                note(request, d.APART, best)

                def compare() -> None:
                    trust = b.max(b.mul(word(request, d.TRUSTED_FOR), 2), b.mul(unit, d.LEAST_TRUST))
                    trust = b.max(b.min(trust, b.mul(unit, d.MOST_TRUST)), b.mul(best, d.TRUST_RUNS))
                    trust = b.select(b.icmp("sge", best, average), trust, i64(0))
                    note(request, d.TRUSTED_FOR, trust)
                    note(request, d.TRUSTED, b.add(end, trust))

                    def share() -> None:
                        for field in (d.ALONE_UNTIL, d.ALONE_RUNS):
                            _store(b, i64(0), b.offset(job, field))

                    b.when(b.icmp("ne", trust, 0), share)

                # One short run may have been disturbed.
                enough = b.op("or", again, b.icmp("sgt", taken, b.mul(unit, d.LEAST_ALONE)))
                b.when(b.op("and", b.icmp("ne", average, 0), enough), compare)
                return [i64(1)]

            def shared() -> list[Value]:
                free = _replace(b, b.offset(job, d.BUSY), 0, 1)
                return b.when(free, lambda: together(begin), alone)

            late = b.op("or", b.icmp("slt", begin, until), b.icmp("sgt", runs, 0))
            (taking_part,) = b.when(late, held, lambda: b.when(brief, alone, shared))
            end = self.now(b)
            taken = b.sub(end, begin)
            work = b.mul(taken, taking_part)
            less = b.op("or", b.icmp("eq", shortest, 0), b.icmp("slt", work, shortest))
            note(request, d.SHORTEST, b.select(less, work, shortest))
            note(job, d.ENDED, end)
            return [taking_part]

        return b.when(b.icmp("sgt", threads, 1), several, alone)[0]

    def judge(self, b: Builder, job: Value, request: Value, begin: Value) -> None:
        """Whether workers are late, so that the next runs had better stay on their callers."""

        def word(offset: int, block: Value = job) -> Value:
            return b.load("i64", b.offset(block, offset), align=8)

        def note(offset: int, value: Value, block: Value = job) -> None:
            b.store(value, b.offset(block, offset), align=8)

        end, unit = self.now(b), word(d.MILLISECOND)
        taken = b.sub(end, begin)
        before, best, apart = (word(field, request) for field in (d.TOGETHER, d.BEST_TOGETHER, d.APART))
        first = b.icmp("eq", best, 0)
        best = b.select(first, taken, b.min(taken, b.add(best, b.sdiv(best, d.FORGET))))
        begins = b.op("or", first, b.icmp("ne", word(d.ANEW, request), 0))
        average = b.select(begins, taken, b.add(before, b.sdiv(b.sub(taken, before), d.AVERAGED)))
        for field, value in ((d.TOGETHER, average), (d.BEST_TOGETHER, best), (d.ANEW, i64(0))):
            note(field, value, request)

        def over_window(total: int, value: Value) -> Value:
            before = word(total)
            return b.add(b.sub(before, b.sdiv(before, d.WINDOW)), value)

        trusted = b.icmp("slt", begin, word(d.TRUSTED, request))
        all_slept = over_window(d.ALL_SLEPT, b.select(trusted, i64(0), word(d.SLEPT)))
        all_taken = over_window(d.ALL_TAKEN, taken)
        late = b.icmp("sgt", b.mul(all_slept, d.LATE_SHARE), all_taken)
        late = b.op("and", late, b.icmp("sgt", all_slept, unit))
        usual = b.select(b.icmp("eq", apart, 0), b.add(best, b.sdiv(best, 2)), apart)
        lost = b.select(trusted, i64(0), b.sub(average, usual))
        late = b.op("or", late, b.icmp("sgt", b.mul(lost, d.WINDOW), unit))

        def stay() -> list[Value]:
            pause = b.max(word(d.ALONE_FOR), b.mul(unit, d.LEAST_ALONE))
            _store(b, b.add(end, pause), b.offset(job, d.ALONE_UNTIL))
            _store(b, b.sdiv(pause, b.mul(unit, d.LEAST_ALONE)), b.offset(job, d.ALONE_RUNS))
            note(d.ALONE_FOR, b.min(b.mul(pause, 4), b.mul(unit, d.MOST_ALONE)))
            note(d.KEPT_UP, i64(0))
            note(d.APART, i64(0), request)
            note(d.ANEW, i64(1), request)
            # Half of what makes workers late: another late run is enough, a good one wipes it out.
            return [b.sdiv(all_taken, 2 * d.LATE_SHARE), all_taken]

        def go_on() -> list[Value]:
            # Workers that have kept up for as long as runs would stay alone next are late no more.
            kept_up = b.add(word(d.KEPT_UP), taken)
            note(d.KEPT_UP, kept_up)
            note(d.ALONE_FOR, b.select(b.icmp("sgt", kept_up, word(d.ALONE_FOR)), i64(0), word(d.ALONE_FOR)))
            return [all_slept, all_taken]

        all_slept, all_taken = b.when(late, stay, go_on)
        note(d.ALL_SLEPT, all_slept)
        note(d.ALL_TAKEN, all_taken)

    def join(self, b: Builder, job: Value, tid: Value) -> None:
        """Wait until a worker is outside."""
        inside = b.offset(self.seat(b, job, tid), d.INSIDE)
        begin = self.now(b)
        slept = self.wait(
            b,
            job,
            done=lambda: b.icmp("eq", _load(b, inside), d.OUT),
            address=inside,
            announce=lambda: _announced(b, inside, d.IN, d.WATCHED),
        )
        b.when(slept, lambda: self.note_sleep(b, job, begin))

    def leave(self, b: Builder, job: Value, tid: Value) -> None:
        """Go outside, and wake a caller that waits for that."""
        inside = b.offset(self.seat(b, job, tid), d.INSIDE)
        old = _exchange(b, "xchg", inside, d.OUT)
        b.when(b.icmp("eq", old, d.WATCHED), lambda: self.wake(b, inside, 1))

    def seat(self, b: Builder, job: Value, tid: Value) -> Value:
        return b.offset(b.offset(job, d.SEATS), b.mul(tid, d.SEAT_BYTES))

    def call_worker(self, b: Builder, job: Value, tid: Value) -> None:
        """Have a worker take part.

        It is confined before it is called: a worker that is about to sleep could see the call at once, and would then
        look whether it is confined before it is.
        """
        seat = self.seat(b, job, tid)
        b.when(b.icmp("eq", _load(b, seat), d.ASLEEP), lambda: _do(b, "confine", job, tid))
        old = _exchange(b, "xchg", seat, d.CALLED)
        b.when(b.icmp("eq", old, d.ASLEEP), lambda: self.wake(b, seat, 1))

    def worker(self, b: Builder, job: Value, tid: Value) -> None:
        """Wait to be called, see whether there is a run, and take part.

        A call that comes through only after its run is over is good for the next one, whose own call then finds that
        the worker has taken part already.
        """
        last = b.stack("i64", 1, align=8)  # the run that it took part in last
        b.store(i64(0), last, align=8)
        seat = self.seat(b, job, tid)
        inside = b.offset(seat, d.INSIDE)
        thread = self.system(b, self.machine.get_thread)
        b.store(thread, b.offset(seat, d.THREAD), align=8)
        b.line("br label %again")
        b.label("again")
        slept = self.wait(
            b,
            job,
            done=lambda: b.icmp("ugt", _load(b, seat), d.ASLEEP),
            address=seat,
            announce=lambda: _announced(b, seat, d.IDLE, d.ASLEEP),
        )
        b.line(f"br {_replace(b, seat, d.CALLED, d.IDLE)}, label %called, label %stopped")
        b.label("called")
        b.when(slept, lambda: _do(b, "free", job, tid))
        _exchange(b, "xchg", inside, d.IN)
        run = _load(b, b.offset(job, d.RUN), "i64")
        threads = b.load("i64", b.offset(job, d.THREADS), align=8)
        present = b.op("and", b.icmp("ne", run, 0), b.icmp("slt", tid, threads))
        present = b.op("and", present, b.icmp("ne", run, b.load("i64", last, align=8)))
        b.store(run, last, align=8)
        b.when(present, lambda: _do(b, "execute", job, tid, threads, run))
        _do(b, "leave", job, tid)
        b.line("br label %again")
        b.label("stopped")

    def stop(self, b: Builder, job: Value) -> Value:
        """Send the workers home. The pool stays taken, so that later runs do not call workers that are gone."""
        free = _replace(b, b.offset(job, d.BUSY), 0, 1)
        threads = b.load("i64", b.offset(job, d.POOL_THREADS), align=8)

        def send(tid: Value) -> None:
            seat = self.seat(b, job, tid)
            old = _exchange(b, "xchg", seat, d.STOPPED)
            b.when(b.icmp("eq", old, d.ASLEEP), lambda: self.wake(b, seat, 1))

        b.when(free, lambda: b.loop(1, threads, 1, send))
        return b.convert("zext", free, "i64")

    def spin(self, b: Builder, count: Value) -> None:
        b.loop(0, count, 1, lambda _: self.pause(b))

"""The driver's code: emits the functions of `driver.SYMBOLS` as LLVM IR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlx.backends.cpu.builder import NULL, Builder, Module, Value, const, i64
from rlx.backends.cpu.driver import (
    AHEAD,
    ALTERNATING,
    ARRIVED,
    ASLEEP,
    ASLEEP_BIT,
    BARRIER_AFTER,
    BUSY,
    CALLED,
    COUNT,
    COUNT_STEPS,
    DEFAULT_MXCSR,
    END,
    ENDS,
    ENTER,
    EVERYONE,
    EXIT,
    FAILED,
    FIRST,
    HOME,
    IDLE,
    IS_PRIVATE,
    JUMP,
    KIND,
    LAUNCH,
    LEAVE,
    LINE,
    LINEAR,
    MOVES,
    NEXT,
    PENDING,
    PHASE,
    POOL_THREADS,
    PRIVATE,
    READ_AHEAD,
    READ_END,
    READ_STEP,
    READ_TO,
    RECORD_WORDS,
    RECORDS,
    SCRATCH,
    SEATS,
    SLOTS,
    SOLO,
    SOURCE,
    SPIN,
    STATUS,
    STOPPED,
    STOPS,
    STRIDE,
    TEST,
    THREADS,
    TRACE,
    WAIT,
    WAKE,
    WORDS,
)
from rlx.backends.cpu.repeat_code import repeat
from rlx.target import Target


def emitted(target: Target) -> str:
    """The driver's LLVM IR."""
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
        job, tid, threads, scratch = ("ptr", "job"), ("i64", "tid"), ("i64", "threads"), ("ptr", "scratch")
        given = [("ptr", "records"), ("i64", "count"), ("ptr", "scratch"), ("i64", "stride"), ("ptr", "trace")]
        module.define("barrier", [job, threads, scratch], self.barrier, internal=True, noinline=True)
        module.define("execute", [job, tid, threads], self.execute)
        module.define("run", [job, *given, ("i64", "slots")], self.run, result="i64")
        module.define("call", [job, ("ptr", "request")], self.call, result="i64")
        module.define("repeat", [("ptr", "self"), ("ptr", "inputs")], repeat, result="ptr")
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
        meanwhile: Callable[[], object] | None = None,
    ) -> None:
        """Wait until `done(word)` of the word at `address`: spin, then `announce` the sleep in that word, and sleep.

        Between two looks at the word there is a pause, or what there is to do `meanwhile`.

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
        b.line(f"{index.text} = phi i64 [ 0, %{before} ], [ {following.text}, %{tag}.again ]")
        b.line(f"br {done(_load(b, address))}, label %{tag}.done, label %{tag}.more")
        b.label(f"{tag}.more")
        b.line(f"br {b.icmp('slt', index, limit)}, label %{tag}.pause, label %{tag}.tired")
        b.label(f"{tag}.pause")
        (meanwhile or (lambda: self.pause(b)))()
        b.line(f"{following.text} = add {index}, 1")
        b.line(f"br label %{tag}.again")
        b.label(f"{tag}.again")
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

    def barrier(self, b: Builder, job: Value, threads: Value, scratch: Value) -> None:
        """Return when all threads are here. The last to arrive resets the count and opens the next phase.

        The others read ahead: memory would have nothing to do as long as some thread computes what all others need.

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
                meanwhile=lambda: self.read_ahead(b, scratch),
            )

        last = b.icmp("eq", b.convert("zext", position, "i64"), b.sub(threads, 1))
        b.when(last, open_next, wait_for_it)

    def read_ahead(self, b: Builder, scratch: Value) -> None:
        """Some lines more of what this thread will read, or a pause."""
        place = b.offset(scratch, READ_TO)
        at = b.load("i64", place, align=8)

        def some() -> None:
            for line in range(0, READ_STEP, 64):  # loads: of prefetches a core drops those that come too fast
                b.assign("i64", f"load volatile i64, {b.convert('inttoptr', b.add(at, line), 'ptr')}, align 8")
            b.store(b.add(at, READ_STEP), place, align=8)

        more = b.icmp("slt", at, b.load("i64", b.offset(scratch, READ_END), align=8))
        b.when(more, some, lambda: self.pause(b))

    # -- one thread's walk ----------------------------------------------------------------------------------------
    def execute(self, b: Builder, job: Value, tid: Value, threads: Value) -> None:
        control = b.stack("i32", 2, align=4) if self.machine.has_mxcsr else NULL
        self.default_control(b, control)
        _Walk(self, b, job, tid, threads).emit()
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
            fields = (records, count, scratch, stride, trace, slots, taking_part, i64(0))
            for offset, value in zip(range(RECORDS, STOPS + 8, 8), fields, strict=True):
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


@dataclass(frozen=True, slots=True)
class _State:
    """Where a thread is in its walk: SSA values that change from record to record."""

    at: Value  # the record
    threads: Value  # that share the launches; 1 in a loop that one runs alone
    escape: Value  # the record to go to when a loop that one thread runs finds a fault
    turn: Value  # which of the two words of STOPS is used next

    def values(self) -> list[Value]:
        return [self.at, self.threads, self.escape, self.turn]


class _Walk:
    """The part of `execute` that walks records."""

    def __init__(self, driver: _Driver, b: Builder, job: Value, tid: Value, threads: Value) -> None:
        self.driver, self.b, self.job, self.tid, self.threads = driver, b, job, tid, threads
        self.stride, self.slots = (self.word(job, field) for field in (STRIDE, SLOTS))
        self.records, self.base, self.trace = (self.word(job, field, "ptr") for field in (RECORDS, SCRATCH, TRACE))
        self.count = self.word(job, COUNT)
        self.scratch = b.offset(self.base, b.mul(tid, self.stride))
        self.traced = b.icmp("ne", self.trace, NULL)
        self.several = b.icmp("ne", threads, 1)

    def word(self, block: Value, offset: int, type_: str = "i64") -> Value:
        return self.b.load(type_, self.b.offset(block, offset), align=8)

    def emit(self) -> None:
        b = self.b
        # The status words of slots that no thread has today are cleared too, so that a reader may look at all.
        b.loop(self.tid, self.slots, self.threads, self.clear)
        start = _State(i64(0), self.threads, self.count, i64(0))
        tag, before = b.fresh("walk"), b.block
        b.line(f"br label %{tag}.head")
        b.label(f"{tag}.head")
        phis = len(b.lines)
        state = _State(*(Value("i64", f"%{tag}.{i}") for i in range(4)))
        b.line(f"br {b.icmp('slt', state.at, self.count)}, label %{tag}.record, label %{tag}.done")
        b.label(f"{tag}.record")
        after = self.record(state)
        triples = zip(state.values(), start.values(), after, strict=True)
        b.lines[phis:phis] = [
            f"  {now.text} = phi i64 [ {first.text}, %{before} ], [ {then.text}, %{b.block} ]"
            for now, first, then in triples
        ]
        b.line(f"br label %{tag}.head")
        b.label(f"{tag}.done")

    def clear(self, slot: Value) -> None:
        for field in (STATUS, FAILED, READ_TO, READ_END):
            self.b.store(i64(0), self.b.offset(self.b.offset(self.base, self.b.mul(slot, self.stride)), field), align=8)

    def record(self, state: _State) -> list[Value]:
        """One record; the state after it."""
        b = self.b
        record = b.offset(self.records, b.mul(state.at, RECORD_WORDS), "i64")
        flags = self.word(record, 24)
        kind = b.op("and", flags, i64(KIND))
        emitters = {
            AHEAD: self.ahead, ENTER: self.enter, NEXT: self.next, TEST: self.test, JUMP: self.jump, LEAVE: self.leave
        }  # fmt: skip

        def other(kinds: list[int]) -> list[Value]:
            emit = emitters[kinds[0]]
            if len(kinds) == 1:
                return emit(state, record, flags)
            is_this = b.icmp("eq", kind, kinds[0])
            return b.when(is_this, lambda: emit(state, record, flags), lambda: other(kinds[1:]))

        is_launch = b.icmp("eq", kind, LAUNCH)
        return b.when(is_launch, lambda: self.launch(state, record, flags), lambda: other(list(emitters)))

    def following(self, state: _State) -> Value:
        return self.b.add(state.at, 1)

    def arguments(self, record: Value, flags: Value) -> Value:
        """The address of a record's arguments."""
        return self.address(self.word(record, 8), _has_bit(self.b, flags, PRIVATE))

    def address(self, word: Value, is_private: Value) -> Value:
        """An address, or an offset in the thread's scratch."""
        b = self.b
        base = b.select(is_private, b.convert("ptrtoint", self.scratch, "i64"), i64(0))
        return b.convert("inttoptr", b.add(base, word), "ptr")

    # -- the kinds of records -------------------------------------------------------------------------------------
    def launch(self, state: _State, record: Value, flags: Value) -> list[Value]:
        b = self.b
        function, arguments, units = self.word(record, 0, "ptr"), self.arguments(record, flags), self.word(record, 16)
        alone = b.icmp("eq", state.threads, 1)
        low, high = b.when(alone, lambda: [i64(0), units], lambda: self.part(state, units))

        def call() -> None:
            b.call_pointer(function, arguments, low, high, self.scratch)
            status, failed = (self.word(self.scratch, field) for field in (STATUS, FAILED))
            first = b.op("and", b.icmp("ne", status, 0), b.icmp("eq", failed, 0))
            b.when(first, lambda: b.store(b.add(state.at, 1), b.offset(self.scratch, FAILED), align=8))

        def timed() -> None:
            begin = self.now()
            b.when(b.icmp("slt", low, high), call)
            self.stamp(state.at, begin)

        b.when(self.traced, timed, lambda: b.when(b.icmp("slt", low, high), call))
        self.meet(state.threads, flags)
        return [self.following(state), state.threads, state.escape, state.turn]

    def part(self, state: _State, units: Value) -> list[Value]:
        """The units of this thread: from the first to the one after the last."""
        b = self.b
        return [b.sdiv(b.mul(units, t), state.threads) for t in (self.tid, b.add(self.tid, 1))]

    def ahead(self, state: _State, record: Value, flags: Value) -> list[Value]:
        b = self.b
        start, size, units = (self.word(record, 8 * i) for i in range(3))
        low, high = self.part(state, units)
        first = b.add(start, b.mul(low, size))
        length = b.op("and", b.min(b.mul(b.sub(high, low), size), READ_AHEAD), i64(-READ_STEP))
        b.store(first, b.offset(self.scratch, READ_TO), align=8)
        b.store(b.add(first, length), b.offset(self.scratch, READ_END), align=8)
        return [self.following(state), state.threads, state.escape, state.turn]

    def enter(self, state: _State, record: Value, flags: Value) -> list[Value]:
        b = self.b
        loop = self.word(record, 8, "ptr")
        solo = b.op("and", self.several, _has_bit(b, flags, SOLO))
        end = self.word(loop, END)
        b.when(self.traced, lambda: self.mark(state.at, 0))

        def begin() -> list[Value]:
            source = self.address(self.word(loop, SOURCE), b.icmp("ne", self.word(loop, IS_PRIVATE), 0))
            home = b.offset(self.scratch, self.word(loop, HOME))
            b.store(i64(0), home, align=8)

            def copy(i: Value) -> None:
                word = b.load("i64", b.offset(source, i, "i64"), align=8)
                b.store(word, b.offset(home, b.add(i, 1), "i64"), align=8)

            b.loop(0, self.word(loop, WORDS), 1, copy)
            runs = b.icmp("sgt", self.word(loop, COUNT_STEPS), 0)
            at = b.select(runs, self.word(loop, FIRST), self.word(loop, EXIT))
            return [at, b.select(solo, i64(1), state.threads), b.select(solo, end, state.escape), state.turn]

        others = b.op("and", solo, b.icmp("ne", self.tid, 0))
        return b.when(others, lambda: [end, state.threads, state.escape, state.turn], begin)

    def next(self, state: _State, record: Value, flags: Value) -> list[Value]:
        b = self.b
        loop = self.word(record, 8, "ptr")
        home = b.offset(self.scratch, self.word(loop, HOME))
        step = self.word(home, 0)
        linear, alternating = self.word(loop, LINEAR), self.word(loop, ALTERNATING)
        moves = self.word(loop, MOVES, "ptr")

        def move(sign: Value) -> Callable[[Value], None]:
            def one(i: Value) -> None:
                entry = b.offset(moves, b.mul(i, 16))
                place = b.offset(home, self.word(entry, 0))
                far = b.sub(b.op("xor", self.word(entry, 8), sign), sign)  # negated where the sign is -1
                b.store(b.add(self.word(place, 0), far), place, align=8)

            return one

        b.loop(0, linear, 1, move(i64(0)))
        b.loop(linear, b.add(linear, alternating), 1, move(b.sub(i64(0), b.op("and", step, i64(1)))))
        done = b.add(step, 1)
        b.store(done, home, align=8)
        b.when(self.traced, lambda: self.tally(state.at))
        more = b.icmp("slt", done, self.word(loop, COUNT_STEPS))
        at = b.select(more, self.word(loop, FIRST), self.word(loop, EXIT))
        failed = b.icmp("ne", self.word(self.scratch, STATUS), 0)
        alone = b.icmp("eq", state.threads, 1)

        def together() -> list[Value]:
            """Meet, and see whether anybody has found a fault: then all end here, for the run is lost.

            There are two words, used in turn, because a thread may be a step ahead of one that has not looked yet.
            """
            stop = b.offset(b.offset(self.job, STOPS), state.turn, "i32")
            b.when(failed, lambda: _store(b, 1, stop))
            self.barrier()
            stopped = b.icmp("ne", _load(b, stop), 0)
            return [b.select(stopped, self.count, at), b.op("xor", state.turn, i64(1))]

        def apart() -> list[Value]:
            return [b.select(b.op("and", alone, failed), state.escape, at), state.turn]

        goes_on = b.op("or", more, _has_bit(b, flags, ENDS))
        waits = b.op("and", _has_bit(b, flags, BARRIER_AFTER), goes_on)
        meets = b.op("and", waits, b.icmp("ne", state.threads, 1))
        at, turn = b.when(meets, together, apart)
        return [at, state.threads, state.escape, turn]

    def test(self, state: _State, record: Value, flags: Value) -> list[Value]:
        b = self.b
        predicate = self.word(self.arguments(record, flags), 0, "ptr")
        is_true = b.icmp("ne", b.load("i8", predicate), 0)
        b.when(self.traced, lambda: self.mark(state.at, 0))
        at = b.select(is_true, self.following(state), self.word(record, 0))
        return [at, state.threads, state.escape, state.turn]

    def jump(self, state: _State, record: Value, flags: Value) -> list[Value]:
        return [self.word(record, 0), state.threads, state.escape, state.turn]

    def leave(self, state: _State, record: Value, flags: Value) -> list[Value]:
        b = self.b
        solo = b.op("and", self.several, _has_bit(b, flags, SOLO))
        threads = b.select(solo, self.threads, state.threads)
        self.meet(threads, flags)
        b.when(self.traced, lambda: self.mark(self.word(record, 0), 1))
        return [self.following(state), threads, b.select(solo, self.count, state.escape), state.turn]

    # -- meeting and timing ---------------------------------------------------------------------------------------
    def meet(self, threads: Value, flags: Value) -> None:
        b = self.b
        b.when(b.op("and", b.icmp("ne", threads, 1), _has_bit(b, flags, BARRIER_AFTER)), self.barrier)

    def barrier(self) -> None:
        self.b.line(f"call void @barrier({self.job}, {self.threads}, {self.scratch})")

    def now(self) -> Value:
        return self.b.call("i64", "llvm.readcyclecounter")

    def cell(self, record: Value, end: int) -> Value:
        """trace[record][tid][end]"""
        b = self.b
        return b.offset(self.trace, b.add(b.mul(b.add(b.mul(record, self.slots), self.tid), 2), end), "i64")

    def stamp(self, record: Value, begin: Value) -> None:
        """Of a launch: when it first began, and that plus the time of all its runs."""
        b = self.b
        taken = b.sub(self.now(), begin)
        first, last = (self.cell(record, end) for end in (0, 1))

        def once() -> None:
            b.store(begin, first, align=8)
            b.store(begin, last, align=8)

        b.when(b.icmp("eq", self.word(first, 0), 0), once)
        b.store(b.add(self.word(last, 0), taken), last, align=8)

    def mark(self, record: Value, end: int) -> None:
        """Of a loop or branch: when it was first entered and last left."""
        b = self.b
        cell, now = self.cell(record, end), self.now()
        if end:
            b.store(now, cell, align=8)
        else:
            b.when(b.icmp("eq", self.word(cell, 0), 0), lambda: b.store(now, cell, align=8))

    def tally(self, record: Value) -> None:
        """Of a NEXT: how many steps there were."""
        cell = self.cell(record, 1)
        self.b.store(self.b.add(self.word(cell, 0), 1), cell, align=8)

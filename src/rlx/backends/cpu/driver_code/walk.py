"""The part of the driver that walks records, as LLVM IR."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

from rlx.backends.cpu import driver as d
from rlx.backends.cpu.builder import NULL, Builder, Value, const, i64
from rlx.backends.cpu.driver_code.system import call_void
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class State:
    """A thread's position in its walk: SSA values that change from record to record."""

    at: Value  # current record
    threads: Value  # threads that share the launches; 1 in a solo loop
    escape: Value  # the record to jump to when a solo loop reports a fault
    launches: Value  # shared launches so far, in all runs of the pool
    units: Value  # their units
    done: Value  # units done by this thread and not reported yet
    tests: Value  # tests so far, in all runs of the pool

    def values(self) -> list[Value]:
        return [getattr(self, field.name) for field in fields(self)]


def _has_bit(b: Builder, word: Value, bit: int) -> Value:
    return b.icmp("ne", b.op("and", word, const(word.type, bit)), 0)


class Walk:
    """Emits the walk of thread `tid` of `threads` over the records of a run."""

    def __init__(
        self, b: Builder, job: Value, tid: Value, threads: Value, run: Value, *, clock: Callable[[], Value]
    ) -> None:
        self.b, self.job, self.tid, self.threads, self.run, self.now = b, job, tid, threads, run, clock
        self.stride, self.slots, self.count = (self.word(job, field) for field in (d.STRIDE, d.SLOTS, d.COUNT))
        self.records, self.base, self.trace = (
            self.word(job, field, "ptr") for field in (d.RECORDS, d.SCRATCH, d.TRACE)
        )
        self.scratch = b.offset(self.base, b.mul(tid, self.stride))
        self.traced = b.icmp("ne", self.trace, NULL)
        self.several = b.icmp("ne", threads, 1)
        self.first = b.icmp("eq", tid, 0)
        self.signals = self.word(job, d.SIGNALS, "ptr")
        self.watches = b.op("and", self.first, b.icmp("ne", self.signals, NULL))

    def word(self, block: Value, offset: int, type_: str = "i64") -> Value:
        return self.b.load(type_, self.b.offset(block, offset), align=8)

    def emit(self) -> None:
        b = self.b
        for field in (d.STATUS, d.FAILED, d.READ_TO, d.READ_END, d.HANDLED, d.LOOK_MASK):
            b.store(i64(0), b.offset(self.scratch, field), align=8)
        launches, units, tests = (self.word(self.job, field) for field in d.BEFORE)
        start = State(i64(0), self.threads, self.count, launches, units, i64(0), tests)
        tag, before = b.fresh("walk"), b.block
        b.line(f"br label %{tag}.head")
        b.label(f"{tag}.head")
        phis = len(b.lines)
        state = State(*(Value("i64", f"%{tag}.{i}") for i in range(len(fields(State)))))
        b.line(f"br {b.icmp('slt', state.at, self.count)}, label %{tag}.record, label %{tag}.done")
        b.label(f"{tag}.record")
        after = self.record(state)
        triples = zip(state.values(), start.values(), after.values(), strict=True)
        b.lines[phis:phis] = [
            f"  {now.text} = phi i64 [ {first.text}, %{before} ], [ {then.text}, %{b.block} ]"
            for now, first, then in triples
        ]
        b.line(f"br label %{tag}.head")
        b.label(f"{tag}.done")
        b.when(self.several, lambda: self.end(state))

    def end(self, state: State) -> None:
        """Reports finished units. The caller waits for the rest, and records the initial counters of the next run."""
        b = self.b

        def report() -> None:
            b.line(f"call void @finish({self.job}, {self.tid}, {state.units}, {state.done})")
            # A thread that sits out the rest of the run does not know the current `wanted` count.
            b.line(f"call void @wake_sleepers({self.job}, {self.tid})")

        b.when(b.icmp("ne", state.done, 0), report)

        def wait() -> None:
            b.call("i64", "wait_done", self.job, self.tid, self.run, state.units, self.scratch)
            # Not in place of this run's initial counters: a latecomer still starts with those.
            for field, value in zip(d.AFTER, (state.launches, state.units, state.tests), strict=True):
                b.store(value, b.offset(self.job, field), align=8)

        b.when(b.icmp("eq", self.tid, 0), wait)

    def record(self, state: State) -> State:
        """Walks one record; returns the state after it."""
        b = self.b
        record = b.offset(self.records, b.mul(state.at, d.RECORD_WORDS), "i64")
        flags = self.word(record, 24)
        kind = b.op("and", flags, i64(d.KIND))
        emitters = {
            d.LAUNCH: self.launch, d.AHEAD: self.ahead, d.ENTER: self.enter, d.NEXT: self.next, d.TEST: self.test,
            d.JUMP: self.jump, d.LEAVE: self.leave,
        }  # fmt: skip

        def one_of(kinds: list[int]) -> list[Value]:
            def emit() -> list[Value]:
                return emitters[kinds[0]](state, record, flags).values()

            return b.when(b.icmp("eq", kind, kinds[0]), emit, lambda: one_of(kinds[1:])) if kinds[1:] else emit()

        return State(*one_of(list(emitters)))

    def when(self, condition: Value, then: Callable[[], State], otherwise: Callable[[], State]) -> State:
        return State(*self.b.when(condition, lambda: then().values(), lambda: otherwise().values()))

    def following(self, state: State) -> State:
        return replace(state, at=self.b.add(state.at, 1))

    def arguments(self, record: Value, flags: Value) -> Value:
        """The address of a record's arguments."""
        return self.address(self.word(record, 8), _has_bit(self.b, flags, d.PRIVATE))

    def address(self, word: Value, is_private: Value) -> Value:
        """An address, or an offset in the thread's scratch."""
        b = self.b
        base = b.select(is_private, b.convert("ptrtoint", self.scratch, "i64"), i64(0))
        return b.convert("inttoptr", b.add(base, word), "ptr")

    # -- the kinds of records -----------------------------------------------------------------------------------------
    def launch(self, state: State, record: Value, flags: Value) -> State:
        b = self.b
        function, arguments, units = self.word(record, 0, "ptr"), self.arguments(record, flags), self.word(record, 16)
        begin = b.when(self.traced, lambda: [self.now()], lambda: [i64(0)])[0]

        def alone() -> State:
            b.when(b.icmp("sgt", units, 0), lambda: b.call_pointer(function, arguments, i64(0), units, self.scratch))
            status, failed = (self.word(self.scratch, field) for field in (d.STATUS, d.FAILED))
            first = b.op("and", b.icmp("ne", status, 0), b.icmp("eq", failed, 0))
            b.when(first, lambda: b.store(b.add(state.at, 1), b.offset(self.scratch, d.FAILED), align=8))
            b.when(self.traced, lambda: self.stamp(state.at, begin))
            return self.following(state)

        def shared() -> State:
            number = b.add(state.launches, 1)
            part = function, arguments, units, number, b.add(state.at, 1), self.scratch
            after = self.following(state)
            final = b.icmp("eq", after.at, self.count)
            meets = b.op("or", _has_bit(b, flags, d.BARRIER_AFTER), final)
            own = b.call("i64", "take", self.job, self.tid, *part)
            # At a barrier a waiting thread takes over other threads' units; without a barrier it would never come back
            # to them. Work done at a barrier is not traced either.
            now = b.op("or", self.traced, b.op("xor", meets, const("i1", True)))
            (rest,) = b.when(now, lambda: [b.call("i64", "take_others", self.job, self.tid, *part)], lambda: [i64(0)])
            b.when(self.traced, lambda: self.stamp(state.at, begin))
            done = b.add(state.done, b.add(own, rest))
            after = replace(after, launches=number, units=b.add(state.units, units), done=done)
            return self.when(meets, lambda: self.barrier(after, final, *part), lambda: after)

        return self.when(b.icmp("eq", state.threads, 1), alone, shared)

    def ahead(self, state: State, record: Value, flags: Value) -> State:
        b = self.b
        start, size, units = (self.word(record, 8 * i) for i in range(3))
        low, high = (b.sdiv(b.mul(units, t), state.threads) for t in (self.tid, b.add(self.tid, 1)))
        first = b.add(start, b.mul(low, size))
        length = b.op("and", b.min(b.mul(b.sub(high, low), size), d.READ_AHEAD), i64(-d.READ_STEP))
        b.store(first, b.offset(self.scratch, d.READ_TO), align=8)
        b.store(b.add(first, length), b.offset(self.scratch, d.READ_END), align=8)
        return self.following(state)

    def enter(self, state: State, record: Value, flags: Value) -> State:
        b = self.b
        loop = self.word(record, 8, "ptr")
        solo = b.op("and", self.several, _has_bit(b, flags, d.SOLO))
        end = self.word(loop, d.END)
        b.when(self.traced, lambda: self.mark(state.at, 0))

        def begin() -> State:
            source = self.address(self.word(loop, d.SOURCE), b.icmp("ne", self.word(loop, d.IS_PRIVATE), 0))
            home = b.offset(self.scratch, self.word(loop, d.HOME))
            b.store(i64(0), home, align=8)
            b.store(i64(0), b.offset(self.scratch, d.LOOK_MASK), align=8)

            def copy(i: Value) -> None:
                word = b.load("i64", b.offset(source, i, "i64"), align=8)
                b.store(word, b.offset(home, b.add(i, 1), "i64"), align=8)

            b.loop(0, self.word(loop, d.WORDS), 1, copy)
            runs = b.icmp("sgt", self.word(loop, d.COUNT_STEPS), 0)
            at = b.select(runs, self.word(loop, d.FIRST), self.word(loop, d.EXIT))
            threads, escape = b.select(solo, i64(1), state.threads), b.select(solo, end, state.escape)
            return replace(state, at=at, threads=threads, escape=escape)

        others = b.op("and", solo, b.icmp("ne", self.tid, 0))
        return self.when(others, lambda: replace(state, at=end), begin)

    def next(self, state: State, record: Value, flags: Value) -> State:
        b = self.b
        loop = self.word(record, 8, "ptr")
        home = b.offset(self.scratch, self.word(loop, d.HOME))
        step = self.word(home, 0)
        linear, alternating = self.word(loop, d.LINEAR), self.word(loop, d.ALTERNATING)
        moves = self.word(loop, d.MOVES, "ptr")

        def move(sign: Value) -> Callable[[Value], None]:
            def one(i: Value) -> None:
                entry = b.offset(moves, b.mul(i, 16))
                place = b.offset(home, self.word(entry, 0))
                far = b.sub(b.op("xor", self.word(entry, 8), sign), sign)  # negated if the sign is -1
                b.store(b.add(self.word(place, 0), far), place, align=8)

            return one

        b.loop(0, linear, 1, move(i64(0)))
        b.loop(linear, b.add(linear, alternating), 1, move(b.sub(i64(0), b.op("and", step, i64(1)))))
        steps = b.add(step, 1)
        b.store(steps, home, align=8)
        b.when(self.traced, lambda: self.tally(state.at))
        looks = b.icmp("eq", b.op("and", steps, self.word(self.scratch, d.LOOK_MASK)), 0)
        handle = lambda: call_void(b, "handle_signals", self.signals, self.scratch)
        b.when(b.op("and", self.watches, looks), handle)
        more = b.icmp("slt", steps, self.word(loop, d.COUNT_STEPS))
        after = replace(state, at=b.select(more, self.word(loop, d.FIRST), self.word(loop, d.EXIT)))

        def synchronise() -> State:
            """Synchronises, and ends all threads here if any has reported a fault, since the run is lost.

            Others may be one step ahead and report one there; they end one step later, and so does this thread.
            """
            passed = self.barrier(after)
            launch = self.word(self.job, d.FAULT)
            stopped = b.op("and", b.icmp("ne", launch, 0), b.icmp("sle", launch, state.launches))
            return replace(passed, at=b.select(stopped, self.count, passed.at))

        def no_barrier() -> State:
            failed = b.icmp("ne", self.word(self.scratch, d.STATUS), 0)
            alone = b.icmp("eq", state.threads, 1)
            return replace(after, at=b.select(b.op("and", alone, failed), state.escape, after.at))

        continues = b.op("or", more, _has_bit(b, flags, d.ENDS))
        waits = b.op("and", _has_bit(b, flags, d.BARRIER_AFTER), continues)
        return self.when(b.op("and", waits, b.icmp("ne", state.threads, 1)), synchronise, no_barrier)

    def test(self, state: State, record: Value, flags: Value) -> State:
        b = self.b
        predicate = self.word(self.arguments(record, flags), 0, "ptr")
        b.when(self.traced, lambda: self.mark(state.at, 0))

        def is_true() -> Value:
            return b.icmp("ne", b.load("i8", predicate), 0)

        def alone() -> State:
            return replace(state, at=b.select(is_true(), b.add(state.at, 1), self.word(record, 0)))

        def decision() -> list[Value]:
            interrupted = b.icmp("eq", self.word(self.scratch, d.STATUS), d.INTERRUPTED)
            b.when(interrupted, lambda: self.report_fault(state.launches))  # others see it after the decision
            return [b.select(interrupted, const("i1", False), is_true())]

        def shared() -> State:
            number = b.add(state.tests, 1)
            (value,) = b.when(self.first, decision, lambda: [const("i1", False)])
            outcome = b.call("i64", "decide", self.job, self.tid, number, value)
            at = b.select(b.icmp("eq", outcome, 1), b.add(state.at, 1), self.word(record, 0))
            # Too late to know the branch the others took: such a worker sits out the rest of the run.
            return replace(state, at=b.select(b.icmp("eq", outcome, 2), self.count, at), tests=number)

        return self.when(b.icmp("eq", state.threads, 1), alone, shared)

    def jump(self, state: State, record: Value, flags: Value) -> State:
        return replace(state, at=self.word(record, 0))

    def leave(self, state: State, record: Value, flags: Value) -> State:
        b = self.b
        solo = b.op("and", self.several, _has_bit(b, flags, d.SOLO))
        ran = b.op("and", solo, b.icmp("eq", self.tid, 0))
        one = b.convert("zext", solo, "i64")
        after = replace(
            self.following(state),
            threads=b.select(solo, self.threads, state.threads),
            escape=b.select(solo, self.count, state.escape),
            # A loop that the first thread runs alone is a launch of one unit, for which the others wait.
            launches=b.add(state.launches, one),
            units=b.add(state.units, one),
            done=b.add(state.done, b.convert("zext", ran, "i64")),
        )
        failed = b.op("and", ran, b.icmp("ne", self.word(self.scratch, d.STATUS), 0))
        b.when(failed, lambda: self.report_fault(after.launches))
        waits = b.op("and", _has_bit(b, flags, d.BARRIER_AFTER), b.icmp("ne", after.threads, 1))

        def mark() -> None:
            b.when(self.traced, lambda: self.mark(self.word(record, 0), 1))

        def go_on() -> State:
            mark()
            return after

        return self.when(waits, lambda: self.barrier(after, then=mark), go_on)

    # -- barriers and timing ------------------------------------------------------------------------------------------
    def barrier(
        self, state: State, final: Value | None = None, *part: Value, then: Callable[[], None] | None = None
    ) -> State:
        """The state after a barrier, where waiting threads may take units of a launch; the end if the run is over.

        `then` may touch the run's memory, so only threads that are still inside execute it.
        """
        b = self.b
        nothing = NULL, NULL, i64(0), i64(0), i64(0), self.scratch
        final = const("i1", False) if final is None else final
        operands = [self.job, self.tid, self.run, final, state.units, state.done, *(part or nothing)]
        over = b.icmp("ne", b.call("i64", "barrier", *operands), 0)
        if then is not None:
            b.when(over, lambda: None, then)
        return replace(state, at=b.select(over, self.count, state.at), done=i64(0))

    def report_fault(self, launch: Value) -> None:
        """Records the first launch in which a fault was reported."""
        place = self.b.offset(self.job, d.FAULT)
        self.b.assign("{ i64, i1 }", f"cmpxchg {place}, i64 0, {launch} seq_cst seq_cst, align 8")

    def cell(self, record: Value, end: int) -> Value:
        """trace[record][tid][end]"""
        b = self.b
        return b.offset(self.trace, b.add(b.mul(b.add(b.mul(record, self.slots), self.tid), 2), end), "i64")

    def stamp(self, record: Value, begin: Value) -> None:
        """Timestamps of a launch: its first start, and that plus the total time of its runs."""
        b = self.b
        taken = b.sub(self.now(), begin)
        first, last = (self.cell(record, end) for end in (0, 1))

        def once() -> None:
            b.store(begin, first, align=8)
            b.store(begin, last, align=8)

        b.when(b.icmp("eq", self.word(first, 0), 0), once)
        b.store(b.add(self.word(last, 0), taken), last, align=8)

    def mark(self, record: Value, end: int) -> None:
        """Timestamps of a loop or branch: when it was first entered and last left."""
        b = self.b
        cell, now = self.cell(record, end), self.now()
        if end:
            b.store(now, cell, align=8)
        else:
            b.when(b.icmp("eq", self.word(cell, 0), 0), lambda: b.store(now, cell, align=8))

    def tally(self, record: Value) -> None:
        """Of a NEXT record: the number of steps."""
        cell = self.cell(record, 1)
        self.b.store(self.b.add(self.word(cell, 0), 1), cell, align=8)

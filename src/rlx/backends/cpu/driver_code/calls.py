"""A run from the caller's side: shared with the workers of the pool, or alone where that is faster."""

from __future__ import annotations

from rlx.backends.cpu import driver as d
from rlx.backends.cpu.builder import NULL, Builder, Value, const, i64
from rlx.backends.cpu.driver_code.system import System, call_void, exchange, load, publish, replace
from rlx.backends.cpu.driver_code.walk import Walk
from rlx.backends.cpu.driver_code.workers import Workers
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Calls:
    """Emits calls of the pool, the heuristics that decide whether sharing pays, and the walk of one thread."""

    system: System
    workers: Workers

    def call(self, b: Builder, job: Value, request: Value) -> Value:
        """Runs the records on the pool, or on this thread alone where that is better.

        That is when the pool is busy with another run or has only one thread, when its workers are late, or when they
        sleep and the run is brief.
        """
        own = b.stack("i8", 2 * d.LINE, align=8)  # a job block for a solo walk, which shares nothing with other threads

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
            publish(b, number, b.offset(job, d.RUN))
            b.loop(1, threads, 1, lambda tid: self.workers.call_worker(b, job, tid))
            call_void(b, "execute", job, i64(0), threads, number)
            exchange(b, "xchg", b.offset(job, d.RUN), i64(0))
            # Join all workers: one that this run does not need, but that was called late, may be reading the job block.
            b.loop(1, word(job, d.POOL_THREADS), 1, lambda tid: self.workers.join(b, job, tid))
            b.when(b.icmp("ne", unit, 0), lambda: self.judge(b, job, request, begin))
            publish(b, const("i32", 0), b.offset(job, d.BUSY))
            return [threads]

        def alone() -> list[Value]:
            fill(own)
            note(own, d.SIGNALS, word(job, d.SIGNALS))
            call_void(b, "execute", own, i64(0), i64(1), i64(0))
            return [i64(1)]

        def several() -> list[Value]:
            begin = self.system.now(b)
            until, runs = (load(b, b.offset(job, field), "i64") for field in (d.ALONE_UNTIL, d.ALONE_RUNS))
            shortest, ended = word(request, d.SHORTEST), word(job, d.ENDED)
            brief = b.op("and", b.icmp("ne", shortest, 0), b.icmp("slt", b.mul(shortest, d.BRIEF), unit))
            brief = b.op("and", brief, b.icmp("sgt", b.mul(b.sub(begin, ended), d.REST), unit))

            def run_late() -> list[Value]:
                publish(b, b.max(b.sub(runs, 1), 0), b.offset(job, d.ALONE_RUNS))
                alone()
                end, average, before = self.system.now(b), word(request, d.SHARED_AVERAGE), word(request, d.BEST_ALONE)
                taken, again = b.sub(end, begin), b.icmp("ne", before, 0)
                best = b.select(again, b.min(before, taken), taken)
                note(request, d.BEST_ALONE, best)

                def compare() -> None:
                    trust = b.max(b.mul(word(request, d.TRUSTED_FOR), 2), b.mul(unit, d.LEAST_TRUST))
                    trust = b.max(b.min(trust, b.mul(unit, d.MOST_TRUST)), b.mul(best, d.TRUST_RUNS))
                    trust = b.select(b.icmp("sge", best, average), trust, i64(0))
                    note(request, d.TRUSTED_FOR, trust)
                    note(request, d.TRUSTED, b.add(end, trust))

                    def share() -> None:
                        for field in (d.ALONE_UNTIL, d.ALONE_RUNS):
                            publish(b, i64(0), b.offset(job, field))

                    b.when(b.icmp("ne", trust, 0), share)

                # A single short run may have been disturbed.
                enough = b.op("or", again, b.icmp("sgt", taken, b.mul(unit, d.LEAST_ALONE)))
                b.when(b.op("and", b.icmp("ne", average, 0), enough), compare)
                return [i64(1)]

            def shared() -> list[Value]:
                free = replace(b, b.offset(job, d.BUSY), 0, 1)
                return b.when(free, lambda: together(begin), alone)

            late = b.op("or", b.icmp("slt", begin, until), b.icmp("sgt", runs, 0))
            (taking_part,) = b.when(late, run_late, lambda: b.when(brief, alone, shared))
            end = self.system.now(b)
            taken = b.sub(end, begin)
            work = b.mul(taken, taking_part)
            less = b.op("or", b.icmp("eq", shortest, 0), b.icmp("slt", work, shortest))
            note(request, d.SHORTEST, b.select(less, work, shortest))
            note(job, d.ENDED, end)
            return [taking_part]

        return b.when(b.icmp("sgt", threads, 1), several, alone)[0]

    def judge(self, b: Builder, job: Value, request: Value, begin: Value) -> None:
        """Decides whether workers are late, so that the next runs stay on their callers."""

        def word(offset: int, block: Value = job) -> Value:
            return b.load("i64", b.offset(block, offset), align=8)

        def note(offset: int, value: Value, block: Value = job) -> None:
            b.store(value, b.offset(block, offset), align=8)

        end, unit = self.system.now(b), word(d.MILLISECOND)
        taken = b.sub(end, begin)
        before, best, best_alone = (word(field, request) for field in (d.SHARED_AVERAGE, d.SHARED_BEST, d.BEST_ALONE))
        first = b.icmp("eq", best, 0)
        best = b.select(first, taken, b.min(taken, b.add(best, b.sdiv(best, d.FORGET))))
        begins = b.op("or", first, b.icmp("ne", word(d.RESTART_AVERAGE, request), 0))
        average = b.select(begins, taken, b.add(before, b.sdiv(b.sub(taken, before), d.AVERAGED)))
        for field, value in ((d.SHARED_AVERAGE, average), (d.SHARED_BEST, best), (d.RESTART_AVERAGE, i64(0))):
            note(field, value, request)

        def over_window(total: int, value: Value) -> Value:
            before = word(total)
            return b.add(b.sub(before, b.sdiv(before, d.WINDOW)), value)

        trusted = b.icmp("slt", begin, word(d.TRUSTED, request))
        all_slept = over_window(d.ALL_SLEPT, b.select(trusted, i64(0), word(d.SLEPT)))
        all_taken = over_window(d.ALL_TAKEN, taken)
        threads = word(d.THREADS)
        most_slept = b.sdiv(b.mul(all_taken, b.sub(b.mul(threads, d.HOPE[1]), d.HOPE[0])), b.mul(threads, d.HOPE[1]))
        late = b.op("and", b.icmp("sgt", all_slept, most_slept), b.icmp("sgt", all_slept, unit))
        usual = b.select(
            b.icmp("eq", best_alone, 0), b.sdiv(b.mul(b.mul(best, threads), d.LOSS[0]), d.LOSS[1]), best_alone
        )
        lost = b.select(trusted, i64(0), b.sub(average, usual))
        late = b.op("or", late, b.icmp("sgt", b.mul(lost, d.WINDOW), unit))

        def stay() -> list[Value]:
            pause = b.max(word(d.ALONE_FOR), b.mul(unit, d.LEAST_ALONE))
            publish(b, b.add(end, pause), b.offset(job, d.ALONE_UNTIL))
            publish(b, b.sdiv(pause, b.mul(unit, d.LEAST_ALONE)), b.offset(job, d.ALONE_RUNS))
            note(d.ALONE_FOR, b.min(b.mul(pause, d.BACK_OFF), b.mul(unit, d.MOST_ALONE)))
            note(d.KEPT_UP, i64(0))
            note(d.BEST_ALONE, i64(0), request)
            note(d.RESTART_AVERAGE, i64(1), request)
            # Half of the lateness threshold: one more late run reaches it, a good run clears it.
            return [b.sdiv(most_slept, 2), all_taken]

        def go_on() -> list[Value]:
            # Workers that have kept up for as long as the next back-off would last no longer count as late.
            kept_up = b.add(word(d.KEPT_UP), taken)
            note(d.KEPT_UP, kept_up)
            note(d.ALONE_FOR, b.select(b.icmp("sgt", kept_up, word(d.ALONE_FOR)), i64(0), word(d.ALONE_FOR)))
            return [all_slept, all_taken]

        all_slept, all_taken = b.when(late, stay, go_on)
        note(d.ALL_SLEPT, all_slept)
        note(d.ALL_TAKEN, all_taken)

    def execute(self, b: Builder, job: Value, tid: Value, threads: Value, run: Value) -> None:
        control = b.stack("i32", 2, align=4) if self.system.machine.has_mxcsr else NULL
        self.default_control(b, control)
        Walk(b, job, tid, threads, run, clock=lambda: self.system.now(b)).emit()
        if self.system.machine.has_mxcsr:
            b.call("void", "llvm.x86.sse.ldmxcsr", control)

    def default_control(self, b: Builder, control: Value) -> None:
        """Saves the caller's MXCSR, which may flush denormals, and sets the default."""
        if self.system.machine.has_mxcsr:
            b.call("void", "llvm.x86.sse.stmxcsr", control)
            b.store(const("i32", d.DEFAULT_MXCSR), b.offset(control, 1, "i32"), align=4)
            b.call("void", "llvm.x86.sse.ldmxcsr", b.offset(control, 1, "i32"))

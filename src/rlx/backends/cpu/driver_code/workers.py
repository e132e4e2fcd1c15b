"""The workers of a pool: calling and joining them, their main loop, and the cores that they wake up on."""

from __future__ import annotations

from rlx.backends.cpu import driver as d
from rlx.backends.cpu.builder import Builder, Value, const, i64
from rlx.backends.cpu.driver_code.system import System, announce_sleep, call_void, exchange, load, replace, seat_of
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Workers:
    """Emits what workers do outside of runs, and what callers do with workers."""

    system: System

    # -- cores --------------------------------------------------------------------------------------------------------
    def core(self, b: Builder) -> Value:
        """The core that this thread runs on."""
        place = b.stack("i32", 1, align=4)
        b.store(const("i32", 0), place, align=4)
        self.system.call(b, self.system.machine.get_core, place)
        return b.convert("zext", b.load("i32", place, align=4), "i64")

    def confine(self, b: Builder, job: Value, tid: Value) -> None:
        """Keeps a sleeping worker away from this core, if it may use any other.

        The kernel tends to wake a thread on its waker's core, where it then waits for a time slice. So the worker is
        confined to other cores while it wakes up. Once awake it may use all of its cores again, and the system
        balances.
        """
        mask, words = b.stack("i64", d.CORES_BYTES // 8, align=8), d.CORES_BYTES // 8
        here = self.core(b)
        seat = seat_of(b, job, tid)
        thread, cores = b.load("i64", b.offset(seat, d.THREAD), align=8), b.offset(seat, d.CORES)
        self.system.call(b, self.system.machine.get_affinity, thread, d.CORES_BYTES, cores)

        def without_this(i: Value, has: Value, others: Value) -> list[Value]:
            own = b.icmp("eq", i, b.op("lshr", here, i64(6)))
            bit = b.select(own, b.op("shl", i64(1), b.op("and", here, i64(63))), i64(0))
            word = b.load("i64", b.offset(cores, i, "i64"), align=8)
            left = b.op("and", word, b.op("xor", bit, i64(-1)))
            b.store(left, b.offset(mask, i, "i64"), align=8)
            return [b.op("or", has, b.op("and", word, bit)), b.op("or", others, left)]

        def keep_away() -> None:
            self.system.call(b, self.system.machine.set_affinity, thread, d.CORES_BYTES, mask)
            b.store(i64(1), b.offset(seat, d.CONFINED), align=8)

        has, others = b.loop(0, words, 1, without_this, [i64(0), i64(0)])
        b.when(b.op("and", b.icmp("ne", has, 0), b.icmp("ne", others, 0)), keep_away)

    def free(self, b: Builder, job: Value, tid: Value) -> None:
        """Lets this thread use all of its cores again."""
        seat = seat_of(b, job, tid)
        confined = b.offset(seat, d.CONFINED)

        def allow_all() -> None:
            self.system.call(b, self.system.machine.set_affinity, 0, d.CORES_BYTES, b.offset(seat, d.CORES))
            b.store(i64(0), confined, align=8)

        b.when(b.icmp("ne", b.load("i64", confined, align=8), 0), allow_all)

    # -- runs ---------------------------------------------------------------------------------------------------------
    def call_worker(self, b: Builder, job: Value, tid: Value) -> None:
        """Calls a worker to take part.

        Confines it first: a worker that is about to sleep could see the call at once, and would then check whether it
        is confined too early.
        """
        seat = seat_of(b, job, tid)
        b.when(b.icmp("eq", load(b, seat), d.ASLEEP), lambda: call_void(b, "confine", job, tid))
        old = exchange(b, "xchg", seat, d.CALLED)
        b.when(b.icmp("eq", old, d.ASLEEP), lambda: self.system.wake(b, seat, 1))

    def worker(self, b: Builder, job: Value, tid: Value) -> None:
        """Waits for calls, and takes part if there is a run.

        A call that arrives only after its run is over serves the next one, whose own call then finds that the worker
        has already taken part.
        """
        last = b.stack("i64", 1, align=8)  # the last run that it took part in
        b.store(i64(0), last, align=8)
        seat = seat_of(b, job, tid)
        inside = b.offset(seat, d.INSIDE)
        thread = self.system.call(b, self.system.machine.get_thread)
        b.store(thread, b.offset(seat, d.THREAD), align=8)
        b.line("br label %again")
        b.label("again")
        slept = self.system.wait(
            b,
            job,
            done=lambda: b.icmp("ugt", load(b, seat), d.ASLEEP),
            address=seat,
            announce=lambda: announce_sleep(b, seat, d.IDLE, d.ASLEEP),
        )
        b.line(f"br {replace(b, seat, d.CALLED, d.IDLE)}, label %called, label %stopped")
        b.label("called")
        b.when(slept, lambda: call_void(b, "free", job, tid))
        exchange(b, "xchg", inside, d.IN)
        run = load(b, b.offset(job, d.RUN), "i64")
        threads = b.load("i64", b.offset(job, d.THREADS), align=8)
        present = b.op("and", b.icmp("ne", run, 0), b.icmp("slt", tid, threads))
        present = b.op("and", present, b.icmp("ne", run, b.load("i64", last, align=8)))
        b.store(run, last, align=8)
        b.when(present, lambda: call_void(b, "execute", job, tid, threads, run))
        call_void(b, "leave", job, tid)
        b.line("br label %again")
        b.label("stopped")

    def join(self, b: Builder, job: Value, tid: Value) -> None:
        """Waits until a worker is outside."""
        inside = b.offset(seat_of(b, job, tid), d.INSIDE)
        begin = self.system.now(b)
        slept = self.system.wait(
            b,
            job,
            done=lambda: b.icmp("eq", load(b, inside), d.OUT),
            address=inside,
            announce=lambda: announce_sleep(b, inside, d.IN, d.WATCHED),
        )
        b.when(slept, lambda: self.system.note_sleep(b, job, begin))

    def leave(self, b: Builder, job: Value, tid: Value) -> None:
        """Goes outside, and wakes a caller that waits for that."""
        inside = b.offset(seat_of(b, job, tid), d.INSIDE)
        old = exchange(b, "xchg", inside, d.OUT)
        b.when(b.icmp("eq", old, d.WATCHED), lambda: self.system.wake(b, inside, 1))

    def stop(self, b: Builder, job: Value) -> Value:
        """Stops the workers. The pool stays busy, so that later runs do not call workers that are gone."""
        free = replace(b, b.offset(job, d.BUSY), 0, 1)
        threads = b.load("i64", b.offset(job, d.POOL_THREADS), align=8)

        def send(tid: Value) -> None:
            seat = seat_of(b, job, tid)
            old = exchange(b, "xchg", seat, d.STOPPED)
            b.when(b.icmp("eq", old, d.ASLEEP), lambda: self.system.wake(b, seat, 1))

        b.when(free, lambda: b.loop(1, threads, 1, send))
        return b.convert("zext", free, "i64")

    def spin(self, b: Builder, count: Value) -> None:
        b.loop(0, count, 1, lambda _: self.system.pause(b))

"""How threads share a launch, and wait for each other after it."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu import driver as d
from rlx.backends.cpu.builder import Builder, Value, const, i64
from rlx.backends.cpu.driver_code.system import System, call_void, exchange, load, replace, seat_of
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Barriers:
    """Emits claiming of units, barriers, and tests whose outcome all threads share."""

    system: System

    # -- sharing a launch ---------------------------------------------------------------------------------------------
    def take(self, b: Builder, job: Value, slot: Value, *part: Value) -> Value:
        """Claims and runs chunks of the slice of `slot` until none is left; returns the number of units run."""
        function, arguments, units, launch, record, scratch = part
        threads, chunks = (b.load("i64", b.offset(job, field), align=8) for field in (d.THREADS, d.SLICE_CHUNKS))
        low, high = (b.sdiv(b.mul(units, s), threads) for s in (slot, b.add(slot, 1)))
        size, word = b.sub(high, low), b.offset(seat_of(b, job, slot), d.CLAIMED)
        claim = b.op("shl", launch, i64(d.CLAIM_SHIFT))

        def start(chunk: Value) -> Value:
            """Where a chunk starts: at nothing, half, three quarters, ... of the slice; the last one ends the slice."""
            past = b.sub(size, b.op("lshr", size, chunk))
            return b.select(b.icmp("slt", chunk, chunks), past, size)

        b.line("br label %next")
        b.label("next")
        total, taken = Value("i64", "%total"), Value("i64", "%taken")
        b.line(f"{total.text} = phi i64 [ 0, %entry ], [ {total.text}, %claim ], [ {taken.text}, %run ]")
        old = load(b, word, "i64")
        begun = b.icmp("uge", old, claim)
        chunk = b.select(begun, b.sub(old, claim), i64(0))
        chunk = b.select(b.icmp("ult", chunk, chunks), chunk, chunks)  # also if a later launch has begun
        first = start(chunk)
        b.line(f"br {b.icmp('slt', first, size)}, label %claim, label %nothing")
        b.label("claim")
        last = start(b.add(chunk, 1))
        mine = replace(b, word, old, b.add(b.add(claim, chunk), 1), "i64")
        b.line(f"br {mine}, label %run, label %next")
        b.label("run")
        b.call_pointer(function, arguments, b.add(low, first), b.add(low, last), scratch)
        b.line(f"{taken.text} = add {total}, {b.sub(last, first).text}")
        b.line("br label %next")
        b.label("nothing")

        def report() -> None:
            b.store(record, b.offset(scratch, d.FAILED), align=8)
            replace(b, b.offset(job, d.FAULT), 0, launch, "i64")

        status, failed = (b.load("i64", b.offset(scratch, field), align=8) for field in (d.STATUS, d.FAILED))
        new = b.op("and", b.icmp("ne", status, 0), b.icmp("eq", failed, 0))
        # Others see a fault in time if units are still missing; a signal's fault waits for a launch with some.
        b.when(b.op("and", new, b.icmp("ne", total, 0)), report)
        return total

    def take_others(self, b: Builder, job: Value, tid: Value, *part: Value) -> Value:
        """Takes what is left of other threads' slices, starting with the next thread's."""
        threads = b.load("i64", b.offset(job, d.THREADS), align=8)

        def one(i: Value, total: Value) -> list[Value]:
            slot = b.add(tid, i)
            slot = b.select(b.icmp("slt", slot, threads), slot, b.sub(slot, threads))
            return [b.add(total, b.call("i64", "take", job, slot, *part))]

        return b.loop(1, threads, 1, one, [i64(0)])[0]

    # -- waiting ------------------------------------------------------------------------------------------------------
    def finish(self, b: Builder, job: Value, tid: Value, wanted: Value, more: Value) -> None:
        """Reports units as done; the thread that completes the `wanted` number wakes the sleepers."""
        before = exchange(b, "add", b.offset(job, d.DONE), more)

        def last() -> None:
            exchange(b, "xchg", b.offset(job, d.PASSED), wanted)
            call_void(b, "wake_sleepers", job, tid)

        b.when(b.icmp("eq", b.add(before, more), wanted), last)

    def wake_sleepers(self, b: Builder, job: Value, tid: Value) -> None:
        """Wakes all threads that sleep in a run."""

        def wake() -> None:
            exchange(b, "xchg", b.offset(job, d.SLEEPERS), 0)  # before the word: later sleepers see what is done
            exchange(b, "add", b.offset(job, d.WAKES), 1)
            self.system.wake(b, b.offset(job, d.WAKES), d.EVERYONE)

        b.when(b.icmp("ne", load(b, b.offset(job, d.SLEEPERS)), 0), wake)

    def sleep(
        self, b: Builder, job: Value, done: Callable[[], Value], meanwhile: Callable[[], object] | None = None
    ) -> Value:
        """Waits within a run for other threads, as long as it takes. Returns whether it slept."""
        wakes = b.offset(job, d.WAKES)

        def announce() -> Value:
            # Read the word first: a thread that withdraws the announcement changes the word after that.
            word = load(b, wakes)
            exchange(b, "xchg", b.offset(job, d.SLEEPERS), 1)
            return word

        return self.system.wait(b, job, done, wakes, announce, meanwhile)

    def done(self, b: Builder, job: Value) -> Value:
        """The number of units done, as seen by waiting threads."""
        many = b.icmp("sgt", b.load("i64", b.offset(job, d.THREADS), align=8), d.FEW)
        return load(b, b.select(many, b.offset(job, d.PASSED), b.offset(job, d.DONE)), "i64")

    def is_done(self, b: Builder, job: Value, wanted: Value) -> Value:
        return b.icmp("sge", self.done(b, job), wanted)

    def barrier(
        self, b: Builder, job: Value, tid: Value, run: Value, final: Value, wanted: Value, more: Value, *part: Value
    ) -> Value:
        """Reports `more` units, returns when all `wanted` ones are done; 1 if the run is over for this worker.

        A waiting thread looks at other threads' slices only after the usual skew between threads has passed: each look
        takes the cache line with the claims away from the owner. Only the caller waits at the `final` barrier.
        """
        scratch = part[-1]
        b.when(b.icmp("ne", more, 0), lambda: call_void(b, "finish", job, tid, wanted, more))
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
        # Latecomers need not walk to the end of a run that is over.
        behind = b.icmp("sgt", self.done(b, job), wanted)
        closed = b.icmp("ne", load(b, b.offset(job, d.RUN), "i64"), run)
        b.line(f"ret {b.convert('zext', b.op('and', behind, closed), 'i64')}")

        b.label(f"{tag}.late")
        got = b.call("i64", "take_others", job, tid, *part)
        b.when(b.icmp("ne", got, 0), lambda: call_void(b, "finish", job, tid, wanted, got))
        leaves = b.op("and", final, b.icmp("ne", tid, 0))
        wait = lambda: [b.call("i64", "wait_done", job, tid, run, wanted, scratch)]
        return b.when(leaves, lambda: [i64(1)], wait)[0]

    def wait_done(self, b: Builder, job: Value, tid: Value, run: Value, wanted: Value, scratch: Value) -> Value:
        """Returns when all `wanted` units are done; 1 if the run is over without this worker.

        The caller waits inside, and records how long it slept. A worker prefetches as long as there is something to
        prefetch, then waits outside, so that a caller that has finished everything need not wait for it.
        """

        def done() -> Value:
            return self.is_done(b, job, wanted)

        def caller() -> list[Value]:
            begin = self.system.now(b)
            slept = self.sleep(b, job, done, lambda: self.read_ahead(b, scratch))
            b.when(slept, lambda: self.system.note_sleep(b, job, begin))
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
            call_void(b, "leave", job, tid)
            self.sleep(b, job, done)
            exchange(b, "xchg", b.offset(seat_of(b, job, tid), d.INSIDE), d.IN)
            still = b.icmp("eq", load(b, b.offset(job, d.RUN), "i64"), run)
            return [b.select(still, i64(0), i64(1))]

        return b.when(b.icmp("eq", tid, 0), caller, worker)[0]

    def read_ahead(self, b: Builder, scratch: Value) -> None:
        """Reads a few more cache lines ahead for this thread, or pauses."""
        place = b.offset(scratch, d.READ_TO)
        at = b.load("i64", place, align=8)

        def some() -> None:
            for line in range(0, d.READ_STEP, 64):  # loads, because a core drops prefetches that come too fast
                b.assign("i64", f"load volatile i64, {b.convert('inttoptr', b.add(at, line), 'ptr')}, align 8")
            b.store(b.add(at, d.READ_STEP), place, align=8)

        more = b.icmp("slt", at, b.load("i64", b.offset(scratch, d.READ_END), align=8))
        b.when(more, some, lambda: self.system.pause(b))

    def decide(self, b: Builder, job: Value, tid: Value, test: Value, holds: Value) -> Value:
        """The outcome of a test, the same for all threads: 0, 1, or 2 if the caller is already at a later one.

        The caller publishes whether its predicate `holds`. The others cannot read it: later steps may overwrite it.
        """
        place = b.offset(job, d.TESTED)

        def caller() -> list[Value]:
            value = b.convert("zext", holds, "i64")
            exchange(b, "xchg", place, b.op("or", b.op("shl", test, i64(1)), value))
            call_void(b, "wake_sleepers", job, tid)
            return [value]

        def worker() -> list[Value]:
            def number() -> Value:
                return b.op("ashr", load(b, place, "i64"), i64(1))

            self.sleep(b, job, lambda: b.icmp("sge", number(), test))
            outcome = b.sub(load(b, place, "i64"), b.op("shl", test, i64(1)))
            return [b.select(b.icmp("ult", outcome, 2), outcome, i64(2))]

        return b.when(b.icmp("eq", tid, 0), caller, worker)[0]

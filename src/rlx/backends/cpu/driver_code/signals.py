"""Signals during a run: a handler that raises, as for Ctrl-C, ends a loop that has no other end."""

from __future__ import annotations

from rlx.backends.cpu import driver as d
from rlx.backends.cpu.builder import Builder, Value, const, i64
from rlx.backends.cpu.driver_code.system import System
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Signals:
    """Emits the caller's look at the clock and, once in a while, at Python's signals."""

    system: System

    def handle(self, b: Builder, table: Value, scratch: Value) -> None:
        """Lets Python handle signals if it is time; an exception becomes a fault of the caller's next launch.

        Otherwise the mask grows by a bit: a loop of short steps seldom looks at the clock, one of long steps always.
        """

        def word(block: Value, offset: int, type_: str = "i64") -> Value:
            return b.load(type_, b.offset(block, offset), align=8)

        def note(offset: int, value: Value) -> None:
            b.store(value, b.offset(scratch, offset), align=8)

        now, before, mask = self.system.now(b), word(scratch, d.HANDLED), word(scratch, d.LOOK_MASK)
        passed = b.icmp("sge", b.sub(now, before), word(table, d.SIGNAL_TICKS))
        due = b.op("and", b.icmp("ne", before, 0), passed)
        longer = b.op("and", b.op("or", b.op("shl", mask, i64(1)), i64(1)), i64(d.MOST_LOOK_MASK))
        note(d.LOOK_MASK, b.select(due, b.op("lshr", mask, i64(1)), longer))
        b.when(b.op("or", due, b.icmp("eq", before, 0)), lambda: note(d.HANDLED, now))

        def look() -> None:
            state = b.assign("i32", f"call i32 {word(table, d.ENSURE, 'ptr').text}()")
            raised = b.icmp("ne", b.assign("i32", f"call i32 {word(table, d.CHECK, 'ptr').text}()"), const("i32", 0))

            def store() -> None:
                places = (b.offset(table, field) for field in (d.RAISED, d.RAISED_VALUE, d.RAISED_TRACE))
                b.call_pointer(word(table, d.FETCH, "ptr"), *places)
                note(d.STATUS, i64(d.INTERRUPTED))

            b.when(raised, store)
            b.call_pointer(word(table, d.RELEASE, "ptr"), state)

        b.when(due, look)

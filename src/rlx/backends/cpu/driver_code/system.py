"""What the driver needs of the machine and the system: atomic words, system calls, clock, pauses and waiting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from rlx.backends.cpu import driver as d
from rlx.backends.cpu.builder import Builder, Value, const, i64


@dataclass(frozen=True, slots=True)
class Machine:
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


MACHINES = {
    "x86_64": Machine(
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
    "aarch64": Machine(
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


def load(b: Builder, pointer: Value, type_: str = "i32") -> Value:
    return b.assign(type_, f"load atomic {type_}, {pointer} seq_cst, align {int(type_[1:]) // 8}")


def publish(b: Builder, value: Value, pointer: Value) -> None:
    """Publish what was written before."""
    b.line(f"store atomic {value}, {pointer} release, align {int(value.type[1:]) // 8}")


def exchange(b: Builder, operation: str, pointer: Value, value: int | Value, type_: str = "i32") -> Value:
    """An atomic read-modify-write (`add`, `sub`, `xchg`); the result is the old word."""
    word = _word(value, type_)
    return b.assign(word.type, f"atomicrmw {operation} {pointer}, {word} seq_cst, align {int(word.type[1:]) // 8}")


def replace(b: Builder, pointer: Value, old: int | Value, new: int | Value, type_: str = "i32") -> Value:
    """Set the word to `new` if it is `old`; the result says whether it was."""
    before, after = _word(old, type_), _word(new, type_)
    size = int(before.type[1:]) // 8
    pair = b.assign(f"{{ {before.type}, i1 }}", f"cmpxchg {pointer}, {before}, {after} seq_cst seq_cst, align {size}")
    return b.assign("i1", f"extractvalue {pair}, 1")


def announced(b: Builder, pointer: Value, awake: int, asleep: int) -> Value:
    """Say in the very word that a thread waits for that it sleeps."""
    replace(b, pointer, awake, asleep)
    return const("i32", asleep)


def call_void(b: Builder, function: str, *arguments: Value) -> None:
    """Call a function of the driver that has no result."""
    b.line(f"call void @{function}({', '.join(map(str, arguments))})")


def seat_of(b: Builder, job: Value, tid: Value) -> Value:
    """Where a thread's words are in the job block of its pool."""
    return b.offset(b.offset(job, d.SEATS), b.mul(tid, d.SEAT_BYTES))


@dataclass(frozen=True, slots=True)
class System:
    """Emits system calls and waiting for a machine."""

    machine: Machine

    def call(self, b: Builder, number: int, *arguments: Value | int) -> Value:
        """A system call. Errors do not matter here: what was asked for is looked at again, or not vital."""
        m = self.machine
        words = [_word(a, "i64") for a in arguments]
        words = [b.convert("ptrtoint", w, "i64") if w.type == "ptr" else b.convert("zext", w, "i64") for w in words]
        given = ", ".join(map(str, [i64(number), *words, *[i64(0)] * (4 - len(words))]))
        return b.assign("i64", f'call i64 asm sideeffect "{m.system_call}", "{m.constraints}"({given})')

    def wake(self, b: Builder, address: Value, count: int) -> None:
        self.call(b, self.machine.futex, address, d.WAKE, count)

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
        self.call(b, self.machine.futex, address, d.WAIT, word)
        b.line(f"br label %{tag}.tired")  # woken, interrupted or not even asleep
        b.label(f"{tag}.done")
        return b.assign("i1", f"phi i1 [ false, %{tag}.look ], [ true, %{awake} ]")

    def note_sleep(self, b: Builder, job: Value, begin: Value) -> None:
        place = b.offset(job, d.SLEPT)
        b.store(b.add(b.load("i64", place, align=8), b.sub(self.now(b), begin)), place, align=8)

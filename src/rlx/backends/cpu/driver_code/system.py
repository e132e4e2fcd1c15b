"""The machine and system layer of the driver: atomic words, system calls, clock, pauses and waiting."""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu import driver as d
from rlx.backends.cpu.builder import Builder, Value, const, i64
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class Machine:
    """Differences between architectures."""

    system_call: str
    constraints: str  # result; number, four arguments; clobbers
    futex: int  # system call numbers
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
    # `isb` really waits; `yield` is a no-op on most cores.
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
# All are sequentially consistent: if two threads each write one word and read the other's, one must see the write.
def _word(value: int | Value, type_: str) -> Value:
    return value if isinstance(value, Value) else const(type_, value)


def load(b: Builder, pointer: Value, type_: str = "i32") -> Value:
    return b.assign(type_, f"load atomic {type_}, {pointer} seq_cst, align {int(type_[1:]) // 8}")


def publish(b: Builder, value: Value, pointer: Value) -> None:
    """A release store: publishes all earlier writes."""
    b.line(f"store atomic {value}, {pointer} release, align {int(value.type[1:]) // 8}")


def exchange(b: Builder, operation: str, pointer: Value, value: int | Value, type_: str = "i32") -> Value:
    """An atomic read-modify-write (`add`, `sub`, `xchg`); returns the old word."""
    word = _word(value, type_)
    return b.assign(word.type, f"atomicrmw {operation} {pointer}, {word} seq_cst, align {int(word.type[1:]) // 8}")


def replace(b: Builder, pointer: Value, old: int | Value, new: int | Value, type_: str = "i32") -> Value:
    """Sets the word to `new` if it is `old`; returns whether it was."""
    before, after = _word(old, type_), _word(new, type_)
    size = int(before.type[1:]) // 8
    pair = b.assign(f"{{ {before.type}, i1 }}", f"cmpxchg {pointer}, {before}, {after} seq_cst seq_cst, align {size}")
    return b.assign("i1", f"extractvalue {pair}, 1")


def announce_sleep(b: Builder, pointer: Value, awake: int, asleep: int) -> Value:
    """Announces in the awaited word itself that this thread sleeps."""
    replace(b, pointer, awake, asleep)
    return const("i32", asleep)


def call_void(b: Builder, function: str, *arguments: Value) -> None:
    """Calls a driver function that returns nothing."""
    b.line(f"call void @{function}({', '.join(map(str, arguments))})")


def seat_of(b: Builder, job: Value, tid: Value) -> Value:
    """The address of a thread's words in its pool's job block."""
    return b.offset(b.offset(job, d.SEATS), b.mul(tid, d.SEAT_BYTES))


@dataclass(frozen=True, slots=True)
class System:
    """Emits system calls and waiting for a machine."""

    machine: Machine

    def call(self, b: Builder, number: int, *arguments: Value | int) -> Value:
        """A system call. Errors are ignored: the condition is checked again, or the call is not vital."""
        m = self.machine
        words = [_word(a, "i64") for a in arguments]
        words = [b.convert("ptrtoint", w, "i64") if w.type == "ptr" else b.convert("zext", w, "i64") for w in words]
        operands = ", ".join(map(str, [i64(number), *words, *[i64(0)] * (4 - len(words))]))
        return b.assign("i64", f'call i64 asm sideeffect "{m.system_call}", "{m.constraints}"({operands})')

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
        """Waits until `done()`: spins, then calls `announce` and sleeps on the word at `address`. Returns whether it
        slept.

        Between two checks it pauses, or does `meanwhile`. `announce` returns the value of the word to sleep on.

        No wake-up is lost: the waker makes the condition true before it looks for an announcement, and then changes the
        word. So either the waker sees the announcement, or the check after it sees the condition. If the word has
        changed in between, the kernel, which compares it with the announced value, returns at once.
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
        b.line(f"br label %{tag}.tired")  # woken, interrupted or never asleep
        b.label(f"{tag}.done")
        return b.assign("i1", f"phi i1 [ false, %{tag}.look ], [ true, %{awake} ]")

    def note_sleep(self, b: Builder, job: Value, begin: Value) -> None:
        place = b.offset(job, d.SLEPT)
        b.store(b.add(b.load("i64", place, align=8), b.sub(self.now(b), begin)), place, align=8)

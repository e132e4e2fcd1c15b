"""Code of the bus error handler: emits `bus_error(signal, details, context)` as LLVM IR."""

from __future__ import annotations

from rlx.backends.cpu.builder import NULL, Builder, Module, Value, const, i64
from rlx.backends.cpu.bus_errors import (
    AFTER,
    AFTER_LENGTH,
    BEFORE,
    BEFORE_LENGTH,
    BLOCK,
    CODE,
    EXIT,
    HANDLER,
    MAPS,
    OLD,
    OLD_ACTION,
    OLD_IS_DETAILED,
    RAISE,
    SI_ADDRESS,
    SI_CODE,
    SIGACTION,
    WRITE,
)
from rlx.formats.mapped_file import END, LENGTH, PATH, SLOTS, START

_STDERR = const("i32", 2)
_LAST_SPECIAL = 1  # handlers that are not functions: SIG_DFL is 0, SIG_IGN is 1


def handler_ir() -> str:
    """The handler's LLVM IR."""
    module = Module()
    block = module.word(BLOCK)
    arguments = [("i32", "signal"), ("ptr", "details"), ("ptr", "context")]
    module.define(HANDLER, arguments, lambda b, *operands: _Handler(b, block, *operands).emit())
    return module.text()


class _Handler:
    def __init__(self, b: Builder, block: Value, signal: Value, details: Value, context: Value) -> None:
        self.b, self.signal, self.details, self.context = b, signal, details, context
        # Volatile: the constant is patched after the compiler has seen it.
        self.block = b.assign("ptr", f"load volatile ptr, {block}, align 8")

    def word(self, offset: int, type_: str = "i64") -> Value:
        return self.b.load(type_, self.b.offset(self.block, offset), align=8)

    def call(self, function: int, result: str, *arguments: Value) -> None:
        operands = ", ".join(map(str, arguments))
        self.b.assign(result, f"call {result} {self.word(function, 'ptr').text}({operands})")

    def emit(self) -> None:
        b = self.b
        code = b.load("i32", b.offset(self.details, SI_CODE), align=4)
        self.is_fault = b.icmp("sgt", code, const("i32", 0))  # otherwise another process sent the signal
        address = b.load("i64", b.offset(self.details, SI_ADDRESS), align=8)
        slot, in_map = b.loop(0, SLOTS, 1, lambda i, *best: self.look(i, address, *best), [NULL, const("i1", False)])
        b.when(b.op("and", in_map, self.is_fault), lambda: self.report(slot), self.pass_on)

    def look(self, i: Value, address: Value, slot: Value, in_map: Value) -> list[Value]:
        b = self.b
        here = b.offset(self.word(MAPS, "ptr"), b.mul(i, 4), "i64")
        start, end = (b.load("i64", b.offset(here, 8 * word), align=8) for word in (START, END))
        inside = b.op("and", b.icmp("ule", start, address), b.icmp("ult", address, end))
        inside = b.op("and", inside, b.icmp("ne", start, i64(0)))
        return [b.select(inside, here, slot), b.op("or", in_map, inside)]

    def report(self, slot: Value) -> None:
        """Writes the message and exits."""
        b = self.b
        path, length = (b.load(t, b.offset(slot, 8 * word), align=8) for t, word in (("ptr", PATH), ("i64", LENGTH)))
        self.call(WRITE, "i64", _STDERR, self.word(BEFORE, "ptr"), self.word(BEFORE_LENGTH))
        self.call(WRITE, "i64", _STDERR, path, length)
        self.call(WRITE, "i64", _STDERR, self.word(AFTER, "ptr"), self.word(AFTER_LENGTH))
        b.call_pointer(self.word(EXIT, "ptr"), b.convert("trunc", self.word(CODE), "i32"))

    def pass_on(self) -> None:
        """Passes the signal on to the previous handler."""
        b = self.b
        b.when(b.icmp("ule", self.word(OLD), i64(_LAST_SPECIAL)), self.restore, self.call_old)

    def restore(self) -> None:
        """Reinstalls the previous action: a faulting instruction faults again, a sent signal is raised again."""
        self.call(SIGACTION, "i32", self.signal, self.word(OLD_ACTION, "ptr"), NULL)
        self.b.when(self.is_fault, lambda: None, lambda: self.call(RAISE, "i32", self.signal))

    def call_old(self) -> None:
        b, old = self.b, self.word(OLD, "ptr")
        b.when(
            b.icmp("ne", self.word(OLD_IS_DETAILED), i64(0)),
            lambda: b.call_pointer(old, self.signal, self.details, self.context),
            lambda: b.call_pointer(old, self.signal),
        )

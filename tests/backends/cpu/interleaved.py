"""The driver's LLVM IR as Python generators: threads that a test interleaves as it likes, at every access to memory.

`Machine` has memory, futexes and affinity masks; `Machine.start` begins a thread in a function of the driver, `step`
lets a thread go on to its next access. Memory is sequentially consistent, as the driver asks for it to be.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from typing import Any

SIZES = {"i1": 1, "i8": 1, "i32": 4, "i64": 8, "ptr": 8}
OPERATORS = {"add": "+", "sub": "-", "mul": "*", "and": "&", "or": "|", "xor": "^", "shl": "<<", "ashr": ">>"}
PREDICATES = {"eq": "==", "ne": "!=", "slt": "<", "sle": "<=", "sgt": ">", "sge": ">="}
PREDICATES |= {"ult": "<", "ule": "<=", "ugt": ">", "uge": ">="}
FUTEX, SET_AFFINITY, GET_AFFINITY, GET_CORE, GET_THREAD, WAIT = 202, 203, 204, 309, 186, 128

Life = Generator[None, None, Any]
Kernel = Callable[..., Life]  # of the machine, the thread and the arguments of the call


def translated(text: str, names: set[str]) -> dict[str, Callable[..., Life]]:
    """The functions of a module that are named, as generators: f(machine, thread, *arguments)."""
    lines: list[str] = []
    for head, body in re.findall(r"^define ([^{]*) \{\n(.*?)^\}", text, re.M | re.S):
        name = re.search(r"@(\w+)", head)[1]  # type: ignore[index]
        if name in names:
            lines += _function(name, re.findall(r"%(\S+?)[,)]", head), body)
    space: dict[str, Any] = {"U": (1 << 64) - 1}
    exec("\n".join(lines), space)
    return {name: space[name] for name in names}


def _value(text: str) -> str:
    text = text.split()[-1].strip()
    if text.startswith("%"):
        return "v_" + text[1:].replace(".", "_")
    return {"true": "1", "false": "0", "null": "0"}.get(text, text)


def _function(name: str, arguments: list[str], body: str) -> list[str]:
    blocks: dict[str, list[str]] = {}
    for line in body.splitlines():
        if line and not line.startswith(" "):
            current = blocks.setdefault(line.rstrip(":"), [])
        elif line.strip():
            current.append(line.strip())
    numbers = {label: i for i, label in enumerate(blocks)}
    phis: dict[tuple[str, str], list[tuple[str, str]]] = {}
    for label, instructions in blocks.items():
        for line in instructions:
            if match := re.match(r"(%\S+) = phi \S+ (.*)", line):
                for value, before in re.findall(r"\[ (\S+), %(\S+) \]", match[2]):
                    phis.setdefault((before, label), []).append((_value(match[1]), _value(value)))

    def go(before: str, label: str) -> str:
        moves = phis.get((before, label), [])
        moved = f"{', '.join(a for a, _ in moves)} = {', '.join(b for _, b in moves)}; " if moves else ""
        return f"{moved}b = {numbers[label]}; continue"

    out = [f"def {name}(m, t, {', '.join('v_' + a for a in arguments)}):", " b = 0", " while True:"]
    for label, instructions in blocks.items():
        out.append(f"  if b == {numbers[label]}:")
        for line in instructions:
            if " phi " in line:
                continue
            if match := re.match(r"br i1 (\S+), label %(\S+), label %(\S+)", line):
                out += [f"   if {_value(match[1])}:", f"    {go(label, match[2])}", f"   {go(label, match[3])}"]
            elif match := re.match(r"br label %(\S+)", line):
                out.append(f"   {go(label, match[1])}")
            elif line == "unreachable":
                out.append("   raise AssertionError")
            elif line.startswith("ret"):
                out.append("   return" + ("" if line == "ret void" else f" {_value(line)}"))
            else:
                out += [f"   {part}" for part in _instruction(line)]
    return out


def _instruction(line: str) -> list[str]:
    match = re.match(r"(?:(%\S+) = )?(.*)", line)
    assert match is not None
    to, rest = (_value(match[1]) if match[1] else "_"), match[2]
    word = rest.split()[0]
    if word == "call":
        arguments = [_value(a) for a in rest[rest.rindex("(") + 1 : -1].split(",") if a.strip()]
        if "asm" in rest:
            return ["yield", f"{to} = yield from m.system(t, {', '.join(arguments)})"]
        callee = re.search(r"call \S+ ([@%][\w.]+)\(", rest)[1]  # type: ignore[index]
        if callee.startswith("@llvm"):
            return [f"{to} = m.now()"] if "cycle" in callee else ["yield"] if "pause" in callee else ["pass"]
        if callee.startswith("@"):
            return [f"{to} = yield from {callee[1:]}(m, t, {', '.join(arguments)})"]
        return [f"{to} = yield from m.kernels[{_value(callee)}]({', '.join(['m', 't', *arguments])})"]
    if word == "getelementptr":
        fields = re.match(r"getelementptr (\S+), ptr (\S+), \S+ (\S+)", rest)
        assert fields is not None
        return [f"{to} = {_value(fields[2])} + {_value(fields[3])} * {SIZES[fields[1]]}"]
    if word == "load":
        fields = re.match(r"load (?:atomic |volatile )?(\S+), ptr ([^,\s]+)", rest)
        assert fields is not None
        return ["yield", f"{to} = m.load(t, {_value(fields[2])}, {SIZES[fields[1]]})"]
    if word == "store":
        fields = re.match(r"store (?:atomic |volatile )?(\S+) (\S+), ptr ([^,\s]+)", rest)
        assert fields is not None
        return ["yield", f"m.store(t, {_value(fields[3])}, {SIZES[fields[1]]}, {_value(fields[2])})"]
    if word == "atomicrmw":
        fields = re.match(r"atomicrmw (\S+) ptr (\S+), (\S+) (\S+) ", rest)
        assert fields is not None
        place, size, value = _value(fields[2]), SIZES[fields[3]], _value(fields[4])
        new = value if fields[1] == "xchg" else f"{to} {OPERATORS[fields[1]]} {value}"
        return ["yield", f"{to} = m.load(t, {place}, {size})", f"m.store(t, {place}, {size}, {new})"]
    if word == "cmpxchg":
        fields = re.match(r"cmpxchg ptr (\S+), (\S+) (\S+), \S+ (\S+) ", rest)
        assert fields is not None
        place, size = _value(fields[1]), SIZES[fields[2]]
        same = f"m.load(t, {place}, {size}) == {_value(fields[3])}"
        return ["yield", f"{to} = {same}", f"if {to}: m.store(t, {place}, {size}, {_value(fields[4])})"]
    if word == "extractvalue":
        return [f"{to} = {_value(rest.rpartition(',')[0])}"]
    if word == "alloca":
        fields = re.match(r"alloca (\S+), \S+ (\d+)", rest)
        assert fields is not None
        return [f"{to} = m.reserve({SIZES[fields[1]] * int(fields[2])})"]
    if word == "icmp":
        fields = re.match(r"icmp (\S+) \S+ (\S+), (\S+)", rest)
        assert fields is not None
        mask = " & U" if fields[1][0] == "u" else ""
        return [f"{to} = ({_value(fields[2])}{mask}) {PREDICATES[fields[1]]} ({_value(fields[3])}{mask})"]
    if word == "select":
        condition, a, b = (_value(part) for part in rest[6:].split(","))
        return [f"{to} = {a} if {condition} else {b}"]
    if word in ("zext", "sext", "trunc", "ptrtoint", "inttoptr"):
        return [f"{to} = int({_value(rest.partition(' to ')[0])})"]
    a, b = (_value(part) for part in rest.split(","))
    if word == "lshr":
        return [f"{to} = ({a} & U) >> {b}"]
    if word == "sdiv":
        return [f"{to} = abs({a}) // abs({b}) * (1 if ({a} < 0) == ({b} < 0) else -1)"]
    return [f"{to} = {a} {OPERATORS[word]} {b}"]


class Machine:
    """Memory, and threads that run one step at a time."""

    def __init__(self, functions: dict[str, Callable[..., Life]], cores: int) -> None:
        self.functions = functions
        self.memory = bytearray(1 << 16)
        self.used = 256
        self.threads: list[Life | None] = []
        self.results: list[Any] = []
        self.asleep: dict[int, int] = {}  # thread: the address that it sleeps on
        self.kernels: dict[int, Kernel] = {}
        self.masks: list[int] = []
        self.cores = cores
        self.core: Callable[[], int] = lambda: 0
        self.ticks = 0
        self.gone: list[tuple[int, int]] = []  # memory that nobody may touch any more

    def reserve(self, size: int) -> int:
        at = self.used
        self.used += -(-size // 128) * 128
        if self.used > len(self.memory):
            self.memory.extend(bytes(self.used - len(self.memory)))
        return at

    def _check(self, thread: int, at: int) -> None:
        for low, high in self.gone:
            assert not low <= at < high, f"thread {thread} uses memory of a run that is over"

    def load(self, thread: int, at: int, size: int) -> int:
        self._check(thread, at)
        return int.from_bytes(self.memory[at : at + size], "little", signed=True)

    def store(self, thread: int, at: int, size: int, value: int) -> None:
        self._check(thread, at)
        self.memory[at : at + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")

    def write(self, at: int, *words: int) -> None:
        for i, value in enumerate(words):
            self.store(-1, at + 8 * i, 8, value)

    def now(self) -> int:
        self.ticks += 1
        return self.ticks

    def start(self, function: str, *arguments: int) -> int:
        thread = len(self.threads)
        self.masks.append((1 << self.cores) - 1)
        self.results.append(None)
        self.threads.append(self.functions[function](self, thread, *arguments))
        return thread

    def runnable(self) -> list[int]:
        return [i for i, life in enumerate(self.threads) if life is not None and i not in self.asleep]

    def step(self, thread: int) -> None:
        life = self.threads[thread]
        assert life is not None
        self.ticks += 1
        try:
            next(life)
        except StopIteration as end:
            self.threads[thread], self.results[thread] = None, end.value

    def system(self, thread: int, number: int, a: int, b: int, c: int, d: int) -> Life:
        if number == FUTEX and b == WAIT:
            if self.load(thread, a, 4) != c:
                return -11
            self.asleep[thread] = a
            yield
        elif number == FUTEX:
            woken = [t for t, place in self.asleep.items() if place == a][:c]
            for t in woken:
                del self.asleep[t]
            return len(woken)
        elif number == GET_CORE:
            self.store(thread, a, 4, self.core())
        elif number == GET_THREAD:
            return thread + 1
        elif number in (GET_AFFINITY, SET_AFFINITY):
            other = a - 1 if a else thread
            if number == GET_AFFINITY:
                self.store(thread, c, 8, self.masks[other])
                return 8
            self.masks[other] = self.load(thread, c, 8)
            assert self.masks[other], "a thread needs a core"
        return 0

"""LIR programs: buffers, kernels, launches. Everything a backend needs to run a graph, and readable as text.

Sizes are expressions over run-time symbols; buffer addresses are data. `Program` is target-specific (layouts of
weights) but knows no machine code. Launches stand in one list; loops and branches are ranges of it, and `steps` is the
walk through them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from rlx.dtypes import I16, U8
from rlx.ir.graph import Array
from rlx.lir.kernels import Kernel, MatmulKernel
from rlx.lir.loops import Let, LoopKernel, Ref, statements, walk
from rlx.lir.views import View
from rlx.types import Size, TensorType, contiguous_strides, evaluate

LONGEST_EPILOGUE = 200  # terms that a launch line shows
INPUT, OUTPUT, WEIGHT, CONST, ARENA = "input", "output", "weight", "const", "buffer"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of a type. Arena buffers are planned; the others belong to the caller, the weight store or the program."""

    name: str
    type: TensorType
    kind: str
    value: Array | None = None
    note: str = ""  # how a weight is laid out

    def view(self) -> View:
        """All of it, without gaps; packed blocks are seen as the units they are made of, of 16 or of 8 bits."""
        storage = self.type.dtype
        if storage.is_packed:
            *lead, blocks = self.type.array_shape
            shape = (*lead, blocks * (storage.size // storage.unit))
            return View(self.name, I16 if storage.unit == 2 else U8, shape, contiguous_strides(shape))
        return View(self.name, self.type.dtype, self.type.shape, contiguous_strides(self.type.shape))


@dataclass(frozen=True, slots=True)
class Launch:
    """One run of a kernel: a value for each word of its argument block, and how far it is split."""

    kernel: Kernel
    words: tuple[View | Size | None, ...]  # None: an address that the backend fills in
    units: Size
    split: str
    barrier: bool = False
    where: str = ""  # stage path and source line
    node: int = -1
    flops: Size = 0
    also: tuple[int, ...] = ()  # further nodes whose launches were merged into this one
    shares: Mapping[str, Size] = field(default_factory=dict)  # bytes of operands of which each unit has its own run

    def views(self, written: bool | None = None) -> list[View]:
        """Operand views; only those the kernel writes, or only those it reads, if asked."""
        wanted = {w for w, is_written in self.kernel.operands().items() if written is None or is_written == written}
        return [
            v for name, v in zip(self.kernel.words, self.words, strict=True) if isinstance(v, View) and name in wanted
        ]

    @property
    def bytes(self) -> Size:
        """Bytes of all operands, each counted once."""
        total: Size = 0
        for view in dict.fromkeys(self.views()):
            size: Size = view.dtype.size
            for d, s in zip(view.shape, view.strides, strict=True):
                size = size * d if s != 0 else size
            total = total + size
        return total


@dataclass(frozen=True, slots=True)
class Loop:
    """Launches [first, last) again and again, then [last, end) once. Ranges of inner loops lie inside.

    Operands move by two symbols that only offsets of views have: `symbol` counts the steps from 0, `parity` is 0 in the
    first step, 1 in the second, 0 in the third. In a loop with a `predicate`, launches [first, test) compute it, and
    the loop goes on to [test, last) only where it is true.
    """

    first: int
    last: int
    end: int
    length: Size | None  # steps; with a predicate the most of them, None where nothing else ends it
    symbol: str
    parity: str
    predicate: View | None = None
    test: int = -1
    between: bool = False  # a barrier between two steps
    barrier: bool = False  # and one after the loop

    @property
    def edges(self) -> tuple[int, ...]:
        """Where something begins or ends, in order."""
        tested = () if self.predicate is None else (self.test,)
        return self.first, *tested, self.last, self.end

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.symbol, self.parity

    def moved(self, to: Callable[[int], int]) -> Loop:
        """The same loop in a list whose launches have other numbers."""
        test = -1 if self.predicate is None else to(self.test)
        return replace(self, first=to(self.first), last=to(self.last), end=to(self.end), test=test)


@dataclass(frozen=True, slots=True)
class Branch:
    """Launches [first, middle) where the predicate is true, else [middle, end)."""

    first: int
    middle: int
    end: int
    predicate: View
    barrier: bool = False

    @property
    def edges(self) -> tuple[int, ...]:
        return self.first, self.middle, self.end

    @property
    def symbols(self) -> tuple[str, ...]:
        return ()

    def moved(self, to: Callable[[int], int]) -> Branch:
        return replace(self, first=to(self.first), middle=to(self.middle), end=to(self.end))


Control = Loop | Branch
LAUNCH, ENTER, TEST, NEXT, JUMP, LEAVE = "launch", "enter", "test", "next", "jump", "leave"


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that the walk through a program meets, and the loops it is in, outermost first.

    A launch, or an edge of a loop or branch: `enter` a loop, `test` a predicate, go to the `next` step of a loop,
    `jump` over the other side of a branch, `leave` either. `number` counts launches or the program's controls.
    """

    kind: str
    number: int
    loops: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Assertion:
    """How two sizes must relate at run time, because an op says so.

    In a body that may not run at all, only where it does: if each of the loops around it has a step (`steps`), and if
    the branch is taken or the condition of a loop holds, which a launch in front of the body finds out (`launched`).
    """

    a: Size
    b: Size
    relation: str  # == or <=
    op: str
    where: str
    steps: tuple[Size, ...] = ()
    launched: bool = False

    def holds(self, a: int, b: int) -> bool:
        return a == b if self.relation == "==" else a <= b

    def message(self, a: int, b: int) -> str:
        """What to say when it does not hold for these sizes."""
        if self.relation == "==":
            return f"{self.op}: {self.a} is {a}, {self.b} is {b}"
        return f"{self.op}: {self.a} is {a}, more than {self.b}, which is {b}"


@dataclass
class Program:
    """A schedulable graph: what it reads and gives, its buffers and its launches in order."""

    name: str
    target: str
    symbols: tuple[str, ...]
    limits: dict[str, int]
    buffers: dict[str, Buffer] = field(default_factory=dict)
    launches: list[Launch] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    weights: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)
    assertions: list[Assertion] = field(default_factory=list)
    controls: list[Control] = field(default_factory=list)  # outer ones before inner ones
    batch: str | None = None  # the symbol of the first axis of all inputs and outputs, whose entries are independent

    def steps(self) -> Iterator[Step]:
        """The walk through the program: launches in order, with the edges of loops and branches between them."""
        return _Walk(self).section(0, len(self.launches), ())

    def loop_symbols(self) -> tuple[str, ...]:
        """The symbols by which operands move."""
        return tuple(name for control in self.controls for name in control.symbols)

    def runs(self, steps: Mapping[int, int]) -> list[int]:
        """How often each launch runs, if all steps of each loop, by its number, are so many; a test counts as true."""
        found = []
        for step in self.steps():
            if step.kind == LAUNCH:
                around = [n for n in step.loops if step.number < self._loop(n).last]
                found.append(steps[around[-1]] if around else 1)
        return found

    def all_steps(self, sizes: Mapping[str, int]) -> dict[int, int]:
        """The steps of each loop in a whole run; one for each time that a loop of unknown length is entered."""
        found: dict[int, int] = {}
        for step in self.steps():
            if step.kind == ENTER:
                length = self._loop(step.number).length
                times = 1 if length is None or self._loop(step.number).predicate else evaluate(length, sizes)
                found[step.number] = times * (found[step.loops[-1]] if step.loops else 1)
        return found

    def outermost_loops(self) -> list[int | None]:
        """The number of the outermost loop around each launch."""
        return [step.loops[0] if step.loops else None for step in self.steps() if step.kind == LAUNCH]

    def _loop(self, number: int) -> Loop:
        control = self.controls[number]
        assert isinstance(control, Loop)
        return control

    def kernels(self) -> dict[str, Kernel]:
        """Each unique kernel once, by symbol."""
        return {launch.kernel.symbol: launch.kernel for launch in self.launches}

    def fingerprint(self) -> str:
        """A digest of the whole program, with every size and number that its text leaves out."""
        digest = hashlib.blake2b(self.text().encode(), digest_size=16)
        for launch in self.launches:
            digest.update(f"\n{launch.words}".encode())
        constants = {n: b.value.digest for n, b in self.buffers.items() if b.value is not None}
        digest.update(f"\n{self.inputs}{self.weights}{self.outputs}{constants}".encode())
        return digest.hexdigest()

    def manifest(self) -> dict[str, dict[str, str]]:
        """Names and types of inputs, weights and outputs."""
        return {
            kind: {name: str(self.buffers[name].type) for name in names}
            for kind, names in (("inputs", self.inputs), ("weights", self.weights), ("outputs", self.outputs))
        }

    def text(self, *, kernels: bool = True, full: bool = False) -> str:
        """The program as text: interface, buffers, launches, then the kernels. In full it can be read by `parse`."""
        if full:
            from rlx.lir.text import program_text

            return program_text(self)
        lines = [*self.interface_lines(), *self.launch_lines(launch_text)]
        if kernels:
            for kernel in self.kernels().values():
                lines += ["", kernel.text()]
        return "\n".join(lines)

    def interface_lines(self) -> Iterator[str]:
        """What the program takes and gives, its buffers, and what it asserts."""
        yield f"program @{self.name}({', '.join(self.symbols)})  # {self.target}"
        for symbol, limit in sorted(self.limits.items()):
            yield f"  limit {symbol} <= {limit}"
        for buffer in self.buffers.values():
            note = f" as {buffer.note}" if buffer.note else ""
            value = f" = {buffer.value!r}" if buffer.value is not None else ""
            yield f"  {buffer.kind} {buffer.name}: {buffer.type}{note}{value}"
        if self.batch is not None:
            yield f"  entries of {self.batch} are independent"
        for a in self.assertions:
            inside = f" in {' by '.join(map(str, a.steps))} steps" if a.steps else ""
            yield f"  assert {a.a} {a.relation} {a.b}{inside}{' where it runs' if a.launched else ''}  # {a.where}"

    @classmethod
    def parse(cls, text: str) -> Program:
        """The program that `text(full=True)` has printed."""
        from rlx.lir.parse import parse_program

        return parse_program(text)

    def launch_lines(self, show: Callable[[Launch], str], view: Callable[[View], str] = str) -> Iterator[str]:
        """The text of each launch, indented in loops and branches, whose edges have lines of their own."""
        depth = 1
        for step in self.steps():
            if step.kind == LAUNCH:
                yield from ("  " * depth + line for line in show(self.launches[step.number]).split("\n"))
                continue
            control = self.controls[step.number]
            line = _edge_text(step.kind, control, view)
            if line:
                yield "  " * (depth - (step.kind in (NEXT, JUMP))) + line
            depth += (step.kind == ENTER) + (step.kind == TEST and isinstance(control, Branch)) - (step.kind == LEAVE)


class _Walk:
    """Reads controls in the order in which they begin."""

    def __init__(self, program: Program) -> None:
        self.controls = program.controls
        self.at = 0

    def section(self, first: int, end: int, loops: tuple[int, ...]) -> Iterator[Step]:
        """Launches [first, end) and what is inside them."""
        position = first
        while True:
            inner = self.controls[self.at] if self.at < len(self.controls) else None
            if inner is not None and inner.first == position and inner.end <= end:
                yield from self.control(inner, loops)
                position = inner.end
            elif position < end:
                yield Step(LAUNCH, position, loops)
                position += 1
            else:
                return

    def control(self, control: Control, loops: tuple[int, ...]) -> Iterator[Step]:
        number = self.at
        self.at += 1
        first, *others = control.edges
        if isinstance(control, Branch):
            inside, kinds = loops, [JUMP, LEAVE]
            yield Step(TEST, number, loops)
        else:
            inside, kinds = (*loops, number), [TEST, NEXT, LEAVE][-len(others) :]
            yield Step(ENTER, number, loops)
        for kind, stop in zip(kinds, others, strict=True):
            yield from self.section(first, stop, inside)
            yield Step(kind, number, loops if kind == LEAVE else inside)
            first = stop


def _edge_text(kind: str, control: Control, view: Callable[[View], str]) -> str:
    after = "  barrier" if control.barrier else ""
    match kind, control:
        case "enter", Loop():
            head = "loop" if control.predicate is None else "while"
            steps = "" if control.length is None else f" in {control.length}"
            between = "  barrier between" if control.between else ""
            return f"{head} {control.symbol}{steps}, {control.parity}:{between}{after}"
        case "test", Loop():
            assert control.predicate is not None
            return f"test {view(control.predicate)}"
        case "test", Branch():
            return f"if {view(control.predicate)}:{after}"
        case "next", Loop(last=last, end=end) if last < end:
            return "then:"
        case "jump", _:
            return "else:"
    return ""


def launch_text(launch: Launch) -> str:
    """A launch as one line."""
    reads = ", ".join(map(str, launch.views(written=False)))
    writes = ", ".join(map(str, launch.views(written=True)))
    text = f"launch {launch.kernel.symbol}({reads}) -> {writes}  split {launch.split}({launch.units})"
    if isinstance(launch.kernel, MatmulKernel) and launch.kernel.epilogue is not None:
        text += f"  epilogue {_epilogue_text(launch.kernel, launch.kernel.epilogue)}"
    return text + ("  barrier" if launch.barrier else "")


def _epilogue_text(kernel: MatmulKernel, epilogue: LoopKernel) -> str:
    """The epilogue written out, or its name where lets that are used again and again would make it endless."""
    terms: dict[str, int] = {}
    for stmt in statements(epilogue.root):
        if isinstance(stmt, Let):
            terms[stmt.name] = sum(terms.get(e.name, 1) if isinstance(e, Ref) else 1 for e in walk(stmt.value))
    return kernel.epilogue_text() if max(terms.values(), default=0) <= LONGEST_EPILOGUE else epilogue.name

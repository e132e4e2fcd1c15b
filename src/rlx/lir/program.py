"""LIR programs: buffers, kernels and launches, everything a backend needs to run a graph.

Sizes are expressions over run-time symbols; buffer addresses are data. A `Program` is specific to a target (through
weight layouts) but contains no machine code. Launches form one list; loops and branches are ranges of it, and `steps`
walks through them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import field, replace

from rlx.dtypes import I16, U8
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Array
from rlx.lir.interface import ARENA as ARENA
from rlx.lir.interface import CONST as CONST
from rlx.lir.interface import INPUT as INPUT
from rlx.lir.interface import OUTPUT as OUTPUT
from rlx.lir.interface import WEIGHT as WEIGHT
from rlx.lir.interface import Assertion as Assertion
from rlx.lir.kernels import Kernel, MatmulKernel
from rlx.lir.views import View
from rlx.types import Size, TensorType, contiguous_strides, evaluate


@dataclass(frozen=True, slots=True)
class Buffer:
    """Typed memory. Arena buffers are planned; others belong to the caller, the weight store or the program."""

    name: str
    type: TensorType
    kind: str
    value: Array | None = None
    note: str = ""  # how a weight is laid out

    def view(self) -> View:
        """A contiguous view of the entire buffer; quantised blocks are viewed as 16-bit or 8-bit units."""
        storage = self.type.dtype
        if storage.is_packed:
            *lead, blocks = self.type.array_shape
            shape = (*lead, blocks * (storage.size // storage.unit))
            return View(self.name, I16 if storage.unit == 2 else U8, shape, contiguous_strides(shape))
        return View(self.name, self.type.dtype, self.type.shape, contiguous_strides(self.type.shape))


@dataclass(frozen=True, slots=True, repr=False)
class Launch:
    """One run of a kernel: a value for each of its words, and, for loop kernels, how they are split.

    `words` has one entry per name in `kernel.words`, in that order: operands, sizes, strides. A `View` is an operand:
    pass the address of `buffer[offset]`, where the offset counts elements. A `Size` is a 64-bit integer:
    `rlx.types.evaluate(word, sizes)`, where sizes include the symbols of enclosing loops. `None` is an optional
    operand that this launch does not have.
    """

    kernel: Kernel
    words: tuple[View | Size | None, ...]
    units: Size | None = None  # of loop kernels: parallel iterations; backends split other kernels themselves
    split: str = ""  # the name of a unit
    barrier: bool = False
    where: str = ""  # stage path and source line
    node: int = -1
    flops: Size = 0
    also: tuple[int, ...] = ()  # further nodes whose launches were merged into this one
    shares: Mapping[str, Size] = field(
        default_factory=dict
    )  # bytes per unit of operands that units access in disjoint runs

    def __repr__(self) -> str:
        return f"<{launch_text(self)}>"

    def views(self, written: bool | None = None) -> list[View]:
        """Operand views: all, only those written (`written=True`), or only those read (`written=False`)."""
        wanted = {w for w, is_written in self.kernel.operands().items() if written is None or is_written == written}
        return [
            v for name, v in zip(self.kernel.words, self.words, strict=True) if isinstance(v, View) and name in wanted
        ]

    @property
    def bytes(self) -> Size:
        """Bytes of all operands, each counted once."""
        return _bytes(self.views())

    def min_bytes(self, buffers: Container[str] | None = None) -> Size:
        """Bytes that every run accesses, of all operands or those in some buffers.

        Operands of which data selects a part, such as the table of a gather, are left out.
        """
        operands = self.kernel.operands().keys() - self.kernel.selected
        views = [
            view
            for name, view in zip(self.kernel.words, self.words, strict=True)
            if isinstance(view, View) and name in operands and (buffers is None or view.buffer in buffers)
        ]
        return _bytes(views)


def _bytes(views: Iterable[View]) -> Size:
    """Bytes of distinct views; axes of stride 0 are accessed once."""
    total: Size = 0
    for view in dict.fromkeys(views):
        size: Size = view.dtype.size
        for d, s in zip(view.shape, view.strides, strict=True):
            size = size * d if s != 0 else size
        total = total + size
    return total


@dataclass(frozen=True, slots=True)
class Loop:
    """Runs launches [first, last) repeatedly, then [last, end) once. Ranges of inner loops are nested inside.

    View offsets depend on the step through two symbols: `symbol` counts steps from 0, and `parity` alternates between
    0 and 1, beginning with 0. In a loop with a `predicate`, launches [first, test) compute it, and [test, last) run
    only while it is true.
    """

    first: int
    last: int
    end: int
    length: Size | None  # steps; with a predicate their maximum, None if unlimited
    symbol: str
    parity: str
    predicate: View | None = None
    test: int = -1
    between: bool = False  # barrier between steps
    barrier: bool = False  # barrier after the loop

    @property
    def edges(self) -> tuple[int, ...]:
        """The launch indices at which a range begins or ends, in order."""
        tested = () if self.predicate is None else (self.test,)
        return self.first, *tested, self.last, self.end

    @property
    def symbols(self) -> tuple[str, ...]:
        return self.symbol, self.parity

    def renumbered(self, to: Callable[[int], int]) -> Loop:
        """The same loop after launches are renumbered by `to`."""
        test = -1 if self.predicate is None else to(self.test)
        return replace(self, first=to(self.first), last=to(self.last), end=to(self.end), test=test)


@dataclass(frozen=True, slots=True)
class Branch:
    """Runs launches [first, middle) if the predicate is true, else [middle, end)."""

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

    def renumbered(self, to: Callable[[int], int]) -> Branch:
        return replace(self, first=to(self.first), middle=to(self.middle), end=to(self.end))


Control = Loop | Branch
LAUNCH, ENTER, TEST, NEXT, JUMP, LEAVE = "launch", "enter", "test", "next", "jump", "leave"


@dataclass(frozen=True, slots=True)
class Step:
    """One step of the walk through a program: a launch, or an edge of a loop or branch.

    `enter` a loop, `test` a predicate, go to the `next` iteration of a loop, `jump` over the else side of a branch,
    `leave` either.
    """

    kind: str  # LAUNCH, ENTER, TEST, NEXT, JUMP or LEAVE
    number: int  # index into `program.launches` for LAUNCH, into `program.controls` for all others
    loops: tuple[int, ...] = ()  # enclosing loops, outermost first, as indices into `program.controls`


@dataclass
class Program:
    """A scheduled graph: its interface, its buffers, and its launches in order."""

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
    controls: list[Control] = field(default_factory=list)  # outer before inner
    batch: str | None = None  # symbol of the leading axis of all inputs and outputs, if its entries are independent

    def steps(self) -> Iterator[Step]:
        """Walk through the program: launches in order, with the edges of loops and branches between them."""
        return _Walk(self).section(0, len(self.launches), ())

    def loop_symbols(self) -> tuple[str, ...]:
        """The symbols that change from step to step of loops."""
        return tuple(name for control in self.controls for name in control.symbols)

    def runs(self, steps: Mapping[int, int]) -> list[int]:
        """How often each launch runs, given the total steps of each loop by its index; tests count as true."""
        counts = []
        for step in self.steps():
            if step.kind == LAUNCH:
                around = [n for n in step.loops if step.number < self._loop(n).last]
                counts.append(steps[around[-1]] if around else 1)
        return counts

    def all_steps(self, sizes: Mapping[str, int]) -> dict[int, int]:
        """The total steps of each loop in a run; loops of unknown length count one step per entry."""
        totals: dict[int, int] = {}
        for step in self.steps():
            if step.kind == ENTER:
                length = self._loop(step.number).length
                times = 1 if length is None or self._loop(step.number).predicate else evaluate(length, sizes)
                totals[step.number] = times * (totals[step.loops[-1]] if step.loops else 1)
        return totals

    def outermost_loops(self) -> list[int | None]:
        """The index of the outermost loop around each launch."""
        return [step.loops[0] if step.loops else None for step in self.steps() if step.kind == LAUNCH]

    def _loop(self, number: int) -> Loop:
        control = self.controls[number]
        assert isinstance(control, Loop)
        return control

    def kernels(self) -> dict[str, Kernel]:
        """Each unique kernel once, by symbol."""
        return {launch.kernel.symbol: launch.kernel for launch in self.launches}

    def fingerprint(self) -> str:
        """A digest of the program, including all sizes and constants that its text omits."""
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

    def __str__(self) -> str:
        """The program as `text()` prints it."""
        return self.text()

    def text(self, *, kernels: bool = True, full: bool = False) -> str:
        """The program as text: interface, buffers, launches, kernels. With `full`, `parse` can read it back."""
        if full:
            from rlx.lir.text import program_text

            return program_text(self)
        lines = [*self.interface_lines(), *self.launch_lines(launch_text)]
        if kernels:
            for kernel in self.kernels().values():
                lines += ["", kernel.text()]
        return "\n".join(lines)

    def interface_lines(self) -> Iterator[str]:
        """The program's symbols, limits, buffers and assertions."""
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
        """Parse the output of `text(full=True)`."""
        from rlx.lir.parse import parse_program

        return parse_program(text)

    def launch_lines(self, show: Callable[[Launch], str], view: Callable[[View], str] = str) -> Iterator[str]:
        """The text of each launch, indented inside loops and branches, whose edges are separate lines."""
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
    """Walks through controls in the order in which they begin."""

    def __init__(self, program: Program) -> None:
        self.controls = program.controls
        self.at = 0

    def section(self, first: int, end: int, loops: tuple[int, ...]) -> Iterator[Step]:
        """Steps of launches [first, end), including controls in that range."""
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
    text = f"launch {launch.kernel.symbol}({reads}) -> {writes}"
    if launch.units is not None:
        text += f"  split {launch.split}({launch.units})"
    if isinstance(launch.kernel, MatmulKernel) and launch.kernel.epilogue is not None:
        text += f"  epilogue {launch.kernel.epilogue.text(_buffers(launch, launch.kernel))}"
    return text + ("  barrier" if launch.barrier else "")


def _buffers(launch: Launch, kernel: MatmulKernel) -> dict[str, str]:
    """The buffers of a matmul's epilogue operands, by their names in the epilogue."""
    views = dict(zip(kernel.words, launch.words, strict=True))
    named = {operand.name: views[operand.name] for operand in kernel.epilogue_operands}
    return {name: view.buffer for name, view in named.items() if isinstance(view, View)}

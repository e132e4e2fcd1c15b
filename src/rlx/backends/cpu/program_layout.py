"""Program layouts: word positions, size indices and routine names, without kernels.

`Layout` is plain data, so a warm start needs neither the program nor the generators. `lay_out` builds it: every word of
every launch gets a position in one block, grouped by where its value comes from.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.backends.cpu import driver
from rlx.backends.cpu.launch_records import ARGUMENTS, ENDLESS, FLAGS, FUNCTION, LoopPlan, Mark, Records, Words
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import DType
from rlx.fast_dataclass import dataclass
from rlx.lir.interface import ARENA, CONST, INPUT, OUTPUT, WEIGHT, Assertion
from rlx.lir.memory import Lifetime, lifetimes
from rlx.types import Size, is_monotone, product, symbols_of

if TYPE_CHECKING:
    from rlx.backends.cpu.routine import Call, Entry
    from rlx.lir.program import Buffer, Program
    from rlx.lir.views import View


@dataclass(frozen=True)
class Pointers:
    """Argument words that hold addresses: their positions, buffers and offsets."""

    positions: Words
    buffers: Words
    offsets: Words  # indices in the size table, in bytes


@dataclass(frozen=True)
class Prefetch:
    """Prefetch records: the words with the addresses to read ahead, and indices of sizes."""

    records: Words
    words: Words
    bytes: Words
    units: Words  # of the launches that read it
    rows: Words  # of the matmul; with many rows a launch is not bound by memory
    rounds: Words  # how often units read it: only data read once is prefetched


@dataclass(frozen=True)
class SizeCheck:
    """An assertion that depends only on sizes, with their indices."""

    assertion: Assertion
    a: int
    b: int
    steps: tuple[int, ...]  # of loops: if one of them has no steps, the assertion need not hold

    def holds(self, values: Sequence[int]) -> bool:
        related = self.assertion.holds(values[self.a], values[self.b])
        return related or any(values[steps] <= 0 for steps in self.steps)


@dataclass(frozen=True)
class Layout:
    """Everything that running a program needs. Sizes are given as indices in `sizes`."""

    name: str
    symbols: tuple[str, ...]
    loop_symbols: tuple[str, ...]
    names: Mapping[str, tuple[str, ...]]  # of buffers by kind, in the order of pointers' buffer numbers
    records: Records
    entries: tuple[str, ...]  # the routine of each launch
    tables: tuple[tuple[int, tuple[str, ...]], ...]  # words with the address of a routine or a routine table
    number_words: Words  # the words that are sizes ...
    number_sizes: Words  # ... and their indices
    pointers: Mapping[str, Pointers]  # by kind of buffer
    sizes: tuple[Size, ...]
    units: Words  # of each launch
    steps: tuple[int, ...]  # of each loop
    scratch: int  # bytes per thread, as far as they do not depend on sizes
    scratch_of: tuple[tuple[str, int], ...]  # kernels whose scratch depends on a size, and its index
    lives: tuple[Lifetime, ...]
    arena_bytes: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]  # of outputs
    output_types: tuple[DType, ...]
    constants: Mapping[str, Array]
    assertions: tuple[SizeCheck, ...]
    rounds: bool  # whether the arena of a size class is large enough for all its sizes
    batch: int | None  # index of the symbol along which a run may be split, if any ...
    rows: int  # ... and of the size that gives the rows multiplied with the largest weight
    ahead: Prefetch

    def routines(self) -> set[str]:
        """All functions that must be loaded before it can run."""
        return {*self.entries, *(symbol for _, symbols in self.tables for symbol in symbols)}


def lay_out(program: Program, entries: Mapping[str, Entry], target: CpuTarget) -> Layout:
    """Lays out a program whose kernels have these routines."""
    from rlx.backends.cpu.kernel_generators import call

    return _Maker(program, entries, [call(launch, target) for launch in program.launches]).layout(target)


class _Maker:
    def __init__(self, program: Program, entries: Mapping[str, Entry], calls: Sequence[Call]) -> None:
        self.program = program
        self.entries = entries
        self.calls = calls  # of each launch
        self.sizes: dict[Size, int] = {}  # every distinct size and its index; evaluated together
        self.numbers: list[tuple[int, int]] = []
        self.tables: list[tuple[int, tuple[str, ...]]] = []
        self.pointers: dict[str, list[tuple[int, int, int]]] = {k: [] for k in (INPUT, OUTPUT, WEIGHT, CONST, ARENA)}
        buffers = program.buffers.values()
        self.names = {kind: [b.name for b in buffers if b.kind == kind] for kind in self.pointers}
        self.names[INPUT], self.names[OUTPUT] = list(program.inputs), list(program.outputs)
        self.places = {kind: {name: i for i, name in enumerate(names)} for kind, names in self.names.items()}
        self.loop_symbols = {s: number for number, c in enumerate(program.controls) for s in c.symbols}
        self.records = records_of(program, [len(each.words) for each in calls])

    def add(self, size: Size) -> int:
        """The index of a size."""
        return self.sizes.setdefault(size, len(self.sizes))

    def layout(self, target: CpuTarget) -> Layout:
        from rlx.backends.cpu.kernel_generators import inner_size, scratch_bytes

        program, records = self.program, self.records
        for mark, position in zip(records.walk, records.first_words, strict=True):
            self._words(mark, position)
        units = [self.add(each.units) for each in self.calls]
        for mark in records.walk:
            if mark.kind == driver.LAUNCH and mark.loops:
                launch = program.launches[mark.number]
                records.work[mark.number] = self.add(launch.flops), self.add(launch.bytes), units[mark.number]
        lengths = [program.controls[number].length for number in records.loops]  # type: ignore[union-attr]
        steps = [self.add(ENDLESS if length is None else length) for length in lengths]
        scratch, scratch_of = 64, dict[tuple[str, int], None]()
        for launch in program.launches:
            inner = inner_size(launch.kernel, launch.words)
            if isinstance(inner, int):
                scratch = max(scratch, scratch_bytes(launch.kernel, target, inner))
            else:
                scratch_of[launch.kernel.symbol, self.add(inner)] = None
        lives = lifetimes(program)
        arena = [program.buffers[x.name].type.bytes for x in lives]
        outputs = [program.buffers[n].type for n in program.outputs]
        return Layout(
            program.name,
            program.symbols,
            tuple(self.loop_symbols),
            {kind: tuple(names) for kind, names in self.names.items()},
            records,
            tuple(self.entries[launch.kernel.symbol].routine.symbol for launch in program.launches),
            tuple(self.tables),
            _column(self.numbers, 0),
            _column(self.numbers, 1),
            {kind: Pointers(*(_column(columns, i) for i in range(3))) for kind, columns in self.pointers.items()},
            units=np.array(units, np.int64),
            steps=tuple(steps),
            scratch=scratch,
            scratch_of=tuple(scratch_of),
            lives=tuple(lives),
            arena_bytes=tuple(map(self.add, arena)),
            shapes=tuple(tuple(map(self.add, t.array_shape)) for t in outputs),
            output_types=tuple(t.dtype for t in outputs),
            constants={n: program.buffers[n].value.data for n in self.names[CONST]},  # type: ignore[union-attr]
            assertions=tuple(self._assertions()),
            rounds=all(map(is_monotone, arena)),
            batch=self._batch(),
            rows=self.add(self._rows()),
            ahead=self._ahead(),
            sizes=tuple(self.sizes),  # last: the arguments above have added to them
        )

    def _assertions(self) -> Iterator[SizeCheck]:
        """The assertions that depend on sizes alone; launches check the others."""
        for a in self.program.assertions:
            if not a.launched:
                yield SizeCheck(a, self.add(a.a), self.add(a.b), tuple(map(self.add, a.steps)))

    def _batch(self) -> int | None:
        program = self.program
        asserted = {s.name for a in program.assertions for size in (a.a, a.b) for s in symbols_of(size)}
        if program.batch is None or program.batch in asserted:
            return None
        return program.symbols.index(program.batch)

    def _rows(self) -> Size:
        """Rows of the matmul with the largest weight; 0 if there is no matmul."""
        from rlx.lir.kernels import MatmulKernel

        matmuls: list[dict[str, Any]] = []
        for launch in self.program.launches:
            if isinstance(launch.kernel, MatmulKernel) and launch.kernel.layout is not None:
                matmuls.append(dict(zip(launch.kernel.words, launch.words, strict=True)))
        sizes = [w["k"] * w["n"] if isinstance(w["k"], int) and isinstance(w["n"], int) else 0 for w in matmuls]
        if not matmuls:
            return 0
        largest = matmuls[sizes.index(max(sizes))]
        return product([largest["m"], largest["batch0"], largest["batch1"]])

    def _ahead(self) -> Prefetch:
        program, records, prefetches = self.program, self.records, list[tuple[int, ...]]()
        marks = zip(records.walk, records.first_words, strict=True)
        first_words = {mark.number: at for mark, at in marks if _is_launch(mark)}
        for record, mark in enumerate(records.walk):
            if mark.kind == driver.AHEAD:
                call = self.calls[mark.number]
                words: Mapping[str, Any] = call.words
                rounds = product([words[name] for name in ("row_blocks", "batch0", "batch1")])
                sizes = (program.buffers[words["b"].buffer].type.bytes, call.units, words["m"], rounds)
                at = first_words[mark.number] + list(words).index("b")
                prefetches.append((record, at, *map(self.add, sizes)))
        return Prefetch(*(_column(prefetches, i) for i in range(6)))

    def _words(self, mark: Mark, position: int) -> None:
        from rlx.lir.views import View

        program = self.program
        if mark.kind == driver.LAUNCH:
            tables = self.entries[program.launches[mark.number].kernel.symbol].tables
            for i, (name, value) in enumerate(self.calls[mark.number].words.items(), start=position):
                if value is None:
                    self.tables.append((i, tuple(r.symbol for r in tables.get(name, ()))))
                elif isinstance(value, View):
                    self._pointer(i, program.buffers[value.buffer], value)
                else:
                    self.numbers.append((i, self.add(value)))
        elif mark.kind == driver.TEST:
            predicate = program.controls[mark.number].predicate
            assert predicate is not None
            self._pointer(position, program.buffers[predicate.buffer], predicate)

    def _pointer(self, position: int, buffer: Buffer, view: View) -> None:
        from rlx.lir.views import offset_steps

        place = self.places[buffer.kind][buffer.name]
        self.pointers[buffer.kind].append((position, place, self.add(view.offset * view.dtype.size)))
        for symbol, step in offset_steps(view.offset, self.loop_symbols).items():
            number = self.loop_symbols[symbol]
            plan, control = self.records.loops[number], self.program.controls[number]
            moves = plan.alternating if symbol == control.symbols[1] else plan.linear
            moves.positions.append(position)
            moves.steps.append(self.add(step * view.dtype.size))


def _column(rows: list[Any], i: int) -> Words:
    return np.array([row[i] for row in rows], np.int64)


# -- records ---------------------------------------------------------------------------------------------------------
def records_of(program: Program, words: Sequence[int]) -> Records:
    """The walk through a program, numbered; `words` has the length of each launch's argument block."""
    kinds: Mapping[str, int] = {
        name: getattr(driver, name.upper()) for name in ("launch", "enter", "test", "next", "jump", "leave")
    }
    walk = _reading_ahead(program, [Mark(kinds[step.kind], step.number, step.loops) for step in program.steps()])
    loops: dict[int, LoopPlan] = {}
    first_words: list[int] = []
    count = 0
    for record, mark in enumerate(walk):
        first_words.append(count)
        if mark.kind == driver.LAUNCH:
            count += words[mark.number]
        elif mark.kind == driver.TEST:
            count += 1
        elif mark.kind == driver.ENTER:
            outer = loops[mark.loops[-1]] if mark.loops else None
            loops[mark.number] = LoopPlan(len(loops), outer, count, record, inside=mark.loops)
        elif mark.kind == driver.NEXT:
            loops[mark.number].exit = record + 1
        elif mark.kind == driver.LEAVE and mark.number in loops:
            loops[mark.number].leave, loops[mark.number].high = record, count
    private = 0
    for plan in loops.values():
        plan.home = private
        private = plan.place(plan.high)
    called = [r for r, mark in enumerate(walk) if mark.kind in (driver.LAUNCH, driver.TEST)]
    return Records(
        walk, first_words, count, loops, private, _template(program, walk, first_words, loops),
        shared=[r for r in called if not walk[r].loops],
        private=[r for r in called if walk[r].loops],
        work={},
        launches=[r for r, mark in enumerate(walk) if mark.kind == driver.LAUNCH],
    )  # fmt: skip


def _is_launch(mark: Mark) -> bool:
    return mark.kind == driver.LAUNCH


def _reading_ahead(program: Program, walk: list[Mark]) -> list[Mark]:
    """The walk with a prefetch record before each launch that streams weights, for the next such launch."""
    streams = [mark for mark in walk if _is_launch(mark) and not mark.loops and _streams(program, mark.number)]
    following = {mark: Mark(driver.AHEAD, then.number) for mark, then in itertools.pairwise(streams)}
    marks = [Mark(driver.AHEAD, mark.number) for mark in streams[:1]]
    for mark in walk:
        marks += [following[mark], mark] if mark in following else [mark]
    return marks


def _streams(program: Program, number: int) -> bool:
    """Whether a launch reads packed weights once, front to back."""
    from rlx.lir.kernels import MatmulKernel
    from rlx.lir.views import View

    launch = program.launches[number]
    if not isinstance(launch.kernel, MatmulKernel) or launch.kernel.layout is None or launch.kernel.grouped:
        return False
    weights = launch.words[launch.kernel.words.index("b")]
    return isinstance(weights, View) and weights.offset == 0 and program.buffers[weights.buffer].kind == WEIGHT


def _barrier(after: bool) -> int:
    return driver.BARRIER_AFTER if after else 0


def _template(program: Program, walk: list[Mark], first_words: list[int], loops: Mapping[int, LoopPlan]) -> Words:
    """The record words that depend on neither sizes nor addresses: kinds, flags, branch targets.

    Arguments are offsets in the words or in a thread's copy.
    """
    template = np.zeros((len(walk), driver.RECORD_WORDS), np.int64)
    tests: dict[int, int] = {}  # the records where branches test and jump
    jumps: dict[int, int] = {}
    for record, (mark, row) in enumerate(zip(walk, template, strict=True)):
        row[FLAGS] = mark.kind
        if mark.kind in (driver.LAUNCH, driver.TEST):
            start = first_words[record]
            row[ARGUMENTS] = loops[mark.loops[-1]].place(start) if mark.loops else 8 * start
            row[FLAGS] |= driver.PRIVATE if mark.loops else 0
        if mark.kind == driver.LAUNCH:
            row[FLAGS] |= _barrier(program.launches[mark.number].barrier)
            continue
        if mark.kind == driver.AHEAD:
            continue
        control: Any = program.controls[mark.number]
        if mark.kind == driver.LEAVE:
            row[FLAGS] |= _barrier(control.barrier)
        if mark.number in loops:
            plan = loops[mark.number]
            row[FUNCTION] = {driver.TEST: plan.exit, driver.LEAVE: plan.enter}.get(mark.kind, 0)
            if mark.kind == driver.NEXT:
                row[FLAGS] |= _barrier(control.between)
                row[FLAGS] |= driver.ENDS if control.last < control.end else 0
        elif mark.kind == driver.TEST:
            tests[mark.number] = record
        elif mark.kind == driver.JUMP:
            jumps[mark.number] = record
            template[tests[mark.number], FUNCTION] = record + 1
        else:
            template[jumps[mark.number], FUNCTION] = record
            row[FUNCTION] = tests[mark.number]
    return template

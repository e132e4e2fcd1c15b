"""An executable: a program, its machine code and its memory. Runs from any number of threads at once.

Sizes are evaluated once for each binding of the symbols (a frame); argument blocks, arena and scratch belong to an
instance that a run checks out. A run with known sizes only writes the addresses of its inputs and outputs; one with the
sizes of the run before does so in machine code (`again`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from rlx.arrays import Array
from rlx.backends import base
from rlx.backends.base import ArrayType, InputSpec, bytes_of
from rlx.backends.cpu import driver, fast_call
from rlx.backends.cpu import pool as pools
from rlx.backends.cpu.executable_image import Image
from rlx.backends.cpu.fast_call import Repeat, Results
from rlx.backends.cpu.kernel_library import library
from rlx.backends.cpu.launch_records import ARGUMENTS, FUNCTION, UNITS
from rlx.backends.cpu.memory import (
    Bytes,
    Guarded,
    aligned,
    alloc_packed,
    checking,
    guarded_scratch,
    guarded_stride,
)
from rlx.backends.cpu.memory_check import out_of_memory
from rlx.backends.cpu.program_layout import Layout, lay_out
from rlx.backends.cpu.targets import CpuTarget
from rlx.errors import BindError, KernelError
from rlx.fork_safe_locks import cached_property
from rlx.free_memory import ADDRESSES, fits
from rlx.host_memory import PAGE, address
from rlx.lir.interface import ARENA, CONST, INPUT, OUTPUT, WEIGHT, Assertion
from rlx.lir.memory import Plan, plan
from rlx.types import compile_sizes, round_up_power_of_two

if TYPE_CHECKING:
    from rlx.backends.reports import RunMemory, Trace
    from rlx.lir.program import Program

KEPT_BYTES = 1 << 16  # outputs up to this size may be kept for the next run
FRAMES = 256  # bindings whose sizes are remembered
FEW_ROWS = 8  # of a product that waits for its weights rather than for arithmetic
# Rows that each thread takes through a whole program before the next ones: what they become stays in its cache.
# Fewer would read weights too often. Measured on encoders of width 384: 1.02 to 1.12 times as fast.
PIECE_ROWS = 256
CACHE_BYTES = 1 << 20  # of a thread: where all of a run's arena fits in, there is nothing to gain


@dataclass
class SizePlan:
    """Everything that depends on the sizes of the symbols alone."""

    key: tuple[int, ...]  # the values of the symbols
    words: np.ndarray[Any, np.dtype[np.int64]]
    units: np.ndarray[Any, np.dtype[np.int64]]
    steps: list[int]  # of each loop
    solo: list[bool]  # whether one thread runs it
    plan: Plan
    scratch: int  # bytes of a thread, of which those from `private` belong to loops
    private: int
    outputs: list[ArrayType]  # shape and element type of each
    values: tuple[int, ...]

    @cached_property
    def output_bytes(self) -> int:
        return bytes_of(self.outputs)


@dataclass(frozen=True)
class BatchSplit:
    """A run along whose batch others are made instead: [start, stop) of each and its sizes, the largest first."""

    parts: list[tuple[int, int, tuple[int, ...]]]
    outputs: list[ArrayType]


class RunContext:
    """Memory for one run at a time."""

    def __init__(self, executable: CpuExecutable) -> None:
        plan = executable.records
        self.words = np.zeros(plan.word_count, np.int64)
        self.view = memoryview(self.words)  # type: ignore[arg-type]
        self.records = plan.template.copy()
        self.records[plan.launches, FUNCTION] = executable.entries
        self.records[plan.shared, ARGUMENTS] += self.words.ctypes.data
        self.loops = np.zeros(plan.block_words(), np.int64)
        self.arena: Bytes = aligned(0)
        self.scratch: Bytes = aligned(0)
        self.guards: dict[str, Guarded] = {}  # of arena buffers
        self.frame: SizePlan | None = None
        self.read: Mapping[str, Array] = {}  # weights and constants: the words hold their addresses
        self.fixed: dict[str, list[int]] = {}  # addresses of those, by kind of buffer
        self.inputs: list[tuple[int, int, int]] = []
        self.outputs: list[tuple[int, int, int]] = []
        self.results: Results | None = None
        self.status = memoryview(b"")
        self.headers: list[int] = []
        self.request = np.zeros(0, np.int64)  # what the driver reads
        self.call = 0  # its address
        self.again: Repeat = _never


class CpuExecutable(base.Executable):
    """A linked program, whose machine code is loaded.

    `program` is only asked for by reports, for the words of an error, and for scratch that depends on sizes: a layout
    from a cache has all else.
    """

    target: CpuTarget

    def __init__(
        self, layout: Layout, program: Callable[[], Program], target: CpuTarget, threads: int | None = None, *,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> None:  # fmt: skip
        # Weights that kernels read again and again are worth starting on a cache line: NumPy's memory does not, and a
        # vector that straddles two lines is read twice.
        self._allocate = alloc_packed if long_lived else _each_new
        self._inputs = inputs
        self.symbols, self.reads = layout.symbols, layout.names[WEIGHT]
        self._make_program = program
        self.layout, self.records = layout, layout.records
        self.target = target
        code = library(target)
        self.pool = pools.shared(threads, code.driver)
        self.threads = self.pool.threads
        self.entries = [code.address([symbol]) for symbol in layout.entries]
        # Replaced, never changed: a run that has begun keeps its own. Kernels read what is in the second.
        self._weights: Mapping[str, Array] = {}
        self._read: Mapping[str, Array] = {}
        self._instances: list[RunContext] = []
        self._frames: dict[tuple[int, ...], SizePlan] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._pieces: dict[tuple[int, ...], BatchSplit | None] = {}
        self._check = checking()
        self.bind({})
        self._template = np.zeros(layout.records.word_count, np.int64)  # the words that no size changes
        for position, symbols in layout.tables:
            self._template[position] = code.address(symbols)
        everywhere = compile_sizes((*layout.symbols, *layout.loop_symbols), layout.sizes)
        start = (0,) * len(layout.loop_symbols)
        # All sizes of the layout for values of the symbols.
        self.sizes: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda key: everywhere(*key, *start)
        self._output_types = [dtype.numpy for dtype in layout.output_types]

    @classmethod
    def of(
        cls, program: Program, target: CpuTarget, threads: int | None = None, *,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> CpuExecutable:  # fmt: skip
        """Compile and link a program."""
        entries = library(target).link(program.kernels().values())
        layout = lay_out(program, entries, target)
        return cls(layout, lambda: program, target, threads, inputs=inputs, long_lived=long_lived)

    @cached_property
    def program(self) -> Program:
        return self._make_program()

    @property
    def asks_program(self) -> bool:
        return bool(self.layout.scratch_of)

    def image(self) -> Image | None:
        homes = library(self.target).homes(self.layout.routines())
        return None if homes is None else Image(self.layout, homes)

    # -- weights -------------------------------------------------------------------------------------------------------
    @property
    def weights(self) -> Mapping[str, Array]:
        return self._weights

    def bind(self, weights: Mapping[str, Array]) -> None:
        self._weights = dict(weights)
        read = {**self.layout.constants, **weights}
        self._read = {name: Guarded.copy(array).bytes for name, array in read.items()} if self._check else read
        self._instances = []  # after the weights: who finds this list has seen them

    # -- frames --------------------------------------------------------------------------------------------------------
    def frame(self, key: tuple[int, ...]) -> SizePlan:
        """The sizes of everything for these values of the symbols."""
        found = self._frames.get(key)
        if found is None:
            found = self._make_frame(key)
            if len(self._frames) >= FRAMES:
                self._frames.clear()
            self._frames[key] = found
        return found

    def outputs(self, key: tuple[int, ...]) -> list[ArrayType]:
        return self.frame(key).outputs

    def units(self, key: tuple[int, ...]) -> list[int]:
        found: list[int] = self.frame(key).units.tolist()
        return found

    def memory(self, key: tuple[int, ...]) -> RunMemory:
        from rlx.backends.reports import RunMemory

        largest = self.largest(key)
        frame = self.frame(largest)
        return RunMemory(largest, frame.plan, frame.scratch)

    def reserved_bytes(self) -> int:
        return sum(instance.arena.nbytes + instance.scratch.nbytes for instance in self._instances)

    def plan_memory(self, key: tuple[int, ...]) -> Plan:
        """The arena for a size class: each symbol rounded up to a power of two, where sizes can only grow with it."""
        rounded = tuple(round_up_power_of_two(v) for v in key) if self.layout.rounds else key
        found = self._plans.get(rounded)
        if found is None:
            found = self._plan(rounded)
            if len(self._plans) >= FRAMES:
                self._plans.clear()
            self._plans[rounded] = found
        return found

    def _plan(self, key: tuple[int, ...]) -> Plan:
        values, lives = self.sizes(key), self.layout.lives
        return plan(lives, {x.name: values[i] for x, i in zip(lives, self.layout.arena_bytes, strict=True)})

    def _plan_that_fits(self, key: tuple[int, ...]) -> Plan:
        """The arena of the size class, or where there is no memory for that, of exactly these sizes."""
        found = self.plan_memory(key)
        return found if fits(found.size) else self._plan(key)

    def _make_frame(self, key: tuple[int, ...]) -> SizePlan:
        layout = self.layout
        values = self.sizes(key)
        for asserted in layout.assertions:
            if not asserted.holds(values):
                raise self._unfit(asserted.assertion, key)
        shapes = [tuple(values[i] for i in shape) for shape in layout.shapes]
        for i, shape in enumerate(shapes):
            if min(shape, default=0) < 0:
                raise BindError(f"output {i}: its shape is {shape}", hint="a symbolic size came out negative")
        memory = self._plan_that_fits(key)
        outputs = list(zip(shapes, self._output_types, strict=True))
        if max(values, default=0) >= ADDRESSES:
            raise out_of_memory(self, key, memory, outputs)
        numbers = np.array(values, np.int64)
        words = self._template.copy()
        words[layout.number_words] = numbers[layout.number_sizes]
        for found in layout.pointers.values():
            words[found.positions] = numbers[found.offsets]
        scratch = max([layout.scratch, *self._scratch_by_size(values)])
        private = -(-scratch // 64) * 64
        whole = private + -(-self.records.private_bytes // 64) * 64
        if self._check:
            private, whole = private + PAGE, guarded_stride(private, self.records.private_bytes)
        steps = [values[i] for i in layout.steps]
        solo = self.records.solo(values, steps, self.threads) if steps else []
        return SizePlan(key, words, numbers[layout.units], steps, solo, memory, whole, private, outputs, values)

    def _scratch_by_size(self, values: Sequence[int]) -> Iterator[int]:
        """What the kernels need whose scratch depends on run-time sizes."""
        if self.layout.scratch_of:
            from rlx.backends.cpu.kernel_generators import scratch_bytes

            kernels = self.program.kernels()
            for symbol, size in self.layout.scratch_of:
                yield scratch_bytes(kernels[symbol], self.target, values[size])

    # -- running -------------------------------------------------------------------------------------------------------
    def run(
        self, key: tuple[int, ...], inputs: Sequence[Array], trace: np.ndarray[Any, np.dtype[np.int64]] | None = None,
        into: Sequence[Array] | None = None,
    ) -> list[Array]:  # fmt: skip
        """The outputs for contiguous inputs of the declared types, with symbol values `key`: new arrays, or `into`."""
        frame = self._frames.get(key)
        if frame is None:
            pieces = None if into is not None else self.pieces(key)
            if pieces is not None:
                return self._run_pieces(pieces, inputs, trace)
            frame = self.frame(key)
        instances = self._instances
        try:
            instance = instances.pop()
        except IndexError:
            instance = RunContext(self)
        if instance.frame is not frame or self._check:
            self._make_room(instance, frame, frame.output_bytes if into is None else 0)
            self._fill(instance, frame)
        elif (
            instance.again is _never and self._inputs is not None and fast_call.usable()
        ):  # the second run of these sizes
            self._prepare_repeat(instance, frame, inputs)
        outputs = self._allocate(frame.outputs) if into is None else list(into)
        if self._check:
            self._run_checked(instance, inputs, outputs, trace)
        else:
            self._point_outputs(instance, outputs)
            self._execute(instance, inputs, trace)
        status = instance.status
        for header in instance.headers:
            if status[header]:
                raise self._fault(instance)
        instances.append(instance)  # where it was: with new weights there is another list
        return outputs

    def run_again(self, inputs: object) -> list[Array] | None:
        instances = self._instances
        try:
            instance = instances.pop()
        except IndexError:
            return None
        outputs = instance.again(inputs)
        if outputs is False:
            raise self._fault(instance)
        instances.append(instance)
        return outputs

    def _run_pieces(
        self, pieces: BatchSplit, inputs: Sequence[Array], trace: np.ndarray[Any, np.dtype[np.int64]] | None
    ) -> list[Array]:
        outputs = self._allocate(pieces.outputs)
        for start, stop, key in pieces.parts:
            self.run(key, [a[start:stop] for a in inputs], trace, [a[start:stop] for a in outputs])
        return outputs

    def pieces(self, key: tuple[int, ...]) -> BatchSplit | None:
        """How a run with these sizes is cut along the batch; None where it runs as a whole."""
        if self.layout.batch is None:
            return None
        known = self._pieces  # other threads may begin a new one at any time
        if key not in known:
            if len(known) >= FRAMES:
                self._pieces = known = {}
            known[key] = self._split_batch(key)
        return known[key]

    def _split_batch(self, key: tuple[int, ...]) -> BatchSplit | None:
        layout = self.layout
        assert layout.batch is not None
        values, batch = self.sizes(key), key[layout.batch]
        most = max(1, PIECE_ROWS * self.threads * batch // max(1, values[layout.rows]))
        if batch <= most or not values[layout.rows] or self.plan_memory(key).size <= CACHE_BYTES * self.threads:
            return None
        count = -(-batch // most)
        ends = [-(-batch * i // count) for i in range(count + 1)]
        sizes = [stop - start for start, stop in itertools.pairwise(ends)]
        parts, start = [], 0
        for size in sorted(sizes, reverse=True):  # those of one size follow each other: only addresses change
            parts.append((start, start + size, (*key[: layout.batch], size, *key[layout.batch + 1 :])))
            start += size
        shapes = [tuple(values[i] for i in shape) for shape in layout.shapes]
        outputs = list(zip(shapes, self._output_types, strict=True))
        arena = self._plan_that_fits(parts[0][2])
        if not fits(arena.size + bytes_of(outputs)):
            raise out_of_memory(self, key, arena, outputs)
        return BatchSplit(parts, outputs)

    def largest(self, key: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the largest piece of a run, which decide its memory."""
        pieces = self.pieces(key)
        return key if pieces is None else pieces.parts[0][2]

    @staticmethod
    def _point_outputs(instance: RunContext, outputs: Sequence[Array]) -> None:
        places = [address(array) for array in outputs]
        for position, buffer, offset in instance.outputs:
            instance.view[position] = places[buffer] + offset

    def _execute(
        self, instance: RunContext, inputs: Sequence[Array], trace: np.ndarray[Any, np.dtype[np.int64]] | None = None
    ) -> None:
        words, places = instance.view, [address(array) for array in inputs]
        for position, buffer, offset in instance.inputs:
            words[position] = places[buffer] + offset
        if trace is None:
            self.pool.execute(instance.call)
            return
        instance.request[driver.TRACE // 8] = address(trace)
        try:
            self.pool.execute(instance.call)
        finally:
            instance.request[driver.TRACE // 8] = 0

    def _make_room(self, instance: RunContext, frame: SizePlan, outputs: int) -> None:
        """Allocate what a run needs beside `outputs` bytes for its outputs, if there is memory for both."""
        grows = instance.arena.nbytes < frame.plan.size
        scratch = frame.scratch * self.threads
        if not fits(outputs + (frame.plan.size - instance.arena.nbytes if grows else 0) + scratch):
            raise out_of_memory(self, frame.key, frame.plan, frame.outputs)
        if self._check:
            self._guard(instance, frame)
            return
        if grows:
            instance.arena = aligned(0)  # the old one goes first
            instance.arena = aligned(frame.plan.size)
        if instance.scratch.nbytes != scratch:
            instance.scratch = aligned(scratch)

    def _fill(self, instance: RunContext, frame: SizePlan) -> None:
        """Write all words that do not change from run to run."""
        read = self._read
        instance.words[:] = frame.words
        instance.records[self.records.launches, UNITS] = frame.units
        self.records.fill(
            instance.records, instance.loops, address(instance.words), frame.private, frame.values, frame.steps,
            frame.solo,
        )  # fmt: skip
        names = self.layout.names
        bases = self._arena_bases(instance, frame)
        self._add(instance, ARENA, [bases.get(n, 0) for n in names[ARENA]])
        if instance.read is not read:
            instance.fixed = {kind: [address(read[n]) for n in names[kind]] for kind in (CONST, WEIGHT)}
        for kind, addresses in instance.fixed.items():
            self._add(instance, kind, addresses)
        self._read_ahead(instance, frame)
        instance.inputs = self._moving(INPUT, frame)
        instance.outputs = self._moving(OUTPUT, frame)
        instance.status = memoryview(instance.scratch.view(np.int64))  # type: ignore[arg-type]
        instance.headers = [t * frame.scratch // 8 for t in range(self.threads)]
        for header in instance.headers:
            instance.status[header] = instance.status[header + 1] = 0
        records, scratch = address(instance.records), address(instance.scratch)
        request = [records, len(instance.records), scratch, frame.scratch, 0, self.threads]
        instance.request = np.array(request + [0] * (driver.REQUEST_WORDS - len(request)), np.int64)
        instance.call, instance.again = address(instance.request), _never
        instance.frame, instance.read = frame, read

    def _prepare_repeat(self, instance: RunContext, frame: SizePlan, inputs: Sequence[Array]) -> None:
        assert self._inputs is not None
        results = Results(frame.outputs, [None] * len(frame.outputs), frame.output_bytes <= KEPT_BYTES)
        moved = instance.inputs + [(at, len(inputs) + buffer, offset) for at, buffer, offset in instance.outputs]
        instance.results = results
        instance.request = fast_call.block(
            instance.request, address(self.pool.job), address(instance.words), self._inputs, inputs, results, moved
        )
        instance.call = address(instance.request)
        instance.again = fast_call.function(self.pool.repeat, instance.request)

    def _read_ahead(self, instance: RunContext, frame: SizePlan) -> None:
        """What threads read while they wait: nothing for a launch that multiplies much or reads it more than once."""
        ahead, sizes = self.layout.ahead, np.array(frame.values, np.int64)
        whole, units = sizes[ahead.bytes], sizes[ahead.units]
        units = np.where((sizes[ahead.rows] <= FEW_ROWS) & (sizes[ahead.rounds] == 1), units, 0)
        columns = (instance.words[ahead.words], whole // np.maximum(units, 1), units)
        instance.records[ahead.records, : UNITS + 1] = np.stack(columns, axis=1)

    def _moving(self, kind: str, frame: SizePlan) -> list[tuple[int, int, int]]:
        """Position, buffer number and byte offset of the words that hold addresses of inputs or outputs."""
        found = self.layout.pointers[kind]
        positions, offsets = found.positions.tolist(), frame.words[found.positions].tolist()
        return list(zip(positions, found.buffers.tolist(), offsets, strict=True))

    def _add(self, instance: RunContext, kind: str, addresses: Sequence[int]) -> None:
        found = self.layout.pointers[kind]
        if len(found.positions):
            instance.words[found.positions] += np.array(addresses, np.int64)[found.buffers]

    def _arena_bases(self, instance: RunContext, frame: SizePlan) -> dict[str, int]:
        if not self._check:
            base = address(instance.arena)
            return {name: base + offset for name, offset in frame.plan.offsets.items()}
        return {name: guard.address for name, guard in instance.guards.items()}

    def _guard(self, instance: RunContext, frame: SizePlan) -> None:
        """New memory of NaN: each arena buffer has its own, and scratch ends for each thread, between guard pages."""
        sizes = (max(0, frame.values[i]) for i in self.layout.arena_bytes)
        instance.guards = {x.name: Guarded(size) for x, size in zip(self.layout.lives, sizes, strict=True)}
        instance.scratch = guarded_scratch(frame.private - PAGE, self.records.private_bytes, self.threads)

    def _run_checked(
        self,
        instance: RunContext,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        trace: np.ndarray[Any, np.dtype[np.int64]] | None,
    ) -> None:
        """A run on guarded copies: what is only read is read-only, and a write just before an array is found."""
        names = self.layout.names
        taken, given = dict(zip(names[INPUT], inputs, strict=True)), dict(zip(names[OUTPUT], outputs, strict=True))
        states = {leaf.name for leaf in self._inputs or () if leaf.written}
        read = {name: Guarded.copy(array, written=name in states) for name, array in taken.items()}
        made = {name: Guarded(array.nbytes) for name, array in given.items()}
        self._point_outputs(instance, [guard.bytes for guard in made.values()])
        self._execute(instance, [guard.bytes for guard in read.values()], trace)
        for name, guard in {**read, **made, **instance.guards}.items():
            if not guard.intact:
                raise KernelError(f"{self.layout.name}: a kernel has written before the beginning of {name!r}")
        arrays = {**taken, **given}
        for name, guard in {**{n: read[n] for n in states}, **made}.items():
            arrays[name].reshape(-1).view(np.uint8)[:] = guard.bytes

    def _unfit(self, assertion: Assertion, key: tuple[int, ...]) -> BindError:
        """What to say of an assertion that does not hold."""
        from rlx.backends.run_time_errors import unfit

        return unfit(assertion, dict(zip(self.layout.symbols, key, strict=True)))

    def _fault(self, instance: RunContext) -> KernelError | BindError:
        """What the threads have left in their scratch headers: a code, and the number of the first record to fail."""
        from rlx.backends.run_time_errors import fault

        status = instance.status
        record, code = min((status[at + 1], status[at]) for at in instance.headers if status[at])
        assert instance.frame is not None
        step = self.records.walk[record - 1] if 0 < record <= len(self.records.walk) else None
        launch = self.program.launches[step.number] if step is not None else None
        return fault(self.program, launch, code, dict(zip(self.layout.symbols, instance.frame.key, strict=True)))

    def trace(self, key: tuple[int, ...], inputs: Sequence[Array]) -> tuple[list[Array], Trace]:
        from rlx.backends.cpu.ceilings import ticks_per_second
        from rlx.backends.reports import Trace

        stamps = np.zeros((len(self.records.walk), self.threads, 2), np.int64)
        outputs = self.run(key, inputs, stamps)
        entered: dict[int, int] = {}
        steps: dict[int, int] = {}
        for record, step in enumerate(self.records.walk):
            if step.kind not in (driver.LAUNCH, driver.AHEAD):
                entered.setdefault(step.number, record)
                if step.kind == driver.NEXT:
                    steps[step.number] = int(stamps[record, :, 1].max())
        seconds = stamps / ticks_per_second(self.target)
        return outputs, Trace(seconds[self.records.launches], seconds[list(entered.values())], steps)


def _never(inputs: object) -> None:
    """A run cannot be repeated."""


def _each_new(types: Sequence[ArrayType]) -> list[Array]:
    return [np.empty(shape, dtype) for shape, dtype in types]

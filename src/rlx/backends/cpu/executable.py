"""The CPU executable: a program, its machine code and its memory. Runs from any number of threads at once.

Sizes are evaluated once per binding of the symbols (`SizePlan`); argument blocks, arena and scratch belong to a
`RunContext` that a run checks out. A run with known sizes only writes the addresses of its inputs and outputs; one with
the sizes of the previous run does even that in machine code (`fast_run`).
"""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
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
    alloc_aligned,
    alloc_packed,
    checking,
    guarded_scratch,
    guarded_stride,
)
from rlx.backends.cpu.memory_check import out_of_memory
from rlx.backends.cpu.program_layout import Layout, lay_out
from rlx.backends.cpu.targets import CpuTarget
from rlx.errors import BindError, KernelError
from rlx.fast_dataclass import dataclass
from rlx.fork_safe_locks import cached_property
from rlx.free_memory import ADDRESSES, fits
from rlx.host_memory import PAGE, address
from rlx.lir.interface import ARENA, CONST, INPUT, OUTPUT, WEIGHT, Assertion
from rlx.lir.memory import Plan, plan
from rlx.types import compile_sizes, concrete, round_up_power_of_two

if TYPE_CHECKING:
    from rlx.backends.reports import RunMemory, Trace
    from rlx.lir.program import Program
    from rlx.lir.views import View

REUSED_BYTES = 1 << 16  # outputs up to this size may be reused by the next run
# Cached per executable: a decoder of 30 layers has 60 KB per plan of either kind.
MAX_SIZE_PLANS = 64  # a new one takes less than 0.1 ms
MAX_ARENA_PLANS = 32  # one per size class, so there are few; a new one takes 2 ms
FEW_ROWS = 8  # of a matmul that is bound by reading weights, not by arithmetic
# Rows that each thread takes through the complete program before the next ones, so that activations stay in its cache.
# Fewer rows would read weights too often. Measured on encoders of width 384: 1.02 to 1.12 times as fast.
PIECE_ROWS = 256
CACHE_BYTES = 1 << 20  # per thread: if the arena of a run fits, splitting gains nothing


@dataclass
class SizePlan:
    """Everything that depends only on the symbols' sizes."""

    key: tuple[int, ...]  # values of the symbols
    words: np.ndarray[Any, np.dtype[np.int64]]
    units: np.ndarray[Any, np.dtype[np.int64]]
    steps: list[int]  # per loop
    solo: list[bool]  # per loop: whether a single thread runs it
    plan: Plan
    scratch: int  # bytes per thread; from `private` on they belong to loops
    private: int
    outputs: list[ArrayType]  # shape and element type of each output
    values: tuple[int, ...]

    @cached_property
    def output_bytes(self) -> int:
        return bytes_of(self.outputs)


@dataclass(frozen=True)
class BatchSplit:
    """A run split along its batch: [start, stop) and sizes of each part, largest first."""

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
        self.arena: Bytes = alloc_aligned(0)
        self.scratch: Bytes = alloc_aligned(0)
        self.guards: dict[str, Guarded] = {}  # guarded arena buffers
        self.size_plan: SizePlan | None = None
        self.read: Mapping[str, Array] = {}  # weights and constants whose addresses the words hold
        self.fixed: dict[str, list[int]] = {}  # their addresses, by kind of buffer
        self.inputs: list[tuple[int, int, int]] = []
        self.outputs: list[tuple[int, int, int]] = []
        self.results: Results | None = None
        self.status = memoryview(b"")
        self.headers: list[int] = []
        self.request = np.zeros(0, np.int64)  # read by the driver
        self.call = 0  # address of `request`
        self.fast_run: Repeat = _no_fast_run


class CpuExecutable(base.Executable):
    """A linked program with its machine code loaded.

    `program` is needed only by reports, error messages and size-dependent scratch; a cached layout has everything else.
    """

    target: CpuTarget

    def __init__(
        self, layout: Layout, program: Callable[[], Program], target: CpuTarget, threads: int | None = None, *,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> None:  # fmt: skip
        # Weights that every run reads start on a cache line: NumPy's memory does not, and a vector that straddles two
        # lines is read twice.
        self._allocate = alloc_packed if long_lived else _alloc_outputs
        self._inputs = inputs
        self.symbols, self.reads = layout.symbols, layout.names[WEIGHT]
        self._make_program = program
        self.layout, self.records = layout, layout.records
        self.target = target
        code = library(target)
        self.pool = pools.shared(threads, code.driver)
        self.threads = self.pool.threads
        self.entries = [code.address([symbol]) for symbol in layout.entries]
        # Swapped atomically, never mutated, so running calls keep a consistent set. `_read` is what kernels see:
        # weights and constants.
        self._weights: Mapping[str, Array] = {}
        self._read: Mapping[str, Array] = {}
        self._contexts: list[RunContext] = []
        self._size_plans: dict[tuple[int, ...], SizePlan] = {}
        self._plans: dict[tuple[int, ...], Plan] = {}
        self._pieces: dict[tuple[int, ...], BatchSplit | None] = {}
        self._check = checking()
        self.bind({})
        self._template = np.zeros(layout.records.word_count, np.int64)  # words that do not depend on sizes
        for position, symbols in layout.tables:
            self._template[position] = code.address(symbols)
        evaluate_sizes = compile_sizes((*layout.symbols, *layout.loop_symbols), layout.sizes)
        zeros = (0,) * len(layout.loop_symbols)
        # All sizes of the layout for the symbols' values.
        self.sizes: Callable[[tuple[int, ...]], tuple[int, ...]] = lambda key: evaluate_sizes(*key, *zeros)
        self._output_types = [dtype.numpy for dtype in layout.output_types]

    @classmethod
    def of(
        cls, program: Program, target: CpuTarget, threads: int | None = None, *,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> CpuExecutable:  # fmt: skip
        """Compiles and links a program."""
        entries = library(target).link(program.kernels().values())
        layout = lay_out(program, entries, target)
        return cls(layout, lambda: program, target, threads, inputs=inputs, long_lived=long_lived)

    @cached_property
    def program(self) -> Program:
        return self._make_program()

    @property
    def needs_program(self) -> bool:
        return bool(self.layout.scratch_of)

    def image(self) -> Image | None:
        locations = library(self.target).locations(self.layout.routines())
        return None if locations is None else Image(self.layout, locations)

    # -- weights -------------------------------------------------------------------------------------------------------
    @property
    def weights(self) -> Mapping[str, Array]:
        return self._weights

    def bind(self, weights: Mapping[str, Array]) -> None:
        self._weights = dict(weights)
        read = {**self.layout.constants, **weights}
        self._read = {name: Guarded.copy(array).bytes for name, array in read.items()} if self._check else read
        self._contexts = []  # after the weights: whoever sees this list sees them too

    # -- size plans
    # ------------------------------------------------------------------------------------------------------
    def size_plan(self, key: tuple[int, ...]) -> SizePlan:
        """The size plan for these values of the symbols, cached."""
        plan = self._size_plans.get(key)
        if plan is None:
            plan = self._make_size_plan(key)
            if len(self._size_plans) >= MAX_SIZE_PLANS:
                self._size_plans.clear()
            self._size_plans[key] = plan
        return plan

    def outputs(self, key: tuple[int, ...]) -> list[ArrayType]:
        return self.size_plan(key).outputs

    def units(self, key: tuple[int, ...]) -> list[int]:
        units: list[int] = self.size_plan(key).units.tolist()
        return units

    def memory(self, key: tuple[int, ...]) -> RunMemory:
        from rlx.backends.reports import RunMemory

        largest = self.largest(key)
        size_plan = self.size_plan(largest)
        return RunMemory(largest, size_plan.plan, size_plan.scratch)

    def reserved_bytes(self) -> int:
        return sum(context.arena.nbytes + context.scratch.nbytes for context in self._contexts)

    def plan_memory(self, key: tuple[int, ...]) -> Plan:
        """The arena for a size class: each symbol rounded up to a power of two, if sizes only grow with it."""
        rounded = tuple(round_up_power_of_two(v) for v in key) if self.layout.rounds else key
        plan = self._plans.get(rounded)
        if plan is None:
            plan = self._plan(rounded)
            if len(self._plans) >= MAX_ARENA_PLANS:
                self._plans.clear()
            self._plans[rounded] = plan
        return plan

    def _plan(self, key: tuple[int, ...]) -> Plan:
        values, lives = self.sizes(key), self.layout.lives
        return plan(lives, {x.name: values[i] for x, i in zip(lives, self.layout.arena_bytes, strict=True)})

    def _plan_that_fits(self, key: tuple[int, ...]) -> Plan:
        """The arena of the size class or, if memory is too short for it, of exactly these sizes."""
        plan = self.plan_memory(key)
        return plan if fits(plan.size) else self._plan(key)

    def _make_size_plan(self, key: tuple[int, ...]) -> SizePlan:
        layout = self.layout
        values = self.sizes(key)
        for asserted in layout.assertions:
            if not asserted.holds(values):
                raise self._assertion_error(asserted.assertion, key)
        shapes = [tuple(values[i] for i in shape) for shape in layout.shapes]
        for i, shape in enumerate(shapes):
            if min(shape, default=0) < 0:
                from rlx.backends.run_time_errors import negative_shape

                raise negative_shape(i, shape)
        memory = self._plan_that_fits(key)
        outputs = list(zip(shapes, self._output_types, strict=True))
        if max(values, default=0) >= ADDRESSES:
            raise out_of_memory(self, key, memory, outputs)
        numbers = np.array(values, np.int64)
        words = self._template.copy()
        words[layout.number_words] = numbers[layout.number_sizes]
        for pointers in layout.pointers.values():
            words[pointers.positions] = numbers[pointers.offsets]
        scratch = max([layout.scratch, *self._scratch_by_size(values)])
        private = -(-scratch // 64) * 64
        stride = private + -(-self.records.private_bytes // 64) * 64
        if self._check:
            private, stride = private + PAGE, guarded_stride(private, self.records.private_bytes)
        steps = [values[i] for i in layout.steps]
        solo = self.records.solo(values, steps, self.threads) if steps else []
        return SizePlan(key, words, numbers[layout.units], steps, solo, memory, stride, private, outputs, values)

    def _scratch_by_size(self, values: Sequence[int]) -> Iterator[int]:
        """Scratch of the kernels whose scratch depends on run-time sizes."""
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
        """Runs on contiguous inputs of the declared types with symbol values `key`; returns new arrays, or `into`."""
        size_plan = self._size_plans.get(key)
        if size_plan is None:
            pieces = None if into is not None else self.pieces(key)
            if pieces is not None:
                return self._run_pieces(pieces, inputs, trace)
            size_plan = self.size_plan(key)
        contexts = self._contexts
        try:
            context = contexts.pop()
        except IndexError:
            context = RunContext(self)
        if context.size_plan is not size_plan or self._check:
            self._make_room(context, size_plan, size_plan.output_bytes if into is None else 0)
            self._fill(context, size_plan)
        elif (
            context.fast_run is _no_fast_run and self._inputs is not None and fast_call.usable()
        ):  # the second run of these sizes
            self._prepare_fast_run(context, size_plan, inputs)
        outputs = self._allocate(size_plan.outputs) if into is None else list(into)
        if self._check:
            self._run_checked(context, inputs, outputs, trace)
        else:
            self._point_outputs(context, outputs)
            self._execute(context, inputs, trace)
        status = context.status
        for header in context.headers:
            if status[header]:
                raise self._fault(context, is_piece=into is not None)
        contexts.append(context)  # the same list: `bind` replaces it
        return outputs

    def run_again(self, inputs: object) -> list[Array] | None:
        contexts = self._contexts
        try:
            context = contexts.pop()
        except IndexError:
            return None
        outputs = context.fast_run(inputs)
        if outputs is False:
            raise self._fault(context)
        contexts.append(context)
        return outputs

    def _run_pieces(
        self, pieces: BatchSplit, inputs: Sequence[Array], trace: np.ndarray[Any, np.dtype[np.int64]] | None
    ) -> list[Array]:
        outputs = self._allocate(pieces.outputs)
        for start, stop, key in pieces.parts:
            self.run(key, [a[start:stop] for a in inputs], trace, [a[start:stop] for a in outputs])
        return outputs

    def pieces(self, key: tuple[int, ...]) -> BatchSplit | None:
        """How a run with these sizes is split along the batch; None if it is not."""
        if self.layout.batch is None:
            return None
        known = self._pieces  # other threads may replace it at any time
        if key not in known:
            if len(known) >= MAX_SIZE_PLANS:
                self._pieces = known = {}
            known[key] = self._split_batch(key)
        return known[key]

    def _split_batch(self, key: tuple[int, ...]) -> BatchSplit | None:
        layout = self.layout
        assert layout.batch is not None
        values, batch = self.sizes(key), key[layout.batch]
        max_batch = max(1, PIECE_ROWS * self.threads * batch // max(1, values[layout.rows]))
        if batch <= max_batch or not values[layout.rows] or self.plan_memory(key).size <= CACHE_BYTES * self.threads:
            return None
        count = -(-batch // max_batch)
        ends = [-(-batch * i // count) for i in range(count + 1)]
        sizes = [stop - start for start, stop in itertools.pairwise(ends)]
        parts, start = [], 0
        for size in sorted(sizes, reverse=True):  # equal sizes are adjacent, so only addresses change
            parts.append((start, start + size, (*key[: layout.batch], size, *key[layout.batch + 1 :])))
            start += size
        shapes = [tuple(values[i] for i in shape) for shape in layout.shapes]
        outputs = list(zip(shapes, self._output_types, strict=True))
        arena = self._plan_that_fits(parts[0][2])
        if not fits(arena.size + bytes_of(outputs)):
            raise out_of_memory(self, key, arena, outputs)
        return BatchSplit(parts, outputs)

    def largest(self, key: tuple[int, ...]) -> tuple[int, ...]:
        """The sizes of the largest part of a run, which determine its memory."""
        pieces = self.pieces(key)
        return key if pieces is None else pieces.parts[0][2]

    @staticmethod
    def _point_outputs(context: RunContext, outputs: Sequence[Array]) -> None:
        places = [address(array) for array in outputs]
        for position, buffer, offset in context.outputs:
            context.view[position] = places[buffer] + offset

    def _execute(
        self, context: RunContext, inputs: Sequence[Array], trace: np.ndarray[Any, np.dtype[np.int64]] | None = None
    ) -> None:
        words, places = context.view, [address(array) for array in inputs]
        for position, buffer, offset in context.inputs:
            words[position] = places[buffer] + offset
        if trace is None:
            self.pool.execute(context.call)
            return
        context.request[driver.TRACE // 8] = address(trace)
        try:
            self.pool.execute(context.call)
        finally:
            context.request[driver.TRACE // 8] = 0

    def _make_room(self, context: RunContext, size_plan: SizePlan, outputs: int) -> None:
        """Allocates arena and scratch, provided that `outputs` bytes of outputs fit as well."""
        grows = context.arena.nbytes < size_plan.plan.size
        scratch = size_plan.scratch * self.threads
        if not fits(outputs + (size_plan.plan.size - context.arena.nbytes if grows else 0) + scratch):
            raise out_of_memory(self, size_plan.key, size_plan.plan, size_plan.outputs)
        if self._check:
            self._guard(context, size_plan)
            return
        if grows:
            context.arena = alloc_aligned(0)  # release the old one first
            context.arena = alloc_aligned(size_plan.plan.size)
        if context.scratch.nbytes != scratch:
            context.scratch = alloc_aligned(scratch)

    def _fill(self, context: RunContext, size_plan: SizePlan) -> None:
        """Writes all words that stay the same from run to run."""
        read = self._read
        context.words[:] = size_plan.words
        context.records[self.records.launches, UNITS] = size_plan.units
        self.records.fill(
            context.records, context.loops, address(context.words), size_plan.private, size_plan.values,
            size_plan.steps, size_plan.solo,
        )  # fmt: skip
        names = self.layout.names
        bases = self._arena_bases(context, size_plan)
        self._add(context, ARENA, [bases.get(n, 0) for n in names[ARENA]])
        if context.read is not read:
            context.fixed = {kind: [address(read[n]) for n in names[kind]] for kind in (CONST, WEIGHT)}
        for kind, addresses in context.fixed.items():
            self._add(context, kind, addresses)
        self._read_ahead(context, size_plan)
        context.inputs = self._address_words(INPUT, size_plan)
        context.outputs = self._address_words(OUTPUT, size_plan)
        context.status = memoryview(context.scratch.view(np.int64))  # type: ignore[arg-type]
        context.headers = [t * size_plan.scratch // 8 for t in range(self.threads)]
        for header in context.headers:
            context.status[header] = context.status[header + 1] = 0
        records, scratch = address(context.records), address(context.scratch)
        request = [records, len(context.records), scratch, size_plan.scratch, 0, self.threads]
        context.request = np.array(request + [0] * (driver.REQUEST_WORDS - len(request)), np.int64)
        context.call, context.fast_run = address(context.request), _no_fast_run
        context.size_plan, context.read = size_plan, read

    def _prepare_fast_run(self, context: RunContext, size_plan: SizePlan, inputs: Sequence[Array]) -> None:
        assert self._inputs is not None
        results = Results(size_plan.outputs, [None] * len(size_plan.outputs), size_plan.output_bytes <= REUSED_BYTES)
        moved = context.inputs + [(at, len(inputs) + buffer, offset) for at, buffer, offset in context.outputs]
        context.results = results
        context.request = fast_call.block(
            context.request, address(self.pool.job), address(context.words), self._inputs, inputs, results, moved
        )
        context.call = address(context.request)
        context.fast_run = fast_call.function(self.pool.repeat, context.request)

    def _read_ahead(self, context: RunContext, size_plan: SizePlan) -> None:
        """Fills the prefetch records, except for launches that are compute-bound or read weights repeatedly."""
        ahead, sizes = self.layout.ahead, np.array(size_plan.values, np.int64)
        nbytes, units = sizes[ahead.bytes], sizes[ahead.units]
        units = np.where((sizes[ahead.rows] <= FEW_ROWS) & (sizes[ahead.rounds] == 1), units, 0)
        columns = (context.words[ahead.words], nbytes // np.maximum(units, 1), units)
        context.records[ahead.records, : UNITS + 1] = np.stack(columns, axis=1)

    def _address_words(self, kind: str, size_plan: SizePlan) -> list[tuple[int, int, int]]:
        """Position, buffer number and byte offset of the words that hold input or output addresses."""
        pointers = self.layout.pointers[kind]
        positions, offsets = pointers.positions.tolist(), size_plan.words[pointers.positions].tolist()
        return list(zip(positions, pointers.buffers.tolist(), offsets, strict=True))

    def _add(self, context: RunContext, kind: str, addresses: Sequence[int]) -> None:
        pointers = self.layout.pointers[kind]
        if len(pointers.positions):
            context.words[pointers.positions] += np.array(addresses, np.int64)[pointers.buffers]

    def _arena_bases(self, context: RunContext, size_plan: SizePlan) -> dict[str, int]:
        if not self._check:
            base = address(context.arena)
            return {name: base + offset for name, offset in size_plan.plan.offsets.items()}
        return {name: guard.address for name, guard in context.guards.items()}

    def _guard(self, context: RunContext, size_plan: SizePlan) -> None:
        """Allocates memory filled with NaN: each arena buffer and each thread's scratch lie between guard pages."""
        sizes = (max(0, size_plan.values[i]) for i in self.layout.arena_bytes)
        context.guards = {x.name: Guarded(size) for x, size in zip(self.layout.lives, sizes, strict=True)}
        context.scratch = guarded_scratch(size_plan.private - PAGE, self.records.private_bytes, self.threads)

    def _run_checked(
        self,
        context: RunContext,
        inputs: Sequence[Array],
        outputs: Sequence[Array],
        trace: np.ndarray[Any, np.dtype[np.int64]] | None,
    ) -> None:
        """Runs on guarded copies: read-only data is write-protected, and writes just before an array are detected."""
        names = self.layout.names
        input_arrays = dict(zip(names[INPUT], inputs, strict=True))
        output_arrays = dict(zip(names[OUTPUT], outputs, strict=True))
        states = {leaf.name for leaf in self._inputs or () if leaf.written}
        input_guards = {name: Guarded.copy(array, written=name in states) for name, array in input_arrays.items()}
        output_guards = {name: Guarded(array.nbytes) for name, array in output_arrays.items()}
        self._point_outputs(context, [guard.bytes for guard in output_guards.values()])
        self._execute(context, [guard.bytes for guard in input_guards.values()], trace)
        for name, guard in {**input_guards, **output_guards, **context.guards}.items():
            if not guard.intact:
                raise KernelError(f"{self.layout.name}: a kernel has written before the beginning of {name!r}")
        arrays = {**input_arrays, **output_arrays}
        for name, guard in {**{n: input_guards[n] for n in states}, **output_guards}.items():
            arrays[name].reshape(-1).view(np.uint8)[:] = guard.bytes

    def _assertion_error(self, assertion: Assertion, key: tuple[int, ...]) -> BindError:
        """The error for an assertion that these sizes violate."""
        from rlx.backends.run_time_errors import assertion_error

        return assertion_error(assertion, dict(zip(self.layout.symbols, key, strict=True)))

    def _fault(self, context: RunContext, *, is_piece: bool = False) -> BaseException:
        """The error for a failed run, from the scratch headers: a fault code, and the first record that failed."""
        from rlx.backends.run_time_errors import fault

        if (raised := pools.interruption()) is not None:
            return raised
        status = context.status
        record, code = min((status[at + 1], status[at]) for at in context.headers if status[at])
        assert context.size_plan is not None
        sizes = dict(zip(self.layout.symbols, context.size_plan.key, strict=True))
        step = self.records.walk[record - 1] if 0 < record <= len(self.records.walk) else None
        if step is None:
            return fault(self.program, None, code, sizes)
        # in a loop, addresses are those of a thread's last step; guarded memory is released already
        read = None if step.loops or self._check else partial(self._operand, context, record - 1, sizes)
        return fault(self.program, self.program.launches[step.number], code, sizes, read, is_piece=is_piece)

    def _operand(
        self, context: RunContext, record: int, sizes: Mapping[str, int], word: str, view: View
    ) -> Array | None:
        """The elements of an operand of a launch after a run; None if their memory was reused since."""
        from rlx.lir.wrong_index import strided

        number = self.records.walk[record].number
        shape, strides = concrete(view.shape, sizes), concrete(view.strides, sizes)
        if 0 in shape or min(strides, default=0) < 0 or not self._is_intact(context, number, view.buffer):
            return None
        word_at = self.records.first_words[record] + self.program.launches[number].kernel.words.index(word)
        count = 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        memory = (ctypes.c_char * (count * view.dtype.size)).from_address(int(context.words[word_at]))
        return strided(np.frombuffer(memoryview(memory), view.dtype.numpy), view, sizes)

    def _is_intact(self, context: RunContext, number: int, name: str) -> bool:
        """Whether no launch after this one has written to a buffer, or to another one in the same memory."""
        later = self.program.launches[number + 1 :]
        if any(view.buffer == name for launch in later for view in launch.views(written=True)):
            return False
        if self.program.buffers[name].kind != ARENA:
            return True
        assert context.size_plan is not None
        plan, lives = context.size_plan.plan, {life.name: life for life in self.layout.lives}
        start, stop = plan.offsets[name], plan.offsets[name] + plan.sizes[name]
        after = (other for other, life in lives.items() if life.last > lives[name].last)
        return all(plan.offsets[x] + plan.sizes[x] <= start or stop <= plan.offsets[x] for x in after)

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


def _no_fast_run(inputs: object) -> None:
    """No fast path: the next run is a full one."""


def _alloc_outputs(types: Sequence[ArrayType]) -> list[Array]:
    return [np.empty(shape, dtype) for shape, dtype in types]

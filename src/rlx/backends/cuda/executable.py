"""The executable: a LIR program on a GPU. Sizes that repeat run as one CUDA graph.

A `PreparedProgram` is the program at concrete sizes and addresses. Its first run enqueues launches one by one; the
second captures them as a graph, which later runs replay: inputs are copied to fixed places, results from fixed places.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Enqueued, InputSpec, Key
from rlx.backends.cuda.gpu import Function, Gpu, Graph
from rlx.backends.cuda.launch_plan import SCRATCH, PlannedLaunch, can_fault, joined, plan_launches, variants
from rlx.backends.cuda.memory import ALIGNMENT, CudaArray, Memory
from rlx.backends.cuda.modules import load_variants
from rlx.backends.cuda.targets import CudaTarget
from rlx.backends.cuda.transfers import Slot
from rlx.backends.program_executable import ProgramExecutable
from rlx.backends.reports import Trace
from rlx.backends.run_time_errors import check_sizes, fault
from rlx.lir.program import LAUNCH, Program
from rlx.lir.views import View
from rlx.types import evaluate

FAULT_BYTES = 8  # number of the launch and code
MOST_GRAPHS = 64  # sizes of a program whose graphs are kept
Planned = tuple[list[PlannedLaunch], Mapping[tuple[str, str], Function]]
LARGEST_COPY = 64 << 20  # bytes of inputs and outputs up to which a run is captured: a graph copies them


class CudaExecutable(ProgramExecutable):
    """Runs a program from any number of threads: runs take turns on the GPU's stream."""

    target: CudaTarget
    alignment = ALIGNMENT

    def __init__(
        self, program: Program, target: CudaTarget, device: Gpu, inputs: Sequence[InputSpec] | None = None
    ) -> None:  # fmt: skip
        super().__init__(program, target)
        self.gpu = device
        self.states = {spec.name for spec in inputs or () if spec.written}
        self._constants: dict[str, CudaArray] | None = None
        self._arena: Memory | None = None
        self._fault: Memory | None = None
        self._prepared: dict[tuple[Any, ...], PreparedProgram] = {}
        self.plans: dict[Key, Planned] = {}
        self.faults = any(can_fault(kernel) for kernel in program.kernels().values())

    def bind(self, weights: Mapping[str, Any]) -> None:
        with self.gpu.lock:
            super().bind(weights)
            self._forget()
            if not weights:
                self._arena = None

    def _forget(self) -> None:
        for prepared in self._prepared.values():
            prepared.release()
        self._prepared = {}

    # -- sizes --
    def planned(self, key: Key, sizes: Mapping[str, int]) -> Planned:
        """The launches of a run and their functions, which do not depend on where states are."""
        planned = self.plans.pop(key, None)
        if planned is None:
            launches = plan_launches(self._program, sizes, self.target)
            planned = launches, load_variants(list(variants(launches)), self.target, self.gpu)
            while len(self.plans) >= MOST_GRAPHS:
                self.plans.pop(next(iter(self.plans)))
        self.plans[key] = planned  # the most recently used is last
        return planned

    def units(self, key: Key) -> list[int]:
        sizes = self.sizes(key)
        return [
            sum(math.prod(p.grid) for p in one.plan.passes) for one in plan_launches(self._program, sizes, self.target)
        ]

    def reserved_bytes(self) -> int:
        return self._arena.size if self._arena is not None else 0

    # -- memory of the program --
    def arena(self, size: int) -> Memory:
        """Memory for temporary buffers, shared by runs of all sizes: they take turns."""
        if self._arena is None or self._arena.size < size:
            self._arena = Memory(self.gpu, size, f"the arena of program {self._program.name!r}")
        return self._arena

    def constants(self) -> Mapping[str, CudaArray]:
        if self._constants is None:
            values = {name: b.value.data for name, b in self._program.buffers.items() if b.value is not None}
            self._constants = {
                n: CudaArray(v.shape, v.dtype, self.gpu, None, host=np.array(v)) for n, v in values.items()
            }
        return self._constants

    def fault_memory(self) -> Memory:
        """Where kernels report their first fault."""
        if self._fault is None:
            self._fault = Memory(self.gpu, FAULT_BYTES, "faults")
            self.gpu.clear(self._fault.address, FAULT_BYTES)
        return self._fault

    # -- running --
    def run(self, key: Key, inputs: Sequence[Any]) -> list[CudaArray]:
        with self.gpu.lock:
            prepared = self._prepare(key, inputs)
            outputs = prepared.run(inputs)
        if self.faults:
            prepared.check()
        return outputs

    def _prepare(self, key: Key, inputs: Sequence[Any]) -> PreparedProgram:
        named = zip(self._program.inputs, inputs, strict=True)
        states = tuple(array.address for name, array in named if name in self.states)
        known = (key, states)
        prepared = self._prepared.pop(known, None)
        if prepared is None:
            while len(self._prepared) >= MOST_GRAPHS:
                self._prepared.pop(next(iter(self._prepared))).release()
            prepared = PreparedProgram(self, key)
        self._prepared[known] = prepared  # the most recently used is last
        return prepared

    @property
    def latest_key(self) -> Key:
        """The sizes of the latest run, for benchmarks."""
        key: Key = next(reversed(self._prepared))[0]
        return key

    @property
    def latest(self) -> PreparedProgram:
        """The program at the sizes and states of the latest run, for benchmarks."""
        return next(reversed(self._prepared.values()))

    def enqueue(self, key: Key, inputs: Sequence[Any], read: Sequence[int]) -> Enqueued:
        with self.gpu.lock:
            prepared = self._prepare(key, inputs)
            return _Behind(prepared.run(inputs), read, prepared)

    def trace(self, key: Key, inputs: Sequence[Any]) -> tuple[list[CudaArray], Trace]:
        with self.gpu.lock:
            prepared = self._prepare(key, inputs)
            outputs, trace = prepared.trace(inputs)
        if self.faults:
            prepared.check()
        return outputs, trace


def _round(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT


class _Behind(Enqueued):
    """A run on the stream. What the host will read, and where faults are reported, is copied right behind it."""

    def __init__(self, outputs: list[CudaArray], read: Sequence[int], prepared: PreparedProgram) -> None:
        super().__init__(outputs, read)
        self._prepared, gpu = prepared, prepared.gpu
        arrays = [outputs[i] for i in read]
        self._offsets = np.cumsum([FAULT_BYTES, *(_round(array.nbytes) for array in arrays)]).tolist()
        self._slot: Slot | None = gpu.slots.take(self._offsets[-1])
        if prepared.owner.faults:
            gpu.start_download(self._slot.address, prepared.owner.fault_memory().address, FAULT_BYTES)
        else:
            self._slot.array[:FAULT_BYTES] = 0
        for array, at in zip(arrays, self._offsets, strict=False):
            if array.nbytes:
                gpu.start_download(self._slot.address + at, array.address, array.nbytes)
        self._slot.event = gpu.mark(self._slot.event)

    def read(self) -> list[Array]:
        slot = self._slot
        if slot is None:
            return super().read()
        self._prepared.gpu.wait(slot.event)
        arrays = []
        for i, at in zip(self._read, self._offsets, strict=False):
            output = self.outputs[i]
            data = slot.array[at : at + output.nbytes].copy()
            arrays.append(data.view(output.dtype).reshape(output.shape))
        number, code = slot.array[:FAULT_BYTES].view(np.int32).tolist()
        self._release()
        if code:
            raise self._prepared.reported(number, code)
        return arrays

    def _release(self) -> None:
        if self._slot is not None:
            self._prepared.gpu.slots.give_back(self._slot)
            self._slot = None

    def __del__(self) -> None:
        if getattr(self, "_slot", None) is not None:
            self._release()


class PreparedProgram:
    """A program at concrete sizes: planned launches, their functions, and memory."""

    def __init__(self, owner: CudaExecutable, key: Key) -> None:
        program = owner.program
        self.owner, self.gpu, self.program = owner, owner.gpu, program
        self.sizes = owner.sizes(key)
        check_sizes(program, self.sizes)
        self.types = owner.outputs(key)
        self.launches, self.functions = owner.planned(key, self.sizes)
        arena = owner.plan(self.sizes, joined(self.launches))
        self.memory = owner.arena(arena.size)
        self.addresses = {name: self.memory.address + at for name, at in arena.offsets.items()}
        self.addresses |= {name: array.address for name, array in owner.constants().items()}
        self.addresses |= {name: owner.weights[name].address for name in owner.reads}
        self._words = [launch.words.copy() for launch in self.launches]
        self._scratch = self._allocate_scratch()
        self._places: dict[str, list[tuple[int, int, int]]] = {}  # buffer -> (launch, word, offset)
        for i, launch in enumerate(self.launches):
            for word, buffer in launch.operands:
                self._places.setdefault(buffer, []).append((i, word, int(launch.words[word])))
            self._words[i][list(launch.fault_words)] = owner.fault_memory().address
        for buffer, address in list(self.addresses.items()):
            self._place(buffer, address)
        self._graph: Graph | None = None
        self._slots: Memory | None = None
        self._runs = 0
        copied = sum(math.prod(shape) * dtype.itemsize for shape, dtype in self.types)
        self._can_capture = not self._depends_on_data() and copied <= LARGEST_COPY and bool(self.launches)

    def release(self) -> None:
        if self._graph is not None:
            self.gpu.destroy(self._graph)
            self._graph = None

    def _depends_on_data(self) -> bool:
        return any(control.predicate is not None for control in self.program.controls)

    def _allocate_scratch(self) -> list[Memory]:
        """Scratch memory: launches share it, except what must be zero before and after a launch."""
        shared = max((x.plan.scratch for x in self.launches if not x.plan.zeroed), default=0)
        clean: dict[int, int] = {}
        for launch in self.launches:
            if launch.plan.zeroed:
                clean[launch.plan.zeroed] = max(clean.get(launch.plan.zeroed, 0), launch.plan.scratch)
        areas = {0: Memory(self.gpu, shared, "scratch")} if shared else {}
        for zeroed, size in clean.items():
            areas[zeroed] = Memory(self.gpu, size, "scratch")
            self.gpu.clear(areas[zeroed].address, zeroed)
        for launch, words in zip(self.launches, self._words, strict=True):
            if launch.plan.scratch:
                words[SCRATCH] = areas[launch.plan.zeroed].address
        return list(areas.values())

    def _place(self, buffer: str, address: int) -> None:
        """Gives a buffer its address in the parameters of all launches."""
        self.addresses[buffer] = address
        for launch, word, offset in self._places.get(buffer, ()):
            self._words[launch][word] = address + offset

    # -- running --
    def run(self, inputs: Sequence[CudaArray]) -> list[CudaArray]:
        self._runs += 1
        if self._graph is None and self._runs > 1 and self._can_capture:
            self._capture(inputs)
        if self._graph is not None:
            return self._replay(inputs)
        outputs = self._bind_arrays(inputs)
        self.gpu.activate()
        self._enqueue()
        return outputs

    def _new_outputs(self) -> list[CudaArray]:
        owner = f"an output of program {self.program.name!r}"
        sizes = [_round(math.prod(shape) * dtype.itemsize) for shape, dtype in self.types]
        return [
            CudaArray(shape, dtype, self.gpu, Memory(self.gpu, size, owner))
            for (shape, dtype), size in zip(self.types, sizes, strict=True)
        ]

    def _bind_arrays(self, inputs: Sequence[CudaArray]) -> list[CudaArray]:
        """Lets launches read these inputs and write new outputs."""
        outputs = self._new_outputs()
        for name, array in zip(self.program.inputs, inputs, strict=True):
            self._place(name, array.address)
        for name, array in zip(self.program.outputs, outputs, strict=True):
            self._place(name, array.address)
        return outputs

    def _enqueue(self) -> None:
        self.gpu.separate()
        for launch in self.launch_order():
            self._launch(launch, self.sizes)

    def _launch(self, number: int, sizes: Mapping[str, int]) -> None:
        planned, words = self.launches[number], self._words[number]
        for symbol, step in planned.steps.items():
            if sizes.get(symbol):
                words = words + step * sizes[symbol]
        for one in planned.plan.passes:
            if 0 not in one.grid:
                function = self.functions[planned.kernel.symbol, one.variant]
                self.gpu.launch(function, one.grid, one.threads, one.shared, words)

    def launch_order(self) -> Iterator[int]:
        """Walks through loops and branches; reads predicates from the device."""
        steps = self.owner.run_order(self.sizes, self._holds)
        return (step.number for step in steps if step.kind == LAUNCH)

    def _holds(self, predicate: View) -> bool:
        value = np.zeros(1, np.uint8)
        offset = evaluate(predicate.offset, self.sizes) * predicate.dtype.size
        self.gpu.download(value, self.addresses[predicate.buffer] + offset)
        if self.owner.faults:
            self.check()  # a condition that a fault made wrong must not loop for ever
        return bool(value[0])

    def check(self) -> None:
        """Raises the first fault that kernels reported."""
        reported = np.zeros(2, np.int32)
        memory = self.owner.fault_memory()
        self.gpu.download(reported, memory.address)
        number, code = reported.tolist()
        if code:
            raise self.reported(number, code)

    def reported(self, number: int, code: int) -> Exception:
        """The error of a fault; later runs report their own."""
        self.gpu.clear(self.owner.fault_memory().address, FAULT_BYTES)
        return fault(self.program, self.program.launches[number], code, self.sizes)

    # -- graphs --
    def _capture(self, inputs: Sequence[CudaArray]) -> None:
        """Gives inputs and outputs fixed places and records all launches."""
        named = list(zip(self.program.inputs, inputs, strict=True))
        sizes = [0 if name in self.owner.states else _round(array.nbytes) for name, array in named]
        if sum(sizes) > LARGEST_COPY:
            self._can_capture = False
            return
        self._slots = Memory(self.gpu, sum(sizes), f"inputs of program {self.program.name!r}")
        self._offsets = [0, *np.cumsum(sizes).tolist()]
        for (name, array), at in zip(named, self._offsets, strict=False):
            state = name in self.owner.states
            self._place(name, array.address if state else self._slots.address + at)
        self._results = self._new_outputs()
        for name, array in zip(self.program.outputs, self._results, strict=True):
            self._place(name, array.address)
        with self.gpu.capture() as graphs:
            self._enqueue()
        (self._graph,) = graphs

    def _replay(self, inputs: Sequence[CudaArray]) -> list[CudaArray]:
        self._copy_inputs(inputs)
        self.replay()
        outputs = self._new_outputs()
        for result, output in zip(self._results, outputs, strict=True):
            self.gpu.copy(output.start, result.start, result.nbytes)
        return outputs

    def replay(self) -> None:
        """Enqueues the graph once more, on the inputs of the latest run."""
        assert self._graph is not None, "sizes that repeat have a graph"
        self.gpu.replay(self._graph)

    def _copy_inputs(self, inputs: Sequence[CudaArray]) -> None:
        """Copies inputs to their places: what is on the host in one piece, what is on the device each by itself."""
        assert self._slots is not None
        slot = self.gpu.slots.take(self._offsets[-1])
        staged: list[tuple[int, int]] = []
        for name, array, at in zip(self.program.inputs, inputs, self._offsets, strict=False):
            if name in self.owner.states or not array.nbytes:
                continue
            if array.host is not None:
                slot.array[at : at + array.nbytes] = array.host.reshape(-1).view(np.uint8)
                staged.append((at, at + array.nbytes))
            else:
                self.gpu.copy(self._slots.address + at, array.address, array.nbytes)
        for begin, end in _merged(staged):
            self.gpu.start_upload(self._slots.address + begin, slot.address + begin, end - begin)
        slot.event = self.gpu.mark(slot.event)
        self.gpu.slots.give_back(slot)

    # -- times --
    def trace(self, inputs: Sequence[CudaArray]) -> tuple[list[CudaArray], Trace]:
        """Runs launch by launch, with a time stamp around each."""
        graph, self._graph = self._graph, None
        outputs = self._bind_arrays(inputs)
        marks: list[tuple[int, Any, Any]] = []
        self.gpu.activate()
        origin = self.gpu.event()
        self.gpu.separate()
        for number in self.launch_order():
            begin = self.gpu.event()
            self._launch(number, self.sizes)
            marks.append((number, begin, self.gpu.event()))
        self.gpu.synchronize()
        times = np.zeros((len(self.launches), 1, 2))
        for number, begin, end in marks:
            at, seconds = self.gpu.seconds(origin, begin), self.gpu.seconds(begin, end)
            row = times[number, 0]
            row[0] = row[0] or at
            row[1] = (row[1] or row[0]) + seconds
        for _, begin, end in marks:
            self.gpu.release(begin)
            self.gpu.release(end)
        self.gpu.release(origin)
        if graph is not None:  # its fixed places are in the words again
            self.gpu.destroy(graph)
        steps = self.program.all_steps(self.sizes)
        return outputs, Trace(times, np.zeros((len(self.program.controls), 1, 2)), steps)


def _merged(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Runs of bytes that lie in one alignment unit of each other, as one."""
    merged: list[tuple[int, int]] = []
    for begin, end in runs:
        if merged and begin - merged[-1][1] <= ALIGNMENT:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((begin, end))
    return merged

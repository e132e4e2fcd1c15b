"""Scheduling: lowers MIR nodes, in order, to kernel launches on buffers; shape ops become strided views.

The loop forms of each op group are in `lir/forms/<group>.py`. A form takes the scheduler and a node, adds launches,
and returns the views of the node's results.
"""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import field, replace
from typing import Any

from rlx.dtypes import I64
from rlx.errors import LowerError
from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import RuleTable, checked_results
from rlx.lir.barriers import place_barriers
from rlx.lir.expressions import Formula, known, number
from rlx.lir.forms import GROUPS
from rlx.lir.kernels import Kernel
from rlx.lir.loops import Arg, Expr, For, Index, Let, Load, LoopKernel, Param, Place, Ref, Stmt, Store
from rlx.lir.merge_launches import merge_launches
from rlx.lir.program import ARENA, CONST, INPUT, OUTPUT, WEIGHT, Assertion, Buffer, Launch, Program
from rlx.lir.views import View, collapse
from rlx.mir.independence import independent_symbol
from rlx.target import Target
from rlx.types import Size, TensorType

LoopForm = Callable[["Scheduler", Node], Sequence[View]]
loop_form: RuleTable[LoopForm] = RuleTable("loop form", "src/rlx/lir/forms/{group}.py")


class Scheduler:
    """Builds a program from a graph. The body of a loop or branch has its own scheduler, nested `inside` another."""

    def __init__(self, graph: Graph, target: Target, notes: Mapping[str, str], inside: Scheduler | None = None) -> None:
        self.graph = graph
        self.target = target
        self.forms: Mapping[str, LoopForm] = target.forms()
        self.views: dict[Value, View] = {}
        self.node: Node | None = None
        self.notes = notes
        self.borrowed: set[str] = set()  # buffers that a body gets from outside and must not change
        self.shared: dict[Hashable, Any] = {}  # values that a form shares with forms of later nodes
        self._outputs: dict[Value, str] = {}
        self._places: dict[Value, View] = {}
        self._steps: tuple[Size, ...] = ()  # of enclosing loops that may have no steps
        self._asserted: list[Assertion] | None = None  # None: assertions go to the program
        self.program: Program
        self._taken: set[str]  # names of buffers
        if inside is not None:
            self.program, self._taken = inside.program, inside._taken
            self._steps, self._asserted = inside._steps, inside._asserted
        else:
            self.program = Program(graph.name, target.name, tuple(graph.symbols()), dict(graph.limits))
            self._taken = {n.attrs["name"] for n in (*graph.inputs, *graph.params)}

    def run(self) -> Program:
        self.program.outputs = [self._fresh(f"output{i}") for i in range(len(self.graph.outputs))]
        for value, name in zip(self.graph.outputs, self.program.outputs, strict=True):
            self._outputs.setdefault(value, name)
        for node in self.graph.nodes:
            self.node = node
            self.views.update(zip(node.results, self._lower(node), strict=True))
        self._finish_outputs()
        merge_launches(self.program, independent=not self.target.overlaps_launches)
        place_barriers(self.program)
        return self.program

    def _lower(self, node: Node) -> Sequence[View]:
        match node.op:
            case "input" | "state" | "param":
                kind, name = (WEIGHT if node.op == "param" else INPUT), node.attrs["name"]
                (self.program.inputs if kind == INPUT else self.program.weights).append(name)
                return [self._buffer(Buffer(name, node.types[0], kind, note=self.notes.get(name, "")))]
            case "const":
                return [self._buffer(Buffer(self._fresh(f"const{node.id}"), node.types[0], CONST, node.attrs["value"]))]
            case _:
                form = self.forms.get(node.op) or form_of(node)
                return checked_results("loop form", node.op, form(self, node), len(node.results))

    def _fresh(self, name: str) -> str:
        """A buffer name that no input, param or other buffer has."""
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def _buffer(self, buffer: Buffer) -> View:
        self.program.buffers[buffer.name] = buffer
        return buffer.view()

    def _finish_outputs(self) -> None:
        """Give every output a buffer of its own; views, inputs and repeated outputs are copied."""
        for value, name in zip(self.graph.outputs, self.program.outputs, strict=True):
            view = self.views[value]
            if view.buffer != name:
                self.node = value.node
                out = self._buffer(Buffer(name, value.type, OUTPUT))
                self.copy_into(view, out)
        order = {b.name: b for b in self.program.buffers.values()}
        self.program.buffers = {n: b for n, b in order.items() if b.kind != OUTPUT}
        self.program.buffers |= {n: order[n] for n in self.program.outputs}

    # -- for loops and branches ---------------------------------------------------------------------------------------
    def body(
        self, graph: Graph, inputs: Sequence[View], places: Sequence[View | None], *, steps: Size = 1,
        asserted: list[Assertion] | None = None,
    ) -> list[View]:  # fmt: skip
        """Schedule a body and return the views of its outputs. An output with a place is stored there.

        Its size assertions apply only if it runs. They hold for runs with `steps` > 0; if data decides whether it runs,
        they are added to `asserted` instead, and the caller checks them there.
        """
        inner = Scheduler(graph, self.target, self.notes, inside=self)
        if not isinstance(steps, int) or steps < 1:
            inner._steps = (*inner._steps, steps)
        if asserted is not None:
            inner._steps, inner._asserted = (), asserted
        inner.views = {node[0]: view for node, view in zip(graph.inputs, inputs, strict=True)}
        inner.borrowed = {view.buffer for view in inputs}
        for value, place in zip(graph.outputs, places, strict=True):
            if place is not None and value not in inner.views:
                inner._places.setdefault(value, place)
        for node in graph.nodes:
            if node.op != "input":
                inner.node = node
                inner.views.update(zip(node.results, inner._lower(node), strict=True))
        views = [inner.views[value] for value in graph.outputs]
        for value, view, place in zip(graph.outputs, views, places, strict=True):
            if place is not None and view != place:
                inner.node = value.node
                inner.copy_into(view, place)
        return views

    def loop_symbol(self, letter: str) -> str:
        """A fresh name for a symbol that changes from step to step of a loop."""
        known = {*self.program.symbols, *self.program.loop_symbols()}
        return next(name for i in itertools.count() if (name := f"{letter}{i}") not in known)

    # -- for loop forms -----------------------------------------------------------------------------------------------
    def view(self, value: Value | None) -> View:
        """The view of an operand."""
        assert value is not None
        return self.views[value]

    def result(self, node: Node, index: int = 0) -> View:
        """A contiguous buffer for a result of `node`: a new one, or its preassigned place if it is an output."""
        value = node[index]
        if value in self._places:
            return self._places[value]
        suffix = f".{index}" if len(node.types) > 1 else ""
        name = self._outputs.get(value)
        if name is not None:
            return self._buffer(Buffer(name, value.type, OUTPUT))
        return self._buffer(Buffer(self._fresh(f"t{node.id}{suffix}"), value.type, ARENA))

    def is_output(self, node: Node) -> bool:
        """Whether the first result of `node` has a preassigned place, so that it cannot alias an operand."""
        return node[0] in self._places or node[0] in self._outputs

    def temporary(self, type_: TensorType) -> View:
        """A new arena buffer."""
        return self._buffer(Buffer(self._fresh(f"c{len(self.program.buffers)}"), type_, ARENA))

    def contiguous(self, view: View) -> View:
        """The view itself if contiguous, else a contiguous copy."""
        return view if view.is_contiguous() else self.copied(view)

    def copied(self, view: View) -> View:
        out = self.temporary(TensorType(view.shape, view.dtype))
        self.copy_into(view, out)
        return out

    def copy_into(self, view: View, out: View) -> None:
        map_elements(self, "copy", out.shape, [view], [out], lambda e: ((), [e.load(0)]))

    def launch(
        self,
        kernel: Kernel,
        words: Mapping[str, View | Size | None],
        units: Size | None = None,
        split: str = "",
        *,
        flops: Size = 0,
        shares: Mapping[str, Size] | None = None,
    ) -> None:
        """Add a launch; `words` has a value for each word of the kernel except absent operands.

        Loop kernels have units. Unit u touches only bytes [u · share, (u + 1) · share) of an operand in `shares`.
        """
        assert self.node is not None
        values = tuple(words.get(w) for w in kernel.words)
        self.program.launches.append(
            Launch(kernel, values, units, split, False, str(self.node.origin), self.node.id, flops, shares=shares or {})
        )

    def assume(self, a: Size, b: Size, relation: str = "==", subject: str = "") -> None:
        """Check at run time that two sizes are related by `==` or `<=`; errors begin with the subject, or the op."""
        assert self.node is not None
        assertions = self.program.assertions if self._asserted is None else self._asserted
        assertions.append(Assertion(a, b, relation, subject or self.node.op, str(self.node.origin), self._steps))


# -- building loop kernels --------------------------------------------------------------------------------------------
@dataclass
class LoopBuilder:
    """Collects the parameters and run-time integers of a loop kernel while its statements are built."""

    name: str
    params: list[Param] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    args: dict[str, Size] = field(default_factory=dict)

    def param(self, view: View, *, written: bool = False, name: str = "") -> int:
        """Add a buffer the kernel reads or writes; returns its parameter index."""
        index = len(self.params)
        self.params.append(Param(name or f"{'y' if written else 'x'}{index}", view.dtype, written))
        self.views.append(view)
        return index

    def load(self, param: int, at: Place) -> Expr:
        """Load an element, cast to its wide type, in which sums are accumulated on every target."""
        dtype = self.params[param].dtype
        return Load(param, at, dtype).cast(dtype.wide)

    def arg(self, name: str, size: Size) -> Arg:
        """Add a run-time integer."""
        if name in (p.name for p in self.params) or self.args.get(name, size) != size:
            other = self.args.get(name, "an operand")
            hint = "choose another name; a kernel has its own, such as 'n' and 'units'"
            raise LowerError(f"kernel {self.name}: argument {name!r} is {size}, and also {other}", hint=hint)
        self.args[name] = size
        return Arg(name)

    def stride(self, param: int, axis: str, size: Size, *, unit: bool = False) -> int | Arg:
        """A stride: 0 is constant, 1 is constant on unit axes, anything else is a run-time integer."""
        if size == 0:
            return 0
        if size == 1 and unit:
            return 1
        return self.arg(f"{self.params[param].name}_{axis}", size)

    def launch(
        self, scheduler: Scheduler, root: For, units: Size, *, chunk: int = 0, split: str = "rows", flops: Size = 0,
        shares: Mapping[int, Size] | None = None, streams: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        """Launch the kernel; `shares` gives the elements per unit of parameters that units access in disjoint runs."""
        kernel = LoopKernel(self.name, tuple(self.params), tuple(self.args), root, chunk, streams=streams)
        words: dict[str, View | Size | None] = {p.name: v for p, v in zip(self.params, self.views, strict=True)}
        words |= self.args
        own = {self.params[i].name: size * self.params[i].dtype.size for i, size in (shares or {}).items()}
        scheduler.launch(kernel, words, units, split, flops=flops, shares=own)


CHUNK = 4096  # elements per unit of a one-dimensional loop


@dataclass(frozen=True)
class Nest:
    """A loop nest over collapsed axes: the unit index is decoded into the outer axes, the last is a vector loop."""

    sizes: list[Size]
    strides: list[list[Size]]
    axes: list[list[int]]

    @property
    def names(self) -> list[str]:
        return [f"i{a}" for a in range(len(self.sizes))]

    @property
    def outer(self) -> Size:
        total: Size = 1
        for size in self.sizes[:-1]:
            total = total * size
        return total


def decode_unit(builder: LoopBuilder, sizes: Sequence[Size], names: Sequence[str], unit: str = "u") -> list[Let]:
    """Returns `Let` statements that split the unit index into one index per axis; the last axis varies fastest."""
    if len(sizes) == 1:
        return [Let(names[0], Index(unit))]
    lets: list[Let] = []
    rest: Expr = Index(unit)
    for i in range(len(sizes) - 1, 0, -1):
        extent = builder.arg(f"n_{names[i]}", sizes[i])
        lets.append(Let(names[i], rest.rem(extent)))
        quotient = Let(f"{names[i]}_q", rest.quot(extent))
        lets.append(quotient)
        rest = Ref(quotient.name, I64)
    lets.append(Let(names[0], rest))
    return lets


def places(builder: LoopBuilder, nest: Nest, count: int) -> list[Place]:
    """The address terms of each operand at the current indices of a nest."""
    last = len(nest.sizes) - 1
    chunked = len(nest.sizes) == 1
    addresses = []
    for operand in range(count):
        terms: list[tuple[Expr, int | Arg]] = []
        for axis, name in enumerate(nest.names):
            stride = builder.stride(operand, name, nest.strides[operand][axis], unit=axis == last)
            if stride != 0:
                inner = axis == last or chunked
                terms.append((Index("j") if inner else Ref(name, I64), stride))
        addresses.append(tuple(terms))
    return addresses


@dataclass(frozen=True)
class Elements:
    """The current element of each operand and its indices, for the body of `map_elements`."""

    builder: LoopBuilder
    nest: Nest
    at: list[Place]
    target: Target
    keep: tuple[int, ...] = ()  # axes that are not merged with others

    def load(self, i: int, *terms: tuple[Expr | int, int | Arg]) -> Expr:
        """The element of operand i, offset by further address terms, in the type the target computes in."""
        dtype = self.builder.params[i].dtype
        return Load(i, self.at[i] + _terms(terms), dtype).cast(self.target.native(dtype))

    def load_wide(self, i: int, *terms: tuple[Expr | int, int | Arg]) -> Expr:
        """Like `load`, but in the wide type, for ops that round once after several operations."""
        return self.builder.load(i, self.at[i] + _terms(terms))

    def index(self, axis: int) -> Expr:
        """The index along an axis of the shape, which must be in `keep`."""
        if axis not in self.keep:
            wanted = ", ".join(map(str, (*self.keep, axis)))
            raise LowerError(
                f"kernel {self.builder.name}: index({axis}) of an axis that may be merged with others",
                hint=f"map_elements(..., keep=({wanted},))",
            )
        where = next(i for i, merged in enumerate(self.nest.axes) if axis in merged)
        return Index("j") if where == len(self.nest.sizes) - 1 else Ref(self.nest.names[where], I64)

    def arg(self, name: str, size: Size) -> Arg:
        """A run-time integer."""
        return self.builder.arg(name, size)


def _terms(terms: Sequence[tuple[Expr | int, int | Arg]]) -> Place:
    """Address terms, with integers as constants."""
    return tuple((known(index, I64), stride) for index, stride in terms)


Body = Callable[[Elements], tuple[Sequence[Stmt], Sequence[Expr]]]


def map_elements(
    scheduler: Scheduler,
    name: str,
    shape: Sequence[Size],
    reads: Sequence[View],
    writes: Sequence[View],
    body: Body,
    *,
    keep: Sequence[int] = (),
    flops: int = 1,
) -> None:
    """Launch a kernel that computes every element of `writes` from `reads` (broadcast to `shape`) at the same index.

    `body` returns statements, and one expression per write; axes in `keep` are not merged with others.
    """
    builder = LoopBuilder(name)
    operands = [v.expand(tuple(shape)) if v.rank != len(shape) or v.shape != tuple(shape) else v for v in reads]
    operands += list(writes)
    sizes, strides, axes = collapse(shape, [v.strides for v in operands], keep=keep)
    if not sizes:
        sizes, strides, axes = [1], [[0] for _ in operands], [[]]
    nest = Nest(sizes, strides, axes)
    for v in reads:
        builder.param(v)
    for v in writes:
        builder.param(v, written=True)
    lets = [] if len(sizes) == 1 else decode_unit(builder, sizes[:-1], nest.names[:-1])
    at = places(builder, nest, len(operands))
    stmts, values = body(Elements(builder, nest, at, scheduler.target, tuple(keep)))
    values = [v if isinstance(v, Formula) else number(v, w.dtype.wide) for v, w in zip(values, writes, strict=True)]
    stores = [Store(len(reads) + i, at[len(reads) + i], value) for i, value in enumerate(values)]
    inner = For("j", builder.arg("n", sizes[-1]), (*stmts, *stores), vector=True)
    elements: Size = flops
    for d in shape:
        elements = elements * d
    if len(sizes) == 1:
        units = (sizes[0] + (CHUNK - 1)) // CHUNK
        builder.launch(scheduler, inner, units, chunk=CHUNK, split="chunks", flops=elements)
    else:
        root = For("u", builder.arg("units", nest.outer), (*lets, inner))
        builder.launch(scheduler, root, nest.outer, flops=elements)


def form_of(node: Node) -> LoopForm:
    """The loop form of an op. Groups are imported on first use, since most programs need few."""
    if node.op not in loop_form and node.definition.is_builtin and node.definition.group in GROUPS:
        importlib.import_module(f"rlx.lir.forms.{node.definition.group}")
    return loop_form[node.op]


def lazy_forms(package: str, where: Mapping[str, str]) -> Mapping[str, LoopForm]:
    """A backend's forms by op, each `module.function` of its package, imported on first use."""

    def lazy(module: str, function: str) -> LoopForm:
        def form(s: Scheduler, node: Node) -> Sequence[View]:
            own: LoopForm = getattr(importlib.import_module(module), function)
            return own(s, node)

        form.__module__, form.__qualname__ = module, function  # where `rlx ops` says it is
        return form

    return {op: lazy(f"{package}.{place.split('.')[0]}", place.split(".")[1]) for op, place in where.items()}


def schedule(graph: Graph, target: Target, *, notes: Mapping[str, str] | None = None) -> Program:
    """Lower an optimised MIR graph to a program."""
    program = Scheduler(graph, target, notes or {}).run()
    program.batch = independent_symbol(graph)
    _share_kernels(program)
    return program


def _share_kernels(program: Program) -> None:
    """Make launches of equal kernels share one object, so that work per kernel is done once."""
    known: dict[tuple[type, str], Kernel] = {}
    for i, launch in enumerate(program.launches):
        kernel = known.setdefault((type(launch.kernel), launch.kernel.fingerprint), launch.kernel)
        if kernel is not launch.kernel:
            program.launches[i] = replace(launch, kernel=kernel)

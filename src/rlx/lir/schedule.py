"""Scheduling: MIR nodes become launches of kernels on buffers, in order. Views become strides.

Each op group has its loop forms in `lir/<group>.py`; a form is a function of the scheduler and a node that adds
launches and gives the views of the node's results.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from rlx.dtypes import I64, DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import RuleTable
from rlx.lir.kernels import Kernel
from rlx.lir.loops import Apply, Arg, Expr, For, Index, Let, Load, LoopKernel, Param, Ref, Stmt, Store
from rlx.lir.merge_launches import merge_launches
from rlx.lir.program import ARENA, CONST, INPUT, OUTPUT, WEIGHT, Assertion, Buffer, Launch, Program
from rlx.lir.views import View, collapse
from rlx.target import Target
from rlx.types import Size, TensorType

LoopForm = Callable[["Scheduler", Node], Sequence[View]]
loop_form: RuleTable[LoopForm] = RuleTable("loop form", "src/rlx/lir/{group}.py")


class Scheduler:
    """Builds one program from one graph."""

    def __init__(self, graph: Graph, target: Target, notes: Mapping[str, str]) -> None:
        self.graph = graph
        self.target = target
        self.program = Program(graph.name, target.name, tuple(graph.symbols()), dict(graph.limits))
        self.views: dict[Value, View] = {}
        self.node: Node | None = None
        self.notes = notes
        self._taken = {n.attrs["name"] for n in (*graph.inputs, *graph.params)}
        self._outputs: dict[Value, str] = {}

    def run(self) -> Program:
        self.program.outputs = [self._fresh(f"output{i}") for i in range(len(self.graph.outputs))]
        for value, name in zip(self.graph.outputs, self.program.outputs, strict=True):
            self._outputs.setdefault(value, name)
        for node in self.graph.nodes:
            self.node = node
            self.views.update(zip(node.results, self._lower(node), strict=True))
        self._finish_outputs()
        merge_launches(self.program)
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
                return loop_form[node.op](self, node)

    def _fresh(self, name: str) -> str:
        """A name for a buffer that no input, param or other buffer has."""
        while name in self._taken:
            name += "_"
        self._taken.add(name)
        return name

    def _buffer(self, buffer: Buffer) -> View:
        self.program.buffers[buffer.name] = buffer
        return buffer.view()

    def _finish_outputs(self) -> None:
        """Every output is a buffer of its own; what is only a view, an input or given twice gets copied."""
        for value, name in zip(self.graph.outputs, self.program.outputs, strict=True):
            view = self.views[value]
            if view.buffer != name:
                self.node = value.node
                out = self._buffer(Buffer(name, value.type, OUTPUT))
                self.copy_into(view, out)
        order = {b.name: b for b in self.program.buffers.values()}
        self.program.buffers = {n: b for n, b in order.items() if b.kind != OUTPUT}
        self.program.buffers |= {n: order[n] for n in self.program.outputs}

    # -- for loop forms -----------------------------------------------------------------------------------------------
    def view(self, value: Value | None) -> View:
        """The view of an operand."""
        assert value is not None
        return self.views[value]

    def result(self, node: Node, index: int = 0) -> View:
        """A fresh contiguous buffer for a result of `node`: the caller's array where it is an output of the graph."""
        value = node[index]
        suffix = f".{index}" if len(node.types) > 1 else ""
        name = self._outputs.get(value)
        if name is not None:
            return self._buffer(Buffer(name, value.type, OUTPUT))
        return self._buffer(Buffer(self._fresh(f"t{node.id}{suffix}"), value.type, ARENA))

    def temporary(self, type_: TensorType) -> View:
        """A fresh arena buffer."""
        return self._buffer(Buffer(self._fresh(f"c{len(self.program.buffers)}"), type_, ARENA))

    def contiguous(self, view: View) -> View:
        """The view itself, or a copy of it without gaps."""
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
        units: Size,
        split: str,
        *,
        flops: Size = 0,
    ) -> None:
        """Add a launch; `words` has a value for each word of the kernel that the backend does not fill in."""
        assert self.node is not None
        values = tuple(words.get(w) for w in kernel.words)
        self.program.launches.append(
            Launch(kernel, values, units, split, False, str(self.node.origin), self.node.id, flops)
        )

    def assume(self, a: Size, b: Size, relation: str = "==") -> None:
        """Have run time check how two sizes relate: `==` or `<=`."""
        assert self.node is not None
        self.program.assertions.append(Assertion(a, b, relation, self.node.op, str(self.node.origin)))


# -- building loop kernels --------------------------------------------------------------------------------------------
@dataclass
class LoopBuilder:
    """Collects the parameters and run-time integers of a loop kernel while its statements are written."""

    name: str
    params: list[Param] = field(default_factory=list)
    views: list[View] = field(default_factory=list)
    args: dict[str, Size] = field(default_factory=dict)

    def param(self, view: View, *, written: bool = False, name: str = "") -> int:
        """A buffer the kernel touches; gives its number."""
        index = len(self.params)
        self.params.append(Param(name or f"{'y' if written else 'x'}{index}", view.dtype, written))
        self.views.append(view)
        return index

    def arg(self, name: str, size: Size) -> Arg:
        """A run-time integer."""
        self.args[name] = size
        return Arg(name)

    def stride(self, param: int, axis: str, size: Size, *, unit: bool = False) -> int | Arg:
        """A stride for `at`: 0 is known, 1 is known on unit axes, anything else is a run-time integer."""
        if size == 0:
            return 0
        if size == 1 and unit:
            return 1
        return self.arg(f"{self.params[param].name}_{axis}", size)

    def launch(
        self, scheduler: Scheduler, root: For, units: Size, *, chunk: int = 0, split: str = "rows", flops: Size = 0
    ) -> None:
        kernel = LoopKernel(self.name, tuple(self.params), tuple(self.args), root, chunk)
        words: dict[str, View | Size | None] = {p.name: v for p, v in zip(self.params, self.views, strict=True)}
        words |= self.args
        scheduler.launch(kernel, words, units, split, flops=flops)


CHUNK = 4096  # elements of a one-dimensional loop that are one unit


@dataclass(frozen=True)
class Nest:
    """A loop nest over collapsed axes: the unit index is decoded into the outer ones, the last one is a vector loop."""

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
    """Lets that split the unit index into one index an axis, the last axis fastest."""
    if len(sizes) == 1:
        return [Let(names[0], Index(unit))]
    lets: list[Let] = []
    rest: Expr = Index(unit)
    for i in range(len(sizes) - 1, 0, -1):
        extent = builder.arg(f"n_{names[i]}", sizes[i])
        lets.append(Let(names[i], Apply("rem", (rest, extent), I64)))
        quotient = Let(f"{names[i]}_q", Apply("quot", (rest, extent), I64))
        lets.append(quotient)
        rest = Ref(quotient.name, I64)
    lets.append(Let(names[0], rest))
    return lets


def places(builder: LoopBuilder, nest: Nest, count: int) -> list[tuple[tuple[Expr, int | Arg], ...]]:
    """The address terms of each operand at the current indices of a nest."""
    last = len(nest.sizes) - 1
    chunked = len(nest.sizes) == 1
    found = []
    for operand in range(count):
        terms: list[tuple[Expr, int | Arg]] = []
        for axis, name in enumerate(nest.names):
            stride = builder.stride(operand, name, nest.strides[operand][axis], unit=axis == last)
            if stride != 0:
                inner = axis == last or chunked
                terms.append((Index("j") if inner else Ref(name, I64), stride))
        found.append(tuple(terms))
    return found


@dataclass(frozen=True)
class Elements:
    """What the body of `map_elements` sees: the element at hand of each operand, and its indices."""

    builder: LoopBuilder
    nest: Nest
    at: list[tuple[tuple[Expr, int | Arg], ...]]

    def load(self, i: int, *terms: tuple[Expr, int | Arg]) -> Expr:
        """The element of read i, moved by further address terms if given."""
        return widened(Load(i, self.at[i] + terms, self.builder.params[i].dtype))

    def index(self, axis: int) -> Expr:
        """The index on an axis of the shape; the axis must be kept."""
        where = next(i for i, merged in enumerate(self.nest.axes) if axis in merged)
        return Index("j") if where == len(self.nest.sizes) - 1 else Ref(self.nest.names[where], I64)

    def arg(self, name: str, size: Size) -> Arg:
        """A run-time integer."""
        return self.builder.arg(name, size)


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
    """A kernel that computes every element of `writes` from those of `reads` (broadcast to `shape`) at the same index.

    `body` gives statements, and one expression a write; axes in `keep` are not merged with others.
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
    stmts, values = body(Elements(builder, nest, at))
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


def widened(load: Expr) -> Expr:
    """A load in the type that arithmetic uses."""
    return cast(load, load.dtype.compute)


def cast(expr: Expr, to: DType) -> Expr:
    """`expr` in another type; nothing where it has it."""
    return expr if expr.dtype is to else Apply("cast", (expr,), to)


# -- barriers ---------------------------------------------------------------------------------------------------------
def place_barriers(program: Program) -> None:
    """A barrier wherever the next launch touches what launches since the last one wrote, or writes what they read."""
    read: set[str] = set()
    written: set[str] = set()
    for i, launch in enumerate(program.launches):
        reads = {v.buffer for v in launch.views(written=False)}
        writes = {v.buffer for v in launch.views(written=True)}
        if i and (reads & written or writes & (read | written)):
            program.launches[i - 1] = replace(program.launches[i - 1], barrier=True)
            read, written = set(), set()
        read |= reads
        written |= writes


def schedule(graph: Graph, target: Target, *, notes: Mapping[str, str] | None = None) -> Program:
    """The program of an optimised MIR graph."""
    import rlx.lir.forms  # noqa: F401  fills the table of loop forms

    return Scheduler(graph, target, notes or {}).run()

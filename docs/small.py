"""A whole compiler on one page: from `softmax(x @ w)` in Python to machine code.

Read it from top to bottom; each part needs only the parts above it. It is rlx in miniature and shares no code with it:
only NumPy and llvmlite are imported. At the end of each part, "In rlx" says what the real one does differently, and in
which file.

    1. graphs      what is computed: nodes, made by calling ops           Node, apply
    2. ops         the meaning of each op, declared once                  OPS
    3. meaning     running a graph in NumPy: slow, and always right       evaluate
    4. passes      the same meaning with less work                        fold, simplify, share
    5. loops       how it is computed: loops over elements of memory      schedule, merge
    6. LLVM        the loops in the language of a code generator          llvm_text
    7. running     machine code, called with arrays                       compile

`python docs/small.py` follows one expression through all of it.
"""

from __future__ import annotations

import ctypes
import itertools
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import llvmlite.binding as llvm
import numpy as np

# -- 1. Graphs --------------------------------------------------------------------------------------------------------
# A graph says what is computed, not how. A node is an op applied to other nodes; the node that it all ends in stands
# for the whole graph. Every element is an f32. A size may be a name: it is known only when the program runs, and the
# machine code takes it as an argument, so that no new length is ever a new compilation.
Size = int | str
Shape = tuple[Size, ...]
Array = np.ndarray


@dataclass(frozen=True, eq=False)
class Node:
    """One op applied to other nodes. Nodes never change; a pass makes new ones."""

    op: str
    operands: tuple[Node, ...]
    shape: Shape
    name: str = ""  # of an input
    value: float = 0.0  # of a constant

    def __add__(self, other: Node | float) -> Node:
        return apply("add", self, other)

    def __sub__(self, other: Node | float) -> Node:
        return apply("sub", self, other)

    def __mul__(self, other: Node | float) -> Node:
        return apply("mul", self, other)

    def __truediv__(self, other: Node | float) -> Node:
        return apply("div", self, other)

    def __matmul__(self, other: Node) -> Node:
        return apply("matmul", self, other)

    def __str__(self) -> str:
        return graph_text(self)


def arg(name: str, *shape: Size) -> Node:
    """An array that is given when the program runs."""
    if not name.isidentifier() or name == "output":
        raise ValueError(f"arg: {name!r} cannot be the name of an input")
    return Node("input", (), shape, name=name)


def const(value: float) -> Node:
    """A number that is part of the program."""
    return Node("const", (), (), value=float(value))


def apply(op: str, *operands: Node | float) -> Node:
    """The op applied to operands. Its shape is inferred here, so a mistake is found where it is made."""
    nodes = tuple(o if isinstance(o, Node) else const(o) for o in operands)
    return Node(op, nodes, OPS[op].rule(*(n.shape for n in nodes)))


def walk(root: Node) -> list[Node]:
    """All nodes that `root` needs, operands before their readers."""
    order: dict[Node, None] = {}

    def visit(node: Node) -> None:
        if node not in order:
            for operand in node.operands:
                visit(operand)
            order[node] = None

    visit(root)
    return list(order)


def graph_text(root: Node) -> str:
    """One line a node."""
    number = {node: i for i, node in enumerate(walk(root))}
    lines = []
    for node, i in number.items():
        inside = node.name or (
            repr(node.value) if node.op == "const" else ", ".join(f"%{number[o]}" for o in node.operands)
        )
        lines.append(f"%{i} = {node.op}({inside}) : f32[{', '.join(map(str, node.shape))}]")
    return "\n".join(lines)


# In rlx: nodes live in an append-only `Graph` (src/rlx/ir/graph.py), have element types, attributes, several results,
# and remember the source line that made them. Sizes are expressions such as `batch*seq` (src/rlx/types.py).


# -- 2. Ops -----------------------------------------------------------------------------------------------------------
# An op is declared once: the rule for its shape, its meaning in NumPy, and, if it works element by element, the LLVM
# instruction for one element. Nothing else in this file knows an op by its name, except the three that are not
# elementwise: they need loops of their own.
def broadcast(*shapes: Shape) -> Shape:
    """NumPy's rule: shapes are aligned at the right, and a size of 1 is repeated. A name is never taken for 1."""
    rank = max(map(len, shapes))
    result: list[Size] = []
    for sizes in zip(*((1,) * (rank - len(s)) + s for s in shapes), strict=True):
        others = {s for s in sizes if s != 1}
        if len(others) > 1:
            raise ValueError(f"broadcast: sizes differ, {' and '.join(map(str, sizes))}")
        result.append(others.pop() if others else 1)
    return tuple(result)


def row(x: Shape) -> Shape:
    """The shape of a reduction over the last axis, which stays with size 1."""
    if not x:
        raise ValueError("reduction: there is no axis to reduce")
    return (*x[:-1], 1)


def product(a: Shape, b: Shape) -> Shape:
    """[..., k] by [k, n] gives [..., n]."""
    if len(b) != 2 or not a or a[-1] != b[0]:
        raise ValueError(f"matmul: {list(a)} by {list(b)} does not fit")
    return (*a[:-1], b[1])


@dataclass(frozen=True)
class Op:
    """All that is known of an op."""

    rule: Callable[..., Shape]
    meaning: Callable[..., Array]
    instruction: str = ""  # for one element; {} are the operands


OPS = {
    "add": Op(broadcast, np.add, "fadd float {}, {}"),
    "sub": Op(broadcast, np.subtract, "fsub float {}, {}"),
    "mul": Op(broadcast, np.multiply, "fmul float {}, {}"),
    "div": Op(broadcast, np.divide, "fdiv float {}, {}"),
    "maximum": Op(broadcast, np.maximum, "call float @llvm.maximum.f32(float {}, float {})"),
    "exp": Op(broadcast, np.exp, "call float @llvm.exp.f32(float {})"),
    "max": Op(row, lambda x: x.max(-1, keepdims=True)),
    "sum": Op(row, lambda x: x.sum(-1, keepdims=True)),
    "matmul": Op(product, np.matmul),
}
REDUCTIONS = {"max": ("maximum", -np.inf), "sum": ("add", 0.0)}  # the op that combines, and where it starts


def is_elementwise(node: Node) -> bool:
    return node.op in OPS and bool(OPS[node.op].instruction)


def exp(x: Node) -> Node:
    return apply("exp", x)


def relu(x: Node) -> Node:
    return apply("maximum", x, 0.0)


def softmax(x: Node) -> Node:
    """Composed of other ops; the largest element is taken off first, so that no exp overflows."""
    powers = exp(x - apply("max", x))
    return powers / apply("sum", powers)


# In rlx: src/rlx/ops has one file a group of ops, and the signature of a type rule is the schema of its op. `rlx ops
# softmax` shows where everything about an op is. A softmax is an op of its own there, with one loop for all of it.


# -- 3. Meaning -------------------------------------------------------------------------------------------------------
def evaluate(root: Node, inputs: Mapping[str, Array]) -> Array:
    """The graph in NumPy, node by node. Whatever the compiler makes of the graph has to agree with this."""
    values: dict[Node, Array] = {}
    for node in walk(root):
        match node.op:
            case "input":
                values[node] = np.asarray(inputs[node.name], np.float32)
            case "const":
                values[node] = np.float32(node.value)
            case _:
                values[node] = OPS[node.op].meaning(*(values[o] for o in node.operands))
    return values[root]


# In rlx: this is the device called "reference" (src/rlx/ir/evaluate.py). Tests compare it with oracles from outside.


# -- 4. Passes --------------------------------------------------------------------------------------------------------
# A pass is a function from graph to graph that keeps the meaning. Dead code needs no pass: what the last node does not
# need is never walked.
def rewrite(root: Node, change: Callable[[Node], Node]) -> Node:
    """The graph again from its leaves up, every node replaced by what `change` makes of it."""
    new: dict[Node, Node] = {}
    for node in walk(root):
        operands = tuple(new[o] for o in node.operands)
        new[node] = change(node if operands == node.operands else replace(node, operands=operands))
    return new[root]


def fold(root: Node) -> Node:
    """Compute now what depends on constants alone."""

    def change(node: Node) -> Node:
        if not node.operands or any(o.op != "const" for o in node.operands):
            return node
        return const(OPS[node.op].meaning(*(np.float32(o.value) for o in node.operands)))

    return rewrite(root, change)


# Graphs that are equal to the X inside them. `X + 0` is not among them: where x is -0.0 it gives 0.0.
X = Node("any", (), ())
EQUAL_TO_X = [X * 1.0, X / 1.0, X - 0.0]


def simplify(root: Node) -> Node:
    """Replace what looks like one of the graphs above by what stands in the place of X."""

    def matches(pattern: Node, node: Node, found: list[Node]) -> bool:
        if pattern is X:
            found.append(node)
            return True
        if (pattern.op, str(pattern.value)) != (node.op, str(node.value)):
            return False
        return all(matches(p, n, found) for p, n in zip(pattern.operands, node.operands, strict=True))

    def change(node: Node) -> Node:
        found: list[Node] = []
        return found[-1] if any(matches(pattern, node, found) for pattern in EQUAL_TO_X) else node

    return rewrite(root, change)


def share(root: Node) -> Node:
    """Compute what occurs twice only once."""
    seen: dict[tuple[object, ...], Node] = {}

    def change(node: Node) -> Node:
        # Operands were visited before, so equal ones are the same node by now; str tells 0.0 and -0.0 apart.
        key = (node.op, node.operands, node.shape, node.name, str(node.value))
        return seen.setdefault(key, node)

    return rewrite(root, change)


PASSES = (fold, simplify, share)


def optimise(root: Node) -> Node:
    for run in PASSES:
        root = run(root)
    return root


# In rlx: src/rlx/mir/pipeline.py is the list, and each pass has a file beside it. A verifier runs after every pass, and
# `rlx tour "softmax(x @ w)"` shows what each of them changed. Work that depends on weights alone moves into a program
# of its own that runs once (src/rlx/mir/hoist_weights.py).


# -- 5. Loops ---------------------------------------------------------------------------------------------------------
# Now how: loops that load elements, compute, and store. An index is a loop variable, or 0 on an axis of size 1.
Index = str | int


@dataclass(frozen=True)
class Load:
    """One element of a buffer."""

    buffer: str
    index: tuple[Index, ...]


@dataclass(frozen=True)
class Scalar:
    """An elementwise op on single numbers."""

    op: str
    operands: tuple[Expr, ...]


@dataclass(frozen=True)
class Reduce:
    """All values of an expression for var in [0, extent), combined: a loop with one running result."""

    op: str
    var: str
    extent: Size
    value: Expr


Expr = Load | Scalar | Reduce | float


@dataclass(frozen=True)
class Store:
    """Write one element of a buffer."""

    buffer: str
    index: tuple[Index, ...]
    value: Expr


@dataclass(frozen=True)
class For:
    """Statements for var in [0, extent)."""

    var: str
    extent: Size
    body: tuple[Stmt, ...]


Stmt = Store | For


@dataclass(frozen=True)
class Program:
    """Loops over buffers: the inputs, what has to be kept on the way, and last the output."""

    inputs: dict[str, Shape]
    buffers: dict[str, Shape]
    loops: tuple[Stmt, ...]

    @property
    def shapes(self) -> dict[str, Shape]:
        return self.inputs | self.buffers

    @property
    def sizes(self) -> list[str]:
        """The sizes that only a run knows."""
        return sorted({d for shape in self.inputs.values() for d in shape if isinstance(d, str)})


def stored(root: Node) -> list[Node]:
    """Fusion: the nodes that get memory. Every other one is computed inside the loops of its only reader."""
    readers: dict[Node, list[Node]] = {node: [] for node in walk(root)}
    for node in readers:
        for operand in node.operands:
            readers[operand].append(node)

    def absorbs(reader: Node, node: Node) -> bool:
        """Whether each element of `node` would still be computed just once."""
        if is_elementwise(reader):
            return reader.shape == node.shape
        return reader.op in REDUCTIONS and is_elementwise(node)

    def inside(node: Node) -> bool:
        leaf = node.op in ("input", "const")
        return node is not root and (leaf or (len(readers[node]) == 1 and absorbs(readers[node][0], node)))

    return [node for node in readers if not inside(node)]


def schedule(root: Node) -> Program:
    """One nest of loops for each node that is stored."""
    inputs = {node.name: node.shape for node in walk(root) if node.op == "input"}
    for node in walk(root):
        if node.op == "input" and node.shape != inputs[node.name]:
            raise ValueError(
                f"{node.name}: is {list(node.shape)} in one place and {list(inputs[node.name])} in another"
            )
    kept = stored(root)
    temporary = (t for i in itertools.count() if (t := f"t{i}") not in inputs)
    names = {node: "output" if node is root else next(temporary) for node in kept}
    variables = (f"k{i}" for i in itertools.count())

    def at(node: Node, index: tuple[Index, ...]) -> Expr:
        """The element of `node` at an index of its reader, which may be larger."""
        own = index[len(index) - len(node.shape) :]
        own = tuple(0 if size == 1 else i for i, size in zip(own, node.shape, strict=True))
        return Load(names[node], own) if node in names else compute(node, own)

    def compute(node: Node, index: tuple[Index, ...]) -> Expr:
        """How the element at an index comes about."""
        match node.op:
            case "input":
                return Load(node.name, index)
            case "const":
                return node.value
            case "matmul":
                a, b = node.operands
                k = next(variables)
                terms = Scalar("mul", (at(a, (*index[:-1], k)), at(b, (k, index[-1]))))
                return Reduce("sum", k, a.shape[-1], terms)
            case "max" | "sum":
                (x,) = node.operands
                k = next(variables)
                return Reduce(node.op, k, x.shape[-1], at(x, (*index[:-1], k)))
            case _:
                return Scalar(node.op, tuple(at(o, index) for o in node.operands))

    def nest(node: Node) -> Stmt:
        index = tuple(0 if size == 1 else f"i{axis}" for axis, size in enumerate(node.shape))
        stmt: Stmt = Store(names[node], index, compute(node, index))
        for i, size in reversed([*zip(index, node.shape, strict=True)]):
            stmt = For(i, size, (stmt,)) if isinstance(i, str) else stmt
        return stmt

    buffers = {names[node]: node.shape for node in kept}
    return Program(inputs, buffers, merge(tuple(nest(node) for node in kept)))


def merge(stmts: tuple[Stmt, ...]) -> tuple[Stmt, ...]:
    """Make one loop of two neighbours over the same range, so that what one writes is still near when the other reads.

    The second may read what the first writes only in the same turn of the loop.
    """
    merged: list[Stmt] = []
    for stmt in stmts:
        match merged[-1:], stmt:
            case [For(var, extent, body) as first], For(v, e, more) if (v, e) == (var, extent) and follows(first, stmt):
                merged[-1] = For(var, extent, body + more)
            case _:
                merged.append(stmt)
    return tuple(replace(s, body=merge(s.body)) if isinstance(s, For) else s for s in merged)


def follows(first: For, second: For) -> bool:
    """Whether all that `second` reads of `first` belongs to the same turn."""
    written = {s.buffer: s.index for s in parts(first) if isinstance(s, Store)}
    return all(
        load.index[written[load.buffer].index(first.var)] == first.var
        for load in parts(second)
        if isinstance(load, Load) and load.buffer in written
    )


def parts(tree: Stmt | Expr) -> Iterator[Stmt | Expr]:
    """A statement or expression and everything inside it."""
    yield tree
    match tree:
        case For():
            inside: tuple[Stmt | Expr, ...] = tree.body
        case Scalar():
            inside = tree.operands
        case Store() | Reduce():
            inside = (tree.value,)
        case _:
            inside = ()
    for part in inside:
        yield from parts(part)


def loops_text(stmts: tuple[Stmt, ...], pad: str = "") -> str:
    """Loops as they would be written by hand."""

    def place(x: Load | Store) -> str:
        return f"{x.buffer}[{', '.join(map(str, x.index))}]"

    def show(e: Expr) -> str:
        match e:
            case Load():
                return place(e)
            case Scalar():
                return f"{e.op}({', '.join(map(show, e.operands))})"
            case Reduce():
                return f"{e.op}({show(e.value)} for {e.var} in {e.extent})"
            case _:
                return repr(e)

    lines = []
    for stmt in stmts:
        match stmt:
            case For():
                lines += [f"{pad}for {stmt.var} in {stmt.extent}:", loops_text(stmt.body, pad + "  ")]
            case Store():
                lines.append(f"{pad}{place(stmt)} = {show(stmt.value)}")
    return "\n".join(lines)


# In rlx: src/rlx/lir/schedule.py gives a program of launches, each of one kernel, split over threads. Buffers whose
# lives do not overlap share memory (src/rlx/lir/memory.py). Matmul and attention are kernels of their own kind
# (src/rlx/lir/kernels.py): a sum over k for each element reads `b` in steps of a whole row, which no cache likes.


# -- 6. LLVM ----------------------------------------------------------------------------------------------------------
# LLVM's language has no loops, only jumps, and values that are assigned once. A loop variable and a running result
# change, so each gets a slot of memory; LLVM's own passes turn the slots into registers.
class Emitter:
    """Writes one function."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes
        self.slots: list[str] = []  # all at the start of the function, where LLVM looks for them
        self.lines: list[str] = []
        self.index: dict[str, str] = {}  # what each loop variable is called here
        self.numbers = itertools.count()

    def value(self, text: str) -> str:
        """A line that computes something, and its name."""
        name = f"%v{next(self.numbers)}"
        self.lines.append(f"  {name} = {text}")
        return name

    def slot(self, kind: str) -> str:
        name = f"%s{len(self.slots)}"
        self.slots.append(f"  {name} = alloca {kind}")
        return name

    def loop(self, var: str, extent: Size, body: Callable[[], None]) -> None:
        """`body` for var from 0 up to the extent: a test at the head, a jump back at the end."""
        n, counter = next(self.numbers), self.slot("i64")
        self.lines += [f"  store i64 0, ptr {counter}", f"  br label %head{n}", f"head{n}:"]
        self.index[var] = self.value(f"load i64, ptr {counter}")
        more = self.value(f"icmp slt i64 {self.index[var]}, {size_text(extent)}")
        self.lines += [f"  br i1 {more}, label %body{n}, label %done{n}", f"body{n}:"]
        body()
        after = self.value(f"add i64 {self.index[var]}, 1")
        self.lines += [f"  store i64 {after}, ptr {counter}", f"  br label %head{n}", f"done{n}:"]

    def address(self, buffer: str, index: tuple[Index, ...]) -> str:
        """Where an element lies: rows one after the other, without gaps."""
        offset = "0"
        for i, size in zip(index, self.shapes[buffer], strict=True):
            offset = self.value(f"mul i64 {offset}, {size_text(size)}")
            offset = self.value(f"add i64 {offset}, {self.index[i] if isinstance(i, str) else i}")
        return self.value(f"getelementptr float, ptr %memory.{buffer}, i64 {offset}")

    def expression(self, e: Expr) -> str:
        match e:
            case Load():
                return self.value(f"load float, ptr {self.address(e.buffer, e.index)}")
            case Scalar():
                operands = [self.expression(o) for o in e.operands]
                return self.value(OPS[e.op].instruction.format(*operands))
            case Reduce():
                return self.reduction(e)
            case _:
                return number_text(e)

    def reduction(self, e: Reduce) -> str:
        combine, start = REDUCTIONS[e.op]
        result = self.slot("float")

        def body() -> None:
            term = self.expression(e.value)
            sofar = self.value(f"load float, ptr {result}")
            self.lines.append(f"  store float {self.value(OPS[combine].instruction.format(sofar, term))}, ptr {result}")

        self.lines.append(f"  store float {number_text(start)}, ptr {result}")
        self.loop(e.var, e.extent, body)
        return self.value(f"load float, ptr {result}")

    def statements(self, stmts: tuple[Stmt, ...]) -> None:
        for stmt in stmts:
            match stmt:
                case For():
                    self.loop(stmt.var, stmt.extent, lambda body=stmt.body: self.statements(body))
                case Store():
                    value = self.expression(stmt.value)
                    self.lines.append(f"  store float {value}, ptr {self.address(stmt.buffer, stmt.index)}")


def size_text(size: Size) -> str:
    return str(size) if isinstance(size, int) else f"%size.{size}"


def number_text(value: float) -> str:
    """A float as LLVM reads it exactly: the bits of a double."""
    return f"0x{struct.unpack('<Q', struct.pack('<d', np.float32(value)))[0]:016X}"


def llvm_text(program: Program) -> str:
    """The program as one function: a pointer for each buffer, then the sizes. `noalias`: no two buffers overlap."""
    emitter = Emitter(program.shapes)
    emitter.statements(program.loops)
    arguments = [f"ptr noalias %memory.{name}" for name in program.shapes] + [
        f"i64 %size.{name}" for name in program.sizes
    ]
    head = "declare float @llvm.exp.f32(float)\ndeclare float @llvm.maximum.f32(float, float)"
    body = "\n".join([*emitter.slots, *emitter.lines, "  ret void"])
    return f"{head}\n\ndefine void @run({', '.join(arguments)}) {{\n{body}\n}}\n"


# In rlx: src/rlx/backends/cpu has an emitter for each kind of kernel. They write vectors themselves, keep a tile of the
# sums of a matmul in registers, and bring their own exp (src/rlx/backends/cpu/math.py): here LLVM calls the C library.


# -- 7. Running -------------------------------------------------------------------------------------------------------
llvm.initialize_native_target()
llvm.initialize_native_asmprinter()


def optimised(text: str) -> llvm.ModuleRef:
    """The module after LLVM's own passes for this machine."""
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3)
    module = llvm.parse_assembly(text)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return module


class Compiled:
    """Machine code for a graph. Call it with an array for each input."""

    def __init__(self, root: Node) -> None:
        self.program = schedule(optimise(root))
        self.text = llvm_text(self.program)
        self._linker = llvm.create_lljit_compiler()
        library = llvm.JITLibraryBuilder().add_ir(str(optimised(self.text))).add_current_process()
        self._loaded = library.export_symbol("run").link(self._linker, "program")
        kinds = [ctypes.c_void_p] * len(self.program.shapes) + [ctypes.c_int64] * len(self.program.sizes)
        self._run = ctypes.CFUNCTYPE(None, *kinds)(self._loaded["run"])

    def __call__(self, **arrays: Array) -> Array:
        if arrays.keys() != self.program.inputs.keys():
            raise ValueError(f"run: expected {', '.join(self.program.inputs)}, found {', '.join(arrays) or 'nothing'}")
        given = {name: np.ascontiguousarray(arrays[name], np.float32) for name in self.program.inputs}
        sizes = bind(self.program.inputs, given)
        made = {
            name: np.empty([sizes.get(d, d) for d in shape], np.float32) for name, shape in self.program.buffers.items()
        }
        self._run(*(a.ctypes.data for a in (given | made).values()), *(sizes[name] for name in self.program.sizes))
        return made["output"]


def bind(shapes: Mapping[str, Shape], arrays: Mapping[str, Array]) -> dict[Size, int]:
    """The sizes of this run, read off the arrays."""
    sizes: dict[Size, int] = {}
    for name, shape in shapes.items():
        found = arrays[name].shape
        known = [sizes.setdefault(d, f) if isinstance(d, str) else d for d, f in zip(shape, found, strict=False)]
        if len(shape) != len(found) or tuple(known) != found:
            raise ValueError(f"run: {name} has shape {list(found)}, expected {list(shape)} with {sizes}")
    return sizes


def compile(root: Node) -> Compiled:
    return Compiled(root)


# In rlx: src/rlx/runtime has sessions and weights, src/rlx/backends/cpu/executable.py memory and threads; one call into
# machine code runs all launches. Kernels are kept on disk (src/rlx/backends/cache.py): most programs compile nothing.


# -- One expression through all of it ---------------------------------------------------------------------------------
def mlp() -> Node:
    """Two layers and a softmax: what a small classifier is."""
    x, w1, b1, w2, b2 = arg("x", "rows", 16), arg("w1", 16, 32), arg("b1", 32), arg("w2", 32, 10), arg("b2", 10)
    return softmax(relu(x @ w1 + b1) @ w2 + b2)


def main() -> None:
    x, w = arg("x", "rows", 16), arg("w", 16, 4)
    graph = softmax((x @ w) * (const(2.0) * 0.5))
    print(f"The graph, as it was built:\n{graph}\n")
    print(f"After the passes {', '.join(p.__name__ for p in PASSES)}:\n{optimise(graph)}\n")
    compiled = compile(graph)
    print(f"As loops:\n{loops_text(compiled.program.loops)}\n")
    head, body = compiled.text.index("head0:"), compiled.text.index("body0:")
    print(f"As LLVM text, where the first loop begins:\n{compiled.text[head:body]}")
    rng = np.random.default_rng(0)
    for rows in (1, 5, 1000):
        arrays = {"x": rng.standard_normal((rows, 16)), "w": rng.standard_normal((16, 4))}
        error = np.abs(compiled(**arrays) - evaluate(graph, arrays)).max()
        print(f"{rows:4} rows, the same machine code: largest difference to NumPy {error:.1e}")


if __name__ == "__main__":
    main()

"""A whole compiler on one page: from `softmax(x @ w)` in Python to machine code.

Read it from top to bottom; each part needs only the parts above it. It is rlx in miniature and shares no code with it:
only NumPy and llvmlite are imported. At the head of each part, "In rlx" says what the real one does differently, and
in which file.

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
import functools
import itertools
import struct
from collections import namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import llvmlite.binding as llvm
import numpy as np

# -- 1. Graphs --------------------------------------------------------------------------------------------------------
# A graph says what is computed, not how. A node is an op applied to other nodes; the node that it all ends in stands
# for the whole graph. Every element is an f32. A size may be a name: it is known only when the program runs, and the
# machine code takes it as an argument, so that no new length is ever a new compilation.
# In rlx: nodes live in an append-only `Graph` (src/rlx/ir/graph.py), have element types, attributes, several results,
# and remember the source line that made them. Sizes are expressions such as `batch*seq` (src/rlx/dims.py).
Size = int | str
Shape = tuple[Size, ...]
Array = np.ndarray
const = lambda value: Node("const", (), (), value=float(value))  # a number that is part of the program


@dataclass(frozen=True, eq=False)
class Node:
    """One op applied to other nodes. Nodes never change; a pass makes new ones."""

    op: str
    operands: tuple[Node, ...]
    shape: Shape
    name: str = ""  # of an input
    value: float = 0.0  # of a constant

    __add__ = lambda self, other: apply("add", self, other)
    __sub__ = lambda self, other: apply("sub", self, other)
    __mul__ = lambda self, other: apply("mul", self, other)
    __truediv__ = lambda self, other: apply("div", self, other)
    __matmul__ = lambda self, other: apply("matmul", self, other)

    def __str__(self) -> str:
        """The graph that ends here, one line per node."""
        number = {node: i for i, node in enumerate(walk(self))}
        lines = []
        for node, i in number.items():
            operands = ", ".join(f"%{number[o]}" for o in node.operands)
            inside = node.name or (repr(node.value) if node.op == "const" else operands)
            lines.append(f"%{i} = {node.op}({inside}) : f32[{', '.join(map(str, node.shape))}]")
        return "\n".join(lines)


def arg(name: str, *shape: Size) -> Node:
    """An array that is given when the program runs."""
    if not name.isidentifier() or name == "output":
        raise ValueError(f"arg: {name!r} cannot be the name of an input")
    return Node("input", (), shape, name=name)


def apply(op: str, *operands: Node | float) -> Node:
    """The op applied to operands. Its shape is inferred here, so a mistake is found where it is made."""
    nodes = tuple(o if isinstance(o, Node) else const(o) for o in operands)
    return Node(op, nodes, OPS[op].rule(*(n.shape for n in nodes)))


def walk(root: Node, order: dict[Node, None] | None = None) -> dict[Node, None]:
    """All nodes that `root` needs, operands before their readers."""
    order = {} if order is None else order
    if root not in order:
        for operand in root.operands:
            walk(operand, order)
        order[root] = None
    return order


# -- 2. Ops -----------------------------------------------------------------------------------------------------------
# An op is declared once: the rule for its shape, its meaning in NumPy, and, if it works element by element, the LLVM
# instruction for one element. Nothing else in this file knows an op by its name, except the three that are not
# elementwise: they need loops of their own.
# In rlx: src/rlx/ops has one file per group of ops, and the signature of a type rule is the schema of its op. `rlx ops
# softmax` shows where everything about an op is. A softmax is an op of its own there, with one loop for all of it.
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


class Op(NamedTuple):  # all that is known of an op
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
is_elementwise = lambda node: node.op in OPS and OPS[node.op].instruction != ""
exp = lambda x: apply("exp", x)
relu = lambda x: apply("maximum", x, 0.0)


def softmax(x: Node) -> Node:
    """Composed of other ops; the largest element is taken off first, so that no exp overflows."""
    powers = exp(x - apply("max", x))
    return powers / apply("sum", powers)


# -- 3. Meaning -------------------------------------------------------------------------------------------------------
# In rlx: this is the device called "reference" (src/rlx/ir/evaluate.py). Tests compare it with oracles from outside.
def evaluate(root: Node, inputs: Mapping[str, Array]) -> Array:
    """The graph in NumPy, node by node. Whatever the compiler makes of the graph has to agree with this."""
    values: dict[Node, Array] = {}
    for node in walk(root):
        if node.op in OPS:
            values[node] = OPS[node.op].meaning(*(values[o] for o in node.operands))
        else:
            values[node] = np.asarray(node.value if node.op == "const" else inputs[node.name], np.float32)
    return values[root]


# -- 4. Passes --------------------------------------------------------------------------------------------------------
# A pass is a function from graph to graph that keeps the meaning. Dead code needs no pass: what the last node does not
# need is never walked.
# In rlx: src/rlx/mir/pipeline.py is the list, and each pass has a file next to it. A verifier runs after every pass,
# and `rlx tour "softmax(x @ w)"` shows what each of them changed. Work that depends on weights alone moves into a
# program of its own that runs once (src/rlx/mir/hoist_weights.py).
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
        known = node.operands and all(o.op == "const" for o in node.operands)
        return const(OPS[node.op].meaning(*(np.float32(o.value) for o in node.operands))) if known else node

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
    # Operands were visited before, so equal ones are the same node by now; str tells 0.0 and -0.0 apart.
    key = lambda node: (node.op, node.operands, node.shape, node.name, str(node.value))
    return rewrite(root, lambda node: seen.setdefault(key(node), node))


PASSES = (fold, simplify, share)
optimise = lambda root: functools.reduce(lambda graph, run: run(graph), PASSES, root)


# -- 5. Loops ---------------------------------------------------------------------------------------------------------
# Now how: loops that load elements, compute, and store. An index is a loop variable, or 0 on an axis of size 1.
# In rlx: src/rlx/lir/schedule.py gives a program of launches, each of one kernel, split over threads. Buffers whose
# lives do not overlap share memory (src/rlx/lir/memory.py). Matmul and attention are kernels of their own kind
# (src/rlx/lir/kernels.py): a sum over k for each element reads `b` in steps of a whole row, which no cache likes.
Index = str | int
Load = namedtuple("Load", "buffer index")  # one element of a buffer
Scalar = namedtuple("Scalar", "op operands")  # an elementwise op on single numbers
Reduce = namedtuple("Reduce", "op var extent value")  # all values for var in [0, extent), combined into one result
Expr = Load | Scalar | Reduce | float
Store = namedtuple("Store", "buffer index value")  # write one element of a buffer
For = namedtuple("For", "var extent body")  # statements for var in [0, extent)
Stmt = Store | For


class Program(NamedTuple):  # loops over buffers: the inputs, what has to be kept on the way, and last the output
    inputs: dict[str, Shape]
    buffers: dict[str, Shape]
    loops: tuple[Stmt, ...]
    shapes = property(lambda self: self.inputs | self.buffers)
    sizes = property(lambda self: sorted({d for shape in self.inputs.values() for d in shape if isinstance(d, str)}))


def stored(root: Node) -> list[Node]:
    """Fusion: the nodes that get memory. Every other one is computed inside the loops of its only reader."""
    readers: dict[Node, list[Node]] = {node: [] for node in walk(root)}
    for node in readers:
        for operand in node.operands:
            readers[operand].append(node)

    def inside(node: Node) -> bool:
        """Whether each element would still be computed just once; leaves are not computed at all."""
        if node.op in ("input", "const") or len(readers[node]) != 1:
            return node is not root and node.op in ("input", "const")
        (reader,) = readers[node]
        if is_elementwise(reader):
            return reader.shape == node.shape
        return reader.op in REDUCTIONS and is_elementwise(node)

    return [node for node in readers if not inside(node)]


def schedule(root: Node) -> Program:
    """One nest of loops for each node that is stored."""
    inputs = {node.name: node.shape for node in walk(root) if node.op == "input"}
    for node in walk(root):
        if (first := inputs.get(node.name, node.shape)) != node.shape:
            raise ValueError(f"{node.name}: is {list(node.shape)} in one place and {list(first)} in another")
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
        if node.op in ("input", "const"):
            return Load(node.name, index) if node.op == "input" else node.value
        if is_elementwise(node):
            return Scalar(node.op, tuple(at(o, index) for o in node.operands))
        k, first = next(variables), node.operands[0]
        value = at(first, (*index[:-1], k))
        if node.op == "matmul":
            value = Scalar("mul", (value, at(node.operands[1], (k, index[-1]))))
        return Reduce(node.op if node.op in REDUCTIONS else "sum", k, first.shape[-1], value)

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
    return tuple(s._replace(body=merge(s.body)) if isinstance(s, For) else s for s in merged)


def follows(first: For, second: For) -> bool:
    """Whether all that `second` reads of `first` belongs to the same turn."""
    written = {s.buffer: s.index for s in parts(first) if isinstance(s, Store)}
    loads = (x for x in parts(second) if isinstance(x, Load) and x.buffer in written)
    return all(x.index[written[x.buffer].index(first.var)] == first.var for x in loads)


def parts(tree: Stmt | Expr) -> Iterator[Stmt | Expr]:
    """A statement or expression and everything inside it."""
    yield tree
    for part in tree if isinstance(tree, tuple) else ():
        yield from parts(part)


def loops_text(stmts: tuple[Stmt, ...], pad: str = "") -> str:
    """Loops as they would be written by hand."""

    def show(e: Expr | Store) -> str:
        match e:
            case Load(buffer, index) | Store(buffer, index, _):
                return f"{buffer}[{', '.join(map(str, index))}]"
            case Scalar(op, operands):
                return f"{op}({', '.join(map(show, operands))})"
            case Reduce(op, var, extent, value):
                return f"{op}({show(value)} for {var} in {extent})"
        return repr(e)

    lines = []
    for stmt in stmts:
        if isinstance(stmt, For):
            lines += [f"{pad}for {stmt.var} in {stmt.extent}:", loops_text(stmt.body, pad + "  ")]
        else:
            lines.append(f"{pad}{show(stmt)} = {show(stmt.value)}")
    return "\n".join(lines)


# -- 6. LLVM ----------------------------------------------------------------------------------------------------------
# LLVM's language has no loops, only jumps, and values that are assigned once. A loop variable and a running result
# change, so each gets a slot of memory; LLVM's own passes turn the slots into registers.
# In rlx: src/rlx/backends/cpu has an emitter for each kind of kernel. They write vectors themselves, keep a tile of the
# sums of a matmul in registers, and bring their own exp (src/rlx/backends/cpu/math): here LLVM calls the C library.
class Emitter:
    """Writes one function."""

    def __init__(self, shapes: Mapping[str, Shape]) -> None:
        self.shapes = shapes
        self.slots: dict[str, str] = {}  # name -> kind; all at the start of the function, where LLVM looks for them
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
        self.slots[name] = kind
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
        if buffer in self.slots:
            return buffer
        offset = "0"
        for i, size in zip(index, self.shapes[buffer], strict=True):
            offset = self.value(f"mul i64 {offset}, {size_text(size)}")
            offset = self.value(f"add i64 {offset}, {self.index[i] if isinstance(i, str) else i}")
        return self.value(f"getelementptr float, ptr %memory.{buffer}, i64 {offset}")

    def expression(self, e: Expr) -> str:
        match e:
            case Load(buffer, index):
                return self.value(f"load float, ptr {self.address(buffer, index)}")
            case Scalar(op, operands):
                return self.value(OPS[op].instruction.format(*map(self.expression, operands)))
            case Reduce(op, var, extent, value):
                (combine, start), result = REDUCTIONS[op], self.slot("float")
                sofar = Scalar(combine, (Load(result, ()), value))  # a slot is a buffer of one element
                self.statements((Store(result, (), start), For(var, extent, (Store(result, (), sofar),))))
                return self.expression(Load(result, ()))
        return number_text(e)

    def statements(self, stmts: tuple[Stmt, ...]) -> None:
        for stmt in stmts:
            if isinstance(stmt, For):
                self.loop(stmt.var, stmt.extent, lambda body=stmt.body: self.statements(body))
            else:
                value = self.expression(stmt.value)
                self.lines.append(f"  store float {value}, ptr {self.address(stmt.buffer, stmt.index)}")


size_text = lambda size: str(size) if isinstance(size, int) else f"%size.{size}"
number_text = lambda value: "0x" + struct.pack(">d", np.float32(value)).hex()  # exactly: the bits of a double


def llvm_text(program: Program) -> str:
    """The program as one function: a pointer for each buffer, then the sizes. `noalias`: no two buffers overlap."""
    emitter = Emitter(program.shapes)
    emitter.statements(program.loops)
    arguments = [f"ptr noalias %memory.{name}" for name in program.shapes]
    arguments += [f"i64 %size.{name}" for name in program.sizes]
    head = "declare float @llvm.exp.f32(float)\ndeclare float @llvm.maximum.f32(float, float)"
    slots = [f"  {name} = alloca {kind}" for name, kind in emitter.slots.items()]
    body = "\n".join([*slots, *emitter.lines, "  ret void"])
    return f"{head}\n\ndefine void @run({', '.join(arguments)}) {{\n{body}\n}}\n"


# -- 7. Running -------------------------------------------------------------------------------------------------------
# In rlx: src/rlx/runtime has sessions and weights, src/rlx/backends/cpu/executable.py memory and threads; one call into
# machine code runs all launches. Kernels are kept on disk (backends/cache_folder.py): most programs compile nothing.
def optimised(text: str) -> llvm.ModuleRef:
    """The module after LLVM's own passes for this machine."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    cpu, features = llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten()
    machine = llvm.Target.from_default_triple().create_target_machine(cpu=cpu, features=features, opt=3)
    module = llvm.parse_assembly(text)
    module.verify()
    builder = llvm.create_pass_builder(machine, llvm.create_pipeline_tuning_options(speed_level=3))
    builder.getModulePassManager().run(module, builder)
    return module


class compile:
    """Machine code for a graph. Call it with an array for each input."""

    def __init__(self, root: Node) -> None:
        self.program = schedule(optimise(root))
        self.text = llvm_text(self.program)
        library = llvm.JITLibraryBuilder().add_ir(str(optimised(self.text))).add_current_process()
        self._linker = llvm.create_lljit_compiler()
        self._loaded = library.export_symbol("run").link(self._linker, "program")
        kinds = [ctypes.c_void_p] * len(self.program.shapes) + [ctypes.c_int64] * len(self.program.sizes)
        self._run = ctypes.CFUNCTYPE(None, *kinds)(self._loaded["run"])

    def __call__(self, **arrays: Array) -> Array:
        if arrays.keys() != self.program.inputs.keys():
            raise ValueError(f"run: expected {', '.join(self.program.inputs)}, found {', '.join(arrays) or 'nothing'}")
        given = {name: np.ascontiguousarray(arrays[name], np.float32) for name in self.program.inputs}
        sizes = bind(self.program.inputs, given)
        buffers = self.program.buffers.items()
        made = {name: np.empty([sizes.get(d, d) for d in shape], np.float32) for name, shape in buffers}
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

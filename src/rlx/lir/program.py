"""LIR programs: buffers, kernels, launches. Everything a backend needs to run a graph, and readable as text.

Sizes are expressions over run-time symbols; buffer addresses are data. `Program` is target-specific (panel widths) but
knows no machine code.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from rlx.dtypes import I16
from rlx.ir.graph import Array
from rlx.lir.blocks import units_of
from rlx.lir.kernels import Kernel, MatmulKernel
from rlx.lir.loops import Let, LoopKernel, Ref, statements, walk
from rlx.lir.views import View
from rlx.types import Size, TensorType, contiguous_strides

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
        """All of it, without gaps; packed blocks are seen as the 16-bit units they are made of."""
        if self.type.dtype.is_packed:
            *lead, blocks = self.type.array_shape
            shape = (*lead, blocks * units_of(self.type.dtype))
            return View(self.name, I16, shape, contiguous_strides(shape))
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

    def views(self, written: bool | None = None) -> list[View]:
        """Operand views; only those the kernel writes, or only those it reads, if asked."""
        wanted = {w for w, is_written in operand_words(self.kernel).items() if written is None or is_written == written}
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


def operand_words(kernel: Kernel) -> dict[str, bool]:
    """The words of a kernel that are operand addresses, and whether the kernel writes there."""
    match kernel.kind:
        case "loops":
            return {p.name: p.written for p in kernel.params}  # type: ignore[union-attr]
        case "matmul":
            assert isinstance(kernel, MatmulKernel)
            return {"a": False, "b": False} | {f"ptr{i}": o.written for i, o in enumerate(kernel.operands)}
        case _:
            return {"q": False, "k": False, "v": False, "out": True, "mask": False, "positions": False}


@dataclass(frozen=True, slots=True)
class Assertion:
    """How two sizes must relate at run time, because an op says so."""

    a: Size
    b: Size
    relation: str  # == or <=
    op: str
    where: str

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

    def text(self, *, kernels: bool = True) -> str:
        """The program as text: interface, buffers, launches, then the kernels."""
        lines = [f"program @{self.name}({', '.join(self.symbols)})  # {self.target}"]
        for symbol, limit in sorted(self.limits.items()):
            lines.append(f"  limit {symbol} <= {limit}")
        for buffer in self.buffers.values():
            note = f" as {buffer.note}" if buffer.note else ""
            value = f" = {buffer.value!r}" if buffer.value is not None else ""
            lines.append(f"  {buffer.kind} {buffer.name}: {buffer.type}{note}{value}")
        for a in self.assertions:
            lines.append(f"  assert {a.a} {a.relation} {a.b}  # {a.where}")
        for launch in self.launches:
            lines.append("  " + launch_text(launch))
        if kernels:
            for kernel in self.kernels().values():
                lines += ["", kernel.text()]
        return "\n".join(lines)


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

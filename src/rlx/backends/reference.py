"""The reference backend: evaluates MIR graphs in NumPy, one op at a time. The oracle for every other backend."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Backend, Executable, InputSpec, Key
from rlx.backends.reports import Trace
from rlx.errors import CapabilityError
from rlx.free_memory import require
from rlx.target import Target

if TYPE_CHECKING:
    from rlx.ir.graph import Graph
    from rlx.lir.kernels import Kernel
    from rlx.lir.program import Program

REFERENCE = Target("reference", device="reference")


class ReferenceExecutable(Executable):
    """Evaluates a MIR graph in NumPy."""

    threads = 1

    target = REFERENCE

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self.symbols = tuple(graph.symbols())
        self.reads = tuple(n.attrs["name"] for n in graph.params)
        self._names = [n.attrs["name"] for n in graph.inputs]
        self._weights: Mapping[str, Array] = {}

    @property
    def program(self) -> Program:
        raise CapabilityError("program: the reference device runs graphs op by op", hint="compile for device cpu")

    @property
    def weights(self) -> Mapping[str, Array]:
        return self._weights

    def bind(self, weights: Mapping[str, Array]) -> None:
        self._weights = dict(weights)

    def run(self, key: Key, inputs: Sequence[Array]) -> list[Array]:
        from rlx.ir import evaluate

        leaves = {**self._weights, **dict(zip(self._names, inputs, strict=True))}
        outputs = evaluate.run(self._graph, leaves, dict(zip(self.symbols, key, strict=True)))
        require(f"graph {self._graph.name!r}: its outputs", sum(a.nbytes for a in outputs), "smaller inputs")
        return [np.array(a, order="C") for a in outputs]

    def trace(self, key: Key, inputs: Sequence[Array]) -> tuple[list[Array], Trace]:
        raise CapabilityError("trace: the reference device has no launches to show", hint="compile for device cpu")


class ReferenceBackend(Backend):
    """Evaluates graphs in NumPy, one op at a time."""

    name = "reference"
    interprets = True

    def targets(self) -> tuple[Target, ...]:
        return (REFERENCE,)

    def target(self, name: str | None = None) -> Target:
        return REFERENCE  # whatever target a program was built for

    def accepts(self, target: Target) -> bool:
        return True  # the oracle for every device

    def identity(self, target: Target) -> str:
        return f"numpy={np.__version__}"

    def interpret(self, graph: Graph) -> Executable:
        return ReferenceExecutable(graph)

    def compile(
        self, program: Program, target: Target, *, threads: int | None = None,
        inputs: Sequence[InputSpec] | None = None, long_lived: bool = False,
    ) -> Executable:  # fmt: skip
        raise CapabilityError("compile: the reference device runs graphs, not programs", hint="compile for device cpu")

    def kernel_text(self, kernels: Iterable[Kernel], target: Target, *, assembly: bool = False) -> str:
        raise CapabilityError("inspect: the reference device has no kernels", hint="compile for device cpu")

"""Signatures: inputs, params and outputs of a compiled graph, without the graph."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from rlx.fast_dataclass import dataclass
from rlx.types import TensorType

if TYPE_CHECKING:
    from rlx.ir.graph import Graph


@dataclass(frozen=True)
class Signature:
    """Names and types of inputs (including states, which are updated in place), params and outputs."""

    name: str
    inputs: Mapping[str, TensorType]
    states: tuple[str, ...]
    params: Mapping[str, TensorType]
    outputs: tuple[TensorType, ...]
    limits: Mapping[str, int]

    @classmethod
    def of(cls, graph: Graph) -> Signature:
        return cls(
            graph.name,
            {n.attrs["name"]: n.types[0] for n in graph.inputs},
            tuple(n.attrs["name"] for n in graph.inputs if n.op == "state"),
            {n.attrs["name"]: n.types[0] for n in graph.params},
            tuple(v.type for v in graph.outputs),
            dict(graph.limits),
        )

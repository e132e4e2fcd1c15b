"""The evaluator: runs a graph node by node with each op's NumPy reference. The `reference` device, the oracle of tests."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rlx.errors import LowerError
from rlx.ir import registry
from rlx.ir.graph import Graph, Node, Value
from rlx.types import Dim, evaluate

Arrays = Mapping[str, np.ndarray[Any, Any]]


def run(graph: Graph, leaves: Arrays, binding: Mapping[str, int]) -> list[np.ndarray[Any, Any]]:
    """The outputs of the graph for arrays of its inputs and params; symbols have sizes in `binding`."""
    values: dict[Value, np.ndarray[Any, Any]] = {}
    for node in graph.nodes:
        match node.op:
            case "input" | "param":
                results: tuple[Any, ...] = (leaves[node.attrs["name"]],)
            case "const":
                results = (node.attrs["value"].data,)
            case _:
                results = apply(node, [None if o is None else values[o] for o in node.operands], binding)
        values.update(zip(node.results, results, strict=True))
    return [values[o] for o in graph.outputs]


def apply(node: Node, operands: list[Any], binding: Mapping[str, int]) -> tuple[np.ndarray[Any, Any], ...]:
    """One node: narrow floats are widened, the reference runs, results are rounded to the declared types."""
    definition = registry.get(node.op)
    if definition.reference is None:
        raise LowerError(f"{node.op}: has no NumPy reference", hint=f"add reference= in {definition.place}")
    wide = [None if a is None else widen(a) for a in operands]
    attrs = {k: bind_attr(v, binding) for k, v in node.attrs.items() if k not in ("num_heads", "head_dim")}
    if definition.takes_binding:
        attrs["binding"] = binding
    with np.errstate(all="ignore"):
        given = definition.reference(*wide, **attrs)
        results = given if isinstance(given, tuple) else (given,)
        return tuple(_round(np.asarray(r), t.dtype) for r, t in zip(results, node.types, strict=True))


def _round(array: np.ndarray[Any, Any], to: Any) -> np.ndarray[Any, Any]:
    return array if array.dtype == to.numpy else array.astype(to.numpy)


def widen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Narrow floats as f32; anything else as it is."""
    narrow = array.dtype == np.float16 or array.dtype.name == "bfloat16"
    return array.astype(np.float32) if narrow else array


def bind_attr(value: Any, binding: Mapping[str, int]) -> Any:
    """An attribute with its symbolic sizes replaced."""
    if isinstance(value, Dim):
        return evaluate(value, binding)
    if isinstance(value, tuple):
        return tuple(bind_attr(v, binding) for v in value)
    return value

"""The evaluator: runs a graph node by node with each op's NumPy reference. It is the `reference` device, the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import numpy as np

from rlx.errors import BindError, LowerError
from rlx.free_memory import ADDRESSES, SMALL, require
from rlx.ir import registry
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import LEAF, VIEW
from rlx.types import Dim, concrete, evaluate

Arrays = Mapping[str, np.ndarray[Any, Any]]
Look = Callable[[Node, Sequence[Any], Sequence[np.ndarray[Any, Any]]], None]
_look: ContextVar[Look | None] = ContextVar("look", default=None)


@contextmanager
def observe_nodes(look: Look) -> Iterator[None]:
    """Calls `look(node, operands, results)` for each node that is evaluated inside, also in bodies."""
    token = _look.set(look)
    try:
        yield
    finally:
        _look.reset(token)


def run(graph: Graph, leaves: Arrays, binding: Mapping[str, int]) -> list[np.ndarray[Any, Any]]:
    """The outputs of the graph for arrays of its inputs and params; `binding` maps symbols to sizes."""
    values: dict[Value, np.ndarray[Any, Any]] = {}
    look = _look.get()
    for node in graph.nodes:
        operands = [None if o is None else values[o] for o in node.operands]
        shapes = [concrete(t.array_shape, binding) for t in node.types]
        _check_room(graph, node, operands, shapes)
        results = results_of(node, operands, leaves, binding)
        if look is not None and node.operands:
            look(node, operands, results)
        for value, result, shape in zip(node.results, results, shapes, strict=True):
            _check_shape(value, result.shape, shape)
            values[value] = result
    return [values[o] for o in graph.outputs]


def results_of(
    node: Node, operands: list[Any], leaves: Arrays, binding: Mapping[str, int]
) -> tuple[np.ndarray[Any, Any], ...]:
    """The results of a node, including leaves."""
    match node.op:
        case "input" | "state" | "param":
            return (leaves[node.attrs["name"]],)
        case "const":
            return (node.attrs["value"].data,)
        case _:
            return apply(node, operands, binding)


def _check_room(graph: Graph, node: Node, operands: Sequence[Any], shapes: Sequence[tuple[int, ...]]) -> None:
    """Refuse a node whose results do not fit in memory. Views need none, up to NumPy's size limit."""
    needed = sum(math.prod(shape) * t.dtype.numpy.itemsize for shape, t in zip(shapes, node.types, strict=True))
    if needed <= SMALL or LEAF in node.definition.traits:
        return
    copies = node.op == "reshape" and not operands[0].flags.c_contiguous
    if VIEW not in node.definition.traits or copies or needed >= ADDRESSES:
        subject = f"graph {graph.name!r}: %{node.id} {node.op} of {node.types[0]}, shape {list(shapes[0])}"
        require(subject, needed, "smaller inputs or a smaller batch", [f"built at: {node.origin}"])


def _check_shape(value: Value, actual: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    """Raise unless the result has the declared shape."""
    if actual != wanted:
        raise BindError(f"%{value.node.id} {value.node.op}: shape is {actual}, its type {value.type} says {wanted}")


def apply(node: Node, operands: list[Any], binding: Mapping[str, int]) -> tuple[np.ndarray[Any, Any], ...]:
    """Evaluates one node: widens narrow floats, runs the reference, rounds results to the declared types."""
    definition = registry.get(node.op)
    if definition.reference is None:
        raise LowerError(f"{node.op}: has no NumPy reference", hint=f"add reference= in {definition.place}")
    if node.op == "assume_equal":
        _check_assumption(node, operands[0].shape, binding)
    wide = [None if a is None else widen(a) for a in operands]
    attrs = {k: bind_attr(v, binding) for k, v in node.attrs.items()}
    if node.op == "attention":  # these two only check shapes
        attrs = {k: v for k, v in attrs.items() if k not in ("num_heads", "head_dim")}
    if definition.takes_binding:
        attrs["binding"] = binding
    with np.errstate(all="ignore"):
        outputs = definition.reference(*wide, **attrs)
        results = outputs if isinstance(outputs, tuple) else (outputs,)
        return tuple(_round(np.asarray(r), t.dtype) for r, t in zip(results, node.types, strict=True))


def _check_assumption(node: Node, shape: tuple[int, ...], binding: Mapping[str, int]) -> None:
    """Check the sizes that the graph assumes equal, as compiled programs do."""
    assert node.operands[0] is not None
    for have, want, size in zip(node.operands[0].shape, node.types[0].shape, shape, strict=True):
        if size != evaluate(want, binding):
            where = [str(node.origin)]
            raise BindError(f"assume_equal: {have} is {size}, {want} is {evaluate(want, binding)}", notes=where)


def _round(array: np.ndarray[Any, Any], to: Any) -> np.ndarray[Any, Any]:
    return array if array.dtype == to.numpy else array.astype(to.numpy)


def widen(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Narrow floats as f32; anything else unchanged."""
    narrow = array.dtype == np.float16 or array.dtype.name == "bfloat16"
    return array.astype(np.float32) if narrow else array


def bind_attr(value: Any, binding: Mapping[str, int]) -> Any:
    """Replaces symbolic sizes in an attribute."""
    if isinstance(value, Dim):
        return evaluate(value, binding)
    if isinstance(value, tuple):
        return tuple(bind_attr(v, binding) for v in value)
    return value

"""Decompositions: the graph of simpler ops that an op's decomposition builds for given operand types."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.dtypes import dtype
from rlx.errors import LowerError, RlxError
from rlx.ir import evaluate
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import COMPOSED, HIR, SEGMENTED, OpDef, get, result_types
from rlx.types import TensorType


def has_segments(node: Node) -> bool:
    """Whether the node has segment ids; without them it has a kernel."""
    return SEGMENTED in node.definition.traits and node.operands[-1] is not None


def is_composed(node: Node) -> bool:
    """Whether the node has no kernel, only a decomposition."""
    return COMPOSED in node.definition.traits or has_segments(node)


def expand_decomposition(
    definition: OpDef,
    operands: Sequence[TensorType | None],
    attrs: Mapping[str, Any],
    decompose: Callable[..., Any] | None = None,
) -> Graph:
    """Builds an op's decomposition: one input per operand present, outputs with the types that its rule infers.

    `decompose` replaces the declared decomposition.
    """
    wanted = result_types(definition, operands, attrs)
    decompose = decompose or definition.decompose
    assert decompose is not None
    body, results = _build(definition.name, decompose, operands, attrs)
    where = f"op {definition.name}: its decomposition"
    if not all(isinstance(v, Value) and v.graph is body for v in results):
        raise LowerError(f"{where} gives {results!r}, expected values made of its operands", hint=definition.place)
    actual = tuple(v.type for v in results)
    if actual != wanted:
        have, want = ("; ".join(map(str, types)) for types in (actual, wanted))
        raise LowerError(f"{where} gives {have}, its type rule {want}", hint=definition.place)
    for node in body.nodes:
        if get(node.op).level == HIR:
            raise LowerError(f"{where} uses the HIR block {node.op}", hint="write it with MIR ops")
    return body.set_outputs(results)


def _build(
    name: str, decompose: Callable[..., Any], operands: Sequence[TensorType | None], attrs: Mapping[str, Any]
) -> tuple[Graph, tuple[Any, ...]]:
    body = Graph(name)
    values = [None if t is None else body.input(f"x{i}", t.shape, t.dtype) for i, t in enumerate(operands)]
    try:
        results = decompose(*values, **attrs)
    except RlxError as error:
        error.add_note(f"  in the decomposition of op {name}")
        raise
    return body, results if isinstance(results, tuple) else (results,)


def reference_by_parts(name: str, decompose: Callable[..., Any]) -> Callable[..., Any]:
    """The NumPy reference of an op that only has a decomposition: evaluates the ops it consists of."""

    def reference(*arrays: Any, binding: Mapping[str, int], **attrs: Any) -> Any:
        types = [None if a is None else TensorType(a.shape, dtype(a.dtype)) for a in arrays]
        body, results = _build(name, decompose, types, attrs)
        body.set_outputs(results)
        leaves = {f"x{i}": a for i, a in enumerate(arrays) if a is not None}
        try:
            return tuple(evaluate.run(body, leaves, binding))
        except RecursionError:
            raise LowerError(f"op {name}: is written with itself") from None

    return reference

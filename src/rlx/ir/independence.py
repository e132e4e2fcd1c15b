"""Batch independence of ops: when entries along the first axis do not depend on each other.

An op declares a rule with `@op(..., independent=rule)`. The rule is called with one node: `batched` says which operands
have the batch as their first axis; all results have it too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rlx.ir.value import Node
    from rlx.types import TensorType

Independence = Callable[["Node", Sequence[bool]], bool]


def batched_types(node: Node, batched: Sequence[bool]) -> list[TensorType]:
    """The types of the batched operands."""
    return [operand.type for operand, has in zip(node.operands, batched, strict=True) if has and operand is not None]


def never(node: Node, batched: Sequence[bool]) -> bool:
    """Batch entries depend on each other, or a run of the op must not be split."""
    return False


def aligned(node: Node, batched: Sequence[bool]) -> bool:
    """The batch axis is aligned in all operands: elementwise ops, which broadcast from the right."""
    return all(type_.rank == node.types[0].rank for type_ in batched_types(node, batched))


def by_rows(node: Node, batched: Sequence[bool]) -> bool:
    """The op works along the last axis of its first operand, and that is not the batch axis."""
    return batched[0] and node.types[0].rank > 1


def matrices(node: Node, batched: Sequence[bool]) -> bool:
    """A matrix product: batched rows of the left operand, or batched matrices."""
    return batched[0] and aligned(node, batched) and (not batched[1] or node.types[0].rank > 2)


def batched_matrices(node: Node, batched: Sequence[bool]) -> bool:
    """All operands are batches of matrices."""
    return all(batched) and all(type_.rank > 2 for type_ in batched_types(node, batched))


def everything(node: Node, batched: Sequence[bool]) -> bool:
    """All operands have the batch. So does the result: concatenation along it would be longer."""
    return all(batched)

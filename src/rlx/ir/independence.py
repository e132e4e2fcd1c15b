"""Batch independence as a trait of ops: when entries along the first axis do not depend on each other.

An op declares a rule with `@op(..., independent=rule)`. The rule is asked about one node: `batched` says which operands
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
    """The types of the operands that have the batch."""
    return [operand.type for operand, has in zip(node.operands, batched, strict=True) if has and operand is not None]


def never(node: Node, batched: Sequence[bool]) -> bool:
    """Entries meet, or no run of such an op is to be cut."""
    return False


def aligned(node: Node, batched: Sequence[bool]) -> bool:
    """The batch is at one place in all operands: an elementwise op, which broadcasts from the right."""
    return all(type_.rank == node.types[0].rank for type_ in batched_types(node, batched))


def by_rows(node: Node, batched: Sequence[bool]) -> bool:
    """Works along the last axis of its first operand, which is not the first one."""
    return batched[0] and node.types[0].rank > 1


def matrices(node: Node, batched: Sequence[bool]) -> bool:
    """A product: rows of the left side, or whole matrices."""
    return batched[0] and aligned(node, batched) and (not batched[1] or node.types[0].rank > 2)


def everything(node: Node, batched: Sequence[bool]) -> bool:
    """All operands have the batch. So has the result: a concatenation along it would be longer."""
    return all(batched)

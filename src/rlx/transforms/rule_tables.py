"""The tables of rules by op name, and how an op says that it has no derivative. `rules/<group>.py` fills them.

What an op needs: a `partials` (elementwise), a `vjp`, a decomposition, or a declaration that there is none. Forward
mode follows from each; an op may have a `jvp` of its own where that is shorter. `batching` says how it is vmapped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import RuleTable
from rlx.types import Size

Cotangents = Sequence[Value | None]
Pull = Callable[[Cotangents], Cotangents]  # cotangents of the results -> cotangents of the operands
_WHERE = "src/rlx/transforms/rules/{group}.py"


@dataclass(frozen=True)
class NodeCtx:
    """A node while it is differentiated: its operands and results are values of the graph under construction."""

    node: Node
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]
    wanted: tuple[bool, ...]  # operands whose derivative is asked for

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.node.attrs

    @property
    def graph(self) -> Graph:
        return self.results[0].graph

    @property
    def result(self) -> Value:
        return self.results[0]

    def operand(self, i: int) -> Value:
        """Operand number i, which is there."""
        value = self.operands[i]
        assert value is not None
        return value


@dataclass(frozen=True)
class Vmapped:
    """A node while it is vmapped: batched operands have the axis of the batch in front."""

    node: Node
    graph: Graph
    operands: tuple[Value | None, ...]
    batched: tuple[bool, ...]
    size: Size

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.node.attrs

    def operand(self, i: int) -> Value:
        """Operand number i, which is there."""
        value = self.operands[i]
        assert value is not None
        return value

    def full(self, i: int) -> Value:
        """Operand number i with the axis of the batch, repeated along it where it has none."""
        value = self.operand(i)
        return value if self.batched[i] else self.graph.one("expand", value, shape=(self.size, *value.shape))


Vjp = Callable[..., Cotangents]  # (site, *cotangents of results) -> a cotangent for each operand
Jvp = Callable[..., Cotangents]  # (site, *tangents of operands) -> a tangent for each result
Linearise = Callable[[Graph, Node, Cotangents, Sequence[bool]], tuple[Sequence[Value], Pull]]
Push = Callable[[Graph, Node, Cotangents, Cotangents], tuple[Sequence[Value], Cotangents]]
Batching = Callable[[Vmapped], Sequence[Value]]
Parts = Callable[..., "Value | tuple[Value, ...]"]

partials: RuleTable[Callable[..., Any]] = RuleTable("partial derivatives", _WHERE)
vjp: RuleTable[Vjp] = RuleTable("VJP", _WHERE)
jvp: RuleTable[Jvp] = RuleTable("JVP", _WHERE)
linearise: RuleTable[Linearise] = RuleTable("linearisation", _WHERE)  # where the gradient changes the forward pass
push: RuleTable[Push] = RuleTable("forward mode", _WHERE)  # results and tangents together
parts: RuleTable[Parts] = RuleTable("decomposition for derivatives", _WHERE)  # before an op's own decomposition
batching: RuleTable[Batching] = RuleTable("vmap rule", _WHERE)

NO_DERIVATIVE: dict[str, str] = {}  # op -> why a derivative through it is an error
NO_DERIVATIVE_WITH: dict[str, dict[str, str]] = {}  # op -> operand -> why it is an error where that is given
FLAT: dict[str, str] = {}  # op -> why its derivative is zero wherever it exists
STRAIGHT_THROUGH: dict[str, str] = {}  # op -> why its rule is not what differences would show


def no_derivative(*names: str, why: str) -> None:
    """Declare that nothing can be differentiated through these ops: asking for it is an error that says why."""
    NO_DERIVATIVE.update(dict.fromkeys(names, why))


def no_derivative_with(operand: str, *names: str, why: str) -> None:
    """Declare the same of these ops where this operand is given."""
    for name in names:
        NO_DERIVATIVE_WITH.setdefault(name, {})[operand] = why


def refused(node: Node) -> str | None:
    """Why nothing can be differentiated through a node; None where it can."""
    if node.op in NO_DERIVATIVE:
        return NO_DERIVATIVE[node.op]
    operands = NO_DERIVATIVE_WITH.get(node.op, {})
    return next((why for name, why in operands.items() if node.operand(name) is not None), None)


def zero_gradient(*names: str, why: str) -> None:
    """Declare that results do not change with small changes of operands: derivatives are zero."""
    FLAT.update(dict.fromkeys(names, why))


def straight_through(*names: str, why: str) -> None:
    """Declare that the rules of these ops are estimators, made for training, and not their derivatives."""
    STRAIGHT_THROUGH.update(dict.fromkeys(names, why))


def covered(node_or_name: str) -> bool:
    """Whether a table of this module says how an op is differentiated."""
    tables = (partials, vjp, linearise, parts)
    return node_or_name in FLAT or node_or_name in NO_DERIVATIVE or any(node_or_name in t for t in tables)

"""Tables of derivative and vmap rules by op name, and declarations of ops without a derivative.

`rules/<group>.py` fills them. Each op needs `partials` (elementwise), a `vjp`, a decomposition, or a declaration that
it has no derivative. Forward mode follows from each; an op may have its own `jvp` where that is shorter. `batching` is
its vmap rule. Tables are decorators, for ops of users too:

    @vjp("tril")
    def _(at: NodeCtx, ct: Value | None) -> Sequence[Value | None]: ...     # cotangents of results -> of operands

    @batching("tril")
    def _(vmapped: Vmapped) -> Sequence[Value]: ...     # batched operands -> all results, with the batch axis first

    @partials("softsign")
    def _(at: NodeCtx, i: int) -> Value | float: ...     # the derivative of the result by operand i
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.fast_dataclass import dataclass
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import RuleTable
from rlx.types import Size

Cotangents = Sequence[Value | None]
Pull = Callable[[Cotangents], Cotangents]  # cotangents of the results -> cotangents of the operands
_WHERE = "src/rlx/transforms/rules/{group}.py"


@dataclass(frozen=True)
class NodeCtx:
    """A node being differentiated; operands and results are values of the graph under construction."""

    node: Node
    operands: tuple[Value | None, ...]
    results: tuple[Value, ...]
    wanted: tuple[bool, ...]  # operands whose derivative is needed

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
        """Return operand i, which must be present."""
        value = self.operands[i]
        assert value is not None
        return value


@dataclass(frozen=True)
class Vmapped:
    """A node being vmapped; batched operands have the batch axis in front."""

    node: Node
    graph: Graph
    operands: tuple[Value | None, ...]
    batched: tuple[bool, ...]
    size: Size

    @property
    def attrs(self) -> Mapping[str, Any]:
        return self.node.attrs

    def operand(self, i: int) -> Value:
        """Return operand i, which must be present."""
        value = self.operands[i]
        assert value is not None
        return value

    def full(self, i: int) -> Value:
        """Return operand i with the batch axis; repeated along it if it is not batched."""
        value = self.operand(i)
        return value if self.batched[i] else self.graph.one("expand", value, shape=(self.size, *value.shape))


Vjp = Callable[..., Cotangents]  # (ctx, *cotangents of results) -> a cotangent per operand
Jvp = Callable[..., Cotangents]  # (ctx, *tangents of operands) -> a tangent per result
Linearise = Callable[[Graph, Node, Cotangents, Sequence[bool]], tuple[Sequence[Value], Pull]]
Push = Callable[[Graph, Node, Cotangents, Cotangents], tuple[Sequence[Value], Cotangents]]
Batching = Callable[[Vmapped], Sequence[Value]]
Parts = Callable[..., "Value | tuple[Value, ...]"]

partials: RuleTable[Callable[..., Any]] = RuleTable("partial derivatives", _WHERE)
vjp: RuleTable[Vjp] = RuleTable("VJP", _WHERE)
jvp: RuleTable[Jvp] = RuleTable("JVP", _WHERE)
linearise: RuleTable[Linearise] = RuleTable("linearisation", _WHERE)  # for ops whose gradient changes the forward pass
push: RuleTable[Push] = RuleTable("forward mode", _WHERE)  # results and tangents together
parts: RuleTable[Parts] = RuleTable(
    "decomposition for derivatives", _WHERE
)  # takes precedence over the op's own decomposition
batching: RuleTable[Batching] = RuleTable("vmap rule", _WHERE)

NO_DERIVATIVE: dict[str, str] = {}  # op -> why differentiating it is an error
NO_DERIVATIVE_WITH: dict[str, dict[str, str]] = {}  # op -> operand -> why it is an error with this operand
ZERO_GRADIENT: dict[str, str] = {}  # op -> why its derivative is zero almost everywhere
STRAIGHT_THROUGH: dict[str, str] = {}  # op -> why its rule differs from finite differences


def no_derivative(*names: str, why: str) -> None:
    """Declare that these ops cannot be differentiated: trying to is an error that says why."""
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
    """Declare that results do not change with small changes of operands, so derivatives are zero."""
    ZERO_GRADIENT.update(dict.fromkeys(names, why))


def straight_through(*names: str, why: str) -> None:
    """Declare that the rules of these ops are straight-through estimators for training, not true derivatives."""
    STRAIGHT_THROUGH.update(dict.fromkeys(names, why))


def covered(node_or_name: str) -> bool:
    """Whether some table of this module covers the differentiation of an op."""
    tables = (partials, vjp, linearise, parts)
    return node_or_name in ZERO_GRADIENT or node_or_name in NO_DERIVATIVE or any(node_or_name in t for t in tables)

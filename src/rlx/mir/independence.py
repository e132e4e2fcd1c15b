"""Graphs whose batch entries have nothing to do with each other: a run of many may be cut into runs of few.

A graph in, a symbol out. That is found op by op: what is made of a batch has it as its first axis, and only there, and
no op on the way lets entries meet. An op without a rule here is taken to let them.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import ELEMENTWISE, RuleTable
from rlx.ops.reduce import normal_axes
from rlx.types import Dim, Size, TensorType, dim, symbols_of

Rule = Callable[[Node, list[bool]], bool]  # is told which operands have the batch; the results have it
_rule: RuleTable[Rule] = RuleTable("rule of independence", "src/rlx/mir/independence.py")


def independent_symbol(graph: Graph) -> str | None:
    """The symbol that is the first axis of all inputs and outputs, if entries along it do not depend on each other."""
    leading = {node.types[0].shape[:1] for node in graph.inputs}
    if len(leading) != 1:
        return None
    for batch in leading.pop():
        for symbol in symbols_of(batch):
            if batch == dim(symbol.name) and _is_independent(graph, batch, symbol.name):
                return symbol.name
    return None


def _is_independent(graph: Graph, batch: Size, symbol: str) -> bool:
    inputs = set(graph.inputs)
    have: set[Value] = set()  # the values that have the batch
    for node in graph.nodes:
        given = [operand in have for operand in node.operands]
        if node.op == "state" or _mentions(node, symbol, axis=1) or _depends(node, symbol):
            return False
        if not any(given) and node not in inputs and node.op != "expand":
            if _mentions(node, symbol, axis=0):
                return False  # such as numbers counted along the batch
            continue
        if not all(type_.shape[:1] == (batch,) for type_ in node.types):
            return False
        if node not in inputs:
            rule = _elementwise if ELEMENTWISE in node.definition.traits else _rule.get(node.op)
            if rule is None or not rule(node, given):
                return False
        have.update(node.results)
    return have.issuperset(graph.outputs)


def _mentions(node: Node, symbol: str, *, axis: int) -> bool:
    """Whether the shape of a result has the symbol, from an axis on."""
    sizes = (size for type_ in node.types for size in type_.shape[axis:])
    return any(found.name == symbol for size in sizes for found in symbols_of(size))


def _depends(node: Node, symbol: str) -> bool:
    """Whether an attribute has the symbol, but for the first of several sizes: that is the batch itself, or a shape's.

    So it is with a part of each entry, or of a table, that starts where the size of the batch says.
    """
    values = (v[1:] if isinstance(v, tuple) else (v,) for v in node.attrs.values())
    sizes = [size for several in values for size in several if isinstance(size, Dim)]
    start = node.attrs["start"][:1] if node.op == "slice" else ()
    return any(found.name == symbol for size in (*sizes, *start) for found in symbols_of(size))


def _types(node: Node, given: list[bool]) -> list[TensorType]:
    """The types of the operands that have the batch."""
    return [operand.type for operand, has in zip(node.operands, given, strict=True) if has and operand is not None]


@_rule("region", "expand")
def _elementwise(node: Node, given: list[bool]) -> bool:
    return all(type_.rank == node.types[0].rank for type_ in _types(node, given))


@_rule("matmul", "integer_matmul", "fused_matmul")
def _(node: Node, given: list[bool]) -> bool:
    """Rows of the left side, or whole matrices."""
    alike = all(type_.rank == node.types[0].rank for type_ in _types(node, given))
    return given[0] and alike and (not given[1] or node.types[0].rank > 2)


@_rule("layer_norm", "rms_norm", "residual_norm", "quantised_norm", "quantise_rows")
def _(node: Node, given: list[bool]) -> bool:
    return given[0] and node.types[0].rank > 1  # the last axis is not the first


@_rule("prepack")
def _(node: Node, given: list[bool]) -> bool:
    return node.attrs["layout"].by_rows and node.types[0].rank > 1  # the last axis is not the first


@_rule("softmax")
def _(node: Node, given: list[bool]) -> bool:
    return bool(node.attrs["axis"] % node.types[0].rank != 0)


@_rule("sum", "prod", "mean", "max", "min")
def _(node: Node, given: list[bool]) -> bool:
    (x,) = _types(node, given)
    return 0 not in normal_axes(node.attrs["axis"], x.rank, node.op)


@_rule("gather")
def _(node: Node, given: list[bool]) -> bool:
    return not given[0] and node.attrs["axis"] == 0


@_rule("reshape", "concatenate")
def _(node: Node, given: list[bool]) -> bool:
    """Both sides begin with the batch: a concatenation along it would be longer."""
    return all(given)


@_rule("transpose")
def _(node: Node, given: list[bool]) -> bool:
    return bool(node.attrs["axes"][0] == 0)


@_rule("slice")
def _(node: Node, given: list[bool]) -> bool:
    return bool(node.attrs["start"][0] == 0 and node.attrs["step"][0] == 1)  # and as long as before: all of it


@_rule("attention")
def _(node: Node, given: list[bool]) -> bool:
    return all(given[:3])


@_rule("rope")
def _(node: Node, given: list[bool]) -> bool:
    return given[0] and not any(given[1:3])

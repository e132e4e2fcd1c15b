"""Sets the precision: f32 values between ops become f16 or bf16. MIR in, MIR out; inputs, params and outputs unchanged.

If 16-bit floats are not native (`Target.native`) they are storage only: kernels widen on load, compute in f32 and round
on store, so ops fused into one kernel pass f32 to each other. Left unchanged: integers; floats from which integers or
booleans are computed (token ids stored as floats stay exact, comparisons keep their operands); floats computed from
integers, random numbers and scales; f64; scalar constants; caches that the caller owns; and quantised weights.
Custom ops of users get f32.
"""

from __future__ import annotations

from typing import Any

from rlx.dtypes import F32, DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import ELEMENTWISE, LEAF, VIEW
from rlx.ir.rewrite import Rewriter

DELICATE = ("reduce", "softmax", "norm")  # op groups that keep f32 results in mixed precision
# Op groups that update states.
CARRYING = ("causal_conv", "gated_delta_net", "gated_linear_attention", "selective_scan", "update")
QUANTISING = ("quant", "fake_quant", "int8")  # op groups that read scales and values in f32, and only round
MOVES = ("gather", "concatenate", "pad", "cumsum")  # with views and elementwise ops: how indices are computed


def set_precision(graph: Graph, *, compute: DType, mixed: bool = False) -> Graph:
    """Round f32 values to `compute` between ops; with `mixed`, results of reductions, softmax and norms stay f32."""
    return _Precision(graph, compute, mixed).run()


class _Precision:
    def __init__(self, graph: Graph, compute: DType, mixed: bool) -> None:
        self.graph, self.compute, self.mixed = graph, compute, mixed
        self.exact = _sources_of_integers(graph) | _computed_from_integers(graph)
        self.rewriter = Rewriter(graph, "set_precision")
        self.copies: dict[tuple[Value, DType], Value] = {}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            results = self.rewriter.copy(node) if LEAF in node.definition.traits else self.node(node)
            self.rewriter.values.update(zip(node.results, results, strict=True))
        values = [(o, self.rewriter[o]) for o in self.graph.outputs]
        outputs = [self.cast(o.node, new, o.dtype) for o, new in values]
        self.rewriter.graph.outputs = tuple(outputs)
        return self.rewriter.graph

    def node(self, node: Node) -> tuple[Value, ...]:
        wide = self.is_exact(node) or self.is_delicate(node) or bool(_bodies(node)) or _takes_f32(node)
        operands = [None if o is None else self.operand(node, i, o, wide) for i, o in enumerate(node.operands)]
        attrs = {k: v if self.is_exact(node) else self.attribute(v) for k, v in node.attrs.items()}
        results = self.rewriter.graph.build(node.op, operands, attrs, node.origin).results
        if self.is_exact(node) or self.is_delicate(node) or _is_cache(node[0]) or _stays_wide(node[0]):
            return results
        return tuple(self.cast(node, v, self.compute) if v.dtype is F32 else v for v in results)

    def operand(self, node: Node, position: int, old: Value, wide: bool) -> Value:
        new = self.rewriter[old]
        if old.dtype is not F32 or _is_cache(old):
            return new
        if wide:
            return self.cast(node, new, F32)
        is_table = node.op == "gather" and position == 0  # rounding only the gathered rows is cheaper
        return new if is_table or _stays_wide(old) else self.cast(node, new, self.compute)

    def attribute(self, value: Any) -> Any:
        """Set the precision inside a body; the types of its inputs and outputs stay the same."""
        return set_precision(value, compute=self.compute, mixed=self.mixed) if isinstance(value, Graph) else value

    def cast(self, like: Node, value: Value, to: DType) -> Value:
        if value.dtype is to:
            return value
        if (value, to) not in self.copies:
            self.copies[value, to] = self.rewriter.one(like, "cast", value, dtype=to)
        return self.copies[value, to]

    def is_exact(self, node: Node) -> bool:
        return any(v in self.exact for v in node.results)

    def is_delicate(self, node: Node) -> bool:
        return self.mixed and node.definition.group in DELICATE


def _sources_of_integers(graph: Graph) -> set[Value]:
    """Return floats from which integers, indices or booleans are computed, through views, moves and elementwise ops.

    If a loop body computes any of those from floats, the loop is left unchanged: a carry may be a counter or end it.
    """
    sources: set[Value] = set()
    stack: list[Value | None] = []
    for node in graph.nodes:
        if _makes_integers(node):
            stack += node.operands
            sources.update(node.results)
    while stack:
        value = stack.pop()
        if value is None or value in sources or not value.dtype.is_float:
            continue
        sources.add(value)
        definition = value.node.definition
        if definition.traits & {ELEMENTWISE, VIEW} or definition.name in MOVES:
            stack += value.node.operands
    return sources


def _makes_integers(node: Node) -> bool:
    """Whether it computes integers or booleans from floats (casts, comparisons, indices); quantising does not count."""
    if bodies := _bodies(node):
        return any(_makes_integers(inner) for body in bodies for inner in body.nodes)
    takes_floats = any(o is not None and o.dtype.is_float for o in node.operands)
    return takes_floats and node.definition.group not in QUANTISING and any(not t.dtype.is_float for t in node.types)


def _computed_from_integers(graph: Graph) -> set[Value]:
    """Return floats computed from integers, random numbers or scales, and from nothing else but constants."""
    values: set[Value] = set()
    for node in graph.nodes:
        operands = [o for o in node.operands if o is not None]
        alone = all(o in values or _stays_wide(o) for o in operands if o.dtype.is_float)
        follows = alone and any(o in values or o.dtype.is_integer for o in operands)
        is_source = node.definition.group == "random" or node.op in ("quant_scale", "quantise_rows")
        if is_source or (follows and node.definition.traits & {ELEMENTWISE, VIEW}):
            values.update(node.results)
    return values


def _bodies(node: Node) -> list[Graph]:
    return [v for v in node.attrs.values() if isinstance(v, Graph)]


def _takes_f32(node: Node) -> bool:
    """Whether an op needs f32 operands: custom ops of users, and ops on quantised values (scales must not be rounded).

    Also recurrences over, and updates of, a state that the caller owns, which is f32.
    """
    carries = node.definition.group in CARRYING and any(o is not None and _is_cache(o) for o in node.operands)
    return carries or not node.definition.is_builtin or node.definition.group in QUANTISING


def _is_cache(value: Value) -> bool:
    return value.node.op in ("state", "kv_append", "assign", "adamw_update", "sgd_update")


def _stays_wide(value: Value) -> bool:
    """Whether it is a scalar constant (kept in a register anyway) or a quantised weight (dequantised by the matmul)."""
    node = value.node
    while VIEW in node.definition.traits and node.operands[0] is not None:
        node = node.operands[0].node
    return node.op == "dequantise" or (value.node.op == "const" and value.type.elements == 1)

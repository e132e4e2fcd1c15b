"""Precision: f32 values become f16 or bf16 between ops. MIR in, MIR out, inputs, params and outputs as they were.

Where narrow floats are not native (`Target.native`) they are storage: kernels widen what they load, compute in f32 and
round what they store, so that ops fused into one kernel hand f32 on. Left alone are integers and whatever floats
integers and decisions are made of (token ids that arrive as floats stay whole, what is compared is compared as it was)
and floats that are made of integers, random numbers and scales; f64, scalar constants, caches that the caller owns, and
packed weights. Ops of users get f32.
"""

from __future__ import annotations

from typing import Any

from rlx.dtypes import F32, DType
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.registry import ELEMENTWISE, LEAF, VIEW
from rlx.ir.rewrite import Rewriter

DELICATE = ("reduce", "softmax", "norm")  # groups that keep f32 results where types are mixed
# Groups whose ops change states.
CARRYING = ("causal_conv", "gated_delta_net", "gated_linear_attention", "selective_scan", "update")
QUANTISING = ("quant", "fake_quant", "int8")  # groups whose ops take scales and numbers as they are, and only round
MOVES = ("gather", "concatenate", "pad", "cumsum")  # with views and elementwise ops: how indices are computed


def set_precision(graph: Graph, *, compute: DType, mixed: bool = False) -> Graph:
    """Round f32 values to `compute` between ops; with `mixed`, results of reductions, softmax and norms stay f32."""
    return _Precision(graph, compute, mixed).run()


class _Precision:
    def __init__(self, graph: Graph, compute: DType, mixed: bool) -> None:
        self.graph, self.compute, self.mixed = graph, compute, mixed
        self.exact = _integers_come_from(graph) | _made_of_integers(graph)
        self.rewriter = Rewriter(graph, "set_precision")
        self.copies: dict[tuple[Value, DType], Value] = {}

    def run(self) -> Graph:
        for node in self.graph.nodes:
            made = self.rewriter.copy(node) if LEAF in node.definition.traits else self.node(node)
            self.rewriter.values.update(zip(node.results, made, strict=True))
        values = [(o, self.rewriter[o]) for o in self.graph.outputs]
        outputs = [self.cast(o.node, new, o.dtype) for o, new in values]
        self.rewriter.graph.outputs = tuple(outputs)
        return self.rewriter.graph

    def node(self, node: Node) -> tuple[Value, ...]:
        wide = self.is_exact(node) or self.is_delicate(node) or bool(_bodies(node)) or _takes_f32(node)
        operands = [None if o is None else self.operand(node, i, o, wide) for i, o in enumerate(node.operands)]
        attrs = node.attrs if self.is_exact(node) else {k: self.attribute(v) for k, v in node.attrs.items()}
        made = self.rewriter.graph.build(node.op, operands, attrs, node.origin).results
        if self.is_exact(node) or self.is_delicate(node) or _is_cache(node[0]) or _stays_wide(node[0]):
            return made
        return tuple(self.cast(node, v, self.compute) if v.dtype is F32 else v for v in made)

    def operand(self, node: Node, position: int, old: Value, wide: bool) -> Value:
        new = self.rewriter[old]
        if old.dtype is not F32 or _is_cache(old):
            return new
        if wide:
            return self.cast(node, new, F32)
        is_table = node.op == "gather" and position == 0  # rounding the rows that are taken is less work
        return new if is_table or _stays_wide(old) else self.cast(node, new, self.compute)

    def attribute(self, value: Any) -> Any:
        """Loops and branches have the same types outside, whatever happens inside."""
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


def _integers_come_from(graph: Graph) -> set[Value]:
    """Floats that become integers, indices or truth values, back through ops that move or work on each number alone.

    Of a loop that makes those of floats inside, everything is left as it is: a carry may count, or end the loop.
    """
    found: set[Value] = set()
    stack: list[Value | None] = []
    for node in graph.nodes:
        if _makes_integers(node):
            stack += node.operands
            found.update(node.results)
    while stack:
        value = stack.pop()
        if value is None or value in found or not value.dtype.is_float:
            continue
        found.add(value)
        definition = value.node.definition
        if definition.traits & {ELEMENTWISE, VIEW} or definition.name in MOVES:
            stack += value.node.operands
    return found


def _makes_integers(node: Node) -> bool:
    """Whether it decides something by floats: casts, comparisons, indices; quantising only rounds."""
    if bodies := _bodies(node):
        return any(_makes_integers(inner) for body in bodies for inner in body.nodes)
    takes_floats = any(o is not None and o.dtype.is_float for o in node.operands)
    return takes_floats and node.definition.group not in QUANTISING and any(not t.dtype.is_float for t in node.types)


def _made_of_integers(graph: Graph) -> set[Value]:
    """Floats made of integers, random numbers and scales, and what is made of nothing but those and constants."""
    found: set[Value] = set()
    for node in graph.nodes:
        given = [o for o in node.operands if o is not None]
        alone = all(o in found or _stays_wide(o) for o in given if o.dtype.is_float)
        follows = alone and any(o in found or o.dtype.is_integer for o in given)
        is_source = node.definition.group == "random" or node.op in ("quant_scale", "quantise_rows")
        if is_source or (follows and node.definition.traits & {ELEMENTWISE, VIEW}):
            found.update(node.results)
    return found


def _bodies(node: Node) -> list[Graph]:
    return [v for v in node.attrs.values() if isinstance(v, Graph)]


def _takes_f32(node: Node) -> bool:
    """Ops of users, of which nothing is known, and those of quantised numbers: a rounded scale is another scale.

    And recurrences over a state that the caller owns, and updates of one, which is f32.
    """
    carries = node.definition.group in CARRYING and any(o is not None and _is_cache(o) for o in node.operands)
    return carries or not node.definition.is_builtin or node.definition.group in QUANTISING


def _is_cache(value: Value) -> bool:
    return value.node.op in ("state", "kv_append", "assign", "adamw_update", "sgd_update")


def _stays_wide(value: Value) -> bool:
    """Scalar constants, which registers hold anyway, and packed weights, which the matmul unpacks itself."""
    node = value.node
    while VIEW in node.definition.traits and node.operands[0] is not None:
        node = node.operands[0].node
    return node.op == "dequantise" or (value.node.op == "const" and value.type.elements == 1)

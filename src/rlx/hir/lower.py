"""Lowers HIR blocks to MIR ops. Every new node records the block it came from.

`lowering` writes a block in plain ops, which passes fuse later; `direct` has the blocks that `FusionPolicy.DIRECT`
lowers straight to a fused op. Both compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from rlx.dtypes import DType
from rlx.errors import LowerError
from rlx.hir.activations import activate
from rlx.hir.blocks import ACTIVATIONS, heads_first, heads_shape, rotary_size, wide
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.provenance import built_from
from rlx.ir.registry import HIR, MIR, NAMED, RuleTable, get
from rlx.ir.rewrite import Rewriter, map_bodies
from rlx.profile import FusionPolicy
from rlx.types import Size, TensorType

Lowering = Callable[..., Value | tuple[Value, ...]]
lowering: RuleTable[Lowering] = RuleTable("lowering", "src/rlx/hir/lower.py")
direct: RuleTable[Lowering] = RuleTable("direct lowering", "src/rlx/hir/lower.py")


def apply_activation(x: Value, activation: str | None) -> Value:
    if activation is None:
        return x
    return x.graph.one(activation, x) if activation in ACTIVATIONS else activate(x, activation)


# -- linear maps ------------------------------------------------------------------------------------------------------
def read(stored: Value, kind: DType) -> Value:
    """Converts a stored weight to an element type: unpacks quantised blocks, casts other types."""
    if stored.dtype.is_packed:
        stored = stored.dequantise()
    return stored if stored.dtype is kind else stored.astype(kind)


def project(
    x: Value, weight: Value, bias: Value | None = None, *, transposed: bool = True, kind: DType | None = None
) -> Value:
    """x times a stored weight ([out, in] if `transposed`, else [in, out]) plus a bias.

    Weight and bias are converted to `kind`, by default f32, or f64 if x is f64.
    """
    kind = kind or wide(x)
    weight = read(weight, kind)
    product = x @ (weight.mT if transposed else weight)
    return product if bias is None else product + read(bias, kind)


@lowering("linear")
def _(x: Value, weight: Value, bias: Value | None, *, activation: str | None) -> Value:
    product = x @ weight
    return apply_activation(product if bias is None else product + bias, activation)


@direct("linear")
@lowering("linear_fused")
def _(x: Value, weight: Value, bias: Value | None, *, activation: str | None) -> Value:
    if bias is None and activation is None:
        return x @ weight
    others = [] if bias is None else [bias]

    def epilogue(total: Value, *added: Value) -> Value:
        return apply_activation(total + added[0] if added else total, activation)

    return fused(x, [weight], others, epilogue)


@lowering("shared_linear_pair")
def _(x: Value, first: Value, second: Value) -> tuple[Value, Value]:
    return x @ first, x @ second


def swiglu(gate: Value, up: Value) -> Value:
    return gate.graph.one("silu", gate) * up


@lowering("swiglu_ffn")
def _(x: Value, up: Value, gate: Value, down: Value) -> Value:
    return swiglu(x @ gate, x @ up) @ down


@direct("swiglu_ffn")
def _(x: Value, up: Value, gate: Value, down: Value) -> Value:
    return fused(x, [gate, up], [], swiglu) @ down


@lowering("residual_rms_norm")
def _(x: Value, residual: Value, gamma: Value, beta: Value | None, *, eps: float) -> Value:
    return rms(x + residual, gamma, eps, beta)


@direct("residual_rms_norm")
def _(x: Value, residual: Value, gamma: Value, beta: Value | None, *, eps: float) -> Value:
    normed: Value = x.graph.apply("residual_norm", x, residual, gamma, beta, kind="rms", eps=eps)[0]
    return normed


def rms(x: Value, gamma: Value, eps: float, beta: Value | None = None) -> Value:
    return x.graph.one("rms_norm", x, gamma, beta, eps=eps)


def fused(x: Value, weights: Sequence[Value], others: Sequence[Value], epilogue: Callable[..., Value]) -> Value:
    """One matmul with an epilogue over its sums and `others`; plain ops unless all operands share one float type."""
    graph = x.graph
    if not x.dtype.is_float or any(w.dtype is not x.dtype for w in weights):
        return epilogue(*(x @ w for w in weights), *others)
    body = Graph("body")
    leading = x.shape[:-2] if weights[0].rank == 2 else (x @ weights[0]).shape[:-2]
    columns = weights[0].shape[-1]
    sums = [body.input(f"acc{i}", (*leading, x.shape[-2], columns), x.dtype) for i in range(len(weights))]
    read = [body.input(f"x{i}", o.shape, o.dtype) for i, o in enumerate(others)]
    body.set_outputs([epilogue(*sums, *read)])
    attrs = {"body": body, "weights": len(weights), "columns": columns}
    return graph.one("fused_matmul", x, *weights, *others, **attrs)


# -- heads ------------------------------------------------------------------------------------------------------------
def split_heads(x: Value, size: int) -> Value:
    """[batch, seq, heads · size] to [batch, seq, heads, size]."""
    return x.reshape(heads_shape("heads", "x", x.type, size))


@lowering("attention_block")
def _(
    q: Value, k: Value, v: Value, mask: Value | None, *, num_heads: int, head_dim: int, mask_kind: str,
    scale: float | None, softcap: float | None,
) -> Value:  # fmt: skip
    swap = heads_first(q.type, num_heads)
    heads = [swap_heads_and_seq(t) if swap else split_heads(t, head_dim) for t in (q, k, v)]
    seen = q.graph.one("attention", *heads, mask, mask_kind=mask_kind, scale=scale, softcap=softcap)
    return swap_heads_and_seq(seen) if swap else seen.reshape(q.shape) if q.rank == 3 else seen


def swap_heads_and_seq(x: Value) -> Value:
    return x.graph.one("transpose", x, axes=(0, 2, 1, 3))


@lowering("rope_block")
def _(x: Value, cos: Value, sin: Value, positions: Value | None, *, head_dim: int, n_rot: int | None) -> Value:
    if positions is None:
        positions = default_positions(x.graph, x.shape[0], x.shape[1])
    return apply_rope(split_heads(x, head_dim), cos, sin, positions, n_rot).reshape(x.shape)


def default_positions(graph: Graph, batch: Size, seq: Size) -> Value:
    """Positions 0, 1, ... in each row, [batch, seq]."""
    ones = graph.one("expand", graph.constant(1, "i32"), shape=(batch, seq))
    return graph.one("cumsum", ones, axis=1, exclusive=True)


def apply_rope(heads: Value, cos: Value, sin: Value, positions: Value, n_rot: int | None = None) -> Value:
    """Applies RoPE to [batch, seq, heads, head_dim]; the tables may be wider than the rotated part."""
    head_dim = heads.shape[3]
    assert isinstance(head_dim, int)
    half = rotary_size("rope", head_dim, n_rot, cos.type) // 2
    cos, sin = (t if t.shape[1] == half else t[:, :half] for t in (cos, sin))
    return heads.graph.one("rope", heads, cos, sin, positions)


# -- layers -----------------------------------------------------------------------------------------------------------
@lowering("llama_decoder_block")
def _(
    x: Value, input_norm: Value, q: Value, k: Value, v: Value, o: Value, post_norm: Value, gate: Value, up: Value,
    down: Value, cos: Value, sin: Value, input_beta: Value | None, post_beta: Value | None, mask: Value | None, *,
    num_heads: int, num_kv_heads: int, head_dim: int, eps: float, mask_kind: str,
) -> Value:  # fmt: skip
    h = rms(x, input_norm, eps, input_beta)
    positions = default_positions(x.graph, *x.shape[:2])
    queries, keys, values = (split_heads(h @ w, head_dim) for w in (q, k, v))
    queries, keys = (apply_rope(t, cos, sin, positions) for t in (queries, keys))
    seen = x.graph.one("attention", queries, keys, values, mask, mask_kind=mask_kind)
    x = x + seen.reshape(*x.shape[:2], num_heads * head_dim) @ o
    h = rms(x, post_norm, eps, post_beta)
    return x + swiglu(h @ gate, h @ up) @ down


@lowering("qwen35_mtp_head")
def _(
    x: Value, ids: Value, last: Value, embed: Value, hidden_norm: Value, embed_norm: Value, eh_proj: Value,
    input_norm: Value, q: Value, k: Value, v: Value, o: Value, q_norm: Value, k_norm: Value, cos: Value, sin: Value,
    post_norm: Value, gate: Value, up: Value, down: Value, norm: Value, head: Value, *, num_heads: int,
    num_kv_heads: int, head_dim: int, eps: float, n_rot: int | None,
) -> Value:  # fmt: skip
    graph = x.graph
    batch, seq, _ = x.shape
    tokens = rms(graph.one("gather", embed, ids), embed_norm, eps)
    x = graph.one("concatenate", tokens, rms(x, hidden_norm, eps), axis=-1) @ eh_proj
    h = rms(x, input_norm, eps)
    positions = default_positions(graph, batch, seq)
    both = (h @ q).reshape(batch, seq, num_heads, 2 * head_dim)  # per head: the query, then its gate
    keys, values = (split_heads(h @ w, head_dim) for w in (k, v))
    queries = apply_rope(rms(both[..., :head_dim], q_norm, eps), cos, sin, positions, n_rot)
    keys = apply_rope(rms(keys, k_norm, eps), cos, sin, positions, n_rot)
    seen = graph.one("attention", queries, keys, values, mask_kind="causal")
    opened = seen * graph.one("sigmoid", both[..., head_dim:])
    x = x + opened.reshape(batch, seq, num_heads * head_dim) @ o
    h = rms(x, post_norm, eps)
    x = x + swiglu(h @ gate, h @ up) @ down
    return rms(take_rows(x, last), norm, eps) @ head


def take_rows(x: Value, last: Value) -> Value:
    """Returns row `last[b]` of each x[b], [batch, hidden]."""
    graph = x.graph
    batch, seq, hidden = x.shape
    ones = graph.one("expand", graph.constant(1, "i32"), shape=(batch, seq))
    lengths = graph.one("sum", ones, axis=1)
    offsets = graph.one("cumsum", lengths, axis=0, exclusive=True)  # b · seq
    inside = graph.one("logical_and", graph.one("greater_equal", last, 0), graph.one("less", last, lengths))
    rows = graph.one("where", inside, offsets + last, -1)  # an index out of range would hit another sequence
    return graph.one("gather", x.reshape(batch * seq, hidden), rows)


def place(leaf: Value) -> Value:
    """Returns an operand of a block, placing it in the graph if it is a pending leaf."""
    return leaf.node[leaf.index]


# -- graphs -----------------------------------------------------------------------------------------------------------
class _LateLeaf(Value):
    """A pending leaf. It is placed in the graph when the first op of the block reads it."""

    __slots__ = ("leaf", "lowering")

    def __init__(self, lowering: _Lowering, leaf: Value) -> None:
        super().__init__(leaf.index)
        self.lowering, self.leaf = lowering, leaf

    @property
    def node(self) -> Node:  # type: ignore[override]
        return self.__rlx_value__().node

    @property
    def type(self) -> TensorType:
        return self.leaf.type

    def __rlx_value__(self) -> Value:
        self.lowering.place(self.leaf.node)
        return self.lowering.values[self.leaf]


class _Lowering(Rewriter):
    """Lowers one graph.

    Inputs, params and states right before a block stay pending until one of its ops reads them, and keep their order.
    Ops and their weights thus appear in the order in which they would be written by hand.
    """

    def __init__(self, graph: Graph, policy: FusionPolicy) -> None:
        super().__init__(graph, "lower")
        self.graph.level = MIR
        self.policy = policy
        self.waiting: dict[Node, None] = {}

    def place(self, leaf: Node) -> None:
        """Place a leaf and all leaves pending longer, since the order of leaves is the graph's signature."""
        while leaf in self.waiting:
            first = next(iter(self.waiting))
            del self.waiting[first]
            self.set_results(first, self.copy(first))

    def place_all(self, but: Sequence[Node] = ()) -> None:
        """Place all pending leaves, except a trailing run of those in `but`."""
        waiting = list(self.waiting)
        while waiting and waiting[-1] in but:
            waiting.pop()
        for leaf in waiting:
            self.place(leaf)

    def add(self, node: Node) -> None:
        if node.op in NAMED:  # placed at their first use
            self.waiting[node] = None
            return
        if get(node.op).level == HIR:
            results = self.lower(node)
            self.place_all()
        else:
            self.place_all()
            results = self.copy_with_bodies(node)
        self.set_results(node, results)

    def set_results(self, node: Node, results: Sequence[Value]) -> None:
        """Record the values that replace a node's results."""
        self.values.update(zip(node.results, results, strict=True))

    def copy_with_bodies(self, node: Node) -> tuple[Value, ...]:
        """Copies a tensor op, lowering blocks in its bodies."""
        if not any(isinstance(v, Graph) for v in node.attrs.values()):
            return self.copy(node)
        attrs = {k: lower(v, self.policy) if isinstance(v, Graph) else v for k, v in node.attrs.items()}
        return self.graph.append(node.op, self.operands(node), attrs, node.types, node.origin).results

    def lower(self, node: Node) -> tuple[Value, ...]:
        """Lowers a block to ops."""
        _check(node)
        is_direct = self.policy is FusionPolicy.DIRECT and node.op in direct
        rule = direct[node.op] if is_direct else lowering[node.op]
        self.place_all(but=[o.node for o in node.operands if o is not None])
        operands = [
            None if o is None else _LateLeaf(self, o) if o.node in self.waiting else self.values[o]
            for o in node.operands
        ]
        origin = replace(node.origin, source=f"%{node.id} {node.op}")
        with self.graph.scope(origin), built_from(origin):  # the latter for nodes in bodies
            outputs = rule(*operands, **node.attrs)
        results = (outputs,) if isinstance(outputs, Value) else outputs
        for have, want in zip(results, node.types, strict=True):
            if have.type != want:
                raise LowerError(f"{node.op}: became {have.type}, expected {want}", notes=[f"at: {node.origin}"])
        return results


def lower(graph: Graph, policy: FusionPolicy = FusionPolicy.FUSABLE) -> Graph:
    """Lowers an HIR graph to MIR; returns MIR graphs unchanged."""
    if graph.level == MIR:
        return graph
    lowered = _Lowering(map_bodies(graph, lambda body: lower(body, policy)), policy)
    for node in lowered.old.nodes:
        lowered.add(node)
    lowered.place_all()
    lowered.graph.outputs = tuple(lowered.values[o] for o in lowered.old.outputs)
    return lowered.graph


def _check(node: Node) -> None:
    """Check operands against the block's schema; a graph not made by the builder may lack some."""
    schema = get(node.op).schema
    names, required = schema.operands, len(schema.operands) - schema.optional
    notes = [f"at: {node.origin}"]
    if len(node.operands) != len(names):
        wanted = f"{len(names)} operands ({', '.join(names)})"
        raise LowerError(f"{node.op}: expected {wanted}, found {len(node.operands)}", notes=notes)
    for name, operand in zip(names[:required], node.operands, strict=False):
        if operand is None:
            raise LowerError(f"{node.op}: expected operand {name!r}, found none", notes=notes)

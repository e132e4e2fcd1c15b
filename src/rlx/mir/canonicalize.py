"""Canonical forms: algebraic identities, and views of views folded into one. All rewrites are bit-exact.

An identity is a pair of equal expressions; a test evaluates both sides on random data, including NaN and infinities.
"""

from __future__ import annotations

import rlx.ops  # noqa: F401  identities are built from registered ops
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import IDENTITIES, Identity, Rewriter, identity, match, rebuild, substitute
from rlx.ir.value import bind_value

FLOATS = ("f32", "f64")
INTS = ("i32", "i64")


@identity(*FLOATS, *INTS)
def mul_by_one(x):  # type: ignore[no-untyped-def]
    return x * 1, x


@identity(*FLOATS, *INTS)
def one_times(x):  # type: ignore[no-untyped-def]
    return 1 * x, x


@identity(*FLOATS)
def div_by_one(x):  # type: ignore[no-untyped-def]
    return x / 1.0, x


@identity(*FLOATS, *INTS)
def sub_zero(x):  # type: ignore[no-untyped-def]
    return x - 0, x


@identity(*INTS)
def add_zero(x):  # type: ignore[no-untyped-def]
    """Integers only: -0.0 + 0.0 is 0.0."""
    return x + 0, x


@identity(*FLOATS)
def add_negative_zero(x):  # type: ignore[no-untyped-def]
    return x + -0.0, x


@identity(*FLOATS, *INTS)
def neg_twice(x):  # type: ignore[no-untyped-def]
    return x.neg().neg(), x


@identity(*FLOATS, *INTS)
def sub_negative(x, y):  # type: ignore[no-untyped-def]
    return x - (-y), x + y


@identity(*FLOATS, *INTS)
def add_negative(x, y):  # type: ignore[no-untyped-def]
    return x + (-y), x - y


@identity("bool")
def not_twice(x):  # type: ignore[no-untyped-def]
    return ~~x, x


@identity(*FLOATS)
def silu_spelled_out(x):  # type: ignore[no-untyped-def]
    return x * x.sigmoid(), x.silu()


@identity(*FLOATS)
def silu_commuted(x):  # type: ignore[no-untyped-def]
    return x.sigmoid() * x, x.silu()


@identity(*FLOATS)
def square(x):  # type: ignore[no-untyped-def]
    return x**2.0, x * x


def canonicalize(graph: Graph) -> Graph:
    """Apply identities and view rules once, operands first."""
    return rebuild(graph, _visit, made_by="canonicalize")


def _visit(rewriter: Rewriter, node: Node) -> Value | None:
    rule = _VIEWS.get(node.op)
    if rule is not None:
        return rule(rewriter, node)
    candidates = _BY_OP.get(node.op)
    if candidates is None:
        return None
    preview = _Preview(rewriter, node)
    for candidate in candidates:
        bindings: dict[Value, Value] = {}
        if match(candidate.left, preview, candidate.places, bindings):
            result = _replacement(rewriter, node, candidate, bindings)
            if result is not None:
                return result
    return None


def _replacement(rewriter: Rewriter, node: Node, rule: Identity, bindings: dict[Value, Value]) -> Value | None:
    """Build the right side, if all operands have the result's dtype: casts between i32 and floats round or wrap."""
    (type_,) = node.types
    if type_.dtype.name not in rule.dtypes or any(v.dtype is not type_.dtype for v in bindings.values()):
        return None
    result = substitute(rewriter, node, rule.right, bindings)
    return result if result.type == type_ else None


class _Preview(Value):
    """A node as it would look in the new graph, not appended yet."""

    def __init__(self, rewriter: Rewriter, node: Node) -> None:
        super().__init__()
        operands, results = rewriter.operands(node), (self,)
        attrs, types, origin = node.attrs, node.types, node.origin
        bind_value(self, Node(-1, node.op, operands, attrs, types, origin, rewriter.graph, results))


_BY_OP: dict[str, list[Identity]] = {}
for _identity in IDENTITIES:
    _BY_OP.setdefault(_identity.left.node.op, []).append(_identity)


# -- views ------------------------------------------------------------------------------------------------------------
def _operand(rewriter: Rewriter, node: Node) -> Value:
    first = node.operands[0]
    assert first is not None
    return rewriter[first]


def _reshape(rewriter: Rewriter, node: Node) -> Value | None:
    """reshape(reshape(x)) -> reshape(x); reshape to the same shape -> x."""
    x = _operand(rewriter, node)
    while x.node.op == "reshape" and x.node.operands[0] is not None:
        x = x.node.operands[0]
    if x.shape == node.types[0].shape:
        return x
    return rewriter.one(node, "reshape", x, shape=node.types[0].shape)


def _transpose(rewriter: Rewriter, node: Node) -> Value | None:
    """transpose(transpose(x)) -> transpose(x); identity transpose -> x."""
    x, axes = _operand(rewriter, node), node.attrs["axes"]
    if x.node.op == "transpose" and x.node.operands[0] is not None:
        inner = x.node.attrs["axes"]
        axes, x = tuple(inner[a] for a in axes), x.node.operands[0]
    if axes == tuple(range(len(axes))):
        return x
    product = _transposed_product(rewriter, node, x, axes)
    return rewriter.one(node, "transpose", x, axes=axes) if product is None else product


def _transposed_product(rewriter: Rewriter, node: Node, x: Value, axes: tuple[int, ...]) -> Value | None:
    """matmul(a.mT, b).mT -> matmul(b.mT, a), as in the gradient of a weight stored as [out, in].

    Bit-exact: products commute and are summed in the same order. Weights stay on the right, where they are packed.
    """
    swap = (*range(len(axes) - 2), len(axes) - 1, len(axes) - 2)
    if axes != swap or x.node.op != "matmul" or not _is_read_once(rewriter, node.operands[0], x):
        return None
    a, b = (o for o in x.node.operands if o is not None)
    inner = a.node.operands[0] if a.node.op == "transpose" and a.node.attrs["axes"] == swap else None
    if inner is None or b.rank != a.rank or b.node.op in ("param", "const"):
        return None
    return rewriter.one(node, "matmul", rewriter.one(node, "transpose", b, axes=swap), inner)


def _is_read_once(rewriter: Rewriter, before: Value | None, now: Value) -> bool:
    """Whether an operand, rewritten to `now`, has exactly one reader."""
    assert before is not None
    old = rewriter.old
    return rewriter[before] is now and before not in old.outputs and len(old.users()[before]) == 1


def _no_op_view(rewriter: Rewriter, node: Node) -> Value | None:
    """slice or expand that changes nothing -> x."""
    x = _operand(rewriter, node)
    moves = any(s != 0 for s in node.attrs.get("start", ())) or any(s != 1 for s in node.attrs.get("step", ()))
    return x if x.shape == node.types[0].shape and not moves else None


def _cast(rewriter: Rewriter, node: Node) -> Value | None:
    """cast to the same dtype -> x."""
    x = _operand(rewriter, node)
    return x if x.type == node.types[0] else None


def _concatenate(rewriter: Rewriter, node: Node) -> Value | None:
    """concatenate(x) -> x."""
    x = _operand(rewriter, node)
    return x if len(node.operands) == 1 and x.type == node.types[0] else None


def _gather(rewriter: Rewriter, node: Node) -> Value | None:
    """gather(cast(table)) -> cast(gather(table)): only the gathered rows are widened or unpacked, not the table."""
    table, indices = (rewriter[o] for o in node.operands if o is not None)
    inner = table.node.operands[0] if table.node.op in ("cast", "dequantise") else None
    if inner is None or (table.node.op == "cast" and inner.dtype.size >= table.dtype.size):
        return None
    if table.node.op == "dequantise" and not inner.dtype.is_packed:  # gather cannot index its scales
        return None
    if inner.dtype.is_packed:
        gathers_rows = node.attrs["axis"] == 0 and inner.rank == 2
        return rewriter.one(node, "gather", inner, indices, axis=0) if gathers_rows else None
    return rewriter.one(node, "cast", rewriter.one(node, "gather", inner, indices, **node.attrs), dtype=table.dtype)


_VIEWS = {
    "reshape": _reshape, "transpose": _transpose, "slice": _no_op_view, "expand": _no_op_view, "cast": _cast,
    "concatenate": _concatenate, "gather": _gather,
}  # fmt: skip

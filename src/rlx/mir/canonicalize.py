"""Canonical forms: algebraic identities, and views of views made one view. Everything here keeps bits.

Identities are pairs of equal expressions; a test evaluates both sides on random data, special numbers included.
"""

from __future__ import annotations

import rlx.ops  # noqa: F401  identities are built from registered ops
from rlx.ir.graph import Graph, Node, Value
from rlx.ir.rewrite import IDENTITIES, Identity, Rewriter, identity, match, rebuild, substitute

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
def silu_the_other_way(x):  # type: ignore[no-untyped-def]
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
    copied = _Preview(rewriter, node)
    for candidate in candidates:
        found: dict[Value, Value] = {}
        if match(candidate.left, copied, candidate.places, found):
            result = _replacement(rewriter, node, candidate, found)
            if result is not None:
                return result
    return None


def _replacement(rewriter: Rewriter, node: Node, found_by: Identity, found: dict[Value, Value]) -> Value | None:
    """The right side, if every operand has the type of the result: an i32 that becomes a float rounds and wraps."""
    (type_,) = node.types
    if type_.dtype.name not in found_by.dtypes or any(v.dtype is not type_.dtype for v in found.values()):
        return None
    result = substitute(rewriter, node, found_by.right, found)
    return result if result.type == type_ else None


class _Preview(Value):
    """A node as it would be in the new graph, without appending it yet."""

    def __init__(self, rewriter: Rewriter, node: Node) -> None:
        super().__init__()
        operands, results = rewriter.operands(node), (self,)
        self.node = Node(-1, node.op, operands, node.attrs, node.types, node.origin, rewriter.graph, results)


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
    """transpose(transpose(x)) -> transpose(x); transpose that moves nothing -> x."""
    x, axes = _operand(rewriter, node), node.attrs["axes"]
    if x.node.op == "transpose" and x.node.operands[0] is not None:
        inner = x.node.attrs["axes"]
        axes, x = tuple(inner[a] for a in axes), x.node.operands[0]
    if axes == tuple(range(len(axes))):
        return x
    product = _turned_product(rewriter, node, x, axes)
    return rewriter.one(node, "transpose", x, axes=axes) if product is None else product


def _turned_product(rewriter: Rewriter, node: Node, x: Value, axes: tuple[int, ...]) -> Value | None:
    """matmul(a.mT, b).mT -> matmul(b.mT, a), as in the gradient of a weight that is stored [out, in].

    Products commute and are summed in the same order. A weight stays on the right, where it is packed.
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
    """Whether an operand, which became `now`, has one reader."""
    assert before is not None
    old = rewriter.old
    return rewriter[before] is now and before not in old.outputs and len(old.users()[before]) == 1


def _whole(rewriter: Rewriter, node: Node) -> Value | None:
    """slice or expand that changes nothing -> x."""
    x = _operand(rewriter, node)
    moves = any(s != 0 for s in node.attrs.get("start", ())) or any(s != 1 for s in node.attrs.get("step", ()))
    return x if x.shape == node.types[0].shape and not moves else None


def _cast(rewriter: Rewriter, node: Node) -> Value | None:
    """cast to the type that x has -> x."""
    x = _operand(rewriter, node)
    return x if x.type == node.types[0] else None


def _concatenate(rewriter: Rewriter, node: Node) -> Value | None:
    """concatenate(x) -> x."""
    x = _operand(rewriter, node)
    return x if len(node.operands) == 1 and x.type == node.types[0] else None


def _gather(rewriter: Rewriter, node: Node) -> Value | None:
    """Rows are taken first and widened or unpacked then, so that no table is."""
    table, indices = (rewriter[o] for o in node.operands if o is not None)
    inner = table.node.operands[0] if table.node.op in ("cast", "dequantise") else None
    if inner is None or (table.node.op == "cast" and inner.dtype.size >= table.dtype.size):
        return None
    if table.node.op == "dequantise" and not inner.dtype.is_packed:  # has scales, which rows do not say
        return None
    if inner.dtype.is_packed:
        whole = node.attrs["axis"] == 0 and inner.rank == 2
        return rewriter.one(node, "gather", inner, indices, axis=0) if whole else None
    return rewriter.one(node, "cast", rewriter.one(node, "gather", inner, indices, **node.attrs), dtype=table.dtype)


_VIEWS = {
    "reshape": _reshape, "transpose": _transpose, "slice": _whole, "expand": _whole, "cast": _cast,
    "concatenate": _concatenate, "gather": _gather,
}  # fmt: skip

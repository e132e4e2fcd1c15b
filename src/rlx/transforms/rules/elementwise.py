"""Elementwise ops: a partial derivative per operand.

A partial is None (meaning 1), a number, a value, or a function of the value it multiplies. If both operands of
`maximum` are equal, each gets half of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import rlx.ops  # noqa: F401  the ops that share a vmap rule are looked up below
from rlx.ir.graph import Value
from rlx.ir.registry import ELEMENTWISE, OPS
from rlx.transforms.build import insert_axes, zeros
from rlx.transforms.rule_tables import NodeCtx, Vmapped, batching, partials, zero_gradient

Partial = Any  # None, a number, a Value, or a function of a Value


def apply_unary(x: Value, name: str) -> Value:
    """Apply a unary op."""
    return x.graph.one(name, x)


# -- one operand ------------------------------------------------------------------------------------------------------
def unary(name: str, derivative: Callable[[Value, Value], Partial]) -> None:
    """Register the derivative of a unary op, as a function of the operand and the result."""
    partials(name)(lambda at, i: derivative(at.operand(0), at.result))


def sign(x: Value) -> Value:
    """Return the sign of x: 1, 0 or -1."""
    g = x.graph
    return g.one("where", x > 0, 1.0, g.one("where", x < 0, -1.0, 0.0)).astype(x.dtype)


def _silu(x: Value, y: Value) -> Value:
    s = apply_unary(x, "sigmoid")
    return s + y * (1 - s)


def _gelu(x: Value, y: Value) -> Value:
    density = apply_unary(x * x * -0.5, "exp") * (1 / math.sqrt(2 * math.pi))
    return 0.5 * (1 + apply_unary(x * math.sqrt(0.5), "erf")) + x * density


def _gelu_tanh(x: Value, y: Value) -> Value:
    c = math.sqrt(2 / math.pi)
    t = apply_unary(c * (x + 0.044715 * x * x * x), "tanh")
    return 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * (c * (1 + 3 * 0.044715 * x * x))


unary("neg", lambda x, y: -1)
unary("abs", lambda x, y: sign(x))
unary("exp", lambda x, y: y)
unary("log", lambda x, y: lambda by: by / x)
unary("sqrt", lambda x, y: lambda by: by * 0.5 / y)
unary("rsqrt", lambda x, y: -0.5 * y / x)
unary("sin", lambda x, y: apply_unary(x, "cos"))
unary("cos", lambda x, y: -apply_unary(x, "sin"))
unary("tan", lambda x, y: 1 + y * y)
unary("atan", lambda x, y: lambda by: by / (1 + x * x))
unary("tanh", lambda x, y: 1 - y * y)
unary("relu", lambda x, y: lambda by: by.graph.one("where", x > 0, by, 0.0))
unary("erf", lambda x, y: apply_unary(-(x * x), "exp") * (2 / math.sqrt(math.pi)))
unary("sigmoid", lambda x, y: y * (1 - y))
unary("silu", _silu)
unary("gelu", _gelu)
unary("gelu_tanh", _gelu_tanh)
zero_gradient("round", why="between halves it does not change")


# -- two operands -----------------------------------------------------------------------------------------------------
def binary(name: str, *derivatives: Callable[[Value, Value, Value], Partial]) -> None:
    """Register the derivatives of a binary op, as functions of the operands and the result."""
    partials(name)(lambda at, i: derivatives[i](at.operand(0), at.operand(1), at.result))


def _pow_base(a: Value, b: Value, y: Value) -> Value:
    g, none = a.graph, b.equal(0.0)
    less = g.one("where", none, 1.0, b - 1).astype(y.dtype)  # 0 ** -1 would be inf, and inf · 0 NaN
    return g.one("where", none, 0.0, b * g.one("pow", a, less)).astype(y.dtype)


def _pow_exponent(a: Value, b: Value, y: Value) -> Value:
    return y * apply_unary(a.graph.one("where", a.equal(0.0), 1.0, a), "log")


def _larger(first: Value, second: Value) -> Callable[[Value], Value]:
    """Return the partial for `first`: 1 where it is larger than `second`, 1/2 where both are equal, else 0."""

    def share(by: Value) -> Value:
        g = by.graph
        return g.one("where", first > second, by, g.one("where", first < second, 0.0, by * 0.5))

    return share


binary("add", lambda a, b, y: None, lambda a, b, y: None)
binary("sub", lambda a, b, y: None, lambda a, b, y: -1)
binary("mul", lambda a, b, y: b, lambda a, b, y: a)
binary("div", lambda a, b, y: lambda by: by / b, lambda a, b, y: lambda by: -(by * y / b))
binary("pow", _pow_base, _pow_exponent)
binary("maximum", lambda a, b, y: _larger(a, b), lambda a, b, y: _larger(b, a))
binary("minimum", lambda a, b, y: _larger(b, a), lambda a, b, y: _larger(a, b))
zero_gradient(
    "equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_not",
    why="it returns booleans",
)  # fmt: skip
zero_gradient("floor_divide", "mod", why="it takes integers")


@partials("where")
def _(at: NodeCtx, i: int) -> Partial:
    condition = at.operand(0)

    def chosen(by: Value) -> Value:
        none = zeros(by.graph, by.type.with_shape())
        return by.graph.one("where", condition, *((by, none) if i == 1 else (none, by)))

    return chosen


@partials("cast")
def _(at: NodeCtx, i: int) -> Partial:
    return None  # sum_to and the engine cast cotangents and tangents


# -- vmap -------------------------------------------------------------------------------------------------------------
def aligned(vmapped: Vmapped, operands: Sequence[Value], batched: Sequence[bool]) -> list[Value]:
    """Pad operands to equal rank after the batch axis, so that it stays first under broadcasting."""
    rank = max(v.rank - b for v, b in zip(operands, batched, strict=True))
    return [insert_axes(v, 1, rank - (v.rank - 1)) if b else v for v, b in zip(operands, batched, strict=True)]


def _batch_elementwise(vmapped: Vmapped) -> Sequence[Value]:
    operands = aligned(vmapped, [vmapped.operand(i) for i in range(len(vmapped.operands))], vmapped.batched)
    return [vmapped.graph.one(vmapped.node.op, *operands, **vmapped.attrs)]


batching(*(name for name, definition in OPS.items() if ELEMENTWISE in definition.traits and definition.is_builtin))(
    _batch_elementwise
)

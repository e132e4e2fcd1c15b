"""Loop forms of elementwise ops: each as a scalar expression. Regions are emitted by `fused.py`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlx.dtypes import BOOL, DType, promote
from rlx.ir import registry
from rlx.ir.graph import Graph, Value
from rlx.lir.loops import Apply, Const, Expr, Let, Ref
from rlx.lir.schedule import cast

ScalarForm = Callable[..., Expr]
scalar_form: registry.RuleTable[ScalarForm] = registry.RuleTable("scalar form", "src/rlx/lir/{group}.py")

COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


def apply(op: str, *args: Expr) -> Expr:
    """A scalar operation whose result has the type of its first argument."""
    return Apply(op, args, args[0].dtype)


def number(value: float, like: Expr) -> Const:
    return Const(value, like.dtype)


def one_plus_exp_neg(x: Expr) -> Expr:
    return apply("add", apply("exp", apply("neg", x)), number(1.0, x))


@scalar_form("sigmoid")
def _(x: Expr) -> Expr:
    return apply("div", number(1.0, x), one_plus_exp_neg(x))


@scalar_form("silu")
def _(x: Expr) -> Expr:
    return apply("div", x, one_plus_exp_neg(x))


@scalar_form("relu")
def _(x: Expr) -> Expr:
    return apply("max", x, number(0.0, x))


@scalar_form("round")
def _(x: Expr) -> Expr:
    """Numbers next to 2^23 (2^52 in f64) are whole, so adding that rounds; the sign of zero is kept."""
    big = number(2.0 ** (52 if x.dtype.size == 8 else 23), x)
    size = apply("abs", x)
    near = apply("sub", apply("add", size, big), big)
    whole = Apply("select", (Apply("lt", (size, big), BOOL), near, size), x.dtype)
    signed = Apply("select", (Apply("lt", (x, number(0.0, x)), BOOL), apply("neg", whole), whole), x.dtype)
    return Apply("select", (Apply("eq", (x, number(0.0, x)), BOOL), x, signed), x.dtype)


@scalar_form("rsqrt")
def _(x: Expr) -> Expr:
    return apply("div", number(1.0, x), apply("sqrt", x))


@scalar_form("gelu_tanh")
def _(x: Expr) -> Expr:
    cube = apply("mul", apply("mul", x, x), x)
    inner = apply("fma", cube, number(0.044715, x), x)
    bell = apply("tanh", apply("mul", inner, number(math.sqrt(2 / math.pi), x)))
    half = apply("mul", x, number(0.5, x))
    return apply("fma", half, bell, half)


def scalar(op: str, args: Sequence[Expr], operand_types: Sequence[DType], result: DType) -> Expr:
    """One elementwise op on values in their compute types."""
    definition = registry.get(op)
    name = definition.scalar
    if name == "cast":
        return cast(cast(args[0], result), result.compute)  # through the narrow type, so that it rounds
    if name == "select":
        return Apply("select", (args[0], cast(args[1], result.compute), cast(args[2], result.compute)), result.compute)
    if name in COMPARISONS:
        common = promote(*operand_types).compute
        return Apply(name, tuple(cast(a, common) for a in args), BOOL)
    wide = [cast(a, result.compute) for a in args]
    if op in scalar_form:
        return scalar_form[op](*wide)
    return Apply(name, tuple(wide), result.compute)


def body_lets(body: Graph, inputs: Sequence[Expr]) -> tuple[list[Let], list[Expr]]:
    """The nodes of a body as lets, given expressions for its inputs; and the expressions of its outputs."""
    values: dict[Value, Expr] = {}
    lets: list[Let] = []
    given = iter(inputs)
    for node in body.nodes:
        value = node[0]
        if node.op == "input":
            expr = next(given)
        elif node.op == "const":
            data = node.attrs["value"].data.reshape(())
            compute = value.dtype.compute
            values[value] = Const(bool(data) if compute is BOOL else compute.numpy.type(data).item(), compute)
            continue
        else:
            operands = [o for o in node.operands if o is not None]
            expr = scalar(node.op, [values[o] for o in operands], [o.dtype for o in operands], value.dtype)
        let = Let(f"v{node.id}", expr)
        lets.append(let)
        values[value] = Ref(let.name, expr.dtype)
    return lets, [values[o] for o in body.outputs]

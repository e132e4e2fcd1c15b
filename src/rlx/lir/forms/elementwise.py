"""Elementwise ops as scalar expressions. `fused.py` emits regions of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from rlx.dtypes import BF16, BOOL, F16, F32, F64, DType, promote
from rlx.ir import registry
from rlx.ir.graph import Graph, Value
from rlx.lir.loops import Apply, Const, Expr, Let, Ref, compare, fma
from rlx.target import Target

ScalarForm = Callable[..., Expr]
scalar_form: registry.RuleTable[ScalarForm] = registry.RuleTable("scalar form", "src/rlx/lir/forms/{group}.py")

FRACTION_BITS = {F64: 52, F32: 23, F16: 10, BF16: 7}  # of floats: from 2 to this power on, all values are integers
COMPARISONS = ("eq", "ne", "lt", "le", "gt", "ge")


@scalar_form("sigmoid")
def _(x: Expr) -> Expr:
    return 1.0 / ((-x).exp() + 1.0)


@scalar_form("silu")
def _(x: Expr) -> Expr:
    return x / ((-x).exp() + 1.0)


@scalar_form("relu")
def _(x: Expr) -> Expr:
    return x.max(0)


@scalar_form("round")
def _(x: Expr) -> Expr:
    """From 2^23 on all f32 values are integers, so adding 2^23 rounds; the sign of zero is preserved."""
    big, size = 2.0 ** FRACTION_BITS[x.dtype], abs(x)
    rounded = (size < big).select(size + big - big, size)
    return x.eq(0.0).select(x, (x < 0.0).select(-rounded, rounded))


@scalar_form("rsqrt")
def _(x: Expr) -> Expr:
    return 1.0 / x.sqrt()


@scalar_form("gelu_tanh")
def _(x: Expr) -> Expr:
    inner = fma(x * x * x, Const(0.044715, x.dtype), x)
    half = x * 0.5
    return fma(half, (inner * math.sqrt(2 / math.pi)).tanh(), half)


def scalar(op: str, args: Sequence[Expr], operand_types: Sequence[DType], result: DType, target: Target) -> Expr:
    """One elementwise op on values in the types the target computes in."""
    definition = registry.get(op)
    name, native = definition.scalar, target.native(result)
    if name == "cast":
        return args[0].cast(result).cast(native)  # through the narrow type, for rounding
    if name == "select":
        return args[0].select(args[1].cast(native), args[2].cast(native))
    if name in COMPARISONS:
        common = target.native(promote(*operand_types))
        return compare(name, *(a.cast(common) for a in args))
    wide = [a.cast(native) for a in args]
    if op in scalar_form:
        return scalar_form[op](*wide)
    return Apply(name, tuple(wide), native)


def body_lets(body: Graph, inputs: Sequence[Expr], target: Target) -> tuple[list[Let], list[Expr]]:
    """The nodes of a body as lets, and expressions for its outputs; `inputs` are expressions for its inputs."""
    values: dict[Value, Expr] = {}
    lets: list[Let] = []
    remaining = iter(inputs)
    for node in body.nodes:
        value = node[0]
        if node.op == "input":
            expr = next(remaining)
        elif node.op == "const":
            data = node.attrs["value"].data.reshape(())
            native = target.native(value.dtype)
            values[value] = Const(bool(data) if native is BOOL else native.numpy.type(data).item(), native)
            continue
        else:
            operands = [o for o in node.operands if o is not None]
            expr = scalar(node.op, [values[o] for o in operands], [o.dtype for o in operands], value.dtype, target)
        let = Let(f"v{node.id}", expr)
        lets.append(let)
        values[value] = Ref(let.name, expr.dtype)
    return lets, [values[o] for o in body.outputs]

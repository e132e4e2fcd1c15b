"""Epilogue expressions as CUDA C."""

from __future__ import annotations

import math

from rlx.dtypes import BF16, BOOL, F16, F32, F64, DType
from rlx.errors import LowerError
from rlx.lir.loops import Apply, Choose, Const, Expr, Ref

INFIX = {
    "add": "+", "sub": "-", "mul": "*", "div": "/", "quot": "/", "rem": "%", "eq": "==", "ne": "!=", "lt": "<",
    "le": "<=", "gt": ">", "ge": ">=", "and": "&", "or": "|", "xor": "^", "shl": "<<", "shr": ">>",
}  # fmt: skip
CALLS = {
    "exp": "exp", "log": "log", "tanh": "tanh", "erf": "erf", "sqrt": "sqrt", "sin": "sin", "cos": "cos", "tan": "tan",
    "atan": "atan", "pow": "pow", "fma": "fma", "abs": "fabs",
}  # fmt: skip
NARROW = {BF16: "to_bf16", F16: "to_f16"}


def c_expression(expr: Expr) -> str:
    """A value at one element of the result, as C."""
    match expr:
        case Ref():
            return expr.name
        case Const():
            return _number(expr)
        case Choose():
            return f"({c_expression(expr.condition)} ? {c_expression(expr.then)} : {c_expression(expr.other)})"
        case Apply():
            return _apply(expr)
    raise LowerError(f"cuda: an epilogue cannot contain {type(expr).__name__}")


def _apply(expr: Apply) -> str:
    args = [c_expression(a) for a in expr.args]
    kind = expr.args[0].dtype
    suffix = "f" if kind is F32 else ""
    match expr.op:
        case "cast":
            return _cast(args[0], kind, expr.dtype)
        case "neg":
            return f"(-{args[0]})"
        case "not":
            return f"(!{args[0]})" if kind is BOOL else f"(~{args[0]})"
        case "select":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        case "max" | "min" if kind.is_float:  # NaN of either operand is the result, as in NumPy
            sign = ">" if expr.op == "max" else "<"
            a, b = args
            return f"(({a} != {a}) || {a} {sign} {b} ? {a} : {b})"
        case "max" | "min":
            return f"({args[0]} {'>' if expr.op == 'max' else '<'} {args[1]} ? {args[0]} : {args[1]})"
        case "gelu":
            half = _cast("0.5", F64, kind)
            return f"({half} * {args[0]} * (1 + erf{suffix}({args[0]} * {_number(Const(math.sqrt(0.5), kind))})))"
        case "abs" if not kind.is_float:
            return f"({args[0]} < 0 ? -{args[0]} : {args[0]})"
        case op if op in INFIX:
            return f"({args[0]} {INFIX[op]} {args[1]})"
        case op if op in CALLS:
            return f"{CALLS[op]}{suffix}({', '.join(args)})"
    raise LowerError(f"cuda: an epilogue cannot contain {expr.op} of {kind}")


def _cast(value: str, source: DType, to: DType) -> str:
    if source is to:
        return value
    value = f"widen({value})" if source in NARROW else value
    if to in NARROW:
        return f"{NARROW[to]}((float)({value}))"
    if to is BOOL:
        return f"(({value}) != 0)"
    names = {F64: "double", F32: "float"}
    return f"(({names.get(to, to.name)})({value}))"


def _number(constant: Const) -> str:
    value = constant.value
    if constant.dtype is BOOL:
        return "true" if value else "false"
    if not constant.dtype.is_float:
        return f"(({constant.dtype.name}){value}ll)"
    if math.isnan(value) or math.isinf(value):
        sign = "-" if value < 0 else ""
        bits = "0x7ff8000000000000ll" if math.isnan(value) else "0x7ff0000000000000ll"
        text = f"({sign}__longlong_as_double({bits}))"
    else:
        text = float(value).hex()
    return f"((float){text})" if constant.dtype is not F64 else text

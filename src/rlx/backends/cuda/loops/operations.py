"""The C text of types, constants and scalar operations."""

from __future__ import annotations

import math
import struct

from rlx.dtypes import BF16, BOOL, F16, F32, F64, I32, I64, U32, DType
from rlx.errors import LowerError

MEMORY = {  # element types in memory
    "f64": "double", "f32": "float", "f16": "f16", "bf16": "bf16", "i64": "i64", "i32": "i32", "i16": "i16",
    "i8": "i8", "u32": "u32", "u8": "u8", "bool": "u8",
}  # fmt: skip
VALUE = MEMORY | {"bool": "bool"}  # types of values
REDUCTIONS = {"sum": "SumOf", "prod": "ProdOf", "max": "MaxOf", "min": "MinOf"}
COMPARISONS = {"eq": "==", "ne": "!=", "lt": "<", "le": "<=", "gt": ">", "ge": ">="}
FLOAT_INFIX = {"add": "+", "sub": "-", "mul": "*", "div": "/"}
WRAPPING = {"add": "+", "sub": "-", "mul": "*", "shl": "<<"}
BITWISE = {"and": "&", "or": "|", "xor": "^"}
UNSIGNED = {8: "u64", 4: "u32"}
FUNCTIONS = {  # of floats: the accurate ones of CUDA's library, and those of `scalars.py`
    F32: {"exp": "expf", "log": "logf", "tanh": "tanhf", "erf": "erff", "sqrt": "sqrtf", "sin": "sinf", "cos": "cosf",
          "tan": "tanf", "atan": "atanf", "pow": "powf", "fma": "fmaf"},
    F64: {name: name for name in ("exp", "log", "tanh", "erf", "sqrt", "sin", "cos", "tan", "atan", "pow", "fma")},
}  # fmt: skip
CALLS = {"max": "larger", "min": "smaller", "abs": "magnitude", "order": "order_key", "nearest": "nearest"}


def constant(value: float | int | bool, dtype: DType) -> str:
    """A constant, exactly."""
    if dtype is BOOL:
        return "true" if value else "false"
    if dtype in (F16, BF16):
        return f"to_{dtype}({constant(float(value), F32)})"
    if dtype.is_float:
        return _float(float(value), dtype)
    number = int(value)
    if dtype is I64:
        return f"({number}ll)" if number != -(2**63) else "(-9223372036854775807ll - 1)"
    if dtype is I32:
        return str(number) if number >= 0 else f"({number})" if number != -(2**31) else "(-2147483647 - 1)"
    return f"{number}u" if dtype is U32 else f"({VALUE[dtype.name]})({number})"


def _float(value: float, dtype: DType) -> str:
    if dtype is F64:
        bits = struct.unpack("<q", struct.pack("<d", value))[0]
        return f"({value.hex()})" if math.isfinite(value) else f"__longlong_as_double({bits}ll)"
    try:
        bits = struct.unpack("<I", struct.pack("<f", value))[0]
    except OverflowError:  # rounds to infinity
        bits = 0x7F800000 if value > 0 else 0xFF800000
    rounded = struct.unpack("<f", struct.pack("<I", bits))[0]
    return f"({rounded.hex()}f)" if math.isfinite(rounded) else f"__uint_as_float({bits:#x}u)"


def identity(op: str, dtype: DType) -> str:
    """The identity of a reduction."""
    if op in ("sum", "prod"):
        return constant(op == "prod", dtype)
    if dtype.is_float:
        return constant(-math.inf if op == "max" else math.inf, dtype)
    if dtype is BOOL:
        return constant(op == "min", dtype)
    bits = 8 * dtype.size
    low, high = (0, 2**bits - 1) if dtype.kind == "uint" else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    return constant(low if op == "max" else high, dtype)


def combine(op: str, a: str, b: str) -> str:
    """Combines two partial results of a reduction."""
    return f"{REDUCTIONS[op]}::of({a}, {b})"


def apply(op: str, args: list[str], kind: DType, dtype: DType) -> str:
    """An operation on values of type `kind`, with a result of type `dtype`."""
    match op:
        case "cast":
            return cast(args[0], kind, dtype)
        case "select":
            return f"({args[0]} ? {args[1]} : {args[2]})"
        case "not" if kind is BOOL:
            return f"(!{args[0]})"
        case "bits":
            return f"(i32)__float_as_uint({args[0]})" if kind is F32 else f"__uint_as_float((u32){args[0]})"
        case "dot_u8" | "dot_u7":
            return f"dot_bytes({', '.join(args)})"
        case _ if op in COMPARISONS:
            return f"({args[0]} {COMPARISONS[op]} {args[1]})"
        case _ if op in CALLS:
            return f"{CALLS[op]}({', '.join(args)})"
        case _ if kind is BOOL and op in BITWISE:
            return f"(bool)({args[0]} {BITWISE[op]} {args[1]})"
    result = _of_floats(op, args, dtype) if dtype.is_float else _of_integers(op, args, dtype)
    if result is None:
        raise LowerError(f"cuda loops: no operation {op!r} of {kind}", hint="see `SCALAR_OPS` in lir/expressions.py")
    return result


def _of_floats(op: str, args: list[str], dtype: DType) -> str | None:
    if dtype not in FUNCTIONS:
        return None
    if op in FLOAT_INFIX:
        return f"({args[0]} {FLOAT_INFIX[op]} {args[1]})"
    if op == "neg":
        return f"(-{args[0]})"
    if op == "gelu":  # x times the normal distribution function, which keeps its digits far below 0
        return f"({args[0]} * normcdf{'f' if dtype is F32 else ''}({args[0]}))"
    return f"{FUNCTIONS[dtype][op]}({', '.join(args)})" if op in FUNCTIONS[dtype] else None


def _of_integers(op: str, args: list[str], dtype: DType) -> str | None:
    kind = VALUE[dtype.name]
    unsigned = UNSIGNED.get(dtype.size, "u32")  # signed overflow is undefined in C++, unsigned integers wrap
    if op in WRAPPING:
        return f"({kind})(({unsigned}){args[0]} {WRAPPING[op]} ({unsigned}){args[1]})"
    if op in BITWISE:
        return f"({kind})({args[0]} {BITWISE[op]} {args[1]})"
    match op:
        case "neg":
            return f"({kind})(0 - ({unsigned}){args[0]})"
        case "not":
            return f"({kind})(~{args[0]})"
        case "shr":
            signed = {"u32": "i32", "u8": "i8"}.get(kind, kind)  # arithmetic
            return f"({kind})(({signed}){args[0]} >> {args[1]})"
        case "fma":
            return f"({kind})(({unsigned}){args[0]} * ({unsigned}){args[1]} + ({unsigned}){args[2]})"
        case "floordiv" | "mod":
            return f"floor_{'quotient' if op == 'floordiv' else 'rest'}<{kind}>({args[0]}, {args[1]})"
        case "quot" | "rem":
            wide = "i64" if dtype.size == 8 else "i32"
            return f"({kind}){op}(({wide}){args[0]}, ({wide}){args[1]})"
    return None


def index_arithmetic(op: str, args: list[str]) -> str:
    """An operation on 32-bit indices, which do not overflow."""
    infix = FLOAT_INFIX | {"and": "&", "shr": ">>"}
    if op in infix:
        return f"({args[0]} {infix[op]} {args[1]})"
    return apply(op, args, I32, I32)


def cast(x: str, have: DType, want: DType) -> str:
    """A conversion: floats round to nearest even, integers wrap; float to integer saturates, NaN becomes 0."""
    if have is want:
        return x
    if have.is_float and have.size == 2:
        return cast(f"widen({x})", F32, want)
    if want.is_float and want.size == 2:
        single = f"to_odd({x})" if have is F64 else cast(x, have, F32)
        return f"to_{want}({single})"
    if want is BOOL:
        return f"({x} != 0)"
    if have.is_float and not want.is_float:
        return f"float_to_{want}({x})"
    return f"({VALUE[want.name]})({x})"

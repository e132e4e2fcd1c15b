"""Scalar operations and casts, on vectors of any number of lanes."""

from __future__ import annotations

from rlx.backends.cpu.builder import Builder, Value, const, lanes_of, scalar_of, vector
from rlx.backends.cpu.loops.byte_dots import dot
from rlx.backends.cpu.math import FUNCTIONS, arithmetic, conversions
from rlx.backends.cpu.targets import CpuTarget
from rlx.dtypes import BOOL, F32, F64, I64, U8, U32, DType
from rlx.errors import LowerError
from rlx.fast_dataclass import dataclass

# Element types in memory, and value types in registers. Narrow floats are bit patterns until they are cast.
MEMORY = {"f64": "double", "f32": "float", "f16": "i16", "bf16": "i16", "i64": "i64", "i32": "i32", "i16": "i16",
          "i8": "i8", "u32": "i32", "u8": "i8", "bool": "i8"}  # fmt: skip
REGISTER = MEMORY | {"bool": "i1"}


@dataclass(frozen=True, slots=True)
class Scalars:
    """Emits scalar operations for a target."""

    b: Builder
    target: CpuTarget

    def apply(self, op: str, args: list[Value], kind: DType, dtype: DType) -> Value:
        """A scalar operation on values of dtype `kind`, with a result of `dtype`."""
        match op:
            case "cast":
                return self.cast(args[0], kind, dtype)
            case "select":
                return self.b.select(args[0], args[1], args[2])
            case "and" | "or" | "xor":
                return self.b.op(op, args[0], args[1])
            case "shl" | "shr":
                return self.b.op("shl" if op == "shl" else "ashr", args[0], args[1])
            case "not":
                return self.b.op("xor", args[0], const(args[0].type, True))
            case "eq" | "ne" | "lt" | "le" | "gt" | "ge":
                return self.compare(op, args[0], args[1], kind)
            case "order":
                return self.order(args[0])
            case "nearest":
                return conversions.nearest(self.b, args[0], self.target)
            case "bits":
                return self.b.convert("bitcast", args[0], vector(lanes_of(args[0].type), REGISTER[dtype.name]))
            case "dot_u8" | "dot_u7":
                return dot(self.b, args[0], args[1], args[2], self.target, small=op == "dot_u7")
            case _:
                return self.arithmetic(op, args, dtype)

    def compare(self, op: str, a: Value, c: Value, kind: DType) -> Value:
        if kind.is_float:
            return self.b.fcmp({"ne": "une"}.get(op, "o" + op), a, c)
        if op in ("eq", "ne"):
            return self.b.icmp(op, a, c)
        return self.b.icmp(("u" if kind.kind in ("uint", "bool") else "s") + op, a, c)

    def arithmetic(self, op: str, args: list[Value], dtype: DType) -> Value:
        return self.float_arithmetic(op, args) if dtype.is_float else self.integer_arithmetic(op, args, dtype)

    def float_arithmetic(self, op: str, args: list[Value]) -> Value:
        b, target = self.b, self.target
        match op:
            case "add" | "sub" | "mul" | "div":
                return b.op("f" + op, args[0], args[1])
            case "neg":
                return b.fneg(args[0])
            case "abs":
                return b.intrinsic("fabs", args[0])
            case "sqrt":
                return b.intrinsic("sqrt", args[0])
            case "max":
                return arithmetic.max(b, args[0], args[1])
            case "min":
                return arithmetic.min(b, args[0], args[1])
            case "fma":
                return arithmetic.fma(b, args[0], args[1], args[2], target)
            case _ if op in FUNCTIONS:
                return FUNCTIONS[op](b, *args, target)
        raise LowerError(f"loops: no float operation {op!r}")

    def integer_arithmetic(self, op: str, args: list[Value], dtype: DType) -> Value:
        b = self.b
        signed = dtype.kind == "int"
        match op:
            case "add" | "sub" | "mul":
                return b.op(op, args[0], args[1])
            case "neg":
                return b.op("sub", const(args[0].type, 0), args[0])
            case "abs":
                below = b.icmp("slt", args[0], const(args[0].type, 0))
                return b.select(below, b.op("sub", const(args[0].type, 0), args[0]), args[0]) if signed else args[0]
            case "max" | "min":
                sign = ("s" if signed else "u") + ("gt" if op == "max" else "lt")
                return b.select(b.icmp(sign, args[0], args[1]), args[0], args[1])
            case "fma":
                return b.op("add", b.op("mul", args[0], args[1]), args[2])
            case "floordiv" | "mod":
                return self.floor_division(op, args[0], args[1], signed)
            case "quot" | "rem":  # of non-negative numbers; masked lanes may divide by zero
                return self.floor_division("floordiv" if op == "quot" else "mod", args[0], args[1], signed=False)
        raise LowerError(f"loops: no integer operation {op!r}")

    def floor_division(self, op: str, a: Value, c: Value, signed: bool) -> Value:
        """Rounds down; a zero divisor gives 0; the minimum divided by -1 wraps instead of trapping."""
        b = self.b
        zero = const(a.type, 0)
        is_zero = b.icmp("eq", c, zero)
        safe = b.select(is_zero, const(a.type, 1), c)
        if not signed:
            return b.select(is_zero, zero, b.op("udiv" if op == "floordiv" else "urem", a, safe))
        minus = b.icmp("eq", c, const(a.type, -1))
        safe = b.select(minus, const(a.type, 1), safe)
        quotient, rest = b.op("sdiv", a, safe), b.op("srem", a, safe)
        below = b.op("and", b.icmp("ne", rest, zero), b.icmp("slt", b.op("xor", rest, safe), zero))
        if op == "floordiv":
            down = b.select(below, b.op("sub", quotient, const(a.type, 1)), quotient)
            return b.select(is_zero, zero, b.select(minus, b.op("sub", zero, a), down))
        up = b.select(below, b.op("add", rest, safe), rest)
        return b.select(b.op("or", is_zero, minus), zero, up)

    def order(self, x: Value) -> Value:
        """Sign-magnitude bits as two's complement; -0.0 equals 0.0, NaN is the largest."""
        b = self.b
        bits = 64 if scalar_of(x.type) == "double" else 32
        type_ = vector(lanes_of(x.type), f"i{bits}")
        plain = b.op("fadd", x, const(x.type, 0.0))  # -0.0 + 0.0 is 0.0
        raw = b.convert("bitcast", plain, type_)
        sign = b.op("ashr", raw, const(type_, bits - 1))
        key = b.op("xor", raw, b.op("and", sign, const(type_, 2 ** (bits - 1) - 1)))
        return b.select(b.fcmp("uno", x, x), const(type_, 2 ** (bits - 1) - 1), key)

    # -- reductions -------------------------------------------------------------------------------------------------
    def identity(self, op: str, dtype: DType, count: int) -> Value:
        """The identity of a reduction, in `count` lanes."""
        type_ = vector(count, REGISTER[dtype.name])
        if op in ("sum", "prod"):
            return const(type_, 0 if op == "sum" else 1)
        if dtype.is_float:
            return const(type_, float("-inf") if op == "max" else float("inf"))
        bits = 8 * dtype.size
        if dtype.kind == "uint":
            return const(type_, 0 if op == "max" else 2**bits - 1)
        return const(type_, -(2 ** (bits - 1)) if op == "max" else 2 ** (bits - 1) - 1)

    def combine(self, op: str, a: Value, c: Value, dtype: DType) -> Value:
        """Combines two partial results of a reduction."""
        return self.arithmetic({"sum": "add", "prod": "mul"}.get(op, op), [a, c], dtype)

    # -- casts ------------------------------------------------------------------------------------------------------
    def cast(self, x: Value, have: DType, want: DType) -> Value:
        if have is want:
            return x
        b, count = self.b, lanes_of(x.type)
        type_ = vector(count, REGISTER[want.name])
        if have.is_float and have.size == 2:
            widen = conversions.half_to_float if have.name == "f16" else conversions.bfloat_to_float
            return self.cast(widen(b, x, self.target), F32, want)
        if want.is_float and want.size == 2:
            narrow = conversions.float_to_half if want.name == "f16" else conversions.float_to_bfloat
            return narrow(b, x if have is F64 else self.cast(x, have, F32), self.target)
        if want is BOOL:
            return b.fcmp("une", x, const(x.type, 0.0)) if have.is_float else b.icmp("ne", x, const(x.type, 0))
        if have.is_float and want.is_float:
            return b.convert("fpext" if want is F64 else "fptrunc", x, type_)
        if want.is_float:
            return b.convert("sitofp" if have.kind == "int" else "uitofp", x, type_)
        if have.is_float:
            return self.float_to_integer(x, want)
        if want.size < have.size:
            return b.convert("trunc", x, type_)
        if have is BOOL:
            return b.convert("zext", x, type_)
        return b.convert("sext" if have.kind == "int" else "zext", x, type_)

    def float_to_integer(self, x: Value, want: DType) -> Value:
        """Saturates; u32 goes through i64."""
        b, count = self.b, lanes_of(x.type)
        if want.kind == "int" or want is U8:
            return conversions.float_to_int(b, x, f"i{8 * want.size}", self.target, signed=want.kind == "int")
        assert want is U32
        type_ = vector(count, REGISTER[I64.name])
        value = conversions.float_to_int(b, x, "i64", self.target)
        for limit, predicate in ((0, "slt"), (2**32 - 1, "sgt")):
            value = b.select(b.icmp(predicate, value, const(type_, limit)), const(type_, limit), value)
        return b.convert("trunc", value, vector(count, REGISTER[want.name]))

    def to_memory(self, x: Value, have: DType, want: DType) -> Value:
        """A value as it is stored in memory of dtype `want`."""
        x = self.cast(x, have, want)
        return self.b.convert("zext", x, vector(lanes_of(x.type), "i8")) if want is BOOL else x

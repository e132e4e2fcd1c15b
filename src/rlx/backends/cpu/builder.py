"""A small typed builder of LLVM IR text: the language in which the generators write kernels.

Values know their LLVM type, Python numbers fold into constants, loops and branches take Python callables as bodies. The
builder knows nothing about graphs, ops or kernels.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

from rlx.fast_dataclass import dataclass

Body = Callable[..., "Sequence[Value] | None"]


@dataclass(frozen=True, slots=True)
class Value:
    """An SSA value or constant: its LLVM type and its text."""

    type: str
    text: str

    def __str__(self) -> str:
        return f"{self.type} {self.text}"

    @property
    def constant(self) -> int | None:
        """The integer value, if it is known at build time."""
        if self.type[0] == "i" and (self.text.isdigit() or (self.text[0] == "-" and self.text[1:].isdigit())):
            return int(self.text)
        return None


Int = Value | int


def vector(lanes: int, scalar: str) -> str:
    """The LLVM type of a vector of `lanes` scalars; one lane is still a vector, so generators need no second path."""
    return f"<{lanes} x {scalar}>"


def scalar_of(type_: str) -> str:
    """The element type of a vector type; a scalar type itself."""
    return type_.split(" x ", 1)[1][:-1] if type_.startswith("<") else type_


def lanes_of(type_: str) -> int:
    """The number of lanes of a vector type; 0 for a scalar."""
    return int(type_[1:].split(" x ", 1)[0]) if type_.startswith("<") else 0


def float_text(value: float, scalar: str) -> str:
    """The LLVM literal of `value` rounded to the type, exactly."""
    if scalar == "float":
        value = struct.unpack("f", struct.pack("f", value))[0]
    elif scalar == "half":
        return f"0xH{struct.unpack('H', struct.pack('e', value))[0]:04X}"
    elif scalar == "bfloat":
        bits = struct.unpack("I", struct.pack("f", value))[0]
        return f"0xR{bits >> 16:04X}"
    return f"0x{struct.unpack('Q', struct.pack('d', value))[0]:016X}"


def const(type_: str, value: float | int | bool) -> Value:
    """A constant of a scalar or vector type; a vector gets `value` in every lane."""
    scalar = scalar_of(type_)
    if scalar in ("float", "double", "half", "bfloat"):
        text = float_text(float(value), scalar)
    elif scalar == "i1":
        text = "true" if value else "false"
    else:
        text = str(int(value))
    return Value(type_, f"splat ({scalar} {text})" if type_.startswith("<") else text)


def i64(value: Int) -> Value:
    """`value` as an i64."""
    return value if isinstance(value, Value) else Value("i64", str(value))


NULL = Value("ptr", "null")
_SUFFIX = {"float": "f32", "double": "f64", "half": "f16", "bfloat": "bf16"}


def intrinsic_suffix(type_: str) -> str:
    """The type suffix of LLVM intrinsics: `<16 x float>` is `v16f32`."""
    scalar = _SUFFIX.get(scalar_of(type_), scalar_of(type_))
    return f"v{lanes_of(type_)}{scalar}" if type_.startswith("<") else scalar


class Module:
    """Functions and declarations that are compiled to one object file."""

    def __init__(self) -> None:
        self.functions: dict[str, str] = {}
        self.declarations: dict[str, str] = {}
        self.tables: dict[str, str] = {}
        self.words: set[str] = set()

    def table(self, name: str, scalar: str, values: Sequence[int]) -> Value:
        """A table of constants in memory, one per name and module."""
        if name not in self.tables:
            numbers = ", ".join(f"{scalar} {v}" for v in values)
            self.tables[name] = f"private unnamed_addr constant [{len(values)} x {scalar}] [{numbers}], align 64"
        return Value("ptr", f"@table.{name}")

    def word(self, name: str) -> Value:
        """A word of constant memory whose value is patched into the object file at load time (`elf.with_word`)."""
        self.words.add(name)
        return Value("ptr", f"@{name}")

    def declare(self, name: str, result: str, arguments: Sequence[str]) -> None:
        self.declarations[name] = f"declare {result} @{name}({', '.join(arguments)})"

    def define(
        self,
        name: str,
        arguments: Sequence[tuple[str, str]],
        emit: Callable[..., Value | None],
        *,
        result: str = "void",
        internal: bool = False,
        noinline: bool = False,
    ) -> None:
        """Adds a function; `emit(builder, *arguments)` writes its body and returns the result value."""
        if name in self.functions:
            return
        self.functions[name] = ""  # reserves the name, so a body may refer to itself
        b = Builder(self)
        returned = emit(b, *(Value(t.split()[0] if not t.startswith("<") else t, f"%{n}") for t, n in arguments))
        b.line(f"ret {returned}" if returned is not None else "ret void")
        linkage = "internal " if internal else ""
        signature = ", ".join(f"{t} %{n}" for t, n in arguments)
        attributes = "nounwind noinline" if noinline else "nounwind"
        self.functions[name] = (
            f"define {linkage}{result} @{name}({signature}) {attributes} {{\nentry:\n" + "\n".join(b.lines) + "\n}\n"
        )

    def __len__(self) -> int:
        """Number of characters in its functions."""
        return sum(map(len, self.functions.values()))

    def text(self) -> str:
        declared = [d for n, d in sorted(self.declarations.items()) if n not in self.functions]
        tables = [f"@table.{n} = {t}" for n, t in sorted(self.tables.items())]
        words = [f"@{n} = dso_local constant i64 0, align 8" for n in sorted(self.words)]
        return "\n".join(tables + words + declared) + "\n\n" + "\n".join(self.functions.values())


class Builder:
    """Writes the body of one function."""

    def __init__(self, module: Module) -> None:
        self.module = module
        self.lines: list[str] = []
        self.block = "entry"
        self.count = 0

    # -- lines and names ------------------------------------------------------------------------------------------
    def fresh(self, prefix: str = "v") -> str:
        self.count += 1
        return f"{prefix}{self.count}"

    def line(self, text: str) -> None:
        self.lines.append("  " + text)

    def assign(self, type_: str, text: str) -> Value:
        name = "%" + self.fresh()
        self.lines.append(f"  {name} = {text}")
        return Value(type_, name)

    def label(self, name: str) -> None:
        self.lines.append(f"{name}:")
        self.block = name

    # -- integer arithmetic (folds constants) ---------------------------------------------------------------------
    def add(self, a: Int, b: Int) -> Value:
        x, y = self._pair(a, b)
        p, q = x.constant, y.constant
        if p is not None and q is not None:
            return Value(x.type, str(p + q))
        if p == 0:
            return y
        return x if q == 0 else self.assign(x.type, f"add {x}, {y.text}")

    def sub(self, a: Int, b: Int) -> Value:
        x, y = self._pair(a, b)
        p, q = x.constant, y.constant
        if p is not None and q is not None:
            return Value(x.type, str(p - q))
        return x if q == 0 else self.assign(x.type, f"sub {x}, {y.text}")

    def mul(self, a: Int, b: Int) -> Value:
        x, y = self._pair(a, b)
        p, q = x.constant, y.constant
        if p is not None and q is not None:
            return Value(x.type, str(p * q))
        if p == 0 or q == 0:
            return Value(x.type, "0")
        if p == 1:
            return y
        return x if q == 1 else self.assign(x.type, f"mul {x}, {y.text}")

    def sdiv(self, a: Int, b: Int) -> Value:
        """Quotient of non-negative integers."""
        x, y = self._pair(a, b)
        p, q = x.constant, y.constant
        if p is not None and q:
            return Value(x.type, str(p // q))
        return x if q == 1 else self.assign(x.type, f"sdiv {x}, {y.text}")

    def srem(self, a: Int, b: Int) -> Value:
        """Remainder of non-negative integers."""
        x, y = self._pair(a, b)
        p, q = x.constant, y.constant
        if p is not None and q:
            return Value(x.type, str(p % q))
        return Value(x.type, "0") if q == 1 else self.assign(x.type, f"srem {x}, {y.text}")

    def ceil_div(self, a: Int, b: int) -> Value:
        return self.sdiv(self.add(a, b - 1), b)

    def min(self, a: Int, b: Int) -> Value:
        x, y = self._pair(a, b)
        if x.constant is not None and y.constant is not None:
            return x if x.constant < y.constant else y
        return self.select(self.icmp("slt", x, y), x, y)

    def max(self, a: Int, b: Int) -> Value:
        x, y = self._pair(a, b)
        if x.constant is not None and y.constant is not None:
            return x if x.constant > y.constant else y
        return self.select(self.icmp("sgt", x, y), x, y)

    def _pair(self, a: Int, b: Int) -> tuple[Value, Value]:
        type_ = a.type if isinstance(a, Value) else b.type if isinstance(b, Value) else "i64"
        return (a if isinstance(a, Value) else const(type_, a)), (b if isinstance(b, Value) else const(type_, b))

    # -- any instruction ------------------------------------------------------------------------------------------
    def op(self, name: str, a: Value, b: Value) -> Value:
        """A binary instruction on operands of one type: fadd, fmul, and, shl, ..."""
        return self.assign(a.type, f"{name} {a}, {b.text}")

    def fneg(self, a: Value) -> Value:
        return self.assign(a.type, f"fneg {a}")

    def convert(self, name: str, a: Value, type_: str) -> Value:
        """A conversion instruction: sitofp, fpext, trunc, bitcast, ... (a no-op if the type already is `type_`)."""
        return a if a.type == type_ else self.assign(type_, f"{name} {a} to {type_}")

    def icmp(self, predicate: str, a: Int, b: Int) -> Value:
        x, y = self._pair(a, b)
        return self.assign(self._mask(x.type), f"icmp {predicate} {x}, {y.text}")

    def fcmp(self, predicate: str, a: Value, b: Value) -> Value:
        return self.assign(self._mask(a.type), f"fcmp {predicate} {a}, {b.text}")

    def select(self, condition: Value, a: Value, b: Value) -> Value:
        return self.assign(a.type, f"select {condition}, {a}, {b}")

    @staticmethod
    def _mask(type_: str) -> str:
        return vector(lanes_of(type_), "i1") if type_.startswith("<") else "i1"

    def call(self, result: str, name: str, *arguments: Value, cold: bool = False) -> Value:
        """Calls a function of the module or an intrinsic, declaring it; branches to a `cold` call are unlikely."""
        self.module.declare(name, result, [a.type for a in arguments])
        text = f"call {result} @{name}({', '.join(map(str, arguments))}){' cold' if cold else ''}"
        if result == "void":
            self.line(text)
            return NULL
        return self.assign(result, text)

    def call_pointer(self, function: Value, *arguments: Value) -> None:
        """Calls a void function by its address."""
        self.line(f"call void {function.text}({', '.join(map(str, arguments))})")

    def intrinsic(self, name: str, *arguments: Value) -> Value:
        """An LLVM intrinsic overloaded on its first argument, whose type it returns: `fma`, `sqrt`, `fabs`, ..."""
        type_ = arguments[0].type
        return self.call(type_, f"llvm.{name}.{intrinsic_suffix(type_)}", *arguments)

    # -- memory ---------------------------------------------------------------------------------------------------
    def offset(self, pointer: Value, index: Int, unit: str = "i8") -> Value:
        """`pointer` advanced by `index` elements of type `unit`."""
        n = i64(index)
        return pointer if n.constant == 0 else self.assign("ptr", f"getelementptr {unit}, {pointer}, {n}")

    def load(self, type_: str, pointer: Value, *, align: int = 1) -> Value:
        return self.assign(type_, f"load {type_}, {pointer}, align {align}")

    def store(self, value: Value, pointer: Value, *, align: int = 1) -> None:
        self.line(f"store {value}, {pointer}, align {align}")

    def stack(self, type_: str, count: int = 1, *, align: int = 64) -> Value:
        """Allocates memory in the stack frame; call it before any loop."""
        return self.assign("ptr", f"alloca {type_}, i64 {count}, align {align}")

    def prefetch(self, pointer: Value, *, locality: int = 3) -> None:
        self.call(
            "void", "llvm.prefetch.p0", pointer, Value("i32", "0"), Value("i32", str(locality)), Value("i32", "1")
        )

    # -- vectors --------------------------------------------------------------------------------------------------
    def splat(self, value: Value, lanes: int) -> Value:
        """A vector with `value` in every lane."""
        type_ = vector(lanes, value.type)
        if not value.text.startswith("%"):
            return Value(type_, f"splat ({value})")
        first = self.assign(type_, f"insertelement {type_} poison, {value}, i64 0")
        return self.assign(type_, f"shufflevector {first}, {type_} poison, <{lanes} x i32> zeroinitializer")

    def shuffle(self, a: Value, b: Value, pattern: Sequence[int]) -> Value:
        type_ = vector(len(pattern), scalar_of(a.type))
        indices = ", ".join(f"i32 {i}" for i in pattern)
        return self.assign(type_, f"shufflevector {a}, {b}, <{len(pattern)} x i32> <{indices}>")

    def extract(self, value: Value, lane: Int) -> Value:
        return self.assign(scalar_of(value.type), f"extractelement {value}, {i64(lane)}")

    def insert(self, into: Value, value: Value, lane: Int) -> Value:
        return self.assign(into.type, f"insertelement {into}, {value}, {i64(lane)}")

    def iota(self, lanes: int, scalar: str = "i64") -> Value:
        """0, 1, 2, ... as a vector constant."""
        return Value(vector(lanes, scalar), "<" + ", ".join(f"{scalar} {i}" for i in range(lanes)) + ">")

    def lane_mask(self, count: Value, lanes: int) -> Value:
        """A mask of the first `count` lanes (an i64 that may exceed the width)."""
        return self.icmp("slt", self.iota(lanes), self.splat(count, lanes))

    def opaque(self, value: Value) -> Value:
        """Hides an i64 constant from LLVM's optimiser."""
        if value.constant is None:
            return value
        return self.assign("i64", f'call i64 asm "", "=r,0"({value})')

    def fold(self, value: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """Reduces all lanes to a scalar by halving: one fixed order for every caller."""
        return self.extract(self.narrow(value, combine, 1), 0)

    def narrow(self, value: Value, combine: Callable[[Value, Value], Value], lanes: int) -> Value:
        """Reduces all lanes to a vector of `lanes` by halving."""
        while (width := lanes_of(value.type)) > lanes:
            low, high = (self.shuffle(value, value, part) for part in (range(width // 2), range(width // 2, width)))
            value = combine(low, high)
        return value

    def any(self, mask: Value) -> Value:
        """Whether any lane of a mask is set."""
        return self.icmp("ne", self.convert("bitcast", mask, f"i{lanes_of(mask.type)}"), 0)

    # -- control --------------------------------------------------------------------------------------------------
    def loop(
        self,
        low: Int,
        high: Int,
        step: Int,
        body: Body,
        carry: Sequence[Value] = (),
    ) -> list[Value]:
        """`for i in range(low, high, step)` with carried values; zero trips are allowed.

        `body(i, *carried)` returns the next carried values; the loop returns those after the last trip.
        """
        tag = self.fresh("loop")
        before = self.block
        self.line(f"br label %{tag}.head")
        self.label(f"{tag}.head")
        at = len(self.lines)
        index = Value("i64", f"%{tag}.i")
        carried = [Value(c.type, f"%{tag}.c{k}") for k, c in enumerate(carry)]
        more = self.icmp("slt", index, i64(high))
        self.line(f"br {more}, label %{tag}.body, label %{tag}.done")
        self.label(f"{tag}.body")
        after = list(body(index, *carried) or ())
        assert len(after) == len(carried), "a loop body returns one value per carried value"
        following = self.assign("i64", f"add {index}, {i64(step).text}")
        latch = self.block
        self.line(f"br label %{tag}.head")
        phis = [f"  {index.text} = phi i64 [ {i64(low).text}, %{before} ], [ {following.text}, %{latch} ]"]
        phis += [
            f"  {c.text} = phi {c.type} [ {start.text}, %{before} ], [ {end.text}, %{latch} ]"
            for c, start, end in zip(carried, carry, after, strict=True)
        ]
        self.lines[at:at] = phis
        self.label(f"{tag}.done")
        return carried

    def when(self, condition: Value, then: Body, otherwise: Body | None = None) -> list[Value]:
        """A branch; both sides return the same number of values, which are merged."""
        tag = self.fresh("if")
        other = f"{tag}.else" if otherwise else f"{tag}.end"
        self.line(f"br {condition}, label %{tag}.then, label %{other}")
        self.label(f"{tag}.then")
        first = list(then() or ())
        first_end = self.block
        self.line(f"br label %{tag}.end")
        second: list[Value] = []
        second_end = ""
        if otherwise:
            self.label(other)
            second = list(otherwise() or ())
            second_end = self.block
            self.line(f"br label %{tag}.end")
        assert len(first) == len(second), "both sides of a branch return the same number of values"
        self.label(f"{tag}.end")
        return [
            self.assign(a.type, f"phi {a.type} [ {a.text}, %{first_end} ], [ {b.text}, %{second_end} ]")
            for a, b in zip(first, second, strict=True)
        ]

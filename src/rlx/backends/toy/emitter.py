"""The emitter: translates a `LoopKernel` to the source of a Python function over NumPy.

Units, iterations of `vector` loops and terms of reductions are vectorised: each is an array axis, innermost first, so
that NumPy broadcasting aligns them. All other loops are Python loops. Where only some lanes take part in a loop or
branch, a mask selects them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rlx.backends.toy import scalars
from rlx.dtypes import ALL, I64, DType
from rlx.errors import LowerError
from rlx.lir.loops import (
    Apply,
    Arg,
    Assign,
    Check,
    Choose,
    Const,
    Expr,
    For,
    Index,
    Let,
    Load,
    Lookup,
    LoopKernel,
    Reduce,
    Ref,
    Stmt,
    Store,
    Var,
)

# Operations in Python. NumPy's integers wrap, maximum and minimum propagate NaN, integer division floors.
PYTHON = {
    "add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "{} / {}", "fma": "{} * {} + {}", "neg": "-{}",
    "floordiv": "np.floor_divide({}, {})", "mod": "np.mod({}, {})", "quot": "{} // {}", "rem": "{} % {}",
    "pow": "np.power({}, {})", "max": "np.maximum({}, {})", "min": "np.minimum({}, {})", "abs": "np.abs({})",
    "exp": "np.exp({})", "log": "np.log({})", "tanh": "np.tanh({})", "erf": "erf({})", "gelu": "gelu({})",
    "sqrt": "np.sqrt({})", "sin": "np.sin({})", "cos": "np.cos({})", "tan": "np.tan({})", "atan": "np.arctan({})",
    "eq": "{} == {}", "ne": "{} != {}", "lt": "{} < {}", "le": "{} <= {}", "gt": "{} > {}", "ge": "{} >= {}",
    "and": "{} & {}", "or": "{} | {}", "xor": "{} ^ {}", "not": "np.logical_not({})", "shl": "{} << {}",
    "shr": "{} >> {}", "select": "np.where({}, {}, {})", "order": "order({})", "bits": "bits({})",
    "nearest": "nearest({})", "dot_u8": "dot_bytes({}, {}, {})", "dot_u7": "dot_bytes({}, {}, {})",
}  # fmt: skip
COMBINE = {"sum": "np.add", "prod": "np.multiply", "max": "np.maximum", "min": "np.minimum"}

Function = Callable[..., None]
SCOPE = {"np": np, **vars(scalars), **{d.name: d.numpy.type for d in ALL}, **{d.name.upper(): d for d in ALL}}
UNIFORM = ("add", "sub", "mul", "quot", "rem", "and", "shl", "shr", "max", "min")  # integers in, integers out


_functions: dict[str, Function] = {}  # by fingerprint


def function(kernel: LoopKernel) -> Function:
    """The compiled function of a kernel, cached per process."""
    if kernel.fingerprint not in _functions:
        scope: dict[str, Any] = dict(SCOPE)
        exec(compile(source(kernel), kernel.symbol, "exec"), scope)
        _functions[kernel.fingerprint] = scope["kernel"]
    return _functions[kernel.fingerprint]


def functions_compiled() -> int:
    """Number of kernels this process has compiled."""
    return len(_functions)


def source(kernel: LoopKernel) -> str:
    """The Python source of a kernel: `kernel(units, faults, memory and offset of each parameter, arguments)`."""
    return _Emitter(kernel).run()


@dataclass(frozen=True)
class _Axes:
    """The number of axes of values, the active mask, and whether a vector loop encloses the code."""

    rank: int = 1
    mask: str = ""
    in_vector: bool = False


@dataclass
class _Emitter:
    kernel: LoopKernel
    lines: list[str] = field(default_factory=list)
    indent: int = 0
    axes: _Axes = field(default_factory=_Axes)
    names: dict[str, str] = field(default_factory=dict)  # Python names of loop variables, lets and variables
    memo: dict[int, str] = field(default_factory=dict)  # Python names of expressions, by id
    uniform: set[str] = field(default_factory=set)  # integers that are the same in all lanes, by Python name
    variables: set[str] = field(default_factory=set)  # names of mutable variables
    constants: dict[str, str] = field(default_factory=dict)  # text of each constant -> Python name
    count: int = 0

    def run(self) -> str:
        kernel, root = self.kernel, self.kernel.root
        for name in kernel.words:
            _checked(name)
        memory = [name for p in kernel.params for name in (f"mem_{p.name}", f"at_{p.name}")]
        arguments = [f"arg_{name}" for name in kernel.args]
        self.line(f"def kernel({', '.join(('units', 'faults', *memory, *arguments))}):")
        with self.block():
            self.uniform.update(arguments)
            for let in kernel.lets:
                self.stmt(let)
            stop = f"min(units * {int(kernel.chunk)}, {self.extent(root.extent)})" if kernel.chunk else "units"
            index = self.fresh(root.index)
            self.line(f"for {index} in batches({', '.join((stop, *_widths(root.body)))}):")
            with self.block(replace(self.axes, in_vector=bool(kernel.chunk))):
                self.names[root.index] = index
                self.body(root.body)
        constants = [f"{name} = {text}" for text, name in self.constants.items()]
        return "\n".join([*constants, *self.lines, ""])

    # -- text --
    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def fresh(self, name: str = "t") -> str:
        self.count += 1
        return f"{_checked(name)}_{self.count}"

    def let(self, text: str, *, uniform: bool = False) -> str:
        """Assigns an expression to a new name."""
        name = self.fresh()
        self.line(f"{name} = {text}")
        if uniform:
            self.uniform.add(name)
        return name

    def constant(self, text: str) -> str:
        return self.constants.setdefault(text, f"CONSTANT{len(self.constants)}")  # no loop index is called so

    @contextmanager
    def block(self, axes: _Axes | None = None) -> Iterator[None]:
        """Indents lines. Names and values from inside do not escape; earlier values may be stale inside."""
        saved = self.axes, self.names, self.memo
        self.axes, self.names, self.memo = axes or self.axes, dict(self.names), {}
        self.indent += 1
        yield
        self.indent -= 1
        self.axes, self.names, self.memo = saved

    @contextmanager
    def masked(self, mask: str) -> Iterator[None]:
        """Also restricts the code inside to lanes where `mask` holds."""
        saved = self.axes, self.memo
        mask = self.let(f"{self.axes.mask} & {mask}") if self.axes.mask else mask
        self.axes, self.memo = replace(self.axes, mask=mask), {}
        yield
        self.axes, self.memo = saved

    # -- statements --
    def body(self, stmts: tuple[Stmt, ...]) -> None:
        for stmt in stmts:
            self.stmt(stmt)

    def stmt(self, stmt: Stmt) -> None:
        mask = f", {self.axes.mask}" if self.axes.mask else ""
        match stmt:
            case Let():
                value = self.value(stmt.value)
                self.names[stmt.name] = self.let(value) if value in self.variables else value
            case Var():
                name = self.fresh(stmt.name)
                self.line(f"{name} = {self.value(stmt.start)}")
                self.names[stmt.name] = name
                self.variables.add(name)
            case Assign():
                name, value = self.names[stmt.name], self.value(stmt.value)
                self.line(f"{name} = np.where({self.axes.mask}, {value}, {name})" if mask else f"{name} = {value}")
                self.memo = {}
            case Store():
                param = self.kernel.params[stmt.param]
                value = self.cast(self.value(stmt.value), stmt.value.dtype, param.dtype)
                self.line(f"store(mem_{param.name}, {self.address(stmt.param, stmt.at)}, {value}{mask})")
                self.memo = {}
            case Check():
                self.line(f"check(faults, {self.value(stmt.condition)}, {int(stmt.code)}{mask})")
            case For():
                self.loop(stmt)
                self.memo = {}

    def loop(self, loop: For) -> None:
        """Vectorises a vector loop unless another one encloses it; any other loop is a Python loop."""
        extent, index = self.extent(loop.extent), self.fresh(loop.index)
        varies = isinstance(loop.extent, Ref) and extent not in self.uniform
        steps = self.let(f"longest({extent})") if varies else extent
        axes = self.axes
        if loop.vector and not axes.in_vector:
            self.line(f"if {steps} > 0:")
            axes = replace(axes, rank=axes.rank + 1, in_vector=True)
        else:
            self.line(f"for {index} in range({steps}):")
            self.uniform.add(index)
        with self.block(axes):
            if index not in self.uniform:
                self.line(f"{index} = indices(0, {steps}, {axes.rank - 1})")
            self.names[loop.index] = index
            if not varies:
                self.body(loop.body)
                return
            with self.masked(self.let(f"{index} < {extent}")):
                self.body(loop.body)

    def extent(self, extent: int | Arg | Ref) -> str:
        match extent:
            case Arg():
                return f"arg_{extent.name}"
            case Ref():
                return self.names[extent.name]
        return str(int(extent))

    # -- expressions --
    def value(self, expr: Expr) -> str:
        """The Python name (or number) of an expression; common subexpressions under one mask are computed once."""
        match expr:
            case Index() | Ref():
                return self.names[expr.name]
            case Arg():
                return f"arg_{expr.name}"
            case Const() if expr.dtype is I64:
                return str(int(expr.value))
            case Const():
                plain = repr(expr.value) if math.isfinite(expr.value) else repr(str(expr.value))
                return self.constant(f"{expr.dtype}({plain})")
        if id(expr) not in self.memo:
            self.memo[id(expr)] = self.computed(expr)
        return self.memo[id(expr)]

    def computed(self, expr: Expr) -> str:
        match expr:
            case Load():
                memory, at = f"mem_{self.kernel.params[expr.param].name}", self.address(expr.param, expr.at)
                mask = self.axes.mask
                return self.let(f"load({memory}, {at}, {mask})" if mask else f"{memory}[{at}]")
            case Apply(op="cast"):
                return self.cast(self.value(expr.args[0]), expr.args[0].dtype, expr.dtype)
            case Apply():
                args = [self.value(a) for a in expr.args]
                uniform = expr.dtype is I64 and expr.op in UNIFORM and all(self.is_uniform(a) for a in args)
                return self.let(PYTHON[expr.op].format(*args), uniform=uniform)
            case Choose():
                condition = self.value(expr.condition)
                with self.masked(condition):
                    then = self.value(expr.then)
                with self.masked(self.let(f"np.logical_not({condition})")):
                    other = self.value(expr.other)
                return self.let(f"np.where({condition}, {then}, {other})")
            case Reduce():
                return self.reduction(expr)
            case Lookup():
                table = self.constant(f"np.array({[int(v) for v in expr.table.values]}, np.int32)")
                return self.let(f"{table}[{self.value(expr.index)}]")
        raise AssertionError(f"{expr} is not an expression")

    def reduction(self, expr: Reduce) -> str:
        term, index = self.fresh("term"), self.fresh(expr.index)
        start = self.constant(f"identity({expr.op!r}, {expr.dtype.name.upper()})")
        extent = self.extent(expr.extent)
        varies = isinstance(expr.extent, Ref) and extent not in self.uniform
        steps = self.let(f"longest({extent})") if varies else extent
        self.line(f"def {term}({index}):")
        with self.block(replace(self.axes, rank=self.axes.rank + 1)):
            self.names[expr.index] = index
            if varies:
                inside = self.let(f"{index} < {extent}")
                with self.masked(inside):
                    value = self.value(expr.value)
                self.line(f"return np.where({inside}, {value}, {start})")
            else:
                self.line(f"return {self.value(expr.value)}")
        return self.let(f"reduce({COMBINE[expr.op]}, {start}, {steps}, {self.axes.rank}, {term})")

    def address(self, param: int, at: tuple[tuple[Expr, int | Arg], ...]) -> str:
        terms = [f"at_{self.kernel.params[param].name}"]
        for index, stride in at:
            value = self.value(index)
            terms.append(value if stride == 1 else f"{value} * {self.extent(stride)}")
        return self.let(" + ".join(terms)) if at else terms[0]

    def cast(self, value: str, have: DType, want: DType) -> str:
        return value if have is want else self.let(f"cast({value}, {have.name.upper()}, {want.name.upper()})")

    def is_uniform(self, value: str) -> bool:
        return value in self.uniform or value.lstrip("-").isdigit()


def _checked(name: str) -> str:
    """Validates a kernel's name before it becomes part of a Python name: programs may come from files."""
    if not name.isidentifier():
        raise LowerError(f"toy: {name!r} is not a valid name for a kernel value")
    return name


def _widths(body: tuple[Stmt, ...]) -> Iterator[str]:
    """Python expressions for the lane count of each vector loop in a body, where known beforehand."""
    for stmt in body:
        if isinstance(stmt, For):
            if stmt.vector and not isinstance(stmt.extent, Ref):
                yield f"arg_{stmt.extent.name}" if isinstance(stmt.extent, Arg) else str(int(stmt.extent))
            else:
                yield from _widths(stmt.body)

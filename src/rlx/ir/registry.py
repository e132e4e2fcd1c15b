"""The op registry: one declaration per op, and the rule tables keyed by op. Data only.

`@op(...)` turns a type rule into an `OpDef`: the rule's own signature is the schema (positional operands, keyword-only
attributes), its docstring is the documentation. Passes and transforms look rules up in `RuleTable`s, keyed by op name.
"""

from __future__ import annotations

import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from types import FunctionType
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from rlx.dtypes import DType, dtype
from rlx.errors import DTypeError, GraphError, LowerError, RlxError, nearest
from rlx.fast_dataclass import dataclass
from rlx.ir.independence import Independence, aligned
from rlx.types import TensorType

HIR, MIR = "hir", "mir"

ELEMENTWISE = "elementwise"  # the result at an index depends only on the operands at that index
VIEW = "view"  # the result is a strided view of the operand, wherever strides can express it
LEAF = "leaf"  # input, param, const
NAMED = ("input", "state", "param")  # leaves that have names
REQUIRED = inspect.Parameter.empty  # default of a mandatory attribute
FUSED = "fused"  # created by passes, not by users
TAKES_PACKED = "packed"  # operands may be quantised blocks
CONTROL = "control"  # runs graphs that are its attributes: a loop, a branch, a custom function
CHECKS_DATA = "checks data"  # run time checks its operands' data, such as indices
CHECKS_ROWS = "checks rows"  # the same, but only for an optional operand `rows`
CHECKS_SIZES = "checks sizes"  # run time checks symbolic sizes
COMPOSED = "composed"  # has no kernel: replaced by its decomposition first of all
PER_TOKEN = "per token"  # a block whose result at a token depends on that token, its position and weights only
MIXES_TOKENS = "mixes tokens"  # a block that reads other tokens, from a state or from the same call
SEGMENTED = "segmented"  # composed if its last operand, segment ids, is present; otherwise it has a kernel

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep


@dataclass(frozen=True, slots=True)
class Spec:
    """An operand of a sample: random numbers of a shape within [low, high)."""

    shape: tuple[int, ...]
    dtype: str = "f32"
    low: float = -3.0
    high: float = 3.0
    distinct: bool = False  # pairwise different integers
    definite: bool = False  # positive definite matrices

    def array(self, rng: np.random.Generator, dtype_: DType | None = None) -> np.ndarray[Any, Any]:
        """Draws the numbers; a float spec uses the float type `dtype_` if passed."""
        wanted = dtype(self.dtype)
        if wanted.is_float and dtype_ is not None:
            wanted = dtype_
        if wanted.is_packed:
            return _random_blocks(rng, wanted, self.shape)
        if wanted.is_bool:
            return rng.random(self.shape) < 0.5
        if self.definite:
            factor = rng.uniform(self.low, self.high, self.shape) / self.shape[-1] ** 0.5
            matrix: np.ndarray[Any, Any] = factor @ factor.swapaxes(-1, -2) + 2 * np.eye(self.shape[-1])
            return matrix.astype(wanted.numpy)
        if self.distinct:
            numbers = np.arange(int(self.low), int(self.high))
            return rng.choice(numbers, self.shape, replace=False).astype(wanted.numpy)
        if wanted.is_integer:
            return rng.integers(int(self.low), int(self.high), self.shape).astype(wanted.numpy)
        return rng.uniform(self.low, self.high, self.shape).astype(wanted.numpy)


def _random_blocks(rng: np.random.Generator, storage: DType, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    blocks = np.zeros((*shape[:-1], shape[-1] // storage.block), storage.numpy)
    for name in storage.numpy.names or ():
        part = blocks[name]
        if part.dtype.kind == "f":
            part[...] = rng.uniform(-1, 1, part.shape)
        else:
            raw = rng.integers(0, 256, (*part.shape, part.dtype.itemsize)).astype(np.uint8)
            part[...] = raw.view(part.dtype)[..., 0]
    match storage.name:  # scales that are not separate floats: near 1, neither infinite nor NaN
        case "iq1_m":
            blocks["scales"][..., 3] = blocks["scales"][..., 3] & 0x0FFF | 0x2000
        case "mxfp4":
            blocks["e"] = rng.integers(118, 128, blocks.shape)
        case "nvfp4":
            blocks["d"] = rng.integers(0, 64, blocks["d"].shape)
        case "f8e4m3_128" | "f8e4m3_32":
            blocks["codes"] &= 0xF7  # 0x7f and 0xff are NaN
    return blocks


def f32(*shape: int, low: float = -3.0, high: float = 3.0) -> Spec:
    """Random floats."""
    return Spec(shape, "f32", low, high)


def i32(*shape: int, low: int = -9, high: int = 9, distinct: bool = False) -> Spec:
    """Random integers."""
    return Spec(shape, "i32", low, high, distinct)


def boolean(*shape: int) -> Spec:
    """Random booleans."""
    return Spec(shape, "bool")


def packed(storage: str, *shape: int) -> Spec:
    """Random quantised blocks; the shape counts elements."""
    return Spec(shape, storage)


@dataclass(frozen=True, slots=True)
class Sample:
    """Arguments for a test of an op: operands (None if omitted) and attributes."""

    operands: tuple[Spec | None, ...]
    attrs: Mapping[str, Any] = field(default_factory=dict)


def sample(*operands: Spec | None, **attrs: Any) -> Sample:
    """Makes a sample."""
    return Sample(operands, attrs)


@dataclass(frozen=True, slots=True)
class Schema:
    """Operands and attributes of an op, from the signature of its type rule."""

    operands: tuple[str, ...]
    optional: int  # how many trailing operands may be None
    variadic: bool
    attrs: Mapping[str, Any]  # name -> default, or inspect.Parameter.empty


@dataclass(frozen=True)
class OpDef:
    """The complete declaration of an op."""

    name: str
    group: str
    level: str
    rule: Callable[..., TensorType | tuple[TensorType, ...]]
    schema: Schema
    reference: Callable[..., Any] | None
    samples: tuple[Sample, ...]
    traits: frozenset[str]
    decompose: Callable[..., Any] | None
    scalar: str  # name of the scalar operation of an elementwise op
    tolerance: float  # relative, f32, against the outside oracle
    doc: str
    place: str  # file:line
    takes_binding: bool  # whether the reference needs the symbols' sizes
    independent: Independence | None  # when batch entries are independent; None (undeclared): never

    def __str__(self) -> str:
        return self.name

    def __call__(self, *operands: Any, **attrs: Any) -> Any:
        """Apply the op to values of a graph, of a flow or of a traced function, as their method of its name does."""
        method = getattr(operands[0], self.name, None) if operands else None
        if method is None:
            kind = type(operands[0]).__name__ if operands else "nothing"
            hint = f"rlx.jit(lambda x: x.{self.name}())(array) computes it"
            raise GraphError(f"{self.name}: takes values of a graph, found {kind}", hint=hint)
        return method(*operands[1:], **attrs)

    @property
    def is_builtin(self) -> bool:
        """Whether rlx itself declares it."""
        return self.place.startswith(_PACKAGE)


OPS: dict[str, OpDef] = {}
version = 0  # counts removed declarations, for caches of what ops mean
SPELLINGS = {"quantize": "quantise", "dequantize": "dequantise", "fake_quantize": "fake_quantise"}  # as methods
RENAMED = {"barrier": "optimization_barrier", "settled": "read_before_update", "after": "depends_on"}  # in 0.2.0


def current_name(name: str) -> str:
    """The name of the op that is also spelled `name`, or was called so in the version before, which warns."""
    if name in RENAMED and name not in OPS:
        warnings.warn(f"the op {name} is now called {RENAMED[name]}", DeprecationWarning, stacklevel=3)
        return RENAMED[name]
    return SPELLINGS.get(name, name)


def get(name: str) -> OpDef:
    """Look up an op by name."""
    definition = OPS.get(name) or OPS.get(current_name(name))
    if definition is None:
        raise GraphError(f"op: no op is called {name!r}", hint=nearest(name, OPS))
    return definition


def result_types(
    definition: OpDef, operands: Sequence[TensorType | None], attrs: Mapping[str, Any]
) -> tuple[TensorType, ...]:
    """Infers result types with the type rule. Any exception in it, such as text for a number, is a GraphError."""
    for t in operands:
        if t is not None and t.dtype.is_packed and TAKES_PACKED not in definition.traits:
            raise DTypeError(f"{definition.name}: {t} is packed", hint="unpack it with x.dequantise()")
    try:
        inferred = definition.rule(*operands, **attrs)
    except RlxError:
        raise
    except Exception as error:
        raise GraphError(f"{definition.name}: cannot be typed, {error}") from error
    types = inferred if isinstance(inferred, tuple) else (inferred,)
    if not types or not all([isinstance(t, TensorType) for t in types]):
        raise GraphError(f"{definition.name}: its type rule gives {inferred!r}, expected a TensorType or several")
    return types


def _schema(rule: Callable[..., Any]) -> Schema:
    operands, attrs, optional, variadic = [], {}, 0, False
    for parameter in inspect.signature(rule).parameters.values():
        match parameter.kind:
            case inspect.Parameter.KEYWORD_ONLY:
                attrs[parameter.name] = parameter.default
            case inspect.Parameter.VAR_POSITIONAL:
                variadic = True
                operands.append(parameter.name)
            case _:
                operands.append(parameter.name)
                optional += parameter.default is None
    return Schema(tuple(operands), optional, variadic, attrs)


def _parameters(function: Callable[..., Any]) -> Iterable[str]:
    if isinstance(function, FunctionType) and not hasattr(function, "__wrapped__"):  # fast path
        code = function.__code__
        return code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # a NumPy ufunc has no signature
        return ()


def op(
    name: str,
    *,
    reference: Callable[..., Any] | None = None,
    samples: Iterable[Sample] = (),
    traits: Iterable[str] = (),
    decompose: Callable[..., Any] | None = None,
    scalar: str = "",
    tolerance: float = 1e-6,
    level: str = MIR,
    doc: str | None = None,
    independent: Independence | None = None,
) -> Callable[[Callable[..., Any]], OpDef]:
    """Declare an op; decorates its type rule. Users call `rlx.op`."""

    def declare(rule: Callable[..., Any]) -> OpDef:
        if name in OPS:
            raise GraphError(f"op {name}: declared twice, first at {OPS[name].place}")
        caller = sys._getframe(1)  # not this frame, which would form a reference cycle with everything that imports it
        while caller.f_back is not None and caller.f_globals.get("__name__") in _DECLARING:
            caller = caller.f_back
        definition = OpDef(
            name=name,
            group=_group(caller.f_globals.get("__name__")),
            level=level,
            rule=rule,
            schema=_schema(rule),
            reference=reference,
            samples=tuple(samples),
            traits=frozenset(traits),
            decompose=decompose,
            scalar=scalar,
            tolerance=tolerance,
            doc=inspect.cleandoc(doc or rule.__doc__ or ""),
            takes_binding=reference is not None and "binding" in _parameters(reference),
            independent=aligned if independent is None and ELEMENTWISE in traits else independent,
            place=f"{caller.f_code.co_filename}:{caller.f_lineno}",
        )
        OPS[name] = definition
        return definition

    return declare


_DECLARING = (__name__, "rlx.lir.forms.custom")  # modules that declare on behalf of others


def _group(module: str | None) -> str:
    """The op group of a module; scripts and unnamed modules are `main`."""
    return (module or "main").rsplit(".", 1)[-1].strip("_")


Rule = TypeVar("Rule", bound=Callable[..., Any])


class RuleTable(Generic[Rule]):
    """Rules by op name. Refuses a second rule for an op; the error for a missing rule says where to add it."""

    all: ClassVar[list[RuleTable[Any]]] = []

    def __init__(self, kind: str, where: str) -> None:
        RuleTable.all.append(self)
        self.kind = kind
        self.where = where  # path pattern with {group}
        self._rules: dict[str, Rule] = {}

    def __call__(self, *names: str) -> Callable[[Rule], Rule]:
        """Decorator: registers a rule for one or more ops."""

        def add(rule: Rule) -> Rule:
            for name in names:
                if name in self._rules:
                    raise GraphError(f"op {name}: has a {self.kind} already")
                self._rules[name] = rule
            return rule

        return add

    def __contains__(self, name: str) -> bool:
        return name in self._rules

    def get(self, name: str) -> Rule | None:
        """The rule for an op, or None."""
        return self._rules.get(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rules)

    def __getitem__(self, name: str) -> Rule:
        rule = self._rules.get(name)
        if rule is None:
            definition = OPS.get(name)
            if definition is not None and not definition.is_builtin:
                hint = f"give decompose=, loop= or scalar= to rlx.op, at {definition.place}"
                raise LowerError(f"op {name}: has no {self.kind} and no decomposition", hint=hint)
            if definition is not None and definition.level == HIR:
                raise LowerError(f"block {name}: has no {self.kind}", hint="lower the graph first: GraphModule.lower()")
            group = definition.group if definition is not None else "?"
            raise LowerError(f"op {name}: has no {self.kind}", hint=f"add it in {self.where.format(group=group)}")
        return rule

    def drop(self, name: str) -> None:
        """Remove the rule of an op that is redeclared."""
        self._rules.pop(name, None)


Results = TypeVar("Results", bound=Sequence[Any])


def checked_results(rule: str, op: str, results: Results, count: int) -> Results:
    """What a rule returned, if it is a sequence of as many as it should return."""
    if not isinstance(results, (tuple, list)) or len(results) != count:
        actual = f"{len(results)} values" if isinstance(results, (tuple, list)) else type(results).__name__
        hint = "return [y], not y" if count == 1 and results is not None else None  # rules of users have no types
        raise LowerError(f"op {op}: its {rule} returned {actual}, expected a list of {count}", hint=hint)
    return results


def place_of(function: Callable[..., Any]) -> str:
    """`file:line` of a rule, for `rlx ops NAME`."""
    code = getattr(inspect.unwrap(function), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else "built in"

"""Sizes and tensor types: `Dim` expressions over named symbols, `TensorType`, broadcasting, bindings of symbols.

A size is a Python int or a `Dim`: a polynomial over symbols and over `//`, `min`, `max` of sizes, kept in a normal form,
so that equal sizes are equal objects. Zero is legal everywhere; a symbol never broadcasts as 1.
"""

from __future__ import annotations

import ast
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from rlx.dtypes import DType, DTypeLike, dtype
from rlx.errors import BindError, GraphError, ParseError, ShapeError

Size = Union[int, "Dim"]
ShapeLike = Iterable[Any]  # ints, Dims or strings


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named run-time size; `max` bounds it and is checked at run time, but does not tell symbols apart."""

    name: str
    max: int | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Composite:
    """A size that is not a polynomial: `a // b`, `min(a, b)` or `max(a, b)`."""

    op: str
    a: Size
    b: Size


Atom = Union[Symbol, Composite]
Monomial = tuple[Atom, ...]


class Dim:
    """A size known only at run time. Build with `rlx.dim("n")`, combine with + - * // and `dim_min`, `dim_max`."""

    __slots__ = ("_hash", "terms")

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        self._hash = hash(terms)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Dim, (self.terms,))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Dim) and self.terms == other.terms)

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Size) -> Size:
        return _combine((self, 1), (other, 1))

    __radd__ = __add__

    def __sub__(self, other: Size) -> Size:
        return _combine((self, 1), (other, -1))

    def __rsub__(self, other: Size) -> Size:
        return _combine((other, 1), (self, -1))

    def __mul__(self, other: Size) -> Size:
        if isinstance(other, int):
            return _combine((self, other))
        total: dict[Monomial, int] = {}
        for m, c in self.terms:
            for n, d in other.terms:
                key = tuple(sorted(m + n, key=_atom_key))
                total[key] = total.get(key, 0) + c * d
        return _normal(total)

    __rmul__ = __mul__

    def __floordiv__(self, other: Size) -> Size:
        return dim_floordiv(self, other)

    def __rfloordiv__(self, other: Size) -> Size:
        return dim_floordiv(other, self)

    def __bool__(self) -> bool:
        raise ShapeError(f"dim {self}: its size is not known before run time", hint="compare dims with ==")

    def __int__(self) -> int:
        raise ShapeError(f"dim {self}: its size is not known before run time", hint="bind it with a DimBinding")

    def __str__(self) -> str:
        return _dim_text(self)

    def __repr__(self) -> str:
        return f"Dim({self})"

    def symbols(self) -> Iterator[Symbol]:
        """Every symbol in the expression, with repetitions."""
        for monomial, _ in self.terms:
            for atom in monomial:
                if isinstance(atom, Symbol):
                    yield atom
                else:
                    yield from symbols_of(atom.a)
                    yield from symbols_of(atom.b)


def _atom_key(atom: Atom) -> tuple[int, str]:
    return (0, atom.name) if isinstance(atom, Symbol) else (1, f"{atom.op}({atom.a},{atom.b})")


def _terms(size: Size) -> tuple[tuple[Monomial, int], ...]:
    return size.terms if isinstance(size, Dim) else (((), int(size)),)


def _combine(*weighted: tuple[Size, int]) -> Size:
    total: dict[Monomial, int] = {}
    for size, weight in weighted:
        for monomial, coefficient in _terms(size):
            total[monomial] = total.get(monomial, 0) + weight * coefficient
    return _normal(total)


def _normal(total: Mapping[Monomial, int]) -> Size:
    kept = [(m, c) for m, c in total.items() if c]
    if not kept:
        return 0
    if len(kept) == 1 and not kept[0][0]:
        return kept[0][1]
    kept.sort(key=lambda t: (-len(t[0]), [_atom_key(a) for a in t[0]]))
    return Dim(tuple(kept))


def _atom(atom: Atom) -> Dim:
    return Dim((((atom,), 1),))


def dim(name: str, *, max: int | None = None) -> Dim:
    """A named run-time size; every use of the name in one graph is the same size."""
    if not name.isidentifier():
        raise GraphError(f"dim: {name!r} is not a name", hint="letters, digits and _ only")
    return _atom(Symbol(name, max))


def dim_floordiv(a: Size, b: Size) -> Size:
    """`a // b`, exact where every term divides."""
    if b == 0:
        raise ShapeError(f"dim: {a} // 0")
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 1:
        return a
    if isinstance(b, int) and all(c % b == 0 for _, c in _terms(a)):
        return _normal({m: c // b for m, c in _terms(a)})
    if isinstance(b, Dim) and len(b.terms) == 1:
        exact = _divide_by_monomial(a, *b.terms[0])
        if exact is not None:
            return exact
    return _atom(Composite("//", a, b))


def _divide_by_monomial(a: Size, divisor: Monomial, coefficient: int) -> Size | None:
    total: dict[Monomial, int] = {}
    for monomial, c in _terms(a):
        rest = list(monomial)
        for atom in divisor:
            if atom not in rest:
                return None
            rest.remove(atom)
        if c % coefficient:
            return None
        total[tuple(rest)] = c // coefficient
    return _normal(total)


def dim_min(a: Size, b: Size) -> Size:
    """The smaller of two sizes."""
    return _extreme("min", a, b)


def dim_max(a: Size, b: Size) -> Size:
    """The larger of two sizes."""
    return _extreme("max", a, b)


def _extreme(op: str, a: Size, b: Size) -> Size:
    difference = _combine((a, 1), (b, -1))
    if isinstance(difference, int):
        smaller, larger = (a, b) if difference <= 0 else (b, a)
        return smaller if op == "min" else larger
    if _atom_key_of(b) < _atom_key_of(a):
        a, b = b, a
    return _atom(Composite(op, a, b))


def _atom_key_of(size: Size) -> str:
    return str(size)


def symbols_of(size: Size) -> Iterator[Symbol]:
    """The symbols of a size; none for an int."""
    if isinstance(size, Dim):
        yield from size.symbols()


def known_equal(a: Size, b: Size) -> bool | None:
    """True or False where it can be decided, None where it depends on run-time values."""
    difference = _combine((a, 1), (b, -1))
    return difference == 0 if isinstance(difference, int) else None


def is_monotone(size: Size) -> bool:
    """Whether the size can only grow when any symbol grows."""
    if isinstance(size, int):
        return True
    return all(
        c > 0
        and all(
            isinstance(a, Symbol)
            or (is_monotone(a.a) and (isinstance(a.b, int) if a.op == "//" else is_monotone(a.b)))
            for a in m
        )
        for m, c in size.terms
    )


# -- text -----------------------------------------------------------------------------------------------------------
def _dim_text(size: Size, names: Mapping[str, str] | None = None) -> str:
    if isinstance(size, int):
        return str(size)
    text = ""
    for monomial, coefficient in size.terms:
        sign = "-" if coefficient < 0 else "+" if text else ""
        factors = [_atom_text(a, names) for a in monomial]
        if abs(coefficient) != 1 or not factors:
            factors.insert(0, str(abs(coefficient)))
        text += f"{' ' if text else ''}{sign}{' ' if text and sign else ''}" + "*".join(factors)
    return text


def _atom_text(atom: Atom, names: Mapping[str, str] | None) -> str:
    if isinstance(atom, Symbol):
        return names[atom.name] if names else atom.name
    a, b = _dim_text(atom.a, names), _dim_text(atom.b, names)
    return f"(({a}) // ({b}))" if atom.op == "//" else f"{atom.op}({a}, {b})"


@functools.lru_cache(maxsize=4096)
def parse_dim(text: str) -> Size:
    """The size that an expression says: `4`, `batch*seq`, `(seq + 63) // 64`, `min(a, b)`."""
    try:
        tree = ast.parse(text.strip(), mode="eval").body
    except SyntaxError as error:
        raise ParseError(f"dim: {text!r} is not a size") from error
    return _dim_from_ast(tree, text)


def _dim_from_ast(tree: ast.expr, text: str) -> Size:
    match tree:
        case ast.Constant(value=int() as value) if not isinstance(value, bool):
            return value
        case ast.Name(id=name):
            return dim(name)
        case ast.UnaryOp(op=ast.USub(), operand=inner):
            return 0 - _dim_from_ast(inner, text)
        case ast.BinOp(left=left, op=operator, right=right):
            a, b = _dim_from_ast(left, text), _dim_from_ast(right, text)
            match operator:
                case ast.Add():
                    return a + b
                case ast.Sub():
                    return a - b
                case ast.Mult():
                    return a * b
                case ast.FloorDiv():
                    return dim_floordiv(a, b)
        case ast.Call(func=ast.Name(id="min" | "max" as name), args=[x, y]):
            return _extreme(name, _dim_from_ast(x, text), _dim_from_ast(y, text))
    raise ParseError(f"dim: {text!r} is not a size", hint="sizes use names, integers, + - * // min max")


def as_size(like: Any) -> Size:
    """A size from an int, a Dim, a NumPy integer or text."""
    if isinstance(like, Dim):
        return like
    if isinstance(like, str):
        return parse_dim(like)
    if isinstance(like, bool) or not hasattr(like, "__index__"):
        raise ShapeError(f"shape: {like!r} is not a size", hint="use an int, a name or rlx.dim(...)")
    value = int(like)
    if value < 0:
        raise ShapeError(f"shape: size {value} is negative")
    return value


def as_shape(like: ShapeLike) -> tuple[Size, ...]:
    """A shape from any iterable of sizes."""
    if isinstance(like, str):
        raise ShapeError(f"shape: {like!r} is a string", hint=f"write ({like!r},) for one axis")
    return tuple(as_size(d) for d in like)


# -- values at run time ---------------------------------------------------------------------------------------------
class DimBinding:
    """Sizes for symbols. Symbols may be given by name or as the Dim itself."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self._sizes: dict[str, int] = {}
        for symbol, size in (sizes or {}).items():
            self.set(symbol, size)

    @classmethod
    def batch_seq(cls, batch: int, seq: int) -> DimBinding:
        """BATCH and SEQ bound."""
        return cls({"batch": batch, "seq": seq})

    @classmethod
    def batch_past_seq(cls, batch: int, past: int) -> DimBinding:
        """BATCH and PAST_SEQ bound."""
        return cls({"batch": batch, "past_seq": past})

    def get(self, symbol: str | Dim) -> int | None:
        """The size of a symbol or of an expression over bound symbols; None if unbound."""
        size = parse_dim(symbol) if isinstance(symbol, str) else symbol
        if any(s.name not in self._sizes for s in symbols_of(size)):
            return None
        return evaluate(size, self._sizes)

    def set(self, symbol: str | Dim, size: int) -> DimBinding:
        """Bind one symbol; a later binding wins."""
        name = str(symbol)
        if not name.isidentifier():
            raise GraphError(f"binding: {name} is an expression, not a symbol", hint="bind its symbols instead")
        self._sizes[name] = int(as_size(size))
        return self

    def items(self) -> list[tuple[str, int]]:
        """Bound symbols in alphabetical order."""
        return sorted(self._sizes.items())

    def as_dict(self) -> dict[str, int]:
        return dict(self._sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DimBinding) and self._sizes == other._sizes

    def __repr__(self) -> str:
        return "DimBinding(" + ", ".join(f"{k}={v}" for k, v in self.items()) + ")"


def evaluate(size: Size, binding: Mapping[str, int]) -> int:
    """The value of a size under a binding of symbol names."""
    if isinstance(size, int):
        return size
    total = 0
    for monomial, coefficient in size.terms:
        for atom in monomial:
            if isinstance(atom, Symbol):
                if atom.name not in binding:
                    raise BindError(f"dim {size}: symbol {atom.name!r} is not bound")
                coefficient *= binding[atom.name]
            else:
                a, b = evaluate(atom.a, binding), evaluate(atom.b, binding)
                coefficient *= a // b if atom.op == "//" else min(a, b) if atom.op == "min" else max(a, b)
        total += coefficient
    return total


def compile_sizes(symbols: Sequence[str], sizes: Sequence[Size]) -> Callable[..., tuple[int, ...]]:
    """A function of the symbols' values, in order, that evaluates all sizes at once: far faster than one by one."""
    names = {symbol: f"s{i}" for i, symbol in enumerate(symbols)}
    body = ", ".join(_dim_text(size, names) for size in sizes)
    text = f"lambda {', '.join(names.values())}: ({body}{',' if sizes else ''})"
    return eval(text, {"__builtins__": {}, "min": min, "max": max})  # type: ignore[no-any-return]


class sym:
    """The symbols that the model families use."""

    BATCH = dim("batch")
    SEQ = dim("seq")
    PAST_SEQ = dim("past_seq")
    ROWS = BATCH * SEQ


# -- tensor types ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of a value."""

    shape: tuple[Size, ...]
    dtype: DType

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def elements(self) -> Size:
        return product(self.shape)

    @property
    def bytes(self) -> Size:
        return product(self.shape) * self.dtype.size

    def with_shape(self, *shape: Size) -> TensorType:
        return TensorType(tuple(shape), self.dtype)

    def with_dtype(self, like: DTypeLike) -> TensorType:
        return TensorType(self.shape, dtype(like))


def tensor(shape: ShapeLike, like: DTypeLike = "f32") -> TensorType:
    """A tensor type from loose parts."""
    return TensorType(as_shape(shape), dtype(like))


def parse_type(text: str) -> TensorType:
    """The type that text such as `f32[batch, 4]` says."""
    name, _, rest = text.strip().partition("[")
    if not rest.endswith("]"):
        raise ParseError(f"type: {text!r} has no [shape]")
    inner = rest[:-1].strip()
    return TensorType(tuple(parse_dim(d) for d in split_top(inner)) if inner else (), dtype(name))


def split_top(text: str, separator: str = ",") -> list[str]:
    """Split at separators that stand outside brackets and quotes."""
    parts, depth, start, quoted = [], 0, 0, False
    for i, c in enumerate(text):
        if c == '"' and (i == 0 or text[i - 1] != "\\"):
            quoted = not quoted
        elif quoted:
            continue
        elif c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[start:i].strip())
            start = i + 1
    parts.append(text[start:].strip())
    return parts


def product(sizes: Iterable[Size]) -> Size:
    """The product of sizes; 1 for none."""
    total: Size = 1
    constant = 1
    for size in sizes:
        if isinstance(size, int):
            constant *= size
        else:
            total = total * size
    return total * constant


def concrete(shape: Sequence[Size], binding: Mapping[str, int]) -> tuple[int, ...]:
    """A shape with all symbols replaced."""
    return tuple(evaluate(d, binding) for d in shape)


def broadcast(*shapes: Sequence[Size], where: str = "broadcast") -> tuple[Size, ...]:
    """The common shape, aligned at the right. A 1 stretches; a symbol never does."""
    rank = max((len(s) for s in shapes), default=0)
    result: list[Size] = [1] * rank
    for shape in shapes:
        for axis, size in enumerate(shape, start=rank - len(shape)):
            have = result[axis]
            if size == 1 or have == size:
                continue
            if have == 1:
                result[axis] = size
                continue
            shown = " and ".join("[" + ", ".join(map(str, s)) + "]" for s in shapes)
            require_equal(have, size, f"{where}: sizes {have} and {size} do not broadcast", notes=[f"shapes: {shown}"])
    return tuple(result)


def require_equal(a: Size, b: Size, message: str, *, notes: Iterable[str] = (), hint: str | None = None) -> None:
    """Raise unless two sizes are equal for every binding."""
    same = known_equal(a, b)
    if same:
        return
    if same is None:
        hint = f"if {a} and {b} are equal whenever this runs, say so: x.assume_equal(shape=...)"
    raise ShapeError(message, notes=notes, hint=hint)


def axis_index(axis: int, rank: int, where: str) -> int:
    """A non-negative axis; negative ones count from the end."""
    if not -rank <= axis < rank:
        raise ShapeError(f"{where}: axis {axis} is outside a rank-{rank} tensor")
    return axis % rank if rank else 0


def contiguous_strides(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Element strides of a C-contiguous tensor."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def round_up_power_of_two(n: int) -> int:
    """The least power of two that is not below n; 0 stays 0."""
    return 0 if n <= 0 else 1 << math.ceil(math.log2(n)) if n > 1 else 1

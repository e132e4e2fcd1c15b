"""Sizes: ints, and `Dim` expressions over named symbols; their arithmetic, text and parser.

A `Dim` is a polynomial over symbols and over `//`, `min`, `max` of sizes, in a normal form, so equal sizes compare
equal. Normal forms are bounded in size, since a product of n sums has up to 2^n terms. Zero is legal everywhere; a
symbol never broadcasts as 1.
"""

from __future__ import annotations

import functools
import heapq
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import field
from typing import Any, ClassVar, Union

from rlx.dtypes import BY_NAME
from rlx.errors import GraphError, ParseError, ShapeError, shortened
from rlx.fast_dataclass import dataclass

Size = Union[int, "Dim"]
ShapeLike = Iterable[Any]  # ints, Dims or strings

MAX_PARTS = 1024  # per dim: a symbol or number counts 1; // min max count 4
MAX_DEPTH = 50  # nesting of // min max
MAX_NAME = 256  # characters of a symbol's name
MAX_NESTING = 128  # nested parentheses in the text of a size
MAX_BITS = 3072  # per number in a dim, so that its text has fewer digits than the parser accepts


@dataclass(frozen=True, slots=True)
class Symbol:
    """A named run-time size; `max` bounds it and is checked at run time, but is not part of its identity."""

    name: str
    max: int | None = field(default=None, compare=False)
    parts: ClassVar[int] = 1


@dataclass(frozen=True, slots=True)
class Composite:
    """A size that is not a polynomial: `a // b`, `min(a, b)` or `max(a, b)`."""

    op: str
    a: Size
    b: Size

    @property
    def parts(self) -> int:
        a, b = self.a, self.b
        return 4 + (a.parts if isinstance(a, Dim) else 1) + (b.parts if isinstance(b, Dim) else 1)

    @property
    def depth(self) -> int:
        a, b = self.a, self.b
        return 1 + max(a.depth if isinstance(a, Dim) else 0, b.depth if isinstance(b, Dim) else 0)


Atom = Symbol | Composite
Monomial = tuple[Atom, ...]


class Dim:
    """A size known only at run time. Build with `rlx.dim("n")`, combine with + - * // and `dim_min`, `dim_max`."""

    __slots__ = ("_hash", "_text", "depth", "parts", "terms")
    __array_ufunc__ = None  # so that NumPy defers `np.int64(2) * dim` to Dim

    def __init__(self, terms: tuple[tuple[Monomial, int], ...]) -> None:
        self.terms = terms
        parts = depth = 0
        for monomial, coefficient in terms:
            parts += len(monomial) or 1
            if coefficient.bit_length() > MAX_BITS:
                raise _too_large()
            for atom in monomial:
                if isinstance(atom, Composite):
                    parts += atom.parts - 1
                    depth = max(depth, atom.depth)
        if parts > MAX_PARTS or depth > MAX_DEPTH:
            raise _too_large()
        self.parts, self.depth = parts, depth
        self._hash = hash(terms)
        self._text = ""

    def __reduce__(self) -> tuple[Any, ...]:
        return (Dim, (self.terms,))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Dim) and self.terms == other.terms)

    def __hash__(self) -> int:
        return self._hash

    def __add__(self, other: Size) -> Size:
        return self if other == 0 else _combine((self, 1), (other, 1))

    __radd__ = __add__

    def __sub__(self, other: Size) -> Size:
        return self if other == 0 else _combine((self, 1), (other, -1))

    def __rsub__(self, other: Size) -> Size:
        return _combine((other, 1), (self, -1))

    def __mul__(self, other: Size) -> Size:
        if isinstance(other, int) and other != 0:
            return self if other == 1 else Dim(tuple([(m, c * other) for m, c in self.terms]))
        total: dict[Monomial, int] = {}
        for m, c in self.terms:
            for n, d in _terms(other):
                key = tuple(sorted(m + n, key=_atom_key))
                total[key] = total.get(key, 0) + c * d
            if len(total) > MAX_PARTS:
                raise _too_large()
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
        self._text = self._text or dim_text(self)
        return self._text

    def __repr__(self) -> str:
        return f"Dim({self})"

    def symbols(self) -> Iterator[Symbol]:
        """Yields every symbol in the expression, with repetitions."""
        for monomial, _ in self.terms:
            for atom in monomial:
                if isinstance(atom, Symbol):
                    yield atom
                else:
                    yield from symbols_of(atom.a)
                    yield from symbols_of(atom.b)


def _too_large() -> ShapeError:
    return ShapeError(
        f"dim: a size with more than {MAX_PARTS} symbols, numbers and operations when it is multiplied out, with more "
        f"than {MAX_DEPTH} operations in each other, or with a number of more than {MAX_BITS} bits",
        hint="give a part of it a name of its own, rlx.dim(...), and x.assume_equal(shape=...) where they meet",
    )


def _atom_key(atom: Atom) -> tuple[int, str]:
    return (0, atom.name) if isinstance(atom, Symbol) else (1, f"{atom.op}({atom.a},{atom.b})")


def _terms(size: Size) -> tuple[tuple[Monomial, int], ...]:
    if isinstance(size, Dim):
        return size.terms
    try:
        return (((), operator.index(size)),)
    except TypeError:
        raise ShapeError(f"dim: {size!r} is not a size", hint="sizes are integers and dims") from None


def _combine(*weighted: tuple[Size, int]) -> Size:
    total: dict[Monomial, int] = {}
    for size, weight in weighted:
        for monomial, coefficient in _terms(size):
            total[monomial] = total.get(monomial, 0) + weight * coefficient
        if len(total) > MAX_PARTS:
            raise _too_large()
    return _normal(total)


def _normal(total: Mapping[Monomial, int]) -> Size:
    terms = [(m, c) for m, c in total.items() if c]
    if not terms:
        return 0
    if len(terms) == 1 and not terms[0][0]:
        return terms[0][1]
    if len(terms) > 1:
        terms.sort(key=lambda t: _order(t[0]))
    return Dim(tuple(terms))


def _order(monomial: Monomial) -> tuple[int, list[tuple[int, str]]]:
    """The order of terms in the normal form: by degree, then by names."""
    return -len(monomial), [_atom_key(atom) for atom in monomial]


def _atom(atom: Atom) -> Dim:
    return Dim((((atom,), 1),))


# Keywords of the text form, which cannot be symbol names.
_RESERVED = {"none", "true", "false", "inf", "nan", *BY_NAME}


def dim(name: str, *, max: int | None = None) -> Dim:
    """A named run-time size; all uses of the name in one graph are the same size."""
    if not (name.isidentifier() and re.fullmatch(r"\w+", name) and len(name) <= MAX_NAME):
        hint = f"letters, digits and _ only, at most {MAX_NAME}"
        raise GraphError(f"dim: {shortened(name, 80)!r} is not a name", hint=hint)
    if name in _RESERVED:
        raise GraphError(f"dim: {name!r} means something else in the text of graphs", hint="choose another name")
    return _atom(Symbol(name, max))


def dim_floordiv(a: Size, b: Size) -> Size:
    """`a // b`, simplified where the division is exact; terms divisible by a number b are moved out of it."""
    if b == 0:
        raise ShapeError(f"dim: {a} // 0")
    if isinstance(a, int) and isinstance(b, int):
        return a // b
    if b == 1:
        return a
    exact = _exact_quotient(a, b)
    if exact is not None:
        return exact
    quotient: Size = 0
    if isinstance(b, int):
        quotient = _normal({m: c // b for m, c in _terms(a) if c % b == 0})
        a = a - quotient * b
    return quotient + (a // b if isinstance(a, int) and isinstance(b, int) else _atom(Composite("//", a, b)))


def _exact_quotient(a: Size, b: Size) -> Size | None:
    """The size q with q * b == a as polynomials, by long division; None if there is none within the size bounds."""
    (lead, scale), *others = _terms(b)
    if not lead:
        terms = _terms(a)
        return None if any(c % scale for _, c in terms) else _normal({m: c // scale for m, c in terms})
    rest = dict(_terms(a))
    heap = [(_order(monomial), monomial) for monomial in rest]  # leading term first
    heapq.heapify(heap)
    quotient: dict[Monomial, int] = {}
    parts = 0
    while heap:
        monomial = heapq.heappop(heap)[1]
        coefficient = rest.pop(monomial, 0)
        if coefficient == 0:
            continue
        left = list(monomial)
        for atom in lead:
            if atom not in left:
                return None
            left.remove(atom)
        parts += sum([atom.parts for atom in left]) or 1
        if coefficient % scale or parts > MAX_PARTS or len(rest) > MAX_PARTS:
            return None
        quotient[tuple(left)] = coefficient // scale
        for m, c in others:
            key = tuple(sorted((*left, *m), key=_atom_key))
            if key not in rest:
                heapq.heappush(heap, (_order(key), key))
            rest[key] = rest.get(key, 0) - c * (coefficient // scale)
    return _normal(quotient)


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
    first, second = sorted((a, b), key=str)
    return _atom(Composite(op, first, second))


def symbols_of(size: Size) -> Iterator[Symbol]:
    """Yields the symbols of a size; none for an int."""
    if isinstance(size, Dim):
        yield from size.symbols()


def known_equal(a: Size, b: Size) -> bool | None:
    """True or False if decidable, None if it depends on run-time values."""
    if a == b:
        return True
    difference = _combine((a, 1), (b, -1))
    return difference == 0 if isinstance(difference, int) else None


def is_monotone(size: Size) -> bool:
    """Whether the size is provably non-negative and non-decreasing in every symbol."""
    if isinstance(size, int):
        return size >= 0
    return all(c > 0 and all(isinstance(atom, Symbol) or _is_monotone_atom(atom) for atom in m) for m, c in size.terms)


def _is_monotone_atom(atom: Composite) -> bool:
    return is_monotone(atom.a) and is_monotone(atom.b) and (atom.op != "//" or isinstance(atom.b, int))


# -- text -----------------------------------------------------------------------------------------------------------
def dim_text(size: Size, names: Mapping[str, str] | None = None) -> str:
    """Formats a size as an expression that `parse_dim` reads; `names` renames its symbols."""
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
        return atom.name if names is None else names[atom.name]
    a, b = dim_text(atom.a, names), dim_text(atom.b, names)
    return f"(({a}) // ({b}))" if atom.op == "//" else f"{atom.op}({a}, {b})"


@functools.lru_cache(maxsize=4096)
def parse_dim(text: str) -> Size:
    """Parses a size expression: `4`, `batch*seq`, `(seq + 63) // 64`, `min(a, b)`."""
    try:
        return _DimParser(text).parse()
    except (GraphError, SyntaxError, RecursionError) as error:
        why = f": {error}" if isinstance(error, GraphError) else ""
        hint = error.hint if isinstance(error, GraphError) else "sizes use names, integers, + - * // min max"
        raise ParseError(f"dim: {text[:80]!r} is not a size{why}", hint=hint) from error


class _DimParser:
    """Recursive descent over names, numbers and operators. Python's parser would reject `in` or `lambda` as names."""

    def __init__(self, text: str) -> None:
        self.tokens: list[str] = [*re.findall(r"\w+|//|[^\s\w]", text), ""]
        self.at = 0
        self.depth = 0

    def take(self, *wanted: str) -> str:
        """Consumes the next token if it is one of `wanted`; returns it, or an empty string."""
        token = self.tokens[self.at]
        if token not in wanted or not token:
            return ""
        self.at += 1
        return token

    def need(self, token: str) -> None:
        if not self.take(token):
            raise SyntaxError

    def parse(self) -> Size:
        size = self.sum()
        if self.tokens[self.at]:
            raise SyntaxError
        return size

    def sum(self) -> Size:
        first = self.product()
        others: list[tuple[Size, int]] = []
        while sign := self.take("+", "-"):
            others.append((self.product(), 1 if sign == "+" else -1))
        return _combine((first, 1), *others) if others else first  # in one go: each sum is sorted

    def product(self) -> Size:
        size = self.factor()
        while sign := self.take("*", "//"):
            other = self.factor()
            size = size * other if sign == "*" else dim_floordiv(size, other)
            if isinstance(size, int) and size.bit_length() > MAX_BITS:
                raise _too_large()
        return size

    def factor(self) -> Size:
        self.depth += 1
        if self.depth > MAX_NESTING:
            raise ShapeError(f"dim: more than {MAX_NESTING} parentheses or signs in each other")
        size = self.single()
        self.depth -= 1
        return size

    def single(self) -> Size:
        if self.take("-"):
            return 0 - self.factor()
        if self.take("("):
            size = self.sum()
            self.need(")")
            return size
        word = self.tokens[self.at]
        self.at += bool(word)
        if word in ("min", "max") and self.take("("):
            a = self.sum()
            self.need(",")
            b = self.sum()
            self.need(")")
            return _extreme(word, a, b)
        if re.fullmatch(r"[0-9]{1,999}", word):
            return int(word)
        if not word.isidentifier():
            raise SyntaxError
        return dim(word)


def as_size(like: Any) -> Size:
    """Converts an int, a Dim, a NumPy integer or text to a size."""
    if isinstance(like, str):
        like = parse_dim(like)
    if isinstance(like, Dim):
        return like
    if isinstance(like, bool) or not hasattr(like, "__index__"):
        raise ShapeError(f"shape: {like!r} is not a size", hint="use an int, a name or rlx.dim(...)")
    value = int(like)
    if value < 0:
        raise ShapeError(f"shape: size {value} is negative")
    return value


def as_shape(like: ShapeLike) -> tuple[Size, ...]:
    """Converts any iterable of sizes to a shape."""
    if isinstance(like, str) or not isinstance(like, Iterable):
        description = "a string" if isinstance(like, str) else "not a shape"
        raise ShapeError(f"shape: {like!r} is {description}", hint=f"write ({like!r},) for one axis")
    return tuple(as_size(d) for d in like)

"""Tensor types: shape and element type, broadcasting, strides. Re-exports `dims.py` and `dim_binding.py`."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping, Sequence

from rlx.dim_binding import DimBinding as DimBinding
from rlx.dim_binding import compile_sizes as compile_sizes
from rlx.dim_binding import evaluate as evaluate
from rlx.dim_binding import sym as sym
from rlx.dim_binding import symbol_name as symbol_name
from rlx.dims import MAX_BITS as MAX_BITS
from rlx.dims import MAX_NAME as MAX_NAME
from rlx.dims import MAX_NESTING as MAX_NESTING
from rlx.dims import MAX_PARTS as MAX_PARTS
from rlx.dims import Composite as Composite
from rlx.dims import Dim as Dim
from rlx.dims import ShapeLike as ShapeLike
from rlx.dims import Size as Size
from rlx.dims import Symbol as Symbol
from rlx.dims import as_shape as as_shape
from rlx.dims import as_size as as_size
from rlx.dims import dim as dim
from rlx.dims import dim_floordiv as dim_floordiv
from rlx.dims import dim_max as dim_max
from rlx.dims import dim_min as dim_min
from rlx.dims import is_monotone as is_monotone
from rlx.dims import known_equal as known_equal
from rlx.dims import parse_dim as parse_dim
from rlx.dims import symbols_of as symbols_of
from rlx.dtypes import BY_NAME, DType, DTypeLike, dtype
from rlx.errors import ParseError, ShapeError, nearest, shortened
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True, slots=True)
class TensorType:
    """Shape and element type of a value."""

    shape: tuple[Size, ...]
    dtype: DType

    def __post_init__(self) -> None:
        if self.dtype.__class__ is not DType:
            object.__setattr__(self, "dtype", dtype(self.dtype))
        if self.dtype.block != 1:
            last = self.shape[-1] if self.shape else 1
            if not isinstance(last, int) or last % self.dtype.block:
                raise ShapeError(f"type {self}: its rows are not whole blocks of {self.dtype.block}")

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"

    @property
    def rank(self) -> int:
        return len(self.shape)

    @property
    def elements(self) -> Size:
        return product(self.shape)

    @property
    def array_shape(self) -> tuple[Size, ...]:
        """The shape of a NumPy array of this type: one element per block if packed."""
        return self.shape if self.dtype.block == 1 else (*self.shape[:-1], self.shape[-1] // self.dtype.block)

    @property
    def bytes(self) -> Size:
        return product(self.array_shape) * self.dtype.size

    def with_shape(self, *shape: Size) -> TensorType:
        return TensorType(tuple(shape), self.dtype)

    def with_dtype(self, like: DTypeLike) -> TensorType:
        return TensorType(self.shape, dtype(like))


def tensor(shape: ShapeLike | TensorType, like: DTypeLike = "f32") -> TensorType:
    """Makes a tensor type from a shape and an element type; returns types unchanged."""
    return shape if isinstance(shape, TensorType) else TensorType(as_shape(shape), dtype(like))


@functools.lru_cache(maxsize=4096)
def parse_type(text: str) -> TensorType:
    """Parses a type such as `f32[batch, 4]`."""
    name, bracket, rest = text.strip().partition("[")
    if not bracket or not rest.endswith("]"):
        raise ParseError(f"type: {shortened(text, 80)!r} has no [shape]")
    if name not in BY_NAME:
        raise ParseError(f"type: {shortened(name, 80)!r} is not an element type", hint=nearest(name, BY_NAME))
    shape = tuple(parse_dim(d) for d in split_top(rest[:-1]))
    if any(isinstance(d, int) and d < 0 for d in shape):
        raise ParseError(f"type: {shortened(text, 80)!r} has a negative size")
    return TensorType(shape, BY_NAME[name])


_MARKS = {c: re.compile(r'"(?:[^"\\]|\\.)*"|[][(){}]|' + c, re.S) for c in ",;"}


def split_top(text: str, separator: str = ",") -> list[str]:
    """Splits at separators outside brackets and quotes; an empty text has no parts."""
    parts, depth, start = [], 0, 0
    for mark in _MARKS[separator].finditer(text):
        c = mark[0]
        if c in "([{":
            depth += 1
        elif c in ")]}":
            depth -= 1
        elif c == separator and depth == 0:
            parts.append(text[start : mark.start()].strip())
            start = mark.end()
    last = text[start:].strip()
    return [*parts, last] if parts or last else []


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
    """Replaces all symbols of a shape by their sizes."""
    return tuple(evaluate(d, binding) for d in shape)


def broadcast(*shapes: Sequence[Size], where: str = "broadcast") -> tuple[Size, ...]:
    """The common shape, aligned at the right. An axis of size 1 stretches; a symbol never does."""
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
    """Converts an axis to a non-negative one; negative axes count from the end."""
    if not -rank <= axis < rank:
        raise ShapeError(f"{where}: axis {axis} is outside a rank-{rank} tensor")
    return axis % rank


def contiguous_strides(shape: Sequence[Size]) -> tuple[Size, ...]:
    """Element strides of a C-contiguous tensor."""
    strides: list[Size] = []
    step: Size = 1
    for size in reversed(shape):
        strides.append(step)
        step = step * size
    return tuple(reversed(strides))


def round_up_power_of_two(n: int) -> int:
    """The smallest power of two not below n; 0 stays 0."""
    return 0 if n <= 0 else 1 << (n - 1).bit_length()

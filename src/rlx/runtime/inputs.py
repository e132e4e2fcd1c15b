"""Input checks of compiled graphs: compares arrays with the declared types and solves for the symbol sizes.

Errors name the array, the expected and the actual type, and the nearest known name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Allocator
from rlx.dtypes import DType, dtype
from rlx.errors import BindError, DTypeError, nearest
from rlx.free_memory import require
from rlx.types import Dim, TensorType, evaluate, symbols_of


class Leaf(NamedTuple):
    """An array and its declared type. `label` names it in messages, such as `input 'x'`."""

    label: str
    array: Any  # or a device buffer: only the shape is used
    type: TensorType


def check_names(kind: str, values: Any, wanted: Sequence[str], optional: Sequence[str] = ()) -> None:
    """Raise BindError unless `values` is a mapping with the wanted names, and no others but optional ones."""
    wanted = [name for name in wanted if name not in optional]
    if not isinstance(values, Mapping):
        raise BindError(
            f"{kind}s: expected a mapping from names to arrays, found {type(values).__name__}",
            hint=f"give {{{', '.join(f'{n!r}: ...' for n in wanted[:4])}{', ...' if wanted[4:] else ''}}}",
        )
    known = {*wanted, *optional}
    for name in values:
        if name not in known:
            raise BindError(f"{kind}: nothing is called {name!r}", hint=nearest(str(name), wanted))
    missing = [n for n in wanted if n not in values]
    if missing:
        shown = ", ".join(map(repr, missing[:8])) + (f" and {len(missing) - 8} more" if missing[8:] else "")
        others = [f"wanted: {', '.join(wanted)}"] if len(missing) < len(wanted) <= 16 else []
        raise BindError(f"{kind}: {shown} not given", notes=others)


def not_set(missing: Sequence[str], hint: str) -> BindError:
    """The error for params that a run needs and that are not set."""
    shown = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if missing[5:] else "")
    return BindError(f"params: {shown} not set", hint=hint)


def as_array(kind: str, name: str, value: Any, type_: TensorType) -> Array:
    """Convert to a contiguous array of the declared element type and rank.

    Integers of another width, Python numbers and lists are cast if the declared type can hold their values; other
    arrays never are.
    """
    if type(value) is not np.ndarray:  # subclasses may redefine operators
        value = np.asarray(value) if isinstance(value, np.ndarray) else _convert(f"{kind} {name!r}", value, type_)
    if type_.dtype.is_packed and value.dtype == np.uint8:
        value = _as_blocks(kind, name, value, type_)
    if value.dtype.kind in "iu" and type_.dtype.is_integer and value.dtype != type_.dtype.numpy:
        value = _as_integers(f"{kind} {name!r}", value, type_.dtype)
    if value.dtype != type_.dtype.numpy:
        try:
            actual = str(dtype(value.dtype))
        except DTypeError:
            actual = str(value.dtype)
        hint = f"cast it with .astype({type_.dtype.numpy.name!r})"
        if type_.dtype.is_packed:
            hint = f"give its packed blocks as bytes (uint8), {type_.dtype.size} for each {type_.dtype.block} numbers"
        raise BindError(f"{kind} {name!r}: element type is {actual}, expected {type_.dtype}", hint=hint)
    if value.ndim != len(type_.array_shape):
        raise BindError(f"{kind} {name!r}: shape is {_shape(value)}, expected {type_}")
    array: Array = value
    if not array.flags.c_contiguous:
        require(f"{kind} {name!r}: a contiguous copy", array.nbytes, "give a C-contiguous array, which is not copied")
        array = np.ascontiguousarray(array)
    return array


def as_buffer(kind: str, name: str, value: Any, type_: TensorType, allocator: Allocator) -> Any:
    """Like `as_array`, but leaves a buffer that is already on the device there, also one of another library."""
    if allocator.is_host:
        return as_array(kind, name, value, type_)
    if not allocator.owns(value):
        borrowed = None if isinstance(value, np.ndarray) else allocator.borrow(value)
        if borrowed is None:
            return as_array(kind, name, value, type_)
        value = borrowed
    if value.dtype != type_.dtype.numpy:
        raise BindError(f"{kind} {name!r}: element type is {value.dtype}, expected {type_.dtype}")
    if len(value.shape) != len(type_.array_shape):
        raise BindError(f"{kind} {name!r}: shape is {_shape(value)}, expected {type_}")
    return value


def _as_blocks(kind: str, name: str, value: Array, type_: TensorType) -> Array:
    """Packed rows as blocks, from bytes of shape [..., bytes per row] or flat."""
    rows = [d for d in type_.shape[:-1] if isinstance(d, int)]
    if value.ndim == 1 and value.size and value.size == type_.bytes and len(rows) == type_.rank - 1:
        value = value.reshape(*rows, -1)
    if value.ndim == 0 or value.shape[-1] % type_.dtype.size:
        raise BindError(f"{kind} {name!r}: rows of {_shape(value)} bytes are not whole blocks of {type_.dtype.size}")
    return np.ascontiguousarray(value).view(type_.dtype.numpy)


_PYTHON_TYPES = {"f": "float", "i": "int", "u": "int", "c": "complex", "U": "str", "S": "bytes"}
# NumPy dtype kinds of Python numbers that each kind of element type can hold.
_HOLDS = {"float": "fiub", "int": "iub", "uint": "iub", "bool": "b"}


def _convert(label: str, value: Any, type_: TensorType) -> Array:
    """Convert a NumPy scalar, another library's array, or Python numbers and lists."""
    wanted = type_.dtype
    try:
        source = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors on a GPU
        raise BindError(
            f"{label}: {type(value).__name__} cannot be converted to an array of {wanted}: {error}"
        ) from error
    if hasattr(value, "dtype"):
        return source
    if source.size and source.dtype.kind not in _HOLDS[wanted.kind]:
        kind = _PYTHON_TYPES.get(source.dtype.kind, "object")
        raise BindError(f"{label}: Python values of type {kind} cannot be converted to {wanted}")
    if wanted.is_integer:
        return _as_integers(label, source, wanted)
    with np.errstate(over="ignore"):  # floats out of range become infinity, as in NumPy
        return source.astype(wanted.numpy)


def _as_integers(label: str, source: Array, wanted: DType) -> Array:
    """Cast numbers to an integer type that can hold each of them."""
    array: Array = source.astype(wanted.numpy)
    if (array != source).any():
        outside = source[array != source].flat[0]
        raise BindError(f"{label}: {outside} does not fit into {wanted}")
    return array


def check_fixed(kind: str, name: str, value: Array, type_: TensorType) -> None:
    """Raise BindError if a static size of a weight differs."""
    for have, want in zip(value.shape, type_.array_shape, strict=True):
        if isinstance(want, int) and have != want:
            hint = None
            if type_.rank == 2 and value.shape == tuple(reversed(type_.shape)):
                hint = "it is the transpose: pass array.T"
            raise BindError(f"{kind} {name!r}: shape is {_shape(value)}, expected {type_}", hint=hint)


def _shape(value: Array) -> str:
    return "[" + ", ".join(map(str, value.shape)) + "]"


def has_symbols(type_: TensorType) -> bool:
    """Whether a size of the type is symbolic."""
    return any(isinstance(d, Dim) for d in type_.shape)


def solve_symbols(leaves: Iterable[Leaf], limits: Mapping[str, int]) -> dict[str, int]:
    """Solve for the size of every symbol; checks static sizes and expressions against the arrays' shapes."""
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}
    composite: list[tuple[str, int, Dim, int]] = []
    for label, array, type_ in leaves:
        for axis, want in enumerate(type_.array_shape):
            have = array.shape[axis]
            if isinstance(want, int):
                if have != want:
                    raise BindError(f"{label}: shape is {_shape(array)}, expected {type_}")
            elif str(want).isidentifier():
                symbol = str(want)
                if sizes.setdefault(symbol, have) != have:
                    raise BindError(
                        f"{label}: {symbol} is {have} on axis {axis}, but {sizes[symbol]} in {source[symbol]}",
                        notes=[f"shape is {_shape(array)}, expected {type_}"],
                    )
                source.setdefault(symbol, label)
            else:
                composite.append((label, axis, want, have))
    for label, axis, want, have in composite:
        unknown = {s.name for s in symbols_of(want)} - set(sizes)
        if unknown:
            raise BindError(f"{label}: cannot tell {', '.join(sorted(unknown))} from a size of {want}")
        if evaluate(want, sizes) != have:
            raise BindError(f"{label}: axis {axis} has {have}, {want} is {evaluate(want, sizes)}")
    for symbol, limit in limits.items():
        if sizes.get(symbol, 0) > limit:
            raise BindError(f"{source[symbol]}: {symbol} is {sizes[symbol]}, its limit is {limit}")
    return sizes

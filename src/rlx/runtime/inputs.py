"""What a compiled graph takes: checks arrays against declared types and finds the sizes of the symbols.

Everything that does not fit is an error with the name, what was wanted, what was found and the nearest known name.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from rlx.arrays import Array
from rlx.backends.base import Allocator
from rlx.dtypes import dtype
from rlx.errors import BindError, DTypeError, nearest
from rlx.free_memory import require
from rlx.types import Dim, TensorType, evaluate, symbols_of


class Leaf(NamedTuple):
    """An array and what it is given for; `label` is such as `input 'x'`."""

    label: str
    array: Any  # or a buffer of a device: only its shape is looked at
    type: TensorType


def check_names(what: str, given: Any, wanted: Sequence[str]) -> None:
    """A mapping of exactly the wanted names."""
    if not isinstance(given, Mapping):
        raise BindError(
            f"{what}s: expected a mapping from names to arrays, found {type(given).__name__}",
            hint=f"give {{{', '.join(f'{n!r}: ...' for n in wanted[:4])}{', ...' if wanted[4:] else ''}}}",
        )
    known = set(wanted)
    for name in given:
        if name not in known:
            raise BindError(f"{what}: nothing is called {name!r}", hint=nearest(str(name), wanted))
    missing = [n for n in wanted if n not in given]
    if missing:
        raise BindError(f"{what}: {', '.join(map(repr, missing))} not given", notes=[f"wanted: {', '.join(wanted)}"])


def not_set(missing: Sequence[str], hint: str) -> BindError:
    """The error for parameters that a run needs and nobody has set."""
    shown = ", ".join(map(repr, missing[:5])) + (f" and {len(missing) - 5} more" if missing[5:] else "")
    return BindError(f"params: {shown} not set", hint=hint)


def as_array(what: str, name: str, value: Any, type_: TensorType) -> Array:
    """A contiguous array of the declared element type and rank.

    Arrays are never cast; Python numbers and lists are, where the declared type can hold them.
    """
    if type(value) is not np.ndarray:  # a subclass may give operators another meaning
        value = np.asarray(value) if isinstance(value, np.ndarray) else _converted(f"{what} {name!r}", value, type_)
    if type_.dtype.is_packed and value.dtype == np.uint8:
        value = _as_blocks(what, name, value, type_)
    if value.dtype != type_.dtype.numpy:
        try:
            found = str(dtype(value.dtype))
        except DTypeError:
            found = str(value.dtype)
        hint = f"cast it with .astype({type_.dtype.numpy.name!r})"
        if type_.dtype.is_packed:
            hint = f"give its packed blocks as bytes (uint8), {type_.dtype.size} for each {type_.dtype.block} numbers"
        raise BindError(f"{what} {name!r}: element type is {found}, wanted {type_.dtype}", hint=hint)
    if value.ndim != len(type_.array_shape):
        raise BindError(f"{what} {name!r}: shape is {_shape(value)}, wanted {type_}")
    array: Array = value
    if not array.flags.c_contiguous:
        require(f"{what} {name!r}: a contiguous copy", array.nbytes, "give a C-contiguous array, which is not copied")
        array = np.ascontiguousarray(array)
    return array


def as_buffer(what: str, name: str, value: Any, type_: TensorType, allocator: Allocator) -> Any:
    """Like `as_array`, but a buffer that is in memory of the device already stays there."""
    if allocator.is_host or not allocator.owns(value):
        return as_array(what, name, value, type_)
    if value.dtype != type_.dtype.numpy:
        raise BindError(f"{what} {name!r}: element type is {value.dtype}, wanted {type_.dtype}")
    if len(value.shape) != len(type_.array_shape):
        raise BindError(f"{what} {name!r}: shape is {_shape(value)}, wanted {type_}")
    return value


def _as_blocks(what: str, name: str, value: Array, type_: TensorType) -> Array:
    """The bytes of packed rows, [..., bytes of a row] or all in one row, as blocks."""
    rows = [d for d in type_.shape[:-1] if isinstance(d, int)]
    if value.ndim == 1 and value.size and value.size == type_.bytes and len(rows) == type_.rank - 1:
        value = value.reshape(*rows, -1)
    if value.ndim == 0 or value.shape[-1] % type_.dtype.size:
        raise BindError(f"{what} {name!r}: rows of {_shape(value)} bytes are not whole blocks of {type_.dtype.size}")
    return np.ascontiguousarray(value).view(type_.dtype.numpy)


_PYTHON_TYPES = {"f": "float", "i": "int", "u": "int", "c": "complex", "U": "str", "S": "bytes"}
# Kinds of arrays that NumPy makes of Python numbers, by the kind of element type that can hold them.
_HOLDS = {"float": "fiub", "int": "iub", "uint": "iub", "bool": "b"}


def _converted(label: str, value: Any, type_: TensorType) -> Array:
    """An array of something that is none: a NumPy scalar, another library's array, Python numbers and lists."""
    wanted = type_.dtype
    try:
        found = np.asarray(value)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged lists, tensors that do not give up their data
        raise BindError(f"{label}: {type(value).__name__} is no array of {wanted}: {error}") from error
    if hasattr(value, "dtype"):
        return found
    if found.size and found.dtype.kind not in _HOLDS[wanted.kind]:
        kind = _PYTHON_TYPES.get(found.dtype.kind, "object")
        raise BindError(f"{label}: Python values of type {kind} are no {wanted}")
    with np.errstate(over="ignore"):  # a float beyond the range is an infinity, as in NumPy
        array = found.astype(wanted.numpy)
    if wanted.is_integer and (array != found).any():
        outside = found[array != found].flat[0]
        raise BindError(f"{label}: {outside} does not fit into {wanted}")
    return array


def check_fixed(what: str, name: str, value: Array, type_: TensorType) -> None:
    """The sizes of a weight that are plain numbers."""
    for have, want in zip(value.shape, type_.array_shape, strict=True):
        if isinstance(want, int) and have != want:
            hint = None
            if type_.rank == 2 and value.shape == tuple(reversed(type_.shape)):
                hint = "it is the transpose: weights are [in, out]; pass array.T"
            raise BindError(f"{what} {name!r}: shape is {_shape(value)}, wanted {type_}", hint=hint)


def _shape(value: Array) -> str:
    return "[" + ", ".join(map(str, value.shape)) + "]"


def has_symbols(type_: TensorType) -> bool:
    """Whether a size of the type is known only at run time."""
    return any(isinstance(d, Dim) for d in type_.shape)


def solve_symbols(leaves: Iterable[Leaf], limits: Mapping[str, int]) -> dict[str, int]:
    """The size of every symbol; plain sizes and expressions are checked against what the arrays have."""
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}
    later: list[tuple[str, int, Dim, int]] = []
    for label, array, type_ in leaves:
        for axis, want in enumerate(type_.array_shape):
            have = array.shape[axis]
            if isinstance(want, int):
                if have != want:
                    raise BindError(f"{label}: shape is {_shape(array)}, wanted {type_}")
            elif str(want).isidentifier():
                symbol = str(want)
                if sizes.setdefault(symbol, have) != have:
                    raise BindError(
                        f"{label}: {symbol} is {have} on axis {axis}, but {sizes[symbol]} in {source[symbol]}",
                        notes=[f"shape is {_shape(array)}, wanted {type_}"],
                    )
                source.setdefault(symbol, label)
            else:
                later.append((label, axis, want, have))
    for label, axis, want, have in later:
        unknown = {s.name for s in symbols_of(want)} - set(sizes)
        if unknown:
            raise BindError(f"{label}: cannot tell {', '.join(sorted(unknown))} from a size of {want}")
        if evaluate(want, sizes) != have:
            raise BindError(f"{label}: axis {axis} has {have}, {want} is {evaluate(want, sizes)}")
    for symbol, limit in limits.items():
        if sizes.get(symbol, 0) > limit:
            raise BindError(f"{source[symbol]}: {symbol} is {sizes[symbol]}, its limit is {limit}")
    return sizes

"""What a compiled graph takes: checks arrays against declared types and finds the sizes of the symbols.

Everything that does not fit is an error with the name, what was wanted, what was found and the nearest known name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from rlx.dtypes import dtype
from rlx.errors import BindError, DTypeError, nearest
from rlx.types import Dim, TensorType, evaluate, symbols_of

Array = np.ndarray[Any, Any]


def check_names(what: str, given: Mapping[str, Any], wanted: Sequence[str]) -> None:
    """Exactly the wanted names, no others."""
    known = set(wanted)
    for name in given:
        if name not in known:
            raise BindError(f"{what}: nothing is called {name!r}", hint=nearest(name, wanted))
    missing = [n for n in wanted if n not in given]
    if missing:
        raise BindError(f"{what}: {', '.join(map(repr, missing))} not given", notes=[f"wanted: {', '.join(wanted)}"])


def as_array(what: str, name: str, value: Any, type_: TensorType) -> Array:
    """A contiguous array of the declared element type and rank. Arrays are never cast; Python numbers and lists are."""
    if not isinstance(value, np.ndarray):
        value = np.asarray(value) if hasattr(value, "dtype") else np.asarray(value, type_.dtype.numpy)
    if value.dtype != type_.dtype.numpy:
        try:
            found = str(dtype(value.dtype))
        except DTypeError:
            found = str(value.dtype)
        raise BindError(
            f"{what} {name!r}: element type is {found}, wanted {type_.dtype}",
            hint=f"cast it with .astype({type_.dtype.numpy.name!r})",
        )
    if value.ndim != type_.rank:
        raise BindError(f"{what} {name!r}: shape is {_shape(value)}, wanted {type_}")
    return value if value.flags.c_contiguous else np.ascontiguousarray(value)


def check_fixed(what: str, name: str, value: Array, type_: TensorType) -> None:
    """The sizes of a weight that are plain numbers."""
    for have, want in zip(value.shape, type_.shape, strict=True):
        if isinstance(want, int) and have != want:
            hint = None
            if type_.rank == 2 and value.shape == tuple(reversed(type_.shape)):
                hint = "it is the transpose: weights are [in, out]; pass array.T"
            raise BindError(f"{what} {name!r}: shape is {_shape(value)}, wanted {type_}", hint=hint)


def _shape(value: Array) -> str:
    return "[" + ", ".join(map(str, value.shape)) + "]"


def solve_symbols(
    what: str, arrays: Mapping[str, Array], types: Mapping[str, TensorType], limits: Mapping[str, int]
) -> dict[str, int]:
    """The size of every symbol; plain sizes and expressions are checked against what the arrays have."""
    sizes: dict[str, int] = {}
    source: dict[str, str] = {}
    later: list[tuple[str, int, Dim, int]] = []
    for name, type_ in types.items():
        for axis, want in enumerate(type_.shape):
            have = arrays[name].shape[axis]
            if isinstance(want, int):
                if have != want:
                    raise BindError(f"{what} {name!r}: shape is {_shape(arrays[name])}, wanted {type_}")
            elif str(want).isidentifier():
                symbol = str(want)
                if sizes.setdefault(symbol, have) != have:
                    raise BindError(
                        f"{what} {name!r}: {symbol} is {have} on axis {axis}, but {sizes[symbol]} in {source[symbol]!r}",
                        notes=[f"shape is {_shape(arrays[name])}, wanted {type_}"],
                    )
                source.setdefault(symbol, name)
            else:
                later.append((name, axis, want, have))
    for name, axis, want, have in later:
        unknown = {s.name for s in symbols_of(want)} - set(sizes)
        if unknown:
            raise BindError(f"{what} {name!r}: cannot tell {', '.join(sorted(unknown))} from a size of {want}")
        if evaluate(want, sizes) != have:
            raise BindError(f"{what} {name!r}: axis {axis} has {have}, {want} is {evaluate(want, sizes)}")
    for symbol, limit in limits.items():
        if sizes.get(symbol, 0) > limit:
            raise BindError(f"{what}: {symbol} is {sizes[symbol]}, its limit is {limit}")
    return sizes

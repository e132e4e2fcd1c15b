"""Constants embedded in a graph: their arrays, and the conversion of data to them."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np

from rlx.dtypes import DTypeLike, dtype
from rlx.errors import DTypeError


class Array:
    """A constant's data: a read-only copy of a NumPy array that compares and hashes by content."""

    __slots__ = ("data", "digest")

    def __init__(self, data: np.ndarray[Any, Any]) -> None:
        self.data = np.array(data, order="C")
        self.data.flags.writeable = False
        digest = hashlib.blake2b(f"{self.data.dtype.name}{self.data.shape}".encode(), digest_size=16)
        digest.update(self.data.reshape(-1).view(np.uint8).data)
        self.digest = digest.hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Array) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)

    def __reduce__(self) -> tuple[Any, ...]:
        return (Array, (self.data,))

    def __repr__(self) -> str:
        return f"@{self.digest[:12]}"


def constant_data(data: Any, like: DTypeLike | None) -> np.ndarray[Any, Any]:
    """Converts `data` to an array of a supported type; numbers out of its range are an error."""
    try:
        array = np.asarray(data)
    except ValueError as error:
        raise DTypeError(f"constant: {error}") from error
    if like is not None:
        wanted = dtype(like)
    elif isinstance(data, (np.ndarray, np.generic)):
        wanted = dtype(data.dtype)
    elif array.dtype.kind in "biuf":
        wanted = dtype({"b": bool, "f": float}.get(array.dtype.kind, int))
    else:
        raise DTypeError(f"constant: {data!r} is not made of numbers that rlx has")
    if wanted.is_integer and array.size and array.dtype.kind in "iuf":
        limits = np.iinfo(wanted.numpy)
        for number in (array.min(), array.max()):
            if not limits.min <= number <= limits.max:
                raise DTypeError(f"constant: {number} does not fit {wanted}", hint='give a wider type: dtype="i64"')
    with np.errstate(over="ignore"):  # float overflow becomes inf, as in any float arithmetic
        return array.astype(wanted.numpy, copy=False)

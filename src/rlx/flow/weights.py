"""Where a flow's weights come from: anything that knows tensors by key. Linear weights are `[out, in]`, as in files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import dtype
from rlx.errors import BindError, GraphError, RlxError, nearest
from rlx.types import TensorType


@runtime_checkable
class WeightSource(Protocol):
    """Tensors by key. `type` is known without loading; `array` may map a file."""

    def has(self, key: str) -> bool: ...

    def type(self, key: str) -> TensorType: ...

    def array(self, key: str) -> Array: ...

    def keys(self) -> Iterable[str]: ...


@runtime_checkable
class Wanting(Protocol):
    """A source that learns from stages which weights there are, and their shapes as files have them."""

    def want(self, key: str, shape: Sequence[Any] | None, init: Any = None) -> None: ...


class MapWeights:
    """Weights from a dictionary of arrays."""

    def __init__(self, arrays: Mapping[str, Any] | None = None) -> None:
        self._arrays: dict[str, Array] = {key: np.asarray(array) for key, array in (arrays or {}).items()}

    def has(self, key: str) -> bool:
        return key in self._arrays

    def type(self, key: str) -> TensorType:
        array = self.array(key)
        storage = dtype(array.dtype)
        if storage.is_packed:  # an element of the array is a block
            return TensorType((*array.shape[:-1], array.shape[-1] * storage.block), storage)
        return TensorType(tuple(array.shape), storage)

    def array(self, key: str) -> Array:
        if key not in self._arrays:
            raise BindError(f"weights: no tensor is called {key!r}", hint=nearest(key, self._arrays))
        return self._arrays[key]

    def keys(self) -> Iterable[str]:
        return self._arrays.keys()


class TakenWeights:
    """Weights of a source that can only give: `take(key, transpose)` is an array, or its numbers and their shape.

    Each is taken once, and kept: a stage may ask for a weight again, and in the other orientation.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._taken: dict[str, Array | None] = {}

    def _take(self, key: str) -> Array | None:
        if key not in self._taken:
            try:
                given = self.source.take(key, False)
            except (LookupError, RlxError):
                given = None
            if isinstance(given, tuple):
                numbers, shape = given
                given = np.asarray(numbers).reshape(shape)
            self._taken[key] = None if given is None else np.asarray(given)
        return self._taken[key]

    def has(self, key: str) -> bool:
        return self._take(key) is not None

    def type(self, key: str) -> TensorType:
        return MapWeights({key: self.array(key)}).type(key)

    def array(self, key: str) -> Array:
        array = self._take(key)
        if array is None:
            raise BindError(f"weights: no tensor is called {key!r}", hint=nearest(key, self.keys()))
        return array

    def keys(self) -> Iterable[str]:
        return [key for key, array in self._taken.items() if array is not None]


def as_source(weights: Any) -> WeightSource:
    """Where weights come from: a source, a dictionary of arrays, something with `take(key, transpose)`, or nothing."""
    if weights is None or isinstance(weights, Mapping):
        return MapWeights(weights)
    if isinstance(weights, WeightSource):
        return weights
    if callable(getattr(weights, "take", None)):
        return TakenWeights(weights)
    raise GraphError(
        f"weights: a {type(weights).__name__} is no source of weights",
        hint="give a dictionary of arrays, or something with has, type, array and keys",
    )


class LayeredWeights:
    """Weights of several sources: a key is looked for in one after the other."""

    def __init__(self, *sources: WeightSource) -> None:
        self.sources = sources
        self.file = next((f for s in sources if (f := getattr(s, "file", None)) is not None), None)  # for errors

    def _of(self, key: str) -> WeightSource:
        return next((source for source in self.sources if source.has(key)), self.sources[-1])

    def has(self, key: str) -> bool:
        return any(source.has(key) for source in self.sources)

    def type(self, key: str) -> TensorType:
        return self._of(key).type(key)

    def array(self, key: str) -> Array:
        return self._of(key).array(key)

    def keys(self) -> Iterable[str]:
        return dict.fromkeys(chain.from_iterable(source.keys() for source in self.sources))


def unchecked(source: WeightSource) -> Iterable[str]:
    """Keys that nobody has compared with what a model needs; those of a file were, when it was opened."""
    if isinstance(source, LayeredWeights):
        return dict.fromkeys(chain.from_iterable(map(unchecked, source.sources)))
    return () if isinstance(source, Wanting) or getattr(source, "file", None) is not None else source.keys()

"""Weight sources of a flow: anything that has tensors by key. Linear weights are `[out, in]`, as in files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from os import PathLike
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import dtype
from rlx.errors import BindError, GraphError, RlxError, nearest
from rlx.types import TensorType


@runtime_checkable
class WeightSource(Protocol):
    """Tensors by key. `type` does not load the tensor; `array` may be memory-mapped."""

    def has(self, key: str) -> bool: ...

    def type(self, key: str) -> TensorType: ...

    def array(self, key: str) -> Array: ...

    def keys(self) -> Iterable[str]: ...


@runtime_checkable
class Wanting(Protocol):
    """A source that learns from stages which weights exist, and their shapes in file layout."""

    def want(self, key: str, shape: Sequence[Any] | None, init: Any = None) -> None: ...


class MapWeights:
    """Weights from a dictionary of arrays."""

    def __init__(self, arrays: Mapping[str, Any] | None = None) -> None:
        self._arrays: dict[str, Array] = {key: np.asarray(array) for key, array in (arrays or {}).items()}

    def has(self, key: str) -> bool:
        return key in self._arrays

    def type(self, key: str) -> TensorType:
        array = self.array(key)
        try:
            storage = dtype(array.dtype)
        except RlxError as error:
            raise BindError(f"weight {key!r}: {error}", hint="weights are floats, such as np.float32") from error
        if storage.is_packed:  # each array element is a block
            return TensorType((*array.shape[:-1], array.shape[-1] * storage.block), storage)
        return TensorType(tuple(array.shape), storage)

    def array(self, key: str) -> Array:
        if key not in self._arrays:
            raise BindError(f"weights: no tensor is called {key!r}", hint=nearest(key, self._arrays))
        return self._arrays[key]

    def keys(self) -> Iterable[str]:
        return self._arrays.keys()


class TakenWeights:
    """Weights of an object with only `take(key, transpose)`, which returns an array, or (numbers, shape).

    Each tensor is taken once and cached: a stage may ask for it again, or in the other orientation.
    """

    def __init__(self, source: Any) -> None:
        self.source = source
        self._taken: dict[str, Array | None] = {}

    def _take(self, key: str) -> Array | None:
        if key not in self._taken:
            try:
                tensor = self.source.take(key, False)
            except (LookupError, RlxError):
                tensor = None
            if isinstance(tensor, tuple):
                numbers, shape = tensor
                tensor = np.asarray(numbers).reshape(shape)
            self._taken[key] = None if tensor is None else np.asarray(tensor)
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
    """Convert to a weight source: from a source, a dict of arrays, an object with `take(key, transpose)`, or None."""
    if weights is None or isinstance(weights, Mapping):
        return MapWeights(weights)
    if isinstance(weights, WeightSource):
        return weights
    if callable(getattr(weights, "take", None)):
        return TakenWeights(weights)
    hint = "pass a dict of arrays, or an object with has, type, array and keys"
    if isinstance(weights, str | PathLike):
        path = os.fspath(weights)
        read = f"file = rlx.formats.open_tensors({path!r}); {{n: file.array(n) for n in file.names}}"
        hint = f"read the file first: {f'dict(np.load({path!r}))' if str(path).endswith('.npz') else read}"
    raise GraphError(f"weights: a {type(weights).__name__} is not a weight source", hint=hint)


class LayeredWeights:
    """Weights of several sources, searched in order."""

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
    """Return keys that were not checked against the model; those of a file were checked when it was opened."""
    if isinstance(source, LayeredWeights):
        return dict.fromkeys(chain.from_iterable(map(unchecked, source.sources)))
    return () if isinstance(source, Wanting) or getattr(source, "file", None) is not None else source.keys()

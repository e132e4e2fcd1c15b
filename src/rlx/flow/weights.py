"""Where a flow's weights come from: anything that knows tensors by key. Linear weights are `[out, in]`, as in files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, Protocol, runtime_checkable

import numpy as np

from rlx.dtypes import dtype
from rlx.errors import BindError, nearest
from rlx.types import TensorType

Array = np.ndarray[Any, Any]


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

    def want(self, key: str, shape: Sequence[Any] | None) -> None: ...


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

"""Where a flow's weights come from: anything that knows tensors by key. Linear weights are `[out, in]`, as in files."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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

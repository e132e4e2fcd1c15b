"""Weights that a file arranges in another way than a flow wants them: several in one tensor, or one in several.

What is made here are views where that is possible, so packed rows stay packed and mapped ones mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from rlx.flow.weights import Array
from rlx.formats import TensorEntry, TensorFile
from rlx.models.family import Family, FileWeights
from rlx.types import TensorType


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight; those of its transpose, where the file has it `[in, out]`."""

    of: str
    start: int = 0
    stop: int | None = None
    turned: bool = False

    def names(self) -> Iterator[str]:
        yield self.of

    def shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        rows, *rest = shape[::-1] if self.turned else shape
        return (len(range(rows)[self.start : self.stop]), *rest)

    def array(self, arrays: list[Array]) -> Array:
        whole = arrays[0].T if self.turned else arrays[0]
        return whole[self.start : self.stop]


@dataclass(frozen=True)
class Stack:
    """Weights one after the other, `[count, ...]`; {j} in the name is the number of each."""

    of: str
    count: int

    def names(self) -> Iterator[str]:
        return (self.of.replace("{j}", str(j)) for j in range(self.count))

    def shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.count, *shape)

    def array(self, arrays: list[Array]) -> Array:
        return np.stack(arrays)


Arrangement = Mapping[str, Rows | Stack]  # by pattern; {i} is the layer


def weights_of(family: Family, config: Any, file: TensorFile) -> FileWeights:
    """The weights of a family's file under the names that its flow asks for."""
    if family.arrange is None:
        return FileWeights(file, family.weights, config.layers, family.prefixes)
    made = family.arrange(config, file.format)
    return ArrangedWeights(file, family.weights, config.layers, family.prefixes, made)


class ArrangedWeights(FileWeights):
    """Weights of a file, and others that are made of them."""

    def __init__(
        self, file: TensorFile, names: Mapping[str, str], layers: int, prefixes: Iterable[str], arrangement: Arrangement
    ) -> None:
        super().__init__(file, names, layers, prefixes)
        self._made: dict[str, Rows | Stack] = {}
        for pattern, made in arrangement.items():
            for i in range(layers if "{i}" in pattern else 1):
                one = replace(made, of=made.of.replace("{i}", str(i)))
                if all(super(ArrangedWeights, self).has(name) for name in one.names()):
                    self._made[pattern.replace("{i}", str(i))] = one

    def has(self, key: str) -> bool:
        return key in self._made or super().has(key)

    def type(self, key: str) -> TensorType:
        if key not in self._made:
            return super().type(key)
        made = self._made[key]
        found = super().type(next(made.names()))
        return TensorType(made.shape(found.shape), found.dtype)

    def array(self, key: str) -> Array:
        if key not in self._made:
            return super().array(key)
        made = self._made[key]
        return made.array([super(ArrangedWeights, self).array(name) for name in made.names()])

    def entry(self, key: str) -> TensorEntry:
        return super().entry(next(self._made[key].names()) if key in self._made else key)

    def keys(self) -> Iterable[str]:
        return (*self._made, *super().keys())

"""Weights that a file arranges in another way than a flow wants them: several in one tensor, or one in several.

What is made here are views where that is possible, so packed rows stay packed and mapped ones mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from rlx.flow.weights import Array
from rlx.formats import TensorEntry, TensorFile
from rlx.models.family import Family, FileWeights
from rlx.types import TensorType


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight; those of its transpose, where the file has it `[in, out]`; of each in a stack, by axis."""

    of: str
    start: int = 0
    stop: int | None = None
    turned: bool = False
    axis: int = 0

    def names(self) -> Iterator[str]:
        yield self.of

    def shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        sizes = list(shape[::-1] if self.turned else shape)
        sizes[self.axis] = len(range(sizes[self.axis])[self.start : self.stop])
        return tuple(sizes)

    def array(self, arrays: list[Array]) -> Array:
        whole = arrays[0].T if self.turned else arrays[0]
        return whole[self._place]

    def put(self, whole: Array, part: Array) -> None:
        """The way back; the whole is not turned yet."""
        whole[self._place] = part

    @property
    def _place(self) -> tuple[slice, ...]:
        return (*(slice(None),) * self.axis, slice(self.start, self.stop))


@dataclass(frozen=True)
class Spans:
    """Some rows of each of the groups that a weight's rows are in: a span of all groups, then the next one."""

    of: str
    groups: int
    spans: tuple[tuple[int, int], ...]  # of the rows of a group
    turned: ClassVar[bool] = False
    axis: ClassVar[int] = 0

    def names(self) -> Iterator[str]:
        yield self.of

    def shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.groups * sum(stop - start for start, stop in self.spans), *shape[1:])

    def array(self, arrays: list[Array]) -> Array:
        return arrays[0][self._places(len(arrays[0]))]

    def put(self, whole: Array, part: Array) -> None:
        whole[self._places(len(whole))] = part

    def _places(self, rows: int) -> Array:
        each = np.arange(rows).reshape(self.groups, -1)
        return np.concatenate([each[:, start:stop].reshape(-1) for start, stop in self.spans])


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


Made = Rows | Spans | Stack
# By pattern, {i} is the layer. Where files differ, all ways; those of rlx have the first.
Arrangement = Mapping[str, Made | tuple[Made, ...]]


def weights_of(family: Family, config: Any, file: TensorFile) -> FileWeights:
    """The weights of a family's file under the names that its flow asks for."""
    if family.arrange is None:
        return FileWeights(file, family.weights, config.layers, family.prefixes)
    made = family.arrange(config, file.format)
    return ArrangedWeights(file, family.weights, config.layers, family.prefixes, made)


def in_layers(arrangement: Arrangement, layers: int) -> Iterator[tuple[str, tuple[Made, ...]]]:
    """Each weight by its name, and the ways in which files may have it."""
    for pattern, made in arrangement.items():
        ways = made if isinstance(made, tuple) else (made,)
        for i in range(layers if "{i}" in pattern else 1):
            places = (replace(way, of=way.of.replace("{i}", str(i))) for way in ways)
            yield pattern.replace("{i}", str(i)), tuple(places)


class ArrangedWeights(FileWeights):
    """Weights of a file, and others that are made of them."""

    def __init__(
        self, file: TensorFile, names: Mapping[str, str], layers: int, prefixes: Iterable[str], arrangement: Arrangement
    ) -> None:
        super().__init__(file, names, layers, prefixes)
        has = super().has
        self.made: dict[str, Made] = {}
        for name, ways in in_layers(arrangement, layers):
            found = next((way for way in ways if all(map(has, way.names()))), None)
            if found is not None:
                self.made[name] = found

    def has(self, key: str) -> bool:
        return key in self.made or super().has(key)

    def type(self, key: str) -> TensorType:
        if key not in self.made:
            return super().type(key)
        made = self.made[key]
        found = super().type(next(made.names()))
        return TensorType(made.shape(found.shape), found.dtype)

    def array(self, key: str) -> Array:
        if key not in self.made:
            return super().array(key)
        made = self.made[key]
        return made.array([super(ArrangedWeights, self).array(name) for name in made.names()])

    def entry(self, key: str) -> TensorEntry:
        return super().entry(next(self.made[key].names()) if key in self.made else key)

    def keys(self) -> Iterable[str]:
        return (*self.made, *super().keys())

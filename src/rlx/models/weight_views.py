"""Weights that a file arranges in another way than a flow wants them: several in one tensor, or one in several.

What is made here are views where that is possible, so packed rows stay packed and mapped ones mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np

from rlx.arrays import Array
from rlx.formats import TensorEntry, TensorFile
from rlx.formats.scaled_weights import with_scales
from rlx.formats.tensor_file import broken, quoted
from rlx.models.family import Family, FileWeights
from rlx.types import TensorType


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight; those of its transpose, where the file has it `[in, out]`; of each in a stack, by axis."""

    of: str
    start: int = 0
    stop: int | None = None
    transposed: bool = False
    axis: int = 0

    def names(self) -> Iterator[str]:
        yield self.of

    def wanted(self, shape: tuple[Any, ...]) -> str | None:
        return f"{self.axis + 1} axes or more" if len(shape) <= self.axis else None

    def shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        sizes = list(shape[::-1] if self.transposed else shape)
        sizes[self.axis] = len(range(sizes[self.axis])[self.start : self.stop])
        return tuple(sizes)

    def array(self, arrays: list[Array]) -> Array:
        whole = arrays[0].T if self.transposed else arrays[0]
        return whole[self._place]

    def put(self, whole: Array, part: Array) -> None:
        """The way back; the whole is not transposed yet."""
        whole[self._place] = part

    @property
    def _place(self) -> tuple[slice, ...]:
        return (*(slice(None),) * self.axis, slice(self.start, self.stop))


@dataclass(frozen=True)
class GroupedRows:
    """Some rows of each of the groups that a weight's rows are in: a span of all groups, then the next one."""

    of: str
    groups: int
    size: int  # rows of a group
    spans: tuple[tuple[int, int], ...]  # of them
    transposed: ClassVar[bool] = False
    axis: ClassVar[int] = 0

    def names(self) -> Iterator[str]:
        yield self.of

    def wanted(self, shape: tuple[Any, ...]) -> str | None:
        rows = self.groups * self.size
        return f"{rows} rows, {self.size} for each of {self.groups} heads" if shape[:1] != (rows,) else None

    def shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.groups * sum(stop - start for start, stop in self.spans), *shape[1:])

    def array(self, arrays: list[Array]) -> Array:
        return arrays[0][self._places()]

    def put(self, whole: Array, part: Array) -> None:
        whole[self._places()] = part

    def _places(self) -> Array:
        each = np.arange(self.groups * self.size).reshape(self.groups, self.size)
        return np.concatenate([each[:, start:stop].reshape(-1) for start, stop in self.spans])


@dataclass(frozen=True)
class Stack:
    """Weights one after the other, `[count, ...]`; {j} in the name is the number of each."""

    of: str
    count: int

    def names(self) -> Iterator[str]:
        return (self.of.replace("{j}", str(j)) for j in range(self.count))

    def wanted(self, shape: tuple[Any, ...]) -> str | None:
        return None

    def shape(self, shape: tuple[Any, ...]) -> tuple[Any, ...]:
        return (self.count, *shape)

    def array(self, arrays: list[Array]) -> Array:
        return np.stack(arrays)


WeightView = Rows | GroupedRows | Stack
# By pattern, {i} is the layer. Where files differ, all ways; those of rlx have the first.
WeightViews = Mapping[str, WeightView | tuple[WeightView, ...]]


def weights_of(family: Family, config: Any, file: TensorFile) -> FileWeights:
    """The weights of a family's file under the names that its flow asks for, each together with its scales."""
    file = with_scales(file, config.quantization, str(file.path))
    if family.weight_views is None:
        return FileWeights(file, family.weights, config.layers, family.prefixes)
    made = family.weight_views(config, file.format)
    return ArrangedWeights(file, family.weights, config.layers, family.prefixes, made)


def in_layers(arrangement: WeightViews, layers: int) -> Iterator[tuple[str, tuple[WeightView, ...]]]:
    """Each weight by its name, and the ways in which files may have it."""
    for pattern, made in arrangement.items():
        ways = made if isinstance(made, tuple) else (made,)
        for i in range(layers if "{i}" in pattern else 1):
            places = (replace(way, of=way.of.replace("{i}", str(i))) for way in ways)
            yield pattern.replace("{i}", str(i)), tuple(places)


class ArrangedWeights(FileWeights):
    """Weights of a file, and others that are made of them."""

    def __init__(
        self, file: TensorFile, names: Mapping[str, str], layers: int, prefixes: Iterable[str], arrangement: WeightViews
    ) -> None:
        super().__init__(file, names, layers, prefixes)
        has = super().has
        self.views: dict[str, WeightView] = {}
        for name, ways in in_layers(arrangement, layers):
            found = [way for way in ways if all(map(has, way.names()))]
            if len(found) > 1:  # which of them would count?
                twice = " and ".join(quoted(way.of) for way in found)
                raise broken(file.path, f"weight {quoted(name)}", expected="one tensor or the other", actual=twice)
            if found:
                self.views[name] = found[0]

    def has(self, key: str) -> bool:
        return key in self.views or super().has(key)

    def type(self, key: str) -> TensorType:
        if key not in self.views:
            return super().type(key)
        made = self.views[key]
        first, *others = ((name, super(ArrangedWeights, self).type(name)) for name in made.names())
        for name, type_ in others:
            if type_ != first[1]:
                raise broken(
                    self.file.path, f"tensor {quoted(name)}", expected=f"{first[1]} as {quoted(first[0])}", actual=type_
                )
        shape = first[1].shape
        if (wanted := made.wanted(shape)) is not None:
            raise broken(self.file.path, f"tensor {quoted(first[0])}", expected=wanted, actual=f"shape {list(shape)}")
        if getattr(made, "turned", False) and first[1].dtype.is_packed:  # blocks run along the other axis
            what = f"tensor {quoted(first[0])}, which is stored transposed"
            raise broken(self.file.path, what, expected="plain floats", actual=first[1].dtype)
        return TensorType(made.shape(shape), first[1].dtype)

    def array(self, key: str) -> Array:
        if key not in self.views:
            return super().array(key)
        made = self.views[key]
        array = made.array([super(ArrangedWeights, self).array(name) for name in made.names()])
        array.flags.writeable = False  # a copy, or a part of what is read-only: what is derived from it can be shared
        return array

    def entry(self, key: str) -> TensorEntry:
        return super().entry(next(self.views[key].names()) if key in self.views else key)

    def keys(self) -> Iterable[str]:
        return (*self.views, *super().keys())

"""Weights that a file lays out differently from the flow: several in one tensor, or one in several.

Produces views where possible, so quantised rows stay quantised and mapped ones stay mapped.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from rlx.arrays import Array
from rlx.fast_dataclass import dataclass
from rlx.formats import TensorEntry, TensorFile
from rlx.formats.scaled_weights import with_scales
from rlx.formats.tensor_file import broken, quoted
from rlx.models.family import Family, FileWeights
from rlx.types import TensorType


@dataclass(frozen=True)
class Rows:
    """Some rows of a weight (of its transpose if the file stores `[in, out]`), along `axis` in stacks of weights."""

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
        tensor = arrays[0].T if self.transposed else arrays[0]
        return tensor[self._place]

    def put(self, tensor: Array, part: Array) -> None:
        """The inverse of `array`: writes the part into the tensor, which is not transposed yet."""
        tensor[self._place] = part

    @property
    def _place(self) -> tuple[slice, ...]:
        return (*(slice(None),) * self.axis, slice(self.start, self.stop))


@dataclass(frozen=True)
class GroupedRows:
    """Some rows of each group of a weight's rows: one span of all groups, then the next span."""

    of: str
    groups: int
    size: int  # rows per group
    spans: tuple[tuple[int, int], ...]  # row ranges within a group
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

    def put(self, tensor: Array, part: Array) -> None:
        tensor[self._places()] = part

    def _places(self) -> Array:
        each = np.arange(self.groups * self.size).reshape(self.groups, self.size)
        return np.concatenate([each[:, start:stop].reshape(-1) for start, stop in self.spans])


@dataclass(frozen=True)
class Stack:
    """Stacks separate weights to `[count, ...]`; {j} in the name is the index."""

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
# By pattern; {i} is the layer. Where files differ, a tuple of alternatives; rlx writes the first.
WeightViews = Mapping[str, WeightView | tuple[WeightView, ...]]


def weights_of(family: Family, config: Any, file: TensorFile) -> FileWeights:
    """The weights of a file under the names that the family's flow uses, joined with their scales."""
    file = with_scales(file, config.quantization, str(file.path))
    if family.weight_views is None:
        return FileWeights(file, family.weights, config.layers, family.prefixes)
    views = family.weight_views(config, file.format)
    return ArrangedWeights(file, family.weights, config.layers, family.prefixes, views)


def in_layers(arrangement: WeightViews, layers: int) -> Iterator[tuple[str, tuple[WeightView, ...]]]:
    """Yields each weight's name and the views by which files may provide it."""
    for pattern, views in arrangement.items():
        ways = views if isinstance(views, tuple) else (views,)
        for i in range(layers if "{i}" in pattern else 1):
            places = (replace(way, of=way.of.replace("{i}", str(i))) for way in ways)
            yield pattern.replace("{i}", str(i)), tuple(places)


class ArrangedWeights(FileWeights):
    """Weights of a file, and views derived from them."""

    def __init__(
        self, file: TensorFile, names: Mapping[str, str], layers: int, prefixes: Iterable[str], arrangement: WeightViews
    ) -> None:
        super().__init__(file, names, layers, prefixes)
        has = super().has
        self.views: dict[str, WeightView] = {}
        for name, ways in in_layers(arrangement, layers):
            matches = [way for way in ways if all(map(has, way.names()))]
            if len(matches) > 1:  # ambiguous
                twice = " and ".join(quoted(way.of) for way in matches)
                raise broken(file.path, f"weight {quoted(name)}", expected="one tensor or the other", actual=twice)
            if matches:
                self.views[name] = matches[0]

    def has(self, key: str) -> bool:
        return key in self.views or super().has(key)

    def type(self, key: str) -> TensorType:
        if key not in self.views:
            return super().type(key)
        view = self.views[key]
        first, *others = ((name, super(ArrangedWeights, self).type(name)) for name in view.names())
        for name, type_ in others:
            if type_ != first[1]:
                raise broken(
                    self.file.path, f"tensor {quoted(name)}", expected=f"{first[1]} as {quoted(first[0])}", actual=type_
                )
        shape = first[1].shape
        if (wanted := view.wanted(shape)) is not None:
            raise broken(self.file.path, f"tensor {quoted(first[0])}", expected=wanted, actual=f"shape {list(shape)}")
        if getattr(view, "transposed", False) and first[1].dtype.is_packed:  # blocks run along the other axis
            where = f"tensor {quoted(first[0])}, which is stored transposed"
            raise broken(self.file.path, where, expected="plain floats", actual=first[1].dtype)
        return TensorType(view.shape(shape), first[1].dtype)

    def array(self, key: str) -> Array:
        if key not in self.views:
            return super().array(key)
        view = self.views[key]
        array = view.array([super(ArrangedWeights, self).array(name) for name in view.names()])
        array.flags.writeable = False  # a copy, or a slice of a read-only array: derived weights can be shared
        return array

    def entry(self, key: str) -> TensorEntry:
        return super().entry(next(self.views[key].names()) if key in self.views else key)

    def keys(self) -> Iterable[str]:
        return (*self.views, *super().keys())

"""The tensors of a model as a file of either format has them: names, the order of heads, what converters add to norms.

A model that stays in its format keeps its tensors as they are; from one format to the other, decoders are rewritten.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rlx.arrays import Array
from rlx.dtypes import BF16, F16, F32, DType, dtype
from rlx.errors import CapabilityError
from rlx.formats.gguf_quants import dequantise
from rlx.models.family import Family
from rlx.models.load import Checkpoint, repeated_head
from rlx.models.weight_views import ArrangedWeights, GroupedRows, Rows, Stack, in_layers
from rlx.types import TensorType

FLOATS = {"f32": F32, "f16": F16, "bf16": BF16}
STATE_SPACE = (".A_log", ".mixer.D", ".mixer.norm.weight", ".conv1d.weight")  # weights that llama.cpp reads as f32


@dataclass(frozen=True)
class Tensor:
    """What a tensor is, and a function that reads it."""

    type: TensorType
    read: Callable[[], Array]

    @classmethod
    def of(cls, array: Array) -> Tensor:
        storage = dtype(array.dtype)
        shape = (*array.shape[:-1], array.shape[-1] * storage.block) if storage.is_packed else array.shape
        return cls(TensorType(tuple(shape), storage), lambda: array)

    def floats(self) -> Array:
        """As f32."""
        shape = tuple(int(n) for n in self.type.shape)
        return dequantise(np.ascontiguousarray(self.read()), self.type.dtype, int(np.prod(shape))).reshape(shape)

    def as_type(self, wanted: DType) -> Tensor:
        if self.type.dtype is wanted:
            return self
        return Tensor(TensorType(self.type.shape, wanted), lambda: self.floats().astype(wanted.numpy))

    def changed(self, change: Callable[[Array], Array], shape: Sequence[Any] | None = None) -> Tensor:
        """What a function makes of it, as f32."""
        kind = TensorType(self.type.shape if shape is None else tuple(shape), F32)
        return Tensor(kind, lambda: np.ascontiguousarray(change(self.floats()), np.float32))


@dataclass(frozen=True)
class Source:
    """A model's file, and tensors that take the place of its own."""

    checkpoint: Checkpoint
    given: Mapping[str, Tensor]

    def tensor(self, name: str) -> Tensor:
        """A weight by the name that stages know it by."""
        weights = self.checkpoint.weights
        return self.given.get(name) or Tensor(weights.type(name), functools.partial(weights.array, name))

    def in_format(self, format: str, names: Sequence[str], *, joined: bool = False) -> dict[str, Tensor]:
        """All tensors of a file of this format; where it has scales apart from weights, `joined` has them as one."""
        file, weights = self.checkpoint.file, self.checkpoint.weights
        if file.format != format:
            return _renamed(
                self.checkpoint, format, self._arranged(format, {name: self.tensor(name) for name in names})
            )
        changed = self._arranged(format, self._whole(format))
        given = {weights.entry(name).name: tensor for name, tensor in changed.items()}
        repeated, copied = repeated_head(self.checkpoint), file if joined else file.stored
        dropped = {part for name in given for part in file.parts(name)} - given.keys()
        if repeated is not None:
            dropped |= {repeated, *file.parts(repeated)}
        return {name: _raw(copied, name) for name in copied.names if name not in dropped} | given

    def _whole(self, format: str) -> dict[str, Tensor]:
        """The tensors given, and those that a file keeps in one with them."""
        places = self._places(format)
        touched = {places[name].of for name in self.given if name in places}
        return {n: self.tensor(n) for n, place in places.items() if place.of in touched} | dict(self.given)

    def _places(self, format: str) -> dict[str, Any]:
        """Where in a file of this format the weights are that it arranges in another way."""
        family, c, weights = self.checkpoint.family, self.checkpoint.config, self.checkpoint.weights
        if family.weight_views is None:
            return {}
        if isinstance(weights, ArrangedWeights) and self.checkpoint.file.format == format:
            return dict(weights.views)
        return {name: ways[0] for name, ways in in_layers(family.weight_views(c, format), c.layers)}

    def _arranged(self, format: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of stages as a file of this format has them: parts are joined, stacks taken apart."""
        places = self._places(format)
        found: dict[str, Tensor] = {}
        parts: dict[str, list[tuple[Rows | GroupedRows, Tensor]]] = {}
        for name, tensor in tensors.items():
            place = places.get(name)
            if place is None:
                found[name] = tensor
            elif not isinstance(place, Stack):
                parts.setdefault(place.of, []).append((place, tensor))
            else:
                one = TensorType(tensor.type.shape[1:], tensor.type.dtype)
                for j, other in enumerate(place.names()):
                    found[other] = Tensor(one, functools.partial(lambda t, i: t.read()[i], tensor, j))
        return found | {name: _joined(*zip(*each, strict=True)) for name, each in parts.items()}


def _raw(file: Any, name: str) -> Tensor:
    entry = file.entry(name)
    return Tensor(TensorType(tuple(entry.shape), entry.storage), functools.partial(file.array, name))


def _joined(places: Sequence[Rows | GroupedRows], tensors: Sequence[Tensor]) -> Tensor:
    """Parts of a tensor at their places, and turned where a file has them so."""
    kinds = {tensor.type.dtype for tensor in tensors}
    parts = list(tensors) if len(kinds) == 1 else [tensor.as_type(F32) for tensor in tensors]
    axis, turned = places[0].axis, places[0].transposed

    def whole(shapes: Sequence[Sequence[Any]]) -> tuple[Any, ...]:
        sizes = list(shapes[0])
        sizes[axis] = sum(int(shape[axis]) for shape in shapes)
        return tuple(sizes)

    def read() -> Array:
        arrays = [tensor.read() for tensor in parts]
        found = np.empty(whole([array.shape for array in arrays]), arrays[0].dtype)
        for place, array in zip(places, arrays, strict=True):
            place.put(found, array)
        return found.T if turned else found

    shape = whole([tensor.type.shape for tensor in parts])
    return Tensor(TensorType(shape[::-1] if turned else shape, parts[0].type.dtype), read)


def _renamed(checkpoint: Checkpoint, format: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a decoder under the names of another format, with the numbers that it keeps."""
    family, c = checkpoint.family, checkpoint.config
    if family.kind != "decoder" or not (family.architecture if format == "gguf" else family.hf):
        raise CapabilityError(
            f"save: a {family.name} out of a {checkpoint.file.format} file is not written as {format}"
        )
    if checkpoint.rope_factors is not None:
        raise CapabilityError("save: Hugging Face's files have no table of RoPE factors, which this model has")
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if format == "gguf":
            found[_gguf_name(family.weights, name, c.layers)] = _to_gguf(family, c, name, tensor)
        else:
            found[name] = _from_gguf(family, c, name, tensor)
    return found


def _gguf_name(names: Mapping[str, str], name: str, layers: int) -> str:
    if names.get(name):
        return names[name]
    for i in range(layers):
        pattern = name.replace(f".{i}.", ".{i}.", 1)
        if names.get(pattern):
            return names[pattern].replace("{i}", str(i))
    raise CapabilityError(f"save: GGUF has no name for the weight {name!r}", hint="save a folder, which has it")


def _to_gguf(family: Family, c: Any, name: str, tensor: Tensor) -> Tensor:
    kind = tensor.type.dtype
    if family.changes is not None:
        change = family.changes(c, name)
        if change is not None:
            tensor = tensor.changed(change.to_gguf, None if change.shapes is None else change.shapes[0])
    elif getattr(c, "unit_offset", False) and name.endswith("norm.weight"):
        tensor = tensor.changed(lambda x: x + 1)
    elif "pairs" in c.IN_GGUF and not c.pairs and _turns(name):
        tensor = tensor.changed(lambda x: _heads(x, c.head_dim, 2, c.head_dim // 2))
    if name.endswith("conv1d.weight"):  # without the axis of length 1 that convolutions have
        channels, _, size = map(int, tensor.type.shape)
        return tensor.changed(lambda x: x.reshape(channels, size), (channels, size))
    if len(tensor.type.shape) == 1 or name.endswith(STATE_SPACE):
        return tensor.as_type(F32)  # as llama.cpp wants them
    return tensor.as_type(kind) if kind in FLOATS.values() else tensor  # in another order, they are no other numbers


def _from_gguf(family: Family, c: Any, name: str, tensor: Tensor) -> Tensor:
    if family.changes is not None:
        change = family.changes(c, name)
        if change is not None:
            tensor = tensor.changed(change.from_gguf, None if change.shapes is None else change.shapes[1])
    elif getattr(c, "unit_offset", True) is False and name.endswith("norm.weight"):
        tensor = tensor.changed(lambda x: x - 1)
    elif getattr(c, "pairs", False) and _turns(name):
        tensor = tensor.changed(lambda x: _heads(x, c.head_dim, c.head_dim // 2, 2))
    if name.endswith("conv1d.weight"):
        channels, size = map(int, tensor.type.shape)
        tensor = tensor.changed(lambda x: x.reshape(channels, 1, size), (channels, 1, size))
    return tensor


def _turns(name: str) -> bool:
    """Whether it makes queries or keys."""
    return ".q_proj." in name or ".k_proj." in name


def _heads(x: Array, head: int, outer: int, inner: int) -> Array:
    """Rows of each head in another order: from halves to pairs, or back."""
    return x.reshape(-1, outer, inner, *x.shape[1:]).swapaxes(1, 2).reshape(-1, head, *x.shape[1:]).reshape(x.shape)
